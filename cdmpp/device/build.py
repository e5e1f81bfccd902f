"""Row + share + instruction set -> Device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdmpp.device.spec import Device
from cdmpp.errors import UnknownDeviceError

if TYPE_CHECKING:
    from cdmpp.device.row import DeviceRow


@dataclass(frozen=True)
class Isa:
    """An instruction set level that code for a CPU can be restricted to (its name is LLVM's ``mcpu``)."""

    name: str
    simd_bits: int
    fma: bool


#: The x86-64 levels of the psABI; v2 is SSE4.2, v3 AVX2 with FMA, v4 AVX-512.
ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("x86-64", 128, False),
        Isa("x86-64-v2", 128, False),
        Isa("x86-64-v3", 256, True),
        Isa("x86-64-v4", 512, True),
    )
}

#: Vector instructions a core starts per cycle where the row does not say: two 128- to 512-bit pipes are
#: what server cores since Haswell and Zen 2 have (some Xeon Silver and Bronze have one 512-bit FMA pipe:
#: their peak is half).
ASSUMED_SIMD_PIPES = 2


def build_device(
    row: DeviceRow, share: float | None = None, isa: str = "", cores_here: int | None = None
) -> Device:
    """The device of a table row, as used.

    Parameters
    ----------
    share
        Cores of a CPU (a whole number), fraction of a GPU (0 < share <= 1); None for all.
    isa
        One of :data:`ISAS`, or "" for all that the CPU has.
    cores_here
        Cores of this machine, where the device is its CPU. Elsewhere there may be a larger virtual machine with the same CPU.

    Raises
    ------
    UnknownDeviceError
        There is no such share or restriction of this device.
    """
    if row.kind == "gpu":
        return _gpu(row, 1.0 if share is None else share, isa)
    return _cpu(row, share, isa, cores_here)


def _cpu(row: DeviceRow, share: float | None, isa_name: str, cores_here: int | None) -> Device:
    if share is None:
        share = cores_here or row.cores
        if share is None:
            raise UnknownDeviceError(
                f"{row.name}: the number of its cores is unknown; say how many, as {row.name}@1"
            )
    if not float(share).is_integer() or share < 1:
        raise UnknownDeviceError(f"{row.name}@{share:g}: the share of a CPU is a number of cores, 1 or more")
    if cores_here is not None and share > cores_here:
        raise UnknownDeviceError(f"{row.name}@{share:g}: this machine has {cores_here} cores")
    if row.cores is not None and share > row.cores:
        if cores_here is None and not row.virtual:
            raise UnknownDeviceError(f"{row.name}@{share:g}: it has {row.cores} cores")
        row = row.model_copy(update={"cores": int(share), "mem_gb": None})
    simd_bits, fma, mcpu = row.simd_bits, row.fma, row.mcpu
    pipes = row.simd_pipes or ASSUMED_SIMD_PIPES
    if isa_name:
        isa = ISAS[isa_name]
        if simd_bits is not None and isa.simd_bits > simd_bits:
            raise UnknownDeviceError(f"{row.name}.{isa_name}: it has no {isa.simd_bits}-bit vectors")
        if (
            simd_bits is not None
        ):  # what takes a whole cycle at full width may be done twice in one at half of it
            pipes = min(ASSUMED_SIMD_PIPES, pipes * simd_bits // isa.simd_bits)
        simd_bits, mcpu = isa.simd_bits, isa.name
        fma = isa.fma if fma is None else fma and isa.fma
    lanes = row.lanes_per_core if not isa_name else None
    if lanes is None and simd_bits is not None:
        lanes = simd_bits // 32 * pipes
    cores_used = int(share)
    peaks: dict[str, float] = {}
    if not isa_name and row.peak_gflops and row.cores:
        peaks = {str(name): peak * cores_used / row.cores for name, peak in row.peak_gflops.items()}
    elif lanes is not None and row.clock_mhz is not None and fma is not None:
        float32 = cores_used * row.clock_mhz / 1e3 * lanes * (2 if fma else 1)
        peaks = {"float32": float32, "float64": float32 / 2}
    target: dict[str, Any] = {"kind": "llvm", "num-cores": cores_used}
    if mcpu:
        target["mcpu"] = mcpu
    if row.mtriple:
        target["mtriple"] = row.mtriple
    suffix = f".{isa_name}" if isa_name else ""
    return Device(
        name=f"{row.name}{suffix}@{cores_used}",
        share=float(cores_used),
        cores_used=float(cores_used),
        isa=isa_name,
        simd_bits=simd_bits,
        fma=fma,
        lanes_per_core=lanes,
        peak_gflops=peaks,
        target=target,
        **_common(row),
    )


def _gpu(row: DeviceRow, share: float, isa_name: str) -> Device:
    if isa_name:
        raise UnknownDeviceError(f"{row.name}.{isa_name}: only a CPU can be restricted to an instruction set")
    if not 0 < share <= 1:
        raise UnknownDeviceError(
            f"{row.name}@{share:g}: the share of a GPU is a fraction, above 0 and at most 1"
        )
    return Device(
        name=row.name if share == 1 else f"{row.name}@{share:g}",
        share=float(share),
        cores_used=None if row.cores is None else max(1.0, round(row.cores * share)),
        simd_bits=row.simd_bits,
        fma=True if row.fma is None else row.fma,
        lanes_per_core=row.lanes_per_core,
        peak_gflops={str(name): peak * share for name, peak in _gpu_peaks(row).items()},
        target=_gpu_target(row),
        **_common(row),
    )


def _gpu_peaks(row: DeviceRow) -> dict[str, float]:
    peaks = {str(name): peak for name, peak in row.peak_gflops.items()}
    if "float32" not in peaks and row.cores and row.lanes_per_core and row.clock_mhz:
        peaks["float32"] = 2 * row.cores * row.lanes_per_core * row.clock_mhz / 1e3
    return peaks


def _gpu_target(row: DeviceRow) -> dict[str, Any]:
    shared = int((row.max_shared_per_block_kb or 48) * 1024)
    threads = row.max_threads_per_block or 1024
    if row.mcpu.startswith("sm_"):
        return {
            "kind": "cuda",
            "arch": row.mcpu,
            "max_threads_per_block": threads,
            "max_shared_memory_per_block": shared,
            "thread_warp_size": row.warp_size or 32,
        }
    if row.mcpu.startswith("gfx"):
        return {
            "kind": "rocm",
            "mcpu": row.mcpu,
            "max_threads_per_block": threads,
            "max_shared_memory_per_block": shared,
            "thread_warp_size": row.warp_size or 64,
        }
    if row.vendor == "intel":
        return {
            "kind": "opencl",
            "max_threads_per_block": threads,
            "max_shared_memory_per_block": shared,
            "thread_warp_size": row.warp_size or 1,
        }
    return {}


def _common(row: DeviceRow) -> dict[str, Any]:
    same = (
        "kind", "vendor", "model", "cores", "arch", "clock_mhz", "l1_kb", "l2_kb", "l3_kb", "shared_kb",
        "registers_per_core", "warp_size", "max_threads_per_core", "mem_gb", "bandwidth_gb_s", "tdp_w", "process_nm",
        "launch_overhead_us", "virtual",
    )  # fmt: skip
    values = {name: getattr(row, name) for name in same}
    values["measured"] = dict(row.measured)
    return {**values, "base": row.name, "sources": (row.source,) if row.source else ()}
