"""The numbers in a report on a run folder, its predictor and the records it is scored on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, Split
from cdmpp.dataset.split import architecture
from cdmpp.errors import PredictorError, SplitError, raised_as
from cdmpp.files import seconds_text
from cdmpp.predictor import Config, Predictor, TrainingData, gather, load_config
from cdmpp.predictor.evaluation import evaluate_rows, rows_to_score
from cdmpp.predictor.evidence import NO_EVIDENCE
from cdmpp.predictor.finetuning import TASK_FILE
from cdmpp.predictor.metrics import evaluate_groups
from cdmpp.predictor.uncertainty import interval_metrics

if TYPE_CHECKING:
    import pandas as pd

#: Nominal coverages at which intervals are checked.
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)

#: Number of tasks that are listed as the worst.
WORST_TASKS = 50

CONFIG_FILE = "config.yaml"
SPLIT_FILE = "split.json"

#: A scored group: ``name``, ``bias`` (median of predicted / measured, minus one) and the metrics of
#: :mod:`cdmpp.predictor.metrics`.
Row = dict[str, Any]


@dataclass(frozen=True)
class RunReport:
    """The numbers in a report on the run folder ``name``."""

    name: str
    #: The configuration as YAML.
    config: str
    #: What the predictor was trained on (:attr:`cdmpp.predictor.Predictor.training`).
    training: Mapping[str, Any]
    #: The output of ``cdmpp evaluate --json`` for the same records, by device, network, family and task.
    scores: Mapping[str, Any]
    #: One row per scored record: ``task, device, latency_s, predicted_s, family`` (``several`` if there is more than one,
    #: ``unknown`` if there is none), ``noise, error_floor``.
    records: pd.DataFrame
    #: Rows by ``device``, ``network``, ``family`` and ``task``, the largest MAPE first, and by ``latency``, ascending
    #: decades. A network's row covers all its sizes and batches; if it has several, ``sizes`` holds their rows. Only the
    #: :data:`WORST_TASKS` worst tasks are in, each with its ``label`` and ``networks``.
    groups: Mapping[str, list[Row]]
    #: A row for every pair of a task and a device with at least two programs.
    ranking: list[Row]
    #: :func:`cdmpp.predictor.uncertainty.interval_metrics` at the :data:`COVERAGES` that the calibration supports.
    coverage: list[dict[str, Any]]
    #: One entry per epoch.
    history: list[dict[str, Any]]
    #: Dataset folders and the machines their records were taken on.
    data: tuple[str, ...]
    #: Caveats about the numbers.
    notes: tuple[str, ...]


def collect_report(
    run: str | Path,
    data: TrainingData | str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunReport:
    """Score the predictor of a run folder and collect the numbers for its report.

    `data` is records or their dataset folders; without it the run's configuration names them. `split` is as in
    ``cdmpp evaluate``; without it the run's own split applies if the records are those of the run, else the kind of split used
    in training is made anew on these records. Raises PredictorError if there is no run folder, no finished predictor in it, no
    data, or a damaged file; other errors as :func:`cdmpp.predictor.evaluate` and :func:`cdmpp.predictor.gather`."""
    run = Path(run)
    if not run.is_dir():
        raise PredictorError(f"{run}: no such run folder (cdmpp train writes one)")
    finetuned = (run / TASK_FILE).exists()
    config = Config() if finetuned else load_config(run / CONFIG_FILE)
    predictor = Predictor.load(run)
    if not isinstance(data, TrainingData):
        if data is None and not config.data.paths:
            raise PredictorError(f"{run} names no datasets: say where they are with --data")
        data = gather(config.data.paths if data is None else data, config.data, progress=progress)
    notes: list[str] = []
    own = _own_split(run, data, notes) if split is None else None
    name, rows = rows_to_score(predictor, data, own or split)
    predicted_s = predictor.predict_rows(data, rows)
    scores = evaluate_rows(predictor, data, rows, predicted_s, ("device", "network", "family", "task"), name)
    records = _records(data, rows, predicted_s)
    groups, ranking = _groups(data, rows, records, scores)
    labels = (records["latency_s"], predicted_s, records["task"].tolist(), records["device"].tolist())
    difficulty = predictor.difficulty(predictor.pairs_of_rows(data, rows))
    of_device = partial(predictor.calibration_of, NO_EVIDENCE)
    coverage = [interval_metrics(of_device, *labels, nominal, difficulty) for nominal in COVERAGES]
    return RunReport(
        name=str(run),
        config="" if finetuned else (run / CONFIG_FILE).read_text(encoding="utf-8"),
        training=predictor.training,
        scores=scores,
        records=records,
        groups=groups,
        ranking=ranking,
        coverage=[entry for entry in coverage if entry is not None],
        history=_history(run),
        data=_sources(data.view),
        notes=(*notes, *_notes(predictor, scores)),
    )


def latency_decade(latency_s: float) -> str:
    """The decade of a latency as text, such as ``10 us to 100 us``."""
    exponent = math.floor(math.log10(latency_s) + 1e-12)
    return f"{seconds_text(10.0**exponent)} to {seconds_text(10.0 ** (exponent + 1))}"


def _own_split(run: Path, data: TrainingData, notes: list[str]) -> Split | None:
    """The run's split; None, with a note added, if it was made on other records."""
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
    members = data.members("family", rows)
    families = ["unknown" if not names else names[0] if len(names) == 1 else "several" for names in members]
    return table.reset_index(drop=True).assign(predicted_s=predicted_s, family=families)


