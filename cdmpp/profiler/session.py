"""Profiling: from networks (or another dataset) and a device to a dataset of measured programs."""

from __future__ import annotations

import json
import logging
import platform
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.device.detect import machine_facts
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler.calibration import Calibration, calibrate, core_groups
from cdmpp.profiler.engine import CpuEngine, EngineConfig, Outcome
from cdmpp.profiler.machine import usable_cores
from cdmpp.profiler.plan import ReplayPlan, TaskPlan, UnscheduledPlan
from cdmpp.profiler.statistics import SamplingPlan

if TYPE_CHECKING:
    from cdmpp.dataset import Dataset
    from cdmpp.device import Device
    from cdmpp.profiler.build import BuildJob
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileConfig:
    """Options of :func:`profile`; see there and :class:`~cdmpp.profiler.engine.EngineConfig`.

    ``unscheduled`` measures each task as it is in place of drawing programs of it.
    """

    programs_per_task: int = 64
    unscheduled: bool = False
    search_fraction: float = 0.25
    workers: int | str = "auto"
    builders: int | None = None
    seed: int = 0
    tolerance: float = 0.02
    calibration_programs: int = 40
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    batch_size: int = 8
    plan: SamplingPlan = field(default_factory=SamplingPlan)
    realtime: bool = True
    object_cache: str | None = None
    limit: int | None = None
    max_seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where a profiling run stands; ``total`` is what it will measure at most, earlier runs included."""

    done: int
    total: int
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float

    @property
    def rate_per_s(self) -> float:
        """Programs per second since the start of this run."""
        return self.new / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class ProfileReport:
    """What a run of :func:`profile` did."""

    path: Path
    device: str
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float
    workers: int
    calibration: Calibration | None


def profile(
    networks: Sequence[Network | str] = (),
    *,
    device: str | Device = "this-cpu@1",
    out: str | Path,
    config: ProfileConfig | None = None,
    tasks: Sequence[str] | None = None,
    programs_of: str | Path | None = None,
    resume: bool = False,
    remeasure: bool = False,
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> ProfileReport:
    """Measure programs on a CPU share of this machine and store them in a dataset.

    Parameters
    ----------
    networks
        Zoo names, ``.onnx``/``.pt2`` files or :class:`~cdmpp.program.network.Network` objects.
    device
        A CPU of this machine with a share, such as ``this-cpu@1`` or ``this-cpu.x86-64-v2@1``.
    out
        Folder of the dataset.
    tasks
        Hashes of the tasks to profile; all if None.
    programs_of
        Measure the programs of this dataset in place of drawing new ones from networks.
    resume
        Go on with the dataset in `out`; programs that have a record are not measured again.
    remeasure
        With `programs_of`: measure them once more though the dataset in `out` has them (label quality).
    progress, notify
        Called with the state after each outcome, and with one-line news (calibration, ...).

    Returns
    -------
    ProfileReport

    Raises
    ------
    ProfilerError
        The device is not on this machine, or nothing can be measured.
    DatasetError
        `out` holds a dataset and `resume` was not asked for; the disk is full. What was measured is kept.
    """
    from cdmpp.dataset import Dataset
    from cdmpp.device import get_device

    config = config or ProfileConfig()
    say = notify or (lambda line: logger.info("%s", line))
    target_device = get_device(device) if isinstance(device, str) else device
    threads = _threads(target_device)
    path = Path(out)
    if (path / "meta.json").exists() and not (resume or remeasure):
        raise DatasetError(f"{path} holds a dataset already: go on with --resume, or choose another folder")

    plan: TaskPlan | ReplayPlan | UnscheduledPlan
    families: dict[str, str] = {}
    if programs_of is not None:
        source = Dataset.open(programs_of)
        families = dict(source.network_families)
        plan = ReplayPlan(source, limit=config.limit, tasks=tasks, seed=config.seed)
        if remeasure and config.limit is None:
            raise ProfilerError("re-measuring needs a limit: how many programs?")
    else:
        chosen, families = _tasks(networks, tasks, path, say)
        plan = (
            UnscheduledPlan(chosen)
            if config.unscheduled
            else TaskPlan(
                chosen,
                config.programs_per_task,
                search_fraction=config.search_fraction,
                num_cores=threads,
                seed=config.seed,
            )
        )
    if not plan.tasks:
        where = "these networks" if programs_of is None else f"those that {programs_of} has latencies of"
        raise ProfilerError(f"no task to profile: none of the tasks asked for is among {where}")

    with Dataset.open_or_create(path) as dataset:
        dataset.set_device(target_device)
        if not remeasure:
            for program, latency_s in _known(dataset, target_device.name):
                plan.learn(program, latency_s)
        if not isinstance(plan, ReplayPlan) and tasks is None:
            # A task is stored before it is measured, so that a resumed run need not import the networks again.
            for task in plan.tasks:
                dataset.add_task(task)
            complete = {*dataset.meta.get("complete_networks", []), *families}
            dataset.update_meta(complete_networks=sorted(complete))
        session, started = uuid.uuid4().hex[:12], time.time()
        engine_config = EngineConfig(
            target=dict(target_device.target),
            core_groups=core_groups(usable_cores(), threads, 1),
            builders=config.builders or len(usable_cores()),
            batch_size=config.batch_size,
            build_timeout_s=config.build_timeout_s,
            run_timeout_s=config.run_timeout_s,
            plan=config.plan,
            realtime=config.realtime,
            object_cache=config.object_cache,
        )
        from cdmpp.profiler.reference import reference_job

        reference = reference_job()
        degree, calibration = _degree(config, engine_config, reference, plan, threads, say)
        engine_config = EngineConfig(
            **{**_shallow(engine_config), "core_groups": core_groups(usable_cores(), threads, degree)}
        )
        _note_session(dataset, session, started, target_device, engine_config, config, calibration, families)
        measured = _Measuring(dataset, target_device.name, plan, session, degree, threads, progress)
        try:
            with CpuEngine(engine_config, reference) as engine:
                for outcome in engine.run(plan.jobs()):
                    measured.take(outcome)
                    if config.max_seconds is not None and measured.elapsed_s > config.max_seconds:
                        say(f"stopped after {config.max_seconds:g} s; go on with --resume")
                        break
        finally:
            dataset.flush()
        if not measured.new and not measured.known:
            raise ProfilerError("nothing was measured")
        dataset.finalize()
    return ProfileReport(
        path,
        target_device.name,
        measured.new,
        measured.ok,
        dict(measured.failures),
        measured.elapsed_s,
        degree,
        calibration,
    )


class _Measuring:
    """Puts outcomes into the dataset as they come."""

    def __init__(
        self,
        dataset: Dataset,
        device: str,
        plan: TaskPlan | ReplayPlan | UnscheduledPlan,
        session: str,
        workers: int,
        threads: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._dataset, self._device, self._plan = dataset, device, plan
        self._meta = {"session": session, "workers": workers, "threads": threads, "cache": "warm"}
        self._progress = progress
        self._started = time.perf_counter()
        self.known = plan.known
        self.new = self.ok = 0
        self.failures: Counter[str] = Counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def take(self, outcome: Outcome) -> None:
        from cdmpp.dataset import Record

        job = outcome.job
        self._dataset.add_task(job.task)
        if job.space is not None:
            self._dataset.add_space(job.space)
        self._dataset.add_program(job.program)
        self._dataset.add_record(
            Record(
                program=job.program.hash,
                device=self._device,
                status=outcome.status,
                latency_s=outcome.latency_s,
                samples_s=outcome.samples_s,
                noise=outcome.noise,
                error=outcome.error,
                measured_at=time.time(),
                meta={**self._meta, **outcome.meta},
            )
        )
        self._plan.done(outcome)
        self.new += 1
        if outcome.status == "ok":
            self.ok += 1
        else:
            self.failures[outcome.status] += 1
        if self._progress is not None:
            self._progress(
                Progress(
                    self.known + self.new,
                    max(self._plan.total, self.new),
                    self.new,
                    self.ok,
                    dict(self.failures),
                    self.elapsed_s,
                )
            )


def _threads(device: Device) -> int:
    """Cores of the share, checked against this machine."""
    from cdmpp.device import get_device

    if device.kind != "cpu":
        raise ProfilerError(
            f"{device.name} is a {device.kind}: cdmpp.profiler.profile_gpu measures those of this machine, "
            "cdmpp bundle and cdmpp measure those of another"
        )
    here = get_device("this-cpu")
    if device.base != here.base:
        raise ProfilerError(f"{device.name} is not this machine, which is {here.name}")
    threads = int(device.share)
    if threads != device.share or not 1 <= threads <= len(usable_cores()):
        raise ProfilerError(f"{device.name}: this process may use {len(usable_cores())} whole cores")
    return threads


def _tasks(
    networks: Sequence[Network | str], wanted: Sequence[str] | None, path: Path, say: Callable[[str], None]
) -> tuple[list[Task], dict[str, str]]:
    from cdmpp.program.network import load_network
    from cdmpp.program.tasks import extract_tasks

    loaded = [load_network(n) if isinstance(n, str) else n for n in networks]
    if not loaded:
        raise ProfilerError("no network to profile")
    tasks = _stored_tasks(loaded, path)
    if tasks is None:
        tasks = extract_tasks(loaded, progress=lambda name, i, n: say(f"importing {name} ({i}/{n})"))
    if wanted is not None:
        missing = set(wanted) - {t.hash for t in tasks}
        if missing:
            raise ProfilerError(
                f"{len(missing)} wanted tasks are not of these networks, first {min(missing)}"
            )
        tasks = [t for t in tasks if t.hash in set(wanted)]
    say(f"{len(tasks)} tasks of {len(loaded)} networks")
    return tasks, {n.name: n.family for n in loaded}


def _stored_tasks(networks: Sequence[Network], path: Path) -> list[Task] | None:
    """All tasks of the networks, from the dataset that a resumed run goes on with.

    Only of networks of the zoo, of which a name says everything: importing all of it takes minutes.
    """
    from cdmpp.dataset import Dataset

    names = {n.name for n in networks}
    if not (path / "meta.json").exists() or any(n.source != "zoo" for n in networks):
        return None
    dataset = Dataset.open(path)
    if not names <= set(dataset.meta.get("complete_networks", [])):
        return None
    return [t for t in dataset.tasks.values() if names & set(t.networks)]


def read_task_file(path: str | Path) -> list[str]:
    """Task hashes from a file: JSON with a list ``tasks``, or one hash a line.

    Raises
    ------
    ProfilerError
        It cannot be read or holds no hash.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        hashes = json.loads(text)["tasks"] if text.lstrip().startswith("{") else text.split()
    except (OSError, ValueError, KeyError) as err:
        raise ProfilerError(f"{path} is no task file (JSON with 'tasks', or one hash a line): {err}") from err
    if not hashes:
        raise ProfilerError(f"{path} names no task")
    return [str(h) for h in hashes]


