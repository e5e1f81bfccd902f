"""A training run as one HTML file: figures embedded, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import PredictorError
from cdmpp.report.content import RunReport, collect_report, seconds_text
from cdmpp.report.figures import coverage_figure, history_figure, ranking_figure, scatter_figure

if TYPE_CHECKING:
    from cdmpp.predictor import TrainingData

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: white; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
.cards { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1rem 0; }
.card { border: 1px solid #999; border-radius: 4px; padding: 0.4rem 0.8rem; }
.card b { display: block; font-size: 1.3rem; } .card span { color: #555; font-size: 0.85rem; }
.note { border-left: 4px solid #d55e00; padding: 0.3rem 0.8rem; margin: 0.4rem 0; background: #fff6ef; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; }
th, td { padding: 0.18rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { border-bottom: 1px solid #555; }
.text { text-align: left; white-space: normal; overflow-wrap: break-word; min-width: 9rem; }
td.text:first-child { min-width: 14rem; max-width: 24rem; }
img { max-width: 100%; height: auto; } pre { background: #f5f5f5; padding: 0.6rem; overflow-x: auto; }
p.about { color: #444; max-width: 55rem; margin: 0.3rem 0 0.6rem; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } h2 { break-after: avoid; }
  img, tr { break-inside: avoid; } th, td { white-space: normal; } }
"""

#: Key, heading and format of a column of numbers.
_Column = tuple[str, str, Callable[[Any], str]]


def write_report(
    run: str | Path,
    out: str | Path,
    data: TrainingData | str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
) -> RunReport:
    """Score a run's predictor and write what there is to say about it as one HTML file.

    Parameters
    ----------
    run, data, split
        As :func:`cdmpp.report.content.collect_report` takes them.
    out
        The file; its folder is made if missing.

    Returns
    -------
    The numbers in the file.

    Raises
    ------
    PredictorError
        As ``collect_report`` does; matplotlib is not installed; the file cannot be written.
    DatasetError, SplitError
        As ``collect_report`` does.
    """
    report = collect_report(run, data, split)
    text = report_html(report)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as err:
        raise PredictorError(f"cannot write {out}: {err.strerror or err}") from err
    return report


