"""The tuning loop over a network's tasks: propose, drop, measure and learn, until an objective is reached."""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.errors import ProgramError, TunerError
from cdmpp.predictor.pair_features import roofline_s
from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.program.ast import compact_asts
from cdmpp.program.types import Task
from cdmpp.tuner.candidates import Candidate, DecisionSearch, TaskTuner, runner_results
from cdmpp.tuner.config import TuneConfig
from cdmpp.tuner.measure import Measurer, in_time
from cdmpp.tuner.progress import KEPT, Progress, leave_alone, next_task, worth_measuring
from cdmpp.tuner.results import TuningStore, replayed

if TYPE_CHECKING:
    from cdmpp.tuner.validity import ValidityGuard

FloatArray = NDArray[np.float64]
Models = tuple[Any, "ValidityGuard | None"]

#: Rounds under way at a time: the candidates of one are searched while those of another are compiled and measured.
_DEPTH = 2


@dataclass
class _Round:
    """A round of one task whose candidates are being measured."""

    futures: list[Future[Outcome]]
    dropped: int
    #: Whether only the candidates that are always measured were worth measuring (:data:`cdmpp.tuner.progress.KEPT`).
    hopeless: bool


def make_models(config: TuneConfig, device: Device) -> Models:
    """The models of a configuration, loaded or trained: the cost model, and the guard that predicts whether candidates run."""
    from cdmpp.tuner.cost_model import make_cost_model

    guard = None
    # all programs run on a CPU
    if config.validity is not None and (device.kind == "gpu" or config.validity != "default"):
        from cdmpp.tuner.validity import make_guard

        guard = make_guard(config.validity, device, config.seed)
    return make_cost_model(config, device), guard


