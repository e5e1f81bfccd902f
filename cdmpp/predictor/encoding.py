"""From raw feature values to what the network sees: signed logarithm, standardisation, clipping, fitted on training data
alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import GENERAL_DEVICE_FEATURES
from cdmpp.errors import FeatureMismatchError, PredictorError
from cdmpp.predictor.pair_features import TIME_PARTS, CodeRows
from cdmpp.program.codegen import LOOPS

FloatArray = NDArray[np.float32]

_PARTS = ("leaf", "device", "pair", "code", "loop")
#: Standard deviations (of signed logarithms) below which a column counts as constant.
_CONSTANT_STD = 1e-5


def signed_log1p(values: NDArray[Any]) -> NDArray[np.float64]:
    """``sign(x) * log(1 + |x|)``: keeps zero and flags, compresses counts and bytes."""
    values = np.asarray(values, dtype=np.float64)
    return np.sign(values) * np.log1p(np.abs(values))


@dataclass(frozen=True)
class ColumnScaler:
    """Signed logarithm and standardisation per column: ``mean`` and ``std``, (n_columns,), are of the signed logarithm
    of the training rows, ignoring NaN. Columns that did not vary in training are not ``active``: they are encoded as 0
    always, as whatever weights they meet were never trained. Standardised values are clipped to ``[-clip, clip]``."""

    names: tuple[str, ...]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    active: NDArray[np.bool_]
    clip: float

    def __post_init__(self) -> None:
        if any(np.shape(column) != (len(self.names),) for column in (self.mean, self.std, self.active)):
            raise PredictorError(f"statistics of {len(self.names)} features are of another shape")

    @classmethod
    def fit(cls, rows: NDArray[Any], names: Sequence[str], clip: float) -> ColumnScaler:
        """Fit to rows of shape (n, n_columns), n >= 1; NaN is missing."""
        rows = np.asarray(rows)
        _check_columns(rows, names)
        if not len(rows):
            raise PredictorError("a scaler needs one row at least")
        logs = signed_log1p(rows)
        known = ~np.isnan(logs)
        count = np.maximum(known.sum(0), 1)
        mean = np.where(known, logs, 0.0).sum(0) / count
        std = np.sqrt((np.where(known, logs - mean, 0.0) ** 2).sum(0) / count)
        active = std > _CONSTANT_STD
        return cls(tuple(names), mean, np.where(active, std, 1.0), active, float(clip))

    def transform(self, rows: NDArray[Any]) -> FloatArray:
        """Encode rows of shape (n, n_columns); NaN becomes 0, the training mean."""
        _check_columns(rows, self.names)
        scaled = (signed_log1p(rows) - self.mean) / self.std
        scaled = np.where(self.active & ~np.isnan(scaled), np.clip(scaled, -self.clip, self.clip), 0.0)
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class FeatureEncoder:
    """Scalers of leaves, devices, pairs of both, compiled code and its loops (:mod:`cdmpp.predictor.pair_features`).

    The device scaler sees every training device once, whatever its number of records. It clips to as far as any of these is
    from their mean: a few devices do not tell what lies beyond, and a network that was shown two of them would extrapolate
    without bound. Without a scaler of pairs or code, these are encoded as nothing. ``feature_set`` identifies the leaf
    features (:data:`cdmpp.program.ast.FEATURE_SET`).
    """

    feature_set: str
    leaf: ColumnScaler
    device: ColumnScaler
    pair: ColumnScaler | None = None
    code: ColumnScaler | None = None
    loop: ColumnScaler | None = None

    @classmethod
    def fit(
        cls, feature_set: str, parts: Mapping[str, tuple[NDArray[Any], Sequence[str]]], clip: float = 8.0
    ) -> FeatureEncoder:
        """Fit to raw rows and column names of each part: ``leaf`` (of all training programs), ``device``, and if any
        ``pair``, ``code`` and ``loop`` (rows of NaN where unknown). FeatureMismatchError: columns and names differ in
        number. PredictorError: a leaf value is not finite, or there are no rows."""
        _check_finite(parts["leaf"][0])
        scalers = {part: ColumnScaler.fit(rows, names, clip) for part, (rows, names) in parts.items()}
        furthest = float(np.abs(scalers["device"].transform(parts["device"][0])).max(initial=1.0))
        return cls(feature_set, **{**scalers, "device": replace(scalers["device"], clip=furthest)})

    @property
    def leaf_dim(self) -> int:
        """Width of an encoded leaf."""
        return len(self.leaf.names)

    @property
    def device_dim(self) -> int:
        """Width of an encoded device: values and missing flags."""
        return 2 * len(self.device.names)

    @property
    def pair_dim(self) -> int:
        """Width of an encoded pair."""
        return len(self.pair.names) if self.pair else 0

    @property
    def code_dim(self) -> int:
        """Width of encoded code: numbers of the program, of its longest loops, and the parts of its time."""
        if self.code is None or self.loop is None:
            return 0
        return len(self.code.names) + LOOPS * len(self.loop.names) + len(TIME_PARTS)

    def encode_leaves(self, leaves: NDArray[Any]) -> FloatArray:
        """Raw leaves (n, n_leaf_features) -> float32 of the same shape."""
        encoded = self.leaf.transform(leaves)
        _check_finite(leaves)
        return encoded

    def encode_devices(self, devices: NDArray[Any]) -> FloatArray:
        """Raw devices (m, n_device_features) -> float32 (m, device_dim): values, then missing flags."""
        return np.concatenate([self.device.transform(devices), np.isnan(devices).astype(np.float32)], axis=1)

    def encode_codes(self, rows: CodeRows) -> tuple[FloatArray, NDArray[np.bool_]]:
        """What is known of n compiled programs -> float32 (n, code_dim) and bool (n,), whether anything is: rows of 0 where
        not. The parts of the time stay as they are."""
        n = len(rows.program)
        if self.code is None or self.loop is None:
            return np.zeros((n, 0), np.float32), np.zeros(n, bool)
        known: NDArray[np.bool_] = np.asarray(np.isfinite(rows.program).all(axis=1))
        loops = self.loop.transform(rows.loops.reshape(n * LOOPS, -1)).reshape(n, -1)
        values = np.concatenate([self.code.transform(rows.program), loops, rows.times], axis=1)
        return np.where(known[:, None], values, 0.0).astype(np.float32), known

    def general_devices(self, encoded: NDArray[np.float32]) -> FloatArray:
        """Encoded devices (m, device_dim) with all but :data:`cdmpp.device.GENERAL_DEVICE_FEATURES` missing."""
        keep = np.array([name in GENERAL_DEVICE_FEATURES for name in self.device.names])
        values, missing = np.split(encoded, 2, axis=1)
        general = np.concatenate([np.where(keep, values, 0), np.where(keep, missing, 1)], axis=1)
        return general.astype(np.float32)

    def _scalers(self) -> dict[str, ColumnScaler]:
        found = {part: getattr(self, part) for part in _PARTS}
        return {part: scaler for part, scaler in found.items() if scaler is not None}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The fitted statistics, to be stored beside the weights."""
        return {
            f"encoder.{part}.{name}": np.asarray(getattr(scaler, name), dtype=np.float64)
            for part, scaler in self._scalers().items()
            for name in ("mean", "std", "active")
        }

    def to_json(self) -> dict[str, Any]:
        """Names and settings as JSON values; the statistics are in :meth:`to_arrays`."""
        scalers = self._scalers()
        names = {part: list(scalers[part].names) if part in scalers else [] for part in _PARTS}
        return {
            "feature_set": self.feature_set,
            **{f"{part}_features": known for part, known in names.items()},
            "clip": {part: scaler.clip for part, scaler in scalers.items()},
        }

    @classmethod
    def from_arrays(cls, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> FeatureEncoder:
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`; KeyError, TypeError, ValueError or PredictorError if they do not
        fit together."""
        scalers = {}
        for part in _PARTS:
            names = tuple(state.get(f"{part}_features", ()))  # early predictors had no code features
            if names or part in ("leaf", "device"):
                mean, std, active = (arrays[f"encoder.{part}.{key}"] for key in ("mean", "std", "active"))
                clip = float(state["clip"][part])
                scalers[part] = ColumnScaler(names, mean, std, np.asarray(active, dtype=bool), clip)
        return cls(str(state["feature_set"]), **scalers)


def _check_columns(rows: NDArray[Any], names: Sequence[str]) -> None:
    if np.ndim(rows) != 2 or np.shape(rows)[1] != len(names):
        raise FeatureMismatchError(f"expected features of shape (n, {len(names)}), got {np.shape(rows)}")


def _check_finite(leaves: NDArray[Any]) -> None:
    bad = ~np.isfinite(leaves)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise PredictorError(f"{int(bad.sum())} leaf features are not finite, the first in row {row}, column {column}")
