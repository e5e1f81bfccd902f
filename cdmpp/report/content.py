"""What a report says: a run folder, its predictor and the records it is scored on, in numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError, SplitError
from cdmpp.predictor.metrics import evaluate_groups

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.dataset import DatasetView, Split
    from cdmpp.predictor import Predictor, TrainingData

#: Nominal coverages that intervals are checked at.
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)

#: Tasks listed as the worst.
WORST_TASKS = 20

COMPARISON_FILE = "comparison.json"
CONFIG_FILE = "config.yaml"
SPLIT_FILE = "split.json"

#: A scored group: its name, ``bias`` and the metrics of :mod:`cdmpp.predictor.metrics`.
Row = dict[str, Any]


@dataclass(frozen=True)
class RunReport:
    """The numbers of a report.

    Attributes
    ----------
    name
        Of the run folder.
    config
        The configuration as YAML.
    training
        What the predictor says it was trained on (:attr:`cdmpp.predictor.Predictor.training`).
    held_out
        Networks or devices that the split holds out.
    scores
        What ``cdmpp evaluate --json`` writes for the same records, by device, network, family and task.
    records
        One row a scored record: ``task, device, latency_s, predicted_s, family`` (of several: ``several``;
        of none: ``unknown``).
    groups
        ``device``, ``network``, ``family`` (worst MAPE first) and ``latency`` (decades, ascending): their rows.
        ``bias`` is the median of predicted / measured, minus one.
    worst_tasks
        The tasks of the largest MAPE, each with its ``label`` and ``networks`` besides.
    ranking
        Metrics of every task on every device that has at least two programs.
    coverage
        :func:`cdmpp.predictor.uncertainty.interval_metrics` at the :data:`COVERAGES` that the calibration
        supports; empty without one.
    history
        One line an epoch; empty where the run has none.
    comparison
        Model -> result of :func:`cdmpp.predictor.baselines.evaluate_models`, from ``comparison.json``; empty
        without that file.
    data
        Dataset folders and the machines their records were taken on, as text.
    notes
        What a reader has to know before believing the numbers.
    """

    name: str
    config: str
    training: Mapping[str, Any]
    held_out: tuple[str, ...]
    scores: Mapping[str, Any]
    records: pd.DataFrame
    groups: Mapping[str, list[Row]]
    worst_tasks: list[Row]
    ranking: list[Row]
    coverage: list[dict[str, Any]]
    history: list[dict[str, Any]]
    comparison: Mapping[str, Any]
    data: tuple[str, ...]
    notes: tuple[str, ...]


def collect_report(
    run: str | Path,
    data: TrainingData | str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
) -> RunReport:
    """Score the predictor of a run folder and collect what a report of it says.

    Parameters
    ----------
    run
        What ``cdmpp train`` wrote.
    data
        Records to score, or their dataset folders; None takes those of the run's configuration.
    split
        A specification as ``cdmpp evaluate`` takes it. None takes the run's own split where the records are
        those of the run, else the split of training made anew on these records.

    Raises
    ------
    PredictorError
        No run folder, no finished predictor in it, no data, or a file in it that is damaged.
    DatasetError, SplitError
        As :func:`cdmpp.predictor.evaluate` and :func:`cdmpp.predictor.gather` raise them.
    """
    from cdmpp.predictor import Predictor, TrainingData, gather, load_config
    from cdmpp.predictor.scoring import evaluate_rows, predict_rows, rows_to_score
    from cdmpp.predictor.uncertainty import interval_metrics

    run = Path(run)
    if not run.is_dir():
        raise PredictorError(f"{run}: no such run folder (cdmpp train writes one)")
    config = load_config(run / CONFIG_FILE)
    predictor = Predictor.load(run)
    if not isinstance(data, TrainingData):
        if data is None and not config.data.paths:
            raise PredictorError(f"{run / CONFIG_FILE} names no datasets: say where they are with --data")
        data = gather(config.data.paths if data is None else data, config.data)
    notes: list[str] = []
    own = _own_split(run, data, notes) if split is None else None
    name, rows = rows_to_score(predictor, data, own or split)
    predicted_s = predict_rows(predictor, data, rows)
    scores = evaluate_rows(predictor, data, rows, predicted_s, ("device", "network", "family", "task"), name)
    records = _records(data, rows, predicted_s)
    groups, ranking = _groups(data, rows, records, scores)
    tasks = sorted(_rows(scores["groups"]["task"], _bias(records, data.members("task", rows))), key=_mape)
    worst = [_named(row, data) for row in tasks[::-1][:WORST_TASKS]]
    coverage = [
        interval_metrics(
            predictor.calibration,
            records["latency_s"],
            predicted_s,
            records["task"].tolist(),
            records["device"].tolist(),
            nominal,
        )
        for nominal in COVERAGES
    ]
    notes += _notes(predictor, scores)
    return RunReport(
        name=str(run),
        config=(run / CONFIG_FILE).read_text(encoding="utf-8"),
        training=predictor.training,
        held_out=own.held_out if own is not None else (),
        scores=scores,
        records=records,
        groups=groups,
        worst_tasks=worst,
        ranking=ranking,
        coverage=[entry for entry in coverage if entry is not None],
        history=_history(run),
        comparison=_comparison(run),
        data=_sources(data.view),
        notes=tuple(notes),
    )


def latency_decade(latency_s: float) -> str:
    """The decade of a latency as text, such as ``10 us to 100 us``."""
    exponent = math.floor(math.log10(latency_s) + 1e-12)
    return f"{seconds_text(10.0**exponent)} to {seconds_text(10.0 ** (exponent + 1))}"


def seconds_text(value_s: float) -> str:
    """Seconds with three digits and a unit: ``1.25 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value_s >= scale * (1 - 1e-9):
            return f"{value_s / scale:.3g} {unit}"
    return f"{value_s / 1e-9:.3g} ns"


