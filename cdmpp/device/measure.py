"""Micro-benchmarks of the machine at hand: what a specification does not say, or says too well.

What a kernel's time depends on, measured as simply as it can be (MAPLE, Abbasi et al. 2022, describes devices by such
measurements): memory bandwidth, peak arithmetic, what a call costs, and where the caches end. Some seconds in all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.device.row import DeviceRow
from cdmpp.device.table import DeviceTable, load_table, normalise
from cdmpp.errors import CdmppError, UnknownDeviceError

#: Seconds that one benchmark may take.
_BUDGET_S = 0.4
#: Every result is the best of at least so many runs: others on the machine only ever make it slower.
_RUNS = 5
#: Bytes of the arrays for memory bandwidth: beyond every last-level cache, within every memory.
_STREAM_BYTES = 96 << 20
#: Working sets of the pointer chase.
_CHASE_KB = tuple(2**k for k in range(2, 17)) + tuple(3 * 2**k for k in range(2, 15))
#: Rounds of the pointer chase.
_ROUNDS = 3
#: Bandwidth and peak say nothing where this process was given less of the cores.
_GIVEN = 0.6
#: A cache ends where a load takes this many times as long as within it; beyond, latencies climb by more than this.
_STEP, _CLIMB = 1.6, 1.15

#: Measured quantity -> field of the row that it fills in where the table leaves it open.
_FILLS = {
    "copy_gb_s": "bandwidth_gb_s",
    "launch_us": "launch_overhead_us",
    "l1_kb": "l1_kb",
    "l2_kb": "l2_kb",
    "l3_kb": "l3_kb",
    "cores": "cores",
    "mem_gb": "mem_gb",
    "clock_mhz": "clock_mhz",
    "max_threads_per_core": "max_threads_per_core",
    "shared_kb": "shared_kb",
}


@dataclass(frozen=True)
class MeasuredDevice:
    """A device of this machine as measured.

    Attributes
    ----------
    row
        A row for a device file: it fills in what the table leaves open, and has all results under ``measured``.
    known
        The table's row of the device; None for one that is not in the table.
    results
        Quantity -> value; the unit is in the name.
    skipped
        What could not be measured, and why.
    """

    row: DeviceRow
    known: DeviceRow | None
    results: dict[str, float]
    skipped: tuple[str, ...] = ()


def measure_machine(table: DeviceTable | None = None) -> list[MeasuredDevice]:
    """Measure this machine's CPU, and its GPU where torch or cupy reaches one."""
    from cdmpp.device.measure_gpu import measure_gpu

    table = table or load_table()
    devices = [measure_cpu(table)]
    gpu = measure_gpu()
    if gpu is not None:
        name, arch, results, skipped = gpu
        devices.append(
            as_row(table, name, "gpu", results, skipped, vendor="nvidia" if arch else "", mcpu=arch)
        )
    return devices


def measure_cpu(table: DeviceTable | None = None) -> MeasuredDevice:
    """Measure the CPU, with all cores that this process may use."""
    table = table or load_table()
    here = table.this_cpu
    if here is None:
        raise UnknownDeviceError("this machine's CPU is not in the table")
    results: dict[str, float] = {}
    skipped: list[str] = []
    streams, given = _streams(here.cores or 1)
    if given < _GIVEN:
        skipped.append(
            f"bandwidth and peak: other work on this machine left {100 * given:.0f} % of the cores"
        )
    else:
        results.update(streams)
    try:
        from cdmpp.device.measure_tvm import CpuKernels

        kernels = CpuKernels(here.cores or 1, max(_CHASE_KB))
    except CdmppError as error:
        skipped.append(f"caches and call overhead: {error}")
    else:
        results["launch_us"] = 1e6 * kernels.launch_s()
        # Rounds over all sizes, so that what disturbs one round does not disturb a size.
        rounds = [[kernels.load_s(kb) for kb in sorted(_CHASE_KB)] for _ in range(_ROUNDS)]
        best = [1e9 * min(of_size) for of_size in zip(*rounds, strict=True)]
        results.update(cache_levels(list(zip(sorted(_CHASE_KB), best, strict=True))))
    return as_row(table, here.name, "cpu", results, skipped)


