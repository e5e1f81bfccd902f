"""Refusing device rows whose numbers cannot be: mostly a unit that is off by 1000.

Each field has a range around everything that exists, with room; two ratios tell what ranges are too wide for: the balance
of arithmetic and memory, and the stated peak against lanes and clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.errors import UnknownDeviceError

if TYPE_CHECKING:
    from cdmpp.device.row import DeviceRow

#: Field -> lowest and highest value, of a CPU and of a GPU, and the unit for people.
_RANGES: dict[str, tuple[tuple[float, float], tuple[float, float], str]] = {
    "clock_mhz": ((100, 10_000), (100, 10_000), "MHz"),
    "cores": ((1, 4096), (1, 4096), "cores, SMs or CUs"),
    "lanes_per_core": ((1, 1024), (4, 1024), "lanes"),
    "simd_bits": ((32, 4096), (32, 4096), "bits"),
    "l1_kb": ((1, 2048), (1, 2048), "KB of one core"),
    "l2_kb": ((16, 262_144), (16, 1_048_576), "KB (of one core of a CPU, of the whole GPU)"),
    "l3_kb": ((256, 8_388_608), (256, 8_388_608), "KB of the whole device"),
    "shared_kb": ((1, 1024), (1, 1024), "KB of one SM"),
    "max_shared_per_block_kb": ((1, 1024), (1, 1024), "KB of one block"),
    "mem_gb": ((0.03, 65_536), (0.1, 4096), "GB"),
    "bandwidth_gb_s": ((0.5, 10_000), (5, 100_000), "GB/s"),
    "tdp_w": ((0.5, 5000), (1, 20_000), "W"),
    "process_nm": ((0.5, 1000), (0.5, 1000), "nm"),
    "launch_overhead_us": ((0.001, 1000), (0.2, 1000), "microseconds"),
}

#: GFLOP/s per GB/s of what exists: 7 (A64FX) to 105 (A40, L40S).
_BALANCE = (0.7, 1500.0)
#: Stated float32 peak over lanes times clock: 1 with multiply-add counted as one, 2 as two, others by other clocks.
_PEAK_RATIO = (0.05, 20.0)


def check_plausible(row: DeviceRow, where: str = "") -> None:
    """Refuse numbers that no device has. Missing ones are fine.

    Parameters
    ----------
    where
        What comes before the row's name in the message, such as the file.

    Raises
    ------
    UnknownDeviceError
        The message names the row, the field, its value and what was expected.
    """
    who = f"{where}: {row.name}" if where else row.name
    for field, (cpu, gpu, unit) in _RANGES.items():
        value = getattr(row, field)
        low, high = gpu if row.kind == "gpu" else cpu
        if value is not None and not low <= value <= high:
            raise UnknownDeviceError(
                f"{who}: {field} is {value:g}, expected {low:g} to {high:g} {unit}: is the unit off by 1000?"
            )
    peak = row.peak_gflops.get("float32")
    lanes = row.lanes_per_core
    if lanes is None and row.simd_bits is not None:
        lanes = row.simd_bits // 32 * (row.simd_pipes or 2)
    computed = 2 * row.cores * lanes * row.clock_mhz / 1e3 if row.cores and lanes and row.clock_mhz else None
    if peak and computed and not _PEAK_RATIO[0] <= peak / computed <= _PEAK_RATIO[1]:
        raise UnknownDeviceError(
            f"{who}: peak_gflops.float32 is {peak:g}, but cores, lanes and clock make {computed:.3g} GFLOP/s: is a "
            f"unit off by 1000?"
        )
    peak = peak or computed
    if peak and row.bandwidth_gb_s and not _BALANCE[0] <= peak / row.bandwidth_gb_s <= _BALANCE[1]:
        raise UnknownDeviceError(
            f"{who}: a float32 peak of {peak:g} GFLOP/s with a bandwidth_gb_s of {row.bandwidth_gb_s:g} fits no device: "
            f"is a unit off by 1000?"
        )


def missing_fields(row: DeviceRow) -> tuple[str, ...]:
    """Fields that predictions would use and the row leaves open, in the order of the row."""
    shared = ("clock_mhz", "cores", "l1_kb", "l2_kb", "mem_gb", "bandwidth_gb_s")
    own = (
        ("lanes_per_core", "shared_kb", "registers_per_core", "warp_size", "max_threads_per_core")
        if row.kind == "gpu"
        else ("simd_bits", "fma", "l3_kb")
    )
    wanted = {*shared, *own}
    missing = [field for field in type(row).model_fields if field in wanted and getattr(row, field) is None]
    if row.peak_gflops.get("float32") is None and {"clock_mhz", "cores", "lanes_per_core", "simd_bits"} & set(
        missing
    ):
        missing.append("peak_gflops.float32")
    return tuple(missing)
