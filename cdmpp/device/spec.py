"""Device: a piece of hardware as it is used, with what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Device:
    """A named piece of hardware and the share of it that a program gets. None means unknown.

    Attributes
    ----------
    name
        Canonical: ``base[.isa][@share]``, such as ``xeon-cascadelake-2.5ghz.x86-64-v2@1``, ``h200`` or
        ``h200@0.5``.
    base
        The hardware without restriction and share.
    kind
        ``"cpu"`` or ``"gpu"``.
    vendor
        ``intel``, ``amd``, ``arm``, ``nvidia``, ...
    model
        What the hardware calls itself.
    share
        Cores (CPU) or fraction of the SMs (GPU, at most 1).
    cores, cores_used
        Cores, SMs or CUs of the whole, and of the share.
    isa
        An instruction set that the code is restricted to (``x86-64-v2``); "" for all that the CPU has.
    arch
        Microarchitecture: ``cascadelake``, ``hopper``, ``cdna2``.
    clock_mhz
        Nominal clock of a CPU, boost clock of a GPU.
    simd_bits
        Vector width of a CPU as restricted.
    fma
        Whether a multiply-add is one instruction.
    lanes_per_core
        fp32 operations that one core starts per cycle (a multiply-add counts once): CPU pipes x vector
        lanes, GPU lanes per SM.
    l1_kb
        Data cache of one core or SM. NVIDIA since Volta: L1 and shared memory together.
    l2_kb
        CPU: of one core. GPU: of the whole device.
    l3_kb
        Last-level cache of the whole device.
    shared_kb
        Shared memory (LDS) of one SM (CU) that programs can use.
    registers_per_core
        32-bit registers of one SM.
    warp_size, max_threads_per_core
        GPU only.
    mem_gb, bandwidth_gb_s
        Memory of the whole device; a share keeps both, as one core may use more than its part.
    tdp_w
        Power that the whole device (the package of a CPU, the board of a GPU) may draw for long.
    process_nm
        Manufacturing process, as marketed: with the power it tells how much of the peak can be sustained.
    peak_gflops
        Peak by data type *of the share*: ``float32``, ``float16``, ``float64``, and ``..._matrix`` for
        matrix units (``tfloat32_matrix``, ``float16_matrix``), dense.
    launch_overhead_us
        Cost of starting one kernel.
    virtual
        Whether it is seen through a hypervisor.
    measured
        What micro-benchmarks of the whole device found, the unit in the name.
    target
        Dictionary for ``tvm.target.Target``; empty where we know none.
    sources
        Where the numbers are from.
    """

    name: str
    base: str
    kind: str
    vendor: str
    model: str
    share: float
    cores: int | None = None
    cores_used: float | None = None
    isa: str = ""
    arch: str = ""
    clock_mhz: float | None = None
    simd_bits: int | None = None
    fma: bool | None = None
    lanes_per_core: int | None = None
    l1_kb: float | None = None
    l2_kb: float | None = None
    l3_kb: float | None = None
    shared_kb: float | None = None
    registers_per_core: int | None = None
    warp_size: int | None = None
    max_threads_per_core: int | None = None
    mem_gb: float | None = None
    bandwidth_gb_s: float | None = None
    tdp_w: float | None = None
    process_nm: float | None = None
    peak_gflops: Mapping[str, float] = field(default_factory=dict)
    launch_overhead_us: float | None = None
    virtual: bool | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def differences(self, other: Device) -> list[str]:
        """What says that two specifications are not of one device, such as ``"arch zen3 / zen4"``; empty if nothing does.

        See :func:`identity_differences`.
        """
        mine, others = (
            {**vars(d), "code": d.target.get("mcpu") or d.target.get("arch")} for d in (self, other)
        )
        return identity_differences(mine, others)

    @property
    def share_fraction(self) -> float | None:
        """Share as a fraction of the whole device, 0 to 1."""
        if self.kind == "gpu":
            return self.share
        return self.share / self.cores if self.cores else None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **asdict(self),
            "peak_gflops": dict(self.peak_gflops),
            "measured": dict(self.measured),
            "target": dict(self.target),
            "sources": list(self.sources),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Device:
        """Inverse of :meth:`to_json`; unknown keys are ignored."""
        known = {f.name for f in fields(cls)}
        kept = {key: item for key, item in value.items() if key in known}
        return cls(**{**kept, "sources": tuple(kept.get("sources", ()))})


#: What makes a CPU, or a GPU, the device that it is. Stepping, L3, memory and the number of cores of a CPU are not among
#: it: hypervisors vary them.
_CPU_IDENTITY = (
    "kind", "vendor", "arch", "isa", "share", "code", "simd_bits", "fma", "l1_kb", "l2_kb", "clock_mhz",
)  # fmt: skip
_GPU_IDENTITY = ("kind", "vendor", "arch", "share", "code", "cores")

#: Hypervisors tell the same nominal clock a little differently.
_CLOCK_TOLERANCE = 0.03


def identity_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The facts that make a device what it is and that two descriptions give differently, as ``"name one / other"``.

    Parameters
    ----------
    one, other
        Fields of :class:`Device`, and ``code``: what a compiler is told to make code for. Unknown ones (None, "" or missing)
        differ from nothing; clocks within 3 % are equal.
    """
    found = []
    for name in _GPU_IDENTITY if "gpu" in (one.get("kind"), other.get("kind")) else _CPU_IDENTITY:
        a, b = one.get(name), other.get(name)
        if name == "isa":  # "" is an instruction set, too: all that the CPU has
            same = a is None or b is None or a == b
        elif a in (None, "") or b in (None, ""):
            same = True
        elif name == "clock_mhz":
            same = abs(a - b) <= _CLOCK_TOLERANCE * max(a, b)
        else:
            same = a == b
        if not same:
            found.append(f"{name} {a or 'all'} / {b or 'all'}")
    return found
