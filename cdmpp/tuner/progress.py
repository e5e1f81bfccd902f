"""The state of a tuning: its tasks, the costs so far, and the network's latency against time. From these it decides which task
to tune next, and which of its candidates are worth building.

The next task is chosen as in TVM's gradient-based scheduler, after Ansor (Zheng et al., OSDI'20, section 6): first one round
for every task, then always the task whose next round promises most for the network, judged by its last rounds and their number.

A candidate is dropped if even the lower end of its predicted interval is no better than the best program measured for its
task. If the intervals hold (:meth:`cdmpp.tuner.cost_model.OnlineModel.interval`), a coverage of 0.9 loses one in twenty of the
candidates that would have won. If they do not hold, dropping every candidate would hide that. So a quarter of every round, with
the lowest lower ends, is always measured, and the model learns from it. A task is given up if for several rounds only this
quarter was measured and nothing was gained.
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

from cdmpp.profiler.engine import Outcome
from cdmpp.program.types import Program, Task
from cdmpp.tuner.candidates import is_untuned
from cdmpp.tuner.config import Costs, Objective, Point
from cdmpp.tuner.measure import EnergyMeter

logger = logging.getLogger(__name__)

#: Fraction of a round that is always measured.
KEPT = 0.25
#: Weight of the last rounds' gains, against the optimistic guess that latency falls with the number of rounds.
_ALPHA = 0.2
#: Number of last rounds whose gain is used.
_WINDOW = 3
#: A task is given up after so many rounds in a row without a program that works, or without one worth measuring.
_FRUITLESS = 3
#: Prefix of the reason why a task is not tuned at all.
LEFT_ALONE = "left alone"
#: Smaller relative improvements do not count as a gain: labels repeat to about so much.
_GAIN = 0.01


@dataclass
class TaskState:
    """The state of the tuning of one task."""

    name: str
    #: How often the network runs it.
    weight: float
    #: Latency of the untuned task (:mod:`cdmpp.tuner.candidates`), None if it does not run.
    untuned_s: float | None = None
    #: Latency of the best scheduled program, None before there is one.
    best_s: float | None = None
    #: ``best_s`` after each round, infinite while there is none.
    history: list[float] = field(default_factory=list)
    #: Origin and hash of the best scheduled program, "" before there is one.
    best: str = ""
    #: Numbers of candidates.
    measured: int = 0
    failed: int = 0
    dropped: int = 0
    #: Seconds of building and measuring.
    spent_s: float = 0.0
    #: Rounds in a row that measured no working program, or that were hopeless (:meth:`end_round`) and gained nothing.
    fruitless: int = 0
    #: Why the task is not tuned any more; "" while it is.
    finished: str = ""

    @property
    def latency_s(self) -> float | None:
        """The lower of the tuned and the untuned latency."""
        known = [s for s in (self.best_s, self.untuned_s) if s is not None]
        return min(known, default=None)

    @property
    def used(self) -> str:
        """The program used: ``untuned``, or the origin and hash of the best schedule; "" if none runs."""
        return "" if self.latency_s is None else "untuned" if self.latency_s == self.untuned_s else self.best

    def count(self, latency_s: float | None, program: Program) -> None:
        """Count a measured program and record its latency; None is a failure."""
        if not is_untuned(program):
            self.measured += 1
            self.failed += latency_s is None
        self.take(latency_s, program)

    def take(self, latency_s: float | None, program: Program) -> None:
        """Record a program's latency without counting the program."""
        if is_untuned(program):
            self.untuned_s = latency_s
        elif latency_s is not None and (self.best_s is None or latency_s < self.best_s):
            self.best_s, self.best = latency_s, f"{program.origin} {program.hash[:8]}"

    def end_round(self, worked: int, hopeless: bool = False) -> None:
        """End a round in which `worked` programs worked. It is `hopeless` if only the candidates that are always measured were
        measured. The measured programs have been counted before."""
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
    """Index of the task to tune next; None if all are finished or busy."""
    open_ = [i for i, state in enumerate(states) if not state.finished and i not in busy]
    return max(open_, key=lambda i: promise(states[i]), default=None)


