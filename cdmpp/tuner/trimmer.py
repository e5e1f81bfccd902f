"""Dropping candidates that cannot win before they are built.

A candidate is dropped where even the lower end of its predicted interval is no better than the best program measured of
its task. As far as the intervals hold (:meth:`cdmpp.tuner.learning.OnlineModel.interval`), a coverage of 0.9 loses one in
twenty of those that would have won. Where they do not hold, dropping everything would hide it: a quarter of every round
is measured whatever the intervals say, those of the lowest lower ends, and the model learns from them. A task of which
round after round only this quarter is measured, and brings nothing, is given up
(:meth:`cdmpp.tuner.scheduler.TaskState.end_round`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import TunerError

#: Part of a round that is measured in any case.
KEPT = 0.25


def check_coverage(coverage: float) -> None:
    """TunerError for a coverage that a trimmer cannot have."""
    if not 0 < coverage < 1:
        raise TunerError(f"the trimmer's coverage must be between 0 and 1, got {coverage:g}")


@dataclass(frozen=True)
class Trimmer:
    """Says which candidates are worth building, by the intervals of a model (``interval_s`` of
    :class:`cdmpp.tuner.CostModel`) of a coverage: the less, the more is dropped."""

    model: Any
    coverage: float = 0.9

    def __post_init__(self) -> None:
        check_coverage(self.coverage)

    def worth(self, context: Any, candidates: Sequence[Any], best_s: float | None) -> NDArray[np.bool_]:
        """Whether each candidate is to be measured, bool (n,): those that may beat `best_s`, and :data:`KEPT` of all at least;
        all of them where nothing was measured yet."""
        if best_s is None or not candidates:
            return np.ones(len(candidates), dtype=bool)
        low, _ = self.model.interval_s(context, candidates, self.coverage)
        worth: NDArray[np.bool_] = low < best_s
        # what failed before is infinitely slow
        likeliest = np.argsort(low, kind="stable")[: math.ceil(KEPT * len(low))]
        worth[likeliest] = np.isfinite(low[likeliest])
        return worth


def worth_measuring(
    guard: Any, trimmer: Trimmer | None, context: Any, candidates: Sequence[Any], best_s: float | None
) -> NDArray[np.bool_]:
    """Whether each candidate is likely to run (by a :class:`cdmpp.tuner.validity.ValidityGuard`) and may beat `best_s` (by a
    trimmer), bool (n,); None of either objects to nothing."""
    worth = np.ones(len(candidates), dtype=bool)
    if guard is not None:
        worth[:] = guard.worth(context, candidates)
    left = np.flatnonzero(worth)
    if trimmer is not None and len(left):
        worth[left] = trimmer.worth(context, [candidates[int(i)] for i in left], best_s)
    return worth
