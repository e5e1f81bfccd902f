"""The account of a tuning: where every task stands, what everything has cost, the network's latency against time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cdmpp.errors import TunerError
from cdmpp.tuner.objective import Costs, Objective, Point
from cdmpp.tuner.scheduler import TaskState
from cdmpp.tuner.untuned import is_untuned

if TYPE_CHECKING:
    from cdmpp.profiler.engine import Outcome
    from cdmpp.tuner.energy import EnergyCounter
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.task_tuner import TaskTuner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Where a tuning stands."""

    costs: Costs
    trials: int
    latency_s: float | None
    untuned_s: float | None
    task: str
    gain: float | None


class Ledger:
    """What a tuning knows of its tasks and its costs; whoever searches and measures keeps it.

    Parameters
    ----------
    tuners
        One a task.
    weights
        How often the network runs each.
    store
        Where everything measured goes; what it holds already is not measured again.
    objective
        When to stop.
    progress
        Called after every round.
    clock
        Gives seconds.
    energy
        Counts the device's energy; None where nothing does.

    Attributes
    ----------
    states
        One a task.
    curve, costs
        Earlier runs of a resumed tuning included.

    Raises
    ------
    TunerError
        There is no task.
    """

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        weights: Sequence[float],
        store: TuningStore,
        objective: Objective,
        *,
        progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        energy: EnergyCounter | None = None,
    ) -> None:
        if not tuners:
            raise TunerError("no task to tune")
        self._tuners, self._store, self._objective = tuners, store, objective
        self._progress, self._clock = progress, clock
        self.states = [TaskState(t.task.name, w) for t, w in zip(tuners, weights, strict=True)]
        self.curve, self.costs = store.curve()
        self._known = store.outcomes()
        self._began = self._cpu = 0.0
        #: CPU seconds of search in other processes: those that are there, and those that are not any more.
        self._elsewhere_s = self._buried_s = 0.0
        self._before_s = self.costs.wall_s
        self._energy = energy
        #: Of earlier runs; None where they were not counted, and so cannot be all of this tuning.
        self._before_j = self.costs.energy_j if self._before_s > 0 else 0.0

    @property
    def latency_s(self) -> float | None:
        """Sum over the tasks, weighted, of the best so far; None while one of them has none."""
        parts = [(s.weight, s.latency_s) for s in self.states if not (s.finished and s.latency_s is None)]
        if not parts or any(latency is None for _, latency in parts):
            return None
        return sum(weight * latency for weight, latency in parts if latency is not None)

    @property
    def untuned_s(self) -> float | None:
        """Sum over the tasks, weighted, of what runs untuned; None where a task does not run untuned."""
        parts = [(s.weight, s.untuned_s) for s in self.states]
        if any(latency is None for _, latency in parts):
            return None
        return sum(weight * latency for weight, latency in parts if latency is not None)

    def _begin(self) -> None:
        """Start the clocks, where earlier runs stopped them."""
        self._began = self._clock() - self._before_s
        self._cpu = time.process_time() - self.costs.search_cpu_s

    def _tick(self) -> None:
        self.costs.wall_s = self._clock() - self._began
        self.costs.search_cpu_s = time.process_time() - self._cpu + self._elsewhere_s
        self.costs.energy_j = self._joules()

    def _joules(self) -> float | None:
        if self._energy is None or self._before_j is None:
            return None
        try:
            return self._before_j + self._energy.joules()
        except OSError as err:
            logger.warning("energy is not counted any more: %s", err)
            self._energy = None
            return None

    @property
    def _time_left_s(self) -> float | None:
        """Of the budget; None without one."""
        budget_s = self._objective.budget_s
        return None if budget_s is None else max(0.0, budget_s - (self._clock() - self._began))

    def _with(self, measured: int, dropped: int) -> Costs:
        """Costs with what is under way."""
        return replace(
            self.costs,
            trials=self.costs.trials + measured + dropped,
            measurements=self.costs.measurements + measured,
        )

    def _recall_states(self, batch: int) -> None:
        """Count what earlier runs into this store measured, in rounds of so many candidates."""
        programs = self._store.dataset.programs
        by_task = {tuner.task.hash: state for tuner, state in zip(self._tuners, self.states, strict=True)}
        for digest, latency_s in self._known.items():
            state = by_task.get(programs[digest].task_hash)
            if state is None:
                continue
            if is_untuned(programs[digest]):
                state.untuned_s = latency_s
            else:
                state.count(latency_s)
        for state in self.states:
            state.history = [state.best_s or float("inf")] * -(-state.measured // batch)
        # The curve may lack what was measured last.
        self.costs.measurements = sum(state.measured for state in self.states)
        self.costs.failures = sum(state.failed for state in self.states)
        self.costs.trials = max(self.costs.trials, self.costs.measurements + self.costs.dropped)

    def _take(self, state: TaskState, outcome: Outcome) -> None:
        """Enter an outcome, and keep it."""
        self._store.add(outcome)
        self._known[outcome.job.program.hash] = outcome.latency_s
        build_s = float(outcome.meta.get("build_s", 0.0))
        run_s = float(outcome.meta.get("run_s", 0.0))
        self.costs.build_s += build_s
        self.costs.device_s += run_s
        if is_untuned(outcome.job.program):
            state.untuned_s = outcome.latency_s
            return
        state.spent_s += build_s + run_s
        state.count(outcome.latency_s)
        self.costs.failures += outcome.latency_s is None

    def _note(self, state: TaskState, task: str | None = None) -> None:
        """Add a point to the curve and report."""
        self._tick()
        latency_s = self.latency_s
        name = state.name if task is None else task
        if latency_s is not None:
            point = Point(self.costs.wall_s, self.costs.trials, self.costs.measurements, latency_s, name)
            self.curve.points.append(point)
            self._store.add_point(point, self.costs)
        if self._progress is not None:
            self._progress(
                Progress(
                    self.costs, self._objective.trials, latency_s, self.untuned_s, name, self.curve.gain()
                )
            )

    @staticmethod
    def _say_if_lost(state: TaskState, error: str = "") -> None:
        """One line about a task that is given up without a program that works."""
        if state.finished and state.best_s is None:
            reason = f" ({error})" if error else ""
            logger.warning("task %s is given up, the others go on: %s%s", state.name, state.finished, reason)
