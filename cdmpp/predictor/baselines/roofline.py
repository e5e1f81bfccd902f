"""The roofline, and an analytical estimate, as models to compare with: nothing is learned but one factor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.predictor.baselines.base import LatencyModel

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData


class RooflineModel(LatencyModel):
    """A reference latency times the factor that fits the training labels best.

    Parameters
    ----------
    reference
        ``"roofline"`` or ``"estimate"``, see :mod:`cdmpp.predictor.roofline`.
    scaled
        Multiply by the median of measured over reference in training, per device (all devices for one that is
        not in training). Without it the reference itself is the prediction.
    """

    def __init__(self, reference: str = "roofline", scaled: bool = True) -> None:
        self.name = reference
        self._reference, self._scaled = reference, scaled

    def fit(self, data: TrainingData, split: Split) -> None:
        rows = np.asarray(split.train)
        table = data.labels.iloc[rows]
        logs = np.log(table["latency_s"].to_numpy(dtype=np.float64)) - np.log(self._of(data, rows))
        self.overall_ = float(np.median(logs))
        device = table["device"].to_numpy()
        self.device_ = {name: float(np.median(logs[device == name])) for name in set(device)}

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        reference = self._of(data, rows)
        if not self._scaled:
            return reference
        devices = data.labels["device"].iloc[rows]
        return reference * np.exp([self.device_.get(name, self.overall_) for name in devices])

    def _of(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return data.reference_s(self._reference, rows)
