"""What the session of a sharded tuning and its workers tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdmpp.tuner.measure import CpuSpec, Engine, cpu_engine

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.errors import CdmppError
    from cdmpp.profiler.engine import BuildJob, Outcome
    from cdmpp.program.types import Program, Space, Task
    from cdmpp.tuner.online import Row
    from cdmpp.tuner.tuning import TuneConfig


@dataclass(frozen=True)
class ShardConfig:
    """What a worker needs to know.

    Attributes
    ----------
    number
        Of the worker, from 0.
    cores
        Its own; of a GPU those it searches on.
    device
        The share that it measures on and tunes for.
    tune
        How to tune; its predictor is a folder, ``"default"`` or None, its validity model a folder, ``"online"`` or None.
    tasks
        All tasks of the tuning.
    cost_model
        File of what the cost model learned before; "" for none.
    work_dir
        Folder for what is built.
    engine
        Makes what measures.
    """

    number: int
    cores: tuple[int, ...]
    device: Device
    tune: TuneConfig
    tasks: tuple[Task, ...]
    cost_model: str = ""
    work_dir: str | None = None
    engine: Callable[[CpuSpec], Engine] = cpu_engine


# -- what a worker is told -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Find candidates of a task.

    Attributes
    ----------
    order
        Number of what is asked for.
    index
        Of the task.
    best_s
        The best latency known.
    earlier
        Programs of the task that others measured, with their labels (None for a failure).
    first
        Programs to propose in place of a search.
    learned
        What other workers' cost models learned.
    """

    order: int
    index: int
    best_s: float | None
    earlier: Sequence[tuple[Program, Space, float | None]] = ()
    first: Sequence[tuple[Program, Space]] = ()
    learned: Sequence[Row] = ()


@dataclass(frozen=True)
class Measure:
    """Build and measure these of the candidates found, and learn from them."""

    order: int
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class MeasureJobs:
    """Build and measure programs that are of no search of this worker."""

    order: int
    jobs: Sequence[BuildJob]


@dataclass(frozen=True)
class GiveBack:
    """Return so many programs, at most, that nothing was done for yet."""

    most: int


# -- what a worker says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """It has started."""


@dataclass(frozen=True)
class Found:
    """Candidates, and whether each is worth building; None where the space gives none."""

    order: int
    hashes: tuple[str, ...] | None
    worth: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Taken:
    """An outcome; ``record`` is MetaSchedule's for its database, where there is one."""

    order: int
    outcome: Outcome
    record: Any = None


@dataclass(frozen=True)
class GivenBack:
    """Programs that are not going to be measured here."""

    jobs: Sequence[BuildJob]


@dataclass(frozen=True)
class Ended:
    """Nothing more comes of an order; what was learned of it, and CPU seconds of searching since the start."""

    order: int
    learned: Sequence[Row]
    cpu_s: float


@dataclass(frozen=True)
class Failed:
    """Sent last: it cannot go on, and another would not get further."""

    error: CdmppError
