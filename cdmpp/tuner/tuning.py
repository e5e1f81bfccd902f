"""Tuning a network, or a list of tasks, for a device of this machine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdmpp.device import Device, get_device
from cdmpp.errors import CdmppError, TunerError
from cdmpp.profiler.engine import Executor
from cdmpp.program import import_tvm
from cdmpp.program.network import Network
from cdmpp.program.types import Task
from cdmpp.tuner import measure, session
from cdmpp.tuner.config import AUTO, TuneConfig, curve_gain
from cdmpp.tuner.deployment import apply_database, import_network, measure_network, weighted_tasks
from cdmpp.tuner.progress import Progress
from cdmpp.tuner.results import TaskResult, TuneReport, TuningStore, check_folder, keep, write_report

logger = logging.getLogger(__name__)


def tune(
    network: Network | str,
    *,
    device: str | Device = "this-cpu@1",
    out: str | Path,
    config: TuneConfig,
    resume: bool = False,
    warm_start: Sequence[str | Path] = (),
    progress: Callable[[Progress], None] = lambda state: None,
    notify: Callable[[str], None] = logger.info,
) -> TuneReport:
    """Tune a network (a zoo name, an ``.onnx`` or ``.pt2`` file, or a Network) for a CPU share or a CUDA GPU of this machine.
    On a GPU, a cluster or a board the network itself is not run: the result is the sums over its tasks; so it is where the
    network does not run. On a GPU the untuned tasks have the schedules that TVM Relax applies by default.

    `device` includes the share that will serve the network, such as ``this-cpu@1`` or ``h200@0.5``. `out` is a folder
    (:mod:`cdmpp.tuner.results`); with `resume` a tuning in it continues, and nothing is measured twice. `warm_start` lists
    folders of earlier records, or ``"auto"`` (:func:`cdmpp.tuner.warm_start.warm_start`). `progress` is called after each
    round, `notify` with one-line messages.

    Raises TunerError if nothing can be tuned or `out` holds another tuning; TunerError or ProfilerError if the device is not on
    this machine; NetworkError, UnknownDeviceError, PredictorError and DatasetError as their names say."""
    from cdmpp.program.network import load_network

    tuning = _Tuning(device, Path(out), config, resume, warm_start, progress, notify)
    loaded = load_network(network)
    tuning.say(f"importing {loaded.name}")
    fused = import_network(loaded)
    tasks = weighted_tasks(fused, loaded.name)
    tuning.say(f"{len(tasks)} tasks")
    report, database = tuning.run(loaded.name, tasks)
    write_report(report, Path(out))  # now, as running the network may fail
    target_device = tuning.device
    if target_device.kind == "cpu" and tuning.here and any(task.best_s is not None for task in report.tasks):
        tuning.say("compiling and running the network with and without the schedules found")
        target = import_tvm().target.Target(dict(target_device.target))
        modules = {"untuned": fused.module, "tuned": apply_database(fused.module, database, target)[0]}
        cores = measure.core_groups_of(target_device, 1)[0]
        try:
            latency = measure_network(fused, loaded, target_device, modules, cores, realtime=config.realtime)
        except CdmppError as err:
            tuning.say(f"the tuning is complete, but the whole network was not measured: {err}")
        else:
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
    progress: Callable[[Progress], None] = lambda state: None,
    notify: Callable[[str], None] = logger.info,
    measurer: measure.Measurer | None = None,
) -> TuneReport:
    """:func:`tune` for tasks with their weights, without a network; a given `measurer` is already running, None starts one."""
    return _Tuning(device, Path(out), config, resume, warm_start, progress, notify).run(name, tasks, measurer)[0]


class _Tuning:
    """A tuning that can begin: it checks all options first, before a network is imported, which takes a while."""

    def __init__(
        self,
        device: str | Device,
        out: Path,
        config: TuneConfig,
        resume: bool,
        earlier: Sequence[str | Path],
        report: Callable[[Progress], None],
        say: Callable[[str], None],
    ) -> None:
        import_tvm()  # raises at once if TVM is missing
        self._executor: Executor | None = None
        if config.ray is not None:
            from cdmpp.profiler import ray

            self._executor = cluster = ray.connect(config.ray, device, config.shards or config.workers)
            self.device = cluster.device
        elif config.rpc is not None:
            from cdmpp.profiler import rpc

            self.device = get_device(device)
            self._executor = rpc.connect(config.rpc, config.key, self.device, config.shards or config.workers)
        else:
            self.device = measure.device_of_this_machine(device, config.workers, config.gpu)
        self.here = self._executor is None  # whether the device is on this machine
        self._cores: tuple[tuple[int, ...], ...] | None = None
        if config.shards is not None:
            from cdmpp.tuner.workers import worker_cores

            self._cores = worker_cores(self.device, config.shards, self._executor.degree if self._executor else None)
        self._config = config
        if config.objective.energy_budget_j is not None and self._meter() is None:
            raise TunerError(f"an energy budget needs a meter: nothing here counts the energy of {self.device.name}")
        check_folder(out, resume)
        for path in earlier:
            if path != AUTO and not Path(path).is_dir():
                raise TunerError(f"{path} is no folder of earlier records")
        self._of_each = measure.compiled_for_each(config, self.device)
        self._models = session.make_models(config, self.device)
        self._out, self._resume = out, resume
        self._earlier, self._report, self.say = earlier, report, say

    def _meter(self) -> measure.EnergyMeter | None:
        """A new energy meter of the device; None if the device is not here or has no counter."""
        return None if self._config.gpu or not self.here else measure.energy_meter(self.device)

    def run(
        self, name: str, tasks: Sequence[tuple[Task, float]], measurer: measure.Measurer | None = None
    ) -> tuple[TuneReport, Any]:
        """Tune, and return the report and the MetaSchedule database."""
        config, device, cores, models = self._config, self.device, self._cores, self._models
        settings = {"network": name, "cost_model": config.cost_model, "seed": config.seed}
        tuners, tasks = session.make_tuners(tasks, device, config, self.say)
        store = TuningStore(self._out, settings, device, self._resume)
        with contextlib.ExitStack() as open_:
            open_.callback(store.close)
            store.open_database(tuners)
            progress = Progress(tasks, store, config.objective, report=self._report, energy=self._meter())
            if measurer is None:
                degree = config.workers if cores is None else len(cores)
                if self._executor is not None and cores is None:
                    degree = self._executor.degree
                if isinstance(degree, str):
                    of_each = -(-measure.CALIBRATION_PROGRAMS // len(tuners))
                    some = tuners[: measure.CALIBRATION_PROGRAMS]
                    jobs = [c.job for tuner in some for c in tuner.sample(of_each, config.seed)]
                    degree = measure.calibrated_degree(config, device, jobs, self.say)
                if self._of_each == 1:
                    measurer = measure.Measurer(measure.make_engine(config, device, degree, self._executor))
                else:
                    measurer = measure.ChoosingMeasurer(config, device, degree, self._executor, self._of_each)
                open_.enter_context(measurer)
            progress.start(config.batch)
            if cores is None:
                searches = session.Searches(tuners, models, config, store.database, store.commit, progress.until)
                searches.begin(store.dataset, progress.known, self._earlier, device, self.say)
                session.measure_untuned(tuners, measurer, progress, searches.prepare)
                stopped = session.TuningSession(dict(enumerate(tuners)), searches, measurer, progress, config).run()
                learned = searches.describe()
                session.measure_close_again(store, device, tuners, measurer, progress, self.say)
            else:
                from cdmpp.tuner.workers import tune_with_workers

                guard = models[1]
                if guard is not None and guard.validity.model is not None:
                    # it was loaded or trained here: the workers need not do it again
                    config = replace(config, validity=guard.validity.model)
                stopped, of_workers = tune_with_workers(
                    tuners, tasks, store, measurer, progress, config, device, cores, self._earlier, self.say
                )
                learned = _together(of_workers)
            # Tasks that no schedule makes faster enter the database untuned. This waits until the search has ended, because it
            # cannot mutate a trace without sampling decisions (a resumed tuning rebuilds the database without them).
            for tuner, state in zip(tuners, progress.states, strict=True):
                untuned_s = state.untuned_s
                if untuned_s is not None and untuned_s == state.latency_s and (candidate := tuner.untuned_candidate()):
                    store.commit(tuner, candidate, untuned_s)
            keep(store.dataset, device, store.outcomes())
            store.close(done=True)
        report = TuneReport(
            name,
            device.name,
            config.cost_model,
            config.seed,
            stopped,
            TaskResult.all_of(tasks, progress.states),
            progress.untuned_s,
            progress.latency_s,
            curve_gain(progress.curve),
            progress.costs,
            progress.curve,
            learned,
            shards=config.shards,
        )
        return report, store.database


def _together(learned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the workers' cost models learned, each from its own tasks; empty for TVM's cost models."""
    workers = [found for found in learned if found]
    if not workers:
        return {}
    together = session.summed([{key: found[key] for key in ("records", "tasks")} for found in workers])
    searches = [found["search"] for found in workers if "search" in found]
    return {**together, **({"search": session.summed(searches)} if searches else {}), "workers": workers}
