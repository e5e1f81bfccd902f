"""Latency of whole networks: of each task, and end to end."""

from cdmpp.endtoend.graph import NetworkTasks, network_tasks
from cdmpp.endtoend.latency import Comparison, compare_devices, predict_latency, read_prices, shares_of, smallest_share
from cdmpp.endtoend.report import LatencyReport
from cdmpp.endtoend.tasks import predict_network

__all__ = [
    "Comparison", "LatencyReport", "NetworkTasks", "compare_devices", "network_tasks", "predict_latency",
    "predict_network", "read_prices", "shares_of", "smallest_share",
]  # fmt: skip
