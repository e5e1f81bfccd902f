"""The network's inputs and outputs: features, labels, and batches of programs on devices.

Raw features are encoded by a signed logarithm and standardisation, then clipped. Latencies in seconds are transformed to the
scale that the network predicts, and back. Both are fitted on training data alone. The inverse of a label is clamped to a wide
range around the training labels, as the inverse of Box-Cox is undefined beyond ``-1 / lambda``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from cdmpp.device import GENERAL_DEVICE_FEATURES
from cdmpp.errors import FeatureMismatchError, LabelError, PredictorError
from cdmpp.predictor.pair_features import TIME_PARTS, CodeRows
from cdmpp.program.ast import CompactAST
from cdmpp.program.codegen import LOOPS

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

_PARTS = ("leaf", "device", "pair", "code", "loop")
#: Standard deviations (of signed logarithms) below which a column counts as constant.
_CONSTANT_STD = 1e-5
#: Rows encoded at once: more would take gigabytes.
_ROWS_AT_ONCE = 65536


def signed_log1p(values: NDArray[Any]) -> NDArray[np.float64]:
    """``sign(x) * log(1 + |x|)``: keeps zero and flags, compresses counts and bytes."""
    values = np.asarray(values, dtype=np.float64)
    return np.sign(values) * np.log1p(np.abs(values))


@dataclass(frozen=True)
class ColumnScaler:
    """Signed logarithm and standardisation per column: ``mean`` and ``std``, (n_columns,), are of the signed logarithm
    of the training rows, ignoring NaN. Columns that did not vary in training are not ``active``: they are always encoded
    as 0, because the network's weights for them were never trained. Standardised values are clipped to ``[-clip, clip]``."""

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
        """Fit to rows of shape (n, n_columns), n >= 1; NaN stands for a missing value."""
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
        encoded = np.empty(np.shape(rows), dtype=np.float32)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            scaled = (signed_log1p(rows[part]) - self.mean) / self.std
            encoded[part] = np.where(self.active & ~np.isnan(scaled), np.clip(scaled, -self.clip, self.clip), 0.0)
        return encoded


