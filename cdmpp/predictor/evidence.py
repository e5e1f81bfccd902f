r"""Evidence about programs besides their ASTs: their compiled code, or their latencies on other devices.

A latency measured on another device shows effects that no model of programs knows (cache conflicts, what the compiler made of
it). Scaled to the target device, it is one more prediction. The scale is the ratio of two predictions, as in Habitat (Yu et
al., USENIX ATC'21), which scales operators from GPU to GPU. For a program measured as :math:`y_s` on device s and a target t,

.. math:: z_s = y_s\, (f_t / f_s)^{1 - c}\, (e_t / e_s)^{c}\, e^{b},

with f the predictor's latency, e the analytical estimate (:func:`cdmpp.predictor.pair_features.estimate_s`), and b the bias
left between the two devices. The result is the geometric mean of :math:`f_t` and the :math:`z_s`, each weighted by the
inverse square of its error. The error of :math:`f_t` is the predictor's on validation records. The error of :math:`z_s` is that
of scaling from s to t, with b and c of this pair (:class:`DevicePair`), if validation records have programs on both; else it
is proportional to the distance of the two (:func:`device_distance`), as in a linear variogram, with b 0 and c best on average.

A latency on another number of cores of the same CPU is enough: it is scaled by the program's structure alone and replaces all
other predictions (:func:`cdmpp.predictor.pair_features.share_ratio`).

All parameters are fitted to validation records of programs that were measured on several devices; finetuning fits them to the
new device's tasks. Only devices of one kind (CPU, GPU) are combined.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import device_features
from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import signed_log1p
from cdmpp.predictor.pair_features import are_shares

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor.data import TrainingData

FloatArray = NDArray[np.float64]

#: Predicts the seconds of rows of the label table.
RowPredictor = Callable[["TrainingData", NDArray[np.int64]], FloatArray]

#: Tasks that two devices must share to get an error of their own, and programs to count in the error by distance.
MIN_TASKS = 5
MIN_PROGRAMS = 10
#: Candidate values of c.
_ESTIMATE_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Lower bound of every error: labels are not more accurate.
_LEAST_ERROR = 0.02
#: Lower bound of the distance between two devices.
_LEAST_DISTANCE = 0.1
#: Error of a scaled latency per unit of distance if training had no two devices of one kind: that between the CPUs that
#: ship (AVX-512 and 128-bit SIMD, on one core and two).
_ERROR_BY_DISTANCE = 0.15
#: Error of a plain prediction if there are no records to estimate it from.
_OWN_ERROR = 0.3


@dataclass(frozen=True)
class DevicePair:
    """How latencies scaled from one device to another compare with those measured there. ``bias`` is the median over tasks
    of each task's median log(measured / scaled), shrunk if there are few tasks. ``error`` is the mean over the common tasks of
    the mean absolute log error that is left. ``estimate_part`` is c of this pair."""

    bias: float
    error: float
    tasks: int
    estimate_part: float = 1.0


@dataclass(frozen=True)
class DeviceScaling:
    """Parameters and errors by which :func:`combine` scales and weights latencies."""

    #: c of devices that were never compared: 0 scales by the ratio of the predictor's latencies, 1 by that of the estimates.
    estimate_part: float = 1.0
    #: Mean absolute log error of plain predictions; ``own`` has it by device with enough tasks, and by kind (``cpu``).
    own_error: float = _OWN_ERROR
    #: Error of a scaled latency per unit of :func:`device_distance`.
    error_by_distance: float = _ERROR_BY_DISTANCE
    own: Mapping[str, float] = field(default_factory=dict)
    #: ``(measured on, predicted for)`` -> their comparison, for pairs with enough tasks in common.
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
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "pairs": pairs}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> DeviceScaling:
        """Rebuild from :meth:`to_json`; KeyError, TypeError, ValueError or PredictorError if the state is invalid."""
        pairs = {}
        for entry in state["pairs"]:
            numbers = {field.name: entry[field.name] for field in fields(DevicePair)}
            pairs[str(entry["measured"]), str(entry["asked"])] = DevicePair(**numbers)
        return cls(**{**{field.name: state[field.name] for field in fields(cls)}, "pairs": pairs})


def device_distance(one: Device, other: Device) -> float:
    """Euclidean distance of the logarithms of two devices' features; features that one of them lacks are ignored."""
    logs = signed_log1p(np.stack([device_features(one), device_features(other)]))
    return float(np.sqrt(np.nansum((logs[0] - logs[1]) ** 2)))


