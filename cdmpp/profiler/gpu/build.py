"""Building for a GPU, in builder processes: turns scheduled programs or CUDA sources into cubins, or says why they cannot run,
and draws programs from a task's design spaces. Needs no GPU; needs TVM except for compiling sources. The host side of a lowered
program is read, not built: between the passes ``SplitHostDevice`` and ``MakePackedAPI`` it is workspace allocations and
kernel calls with fixed launch parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import ProfilerError, ProgramError
from cdmpp.profiler import arguments
from cdmpp.profiler.arguments import ArgSpec, Reference, argument_specs
from cdmpp.profiler.engine import BuildJob, Built, last_line
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram, Launch
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.limits import resource_fault, rule_fault
from cdmpp.program import import_tvm, quiet
from cdmpp.program.space import Rebuilder, TaskSpaces
from cdmpp.program.types import Program, Space, Task

#: All that the source needs of the C++ library. TVM's own list of includes makes NVRTC read all of libcu++.
_PROLOGUE = """#ifndef __CUDACC_RTC__
#include <cstdint>
#endif
"""
_DIMENSIONS = ("x", "y", "z")


@dataclass(frozen=True)
class MeasureJob:
    """A program to measure while at most `degree` programs run, itself included; its output is compared with a `reference`."""

    kernel: BundledProgram
    degree: int = 1
    reference: Reference | None = None


@dataclass(frozen=True)
class KernelJob(BuildJob):
    """A program of a bundle to measure. Its source is compiled first if it has no cubin."""

    measure: MeasureJob

    @property
    def built(self) -> BundledProgram | None:
        kernel = self.measure.kernel
        return kernel if kernel.status != "ok" or kernel.cubin else None


@dataclass(frozen=True)
class DrawJob:
    """A request to draw candidates from the design spaces of a task: random points, or mutants of `parents`. Builders do it
    because it is the most expensive step: in some spaces one point in fifty can run, and only lowering a point shows it."""

    task: Task
    n: int
    seed: int
    seen: frozenset[str]
    parents: tuple[Program, ...] = ()
    #: Seed of the inputs of a reference to make as well; None to make no reference.
    reference_seed: int | None = None
    built = None


@dataclass(frozen=True)
class Drawn(Built):
    """Drawn candidates with their spaces: those that may run, and those that the device's limits exclude."""

    candidates: tuple[tuple[Program, Space], ...] = ()
    excluded: tuple[tuple[Program, Space, BundledProgram], ...] = ()
    reference: Reference | None = None


class KernelBuilder:
    """Processes build and draw jobs. Without a `target` (a TVM target dictionary) it can only compile sources."""

    def __init__(self, arch: str, target: Mapping[str, Any] | None) -> None:
        self._arch = arch
        if target is not None:
            # Without the postprocessor that only rejects programs: we want to know what is wrong with them.
            self._lower, self._rebuild = CudaLowering(dict(target)), Rebuilder(verify=False)

    def __call__(self, job: BuildJob | DrawJob) -> BundledProgram | Drawn:
        if isinstance(job, DrawJob):
            return self._draw(job)
        if isinstance(job, KernelJob):
            return self._compile(job.program.hash, job.measure.kernel.cuda)
        program = job.program.hash
        try:
            func = self._rebuild(job.program, job.task, job.space)
        except ProgramError as err:
            return BundledProgram(program, status="invalid_config", error=str(err))
        try:
            return self._excluded(program, func) or self._compile(program, self._lower(func))
        except ProgramError as err:
            return BundledProgram(program, status="build_error", error=str(err))

    def _draw(self, job: DrawJob) -> Drawn:
        try:
            spaces = TaskSpaces(job.task, "cuda", verify=False)
        except ProgramError as err:
            return Drawn(status="build_error", error=str(err))
        if job.parents:
            drawn = spaces.mutate(job.parents, job.n, job.seed, exclude=job.seen)
        else:
            drawn = spaces.sample(job.n, job.seed, exclude=job.seen)
        candidates, excluded = [], []
        for program in drawn:
            space = spaces.space_of(program)
            try:
                fault = self._excluded(program.hash, spaces.rebuild(program, space))
            except ProgramError as err:
                fault = BundledProgram(program.hash, status="build_error", error=str(err))
            if fault is None:
                candidates.append((program, space))
            else:
                excluded.append((program, space, fault))
        reference = None
        if candidates and job.reference_seed is not None:
            reference = task_reference(job.task, job.reference_seed)
        return Drawn(tuple(candidates), tuple(excluded), reference)

    def _excluded(self, program: str, func: Any) -> BundledProgram | None:
        """The failure of a program that the device's limits exclude, else None (ProgramError if TVM cannot lower it)."""
        fault = rule_fault(self._lower(func, unroll=False), self._arch)
        return BundledProgram(program, status="invalid_config", error=fault) if fault else None

    def _compile(self, program: str, cuda: CudaProgram | None) -> BundledProgram:
        assert cuda is not None
        try:
            cubin, resources = find_compiler(self._arch).compile(cuda.source, self._arch)
        except ProfilerError as err:
            status = "invalid_config" if "too much shared" in str(err) else "build_error"
            return BundledProgram(program, status=status, error=str(err))
        except TimeoutError as err:
            return BundledProgram(program, status="build_timeout", error=str(err))
        fault = resource_fault(cuda, resources, self._arch)
        if fault is not None:
            return BundledProgram(program, status="invalid_config", error=fault)
        return BundledProgram(program, cuda, cubin, resources)


