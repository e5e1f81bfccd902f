"""Measuring a bundle on the GPU of this machine: from a file to a dataset, with neither TVM nor a device table."""

from __future__ import annotations

import logging
import os
import platform
import random
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset, Record
from cdmpp.device import Device
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler.cuda_calibration import GroupResult, calibrate_groups, possible_degree
from cdmpp.profiler.cuda_engine import CudaEngine, GpuEngineConfig, GpuOutcome
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, read_bundle
from cdmpp.profiler.gpu.device import GpuFacts, is_model
from cdmpp.profiler.gpu.sampling import GpuWorkerConfig, MeasureJob
from cdmpp.profiler.statistics import SamplingPlan

logger = logging.getLogger(__name__)

#: The GPU's clock ticks finer and its neighbours are known, so less time does than on a CPU.
GPU_PLAN = SamplingPlan(
    min_sample_s=0.001, min_samples=6, max_samples=24, target_noise=0.005, max_measure_s=0.25
)
#: Programs measured before the next degree's turn: switching degrees empties the lanes.
_BLOCK = 512


@dataclass(frozen=True)
class MeasureConfig:
    """Options of :func:`measure`.

    Attributes
    ----------
    degree
        Programs side by side at most; ``auto`` finds it by group of programs.
    tolerance
        Median difference to labels taken alone that the calibration accepts.
    calibration_programs
        Programs of each group that it measures.
    best_per_task
        Programs of each task that are measured again alone, if they were not alone.
    check_per_task
        Programs of each task whose output is compared with the reference, where there is one.
    cold, from_source, overlap
        See :class:`~cdmpp.profiler.cuda_engine.GpuEngineConfig`; `from_source` compiles although there are cubins.
    gpu
        Class of the GPU as ``module:Class``.
    """

    degree: int | str = "auto"
    lanes: int = 8
    tolerance: float = 0.02
    calibration_programs: int = 24
    best_per_task: int = 1
    check_per_task: int = 2
    cold: bool = False
    from_source: bool = False
    overlap: bool = True
    compilers: int | None = None
    run_timeout_s: float = 2.0
    hang_s: float = 10.0
    plan: SamplingPlan = field(default_factory=lambda: GPU_PLAN)
    limit: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    gpu: str = "cdmpp.profiler.gpu.cupy:CupyGpu"
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureProgress:
    """Where a run of :func:`measure` stands."""

    done: int
    total: int
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float


@dataclass(frozen=True)
class MeasureReport:
    """What a run of :func:`measure` did; ``labels_per_s`` is of the measuring alone, without the calibration."""

    path: Path
    device: str
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float
    labels_per_s: float
    restarts: int
    checked: int
    degrees: dict[int, int]
    calibration: list[GroupResult]
    facts: GpuFacts