def _groups(
    data: TrainingData, rows: NDArray[np.int64], records: pd.DataFrame, scores: Mapping[str, Any]
) -> tuple[dict[str, list[Row]], list[Row]]:
    """The ``groups`` and ``ranking`` of a :class:`RunReport`."""
    label_s, predicted_s = records["latency_s"], records["predicted_s"]
    tasks, devices = records["task"].tolist(), records["device"].tolist()
    members = {grouping: data.members(grouping, rows) for grouping in scores["groups"]}
    further: dict[str, list[tuple[str, ...]]] = {
        "architecture": [tuple({architecture(name) for name in names}) for names in members["network"]],
        "latency": [(latency_decade(value_s),) for value_s in label_s],
        "pair": [(f"{task} on {device}",) for task, device in zip(tasks, devices, strict=True)],
    }
    noise, floor = records["noise"], records["error_floor"]
    metrics = {**scores["groups"], **evaluate_groups((label_s, predicted_s, tasks, devices, noise, floor), further)}
    found = {
        grouping: _worst(metrics[grouping], predicted_s / label_s, names) for grouping, names in {**members, **further}.items()
    }
    sizes: dict[str, list[Row]] = {}
    for row in found["network"]:
        sizes.setdefault(architecture(row["name"]), []).append(row)
    networks = [(row, sizes[row["name"]]) for row in found["architecture"]]
    decades = {decade: value_s for value_s, (decade,) in zip(label_s, further["latency"], strict=True)}
    return {
        "device": found["device"],
        "network": [{**row, "sizes": own} if len(own) > 1 else own[0] for row, own in networks],
        "family": found["family"],
        "latency": sorted(found["latency"], key=lambda row: decades[row["name"]]),
        "task": [_named(row, data) for row in found["task"][:WORST_TASKS]],
    }, [row for row in found["pair"] if row["top1_regret"] is not None]


def _worst(groups: Mapping[str, Mapping[str, Any]], ratio: pd.Series, members: Sequence[tuple[str, ...]]) -> list[Row]:
    """Rows of groups, the largest MAPE first; ``ratio`` is predicted / measured by record, ``members`` the record's groups."""
    of_group = ratio.repeat([len(names) for names in members])
    bias = of_group.groupby([name for names in members for name in names]).median() - 1
    rows = [{"name": name, "bias": float(bias[name]), **metrics} for name, metrics in groups.items()]
    return sorted(rows, key=lambda row: float(row["mape"]), reverse=True)


def _named(row: Row, data: TrainingData) -> Row:
    task = data.view.tasks.get(row["name"]) if data.view is not None else None
    label = row["name"] if task is None else task.name
    return {**row, "label": label, "networks": data.networks.get(row["name"], ())}


def _history(run: Path) -> list[dict[str, Any]]:
    path = run / "history.jsonl"
    if not path.exists():
        return []
    with raised_as(PredictorError, f"{path}: expected one JSON object a line", TypeError):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return [line for line in lines if {"epoch", "train_loss", "valid_mape", "elapsed_s"} <= set(line)]


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
