r"""Predictions that are told what the same programs took on other devices.

Who asks for the latency on a device that is not at hand often has another at hand. What a program took there says what no
model of programs knows (cache conflicts, what the compiler made of it), and scaled to the device asked for it is one more
prediction. The scale is the ratio of two predictions (Habitat, Yu et al., USENIX ATC'21, scales operators from GPU to GPU by
what their waves of blocks should take): of a program measured to take :math:`y_s` on device s,

.. math:: z_s = y_s\, (f_t / f_s)^{1 - c}\, (e_t / e_s)^{c}\, e^{b},

with f the predictor's latency, e the analytical estimate (:func:`cdmpp.predictor.roofline.estimate_s`), and
b what is left between the two devices on the whole. The answer is the geometric mean of :math:`f_t` and the
:math:`z_s`, each weighted by the inverse square of its error:

* of :math:`f_t`: the predictor's on validation records;
* of :math:`z_s`, where validation records show programs on both s and t: how far apart they were, with b and c of their own
  (:class:`DevicePair`);
* else in proportion to the distance of the two devices (:func:`device_distance`), as in a linear variogram; b is 0, and c
  what is best on average.

All of it is fitted to validation records of programs that were measured on several devices; a finetuning fits it to the new
device's tasks. Only devices of one kind (CPU, GPU) tell of each other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import signed_log1p

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.predictor import Predictor
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

NOT_TAUGHT = "this predictor was not taught to scale measured latencies: train it again"

#: Devices need so many tasks in common for an error of their own, and so many programs to count for that of a distance.
MIN_TASKS = 5
MIN_PROGRAMS = 10
#: Values of c that are tried.
_ESTIMATE_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: No error is taken to be smaller: labels are not better either.
_LEAST_ERROR = 0.02
#: No devices are taken to be nearer.
_LEAST_DISTANCE = 0.1
#: Error of a scaled latency for each unit of distance where training had no two devices of a kind: as between the CPUs that
#: ship (AVX-512 and 128-bit SIMD, on one core and two).
_ERROR_BY_DISTANCE = 0.15
#: The same of a prediction, where there is nothing to tell it by.
_OWN_ERROR = 0.3


@dataclass(frozen=True)
class DevicePair:
    """How latencies scaled from one device to another compare with those measured there.

    Attributes
    ----------
    bias
        Median over the tasks of the median of log(measured / scaled), shrunk for few tasks.
    error
        Mean over the tasks of the mean absolute log error that is left.
    tasks
        In common.
    estimate_part
        c of the two.
    """

    bias: float
    error: float
    tasks: int
    estimate_part: float = 1.0


@dataclass(frozen=True)
class DeviceScaling:
    """What :func:`combine` weighs by.

    Attributes
    ----------
    estimate_part
        c of devices that were never compared: 0 scales by the predictor's ratio of two devices, 1 by the analytical
        estimate's.
    own_error
        Mean absolute log error of plain predictions.
    error_by_distance
        Error of a scaled latency for each unit of :func:`device_distance`.
    own
        ``own_error`` of devices with enough tasks.
    pairs
        ``(measured on, asked for)`` -> their comparison, of pairs with enough tasks in common.
    """

    estimate_part: float = 1.0
    own_error: float = _OWN_ERROR
    error_by_distance: float = _ERROR_BY_DISTANCE
    own: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], DevicePair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        errors = [self.own_error, self.error_by_distance, *self.own.values()]
        errors += [pair.error for pair in self.pairs.values()]
        numbers = [self.estimate_part, *errors]
        numbers += [number for pair in self.pairs.values() for number in (pair.bias, pair.estimate_part)]
        if not np.isfinite(numbers).all() or min(errors) < 0:
            raise PredictorError("errors of a device scaling must be finite and at least 0")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        pairs = [{"measured": s, "asked": t, **asdict(pair)} for (s, t), pair in sorted(self.pairs.items())]
        names = ("estimate_part", "own_error", "error_by_distance")
        return {**{name: getattr(self, name) for name in names}, "own": dict(self.own), "pairs": pairs}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> DeviceScaling:
        """Back from :meth:`to_json`; KeyError, TypeError, ValueError or PredictorError if it is none."""
        pairs = {
            (str(pair["measured"]), str(pair["asked"])): DevicePair(
                float(pair["bias"]), float(pair["error"]), int(pair["tasks"]), float(pair["estimate_part"])
            )
            for pair in state["pairs"]
        }
        return cls(
            float(state["estimate_part"]),
            float(state["own_error"]),
            float(state["error_by_distance"]),
            {str(k): float(v) for k, v in state["own"].items()},
            pairs,
        )


def device_distance(one: Device, other: Device) -> float:
    """Euclidean distance of the logarithms of two devices' features; what one of them lacks tells nothing."""
    from cdmpp.device import device_features

    logs = signed_log1p(np.stack([device_features(one), device_features(other)]))
    return float(np.sqrt(np.nansum((logs[0] - logs[1]) ** 2)))


