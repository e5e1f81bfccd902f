"""Measurements of a tuning: the profiler runs in the background on a device of this machine, and a meter counts its energy.
Submitting a program returns a future, so that the search for one task overlaps with the measuring of another."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cdmpp.device import Device, get_device
from cdmpp.errors import ProfilerError, TunerError
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler import machine
from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer, ObjectBuilder, sentinel_job, threads_of
from cdmpp.profiler.engine import BuildJob, BuildOnly, Engine, Executor, Outcome
from cdmpp.program.ast import compact_asts
from cdmpp.program.codegen import ObjectCache
from cdmpp.program.space import Rebuilder
from cdmpp.tuner.config import TuneConfig

logger = logging.getLogger(__name__)

#: For calibrating how many programs to measure at once: accepted median change of the labels, and programs to measure.
_TOLERANCE, CALIBRATION_PROGRAMS = 0.02, 40
#: Candidates compiled for each one measured, if the predictor uses compiled code.
_OF_EACH = 4
#: Cores needed to build programs for one measuring process; 3 to 9 in ``benchmarks/results/doppler.json``.
_BUILDERS_FED = 4


class Measurer:
    """Measures programs in the background, with an `engine` that is not started yet; use as a context manager. Leaving it after
    an error or Ctrl-C ends builders and measuring processes at once; otherwise the submitted programs are finished first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Programs not begun yet, first come first served; and the futures of these and of all programs under way.
        self._waiting: dict[str, BuildJob] = {}
        self._futures: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._abort, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="measurer", daemon=True)
        self._broken: BaseException | None = None

    def __enter__(self) -> Measurer:
        self._engine.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        if kind is not None:
            self.abort()
        self._thread.join()
        self._engine.__exit__(CancelledError if self._abort.is_set() else None, value, trace)

    def submit(self, jobs: Sequence[BuildJob]) -> list[Future[Outcome]]:
        """Queue programs, and return a future for each; a program that is already under way keeps its future. A future has
        the engine's error if the engine failed, and is cancelled after :meth:`abort`."""
        futures = []
        with self._lock:
            for job in jobs:
                future = self._futures.get(job.program.hash)
                if future is None:
                    future = Future()
                    if self._broken is not None:
                        future.set_exception(self._broken)
                    elif self._abort.is_set():
                        future.cancel()
                    else:
                        self._waiting[job.program.hash], self._futures[job.program.hash] = job, future
                futures.append(future)
        return futures

    def worth(self, jobs: Sequence[BuildJob], good: Sequence[bool], left_s: float | None) -> tuple[list[bool], float]:
        """Which of a task's candidates to measure, among those `good` so far, and the builders' CPU seconds."""
        return list(good), 0.0

    def abort(self) -> None:
        """Give up all programs under way; their futures are cancelled."""
        self._abort.set()
        self._engine.cancel()
        self._thread.join()

    def _jobs(self) -> Iterator[BuildJob | None]:
        while True:
            closing = self._closing.is_set()
            with self._lock:
                job = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            if job is None and closing:
                return
            yield job

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            for outcome in self._engine.run(self._jobs()):
                with self._lock:
                    future = self._futures.pop(outcome.job.program.hash, None)
                if future is not None:
                    future.set_result(outcome)
        except BaseException as err:  # raised where a future is waited for
            error = err
        with self._lock:
            self._broken = error
            futures, self._futures, self._waiting = list(self._futures.values()), {}, {}
        for future in futures:
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)


def in_time(measurer: Any, futures: Sequence[Future[Outcome]], left_s: float | None) -> Iterator[Outcome | None]:
    """Outcomes in order; what is not done after `left_s` seconds (None: no limit) is given up, and its outcome is None."""
    if left_s is not None and wait(futures, timeout=left_s).not_done:
        measurer.abort()
    for future in futures:
        try:
            yield future.result()
        except CancelledError:
            yield None


# -- engines -------------------------------------------------------------------------------------------------------


def device_of_this_machine(device: str | Device, workers: int | str = 1, gpu: str | None = None) -> Device:
    """The device, checked to be on this machine: a CPU share that this process may use `workers` times, or a CUDA GPU or a
    share of it. A GPU may be replaced by a class (`gpu` of :class:`~cdmpp.tuner.config.TuneConfig`). Raises TunerError or
    ProfilerError if the device is not here, TunerError if there is no compiler for the GPU."""
    found = get_device(device)
    if found.kind == "gpu":
        if workers == "auto":
            raise TunerError(f"{found.name}: --workers auto is for CPUs, give a number")
        _check_gpu(found, gpu)
    else:
        core_groups_of(found, 1 if isinstance(workers, str) else workers)
    return found


