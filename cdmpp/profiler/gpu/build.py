"""The building side of bundles: a process that draws programs of a task, lowers and compiles them.

Drawing is here and not in the parent because it costs most: of some spaces a point in fifty can run, and each has to be
lowered to know. What is lowered to know is then compiled, once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.profiler.cuda_build import compile_kernel, excluded
from cdmpp.profiler.gpu.bundle import BundledProgram, Reference
from cdmpp.profiler.gpu.lowering import CudaLowering
from cdmpp.program.types import Program, Space, Task

#: Candidates that are lowered at most for each one that can run.
_MAX_TRIES = 60
#: Candidates drawn at a time.
_DRAWN = 8


@dataclass(frozen=True)
class TaskJob:
    """What to make of one task.

    Attributes
    ----------
    n
        Programs wanted.
    known
        Programs that are there already.
    parents
        Draw mutants of these in place of random points; they are of `spaces`.
    invalid
        Programs that cannot run and are kept all the same, as records without a latency.
    seconds
        Time after which drawing ends.
    reference_flops
        Compute the reference if the task takes no more operations.
    """

    task: Task
    n: int
    known: frozenset[str]
    parents: tuple[Program, ...]
    invalid: int
    seconds: float
    reference_flops: float
    seed: int


@dataclass(frozen=True)
class Compiling:
    """Sent before each compilation (and each drawing), so that the parent knows what does not end."""

    program: Program | None
    space: Space | None


@dataclass(frozen=True)
class BuiltProgram:
    """One program of the task."""

    program: Program
    space: Space
    kernel: BundledProgram


@dataclass(frozen=True)
class TaskDone:
    """Sent last. ``error`` says why the task has no design space, if it has none."""

    reference: Reference | None
    tries: int
    error: str = ""


def _draw(job: TaskJob, spaces: Any, seen: set[str]) -> Iterator[Program]:
    """Candidates, valid or not, until the spaces hold no more."""
    number = 0
    while True:
        seed = job.seed + 7919 * len(job.known) + 104729 * number + 1
        if job.parents:
            drawn = spaces.mutate(job.parents, _DRAWN, seed, exclude=seen)
        else:
            drawn = spaces.sample(_DRAWN, seed, exclude=seen)
        if not drawn:
            return
        seen.update(p.hash for p in drawn)
        yield from drawn
        number += 1


def _build(job: TaskJob, arch: str, lowering: CudaLowering) -> Iterator[Compiling | BuiltProgram | TaskDone]:
    from cdmpp.program.space import TaskSpaces

    started = time.monotonic()
    yield Compiling(None, None)
    try:
        spaces = TaskSpaces(job.task, "cuda", verify=False)
    except ProgramError as err:
        yield TaskDone(None, 0, str(err))
        return
    by_hash = {s.hash: s for s in spaces.spaces}
    ok = invalid = tries = 0
    reference: Reference | None = None
    wanted_reference = not job.known and job.task.flops <= job.reference_flops
    for program in _draw(job, spaces, set(job.known)):
        if ok >= job.n or tries >= _MAX_TRIES * job.n or time.monotonic() - started > job.seconds:
            break
        tries += 1
        space = by_hash[str(program.space_hash)]
        yield Compiling(None, None)
        begun = time.perf_counter()
        try:
            func = spaces.rebuild(program, space)
            fault = excluded(program.hash, func, arch, lowering)
        except ProgramError as err:
            fault = BundledProgram(program.hash, "build_error", str(err))
        if fault is not None:
            if invalid < job.invalid:
                invalid += 1
                yield BuiltProgram(program, space, fault)
            continue
        yield Compiling(program, space)
        kernel = compile_kernel(program.hash, func, arch, lowering)
        if kernel.status == "ok":
            kernel = replace(kernel, build_s=time.perf_counter() - begun)
        yield BuiltProgram(program, space, kernel)
        if kernel.cuda is None:
            continue
        ok += 1
        if wanted_reference:
            wanted_reference = False
            yield Compiling(None, None)
            reference = _reference(job, kernel.cuda.params, kernel.cuda.outputs)
    yield TaskDone(reference, tries)


def _reference(job: TaskJob, params: Any, outputs: Any) -> Reference:
    from cdmpp.profiler.gpu.check import task_reference

    return task_reference(job.task.prim_func(), params, outputs, job.task.hash, job.seed)


def bundle_worker(connection: Connection, target: dict[str, Any], arch: str, niceness: int) -> None:
    """Serve :class:`TaskJob` after :class:`TaskJob` until the connection closes (runs in its own process)."""
    from cdmpp.profiler import machine
    from cdmpp.profiler.pool import requests

    machine.die_with_parent()
    machine.stand_back(niceness)
    lowering = CudaLowering(target)
    job: TaskJob
    for job in requests(connection):
        for message in _build(job, arch, lowering):
            connection.send(message)
