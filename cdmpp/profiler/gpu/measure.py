"""Measures a bundle on this machine's GPU, without TVM or a device table. If TVM is installed too, can also compile first."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset
from cdmpp.device import Device, DeviceTable, get_device
from cdmpp.errors import DatasetError, ProfilerError, UnknownDeviceError
from cdmpp.profiler.calibration import DegreeResult, Labels, calibrate, halved, timed_labels
from cdmpp.profiler.engine import Engine, Outcome
from cdmpp.profiler.gpu.build import KernelJob, MeasureJob
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, read_bundle
from cdmpp.profiler.gpu.make import BundleConfig, make_bundle
from cdmpp.profiler.gpu.sampling import GpuConfig, GpuFacts, GpuMeasurer, is_model, possible_degree
from cdmpp.profiler.plan import evenly
from cdmpp.profiler.session import Progress, Report, Session

logger = logging.getLogger(__name__)

#: Programs are sorted by degree in blocks of this size, because switching degrees empties the lanes.
_BLOCK = 512
#: Minimum rank correlation between labels measured side by side and labels measured alone.
_MIN_SPEARMAN = 0.99
#: The bundle inside the dataset's folder.
BUNDLE_FILE = "programs.bundle"
#: What to do if this machine has no GPU, for error messages.
ELSEWHERE = "compile with `cdmpp bundle` here and run `cdmpp measure` where the GPU is"


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(GpuConfig):
    """Options of :func:`measure`."""

    degree: int | str = "auto"
    build_timeout_s: float = 30.0
    #: The calibration accepts a degree if labels differ from those measured alone by at most this in the median.
    tolerance: float = 0.02
    #: Programs that the calibration measures of each group.
    calibration_programs: int = 24
    #: Fastest programs of each task that are measured again alone, unless they already were.
    best_per_task: int = 1
    #: Programs of each task whose output is compared with the reference, where there is one.
    check_per_task: int = 2
    #: Compile from source even if there are cubins.
    from_source: bool = False
    #: Measure only this many programs, spread evenly over the tasks.
    limit: int | None = None
    max_seconds: float | None = None


@dataclass(frozen=True)
class MeasureReport(Report):
    """What a run of :func:`measure` did. ``labels_per_s`` excludes the calibration. ``degrees`` and ``calibration`` are by
    group: the programs of which a given number fit side by side (:func:`~cdmpp.profiler.gpu.sampling.possible_degree`)."""

    labels_per_s: float
    restarts: int
    checked: int
    degrees: dict[int, int]
    calibration: list[dict[str, Any]]
    facts: GpuFacts


def measure(
    bundle: str | Path | Bundle,
    *,
    out: str | Path,
    device: str | None = None,
    config: MeasureConfig | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> MeasureReport:
    """Measure the programs of a bundle on this machine's GPU and store them in a dataset. ``device`` is the bundle's device
    (None) or a share of it, such as ``h200@0.5``. ``resume`` continues the dataset in `out`. ``progress`` is called with the
    state after each outcome, ``notify`` with one-line messages.

    ProfilerError if the GPU is missing, of another model, lost, or cannot be partitioned. DatasetError if `out` holds records
    of this device and `resume` is False, or records of another device, or the disk is full. What was measured is kept."""
    config, notify = config or MeasureConfig(), notify or logger.info
    content = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    target_device, path = device_of(content, device), Path(out)
    name = target_device.name
    with Dataset.open_or_create(path) as dataset:
        known = dataset.measured(name, retry=("device_lost",))
        if known and not resume:
            raise DatasetError(f"{path} has records of {name} already: go on with --resume, or choose another folder")
        kernels = _chosen(content, config)
        measurer = GpuMeasurer(config, target_device, builds=False)
        with Engine(measurer) as engine:
            facts = measurer.facts
            notify(f"{facts.name}: {facts.share_sms} of {facts.sms} multiprocessors, {facts.lanes} lanes")
            todo = [k for k in kernels if k.program not in known]
            degrees, results = _degrees(content, todo, engine, facts, config, notify)
            # Partitions come in units: the device table has the requested number of cores, this is the actual one.
            dataset.set_device(replace(target_device, cores_used=facts.share_sms))
            settings = {
                **asdict(config),
                "gpu": asdict(facts),
                "bundle": {key: content.note.get(key) for key in ("compiler", "arch", "versions", "made_at")},
                "sampling": asdict(config.plan),
                "cache": "cold" if config.cold else "warm",
                "degrees": {str(group): degree for group, degree in degrees.items()},
                "calibration": results,
            }
            session = Session(
                dataset,
                name,
                settings,
                content.note.get("network_families", {}),
                ("cupy-cuda13x", "cuda-bindings"),
                known=len(kernels) - len(todo),
                total=lambda: len(kernels),
                max_seconds=config.max_seconds,
                progress=progress,
                notify=notify,
            )
            checked = 0

            def count(outcome: Outcome) -> None:
                nonlocal checked
                checked += bool(outcome.meta.get("checked")) or outcome.error.startswith("wrong output")

            meta = {"sms": facts.share_sms, "workers": 1}
            session.take(engine.run(_jobs(content, todo, degrees, facts, config)), meta, count)
            best = [] if session.stopped else _best(dataset, content, kernels, config)
            if best:
                notify(f"measuring the {len(best)} best programs of their tasks again, alone")
                session.take(engine.run(iter(best)), {**meta, "alone": True}, count)
        labels_per_s = session.ok / max(session.elapsed_s, 1e-9)
        return MeasureReport(
            **vars(session.report()),
            labels_per_s=labels_per_s,
            restarts=measurer.restarts,
            checked=checked,
            degrees=degrees,
            calibration=results,
            facts=facts,
        )


def device_of(bundle: Bundle, name: str | None) -> Device:
    """The device to measure on: the bundle's device (`name` is None), or a share of it (ProfilerError for any other)."""
    base = bundle.device.partition("@")[0]
    whole = Device.from_json(bundle.note["devices"][base])
    try:
        device = DeviceTable([whole]).get(name or bundle.device)
    except UnknownDeviceError as err:
        raise ProfilerError(
            f"the bundle is for {base}: expected {base} or a share of it, such as {base}@0.5, not {name}"
        ) from err
    return replace(device, target={**whole.target, "arch": bundle.arch})


