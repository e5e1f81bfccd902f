"""Options of a tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import TunerError
from cdmpp.tuner.objective import Objective

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.statistics import SamplingPlan
    from cdmpp.tuner.validity import ValidityModel

#: Cost models by the names that the command line has for them.
COST_MODELS = ("cdmpp", "xgb", "random")

#: In place of a folder of earlier records: the tunings that are kept in the user's cache.
AUTO = "auto"
#: Searches likewise.
SEARCHES = ("cdmpp", "metaschedule")


@dataclass(frozen=True)
class TuneConfig:
    """Options of :func:`tune`."""

    objective: Objective
    #: One of :data:`COST_MODELS`: ours, TVM's XGBModel, TVM's RandomModel.
    cost_model: str = "cdmpp"
    #: What ours starts from: a predictor, its folder or ``"default"``; None for an analytical estimate.
    predictor: Predictor | str | Path | None = "default"
    #: Coverage of the intervals that the trimmer drops candidates by (only ours has intervals); a measurement on a CPU ends
    #: when the program is clearly slower than the best of its task. None measures every candidate to the end.
    trim: float | None = 0.9
    #: Which candidates will not run, and which to measure first: a validity model, a folder of failures to learn one from,
    #: ``"online"`` to learn it from this tuning's failures alone; ``"default"`` is the model that ships on a GPU, and none on
    #: a CPU, where all programs run. None measures whatever is proposed.
    validity: ValidityModel | str | Path | None = "default"
    #: Candidates of a round.
    batch: int = 16
    #: ``"cdmpp"`` for our search (:mod:`cdmpp.tuner.search`), ``"metaschedule"`` for TVM's evolutionary search, which TVM's
    #: cost models have in any case.
    search: str = "cdmpp"
    #: Programs of a generation of MetaSchedule's evolutionary search (TVM's default is 512), and generations (4): each round
    #: it asks for about ``population * (generations + 1)`` predictions.
    population: int = 256
    generations: int = 3
    seed: int = 0
    #: Measuring processes, each on cores of its own (on a GPU: programs measured side by side at most, each on
    #: multiprocessors of its own), ``"auto"`` for as many as leave the labels of a CPU as they are; and building processes
    #: (None: one a core).
    workers: int | str = 1
    builders: int | None = None
    #: Workers that tune parts of the tasks at the same time (:mod:`cdmpp.tuner.workers`), as many programs measured at a
    #: time, each on a share of its own: a number, or ``"auto"`` for as many as fit. None: one search.
    shards: int | str | None = None
    #: See the profiler's settings.
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    plan: SamplingPlan | None = None
    realtime: bool = True
    #: Build and measure on a Ray cluster: HOST:PORT of its head, or ``local`` (:func:`cdmpp.profiler.ray.connect`).
    ray: str | None = None
    #: A class as ``module:Class`` that stands for the GPU, and what it is made with; None for the GPU that is here.
    gpu: str | None = None
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, name, known in (("cost model", self.cost_model, COST_MODELS), ("search", self.search, SEARCHES)):
            if name not in known:
                raise TunerError(f"no {what} {name!r}; there are {', '.join(known)}")
        for what, value in (("shards", self.shards), ("workers", self.workers)):
            if isinstance(value, str) and value != "auto":
                raise TunerError(f"{what} are a number or 'auto', got {value!r}")
        if self.shards is not None and self.workers != 1:
            raise TunerError("each shard has one measuring process: choose shards or workers, not both")
        if self.population < 2 or self.generations < 1:
            got = f"{self.population} and {self.generations}"
            raise TunerError(f"the search needs a population of 2 and a generation at least, got {got}")
        counts = {"candidates of a round": self.batch, "workers": self.workers, "builders": self.builders}
        for name, number in counts.items():
            if isinstance(number, int) and number < 1:
                raise TunerError(f"{name}: one at least, got {number}")
        for name, seconds in (("build", self.build_timeout_s), ("run", self.run_timeout_s)):
            if not seconds > 0:
                raise TunerError(f"the {name} timeout must be above 0 s, got {seconds:g}")
        if self.trim is not None and not 0 < self.trim < 1:
            raise TunerError(f"the trimmer's coverage must be between 0 and 1, got {self.trim:g}")