def task_reference(task: Task, seed: int) -> Reference:
    """The reference output of a task, computed by running the unscheduled task on the CPU."""
    tvm = import_tvm()
    func = task.prim_func().with_attr("global_symbol", "main")
    with quiet():
        executable = tvm.compile(tvm.IRModule({"main": func}), target=tvm.target.Target("llvm"))
    arrays = [tvm.runtime.tensor(a) for a in arguments.reference_inputs(argument_specs(func), seed)]
    executable["main"](*arrays)
    return arguments.summarise_outputs(task.hash, seed, {number: arrays[number].numpy() for number in _written(func)})


class CudaLowering:
    """Lowers programs for one CUDA target (a TVM target dictionary). The target's architecture only decides what the code
    generator may use. The pass pipeline is set up once and reused."""

    def __init__(self, target: dict[str, Any]) -> None:
        tvm = import_tvm()
        from tvm.ir.instrument import pass_instrument

        @pass_instrument
        class HostBefore:
            """Keeps the input module of the pass ``MakePackedAPI``."""

            module: Any = None

            def run_before_pass(self, module: Any, info: Any) -> None:
                if info.name == "tirx.MakePackedAPI":
                    self.module = module

        self._tvm = tvm
        self._target = tvm.target.Target(target).with_host("llvm")
        self._pipeline, _, self._finalize = tvm.tirx.get_default_tir_pipeline(self._target)
        self._host = HostBefore()

    def __call__(self, func: Any, *, unroll: bool = True) -> CudaProgram:
        """Lower a scheduled PrimFunc (ProgramError if TVM's passes refuse it, or its host side does more than launch kernels).
        Without `unroll` the result has no source; everything else takes a tenth of the time if the schedule unrolls a lot."""
        tvm = self._tvm
        from tvm.tirx.build import codegen_build, split_host_device_mods

        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        self._host.module = None
        source = ""
        try:
            skipped = [] if unroll else ["tirx.UnrollLoop"]
            with quiet(), tvm.transform.PassContext(instruments=[self._host], disabled_pass=skipped):
                lowered = self._pipeline(tvm.tirx.transform.BindTarget(self._target)(mod))
            _, devices = split_host_device_mods(lowered)
            kernels = self._host.module
            if len(devices) != 1 or kernels is None:
                raise ProgramError("the program has no kernel")
            if unroll:
                device = next(iter(devices.values()))
                source = codegen_build(self._finalize()(device), self._target).inspect_source()
        except ProgramError:
            raise
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(f"TVM does not lower it: {last_line(err)}"[:500]) from err
        workspaces, launches = _launches(kernels)
        copies = any(_copies_asynchronously(kernels[launch.kernel]) for launch in launches)
        return CudaProgram(_without_libcxx(source), argument_specs(func), _written(func), workspaces, launches, copies)


