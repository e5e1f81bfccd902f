"""Tuning: MetaSchedule's search with a cost model that is pretrained, and a profiler that wastes little.

Everything below is imported when it is first used: :class:`CostModel` and what searches need TVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.tuner.config import TuneConfig
    from cdmpp.tuner.cost_model import CostModel, builder_and_runner
    from cdmpp.tuner.deployment import import_network
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.objective import Objective
    from cdmpp.tuner.results import TuneReport
    from cdmpp.tuner.tuning import tune, tune_tasks
    from cdmpp.tuner.validity import ValidityModel, train_validity

_HOME = {
    "CostModel": "cdmpp.tuner.cost_model",
    "Measurer": "cdmpp.tuner.measure",
    "Objective": "cdmpp.tuner.objective",
    "TuneConfig": "cdmpp.tuner.config",
    "TuneReport": "cdmpp.tuner.results",
    "ValidityModel": "cdmpp.tuner.validity",
    "builder_and_runner": "cdmpp.tuner.cost_model",
    "import_network": "cdmpp.tuner.deployment",
    "train_validity": "cdmpp.tuner.validity",
    "tune": "cdmpp.tuner.tuning",
    "tune_tasks": "cdmpp.tuner.tuning",
}

__all__ = [
    "CostModel",
    "Measurer",
    "Objective",
    "TuneConfig",
    "TuneReport",
    "ValidityModel",
    "builder_and_runner",
    "import_network",
    "train_validity",
    "tune",
    "tune_tasks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cdmpp.tuner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
