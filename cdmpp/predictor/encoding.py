"""From raw feature values to what the network sees: signed logarithm, standardisation, clipping.

All statistics are fitted on training programs and training devices alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import FeatureMismatchError, PredictorError

FloatArray = NDArray[np.float32]

#: Standard deviations (of signed logarithms) below which a column counts as constant.
_CONSTANT_STD = 1e-5


def signed_log1p(values: NDArray[Any]) -> NDArray[np.float64]:
    """``sign(x) * log(1 + |x|)``: keeps zero and flags, compresses counts and bytes."""
    values = np.asarray(values, dtype=np.float64)
    return np.sign(values) * np.log1p(np.abs(values))


@dataclass(frozen=True)
class ColumnScaler:
    """Signed logarithm and standardisation per column.

    Attributes
    ----------
    mean, std
        Shape (n_columns,), of the signed logarithm of the training rows, ignoring NaN.
    active
        Columns that varied in training. The others are encoded as 0 always: whatever weights they meet
        were never trained.
    clip
        Standardised values are clipped to ``[-clip, clip]``.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    active: NDArray[np.bool_]
    clip: float

    @classmethod
    def fit(cls, rows: NDArray[Any], clip: float) -> ColumnScaler:
        """Fit to rows of shape (n, n_columns), n >= 1; NaN is missing."""
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[0] == 0:
            raise PredictorError(f"a scaler needs rows of shape (n >= 1, columns), got {rows.shape}")
        logs = signed_log1p(rows)
        known = ~np.isnan(logs)
        count = np.maximum(known.sum(0), 1)
        mean = np.where(known, logs, 0.0).sum(0) / count
        std = np.sqrt((np.where(known, logs - mean, 0.0) ** 2).sum(0) / count)
        active = std > _CONSTANT_STD
        return cls(mean, np.where(active, std, 1.0), active, float(clip))

    def within(self, rows: NDArray[Any]) -> ColumnScaler:
        """The same, but clipped to the largest encoded value of these rows, or to 1 if none is larger."""
        return replace(self, clip=float(np.abs(self.transform(rows)).max(initial=1.0)))

    def transform(self, rows: NDArray[Any]) -> FloatArray:
        """Encode rows of shape (n, n_columns); NaN becomes 0, the training mean."""
        scaled = (signed_log1p(rows) - self.mean) / self.std
        scaled = np.where(self.active & ~np.isnan(scaled), np.clip(scaled, -self.clip, self.clip), 0.0)
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class FeatureEncoder:
    """Scalers of leaves, devices, pairs of both and compiled code, with the names of the columns they were fitted to.

    Attributes
    ----------
    feature_set
        Identity of the leaf features (:data:`cdmpp.program.ast.FEATURE_SET`).
    leaf_features, device_features, pair_features, code_features
        Column names, in order. No pair features: pairs are encoded as nothing. Code features are those
        of :mod:`cdmpp.predictor.instruction_time`.
    leaf, device, pair, code
        The scalers. The device scaler sees every training device once, whatever its number of records. It clips to as
        far as any of these is from their mean: a few devices do not tell what lies beyond, and a network that was shown
        two of them would extrapolate without bound.
    """

    feature_set: str
    leaf_features: tuple[str, ...]
    device_features: tuple[str, ...]
    leaf: ColumnScaler
    device: ColumnScaler
    pair_features: tuple[str, ...] = ()
    pair: ColumnScaler | None = None
    code_features: tuple[str, ...] = ()
    code: ColumnScaler | None = None

    @classmethod
    def fit(
        cls,
        leaves: NDArray[Any],
        devices: NDArray[Any],
        *,
        feature_set: str,
        leaf_features: Sequence[str],
        device_features: Sequence[str],
        pairs: NDArray[Any] | None = None,
        pair_features: Sequence[str] = (),
        codes: NDArray[Any] | None = None,
        code_features: Sequence[str] = (),
        clip: float = 8.0,
    ) -> FeatureEncoder:
        """Fit to raw leaves of all training programs, one a row, raw training devices, and raw training pairs and
        features of compiled code (rows of NaN where unknown) if any.

        Raises
        ------
        FeatureMismatchError
            Columns and names differ in number.
        PredictorError
            A leaf value is not finite, or there are no rows.
        """
        _check_columns(leaves, leaf_features, "leaf")
        _check_columns(devices, device_features, "device")
        _check_finite(leaves)
        if pairs is not None:
            _check_columns(pairs, pair_features, "pair")
        if codes is not None:
            _check_columns(codes, code_features, "code")
        return cls(
            feature_set,
            tuple(leaf_features),
            tuple(device_features),
            ColumnScaler.fit(leaves, clip),
            ColumnScaler.fit(devices, clip).within(devices),
            () if pairs is None else tuple(pair_features),
            None if pairs is None else ColumnScaler.fit(pairs, clip),
            () if codes is None else tuple(code_features),
            None if codes is None else ColumnScaler.fit(codes, clip),
        )

    @property
    def leaf_dim(self) -> int:
        """Width of an encoded leaf."""
        return len(self.leaf_features)

    @property
    def device_dim(self) -> int:
        """Width of an encoded device: values and missing flags."""
        return 2 * len(self.device_features)

    def encode_leaves(self, leaves: NDArray[Any]) -> FloatArray:
        """Raw leaves (n, n_leaf_features) -> float32 of the same shape."""
        _check_columns(leaves, self.leaf_features, "leaf")
        _check_finite(leaves)
        return self.leaf.transform(leaves)

    def encode_devices(self, devices: NDArray[Any]) -> FloatArray:
        """Raw devices (m, n_device_features) -> float32 (m, device_dim): values, then missing flags."""
        _check_columns(devices, self.device_features, "device")
        devices = np.asarray(devices, dtype=np.float64)
        return np.concatenate([self.device.transform(devices), np.isnan(devices).astype(np.float32)], axis=1)

    @property
    def pair_dim(self) -> int:
        """Width of an encoded pair."""
        return len(self.pair_features)

    def encode_pairs(self, pairs: NDArray[Any]) -> FloatArray:
        """Raw pairs (n, n_pair_features) -> float32 of the same shape."""
        _check_columns(pairs, self.pair_features, "pair")
        return np.zeros((len(pairs), 0), np.float32) if self.pair is None else self.pair.transform(pairs)

    @property
    def code_dim(self) -> int:
        """Width of encoded code: values, and how long it takes over the estimate."""
        return len(self.code_features) + 1 if self.code_features else 0

    def encode_codes(
        self, features: NDArray[Any], excess: NDArray[Any]
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Code features (n, n_code_features) and the logarithm of their time over the estimate (n,) -> float32 (n, code_dim)
        and bool (n,), whether they are known: rows of 0 where they are NaN, unknown."""
        if self.code is None:
            return np.zeros((len(features), 0), np.float32), np.zeros(len(features), bool)
        _check_columns(features, self.code_features, "code")
        known: NDArray[np.bool_] = ~np.isnan(features).any(axis=1)
        values = np.concatenate([self.code.transform(features), np.asarray(excess)[:, None]], axis=1)
        return np.where(known[:, None], values, 0.0).astype(np.float32), known

    def general_devices(self, encoded: NDArray[np.float32]) -> FloatArray:
        """Encoded devices (m, device_dim) with all but :data:`cdmpp.device.GENERAL_DEVICE_FEATURES` missing."""
        from cdmpp.device import GENERAL_DEVICE_FEATURES

        keep = np.array([name in GENERAL_DEVICE_FEATURES for name in self.device_features])
        values, missing = np.split(encoded, 2, axis=1)
        return np.concatenate([np.where(keep, values, 0), np.where(keep, missing, 1)], axis=1).astype(
            np.float32
        )

    def general_pairs(self) -> FloatArray:
        """1 for encoded pair features among :data:`cdmpp.predictor.pair_features.GENERAL_PAIR_FEATURES`, 0 for others,
        float32 (pair_dim,)."""
        from cdmpp.predictor.pair_features import GENERAL_PAIR_FEATURES

        return np.array([name in GENERAL_PAIR_FEATURES for name in self.pair_features], dtype=np.float32)

    def _scalers(self) -> dict[str, ColumnScaler]:
        found = {"leaf": self.leaf, "device": self.device, "pair": self.pair, "code": self.code}
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
        return {
            "feature_set": self.feature_set,
            "leaf_features": list(self.leaf_features),
            "device_features": list(self.device_features),
            "pair_features": list(self.pair_features),
            "code_features": list(self.code_features),
            "clip": {part: scaler.clip for part, scaler in self._scalers().items()},
        }

    @classmethod
    def from_arrays(cls, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> FeatureEncoder:
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`; PredictorError if they do not fit together."""
        try:
            all_names = {part: tuple(state[f"{part}_features"]) for part in ("leaf", "device", "pair")}
            all_names["code"] = tuple(state.get("code_features", ()))  # predictors of before had none
            scalers = {}
            for part, names in all_names.items():
                if part in ("pair", "code") and not names:
                    continue
                columns = [np.asarray(arrays[f"encoder.{part}.{key}"]) for key in ("mean", "std", "active")]
                if any(column.shape != (len(names),) for column in columns):
                    raise PredictorError(
                        f"encoder statistics of {part} features are not of shape ({len(names)},)"
                    )
                mean, std, active = columns
                scalers[part] = ColumnScaler(mean, std, active.astype(bool), float(state["clip"][part]))
            return cls(
                str(state["feature_set"]),
                all_names["leaf"],
                all_names["device"],
                scalers["leaf"],
                scalers["device"],
                all_names["pair"],
                scalers.get("pair"),
                all_names["code"],
                scalers.get("code"),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise PredictorError(f"encoder state is incomplete or malformed: {err!r}") from err


def _check_columns(rows: NDArray[Any], names: Sequence[str], what: str) -> None:
    if np.ndim(rows) != 2 or np.shape(rows)[1] != len(names):
        raise FeatureMismatchError(
            f"expected {what} features of shape (n, {len(names)}), got {np.shape(rows)}"
        )


def _check_finite(leaves: NDArray[Any]) -> None:
    bad = ~np.isfinite(leaves)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise PredictorError(
            f"{int(bad.sum())} leaf features are not finite, the first in row {row}, column {column}"
        )
