"""Sampling on a GPU: the process that fills a GPU's lanes and samples them in rounds, and the measurer that feeds it programs.

A lane runs one program at a time; lanes run side by side, on the same multiprocessors or on partitions of the GPU. A round
takes one sample in every lane at the same time. Samples have about the same length whatever the program
(``SamplingPlan.min_sample_s``), so all lanes are busy for the whole round. A program's first run is alone: it shows how long a
run takes, and a fault or hang is then certainly this program's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.errors import ProfilerError
from cdmpp.profiler import machine
from cdmpp.profiler.arguments import TOLERANCE, output_error, reference_inputs, summarise_outputs
from cdmpp.profiler.engine import BuildConfig, BuildJob, Measured, Measurer, Running, SamplingPlan
from cdmpp.profiler.gpu.build import KernelBuilder, KernelJob, MeasureJob
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram
from cdmpp.profiler.gpu.limits import cuda_arch
from cdmpp.profiler.machine import Worker, WorkerDied

logger = logging.getLogger(__name__)

#: Needs less time than on a CPU: a GPU's timer is finer, and what runs beside a program is known.
GPU_PLAN = SamplingPlan(min_sample_s=0.001, min_samples=6, max_samples=24, target_noise=0.005, max_measure_s=0.25)
#: Maximum runs per sample: more only take longer to capture.
_MAX_REPEATS = 256
#: Threads that load programs while others are measured.
_LOADERS = 2
#: Seconds that a new process has to find its GPU, and attempts before the device counts as lost.
_START_S, _STARTS = 120.0, 3
#: Lanes if the degree is to be calibrated.
_LANES = 8


class GpuFault(Exception):
    """A kernel broke the CUDA context: nothing can run in this process any more."""


@dataclass(frozen=True)
class GpuFacts:
    """Properties of a GPU, as it reports them."""

    name: str
    arch: str
    #: Number of multiprocessors of the whole GPU, and of those that a lane's programs were observed to run on.
    sms: int
    share_sms: int
    #: How the share is made: ``whole`` or ``green context``.
    partition: str
    lanes: int
    l2_bytes: int
    memory_bytes: int
    driver: str
    launch: str = "graph"


class Gpu(Protocol):
    """One GPU, or a share of it, in one process; tests use a GPU with a scripted clock. Methods raise :class:`GpuFault` if the
    context is broken, other exceptions if only one program is affected."""

    facts: GpuFacts

    def load(self, kernel: BundledProgram) -> Any:
        """Make a program ready to launch. Called from other threads during measurements, which it must not disturb."""

    def first_run(self, loaded: Any, lane: int) -> float:
        """Run the program once with nothing beside it; returns seconds."""

    def prepare(self, loaded: Any, lane: int, repeats: int) -> Any:
        """Prepare a sample of `repeats` back-to-back runs, so that it can start at once."""

    def sample(self, prepared: Sequence[Any], cold: bool) -> list[float]:
        """Take one sample in each lane at the same time; returns the mean seconds per run, in order. Warm: after an untimed run
        of the same program. Cold: after filling the level-2 cache with other data; a sample is then one run."""

    def outputs(self, loaded: Any, inputs: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Run once with these input values; returns the outputs by parameter index."""

    def unload(self, loaded: Any) -> None:
        """Release what :meth:`load` and :meth:`prepare` allocated."""

    def state(self) -> dict[str, Any]:
        """Current clocks, temperature and the like, as far as the driver reports them."""


def is_model(name: str, model: str) -> bool:
    """Whether a GPU that reports the name `name` is of a model of the device table."""
    return model.lower() in name.lower() or name.lower() in model.lower()


def make_gpu(path: str, arguments: Mapping[str, Any]) -> Gpu:
    """A GPU of the class given as ``module:Class`` (ProfilerError if there is no GPU, or a library for it is missing)."""
    module, _, name = path.partition(":")
    try:
        gpu: Gpu = getattr(importlib.import_module(module), name)(**arguments)
    except ImportError as err:
        raise ProfilerError(f"measuring needs cupy: pip install cupy-cuda13x ({err})") from err
    return gpu


