"""Candidates of a search that its round has no room for.

TVM's search replays a thousand traces for the sixteen programs of a round, which is most of a tuning's time on small tasks.
With a trimmer, a search gives :data:`ROUNDS` times as many, for the same time. The likeliest are measured; the others are
judged again by what that taught, and measured next if enough of them may still win. Only then is searched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.tuner.task_tuner import Candidate
    from cdmpp.tuner.trimmer import Trimmer

#: Rounds that a search gives candidates for.
ROUNDS = 4
#: Part of a round that must be left and may win, for no search to be needed.
_ENOUGH = 0.5


class Surplus:
    """What is left of the searches of every task.

    Parameters
    ----------
    trimmer
        What judges candidates; without one every search gives one round.
    batch
        Candidates of a round.
    """

    def __init__(self, trimmer: Trimmer | None, batch: int) -> None:
        self._trimmer, self._batch = trimmer, batch
        self._left: dict[int, list[Candidate]] = {}

    @property
    def wanted(self) -> int:
        """Candidates that a search is asked for."""
        return self._batch if self._trimmer is None else ROUNDS * self._batch

    def take(self, task: int, context: Any, best_s: float | None) -> list[Candidate]:
        """A round without a search, likeliest first; empty where too little is left that may beat `best_s`."""
        left = self._left.get(task, [])
        if self._trimmer is None or len(left) < _ENOUGH * self._batch:
            return []
        left = [left[i] for i in self._trimmer.likeliest(context, [c.measure for c in left], best_s)]
        self._left[task] = left
        if len(left) < _ENOUGH * self._batch:
            return []
        self._left[task] = left[self._batch :]
        return left[: self._batch]

    def share(
        self, task: int, context: Any, found: Sequence[Candidate], best_s: float | None
    ) -> list[Candidate]:
        """The round of what a search found and what was left before; the rest is kept."""
        if self._trimmer is None:
            return list(found)
        every = {c.hash: c for c in [*self._left.get(task, []), *found]}
        candidates = list(every.values())
        measures = [c.measure for c in candidates]
        order = self._trimmer.likeliest(context, measures, best_s)
        # what may not win comes last, and is the round's to drop
        order += [i for i in range(len(candidates)) if i not in set(order)]
        candidates = [candidates[i] for i in order]
        self._left[task] = candidates[self._batch :]
        return candidates[: self._batch]
