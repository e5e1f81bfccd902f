"""Latency report of a network: its latency, that of its layers, and the assumptions behind them."""

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
    """One node of the network, over all its runs; the first fields are those of its GraphNode."""

    name: str
    operator: str
    kind: str
    phase: str
    repeat: float
    tasks: tuple[str, ...]
    #: Latency of its kernels; the interval has all its tasks at the same end, and is None without intervals.
    latency_s: float
    low_s: float | None
    high_s: float | None
    #: How long its stream was idle because the host had not launched its kernels yet.
    gap_s: float
    #: Fraction of the sum of all nodes' latencies and gaps, 0 to 1.
    fraction: float
    #: Start time of its first kernel, and the stream that it runs on.
    start_s: float
    stream: int
    #: Where its programs come from: ``untuned``, ``library``, ``random`` or ``database``; "" without tasks.
    origin: str
    #: Whether one of its programs is far from the training data; None where the predictor cannot tell.
    unfamiliar: bool | None
    #: Measured latency on this device, if the graph has it.
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
    #: Coverage of a single task's interval.
    coverage: float
    #: Sum of all kernels' latencies, and of the times that streams waited for a launch.
    kernel_s: float
    gap_s: float
    #: Number of kernel launches.
    launches: float
    launch_overhead_us: float
    streams: int
    #: Latency on one stream.
    serial_s: float
    #: In the order of execution.
    layers: tuple[LayerLatency, ...]
    #: Price per hour in the user's currency; cost of a million runs.
    price_per_hour: float | None
    cost_per_million: float | None
    #: Measured latency of the whole network on this device, if the graph has it.
    measured_s: float | None
    #: Assumptions behind the numbers, and caveats about them.
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ape(self) -> float | None:
        """Absolute error relative to the measured latency (0.1 is 10 %); None if it was not measured."""
        return None if not self.measured_s else abs(self.latency_s / self.measured_s - 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with ``ape``."""
        return {**asdict(self), "ape": self.ape}
