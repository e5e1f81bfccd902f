"""Baselines that learn one number a group: what a model must beat to have learned anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.base import LatencyModel

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData


class TaskMedian(LatencyModel):
    """Median training latency of the task on the device.

    For a task not seen on the device, the median of the device; for a device not seen, the median of all.
    The geometric mean (``statistic="mean"``) is the alternative.
    """

    def __init__(self, statistic: str = "median") -> None:
        if statistic not in ("median", "mean"):
            raise PredictorError(f"unknown statistic '{statistic}' (known: median, mean)")
        self.name = f"task_{statistic}"
        self._centre = np.median if statistic == "median" else np.mean

    def fit(self, data: TrainingData, split: Split) -> None:
        table = data.labels.iloc[np.asarray(split.train)]
        logs = np.log(table["latency_s"].to_numpy(dtype=np.float64))
        self.overall_ = float(self._centre(logs))
        self.device_ = self._by_key(table["device"].tolist(), logs)
        self.task_ = self._by_key(list(zip(table["task"], table["device"], strict=True)), logs)

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        table = data.labels.iloc[rows]
        logs = [
            self.task_.get((task, device), self.device_.get(device, self.overall_))
            for task, device in zip(table["task"], table["device"], strict=True)
        ]
        return np.exp(np.asarray(logs, dtype=np.float64))

    def _by_key(self, keys: list, logs: NDArray[np.float64]) -> dict:
        groups: dict = {}
        for key, value in zip(keys, logs, strict=True):
            groups.setdefault(key, []).append(value)
        return {key: float(self._centre(values)) for key, values in groups.items()}
