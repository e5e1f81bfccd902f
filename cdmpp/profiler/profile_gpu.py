"""Profiling a GPU of this machine in one go: compile a bundle, then measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.errors import ProfilerError
from cdmpp.profiler.gpu.device import is_model
from cdmpp.profiler.gpu.make import BundleConfig, BundleProgress, BundleReport, make_bundle
from cdmpp.profiler.gpu.measure import MeasureConfig, MeasureProgress, MeasureReport, measure

if TYPE_CHECKING:
    from cdmpp.device import Device

#: The bundle inside the dataset's folder.
BUNDLE_FILE = "programs.bundle"
#: The way around a missing GPU.
ELSEWHERE = "compile with `cdmpp bundle` here and run `cdmpp measure` where the GPU is"


@dataclass(frozen=True)
class GpuProfileReport:
    """What was compiled and what was measured; ``bundle`` is None where a finished one was there already."""

    bundle: BundleReport | None
    measured: MeasureReport


def profile_gpu(
    networks: Sequence[str],
    *,
    device: str | Device,
    out: str | Path,
    bundle_config: BundleConfig | None = None,
    measure_config: MeasureConfig | None = None,
    resume: bool = False,
    bundle_progress: Callable[[BundleProgress], None] | None = None,
    progress: Callable[[MeasureProgress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> GpuProfileReport:
    """Measure programs of networks on a GPU of this machine, which needs TVM as well as cupy.

    ``out`` becomes the dataset, with the bundle in it. Where TVM and the GPU are on different machines, ``cdmpp bundle`` and
    ``cdmpp measure`` do the two halves.

    Parameters
    ----------
    networks
        Zoo names, ``.onnx`` or ``.pt2`` files.
    device
        A CUDA device or a share of it, such as ``h200`` or ``h200@0.5``: the bundle is compiled for the whole one.
    resume
        Go on with the bundle, or with the measuring of it.

    Raises
    ------
    ProfilerError
        No GPU answers, or another one (which is found out before anything is compiled), or what :func:`make_bundle` and
        :func:`measure` raise.
    """
    from cdmpp.device import get_device

    measure_config = measure_config or MeasureConfig()
    known = get_device(device) if isinstance(device, str) else device
    if measure_config.gpu == MeasureConfig().gpu:
        here = check_gpu()
        if not is_model(here, known.model):
            raise ProfilerError(f"{known.name} is not here, this machine has a {here}: {ELSEWHERE}")
    path = Path(out) / BUNDLE_FILE
    made = None
    if not (resume and path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = make_bundle(
            networks,
            device=known.base,
            out=path,
            config=bundle_config,
            resume=resume,
            progress=bundle_progress,
            notify=notify,
        )
    measured = measure(
        path,
        out=out,
        device=known.name,
        config=measure_config,
        resume=resume,
        progress=progress,
        notify=notify,
    )
    return GpuProfileReport(made, measured)


def check_gpu(elsewhere: str = ELSEWHERE) -> str:
    """Name of the GPU that is here; ProfilerError, with the way around it, where cupy or a CUDA device is missing."""
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
