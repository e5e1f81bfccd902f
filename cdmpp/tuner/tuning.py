"""Tuning a network, or a list of tasks, for a device of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import TunerError
from cdmpp.tuner.objective import Objective
from cdmpp.tuner.prepare import (
    core_groups_of,
    device_of_this_machine,
    make_cost_model,
    make_engine,
    make_tuners,
)
from cdmpp.tuner.results import TaskResult, TuneReport
from cdmpp.tuner.trimmer import check_coverage

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.statistics import SamplingPlan
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task
    from cdmpp.tuner.ledger import Ledger, Progress
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.shard_messages import ShardConfig
    from cdmpp.tuner.shards import Shard
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.task_tuner import SearchConfig, TaskTuner
    from cdmpp.tuner.validity import ValidityGuard, ValidityModel

logger = logging.getLogger(__name__)

#: Cost models by the names that the command line has for them.
COST_MODELS = ("cdmpp", "xgb", "random")


@dataclass(frozen=True)
class TuneConfig:
    """Options of :func:`tune`.

    Attributes
    ----------
    objective
        When to stop.
    cost_model
        One of :data:`COST_MODELS`: ours, TVM's XGBModel, TVM's RandomModel.
    predictor
        What ours starts from: a predictor, its folder or ``"default"``; None for an analytical estimate.
    trim
        Coverage of the intervals that the trimmer drops candidates by; None drops none. Only for ours.
    validity
        Which candidates will not run, and which to measure first: a validity model or its folder, a folder of failures to
        learn one from, ``"online"`` to learn it from this tuning's failures alone; None looks away.
    batch
        Candidates of a round.
    search
        MetaSchedule's evolutionary search; None for its defaults here.
    seed
        Of the search.
    workers, builders
        Measuring processes, each on cores of its own (on a GPU: programs measured side by side at most, each on
        multiprocessors of its own), and building processes (None: one a core).
    shards
        Workers that tune at the same time, each searching, building and measuring on a share of its own: a number, or
        ``"auto"`` for as many as fit. None: one search, that builds on all cores. Each has a partition of a GPU; one
        process measures for all of them there (:mod:`cdmpp.tuner.shard_service`).
    build_timeout_s, run_timeout_s, plan, realtime
        See :class:`~cdmpp.profiler.engine.EngineConfig` (of a GPU :class:`~cdmpp.profiler.gpu_engine.GpuConfig`).
    gpu, gpu_arguments
        A class as ``module:Class`` that stands for the GPU, and what it is made with; None for the GPU that is here.
    """

    objective: Objective
    cost_model: str = "cdmpp"
    predictor: Predictor | str | Path | None = "default"
    trim: float | None = 0.9
    validity: ValidityModel | str | Path | None = None
    batch: int = 16
    search: SearchConfig | None = None
    seed: int = 0
    workers: int = 1
    builders: int | None = None
    shards: int | str | None = None
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    plan: SamplingPlan | None = None
    realtime: bool = True
    gpu: str | None = None
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cost_model not in COST_MODELS:
            raise TunerError(f"no cost model {self.cost_model!r}; there are {', '.join(COST_MODELS)}")
        if isinstance(self.shards, str) and self.shards != "auto":
            raise TunerError(f"shards are a number or 'auto', got {self.shards!r}")
        if self.shards is not None and self.workers != 1:
            raise TunerError("each shard has one measuring process: choose shards or workers, not both")
        for name, number in (
            ("candidates of a round", self.batch),
            ("workers", self.workers),
            ("builders", self.builders),
        ):
            if number is not None and number < 1:
                raise TunerError(f"{name}: one at least, got {number}")
        for name, seconds in (("build", self.build_timeout_s), ("run", self.run_timeout_s)):
            if not seconds > 0:
                raise TunerError(f"the {name} timeout must be above 0 s, got {seconds:g}")
        if self.trim is not None:
            check_coverage(self.trim)


def tune(
    network: Network | str,
    *,
    device: str | Device = "this-cpu@1",
    out: str | Path,
    config: TuneConfig,
    resume: bool = False,
    warm_start: Sequence[str | Path] = (),
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> TuneReport:
    """Tune a network for a CPU share of this machine, or for a CUDA GPU of it or a share of that.

    On a GPU the network itself is not run: what a tuning gives are the sums over its tasks, against the schedules that TVM
    Relax gives them by default.

    Parameters
    ----------
    network
        A zoo name, an ``.onnx`` or ``.pt2`` file, or a Network.
    device
        A device of this machine with the share that the network will be served with, such as ``this-cpu@1`` or
        ``h200@0.5`` (a green context with half of the multiprocessors).
    out
        Folder of the tuning: MetaSchedule database, dataset of all measurements, curve, report.
    config
        When to stop, and how to tune.
    resume
        Go on with the tuning in `out`; nothing is measured twice.
    warm_start
        Folders of earlier records, see :func:`cdmpp.tuner.warm_start.warm_start`.
    progress, notify
        Called after each round, and with one-line news.

    Raises
    ------
    TunerError
        The device is not on this machine, nothing can be tuned, or `out` holds another tuning.
    NetworkError, UnknownDeviceError, PredictorError, DatasetError
        As their names say.
    """
    from cdmpp.program.network import load_network
    from cdmpp.tuner.deployment import apply_database, import_network, measure_network, weighted_tasks
    from cdmpp.tuner.report import write_report

    say = notify or (lambda line: logger.info("%s", line))
    # all that may be refused, before the network is imported, which takes a while
    target_device = device_of_this_machine(device, config.workers, config.gpu)
    models = _prepare(target_device, Path(out), config, resume, warm_start)
    loaded = load_network(network) if isinstance(network, str) else network
    say(f"importing {loaded.name}")
    fused = import_network(loaded)
    tasks = weighted_tasks(fused, loaded.name)
    say(f"{len(tasks)} tasks")
    report, store = _tune(
        loaded.name, tasks, target_device, Path(out), config, models, resume, warm_start, progress, say
    )
    if target_device.kind == "cpu" and any(task.best_s is not None for task in report.tasks):
        say("compiling and running the network with and without the schedules found")
        from cdmpp.program.tvm_env import import_tvm

        target = import_tvm().target.Target(dict(target_device.target))
        tuned, _ = apply_database(fused.module, store.database, target)
        modules = {"untuned": fused.module, "tuned": tuned}
        cores = core_groups_of(target_device, 1)[0]
        latency = measure_network(fused, loaded, target_device, modules, cores, realtime=config.realtime)
        report = replace(report, network=latency)
    write_report(report, Path(out))
    return report


def tune_tasks(
    name: str,
    tasks: Sequence[tuple[Task, float]],
    *,
    device: str | Device = "this-cpu@1",
    out: str | Path,
    config: TuneConfig,
    resume: bool = False,
    warm_start: Sequence[str | Path] = (),
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
    measurer: Measurer | None = None,
    start_shard: Callable[[ShardConfig], Shard] | None = None,
) -> TuneReport:
    """Tune tasks without a network around them: :func:`tune` otherwise.

    Parameters
    ----------
    name
        What to call them.
    tasks
        Tasks and their weights.
    measurer
        What measures, already running; None starts one on this machine.
    start_shard
        Starts a worker of a sharded tuning; None starts a process.
    """
    say = notify or (lambda line: logger.info("%s", line))
    target_device = device_of_this_machine(device, config.workers, config.gpu)
    report, _ = _tune(
        name,
        tasks,
        target_device,
        Path(out),
        config,
        _prepare(target_device, Path(out), config, resume, warm_start),
        resume,
        warm_start,
        progress,
        say,
        measurer,
        start_shard,
    )
    return report


@dataclass(frozen=True)
class _Models:
    """What scores candidates, and what tells whether they run."""

    cost_model: Any
    guard: ValidityGuard | None


def _prepare(
    device: Device, out: Path, config: TuneConfig, resume: bool, earlier: Sequence[str | Path]
) -> _Models:
    """Read the models, and refuse what cannot work."""
    from cdmpp.tuner.shards import shard_cores
    from cdmpp.tuner.store import check_folder
    from cdmpp.tuner.validity import make_guard
    from cdmpp.tuner.warm_start import check_paths

    if config.shards is not None:
        shard_cores(device, config.shards)
    check_folder(out, resume)
    check_paths(earlier)
    guard = make_guard(config.validity, device, config.seed)
    return _Models(make_cost_model(config, device), guard)


def _tune(
    name: str,
    tasks: Sequence[tuple[Task, float]],
    device: Device,
    out: Path,
    config: TuneConfig,
    models: _Models,
    resume: bool,
    earlier: Sequence[str | Path],
    progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
    measurer: Measurer | None = None,
    start_shard: Callable[[ShardConfig], Shard] | None = None,
) -> tuple[TuneReport, TuningStore]:
    from cdmpp.tuner.energy import energy_counter
    from cdmpp.tuner.session import order_by_work
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.warm_start import warm_start

    cost_model = models.cost_model
    settings = {"network": name, "cost_model": config.cost_model, "seed": config.seed}
    tuners, weights = make_tuners(order_by_work(tasks), device, config, say)
    store = TuningStore(out, settings, device, resume)
    try:
        store.open_database(tuners)
        started = warm_start(earlier, tuners, device, cost_model)
        if earlier:
            say(
                f"earlier records: learned from {started.learned}, {sum(map(len, started.first.values()))} "
                "programs will be measured first"
            )
        options = {
            "batch": config.batch,
            "first": started.first,
            "progress": progress,
            "energy": None if config.gpu is not None else energy_counter(device),
        }
        if config.shards is None:
            options["guard"] = models.guard
            session, stopped = _run_one(tuners, weights, cost_model, store, device, config, measurer, options)
        else:
            learned = started.learned > 0
            say(f"workers at the same time, each on a {device.name} of its own: {config.shards}")
            session, stopped = _run_sharded(
                tuners, weights, cost_model, store, device, config, start_shard, learned, options
            )
        for tuner, state in zip(tuners, session.states, strict=True):
            if state.untuned_s is not None and state.untuned_s == state.latency_s:
                store.commit_untuned(tuner, state.untuned_s)
        store.close(done=True)
    finally:
        store.close()
    results = [
        TaskResult(
            tuner.task.hash,
            s.name,
            s.weight,
            s.untuned_s,
            s.best_s,
            s.measured,
            s.failed,
            s.dropped,
            s.finished,
        )
        for tuner, s in zip(tuners, session.states, strict=True)
    ]
    learned = cost_model.model.describe() if config.cost_model == "cdmpp" else {}
    report = TuneReport(
        name,
        device.name,
        config.cost_model,
        config.seed,
        stopped,
        results,
        session.untuned_s,
        session.latency_s,
        session.curve.gain(),
        session.costs,
        session.curve,
        learned,
        shards=config.shards,
    )
    return report, store


def _run_one(
    tuners: Sequence[TaskTuner],
    weights: Sequence[float],
    cost_model: Any,
    store: TuningStore,
    device: Device,
    config: TuneConfig,
    measurer: Measurer | None,
    options: dict[str, Any],
) -> tuple[Ledger, str]:
    """One search at a time; builders on all cores."""
    import contextlib

    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.session import TuningSession
    from cdmpp.tuner.trimmer import Trimmer

    trimmer = Trimmer(cost_model, config.trim) if config.cost_model == "cdmpp" and config.trim else None
    running = Measurer(make_engine(config, device)) if measurer is None else contextlib.nullcontext(measurer)
    with running as found:
        session = TuningSession(
            tuners, weights, cost_model, store, found, config.objective, trimmer=trimmer, **options
        )
        return session, session.run()


def _run_sharded(
    tuners: Sequence[TaskTuner],
    weights: Sequence[float],
    cost_model: Any,
    store: TuningStore,
    device: Device,
    config: TuneConfig,
    start: Callable[[ShardConfig], Shard] | None,
    learned: bool,
    options: dict[str, Any],
) -> tuple[Ledger, str]:
    """As many searches as workers, each on its share."""
    import contextlib

    from cdmpp.tuner.shard_service import engine_service
    from cdmpp.tuner.sharding import ShardedSession
    from cdmpp.tuner.shards import shard_configs, shard_cores, start_process

    assert config.shards is not None
    cores = shard_cores(device, config.shards)
    tasks = [tuner.task for tuner in tuners]
    with contextlib.ExitStack() as running:
        shards = running.enter_context(shard_configs(config, device, cores, tasks, cost_model, learned))
        if device.kind == "gpu":
            engine = make_engine(replace(config, shards=None, workers=len(cores)), device)
            shared = running.enter_context(engine_service(engine))
            shards = [replace(shard, engine=shared) for shard in shards]
        session = ShardedSession(
            tuners,
            weights,
            cost_model,
            store,
            shards,
            config.objective,
            start=start or start_process,
            **options,
        )
        return session, session.run()
