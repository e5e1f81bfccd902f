"""Micro-benchmarks of this machine, some twenty seconds, for what a specification leaves out or overstates: memory bandwidth,
peak arithmetic, the rates of one core, and the cost of a call (as MAPLE, Abbasi et al. 2022, describes devices)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cdmpp.device import Device, DeviceTable
from cdmpp.device.spec import CPU_IDENTITY
from cdmpp.device.table import normalise
from cdmpp.errors import CdmppError, UnknownDeviceError
from cdmpp.profiler.core_rates import core_rates

#: Seconds that one benchmark may take.
_BUDGET_S = 0.4
#: Every result is the best of at least this many runs, as other programs on the machine only make it slower.
_RUNS = 5
#: Bytes of the arrays for memory bandwidth: larger than every last-level cache, smaller than every memory.
_STREAM_BYTES, _GPU_STREAM_BYTES = 96 << 20, 512 << 20
#: Rows and columns of the matrices.
_SIDE, _GPU_SIDE = 1024, 4096
#: Launches in a row, from which the cost of one is computed.
_LAUNCHES = 2000
#: Bandwidth and peak are dropped if this process was given less than this share of the cores.
_GIVEN = 0.6
#: Measured quantity -> field of the device's row that it fills in if the table has no value.
_FILLS = {
    "copy_gb_s": "bandwidth_gb_s",
    "launch_us": "launch_overhead_us",
    **{name: name for name in ("l2_kb", "cores", "mem_gb", "clock_mhz", "max_threads_per_core", "shared_kb")},
}


@dataclass(frozen=True)
class MeasuredDevice:
    """A device of this machine, and what was measured of it."""

    #: A row for a device file: it has the fields that the table lacks, and all results under ``measured``.
    row: Device
    #: The device's row in the table; None if it has none.
    known: Device | None
    #: Quantity -> value; the unit is in the name.
    results: dict[str, float]
    #: What could not be measured, and why.
    skipped: tuple[str, ...] = ()


def measure_machine(table: DeviceTable) -> list[MeasuredDevice]:
    """Measure this machine's CPU, and its GPU if torch can use one."""
    return [device for device in [measure_cpu(table), measure_gpu(table)] if device is not None]


def measure_cpu(table: DeviceTable) -> MeasuredDevice:
    """Measure the CPU, with all cores that this process may use."""
    here = table.this_cpu
    if here is None:
        raise UnknownDeviceError("this machine's CPU is not in the table")
    skipped: list[str] = []
    results, given = _streams(here.cores or 1)
    if given < _GIVEN:
        results = {}
        skipped.append(f"bandwidth and peak: other work on this machine left {100 * given:.0f} % of the cores")
    try:
        rates, unsteady = core_rates(here)
        results |= rates
        skipped += unsteady
    except CdmppError as error:
        skipped.append(f"rates of a core: {error}")
    try:
        cores = here.cores or 1
        threads = {n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores}
        results |= {f"parallel_{n}_us": 1e6 * _launch_s(n) for n in sorted(threads)}
        results["launch_us"] = 1e6 * _launch_s(cores)
    except CdmppError as error:
        skipped.append(f"call overhead: {error}")
    identity = {fact: getattr(here, fact) for fact in CPU_IDENTITY if fact not in ("kind", "isa", "share")}
    return as_row(table, here.name, "cpu", results, skipped, **identity)


def _streams(cores: int) -> tuple[dict[str, float], float]:
    """Bandwidth of a copy, and the rate of a float32 matrix product, by torch on all cores; and the share of the cores'
    time that this process was given meanwhile."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    began_s, used_s = time.perf_counter(), time.process_time()
    try:
        a, b = (torch.ones(_STREAM_BYTES // 4) for _ in range(2))
        copy_s = best_s(lambda: b.copy_(a))
        x, y, z = (torch.ones(_SIDE, _SIDE) for _ in range(3))
        product_s = best_s(lambda: torch.mm(x, y, out=z))
    finally:
        torch.set_num_threads(threads)
    given = (time.process_time() - used_s) / (time.perf_counter() - began_s) / cores
    results = {
        "copy_gb_s": 2 * _STREAM_BYTES / copy_s / 1e9,
        "float32_gflops": 2 * _SIDE**3 / product_s / 1e9,
        "cores": float(cores),
    }
    return results, given


def best_s(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Shortest of several runs, in seconds, after one run that is not counted."""
    run()
    best, spent, runs = math.inf, 0.0, 0
    while (runs < _RUNS or spent < _BUDGET_S) and spent <= 4 * _BUDGET_S:
        start = clock()
        run()
        took = clock() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _launch_s(cores: int) -> float:
    """Seconds of a call of a kernel that stores one number on every core (CdmppError without TVM)."""
    import numpy as np

    from cdmpp.program import import_tvm
    from cdmpp.program.kernels import block, function, loops, script

    tvm, T = import_tvm(), script()
    with (
        function(out=((cores,), "float32")) as ((out,), made),
        loops(T.parallel(cores)) as (i,),
        block("store", [(cores, i)]) as (k,),
    ):
        T.buffer_store(out, T.float32(0.0), [k])
    target = tvm.target.Target({"kind": "llvm", "num-cores": cores})
    kernel = tvm.compile(tvm.IRModule({"main": made()}), target)
    timer = kernel.mod.time_evaluator("main", tvm.cpu(), number=200, repeat=2)
    return float(min(timer(tvm.runtime.tensor(np.zeros(cores, dtype=np.float32))).results))


