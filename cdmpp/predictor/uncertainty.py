r"""How far to trust a prediction: intervals with a finite-sample guarantee, and whether a program is like those trained on.

*Intervals* are those of split conformal prediction in log seconds. The score of a validation record is :math:`s =
|\log(\text{measured} / \text{predicted}) / d - m|`, the interval of a prediction :math:`p` is :math:`[p\,e^{(m-q)d},
p\,e^{(m+q)d}]`, with :math:`q` a quantile of the scores. m is one number, the midpoint of the 5 % and 95 % quantiles of the
errors, each task weighing the same. Programs are more often far slower than predicted than far faster; m makes as many fall
beyond either end. d, the *difficulty*, is the expected error of a prediction (normalised conformal prediction: Papadopoulos et
al. 2008; Lei et al. 2018, section 5.2): the exponential of a ridge regression of log errors on the pair's features and
embedding. For a validation record that regression is fitted to other tasks, as it is for a new task.

*Units.* Records of one task resemble each other. Where the split holds out tasks (``by_network``, ``by_task``, ``by_device``)
the unit is the **task**: with K tasks of :math:`N_k` records each, q is the smallest score with

.. math:: \sum_k \frac{1}{N_k}\,\#\{i : s_{ki} \le q\} \;\ge\; (K + 1)\,(1 - \alpha),

so that a record of a new task is covered with probability :math:`1 - \alpha` at least (hierarchical conformal prediction: Lee,
Barber and Willett, "Distribution-free inference with hierarchical data", 2023). For ``within_task`` the unit is the **record**,
and q the ordinary quantile. Devices with fewer than :data:`MIN_UNITS` units share the scores of all devices of their kind (CPU,
GPU). If a device's microarchitecture was not trained on, these shared scores are multiplied by :data:`UNSEEN`.

*When the guarantee does not hold.* It holds for tasks drawn as the calibration tasks were; those of a held-out network may
share a kind of layer that the validation networks lack. The validation part also chose the epoch. The program predicted fastest
of many is more often slower than predicted than one picked at random. ``evaluate`` reports the coverage that is reached.

*Familiarity.* A (program, device) pair is described by the inputs of the network, not by its embedding: a network may map
inputs it never saw next to known ones. A pair is *unfamiliar* if it is farther from the nearest of some 200 KMeans centres of
training pairs than 99 % of the validation pairs. It is also unfamiliar if a feature that was constant in training, which the
encoder hides, has another value in a leaf. Unfamiliar programs may be predicted well, and familiar ones badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.device import Device, device_features
from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import FeatureEncoder, signed_log1p

if TYPE_CHECKING:
    from cdmpp.predictor.data import TrainingData
    from cdmpp.program.ast import CompactAST

#: Units that a device needs for scores of its own: the coverage of one calibration set varies with a standard
#: deviation of sqrt(0.9 * 0.1 / (units + 2)) around 0.9, 5 points for 30.
MIN_UNITS = 30

#: Most steps kept of a distribution of scores. Dropped scores are rounded up, which widens intervals very slightly.
MAX_STEPS = 2048

#: Factor on prediction errors on a CPU whose microarchitecture was left out of training: geometric mean of four measured
#: factors, 1.3 to 2.8 (``accuracy_cpu_left_out.json`` and ``unseen_cpu.json`` over ``model_card.json``); used for GPUs too.
UNSEEN = 1.8

#: Name of the pooled scores, used in place of a device's name.
ALL_DEVICES = "all devices"


@dataclass(frozen=True)
class ScoreDistribution:
    """The step function from a score to the mass of calibration units at or below it: the number of ``units`` K, ascending
    ``scores`` float64 (m,), m >= 1, and the ``mass`` at or below each, K at the last one."""

    units: int
    scores: NDArray[np.float64]
    mass: NDArray[np.float64]

    def __post_init__(self) -> None:
        steps = (self.scores, self.mass)
        if self.scores.ndim != 1 or self.scores.shape != self.mass.shape or not len(self.scores):
            raise PredictorError("a calibration needs as many masses as scores, one at least")
        if not all(np.isfinite(values).all() and (np.diff(values) >= 0).all() for values in steps):
            raise PredictorError("calibration scores and masses must be finite and ascending")

    @classmethod
    def fit(cls, scores: ArrayLike, unit: Sequence[Hashable]) -> ScoreDistribution:
        """Fit to the scores of n >= 1 records and the unit of each; every unit weighs the same."""
        values = np.asarray(scores, dtype=np.float64)
        _, number, counts = np.unique(np.asarray([str(u) for u in unit]), return_inverse=True, return_counts=True)
        order = np.argsort(values, kind="stable")
        ascending, mass = values[order], np.cumsum(1.0 / counts[number[order]])
        if len(ascending) > MAX_STEPS:
            # keep the last step of every run: dropped scores count as the next kept one, which errs to wider intervals
            kept = np.unique(np.linspace(0, len(ascending) - 1, MAX_STEPS).round().astype(np.int64))
            ascending, mass = ascending[kept], mass[kept]
        return cls(len(counts), ascending, mass)

    @classmethod
    def pooled(cls, parts: Sequence[ScoreDistribution], factor: float) -> ScoreDistribution:
        """Merge the units of one or more distributions, with all scores multiplied by ``factor``."""
        scores = np.concatenate([part.scores for part in parts])
        mass = np.concatenate([np.diff(part.mass, prepend=0.0) for part in parts])
        order = np.argsort(scores, kind="stable")
        return cls(sum(p.units for p in parts), factor * scores[order], np.cumsum(mass[order]))

    def quantile(self, coverage: float) -> float:
        """The bound that a new unit's score stays below with probability ``coverage``; infinite if there are too few units."""
        needed = (self.units + 1) * coverage
        # tolerance for rounding in sums of 1 / N and in products with a coverage
        step = int(np.searchsorted(self.mass, needed - 1e-9 * (self.units + 1)))
        return float(self.scores[step]) if step < len(self.scores) else math.inf