class Searches:
    """Proposes candidates of tasks, and learns from their outcomes. It may run in a process of its own
    (:mod:`cdmpp.tuner.workers`), so tasks are passed in as hashes and candidates are returned as jobs. `commit` adds a program
    that ran to MetaSchedule's `database`. cdmpp's own searches end when the monotonic clock reaches `until`."""

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        models: Models,
        config: TuneConfig,
        database: Any,
        commit: Callable[[TaskTuner, Candidate, float], None],
        until: float = math.inf,
    ) -> None:
        self._model, self._guard = models
        self._by_hash = {tuner.task.hash: tuner for tuner in tuners}
        self._config, self._database, self._commit, self._until = config, database, commit, until
        #: Coverage of the intervals by which candidates are dropped.
        self._coverage = config.trim if config.cost_model == "cdmpp" else None
        #: Programs of earlier tunings to measure before any search, by task, best first.
        self._first: dict[str, list[Candidate]] = {}
        #: Programs of a task from earlier tunings, or measured before by this one: the parents that its search begins with.
        self._parents = defaultdict[str, list[Candidate]](list)
        #: The search of each task for which it has begun; None for TVM's search.
        self._searches: dict[str, DecisionSearch | None] = {}
        #: Hashes of programs that were or will be measured.
        self._known: set[str] = set()
        #: A task's candidates that are being measured, for each round.
        self._under_way = defaultdict[str, deque[dict[str, Candidate]]](deque)

    def begin(
        self,
        dataset: Any,
        labels: Mapping[str, float | None],
        earlier: Sequence[str | Path],
        device: Device,
        say: Callable[[str], None],
    ) -> None:
        """Learn from earlier records, choose the programs to measure first (:mod:`cdmpp.tuner.warm_start`), and learn from the
        programs that this tuning measured before (`labels` of a dataset)."""
        if earlier:
            from cdmpp.tuner.warm_start import warm_start

            self._first, learned = warm_start(earlier, self._by_hash, device, self._model, say)
            number = sum(map(len, self._first.values()))
            say(f"earlier records: learned from {learned}, {number} programs come first where their task is tuned")
            self._parents.update({task: list(found) for task, found in self._first.items()})
        self._known.update(labels)
        seen = defaultdict[str, list[Candidate]](list)
        for candidate in replayed(dataset, list(labels), self._by_hash):
            seen[candidate.task].append(candidate)
        for task, found in seen.items():
            self._teach(self._by_hash[task], [(candidate, labels[candidate.hash]) for candidate in found])
            self._parents[task] += found

    def describe(self) -> dict[str, Any]:
        """What the cost model learned and counts of the searches, as JSON values; only for cdmpp's own model and search."""
        found = self._model.model.describe() if hasattr(self._model, "model") else {}
        counts = [search.describe() for search in self._searches.values() if search is not None]
        return {**found, "search": summed(counts)} if counts else found

    def propose(self, task: str, best_s: float | None, first: bool) -> tuple[list[BuildJob], list[bool], bool] | None:
        """A round's candidates, whether each is worth measuring, and whether they are of earlier tunings (all are measured);
        None if the space has no more. In the `first` round the guard may choose the candidates."""
        tuner = self._by_hash[task]
        candidates = earlier = self._first.pop(task, None)
        if not candidates and first and self._guard is not None:
            candidates = self._guard.initial(tuner, self._config.batch, self._model)
        if not candidates:
            search = self._begun(task)
            candidates = tuner.propose() if search is None else search.propose(self._known)
            if not candidates:
                return None
        candidates = [c for c in candidates if c.hash not in self._known]
        measures = [c.measure for c in candidates]
        guard, coverage = (None, None) if earlier else (self._guard, self._coverage)
        worth = worth_measuring(guard, coverage, self._model, tuner.context, measures, best_s).tolist()
        self._known.update(c.hash for c, good in zip(candidates, worth, strict=True) if good)
        self._under_way[task].append({c.hash: c for c in candidates})
        return [c.job for c in candidates], worth, bool(earlier)

    def learn(self, task: str, outcomes: Sequence[Outcome]) -> None:
        """End a task's round, and learn from its measurements."""
        tuner, pairs = self._by_hash[task], list[tuple[Candidate, float | None]]()
        candidates = self._under_way[task].popleft() if self._under_way[task] else {}
        for outcome in outcomes:
            program, space = outcome.job.program, outcome.job.space
            # candidates proposed by a process that has died since are replayed
            candidate = candidates.get(program.hash) or tuner.replay(program, space)
            if outcome.latency_s is not None:
                self._commit(tuner, candidate, outcome.latency_s)
            if outcome.status != "device_lost":
                pairs.append((candidate, outcome.latency_s))
        self._teach(tuner, pairs)

    def expected_gain(self, task: str, untuned_s: float) -> float:
        """Fraction of a task's time that tuning is expected to save. It compares the predictions for the best of a few programs
        and for the untuned one; without a predictor, the device's lower bound (roofline) and the measured latency."""
        tuner = self._by_hash[task]
        if self._config.predictor is None:
            bound_s = roofline_s(compact_asts([tuner.mod["main"]]), self._model.device)
            return 1.0 - min(1.0, bound_s[0] / untuned_s)
        untuned, search = tuner.untuned_candidate(), self._begun(task)
        if untuned is None or search is None:
            return 1.0
        best = min(search.sample(0), default=math.inf)
        if not math.isfinite(best):
            return 1.0
        return 1.0 - min(1.0, math.exp(best - self._log_s(tuner.context, [untuned.measure])[0]))

    def prepare(self) -> None:
        """Begin the searches of all tasks, as far as this is possible before anything is measured."""
        for task in self._by_hash if self._config.own_search else ():
            if time.monotonic() < self._until:
                self._begun(task)

    def _begun(self, task: str) -> DecisionSearch | None:
        """A task's search, begun if it was not; cdmpp's own has sampled a few programs. None for TVM's search."""
        if task not in self._searches:
            tuner, config = self._by_hash[task], self._config
            if config.own_search:
                score = functools.partial(self._log_s, tuner.context)
                parents = self._parents.pop(task, [])
                search = DecisionSearch(tuner, score, config.batch, config.seed, parents, self._until)
                self._searches[task] = search
                search.sample(config.batch)
            else:
                from cdmpp.tuner.cost_model import GuardedModel

                model = self._model if self._guard is None else GuardedModel(self._model, self._guard)
                tuner.start(self._database, model, config.batch)
                self._searches[task] = None
        return self._searches[task]

    def _log_s(self, context: Any, measures: Sequence[Any]) -> FloatArray:
        """Log of the predicted seconds divided by the probability that a program runs, (n,)."""
        log_s = np.log(self._model.predict_s(context, measures))
        if self._guard is not None:
            with np.errstate(divide="ignore"):
                log_s -= np.log(self._guard.scores(measures, np.ones(len(measures))))
        return log_s

    def _teach(self, tuner: TaskTuner, pairs: Sequence[tuple[Candidate, float | None]]) -> None:
        """Train the models on the latencies of candidates; None is a failure."""
        if not pairs:
            return
        measures, latencies = [c.measure for c, _ in pairs], [latency_s for _, latency_s in pairs]
        self._model.update(tuner.context, measures, runner_results(latencies))
        if self._guard is not None:
            self._guard.learn(measures, [latency_s is not None for latency_s in latencies])


