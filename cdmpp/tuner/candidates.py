"""Candidates of one task: MetaSchedule's search proposes them, earlier programs are replayed.

What a task runs as where nothing was tuned is the start of a tuning, and what it falls back to. On a CPU that is the task as
it is, whose loops LLVM compiles. A GPU cannot run that: there it is the schedule that TVM Relax gives by default
(``tvm.s_tir.dlight``, by the rules of ``relax.backend.cuda``), a trace without a choice in it, with an origin of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from cdmpp.device import Device
from cdmpp.errors import ProgramError
from cdmpp.profiler.engine import BuildJob
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.space import (
    CUDA_SPACE_TARGET,
    TaskSpaces,
    instructions_and_decisions,
    program_of_schedule,
    schedule_of,
    unscheduled,
)
from cdmpp.program.tvm_env import import_tvm, quiet, structural_hash
from cdmpp.program.types import Program, Space, Task

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: ``Program.origin`` of default schedules.
DEFAULT = "default"
#: MetaSchedule's search has a limit of its own, which is not used.
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Candidate:
    """A program that is proposed: MetaSchedule's MeasureCandidate, and the same for the profiler."""

    measure: Any
    job: BuildJob

    @property
    def hash(self) -> str:
        """Of the program."""
        return self.job.program.hash

    @property
    def task(self) -> str:
        """The task's hash."""
        return self.job.task.hash


