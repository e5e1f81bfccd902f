"""What measuring needs of a GPU, as an interface: the real one is :mod:`cdmpp.profiler.gpu.cupy`, tests have one with a
scripted clock.

A GPU has lanes. A lane runs one program at a time; programs in different lanes run side by side, on the same
multiprocessors or, where lanes are partitions of the GPU, each on its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from cdmpp.errors import ProfilerError
from cdmpp.profiler.gpu.bundle import BundledProgram


class GpuFault(Exception):
    """A kernel broke the context: nothing runs in this process any more."""


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU says of itself."""

    name: str
    arch: str
    #: Multiprocessors of the whole, and those that a lane's programs were seen to run on.
    sms: int
    share_sms: int
    #: How the share is made: ``whole`` or ``green context``.
    partition: str
    lanes: int
    l2_bytes: int
    memory_bytes: int
    driver: str
    launch: str = "graph"


@dataclass(frozen=True)
class GpuState:
    """Clocks and heat at one moment; None where the driver does not say."""

    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle: str | None = None

    def known(self) -> dict[str, Any]:
        """What the driver says."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Gpu(Protocol):
    """One GPU, or a share of it, in one process.

    Methods raise :class:`GpuFault` where the context is broken, other exceptions for what concerns one program only.
    """

    facts: GpuFacts

    def load(self, kernel: BundledProgram) -> Any:
        """Make a program ready to launch. Called from other threads while programs are measured; touches no timing."""

    def first_run(self, loaded: Any, lane: int) -> float:
        """Run once with nothing beside it; seconds."""

    def prepare(self, loaded: Any, lane: int, repeats: int) -> Any:
        """Make a sample of `repeats` runs back to back ready to start."""

    def sample(self, prepared: Sequence[Any], cold: bool) -> list[float]:
        """One sample in each lane at the same time; mean seconds of a run, in order.

        Warm: after an untimed run of the same program. Cold: after the level-2 cache was filled with something else; a
        sample is then one run.
        """

    def outputs(self, loaded: Any, inputs: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Run once with these input values; the outputs by number of the parameter."""

    def unload(self, loaded: Any) -> None:
        """Give back what :meth:`load` and :meth:`prepare` took."""

    def state(self) -> GpuState:
        """Clocks and heat now."""


def is_model(name: str, model: str) -> bool:
    """Whether a GPU that calls itself `name` is of a model of the device table."""
    return model.lower() in name.lower() or name.lower() in model.lower()


def make_gpu(path: str, arguments: Mapping[str, Any]) -> Gpu:
    """The GPU of a class given as ``module:Class`` (ProfilerError if there is none, or a library for it is missing)."""
    module, _, name = path.partition(":")
    try:
        gpu: Gpu = getattr(importlib.import_module(module), name)(**arguments)
    except ImportError as err:
        raise ProfilerError(f"measuring needs cupy: pip install cupy-cuda13x ({err})") from err
    return gpu
