"""What to measure next: random and searched programs of tasks, or the programs of another dataset."""

from __future__ import annotations

import logging
import random
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cdmpp.errors import ProgramError
from cdmpp.profiler.build import BuildJob
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.dataset import DatasetView
    from cdmpp.profiler.engine import Outcome

logger = logging.getLogger(__name__)

#: Programs of a task that are drawn before the next task's turn: an interrupted collection is a balanced one.
CHUNK = 16
#: Parents of searched programs: the fastest of the task so far.
_ELITE = 6


class TaskPlan:
    """Random programs of every task and, from their latencies, programs of an evolutionary search.

    Parameters
    ----------
    tasks
        The tasks.
    programs_per_task
        Wanted of each; a task whose spaces hold fewer gives fewer.
    search_fraction
        Part of them that is drawn by mutating the fastest programs measured so far (the region that a tuner
        visits), as opposed to at random.
    rule, num_cores
        Of the design spaces.
    seed
        Of all drawing.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        programs_per_task: int,
        *,
        search_fraction: float = 0.25,
        rule: str = "llvm",
        num_cores: int = 1,
        seed: int = 0,
    ) -> None:
        self.tasks = list(tasks)
        # So that what an interrupted collection holds is a fair sample of the networks.
        random.Random(seed).shuffle(self.tasks)
        self.programs_per_task = programs_per_task
        self.search_fraction = search_fraction
        self.rule, self.num_cores, self.seed = rule, num_cores, seed
        self._latencies: dict[str, dict[str, float]] = defaultdict(dict)
        self._programs: dict[str, dict[str, Program]] = defaultdict(dict)
        # Of all tasks: different tasks can be scheduled into the same program, which is measured once.
        self._seen: set[str] = set()
        self._spent: set[str] = set()  # tasks whose spaces hold no more random programs
        self._in_flight: dict[str, int] = defaultdict(int)

    @property
    def total(self) -> int:
        """Programs that will be measured at most."""
        wanted = 0
        for task in self.tasks:
            known = len(self._programs[task.hash])
            wanted += known if task.hash in self._spent else max(known, self.programs_per_task)
        return wanted

    @property
    def known(self) -> int:
        """Of these, programs that were measured."""
        return sum(len(self._programs[task.hash]) for task in self.tasks)

    def learn(self, program: Program, latency_s: float | None) -> None:
        """Take note of a program that was measured (or failed: None), now or in an earlier run."""
        self._programs[program.task_hash][program.hash] = program
        self._seen.add(program.hash)
        if latency_s is not None:
            self._latencies[program.task_hash][program.hash] = latency_s

    def done(self, outcome: Outcome) -> None:
        """Take note of an outcome."""
        self._in_flight[outcome.job.task.hash] -= 1
        self.learn(outcome.job.program, outcome.latency_s)

    def jobs(self) -> Iterator[BuildJob | None]:
        """All jobs, in rounds over the tasks; None while what comes next waits for outcomes."""
        rounds = -(-self.programs_per_task // CHUNK)
        for number in range(1, rounds + 1):
            wanted = min(number * CHUNK, self.programs_per_task)
            # The search of a task follows its random programs at a distance, so that their latencies are known.
            behind: list[Task] = []
            for task in self.tasks:
                yield from self._random(task, wanted)
                behind.append(task)
                if len(behind) > 3:
                    yield from self._search(behind.pop(0), wanted)
            for task in behind:
                yield from self._search(task, wanted)

    def _emit(
        self, task: Task, programs: Sequence[Program], spaces: Mapping[str, object]
    ) -> Iterator[BuildJob]:
        for program in programs:
            self._programs[task.hash][program.hash] = program
            self._seen.add(program.hash)
        for program in programs:
            self._in_flight[task.hash] += 1
            yield BuildJob(program, task, spaces[str(program.space_hash)])  # type: ignore[arg-type]

    def _random(self, task: Task, wanted: int) -> Iterator[BuildJob]:
        from cdmpp.program.space import TaskSpaces

        known = self._programs[task.hash]
        have = sum(p.origin == "random" for p in known.values())
        need = round(wanted * (1 - self.search_fraction)) - have
        if need <= 0 or task.hash in self._spent:
            return
        try:
            spaces = TaskSpaces(task, self.rule, self.num_cores)
        except ProgramError as err:
            logger.warning("%s", err)
            self._spent.add(task.hash)
            return
        # The seed depends on what is there, so that a resumed run draws what the broken one lacks.
        programs = spaces.sample(need, _seed(self.seed, task.hash, have), exclude=self._seen)
        if len(programs) < need:
            self._spent.add(task.hash)
        yield from self._emit(task, programs, {s.hash: s for s in spaces.spaces})

    def _search(self, task: Task, wanted: int) -> Iterator[BuildJob | None]:
        from cdmpp.program.space import TaskSpaces

        known = self._programs[task.hash]
        have = sum(p.origin == "search" for p in known.values())
        need = round(wanted * self.search_fraction) - have
        if need <= 0 or task.hash in self._spent:
            return
        # A few that are measured again later, because somebody disturbed them, are not waited for.
        while self._in_flight[task.hash] > len(known) // 4:
            yield None
        latencies = self._latencies[task.hash]
        elite = [known[h] for h in sorted(latencies, key=latencies.__getitem__)[:_ELITE]]
        if not elite:
            return
        spaces = TaskSpaces(task, self.rule, self.num_cores)
        programs = spaces.mutate(elite, need, _seed(self.seed, task.hash, have), exclude=self._seen)
        yield from self._emit(task, programs, {s.hash: s for s in spaces.spaces})


class ReplayPlan:
    """Programs of another dataset, to measure them on another device or again.

    Parameters
    ----------
    source
        The dataset.
    limit
        Programs in all; they are drawn evenly over the tasks. None takes all.
    tasks
        Hashes of the tasks to draw from; None for all.
    seed
        Of the drawing.
    """

    def __init__(
        self,
        source: DatasetView,
        *,
        limit: int | None = None,
        tasks: Sequence[str] | None = None,
        seed: int = 0,
        statuses: Sequence[str] = ("ok",),
    ) -> None:
        frame = source.records
        usable = set(frame.loc[frame["status"].isin(list(statuses)), "program"])
        by_task: dict[str, list[Program]] = defaultdict(list)
        for digest in sorted(usable):
            program = source.programs[digest]
            if tasks is None or program.task_hash in tasks:
                by_task[program.task_hash].append(program)
        rng = random.Random(seed)
        order = sorted(by_task)
        rng.shuffle(order)
        for task_hash in order:
            rng.shuffle(by_task[task_hash])
        limit = sum(map(len, by_task.values())) if limit is None else limit
        share: dict[str, int] = dict.fromkeys(order, 0)
        while sum(share.values()) < limit:
            open_tasks = [t for t in order if share[t] < len(by_task[t])]
            if not open_tasks:
                break
            for task_hash in open_tasks[: limit - sum(share.values())]:
                share[task_hash] += 1
        self._chosen = [p for t in order for p in by_task[t][: share[t]]]
        self._source = source
        self._measured: set[str] = set()
        self.tasks = [source.tasks[t] for t in order if share[t]]

    @property
    def total(self) -> int:
        """Programs that will be measured."""
        return len(self._chosen)

    @property
    def known(self) -> int:
        """Of these, programs that were measured before."""
        return sum(program.hash in self._measured for program in self._chosen)

    def learn(self, program: Program, latency_s: float | None) -> None:
        """Take note of a program that was measured in an earlier run: it is not measured again."""
        self._measured.add(program.hash)

    def done(self, outcome: Outcome) -> None:
        """Nothing to do: what comes next does not depend on outcomes."""

    def jobs(self) -> Iterator[BuildJob | None]:
        """The chosen programs, task by task."""
        for program in self._chosen:
            if program.hash not in self._measured:
                space = None if program.space_hash is None else self._source.spaces[program.space_hash]
                yield BuildJob(program, self._source.task_of(program), space)


class UnscheduledPlan:
    """Every task as it is, without a schedule: what an untuned network runs.

    Parameters
    ----------
    tasks
        The tasks; those of few operations come first.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = sorted(tasks, key=lambda task: (task.flops, task.hash))
        self._measured: set[str] = set()

    @property
    def total(self) -> int:
        """Programs that will be measured, one a task."""
        return len(self.tasks)

    @property
    def known(self) -> int:
        """Of these, programs that were measured before."""
        return sum(task.hash in self._measured for task in self.tasks)

    def learn(self, program: Program, latency_s: float | None) -> None:
        """Take note of a program that was measured in an earlier run: it is not measured again."""
        self._measured.add(program.hash)

    def done(self, outcome: Outcome) -> None:
        """Nothing to do: what comes next does not depend on outcomes."""

    def jobs(self) -> Iterator[BuildJob | None]:
        """The tasks, one by one."""
        for task in self.tasks:
            if task.hash not in self._measured:
                yield BuildJob(Program(task.hash, task.hash, None, "", "unscheduled"), task, None)


def _seed(*parts: object) -> int:
    return zlib.crc32(":".join(map(str, parts)).encode()) % (2**31 - 2) + 1
