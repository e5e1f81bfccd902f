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
from typing import Any

from cdmpp.device import Device, DeviceTable, load_table
from cdmpp.device.table import normalise
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

    row: Device
    known: Device | None
    results: dict[str, float]
    skipped: tuple[str, ...] = ()


def measure_machine(table: DeviceTable | None = None) -> list[MeasuredDevice]:
    """Measure this machine's CPU, and its GPU where torch reaches one."""
    table = table or load_table()
    devices = [measure_cpu(table)]
    gpu = measure_gpu()
    if gpu is not None:
        name, arch, results = gpu
        vendor = "nvidia" if arch.startswith("sm_") else "amd"
        devices.append(as_row(table, name, "gpu", results, vendor=vendor, mcpu=arch))
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
    """A device file's row of what was measured of a device: what the table leaves open, and all results."""
    known = table.find(name)
    found: dict[str, Any] = {} if known else {"model": name, **more}
    for quantity, field in _FILLS.items():
        if quantity in results and field not in found and (known is None or getattr(known, field) is None):
            whole = field in ("cores", "max_threads_per_core")
            found[field] = round(results[quantity]) if whole else float(f"{results[quantity]:.4g}")
    if known is None and "float32_gflops" in results:
        found["peak_gflops"] = {"float32": float(f"{results['float32_gflops']:.4g}")}
    source = "; ".join((*(known.sources if known else ()), "measured: cdmpp devices --measure"))
    measured = {quantity: float(f"{value:.4g}") for quantity, value in results.items()}
    row = Device(
        known.name if known else normalise(name), kind, measured=measured, sources=(source,), **found
    )
    return MeasuredDevice(row, known, results, tuple(skipped))


#: Dependent loads of one run: long against the call, short for a person.
_LOADS = 1 << 15
_CHASE_RUNS = 2
_LINE_BYTES = 64