def _known(dataset: Dataset, device: str) -> list[tuple[Any, float | None]]:
    frame = dataset.records
    frame = frame[frame["device"] == device]
    latencies = {
        str(row.program): (float(row.latency_s) if row.status == "ok" else None) for row in frame.itertuples()
    }
    return [(dataset.programs[p], value) for p, value in latencies.items() if p in dataset.programs]


def _degree(
    config: ProfileConfig,
    engine_config: EngineConfig,
    reference: BuildJob,
    plan: TaskPlan | ReplayPlan | UnscheduledPlan,
    threads: int,
    say: Callable[[str], None],
) -> tuple[int, Calibration | None]:
    cores = usable_cores()
    if config.workers != "auto":
        degree = int(config.workers)
        core_groups(cores, threads, degree)  # raises where there are not enough cores
        return degree, None
    if len(cores) // threads == 1:
        return 1, None
    jobs = _calibration_jobs(plan, config.calibration_programs, config.seed)
    say(f"calibrating the degree of parallelism on {len(jobs)} programs")
    calibration = calibrate(
        engine_config, jobs, reference, cores=cores, threads=threads, tolerance=config.tolerance
    )
    for result in calibration.results:
        say(
            f"degree {result.degree}: labels differ from solo ones by {100 * result.median_difference:.1f} % in the "
            f"median, {100 * result.mean_difference:.1f} % in the mean (solo against solo "
            f"{100 * calibration.alone_again.median_difference:.1f} %), {result.labels_per_s:.1f} labels/s: "
            + ("accepted" if result.accepted else "refused")
        )
    return calibration.degree, calibration


