"""Many models on the same records and the same split, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.dataset.split import ordered
from cdmpp.predictor.baselines.base import LatencyModel
from cdmpp.predictor.evaluation import score

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData

#: Part of the training programs to stop by where a split has no validation part.
STOP_FRACTION = 0.1


def evaluate_models(
    models: Sequence[LatencyModel],
    data: TrainingData,
    split: Split,
    by: Sequence[str] = (),
    fit: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Fit every model to the training part and score it on the test part.

    Of a split without a validation part (as of few-shot training, whose predictor makes its own) a tenth of the training
    programs is taken to stop by.

    Parameters
    ----------
    models
        Models with different names.
    by
        Groupings to score besides the whole, see :meth:`TrainingData.members`.
    fit
        Whether to fit them first; off for fitted models.
    progress
        Called with a model's name when its turn comes.

    Returns
    -------
    Model name -> ``{"overall": ..., "groups": ..., "fit_s": float, "predict_s": float}``; the noise floor of
    the labels is ``noise_floor_mape`` of each, the same for all.
    """
    rows = np.asarray(split.test, dtype=np.int64)
    if fit and not len(split.valid):
        split = _with_validation(data, split)
    results: dict[str, dict[str, Any]] = {}
    for model in models:
        if progress is not None:
            progress(model.name)
        started = time.perf_counter()
        if fit:
            model.fit(data, split)
        fitted = time.perf_counter()
        predicted_s = model.predict(data, rows)
        done = time.perf_counter()
        timing = {"fit_s": round(fitted - started, 3), "predict_s": round(done - fitted, 3)}
        results[model.name] = {**score(data, rows, predicted_s, by), **timing}
    return results


def _with_validation(data: TrainingData, split: Split) -> Split:
    train = np.asarray(split.train, dtype=np.int64)
    programs = data.labels["program"].iloc[train]
    names = ordered(set(programs), split.seed, "stop")
    held = programs.isin(names[: max(1, round(STOP_FRACTION * len(names)))]).to_numpy()
    return replace(split, train=train[~held], valid=train[held])


def comparison_table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a plain-text table, the noise floor in its last row."""
    columns = ("mape", "median_ape", "within_20pct", "pairwise_accuracy", "spearman", "top1_regret", "n")
    lines = [f"{'model':<18}" + "".join(f"{name:>19}" for name in columns)]
    for name, result in results.items():
        cells = [_cell(result["overall"][column]) for column in columns]
        lines.append(f"{name:<18}" + "".join(f"{cell:>19}" for cell in cells))
    floor = next(iter(results.values()))["overall"]["noise_floor_mape"] if results else None
    lines.append(f"{'noise floor':<18}{_cell(floor):>19}")
    return "\n".join(lines)


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