def report_html(report: RunReport) -> str:
    """The page."""
    title = f"cdmpp report: {report.name}"
    sections = [
        _head(report, title),
        _about(report),
        _comparison(report),
        _scatter(report),
        _errors(report),
        _ranking(report),
        _intervals(report),
        _history(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


# -- sections --------------------------------------------------------------------------------------------------


def _head(report: RunReport, title: str) -> str:
    overall = report.scores["overall"]
    interval = overall["interval"]
    cards = [
        ("MAPE", _percent(overall["mape"])),
        ("noise floor of the labels", _percent(overall["noise_floor_mape"])),
        ("median error", _percent(overall["median_ape"])),
        ("within 20 %", _percent(overall["within_20pct"])),
        ("pairwise accuracy within a task", _percent(overall["pairwise_accuracy"])),
        ("top-1 regret, mean over the tasks", _percent(overall["top1_regret"])),
        ("the same, median of tasks of 32 programs or more", _percent(overall["top1_regret_of_32"])),
    ]
    if interval is not None:
        cards.append(
            (f"covered by {100 * interval['coverage']:g} % intervals", _percent(interval["covered"]))
        )
    shown = "".join(
        f'<div class="card"><b>{value}</b><span>{escape(name)}</span></div>' for name, value in cards
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    tasks, devices = report.records["task"].nunique(), report.records["device"].nunique()
    text = (
        f"Scored on {overall['n']} records of {tasks} tasks on {devices} device{'s' if devices > 1 else ''}."
    )
    return f'<h1>{escape(title)}</h1>\n<p>{text}</p>\n<div class="cards">{shown}</div>\n{notes}'


def _about(report: RunReport) -> str:
    training = report.training
    records = training.get("records_by_device", {})
    rows = [
        ("split scored", report.scores["split"]),
        ("split of training", training.get("split")),
        ("held out", ", ".join(report.held_out)),
        ("seed", training.get("seed")),
        ("trained on", f"{training.get('records')} records, {training.get('programs')} programs"),
        ("records by device", ", ".join(f"{name}: {n}" for name, n in records.items())),
        ("networks of training", ", ".join(training.get("networks", ()))),
        ("epochs", f"{training.get('epochs')}, the best was {training.get('best_epoch')}"),
        ("validation MAPE", _percent(training.get("valid_mape"))),
        ("noise floor of the training labels", _percent(training.get("noise_floor_mape"))),
        ("data scored", "; ".join(report.data)),
    ]
    body = "".join(
        f'<tr><th class="text">{escape(name)}</th><td class="text">{escape(str(value))}</td></tr>'
        for name, value in rows
        if value not in (None, "")
    )
    config = f"<details><summary>Configuration</summary><pre>{escape(report.config)}</pre></details>"
    return f'<h2>The run</h2>\n<div class="scroll"><table>{body}</table></div>\n{config}'


def _comparison(report: RunReport) -> str:
    models = {name: result["overall"] for name, result in report.comparison.items()}
    if not models:
        return (
            "<h2>Beside other models</h2>\n"
            + _table("model", [("this predictor", report.scores["overall"])], _METRICS)
            + '<p class="about">The run folder holds no comparison.json (what evaluate_models gives), so there are '
            "no other models here.</p>"
        )
    ordered = sorted(models.items(), key=lambda item: item[1].get("mape") or 0.0)
    rows = [("this predictor, scored for this report", report.scores["overall"]), *ordered]
    about = '<p class="about">From comparison.json: all models on the records and the split named there, best first.</p>'
    return "<h2>Beside other models</h2>\n" + about + _table("model", rows, _METRICS)


def _scatter(report: RunReport) -> str:
    image = scatter_figure(report.records, report.scores["overall"]["noise_floor_mape"])
    return "<h2>Predicted against measured</h2>\n" + _image(
        image, "Scatter plots of predicted against measured latency, and of their ratio, coloured by family"
    )


def _errors(report: RunReport) -> str:
    parts = [
        "<h2>Where it is wrong</h2>",
        '<p class="about">Worst first. Bias is the median of predicted / measured, minus one: below zero, programs are '
        "slower than predicted. A task of several networks counts in each of them.</p>",
    ]
    for grouping in ("device", "network", "family"):
        rows = [(row["name"], row) for row in report.groups[grouping]]
        parts.append(f"<h3>By {grouping}</h3>" + _table(grouping, rows, _WITH_BIAS))
    decades = [(row["name"], row) for row in report.groups["latency"]]
    parts.append("<h3>By measured latency</h3>" + _table("latency", decades, _WITH_BIAS))
    worst = [
        (f"{row['label']} ({row['name']})" if row["label"] != row["name"] else row["name"], row)
        for row in report.worst_tasks
    ]
    parts.append(
        f"<h3>The {len(worst)} worst tasks</h3>"
        + _table("task", worst, [*_WITH_BIAS, ("networks", "networks", str)])
    )
    return "\n".join(parts)


def _ranking(report: RunReport) -> str:
    if not report.ranking:
        return "<h2>Ranking within tasks</h2>\n<p>No task has two scored programs on a device.</p>"
    return (
        "<h2>Ranking within tasks</h2>\n"
        f'<p class="about">{len(report.ranking)} tasks (on each device) with at least two programs.</p>'
        + _image(
            ranking_figure(report.ranking), "Histograms of top-1 regret and pairwise accuracy over the tasks"
        )
    )


def _intervals(report: RunReport) -> str:
    if not report.coverage:
        return "<h2>Intervals</h2>\n<p>There are none: see the notes at the top.</p>"
    columns: list[_Column] = [
        ("covered", "of the records", _percent),
        ("covered_by_task", "every task the same", _percent),
        ("width", "high / low, median", lambda value: f"{value:.3g}"),
    ]
    rows = [(f"{100 * entry['coverage']:g} %", entry) for entry in report.coverage]
    pooled = report.coverage[0]["pooled_devices"]
    about = "Calibrated on the validation part (split conformal). What is promised is for tasks drawn as those were. "
    if pooled:
        about += f"Intervals of all devices pooled were taken for {', '.join(pooled)}."
    return (
        f'<h2>Intervals</h2>\n<p class="about">{escape(about)}</p>'
        + _image(
            coverage_figure(report.coverage),
            "Coverage reached against coverage asked for, and interval width",
        )
        + _table("asked for", rows, columns)
    )


def _history(report: RunReport) -> str:
    if not report.history:
        return "<h2>Training</h2>\n<p>The run folder holds no history.</p>"
    image = history_figure(report.history, report.training.get("noise_floor_mape"))
    return "<h2>Training</h2>\n" + _image(
        image, "Training loss and validation MAPE against epoch and wall time"
    )


# -- pieces ----------------------------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


_METRICS: list[_Column] = [
    ("mape", "MAPE", _percent),
    ("median_ape", "median", _percent),
    ("within_10pct", "within 10 %", _percent),
    ("within_20pct", "within 20 %", _percent),
    ("rmse_s", "RMSE", _seconds),
    ("pairwise_accuracy", "pairwise", _percent),
    ("spearman", "Spearman", _plain),
    ("top1_regret", "top-1 regret", _percent),
    ("top5_regret", "top-5 regret", _percent),
    ("noise_floor_mape", "noise floor", _percent),
    ("n", "n", str),
]

_WITH_BIAS: list[_Column] = [
    ("mape", "MAPE", _percent),
    ("bias", "bias", _signed),
    *(column for column in _METRICS if column[0] not in ("mape", "rmse_s", "within_10pct")),
]


_TEXT = ' class="text"'


def _table(first: str, rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Sequence[_Column]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for _, heading, _ in columns)
    body = "".join(
        f'<tr><td class="text">{escape(name)}</td>'
        + "".join(
            f"<td{_TEXT if isinstance(row.get(key), str) else ''}>{escape(form(row.get(key)))}</td>"
            for key, _, form in columns
        )
        + "</tr>"
        for name, row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th class="text">{escape(first)}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'
