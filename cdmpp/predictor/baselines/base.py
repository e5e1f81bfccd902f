"""The interface every latency model has in a comparison, ours included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData


class LatencyModel(ABC):
    """Fits to the training part of a split and predicts rows of the label table.

    Everything configurable, the seed included, is given to the constructor. ``fit`` may use the validation
    part to stop early and must not look at the test part.
    """

    #: Short name for tables.
    name: str = "model"

    @abstractmethod
    def fit(self, data: TrainingData, split: Split) -> None:
        """Fit to ``data.labels.iloc[split.train]``."""

    @abstractmethod
    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for ``data.labels.iloc[rows]``, float64 (n,), finite and above 0."""