def _launches(mod: Any) -> tuple[tuple[ArgSpec, ...], tuple[Launch, ...]]:
    """Workspaces and launches of a module's host function, after ``SplitHostDevice`` and before ``MakePackedAPI``."""
    main = mod["main"]
    numbers = {var: number for number, var in enumerate(main.params)}
    workspaces: list[ArgSpec] = []
    launches: list[Launch] = []
    for statement in _statements(main.body):
        kind = type(statement).__name__
        if kind == "AllocBuffer":
            numbers[statement.buffer] = len(main.params) + len(workspaces)
            workspaces.append(_spec(statement.buffer))
        elif kind == "DeclBuffer":
            numbers[statement.buffer] = _number(statement.data, numbers)
        elif kind == "Evaluate" and _callee(statement.value) == "tirx.call_ffi_kernel":
            launches.append(_launch(statement.value, mod, numbers))
        elif kind != "Evaluate" or type(statement.value).__name__ != "IntImm":
            raise ProgramError(f"the host side of the program has a {kind}: not only launches")
    if not launches:
        raise ProgramError("the program has no kernel")
    return tuple(workspaces), tuple(launches)


def _statements(body: Any) -> Iterator[Any]:
    """The statements of a body, in order, including those inside pragmas (these remain where loops are not unrolled)."""
    if hasattr(body, "seq"):
        for part in body.seq:
            yield from _statements(part)
    elif type(body).__name__ == "AttrStmt" and str(body.attr_key).startswith("pragma_"):
        yield from _statements(body.body)
    else:
        yield body


def _number(pointer: Any, numbers: dict[Any, int]) -> int:
    """The number of the parameter or workspace that a pointer points to."""
    if hasattr(pointer, "args"):
        pointer = pointer.args[0]
    if pointer not in numbers:
        raise ProgramError(f"a kernel takes {pointer}, which is no buffer of the program")
    return numbers[pointer]


def _launch(call: Any, mod: Any, numbers: dict[Any, int]) -> Launch:
    name = str(call.args[0].value)
    kernel = mod[name]
    tags = [str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]]
    count = len(kernel.params)
    values = call.args[1 + count :]
    if len(values) != len(tags) or not all(type(v).__name__ == "IntImm" for v in values):
        raise ProgramError(f"the launch of {name} is not fixed")
    extents = {tag: int(value) for tag, value in zip(tags, values, strict=True)}
    grid, block = (tuple(extents.pop(f"{part}.{d}", 1) for d in _DIMENSIONS) for part in ("blockIdx", "threadIdx"))
    if extents:
        raise ProgramError(f"{name} is launched with {', '.join(sorted(extents))}")
    shared = [
        arguments.argument_bytes(_spec(node.buffer))
        for node in _nodes(kernel.body)
        if type(node).__name__ == "AllocBuffer" and str(node.buffer.scope()).startswith("shared")
    ]
    buffers = tuple(_number(a, numbers) for a in call.args[1 : 1 + count])
    return Launch(grid, block, sum(shared), kernel=name, buffers=buffers)  # type: ignore[arg-type]


def _spec(buffer: Any) -> ArgSpec:
    return tuple(int(n) for n in buffer.shape), str(buffer.dtype)


def _nodes(body: Any) -> list[Any]:
    """All nodes of a function's body."""
    import tvm_ffi

    found: list[Any] = []
    tvm_ffi.structural_walk(body, found.append, order="pre")
    return found


def _callee(expr: Any) -> str:
    return str(getattr(getattr(expr, "op", None), "name", ""))


def _copies_asynchronously(kernel: Any) -> bool:
    # Before the device code is finalized, commits and waits are attributes; cp.async itself is a call.
    return any(
        str(node.attr_key).startswith(("async_commit", "async_wait"))
        if type(node).__name__ == "AttrStmt"
        else "cp_async" in _callee(node)
        for node in _nodes(kernel.body)
    )


def _written(func: Any) -> tuple[int, ...]:
    """Indices of the parameters of a PrimFunc that its blocks write."""
    from tvm.s_tir.stmt import SBlock

    sources = [region.source for node in _nodes(func.body) if isinstance(node, SBlock) for region in node.writes]
    return tuple(i for i, param in enumerate(func.params) if any(param.same_as(s) for s in sources))


def _without_libcxx(source: str) -> str:
    """The source, with the block that starts with ``#ifdef __CUDACC_RTC__`` replaced by a short prologue."""
    lines = source.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip() == "#ifdef __CUDACC_RTC__"), None)
    if start is None:
        return source
    depth = 0
    for end in range(start, len(lines)):
        word = lines[end].lstrip()
        depth += word.startswith("#if") - word.startswith("#endif")
        if depth == 0:
            return _PROLOGUE + "\n".join([*lines[:start], *lines[end + 1 :]]) + "\n"
    return source
