"""The GPU profiler for whoever proposes programs while others are measured: builders beside the measuring engine.

What :class:`~cdmpp.profiler.engine.CpuEngine` is for a CPU: takes :class:`~cdmpp.profiler.build.BuildJob`, gives
:class:`~cdmpp.profiler.engine.Outcome`. Builders lower and compile programs on the host's cores, each in a process that is
ended when its time is up; :class:`~cdmpp.profiler.cuda_engine.CudaEngine` measures them. A program that the device's limits
exclude never gets as far as the compiler.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProfilerError
from cdmpp.profiler.build import BuildJob
from cdmpp.profiler.cuda_build import cuda_build_worker
from cdmpp.profiler.cuda_calibration import possible_degree
from cdmpp.profiler.cuda_engine import CudaEngine, GpuEngineConfig, GpuOutcome
from cdmpp.profiler.engine import Outcome
from cdmpp.profiler.gpu.bundle import BundledProgram
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.device import is_model
from cdmpp.profiler.gpu.limits import arch_limits
from cdmpp.profiler.gpu.measure import GPU_PLAN, MeasureConfig
from cdmpp.profiler.gpu.sampling import GpuWorkerConfig, MeasureJob
from cdmpp.profiler.pool import BuildQueue, Worker, ready
from cdmpp.profiler.statistics import SamplingPlan

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)

#: Builders leave the cores to the search and to the measuring process.
_NICENESS = 10


@dataclass(frozen=True)
class GpuConfig:
    """How programs are built and measured on a GPU, or on a share of it.

    Attributes
    ----------
    device
        A CUDA device, with its share.
    degree
        Programs side by side at most: in partitions of their own where the device is a share, else as many as leave each
        other multiprocessors. Their labels are not compared with labels taken alone.
    builders
        Building processes; None for one a core.
    build_timeout_s
        CPU seconds that one build may take.
    run_timeout_s, plan
        See :class:`~cdmpp.profiler.gpu.sampling.GpuWorkerConfig`.
    hang_s
        See :class:`~cdmpp.profiler.cuda_engine.GpuEngineConfig`.
    gpu, gpu_arguments
        Class of the GPU as ``module:Class``, and what it is made with besides its share.
    """

    device: Device
    degree: int = 1
    builders: int | None = None
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    plan: SamplingPlan = field(default_factory=lambda: GPU_PLAN)
    hang_s: float = 10.0
    gpu: str = MeasureConfig.gpu
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)


def cuda_arch(device: Device) -> str:
    """The architecture of a CUDA device, such as ``sm_90``.

    Raises
    ------
    ProfilerError
        It is no CUDA device, or its architecture's limits are not known.
    """
    arch = str(device.target.get("arch", ""))
    if device.kind != "gpu" or not arch.startswith("sm_"):
        raise ProfilerError(f"{device.name} is no CUDA device")
    arch_limits(arch)
    return arch


class GpuEngine:
    """Builders, and a measuring process on the GPU; use as a context manager.

    Raises
    ------
    ProfilerError
        It is no CUDA device or there is no compiler for it; on entering, there is no GPU or another one.
    """

    def __init__(self, config: GpuConfig) -> None:
        self.config = config
        self._arch = cuda_arch(config.device)
        find_compiler(self._arch)
        self._builders: list[Worker] = []
        self._to_build = BuildQueue(config.build_timeout_s)
        self._built: deque[BundledProgram] = deque()
        self._jobs: dict[str, BuildJob] = {}
        self._engine = CudaEngine(self._engine_config())

    def _engine_config(self) -> GpuEngineConfig:
        config = self.config
        lanes = max(1, config.degree)
        arguments = {"share": config.device.share, "lanes": lanes, **config.gpu_arguments}
        worker = GpuWorkerConfig(config.gpu, arguments, config.plan, config.run_timeout_s)
        return GpuEngineConfig(worker, self._arch, hang_s=config.hang_s)

    def __enter__(self) -> GpuEngine:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._engine)
            facts, device = self._engine.facts, self.config.device
            if not is_model(facts.name, device.model) or facts.arch != self._arch:
                raise ProfilerError(
                    f"{device.base} is a {device.model} ({self._arch}), and this is a {facts.name} ({facts.arch})"
                )
            logger.info("%s: %d of %d multiprocessors", facts.name, facts.share_sms, facts.sms)
            args = (dict(device.target), self._arch, _NICENESS)
            count = self.config.builders or len(os.sched_getaffinity(0))
            self._builders = [Worker(cuda_build_worker, args, f"builder-{i}") for i in range(max(1, count))]
            entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._builders:
            worker.kill()
        self._engine.__exit__(kind, value, trace)

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        """Measure `jobs`, yielding outcomes as they become final (not in the order of the jobs).

        The iterator may yield None to say "nothing yet"; it is then asked again later.

        Raises
        ------
        ProfilerError
            The GPU is lost; the program that it was lost with was yielded as ``device_lost`` before.
        """
        for found in self._engine.run(self._kernels(jobs)):
            yield self._outcome(found)

    # -- building --------------------------------------------------------------------------------------------

    def _kernels(self, jobs: Iterator[BuildJob | None]) -> Iterator[MeasureJob | None]:
        """What builders have made of the jobs; None where there is nothing yet."""
        exhausted = False
        while True:
            if not exhausted:
                exhausted = not self._draw(jobs)
            self._to_build.start(self._builders)
            for worker in ready(self._builders, 0.0):
                self._hear(worker)
            for worker in self._builders:
                if worker.overdue():
                    self._overdue(worker)
            while self._built:
                yield self._measure_job(self._built.popleft())
            if exhausted and not self._to_build and not any(w.load is not None for w in self._builders):
                return
            yield None

    def _draw(self, jobs: Iterator[BuildJob | None]) -> bool:
        """Keep a few jobs in the queue; False when there are no more."""
        while len(self._to_build) < len(self._builders):
            try:
                job = next(jobs)
            except StopIteration:
                return False
            if job is None:
                break
            self._jobs[job.program.hash] = job
            self._to_build.add(job)
        return True

    def _hear(self, worker: Worker) -> None:
        job, kernel, error = self._to_build.hear(worker)
        if kernel is not None:
            self._built.append(kernel)
        elif error:
            self._built.append(BundledProgram(job.program.hash, "build_error", error))

    def _overdue(self, worker: Worker) -> None:
        job, _ = worker.load
        worker.replace()
        limit_s = self.config.build_timeout_s
        kernel = BundledProgram(job.program.hash, "build_timeout", f"over {limit_s:g} s", build_s=limit_s)
        self._built.append(kernel)

    # -- measuring -------------------------------------------------------------------------------------------

    def _measure_job(self, kernel: BundledProgram) -> MeasureJob:
        degree = 1
        if kernel.cuda is not None:
            degree = max(1, min(self.config.degree, possible_degree(kernel.cuda, self._engine.facts)))
        return MeasureJob(kernel, degree)

    def _outcome(self, found: GpuOutcome) -> Outcome:
        kernel = found.job.kernel
        meta: dict[str, Any] = {
            "build_s": round(kernel.build_s, 4),
            "sms": self._engine.facts.share_sms,
            "workers": found.job.degree,
            **found.meta,
        }
        if kernel.resources:
            meta["resources"] = {name: dict(taken) for name, taken in kernel.resources.items()}
        job = self._jobs.pop(kernel.program)
        return Outcome(job, found.status, found.latency_s, found.samples_s, found.noise, found.error, meta)