def combine(
    scaling: DeviceScaling,
    device: Device,
    predicted_s: FloatArray,
    estimate_s: FloatArray,
    sources: Sequence[tuple[Device, FloatArray, FloatArray, FloatArray]],
) -> FloatArray:
    """Combine predictions on a device with latencies on others into seconds, float64 (n,). ``predicted_s`` and ``estimate_s``,
    (n,), are the predictor's and the estimate's seconds on ``device``. Each of ``sources`` is another device of its kind, the
    seconds measured there, (n,), NaN where unknown, and the predictor's and the estimate's seconds there."""
    # by kind: GPU operators are predicted far better than CPU programs, and there are more of them
    of_kind = scaling.own.get(device.kind, scaling.own_error)
    own = max(_LEAST_ERROR, scaling.own.get(device.name, of_kind))
    logs = [np.log(predicted_s)]
    weights = [np.full(len(predicted_s), own**-2)]
    for source, measured_s, there_s, estimate_there_s in sources:
        pair = scaling.pairs.get((source.name, device.name))
        if pair is None:
            distance = max(_LEAST_DISTANCE, device_distance(source, device))
            pair = DevicePair(0.0, scaling.error_by_distance * distance, 0, scaling.estimate_part)
        scaled = _log_scaled(pair.estimate_part, measured_s, predicted_s / there_s, estimate_s / estimate_there_s)
        known = ~np.isnan(scaled)
        logs.append(np.where(known, scaled + pair.bias, 0.0))
        weights.append(np.where(known, max(_LEAST_ERROR, pair.error) ** -2, 0.0))
    return np.asarray(np.exp((np.stack(logs) * np.stack(weights)).sum(0) / np.stack(weights).sum(0)))


def _log_scaled(part: float, measured_s: FloatArray, ratio: FloatArray, estimated: FloatArray) -> FloatArray:
    """Logarithm of measured latencies scaled to another device, without bias."""
    return np.asarray(np.log(measured_s) + (1 - part) * np.log(ratio) + part * np.log(estimated), dtype=np.float64)


def fit_scaling(
    predict_rows: RowPredictor,
    data: TrainingData,
    rows: NDArray[np.int64],
    hidden: NDArray[np.int64] | None = None,
    learned: NDArray[np.int64] | None = None,
) -> DeviceScaling:
    """Fit to ``rows`` that were not trained on, using the labels of their programs on other devices except ``hidden`` rows.
    ``learned`` are further rows, which were trained on (None: ``rows`` are enough). Predictions of trained rows prove nothing,
    so devices are then compared by the analytical estimate alone (c is 1), on ``rows`` and ``learned`` together."""
    parts = _ESTIMATE_PARTS if learned is None else (1.0,)
    every = rows if learned is None else np.union1d(rows, learned)
    sources = rows_elsewhere(data, every, hidden)
    label_s = data.latency_s
    tasks = data.labels["task"].to_numpy(dtype=str)
    names = data.labels["device"].to_numpy(dtype=str)
    needed = np.unique(np.concatenate([every, *(there[there >= 0] for _, there in sources)]))
    predicted_s, estimated_s = np.full(len(data), math.nan), np.full(len(data), math.nan)
    if len(needed):
        predicted_s[needed] = predict_rows(data, needed)
        estimated_s[needed] = data.reference_s(needed)
    errors = np.abs(np.log(label_s[rows] / predicted_s[rows]))
    own = {}
    kinds = np.array([data.devices[name].kind for name in names[rows]], dtype=str)
    for group in (names[rows], kinds):
        for name in np.unique(group).tolist():
            here = group == name
            if len(np.unique(tasks[rows[here]])) >= MIN_TASKS:
                own[name] = _mean_by_task(errors[here], tasks[rows[here]])
    own_error = _mean_by_task(errors, tasks[rows]) if len(rows) else _OWN_ERROR
    found: dict[float, dict[tuple[str, str], DevicePair]] = {part: {} for part in parts}
    slopes: dict[float, list[float]] = {part: [] for part in parts}
    for name in np.unique(names[every]).tolist():
        for source, all_there in sources:
            here = (names[every] == name) & (all_there >= 0)
            at, there = every[here], all_there[here]
            if len(at) < MIN_PROGRAMS or are_shares(source, data.devices[name]):
                continue
            distance = max(_LEAST_DISTANCE, device_distance(source, data.devices[name]))
            ratios = predicted_s[at] / predicted_s[there], estimated_s[at] / estimated_s[there]
            for part in parts:
                left = np.log(label_s[at]) - _log_scaled(part, label_s[there], *ratios)
                found[part][source.name, name] = _compare(left, tasks[at], part)
                slopes[part].append(_mean_by_task(np.abs(left), tasks[at]) / distance)
    if not slopes[parts[0]]:
        return DeviceScaling(own_error=own_error, own=own)
    best = min(parts, key=lambda part: float(np.mean(slopes[part])))
    pairs = {
        devices: min((found[part][devices] for part in parts), key=lambda pair: pair.error)
        for devices, pair in found[best].items()
        if pair.tasks >= MIN_TASKS
    }
    return DeviceScaling(best, own_error, float(np.mean(slopes[best])), own, pairs)