@dataclass(frozen=True, kw_only=True)
class GpuConfig(BuildConfig):
    """How programs are built and measured on a GPU or a share of it. No option may change a label beyond its noise."""

    #: Maximum programs side by side: each in its own partition if the device is a share, else as many as leave each other
    #: enough multiprocessors. ``auto``: :func:`~cdmpp.profiler.gpu.measure.measure` finds how many do not disturb labels.
    degree: int | str = 1
    #: A program is not sampled if one run takes longer.
    run_timeout_s: float = 2.0
    plan: SamplingPlan = field(default_factory=lambda: GPU_PLAN)
    #: Fill the level-2 cache with other data before every sample.
    cold: bool = False
    #: Compile and load programs while others are measured. If False, a program finishes all stages before the next begins.
    overlap: bool = True
    #: Maximum programs in the measuring process at a time, those loaded ahead included.
    window: int = 24
    #: The measuring process counts as hung if it sends nothing for this time plus the time that samples may take.
    hang_s: float = 10.0
    #: Seed of the input values.
    seed: int = 0
    #: Class of the GPU as ``module:Class``, and its constructor arguments besides share, lanes and seed.
    gpu: str = "cdmpp.profiler.gpu.cupy:CupyGpu"
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)


# -- the process that measures -----------------------------------------------------------------------------------


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
    """Measures jobs on a GPU. `send` is called with :class:`Running` and :class:`Measured`. The `executor` loads programs while
    others are measured (None: each program is loaded when its turn comes)."""

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
        return not self._queue and not self._running

    @property
    def _running(self) -> list[_Lane]:
        return [lane for lane in self._lanes if lane is not None]

    def add(self, job: MeasureJob) -> None:
        """Queue a job and start to load its program."""
        loading = None if self._executor is None else self._executor.submit(self._gpu.load, job.kernel)
        self._queue.append((job, loading))

    def step(self) -> None:
        """Fill free lanes and take one round of samples (GpuFault if the context is broken)."""
        while self._queue and self._may_start(*self._queue[0]):
            self._start(*self._queue.popleft())
        lanes = self._running
        if not lanes:
            return
        values = self._gpu.sample([lane.prepared for lane in lanes], self._config.cold)
        for lane, value in zip(lanes, values, strict=True):
            lane.samples_s.append(value)
            if not self._config.plan.needs_more(lane.samples_s, sum(lane.samples_s) * lane.repeats):
                self._finish(lane)

    def _may_start(self, job: MeasureJob, loading: Future[Any] | None) -> bool:
        running = self._running
        if not running:
            return True
        if loading is not None and not loading.done():
            return False  # a round with one lane fewer is better than a late round
        return len(running) < min(job.degree, *(lane.job.degree for lane in running), len(self._lanes))

    def _start(self, job: MeasureJob, loading: Future[Any] | None) -> None:
        program, config = job.kernel.program, self._config
        self._send(Running((program,)))
        number = self._lanes.index(None)
        try:
            loaded = self._gpu.load(job.kernel) if loading is None else loading.result()
            wrong, meta = self._check(job, loaded)
            if wrong:
                self._fail(program, loaded, "run_error", wrong)
                return
            first_s = self._gpu.first_run(loaded, number)
            if first_s > config.run_timeout_s:
                late = f"one run took {first_s:.3g} s, over {config.run_timeout_s:g} s"
                self._fail(program, loaded, "run_timeout", late)
                return
            # The first run started with cold caches and may have loaded code.
            run_s = min(first_s, self._gpu.first_run(loaded, number))
            repeats = 1 if config.cold else min(config.plan.repeats(run_s), _MAX_REPEATS)
            prepared = self._gpu.prepare(loaded, number, repeats)
        except GpuFault:
            raise
        except Exception as err:  # any error that concerns this program alone
            self._fail(program, None, "run_error", f"{type(err).__name__}: {err}"[:500])
            return
        self._lanes[number] = _Lane(job, loaded, prepared, repeats, first_s, self._clock(), meta)
        self._send(Running(tuple(lane.job.kernel.program for lane in self._running)))

    def _check(self, job: MeasureJob, loaded: Any) -> tuple[str, dict[str, Any]]:
        """Compare outputs with the reference, if there is one: what is wrong ("" if nothing), and entries for the meta."""
        reference, cuda = job.reference, job.kernel.cuda
        if reference is None or cuda is None:
            return "", {}
        outputs = self._gpu.outputs(loaded, reference_inputs(cuda.params, reference.seed))
        error = output_error(summarise_outputs(reference.task, reference.seed, outputs), reference)
        if error > TOLERANCE:
            return f"wrong output: differs from the reference by {error:.3g}", {}
        return "", {"checked": True, "output_error": float(f"{error:.3g}")}

    def _fail(self, program: str, loaded: Any, status: str, error: str) -> None:
        if loaded is not None:
            self._gpu.unload(loaded)
        self._send(Measured(program, status, error=error))

    def _finish(self, lane: _Lane) -> None:
        self._lanes[self._lanes.index(lane)] = None
        self._gpu.unload(lane.loaded)
        meta = {
            "repeats": lane.repeats,
            "degree": lane.job.degree,
            "first_s": lane.first_s,
            "cache": "cold" if self._config.cold else "warm",
            **lane.meta,
            **self._gpu.state(),
        }
        run_s = self._clock() - lane.started
        self._send(Measured(lane.job.kernel.program, "ok", tuple(lane.samples_s), run_s=run_s, meta=meta))