class TuningSession:
    """Tunes some of a network's tasks (index -> tuner). `searches` may be a proxy for :class:`Searches` in another process.
    Several sessions may share the running measurer and the progress, each in a thread of its own."""

    def __init__(
        self, tuners: Mapping[int, TaskTuner], searches: Any, measurer: Measurer, progress: Progress, config: TuneConfig
    ) -> None:
        self.tuners, self.searches = tuners, searches
        self._measurer, self._progress, self._config = measurer, progress, config
        #: Tasks and their rounds under way; a future is done when the candidates to measure are chosen.
        self._under_way = deque[tuple[int, Future[_Round]]]()
        self._background = ThreadPoolExecutor(_DEPTH, "chooser")
        #: Trials reserved for this session that it has not begun.
        self.reserved = 0
        #: The other sessions that share the limits.
        self.others: Sequence[TuningSession] = ()

    def run(self) -> str:
        """Tune until the objective is reached or there is nothing more to try, and return the reason for stopping."""
        progress, others = self._progress, set(range(len(self._progress.states))) - self.tuners.keys()
        self._leave_alone()
        try:
            while True:
                reason, task = progress.reached(self._reserved()), None
                if reason is None:
                    task = next_task(progress.states, [*others, *(task for task, _ in self._under_way)])
                    if task is None and self._config.own_search:  # begin a round early
                        task = next_task(progress.states, [*others])
                if task is not None:
                    self._begin_round(task)
                elif not self._under_way:
                    return reason or "nothing more to try"
                if self._under_way and (task is None or len(self._under_way) >= _DEPTH):
                    self._end_round()
        finally:
            self._background.shutdown(wait=False, cancel_futures=True)

    def _reserved(self) -> int:
        """Trials that are still reserved for the other sessions."""
        return sum(other.reserved for other in self.others)

    def abandon(self, why: str) -> None:
        """Give up all tasks, and the programs being measured."""
        rounds = [chosen.result() for _, chosen in self._under_way]
        with self._progress.lock:
            self._progress.plan(-sum(len(begun.futures) for begun in rounds))
            for task in self.tuners:
                self._progress.give_up(task, why)

    def _begin_round(self, task: int) -> None:
        """Search for candidates, which are then compiled and measured in the background."""
        progress, state = self._progress, self._progress.states[task]
        first = not state.history and not state.measured and all(other != task for other, _ in self._under_way)
        found = self.searches.propose(self.tuners[task].task.hash, state.latency_s, first)
        with progress.lock:
            if found is None:
                if progress.time_left_s != 0.0:  # else the search was cut short
                    progress.give_up(task, "its space gives no more valid programs")
                return
            progress.plan(len(found[0]))  # until the candidates to measure are chosen
        self._under_way.append((task, self._background.submit(self._chosen, task, *found)))

    def _chosen(self, task: int, proposed: Sequence[BuildJob], good: Sequence[bool], earlier: bool) -> _Round:
        """Drop the candidates that are not worth measuring (none of earlier tunings), and submit the rest to the measurer."""
        progress = self._progress
        worth, build_s = (list(good), 0.0) if earlier else self._measurer.worth(proposed, good, progress.time_left_s)
        with progress.lock:
            progress.plan(-len(proposed))
            progress.costs.build_s += build_s
            fresh = [pair for pair in zip(proposed, worth, strict=True) if pair[0].program.hash not in progress.known]
            fresh.sort(key=lambda pair: not pair[1])  # the last trials are for candidates worth measuring
            worth = [good for _, good in fresh]
            worth = worth[: progress.claim(task, worth, self._reserved())]
            self.reserved = max(0, self.reserved - len(worth))
            best_s = None if self._config.trim is None else progress.states[task].latency_s
            jobs = [replace(job, best_s=best_s) for (job, _), good in zip(fresh, worth, strict=False) if good]
            progress.known.update((job.program.hash, None) for job in jobs)
        # `good`, not `worth`: a choice by compiled code does not mean that the task is hopeless
        hopeless = sum(good) < len(good) and sum(good) <= math.ceil(KEPT * len(good))
        return _Round(self._measurer.submit(jobs), len(worth) - len(jobs), hopeless)

    def _end_round(self) -> None:
        """Wait for the outcomes of the oldest round, within the time budget, and learn from them."""
        progress, (task, chosen) = self._progress, self._under_way[0]
        begun = chosen.result()
        self._under_way.popleft()
        done = [found for found in in_time(self._measurer, begun.futures, progress.time_left_s) if found is not None]
        with progress.lock:
            for outcome in done:
                progress.enter(task, outcome)
        self.searches.learn(self.tuners[task].task.hash, done)
        # A resumed search may propose only programs that were measured before: such a round does not count.
        if done or begun.dropped:
            error = next((f"{o.status}: {o.error}" for o in done if o.error), "")
            with progress.lock:
                progress.end_round(task, sum(o.latency_s is not None for o in done), begun.hopeless, error)

    def _leave_alone(self) -> None:
        """Give up, before any trial, tasks that are not worth one."""
        states, gains = {task: self._progress.states[task] for task in self.tuners}, dict[int, float]()
        if self._config.cost_model != "cdmpp" or len(states) < 2:
            return
        for task, state in states.items():
            open_ = not state.measured and not state.finished and self._progress.time_left_s != 0.0
            if state.untuned_s is not None and open_:
                gain = self.searches.expected_gain(self.tuners[task].task.hash, state.untuned_s)
                gains[task] = state.weight * state.untuned_s * gain
        network_s = sum(state.weight * (state.latency_s or 0.0) for state in states.values())
        with self._progress.lock:
            for task, why in leave_alone(gains, network_s, self._progress.trials_left).items():
                self._progress.give_up(task, why)


