"""Tasks to programs: points of MetaSchedule's design spaces, and their exact rebuilding.

A design space is a trace of schedule instructions; a program is the space plus the decisions of its sampling
instructions. Replaying instructions and decisions and then applying the rule set's postprocessors gives the
same PrimFunc every time, so some 200 bytes store a program exactly (a seed would not: TVM's sampling is not
reproducible between versions or with several threads).
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program import generators
from cdmpp.program.tvm_env import import_tvm, quiet, structural_hash
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

#: Targets the rule sets are asked with. Only what the rules read matters here (cores, limits of a block); the
#: target a program is compiled for belongs to the device.
CUDA_SPACE_TARGET: dict[str, Any] = {
    "kind": "cuda",
    "arch": "sm_80",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
    "registers_per_block": 65536,
}

#: A space is given up after this many rejected points in a row (a CUDA space rejects some 80 % of its points) ...
_MAX_REJECTED = 300
#: ... or after this many in a row that were drawn before.
_MAX_REPEATED = 40


def _plain(obj: Any) -> Any:
    """TVM's boxed numbers and containers as what ``json`` can write."""
    from tvm.tirx import FloatImm, IntImm

    if isinstance(obj, IntImm):
        return int(obj.value)
    if isinstance(obj, FloatImm):
        return float(obj.value)
    if isinstance(obj, list | tuple):
        return [_plain(x) for x in obj]
    if isinstance(obj, dict):
        return {str(k): _plain(v) for k, v in obj.items()}
    return obj


def _dumps(obj: Any) -> str:
    return json.dumps(obj, separators=(",", ":"))


def _space_hash(task: Task, rule: str, num_cores: int, insts: str) -> str:
    key = f"{task.hash}|{rule}|{num_cores}|{insts}"
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _postprocessors(context: Any, verify: bool) -> list[Any]:
    """Those of the rule set; without the one that only rejects if `verify` is False."""
    return [p for p in context.space_generator.postprocs if verify or "VerifyGPUCode" not in str(p)]


@dataclass(frozen=True)
class _Traced:
    """A space with the live TVM trace that samples it."""

    space: Space
    trace: Any


