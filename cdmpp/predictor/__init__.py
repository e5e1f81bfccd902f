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

_HOME = {
    "Config": "config",
    "config_from_dict": "config",
    "load_config": "config",
    "TrainingData": "data",
    "program_resolver": "data",
    "gather": "data",
    "evaluate": "evaluation",
    "FinetuneResult": "finetuning",
    "few_shot": "finetuning",
    "finetune": "finetuning",
    "finetune_config": "finetuning",
    "Predictor": "predictor",
    "TaskSelection": "selection",
    "select_tasks": "selection",
    "TrainResult": "training",
    "train": "training",
    "split_data": "data",
}

__all__ = [
    "Config",
    "FinetuneResult",
    "Predictor",
    "TaskSelection",
    "TrainResult",
    "TrainingData",
    "config_from_dict",
    "evaluate",
    "few_shot",
    "finetune",
    "finetune_config",
    "gather",
    "load_config",
    "program_resolver",
    "select_tasks",
    "split_data",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
