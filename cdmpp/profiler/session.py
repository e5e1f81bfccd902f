"""Profiling: from networks (or another dataset) and a device to a dataset of measured programs."""

from __future__ import annotations

import logging
import platform
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import Dataset
from cdmpp.device import Device, get_device
from cdmpp.device.table import machine_facts
from cdmpp.errors import DatasetError, ProfilerError, raised_as
from cdmpp.files import parse_json, read_text
from cdmpp.profiler.core_rates import with_clock
from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer, sentinel_job, threads_of
from cdmpp.profiler.engine import Engine, Executor, Outcome, add_outcome
from cdmpp.profiler.machine import core_groups, installed, usable_cores
from cdmpp.profiler.plan import Plan, TaskPlan, network_tasks, replay_plan, unscheduled_plan

if TYPE_CHECKING:
    from cdmpp.profiler.calibration import Calibration
    from cdmpp.program.network import Network

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(CpuConfig):
    """Options of :func:`profile`."""

    #: These two: see :class:`~cdmpp.profiler.plan.TaskPlan`.
    programs_per_task: int = 64
    search_fraction: float = 0.25
    #: Measure each task without a schedule, instead of drawing programs of it.
    unscheduled: bool = False
    #: Number of programs measured at the same time; ``auto`` finds how many do not change the labels.
    workers: int | str = "auto"
    #: For ``auto``: accepted median difference from labels taken alone; the mean may be twice as large.
    tolerance: float = 0.02
    #: For ``auto``: number of programs to compare labels of.
    calibration_programs: int = 40
    #: Most programs to measure of another dataset's, spread evenly over the tasks.
    limit: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    #: Build and measure on a Ray cluster: HOST:PORT of its head, or ``local`` (:func:`cdmpp.profiler.ray.connect`).
    ray: str | None = None
    #: Measure on the boards with ``key`` at the TVM RPC tracker HOST:PORT (:func:`cdmpp.profiler.rpc.connect`).
    rpc: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Progress:
    """The state of a run: ``done`` of at most ``total`` programs, earlier runs included; ``new`` outcomes of this run, which
    are ``ok`` or ``failures`` (by kind)."""

    done: int
    total: int
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float


@dataclass(frozen=True)
class Report:
    """What a run did; its time does not include the calibration."""

    path: Path
    device: str
    new: int
    ok: int
    failures: dict[str, int]
    elapsed_s: float


@dataclass(frozen=True)
class ProfileReport(Report):
    """What a run of :func:`profile` did."""

    workers: int
    calibration: Calibration | None