class TaskSpaces:
    """The design spaces of one task under one rule set.

    Parameters
    ----------
    task
        The task.
    rule
        ``"llvm"`` or ``"cuda"`` (no tensor cores).
    num_cores
        Cores the llvm rules parallelise for; ignored for cuda.
    verify
        Reject programs that cannot run on a GPU (MetaSchedule's ``VerifyGPUCode``). Without it both kinds are
        drawn, which is what a validity model learns from.

    Raises
    ------
    ProgramError
        The rule set is unknown or TVM cannot make a space of the task.
    """

    def __init__(self, task: Task, rule: str = "llvm", num_cores: int = 1, *, verify: bool = True) -> None:
        if rule not in ("llvm", "cuda"):
            raise ProgramError(f"unknown rule set {rule!r}: expected 'llvm' or 'cuda'")
        tvm = import_tvm()
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.schedule import Trace

        self.task = task
        self.rule = rule
        self.num_cores = num_cores if rule == "llvm" else 0
        target = {"kind": "llvm", "num-cores": num_cores} if rule == "llvm" else CUDA_SPACE_TARGET
        self._mod = tvm.IRModule({"main": task.prim_func()})
        context = ms.TuneContext(
            mod=self._mod,
            target=tvm.target.Target(target),
            space_generator=ms.space_generator.PostOrderApply(
                sch_rules=rule, postprocs=rule, mutator_probs=rule
            ),
            task_name=task.name,
            num_threads=1,
            # Also seeds the spaces' own sampling; the programs are drawn with seeds of their own.
            rand_state=1,
        )
        try:
            with quiet():
                schedules = context.generate_design_space()
        except Exception as err:  # TVM raises its own InternalError types, by message only
            raise ProgramError(
                f"TVM found no design space for task {task.name} ({task.hash}): {err}"
            ) from err
        self._context = context
        self._postprocs = _postprocessors(context, verify)
        # MutateParallel changes an instruction in place of a decision, so its programs are not of the space any more.
        self._mutators = [
            (m, float(p))
            for m, p in context.space_generator.mutator_probs.items()
            if "MutateParallel" not in str(m)
        ]
        self._traced: list[_Traced] = []
        for index, schedule in enumerate(schedules):
            insts = _dumps(_plain(schedule.trace.as_json(remove_postproc=True)[0]))
            digest = _space_hash(task, rule, self.num_cores, insts)
            if any(t.space.hash == digest for t in self._traced):
                continue  # the rules offer some spaces twice
            space = Space(digest, task.hash, rule, self.num_cores, index, insts)
            self._traced.append(_Traced(space, Trace(list(schedule.trace.insts), {})))

    @property
    def spaces(self) -> list[Space]:
        """The distinct spaces."""
        return [t.space for t in self._traced]

    def _finish(self, schedule: Any, space: Space, origin: str) -> Program | None:
        """Postprocess a freshly sampled schedule; None if the rule set rejects it."""
        decisions = _dumps(_plain(schedule.trace.as_json(remove_postproc=True)[1]))
        for postproc in self._postprocs:
            if not postproc.apply(schedule):
                return None
        digest = structural_hash(schedule.mod["main"])
        return Program(digest, self.task.hash, space.hash, decisions, origin)

    def sample(self, n: int, seed: int, exclude: Iterable[str] = ()) -> list[Program]:
        """Draw up to `n` random programs, unique by structural hash.

        Spaces are visited in turn, so that a space with few points does not hide the others; fewer than `n`
        programs come back where the spaces hold no more.
        """
        from tvm.s_tir.schedule import Schedule

        rng = random.Random(f"{self.task.hash}:{seed}")
        seen = set(exclude)
        programs: list[Program] = []
        alive = list(self._traced)
        rejected = dict.fromkeys((t.space.hash for t in alive), 0)
        repeated = dict(rejected)
        turn = 0
        while alive and len(programs) < n:
            traced = alive[turn % len(alive)]
            key = traced.space.hash
            schedule = Schedule(self._mod, seed=rng.randrange(1, 2**31 - 1))
            program: Program | None = None
            try:
                traced.trace.apply_to_schedule(schedule, remove_postproc=True)
                program = self._finish(schedule, traced.space, "random")
            except Exception as err:  # a decision the primitive refuses; TVM raises ScheduleError and others
                logger.debug("task %s: sampled trace does not apply: %s", self.task.hash, err)
            if program is None:
                rejected[key] += 1
            elif program.hash in seen:
                repeated[key] += 1
            else:
                rejected[key] = repeated[key] = 0
                seen.add(program.hash)
                programs.append(program)
                turn += 1
                continue
            without_choice = program is not None and program.decisions == "[]"
            if without_choice or rejected[key] >= _MAX_REJECTED or repeated[key] >= _MAX_REPEATED:
                alive.remove(traced)
        return programs

    def mutate(
        self, parents: Iterable[Program], n: int, seed: int, exclude: Iterable[str] = ()
    ) -> list[Program]:
        """Up to `n` unique mutants of `parents` by MetaSchedule's own mutators (origin ``search``).

        One to three mutations each, mutators drawn with the rule set's probabilities, as its evolutionary
        search does.
        """
        from tvm.s_tir.schedule import Schedule

        rng = random.Random(f"{self.task.hash}:mutate:{seed}")
        pool = list(parents)
        seen = set(exclude) | {p.hash for p in pool}
        by_space = {t.space.hash: t for t in self._traced}
        pool = [p for p in pool if p.space_hash in by_space]
        mutators, weights = [m for m, _ in self._mutators], [w for _, w in self._mutators]
        mutants: list[Program] = []
        for _ in range(n * 8):
            if len(mutants) >= n or not pool:
                break
            parent = rng.choice(pool)
            space = by_space[str(parent.space_hash)].space
            try:
                schedule = self._replay(parent, space)
                trace = schedule.trace
                for _ in range(rng.choice((1, 1, 2, 3))):
                    trace = rng.choices(mutators, weights)[0].apply(trace) or trace
                child = Schedule(self._mod)
                trace.apply_to_schedule(child, remove_postproc=True)
                program = self._finish(child, space, "search")
            except Exception as err:  # as in sample()
                logger.debug("task %s: mutant does not apply: %s", self.task.hash, err)
                continue
            if program is not None and program.hash not in seen:
                seen.add(program.hash)
                mutants.append(program)
        return mutants

    def _replay(self, program: Program, space: Space) -> Any:
        from tvm.s_tir.schedule import Schedule, Trace

        schedule = Schedule(self._mod)
        Trace.apply_json_to_schedule([json.loads(space.insts_json), json.loads(program.decisions)], schedule)
        return schedule

    def rebuild(self, program: Program, space: Space) -> Any:
        """The scheduled PrimFunc of `program`, exactly as it was drawn.

        Raises
        ------
        ProgramError
            The decisions do not replay, or give another program than the hash says.
        """
        try:
            schedule = self._replay(program, space)
            for postproc in self._postprocs:
                if not postproc.apply(schedule):
                    raise ProgramError(f"program {program.hash}: postprocessor {postproc} rejects it")
        except ProgramError:
            raise
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(f"program {program.hash} does not replay: {err}") from err
        func = schedule.mod["main"]
        digest = structural_hash(func)
        if digest != program.hash:
            raise ProgramError(f"program {program.hash} replays as {digest}: made by another TVM?")
        return func