def _streams(cores: int) -> tuple[dict[str, float], float]:
    """Bandwidth of a copy and of a sum, and the rate of a float32 matrix product, by torch with all cores; and which part
    of the cores this process was given meanwhile."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    began_s, used_s = time.perf_counter(), time.process_time()
    try:
        n = _STREAM_BYTES // 4
        a, b, c = (torch.ones(n) for _ in range(3))
        copy_s = best_s(lambda: c.copy_(a))
        triad_s = best_s(lambda: torch.add(a, b, alpha=2.0, out=c))
        size = 1024
        x, y, z = (torch.ones(size, size) for _ in range(3))
        product_s = best_s(lambda: torch.mm(x, y, out=z))
    finally:
        torch.set_num_threads(threads)
    given = (time.process_time() - used_s) / (time.perf_counter() - began_s) / cores
    results = {
        "copy_gb_s": 2 * _STREAM_BYTES / copy_s / 1e9,
        "triad_gb_s": 3 * _STREAM_BYTES / triad_s / 1e9,
        "float32_gflops": 2 * size**3 / product_s / 1e9,
        "cores": float(cores),
    }
    return results, given


def best_s(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Shortest of several runs, in seconds, after one that does not count."""
    run()
    best, spent, runs = math.inf, 0.0, 0
    while runs < _RUNS or spent < _BUDGET_S:
        start = clock()
        run()
        took = clock() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
        if spent > 4 * _BUDGET_S:
            break
    return best


def cache_levels(chase: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Sizes and latencies of caches from a pointer chase.

    Parameters
    ----------
    chase
        Working set in KB and nanoseconds of a dependent load, by increasing size.

    Returns
    -------
    ``l1_kb``, ``l1_ns``, ``l2_kb``, ``l2_ns``, ``l3_kb``, ``l3_ns`` as far as there are steps, and ``memory_ns``: a level
    ends at the largest working set before loads take :data:`_STEP` times as long as its fastest one, which is its
    latency; the next begins where latencies stop climbing. Memory is the largest working set.
    """
    # A larger working set is never faster: what is slower than a larger one was disturbed.
    loads = list(itertools.accumulate((ns for _, ns in reversed(chase)), min))[::-1]
    chase = [(kb, ns) for (kb, _), ns in zip(chase, loads, strict=True)]
    result: dict[str, float] = {}
    start = 0
    for level in (1, 2, 3):
        lowest, end = chase[start][1], start + 1
        while end < len(chase) and chase[end][1] <= _STEP * lowest:
            lowest = min(lowest, chase[end][1])
            end += 1
        if end == len(chase):
            break
        result[f"l{level}_kb"], result[f"l{level}_ns"] = float(chase[end - 1][0]), float(lowest)
        while end + 1 < len(chase) and chase[end + 1][1] > _CLIMB * chase[end][1]:
            end += 1
        start = end
    result["memory_ns"] = float(chase[-1][1])
    return result


def as_row(
    table: DeviceTable,
    name: str,
    kind: str,
    results: dict[str, float],
    skipped: Sequence[str] = (),
    **more: str,
) -> MeasuredDevice:
    """A device file's row of what was measured of a device."""
    key = normalise(name)
    known = next(
        (row for row in table.rows if key in (row.name, *map(normalise, (row.model, *row.aliases)))), None
    )
    fields: dict[str, Any] = {"name": known.name if known else key, "kind": kind}
    if known is None:
        fields.update({field: value for field, value in more.items() if value}, model=name)
    for quantity, field in _FILLS.items():
        open_ = known is None or getattr(known, field) is None
        if quantity in results and open_ and field not in fields:
            whole = field in ("cores", "max_threads_per_core")
            fields[field] = round(results[quantity]) if whole else float(f"{results[quantity]:.4g}")
    if known is None and "float32_gflops" in results:
        fields["peak_gflops"] = {"float32": float(f"{results['float32_gflops']:.4g}")}
    fields["measured"] = {quantity: float(f"{value:.4g}") for quantity, value in results.items()}
    source = "measured: cdmpp devices --measure"
    fields["source"] = f"{known.source}; {source}" if known and known.source else source
    return MeasuredDevice(DeviceRow.model_validate(fields), known, results, tuple(skipped))


def write_row(rows: Sequence[DeviceRow], path: str | Path) -> None:
    """Write rows as a device file (UnknownDeviceError if it cannot be written)."""
    import yaml

    content = [row.model_dump(mode="json", exclude_unset=True) for row in rows]
    try:
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UnknownDeviceError(f"cannot write {path}: {error.strerror}") from error
