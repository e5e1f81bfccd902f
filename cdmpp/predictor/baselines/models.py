"""The interface of all models in a comparison, the harness that runs them, our predictor as one, and simple baselines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cdmpp.dataset import Split
from cdmpp.dataset.split import ordered
from cdmpp.errors import PredictorError
from cdmpp.predictor.config import Config
from cdmpp.predictor.data import TrainingData
from cdmpp.predictor.encoding import FeatureEncoder, LabelledArrays
from cdmpp.predictor.evaluation import score
from cdmpp.predictor.network import LatencyNetwork
from cdmpp.predictor.pair_features import roofline_s
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.trainer import ProgressCallback
from cdmpp.predictor.training import prepare, train, training_summary

#: Part of the training programs that is held out for early stopping where a split has no validation part.
STOP_FRACTION = 0.1


class LatencyModel(ABC):
    """Fits to the training part of a split and predicts rows of the label table. Everything configurable, the seed included, is
    given to the constructor. ``fit`` may use the validation part to stop early and must not look at the test part."""

    #: Short name for tables.
    name: str = "model"

    @abstractmethod
    def fit(self, data: TrainingData, split: Split) -> None:
        """Fit to ``data.labels.iloc[split.train]``."""

    @abstractmethod
    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for ``data.labels.iloc[rows]``, float64 (n,), finite and above 0."""


class TrainedModel(LatencyModel):
    """Trains a network in memory, for at most ``max_seconds``; ``progress`` is called with each epoch's line."""

    def __init__(self, config: Config, max_seconds: float | None = None, progress: ProgressCallback | None = None) -> None:
        if max_seconds is not None and not max_seconds > 0:
            raise PredictorError(f"max_seconds must be above 0, got {max_seconds}")
        self._config, self.max_seconds, self._progress = config, max_seconds, progress
        self.predictor_: Predictor | None = None

    @abstractmethod
    def make_network(self, train: LabelledArrays, encoder: FeatureEncoder) -> nn.Module:
        """The untrained network for these training pairs, called as ``network(batch, context)``."""

    def fit(self, data: TrainingData, split: Split) -> None:
        fitted = prepare(self._config, data, split, self.make_network, self.max_seconds)
        state = fitted.trainer.fit(progress=self._progress)
        self.predictor_ = fitted.predictor(state.best, training_summary(self._config, data, split, state))

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.predictor_ is None:
            raise PredictorError(f"model {self.name} is not fitted")
        return self.predictor_.predict_rows(data, rows)


class CdmppModel(TrainedModel):
    """Trains a :class:`~cdmpp.predictor.predictor.Predictor`; several networks train without ``max_seconds``."""

    name = "cdmpp"

    def make_network(self, train: LabelledArrays, encoder: FeatureEncoder) -> nn.Module:
        return LatencyNetwork(self._config.model, *train.widths)

    def fit(self, data: TrainingData, split: Split) -> None:
        if self._config.train.members == 1:
            super().fit(data, split)
        else:
            with TemporaryDirectory() as folder:
                self.predictor_ = train(self._config, data, folder, self._progress, split=split).predictor


class TaskMedian(LatencyModel):
    """Median training latency of the task on the device, else of the device, else (for an unseen device) of all records."""

    name = "task_median"

    def fit(self, data: TrainingData, split: Split) -> None:
        table = data.labels.iloc[np.asarray(split.train)]
        logs = np.log(table["latency_s"])
        self.overall_ = float(logs.median())
        self.device_ = logs.groupby(table["device"].astype(str)).median().to_dict()
        self.task_ = logs.groupby([table["task"].astype(str), table["device"].astype(str)]).median().to_dict()

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        table = data.labels.iloc[rows]
        logs = [
            self.task_.get((task, device), self.device_.get(device, self.overall_))
            for task, device in zip(table["task"], table["device"], strict=True)
        ]
        return np.exp(np.asarray(logs, dtype=np.float64))


class RooflineModel(LatencyModel):
    """The roofline, multiplied by the device's median of measured latency over roofline in training (of all devices if not in
    training)."""

    name = "roofline"

    def fit(self, data: TrainingData, split: Split) -> None:
        table = data.labels.iloc[np.asarray(split.train)]
        logs = np.log(table["latency_s"] / data.reference_s(split.train, roofline_s))
        self.overall_ = float(logs.median())
        self.device_ = logs.groupby(table["device"].astype(str)).median().to_dict()

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        devices = data.labels["device"].iloc[rows]
        return data.reference_s(rows, roofline_s) * np.exp([self.device_.get(name, self.overall_) for name in devices])


def evaluate_models(models: Sequence[LatencyModel], data: TrainingData, split: Split) -> dict[str, dict[str, Any]]:
    """Fit every model to the training part and score it on the test part: model name -> ``{"overall": ..., "fit_s": float,
    "predict_s": float}``. If the split has no validation part (as in few-shot training), a tenth of the training programs is
    held out for early stopping."""
    if not len(split.valid):
        split = _with_validation(data, split)
    results: dict[str, dict[str, Any]] = {}
    for model in models:
        started = time.perf_counter()
        model.fit(data, split)
        fitted = time.perf_counter()
        predicted_s = model.predict(data, split.test)
        done = time.perf_counter()
        timing = {"fit_s": round(fitted - started, 3), "predict_s": round(done - fitted, 3)}
        results[model.name] = {**score(data, split.test, predicted_s, ()), **timing}
    return results


def _with_validation(data: TrainingData, split: Split) -> Split:
    programs = data.labels["program"].iloc[split.train]
    names = ordered(set(programs), split.seed, "stop")
    held = programs.isin(names[: max(1, round(STOP_FRACTION * len(names)))]).to_numpy()
    return replace(split, train=split.train[~held], valid=split.train[held])