def measure_untuned(
    tuners: Sequence[TaskTuner], measurer: Measurer, progress: Progress, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Measure the untuned tasks, from which tuning starts. They do not count as trials."""
    untuned = enumerate(tuner.untuned() for tuner in tuners)
    jobs = {task: job for task, job in untuned if job is not None and job.program.hash not in progress.known}
    futures = measurer.submit(list(jobs.values()))
    if jobs:
        meanwhile()
    for task, outcome in zip(jobs, in_time(measurer, futures, progress.time_left_s), strict=True):
        if outcome is not None:
            progress.enter(task, outcome)


def make_tuners(
    tasks: Sequence[tuple[Task, float]], device: Device, config: TuneConfig, say: Callable[[str], None]
) -> tuple[list[TaskTuner], list[tuple[Task, float]]]:
    """A tuner for every task that has a design space, and these tasks; those with the most work in the network come first.
    Raises TunerError if there is none."""
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
    """Sums by name; all counts have the same names."""
    return {name: sum(count[name] for count in counts) for name in (counts[0] if counts else ())}


def work(task: Task, weight: float) -> float:
    """Operations plus bytes of a task, times `weight`, which is how often the network runs it."""
    return weight * (task.flops + task.bytes)


# -- before the best is named -----------------------------------------------------------------------------------------

#: Measuring again: most programs of a task, runs of each, and their number as a fraction of the tuning's measurements.
_OF_TASK, _RUNS, _PART = 3, 2, 0.1
#: Lower bound of a label's noise.
_LEAST = 0.01


def close_programs(store: TuningStore, device: Device, budget: int) -> list[list[str]]:
    """Programs that may be the fastest of their task, for tasks with several such programs; the slowest tasks come first."""
    records, found = store.dataset.records, []
    records = records[(records["device"] == device.name) & (records["status"] == "ok")]
    times = records["program"].value_counts()
    for _, rows in records.drop_duplicates("program", keep="last").groupby("task"):
        rows = rows.sort_values("latency_s").head(_OF_TASK)
        noise = np.maximum(rows["noise"].fillna(0.0).to_numpy(), _LEAST)
        latency_s = rows["latency_s"].to_numpy()
        close = rows["program"][latency_s <= latency_s[0] * (1 + np.maximum(noise, noise[0]))].tolist()
        # not again if an earlier run of a resumed tuning did it
        if len(close) > 1 and times[close].min() <= _RUNS:
            found.append((latency_s[0], close))
    chosen: list[list[str]] = []
    for _, close in sorted(found, reverse=True):
        if _RUNS * sum(map(len, [*chosen, close])) <= budget:
            chosen.append(close)
    return chosen


def measure_close_again(
    store: TuningStore,
    device: Device,
    tuners: Sequence[TaskTuner],
    measurer: Measurer,
    progress: Progress,
    say: Callable[[str], None],
) -> None:
    """Measure the programs that are within the noise of their task's best again, in turn, before the best is chosen. This takes
    at most a tenth of the tuning's measurements and the time left. Of many programs, the one with the lowest label is not only
    fast but also lucky. The better of two new runs counts; the first labels are not used, as they were taken at other times."""
    dataset = store.dataset
    groups = close_programs(store, device, max(_RUNS * _OF_TASK, round(_PART * progress.costs.measurements)))
    if not groups or progress.time_left_s == 0.0:
        return
    programs = [dataset.programs[digest] for close in groups for digest in close]
    jobs = [BuildJob(p, dataset.tasks[p.task_hash], dataset.spaces.get(p.space_hash or "")) for p in programs]
    runs: dict[str, list[Outcome]] = {program.hash: [] for program in programs}
    for _ in range(_RUNS):
        for outcome in in_time(measurer, measurer.submit(jobs), progress.time_left_s):
            if outcome is not None and outcome.latency_s is not None:
                runs[outcome.job.program.hash].append(outcome)
    groups = [close for close in groups if all(len(runs[digest]) == _RUNS for digest in close)]  # all of the same two runs
    for close in groups:
        for digest in close:
            for outcome in sorted(runs[digest], key=lambda o: -(o.latency_s or 0.0)):
                store.add(outcome)  # the last one is the label
                progress.count_costs(outcome)
    labels = store.outcomes()
    changed = sum(progress.relabel(labels, dataset.programs[close[0]].task_hash) for close in groups)
    store.open_database(tuners, anew=True)
    number = sum(map(len, groups))
    say(f"{number} programs of {len(groups)} tasks were close: measured again, another is the best in {changed}")