def _check_gpu(device: Device, gpu: str | None) -> None:
    from cdmpp.profiler.gpu.compile import find_compiler
    from cdmpp.profiler.gpu.limits import cuda_arch
    from cdmpp.profiler.gpu.measure import check_gpu
    from cdmpp.profiler.gpu.sampling import is_model

    try:
        arch = cuda_arch(device)
        here = device.model if gpu is not None else check_gpu("tuning needs TVM and the GPU on one machine")
        if not is_model(here, device.model):
            raise TunerError(f"{device.name} is a gpu that is not here: this machine has a {here}")
        find_compiler(arch)
    except ProfilerError as err:
        raise TunerError(f"{device.name} is a gpu: {err}") from err


def core_groups_of(device: Device, workers: int) -> tuple[tuple[int, ...], ...]:
    """Cores of each of `workers` measuring processes on a share of this machine's CPU; ProfilerError if they do not fit."""
    return machine.core_groups(machine.usable_cores(), threads_of(device), workers)


def make_engine(
    config: TuneConfig, device: Device, degree: int, executor: Executor | None = None, *, overlap: bool = True
) -> Engine:
    """The engine of a tuning. It measures `degree` programs at a time on a device of this machine, or runs them by `executor`.
    Without `overlap` nothing is built on a CPU during measurements. A CPU's builders have all cores, or those of its shards."""
    options = _timing(config)
    if device.kind == "gpu":
        from cdmpp.profiler.gpu.sampling import GpuConfig, GpuMeasurer

        options = {name: value for name, value in options.items() if name not in ("realtime", "object_cache")}
        if config.gpu is not None:
            options |= {"gpu": config.gpu, "gpu_arguments": config.gpu_arguments}
        return Engine(GpuMeasurer(GpuConfig(degree=degree, builders=config.builders, **options), device))
    local = config.shards is not None and executor is None
    builders = config.builders or (degree * int(device.share) if local else None)
    cpu = CpuConfig(builders=builders, **options)
    executor = executor or Executor(core_groups_of(device, degree))
    return Engine(CpuMeasurer(cpu, device.target, executor, sentinel_job(), overlap=overlap))


def compiled_for_each(config: TuneConfig, device: Device) -> int:
    """Candidates that are compiled for each one measured; TunerError if requested but compiled code cannot be used."""
    asked = config.compile or _OF_EACH
    if asked == 1 or (config.compile is None and (device.kind != "cpu" or config.ray is not None)):
        return 1
    predictor = None if config.predictor is None else load_predictor(config.predictor)
    if config.cost_model == "cdmpp" and predictor and predictor.reads_code_of(device) and config.ray is None:
        return asked
    if config.compile is None:
        return 1
    raise TunerError(
        f"--compile {asked} chooses by compiled code: that needs an x86 CPU, cdmpp's cost model, a predictor that was trained "
        "with instruction counts, and builders here (not --ray)"
    )


def calibrated_degree(config: TuneConfig, device: Device, jobs: Sequence[BuildJob], say: Callable[[str], None]) -> int:
    """How many programs can be measured at the same time, each on a CPU share, without changing the labels. It is one, without
    a calibration, if the other cores cannot build for more."""
    cores, share = len(machine.usable_cores()), int(device.share)
    if cores // share <= 1 or cores <= share + _BUILDERS_FED:
        return 1
    from cdmpp.profiler.calibration import calibrate_cpu

    options = _timing(config)
    return calibrate_cpu(jobs, CpuConfig(builders=config.builders, **options), device, _TOLERANCE, say).degree


def _timing(config: TuneConfig) -> dict[str, Any]:
    given = {name: getattr(config, name) for name in ("build_timeout_s", "run_timeout_s", "plan", "object_cache")}
    return {name: value for name, value in given.items() if value is not None} | {"realtime": config.realtime}


# -- energy --------------------------------------------------------------------------------------------------------


