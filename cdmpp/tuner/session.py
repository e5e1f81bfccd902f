"""The tuning of a network's tasks: propose, drop, measure, learn, until an objective is reached."""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError, TunerError
from cdmpp.profiler.engine import BuildJob
from cdmpp.tuner.candidates import Candidate, TaskTuner, runner_results
from cdmpp.tuner.measure import in_time
from cdmpp.tuner.progress import Progress
from cdmpp.tuner.scheduler import Trimmer, leave_alone, next_task, worth_measuring
from cdmpp.tuner.search import DecisionSearch
from cdmpp.tuner.store import replayed

FloatArray = NDArray[np.float64]

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.profiler.engine import Outcome
    from cdmpp.program.types import Task
    from cdmpp.tuner.config import TuneConfig
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.validity import ValidityGuard

#: Rounds of different tasks under way at a time: one is searched for while another is measured.
_DEPTH = 2


@dataclass
class _Round:
    """Candidates of one task on their way through measuring; ``proposed`` are MetaSchedule's own objects, none where the
    candidates are not of its search."""

    task: int
    candidates: list[Candidate]
    futures: list[Future[Outcome]]
    dropped: int
    proposed: list[Any]


@dataclass(frozen=True)
class Models:
    """What scores candidates, and what tells whether they run."""

    cost_model: Any
    guard: ValidityGuard | None

    @classmethod
    def of(cls, config: TuneConfig, device: Device) -> Models:
        """Those that a configuration names, read or trained."""
        from cdmpp.tuner.cost_model import make_cost_model

        guard = None
        if config.validity is not None:
            from cdmpp.tuner.validity import make_guard

            guard = make_guard(config.validity, device, config.seed)
        return cls(make_cost_model(config, device), guard)