def rows_elsewhere(
    data: TrainingData, rows: NDArray[np.int64], hidden: NDArray[np.int64] | None = None
) -> list[tuple[Device, NDArray[np.int64]]]:
    """Every device on which programs of these label table rows (n,) have records, with the rows of these records, int64 (n,).
    It is -1 without a record, for a ``hidden`` one, and if the row's own device is this one or of another kind (CPU, GPU)."""
    table = data.labels
    programs, program = np.unique(table["program"].to_numpy(dtype=str), return_inverse=True)
    names, number = np.unique(table["device"].to_numpy(dtype=str), return_inverse=True)
    row = np.full((len(programs), len(names)), -1)
    shown = np.ones(len(table), dtype=bool)
    shown[[] if hidden is None else hidden] = False
    row[program[shown], number[shown]] = np.flatnonzero(shown)
    on_gpu = np.array([data.devices[name].kind == "gpu" for name in names], dtype=bool)
    found = []
    for source, name in enumerate(names.tolist()):
        usable = (number[rows] != source) & (on_gpu[number[rows]] == on_gpu[source])
        there = np.where(usable, row[program[rows], source], -1)
        if (there >= 0).any():
            found.append((data.devices[name], there))
    return found


def _compare(left: FloatArray, tasks: NDArray[np.str_], estimate_part: float) -> DevicePair:
    """Summarise log(measured / scaled) of programs, given the task of each."""
    medians = [float(np.median(left[tasks == task])) for task in np.unique(tasks)]
    # a few tasks say little about the others: shrink the bias as if two more tasks had none
    bias = float(np.median(medians)) * len(medians) / (len(medians) + 2)
    return DevicePair(bias, _mean_by_task(np.abs(left - bias), tasks), len(medians), estimate_part)


def _mean_by_task(values: FloatArray, tasks: NDArray[np.str_]) -> float:
    """Mean over tasks of each task's mean."""
    _, number, counts = np.unique(tasks, return_inverse=True, return_counts=True)
    return float(np.mean(np.bincount(number, weights=values) / counts))


def check_one_kind(compiled: bool, measured: bool) -> None:
    """Raise PredictorError if both kinds of evidence are asked for."""
    if compiled and measured:
        raise PredictorError(
            "a prediction uses the compiled code (compiled) or latencies measured on other devices (measured), not both"
        )


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence about n programs, of at most one kind (PredictorError for both); none by default. ``code`` holds the
    instruction counts of the compiled programs, float32 (n, len(CODEGEN_FEATURES)), rows of NaN where unknown;
    ``elsewhere`` holds other devices and the seconds measured there, float64 (n,) each, NaN where unknown."""

    code: NDArray[np.float32] | None = None
    elsewhere: Sequence[tuple[Device, NDArray[np.float64]]] | None = None

    def __post_init__(self) -> None:
        check_one_kind(self.code is not None, self.elsewhere is not None)

    @classmethod
    def of_rows(
        cls,
        data: TrainingData,
        rows: NDArray[np.int64],
        *,
        compiled: bool = False,
        measured: bool = False,
        hidden: NDArray[np.int64] | None = None,
    ) -> Evidence:
        """The evidence in data about the programs of these label table rows: the stored instruction counts
        (``compiled``), or the labels on all other devices of the same kind except ``hidden`` rows (``measured``)."""
        check_one_kind(compiled, measured)
        if compiled:
            return cls(code=None if data.codegen_counts is None else data.codegen_counts[rows])
        if not measured:
            return cls()
        latency_s = data.latency_s
        found = rows_elsewhere(data, rows, hidden)
        return cls(elsewhere=[(device, np.where(there >= 0, latency_s[there], np.nan)) for device, there in found])

    def take(self, programs: Sequence[int]) -> Evidence:
        """The evidence about the programs with these indices."""
        if self.elsewhere is not None:
            return Evidence(elsewhere=[(device, seconds[list(programs)]) for device, seconds in self.elsewhere])
        return Evidence(code=None if self.code is None else self.code[list(programs)])

    def known(self, n: int) -> NDArray[np.bool_]:
        """Which of the n programs have evidence, bool (n,); all are True if there is no kind of evidence."""
        if self.code is not None:
            return ~np.isnan(self.code[:, 0])
        known: NDArray[np.bool_] = np.full(n, self.elsewhere is None)
        for _, seconds in self.elsewhere or ():
            known |= ~np.isnan(seconds)
        return known


#: No evidence but the AST.
NO_EVIDENCE = Evidence()


_MEASURED = re.compile(r"([^=]+)=(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(s|ms|us|ns)")
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def measured_latencies(texts: Sequence[str]) -> dict[str, float] | None:
    """Parse ``D=LATENCY`` texts in s, ms, us or ns (``rtx-3060=1.3ms``) to device -> seconds; None if there are no texts.
    PredictorError: a text of another form, or a device named twice."""
    found: dict[str, float] = {}
    for text in texts:
        match = _MEASURED.fullmatch(text)
        if match is None:
            raise PredictorError(f"'{text}': expected DEVICE=LATENCY with its unit, such as rtx-3060=1.3ms")
        device, value, unit = match.groups()
        if device in found:
            raise PredictorError(f"{device} is named twice: expected one latency of a device")
        found[device] = float(value) * _UNITS_S[unit]
    return found or None