class EnergyMeter:
    """Energy that a device used since the meter was made, by all processes together. It reads counters of microjoules, each
    with the highest value after which it wraps around to 0."""

    def __init__(self, counters: Sequence[tuple[Callable[[], int], int]]) -> None:
        self._counters = counters
        self._last_uj = [read() for read, _ in counters]
        self._total_uj = 0

    def joules(self) -> float:
        """Joules so far; call it every few minutes, as counters wrap around. OSError if a counter cannot be read any more."""
        for i, (read, highest_uj) in enumerate(self._counters):
            now_uj = read()
            taken_uj = now_uj - self._last_uj[i]
            self._total_uj += taken_uj if taken_uj >= 0 else taken_uj + highest_uj
            self._last_uj[i] = now_uj
        return self._total_uj / 1e6


def energy_meter(device: Device, powercap: Path = Path("/sys/class/powercap")) -> EnergyMeter | None:
    """The meter of a device of this machine: RAPL for a processor's packages (AMD's too; since 2020 only root may read it),
    NVML for a GPU; None if there is no counter."""
    try:
        counters = [(_nvml_counter(), 0)] if device.kind == "gpu" else _rapl_counters(powercap)
        return EnergyMeter(counters) if counters else None
    except (ImportError, OSError, ValueError) as err:
        logger.info("energy is not counted: %s", err)
        return None


def _rapl_counters(powercap: Path) -> list[tuple[Callable[[], int], int]]:
    """Counters of the packages: other domains are parts of a package (cores, memory) or contain it (the whole machine)."""

    def number(path: Path) -> int:
        return int(path.read_text(encoding="ascii"))

    domains = [d for d in sorted(powercap.glob("intel-rapl:*")) if (d / "name").read_text().startswith("package")]
    return [(partial(number, d / "energy_uj"), number(d / "max_energy_range_uj")) for d in domains]


def _nvml_counter() -> Callable[[], int]:
    import pynvml

    def microjoules() -> int:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            return 1000 * int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except pynvml.NVMLError as err:
            raise OSError(f"NVML: {err}") from err

    return microjoules


#: Candidates that take longer to compile are left out: all others would have to wait.
_COMPILE_S = 4.0


class ChoosingMeasurer(Measurer):
    """Compiles `of` candidates for each one that it measures: the one predicted fastest from its instructions. Its compiled
    object is reused for the measurement. `executor` is :func:`make_engine`'s."""

    def __init__(self, config: TuneConfig, device: Device, degree: int, executor: Executor | None, of: int) -> None:
        assert config.predictor is not None
        limit_s = min(config.build_timeout_s, _COMPILE_S)
        built = CpuConfig(builders=config.builders, build_timeout_s=limit_s, object_cache=config.object_cache)
        self._folder = built.work_folder()
        objects = built.object_cache or str(self._folder)
        super().__init__(make_engine(replace(config, object_cache=objects), device, degree, executor))
        self._predictor, self._device, self._of = load_predictor(config.predictor), device, of
        builder = (ObjectBuilder, (device.target, self._folder, built, device), 0 if config.realtime else 10)
        self._compiler = Measurer(Engine(BuildOnly(built, builder)))
        self._objects, self._rebuild = ObjectCache(objects, device.target), Rebuilder()

    def __enter__(self) -> ChoosingMeasurer:
        super().__enter__()
        self._compiler.__enter__()
        self._compiler._engine.start_builders()  # so that they are ready by the end of the first search
        return self

    def __exit__(self, *error: Any) -> None:
        self._compiler.__exit__(*error)
        super().__exit__(*error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def worth(self, jobs: Sequence[BuildJob], good: Sequence[bool], left_s: float | None) -> tuple[list[bool], float]:
        wanted = [job for job, is_good in zip(jobs, good, strict=True) if is_good]
        if len(wanted) < 2:
            return list(good), 0.0
        outcomes = [o for o in in_time(self._compiler, self._compiler.submit(wanted), left_s) if o is not None]
        build_s = sum(o.meta.get("build_cpu_s", 0.0) for o in outcomes)
        built = {o.job.program.hash: o.built for o in outcomes if o.status == "ok"}
        ready = [job for job in wanted if job.program.hash in built]
        if not ready:  # measuring them will report the reason
            return list(good), build_s
        asts = compact_asts([self._rebuild(job.program, job.task, job.space) for job in ready])
        code = np.stack([built[job.program.hash].counts for job in ready])
        latency_s = self._predictor.predict_asts(asts, self._device, Evidence(code=code))
        best = {ready[i].program.hash for i in np.argsort(latency_s)[: -(-len(wanted) // self._of)]}
        for digest, found in built.items():
            if digest in best:
                self._objects.keep(digest, Path(found.path))
            Path(found.path).unlink()
        return [job.program.hash in best for job in jobs], build_s
