"""Scoring a predictor on records, overall and by group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.dataset import Split
from cdmpp.dataset.split import PARTS
from cdmpp.dataset.view import unite_devices
from cdmpp.errors import PredictorError, SplitError
from cdmpp.predictor.data import TrainingData, split_data, warn_of_missing_counts
from cdmpp.predictor.evidence import NO_EVIDENCE, Evidence, check_one_kind
from cdmpp.predictor.metrics import evaluate_groups, evaluate_predictions
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.uncertainty import interval_metrics

logger = logging.getLogger(__name__)

#: Split specification that scores every record.
ALL_RECORDS = "all"


def evaluate(
    predictor: Predictor,
    data: TrainingData,
    split: Split | str | None = None,
    by: Sequence[str] = ("device", "network"),
    part: str = "test",
    compiled: bool = False,
    measured: bool = False,
) -> dict[str, Any]:
    """Score a predictor; the result is the content of ``cdmpp evaluate --json``.

    ``split`` is a split of ``data``, a specification, ``"all"`` for every record, or None for the split of training. A
    specification that only names the kind of that split (``"by_network"``) also means it, as another would test on training
    records. ``part`` is the part to score: train, valid or test. ``by`` are groupings: device, network, task, family, origin.
    ``compiled`` uses the instruction counts of programs that have them (``cdmpp codegen``), ``measured`` the latencies of the
    same programs on other devices of the data, scored records included; other programs get no evidence. Not both.

    Returns ``{"overall": {...}, "groups": {grouping: {group: {...}}}, "split", "part", "seed", "n_trained_tasks", "n_compiled",
    "n_measured"}`` with the metrics of :mod:`cdmpp.predictor.metrics`. The last three count scored records. ``interval`` in
    ``overall`` says how well 90 % intervals hold (:func:`cdmpp.predictor.uncertainty.interval_metrics`) with such evidence.

    PredictorError: no records to score, an unknown part or grouping, or no such evidence. SplitError: the split cannot be made
    of this data. DatasetError: a device of the data is not the one that had its name in training."""
    check_one_kind(compiled, measured)
    name, rows = rows_to_score(predictor, data, split, part)
    if compiled:
        predictor.check_takes_code()
        _check_counts(data, rows)
    if measured:
        predictor.check_scales()
    evidence = Evidence.of_rows(data, rows, compiled=compiled, measured=measured)
    if measured and not evidence.known(len(rows)).any():
        raise PredictorError("no scored program was measured on another device of the same kind")
    predicted_s = predictor.predict_rows(data, rows, evidence)
    return evaluate_rows(predictor, data, rows, predicted_s, by, name, part, evidence)


def evaluate_rows(
    predictor: Predictor,
    data: TrainingData,
    rows: NDArray[np.int64],
    predicted_s: NDArray[np.float64],
    by: Sequence[str],
    name: str,
    part: str = "test",
    evidence: Evidence = NO_EVIDENCE,
) -> dict[str, Any]:
    """The result of :func:`evaluate` for given predictions in seconds (n,) of these rows (n,) of split ``name``."""
    trained = set(predictor.training.get("tasks", ()))
    seen = int(data.labels["task"].iloc[rows].isin(list(trained)).sum())
    if seen and part == "test" and not name.startswith("within_task"):
        logger.warning("%d of %d scored records are of tasks the predictor was trained on", seen, len(rows))
    scores = score(data, rows, predicted_s, by)
    known = evidence.known(len(rows))
    counted = {"n_compiled": evidence.code, "n_measured": evidence.elsewhere}
    table = data.labels.iloc[rows[known]]
    scores["overall"]["interval"] = interval_metrics(
        partial(predictor.calibration_of, evidence),
        table["latency_s"].to_numpy(dtype=np.float64),
        predicted_s[known],
        table["task"].tolist(),
        table["device"].tolist(),
        difficulty=predictor.difficulty(predictor.pairs_of_rows(data, rows, evidence))[known],
    )
    for key, used in counted.items():
        if used is None:
            continue
        for grouping, groups in scores["groups"].items():
            members = data.members(grouping, rows[known])
            for group, found in groups.items():
                found[key] = sum(group in names for names in members)
    return {
        **scores,
        "split": name,
        "part": part,
        "seed": predictor.training.get("seed"),
        "n_trained_tasks": seen,
        **{key: 0 if used is None else int(known.sum()) for key, used in counted.items()},
    }


def _check_counts(data: TrainingData, rows: NDArray[np.int64]) -> None:
    """Raise PredictorError if a CPU has no record with instruction counts; warn, with numbers, if some records have none."""
    coverage = data.count_coverage(rows)
    none = [name for name, (counted, _) in coverage.items() if not counted]
    if none or not coverage:
        raise PredictorError(
            f"no scored program of {' and of '.join(none) or 'a CPU'} has instruction counts for its target: "
            "cdmpp codegen DIR makes them"
        )
    warn_of_missing_counts(coverage)


def score(data: TrainingData, rows: NDArray[np.int64], predicted_s: NDArray[np.float64], by: Sequence[str]) -> dict[str, Any]:
    """``{"overall": metrics, "groups": ...}`` of predictions in seconds (n,) for these rows (n,) of the label table."""
    table = data.labels.iloc[rows]
    columns = (
        table["latency_s"].to_numpy(dtype=np.float64),
        predicted_s,
        table["task"].tolist(),
        table["device"].tolist(),
        table["noise"].to_numpy(dtype=np.float64),
        table["error_floor"].to_numpy(dtype=np.float64),
    )
    groups = {grouping: data.members(grouping, rows) for grouping in by}
    return {"overall": evaluate_predictions(*columns), "groups": evaluate_groups(columns, groups)}


def rows_to_score(
    predictor: Predictor, data: TrainingData, split: Split | str | None, part: str = "test"
) -> tuple[str, NDArray[np.int64]]:
    """Name of the split and rows of its part, n >= 1; arguments and errors as in :func:`evaluate`."""
    if part not in PARTS:
        raise PredictorError(f"unknown part '{part}' (known: {', '.join(PARTS)})")
    unite_devices({"the predictor's training": predictor.specs, "the data": data.devices})
    name, rows = ALL_RECORDS, np.arange(len(data))
    if split is None or (isinstance(split, str) and split != ALL_RECORDS):
        name = _specification(predictor, split)
        try:
            rows = getattr(split_data(name, data), part)
        except SplitError as err:
            # The split of training may name networks that this data does not have. If no task of the data was
            # trained on, every record counts as one of an unseen network.
            trained = set(predictor.training.get("tasks", ()))
            if part != "test" or not trained or name == split or set(data.labels["task"]) & trained:
                raise
            logger.warning("every record is scored, no task was trained on (%s)", err)
            name = ALL_RECORDS
    elif not isinstance(split, str):
        name, rows = split.spec, getattr(split, part)
    if not len(rows):
        raise PredictorError(f"no records to score: the {part} part of split {name} is empty")
    return name, rows


def _specification(predictor: Predictor, spec: str | None) -> str:
    """The split specification: that of training if ``spec`` is None or only its kind, else ``spec``."""
    trained = predictor.training.get("split")
    if spec is None and trained is None:
        raise PredictorError("the predictor does not say which split it was trained with: name one")
    if spec is None or (trained is not None and str(trained).split(":", 1)[0] == spec):
        return str(trained)
    return spec
