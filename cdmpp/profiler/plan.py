"""What to measure next: random and searched programs of tasks, unscheduled tasks, or the programs of another dataset."""

from __future__ import annotations

import itertools
import logging
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cdmpp.dataset import Dataset, DatasetView
from cdmpp.errors import ProfilerError, ProgramError
from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.program.space import TaskSpaces
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.program.network import Network

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Programs of a task that are drawn before the next task's turn, so that an interrupted collection is balanced.
CHUNK = 16
#: Number of parents of searched programs: the fastest programs of the task so far.
ELITE = 6


def network_tasks(
    networks: Sequence[Network | str],
    notify: Callable[[str], None],
    *,
    tasks_of: str | Path | None = None,
    resumed: Path | None = None,
    wanted: Collection[str] | None = None,
) -> tuple[list[Task], dict[str, str]]:
    """Tasks of networks (`wanted` ones, by hash; None: all), and the networks' families. As importing the zoo takes minutes,
    tasks are read from the dataset `tasks_of`; or from `resumed` if it records that it has all of them and all networks are
    from the zoo, where a name identifies one. NetworkError: a network cannot be imported; ProfilerError: no such task."""
    from cdmpp.program.network import extract_tasks, load_network

    loaded = [load_network(n) for n in networks]
    names = {n.name for n in loaded}
    if not names:
        raise ProfilerError("no network to profile")
    stored = None if tasks_of is None else Dataset.open(tasks_of)
    if stored is None and resumed is not None and (resumed / "meta.json").exists():
        dataset = Dataset.open(resumed)
        complete = names <= set(dataset.meta.get("complete_networks", []))
        stored = dataset if complete and all(n.source == "zoo" for n in loaded) else None
    if stored is not None:
        tasks = [t for t in stored.tasks.values() if names & set(t.networks)]
    else:
        tasks = extract_tasks(loaded, progress=lambda name, i, n: notify(f"importing {name} ({i}/{n})"))
    if missing := {*(wanted or ())} - {task.hash for task in tasks}:
        raise ProfilerError(f"{len(missing)} wanted tasks are not of these networks, first {min(missing)}")
    tasks = [task for task in tasks if wanted is None or task.hash in wanted]
    if not tasks:
        raise ProfilerError("no task of these networks")
    notify(f"{len(tasks)} tasks of {len(loaded)} networks")
    return tasks, {n.name: n.family for n in loaded}


