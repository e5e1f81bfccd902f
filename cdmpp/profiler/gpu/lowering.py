"""Scheduled TIR to CUDA C++ and launches, by TVM's own passes and code generator; no compiler runs.

The host side of a program is read, not built: between the passes ``SplitHostDevice`` and ``MakePackedAPI`` it is a list
of workspace allocations and kernel calls with fixed launch parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.profiler.arguments import ArgSpec, argument_bytes, argument_specs
from cdmpp.profiler.gpu.bundle import CudaProgram, Launch
from cdmpp.program.tvm_env import import_tvm, quiet

#: The source needs no more of the C++ library than this; TVM's own list makes NVRTC read all of libcu++.
_PROLOGUE = """#ifndef __CUDACC_RTC__
#include <cstdint>
#endif
"""
_DIMENSIONS = ("x", "y", "z")


class CudaLowering:
    """Lowers programs for one CUDA target (a TVM target dictionary); keeps the passes.

    The target's architecture steers only what the code generator may use.
    """

    def __init__(self, target: dict[str, Any]) -> None:
        tvm = import_tvm()
        from tvm.ir.instrument import pass_instrument

        @pass_instrument
        class HostBefore:
            """Keeps the module that ``MakePackedAPI`` is given."""

            module: Any = None

            def run_before_pass(self, module: Any, info: Any) -> None:
                if info.name == "tirx.MakePackedAPI":
                    self.module = module

        self._tvm = tvm
        self._target = tvm.target.Target(target).with_host("llvm")
        self._pipeline, _, self._finalize = tvm.tirx.get_default_tir_pipeline(self._target)
        self._host = HostBefore()

    def __call__(self, func: Any, *, unroll: bool = True) -> CudaProgram:
        """Lower a scheduled PrimFunc (ProgramError if TVM's passes refuse it, or its host side is more than launches).

        Without `unroll` there is no source, and all else in a tenth of the time where the schedule unrolls a lot.
        """
        tvm = self._tvm
        from tvm.tirx.build import codegen_build, split_host_device_mods

        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        self._host.module = None
        try:
            skipped = [] if unroll else ["tirx.UnrollLoop"]
            with quiet(), tvm.transform.PassContext(instruments=[self._host], disabled_pass=skipped):
                lowered = self._pipeline(tvm.tirx.transform.BindTarget(self._target)(mod))
            _, devices = split_host_device_mods(lowered)
            if len(devices) != 1 or self._host.module is None:
                raise ProgramError("the program has no kernel")
            device = next(iter(devices.values()))
            kernels = self._host.module
            source = ""
            if unroll:
                source = codegen_build(self._finalize()(device), self._target).inspect_source()
        except ProgramError:
            raise
        except Exception as err:  # TVM raises its own error types
            text = (str(err).strip().splitlines() or [type(err).__name__])[-1]
            raise ProgramError(f"TVM does not lower it: {text}"[:500]) from err
        workspaces, launches = self._launches(kernels)
        copies = any(_copies_asynchronously(kernels[launch.kernel]) for launch in launches)
        return CudaProgram(
            _without_libcxx(source), argument_specs(func), _written(func), workspaces, launches, copies
        )

    def _launches(self, mod: Any) -> tuple[tuple[ArgSpec, ...], tuple[Launch, ...]]:
        """Workspaces and launches of the host function of a module that is split but not packed."""
        main = mod["main"]
        numbers = {var: number for number, var in enumerate(main.params)}
        workspaces: list[ArgSpec] = []
        launches: list[Launch] = []
        for statement in _statements(main.body):
            kind = type(statement).__name__
            if kind == "AllocBuffer":
                spec = (tuple(int(n) for n in statement.buffer.shape), str(statement.buffer.dtype))
                numbers[statement.buffer] = len(main.params) + len(workspaces)
                workspaces.append(spec)
            elif kind == "DeclBuffer":
                numbers[statement.buffer] = self._number(statement.data, numbers)
            elif kind == "Evaluate" and _callee(statement.value) == "tirx.call_ffi_kernel":
                launches.append(self._launch(statement.value, mod, numbers))
            elif kind == "Evaluate" and type(statement.value).__name__ == "IntImm":
                continue
            else:
                raise ProgramError(f"the host side of the program has a {kind}: not only launches")
        if not launches:
            raise ProgramError("the program has no kernel")
        return tuple(workspaces), tuple(launches)

    def _number(self, pointer: Any, numbers: dict[Any, int]) -> int:
        if _callee(pointer) == "tirx.buffer_data" or hasattr(pointer, "args"):
            pointer = pointer.args[0]
        if pointer not in numbers:
            raise ProgramError(f"a kernel takes {pointer}, which is no buffer of the program")
        return numbers[pointer]

    def _launch(self, call: Any, mod: Any, numbers: dict[Any, int]) -> Launch:
        name = str(call.args[0].value)
        kernel = mod[name]
        tags = [str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]]
        count = len(kernel.params)
        values = call.args[1 + count :]
        if len(values) != len(tags) or not all(type(v).__name__ == "IntImm" for v in values):
            raise ProgramError(f"the launch of {name} is not fixed")
        extents = {tag: int(value) for tag, value in zip(tags, values, strict=True)}
        known = {f"{part}.{d}" for part in ("blockIdx", "threadIdx") for d in _DIMENSIONS}
        if set(extents) - known:
            raise ProgramError(f"{name} is launched with {', '.join(sorted(set(extents) - known))}")
        grid, block = (
            tuple(extents.get(f"{part}.{d}", 1) for d in _DIMENSIONS) for part in ("blockIdx", "threadIdx")
        )
        buffers = tuple(self._number(a, numbers) for a in call.args[1 : 1 + count])
        return Launch(grid, block, self._shared_bytes(kernel), kernel=name, buffers=buffers)  # type: ignore[arg-type]

    def _shared_bytes(self, kernel: Any) -> int:
        import tvm_ffi

        total = 0

        def visit(node: Any) -> None:
            nonlocal total
            if type(node).__name__ == "AllocBuffer" and str(node.buffer.scope()).startswith("shared"):
                spec = (tuple(int(n) for n in node.buffer.shape), str(node.buffer.dtype))
                total += argument_bytes(spec)

        tvm_ffi.structural_walk(kernel.body, visit, order="pre")
        return total


def _statements(body: Any) -> Iterator[Any]:
    """The statements of a sequence; pragmas, which stay where loops are not unrolled, are looked through."""
    if hasattr(body, "seq"):
        for part in body.seq:
            yield from _statements(part)
    elif type(body).__name__ == "AttrStmt" and str(body.attr_key).startswith("pragma_"):
        yield from _statements(body.body)
    else:
        yield body


def _callee(expr: Any) -> str:
    return str(getattr(getattr(expr, "op", None), "name", ""))


def _copies_asynchronously(kernel: Any) -> bool:
    import tvm_ffi

    found = False

    def visit(node: Any) -> None:
        nonlocal found
        # Commits and waits are attributes until the device code is finished; cp.async itself is a call.
        if type(node).__name__ == "AttrStmt":
            found = found or str(node.attr_key).startswith(("async_commit", "async_wait"))
        elif hasattr(node, "op"):
            found = found or "cp_async" in _callee(node)

    tvm_ffi.structural_walk(kernel.body, visit, order="pre")
    return found


def _written(func: Any) -> tuple[int, ...]:
    """Which parameters of a scheduled PrimFunc its blocks write."""
    import tvm_ffi
    from tvm.s_tir.stmt import SBlock

    written: set[int] = set()
    params = list(func.params)

    def visit(node: Any) -> None:
        if isinstance(node, SBlock):
            for region in node.writes:
                written.update(i for i, param in enumerate(params) if param.same_as(region.source))

    tvm_ffi.structural_walk(func.body, visit, order="pre")
    return tuple(sorted(written))


def _without_libcxx(source: str) -> str:
    """The source with a short prologue in place of the block that starts with ``#ifdef __CUDACC_RTC__``."""
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
