"""The parallel GPU profiler: host cores compile, one process measures, and neither waits for the other.

The idea is DOPpler's: whatever does not touch the timing (compiling, loading) of many candidates overlaps with the
measuring of others, and programs that leave most of the GPU idle are measured side by side as far as a calibration
allows. The engine deals in :class:`~cdmpp.profiler.gpu.sampling.MeasureJob` and :class:`GpuOutcome`; it knows nothing of
datasets.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from cdmpp.errors import ProfilerError
from cdmpp.profiler.gpu.device import GpuFacts
from cdmpp.profiler.gpu.sampling import (
    Faulted,
    GpuMeasured,
    GpuWorkerConfig,
    MeasureJob,
    Running,
    gpu_worker,
)
from cdmpp.profiler.pool import Worker, ready, requests
from cdmpp.profiler.statistics import label, split_half_difference

logger = logging.getLogger(__name__)

#: Seconds in which a fresh process has to find its GPU.
_START_S = 120.0
#: Attempts at that, one after the other, before the device counts as lost.
_STARTS = 3
#: Seconds between two questions for a job while there is nothing to do.
_IDLE_S = 0.02


@dataclass(frozen=True)
class GpuEngineConfig:
    """How the engine works; none of it may change a label beyond its noise.

    Attributes
    ----------
    worker
        Of the measuring process.
    arch
        What sources are compiled for.
    compilers
        Compiling processes.
    compile_timeout_s
        CPU seconds of one compilation.
    window
        Programs that are with the measuring process at a time: what it loads ahead.
    hang_s
        Seconds without a word after which the measuring process counts as hung, on top of the time that a sample
        may take.
    overlap
        Compile and load while measuring. Without it each program goes through all stages before the next begins:
        the yardstick.
    """

    worker: GpuWorkerConfig
    arch: str
    compilers: int = 2
    compile_timeout_s: float = 30.0
    window: int = 24
    hang_s: float = 10.0
    overlap: bool = True


@dataclass(frozen=True)
class GpuOutcome:
    """One measured (or failed) program; ``latency_s`` and ``noise`` as in :class:`cdmpp.dataset.Record`."""

    job: MeasureJob
    status: str
    latency_s: float | None = None
    samples_s: tuple[float, ...] = ()
    noise: float | None = None
    error: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


def compile_worker(connection: Connection, arch: str) -> None:
    """Compile sources until the connection closes (runs in its own process; it never opens a device).

    Takes (program, source), sends (status, cubin, error, seconds).
    """
    from cdmpp.profiler import machine
    from cdmpp.profiler.gpu.compile import CompileError, find_compiler

    machine.die_with_parent()
    machine.stand_back(10)
    for _, source in requests(connection):
        started = time.perf_counter()
        try:
            cubin = find_compiler(arch).compile(source, arch).cubin
            result = ("ok", cubin, "")
        except CompileError as err:
            result = ("build_error", b"", str(err))
        except (TimeoutError, ProfilerError) as err:
            result = ("build_timeout" if isinstance(err, TimeoutError) else "build_error", b"", str(err))
        connection.send((*result, time.perf_counter() - started))


class CudaEngine:
    """Compiling processes and a measuring process; use as a context manager.

    Raises
    ------
    ProfilerError
        There is no GPU (on entering), or it is lost.
    """

    def __init__(self, config: GpuEngineConfig) -> None:
        self.config = config
        self._compilers: list[Worker] = []
        self._gpu: Worker | None = None
        self.facts: GpuFacts
        #: Broken contexts and hangs so far.
        self.restarts = 0
        self._to_compile: deque[MeasureJob] = deque()
        self._to_measure: deque[MeasureJob] = deque()
        self._outcomes: deque[GpuOutcome] = deque()
        #: Of programs that broke the context; final once another process has its GPU.
        self._ended: list[GpuOutcome] = []
        self._renewed = False
        self._in_flight: dict[str, MeasureJob] = {}
        self._running: tuple[str, ...] = ()
        self._build_s: dict[str, float] = {}
        self._deaths: Counter[str] = Counter()

    def __enter__(self) -> CudaEngine:
        loaders = self.config.worker.loaders if self.config.overlap else 0
        self._worker_config = replace(self.config.worker, loaders=loaders)
        self._gpu = Worker(gpu_worker, (self._worker_config,), "gpu")
        self._greet()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._compilers:
            worker.kill()
        if self._gpu is not None:
            if kind is None:
                self._gpu.close()
            else:
                self._gpu.kill()

    def _greet(self) -> None:
        """Wait until the measuring process has its GPU; start another if it dies over it."""
        assert self._gpu is not None
        for _ in range(_STARTS):
            try:
                if self._gpu.connection.poll(_START_S):
                    said = self._gpu.connection.recv()
                    if isinstance(said, ProfilerError):
                        raise said
                    self.facts = said
                    return
            except EOFError:
                pass
            self._gpu.replace()
        raise ProfilerError("the GPU does not answer: it is lost, or its driver hangs")

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, jobs: Iterator[MeasureJob | None]) -> Iterator[GpuOutcome]:
        """Measure `jobs`, yielding outcomes as they become final (not in the order of the jobs).

        The iterator may yield None to say "nothing yet"; it is then asked again later.

        Raises
        ------
        ProfilerError
            The GPU is lost; the program that it was lost with was yielded as ``device_lost`` before.
        """
        assert self._gpu is not None
        exhausted = False
        while True:
            while self._outcomes:
                yield self._outcomes.popleft()
            if not exhausted:
                exhausted = not self._draw(jobs)
            self._start_compiling()
            self._start_measuring()
            busy = [w for w in (*self._compilers, self._gpu) if w.load is not None]
            if not busy and not self._to_compile and not self._to_measure:
                if exhausted and not self._outcomes:
                    return
                if not self._outcomes:
                    time.sleep(_IDLE_S)
                continue
            for worker in ready(busy, 0.1):
                if worker is self._gpu:
                    self._hear_gpu()
                else:
                    self._hear_compiler(worker)
            for worker in busy:
                if worker.load is not None and worker.overdue():
                    if worker is self._gpu:
                        self._gpu_ended("run_timeout", "it did not end")
                    else:
                        job = worker.load
                        worker.replace()
                        late = f"over {self.config.compile_timeout_s:g} s"
                        self._fail(job, "build_timeout", late)
            if self._renewed:
                try:
                    self._greet()
                except ProfilerError:
                    yield from (replace(o, status="device_lost") for o in self._ended)
                    raise
                self._outcomes.extend(self._ended)
                self._ended.clear()
                self._renewed = False

    @property
    def _waiting(self) -> int:
        compiling = sum(w.load is not None for w in self._compilers)
        return len(self._to_compile) + compiling + len(self._to_measure) + len(self._in_flight)

    def _draw(self, jobs: Iterator[MeasureJob | None]) -> bool:
        """Keep the stages supplied; False when there are no more jobs."""
        limit = self.config.window + 2 * self.config.compilers if self.config.overlap else 1
        while self._waiting < limit:
            try:
                job = next(jobs)
            except StopIteration:
                return False
            if job is None:
                break
            if job.kernel.status != "ok" or job.kernel.cuda is None:
                self._fail(job, job.kernel.status, job.kernel.error)
            elif job.kernel.cubin:
                self._to_measure.append(job)
            else:
                self._to_compile.append(job)
        return True

    def _fail(self, job: MeasureJob, status: str, error: str, **meta: Any) -> None:
        self._outcomes.append(GpuOutcome(job, status, error=error, meta=meta))

    # -- compiling -------------------------------------------------------------------------------------------

    def _start_compiling(self) -> None:
        if self._to_compile and not self._compilers:
            count = self.config.compilers if self.config.overlap else 1
            self._compilers = [
                Worker(compile_worker, (self.config.arch,), f"compiler-{i}") for i in range(max(1, count))
            ]
        for worker in self._compilers:
            if worker.load is None and self._to_compile:
                job = self._to_compile.popleft()
                assert job.kernel.cuda is not None
                request = (job.kernel.program, job.kernel.cuda.source)
                if not worker.submit(request, job, self.config.compile_timeout_s, of_cpu_time=True):
                    self._to_compile.appendleft(job)

    def _hear_compiler(self, worker: Worker) -> None:
        job: MeasureJob = worker.load
        try:
            status, cubin, error, build_s = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            reason = worker.exit_reason()
            worker.replace()
            self._fail(job, "build_error", f"the compiler died with it ({reason})")
            return
        worker.finished()
        if status != "ok":
            self._fail(job, status, error, build_s=round(build_s, 4))
            return
        self._build_s[job.kernel.program] = build_s
        self._to_measure.append(replace(job, kernel=replace(job.kernel, cubin=cubin)))

    # -- measuring -------------------------------------------------------------------------------------------

    def _start_measuring(self) -> None:
        assert self._gpu is not None
        window = self.config.window if self.config.overlap else 1
        while self._to_measure and len(self._in_flight) < window:
            job = self._to_measure.popleft()
            program = job.kernel.program
            try:
                self._gpu.connection.send(job)
            except (BrokenPipeError, ConnectionResetError):
                # It died with what it had; that is found out when its end of the pipe is read.
                self._to_measure.appendleft(job)
                return
            if not self._in_flight:
                self._gpu.extend(self._patience_s)
            self._in_flight[program] = job
            self._gpu.load = self._in_flight

    @property
    def _patience_s(self) -> float:
        worker = self.config.worker
        lanes = self.facts.lanes
        samples_s = lanes * max(worker.plan.max_measure_s, 2 * worker.run_timeout_s)
        return self.config.hang_s + 2 * worker.run_timeout_s + samples_s

    def _hear_gpu(self) -> None:
        """Take in what the measuring process says."""
        assert self._gpu is not None
        try:
            said = self._gpu.connection.recv()
        except (EOFError, ConnectionResetError):
            self._gpu_ended("run_error", f"the measuring process died ({self._gpu.exit_reason()})")
            return
        self._gpu.extend(self._patience_s)
        if isinstance(said, Running):
            self._running = said.programs
        elif isinstance(said, GpuMeasured):
            self._measured(said)
        elif isinstance(said, Faulted):
            self._running = said.programs
            self._gpu_ended("run_error", said.error)

    def _measured(self, said: GpuMeasured) -> None:
        assert self._gpu is not None
        job = self._in_flight.pop(said.program)
        self._running = tuple(p for p in self._running if p != said.program)
        if not self._in_flight:
            self._gpu.finished()
        meta: dict[str, Any] = {"run_s": round(said.run_s, 4), **said.meta}
        build_s = self._build_s.pop(said.program, job.kernel.build_s)
        meta["build_s"] = round(build_s, 4)
        if said.status != "ok":
            self._fail(job, said.status, said.error, **meta)
            return
        value = label(said.samples_s)
        if not 0 < value < float("inf"):
            self._fail(job, "run_error", f"the clock gave {value} s", **meta)
            return
        noise = split_half_difference(said.samples_s)
        self._outcomes.append(GpuOutcome(job, "ok", value, said.samples_s, noise, meta=meta))

    def _gpu_ended(self, status: str, error: str) -> None:
        """Start another measuring process, and find out who did it: one that ran alone; of several, each gets another
        try, alone."""
        assert self._gpu is not None
        self.restarts += 1
        logger.warning(
            "the GPU's context is lost (%s); %d programs are measured again", error, len(self._in_flight)
        )
        suspects = [p for p in self._running if p in self._in_flight] or list(self._in_flight)[:1]
        for program in suspects:
            self._deaths[program] += 1
            if len(suspects) == 1 or self._deaths[program] > 1:
                self._ended.append(GpuOutcome(self._in_flight.pop(program), status, error=error))
            else:
                self._in_flight[program] = replace(self._in_flight[program], degree=1)
        self._to_measure.extendleft(reversed(list(self._in_flight.values())))
        self._renewed = True
        self._in_flight.clear()
        self._running = ()
        self._gpu.replace()
