"""Models to compare ours with, behind one interface (``models``) and on the same records and split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines import networks
from cdmpp.predictor.baselines.models import CdmppModel, LatencyModel, RooflineModel, TaskMedian, evaluate_models
from cdmpp.predictor.baselines.xgboost import XGBoostModel
from cdmpp.predictor.config import LossConfig, TrainConfig, config_from_dict

#: Models that :func:`make_model` makes.
MODEL_NAMES: tuple[str, ...] = (
    "ours", "xgboost-perstore", "xgboost-ast", "released", "lstm", "task-median", "roofline",
)  # fmt: skip

#: More of them, which use the instructions of each compiled program.
COMPILED_NAMES: tuple[str, ...] = ("xgboost-ast-codegen",)

__all__ = [
    "COMPILED_NAMES",
    "MODEL_NAMES",
    "CdmppModel",
    "LatencyModel",
    "TaskMedian",
    "XGBoostModel",
    "evaluate_models",
    "make_model",
]


def make_model(name: str, seed: int = 0, **options: Any) -> LatencyModel:
    """Make one of :data:`MODEL_NAMES` or :data:`COMPILED_NAMES`; deterministic models ignore the seed.

    ``options`` are arguments of the model's constructor. Configurations (``config`` of ours; ``train``, ``loss`` and ``sizes``
    of the networks) may be mappings, as from YAML. PredictorError for an unknown model or key, or a value out of range."""
    if name == "ours":
        config = options.pop("config", None)
        config = config_from_dict(config) if config is None or isinstance(config, Mapping) else config
        return CdmppModel(config.model_copy(update={"train": _seeded(config.train, seed)}), **options)
    if name in ("xgboost-perstore", "xgboost-ast", *COMPILED_NAMES):
        return XGBoostModel(name.removeprefix("xgboost-"), seed=seed, **options)
    if name in ("released", "lstm"):
        if name == "lstm":
            return networks.LstmModel(**_network_options(options, seed, TrainConfig(), LossConfig()))  # type: ignore[call-arg]
        if isinstance(options.get("sizes"), Mapping):
            options["sizes"] = networks.ReleasedSizes(**options["sizes"])
        options = _network_options(options, seed, networks.RELEASED_TRAIN, networks.RELEASED_LOSS)
        return networks.CdmppReleased(**options)
    if name == "task-median":
        return TaskMedian()
    if name == "roofline":
        return RooflineModel()
    raise PredictorError(f"unknown model '{name}' (known: {', '.join(MODEL_NAMES)})")


def _network_options(options: dict[str, Any], seed: int, train: TrainConfig, loss: LossConfig) -> dict[str, Any]:
    """Options with ``train`` and ``loss`` as configurations, which take missing keys from these defaults, and the seed."""
    options = {"train": train, "loss": loss, **options}
    for key, default in (("train", train), ("loss", loss)):
        if isinstance(options[key], Mapping):
            values = {**default.model_dump(), **options[key]}
            options[key] = getattr(config_from_dict({key: values}, f"options of {key}"), key)
    return {**options, "train": _seeded(options["train"], seed)}


def _seeded(train: TrainConfig, seed: int) -> TrainConfig:
    return train.model_copy(update={"seed": seed})
