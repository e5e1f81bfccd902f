"""A validity model that learns from what works and what fails while tuning.

The model stays as it was trained. A few small trees, grown anew on the session's own records with the model's log odds as
their start (XGBoost's base margin), say how far it is off: without failures there is nothing to say, and where nothing
was measured the model's word stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.tuner.validity import ValidityModel, sigmoid
from cdmpp.tuner.validity_features import limits_of, validity_features

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

#: Log odds of a program without a model: nine of ten work, which a session's first failures soon correct.
_WITHOUT_MODEL = float(np.log(9.0))
#: Records that are learned from, the latest.
_MAX_RECORDS = 1024
#: The trees: together they move log odds by 3 at most, where all records agree.
_ROUNDS = 20
_PARAMS: dict[str, Any] = {
    "max_depth": 3,
    "eta": 0.15,
    "min_child_weight": 0.0,
    "colsample_bytree": 0.5,
    "tree_method": "hist",
    "objective": "binary:logistic",
    "base_score": 0.5,
    "nthread": 1,
    "verbosity": 0,
}


class OnlineValidity:
    """P(valid) on one device, with what was seen on it.

    Parameters
    ----------
    model
        What is known at the start; None starts from nothing.
    device
        The device.
    seed
        Of the trees.
    """

    def __init__(self, model: ValidityModel | None, device: Device, seed: int = 0) -> None:
        self.model, self.device = model, device
        self._limits = limits_of(device)
        self._params = {**_PARAMS, "seed": seed}
        #: Program -> features, whether it works; oldest first.
        self._records: dict[str, tuple[NDArray[np.float32], bool]] = {}
        self._trees: Any = None

    def __len__(self) -> int:
        return len(self._records)

    def features(self, asts: Sequence[CompactAST]) -> NDArray[np.float32]:
        """Programs, n >= 1, as :meth:`predict` and :meth:`learn` take them: float32 (n, d)."""
        return validity_features(asts, self._limits, self.device)

    def predict(self, features: NDArray[np.float32]) -> FloatArray:
        """P(valid) of programs, float64 (n,)."""
        odds = self._prior(features)
        if self._trees is not None and len(features):
            import xgboost as xgb

            odds = self._trees.predict(xgb.DMatrix(features, base_margin=odds), output_margin=True)
        return sigmoid(odds)

    def learn(
        self,
        programs: Sequence[str],
        features: NDArray[np.float32],
        valid: Sequence[bool] | NDArray[np.bool_],
    ) -> None:
        """Take programs (their hashes) that worked or failed, and correct the model by the session's records so far."""
        for program, row, works in zip(programs, features, valid, strict=True):
            self._records.pop(program, None)
            self._records[program] = (row, bool(works))
        latest = list(self._records.values())[-_MAX_RECORDS:]
        self._trees = None
        if all(works for _, works in latest):
            return
        import xgboost as xgb

        x = np.stack([row for row, _ in latest])
        y = np.array([works for _, works in latest], dtype=np.float64)
        data = xgb.DMatrix(x, y, base_margin=self._prior(x))
        self._trees = xgb.train(self._params, data, num_boost_round=_ROUNDS)

    def _prior(self, features: NDArray[np.float32]) -> FloatArray:
        if self.model is None:
            return np.full(len(features), _WITHOUT_MODEL)
        return self.model.log_odds(features)
