"""cdmpp's own predictor as one model among others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.base import LatencyModel
from cdmpp.predictor.config import Config

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.predictor import Predictor
    from cdmpp.predictor.trainer import ProgressCallback


class CdmppModel(LatencyModel):
    """Trains :class:`~cdmpp.predictor.predictor.Predictor` in memory, or wraps a trained one."""

    def __init__(
        self, config: Config | None = None, *, predictor: Predictor | None = None, name: str = "cdmpp",
        progress: ProgressCallback | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._config = config or Config()
        self._progress = progress
        self.predictor_ = predictor

    def fit(self, data: TrainingData, split: Split) -> None:
        from cdmpp.predictor.training import prepare, training_summary

        fitted = prepare(self._config, data, split)
        state = fitted.trainer.fit(progress=self._progress)
        self.predictor_ = fitted.predictor(state.best, training_summary(self._config, data, split, state))

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.predictor_ is None:
            raise PredictorError(f"model {self.name} is not fitted")
        return self.predictor_.predict_rows(data, rows)