#: Of the regression of errors: the ridge penalty, the number of cross-fitting folds, the constant added to errors before their
#: logarithm (no label is more accurate than 2 %), and the standard deviations at which inputs are clipped.
_RIDGE, _FOLDS, _LEAST_ERROR, _FAR = 0.1, 5, 0.02, 3.0


@dataclass(frozen=True)
class Difficulty:
    """Expected error of predictions relative to the usual one: a log-linear model with ``weights`` float64 (d,) of inputs that
    are standardised by ``mean`` and ``std``, (d,)."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def fit(
        cls, inputs: NDArray[np.float64], errors: NDArray[np.float64], unit: Sequence[Hashable], seed: int = 0
    ) -> tuple[Difficulty, NDArray[np.float64]]:
        """Fit to inputs (n, d), errors >= 0 (n,) and the unit of each record; every unit weighs the same. Also gives the
        difficulty of each record (n,) by a fit without its unit."""
        _, number, counts = np.unique(np.asarray([str(u) for u in unit]), return_inverse=True, return_counts=True)
        std = inputs.std(axis=0)
        usual = cls(inputs.mean(axis=0), np.where(std > 0, std, 1.0), np.zeros(inputs.shape[1]))
        rows, logs, weight = usual._standardised(inputs), np.log(errors + _LEAST_ERROR), 1.0 / counts[number]
        fold = np.random.default_rng(seed).integers(0, min(_FOLDS, len(counts)), len(counts))[number]
        scales = np.ones(len(errors))
        for out in np.unique(fold):
            rest = fold != out
            if rest.any():
                scales[~rest] = np.exp(rows[~rest] @ _ridge(rows[rest], logs[rest], weight[rest]))
        return replace(usual, weights=_ridge(rows, logs, weight)), scales

    def of(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Difficulty of predictions with these inputs, (n, d) -> (n,)."""
        return np.exp(self._standardised(inputs) @ self.weights)

    def _standardised(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip((inputs - self.mean) / self.std, -_FAR, _FAR)


def _ridge(rows: NDArray[np.float64], values: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of a ridge regression, with intercept, of values (n,) on rows (n, d)."""
    from sklearn.linear_model import Ridge

    found: NDArray[np.float64] = Ridge(_RIDGE * weight.sum()).fit(rows, values, sample_weight=weight).coef_
    return found


@dataclass(frozen=True)
class Calibration:
    """Scores of the validation part around the ``middle``: pooled, and of each device with at least :data:`MIN_UNITS` units.
    ``unit`` is ``"task"`` or ``"record"``, see the module's text. Without a ``difficulty`` it is 1 for all predictions."""

    unit: str
    pooled: ScoreDistribution
    devices: Mapping[str, ScoreDistribution]
    difficulty: Difficulty | None = None
    middle: float = 0.0

    @classmethod
    def fit(
        cls,
        label_s: ArrayLike,
        predicted_s: ArrayLike,
        task: Sequence[str],
        device: Sequence[str],
        unit: str = "task",
        inputs: NDArray[np.float64] | None = None,
    ) -> Calibration:
        """Fit to measured and predicted seconds of n >= 1 records, the task and device of each, and the inputs (n, d) of their
        difficulty. PredictorError: no records, or a unit other than task and record."""
        if unit not in ("task", "record"):
            raise PredictorError(f"unknown calibration unit '{unit}' (known: task, record)")
        errors = log_errors(label_s, predicted_s)
        if not len(errors):
            raise PredictorError("no records to calibrate with")
        units = np.asarray(list(task)) if unit == "task" else np.arange(len(errors)).astype(str)
        difficulty = None
        if inputs is not None:
            difficulty, scales = Difficulty.fit(inputs, np.abs(errors), units.tolist())
            errors = errors / scales
        both = ScoreDistribution.fit(errors, units.tolist())
        middle = float(np.interp([0.05, 0.95], both.mass / both.units, both.scores).mean())
        scores = np.abs(errors - middle)
        where = np.asarray(list(device))
        every = {
            str(name): ScoreDistribution.fit(scores[where == name], units[where == name].tolist()) for name in np.unique(where)
        }
        devices = {name: scored for name, scored in every.items() if scored.units >= MIN_UNITS}
        return cls(unit, ScoreDistribution.fit(scores, units.tolist()), devices, difficulty, middle)

    def with_device(self, device: str, errors: ArrayLike, task: Iterable[str]) -> Calibration:
        """With the scores of a device added or replaced, if it has :data:`MIN_UNITS` tasks. ``errors`` (n,) are log(measured /
        predicted) over the difficulty of the prediction."""
        own = ScoreDistribution.fit(np.abs(np.asarray(errors, dtype=np.float64) - self.middle), list(task))
        return replace(self, devices={**self.devices, device: own}) if own.units >= MIN_UNITS else self

    def for_device(self, device: Device, trained: Mapping[str, Device]) -> Calibration:
        """With the pooled scores that apply to a device without scores of its own."""
        alike = [own for name, own in self.devices.items() if name in trained and trained[name].kind == device.kind]
        seen = any((known.kind, known.arch) == (device.kind, device.arch) for known in trained.values())
        return replace(self, pooled=ScoreDistribution.pooled(alike or [self.pooled], 1.0 if seen else UNSEEN))

    def supports(self, coverage: float) -> bool:
        """Whether there are enough units for intervals of this coverage."""
        return self.pooled.quantile(coverage) < math.inf

    def basis(self, device: str, coverage: float) -> str:
        """Whose scores give the intervals on a device: the device's name, or :data:`ALL_DEVICES`."""
        own = self.devices.get(device)
        return device if own is not None and own.quantile(coverage) < math.inf else ALL_DEVICES

    def ends(self, device: str, coverage: float) -> NDArray[np.float64]:
        """Log seconds (2,) from a prediction of usual difficulty to the ends of its interval, which contains it.
        PredictorError: the coverage is not between 0 and 1, or needs more calibration units than there are."""
        check_coverage(coverage)
        scores = self.devices.get(self.basis(device, coverage), self.pooled)
        if not self.supports(coverage):
            needed = math.ceil(coverage / (1 - coverage) - 1e-9)
            raise PredictorError(
                f"an interval of coverage {coverage:g} needs {needed} calibration {self.unit}s, "
                f"this predictor was calibrated on {self.pooled.units}"
            )
        ends = self.middle + np.array([-1.0, 1.0]) * scores.quantile(coverage)
        return np.clip(ends, [-math.inf, 0.0], [0.0, math.inf])

    def to_json(self) -> dict[str, Any]:
        """Names and numbers as JSON values; the scores are in :meth:`to_arrays`."""
        return {
            "unit": self.unit,
            "middle": self.middle,
            "scores": [{"device": name, "units": scores.units} for name, scores in self._named()],
        }

    def to_arrays(self) -> dict[str, NDArray[np.float64]]:
        """The distributions, to be stored beside the weights."""
        arrays: dict[str, NDArray[np.float64]] = {}
        for number, (_, scores) in enumerate(self._named()):
            arrays[f"calibration.{number}.scores"] = scores.scores
            arrays[f"calibration.{number}.mass"] = scores.mass
        if self.difficulty is not None:
            arrays.update({f"difficulty.{name}": values for name, values in vars(self.difficulty).items()})
        return arrays

    @classmethod
    def from_arrays(cls, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Calibration:
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`; KeyError or PredictorError if they do not fit."""
        every = {
            entry["device"]: ScoreDistribution(
                int(entry["units"]),
                np.asarray(arrays[f"calibration.{number}.scores"], dtype=np.float64),
                np.asarray(arrays[f"calibration.{number}.mass"], dtype=np.float64),
            )
            for number, entry in enumerate(state["scores"])
        }
        pooled = every.pop(None)
        names = [field.name for field in fields(Difficulty)]
        fitted = [np.asarray(arrays[f"difficulty.{key}"], np.float64) for key in names if f"difficulty.{key}" in arrays]
        return cls(str(state["unit"]), pooled, every, Difficulty(*fitted) if fitted else None, state.get("middle", 0.0))

    def _named(self) -> list[tuple[str | None, ScoreDistribution]]:
        return [(None, self.pooled), *sorted(self.devices.items())]


def log_errors(label_s: ArrayLike, predicted_s: ArrayLike) -> NDArray[np.float64]:
    """``log(measured / predicted)`` of seconds (n,)."""
    return np.log(np.asarray(label_s, dtype=np.float64) / np.asarray(predicted_s, dtype=np.float64))


def check_coverage(coverage: float) -> None:
    """PredictorError unless ``0 < coverage < 1``."""
    if not 0 < coverage < 1:
        raise PredictorError(f"coverage must be between 0 and 1, such as 0.9, got {coverage}")


def interval_metrics(
    calibration_of: Callable[[str], Calibration | None],
    label_s: ArrayLike,
    predicted_s: ArrayLike,
    task: Sequence[str],
    device: Sequence[str],
    coverage: float = 0.9,
    difficulty: NDArray[np.float64] | None = None,
) -> dict[str, Any] | None:
    """How well intervals hold on scored records of this ``difficulty`` (n,), None for usual: the requested ``coverage``; the
    fraction ``covered``; its mean over tasks, ``covered_by_task``; the fraction ``below``, faster than the interval; the
    median of high / low (``width``); the ``factor`` on log widths that would reach the requested coverage; and the
    ``pooled_devices``, without scores of their own. None if a device has no calibration or it has too few units."""
    check_coverage(coverage)
    names = np.asarray(list(device))
    ends = np.empty((len(names), 2))
    pooled: list[str] = []
    for name in np.unique(names).tolist():
        calibration = calibration_of(name)
        if calibration is None or not calibration.supports(coverage):
            return None
        ends[names == name] = calibration.ends(name, coverage)
        if calibration.basis(name, coverage) == ALL_DEVICES:
            pooled.append(name)
    if difficulty is not None:
        ends = ends * difficulty[:, None]
    middle, half = ends.mean(axis=1), np.diff(ends, axis=1)[:, 0] / 2
    off = log_errors(label_s, predicted_s) - middle
    # tolerance: the record whose score is the quantile must be inside, however a CPU rounds its prediction
    inside = np.abs(off) <= half + 1e-5
    _, number, counts = np.unique(np.asarray(list(task)), return_inverse=True, return_counts=True)
    return {
        "coverage": coverage,
        "covered": float(inside.mean()),
        "covered_by_task": float((np.bincount(number, weights=inside) / counts).mean()),
        "below": float((~inside & (off < 0)).mean()),
        "width": float(np.median(np.exp(2 * half))),
        "factor": float(np.quantile(np.abs(off) / half, coverage)),
        "pooled_devices": pooled,
    }


#: Fraction of the validation pairs that are nearer than the threshold.
FAMILIAR_QUANTILE = 0.99

#: Most centres, and most values in all centres together: 64,000 of single precision are 256 kB.
MAX_CENTRES = 256
_MAX_NUMBERS = 64_000

#: Most training and most validation pairs that are used, drawn at random if there are more.
_MAX_PAIRS = 8192

#: Programs whose leaves are encoded at once.
_CHUNK = 512

#: Difference of signed logarithms above which a value differs from a training constant.
_NOVEL_LOG = 0.01


@dataclass(frozen=True)
class Familiarity:
    """Centres of the training pairs, float32 (m, leaf_dim + 1 + device_dim), and the largest distance of a familiar pair."""

    centres: NDArray[np.float32]
    threshold: float

    @classmethod
    def fit(
        cls, encoder: FeatureEncoder, data: TrainingData, train_rows: NDArray[np.int64], valid_rows: NDArray[np.int64]
    ) -> Familiarity:
        """Cluster the training pairs and set the threshold on the validation pairs; both are rows of ``data.labels``, at least
        one each. The encoder must have been fitted on the training part."""
        from sklearn.cluster import KMeans

        rng = np.random.default_rng(0)
        vectors = {name: np.asarray(device_features(device), np.float64) for name, device in data.devices.items()}
        described = []
        for rows in (train_rows, valid_rows):
            drawn = rows if len(rows) <= _MAX_PAIRS else np.sort(rng.choice(rows, _MAX_PAIRS, replace=False))
            table = data.labels.iloc[drawn]
            asts, devices = [data.asts[p] for p in table["program"]], [vectors[name] for name in table["device"]]
            described.append(describe_pairs(encoder, asts, np.stack(devices)))
        train, valid = described
        number = min(MAX_CENTRES, max(1, _MAX_NUMBERS // train.shape[1]), len(np.unique(train, axis=0)))
        clusters = KMeans(number, n_init=1, max_iter=25, random_state=0).fit(train)
        centres = np.asarray(clusters.cluster_centers_, dtype=np.float32)
        return cls(centres, float(np.quantile(_distance_to_nearest(valid, centres), FAMILIAR_QUANTILE)))

    def unfamiliar(self, encoder: FeatureEncoder, asts: Sequence[CompactAST], device: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each program is unfamiliar on the device with these raw features, bool (n,)."""
        if not asts:
            return np.zeros(0, dtype=bool)
        pairs = describe_pairs(encoder, asts, np.broadcast_to(device, (len(asts), len(device))))
        return (_distance_to_nearest(pairs, self.centres) > self.threshold) | _novel(encoder, asts)

    def to_json(self) -> dict[str, Any]:
        """The threshold; the centres are in :meth:`to_arrays`."""
        return {"threshold": self.threshold, "quantile": FAMILIAR_QUANTILE}

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """The centres, to be stored beside the weights."""
        return {"familiarity.centres": self.centres}

    @classmethod
    def from_arrays(cls, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], encoder: FeatureEncoder) -> Familiarity:
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`; KeyError or PredictorError if they do not fit."""
        centres = np.asarray(arrays["familiarity.centres"], dtype=np.float32)
        width = encoder.leaf_dim + 1 + encoder.device_dim
        if centres.ndim != 2 or centres.shape[1] != width or not len(centres):
            raise PredictorError(f"familiarity centres are of shape {centres.shape}, not (n, {width})")
        return cls(centres, float(state["threshold"]))


def describe_pairs(encoder: FeatureEncoder, asts: Sequence[CompactAST], devices: NDArray[np.float64]) -> NDArray[np.float32]:
    """Describe n programs, given the raw features of the device of each, by mean encoded leaf, log of the number of leaves,
    and encoded device, float32 (n, leaf_dim + 1 + device_dim)."""
    lengths = np.asarray([ast.leaves.shape[0] for ast in asts])
    means = np.empty((len(asts), encoder.leaf_dim), dtype=np.float32)
    for begin in range(0, len(asts), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        encoded = encoder.encode_leaves(np.concatenate([ast.leaves for ast in asts[part]]))
        starts = np.concatenate([[0], np.cumsum(lengths[part])[:-1]])
        means[part] = np.add.reduceat(encoded, starts, axis=0) / lengths[part, None]
    counts = np.log(lengths).astype(np.float32)[:, None]
    return np.concatenate([means, counts, encoder.encode_devices(devices)], axis=1)


def _distance_to_nearest(pairs: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.float64]:
    """Distance of each pair to the nearest centre, float64 (n,)."""
    return np.sqrt(squared_distances(pairs.astype(np.float64), centres.astype(np.float64)).min(1))


def squared_distances(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared Euclidean distances of rows, (n, d) and (m, d) -> (n, m), by a matrix product, as both uses need many of them."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.maximum(squares, 0.0)


def left_out(inverse: NDArray[np.float64], errors: NDArray[np.float64], task: NDArray[np.int64]) -> NDArray[np.float64]:
    """Leave-one-task-out residuals (n,) of errors: each task is predicted from the others by the inverse covariance (n, n)."""
    solved, left = inverse @ errors, np.empty_like(errors)
    for number in np.unique(task):
        at = np.flatnonzero(task == number)
        left[at] = np.linalg.solve(inverse[np.ix_(at, at)], solved[at])
    return left


def _novel(encoder: FeatureEncoder, asts: Sequence[CompactAST]) -> NDArray[np.bool_]:
    """Whether a leaf of each program differs from training in a feature that was constant there, bool (n,)."""
    constant = ~encoder.leaf.active
    expected = encoder.leaf.mean[constant]
    return np.asarray([bool((np.abs(signed_log1p(ast.leaves[:, constant]) - expected) > _NOVEL_LOG).any()) for ast in asts])
