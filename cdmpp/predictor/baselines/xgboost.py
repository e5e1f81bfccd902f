"""XGBoost on aggregated features and device features: TVM's model family, trained on log seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.base import LatencyModel
from cdmpp.predictor.encoding import signed_log1p

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData

_DEFAULT_PARAMS: dict[str, Any] = {
    "max_depth": 8,
    "eta": 0.05,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "min_child_weight": 2.0,
    "lambda": 1.0,
    "tree_method": "hist",
    "objective": "reg:squarederror",
}


class XGBoostModel(LatencyModel):
    """Gradient-boosted trees on one vector a program plus the device's features; the target is log seconds.

    Parameters
    ----------
    features
        ``"perstore"``: sum, maximum and number of PerStoreFeature rows (TVM's features). ``"ast"``: sum,
        maximum and number of the compact AST's leaves, after a signed logarithm, to compare features with one
        model. ``"ast-codegen"``: these and what ours is told of the compiled program, which needs a
        compilation.
    vectors
        Precomputed per-store vectors, program hash -> (329,); None collects them from the dataset.
    params
        XGBoost parameters on top of the defaults.
    rounds, patience
        Most boosting rounds, and rounds without a better validation error before it stops.
    seed, threads
        Of XGBoost.

    Attributes
    ----------
    params
        The parameters that XGBoost is given.
    """

    def __init__(
        self,
        features: str = "perstore",
        vectors: Mapping[str, NDArray[np.float32]] | None = None,
        params: Mapping[str, Any] | None = None,
        rounds: int = 1000,
        patience: int = 50,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        if features not in ("perstore", "ast", "ast-codegen"):
            raise PredictorError(
                f"unknown features '{features}' for XGBoost (known: perstore, ast, ast-codegen)"
            )
        self.name = f"xgboost-{features}"
        self._features = features
        self._vectors: dict[str, NDArray[np.float32]] = dict(vectors or {})
        self.params: dict[str, Any] = {**_DEFAULT_PARAMS, **(params or {}), "seed": seed, "nthread": threads}
        self._rounds, self._patience = rounds, patience

    def fit(self, data: TrainingData, split: Split) -> None:
        import xgboost as xgb

        train, valid = (self._matrix(data, np.asarray(rows)) for rows in (split.train, split.valid))
        self.booster_ = xgb.train(
            self.params,
            train,
            num_boost_round=self._rounds,
            evals=[(valid, "valid")],
            early_stopping_rounds=self._patience,
            verbose_eval=False,
        )

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        best = self.booster_.best_iteration + 1
        logs = self.booster_.predict(self._matrix(data, rows), iteration_range=(0, best))
        return np.exp(logs.astype(np.float64))

    def _matrix(self, data: TrainingData, rows: NDArray[np.int64]) -> Any:
        import xgboost as xgb

        table = data.labels.iloc[rows]
        self._collect(data, list(dict.fromkeys(table["program"])))
        devices = {name: signed_log1p(vector) for name, vector in data.device_vectors().items()}
        parts: list[NDArray[Any]] = [
            np.stack([self._vectors[program] for program in table["program"]]),
            np.stack([devices[name] for name in table["device"]]),
        ]
        if self._features == "ast-codegen":
            if data.codegen_counts is None:
                raise PredictorError(
                    "xgboost-ast-codegen needs instruction counts: make them with cdmpp codegen DIR"
                )
            features, excess = data.code_features
            parts += [np.log1p(features[rows]), excess[rows, None]]
        x = np.concatenate(parts, axis=1, dtype=np.float32)
        return xgb.DMatrix(x, label=np.log(table["latency_s"].to_numpy(dtype=np.float64)))

    def _collect(self, data: TrainingData, programs: list[str]) -> None:
        missing = [program for program in programs if program not in self._vectors]
        if not missing:
            return
        if self._features != "perstore":
            self._vectors.update(
                {program: aggregate_leaves(data.asts[program].leaves) for program in missing}
            )
            return
        from cdmpp.predictor.baselines.per_store import AGGREGATED_DIM, collect_per_store

        found = collect_per_store(data.view, missing) if data.view is not None else {}
        unknown = np.full(AGGREGATED_DIM, np.nan, dtype=np.float32)  # trees take NaN as missing
        self._vectors.update({program: found.get(program, unknown) for program in missing})


def aggregate_leaves(leaves: NDArray[Any]) -> NDArray[np.float32]:
    """Raw leaves (n, f) -> float32 (2 f + 1,): sum and maximum of signed logarithms, and n."""
    logs = signed_log1p(leaves)
    return np.concatenate([logs.sum(0), logs.max(0), [len(logs)]]).astype(np.float32)
