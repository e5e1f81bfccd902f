"""Options of a tuning, and its objective: when to stop, the costs so far, and the expected gain of another minute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

from cdmpp.errors import TunerError, check_above_0

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.engine import SamplingPlan
    from cdmpp.tuner.validity import ValidityModel


#: Points that a forecast needs.
_LEAST_POINTS = 4


@dataclass(frozen=True)
class Objective:
    """Limits of a tuning; None is no limit. For a resumed tuning they include its earlier runs."""

    #: Candidates that the search proposes, dropped ones included.
    trials: int
    #: Candidates that are built and measured.
    max_measurements: int | None = None
    #: Wall time.
    budget_s: float | None = None
    #: CPU seconds of search, builders and measuring together (:attr:`Costs.cpu_s`).
    cpu_budget_s: float | None = None
    #: Joules of the whole device (:attr:`Costs.energy_j`).
    energy_budget_j: float | None = None
    #: Stop if the next minute is expected to lower the network's latency by less than this fraction: see :func:`curve_gain`.
    least_gain_per_minute: float | None = None

    def __post_init__(self) -> None:
        check_above_0(TunerError, asdict(self))

    def reached(self, costs: Costs, curve: Sequence[Point]) -> str | None:
        """The reason to stop now, in words; None to go on."""
        if costs.trials >= self.trials:
            return f"{self.trials} trials"
        if self.max_measurements is not None and costs.measurements >= self.max_measurements:
            return f"{self.max_measurements} measurements"
        for limit, spent, unit in (
            (self.budget_s, costs.wall_s, "s"),
            (self.cpu_budget_s, costs.cpu_s, "CPU seconds"),
            (self.energy_budget_j, costs.energy_j or 0.0, "J"),
        ):
            if limit is not None and spent >= limit:
                return f"the budget of {limit:g} {unit}"
        if self.energy_budget_j is not None and costs.energy_j is None and costs.wall_s > 0:
            return "energy is not counted, or was not in an earlier run: its budget cannot be kept"
        if self.least_gain_per_minute is not None:
            gain = curve_gain(curve)
            if gain is not None and gain < self.least_gain_per_minute:
                return f"another minute is expected to bring {100 * gain:.2g} %"
        return None


@dataclass
class Costs:
    """Costs of a tuning so far."""

    #: From the start of the search to its end.
    wall_s: float = 0.0
    #: CPU seconds spent on generating candidates, predicting their latencies, and learning.
    search_cpu_s: float = 0.0
    #: CPU seconds of builders.
    build_s: float = 0.0
    #: Seconds that programs ran on the cores they were measured on.
    device_s: float = 0.0
    #: Candidates proposed; dropped without being built; measured; and failed, of those measured.
    trials: int = 0
    dropped: int = 0
    measurements: int = 0
    failures: int = 0
    #: Seconds of building and measuring that dropped candidates would have cost, at the mean of their task.
    saved_s: float = 0.0
    #: Joules that the whole device used meanwhile (:class:`cdmpp.tuner.measure.EnergyMeter`); None if it does not count them.
    energy_j: float | None = None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of everything: search, builders and measuring."""
        return self.search_cpu_s + self.build_s + self.device_s


@dataclass(frozen=True)
class Point:
    """The network's latency after a round of a task: the weighted sum of the best latency of each task, measured alone."""

    wall_s: float
    trials: int
    measurements: int
    latency_s: float
    task: str = ""


def curve_gain(curve: Sequence[Point], seconds: float = 60.0) -> float | None:
    """Expected decrease within the next `seconds`, as a fraction of the latency now; None with too few points. Tuning curves
    are close to straight on logarithmic axes: ``log(latency) = a - b log(time)`` is fitted by least squares to the points of
    the later three quarters of the time. The result is a guess about luck, while there are programs left."""
    now = curve[-1].wall_s if curve else 0.0
    recent = [p for p in curve if p.wall_s >= now / 4 and p.wall_s > 0]
    if len(recent) < _LEAST_POINTS or recent[0].wall_s == now:
        return None
    line = linear_regression([math.log(p.wall_s) for p in recent], [math.log(p.latency_s) for p in recent])
    return max(0.0, 1 - (1 + seconds / now) ** line.slope)


#: Names of the cost models on the command line.
COST_MODELS = ("cdmpp", "xgb", "random")

