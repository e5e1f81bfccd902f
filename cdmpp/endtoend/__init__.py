"""Whole networks: what their tasks take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.endtoend.compare import Comparison, compare_devices
    from cdmpp.endtoend.latency import predict_latency
    from cdmpp.endtoend.prices import read_prices
    from cdmpp.endtoend.report import LatencyReport

_MODULES = {
    "Comparison": "compare",
    "LatencyReport": "report",
    "compare_devices": "compare",
    "predict_latency": "latency",
    "read_prices": "prices",
}

__all__ = ["Comparison", "LatencyReport", "compare_devices", "predict_latency", "read_prices"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
