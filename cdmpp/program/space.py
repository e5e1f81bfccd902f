"""From tasks to programs: sampling points of MetaSchedule's design spaces, and rebuilding them exactly.

A design space is a trace of schedule instructions; a program is the space plus the decisions of its sampling instructions.
Replaying both and then applying the rule set's postprocessors gives the same PrimFunc every time, so some 200 bytes store a
program exactly (a seed would not: TVM's sampling is not reproducible between versions or with several threads). The
configurations of a parametrised kernel form a space of their own: a generator and the names of its parameters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cdmpp.errors import ProgramError, raised_as
from cdmpp.program import import_tvm, quiet, structural_hash
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

#: The target that the cuda rule set is given. Only what the rules read matters here (cores, limits of a block); the target a
#: program is compiled for comes from the device.
CUDA_SPACE_TARGET: dict[str, Any] = {
    "kind": "cuda",
    "arch": "sm_80",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
    "registers_per_block": 65536,
}

#: ``Space.rule`` of programs made by a generator.
GENERATOR_RULE = "generator"
#: A space is given up after this many rejected points in a row (a CUDA space rejects some 80 % of its points) ...
_MAX_REJECTED = 300
#: ... or after this many in a row that were drawn before.
_MAX_REPEATED = 40


def _dumps(value: Any) -> str:
    """Compact JSON; numbers that TVM has boxed (``IntImm``, ``FloatImm``) are written as their values."""
    return json.dumps(value, separators=(",", ":"), default=lambda boxed: boxed.value)


def instructions_and_decisions(schedule: Any) -> tuple[str, str]:
    """The trace of a schedule as two JSON texts, without what the postprocessors added."""
    insts, decisions = schedule.trace.as_json(remove_postproc=True)
    return _dumps(insts), _dumps(decisions)


def _space(task: Task, rule: str, num_cores: int, index: int, insts: str) -> Space:
    key = f"{task.hash}|{rule}|{num_cores}|{insts}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return Space(digest, task.hash, rule, num_cores, index, insts)


def _context(mod: Any, rule: str, num_cores: int, **options: Any) -> Any:
    """A ``TuneContext`` for a rule set; ``options`` add to its arguments or replace them. The rules have not run yet."""
    tvm = import_tvm()
    from tvm.s_tir import meta_schedule as ms

    target = {"kind": "llvm", "num-cores": num_cores} if rule == "llvm" else CUDA_SPACE_TARGET
    # The rules are chosen by name: TVM's own choice for AVX-512 or tensor cores needs its slow import of tensor intrinsics.
    generator = ms.space_generator.PostOrderApply(sch_rules=rule, postprocs=rule, mutator_probs=rule)
    # The random state also seeds the sampling of the spaces; the programs are drawn with separate seeds.
    options = {"target": tvm.target.Target(target), "rand_state": 1, **options}
    return ms.TuneContext(mod=mod, space_generator=generator, num_threads=1, **options)


def _postprocessors(context: Any, verify: bool) -> list[Any]:
    """The postprocessors of the rule set; without ``VerifyGPUCode``, which only rejects, if `verify` is False."""
    return [p for p in context.space_generator.postprocs if verify or "VerifyGPUCode" not in str(p)]


def schedule_of(mod: Any, insts: Any, decisions: Any) -> Any:
    """The schedule before postprocessing: a space's instructions and decisions (JSON values) applied to a task's module. Raises
    TVM's own errors if they do not apply."""
    from tvm.s_tir.schedule import Schedule, Trace

    schedule = Schedule(mod)
    Trace.apply_json_to_schedule([insts, decisions], schedule)
    return schedule


def _rebuilt(mod: Any, insts: Any, program: Program, postprocs: Sequence[Any]) -> Any:
    """The PrimFunc of a program (ProgramError: it does not replay, or its structural hash is not the program's)."""
    try:
        schedule = schedule_of(mod, insts, json.loads(program.decisions))
        rejecting = next((p for p in postprocs if not p.apply(schedule)), None)
    except Exception as err:  # TVM raises its own error types
        raise ProgramError(f"program {program.hash} does not replay: {err}") from err
    if rejecting is not None:
        raise ProgramError(f"program {program.hash}: postprocessor {rejecting} rejects it")
    return _checked(program, schedule.mod["main"], "replays", "TVM")


def _checked(program: Program, func: Any, verb: str, maker: str) -> Any:
    digest = structural_hash(func)
    if digest != program.hash:
        raise ProgramError(f"program {program.hash} {verb} as {digest}: made by another {maker}?")
    return func


