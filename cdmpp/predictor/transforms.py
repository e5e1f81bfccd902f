"""Label transforms: latency in seconds <-> the scale the network predicts; corrections of what comes out. Fitted on training
labels only; the inverse is clamped to a wide range around these, as that of Box-Cox is undefined beyond ``-1 / lambda``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.errors import LabelError, PredictorError

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float64]

#: Names of the transforms.
KINDS: tuple[str, ...] = ("box-cox", "log")

#: Predictions may leave the range of the training labels by this factor on either side.
RANGE_FACTOR = 1e3

#: ``|lambda * log(latency / scale)|`` is kept below the first number for training labels and below the second
#: for the range of the inverse: beyond, Box-Cox saturates and its inverse amplifies rounding without bound.
_SATURATION = (4.0, 5.0)

#: Box-Cox exponents closer to zero than this are treated as the logarithm, its limit.
_LOG_LAMBDA = 1e-6


@dataclass(frozen=True)
class LabelTransform:
    """An invertible, increasing, standardised map of ``latency / reference``, of one of :data:`KINDS`.

    ``box-cox`` is ``((y / scale)**lambda - 1) / lambda`` (CDMPP's label normalisation), with the geometric mean of the training
    labels as ``scale``, which keeps microseconds and seconds well conditioned; ``log`` is its limit for ``lambda = 0``, with a
    scale of 1. ``mean`` and ``std`` are of the unstandardised transformed training labels; ``log_low`` and ``log_high`` the
    natural logarithm of the smallest and largest ratio the inverse returns. ``relative_to`` is what latencies are divided by
    first: a per-program reference (a key of :data:`cdmpp.predictor.roofline.REFERENCES`), which every method then needs as
    ``reference_s`` (PredictorError without it); "" for nothing.
    """

    kind: str
    mean: float
    std: float
    log_low: float
    log_high: float
    relative_to: str = ""
    lambda_: float = 0.0
    log_scale: float = 0.0

    @property
    def relative(self) -> bool:
        """Whether latencies are divided by a reference."""
        return bool(self.relative_to)

    def forward(self, latency_s: ArrayLike, reference_s: ArrayLike | None = None) -> NDArray[np.float64]:
        """Seconds -> standardised label, same shape. LabelError for a latency that is not finite and > 0."""
        log_ratio = np.log(_checked(latency_s, "latency")) - self._log_reference(reference_s)
        return (self._raw(log_ratio) - self.mean) / self.std

    def inverse(self, label: ArrayLike, reference_s: ArrayLike | None = None) -> NDArray[np.float64]:
        """Standardised label -> seconds, same shape, always finite and > 0 (NaN labels stay NaN)."""
        low, high = self._raw(np.asarray([self.log_low, self.log_high]))
        raw = np.clip(np.asarray(label, dtype=np.float64) * self.std + self.mean, low, high)
        log_ratio = np.asarray(self._log_of_raw(raw))
        return np.exp(log_ratio + self._log_reference(reference_s))

    def log_inverse(self, label: torch.Tensor, log_reference: torch.Tensor | None = None) -> torch.Tensor:
        """Standardised label -> log seconds, differentiable inside the clamped range."""
        low, high = self._raw(np.asarray([self.log_low, self.log_high]))
        # a hair inside, so that rounding to single precision never leaves the domain
        margin = 1e-5 * (high - low)
        log_ratio = self._log_of_raw((label * self.std + self.mean).clamp(low + margin, high - margin))
        return log_ratio + self._given(log_reference) if self.relative else log_ratio

    def to_json(self) -> dict[str, Any]:
        """State as JSON values."""
        state = {"kind": self.kind, "mean": self.mean, "std": self.std, "relative_to": self.relative_to}
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

    def _log_reference(self, reference_s: ArrayLike | None) -> NDArray[np.float64] | float:
        return np.log(_checked(self._given(reference_s), "reference")) if self.relative else 0.0

    def _given(self, reference: Any) -> Any:
        if reference is None:
            raise PredictorError("this label transform is relative: a reference per program is needed")
        return reference


def fit_transform(
    kind: str, latency_s: ArrayLike, reference_s: ArrayLike | None = None, relative_to: str = "reference"
) -> LabelTransform:
    """Fit to training labels in seconds (n,), relative to references in seconds (n,) of that name where they are given;
    Box-Cox's lambda by maximum likelihood. LabelError: no labels, or one that is not finite and positive; PredictorError:
    unknown kind."""
    log_ratio = np.log(_checked(latency_s, "latency"))
    if reference_s is not None:
        log_ratio = log_ratio - np.log(_checked(reference_s, "reference"))
    if log_ratio.size == 0:
        raise LabelError("a label transform needs at least one training label")
    _check_kind(kind)
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
    relative = relative_to if reference_s is not None else ""
    unscaled = LabelTransform(kind, 0.0, 1.0, low, high, relative, lambda_, log_scale)
    raw = unscaled._raw(log_ratio)
    std = float(raw.std())
    return replace(unscaled, mean=float(raw.mean()), std=std if std > 1e-9 else 1.0)


def transform_from_json(state: dict[str, Any]) -> LabelTransform:
    """Rebuild a transform from :meth:`LabelTransform.to_json`; PredictorError of an unknown kind, KeyError, TypeError or
    ValueError if the state is not one."""
    _check_kind(kind := state["kind"])
    values = {name: float(state[name]) for name in ("mean", "std", "log_low", "log_high")}
    if kind == "box-cox":
        values.update(lambda_=float(state["lambda"]), log_scale=float(state["log_scale"]))
    return LabelTransform(kind, relative_to=str(state["relative_to"]), **values)


def _check_kind(kind: Any) -> None:
    if kind not in KINDS:
        raise PredictorError(f"unknown label transform '{kind}' (known: {', '.join(KINDS)})")


def _checked(values: ArrayLike, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array > 0))
    if bad.any():
        first = np.argwhere(np.atleast_1d(bad))[0].tolist()
        raise LabelError(f"every {what} must be finite and above 0 s; {int(bad.sum())} are not, the first at {first}")
    return array


#: Kinds of corrections: of predictions from ASTs, and of those with instruction counts.
AST, COMPILED = "ast", "compiled"


@dataclass(frozen=True)
class Correction:
    """What is added to the logarithm of predictions on a device: ``constant``, and ``weights`` (d,) of inputs less ``mean``
    (d,), between ``low`` and ``high``, where the parts of the measured programs were."""

    constant: float
    mean: FloatArray
    weights: FloatArray
    low: float
    high: float

    @classmethod
    def of(cls, constant: float, width: int) -> Correction:
        """The same for all programs, whose inputs are so wide."""
        return cls(constant, np.zeros(width), np.zeros(width), 0.0, 0.0)

    def logs(self, inputs: FloatArray) -> FloatArray:
        """To be added for programs with these inputs (n, d), (n,)."""
        return self.constant + np.clip((inputs - self.mean) @ self.weights, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: [float(f"{v:.6g}") for v in value] if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Correction:
        """Back from :meth:`to_json` (ValueError: numbers that are not finite, or do not belong together)."""
        made = cls(**{**state, **{name: np.asarray(state[name], dtype=np.float64) for name in ("mean", "weights")}})
        if not all(np.isfinite(value).all() for value in vars(made).values()) or made.mean.shape != made.weights.shape:
            raise ValueError("a correction must be finite, with as many weights as means")
        return made
