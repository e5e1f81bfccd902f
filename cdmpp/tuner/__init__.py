"""Tuning: search with a pretrained cost model, and a profiler that avoids needless measurements; imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from cdmpp.tuner.config import Objective, TuneConfig
    from cdmpp.tuner.cost_model import CostModel
    from cdmpp.tuner.deployment import import_network
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.results import TuneReport
    from cdmpp.tuner.tuning import tune, tune_tasks
    from cdmpp.tuner.validity import ValidityModel, train_validity

_PUBLIC = {
    "config": ["Objective", "TuneConfig"],
    "cost_model": ["CostModel"],
    "deployment": ["import_network"],
    "measure": ["Measurer"],
    "results": ["TuneReport"],
    "tuning": ["tune", "tune_tasks"],
    "validity": ["ValidityModel", "train_validity"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, None, _PUBLIC)