def leave_alone(gains: Mapping[int, float], network_s: float, trials: float) -> dict[int, str]:
    """Tasks that are not worth a trial, and why: their expected gain is less than a fraction 1 / `trials` of the expected
    latency of the tuned network. ``gains`` are seconds of the network, by task; the network takes `network_s` now. The average
    gain of a trial would not be a useful threshold, because the first trials bring nearly all of it."""
    tuned_s = network_s - sum(gains.values())
    return {
        task: f"{LEFT_ALONE}: it may bring {gain / tuned_s:.2%} of the tuned network"
        for task, gain in gains.items()
        if gain < tuned_s / trials
    }


def promise(state: TaskState) -> float:
    """Seconds that another round of the task is expected to save for the network."""
    rounds = len(state.history)
    if rounds == 0:
        return float("inf")
    best = state.history[-1]
    if best == float("inf"):
        return 1e9 / rounds  # tasks without a working program come before those that have one, in turn
    before = state.history[-1 - _WINDOW] if rounds > _WINDOW else best
    brought = (before - best) / _WINDOW if before < float("inf") else 0.0
    return state.weight * (_ALPHA * brought + (1 - _ALPHA) * best / rounds)


def worth_measuring(
    guard: Any, coverage: float | None, model: Any, context: Any, candidates: Sequence[Any], best_s: float | None
) -> NDArray[np.bool_]:
    """Whether each candidate is worth building, bool (n,): the guard expects it to run, and by the model's interval of this
    coverage it may beat `best_s` or is among the :data:`KEPT` likeliest. A guard or a coverage of None rejects nothing."""
    worth = np.ones(len(candidates), dtype=bool)
    if guard is not None:
        worth[:] = guard.worth(candidates)
    left = np.flatnonzero(worth)
    if coverage is None or best_s is None or not len(left):
        return worth
    low, _ = model.interval_s(context, [candidates[int(i)] for i in left], coverage)
    worth[left] = low < best_s
    # programs that failed before are infinitely slow
    likeliest = np.argsort(low, kind="stable")[: math.ceil(KEPT * len(low))]
    worth[left[likeliest]] = np.isfinite(low[likeliest])
    return worth