class TaskSpaces:
    """The design spaces of one task under one rule set, ``"llvm"`` or ``"cuda"`` (no tensor cores).

    The llvm rules parallelise for ``num_cores``. With ``verify``, programs that cannot run on a GPU are rejected
    (MetaSchedule's ``VerifyGPUCode``). Without it, programs that can and cannot run are drawn; a validity model learns from
    both. ProgramError: the rule set is unknown or TVM cannot make a space of the task."""

    def __init__(self, task: Task, rule: str = "llvm", num_cores: int = 1, *, verify: bool = True, **options: Any) -> None:
        if rule not in ("llvm", "cuda"):
            raise ProgramError(f"unknown rule set {rule!r}: expected 'llvm' or 'cuda'")
        tvm = import_tvm()
        from tvm.s_tir.schedule import Trace

        self.task = task
        self.rule = rule
        self.num_cores = num_cores if rule == "llvm" else 0
        self._mod = tvm.IRModule({"main": task.prim_func()})
        #: MetaSchedule's ``TuneContext``, made with the additional ``options``.
        self.context = _context(self._mod, rule, num_cores, **options)
        try:
            with quiet():
                self.schedules = self.context.generate_design_space()
        except Exception as err:  # TVM raises its own InternalError types, by message only
            raise ProgramError(f"TVM found no design space for task {task.name} ({task.hash}): {err}") from err
        self._postprocs = _postprocessors(self.context, verify)
        # MutateParallel changes an instruction instead of a decision, so its programs no longer belong to the space.
        self._mutators = {
            mutator: float(probability)
            for mutator, probability in self.context.space_generator.mutator_probs.items()
            if "MutateParallel" not in str(mutator)
        }
        #: Hash of a space -> the space, and the live trace that samples it; the rules produce some spaces twice.
        self._traced: dict[str, tuple[Space, Any]] = {}
        for index, schedule in enumerate(self.schedules):
            insts, _ = instructions_and_decisions(schedule)
            space = _space(task, rule, self.num_cores, index, insts)
            self._traced.setdefault(space.hash, (space, Trace(list(schedule.trace.insts), {})))

    @property
    def spaces(self) -> list[Space]:
        """The distinct spaces."""
        return [space for space, _ in self._traced.values()]

    def space_of(self, program: Program) -> Space:
        """The space that a program was drawn from."""
        return self._traced[str(program.space_hash)][0]

    def draw(self, space: Space, rng: random.Random) -> Any:
        """A random schedule of a space, before postprocessing. Raises TVM's own errors if a primitive refuses a decision."""
        from tvm.s_tir.schedule import Schedule

        schedule = Schedule(self._mod, seed=rng.randrange(1, 2**31 - 1))
        self._traced[space.hash][1].apply_to_schedule(schedule, remove_postproc=True)
        return schedule

    def _finished(self, schedule: Any, space: Space, origin: str) -> Program | None:
        """The program of a freshly sampled schedule; None if the rule set rejects it."""
        _, decisions = instructions_and_decisions(schedule)
        if not all(postproc.apply(schedule) for postproc in self._postprocs):
            return None
        digest = structural_hash(schedule.mod["main"])
        return Program(digest, self.task.hash, space.hash, decisions, origin)

    def sample(self, n: int, seed: int, exclude: Iterable[str] = ()) -> list[Program]:
        """Draw up to `n` random programs, unique by structural hash; fewer if the spaces have no more. Spaces are visited in
        turn, so that one with few points does not hide the others."""
        rng = random.Random(f"{self.task.hash}:{seed}")
        seen = set(exclude)
        programs: list[Program] = []
        alive = list(self._traced)
        rejected, repeated = dict.fromkeys(alive, 0), dict.fromkeys(alive, 0)
        while alive and len(programs) < n:
            key = alive[len(programs) % len(alive)]
            space, _ = self._traced[key]
            program: Program | None = None
            try:
                program = self._finished(self.draw(space, rng), space, "random")
            except Exception as err:  # see draw(): TVM raises ScheduleError and others
                logger.debug("task %s: sampled trace does not apply: %s", self.task.hash, err)
            if program is not None and program.hash not in seen:
                rejected[key] = repeated[key] = 0
                seen.add(program.hash)
                programs.append(program)
                continue
            if program is None:
                rejected[key] += 1
            else:
                repeated[key] += 1
            without_choice = program is not None and program.decisions == "[]"
            if without_choice or rejected[key] >= _MAX_REJECTED or repeated[key] >= _MAX_REPEATED:
                alive.remove(key)
        return programs

    def mutate(self, parents: Iterable[Program], n: int, seed: int, exclude: Iterable[str] = ()) -> list[Program]:
        """Up to `n` unique mutants of `parents` by MetaSchedule's own mutators (origin ``search``): one to three mutations
        each, drawn with the rule set's probabilities, as its evolutionary search does."""
        from tvm.s_tir.schedule import Schedule

        rng = random.Random(f"{self.task.hash}:mutate:{seed}")
        parents = list(parents)
        seen = set(exclude) | {p.hash for p in parents}
        pool = [p for p in parents if p.space_hash in self._traced]
        mutators, weights = list(self._mutators), list(self._mutators.values())
        mutants: list[Program] = []
        for _ in range(n * 8):
            if len(mutants) >= n or not pool:
                break
            parent = rng.choice(pool)
            space, _ = self._traced[str(parent.space_hash)]
            try:
                trace = schedule_of(self._mod, json.loads(space.insts_json), json.loads(parent.decisions)).trace
                for _ in range(rng.choice((1, 1, 2, 3))):
                    trace = rng.choices(mutators, weights)[0].apply(trace) or trace
                child = Schedule(self._mod)
                trace.apply_to_schedule(child, remove_postproc=True)
                program = self._finished(child, space, "search")
            except Exception as err:  # see sample()
                logger.debug("task %s: mutant does not apply: %s", self.task.hash, err)
                continue
            if program is not None and program.hash not in seen:
                seen.add(program.hash)
                mutants.append(program)
        return mutants

    def rebuild(self, program: Program, space: Space) -> Any:
        """The scheduled PrimFunc of `program`, exactly as it was drawn (ProgramError as in :class:`Rebuilder`)."""
        return _rebuilt(self._mod, json.loads(space.insts_json), program, self._postprocs)


