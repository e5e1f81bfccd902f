"""Where a tuning stands: its tasks, what everything has cost, the network's latency against time; and from that, which task to
tune next, and which of its candidates are worth building.

The rule is that of TVM's gradient-based scheduler, after Ansor (Zheng et al., OSDI'20, section 6): every task gets one round,
then the one whose next round promises most for the network, judged by its last rounds and by how many it had.

A candidate is dropped where even the lower end of its predicted interval is no better than the best program measured of its
task. As far as the intervals hold (:meth:`cdmpp.tuner.cost_model.OnlineModel.interval`), a coverage of 0.9 loses one in twenty
of those that would have won. Where they do not hold, dropping everything would hide it: a quarter of every round, with the
lowest lower ends, is measured whatever they say, and the model learns from it. A task of which only this is measured, in vain,
round after round, is given up.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import TunerError
from cdmpp.profiler.engine import Outcome
from cdmpp.program.types import Program, Task
from cdmpp.tuner.candidates import is_untuned
from cdmpp.tuner.config import Costs, Objective, Point
from cdmpp.tuner.measure import EnergyMeter

logger = logging.getLogger(__name__)

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

    def end_round(self, worked: int, hopeless: bool = False) -> None:
        """Take note of a round in which so many programs worked; it is `hopeless` if only those were measured of it that are
        measured in any case. What was measured in it has been counted."""
        before = self.history[-1] if self.history else float("inf")
        self.history.append(float("inf") if self.best_s is None else self.best_s)
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


class Progress:
    """Counts what a tuning does, and says when to stop. `tasks` are with how often the network runs each; `store` is a
    :class:`~cdmpp.tuner.results.TuningStore`, or stands for it in a worker; `report` is called after every round. TunerError:
    no task."""

    def __init__(
        self,
        tasks: Sequence[tuple[Task, float]],
        store: Any,
        objective: Objective,
        *,
        report: Callable[[Progress], None],
        energy: EnergyMeter | None,
    ) -> None:
        if not tasks:
            raise TunerError("no task to tune")
        self.objective, self._store = objective, store
        #: Of several sessions that take turns to change this.
        self.lock = threading.RLock()
        self._report = report
        self.states = [TaskState(task.name, weight) for task, weight in tasks]
        self._number_of = {task.hash: i for i, (task, _) in enumerate(tasks)}
        # earlier runs of a resumed tuning included
        self.curve, self.costs = store.curve()
        #: Program hash -> label of all measured and all that are being measured (None, as of failures).
        self.known: dict[str, float | None] = store.outcomes()
        #: CPU seconds of searches in other processes.
        self.elsewhere_s = 0.0
        #: Programs that may be measured, or will be, and are not yet.
        self._under_way = 0
        self._energy = energy
        #: Of earlier runs; None where they were not counted, and so cannot be all of this tuning.
        self._before_j = self.costs.energy_j if self.costs.wall_s > 0 else 0.0
        self._began = self._cpu = 0.0

    @property
    def latency_s(self) -> float | None:
        """Sum over the tasks, weighted, of the best so far; None while one of them has none, but for those given up."""
        return _total([(s.weight, s.latency_s) for s in self.states if not s.finished or s.latency_s is not None])

    @property
    def untuned_s(self) -> float | None:
        """Sum over the tasks, weighted, of what runs untuned; None where a task does not run untuned."""
        return _total([(s.weight, s.untuned_s) for s in self.states])

    def start(self, batch: int) -> None:
        """Start the clocks where earlier runs stopped them, and count what those measured, in rounds of `batch` candidates."""
        self._began = time.monotonic() - self.costs.wall_s
        self._cpu = time.process_time() - self.costs.search_cpu_s
        programs = self._store.dataset.programs
        for digest, latency_s in self.known.items():
            number = self._number_of.get(programs[digest].task_hash)
            if number is not None:
                self.states[number].count(latency_s, programs[digest])
        for state in self.states:
            state.history = [state.best_s or float("inf")] * -(-state.measured // batch)
        # The curve may lack what was measured last.
        self.costs.measurements = sum(state.measured for state in self.states)
        self.costs.failures = sum(state.failed for state in self.states)
        self.costs.trials = max(self.costs.trials, self.costs.measurements + self.costs.dropped)

    def tick(self) -> None:
        """Bring the costs up to now."""
        energy_j = None
        if self._energy is not None and self._before_j is not None:
            try:
                energy_j = self._before_j + self._energy.joules()
            except OSError as err:
                logger.warning("energy is not counted any more: %s", err)
                self._energy = None
        self.costs.energy_j = energy_j
        self.costs.search_cpu_s = time.process_time() - self._cpu + self.elsewhere_s
        self.costs.wall_s = time.monotonic() - self._began

    @property
    def time_left_s(self) -> float | None:
        """Of the budget; None without one."""
        budget_s = self.objective.budget_s
        return None if budget_s is None else max(0.0, budget_s - (time.monotonic() - self._began))

    @property
    def trials_left(self) -> float:
        """Trials within all limits, one at least; within the budget as long ones as what was measured so far."""
        costs, limits = self.costs, [self.objective.trials - self.costs.trials]
        if self.objective.max_measurements is not None:
            limits.append(self.objective.max_measurements - costs.measurements)
        left_s, spent_s = self.time_left_s, costs.build_s + costs.device_s
        within = math.inf if left_s is None or not spent_s else left_s * len(self.known) / spent_s
        return max(1.0, min(within, *limits))

    def reached(self, reserved: int = 0) -> str | None:
        """Why to stop now, in words; None to go on. What is being measured or reserved counts as measured."""
        self.tick()
        return self.objective.reached(self._planned(reserved), self.curve)

    def _planned(self, reserved: int) -> Costs:
        begun, costs = self._under_way + reserved, self.costs
        return replace(costs, trials=costs.trials + begun, measurements=costs.measurements + begun)

    def claim(self, task: int, worth: Sequence[bool], reserved: int = 0) -> int:
        """Begin a round of a task with candidates that are worth measuring or are dropped; gives with how many of them, the
        first ones, as far as the limits allow."""
        planned, limit = self._planned(reserved), self.objective.max_measurements
        number = min(len(worth), max(0, self.objective.trials - planned.trials))
        while limit is not None and any(worth[:number]) and planned.measurements + sum(worth[:number]) > limit:
            number -= 1
        state, measured = self.states[task], sum(worth[:number])
        dropped = number - measured
        self._under_way += measured
        self.costs.trials += dropped
        self.costs.dropped += dropped
        self.costs.saved_s += dropped * state.spent_s / max(1, state.measured)
        state.dropped += dropped
        return number

    def plan(self, number: int) -> None:
        """So many programs more may be measured; fewer, below 0."""
        self._under_way += number

    def enter(self, task: int, outcome: Outcome) -> None:
        """Count an outcome, and keep it."""
        state = self.states[task]
        self._store.add(outcome)
        self.known[outcome.job.program.hash] = outcome.latency_s
        spent_s = self.count_costs(outcome)
        state.count(outcome.latency_s, outcome.job.program)
        if is_untuned(outcome.job.program):
            if self.untuned_s is not None and not self.curve.points:
                self._note("")
            return
        self._under_way -= 1
        self.costs.trials += 1
        self.costs.measurements += 1
        self.costs.failures += outcome.latency_s is None
        state.spent_s += spent_s

    def count_costs(self, outcome: Outcome) -> float:
        """Count what an outcome took to build and to run; gives the sum in seconds."""
        build_s, run_s = (float(outcome.meta.get(name, 0.0)) for name in ("build_s", "run_s"))
        self.costs.build_s += build_s
        self.costs.device_s += run_s
        return build_s + run_s

    def relabel(self, labels: Mapping[str, float | None], task: str) -> bool:
        """Take other labels for what was measured of a task (its hash); whether another program is the best now."""
        state, programs = self.states[self._number_of[task]], self._store.dataset.programs
        known = {digest: s for digest, s in labels.items() if s is not None and programs[digest].task_hash == task}
        before, self.known = (state.used, {**self.known, **known})
        state.best_s = None
        for digest, latency_s in known.items():
            state.take(latency_s, programs[digest])
        return state.used != before

    def end_round(self, task: int, worked: int, hopeless: bool = False, error: str = "") -> None:
        """End a round whose outcomes were entered; `worked` of them did, `error` is why one did not."""
        state = self.states[task]
        open_before = not state.finished
        state.end_round(worked, hopeless)
        if open_before:
            _say_if_lost(state, error)
        self._note(state.name)

    def give_up(self, task: int, why: str) -> None:
        """End a task, once."""
        state = self.states[task]
        if not state.finished:
            state.finished = why
            _say_if_lost(state)

    def _note(self, task: str) -> None:
        """Add a point to the curve and report."""
        self.tick()
        latency_s = self.latency_s
        if latency_s is not None:
            point = Point(self.costs.wall_s, self.costs.trials, self.costs.measurements, latency_s, task)
            self.curve.points.append(point)
            self._store.add_point(point, self.costs)
        self._report(self)


def _say_if_lost(state: TaskState, error: str = "") -> None:
    """One line about a task that is given up without a program that works."""
    if state.finished and state.best_s is None and not state.finished.startswith(LEFT_ALONE):
        reason = f" ({error})" if error else ""
        logger.warning("task %s is given up, the others go on: %s%s", state.name, state.finished, reason)


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Weighted sum of seconds; None of none, and where one is unknown."""
    known = [weight * seconds for weight, seconds in parts if seconds is not None]
    return sum(known) if known and len(known) == len(parts) else None