class Progress:
    """Counts what a tuning does, and decides when to stop. `tasks` are given with how often the network runs each; `store` is a
    :class:`~cdmpp.tuner.results.TuningStore`, or its replacement in a worker; `report` is called after every round."""

    def __init__(
        self,
        tasks: Sequence[tuple[Task, float]],
        store: Any,
        objective: Objective,
        *,
        report: Callable[[Progress], None],
        energy: EnergyMeter | None,
    ) -> None:
        self.objective, self._store = objective, store
        #: Held by a session while it changes this object: several may share it.
        self.lock = threading.RLock()
        self._report = report
        self.states = [TaskState(task.name, weight) for task, weight in tasks]
        self._number_of = {task.hash: i for i, (task, _) in enumerate(tasks)}
        # earlier runs of a resumed tuning included
        self.curve, self.costs = store.curve()
        #: Program hash -> label of all programs measured or being measured (None for the latter, and for failures).
        self.known: dict[str, float | None] = store.outcomes()
        #: CPU seconds of searches in other processes.
        self.elsewhere_s = 0.0
        #: Number of programs that will or may be measured, and are not yet.
        self._under_way = 0
        self._energy = energy
        #: Joules of earlier runs; None if they were not counted, so that this tuning's total is unknown.
        self._before_j = self.costs.energy_j if self.costs.wall_s > 0 else 0.0
        self._began = self._cpu = 0.0
        #: Where the monotonic clock stands when the time budget ends.
        self.until = math.inf

    @property
    def latency_s(self) -> float | None:
        """Weighted sum of the tasks' best latencies so far; None while a task that is not given up has none."""
        return _total([(s.weight, s.latency_s) for s in self.states if not s.finished or s.latency_s is not None])

    @property
    def untuned_s(self) -> float | None:
        """Weighted sum of the tasks' untuned latencies; None if a task does not run untuned."""
        return _total([(s.weight, s.untuned_s) for s in self.states])

    def start(self, batch: int) -> None:
        """Continue the clocks of earlier runs, and count the programs that those measured, in rounds of `batch` candidates."""
        self._began = time.monotonic() - self.costs.wall_s
        self.until = self._began + (self.objective.budget_s or math.inf)
        self._cpu = time.process_time() - self.costs.search_cpu_s
        programs = self._store.dataset.programs
        for digest, latency_s in self.known.items():
            number = self._number_of.get(programs[digest].task_hash)
            if number is not None:
                self.states[number].count(latency_s, programs[digest])
        for state in self.states:
            state.history = [state.best_s or float("inf")] * -(-state.measured // batch)
        # The curve's costs may lack the last measurements.
        self.costs.measurements = sum(state.measured for state in self.states)
        self.costs.failures = sum(state.failed for state in self.states)
        self.costs.trials = max(self.costs.trials, self.costs.measurements + self.costs.dropped)

    def tick(self) -> None:
        """Update the costs to the present time."""
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
        """Seconds left of the time budget; None without one."""
        return None if self.until == math.inf else max(0.0, self.until - time.monotonic())

    @property
    def trials_left(self) -> float:
        """Trials left within all limits, at least one. For the time budget, trials are expected to take as long as so far."""
        costs, limits = self.costs, [self.objective.trials - self.costs.trials]
        if self.objective.max_measurements is not None:
            limits.append(self.objective.max_measurements - costs.measurements)
        left_s, spent_s = self.time_left_s, costs.build_s + costs.device_s
        within = math.inf if left_s is None or not spent_s else left_s * len(self.known) / spent_s
        return max(1.0, min(within, *limits))

    def reached(self, reserved: int = 0) -> str | None:
        """The reason to stop now, in words; None to go on. Programs being measured or reserved count as measured."""
        self.tick()
        return self.objective.reached(self._planned(reserved), self.curve)

    def _planned(self, reserved: int) -> Costs:
        begun, costs = self._under_way + reserved, self.costs
        return replace(costs, trials=costs.trials + begun, measurements=costs.measurements + begun)

    def claim(self, task: int, worth: Sequence[bool], reserved: int = 0) -> int:
        """Begin a round of a task; `worth` tells which candidates will be measured, the others are dropped. Returns how many
        candidates, from the first one, the limits allow."""
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
        """Add `number`, which may be negative, to the programs that may be measured."""
        self._under_way += number

    def enter(self, task: int, outcome: Outcome) -> None:
        """Count an outcome, and store it."""
        state = self.states[task]
        self._store.add(outcome)
        self.known[outcome.job.program.hash] = outcome.latency_s
        spent_s = self.count_costs(outcome)
        state.count(outcome.latency_s, outcome.job.program)
        if is_untuned(outcome.job.program):
            if self.untuned_s is not None and not self.curve:
                self._note("")
            return
        self._under_way -= 1
        self.costs.trials += 1
        self.costs.measurements += 1
        self.costs.failures += outcome.latency_s is None
        state.spent_s += spent_s

    def count_costs(self, outcome: Outcome) -> float:
        """Count the CPU seconds of building an outcome and those of running it, and return their sum."""
        build_s, run_s = (float(outcome.meta.get(name, 0.0)) for name in ("build_cpu_s", "run_s"))
        self.costs.build_s += build_s
        self.costs.device_s += run_s
        return build_s + run_s

    def relabel(self, labels: Mapping[str, float | None], task: str) -> bool:
        """Replace the labels of a task's programs (the task by its hash); whether another program is the best now."""
        state, programs = self.states[self._number_of[task]], self._store.dataset.programs
        known = {digest: s for digest, s in labels.items() if s is not None and programs[digest].task_hash == task}
        before, self.known = (state.used, {**self.known, **known})
        state.best_s = None
        for digest, latency_s in known.items():
            state.take(latency_s, programs[digest])
        return state.used != before

    def end_round(self, task: int, worked: int, hopeless: bool = False, error: str = "") -> None:
        """End a round whose outcomes were entered; `worked` of the programs worked, `error` is why one did not."""
        state = self.states[task]
        open_before = not state.finished
        state.end_round(worked, hopeless)
        if open_before:
            _say_if_lost(state, error)
        self._note(state.name)

    def give_up(self, task: int, why: str) -> None:
        """Stop tuning a task, unless it is finished already."""
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
            self.curve.append(point)
            self._store.add_point(point, self.costs)
        self._report(self)


def _say_if_lost(state: TaskState, error: str = "") -> None:
    """Log a warning about a task that is given up without a program that works."""
    if state.finished and state.best_s is None and not state.finished.startswith(LEFT_ALONE):
        reason = f" ({error})" if error else ""
        logger.warning("task %s is given up, the others go on: %s%s", state.name, state.finished, reason)


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Weighted sum of seconds; None if there are none, or one is unknown."""
    known = [weight * seconds for weight, seconds in parts if seconds is not None]
    return sum(known) if known and len(known) == len(parts) else None
