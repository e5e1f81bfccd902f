"""Device: a piece of hardware, or the share of it that is used, with its known facts and its feature vector for the predictor.
A row of the device table describes a whole device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from cdmpp.errors import UnknownDeviceError

#: Instruction sets that code for a CPU can be restricted to: the x86-64 levels of the psABI (LLVM's names), each with its
#: vector width and whether a multiply-add is one instruction. v2 is SSE4.2, v3 AVX2 with FMA, v4 AVX-512.
ISAS: dict[str, tuple[int, bool]] = {
    "x86-64": (128, False),
    "x86-64-v2": (128, False),
    "x86-64-v3": (256, True),
    "x86-64-v4": (512, True),
}

#: Vector instructions a core starts per cycle if the row does not say. Server cores since Haswell and Zen 2 have two 128- to
#: 512-bit pipes (some Xeon Silver and Bronze have one 512-bit FMA pipe, so their peak is half).
ASSUMED_SIMD_PIPES = 2


@dataclass(frozen=True)
class Device:
    """A named piece of hardware and the share of it that a program gets. None means unknown."""

    #: Canonical: ``base[.isa][@share]``, such as ``xeon-cascadelake-2.5ghz.x86-64-v2@1``, ``h200`` or ``h200@0.5``.
    name: str
    #: ``"cpu"`` or ``"gpu"``.
    kind: str
    #: Name of the hardware without restriction and share.
    base: str = ""
    #: Other names, such as the model string that a driver reports.
    aliases: tuple[str, ...] = ()
    #: ``intel``, ``amd``, ``arm``, ``nvidia``, ...; what the hardware calls itself.
    vendor: str = ""
    model: str = ""
    #: Cores (CPU) or fraction of the SMs (GPU, at most 1).
    share: float = 1.0
    #: Cores, SMs or CUs of the whole device, and of the share.
    cores: int | None = None
    cores_used: float | None = None
    #: An instruction set of :data:`ISAS` that the code is restricted to; "" for all that the CPU has.
    isa: str = ""
    #: Microarchitecture: ``cascadelake``, ``hopper``, ``cdna2``.
    arch: str = ""
    #: LLVM's name of the CPU or GPU (``cascadelake``, ``sm_90``, ``gfx90a``), and the target triple of a CPU whose architecture
    #: is not this machine's.
    mcpu: str = ""
    mtriple: str = ""
    #: Nominal clock of a CPU or boost clock of a GPU, and the highest clock that a CPU's vendor states.
    clock_mhz: float | None = None
    boost_mhz: float | None = None
    #: Vector width of a CPU, as restricted by ``isa``, and the vector instructions that a core starts per cycle.
    simd_bits: int | None = None
    simd_pipes: int | None = None
    #: Whether a multiply-add is one instruction.
    fma: bool | None = None
    #: fp32 operations that one core starts per cycle (a multiply-add counts once): CPU pipes x vector lanes, GPU lanes per SM.
    lanes_per_core: int | None = None
    #: Data cache of one core or SM. NVIDIA since Volta: L1 and shared memory together.
    l1_kb: float | None = None
    #: L2 of one core of a CPU or of the whole GPU; the last-level cache that one core of a CPU reaches, or of the whole GPU.
    l2_kb: float | None = None
    l3_kb: float | None = None
    #: Shared memory (LDS) and 32-bit registers of one SM (CU) that programs can use. The limits of a block are the defaults.
    shared_kb: float | None = None
    max_shared_per_block_kb: float | None = None
    registers_per_core: int | None = None
    warp_size: int | None = None
    max_threads_per_core: int | None = None
    max_threads_per_block: int | None = None
    #: Memory and bandwidth of the whole device; a share keeps both, since one core may use more than its part.
    mem_gb: float | None = None
    bandwidth_gb_s: float | None = None
    #: Measured bandwidth from the L2 of a GPU to all its cores.
    l2_bandwidth_gb_s: float | None = None
    #: Bandwidth to other devices of the same kind, both directions together: NVLink, Infinity Fabric or PCIe.
    link_gb_s: float | None = None
    #: Power that the whole device (the package of a CPU, the board of a GPU) may draw continuously.
    tdp_w: float | None = None
    #: Manufacturing process, as marketed. Together with the power it decides how much of the peak can be sustained.
    process_nm: float | None = None
    #: Peak of *the share* by data type: ``float32``, ``float16``, ``float64``, and ``..._matrix`` for matrix units
    #: (``tfloat32_matrix``, ``float16_matrix``), dense, with accumulation in float32 as in libraries.
    peak_gflops: Mapping[str, float] = field(default_factory=dict)
    #: Cost of starting one kernel.
    launch_overhead_us: float | None = None
    #: Whether the device is seen through a hypervisor.
    virtual: bool | None = None
    #: Results of micro-benchmarks of the whole device; the name of each contains its unit.
    measured: Mapping[str, float] = field(default_factory=dict)
    #: Dictionary for ``tvm.target.Target``; empty if no target is known.
    target: Mapping[str, Any] = field(default_factory=dict)
    #: Where the numbers come from.
    sources: tuple[str, ...] = ()

    @property
    def working_mhz(self) -> float | None:
        """The clock that programs run at: the measured one, else the highest one, else the nominal one."""
        measured_ghz = self.measured.get("clock_ghz")
        return 1e3 * measured_ghz if measured_ghz else self.boost_mhz or self.clock_mhz

    def power_for(self, gflops: float | None) -> float | None:
        """Power limit in W over a rate in GFLOP/s and the feature size of the process in nm; None if one is unknown."""
        return self.tdp_w / (gflops * self.process_nm) if gflops and self.tdp_w and self.process_nm else None

    def used(self, share: float | None = None, isa: str = "", cores_here: int | None = None) -> Device:
        """A share of this whole device, its code optionally restricted to an instruction set. ``share``: cores of a CPU (a
        whole number), fraction of a GPU (0 < share <= 1); None for all. ``cores_here``: cores of this machine, if this is its
        CPU; elsewhere a virtual CPU may have more cores than known. UnknownDeviceError: no such share or instruction set."""
        if self.kind == "gpu":
            return self._part_of_gpu(share, isa)
        return self._part_of_cpu(share, isa, cores_here)

    def _part_of_cpu(self, share: float | None, isa: str, cores_here: int | None) -> Device:
        share = share if share is not None else cores_here or self.cores
        if share is None:
            raise UnknownDeviceError(f"{self.name}: the number of its cores is unknown; say how many, as {self.name}@1")
        if not float(share).is_integer() or share < 1:
            raise UnknownDeviceError(f"{self.name}@{share:g}: the share of a CPU is a number of cores, 1 or more")
        if cores_here is not None and share > cores_here:
            raise UnknownDeviceError(f"{self.name}@{share:g}: this machine has {cores_here} cores")
        used, cores, mem_gb = int(share), self.cores, self.mem_gb
        if cores is not None and used > cores:
            if cores_here is None and not self.virtual:
                raise UnknownDeviceError(f"{self.name}@{share:g}: it has {cores} cores")
            cores, mem_gb = used, None
        simd_bits, fma, mcpu = self.simd_bits, self.fma, self.mcpu
        pipes = self.simd_pipes or ASSUMED_SIMD_PIPES
        if isa:
            isa_bits, isa_fma = ISAS[isa]
            if simd_bits is not None and isa_bits > simd_bits:
                raise UnknownDeviceError(f"{self.name}.{isa}: it has no {isa_bits}-bit vectors")
            if simd_bits is not None:  # what takes a cycle at full width may run twice a cycle at half of it
                pipes = min(ASSUMED_SIMD_PIPES, pipes * simd_bits // isa_bits)
            simd_bits, mcpu = isa_bits, isa
            fma = isa_fma if fma is None else fma and isa_fma
        lanes = self.lanes_per_core if not isa else None
        if lanes is None and simd_bits is not None:
            lanes = simd_bits // 32 * pipes
        peaks: dict[str, float] = {}
        if not isa and self.peak_gflops and cores:
            peaks = {name: peak * used / cores for name, peak in self.peak_gflops.items()}
        elif lanes is not None and self.working_mhz is not None and fma is not None:
            float32 = used * self.working_mhz / 1e3 * lanes * (2 if fma else 1)
            peaks = {"float32": float32, "float64": float32 / 2}
        target = {"kind": "llvm", "num-cores": used, "mcpu": mcpu, "mtriple": self.mtriple}
        return replace(
            self,
            name=f"{self.name}{f'.{isa}' if isa else ''}@{used}",
            base=self.name,
            share=float(used),
            cores=cores,
            cores_used=float(used),
            isa=isa,
            mcpu=mcpu,
            simd_bits=simd_bits,
            simd_pipes=pipes,
            fma=fma,
            lanes_per_core=lanes,
            mem_gb=mem_gb,
            peak_gflops=peaks,
            target={key: value for key, value in target.items() if value != ""},
        )

    def _part_of_gpu(self, share: float | None, isa: str) -> Device:
        share = 1.0 if share is None else share
        if isa:
            raise UnknownDeviceError(f"{self.name}.{isa}: only a CPU can be restricted to an instruction set")
        if not 0 < share <= 1:
            raise UnknownDeviceError(f"{self.name}@{share:g}: the share of a GPU is a fraction, above 0 and at most 1")
        peaks = dict(self.peak_gflops)
        if "float32" not in peaks and self.cores and self.lanes_per_core and self.clock_mhz:
            peaks["float32"] = 2 * self.cores * self.lanes_per_core * self.clock_mhz / 1e3
        return replace(
            self,
            name=self.name if share == 1 else f"{self.name}@{share:g}",
            base=self.name,
            share=float(share),
            cores_used=None if self.cores is None else max(1.0, round(self.cores * share)),
            fma=True if self.fma is None else self.fma,
            peak_gflops={name: peak * share for name, peak in peaks.items()},
            target=self._gpu_target(),
        )

    def _gpu_target(self) -> dict[str, Any]:
        limits = {
            "max_threads_per_block": self.max_threads_per_block or 1024,
            "max_shared_memory_per_block": int((self.max_shared_per_block_kb or 48) * 1024),
        }
        if self.mcpu.startswith("sm_"):
            return {"kind": "cuda", "arch": self.mcpu, **limits, "thread_warp_size": self.warp_size or 32}
        if self.mcpu.startswith("gfx"):
            return {"kind": "rocm", "mcpu": self.mcpu, **limits, "thread_warp_size": self.warp_size or 64}
        if self.vendor == "intel":
            return {"kind": "opencl", **limits, "thread_warp_size": self.warp_size or 1}
        return {}

    @property
    def share_fraction(self) -> float | None:
        """Share as a fraction of the whole device, 0 to 1."""
        if self.kind == "gpu":
            return self.share
        return self.share / self.cores if self.cores else None

    def differences(self, other: Device) -> list[str]:
        """The identifying facts that differ, as ``"arch zen3 / zen4"``. Facts that hypervisors vary do not count (model string,
        stepping, L3, memory, cores of a CPU). An unknown fact equals any other; clocks within 3 % are equal."""
        found = []
        for name in _GPU_IDENTITY if "gpu" in (self.kind, other.kind) else CPU_IDENTITY:
            mine, others = self._fact(name), other._fact(name)
            if name == "clock_mhz" and mine and others:
                same = abs(mine - others) <= _CLOCK_TOLERANCE * max(mine, others)
            else:
                same = mine == others or (name != "isa" and (mine in (None, "") or others in (None, "")))
            if not same:
                found.append(f"{name} {mine or 'all'} / {others or 'all'}")
        return found

    def _fact(self, name: str) -> Any:
        """An identifying fact by name; specifications stored by older versions have ``mcpu`` only in the target."""
        if name == "mcpu":
            return self.mcpu or self.target.get("mcpu") or self.target.get("arch")
        return getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "aliases": list(self.aliases), "sources": list(self.sources)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Device:
        """Inverse of :meth:`to_json`; unknown keys are ignored. TypeError: a fact is missing or has the wrong type."""
        kept = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for fact in fields(cls):
            wanted = _JSON_TYPES[str(fact.type).partition("[")[0].partition(" ")[0]]
            if not isinstance(kept.get(fact.name), wanted | None):
                raise TypeError(f"its {fact.name} is {kept[fact.name]!r:.40}")
        return cls(**{**kept, **{name: tuple(kept.get(name, ())) for name in ("aliases", "sources")}})


#: Type of a fact -> the Python types of its JSON value.
_JSON_TYPES: dict[str, Any] = {
    "str": str, "float": int | float, "int": int | float, "bool": bool, "tuple": list | tuple, "Mapping": dict | Mapping,
}  # fmt: skip
#: The facts that identify a CPU, and those that identify a GPU.
CPU_IDENTITY = (
    "kind", "vendor", "arch", "isa", "share", "mcpu", "simd_bits", "fma", "l1_kb", "l2_kb", "clock_mhz",
)  # fmt: skip
_GPU_IDENTITY = ("kind", "vendor", "arch", "share", "mcpu", "cores")

#: Relative tolerance: hypervisors report slightly different nominal clocks for the same CPU.
_CLOCK_TOLERANCE = 0.03


def _compute_capability(device: Device) -> float | None:
    """``sm_86`` -> 8.6; None for devices that have none."""
    arch = str(device.target.get("arch", ""))
    digits = arch.removeprefix("sm_").rstrip("af")
    if device.vendor != "nvidia" or not arch.startswith("sm_") or not digits.isdigit():
        return None
    return int(digits) / 10


#: Features that are computed from a device instead of read from the field of that name.
_COMPUTED: dict[str, Callable[[Device], float | None]] = {
    "is_cpu": lambda d: d.kind == "cpu",
    "is_gpu": lambda d: d.kind == "gpu",
    "clock_mhz": lambda d: d.working_mhz,
    "peak_float32_gflops": lambda d: d.peak_gflops.get("float32"),
    "peak_float64_gflops": lambda d: d.peak_gflops.get("float64"),
    "peak_float16_gflops": lambda d: d.peak_gflops.get("float16"),
    # without 4-bit peaks, which the shipped weights were not trained with
    "peak_matrix_gflops": lambda d: max(
        (p for name, p in d.peak_gflops.items() if name.endswith("_matrix") and "float4" not in name), default=None
    ),
    "bytes_per_flop": lambda d: d.bandwidth_gb_s / p if (p := d.peak_gflops.get("float32")) and d.bandwidth_gb_s else None,
    "is_nvidia": lambda d: d.vendor == "nvidia",
    "is_amd": lambda d: d.vendor == "amd",
    "compute_capability": _compute_capability,
    # From Volta on NVIDIA's libraries have other kernels: their matrix products share no tile size or stride limit with
    # Pascal's (NVIDIA, Volta tuning guide: one L1 and shared memory, independently scheduled threads)
    "volta_or_later": lambda d: (_compute_capability(d) or 0.0) >= 7.0,
}

#: Names of the device features, in the order of the vector. The values are raw and positive, so that a logarithm suits all but
#: the flags; units are as in the names.
DEVICE_FEATURES: tuple[str, ...] = (
    "is_cpu", "is_gpu", "share_fraction", "cores", "cores_used", "clock_mhz", "simd_bits", "fma", "lanes_per_core",
    "warp_size", "max_threads_per_core", "registers_per_core", "l1_kb", "l2_kb", "l3_kb", "shared_kb", "mem_gb",
    "bandwidth_gb_s", "peak_float32_gflops", "peak_float64_gflops", "peak_float16_gflops", "peak_matrix_gflops",
    "bytes_per_flop", "tdp_w", "process_nm", "launch_overhead_us", "is_nvidia", "is_amd", "compute_capability",
    "volta_or_later",
)  # fmt: skip

#: The device features that a network gets for a GPU that it was never trained on: those that many GPUs share. The others
#: identify the few GPUs of a training set as a name would; where a new GPU lies between these says little.
GENERAL_DEVICE_FEATURES = frozenset(
    {"is_cpu", "is_gpu", "share_fraction", "is_nvidia", "is_amd", "compute_capability", "volta_or_later"}
)


def device_features(device: Device) -> np.ndarray:
    """Raw features of a device, float32, shape ``(len(DEVICE_FEATURES),)``; NaN where unknown."""
    values = [_COMPUTED[name](device) if name in _COMPUTED else getattr(device, name) for name in DEVICE_FEATURES]
    return np.array(values, dtype=np.float32)  # None becomes NaN