class Session:
    """One run: its records and metadata, its progress, and when it stops. Of at most ``total()`` programs (it may fall),
    `known` have a record already. The `settings` that the labels depend on are written when the run starts, with the machine
    and the versions of `packages`; time counts from then on."""

    def __init__(
        self,
        dataset: Dataset,
        device: str,
        settings: Mapping[str, Any],
        families: Mapping[str, str],
        packages: Sequence[str],
        *,
        known: int,
        total: Callable[[], int],
        max_seconds: float | None,
        progress: Callable[[Progress], None] | None,
        notify: Callable[[str], None],
    ) -> None:
        self._dataset, self._device, self._known, self._total = dataset, device, known, total
        self._max_seconds, self._progress, self._notify = max_seconds, progress, notify
        self.name = uuid.uuid4().hex[:12]
        self.new = self.ok = 0
        self.failures: Counter[str] = Counter()
        self.stopped = False
        entry = {
            "session": self.name,
            "started_at": time.time(),
            "device": device,
            "machine": {
                **machine_facts(),
                "usable_cores": list(usable_cores()),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "versions": installed("cdmpp", "numpy", *packages),
            **settings,
        }
        meta = dataset.meta
        dataset.update_meta(
            sessions=[*meta.get("sessions", []), entry], network_families={**meta.get("network_families", {}), **families}
        )
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def take(
        self, outcomes: Iterable[Outcome], meta: Mapping[str, Any] | None, done: Callable[[Outcome], None] | None = None
    ) -> None:
        """Put outcomes into the dataset as they come, until the time is up, or all if it was up before; `meta` goes into every
        record (None: write no records), and `done` is called with each outcome."""
        for outcome in outcomes:
            if meta is not None:
                add_outcome(self._dataset, self._device, outcome, {"session": self.name, **meta})
            if done is not None:
                done(outcome)
            self.new += 1
            if outcome.status == "ok":
                self.ok += 1
            else:
                self.failures[outcome.status] += 1
            if self._progress is not None:
                count, failures = self._known + self.new, dict(self.failures)
                total = max(self._total(), count)
                self._progress(Progress(count, total, self.new, self.ok, failures, self.elapsed_s))
            if not self.stopped and self._max_seconds is not None and self.elapsed_s > self._max_seconds:
                self.stopped = True
                self._notify(f"stopped after {self._max_seconds:g} s; go on with --resume")
                return

    def report(self) -> Report:
        """Finish the dataset (ProfilerError if nothing was ever measured)."""
        if not self.new and not self._known:
            raise ProfilerError("nothing was measured")
        report = Report(self._dataset.path, self._device, self.new, self.ok, dict(self.failures), self.elapsed_s)
        self._dataset.finalize()
        return report


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
    """Measure programs on a CPU share of this machine, or of a cluster's nodes, and store them in a dataset here. ``networks``
    are zoo names, ``.onnx``/``.pt2`` files or :class:`~cdmpp.program.network.Network` objects, whose ``tasks`` (hashes, None:
    all) are profiled; with ``programs_of``, the programs of that dataset are measured. ``device`` is a CPU with a share,
    such as ``this-cpu@1``. ``resume`` continues the dataset in ``out``; ``remeasure`` with ``programs_of`` measures programs
    once more that it already has (label quality). ``progress`` is called with the state after each outcome, ``notify`` with
    one-line messages.

    ProfilerError if the device is not here, or nothing can be measured. DatasetError if `out` holds a dataset and `resume` is
    not set, or the disk is full; what was measured is kept."""
    config, notify = config or ProfileConfig(), notify or logger.info
    path, calibration = Path(out), None
    refuse_to_replace(path, resume or remeasure)
    if remeasure and (programs_of is None or config.limit is None):
        raise ProfilerError("--remeasure needs --programs-of, the dataset, and --limit, how many of its programs")
    executor: Executor | None = None
    if config.ray is not None:
        from cdmpp.profiler import ray

        executor = cluster = ray.connect(config.ray, device, config.workers)
        device = measured = cluster.device
    else:
        device = measured = get_device(device)
        if config.rpc is None:
            threads_of(device)
            measured = with_clock(device)
        else:
            from cdmpp.profiler import rpc

            executor = rpc.connect(config.rpc, config.key, device, config.workers)
    threads = int(device.share)
    plan, families = _plan(networks, config, threads, path, tasks, programs_of, notify)
    with Dataset.open_or_create(path) as dataset:
        dataset.set_device(measured)
        if not remeasure:
            records = dataset.records
            for row in records[records["device"] == device.name].itertuples():
                if row.program in dataset.programs:
                    latency_s = float(row.latency_s) if row.status == "ok" else None
                    plan.learn(dataset.programs[row.program], latency_s)
        if programs_of is None and tasks is None:
            # A task is stored before it is measured, so that a resumed run need not import the networks again.
            for task in plan.tasks:
                dataset.add_task(task)
            complete = {*dataset.meta.get("complete_networks", []), *families}
            dataset.update_meta(complete_networks=sorted(complete))
        if executor is None:
            degree, calibration = _degree(config, device, plan, threads, notify)
            executor = Executor(core_groups(usable_cores(), threads, degree))
        settings = {
            # labels do not depend on this machine's folders
            **asdict(replace(config, object_cache=None, work_dir=None)),
            "target": dict(device.target),
            **executor.facts(),
            "workers": executor.degree,
            "builders": executor.builder_count(config.builders),
            "sampling": asdict(config.plan),
            "cache": "warm",
            "calibration": None if calibration is None else asdict(calibration),
        }
        watch: dict[str, Any] = {"max_seconds": config.max_seconds, "progress": progress, "notify": notify}
        packages = ("apache-tvm", "apache-tvm-ffi")
        session = Session(
            dataset, device.name, settings, families, packages, known=plan.known, total=lambda: plan.total, **watch
        )
        measurer = CpuMeasurer(config, device.target, executor, sentinel_job())
        with Engine(measurer) as engine:
            meta = {"workers": executor.degree, "threads": threads, "cache": "warm"}
            if config.rpc is not None:
                meta["rpc"] = config.key
            try:
                session.take(engine.run(plan.jobs()), meta, plan.done)
            finally:
                session.take(measurer.labelled(), meta, plan.done)
        return ProfileReport(**vars(session.report()), workers=executor.degree, calibration=calibration)


def refuse_to_replace(path: Path, resume: bool) -> None:
    """DatasetError if the folder holds a dataset with a program and `resume` is not set."""
    if not resume and (path / "meta.json").exists() and Dataset.open(path).programs:
        raise DatasetError(f"{path} holds a dataset already: go on with --resume, or choose another folder")


def _plan(
    networks: Sequence[Network | str],
    config: ProfileConfig,
    threads: int,
    path: Path,
    tasks: Sequence[str] | None,
    programs_of: str | Path | None,
    notify: Callable[[str], None],
) -> tuple[Plan, dict[str, str]]:
    """The plan of what to measure, and the networks' families (ProfilerError if there is nothing to measure)."""
    plan: Plan
    if programs_of is not None:
        source = Dataset.open(programs_of)
        plan, families = replay_plan(source, limit=config.limit, tasks=tasks, seed=config.seed), dict(source.network_families)
        if not plan.tasks:
            raise ProfilerError(f"no task: none of the tasks asked for is among those that {programs_of} has latencies of")
    else:
        chosen, families = network_tasks(networks, notify, resumed=path, wanted=tasks)
        if config.unscheduled:
            plan = unscheduled_plan(chosen)
        else:
            count, fraction = config.programs_per_task, config.search_fraction
            plan = TaskPlan(chosen, count, search_fraction=fraction, num_cores=threads, seed=config.seed)
    return plan, families


def _degree(
    config: ProfileConfig, device: Device, plan: Plan, threads: int, notify: Callable[[str], None]
) -> tuple[int, Calibration | None]:
    """Number of measuring processes at the same time, as asked for or calibrated; and the calibration, if one was made."""
    if config.workers != "auto" or len(usable_cores()) // threads <= 1:
        return 1 if config.workers == "auto" else int(config.workers), None
    from cdmpp.profiler.calibration import calibrate_cpu

    jobs = plan.calibration_jobs(config.calibration_programs)
    calibration = calibrate_cpu(jobs, config, device, config.tolerance, notify)
    return calibration.degree, calibration


def read_task_file(path: str | Path) -> list[str]:
    """Task hashes from a file: JSON with a list ``tasks``, or one hash a line (ProfilerError if it holds none)."""
    with raised_as(ProfilerError, f"{path} is no task file (JSON with 'tasks', or one hash a line)", KeyError):
        text = read_text(path)
        hashes = parse_json(text)["tasks"] if text.lstrip().startswith("{") else text.split()
        if not isinstance(hashes, list):
            raise ValueError(f"'tasks' is {hashes!r:.40}, expected a list")
    if not hashes:
        raise ProfilerError(f"{path} names no task")
    return [str(h) for h in hashes]
