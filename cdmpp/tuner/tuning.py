"""Tuning a network, or a list of tasks, for a device of this machine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.tuner.measure import Measurer, core_groups_of, device_of_this_machine, energy_meter, make_engine
from cdmpp.tuner.progress import Progress, TuningProgress
from cdmpp.tuner.results import TaskResult, TuneReport, write_report
from cdmpp.tuner.session import Models, make_models, make_session, make_tuners
from cdmpp.tuner.store import TuningStore, check_folder
from cdmpp.tuner.warm_start import check_paths
from cdmpp.tuner.workers import Workers, worker_cores

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task
    from cdmpp.tuner.config import TuneConfig

logger = logging.getLogger(__name__)


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
    )
    return report


def _prepare(
    device: Device, out: Path, config: TuneConfig, resume: bool, earlier: Sequence[str | Path]
) -> Models:
    """Read the models, and refuse what cannot work."""
    if config.shards is not None:
        worker_cores(device, config.shards)
    check_folder(out, resume)
    check_paths(earlier)
    return make_models(config, device)


def _tune(
    name: str,
    tasks: Sequence[tuple[Task, float]],
    device: Device,
    out: Path,
    config: TuneConfig,
    models: Models,
    resume: bool,
    earlier: Sequence[str | Path],
    report: Callable[[Progress], None] | None,
    say: Callable[[str], None],
    measurer: Measurer | None = None,
) -> tuple[TuneReport, TuningStore]:
    settings = {"network": name, "cost_model": config.cost_model, "seed": config.seed}
    cores = None if config.shards is None else worker_cores(device, config.shards)
    tuners, tasks = make_tuners(tasks, device, config, say)
    store = TuningStore(out, settings, device, resume)
    with contextlib.ExitStack() as open_:
        open_.callback(store.close)
        store.open_database(tuners)
        energy = None if config.gpu is not None else energy_meter(device)
        progress = TuningProgress(tasks, store, config.objective, report=report, energy=energy)
        if measurer is None:
            engine = make_engine(config, device, config.workers if cores is None else len(cores))
            measurer = open_.enter_context(Measurer(engine))
        if cores is None:
            session = make_session(tuners, models, store, measurer, progress, config, device, earlier, say)
            stopped, learned = session.run(), models.learned
        else:
            workers = Workers(tuners, tasks, store, measurer, progress, say)
            stopped = workers.run(_for_workers(config, models), device, cores, earlier)
            learned = _together(workers.learned)
        for tuner, state in zip(tuners, progress.states, strict=True):
            if state.untuned_s is not None and state.untuned_s == state.latency_s:
                store.commit_untuned(tuner, state.untuned_s)
        store.close(done=True)
    results = [TaskResult.of(task, state) for (task, _), state in zip(tasks, progress.states, strict=True)]
    tuned = TuneReport(
        name,
        device.name,
        config.cost_model,
        config.seed,
        stopped,
        results,
        progress.untuned_s,
        progress.latency_s,
        progress.curve.gain(),
        progress.costs,
        progress.curve,
        learned,
        shards=config.shards,
    )
    return tuned, store


def _for_workers(config: TuneConfig, models: Models) -> TuneConfig:
    """A validity model that was read or trained here is not read or trained again by every worker."""
    known = None if models.guard is None else models.guard.validity.model
    return config if known is None else replace(config, validity=known)


def _together(learned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the workers' cost models learned, each of its own tasks; empty for TVM's."""
    workers = [found for found in learned if found]
    if not workers:
        return {}
    return {**{key: sum(found[key] for found in workers) for key in ("records", "tasks")}, "workers": workers}
