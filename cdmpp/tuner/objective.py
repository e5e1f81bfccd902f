"""When to stop, what it has cost, and what another minute would bring."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import linear_regression

from cdmpp.errors import TunerError

#: Limits as they are called in messages.
_IN_WORDS = {
    "trials": "the number of trials",
    "max_measurements": "the number of measurements",
    "budget_s": "the budget in seconds",
    "cpu_budget_s": "the budget in CPU seconds",
    "energy_budget_j": "the budget in joules",
    "least_gain_per_minute": "the gain per minute to stop at",
}
#: Points that a forecast needs.
_LEAST_POINTS = 4


@dataclass(frozen=True)
class Objective:
    """Limits of a tuning, earlier runs of a resumed one included; None is no limit."""

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
    #: Fraction of the network's latency that the next minute must be expected to bring: see :meth:`Curve.gain`.
    least_gain_per_minute: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise TunerError(f"{_IN_WORDS[name]} must be above 0, got {value:g}")

    def reached(self, costs: Costs, curve: Curve) -> str | None:
        """Why to stop now, in words; None to go on."""
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
            gain = curve.gain()
            if gain is not None and gain < self.least_gain_per_minute:
                return f"another minute is expected to bring {100 * gain:.2g} %"
        return None


@dataclass
class Costs:
    """What tuning has cost so far."""

    #: From the start of the search to its end.
    wall_s: float = 0.0
    #: CPU seconds of generating candidates, predicting them, learning.
    search_cpu_s: float = 0.0
    #: Seconds that builders worked, each on one core.
    build_s: float = 0.0
    #: Seconds that programs ran on the cores they were measured on.
    device_s: float = 0.0
    #: Candidates proposed; of them dropped without building; measured; and of these failed.
    trials: int = 0
    dropped: int = 0
    measurements: int = 0
    failures: int = 0
    #: Seconds of building and measuring that dropped candidates would have cost, at their task's mean.
    saved_s: float = 0.0
    #: Joules that the whole device took meanwhile (:class:`cdmpp.tuner.measure.EnergyMeter`); None where it does not tell.
    energy_j: float | None = None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of everything: search, builders and measuring."""
        return self.search_cpu_s + self.build_s + self.device_s


@dataclass(frozen=True)
class Point:
    """The network's latency after a round of a task: the weighted sum over the tasks of the best so far, measured alone."""

    wall_s: float
    trials: int
    measurements: int
    latency_s: float
    task: str = ""


@dataclass
class Curve:
    """Latency against time; the first point is the untuned network where all of its tasks run untuned."""

    points: list[Point] = field(default_factory=list)

    def gain(self, seconds: float = 60.0) -> float | None:
        """Expected decrease within the next `seconds`, as a fraction of the latency now; None with too few points. Tuning
        curves are close to straight where both axes are logarithmic: ``log(latency) = a - b log(time)`` is fitted to the points
        of the later three quarters of the time, by least squares. What it promises is a guess about luck, and ends where the
        space does."""
        now = self.points[-1].wall_s if self.points else 0.0
        recent = [p for p in self.points if p.wall_s >= now / 4 and p.wall_s > 0]
        if len(recent) < _LEAST_POINTS or recent[0].wall_s == now:
            return None
        line = linear_regression([math.log(p.wall_s) for p in recent], [math.log(p.latency_s) for p in recent])
        return max(0.0, 1 - (1 + seconds / now) ** line.slope)