def _chosen(bundle: Bundle, config: MeasureConfig) -> list[BundledProgram]:
    """The programs to measure, one of each task in turn, so that a limit or an interruption leaves a balanced sample."""
    kernels = list(bundle.kernels)
    if config.from_source:
        kernels = [k if k.cuda is None else replace(k, cubin=b"") for k in kernels]
    for kernel in kernels:
        if kernel.status == "ok" and not kernel.cubin and not (kernel.cuda and kernel.cuda.source):
            raise ProfilerError(f"the bundle keeps no source, and program {kernel.program} has no cubin")
    by_task: dict[str, list[BundledProgram]] = defaultdict(list)
    for kernel in kernels:
        by_task[bundle.programs[kernel.program].task_hash].append(kernel)
    return evenly(by_task, config.seed)[: config.limit]


def job_of(bundle: Bundle, kernel: BundledProgram, **options: Any) -> KernelJob:
    """The job that measures a program of the bundle; `options` are fields of :class:`MeasureJob`."""
    program = bundle.programs[kernel.program]
    space = bundle.spaces.get(program.space_hash or "")
    return KernelJob(program, bundle.tasks[program.task_hash], space, MeasureJob(kernel, **options))


def _jobs(
    bundle: Bundle, kernels: Sequence[BundledProgram], degrees: Mapping[int, int], facts: GpuFacts, config: MeasureConfig
) -> Iterator[KernelJob]:
    """Jobs in blocks, each sorted by degree. The outputs of a task's first programs are checked against its reference."""
    checked: Counter[str] = Counter()
    for start in range(0, len(kernels), _BLOCK):
        jobs = []
        for kernel in kernels[start : start + _BLOCK]:
            degree, reference = 1, None
            if kernel.status == "ok" and kernel.cuda is not None:
                degree = degrees[possible_degree(kernel.cuda, facts)]
                task = bundle.programs[kernel.program].task_hash
                if checked[task] < config.check_per_task:
                    reference = bundle.references.get(task)
                    checked[task] += reference is not None
            jobs.append(job_of(bundle, kernel, degree=degree, reference=reference))
        yield from sorted(jobs, key=lambda job: job.measure.degree)


