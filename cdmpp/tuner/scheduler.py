"""Which task of a network to tune next, and which of its candidates are worth building.

The rule is that of TVM's gradient-based scheduler, after Ansor (Zheng et al., OSDI'20, section 6): every task gets one round,
then the one whose next round promises most for the network, judged by its last rounds and by how many it had.

A candidate is dropped where even the lower end of its predicted interval is no better than the best program measured of its
task. As far as the intervals hold (:meth:`cdmpp.tuner.learning.OnlineModel.interval`), a coverage of 0.9 loses one in twenty of
those that would have won. Where they do not hold, dropping everything would hide it: a quarter of every round, with the lowest
lower ends, is measured whatever they say, and the model learns from it. A task of which only this is measured, in vain, round
after round, is given up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.types import Program
from cdmpp.tuner.candidates import is_untuned

#: Part of a round that is measured in any case.
KEPT = 0.25
#: Weight of what the last rounds brought against the optimistic guess that latency falls with the number of rounds.
_ALPHA = 0.2
#: Rounds looked back on.
_WINDOW = 3
#: A task is given up after so many rounds in a row without one program that works, or without one worth measuring.
_FRUITLESS = 3
#: How the reason begins why a task is not tuned at all.
LEFT_ALONE = "left alone"
#: What is not faster than before by more is no gain: labels repeat to about so much.
_GAIN = 0.01


@dataclass
class TaskState:
    """Where the tuning of one task stands."""

    name: str
    #: How often the network runs it.
    weight: float
    #: Latency of the task untuned (:mod:`cdmpp.tuner.candidates`), None if it does not run.
    untuned_s: float | None = None
    #: Latency of the best scheduled program, None before there is one.
    best_s: float | None = None
    #: ``best_s`` after each round, infinite while there is none.
    history: list[float] = field(default_factory=list)
    #: That program's origin and hash, "" before there is one.
    best: str = ""
    #: Candidates.
    measured: int = 0
    failed: int = 0
    dropped: int = 0
    #: Seconds of building and measuring.
    spent_s: float = 0.0
    #: Rounds in a row that measured no working program, or little that was expected to win and nothing that did.
    fruitless: int = 0
    #: Why it is not tuned any more; "" while it is.
    finished: str = ""
    _before: tuple[int, int] = (0, 0)

    @property
    def latency_s(self) -> float | None:
        """The best of tuned and untuned."""
        known = [s for s in (self.best_s, self.untuned_s) if s is not None]
        return min(known, default=None)

    @property
    def used(self) -> str:
        """What runs: ``untuned``, or the origin and hash of the best schedule; "" where nothing does."""
        return "" if self.latency_s is None else "untuned" if self.latency_s == self.untuned_s else self.best

    def count(self, latency_s: float | None, program: Program) -> None:
        """Take note of a program that was measured; None is a failure."""
        if not is_untuned(program):
            self.measured += 1
            self.failed += latency_s is None
        self.take(latency_s, program)

    def take(self, latency_s: float | None, program: Program) -> None:
        """Take note of a program's latency alone."""
        if is_untuned(program):
            self.untuned_s = latency_s
        elif latency_s is not None and (self.best_s is None or latency_s < self.best_s):
            self.best_s, self.best = latency_s, f"{program.origin} {program.hash[:8]}"

    def end_round(self, worked: int) -> None:
        """Take note of a round in which so many programs worked; what was measured and dropped in it has been counted."""
        measured, dropped = self.measured - self._before[0], self.dropped - self._before[1]
        self._before = (self.measured, self.dropped)
        before = self.history[-1] if self.history else float("inf")
        self.history.append(float("inf") if self.best_s is None else self.best_s)
        hopeless = dropped > 0 and measured <= math.ceil(KEPT * (measured + dropped))
        gained = self.history[-1] < before * (1 - _GAIN)
        self.fruitless = 0 if worked and (gained or not hopeless) else self.fruitless + 1
        if self.fruitless >= _FRUITLESS and not self.finished:
            rounds = f"{self.fruitless} rounds"
            if self.best_s is None:
                self.finished = f"no program worked in {rounds}"
            else:
                self.finished = f"nothing worth measuring in {rounds}"


def next_task(states: Sequence[TaskState], busy: Sequence[int] = ()) -> int | None:
    """Number of the task to tune next; None if all others are finished or busy."""
    open_ = [i for i, state in enumerate(states) if not state.finished and i not in busy]
    return max(open_, key=lambda i: promise(states[i]), default=None)


def leave_alone(gains: Mapping[int, float], network_s: float, trials: float) -> dict[int, str]:
    """Tasks that are not worth a trial, and why: those that are expected to save less than one in so many `trials` of what the
    network is expected to take in the end. ``gains`` are seconds of the network, by task; the network takes `network_s` now.
    What a trial brings on the average would be no measure: the first ones bring nearly all."""
    tuned_s = network_s - sum(gains.values())
    return {
        task: f"{LEFT_ALONE}: it may bring {gain / tuned_s:.2%} of the tuned network"
        for task, gain in gains.items()
        if gain < tuned_s / trials
    }


def promise(state: TaskState) -> float:
    """Seconds of the network that a round promises."""
    rounds = len(state.history)
    if rounds == 0:
        return float("inf")
    best = state.history[-1]
    if best == float("inf"):
        return 1e9 / rounds  # not yet a program that works: before those that have one, in turn
    before = state.history[-1 - _WINDOW] if rounds > _WINDOW else best
    brought = (before - best) / _WINDOW if before < float("inf") else 0.0
    return state.weight * (_ALPHA * brought + (1 - _ALPHA) * best / rounds)


def worth_measuring(
    guard: Any, coverage: float | None, model: Any, context: Any, candidates: Sequence[Any], best_s: float | None
) -> NDArray[np.bool_]:
    """Whether each candidate is worth building, bool (n,); a guard or a coverage of None objects to nothing. A guard must think
    that it runs, and by the model's intervals of this coverage it may beat `best_s`, or is of the :data:`KEPT` likeliest."""
    worth = np.ones(len(candidates), dtype=bool)
    if guard is not None:
        worth[:] = guard.worth(candidates)
    left = np.flatnonzero(worth)
    if coverage is None or best_s is None or not len(left):
        return worth
    low, _ = model.interval_s(context, [candidates[int(i)] for i in left], coverage)
    worth[left] = low < best_s
    # what failed before is infinitely slow
    likeliest = np.argsort(low, kind="stable")[: math.ceil(KEPT * len(low))]
    worth[left[likeliest]] = np.isfinite(low[likeliest])
    return worth
