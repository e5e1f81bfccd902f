"""A CUDA GPU through cupy. No other module touches the GPU.

A label depends on the state of the GPU, which this module controls:

* **Launch gaps**: all runs of a sample are one CUDA graph. A round of samples is queued behind a kernel that waits, so the GPU
  never waits for Python between two events.
* **Input values**: slices of buffers that were filled with random numbers in [0.1, 1); integers are valid indices.
* **Caches**: warm (an untimed run before each sample) or cold (a buffer of twice the level-2 cache is written first).
* **Clocks**: kernels run for a while before the first sample. Clocks, temperature and throttling are stored with every program
  if NVML reports them. No setting of the card is changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProfilerError
from cdmpp.profiler.arguments import argument_bytes, drawn, index_bound
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram
from cdmpp.profiler.gpu.sampling import GpuFacts, GpuFault

#: Upper bound on the nanoseconds that queueing one operation from Python takes.
_QUEUE_NS = 15_000
#: Buffers begin at multiples of this many bytes, as those of an allocator do.
_ALIGNMENT = 256
_WARM_UP_S = 0.5
#: Outputs and workspaces are slices of this buffer; its contents are never used as inputs.
_SCRATCH = "scratch"
#: NVML is asked at most once in this many seconds.
_STATE_S = 0.25
#: Bits of the throttle reasons that disturb labels (``nvmlClocksThrottleReason...``): power cap, hardware, heat.
_THROTTLE = {0x4: "power", 0x8: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake"}


@dataclass
class _Loaded:
    """A loaded program: its module and functions, and the arguments of its launches, by lane."""

    cuda: CudaProgram
    module: Any
    functions: list[Any]
    arguments: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)


@dataclass
class _Prepared:
    lane: int
    repeats: int
    warm: Any
    timed: Any
    start: Any
    end: Any
    operations: int


class CupyGpu:
    """The first visible CUDA GPU, or a share of it (a fraction of its multiprocessors). A share has one lane for each partition
    that fits on the GPU, at most `lanes`. ProfilerError if there is no GPU, or it cannot be partitioned."""

    def __init__(self, share: float = 1.0, lanes: int = 8, seed: int = 0) -> None:
        import cupy

        self._cupy = cupy
        try:
            properties = cupy.cuda.runtime.getDeviceProperties(0)
            cupy.cuda.runtime.free(0)
        except cupy.cuda.runtime.CUDARuntimeError as err:
            raise ProfilerError(f"no CUDA device answers: {err}") from err
        self._nvml = _Nvml()
        self._seed = seed
        sms = int(properties["multiProcessorCount"])
        asked_sms = sms
        if share < 1:
            streams, asked_sms, self._contexts = make_partitions(share, lanes, int(properties["major"]))
            self._streams = [cupy.cuda.Stream.from_external(_Foreign(s)) for s in streams]
        else:
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(lanes)]
        self._gate = cupy.cuda.Stream(non_blocking=True)
        self._gate_open = cupy.cuda.Event(disable_timing=True)
        helpers = cupy.RawModule(code=Path(__file__).with_name("helpers.cu").read_text(encoding="utf-8"), backend="nvrtc")
        self._wait, self._seen, self._busy = (helpers.get_function(n).kernel for n in ("wait_ns", "seen_sms", "busy"))
        self._flush = cupy.empty(2 * int(properties["l2CacheSize"]), dtype=cupy.uint8)
        self._arenas: dict[tuple[int, str], Any] = {}
        # A graph that does not stay in its partition would measure another device: then do without graphs.
        for self._graphs in (True, False):
            seen = self._count_sms()
            if seen <= asked_sms:
                break
        else:
            raise ProfilerError(f"a partition of {asked_sms} multiprocessors runs on {seen} of them")
        self.facts = GpuFacts(
            name=properties["name"].decode(),
            arch=f"sm_{properties['major']}{properties['minor']}",
            sms=sms,
            share_sms=seen,
            partition="whole" if share >= 1 else "green context",
            lanes=len(self._streams),
            l2_bytes=int(properties["l2CacheSize"]),
            memory_bytes=int(properties["totalGlobalMem"]),
            driver=self._nvml.driver or str(cupy.cuda.runtime.driverGetVersion()),
            launch="graph" if self._graphs else "queue",
        )
        self._warm_up()

    # -- programs ----------------------------------------------------------------------------------------------

    def load(self, kernel: BundledProgram) -> _Loaded:
        cupy = self._cupy
        if kernel.cuda is None or not kernel.cubin:
            raise ValueError("the program has no cubin")
        cupy.cuda.Device(0).use()
        module = cupy.cuda.function.Module()
        module.load(kernel.cubin)
        return _Loaded(kernel.cuda, module, [module.get_function(launch.kernel) for launch in kernel.cuda.launches])

    def first_run(self, loaded: _Loaded, lane: int) -> float:
        cupy, stream = self._cupy, self._streams[lane]
        with self._faults():
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self._arguments(loaded, lane)
            start.record(stream)
            self._launch(loaded, lane)
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def prepare(self, loaded: _Loaded, lane: int, repeats: int) -> _Prepared:
        cupy, stream = self._cupy, self._streams[lane]

        def runs(count: int) -> Any:
            def launch() -> None:
                for _ in range(count):
                    self._launch(loaded, lane)

            if not self._graphs:
                return launch
            stream.begin_capture()
            launch()
            graph = stream.end_capture()
            graph.upload(stream)
            return lambda: graph.launch(stream)

        with self._faults():
            operations = 2 + (1 + repeats if not self._graphs else 2)
            made = _Prepared(lane, repeats, runs(1), runs(repeats), cupy.cuda.Event(), cupy.cuda.Event(), operations)
            stream.synchronize()
            return made

    def sample(self, prepared: Sequence[_Prepared], cold: bool) -> list[float]:
        cupy = self._cupy
        with self._faults():
            if cold:
                cupy.cuda.runtime.memsetAsync(self._flush.data.ptr, 1, self._flush.nbytes, self._gate.ptr)
            wait_ns = _QUEUE_NS * (2 + sum(p.operations for p in prepared))
            self._wait((1,), (1,), (np.uint64(wait_ns),), stream=self._gate)
            self._gate_open.record(self._gate)
            for p in prepared:
                stream = self._streams[p.lane]
                stream.wait_event(self._gate_open)
                if not cold:
                    p.warm()
                p.start.record(stream)
                p.timed()
                p.end.record(stream)
            for p in prepared:
                p.end.synchronize()
            return [float(cupy.cuda.get_elapsed_time(p.start, p.end)) / 1e3 / p.repeats for p in prepared]

    def outputs(self, loaded: _Loaded, inputs: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
        cupy = self._cupy
        with self._faults():
            arrays = [cupy.asarray(a) for a in inputs]
            arrays += [cupy.empty(argument_bytes(spec), cupy.uint8) for spec in loaded.cuda.workspaces]
            cupy.cuda.Device(0).synchronize()
            for launch, function in zip(loaded.cuda.launches, loaded.functions, strict=True):
                arguments = tuple(arrays[n] for n in launch.buffers)
                function(launch.grid, launch.block, arguments, stream=self._streams[0])
            self._streams[0].synchronize()
            return {n: cupy.asnumpy(arrays[n]) for n in loaded.cuda.outputs}

    def unload(self, loaded: _Loaded) -> None:
        loaded.arguments.clear()
        loaded.functions.clear()
        loaded.module = None

    def state(self) -> dict[str, Any]:
        return self._nvml.state()

    # -- inside ------------------------------------------------------------------------------------------------

    def _launch(self, loaded: _Loaded, lane: int) -> None:
        stream = self._streams[lane]
        for launch, function, arguments in zip(loaded.cuda.launches, loaded.functions, loaded.arguments[lane], strict=True):
            function(launch.grid, launch.block, arguments, stream=stream)

    def _arguments(self, loaded: _Loaded, lane: int) -> None:
        """Give every parameter and workspace a slice of a buffer of the lane, which has one per dtype (and integer bound)."""
        if lane in loaded.arguments:
            return
        offsets: dict[str, int] = {}
        slices: list[tuple[str, int]] = []
        bound = index_bound(loaded.cuda.params)
        for number, spec in enumerate(loaded.cuda.buffers):
            written = number in loaded.cuda.outputs or number >= len(loaded.cuda.params)
            values = f"{spec[1]}<{bound}" if "int" in spec[1] else spec[1]
            kind = _SCRATCH if written else values
            slices.append((kind, offsets.get(kind, 0)))
            offsets[kind] = offsets.get(kind, 0) + -(-argument_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
        for kind, size in offsets.items():
            self._grow(lane, kind, size)
        arrays = [
            self._arenas[lane, kind][offset : offset + max(1, argument_bytes(spec))]
            for spec, (kind, offset) in zip(loaded.cuda.buffers, slices, strict=True)
        ]
        loaded.arguments[lane] = [tuple(arrays[n] for n in launch.buffers) for launch in loaded.cuda.launches]

    def _grow(self, lane: int, kind: str, size: int) -> None:
        """Make the lane's buffer of a kind at least `size` bytes long, filled with random values."""
        cupy = self._cupy
        have = self._arenas.get((lane, kind))
        if have is not None and have.nbytes >= size:
            return
        self._arenas.pop((lane, kind), None)
        length = 1 << max(20, (size - 1).bit_length())
        dtype, _, bound = (kind if kind != _SCRATCH else "float32").partition("<")
        rng = cupy.random.RandomState(self._seed + lane)
        values = drawn(dtype, length // argument_bytes(((), dtype)), int(bound or 0), rng)
        if dtype == "bfloat16":
            values = (values.astype(cupy.float32).view(cupy.uint32) >> 16).astype(cupy.uint16)  # its upper half
        else:
            values = values.astype(dtype)
        self._arenas[lane, kind] = values.view(cupy.uint8)
        cupy.cuda.Device(0).synchronize()

    def _count_sms(self) -> int:
        """Number of multiprocessors that a kernel in the first lane runs on, launched the way measured kernels are."""
        cupy, stream = self._cupy, self._streams[0]
        seen = cupy.zeros(4096, cupy.uint32)
        cupy.cuda.Device(0).synchronize()
        if self._graphs:
            stream.begin_capture()
        self._seen((4096,), (64,), (seen,), stream=stream)
        if self._graphs:
            stream.end_capture().launch(stream)
        stream.synchronize()
        return int((seen > 0).sum())

    def _warm_up(self) -> None:
        values = self._cupy.ones(1 << 20, self._cupy.float32)
        self._cupy.cuda.Device(0).synchronize()
        until = time.monotonic() + _WARM_UP_S
        while time.monotonic() < until:
            self._busy((4096,), (256,), (values, np.int32(20000)), stream=self._streams[0])
            self._streams[0].synchronize()

    @contextlib.contextmanager
    def _faults(self) -> Any:
        """Raise CUDA errors as :class:`GpuFault`, or as ValueError if the error kept the launch from happening."""
        cupy = self._cupy
        harmless = ["InvalidValue", "INVALID_VALUE", "OUT_OF_RESOURCES", "LaunchOutOfResources", "OutOfMemory"]
        try:
            yield
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as err:
            if any(word in str(err) for word in harmless):
                raise ValueError(str(err)) from err
            raise GpuFault(str(err)) from err


@dataclass(frozen=True)
class _Foreign:
    """A stream that cupy did not create, in the form that cupy accepts."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


class _Nvml:
    """The GPU's state from NVML; empty if ``nvidia-ml-py`` is not installed."""

    def __init__(self) -> None:
        self.driver = ""
        self._asked_at, self._state = 0.0, dict[str, Any]()
        self._questions: dict[str, Callable[[], Any]] = {}
        try:
            import pynvml as nvml
        except ImportError:
            return
        self._error = nvml.NVMLError
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByIndex(0)
            self.driver = str(nvml.nvmlSystemGetDriverVersion())
            self._questions = {
                "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
                "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                "throttle": lambda: _throttled(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
            }

    def state(self) -> dict[str, Any]:
        now = time.monotonic()
        if self._questions and now - self._asked_at >= _STATE_S:
            self._asked_at, self._state = now, {}
            for name, ask in self._questions.items():
                with contextlib.suppress(self._error):
                    self._state[name] = ask()
        return self._state


def _throttled(reasons: int) -> str:
    return ",".join(sorted({word for bit, word in _THROTTLE.items() if reasons & bit}))


#: Multiprocessors per unit of a partition if the driver does not report it, by major compute capability.
_UNITS = {6: 1, 7: 2, 8: 2}
_HOPPER_UNIT = 8


def make_partitions(share: float, lanes: int, capability: int) -> tuple[list[int], int, Any]:
    """Make as many partitions of size `share` as fit on the GPU, at most `lanes`; the primary context must be current. Returns
    the address of a stream in each, the multiprocessors of one partition, and objects that must live as long as the streams.

    Partitions are CUDA green contexts (driver API, CUDA 12.4 and later): they belong to streams of this process and change no
    setting of the card. Their size is a multiple of the architecture's unit (8 multiprocessors on Hopper), so a share is
    rounded down. ProfilerError if cuda-bindings is missing, or the driver refuses."""
    try:
        from cuda.bindings import driver
    except ImportError as err:
        raise ProfilerError(f"shares of a GPU need cuda-bindings: {err}") from err

    def call(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise ProfilerError(f"the driver makes no partition: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    device = call(driver.cuCtxGetDevice())
    whole = call(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    unit = int(getattr(whole.sm, "smCoscheduledAlignment", 0)) or _UNITS.get(capability, _HOPPER_UNIT)
    sms = int(whole.sm.smCount)
    wanted = max(unit, int(sms * share + 1e-9) // unit * unit)
    count = max(1, min(lanes, sms // wanted))
    groups, made, _ = call(driver.cuDevSmResourceSplitByCount(count, whole, 0, wanted))
    keep = []
    for group in groups[:made]:
        description = call(driver.cuDevResourceGenerateDesc([group], 1))
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call(driver.cuGreenCtxCreate(description, device, flag))
        nonblocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        keep.append((context, call(driver.cuGreenCtxStreamCreate(context, nonblocking, 0))))
    return [int(stream) for _, stream in keep], int(groups[0].sm.smCount), keep
