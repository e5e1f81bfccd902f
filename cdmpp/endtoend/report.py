"""What is said about a network's latency on a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: What the two intervals assume; :class:`LatencyReport` has the numbers.
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
    """One node of the network.

    Attributes
    ----------
    name, operator, kind, phase, repeat, tasks
        As in :class:`cdmpp.program.graph.GraphNode`.
    latency_s
        Seconds of its kernels, all its runs together.
    low_s, high_s
        The interval of that, all its tasks at the same end; None without intervals.
    gap_s
        Seconds that its stream was idle because the host had not launched its kernels yet.
    fraction
        Part of the sum of all nodes' latencies and gaps, 0 to 1.
    start_s, stream
        When its first kernel starts, and on which stream.
    origin
        Where its programs come from: ``untuned``, ``library``, ``random`` or ``database``; "" without tasks.
    unfamiliar
        Whether one of its programs is far from the training data; None where the predictor cannot tell.
    measured_s
        Seconds measured on this device, all its runs together, where the graph tells.
    """

    name: str
    operator: str
    kind: str
    phase: str
    repeat: float
    tasks: tuple[str, ...]
    latency_s: float
    low_s: float | None
    high_s: float | None
    gap_s: float
    fraction: float
    start_s: float
    stream: int
    origin: str
    unfamiliar: bool | None
    measured_s: float | None


@dataclass(frozen=True)
class LatencyReport:
    """Predicted latency of a network on a device, in seconds.

    Attributes
    ----------
    network, device
        Names, the device's canonical.
    schedule
        ``untuned``, ``best`` or the folder of a database.
    latency_s
        Of one run of the network.
    low_s, high_s, independent_low_s, independent_high_s
        Intervals of `coverage`, see :data:`INTERVAL` and :data:`INDEPENDENT`; None without intervals.
    coverage
        That a task's own interval has.
    kernel_s
        Sum of all kernels.
    gap_s
        Sum of the times that streams waited for a launch.
    launches
        Number of kernels started.
    launch_overhead_us
        That the replay counted with, microseconds.
    streams
        Kernels that could run at the same time.
    serial_s
        Latency on one stream; the same as `latency_s` where there is one.
    layers
        In the order of execution.
    price_per_hour, cost_per_million
        Of the device, and of a million runs, in the user's currency; None without prices.
    measured_s
        Of the whole network on this device, where the graph tells.
    assumptions, notes
        What the numbers rest on, and what to keep in mind about them.
    """

    network: str
    device: str
    schedule: str
    latency_s: float
    low_s: float | None
    high_s: float | None
    independent_low_s: float | None
    independent_high_s: float | None
    coverage: float
    kernel_s: float
    gap_s: float
    launches: float
    launch_overhead_us: float
    streams: int
    serial_s: float
    layers: tuple[LayerLatency, ...]
    price_per_hour: float | None
    cost_per_million: float | None
    measured_s: float | None
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ape(self) -> float | None:
        """Absolute error relative to what was measured (0.1 is 10 %); None where nothing was."""
        return None if not self.measured_s else abs(self.latency_s / self.measured_s - 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with ``ape``."""
        return {**asdict(self), "ape": self.ape}
