"""The building side of the GPU profiler: a scheduled PrimFunc to a cubin, or the reason why it cannot run; needs no GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError
from cdmpp.profiler.bundle import BundledProgram
from cdmpp.profiler.cuda_compile import CompileError, find_compiler
from cdmpp.profiler.cuda_limits import arch_limits, resource_fault, shape_fault
from cdmpp.profiler.cuda_lowering import CudaLowering

if TYPE_CHECKING:
    from cdmpp.profiler.build import BuildJob
    from cdmpp.profiler.cuda_program import CudaProgram


def rule_fault(cuda: CudaProgram, arch: str) -> tuple[str, str] | None:
    """Why a lowered program cannot run on an architecture, as far as that shows before it is compiled.

    Returns
    -------
    Kind (``threads``, ``block``, ``grid``, ``shared``, ``async``) and a sentence; None if no rule excludes it.
    """
    fault = shape_fault(cuda.shapes, arch)
    if fault is None and cuda.async_copies and not arch_limits(arch).async_copies:
        return "async", f"it copies asynchronously, which {arch} cannot"
    return fault


def excluded(program: str, func: Any, arch: str, lowering: CudaLowering) -> BundledProgram | None:
    """A program that TVM does not lower or that the limits of an architecture exclude, which shows before it is compiled.

    Parameters
    ----------
    program
        Its hash.
    func
        Its scheduled PrimFunc.
    """
    try:
        fault = rule_fault(lowering(func, unroll=False), arch)
    except ProgramError as err:
        return BundledProgram(program, "build_error", str(err))
    return None if fault is None else _invalid(program, fault)


def compile_kernel(program: str, func: Any, arch: str, lowering: CudaLowering) -> BundledProgram:
    """Lower and compile a scheduled PrimFunc; a failure is a status of what comes back."""
    try:
        cuda = lowering(func)
        compiled = find_compiler(arch).compile(cuda.source, arch)
    except CompileError as err:
        shared = "too much shared" in str(err)
        return BundledProgram(program, "invalid_config" if shared else "build_error", str(err))
    except ProgramError as err:
        return BundledProgram(program, "build_error", str(err))
    except TimeoutError as err:
        return BundledProgram(program, "build_timeout", str(err))
    fault = resource_fault(cuda.shapes, [compiled.resources[launch.kernel] for launch in cuda.launches], arch)
    if fault is not None:
        return _invalid(program, fault)
    resources = {name: r.to_json() for name, r in compiled.resources.items()}
    return BundledProgram(program, "ok", "", cuda, compiled.cubin, resources)


def _invalid(program: str, fault: tuple[str, str]) -> BundledProgram:
    return BundledProgram(program, "invalid_config", f"{fault[0]}: {fault[1]}")


def cuda_build_worker(connection: Connection, target: dict[str, Any], arch: str, niceness: int) -> None:
    """Serve :class:`~cdmpp.profiler.build.BuildJob` after job until the connection closes (runs in its own process).

    Sends a :class:`~cdmpp.profiler.bundle.BundledProgram` for each.
    """
    from cdmpp.profiler import machine
    from cdmpp.profiler.workers import requests
    from cdmpp.program.space import Rebuilder

    machine.die_with_parent()
    machine.stand_back(niceness)
    # Without the postprocessor that only rejects: what is wrong with a program is to be said, not that it is.
    lowering, rebuild = CudaLowering(target), Rebuilder(verify=False)
    job: BuildJob
    for job in requests(connection):
        started = time.perf_counter()
        program = job.program.hash
        try:
            func = rebuild(job.program, job.task, job.space)
        except ProgramError as err:
            kernel = BundledProgram(program, "invalid_config", str(err))
        else:
            kernel = excluded(program, func, arch, lowering) or compile_kernel(program, func, arch, lowering)
        connection.send(replace(kernel, build_s=time.perf_counter() - started))
