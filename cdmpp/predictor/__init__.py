"""The predictor: features in, seconds out. Torch is imported when something here is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.predictor.config import Config, config_from_dict, load_config
    from cdmpp.predictor.data import TrainingData, gather, program_resolver, split_data
    from cdmpp.predictor.evaluation import evaluate
    from cdmpp.predictor.finetuning import FinetuneResult, few_shot, finetune, finetune_config
    from cdmpp.predictor.predictor import Predictor
    from cdmpp.predictor.selection import TaskSelection, select_tasks
    from cdmpp.predictor.training import TrainResult, train

_NAMES = {
    "config": ("Config", "config_from_dict", "load_config"),
    "data": ("TrainingData", "gather", "program_resolver", "split_data"),
    "evaluation": ("evaluate",),
    "finetuning": ("FinetuneResult", "few_shot", "finetune", "finetune_config"),
    "predictor": ("Predictor",),
    "selection": ("TaskSelection", "select_tasks"),
    "training": ("TrainResult", "train"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