#: Given in place of a folder of earlier records: use the tunings that are kept in the user's cache.
AUTO = "auto"
#: Names of the searches on the command line.
SEARCHES = ("cdmpp", "metaschedule")


@dataclass(frozen=True)
class TuneConfig:
    """Options of :func:`tune`."""

    objective: Objective
    #: One of :data:`COST_MODELS`: cdmpp's own, TVM's XGBModel, TVM's RandomModel.
    cost_model: str = "cdmpp"
    #: What cdmpp's cost model starts from: a predictor, its folder or ``"default"``; None for an analytical estimate.
    predictor: Predictor | str | Path | None = "default"
    #: Coverage of the prediction intervals by which candidates are dropped (only cdmpp's cost model has them). A measurement on
    #: a CPU also ends early if the program is clearly slower than the best of its task. None measures all candidates fully.
    trim: float | None = 0.9
    #: Predicts which candidates will not run, and helps choose the first ones: a validity model, a folder of failures to train
    #: one on, or ``"online"`` to learn it from this tuning's failures alone. ``"default"`` is the shipped model on a GPU, and
    #: none on a CPU, where all programs run. None measures all proposed candidates.
    validity: ValidityModel | str | Path | None = "default"
    #: Candidates in a round.
    batch: int = 16
    #: ``"cdmpp"`` for our search (:mod:`cdmpp.tuner.candidates`), ``"metaschedule"`` for TVM's, as its cost models need.
    search: str = "cdmpp"
    #: Programs in a generation of MetaSchedule's evolutionary search (TVM's default is 512), and number of generations (TVM's
    #: default is 4): each round asks for about ``population * (generations + 1)`` predictions.
    population: int = 256
    generations: int = 3
    seed: int = 0
    #: Measuring processes, each on its own cores (on a GPU: at most so many programs side by side, each on its own SMs), or
    #: ``"auto"``, for CPUs, for as many as do not change the labels; and building processes (None: one per core).
    workers: int | str = 1
    builders: int | None = None
    #: Number of workers that each tune a part of the tasks at the same time (:mod:`cdmpp.tuner.workers`), or ``"auto"`` for as
    #: many as fit. As many programs are measured at a time, each on its own share of the device. None: one search.
    shards: int | str | None = None
    #: See the profiler's settings.
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    plan: SamplingPlan | None = None
    realtime: bool = True
    object_cache: str | None = None
    #: Build and measure on a Ray cluster: HOST:PORT of its head, or ``local`` (:func:`cdmpp.profiler.ray.connect`).
    ray: str | None = None
    #: Measure on boards with a key at a TVM RPC tracker, HOST:PORT (:func:`cdmpp.profiler.rpc.connect`).
    rpc: str | None = None
    key: str | None = None
    #: Candidates compiled for each one measured: the one predicted fastest from its instructions (None: 4 on x86 CPUs).
    compile: int | None = None
    #: A class, as ``module:Class``, that replaces the GPU, and its constructor arguments; None for this machine's GPU.
    gpu: str | None = None
    gpu_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own_search(self) -> bool:
        """Whether candidates are found by our search, not TVM's."""
        return self.search == "cdmpp" and self.cost_model == "cdmpp"

    def __post_init__(self) -> None:
        for what, name, known in (("cost model", self.cost_model, COST_MODELS), ("search", self.search, SEARCHES)):
            if name not in known:
                raise TunerError(f"no {what} {name!r}; there are {', '.join(known)}")
        for what, value in (("shards", self.shards), ("workers", self.workers)):
            if isinstance(value, str) and value != "auto":
                raise TunerError(f"{what} are a number or 'auto', got {value!r}")
        if self.ray is not None and self.rpc is not None:
            raise TunerError("--ray and --rpc measure in different places: choose one")
        if self.shards is not None and self.workers != 1:
            raise TunerError("each shard has one measuring process: choose shards or workers, not both")
        if self.population < 2 or self.generations < 1:
            got = f"{self.population} and {self.generations}"
            raise TunerError(f"the search needs a population of 2 and a generation at least, got {got}")
        above_0 = ("batch", "workers", "builders", "compile", "build_timeout_s", "run_timeout_s")
        check_above_0(TunerError, {name: getattr(self, name) for name in above_0})
        if self.trim is not None and not 0 < self.trim < 1:
            raise TunerError(f"the trimmer's coverage must be between 0 and 1, got {self.trim:g}")
