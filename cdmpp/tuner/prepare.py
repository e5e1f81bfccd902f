"""What a tuning is made of: the device and its cores, a cost model, a profiler, a search for every task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError, TunerError

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.types import Task
    from cdmpp.tuner.measure import CpuSpec, Engine
    from cdmpp.tuner.task_tuner import TaskTuner
    from cdmpp.tuner.tuning import TuneConfig


def make_cost_model(config: TuneConfig, device: Device) -> Any:
    """The cost model that a configuration names."""
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    from tvm.s_tir.meta_schedule import cost_model

    if config.cost_model == "cdmpp":
        from cdmpp.predictor.predictor import load_predictor
        from cdmpp.tuner.anchors import load_anchors
        from cdmpp.tuner.cost_model import CostModel

        predictor = None if config.predictor is None else load_predictor(config.predictor)
        trained_on = () if predictor is None else predictor.training.get("tasks", ())
        anchors = load_anchors(config.anchors, device, trained_on) if config.anchors else None
        return CostModel(predictor, device, anchors=anchors)
    if config.cost_model == "xgb":
        return cost_model.XGBModel(
            extractor="per-store-feature",
            config=cost_model.xgb_model.XGBConfig(seed=config.seed),
            verbose_eval=False,
        )
    return cost_model.RandomModel(seed=config.seed)


def device_of_this_machine(device: str | Device, workers: int = 1, gpu: str | None = None) -> Device:
    """The device, checked to be here: a CPU share that this process may use `workers` times, a CUDA GPU or a share of it.

    Parameters
    ----------
    gpu
        See :func:`cdmpp.tuner.gpu.gpu_of_this_machine`.

    Raises
    ------
    TunerError
        It is not.
    """
    from cdmpp.device import get_device

    found = get_device(device) if isinstance(device, str) else device
    if found.kind == "gpu":
        from cdmpp.tuner.gpu import gpu_of_this_machine

        return gpu_of_this_machine(found, gpu)
    if found.kind != "cpu":
        raise TunerError(
            f"{found.name} is a {found.kind}: tuning measures on CPUs and CUDA GPUs of this machine"
        )
    here = get_device("this-cpu")
    if found.base != here.base:
        raise TunerError(f"{found.name} is not this machine, which is {here.name}")
    if int(found.share) != found.share:
        raise TunerError(f"{found.name}: the share of a CPU is a whole number of cores")
    core_groups_of(found, workers)
    return found


def core_groups_of(device: Device, workers: int) -> tuple[tuple[int, ...], ...]:
    """Cores of each of several measuring processes of a share."""
    from cdmpp.profiler.machine import core_groups, usable_cores

    return core_groups(usable_cores(), int(device.share), workers)


def engine_config(config: TuneConfig, device: Device, core_groups: tuple[tuple[int, ...], ...]) -> CpuSpec:
    """The profiler of a tuning that measures on these cores; it builds on all that this process may use."""
    from cdmpp.profiler.cpu import CpuConfig
    from cdmpp.profiler.statistics import SamplingPlan

    settings = CpuConfig(
        builders=config.builders,
        build_timeout_s=config.build_timeout_s,
        run_timeout_s=config.run_timeout_s,
        plan=config.plan or SamplingPlan(),
        realtime=config.realtime,
    )
    return settings, device.target, core_groups


def make_engine(config: TuneConfig, device: Device) -> Engine:
    """What measures in a tuning on a device of this machine."""
    from cdmpp.tuner.measure import cpu_engine

    if device.kind == "gpu":
        from cdmpp.profiler.gpu.sampling import gpu_engine
        from cdmpp.tuner.gpu import gpu_config

        return gpu_engine(gpu_config(config), device)
    return cpu_engine(engine_config(config, device, core_groups_of(device, config.workers)))


def alone_engine(device: str | Device) -> Engine:
    """What measures one program at a time on a device of this machine, for final latencies."""
    from cdmpp.tuner.measure import cpu_engine

    found = device_of_this_machine(device)
    if found.kind == "gpu":
        from cdmpp.profiler.gpu.sampling import GpuConfig, gpu_engine

        return gpu_engine(GpuConfig(), found)
    from cdmpp.profiler.cpu import CpuConfig

    return cpu_engine((CpuConfig(), found.target, core_groups_of(found, 1)), overlap=False)


def make_tuners(
    tasks: Sequence[tuple[Task, float]], device: Device, config: TuneConfig, say: Callable[[str], None]
) -> tuple[list[TaskTuner], list[float]]:
    """A search for every task that has a design space, and those tasks' weights.

    Raises
    ------
    TunerError
        No task has one.
    """
    tuners, weights = [], []
    for task, weight in tasks:
        try:
            tuners.append(make_tuner(task, device, config))
            weights.append(weight)
        except ProgramError as err:
            say(str(err))
    if not tuners:
        raise TunerError("no task has a design space: nothing to tune")
    return tuners, weights


def make_tuner(task: Task, device: Device, config: TuneConfig) -> TaskTuner:
    """The search of a task; ProgramError where TVM finds no design space."""
    from cdmpp.tuner.task_tuner import SearchConfig, TaskTuner

    return TaskTuner(task, device, config.search or SearchConfig(), config.seed + 1)