def combine(
    scaling: DeviceScaling,
    device: Device,
    predicted_s: FloatArray,
    estimate_s: FloatArray,
    sources: Sequence[tuple[Device, FloatArray, FloatArray, FloatArray]],
) -> FloatArray:
    """Latencies in seconds of programs on a device, float64 (n,), told those measured on others.

    Parameters
    ----------
    device
        The device asked for.
    predicted_s, estimate_s
        The predictor's latencies and the analytical estimates there, (n,).
    sources
        For other devices of its kind: the device, measured seconds (n,), NaN where there are none, and the predictor's and
        the estimate's there.
    """
    own = max(_LEAST_ERROR, scaling.own.get(device.name, scaling.own_error))
    logs = [np.log(predicted_s)]
    weights = [np.full(len(predicted_s), own**-2)]
    for source, measured_s, there_s, estimate_there_s in sources:
        pair = scaling.pairs.get((source.name, device.name))
        if pair is None:
            distance = max(_LEAST_DISTANCE, device_distance(source, device))
            pair = DevicePair(0.0, scaling.error_by_distance * distance, 0, scaling.estimate_part)
        scaled = _log_scaled(
            pair.estimate_part, measured_s, predicted_s / there_s, estimate_s / estimate_there_s
        )
        known = ~np.isnan(scaled)
        logs.append(np.where(known, scaled + pair.bias, 0.0))
        weights.append(np.where(known, max(_LEAST_ERROR, pair.error) ** -2, 0.0))
    return np.asarray(np.exp((np.stack(logs) * np.stack(weights)).sum(0) / np.stack(weights).sum(0)))


def _log_scaled(
    estimate_part: float, measured_s: FloatArray, ratio: FloatArray, ratio_of_estimates: FloatArray
) -> FloatArray:
    """Logarithm of measured latencies scaled to another device, without bias."""
    return np.asarray(
        np.log(measured_s) + (1 - estimate_part) * np.log(ratio) + estimate_part * np.log(ratio_of_estimates),
        dtype=np.float64,
    )


def predict_scaled(
    predictor: Predictor,
    asts: Sequence[CompactAST],
    device: str | Device,
    measured: Mapping[str, ArrayLike],
) -> FloatArray:
    """What ``Predictor.predict(..., measured=...)`` gives, float64 (n,).

    Raises
    ------
    PredictorError
        The predictor has no scaling; no device to tell from, one of another kind, or the one that is asked for; latencies that
        are not (n,), or not above 0.
    UnknownDeviceError
        No such device.
    """
    from cdmpp.predictor.roofline import estimate_s

    target = predictor.device(device)
    if predictor.scaling is None:
        raise PredictorError(NOT_TAUGHT)
    if not measured:
        raise PredictorError("measured= names no device: expected one at least, with latencies in seconds")
    sources = []
    for name, values in measured.items():
        source = predictor.device(name)
        if source.name == target.name:
            raise PredictorError(
                f"{source.name} is the device asked for: what was measured there needs no prediction"
            )
        if source.kind != target.kind:
            raise PredictorError(
                f"latencies on a {source.kind} ({source.name}) say too little of a {target.kind} ({target.name})"
            )
        seconds = np.atleast_1d(np.asarray(values, dtype=np.float64))
        if (
            seconds.shape != (len(asts),)
            or (seconds[~np.isnan(seconds)] <= 0).any()
            or np.isinf(seconds).any()
        ):
            raise PredictorError(
                f"latencies measured on {source.name}: expected {len(asts)} seconds above 0, NaN where there are none"
            )
        sources.append((source, seconds, predictor.predict_features(asts, name), estimate_s(asts, source)))
    return combine(
        predictor.scaling, target, predictor.predict_features(asts, device), estimate_s(asts, target), sources
    )