class CpuKernels:
    """The kernels, compiled by TVM for this CPU.

    Parameters
    ----------
    cores
        Cores that a parallel call starts.
    max_kb
        Largest working set.

    Raises
    ------
    CdmppError
        TVM is not installed.
    """

    def __init__(self, cores: int, max_kb: int) -> None:
        import numpy as np

        from cdmpp.program.tvm_env import import_tvm

        self._tvm = import_tvm()
        self._cores = cores
        self._next = np.zeros(max_kb * 1024 // 4, dtype=np.int32)
        self._rng = np.random.default_rng(0)
        self._run_chase = self._compile(self._chase())
        self._run_nothing = self._compile(self._nothing())

    def load_s(self, kb: int) -> float:
        """Seconds of a load that waits for the one before, in a working set of so many KB, in random order."""
        import numpy as np

        step = _LINE_BYTES // 4
        lines = kb * 1024 // _LINE_BYTES
        order = self._rng.permutation(lines).astype(np.int32) * step
        self._next[order] = np.roll(order, -1)
        table, out = self._tensor(self._next), self._tensor(np.zeros(1, dtype=np.int32))
        best = float("inf")
        for _ in range(1 + _CHASE_RUNS):
            start = time.thread_time()  # so that time given to others does not count
            self._run_chase(table, out)
            best = min(best, time.thread_time() - start)
        return best / _LOADS

    def launch_s(self) -> float:
        """Seconds of a call of a kernel that stores one number on every core."""
        import numpy as np

        out = self._tensor(np.zeros(self._cores, dtype=np.float32))
        timer = self._run_nothing.mod.time_evaluator("main", self._tvm.cpu(), number=200, repeat=_CHASE_RUNS)
        return float(min(timer(out).results))

    def _tensor(self, array: Any) -> Any:
        return self._tvm.runtime.tensor(array, device=self._tvm.cpu())

    def _compile(self, func: Any) -> Any:
        target = self._tvm.target.Target({"kind": "llvm", "num-cores": self._cores})
        return self._tvm.compile(self._tvm.IRModule({"main": func}), target)

    def _chase(self) -> Any:
        from cdmpp.program.kernels import block, function, loops, script

        T = script()
        with function({"next": (self._next.shape, "int32"), "out": ((1,), "int32")}) as ((table, out), made):
            place = T.sblock_alloc_buffer((1,), "int32", scope="local")
            with block("start"):
                T.buffer_store(place, T.int32(0), [0])
            with loops(T.serial(_LOADS)), block("step"):
                T.buffer_store(place, table[place[0]], [0])
            with block("end"):
                T.buffer_store(out, place[0], [0])
        return made()

    def _nothing(self) -> Any:
        from cdmpp.program.kernels import block, function, loops, script

        T = script()
        with (
            function({"out": ((self._cores,), "float32")}) as ((out,), made),
            loops(T.parallel(self._cores)) as (i,),
            block("store", [(self._cores, i)]) as (k,),
        ):
            T.buffer_store(out, T.float32(0.0), [k])
        return made()


#: Bytes of the arrays for memory bandwidth: beyond every last-level cache.
_GPU_STREAM_BYTES = 512 << 20
#: Side of the matrices, and launches in a row that count the cost of one.
_SIDE, _LAUNCHES = 4096, 2000
_RUNS = 5


def measure_gpu() -> tuple[str, str, dict[str, float]] | None:
    """Model, LLVM's architecture and results of the first GPU; None without one."""
    library = _torch_gpu()
    if library is None:
        return None
    name, arch, results = library.properties()
    results["copy_gb_s"] = 2 * _GPU_STREAM_BYTES / library.seconds(library.copy()) / 1e9
    for dtype, quantity in (
        ("float32", "float32_gflops"), ("tfloat32", "tfloat32_matrix_gflops"), ("float16", "float16_matrix_gflops"),
    ):  # fmt: skip
        results[quantity] = 2 * _SIDE**3 / library.seconds(library.product(dtype)) / 1e9
    tiny = library.tiny()

    def many() -> None:
        for _ in range(_LAUNCHES):
            tiny()

    results["launch_us"] = 1e6 * library.seconds(many) / _LAUNCHES
    return name, arch, results


def _torch_gpu() -> _TorchGpu | None:
    import torch

    return _TorchGpu(torch) if torch.cuda.is_available() else None


class _TorchGpu:
    """What the benchmarks need of a GPU, by torch (CUDA or ROCm)."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def properties(self) -> tuple[str, str, dict[str, float]]:
        found = self.torch.cuda.get_device_properties(0)
        results = {"cores": float(found.multi_processor_count), "mem_gb": found.total_memory / 2**30}
        for name, quantity, unit in (
            ("L2_cache_size", "l2_kb", 1024.0), ("max_threads_per_multi_processor", "max_threads_per_core", 1.0),
            ("shared_memory_per_multiprocessor", "shared_kb", 1024.0), ("clock_rate", "clock_mhz", 1000.0),
        ):  # fmt: skip
            if getattr(found, name, 0):
                results[quantity] = getattr(found, name) / unit
        rocm = getattr(found, "gcnArchName", "") if self.torch.version.hip else ""
        return found.name, rocm.partition(":")[0] or f"sm_{found.major}{found.minor}", results

    def seconds(self, run: Callable[[], Any]) -> float:
        cuda = self.torch.cuda
        run()
        best = float("inf")
        for _ in range(_RUNS):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            cuda.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        return best

    def copy(self) -> Callable[[], Any]:
        a = self.torch.ones(_GPU_STREAM_BYTES // 4, device="cuda")
        b = self.torch.empty_like(a)
        return lambda: b.copy_(a)

    def product(self, dtype: str) -> Callable[[], Any]:
        kind = self.torch.float16 if dtype == "float16" else self.torch.float32
        a, b = (self.torch.ones(_SIDE, _SIDE, device="cuda", dtype=kind) for _ in range(2))
        switch = self.torch.backends.cuda.matmul

        def run() -> None:
            before, switch.allow_tf32 = switch.allow_tf32, dtype == "tfloat32"
            self.torch.mm(a, b)
            switch.allow_tf32 = before

        return run

    def tiny(self) -> Callable[[], Any]:
        a = self.torch.ones(1, device="cuda")
        return lambda: a.add_(1.0)