class TaskTuner:
    """Search for programs of one task, in a space by the device's kind, TVM target and cores (ProgramError if TVM finds
    none)."""

    def __init__(self, task: Task, device: Device, seed: int, population: int = 256, generations: int = 3) -> None:
        tvm = import_tvm()
        from tvm.s_tir import meta_schedule as ms

        self.task, self._on_cpu = task, device.kind == "cpu"
        # GPU programs are drawn within the limits that cdmpp.program.space.Rebuilder replays them with.
        limits = {} if self._on_cpu else {**CUDA_SPACE_TARGET, "arch": str(device.target["arch"])}
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=population, genetic_num_iters=generations, init_min_unmeasured=1
        )
        self._spaces = TaskSpaces(
            task,
            "llvm" if self._on_cpu else "cuda",
            int(device.share),
            target=tvm.target.Target(limits or dict(device.target)),
            search_strategy=strategy,
            task_name=task.name,
            rand_state=seed,
            logger=logging.getLogger(f"{__name__}.metaschedule"),
        )
        self.context = self._spaces.context
        self.mod = self.context.mod
        self._postprocs = list(self.context.space_generator.postprocs)

    def sample(self, n: int, seed: int) -> list[Candidate]:
        """Random programs of all spaces in turn, at most `n`, no two alike; fewer where there are no more."""
        programs = [replace(program, origin="search") for program in self._spaces.sample(n, seed)]
        return [self.replay(program, self._spaces.space_of(program)) for program in programs]

    def untuned(self) -> BuildJob | None:
        """What runs where nothing was tuned, see the module's text; None where there is nothing."""
        if self._on_cpu:
            return BuildJob(unscheduled(self.task), self.task, None)
        return candidate.job if (candidate := self.untuned_candidate()) else None

    def untuned_candidate(self) -> Candidate | None:
        """The same as a trace, for MetaSchedule's database."""
        from tvm.s_tir.schedule import Schedule

        if self._on_cpu:
            schedule = Schedule(self.mod)
            # A record whose trace has no instruction is none to MetaSchedule.
            schedule.get_sblock("root", func_name="main")
            return self.candidate(schedule, "unscheduled")
        schedule = default_schedule(self.mod["main"], self.context.target)
        return None if schedule is None else self.candidate(schedule, DEFAULT)

    def start(self, database: Any, cost_model: Any, batch: int) -> None:
        """Begin the search, with the best programs of a MetaSchedule database as parents."""
        self.context.pre_tuning(_NO_LIMIT, batch, self._spaces.schedules, database, cost_model)

    def propose(self) -> list[Candidate]:
        """The next candidates, none of them proposed before; none where the space gives no more."""
        with signals_held_back():
            found = list(self.context.generate_measure_candidates() or ())
        if found:
            # MetaSchedule's search counts the results that it is told of, and reads none.
            self.context.notify_runner_results(found, runner_results([None] * len(found)))
        return [self.candidate(measure.sch) for measure in found]

    def replay(self, program: Program, space: Space) -> Candidate:
        """An earlier program as a candidate (ProgramError where it does not replay as itself: it was made by another TVM)."""
        try:
            schedule = self._replayed(json.loads(space.insts_json), json.loads(program.decisions))
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(f"program {program.hash} does not replay: {err}") from err
        digest = None if schedule is None else structural_hash(schedule.mod["main"])
        if schedule is None or digest != program.hash:
            raise ProgramError(f"program {program.hash} replays as {digest}: made by another TVM?")
        return self.candidate(schedule, program.origin)

    def drawn(self, n: int, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Instructions and decisions, as JSON, of `n` programs that TVM draws of each space; fewer where it fails."""
        for space in [space for space in self._spaces.spaces for _ in range(n)]:
            try:
                schedule = self._spaces.draw(space, rng)
            except Exception as err:  # a decision that a primitive refuses
                logger.debug("task %s: a sampled trace does not apply: %s", self.task.hash, err)
                continue
            yield space.insts_json, instructions_and_decisions(schedule)[1]

    def measure_of(self, insts: Any, decisions: Any) -> Any | None:
        """MetaSchedule's candidate of a space's instructions and decisions (JSON values); None where TVM rejects them."""
        from tvm.s_tir import meta_schedule as ms

        try:
            schedule = self._replayed(insts, decisions)
        except Exception as err:  # as in drawn()
            logger.debug("task %s: decisions do not apply: %s", self.task.hash, err)
            return None
        return None if schedule is None else ms.MeasureCandidate(schedule, self._arguments)

    def _replayed(self, insts: Any, decisions: Any) -> Any | None:
        """A postprocessed schedule; None where a postprocessor rejects it, TVM's own errors where it does not replay."""
        schedule = schedule_of(self.mod, insts, decisions)
        schedule.enter_postproc()
        return schedule if all(postproc.apply(schedule) for postproc in self._postprocs) else None

    @functools.cached_property
    def _arguments(self) -> Any:
        """Shapes and types as MetaSchedule wants them."""
        from tvm.s_tir import meta_schedule as ms

        return ms.arg_info.ArgInfo.from_entry_func(self.mod, remove_preproc=True)

    def candidate(self, schedule: Any, origin: str = "search") -> Candidate:
        """A postprocessed schedule of the task as a candidate."""
        from tvm.s_tir import meta_schedule as ms

        rule, cores = self._spaces.rule, self._spaces.num_cores
        program, space = program_of_schedule(schedule, self.task, rule, cores, origin)
        return Candidate(ms.MeasureCandidate(schedule, self._arguments), BuildJob(program, self.task, space))


def runner_results(latency_s: Sequence[float | None]) -> list[Any]:
    """Labels in seconds as MetaSchedule takes them; None is a failure."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return [RunnerResult(None, "failed") if s is None else RunnerResult([s], None) for s in latency_s]


def task_hash(context: Any) -> str:
    """Structural hash of the task of a MetaSchedule context."""
    return structural_hash(context.mod["main"])


def funcs_of(measures: Sequence[Any]) -> list[Any]:
    """Scheduled PrimFuncs of MetaSchedule's candidates."""
    return [measure.sch.mod["main"] for measure in measures]


def hashes_of(measures: Sequence[Any]) -> list[str]:
    """Structural hashes of MetaSchedule's candidates."""
    return [structural_hash(func) for func in funcs_of(measures)]


class CandidateCache(Generic[T]):
    """What a model makes of programs, computed once for each: a search asks for some of them again and again. `compute` gives
    something for each of n >= 1 ASTs; `most` programs are kept. ``computed`` counts programs."""

    def __init__(self, compute: Callable[[Sequence[CompactAST]], Sequence[T]], most: int) -> None:
        self._compute, self._most = compute, most
        self.computed = 0
        self._kept: OrderedDict[str, T | None] = OrderedDict()

    def get(self, hashes: Sequence[str], funcs: Sequence[Any]) -> dict[int, T]:
        """Of scheduled PrimFuncs with these hashes, by their numbers, but for what cannot be read."""
        missing = {h: f for h, f in zip(hashes, funcs, strict=True) if h not in self._kept}
        self.computed += len(missing)
        if missing:
            self._kept.update(zip(missing, self._read(list(missing.values())), strict=True))
        found = {i: kept for i, digest in enumerate(hashes) if (kept := self._kept[digest]) is not None}
        for digest in hashes:
            self._kept.move_to_end(digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return found

    def _read(self, funcs: list[Any]) -> list[T | None]:
        try:
            return list(self._compute(compact_asts(funcs)))
        except ProgramError as err:
            if len(funcs) == 1:
                logger.debug("a candidate cannot be read: %s", err)
                return [None]
            # One of them; find out which. This happens to few programs of few tasks.
            return [found for func in funcs for found in self._read([func])]


def is_untuned(program: Program) -> bool:
    """Whether a program is what runs untuned: it is no trial, and no parent for the search, which cannot change it."""
    return program.space_hash is None or program.origin == DEFAULT


def default_schedule(func: Any, target: Any) -> Any | None:
    """The schedule that TVM Relax gives a PrimFunc on a GPU by default; None where no rule does."""
    from tvm.s_tir import dlight

    gpu = dlight.gpu
    for rule in (gpu.Matmul, gpu.GEMV, gpu.Reduction, gpu.GeneralReduction, gpu.Fallback):
        try:
            with quiet(), target:
                found = rule().apply(func, target, False)
        except Exception as err:  # a rule that takes on what it cannot do; TVM raises its own error types
            logger.debug("%s: %s", rule.__name__, err)
            continue
        if found is not None:
            return found[0] if isinstance(found, list) else found
    return None


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Keep Ctrl-C while TVM's search runs until an exception does no harm: in the search's threads it ends the process
    (``std::terminate``), in a callback it becomes an error of TVM's own. The first one (or SIGTERM, where it has a handler) is
    answered at the end, a second one at once. In other threads than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Signals that are ignored or end the process go on doing so.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    received: list[signal.Signals] = []

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        restore()
        received.append(signal.Signals(number))
        print("stopping after this step of the search; Ctrl-C again stops at once", file=sys.stderr)

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield
    finally:
        restore()
    for number in received:
        handlers[number](number, None)