def predict_rows_scaled(
    predictor: Predictor, data: TrainingData, rows: NDArray[np.int64], hidden: NDArray[np.int64] | None = None
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Predicted seconds for these rows of the label table, float64 (n,), told the labels of their programs on all other
    devices of their kind but for ``hidden`` rows; and for which there were any, bool (n,).

    Raises
    ------
    PredictorError
        The predictor has no scaling.
    """
    if predictor.scaling is None:
        raise PredictorError(NOT_TAUGHT)
    labels = _Labels(predictor, data, rows, hidden)
    predicted_s = labels.predicted_s[rows].copy()
    told = np.zeros(len(rows), dtype=bool)
    for target, here, sources in labels.by_device(rows):
        if sources:
            at = rows[here]
            predicted_s[here] = combine(
                predictor.scaling,
                target,
                labels.predicted_s[at],
                labels.estimate_s[at],
                [(s, *labels.values(there)) for s, there in sources],
            )
            told[here] = np.any([there >= 0 for _, there in sources], axis=0)
    return predicted_s, told


def fit_scaling(
    predictor: Predictor,
    data: TrainingData,
    rows: NDArray[np.int64],
    hidden: NDArray[np.int64] | None = None,
    learned: NDArray[np.int64] | None = None,
) -> DeviceScaling:
    """Fit to rows of records that were not trained on, by the labels of their programs on other devices.

    Parameters
    ----------
    hidden
        Rows whose labels may not be looked at.
    learned
        Further rows, which were trained on: what the predictor says of them proves nothing, so devices are then compared by
        the analytical estimate alone (c is 1), on all of these rows. None where there are ``rows`` enough.
    """
    parts = _ESTIMATE_PARTS if learned is None else (1.0,)
    every = rows if learned is None else np.union1d(rows, learned)
    labels = _Labels(predictor, data, every, hidden)
    table = data.labels
    errors = np.abs(np.log(table["latency_s"].to_numpy(dtype=np.float64)[rows] / labels.predicted_s[rows]))
    tasks = table["task"].to_numpy(dtype=str)
    own = {}
    for target, here, _ in labels.by_device(rows):
        if len(np.unique(tasks[rows[here]])) >= MIN_TASKS:
            own[target.name] = _mean_by_task(errors[here], tasks[rows[here]])
    found: dict[float, dict[tuple[str, str], DevicePair]] = {part: {} for part in parts}
    slopes: dict[float, list[float]] = {part: [] for part in parts}
    for source, target, at, there in labels.compared(every):
        measured_s, there_s, estimate_there_s = labels.values(there)
        ratios = labels.predicted_s[at] / there_s, labels.estimate_s[at] / estimate_there_s
        for part in parts:
            scaled = _log_scaled(part, measured_s, *ratios)
            left = np.log(table["latency_s"].to_numpy(dtype=np.float64)[at]) - scaled
            found[part][source.name, target.name] = _compare(left, tasks[at], part)
            distance = max(_LEAST_DISTANCE, device_distance(source, target))
            slopes[part].append(_mean_by_task(np.abs(left), tasks[at]) / distance)
    own_error = _mean_by_task(errors, tasks[rows]) if len(rows) else _OWN_ERROR
    if not slopes[parts[0]]:
        return DeviceScaling(own_error=own_error, own=own)
    best = min(parts, key=lambda part: float(np.mean(slopes[part])))
    pairs = {
        devices: min((found[part][devices] for part in parts), key=lambda pair: pair.error)
        for devices, pair in found[best].items()
        if pair.tasks >= MIN_TASKS
    }
    return DeviceScaling(best, own_error, float(np.mean(slopes[best])), own, pairs)


def _compare(left: FloatArray, tasks: NDArray[np.str_], estimate_part: float) -> DevicePair:
    """Of log(measured / scaled) of programs, and the task of each."""
    medians = [float(np.median(left[tasks == task])) for task in np.unique(tasks)]
    # one task says little of the others: as if two had none
    bias = float(np.median(medians)) * len(medians) / (len(medians) + 2)
    return DevicePair(bias, _mean_by_task(np.abs(left - bias), tasks), len(medians), estimate_part)


def _mean_by_task(values: FloatArray, tasks: NDArray[np.str_]) -> float:
    """Mean over tasks of their means."""
    _, number, counts = np.unique(tasks, return_inverse=True, return_counts=True)
    return float(np.mean(np.bincount(number, weights=values) / counts))


class _Labels:
    """Labels, predictions and estimates of some rows of the label table, and of their programs' rows on other devices."""

    def __init__(
        self,
        predictor: Predictor,
        data: TrainingData,
        rows: NDArray[np.int64],
        hidden: NDArray[np.int64] | None,
    ) -> None:
        from cdmpp.predictor.data import subset
        from cdmpp.predictor.roofline import pair_reference_s
        from cdmpp.predictor.scoring import predict_rows

        table = data.labels
        self._devices = data.devices
        self._program = table["program"].to_numpy(dtype=str)
        self._device = table["device"].to_numpy(dtype=str)
        self._latency_s = table["latency_s"].to_numpy(dtype=np.float64)
        self._row: dict[tuple[str, str], int] = {}
        self._places: dict[str, set[str]] = defaultdict(set)
        shown = np.isin(self._program, np.unique(self._program[rows]))
        shown[[] if hidden is None else hidden] = False
        for i in np.flatnonzero(shown):
            self._row[self._program[i], self._device[i]] = int(i)
            self._places[self._program[i]].add(self._device[i])
        needed = np.array(sorted({*self._row.values(), *rows.tolist()}), dtype=np.int64)
        self.predicted_s = np.full(len(table), math.nan)
        self.estimate_s = np.full(len(table), math.nan)
        if len(needed):
            self.predicted_s[needed] = predict_rows(predictor, data, needed)
            self.estimate_s[needed] = pair_reference_s(subset(data, needed), "estimate")

    def values(self, there: NDArray[np.int64]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Measured, predicted and estimated seconds of rows, NaN for row -1."""
        known = there >= 0
        columns = (self._latency_s, self.predicted_s, self.estimate_s)
        measured_s, predicted_s, estimate_s = (np.where(known, column[there], math.nan) for column in columns)
        return measured_s, predicted_s, estimate_s

    def by_device(
        self, rows: NDArray[np.int64]
    ) -> list[tuple[Device, NDArray[np.int64], list[tuple[Device, NDArray[np.int64]]]]]:
        """For each device of some rows: the device, places in ``rows``, and with every other device of its kind the rows
        of the same programs there, -1 for none."""
        found = []
        for name in np.unique(self._device[rows]).tolist():
            here = np.flatnonzero(self._device[rows] == name)
            target = self._devices[name]
            programs = self._program[rows[here]]
            places = set(itertools.chain.from_iterable(self._places[p] for p in np.unique(programs)))
            sources = [
                (self._devices[other], np.array([self._row.get((p, other), -1) for p in programs]))
                for other in sorted(places - {name})
                if self._devices[other].kind == target.kind
            ]
            found.append((target, here, sources))
        return found

    def compared(
        self, rows: NDArray[np.int64]
    ) -> list[tuple[Device, Device, NDArray[np.int64], NDArray[np.int64]]]:
        """Pairs of devices with enough programs in common: where measured, the device of the rows, these rows, and the rows of
        their programs where measured."""
        found = []
        for target, here, sources in self.by_device(rows):
            for source, there in sources:
                at, known = rows[here][there >= 0], there[there >= 0]
                if len(at) >= MIN_PROGRAMS:
                    found.append((source, target, at, known))
        return found
