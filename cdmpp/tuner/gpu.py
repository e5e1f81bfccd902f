"""Tuning on a GPU of this machine, or on a share of it: which one is here, and what measures on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProfilerError, TunerError

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.profiler.gpu.sampling import GpuConfig
    from cdmpp.tuner.tuning import TuneConfig


def gpu_of_this_machine(device: Device, gpu: str | None = None) -> Device:
    """The device, checked to be a CUDA GPU that is here, or a share of it.

    Parameters
    ----------
    gpu
        A class that stands for the GPU, see :class:`~cdmpp.tuner.tuning.TuneConfig`: what is here does not matter then.

    Raises
    ------
    TunerError
        It is not, or there is no compiler for it.
    """
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
    return device


def gpu_config(config: TuneConfig) -> GpuConfig:
    """The profiler of a tuning on a GPU: it measures as many programs side by side as there are to be workers."""
    from cdmpp.profiler.gpu.sampling import GPU_PLAN, GpuConfig

    standing_in: dict[str, Any] = (
        {} if config.gpu is None else {"gpu": config.gpu, "gpu_arguments": config.gpu_arguments}
    )
    return GpuConfig(
        degree=config.workers,
        builders=config.builders,
        build_timeout_s=config.build_timeout_s,
        run_timeout_s=config.run_timeout_s,
        plan=config.plan or GPU_PLAN,
        **standing_in,
    )
