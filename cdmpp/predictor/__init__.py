"""The predictor: features in, seconds out. Torch is imported when a name of this package is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from cdmpp.predictor.config import Config, config_from_dict, load_config
    from cdmpp.predictor.data import TrainingData, gather, program_resolver, split_data
    from cdmpp.predictor.evaluation import evaluate
    from cdmpp.predictor.finetuning import FinetuneResult, few_shot, finetune
    from cdmpp.predictor.predictor import Predictor
    from cdmpp.predictor.selection import TaskSelection, select_tasks
    from cdmpp.predictor.training import TrainResult, train

_PUBLIC = {
    "config": ["Config", "config_from_dict", "load_config"],
    "data": ["TrainingData", "gather", "program_resolver", "split_data"],
    "evaluation": ["evaluate"],
    "finetuning": ["FinetuneResult", "few_shot", "finetune"],
    "predictor": ["Predictor"],
    "selection": ["TaskSelection", "select_tasks"],
    "training": ["TrainResult", "train"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, None, _PUBLIC)