class TuningSession:
    """Tunes tasks, one tuner each, with one cost model.

    What `store` holds already is not measured again; the measurer is running. In a worker, store, measurer and progress are
    those of :mod:`cdmpp.tuner.workers`.
    """

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        models: Models,
        store: Any,
        measurer: Any,
        progress: Progress,
        config: TuneConfig,
    ) -> None:
        self._tuners, self._model, self._guard = tuners, models.cost_model, models.guard
        self._store, self._measurer, self._progress, self._batch = store, measurer, progress, config.batch
        trims = config.cost_model == "cdmpp" and config.trim is not None
        self._trimmer = Trimmer(self._model, config.trim or 0.9) if trims else None
        self._config = config
        #: Programs of earlier tunings to measure before any search, by task number, best first.
        self._first: dict[int, list[Candidate]] = {}
        #: What is known of a task from before, for its search to begin with.
        self._parents = defaultdict[int, list[Candidate]](list)
        #: The search of each task that was begun; None for TVM's.
        self.searches: dict[int, DecisionSearch | None] = {}

    def warm_start(self, earlier: Sequence[str | Path], device: Device, say: Callable[[str], None]) -> TuningSession:
        """Learn from earlier records, and choose what to measure first (:mod:`cdmpp.tuner.warm_start`); gives itself."""
        if earlier:
            from cdmpp.tuner.warm_start import warm_start

            self._first, learned = warm_start(earlier, self._tuners, device, self._model, say)
            first = sum(map(len, self._first.values()))
            say(f"earlier records: learned from {learned}, {first} programs will be measured first")
            for task, candidates in self._first.items():
                self._parents[task] += candidates
        return self

    def run(self) -> str:
        """Tune until the objective is reached, or until there is nothing more to try; says which."""
        progress = self._progress
        progress.start(self._batch)
        self._learn_from_earlier_runs()
        self._measure_untuned()
        self._leave_alone()
        under_way: deque[_Round] = deque()
        while (reason := progress.reached()) is None:
            task = next_task(progress.states, [r.task for r in under_way])
            if task is None and not under_way:
                return "nothing more to try"
            if task is not None:
                begun = self._begin_round(task)
                if begun is not None:
                    under_way.append(begun)
            if under_way and (task is None or len(under_way) >= _DEPTH):
                self._end_round(under_way.popleft())
        for begun in under_way:
            self._end_round(begun)
        progress.tick()
        return reason

    @property
    def learned(self) -> dict[str, Any]:
        """What the cost model learned and what the searches did, as JSON values; of ours only."""
        found = self._model.model.describe() if hasattr(self._model, "model") else {}
        counts = [search.describe() for search in self.searches.values() if search is not None]
        return {**found, "search": summed(counts)} if counts else found

    def _begin_round(self, task: int) -> _Round | None:
        """Search, drop, and hand the rest over; None where nothing is left to measure."""
        candidates = self._first.pop(task, None) or self._initial(task)
        proposed: list[Any] = []
        if candidates is None:
            candidates, proposed = self._search(task)
            if not candidates:
                self._progress.give_up(task, "its space gives no more valid programs")
                return None
        known = self._progress.known
        candidates = [c for c in candidates if c.hash not in known]
        measures, best_s = [c.measure for c in candidates], self._progress.states[task].latency_s
        context = self._tuners[task].context
        worth = worth_measuring(self._guard, self._trimmer, context, measures, best_s).tolist()
        worth = worth[: self._progress.claim(task, worth)]
        kept = [c for c, good in zip(candidates, worth, strict=False) if good]
        known.update((c.hash, None) for c in kept)
        futures = self._measurer.submit([c.job for c in kept])
        begun = _Round(task, kept, futures, len(worth) - len(kept), proposed)
        if kept:
            return begun
        self._end_round(begun)
        return None

    def _initial(self, task: int) -> list[Candidate] | None:
        """A task's first candidates by the guard; None where it has none to give, or the task was begun."""
        state = self._progress.states[task]
        if self._guard is None or state.history or state.measured:
            return None
        return self._guard.initial(self._tuners[task], self._batch, self._model) or None

    def _start(self, task: int) -> None:
        tuner, config = self._tuners[task], self._config
        if config.search == "cdmpp" and config.cost_model == "cdmpp":
            score = functools.partial(self._log_s, tuner.context)
            parents = self._parents.pop(task, [])
            self.searches[task] = DecisionSearch(tuner, score, self._batch, config.seed, parents)
            return
        from cdmpp.tuner.cost_model import GuardedModel

        model = self._model if self._guard is None else GuardedModel(self._model, self._guard)
        tuner.start(self._store.database, model, self._batch)
        self.searches[task] = None

    def _log_s(self, context: Any, measures: Sequence[Any]) -> FloatArray:
        """Predicted log seconds over the probability that a program runs, (n,)."""
        log_s = np.log(self._model.predict_s(context, measures))
        if self._guard is not None:
            with np.errstate(divide="ignore"):
                log_s -= np.log(self._guard.scores(context, measures, np.ones(len(measures))))
        return log_s

    def _search(self, task: int) -> tuple[list[Candidate], list[Any]]:
        """A round's candidates, none where the space gives none, and what MetaSchedule proposed for it."""
        if task not in self.searches:
            self._start(task)
        search = self.searches[task]
        if search is not None:
            return search.propose(self._progress.known), []
        found = self._tuners[task].propose() or []
        return found, [c.measure for c in found]

    def _leave_alone(self) -> None:
        """Do not begin tasks that are not worth a trial."""
        states, gains = self._progress.states, dict[int, float]()
        if self._config.cost_model != "cdmpp" or len(states) < 2:
            return
        for task, state in enumerate(states):
            if state.untuned_s is not None and not state.measured and not state.finished:
                gains[task] = state.weight * state.untuned_s * self._expected_gain(task, state.untuned_s)
        network_s = sum(state.weight * (state.latency_s or 0.0) for state in states)
        for task, why in leave_alone(gains, network_s, self._progress.trials_left).items():
            self._progress.give_up(task, why)

    def _expected_gain(self, task: int, untuned_s: float) -> float:
        """Fraction of a task's time that tuning is expected to save: of the best of a few programs against the untuned one,
        both predicted; without a predictor, of what the device cannot do faster against what was measured."""
        tuner = self._tuners[task]
        if self._config.predictor is None:
            from cdmpp.predictor.roofline import roofline_s
            from cdmpp.program.ast import compact_asts

            bound_s = roofline_s(compact_asts([tuner.mod["main"]]), self._model.device)
            return 1.0 - min(1.0, bound_s[0] / untuned_s)
        untuned = tuner.untuned_candidate()
        self._start(task)
        search = self.searches[task]
        if untuned is None or search is None:
            return 1.0
        best = min(search.sample(self._batch), default=math.inf)
        if not math.isfinite(best):
            return 1.0
        return 1.0 - min(1.0, math.exp(best - self._log_s(tuner.context, [untuned.measure])[0]))

    def _end_round(self, begun: _Round) -> None:
        """Wait for the outcomes, as long as the budget allows, and learn from them."""
        tuner = self._tuners[begun.task]
        done: list[tuple[Candidate, Outcome]] = []
        for candidate, outcome in zip(begun.candidates, self._in_time(begun.futures), strict=True):
            if outcome is None:
                continue
            self._progress.enter(begun.task, outcome)
            if outcome.latency_s is not None:
                self._store.commit(tuner, candidate, outcome.latency_s)
            done.append((candidate, outcome))
        if done:
            self._learn(tuner, [(c, o.latency_s) for c, o in done if o.status != "device_lost"])
        if begun.proposed:
            tuner.end_round(begun.proposed)
        # A resumed search proposes what was measured before once more: such a round says nothing.
        if done or begun.dropped:
            error = next((f"{o.status}: {o.error}" for _, o in done if o.error), "")
            self._progress.end_round(begun.task, sum(o.latency_s is not None for _, o in done), error)

    def _learn(self, tuner: TaskTuner, pairs: Sequence[tuple[Candidate, float | None]]) -> None:
        """Teach the models what became of candidates; None is a failure."""
        if not pairs:
            return
        measures, latencies = [c.measure for c, _ in pairs], [latency_s for _, latency_s in pairs]
        self._model.update(tuner.context, measures, runner_results(latencies))
        if self._guard is not None:
            self._guard.learn(tuner.context, measures, [latency_s is not None for latency_s in latencies])

    def _in_time(self, futures: Sequence[Future[Outcome]]) -> Iterator[Outcome | None]:
        return in_time(self._measurer, futures, self._progress.time_left_s)

    def _learn_from_earlier_runs(self) -> None:
        """Let the models learn what earlier runs into this store measured."""
        known, seen = self._progress.known, defaultdict[TaskTuner, list[tuple[Candidate, float | None]]](list)
        tuners = {tuner.task.hash: tuner for tuner in self._tuners}
        for tuner, candidate in replayed(self._store.dataset, list(known), tuners):
            seen[tuner].append((candidate, known[candidate.hash]))
        for tuner, pairs in seen.items():
            self._learn(tuner, pairs)
            self._parents[self._tuners.index(tuner)] += [candidate for candidate, _ in pairs]

    def _measure_untuned(self) -> None:
        """Measure the untuned tasks: what tuning starts from. They are no trials."""
        untuned, known = enumerate(tuner.untuned() for tuner in self._tuners), self._progress.known
        jobs = [(task, job) for task, job in untuned if job is not None and job.program.hash not in known]
        futures = self._measurer.submit([job for _, job in jobs])
        for (task, _), outcome in zip(jobs, self._in_time(futures), strict=True):
            if outcome is not None:
                self._progress.enter(task, outcome)