class Rebuilder:
    """Rebuilds programs of many tasks; keeps what TVM needs per task. Making a :class:`TaskSpaces` takes tens of milliseconds
    and replaying a program about three, so only the postprocessors are set up here. ``verify`` is as in :class:`TaskSpaces`."""

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify
        #: (rule set, cores) -> context and postprocessors. A context owns the target of its postprocessors, so both are kept.
        self._contexts: dict[tuple[str, int], tuple[Any, list[Any]]] = {}
        self._mods: dict[str, Any] = {}
        self._insts: dict[str, Any] = {}

    def __call__(self, program: Program, task: Task, space: Space | None) -> Any:
        """The PrimFunc of `program`, or the task's own if it is unscheduled (ProgramError: it does not replay exactly)."""
        if program.space_hash is None:
            return task.prim_func()
        if space is None or space.hash != program.space_hash:
            raise ProgramError(f"program {program.hash} needs its design space {program.space_hash}")
        if space.rule == GENERATOR_RULE:
            return _checked(program, build_program(space, program.decisions), "is generated", "version")
        # keyed by the TIR: tasks with the same hash may name their blocks differently, and the instructions use these names
        if task.tir_json not in self._mods:
            self._mods[task.tir_json] = import_tvm().IRModule({"main": task.prim_func()})
        mod = self._mods[task.tir_json]
        if space.hash not in self._insts:
            self._insts[space.hash] = json.loads(space.insts_json)
        key = (space.rule, space.num_cores)
        if key not in self._contexts:
            context = _context(mod, *key)
            # if another thread was first, its context stays: it is in use
            self._contexts.setdefault(key, (context, _postprocessors(context, self._verify)))
        return _rebuilt(mod, self._insts[space.hash], program, self._contexts[key][1])


def program_of_schedule(
    schedule: Any, task: Task, rule: str = "llvm", num_cores: int = 1, origin: str = "search"
) -> tuple[Program, Space]:
    """A postprocessed schedule of MetaSchedule's search as a program and its design space. A search may change instructions as
    well as decisions (how much is parallel). The space is then not in :attr:`TaskSpaces.spaces`, so its index is -1."""
    insts, decisions = instructions_and_decisions(schedule)
    space = _space(task, rule, num_cores if rule == "llvm" else 0, -1, insts)
    return Program(structural_hash(schedule.mod["main"]), task.hash, space.hash, decisions, origin), space


def unscheduled(task: Task) -> Program:
    """The task itself as a program, as a vendor library runs it."""
    return Program(task.hash, task.hash, None, "", "unscheduled", "library")


def sample_programs(task: Task, n: int, *, rule: str = "llvm", num_cores: int = 1, seed: int = 0) -> list[Program]:
    """Draw up to `n` unique random programs of `task`; see :meth:`TaskSpaces.sample`."""
    return TaskSpaces(task, rule, num_cores).sample(n, seed)


def generator_space(task_hash: str, name: str, parameters: Sequence[str], fixed: Mapping[str, Any]) -> Space:
    """The space of a task's programs by one generator. ``parameters``: names of the arguments that differ, in the order of
    their values in the decisions. ``fixed``: the arguments that all programs share, such as the problem's size."""
    content = _dumps({"generator": name, "parameters": list(parameters), "fixed": dict(fixed)})
    digest = hashlib.blake2b(f"{task_hash}|{GENERATOR_RULE}|{content}".encode(), digest_size=8).hexdigest()
    return Space(digest, task_hash, GENERATOR_RULE, 0, 0, content)


def generator_program(space: Space, program_hash: str, values: Sequence[int]) -> Program:
    """The program of a generator space with these values of its parameters."""
    return Program(program_hash, space.task_hash, space.hash, _dumps(list(values)), "generator")


def build_program(space: Space, decisions: str) -> Any:
    """The PrimFunc of a program of a generator space (ProgramError: it is no such space, the decisions are not values of its
    parameters, or the generator does not take them)."""
    sentence = f"space {space.hash} and decisions {decisions!r} name no generator"
    with raised_as(ProgramError, sentence, TypeError, KeyError):
        content = json.loads(space.insts_json)
        values = dict(zip(content["parameters"], json.loads(decisions), strict=True))
        name, arguments = str(content["generator"]), {**content["fixed"], **values}
    from cdmpp.program import generators

    return generators.build(name, arguments)