def gpu_worker(connection: Connection, config: GpuConfig, arguments: Mapping[str, Any]) -> None:
    """Serve one :class:`MeasureJob` after another until the connection closes (runs in its own process). Sends
    :class:`GpuFacts` (or a ProfilerError if there is no GPU), then the messages of :class:`Sampler`, or a :class:`GpuFault`."""
    machine.die_with_parent()
    try:
        gpu = make_gpu(config.gpu, arguments)
    except ProfilerError as err:
        connection.send(err)
        return
    connection.send(gpu.facts)
    executor = ThreadPoolExecutor(_LOADERS) if config.overlap else None
    sampler = Sampler(gpu, config, connection.send, executor)
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
        connection.send(GpuFault(str(err)[:500]))
        connection.close()
        # Nothing can be freed in a broken context; trying may hang.
        os._exit(1)


# -- what feeds it programs --------------------------------------------------------------------------------------


def possible_degree(cuda: CudaProgram, facts: GpuFacts) -> int:
    """How many programs like this one fit side by side: a power of two up to the number of lanes."""
    if facts.partition != "whole":
        return facts.lanes  # each has a partition of its own
    blocks = max(shape.blocks for shape in cuda.launches)
    degree = 1
    while 2 * degree <= facts.lanes and 2 * degree * blocks <= facts.sms:
        degree *= 2
    return degree


