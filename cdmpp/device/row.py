"""A row of the device table, as users and table.yaml write it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

#: Data types that ``peak_gflops`` may name.
PeakName = Literal[
    "float64", "float32", "float16", "bfloat16", "int8", "float64_matrix", "float32_matrix",
    "tfloat32_matrix", "float16_matrix", "bfloat16_matrix", "float8_matrix", "int8_matrix",
]  # fmt: skip


class DeviceRow(BaseModel):
    """Facts about a whole device, unrestricted. Every field but ``name`` and ``kind`` may be missing.

    The fields are those of :class:`cdmpp.device.spec.Device`, and

    Attributes
    ----------
    aliases
        Other names, such as the model string that a driver reports.
    mcpu
        LLVM's name of the CPU, or of the GPU: ``cascadelake``, ``sm_90``, ``gfx90a``.
    mtriple
        LLVM target triple; needed for a CPU of another instruction set than this machine's.
    simd_pipes
        Vector instructions that one CPU core starts per cycle.
    max_shared_per_block_kb, max_threads_per_block
        Limits of one GPU block without opting in to more.
    measured
        What micro-benchmarks found (:mod:`cdmpp.device.measure`), the unit in the name: ``copy_gb_s``,
        ``float32_gflops``, ``launch_us``, ``l1_ns``, ...
    source
        Where the numbers are from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, allow_inf_nan=False)

    name: str = Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9._+-]*$")
    kind: Literal["cpu", "gpu"]
    aliases: tuple[str, ...] = ()
    vendor: str = ""
    model: str = ""
    arch: str = ""
    mcpu: str = ""
    mtriple: str = ""
    clock_mhz: PositiveFloat | None = None
    cores: PositiveInt | None = None
    lanes_per_core: PositiveInt | None = None
    simd_bits: PositiveInt | None = None
    simd_pipes: PositiveInt | None = None
    fma: bool | None = None
    l1_kb: PositiveFloat | None = None
    l2_kb: PositiveFloat | None = None
    l3_kb: PositiveFloat | None = None
    shared_kb: PositiveFloat | None = None
    max_shared_per_block_kb: PositiveFloat | None = None
    registers_per_core: PositiveInt | None = None
    warp_size: PositiveInt | None = None
    max_threads_per_core: PositiveInt | None = None
    max_threads_per_block: PositiveInt | None = None
    mem_gb: PositiveFloat | None = None
    bandwidth_gb_s: PositiveFloat | None = None
    tdp_w: PositiveFloat | None = None
    process_nm: PositiveFloat | None = None
    peak_gflops: dict[PeakName, PositiveFloat] = Field(default_factory=dict)
    launch_overhead_us: PositiveFloat | None = None
    virtual: bool | None = None
    measured: dict[str, PositiveFloat] = Field(default_factory=dict)
    source: str = ""
