"""Tuning: MetaSchedule's search with a pretrained cost model, and a profiler that wastes little; imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.tuner.config import Objective, TuneConfig
    from cdmpp.tuner.cost_model import CostModel, builder_and_runner
    from cdmpp.tuner.deployment import import_network
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.results import TuneReport
    from cdmpp.tuner.tuning import tune, tune_tasks
    from cdmpp.tuner.validity import ValidityModel, train_validity

_NAMES = {
    "config": ("Objective", "TuneConfig"),
    "cost_model": ("CostModel", "builder_and_runner"),
    "deployment": ("import_network",),
    "measure": ("Measurer",),
    "results": ("TuneReport",),
    "tuning": ("tune", "tune_tasks"),
    "validity": ("ValidityModel", "train_validity"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
