"""Micro-benchmarks of a GPU, through torch or else cupy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

#: Bytes of the arrays for memory bandwidth: beyond every last-level cache.
_STREAM_BYTES = 512 << 20
#: Side of the matrices, and launches in a row that count the cost of one.
_SIDE, _LAUNCHES = 4096, 2000
_RUNS = 5


class _Library(Protocol):
    """What the benchmarks need of a GPU library."""

    def properties(self) -> tuple[str, str, dict[str, float]]: ...

    def seconds(self, run: Callable[[], Any]) -> float: ...

    def copy(self) -> Callable[[], Any]: ...

    def product(self, dtype: str) -> Callable[[], Any] | None: ...

    def tiny(self) -> Callable[[], Any]: ...


def measure_gpu() -> tuple[str, str, dict[str, float], list[str]] | None:
    """Model, LLVM's architecture, results and what was skipped, of the first GPU; None without one."""
    library = _torch() or _cupy()
    if library is None:
        return None
    name, arch, results = library.properties()
    skipped = []
    results["copy_gb_s"] = 2 * _STREAM_BYTES / library.seconds(library.copy()) / 1e9
    for dtype, quantity in (
        ("float32", "float32_gflops"), ("tfloat32", "tfloat32_matrix_gflops"), ("float16", "float16_matrix_gflops"),
    ):  # fmt: skip
        run = library.product(dtype)
        if run is None:
            skipped.append(f"{quantity}: not with this library")
        else:
            results[quantity] = 2 * _SIDE**3 / library.seconds(run) / 1e9
    tiny = library.tiny()

    def many() -> None:
        for _ in range(_LAUNCHES):
            tiny()

    results["launch_us"] = 1e6 * library.seconds(many) / _LAUNCHES
    return name, arch, results, skipped


def _torch() -> _Library | None:
    try:
        import torch
    except ImportError:
        return None
    return _Torch(torch) if torch.cuda.is_available() else None


def _cupy() -> _Library | None:
    try:
        import cupy

        return _Cupy(cupy) if cupy.cuda.runtime.getDeviceCount() else None
    except Exception:  # no driver: cupy raises its own types, or fails to load
        return None


class _Torch:
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
        a = self.torch.ones(_STREAM_BYTES // 4, device="cuda")
        b = self.torch.empty_like(a)
        return lambda: b.copy_(a)

    def product(self, dtype: str) -> Callable[[], Any] | None:
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


class _Cupy:
    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def properties(self) -> tuple[str, str, dict[str, float]]:
        found = self.cupy.cuda.runtime.getDeviceProperties(0)
        name = found["name"].decode() if isinstance(found["name"], bytes) else str(found["name"])
        results = {
            "cores": float(found["multiProcessorCount"]),
            "mem_gb": found["totalGlobalMem"] / 2**30,
            "l2_kb": found["l2CacheSize"] / 1024,
            "max_threads_per_core": float(found["maxThreadsPerMultiProcessor"]),
            "shared_kb": found["sharedMemPerMultiprocessor"] / 1024,
        }
        return name, f"sm_{found['major']}{found['minor']}", results

    def seconds(self, run: Callable[[], Any]) -> float:
        events = self.cupy.cuda
        run()
        best = float("inf")
        for _ in range(_RUNS):
            start, end = events.Event(), events.Event()
            start.record()
            run()
            end.record()
            end.synchronize()
            best = min(best, events.get_elapsed_time(start, end) / 1e3)
        return best

    def copy(self) -> Callable[[], Any]:
        a = self.cupy.ones(_STREAM_BYTES // 4, dtype=self.cupy.float32)
        b = self.cupy.empty_like(a)
        return lambda: self.cupy.copyto(b, a)

    def product(self, dtype: str) -> Callable[[], Any] | None:
        if dtype == "tfloat32":
            return None
        a, b = (self.cupy.ones((_SIDE, _SIDE), dtype=dtype) for _ in range(2))
        return lambda: self.cupy.matmul(a, b)

    def tiny(self) -> Callable[[], Any]:
        kernel = self.cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
        return lambda: kernel((1,), (32,), ())