def _own_split(run: Path, data: TrainingData, notes: list[str]) -> Split | None:
    """The run's split where it is one of these records."""
    from cdmpp.dataset import Split

    try:
        text = (run / SPLIT_FILE).read_text(encoding="utf-8")
    except OSError as err:
        raise PredictorError(f"{run}: no run folder, it has no {SPLIT_FILE}") from err
    split = Split.from_json(text)
    try:
        split.check_table(data.labels)
    except SplitError:
        notes.append("The records are not those of the run: its split was made anew on them.")
        return None
    return split


def _notes(predictor: Predictor, scores: Mapping[str, Any]) -> list[str]:
    notes = []
    seen, n = scores["n_trained_tasks"], scores["overall"]["n"]
    if seen:
        notes.append(f"{seen} of {n} scored records are of tasks that the predictor was trained on.")
    if predictor.calibration is None:
        notes.append("The predictor was not calibrated: it has no intervals.")
    elif scores["overall"]["interval"] is None:
        units = f"{predictor.calibration.pooled.units} {predictor.calibration.unit}s"
        notes.append(f"The predictor was calibrated on {units}, too few for intervals of 90 %.")
    if scores["overall"]["noise_floor_mape"] is None:
        notes.append("Nothing is known of the labels' noise: there is no noise floor to compare with.")
    return notes


def _records(data: TrainingData, rows: NDArray[np.int64], predicted_s: NDArray[np.float64]) -> pd.DataFrame:
    table = data.labels.iloc[rows][["task", "device", "latency_s", "noise", "error_floor"]]
    families = [
        "unknown" if not names else names[0] if len(names) == 1 else "several"
        for names in data.members("family", rows)
    ]
    return table.reset_index(drop=True).assign(predicted_s=predicted_s, family=families)


def _groups(
    data: TrainingData, rows: NDArray[np.int64], records: pd.DataFrame, scores: Mapping[str, Any]
) -> tuple[dict[str, list[Row]], list[Row]]:
    """Rows of every grouping, and those of every task on every device."""
    decades = [(latency_decade(latency_s),) for latency_s in records["latency_s"]]
    pairs = [
        (f"{task} on {device}",) for task, device in zip(records["task"], records["device"], strict=True)
    ]
    extra = evaluate_groups(
        records["latency_s"],
        records["predicted_s"],
        records["task"].tolist(),
        records["device"].tolist(),
        records["noise"],
        records["error_floor"],
        {"latency": decades, "pair": pairs},
    )
    groups = {
        grouping: sorted(
            _rows(scores["groups"][grouping], _bias(records, data.members(grouping, rows))),
            key=_mape,
            reverse=True,
        )
        for grouping in ("device", "network", "family")
    }
    ascending = [names[0] for _, names in sorted(zip(records["latency_s"], decades, strict=True))]
    by_decade = {row["name"]: row for row in _rows(extra["latency"], _bias(records, decades))}
    groups["latency"] = [by_decade[name] for name in dict.fromkeys(ascending)]
    ranked = [row for row in _rows(extra["pair"], _bias(records, pairs)) if row["top1_regret"] is not None]
    return groups, ranked


def _bias(records: pd.DataFrame, members: Sequence[Iterable[str]]) -> dict[str, float]:
    """Group -> median of predicted / measured, minus one."""
    ratios: dict[str, list[float]] = {}
    for ratio, names in zip(records["predicted_s"] / records["latency_s"], members, strict=True):
        for name in names:
            ratios.setdefault(name, []).append(float(ratio))
    return {name: float(np.median(values)) - 1 for name, values in ratios.items()}


def _rows(groups: Mapping[str, Mapping[str, Any]], bias: Mapping[str, float]) -> list[Row]:
    return [{"name": name, "bias": bias[name], **metrics} for name, metrics in groups.items()]


def _mape(row: Row) -> float:
    return float(row["mape"])


def _named(row: Row, data: TrainingData) -> Row:
    task = data.view.tasks.get(row["name"]) if data.view is not None else None
    label = row["name"] if task is None else task.name
    return {**row, "label": label, "networks": ", ".join(data.networks.get(row["name"], ()))}


def _history(run: Path) -> list[dict[str, Any]]:
    path = run / "history.jsonl"
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return [line for line in lines if {"epoch", "train_loss", "valid_mape", "elapsed_s"} <= set(line)]
    except (ValueError, TypeError) as err:
        raise PredictorError(f"{path}: expected one JSON object a line: {err}") from err


def _comparison(run: Path) -> dict[str, Any]:
    path = run / COMPARISON_FILE
    if not path.exists():
        return {}
    try:
        models = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): {"overall": dict(result["overall"])} for name, result in models.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise PredictorError(f"{path}: expected what evaluate_models gives, by model: {err!r}") from err


def _sources(view: DatasetView | None) -> tuple[str, ...]:
    lines = []
    for part in view.parts if view is not None else ():
        machines = {
            f"{session['machine'].get('model', 'unknown model')}, {session['machine'].get('cores', '?')} cores"
            for session in part.meta.get("sessions", ())
            if isinstance(session.get("machine"), dict)
        }
        where = f" (measured on {'; '.join(sorted(machines))})" if machines else ""
        lines.append(f"{part.path}: {len(part.records)} records{where}")
    return tuple(lines)