def _calibration_jobs(plan: TaskPlan | ReplayPlan | UnscheduledPlan, n: int, seed: int) -> list[BuildJob]:
    """A few programs of tasks spread over the range of work."""
    import itertools

    from cdmpp.profiler.build import BuildJob
    from cdmpp.program.space import iter_spaces

    if not isinstance(plan, TaskPlan):
        jobs = [j for j in plan.jobs() if j is not None]
        return jobs[:: max(1, len(jobs) // n)][:n]
    ordered = sorted(plan.tasks, key=lambda t: t.flops)
    chosen = ordered[:: max(1, -(-len(ordered) // max(1, n // 2)))]
    per_task = max(1, -(-n // len(chosen)))
    found: list[BuildJob] = []
    for spaces in iter_spaces(chosen, plan.rule, plan.num_cores):
        by_hash = {s.hash: s for s in spaces.spaces}
        programs = spaces.sample(per_task, seed + 1_000_003)
        found += [BuildJob(p, spaces.task, by_hash[str(p.space_hash)]) for p in programs]
    return list(itertools.islice(found, n))


def _shallow(config: EngineConfig) -> dict[str, Any]:
    from dataclasses import fields

    return {f.name: getattr(config, f.name) for f in fields(config)}


def _note_session(
    dataset: Dataset,
    session: str,
    started: float,
    device: Device,
    engine: EngineConfig,
    config: ProfileConfig,
    calibration: Calibration | None,
    families: dict[str, str],
) -> None:
    """Write down the machine, the versions and the settings that the session's labels depend on."""
    versions = {}
    for package in ("cdmpp", "apache-tvm", "apache-tvm-ffi", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    entry = {
        "session": session,
        "started_at": started,
        "device": device.name,
        "machine": {
            **machine_facts(),
            "usable_cores": list(usable_cores()),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "target": engine.target,
        "versions": versions,
        "workers": len(engine.core_groups),
        "core_groups": engine.core_groups,
        "builders": engine.builders,
        "batch_size": engine.batch_size,
        "build_timeout_s": engine.build_timeout_s,
        "run_timeout_s": engine.run_timeout_s,
        "sampling": asdict(engine.plan),
        "cache": "warm",
        "seed": config.seed,
        "calibration": None if calibration is None else calibration.to_json(),
    }
    sessions = [*dataset.meta.get("sessions", []), entry]
    known = dict(dataset.meta.get("network_families", {}))
    dataset.update_meta(sessions=sessions, network_families={**known, **families})
