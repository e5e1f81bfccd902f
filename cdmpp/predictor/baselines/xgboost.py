"""XGBoost on aggregated program features and device features, trained on log seconds: TVM's kind of model and its features.

TVM's PerStoreFeature takes some 20 ms per program, so its aggregated features are stored in the dataset's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, Split
from cdmpp.device import device_features
from cdmpp.errors import DatasetError, FeatureMismatchError, PredictorError, ProgramError, raised_as
from cdmpp.files import replacing
from cdmpp.predictor.baselines.models import LatencyModel
from cdmpp.predictor.data import TrainingData, collect_derived
from cdmpp.predictor.encoding import signed_log1p
from cdmpp.predictor.metrics import least_mape_shift

#: File in a dataset folder that stores the aggregated features of its programs.
PER_STORE_FILE = "perstore.parquet"

#: Features per store to a buffer, as TVM 0.27 extracts them.
PER_STORE_DIM = 164

#: Identifies the aggregated features; it is stored in the file, and a file with another value is refused.
PER_STORE_SET = "perstore-sum-max-count/1"

#: Length of the aggregated features: sum and maximum over the stores, and the number of stores.
AGGREGATED_DIM = 2 * PER_STORE_DIM + 1


def extract_per_store(funcs: Sequence[Any]) -> list[NDArray[np.float64]]:
    """PrimFuncs of CPU programs -> one float64 matrix (stores, 164) each; ProgramError if TVM cannot lower or analyse one."""
    from cdmpp.program import import_tvm

    tvm = import_tvm()
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.schedule import Schedule

    if not funcs:
        return []
    try:
        candidates = [ms.MeasureCandidate(Schedule(mod), []) for mod in [tvm.IRModule({"main": f}) for f in funcs]]
        target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
        context = ms.TuneContext(mod=tvm.IRModule({"main": funcs[0]}), target=target, num_threads=1)
        features = ms.feature_extractor.PerStoreFeature().extract_from(context, candidates)
    except Exception as err:  # TVM raises its own error types
        raise ProgramError(f"TVM cannot extract PerStoreFeature: {' '.join(str(err).split())[:300]}") from err
    return [np.asarray(matrix.numpy(), dtype=np.float64) for matrix in features]


def aggregate_per_store(matrix: NDArray[np.float64]) -> NDArray[np.float32]:
    """(stores, 164) -> float32 (329,): sum and maximum over the stores, and their number.

    TVM finds no store in some programs that only move data; their features are zeros."""
    if matrix.ndim != 2 or matrix.shape[1] != PER_STORE_DIM:
        raise FeatureMismatchError(f"expected per-store features of shape (n, {PER_STORE_DIM}), got {matrix.shape}")
    if not len(matrix):
        return np.zeros(AGGREGATED_DIM, dtype=np.float32)
    return np.concatenate([matrix.sum(0), matrix.max(0), [len(matrix)]]).astype(np.float32)


def save_per_store(path: str | Path, features: Mapping[str, NDArray[np.float32]]) -> None:
    """Write aggregated features, program hash -> float32 (329,), in half precision."""
    programs = list(features)
    stacked = np.stack([features[p] for p in programs]) if programs else np.zeros((0, AGGREGATED_DIM))
    matrix = np.clip(stacked, -65504, 65504).astype(np.float16)
    columns = {"program": pa.array(programs, pa.string())}
    columns.update({f"f{i:03d}": pa.array(np.ascontiguousarray(matrix[:, i])) for i in range(AGGREGATED_DIM)})
    table = pa.table(columns).replace_schema_metadata({"feature_set": PER_STORE_SET})
    with replacing(Path(path)) as draft:
        pq.write_table(table, draft, compression="zstd", compression_level=9)


def load_per_store(path: str | Path) -> dict[str, NDArray[np.float32]]:
    """Read a file of :func:`save_per_store`. FeatureMismatchError: another feature set; DatasetError: missing or damaged."""
    with raised_as(DatasetError, f"{path}: cannot read per-store features", pa.ArrowException):
        table = pq.read_table(path)
    found = (table.schema.metadata or {}).get(b"feature_set", b"none").decode()
    if found != PER_STORE_SET:
        raise FeatureMismatchError(f"{path}: per-store features '{found}', expected '{PER_STORE_SET}'")
    matrix = np.stack([table.column(f"f{i:03d}").to_numpy() for i in range(AGGREGATED_DIM)], axis=1)
    return dict(zip(table.column("program").to_pylist(), matrix.astype(np.float32), strict=True))


def collect_per_store(view: DatasetView, programs: Iterable[str]) -> dict[str, NDArray[np.float32]]:
    """Aggregated features of programs, from the datasets' ``perstore.parquet`` or extracted with TVM; programs that cannot be
    rebuilt or analysed are left out."""

    def derive(funcs: list[Any]) -> list[NDArray[np.float32]]:
        return [aggregate_per_store(matrix) for matrix in extract_per_store(funcs)]

    return collect_derived(view, programs, PER_STORE_FILE, derive, load_per_store, save_per_store)


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
    """Gradient-boosted trees on one vector per program plus the device's features. The target is log seconds; predictions are
    then scaled by the factor that gives the lowest MAPE on the validation part.

    ``features``: ``"perstore"`` are sum, maximum and number of PerStoreFeature rows (TVM's features); ``"ast"`` are the same of
    the compact AST's leaves, after a signed logarithm, to compare features with one model; ``"ast-codegen"`` adds to these our
    predictor's code features, which need a compilation. ``params`` override the defaults of XGBoost's parameters. There are at
    most ``rounds`` boosting rounds; training stops after ``patience`` rounds without a better validation error."""

    def __init__(
        self,
        features: str = "perstore",
        params: Mapping[str, Any] | None = None,
        rounds: int = 1000,
        patience: int = 50,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        if features not in ("perstore", "ast", "ast-codegen"):
            raise PredictorError(f"unknown features '{features}' for XGBoost (known: perstore, ast, ast-codegen)")
        self.name = f"xgboost-{features}"
        self._features = features
        self._vectors: dict[str, NDArray[np.float32]] = {}
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
        # trees learn the mean of the logarithms, which does not give the least relative error
        self.shift_ = least_mape_shift(np.log(data.latency_s[split.valid]) - self._logs(valid))

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.exp(self._logs(self._matrix(data, rows)) + self.shift_)

    def _logs(self, matrix: Any) -> NDArray[np.float64]:
        best = self.booster_.best_iteration + 1
        logs: NDArray[np.float64] = self.booster_.predict(matrix, iteration_range=(0, best)).astype(np.float64)
        return logs

    def _matrix(self, data: TrainingData, rows: NDArray[np.int64]) -> Any:
        import xgboost as xgb

        table = data.labels.iloc[rows]
        self._collect(data, list(dict.fromkeys(table["program"])))
        devices = {name: signed_log1p(device_features(device)) for name, device in data.devices.items()}
        parts: list[NDArray[Any]] = [
            np.stack([self._vectors[program] for program in table["program"]]),
            np.stack([devices[name] for name in table["device"]]),
        ]
        if self._features == "ast-codegen":
            if data.codegen_counts is None:
                raise PredictorError("xgboost-ast-codegen needs instruction counts: make them with cdmpp codegen DIR")
            code = data.code_features(True)
            parts += [np.log1p(code.program[rows]), np.log1p(code.loops[rows].reshape(len(rows), -1)), code.times[rows]]
        x = np.concatenate(parts, axis=1, dtype=np.float32)
        return xgb.DMatrix(x, label=np.log(table["latency_s"].to_numpy(dtype=np.float64)))

    def _collect(self, data: TrainingData, programs: list[str]) -> None:
        missing = [program for program in programs if program not in self._vectors]
        if not missing:
            return
        if self._features != "perstore":
            self._vectors.update({program: aggregate_leaves(data.asts[program].leaves) for program in missing})
            return
        found = collect_per_store(data.view, missing) if data.view is not None else {}
        unknown = np.full(AGGREGATED_DIM, np.nan, dtype=np.float32)  # trees take NaN as missing
        self._vectors.update({program: found.get(program, unknown) for program in missing})


def aggregate_leaves(leaves: NDArray[Any]) -> NDArray[np.float32]:
    """Raw leaves (n, f) -> float32 (2 f + 1,): sum and maximum of signed logarithms, and n."""
    logs = signed_log1p(leaves)
    return np.concatenate([logs.sum(0), logs.max(0), [len(logs)]]).astype(np.float32)