class GpuMeasurer(Measurer):
    """Feeds programs to the process that measures on a CUDA GPU of this machine, or on a share of it. A broken context or a
    hang costs only one program. Without `builds`, jobs must be :class:`KernelJob`, and TVM is not needed. ProfilerError if the
    device is no CUDA device; :meth:`open` raises it if there is no GPU or one of another model."""

    config: GpuConfig

    def __init__(self, config: GpuConfig, device: Device, *, builds: bool = True) -> None:
        super().__init__(config)
        self._device, self._arch = device, cuda_arch(device)
        self.builder = KernelBuilder, (self._arch, device.target if builds else None), 10
        self.facts: GpuFacts
        #: Number of broken contexts and hangs so far.
        self.restarts = 0
        self._gpu: Worker
        self._to_measure: deque[tuple[BuildJob, MeasureJob]] = deque()
        self._in_flight: dict[str, tuple[BuildJob, MeasureJob]] = {}
        self._running: tuple[str, ...] = ()
        self._deaths: Counter[str] = Counter()

    def open(self, build_now: Callable[[BuildJob], Any]) -> None:
        config, device = self.config, self._device
        lanes = _LANES if config.degree == "auto" else max(1, int(config.degree))
        arguments = {"share": device.share, "lanes": lanes, "seed": config.seed, **config.gpu_arguments}
        self._gpu = Worker(gpu_worker, (config, arguments), "gpu")
        self.workers = [self._gpu]
        self._wait_for_facts()
        found = self.facts
        if not is_model(found.name, device.model) or found.arch != self._arch:
            raise ProfilerError(f"{device.base} is a {device.model} ({self._arch}), and this is a {found.name} ({found.arch})")

    def _wait_for_facts(self) -> None:
        """Wait until the measuring process has its GPU; replace the process if it dies or takes too long."""
        for _ in range(_STARTS):
            with contextlib.suppress(WorkerDied):
                if self._gpu.connection.poll(_START_S):
                    self.facts = self._gpu.receive()
                    return
            self._gpu.replace()
        raise ProfilerError("the GPU does not answer: it is lost, or its driver hangs")

    def accepts(self, building: int) -> bool:
        if self.config.overlap:
            return len(self._to_measure) < self.config.window
        return not (building or self._to_measure or self._in_flight or self.outcomes)

    @property
    def waiting(self) -> bool:
        return bool(self._to_measure)

    def add(self, job: BuildJob, built: BundledProgram) -> None:
        if isinstance(job, KernelJob):
            measure = replace(job.measure, kernel=built)
        else:
            assert built.cuda is not None
            most = 1 if self.config.degree == "auto" else int(self.config.degree)
            measure = MeasureJob(built, max(1, min(most, possible_degree(built.cuda, self.facts))))
        self._to_measure.append((job, measure))

    def feed(self, coming: Sequence[BuildJob]) -> None:
        window = self.config.window if self.config.overlap else 1
        while self._to_measure and len(self._in_flight) < window:
            job, measure = self._to_measure[0]
            try:
                self._gpu.connection.send(measure)
            except (BrokenPipeError, ConnectionResetError):
                # It died. If programs are in flight, reading from its pipe will show that.
                if not self._in_flight:
                    self._restart("run_error", "the measuring process died")
                return
            self._to_measure.popleft()
            if not self._in_flight:
                self._gpu.extend(self._patience_s)
            self._in_flight[measure.kernel.program] = job, measure
            self._gpu.load = self._in_flight

    @property
    def _patience_s(self) -> float:
        config = self.config
        samples_s = self.facts.lanes * max(config.plan.max_measure_s, 2 * config.run_timeout_s)
        return config.hang_s + 2 * config.run_timeout_s + samples_s

    def receive(self, worker: Worker) -> None:
        try:
            message: Running | Measured = worker.receive()
        except WorkerDied as err:
            self._restart("run_error", f"the measuring process died ({err})")
            return
        except GpuFault as err:
            self._restart("run_error", str(err))
            return
        worker.extend(self._patience_s)
        if isinstance(message, Running):
            self._running = message.programs
        else:
            job, measure = self._in_flight.pop(message.program)
            self._running = tuple(p for p in self._running if p != message.program)
            if not self._in_flight:
                self._gpu.finished()
            self.finish(job, measure.kernel, message, **self._meta(measure))

    def overdue(self, worker: Worker) -> None:
        self._restart("run_timeout", "it did not end")

    def _meta(self, measure: MeasureJob) -> dict[str, Any]:
        meta: dict[str, Any] = {"sms": self.facts.share_sms, "workers": measure.degree}
        if measure.kernel.resources:
            meta["resources"] = measure.kernel.resources
        return meta

    def _restart(self, status: str, error: str) -> None:
        """Start another measuring process and find the program to blame: one that ran alone; of several, each is measured
        again, alone. ProfilerError if the GPU does not answer any more; the blamed program's status is then ``device_lost``."""
        self.restarts += 1
        logger.warning("the GPU's context is lost (%s); %d programs are measured again", error, len(self._in_flight))
        suspects = [p for p in self._running if p in self._in_flight] or list(self._in_flight)[:1]
        guilty = []
        for program in suspects:
            self._deaths[program] += 1
            job, measure = self._in_flight[program]
            if len(suspects) == 1 or self._deaths[program] > 1:
                guilty.append(self._in_flight.pop(program))
            else:
                self._in_flight[program] = job, replace(measure, degree=1)
        self._to_measure.extendleft(reversed(list(self._in_flight.values())))
        self._in_flight.clear()
        self._running = ()
        self._gpu.replace()
        try:
            self._wait_for_facts()
        except ProfilerError:
            status = "device_lost"
            raise
        finally:
            for job, measure in guilty:
                self.fail(job, status, error, **self._meta(measure))
