"""Accuracy and ranking metrics of predicted latencies, with exactly the keys of ``cdmpp evaluate --json``.

``mape, median_ape, within_10pct, within_20pct``
    Mean and median of ``|predicted - label| / label``, and the fractions of records within 10 % and 20 %; 0.14 is 14 %.
``rmse_s``
    Root mean squared error in seconds.
``pairwise_accuracy``
    Over all pairs of programs of the same task on the same device, the fraction ordered as their labels are. A pair is a tie
    and left out if its labels differ by no more than the larger noise of the two, relative to the smaller label; equal labels
    are always ties. Equal predictions count one half.
``spearman``
    Spearman's rank correlation within a task on a device, averaged over the (task, device) groups with at least three programs
    and labels that differ. Constant predictions count 0.
``top1_regret, top5_regret``
    Latency of the best among the 1 or 5 programs predicted fastest, over that of the best program of the task on the device,
    minus one, averaged over groups with at least two programs (for top 5: six). ``top1_regret_median`` is the median instead of
    the mean, ``top1_regret_of_32`` the median over groups with at least 32 programs, as choosing from few is easy.
``noise_floor_mape``
    Expected MAPE of a perfect predictor: the mean error floor of the labels (:mod:`cdmpp.dataset.view`), or half of the mean
    noise if no error floors are given.

A metric that is not defined on the records (no pair, no noise figure) is None.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.errors import LabelError, PredictorError

Metrics = dict[str, Any]

#: Programs that a task must have on a device to count in ``top1_regret_of_32``.
_MANY = 32


def evaluate_predictions(
    label_s: ArrayLike,
    predicted_s: ArrayLike,
    task: Sequence[Hashable],
    device: Sequence[Hashable],
    noise: ArrayLike | None = None,
    error_floor: ArrayLike | None = None,
) -> Metrics:
    """Score predictions of n records in seconds, ranked within task and device; the module's text defines every metric.
    ``noise`` is the relative split-half noise of each label and decides which pairs are ties. ``error_floor`` is the expected
    relative error of a perfect predictor on each label. Both are NaN where unknown. LabelError: a label is not finite and
    positive. PredictorError: a prediction is not, lengths differ, or there are no records."""
    labels = np.asarray(label_s, dtype=np.float64)
    predictions = np.asarray(predicted_s, dtype=np.float64)
    noises = _or_unknown(noise, len(labels))
    floors = noises / 2 if error_floor is None else _or_unknown(error_floor, len(labels))
    if len({len(labels), len(predictions), len(task), len(device), len(noises), len(floors)}) != 1:
        raise PredictorError("labels, predictions, tasks, devices and noises must have the same length")
    if len(labels) == 0:
        raise PredictorError("no records to score")
    if not (np.isfinite(labels) & (labels > 0)).all():
        raise LabelError("every label must be finite and above 0 s")
    if not (np.isfinite(predictions) & (predictions > 0)).all():
        raise PredictorError("every prediction must be finite and above 0 s")
    error = np.abs(predictions - labels) / labels
    known = floors[np.isfinite(floors)]
    ranking = _rank_metrics(labels, predictions, np.nan_to_num(noises, nan=0.0), list(zip(task, device, strict=True)))
    return {
        "mape": float(error.mean()),
        "median_ape": float(np.median(error)),
        "within_10pct": float((error <= 0.10).mean()),
        "within_20pct": float((error <= 0.20).mean()),
        "rmse_s": float(np.sqrt(np.mean((predictions - labels) ** 2))),
        **ranking,
        "n": len(labels),
        "noise_floor_mape": float(known.mean()) if len(known) else None,
    }


def evaluate_groups(columns: Sequence[Any], groups: Mapping[str, Sequence[Iterable[str]]]) -> dict[str, dict[str, Metrics]]:
    """Score subsets of the records: grouping (such as ``"network"``) -> group -> metrics, sorted by name. ``columns`` are the
    arguments of :func:`evaluate_predictions`. ``groups`` maps a grouping to the groups of each record, if any."""
    arrays: list[Any] = [np.asarray(column) for column in columns]
    scored: dict[str, dict[str, Metrics]] = {}
    for grouping, members in groups.items():
        rows: dict[str, list[int]] = {}
        for row, names in enumerate(members):
            for name in names:
                rows.setdefault(name, []).append(row)
        scored[grouping] = {
            name: evaluate_predictions(*(array[index] for array in arrays)) for name, index in sorted(rows.items())
        }
    return scored


def least_mape_shift(errors: NDArray[np.float64], group: NDArray[np.int64] | None = None) -> float:
    """The constant which, added to the logarithms of predictions, gives the least MAPE: a weighted median of ``errors``,
    log(measured / predicted), (n,). Records weigh the same, or with ``group``, the group of each, int (n,), the groups do."""
    weights = np.exp(-errors)
    if group is not None:
        weights = weights / np.bincount(group)[group]
    order = np.argsort(errors)
    total = np.cumsum(weights[order])
    return float(errors[order][np.searchsorted(total, total[-1] / 2)])


def _or_unknown(values: ArrayLike | None, n: int) -> NDArray[np.float64]:
    return np.full(n, np.nan) if values is None else np.asarray(values, dtype=np.float64)


def _rank_metrics(
    labels: NDArray[np.float64], predictions: NDArray[np.float64], noise: NDArray[np.float64], keys: list[Any]
) -> Metrics:
    rows: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    right = pairs = 0.0
    correlations: list[float] = []
    regrets: dict[int, list[float]] = {1: [], 5: []}
    of_many: list[float] = []
    for index in rows.values():
        if len(index) < 2:
            continue
        label, predicted = labels[index], predictions[index]
        group_right, group_pairs = ordered_pairs(label, predicted, noise[index])
        right, pairs = right + group_right, pairs + group_pairs
        if len(index) >= 3 and np.ptp(label) > 0:
            correlations.append(_spearman(label, predicted))
        order = np.argsort(predicted, kind="stable")
        for k, values in regrets.items():
            if len(index) > k:
                values.append(float(label[order[:k]].min() / label.min() - 1))
        if len(index) >= _MANY:
            of_many.append(regrets[1][-1])
    return {
        "pairwise_accuracy": right / pairs if pairs else None,
        "spearman": float(np.mean(correlations)) if correlations else None,
        "top1_regret": float(np.mean(regrets[1])) if regrets[1] else None,
        "top1_regret_median": float(np.median(regrets[1])) if regrets[1] else None,
        "top1_regret_of_32": float(np.median(of_many)) if of_many else None,
        "top5_regret": float(np.mean(regrets[5])) if regrets[5] else None,
    }


def ordered_pairs(
    label: NDArray[np.float64], predicted: NDArray[np.float64], noise: NDArray[np.float64], block: int = 512
) -> tuple[float, float]:
    """Numbers of correctly ordered pairs and of counted pairs (not ties); blocks bound the memory of large groups."""
    right = counted = 0.0
    for begin in range(0, len(label), block):
        rows = slice(begin, begin + block)
        a, b = label[rows, None], label[None, :]
        tolerance = np.maximum(noise[rows, None], noise[None, :]) * np.minimum(a, b)
        # count each pair once: the program with the smaller label comes first
        before = b - a > tolerance
        p, q = predicted[rows, None], predicted[None, :]
        right += float((before & (p < q)).sum()) + 0.5 * float((before & (p == q)).sum())
        counted += float(before.sum())
    return right, counted


def _spearman(label: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    from scipy.stats import rankdata

    a, b = rankdata(label), rankdata(predicted)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else 0.0