def make_tuners(
    tasks: Sequence[tuple[Task, float]], device: Device, config: TuneConfig, say: Callable[[str], None]
) -> tuple[list[TaskTuner], list[tuple[Task, float]]]:
    """A search for every task that has a design space, those first that the network spends most on, and these tasks.

    TunerError where no task has one.
    """
    tuners, kept = [], []
    for task, weight in sorted(tasks, key=lambda pair: -work(*pair)):
        try:
            tuners.append(TaskTuner(task, device, config.seed + 1, config.population, config.generations))
            kept.append((task, weight))
        except ProgramError as err:
            say(str(err))
    if not tuners:
        raise TunerError("no task has a design space: nothing to tune")
    return tuners, kept


def summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name; every one of the counts has the same names."""
    return {name: sum(count[name] for count in counts) for name in (counts[0] if counts else ())}


def work(task: Task, weight: float) -> float:
    """Operations and bytes that a network spends on a task that it runs so often."""
    return weight * (task.flops + task.bytes)


# -- before the best is named -----------------------------------------------------------------------------------------

#: Programs of a task at most that are measured again, runs of each, and measurements for each one of the tuning.
_OF_TASK, _RUNS, _PART = 3, 2, 0.1
#: Noise that a label has at least.
_LEAST = 0.01


def close_programs(store: TuningStore, device: Device, budget: int) -> list[list[str]]:
    """Programs that may be their task's fastest, of tasks that have several, those first that took longest to measure."""
    records, found = store.dataset.records, []
    records = records[(records["device"] == device.name) & (records["status"] == "ok")]
    times = records["program"].value_counts()
    for _, rows in records.drop_duplicates("program", keep="last").groupby("task"):
        rows = rows.sort_values("latency_s").head(_OF_TASK)
        noise = np.maximum(rows["noise"].fillna(0.0).to_numpy(), _LEAST)
        latency_s = rows["latency_s"].to_numpy()
        close = rows["program"][latency_s <= latency_s[0] * (1 + np.maximum(noise, noise[0]))].tolist()
        # not again where a resumed tuning did it before
        if len(close) > 1 and times[close].min() <= _RUNS:
            found.append((latency_s[0], close))
    chosen: list[list[str]] = []
    for _, close in sorted(found, reverse=True):
        if _RUNS * sum(map(len, [*chosen, close])) <= budget:
            chosen.append(close)
    return chosen


