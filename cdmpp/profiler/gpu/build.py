"""Building for a GPU, in processes of their own: scheduled programs to cubins, or the reason why they cannot run; sources
alone to cubins; and, for bundles, programs drawn from a task's design space. Needs no GPU; TVM for all but sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.errors import ProfilerError, ProgramError
from cdmpp.profiler.arguments import ArgSpec
from cdmpp.profiler.engine import Builder, BuildJob, Built
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram, Reference
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.limits import arch_limits, resource_fault, shape_fault
from cdmpp.program.types import Program, Space, Task


@dataclass(frozen=True)
class KernelJob(BuildJob):
    """A program of a bundle to measure, with at most `degree` programs at the same time, itself included; its output is
    compared with the `reference`, if there is one."""

    kernel: BundledProgram
    degree: int = 1
    reference: Reference | None = None

    @property
    def built(self) -> BundledProgram | None:
        """The kernel, unless its source is still to be compiled."""
        return self.kernel if self.kernel.status != "ok" or self.kernel.cubin else None


@dataclass(frozen=True)
class DrawJob:
    """Candidates to draw from the design spaces of a task: random points, or mutants of `parents`.

    Drawn by builders, because it costs most: of some spaces a point in fifty can run, and each has to be lowered to know.
    """

    task: Task
    n: int
    seed: int
    seen: frozenset[str]
    parents: tuple[Program, ...] = ()
    built = None


@dataclass(frozen=True)
class Drawn(Built):
    """Candidates in their spaces: those that may run, and those that the device's limits exclude."""

    candidates: tuple[tuple[Program, Space], ...] = ()
    excluded: tuple[tuple[Program, Space, BundledProgram], ...] = ()


@dataclass(frozen=True)
class ReferenceJob:
    """What a task computes, to be found out by running it unscheduled on the CPU."""

    task: Task
    params: tuple[ArgSpec, ...]
    outputs: tuple[int, ...]
    seed: int
    built = None


@dataclass(frozen=True)
class Referenced(Built):
    """The answer to a :class:`ReferenceJob`."""

    reference: Reference


def kernel_builder(arch: str, target: Mapping[str, Any] | None = None) -> Builder:
    """Builders for an architecture; without a `target` (as TVM takes it) they compile sources alone."""
    return KernelBuilder, (arch, target), 10


class KernelBuilder:
    """Does what the jobs above ask for."""

    def __init__(self, arch: str, target: Mapping[str, Any] | None) -> None:
        self._arch = arch
        if target is not None:
            from cdmpp.profiler.gpu.lowering import CudaLowering
            from cdmpp.program.space import Rebuilder

            # Without the postprocessor that only rejects: what is wrong with a program is to be said, not that it is.
            self._lower, self._rebuild = CudaLowering(dict(target)), Rebuilder(verify=False)

    def __call__(self, job: BuildJob | DrawJob | ReferenceJob) -> BundledProgram | Drawn | Referenced:
        if isinstance(job, DrawJob):
            return self._draw(job)
        if isinstance(job, ReferenceJob):
            from cdmpp.profiler.gpu.check import task_reference

            func = job.task.prim_func()
            return Referenced(task_reference(func, job.params, job.outputs, job.task.hash, job.seed))
        if isinstance(job, KernelJob):
            assert job.kernel.cuda is not None
            return self._compile(job.kernel.program, job.kernel.cuda)
        try:
            func = self._rebuild(job.program, job.task, job.space)
        except ProgramError as err:
            return BundledProgram(job.program.hash, status="invalid_config", error=str(err))
        excluded = self._excluded(job.program.hash, func)
        if excluded is not None:
            return excluded
        try:
            return self._compile(job.program.hash, self._lower(func))
        except ProgramError as err:
            return BundledProgram(job.program.hash, status="build_error", error=str(err))

    def _draw(self, job: DrawJob) -> Drawn:
        from cdmpp.program.space import TaskSpaces

        try:
            spaces = TaskSpaces(job.task, "cuda", verify=False)
        except ProgramError as err:
            return Drawn(status="build_error", error=str(err))
        if job.parents:
            drawn = spaces.mutate(job.parents, job.n, job.seed, exclude=job.seen)
        else:
            drawn = spaces.sample(job.n, job.seed, exclude=job.seen)
        by_hash = {space.hash: space for space in spaces.spaces}
        candidates, excluded = [], []
        for program in drawn:
            space = by_hash[str(program.space_hash)]
            try:
                fault = self._excluded(program.hash, spaces.rebuild(program, space))
            except ProgramError as err:
                fault = BundledProgram(program.hash, status="build_error", error=str(err))
            if fault is None:
                candidates.append((program, space))
            else:
                excluded.append((program, space, fault))
        return Drawn(tuple(candidates), tuple(excluded))

    def _excluded(self, program: str, func: Any) -> BundledProgram | None:
        """A program that TVM does not lower or that the limits exclude, which shows before it is compiled."""
        try:
            cuda = self._lower(func, unroll=False)
        except ProgramError as err:
            return BundledProgram(program, status="build_error", error=str(err))
        fault = rule_fault(cuda, self._arch)
        return None if fault is None else _invalid(program, fault)

    def _compile(self, program: str, cuda: CudaProgram) -> BundledProgram:
        try:
            compiled = find_compiler(self._arch).compile(cuda.source, self._arch)
        except ProfilerError as err:
            status = "invalid_config" if "too much shared" in str(err) else "build_error"
            return BundledProgram(program, status=status, error=str(err))
        except TimeoutError as err:
            return BundledProgram(program, status="build_timeout", error=str(err))
        taken = [compiled.resources[launch.kernel] for launch in cuda.launches]
        fault = resource_fault(cuda.launches, taken, self._arch)
        if fault is not None:
            return _invalid(program, fault)
        resources = {name: asdict(r) for name, r in compiled.resources.items()}
        return BundledProgram(program, cuda, compiled.cubin, resources)


def rule_fault(cuda: CudaProgram, arch: str) -> tuple[str, str] | None:
    """Why a lowered program cannot run on an architecture, as far as that shows before it is compiled: kind and sentence."""
    fault = shape_fault(cuda.launches, arch)
    if fault is None and cuda.async_copies and not arch_limits(arch).async_copies:
        return "async", f"it copies asynchronously, which {arch} cannot"
    return fault


def _invalid(program: str, fault: tuple[str, str]) -> BundledProgram:
    return BundledProgram(program, status="invalid_config", error=f"{fault[0]}: {fault[1]}")