def as_row(
    table: DeviceTable, name: str, kind: str, results: dict[str, float], skipped: Sequence[str] = (), **more: Any
) -> MeasuredDevice:
    """A measured device as a row of a device file: the fields that the table lacks, all results, and ``more`` facts."""
    known = table.find(name)
    found: dict[str, Any] = {**more} if known else {"model": name, **more}
    for quantity, field in _FILLS.items():
        if quantity in results and field not in found and (known is None or getattr(known, field) is None):
            whole = field in ("cores", "max_threads_per_core")
            found[field] = round(results[quantity]) if whole else float(f"{results[quantity]:.4g}")
    measured = {quantity: float(f"{value:.4g}") for quantity, value in results.items()}
    if known is None and "float32_gflops" in results:
        found["peak_gflops"] = {"float32": measured["float32_gflops"]}
    source = "; ".join((*(known.sources if known else ()), "measured: cdmpp devices --measure"))
    own_name = known.name if known else normalise(name)
    row = Device(own_name, kind, measured=measured, sources=(source,), **found)
    return MeasuredDevice(row, known, results, tuple(skipped))


def measure_gpu(table: DeviceTable) -> MeasuredDevice | None:
    """Measure the first GPU that torch can use (CUDA or ROCm); None if there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    found: Any = torch.cuda.get_device_properties(0)
    results = {"cores": float(found.multi_processor_count), "mem_gb": found.total_memory / 2**30}
    for name, quantity, unit in (
        ("L2_cache_size", "l2_kb", 1024.0), ("max_threads_per_multi_processor", "max_threads_per_core", 1.0),
        ("shared_memory_per_multiprocessor", "shared_kb", 1024.0), ("clock_rate", "clock_mhz", 1000.0),
    ):  # fmt: skip
        if getattr(found, name, 0):
            results[quantity] = getattr(found, name) / unit
    results |= _gpu_rates("cuda", _gpu_seconds)
    if torch.version.hip:
        return as_row(table, found.name, "gpu", results, vendor="amd", mcpu=found.gcnArchName.partition(":")[0])
    return as_row(table, found.name, "gpu", results, vendor="nvidia", mcpu=f"sm_{found.major}{found.minor}")


def _gpu_rates(where: str, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Bandwidth of a copy, rates of matrix products, and the cost of a launch, on the torch device `where`."""
    import torch

    a = torch.ones(_GPU_STREAM_BYTES // 4, device=where)
    b = torch.empty_like(a)
    results = {"copy_gb_s": 2 * _GPU_STREAM_BYTES / seconds(lambda: b.copy_(a)) / 1e9}
    switch = torch.backends.cuda.matmul
    before = switch.allow_tf32
    for quantity, dtype, tf32 in (
        ("float32_gflops", torch.float32, False), ("tfloat32_matrix_gflops", torch.float32, True),
        ("float16_matrix_gflops", torch.float16, False),
    ):  # fmt: skip
        x, y = (torch.ones(_GPU_SIDE, _GPU_SIDE, device=where, dtype=dtype) for _ in range(2))
        switch.allow_tf32 = tf32
        results[quantity] = 2 * _GPU_SIDE**3 / seconds(partial(torch.mm, x, y)) / 1e9
    switch.allow_tf32 = before
    one = torch.ones(1, device=where)

    def many() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    results["launch_us"] = 1e6 * seconds(many) / _LAUNCHES
    return results


def _gpu_seconds(run: Callable[[], Any]) -> float:
    """Shortest of several runs by the GPU's own clock, in seconds, after one run that is not counted."""
    from torch import cuda

    times_ms = []
    run()
    for _ in range(_RUNS):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    return float(min(times_ms)) / 1e3