def measure_close_again(
    store: TuningStore, device: Device, measurer: Measurer, progress: Progress, say: Callable[[str], None]
) -> None:
    """Measure programs as fast as their task's best within the noise again, in turn, before the best is named: within a tenth
    of the tuning's measurements and the time that is left.

    Of many programs the one with the lowest label was lucky besides fast. Of two runs the better one counts; the first label
    does not, as it was taken at another time than those it is compared with.
    """
    dataset, before = store.dataset, store.outcomes()
    groups = close_programs(store, device, max(_RUNS * _OF_TASK, round(_PART * progress.costs.measurements)))
    if not groups or progress.time_left_s == 0.0:
        return
    programs = [dataset.programs[digest] for close in groups for digest in close]
    jobs = [
        BuildJob(p, dataset.tasks[p.task_hash], None if p.space_hash is None else dataset.spaces[p.space_hash])
        for p in programs
    ]
    runs: dict[str, list[Outcome]] = {program.hash: [] for program in programs}
    for _ in range(_RUNS):
        for outcome in in_time(measurer, measurer.submit(jobs), progress.time_left_s):
            if outcome is not None and outcome.latency_s is not None:
                runs[outcome.job.program.hash].append(outcome)
    changed = 0
    for close in groups:
        # compared are only labels of the same two runs
        if all(len(runs[digest]) == _RUNS for digest in close):
            for digest in close:
                for outcome in sorted(runs[digest], key=lambda o: -(o.latency_s or 0.0)):
                    store.add(outcome)  # the last one is the label
                    progress.count_costs(outcome)
            changed += progress.relabel(store.outcomes(), dataset.programs[close[0]].task_hash)
    store.relabel(before)
    say(
        f"{len(programs)} programs of {len(groups)} tasks were close: measured again, another one is the best in {changed}"
    )
