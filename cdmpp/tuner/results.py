"""What a tuning gives: a line a task, the whole network, what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cdmpp.tuner.objective import Costs, Curve

if TYPE_CHECKING:
    from cdmpp.tuner.deployment import NetworkLatency


@dataclass(frozen=True)
class TaskResult:
    """What became of a task.

    Attributes
    ----------
    task, name, weight
        Hash and name; how often the network runs it.
    untuned_s, best_s
        Seconds of the task untuned (:mod:`cdmpp.tuner.untuned`) and of the best schedule; None where none works.
    measured, failed, dropped
        Candidates.
    finished
        Why it was given up; "" if it was not.
    """

    task: str
    name: str
    weight: float
    untuned_s: float | None
    best_s: float | None
    measured: int
    failed: int
    dropped: int
    finished: str


@dataclass(frozen=True)
class TuneReport:
    """What a tuning gave.

    Attributes
    ----------
    name, device, cost_model, seed
        What was tuned, and how.
    stopped
        Why it ended.
    tasks
        One result a task.
    untuned_s, tuned_s
        Sums over the tasks, weighted, of the untuned tasks and of the best of each, measured alone; None where a
        task has no program that works.
    gain_next_minute
        Fraction that another minute is expected to bring; None if it cannot be told.
    costs, curve
        What it cost, and latency against time.
    learned
        What the cost model learned (of ours).
    network
        Latencies of the whole network, compiled with and without the schedules; None where it was not run.
    shards
        Workers that tuned at the same time, each on a device of that name; None where one search had the machine.
    """

    name: str
    device: str
    cost_model: str
    seed: int
    stopped: str
    tasks: list[TaskResult]
    untuned_s: float | None
    tuned_s: float | None
    gain_next_minute: float | None
    costs: Costs
    curve: Curve
    learned: dict[str, Any] = field(default_factory=dict)
    network: NetworkLatency | None = None
    shards: int | str | None = None

    @property
    def speedup(self) -> float | None:
        """Untuned over tuned latency: of the whole network where it was run, else of the sums over the tasks."""
        if self.network is not None:
            return self.network.latency_s["untuned"] / self.network.latency_s["tuned"]
        return None if not (self.untuned_s and self.tuned_s) else self.untuned_s / self.tuned_s

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **{
                name: getattr(self, name)
                for name in ("name", "device", "cost_model", "seed", "stopped", "shards")
            },
            "untuned_s": self.untuned_s,
            "tuned_s": self.tuned_s,
            "network": None if self.network is None else asdict(self.network),
            "speedup": self.speedup,
            "gain_next_minute": self.gain_next_minute,
            "costs": {**asdict(self.costs), "cpu_s": self.costs.cpu_s},
            "tasks": [asdict(task) for task in self.tasks],
            "curve": [asdict(point) for point in self.curve.points],
            "learned": self.learned,
        }