def measure(
    bundle: str | Path | Bundle,
    *,
    out: str | Path,
    device: str | None = None,
    config: MeasureConfig | None = None,
    resume: bool = False,
    progress: Callable[[MeasureProgress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> MeasureReport:
    """Measure the programs of a bundle on this machine's GPU and store them in a dataset.

    Parameters
    ----------
    bundle
        The file, or what :func:`~cdmpp.profiler.gpu.bundle.read_bundle` gives.
    out
        Folder of the dataset.
    device
        The bundle's device or a share of it, such as ``h200@0.5`` (default: the bundle's device).
    resume
        Go on with the dataset in `out`; programs that have a record on this device are not measured again. A dataset
        may hold several shares.
    progress, notify
        Called with the state after each outcome, and with one-line news.

    Raises
    ------
    BundleError
        The bundle cannot be read.
    ProfilerError
        The GPU is missing, another one, lost, or cannot be partitioned. What was measured is kept.
    DatasetError
        `out` holds records of this device and `resume` was not asked for; the disk is full.
    """
    config = config or MeasureConfig()
    say = notify or (lambda line: logger.info("%s", line))
    content = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    name, share = share_of(content, device)
    path = Path(out)
    with Dataset.open_or_create(path) as dataset:
        known = dataset.measured(name, retry=("device_lost",))
        if known and not resume:
            raise DatasetError(
                f"{path} has records of {name} already: go on with --resume, or choose another folder"
            )
        kernels = _chosen(content, config)
        engine_config = _engine_config(content, config, share)
        with CudaEngine(engine_config) as engine:
            _check_gpu(content, engine.facts)
            say(
                f"{engine.facts.name}: {engine.facts.share_sms} of {engine.facts.sms} multiprocessors, "
                f"{engine.facts.lanes} lanes"
            )
            todo = [k for k in kernels if k.program not in known]
            degrees, results = _degrees(todo, engine, config, say)
            session = _note_session(dataset, content, name, config, engine.facts, degrees, results)
            common = {"session": session, "sms": engine.facts.share_sms}
            run = _Run(dataset, content, name, common, len(kernels) - len(todo), len(kernels), progress)
            try:
                jobs = _jobs(content, todo, degrees, engine.facts, config)
                run.take_all(engine.run(jobs), config.max_seconds, say)
                if not run.stopped:
                    best = _best(dataset, name, kernels, config)
                    if best:
                        say(f"measuring the {len(best)} best programs of their tasks again, alone")
                    run.take_all(engine.run(iter(best)), config.max_seconds, say, alone=True)
            finally:
                dataset.flush()
        if not run.new and not known:
            raise ProfilerError("nothing was measured")
        dataset.finalize()
    return MeasureReport(
        path,
        name,
        run.new,
        run.ok,
        dict(run.failures),
        run.elapsed_s,
        run.ok / max(run.elapsed_s, 1e-9),
        engine.restarts,
        run.checked,
        degrees,
        results,
        engine.facts,
    )


def share_of(bundle: Bundle, device: str | None) -> tuple[str, float]:
    """Canonical name and share of the device to measure on.

    Raises
    ------
    ProfilerError
        It is not the bundle's device, or no share of it.
    """
    base = bundle.device.partition("@")[0]
    asked, at, text = (device or bundle.device).partition("@")
    try:
        share = float(text) if at else 1.0
    except ValueError:
        share = -1.0
    if asked != base or not 0 < share <= 1:
        raise ProfilerError(
            f"the bundle is for {base}: expected {base} or a share of it, such as {base}@0.5, not {device}"
        )
    return (base if share == 1 else f"{base}@{share:g}"), share


def _chosen(bundle: Bundle, config: MeasureConfig) -> list[BundledProgram]:
    """The programs to measure; a limit draws them evenly over the tasks."""
    kernels = list(bundle.kernels)
    if config.from_source:
        kernels = [k if k.cuda is None else replace(k, cubin=b"") for k in kernels]
    for kernel in kernels:
        if kernel.status == "ok" and not kernel.cubin and not (kernel.cuda and kernel.cuda.source):
            raise ProfilerError(f"the bundle keeps no source, and program {kernel.program} has no cubin")
    rng = random.Random(config.seed)
    by_task: dict[str, list[BundledProgram]] = defaultdict(list)
    for kernel in kernels:
        by_task[bundle.programs[kernel.program].task_hash].append(kernel)
    for part in by_task.values():
        rng.shuffle(part)
    # Turn by turn over the tasks, so that what an interrupted run holds is a balanced sample.
    order = list(by_task.values())
    rng.shuffle(order)
    turns = max(map(len, order), default=0)
    chosen = [part[i] for i in range(turns) for part in order if i < len(part)]
    return chosen[: config.limit]


def _engine_config(bundle: Bundle, config: MeasureConfig, share: float) -> GpuEngineConfig:
    arguments = {"share": share, "lanes": config.lanes, "seed": config.seed, **config.gpu_arguments}
    worker = GpuWorkerConfig(config.gpu, arguments, config.plan, config.run_timeout_s, config.cold)
    compilers = config.compilers or max(1, len(os.sched_getaffinity(0)) - 1)
    return GpuEngineConfig(worker, bundle.arch, compilers, hang_s=config.hang_s, overlap=config.overlap)


def _check_gpu(bundle: Bundle, facts: GpuFacts) -> None:
    """Refuse a GPU that is not the one that the records would name."""
    base = bundle.device.partition("@")[0]
    model = str(bundle.note["devices"][base].get("model", ""))
    if not is_model(facts.name, model):
        raise ProfilerError(f"the bundle is for {base} ({model}), and this is a {facts.name}")
    if facts.arch != bundle.arch:
        raise ProfilerError(f"the bundle is for {bundle.arch}, and this GPU is {facts.arch}")


def _degrees(
    todo: Sequence[BundledProgram], engine: CudaEngine, config: MeasureConfig, say: Callable[[str], None]
) -> tuple[dict[int, int], list[GroupResult]]:
    """Degree by group of programs: as asked for, or calibrated."""
    groups: dict[int, list[MeasureJob]] = defaultdict(list)
    for kernel in todo:
        if kernel.status == "ok" and kernel.cuda is not None:
            groups[possible_degree(kernel.cuda, engine.facts)].append(MeasureJob(kernel))
    if config.degree != "auto":
        return {group: min(group, int(config.degree)) for group in groups}, []
    sample = {
        group: jobs[:: max(1, len(jobs) // config.calibration_programs)][: config.calibration_programs]
        for group, jobs in sorted(groups.items())
    }
    degrees, results = calibrate_groups(engine, sample, config.tolerance)
    for result in results:
        say(
            f"programs of which {result.group} fit: {result.degree} side by side differ from alone by "
            f"{100 * result.median_difference:.1f} % in the median (alone again "
            f"{100 * result.alone_again:.1f} %), Spearman {result.spearman:.3f}, {result.labels_per_s:.0f} labels/s "
            f"against {result.labels_per_s_alone:.0f}: " + ("accepted" if result.accepted else "refused")
        )
    return degrees, results


def _jobs(
    bundle: Bundle,
    todo: Sequence[BundledProgram],
    degrees: Mapping[int, int],
    facts: GpuFacts,
    config: MeasureConfig,
) -> Iterator[MeasureJob]:
    """Block by block, and in each by degree; the first programs of a task are checked against its reference."""
    checked: Counter[str] = Counter()
    for start in range(0, len(todo), _BLOCK):
        jobs = []
        for kernel in todo[start : start + _BLOCK]:
            degree, reference = 1, None
            if kernel.status == "ok" and kernel.cuda is not None:
                degree = degrees[possible_degree(kernel.cuda, facts)]
                task = bundle.programs[kernel.program].task_hash
                if checked[task] < config.check_per_task:
                    reference = bundle.references.get(task)
                    checked[task] += reference is not None
            jobs.append(MeasureJob(kernel, degree, reference))
        yield from sorted(jobs, key=lambda job: job.degree)


def _best(
    dataset: Dataset, device: str, kernels: Sequence[BundledProgram], config: MeasureConfig
) -> list[MeasureJob]:
    """The fastest programs of each task, unless they were measured alone."""
    import json

    frame = dataset.records
    frame = frame[(frame["device"] == device) & (frame["status"] == "ok")]
    meta = [json.loads(text) if text else {} for text in frame["meta"]]
    frame = frame.assign(alone=[m.get("degree", 1) == 1 for m in meta])
    alone = set(frame.loc[frame["alone"], "program"])
    by_hash = {k.program: k for k in kernels}
    wanted = []
    for _, part in frame.sort_values("latency_s").drop_duplicates("program").groupby("task"):
        wanted += [h for h in part["program"].head(config.best_per_task) if h not in alone and h in by_hash]
    return [MeasureJob(by_hash[h]) for h in wanted]


class _Run:
    """Puts outcomes into the dataset as they come."""

    def __init__(
        self,
        dataset: Dataset,
        bundle: Bundle,
        device: str,
        common: dict[str, Any],
        done: int,
        total: int,
        progress: Callable[[MeasureProgress], None] | None,
    ) -> None:
        self._dataset, self._bundle, self._device, self._common = dataset, bundle, device, common
        self._done, self._total, self._progress = done, total, progress
        self._started = time.perf_counter()
        self.new = self.ok = self.checked = 0
        self.failures: Counter[str] = Counter()
        self.stopped = False

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def take_all(
        self,
        outcomes: Iterator[GpuOutcome],
        max_seconds: float | None,
        say: Callable[[str], None],
        alone: bool = False,
    ) -> None:
        for outcome in outcomes:
            self._take(outcome, alone)
            if max_seconds is not None and self.elapsed_s > max_seconds:
                self.stopped = True
                say(f"stopped after {max_seconds:g} s; go on with --resume")
                return

    def _take(self, outcome: GpuOutcome, alone: bool) -> None:
        bundle, kernel = self._bundle, outcome.job.kernel
        program = bundle.programs[kernel.program]
        self._dataset.add_task(bundle.tasks[program.task_hash])
        if program.space_hash is not None:
            self._dataset.add_space(bundle.spaces[program.space_hash])
        self._dataset.add_program(program)
        meta: dict[str, Any] = {**self._common, "workers": outcome.job.degree, **outcome.meta}
        if kernel.resources:
            meta["resources"] = {name: dict(r) for name, r in kernel.resources.items()}
        if alone:
            meta["alone"] = True
        self._dataset.add_record(
            Record(
                program=kernel.program,
                device=self._device,
                status=outcome.status,
                latency_s=outcome.latency_s,
                samples_s=outcome.samples_s,
                noise=outcome.noise,
                error=outcome.error,
                measured_at=time.time(),
                meta=meta,
            )
        )
        self.new += 1
        self.checked += bool(outcome.meta.get("checked")) or outcome.error.startswith("wrong output")
        if outcome.status == "ok":
            self.ok += 1
        else:
            self.failures[outcome.status] += 1
        if self._progress is not None:
            done = self._done + self.new
            failures = dict(self.failures)
            total = max(done, self._total)
            self._progress(MeasureProgress(done, total, self.new, self.ok, failures, self.elapsed_s))


def _note_session(
    dataset: Dataset,
    bundle: Bundle,
    device: str,
    config: MeasureConfig,
    facts: GpuFacts,
    degrees: Mapping[int, int],
    results: Sequence[GroupResult],
) -> str:
    """Write down what the session's labels depend on; returns its name."""
    versions = {}
    for package in ("cdmpp", "cupy-cuda13x", "cuda-bindings", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    session = uuid.uuid4().hex[:12]
    entry = {
        "session": session,
        "started_at": time.time(),
        "device": device,
        "gpu": facts.to_json(),
        "machine": {
            "kernel": platform.release(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        },
        "bundle": {key: bundle.note.get(key) for key in ("compiler", "arch", "versions", "made_at")},
        "versions": versions,
        "sampling": asdict(config.plan),
        "cache": "cold" if config.cold else "warm",
        "from_source": config.from_source,
        "overlap": config.overlap,
        "degrees": {str(group): degree for group, degree in degrees.items()},
        "calibration": [result.to_json() for result in results],
        "seed": config.seed,
    }
    facts_of = bundle.note["devices"].get(device)
    if facts_of is not None:
        # Partitions come in units: the count of the table is what was asked for, this is what there was.
        dataset.set_device(Device.from_json({**facts_of, "cores_used": facts.share_sms}))
    families = {**dataset.meta.get("network_families", {}), **bundle.note.get("network_families", {})}
    sessions = [*dataset.meta.get("sessions", []), entry]
    dataset.update_meta(sessions=sessions, network_families=families)
    return session
