"""The measuring process of a GPU: keeps its lanes filled, samples them in rounds, loads what comes next meanwhile.

A round takes one sample in every lane at the same time. Samples are of equal length whatever the program
(``SamplingPlan.min_sample_s``), so that lanes keep each other company for all of it. A program's first run is alone: it tells
how long a run is, and a fault or hang is then certainly its own.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from cdmpp.errors import ProfilerError
from cdmpp.profiler import machine
from cdmpp.profiler.engine import BuildConfig, Measured
from cdmpp.profiler.gpu.bundle import BundledProgram, Reference
from cdmpp.profiler.gpu.check import TOLERANCE, output_error, reference_inputs, summarise_outputs
from cdmpp.profiler.gpu.device import Gpu, GpuFault, make_gpu
from cdmpp.profiler.statistics import SamplingPlan

#: The GPU's clock ticks finer and its neighbours are known, so less time does than on a CPU.
GPU_PLAN = SamplingPlan(
    min_sample_s=0.001, min_samples=6, max_samples=24, target_noise=0.005, max_measure_s=0.25
)
#: Runs of one sample at most: more only take longer to capture.
_MAX_REPEATS = 256
#: Threads that load programs while others are measured.
_LOADERS = 2


@dataclass(frozen=True, kw_only=True)
class GpuConfig(BuildConfig):
    """How programs are built and measured on a GPU, or on a share of it; none of it may change a label beyond its noise."""

    #: Programs side by side at most: in partitions of their own where the device is a share, else as many as leave each
    #: other multiprocessors. ``auto``: as many as labels allow, for :func:`~cdmpp.profiler.gpu.measure.measure` to find.
    degree: int | str = 1
    #: A program whose run takes longer is not sampled.
    run_timeout_s: float = 2.0
    plan: SamplingPlan = field(default_factory=lambda: GPU_PLAN)
    #: Fill the level-2 cache with something else before every sample.
    cold: bool = False
    #: Compile and load while measuring. Without it each program goes through all stages before the next begins: the
    #: yardstick.
    overlap: bool = True
    #: Programs that are with the measuring process at a time: what it loads ahead.
    window: int = 24
    #: Time without a word after which the measuring process counts as hung, on top of the time that a sample may take.
    hang_s: float = 10.0
    #: Of the input values.
    seed: int = 0
    #: Class of the GPU as ``module:Class``, and what it is made with besides its share, lanes and seed.
    gpu: str = "cdmpp.profiler.gpu.cupy:CupyGpu"
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureJob:
    """One program to measure, with at most `degree` programs at the same time, itself included."""

    kernel: BundledProgram
    degree: int = 1
    reference: Reference | None = None


@dataclass(frozen=True)
class Running:
    """Sent when what runs changes: a deadline holds for it."""

    programs: tuple[str, ...]


@dataclass(frozen=True)
class Faulted:
    """Sent last: the context is broken, and one of these programs did it."""

    programs: tuple[str, ...]
    error: str


@dataclass
class _Lane:
    """A program in a lane, with its samples so far."""

    job: MeasureJob
    loaded: Any
    prepared: Any
    repeats: int
    first_s: float
    started: float
    meta: dict[str, Any]
    samples_s: list[float] = field(default_factory=list)


class Sampler:
    """Measures jobs on a GPU; `send` takes :class:`Running` and :class:`Measured`, the `executor` loads programs while
    others are measured (None: each is loaded when its turn comes)."""

    def __init__(
        self,
        gpu: Gpu,
        config: GpuConfig,
        send: Callable[[Any], None],
        executor: Executor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gpu, self._config, self._send = gpu, config, send
        self._executor, self._clock = executor, clock
        self._queue: deque[tuple[MeasureJob, Future[Any] | None]] = deque()
        self._lanes: list[_Lane | None] = [None] * gpu.facts.lanes

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and not self.running

    @property
    def running(self) -> list[_Lane]:
        """The lanes at work."""
        return [lane for lane in self._lanes if lane is not None]

    def add(self, job: MeasureJob) -> None:
        """Queue a job; it is loaded from now on."""
        loading = None if self._executor is None else self._executor.submit(self._gpu.load, job.kernel)
        self._queue.append((job, loading))

    def step(self) -> None:
        """Fill free lanes and take one round of samples.

        Raises
        ------
        GpuFault
            The context is broken.
        """
        while self._queue and self._may_start(*self._queue[0]):
            self._start(*self._queue.popleft())
        if not self.running:
            return
        lanes = self.running
        values = self._gpu.sample([lane.prepared for lane in lanes], self._config.cold)
        for lane, value in zip(lanes, values, strict=True):
            lane.samples_s.append(value)
            spent_s = sum(lane.samples_s) * lane.repeats
            if not self._config.plan.needs_more(lane.samples_s, spent_s):
                self._finish(lane)

    def _may_start(self, job: MeasureJob, loading: Future[Any] | None) -> bool:
        running = self.running
        if not running:
            return True
        if loading is not None and not loading.done():
            return False  # better a round with a lane less than a round late
        limit = min(job.degree, *(lane.job.degree for lane in running), len(self._lanes))
        return len(running) < limit

    def _start(self, job: MeasureJob, loading: Future[Any] | None) -> None:
        program = job.kernel.program
        self._send(Running((program,)))
        number = self._lanes.index(None)
        try:
            loaded = self._gpu.load(job.kernel) if loading is None else loading.result()
            wrong, meta = self._check(job, loaded)
            if wrong:
                self._failed(job, loaded, "run_error", wrong)
                return
            first_s = self._gpu.first_run(loaded, number)
            if first_s > self._config.run_timeout_s:
                late = f"one run took {first_s:.3g} s, over {self._config.run_timeout_s:g} s"
                self._failed(job, loaded, "run_timeout", late)
                return
            # The first run found nothing in the caches and may have loaded code.
            run_s = min(first_s, self._gpu.first_run(loaded, number))
            repeats = 1 if self._config.cold else min(self._config.plan.repeats(run_s), _MAX_REPEATS)
            prepared = self._gpu.prepare(loaded, number, repeats)
        except GpuFault:
            raise
        except Exception as err:  # whatever the driver says of this program alone
            self._failed(job, None, "run_error", f"{type(err).__name__}: {err}"[:500])
            return
        self._lanes[number] = _Lane(job, loaded, prepared, repeats, first_s, self._clock(), meta)
        self._send(Running(tuple(lane.job.kernel.program for lane in self.running)))

    def _check(self, job: MeasureJob, loaded: Any) -> tuple[str, dict[str, Any]]:
        """Compare with the reference, if there is one: what is wrong, and what to keep of it."""
        reference, cuda = job.reference, job.kernel.cuda
        if reference is None or cuda is None:
            return "", {}
        outputs = self._gpu.outputs(loaded, reference_inputs(cuda.params, reference.seed))
        error = output_error(summarise_outputs(reference.task, reference.seed, outputs), reference)
        if error > TOLERANCE:
            return f"wrong output: differs from the reference by {error:.3g}", {}
        return "", {"checked": True, "output_error": float(f"{error:.3g}")}

    def _failed(self, job: MeasureJob, loaded: Any, status: str, error: str) -> None:
        if loaded is not None:
            self._gpu.unload(loaded)
        self._send(Measured(job.kernel.program, status, error=error))

    def _finish(self, lane: _Lane) -> None:
        self._lanes[self._lanes.index(lane)] = None
        self._gpu.unload(lane.loaded)
        meta = {
            "repeats": lane.repeats,
            "degree": lane.job.degree,
            "first_s": lane.first_s,
            "cache": "cold" if self._config.cold else "warm",
            **lane.meta,
            **self._gpu.state().known(),
        }
        run_s = self._clock() - lane.started
        self._send(Measured(lane.job.kernel.program, "ok", tuple(lane.samples_s), run_s=run_s, meta=meta))


def gpu_worker(connection: Connection, config: GpuConfig, arguments: Mapping[str, Any]) -> None:
    """Serve :class:`MeasureJob` after :class:`MeasureJob` until the connection closes (runs in its own process).

    Makes the GPU of `arguments`. Sends its :class:`~cdmpp.profiler.gpu.device.GpuFacts` first (or the ProfilerError that
    there is none), then what :class:`Sampler` sends, and :class:`Faulted` before it ends because the context is broken.
    """
    machine.die_with_parent()
    try:
        gpu = make_gpu(config.gpu, arguments)
    except ProfilerError as err:
        connection.send(err)
        return
    connection.send(gpu.facts)
    executor = ThreadPoolExecutor(_LOADERS) if config.overlap else None
    running: tuple[str, ...] = ()

    def send(message: Any) -> None:
        nonlocal running
        if isinstance(message, Running):
            running = message.programs
        connection.send(message)

    sampler = Sampler(gpu, config, send, executor)
    try:
        while True:
            while sampler.idle or connection.poll(0):
                job: MeasureJob | None = connection.recv()
                if job is None:
                    return
                sampler.add(job)
            sampler.step()
    except EOFError:
        return
    except GpuFault as err:
        connection.send(Faulted(running, str(err)[:500]))
        connection.close()
        # Nothing can be freed in a broken context; trying may hang.
        os._exit(1)
