"""Dealing programs to the one process that measures on a GPU; finding out which of them broke it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cdmpp.device import Device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.engine import BuildJob, Engine, Measured, Measurer
from cdmpp.profiler.gpu.build import KernelJob, kernel_builder
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram
from cdmpp.profiler.gpu.device import GpuFacts, is_model
from cdmpp.profiler.gpu.limits import cuda_arch
from cdmpp.profiler.gpu.sampling import Faulted, GpuConfig, MeasureJob, Running, gpu_worker
from cdmpp.profiler.pool import Worker

logger = logging.getLogger(__name__)

#: Seconds in which a fresh process has to find its GPU.
_START_S = 120.0
#: Attempts at that, one after the other, before the device counts as lost.
_STARTS = 3
#: Lanes where the degree is to be found.
_LANES = 8


def gpu_engine(config: GpuConfig, device: Device, *, builds: bool = True) -> Engine:
    """An engine that measures on a CUDA GPU of this machine, or on a share of it.

    Without `builds` programs come as :class:`~cdmpp.profiler.gpu.build.KernelJob`, so that TVM is not needed.

    Raises
    ------
    ProfilerError
        It is no CUDA device; on entering, there is no GPU or another one.
    """
    return Engine(config, GpuMeasurer(config, device, builds=builds))


def possible_degree(cuda: CudaProgram, facts: GpuFacts) -> int:
    """Programs like this one that fit side by side: a power of two up to the number of lanes.

    Where lanes are partitions every program has its own, so all lanes may work.
    """
    if facts.partition != "whole":
        return facts.lanes
    blocks = max(shape.blocks for shape in cuda.launches)
    degree = 1
    while 2 * degree <= facts.lanes and 2 * degree * blocks <= facts.sms:
        degree *= 2
    return degree


class GpuMeasurer(Measurer):
    """Keeps the measuring process supplied; a context that breaks, or a hang, costs one program."""

    def __init__(self, config: GpuConfig, device: Device, *, builds: bool) -> None:
        super().__init__()
        self.config, self._device, self._arch = config, device, cuda_arch(device)
        self.builder = kernel_builder(self._arch, device.target if builds else None)
        self.facts: GpuFacts
        #: Broken contexts and hangs so far.
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
        self._greet()
        if not is_model(self.facts.name, device.model) or self.facts.arch != self._arch:
            raise ProfilerError(
                f"{device.base} is a {device.model} ({self._arch}), and this is a {self.facts.name} ({self.facts.arch})"
            )

    def _greet(self) -> None:
        """Wait until the measuring process has its GPU; start another if it dies over it."""
        for _ in range(_STARTS):
            try:
                if self._gpu.connection.poll(_START_S):
                    message = self._gpu.connection.recv()
                    if isinstance(message, ProfilerError):
                        raise message
                    self.facts = message
                    return
            except EOFError:
                pass
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
            measure = MeasureJob(built, job.degree, job.reference)
        else:
            assert built.cuda is not None
            most = 1 if self.config.degree == "auto" else int(self.config.degree)
            measure = MeasureJob(built, max(1, min(most, possible_degree(built.cuda, self.facts))))
        self._to_measure.append((job, measure))

    def feed(self, coming: Any) -> None:
        window = self.config.window if self.config.overlap else 1
        while self._to_measure and len(self._in_flight) < window:
            job, measure = self._to_measure[0]
            try:
                self._gpu.connection.send(measure)
            except (BrokenPipeError, ConnectionResetError):
                # It died. With something in flight, that is found out when its end of the pipe is read.
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
            message = self._gpu.connection.recv()
        except (EOFError, ConnectionResetError):
            self._restart("run_error", f"the measuring process died ({self._gpu.exit_reason()})")
            return
        self._gpu.extend(self._patience_s)
        if isinstance(message, Measured):
            self._measured(message)
            return
        assert isinstance(message, Running | Faulted)
        self._running = message.programs
        if isinstance(message, Faulted):
            self._restart("run_error", message.error)

    def overdue(self, worker: Worker) -> None:
        self._restart("run_timeout", "it did not end")

    def _measured(self, message: Measured) -> None:
        job, measure = self._in_flight.pop(message.program)
        self._running = tuple(p for p in self._running if p != message.program)
        if not self._in_flight:
            self._gpu.finished()
        self.finish(job, measure.kernel, message, **self._meta(measure))

    def _meta(self, measure: MeasureJob) -> dict[str, Any]:
        meta: dict[str, Any] = {"sms": self.facts.share_sms, "workers": measure.degree}
        if measure.kernel.resources:
            meta["resources"] = {name: dict(taken) for name, taken in measure.kernel.resources.items()}
        return meta

    def _restart(self, status: str, error: str) -> None:
        """Start another measuring process, and find out who did it: one that ran alone; of several, each gets another
        try, alone.

        Raises
        ------
        ProfilerError
            The GPU does not answer any more; the programs that it was lost with are ``device_lost``.
        """
        self.restarts += 1
        logger.warning(
            "the GPU's context is lost (%s); %d programs are measured again", error, len(self._in_flight)
        )
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
            self._greet()
        except ProfilerError:
            status = "device_lost"
            raise
        finally:
            for job, measure in guilty:
                self.fail(job, status, error, **self._meta(measure))