@dataclass(frozen=True)
class FeatureEncoder:
    """Scalers of leaves, devices, (program, device) pairs, compiled code and its loops (:mod:`cdmpp.predictor.pair_features`).

    The device scaler is fitted to every training device once, however many records it has. It clips at the largest standardised
    value of a training device: a few devices say nothing about what lies beyond, and a network trained on two of them would
    extrapolate without bound. Without a scaler, pairs or code are encoded with width 0. ``feature_set`` identifies the leaf
    features (:data:`cdmpp.program.ast.FEATURE_SET`)."""

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
        """Fit to raw rows and column names of each part: ``leaf`` (of all training programs), ``device``, and optionally
        ``pair``, ``code`` and ``loop`` (rows of NaN where unknown). Raises FeatureMismatchError if the numbers of columns
        and names differ, PredictorError if a leaf value is not finite or a part has no rows."""
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
        """Width of encoded code: features of the whole program and of its longest loops, and the parts of its time."""
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
        """Code features of n compiled programs -> float32 (n, code_dim), and bool (n,), False where they are unknown and the
        row is 0. The parts of the time are not scaled."""
        n = len(rows.program)
        if self.code is None or self.loop is None:
            return np.zeros((n, 0), np.float32), np.zeros(n, bool)
        known: NDArray[np.bool_] = np.asarray(np.isfinite(rows.program).all(axis=1))
        loops = self.loop.transform(rows.loops.reshape(n * LOOPS, -1)).reshape(n, -1)
        values = np.concatenate([self.code.transform(rows.program), loops, rows.times.astype(np.float32)], axis=1)
        values[~known] = 0.0
        return values, known

    def general_devices(self, encoded: NDArray[np.float32]) -> FloatArray:
        """Encoded devices (m, device_dim) with all features but :data:`cdmpp.device.GENERAL_DEVICE_FEATURES` set missing."""
        keep = np.array([name in GENERAL_DEVICE_FEATURES for name in self.device.names])
        values, missing = np.split(encoded, 2, axis=1)
        return np.concatenate([np.where(keep, values, 0), np.where(keep, missing, 1)], axis=1).astype(np.float32)

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
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`. KeyError, TypeError, ValueError, PredictorError: they differ."""
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


#: Names of the label transforms.
KINDS: tuple[str, ...] = ("box-cox", "log")

#: Predictions may exceed the range of the training labels by this factor on either side.
RANGE_FACTOR = 1e3

#: ``|lambda * log(latency / scale)|`` is kept below the first number for training labels and below the second
#: for the range of the inverse: beyond, Box-Cox saturates and its inverse amplifies rounding without bound.
_SATURATION = (4.0, 5.0)

#: Box-Cox exponents closer to zero than this are treated as the logarithm, its limit.
_LOG_LAMBDA = 1e-6


@dataclass(frozen=True)
class LabelTransform:
    """An invertible, increasing, standardised map of ``latency / reference``, of one of :data:`KINDS`.

    ``box-cox`` is ``((y / scale)**lambda - 1) / lambda`` (CDMPP's label normalisation). Its ``scale`` is the geometric mean of
    the training labels, which keeps both microseconds and seconds well conditioned. ``log`` is its limit for ``lambda = 0``,
    with a scale of 1. ``mean`` and ``std`` are of the unstandardised transformed training labels; ``log_low`` and ``log_high``
    are the natural logarithms of the smallest and largest ratio that the inverse returns. If ``relative``,
    every method needs the references that latencies are divided by as ``reference_s``."""

    kind: str
    mean: float
    std: float
    log_low: float
    log_high: float
    relative: bool = False
    lambda_: float = 0.0
    log_scale: float = 0.0

    def forward(self, latency_s: ArrayLike, reference_s: ArrayLike | None = None) -> NDArray[np.float64]:
        """Seconds -> standardised label, same shape. Raises LabelError for a latency that is not finite and > 0."""
        log_ratio = np.log(_checked(latency_s, "latency")) - self._log_reference(reference_s)
        return (self._raw(log_ratio) - self.mean) / self.std

    def inverse(self, label: ArrayLike, reference_s: ArrayLike | None = None) -> NDArray[np.float64]:
        """Standardised label -> seconds, same shape, always finite and > 0 (NaN labels stay NaN)."""
        low, high = self._raw(np.asarray([self.log_low, self.log_high]))
        raw = np.clip(np.asarray(label, dtype=np.float64) * self.std + self.mean, low, high)
        return np.exp(np.asarray(self._log_of_raw(raw)) + self._log_reference(reference_s))

    def log_inverse(self, label: torch.Tensor, log_reference: Any = None) -> torch.Tensor:
        """Standardised label -> natural logarithm of seconds, differentiable inside the clamped range."""
        low, high = self._raw(np.asarray([self.log_low, self.log_high]))
        # slightly inside the range, so that rounding to single precision never leaves the domain
        margin = 1e-5 * (high - low)
        log_ratio = self._log_of_raw((label * self.std + self.mean).clamp(low + margin, high - margin))
        return log_ratio + log_reference if self.relative else log_ratio

    def to_json(self) -> dict[str, Any]:
        """State as JSON values."""
        state = {"kind": self.kind, "mean": self.mean, "std": self.std, "relative": self.relative}
        state.update(log_low=self.log_low, log_high=self.log_high)
        return state if self.kind == "log" else {**state, "lambda": self.lambda_, "log_scale": self.log_scale}

    def _raw(self, log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log ratio -> unstandardised transformed label."""
        centred = log_ratio - self.log_scale
        if abs(self.lambda_) < _LOG_LAMBDA:
            return centred
        return np.expm1(self.lambda_ * centred) / self.lambda_

    def _log_of_raw(self, raw: Any) -> Any:
        """Inverse of :meth:`_raw` on its clamped range; array or tensor."""
        if abs(self.lambda_) < _LOG_LAMBDA:
            return raw + self.log_scale
        log1p = np.log1p if isinstance(raw, np.ndarray) else type(raw).log1p
        return log1p(raw * self.lambda_) / self.lambda_ + self.log_scale

    def _log_reference(self, reference_s: Any) -> NDArray[np.float64] | float:
        return np.log(_checked(reference_s, "reference")) if self.relative else 0.0


def fit_transform(kind: str, latency_s: ArrayLike, reference_s: ArrayLike | None = None) -> LabelTransform:
    """Fit a transform to training latencies in seconds (n,), relative to references in seconds (n,) if given. Box-Cox's
    lambda is fitted by maximum likelihood. Raises LabelError if there are no labels or one is not finite and positive."""
    log_ratio = np.log(_checked(latency_s, "latency"))
    if reference_s is not None:
        log_ratio = log_ratio - np.log(_checked(reference_s, "reference"))
    if log_ratio.size == 0:
        raise LabelError("a label transform needs at least one training label")
    low = float(log_ratio.min()) - math.log(RANGE_FACTOR)
    high = float(log_ratio.max()) + math.log(RANGE_FACTOR)
    log_scale = float(log_ratio.mean()) if kind == "box-cox" else 0.0
    lambda_ = 0.0
    if kind == "box-cox" and np.ptp(log_ratio) > 1e-9:
        from sklearn.preprocessing import PowerTransformer

        fitted = PowerTransformer(method="box-cox", standardize=False).fit(np.exp(log_ratio - log_scale)[:, None])
        limit = _SATURATION[0] / float(np.abs(log_ratio - log_scale).max())
        lambda_ = float(np.clip(fitted.lambdas_[0], -limit, limit))
        if abs(lambda_) >= _LOG_LAMBDA:
            reach = _SATURATION[1] / abs(lambda_)
            low, high = max(low, log_scale - reach), min(high, log_scale + reach)
    unscaled = LabelTransform(kind, 0.0, 1.0, low, high, reference_s is not None, lambda_, log_scale)
    raw = unscaled._raw(log_ratio)
    std = float(raw.std())
    return replace(unscaled, mean=float(raw.mean()), std=std if std > 1e-9 else 1.0)


def transform_from_json(state: dict[str, Any]) -> LabelTransform:
    """Rebuild a transform from :meth:`LabelTransform.to_json`. Raises PredictorError for an unknown kind, and KeyError,
    TypeError or ValueError if the state is malformed."""
    if (kind := state["kind"]) not in KINDS:
        raise PredictorError(f"unknown label transform '{kind}' (known: {', '.join(KINDS)})")
    values = {name: float(state[name]) for name in ("mean", "std", "log_low", "log_high")}
    if kind == "box-cox":
        values.update(lambda_=float(state["lambda"]), log_scale=float(state["log_scale"]))
    return LabelTransform(kind, relative=bool(state["relative"]), **values)


def _checked(values: ArrayLike, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array > 0))
    if bad.any():
        first = np.argwhere(np.atleast_1d(bad))[0].tolist()
        raise LabelError(f"every {what} must be finite and above 0 s; {int(bad.sum())} are not, the first at {first}")
    return array


#: Kinds of corrections: for predictions from ASTs alone, and for those with instruction counts.
AST, COMPILED = "ast", "compiled"


@dataclass(frozen=True)
class Correction:
    """A linear correction, added to the logarithm of predictions on a device: ``constant + (inputs - mean) @ weights``, with
    ``mean`` and ``weights`` (d,). The product is clipped to ``[low, high]``, its range over the measured programs."""

    constant: float
    mean: NDArray[np.float64]
    weights: NDArray[np.float64]
    low: float
    high: float

    def logs(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The correction (n,) of the logarithms for programs with these inputs (n, d)."""
        return self.constant + np.clip((inputs - self.mean) @ self.weights, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """State as JSON values."""
        return {
            name: [float(f"{v:.6g}") for v in value] if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Correction:
        """Rebuild from :meth:`to_json`. Raises ValueError if a number is not finite or the shapes do not match."""
        made = cls(**{**state, **{name: np.asarray(state[name], dtype=np.float64) for name in ("mean", "weights")}})
        if not all(np.isfinite(value).all() for value in vars(made).values()) or made.mean.shape != made.weights.shape:
            raise ValueError("a correction must be finite, with as many weights as means")
        return made


#: Number of cosines that approximate a Gaussian kernel.
WAVES = 192


def waves(inputs: NDArray[np.float64], reach: float) -> NDArray[np.float64]:
    """Cosines of inputs (n, d), shape (n, WAVES): random Fourier features (Rahimi and Recht, NIPS 2007) of a Gaussian kernel
    whose standard deviation is ``reach`` times the square root of d. The random frequencies are always the same."""
    drawn = np.random.default_rng(0)
    frequencies = drawn.standard_normal((inputs.shape[1], WAVES)) / (reach * math.sqrt(inputs.shape[1]))
    found: NDArray[np.float64] = np.cos(inputs @ frequencies + drawn.uniform(0, 2 * np.pi, WAVES))
    return found


#: Shuffled rows are sorted by length inside windows of this many batches.
_BUCKET_BATCHES = 16


class PaddedBatch(NamedTuple):
    """A batch of programs: leaves float32 (batch, length, features), pre-order node positions int64 (batch, length), and
    padding bool (batch, length), True where there is no leaf; leaves and positions are 0 there."""

    leaves: torch.Tensor
    positions: torch.Tensor
    padding: torch.Tensor


class Context(NamedTuple):
    """The network's inputs besides the programs, one float32 row each: encoded ``device`` (batch, device_dim) and ``pair``
    (batch, pair_dim, :mod:`cdmpp.predictor.pair_features`), and ``code`` (batch, code_dim) as given by
    :meth:`~cdmpp.predictor.encoding.FeatureEncoder.encode_codes`, zeros where ``has_code``, bool (batch,), is False."""

    device: torch.Tensor
    pair: torch.Tensor
    code: torch.Tensor
    has_code: torch.Tensor

    def take(self, rows: torch.Tensor) -> Context:
        """The rows with these indices, int64, or where this mask, bool (batch,), is True."""
        return Context(*(part[rows] for part in self))


@dataclass(frozen=True)
class PackedPrograms:
    """Encoded leaves of many programs: float32 (total leaves, features), positions int64 (total leaves,), and offsets int64
    (programs + 1,): program i owns leaves ``offsets[i]:offsets[i + 1]``."""

    leaves: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def pack(cls, asts: Sequence[CompactAST], encoder: FeatureEncoder) -> PackedPrograms:
        """Encode and concatenate the leaves of ASTs, each of which has at least one."""
        offsets = np.cumsum([0, *(ast.n_leaves for ast in asts)], dtype=np.int64)
        leaves = np.concatenate([ast.leaves for ast in asts]) if asts else np.zeros((0, encoder.leaf_dim), np.float32)
        positions = np.concatenate([np.zeros(0, np.int64), *(ast.positions for ast in asts)])
        return cls(*map(torch.from_numpy, (encoder.encode_leaves(leaves), positions, offsets)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Number of leaves of each program, shape (programs,)."""
        return np.diff(self.offsets.numpy())

    def batch(self, programs: IntArray) -> PaddedBatch:
        """A batch of the programs with these indices, shape (batch,), padded to the longest of them."""
        rows = torch.from_numpy(np.asarray(programs, dtype=np.int64))
        start = self.offsets[rows]
        lengths = self.offsets[rows + 1] - start
        step = torch.arange(int(lengths.max()))
        padding = step[None, :] >= lengths[:, None]
        index = torch.where(padding, start[:, None], start[:, None] + step[None, :])
        leaves = self.leaves[index].masked_fill(padding[:, :, None], 0.0)
        return PaddedBatch(leaves, self.positions[index].masked_fill(padding, 0), padding)


@dataclass(frozen=True)
class GeneralInputs:
    """The network's inputs for m devices as if they had not been in training: encoded devices float32 (m, device_dim), with
    all known features for a CPU; and ``pair_keep`` float32 (m, pair_dim), 1 for pair features that the network is given for
    programs on the device, 0 for others."""

    device_rows: torch.Tensor
    pair_keep: torch.Tensor


@dataclass(frozen=True)
class PairArrays:
    """n (program, device) pairs: ``program`` and ``device`` index ``packed`` and ``device_rows``, the encoded devices, float32
    (devices, device_dim). ``pair``, ``code`` and ``has_code`` are as in :class:`Context`. ``general`` is set where the network
    is to learn to predict with fewer features (``model.general_part``)."""

    packed: PackedPrograms
    device_rows: torch.Tensor
    program: NDArray[np.int64]
    device: NDArray[np.int64]
    pair: torch.Tensor
    code: torch.Tensor
    has_code: torch.Tensor
    general: GeneralInputs | None = field(default=None, kw_only=True)

    @classmethod
    def encode(
        cls,
        encoder: FeatureEncoder,
        asts: Sequence[CompactAST],
        device_rows: NDArray[np.float32],
        program: NDArray[np.int64],
        device: NDArray[np.int64],
        pair: NDArray[np.float64] | None,
        code: CodeRows | None,
    ) -> PairArrays:
        """Encode programs, raw pair features (n, n_pair_features) and compiled code, None for those that the encoder does not
        take or that are unknown. Devices come encoded."""
        n = len(program)
        pairs = np.zeros((n, 0), np.float32) if pair is None or encoder.pair is None else encoder.pair.transform(pair)
        codes, known = np.zeros((n, encoder.code_dim), np.float32), np.zeros(n, bool)
        if code is not None:
            codes, known = encoder.encode_codes(code)
        parts = map(torch.from_numpy, (pairs, codes, known))
        packed = PackedPrograms.pack(asts, encoder)
        return PairArrays(packed, torch.from_numpy(device_rows), program, device, *parts)

    def __len__(self) -> int:
        return len(self.program)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of an encoded leaf, device, pair and code."""
        parts = (self.packed.leaves, self.device_rows, self.pair, self.code)
        leaf, device, pair, code = (part.shape[1] for part in parts)
        return leaf, device, pair, code

    @property
    def leaves(self) -> torch.Tensor:
        """Encoded leaves of the programs of these pairs, each program once, float32 (leaves, leaf_dim)."""
        of_program = np.repeat(np.arange(len(self.packed)), self.packed.lengths)
        return self.packed.leaves[torch.from_numpy(np.isin(of_program, self.program))]

    def batch(
        self, rows: NDArray[np.int64], where: torch.device, unseen: NDArray[np.bool_] | None = None
    ) -> tuple[PaddedBatch, Context]:
        """The network's inputs for the pairs with these indices, on a torch device. Those marked in ``unseen``, bool (n,), get
        inputs as if their devices had not been in training (:class:`GeneralInputs`)."""
        index = torch.from_numpy(rows)
        number = torch.from_numpy(self.device[rows])
        device, pair = self.device_rows[number], self.pair[index]
        if unseen is not None and self.general is not None:
            chosen = torch.from_numpy(unseen)[:, None]
            device = torch.where(chosen, self.general.device_rows[number], device)
            pair = torch.where(chosen, pair * self.general.pair_keep[number], pair)
        batch = PaddedBatch(*(part.to(where) for part in self.packed.batch(self.program[rows])))
        return batch, Context(*(part.to(where) for part in (device, pair, self.code[index], self.has_code[index])))

    def without_code(self) -> Self:
        """The same pairs without any features of compiled code."""
        return replace(self, code=torch.zeros_like(self.code), has_code=torch.zeros_like(self.has_code))


@dataclass(frozen=True)
class LabelledArrays(PairArrays):
    """Labelled pairs: ``latency_s`` float64 (n,), ``reference_s`` (n,) where labels are relative to it, and ``codegen``,
    instruction counts, float32 (n, len(CODEGEN_FEATURES)), NaN where a program has none."""

    latency_s: NDArray[np.float64]
    reference_s: NDArray[np.float64] | None = None
    codegen: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.int64]) -> LabelledArrays:
        """The pairs with these indices; the arrays of programs and devices are shared, not copied."""
        shared = ("packed", "device_rows", "general")
        every = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}
        return replace(self, **{name: values[rows] for name, values in every.items() if values is not None})


def training_batches(lengths: IntArray, batch_size: int, rng: np.random.Generator) -> list[IntArray]:
    """Split ``range(len(lengths))`` into shuffled batches whose members have similar lengths."""
    order = rng.permutation(len(lengths))
    window = batch_size * _BUCKET_BATCHES
    batches: list[IntArray] = []
    for begin in range(0, len(order), window):
        chunk = order[begin : begin + window]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches.extend(chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size))
    return [batches[i] for i in rng.permutation(len(batches))]


def inference_batches(lengths: IntArray, batch_size: int, max_leaves: int = 65536) -> Iterator[IntArray]:
    """Split ``range(len(lengths))`` into batches sorted by length, of at most ``max_leaves`` leaves with padding."""
    order = np.argsort(lengths, kind="stable")
    begin = 0
    while begin < len(order):
        end = min(begin + batch_size, len(order))
        while end - begin > 1 and (end - begin) * int(lengths[order[end - 1]]) > max_leaves:
            end = begin + max(1, (end - begin) // 2)
        yield order[begin:end]
        begin = end