class Rebuilder:
    """Rebuilds programs of many tasks; keeps what TVM needs per task.

    Making a :class:`TaskSpaces` costs tens of milliseconds (the rules run), replaying a program about three.
    To rebuild without running the rules again, only the postprocessors are set up here.

    Parameters
    ----------
    verify
        As for :class:`TaskSpaces`: without it programs are rebuilt that cannot run.
    """

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify
        self._postprocs: dict[tuple[str, int], list[Any]] = {}
        self._mods: dict[str, Any] = {}
        self._insts: dict[str, Any] = {}

    def _postprocessors(self, space: Space, mod: Any) -> list[Any]:
        key = (space.rule, space.num_cores)
        if key not in self._postprocs:
            tvm = import_tvm()
            from tvm.s_tir import meta_schedule as ms

            llvm = {"kind": "llvm", "num-cores": space.num_cores}
            context = ms.TuneContext(
                mod=mod,
                target=tvm.target.Target(llvm if space.rule == "llvm" else CUDA_SPACE_TARGET),
                space_generator=ms.space_generator.PostOrderApply(
                    sch_rules=space.rule, postprocs=space.rule, mutator_probs=space.rule
                ),
                num_threads=1,
                rand_state=1,
            )
            # The context owns the postprocessors' target: keep it alive with them.
            self._postprocs[key] = [context, *_postprocessors(context, self._verify)]
        return self._postprocs[key][1:]

    def __call__(self, program: Program, task: Task, space: Space | None) -> Any:
        """The PrimFunc of `program`; the task's own where it is unscheduled.

        Raises
        ------
        ProgramError
            The program does not replay or gives another hash.
        """
        if program.space_hash is None:
            return task.prim_func()
        if space is None or space.hash != program.space_hash:
            raise ProgramError(f"program {program.hash} needs its design space {program.space_hash}")
        if space.rule == generators.RULE:
            return _checked(program, generators.build_program(space, program.decisions))
        tvm = import_tvm()
        from tvm.s_tir.schedule import Schedule, Trace

        # by its text: tasks of one hash may call their blocks differently, and the instructions name them
        if task.tir_json not in self._mods:
            self._mods[task.tir_json] = tvm.IRModule({"main": task.prim_func()})
        mod = self._mods[task.tir_json]
        if space.hash not in self._insts:
            self._insts[space.hash] = json.loads(space.insts_json)
        try:
            schedule = Schedule(mod)
            Trace.apply_json_to_schedule([self._insts[space.hash], json.loads(program.decisions)], schedule)
            accepted = all(p.apply(schedule) for p in self._postprocessors(space, mod))
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(f"program {program.hash} does not replay: {err}") from err
        func = schedule.mod["main"]
        digest = structural_hash(func)
        if not accepted or digest != program.hash:
            raise ProgramError(f"program {program.hash} replays as {digest}: made by another TVM?")
        return func


def _checked(program: Program, func: Any) -> Any:
    """What a generator built, if it is the program that was stored."""
    digest = structural_hash(func)
    if digest != program.hash:
        raise ProgramError(f"program {program.hash} is generated as {digest}: made by another version?")
    return func


def rebuild(program: Program, task: Task, space: Space | None) -> Any:
    """Rebuild one program; use :class:`Rebuilder` for many."""
    return Rebuilder()(program, task, space)


def program_of_schedule(
    schedule: Any, task: Task, rule: str = "llvm", num_cores: int = 1, origin: str = "search"
) -> tuple[Program, Space]:
    """A postprocessed schedule, as MetaSchedule's search makes them, as a program and its design space.

    A search may change instructions besides decisions (how much is parallel): the space is then none of
    :attr:`TaskSpaces.spaces`, and its index is -1.
    """
    insts, decisions = (_dumps(_plain(part)) for part in schedule.trace.as_json(remove_postproc=True))
    cores = num_cores if rule == "llvm" else 0
    space = Space(_space_hash(task, rule, cores, insts), task.hash, rule, cores, -1, insts)
    return Program(structural_hash(schedule.mod["main"]), task.hash, space.hash, decisions, origin), space


def unscheduled(task: Task) -> Program:
    """The task itself as a program, as a vendor library runs it."""
    return Program(task.hash, task.hash, None, "", "unscheduled", "library")


def sample_programs(
    task: Task, n: int, *, rule: str = "llvm", num_cores: int = 1, seed: int = 0
) -> list[Program]:
    """Draw up to `n` unique random programs of `task`; see :meth:`TaskSpaces.sample`."""
    return TaskSpaces(task, rule, num_cores).sample(n, seed)


def iter_spaces(tasks: Iterable[Task], rule: str, num_cores: int) -> Iterator[TaskSpaces]:
    """:class:`TaskSpaces` of each task; tasks without a design space are logged and left out."""
    for task in tasks:
        try:
            yield TaskSpaces(task, rule, num_cores)
        except ProgramError as err:
            logger.warning("%s", err)
