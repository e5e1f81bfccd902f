"""Tuning a network, or a list of tasks, for a device of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError, TunerError
from cdmpp.tuner.objective import Objective
from cdmpp.tuner.results import TaskResult, TuneReport

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.engine import EngineConfig
    from cdmpp.profiler.statistics import SamplingPlan
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task
    from cdmpp.tuner.ledger import Progress
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.task_tuner import SearchConfig, TaskTuner

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
    batch
        Candidates of a round.
    search
        MetaSchedule's evolutionary search; None for its defaults here.
    seed
        Of the search.
    workers, builders
        Measuring processes, each on cores of its own, and building processes (None: one a core).
    build_timeout_s, run_timeout_s, plan, realtime
        See :class:`~cdmpp.profiler.engine.EngineConfig`.
    """

    objective: Objective
    cost_model: str = "cdmpp"
    predictor: Predictor | str | Path | None = "default"
    trim: float | None = 0.9
    batch: int = 16
    search: SearchConfig | None = None
    seed: int = 0
    workers: int = 1
    builders: int | None = None
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    plan: SamplingPlan | None = None
    realtime: bool = True

    def __post_init__(self) -> None:
        if self.cost_model not in COST_MODELS:
            raise TunerError(f"no cost model {self.cost_model!r}; there are {', '.join(COST_MODELS)}")


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
    """Tune a network for a CPU share of this machine.

    Parameters
    ----------
    network
        A zoo name, an ``.onnx`` or ``.pt2`` file, or a Network.
    device
        A CPU of this machine with the share that the network will be served with.
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
    target_device = device_of_this_machine(device, config.workers)
    loaded = load_network(network) if isinstance(network, str) else network
    say(f"importing {loaded.name}")
    fused = import_network(loaded)
    tasks = weighted_tasks(fused, loaded.name)
    say(f"{len(tasks)} tasks")
    report, store = _tune(
        loaded.name, tasks, target_device, Path(out), config, resume, warm_start, progress, say, None
    )
    if any(task.best_s is not None for task in report.tasks):
        say("compiling and running the network with and without the schedules found")
        from cdmpp.program.tvm_env import import_tvm

        target = import_tvm().target.Target(dict(target_device.target))
        tuned, _ = apply_database(fused.module, store.database, target)
        modules = {"untuned": fused.module, "tuned": tuned}
        cores = _core_groups(target_device, 1)[0]
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
    """
    say = notify or (lambda line: logger.info("%s", line))
    target_device = device_of_this_machine(device, config.workers)
    report, _ = _tune(
        name, tasks, target_device, Path(out), config, resume, warm_start, progress, say, measurer
    )
    return report


def _tune(
    name: str,
    tasks: Sequence[tuple[Task, float]],
    device: Device,
    out: Path,
    config: TuneConfig,
    resume: bool,
    earlier: Sequence[str | Path],
    progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
    measurer: Measurer | None,
) -> tuple[TuneReport, TuningStore]:
    import contextlib

    from cdmpp.tuner.measure import cpu_measurer
    from cdmpp.tuner.session import TuningSession, order_by_work
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.trimmer import Trimmer
    from cdmpp.tuner.warm_start import check_paths, warm_start

    check_paths(earlier)
    cost_model = make_cost_model(config, device)
    settings = {"network": name, "cost_model": config.cost_model, "seed": config.seed}
    tuners, weights = _tuners(order_by_work(tasks), device, config, say)
    store = TuningStore(out, settings, device, resume)
    try:
        store.open_database(tuners)
        started = warm_start(earlier, tuners, device, cost_model)
        if earlier:
            say(
                f"earlier records: learned from {started.learned}, {sum(map(len, started.first.values()))} "
                "programs will be measured first"
            )
        trimmer = Trimmer(cost_model, config.trim) if config.cost_model == "cdmpp" and config.trim else None
        engine = contextlib.nullcontext(measurer) if measurer else cpu_measurer(_engine(config, device))
        with engine as running:
            assert running is not None
            session = TuningSession(
                tuners,
                weights,
                cost_model,
                store,
                running,
                config.objective,
                trimmer=trimmer,
                batch=config.batch,
                first=started.first,
                progress=progress,
            )
            stopped = session.run()
        for tuner, state in zip(tuners, session.states, strict=True):
            if state.untuned_s is not None and state.untuned_s == state.latency_s:
                store.commit_unscheduled(tuner, state.untuned_s)
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
    )
    return report, store


def make_cost_model(config: TuneConfig, device: Device) -> Any:
    """The cost model that a configuration names."""
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    from tvm.s_tir.meta_schedule import cost_model

    if config.cost_model == "cdmpp":
        from cdmpp.tuner.cost_model import CostModel

        return CostModel(config.predictor, device)
    if config.cost_model == "xgb":
        return cost_model.XGBModel(
            extractor="per-store-feature",
            config=cost_model.xgb_model.XGBConfig(seed=config.seed),
            verbose_eval=False,
        )
    return cost_model.RandomModel(seed=config.seed)


def device_of_this_machine(device: str | Device, workers: int = 1) -> Device:
    """The device, checked to be a CPU share that this process may use `workers` times.

    Raises
    ------
    TunerError
        It is not.
    """
    from cdmpp.device import get_device

    found = get_device(device) if isinstance(device, str) else device
    if found.kind != "cpu":
        raise TunerError(f"{found.name} is a {found.kind}: tuning measures on CPUs of this machine")
    here = get_device("this-cpu")
    if found.base != here.base:
        raise TunerError(f"{found.name} is not this machine, which is {here.name}")
    if int(found.share) != found.share:
        raise TunerError(f"{found.name}: the share of a CPU is a whole number of cores")
    _core_groups(found, workers)
    return found


def _core_groups(device: Device, workers: int) -> tuple[tuple[int, ...], ...]:
    from cdmpp.profiler.calibration import core_groups
    from cdmpp.profiler.machine import usable_cores

    return core_groups(usable_cores(), int(device.share), workers)


def _engine(config: TuneConfig, device: Device) -> EngineConfig:
    from cdmpp.profiler.engine import EngineConfig
    from cdmpp.profiler.machine import usable_cores
    from cdmpp.profiler.statistics import SamplingPlan

    return EngineConfig(
        target=dict(device.target),
        core_groups=_core_groups(device, config.workers),
        builders=config.builders or len(usable_cores()),
        build_timeout_s=config.build_timeout_s,
        run_timeout_s=config.run_timeout_s,
        plan=config.plan or SamplingPlan(),
        realtime=config.realtime,
    )


def alone_engine_config(device: str | Device) -> EngineConfig:
    """An engine that measures programs with nothing built meanwhile, for final latencies."""
    found = device_of_this_machine(device)
    return replace(_engine(TuneConfig(Objective(1)), found), overlap=False)


def _tuners(
    tasks: Sequence[tuple[Task, float]], device: Device, config: TuneConfig, say: Callable[[str], None]
) -> tuple[list[TaskTuner], list[float]]:
    """A tuner for every task that has a design space."""
    from cdmpp.tuner.task_tuner import SearchConfig, TaskTuner

    search = config.search or SearchConfig()
    tuners, weights = [], []
    for task, weight in tasks:
        try:
            tuners.append(TaskTuner(task, device, search, config.seed + 1))
            weights.append(weight)
        except ProgramError as err:
            say(str(err))
    if not tuners:
        raise TunerError("no task has a design space: nothing to tune")
    return tuners, weights