class TaskPlan:
    """Random programs of every task and, from their latencies, programs of an evolutionary search: `search_fraction` of all
    are mutants of the fastest measured so far (the region that a tuner visits). A task with small spaces gives fewer."""

    def __init__(
        self, tasks: Sequence[Task], programs_per_task: int, *, search_fraction: float = 0.25, num_cores: int = 1, seed: int = 0
    ) -> None:
        self.tasks = list(tasks)
        # So that an interrupted collection holds a fair sample of the networks.
        random.Random(seed).shuffle(self.tasks)
        self.programs_per_task, self.search_fraction = programs_per_task, search_fraction
        self.num_cores, self.seed = num_cores, seed
        self._latencies: dict[str, dict[str, float]] = defaultdict(dict)
        self._programs: dict[str, dict[str, Program]] = defaultdict(dict)
        # Of all tasks: different tasks can be scheduled into the same program, which is measured once.
        self._seen: set[str] = set()
        self._exhausted: set[str] = set()  # tasks whose spaces hold no more random programs
        self._in_flight: dict[str, int] = defaultdict(int)

    @property
    def total(self) -> int:
        """The most programs that will be measured, earlier runs included."""
        wanted = 0
        for task in self.tasks:
            known = len(self._programs[task.hash])
            wanted += known if task.hash in self._exhausted else max(known, self.programs_per_task)
        return wanted

    @property
    def known(self) -> int:
        """How many of these were measured."""
        return sum(len(self._programs[task.hash]) for task in self.tasks)

    def learn(self, program: Program, latency_s: float | None) -> None:
        """Take note of a program that was measured (or that failed: None), now or in an earlier run."""
        self._programs[program.task_hash][program.hash] = program
        self._seen.add(program.hash)
        if latency_s is not None:
            self._latencies[program.task_hash][program.hash] = latency_s

    def done(self, outcome: Outcome) -> None:
        """Take note of an outcome."""
        self._in_flight[outcome.job.task.hash] -= 1
        self.learn(outcome.job.program, outcome.latency_s)

    def jobs(self) -> Iterator[BuildJob | None]:
        """All jobs, in rounds over the tasks; None while the next job depends on outcomes that are still to come."""
        rounds = -(-self.programs_per_task // CHUNK)
        for number in range(1, rounds + 1):
            wanted = min(number * CHUNK, self.programs_per_task)
            # The search of a task follows its random programs at a distance, so that their latencies are known.
            behind: list[Task] = []
            for task in self.tasks:
                yield from self._draw(task, "random", wanted)
                behind.append(task)
                if len(behind) > 3:
                    yield from self._draw(behind.pop(0), "search", wanted)
            for task in behind:
                yield from self._draw(task, "search", wanted)

    def calibration_jobs(self, n: int) -> list[BuildJob]:
        """Up to `n` programs of tasks spread over the range of FLOPs; they are not part of the plan."""
        ordered = sorted(self.tasks, key=lambda t: t.flops)
        chosen = ordered[:: max(1, -(-len(ordered) // max(1, n // 2)))]
        per_task, seed = max(1, -(-n // len(chosen))), self.seed + 1_000_003
        sample = TaskPlan(chosen, per_task, search_fraction=0.0, num_cores=self.num_cores, seed=seed)
        return [job for job in sample.jobs() if job is not None][:n]

    def _draw(self, task: Task, origin: str, wanted: int) -> Iterator[BuildJob | None]:
        """Jobs for the random or searched programs that a task still lacks, out of `wanted` programs in all."""
        known = self._programs[task.hash]
        have = sum(p.origin == origin for p in known.values())
        share = self.search_fraction if origin == "search" else 1 - self.search_fraction
        need = round(wanted * share) - have
        if need <= 0 or task.hash in self._exhausted:
            return
        try:
            spaces = TaskSpaces(task, "llvm", self.num_cores)
        except ProgramError as err:
            logger.warning("%s", err)
            self._exhausted.add(task.hash)
            return
        # The seed depends on the programs that are there, so that a resumed run draws those that the interrupted one lacks.
        seed = seed_of(self.seed, task.hash, have)
        if origin == "random":
            programs = spaces.sample(need, seed, exclude=self._seen)
            if len(programs) < need:
                self._exhausted.add(task.hash)
        else:
            # Do not wait for a few that are measured again later because the core was disturbed.
            while self._in_flight[task.hash] > len(known) // 4:
                yield None
            latencies = self._latencies[task.hash]
            elite = [known[h] for h in sorted(latencies, key=latencies.__getitem__)[:ELITE]]
            programs = spaces.mutate(elite, need, seed, exclude=self._seen) if elite else []
        for program in programs:
            self.learn(program, None)
        for program in programs:
            self._in_flight[task.hash] += 1
            yield BuildJob(program, task, spaces.space_of(program))


class FixedPlan:
    """Programs that are known from the start, in order; for the methods see :class:`TaskPlan`."""

    def __init__(self, jobs: Sequence[BuildJob]) -> None:
        self._jobs = list(jobs)
        self._measured: set[str] = set()
        self.tasks = list({job.task.hash: job.task for job in jobs}.values())

    @property
    def total(self) -> int:
        return len(self._jobs)

    @property
    def known(self) -> int:
        return sum(job.program.hash in self._measured for job in self._jobs)

    def learn(self, program: Program, latency_s: float | None) -> None:
        self._measured.add(program.hash)

    def done(self, outcome: Outcome) -> None:
        """Nothing to do: what comes next does not depend on outcomes."""

    def jobs(self) -> Iterator[BuildJob | None]:
        return (job for job in self._jobs if job.program.hash not in self._measured)

    def calibration_jobs(self, n: int) -> list[BuildJob]:
        jobs = [job for job in self.jobs() if job is not None]
        return jobs[:: max(1, len(jobs) // n)][:n]


Plan = TaskPlan | FixedPlan


def unscheduled_plan(tasks: Sequence[Task]) -> FixedPlan:
    """Every task without a schedule, as an untuned network runs it; tasks with the fewest FLOPs come first."""
    ordered = sorted(tasks, key=lambda task: (task.flops, task.hash))
    return FixedPlan([BuildJob(Program(task.hash, task.hash, None, "", "unscheduled"), task, None) for task in ordered])


def replay_plan(
    source: DatasetView, *, limit: int | None = None, tasks: Sequence[str] | None = None, seed: int = 0
) -> FixedPlan:
    """Programs that have labels in another dataset, to be measured on another device or again: only those of `tasks` (hashes)
    if given, and no more than `limit` in all, spread evenly over the tasks."""
    frame = source.records
    by_task: dict[str, list[Program]] = defaultdict(list)
    for digest in sorted(set(frame.loc[frame["status"] == "ok", "program"])):
        program = source.programs[digest]
        if tasks is None or program.task_hash in tasks:
            by_task[program.task_hash].append(program)
    chosen: dict[str, list[BuildJob]] = defaultdict(list)
    for p in evenly(by_task, seed)[:limit]:
        chosen[p.task_hash].append(BuildJob(p, source.task_of(p), source.spaces.get(p.space_hash or "")))
    return FixedPlan([job for jobs in chosen.values() for job in jobs])


def evenly(groups: Mapping[str, Sequence[T]], seed: int) -> list[T]:
    """The members of all groups in random order, one from each group in turn, so that any first part is balanced."""
    rng, order = random.Random(seed), sorted(groups)
    rng.shuffle(order)
    parts = [list(groups[name]) for name in order]
    for part in parts:
        rng.shuffle(part)
    return [member for turn in itertools.zip_longest(*parts) for member in turn if member is not None]


def seed_of(*parts: object) -> int:
    """A seed that is a function of `parts`."""
    return zlib.crc32(":".join(map(str, parts)).encode()) % (2**31 - 2) + 1