def _degrees(
    bundle: Bundle,
    kernels: Sequence[BundledProgram],
    engine: Engine,
    facts: GpuFacts,
    config: MeasureConfig,
    notify: Callable[[str], None],
) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Degree of each group of programs, as configured or calibrated on a sample of it; and the results of the calibration."""
    groups: dict[int, list[BundledProgram]] = defaultdict(list)
    for kernel in kernels:
        if kernel.status == "ok" and kernel.cuda is not None:
            groups[possible_degree(kernel.cuda, facts)].append(kernel)
    if config.degree != "auto":
        return {group: min(group, int(config.degree)) for group in groups}, []
    n = config.calibration_programs
    degrees: dict[int, int] = {}
    results: list[dict[str, Any]] = []
    for group, members in sorted(groups.items()):
        if group == 1:
            degrees[group] = 1
            continue
        sample = members[:: max(1, len(members) // n)][:n]

        def labels(degree: int | None, sample: Sequence[BundledProgram] = sample) -> Labels:
            return timed_labels(engine.run(iter([job_of(bundle, kernel, degree=degree or 1) for kernel in sample])))

        calibration = calibrate(labels, [d for d in halved(group) if d > 1], config.tolerance, _accept)
        degrees[group], alone = calibration.degree, calibration.alone_again
        for result in calibration.results:
            notify(f"programs of which {group} fit: {result}")
            differences = {"group": group, "alone_again": alone.median_difference}
            results.append({**differences, "labels_per_s_alone": alone.labels_per_s, **asdict(result)})
    return degrees, results


def _accept(result: DegreeResult, alone: DegreeResult) -> bool:
    in_order = result.spearman is None or result.spearman >= _MIN_SPEARMAN
    return in_order and result.labels_per_s > alone.labels_per_s


def _best(dataset: Dataset, bundle: Bundle, known: Sequence[BundledProgram], config: MeasureConfig) -> list[KernelJob]:
    """Jobs for the fastest programs of each task that were not measured alone."""
    frame = dataset.records
    frame = frame[frame["status"] == "ok"]
    meta = [json.loads(text) if text else {} for text in frame["meta"]]
    frame = frame.assign(alone=[m.get("degree", 1) == 1 for m in meta])
    alone = set(frame.loc[frame["alone"], "program"])
    by_hash = {k.program: k for k in known}
    wanted = []
    for _, part in frame.sort_values("latency_s").drop_duplicates("program").groupby("task"):
        wanted += [h for h in part["program"].head(config.best_per_task) if h not in alone and h in by_hash]
    return [job_of(bundle, by_hash[h]) for h in wanted]


def profile_gpu(
    networks: Sequence[str],
    *,
    device: str | Device,
    out: str | Path,
    bundle_config: BundleConfig | None = None,
    measure_config: MeasureConfig | None = None,
    tasks: Collection[str] | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> MeasureReport:
    """Measure programs of networks (`tasks`: of these alone) on a GPU of this machine. This needs TVM and cupy here; otherwise
    run ``cdmpp bundle`` and ``cdmpp measure`` on two machines. `out` becomes the dataset and contains the bundle, which is for
    the whole device even if a share is measured. ProfilerError, before anything is compiled: there is no such GPU here."""
    measure_config = measure_config or MeasureConfig()
    known = get_device(device)
    if measure_config.gpu == MeasureConfig().gpu:
        here = check_gpu()
        if not is_model(here, known.model):
            raise ProfilerError(f"{known.name} is not here, this machine has a {here}: {ELSEWHERE}")
    path = Path(out) / BUNDLE_FILE
    run: dict[str, Any] = {"resume": resume, "progress": progress, "notify": notify}
    if not (resume and path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        make_bundle(networks, device=known.base, out=path, config=bundle_config, tasks=tasks, **run)
    return measure(path, out=out, device=known.name, config=measure_config, **run)


def check_gpu(elsewhere: str = ELSEWHERE) -> str:
    """Name of this machine's GPU. ProfilerError, which says what to do instead, if cupy or a CUDA device is missing."""
    try:
        import cupy
    except ImportError as err:
        raise ProfilerError(f"measuring on a GPU needs cupy ({err}): {elsewhere}") from err
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as err:
        raise ProfilerError(f"no CUDA device answers ({err}): {elsewhere}") from err
    if not count:
        raise ProfilerError(f"this machine has no CUDA device: {elsewhere}")
    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
