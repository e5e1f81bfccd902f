"""Resource limits of CUDA kernels on each architecture, and whether a program stays within them. The numbers are from the table
"Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdmpp.device import Device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.gpu.bundle import CudaProgram
from cdmpp.profiler.gpu.compile import Resources


@dataclass(frozen=True)
class ArchLimits:
    """Limits of one compute capability; registers have 32 bits."""

    #: Threads of one block, which may all lie along x or y; and its largest extent along z.
    threads_per_block: int = 1024
    block_z: int = 64
    #: Shared memory that a kernel may declare (static), and that it may request at launch (dynamic, opt-in).
    shared_static_bytes: int = 49152
    shared_optin_bytes: int = 49152
    registers_per_block: int = 65536
    registers_per_thread: int = 255
    #: Limits of one multiprocessor, which determine the occupancy.
    threads_per_sm: int = 2048
    shared_per_sm_bytes: int = 49152
    registers_per_sm: int = 65536
    #: Whether the architecture has ``cp.async``.
    async_copies: bool = True


#: Architecture -> limits.
ARCH_LIMITS: Mapping[str, ArchLimits] = {
    "sm_70": ArchLimits(shared_optin_bytes=96 << 10, shared_per_sm_bytes=96 << 10, async_copies=False),
    "sm_75": ArchLimits(shared_optin_bytes=64 << 10, shared_per_sm_bytes=64 << 10, threads_per_sm=1024, async_copies=False),
    "sm_80": ArchLimits(shared_optin_bytes=163 << 10, shared_per_sm_bytes=164 << 10),
    "sm_86": ArchLimits(shared_optin_bytes=99 << 10, shared_per_sm_bytes=100 << 10, threads_per_sm=1536),
    "sm_89": ArchLimits(shared_optin_bytes=99 << 10, shared_per_sm_bytes=100 << 10, threads_per_sm=1536),
    "sm_90": ArchLimits(shared_optin_bytes=227 << 10, shared_per_sm_bytes=228 << 10),
}

#: Largest extents of a grid: along x, and along y and z.
_GRID_X, _GRID_YZ = 2**31 - 1, 65535
#: Registers are allocated to warps in units of this many.
_REGISTER_UNIT = 256


def arch_limits(arch: str) -> ArchLimits:
    """The limits of an architecture (ProfilerError for one that is not in the table)."""
    try:
        return ARCH_LIMITS[arch]
    except KeyError:
        raise ProfilerError(f"unknown architecture {arch!r}: expected one of {', '.join(ARCH_LIMITS)}") from None


def cuda_arch(device: Device) -> str:
    """The architecture of a CUDA device, such as ``sm_90`` (ProfilerError if it is no CUDA device, or has no known limits)."""
    arch = str(device.target.get("arch", ""))
    if device.kind != "gpu" or not arch.startswith("sm_"):
        raise ProfilerError(f"{device.name} is no CUDA device: expected an NVIDIA GPU, such as h200")
    arch_limits(arch)
    return arch


def rule_fault(cuda: CudaProgram, arch: str) -> str | None:
    """Why a program cannot run, as far as that can be told before it is compiled: ``threads``, ``block``, ``grid``, ``shared``
    or ``async``, then a colon and a sentence. None if it breaks no limit."""
    limits = arch_limits(arch)
    for launch in cuda.launches:
        if launch.threads > limits.threads_per_block:
            return f"threads: {launch.threads} threads a block, at most {limits.threads_per_block}"
        if launch.block[2] > limits.block_z:
            return f"block: {launch.block[2]} threads along z, at most {limits.block_z}"
        if launch.grid[0] > _GRID_X or max(launch.grid[1:]) > _GRID_YZ:
            return f"grid: a grid of {launch.grid}, at most ({_GRID_X}, {_GRID_YZ}, {_GRID_YZ})"
        if launch.shared_bytes > limits.shared_static_bytes:
            return _shared_fault(launch.shared_bytes, limits)
    if cuda.async_copies and not limits.async_copies:
        return f"async: it copies asynchronously, which {arch} cannot"
    return None


def _shared_fault(needed: int, limits: ArchLimits) -> str:
    return f"shared: {needed} bytes of shared memory, at most {limits.shared_static_bytes}"


def block_registers(registers: int, threads: int) -> int:
    """Registers that a block takes; those of each warp are rounded up to the allocation unit."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    return warps * per_warp


def resource_fault(cuda: CudaProgram, resources: Resources, arch: str) -> str | None:
    """Why a compiled program cannot run: too many registers, or too much shared memory by ptxas' count; None if it can."""
    limits = arch_limits(arch)
    for launch in cuda.launches:
        taken = resources[launch.kernel]
        needed = block_registers(taken["registers"], launch.threads)
        if needed > limits.registers_per_block:
            return f"registers: {needed} registers a block, at most {limits.registers_per_block}"
        if taken["shared_bytes"] > limits.shared_static_bytes:
            return _shared_fault(taken["shared_bytes"], limits)
    return None
