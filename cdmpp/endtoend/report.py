"""The answer to how long a network takes: its latency, that of its layers, and what they rest on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: What the two intervals of a :class:`LatencyReport` assume.
INTERVAL = (
    "low_s and high_s take every task at the same end of its own interval, as if all errors went the same way: wider "
    "than the coverage asks for unless they do"
)
INDEPENDENT = (
    "independent_low_s and independent_high_s let the errors of different tasks differ by chance, so that they partly cancel: "
    "too narrow where the predictor is off on the whole network or device"
)


@dataclass(frozen=True)
class LayerLatency:
    """One node of the network, all its runs together; the first fields are those of its GraphNode."""

    name: str
    operator: str
    kind: str
    phase: str
    repeat: float
    tasks: tuple[str, ...]
    #: Of its kernels, with the interval in which all its tasks are at the same end; None without intervals.
    latency_s: float
    low_s: float | None
    high_s: float | None
    #: How long its stream was idle because the host had not launched its kernels yet.
    gap_s: float
    #: Part of the sum of all nodes' latencies and gaps, 0 to 1.
    fraction: float
    #: When its first kernel starts, and on which stream.
    start_s: float
    stream: int
    #: Where its programs come from: ``untuned``, ``library``, ``random`` or ``database``; "" without tasks.
    origin: str
    #: Whether one of its programs is far from the training data; None where the predictor cannot tell.
    unfamiliar: bool | None
    #: On this device, where the graph says it.
    measured_s: float | None


@dataclass(frozen=True)
class LatencyReport:
    """Predicted latency of one run of a network on a device."""

    network: str
    device: str
    #: ``untuned``, ``best`` or the folder of a database.
    schedule: str
    latency_s: float
    #: See :data:`INTERVAL` and :data:`INDEPENDENT`; None without intervals.
    low_s: float | None
    high_s: float | None
    independent_low_s: float | None
    independent_high_s: float | None
    #: Of a task's own interval.
    coverage: float
    #: Sums over all kernels, and over the times that streams waited for a launch.
    kernel_s: float
    gap_s: float
    #: Kernels started.
    launches: float
    launch_overhead_us: float
    streams: int
    #: Latency on one stream.
    serial_s: float
    #: In the order of execution.
    layers: tuple[LayerLatency, ...]
    #: In the user's currency; the cost of a million runs.
    price_per_hour: float | None
    cost_per_million: float | None
    #: Of the whole network on this device, where the graph says it.
    measured_s: float | None
    #: What the numbers rest on, and what to keep in mind about them.
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ape(self) -> float | None:
        """Absolute error relative to what was measured (0.1 is 10 %); None where nothing was."""
        return None if not self.measured_s else abs(self.latency_s / self.measured_s - 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with ``ape``."""
        return {**asdict(self), "ape": self.ape}
