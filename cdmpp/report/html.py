"""A training run as one HTML file: figures embedded, nothing loaded from elsewhere, nothing wider than the page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cdmpp.errors import PredictorError, reason
from cdmpp.files import seconds_text, write_text
from cdmpp.report.content import Row, RunReport, collect_report
from cdmpp.report.figures import bound_figures, coverage_figures, history_figures, ranking_figures, scatter_figures

if TYPE_CHECKING:
    from cdmpp.endtoend.serving import ServingReport
    from cdmpp.predictor import TrainingData

#: Rows of a table, and names of a list, that are shown; more are folded.
SHOWN = 15

# Folded rows stay rows of their table, so that columns align: they are hidden until the <details> above them is open.
# A browser that does not know :has shows them all.
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: white; max-width: 70rem; margin: 1.5rem auto;
  padding: 0 1rem; }
h1, p, pre, .text { overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
small, .about, .card span { color: #555; } .about { max-width: 55rem; margin: 0.3rem 0 0.6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr)); gap: 0.6rem; margin: 1rem 0; }
.card { border: 1px solid #999; border-radius: 4px; padding: 0.4rem 0.7rem; }
.card b { display: block; font-size: 1.3rem; } .card span { display: block; font-size: 0.85rem; line-height: 1.25; }
.note { border-left: 4px solid #d55e00; padding: 0.3rem 0.8rem; margin: 0.4rem 0; background: #fff6ef; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); gap: 0.5rem; }
img { max-width: 100%; height: auto; } pre, .scroll { overflow-x: auto; } pre { background: #f5f5f5; padding: 0.6rem; }
table { border-collapse: collapse; font-size: 0.88rem; }
th, td { padding: 0.18rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; } thead th { border-bottom: 1px solid #555; }
.text { text-align: left; white-space: normal; min-width: 13.5rem; } td.text small { display: block; }
summary { cursor: pointer; } tr.size .text { padding-left: 1.6rem; }
tbody:not(:has([open])) .size, table:not(:has(.more[open])) .rest { display: none; }
.narrow { display: none; }
@media screen and (max-width: 64rem) { .wide { display: none; } .narrow { display: inline; }
  th, td { padding: 0.18rem 0.3rem; } .text { min-width: 6rem; } }
@media print { body { margin: 0; max-width: none; font-size: 11px; } table { font-size: 9px; } h2 { break-after: avoid; }
  img, tr { break-inside: avoid; } }
"""


class _Column(NamedTuple):
    """A column of a table: the key of its values in a row, and how they are written."""

    key: str
    heading: str
    form: Callable[[Any], str]
    #: Hidden where the page is narrow.
    wide: bool = True


def write_report(
    run: str | Path,
    out: str | Path,
    data: TrainingData | str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunReport:
    """Score a run's predictor, write what there is to say about it as one HTML file and return the numbers in it.

    The arguments and errors are those of :func:`cdmpp.report.content.collect_report`; PredictorError, too, where
    matplotlib is not installed or the file cannot be written (its folder is made if missing).
    """
    report = collect_report(run, data, split, progress)
    _write(out, report_html(report))
    return report


def write_serving(reports: Sequence[ServingReport], out: str | Path) -> None:
    """Write what the operators of a serving step, or of a list, take on each device: a picture, and why (PredictorError:
    matplotlib is not installed, or the file cannot be written)."""
    title = f"cdmpp latency: {reports[0].network}, {reports[0].dtype}"
    about = _about(
        "Bars are coloured by what bounds an operator. Share is of the sum; busy, for which part of an operator's time the "
        "bounding part works; cores, those with work in the last wave of tiles; learned, what networks add as a factor; far, "
        "how far the nearest measured operator is, in standard deviations of the training data."
    )
    sections = [f"<h1>{escape(title)}</h1>", about]
    for report in reports:
        rows = report.by_name()
        for row in rows:
            row["label"] = f"{row['phase']} {row['name']}".strip()
        longest = sorted(rows, key=lambda row: -row["together"])
        ends = (
            f"{seconds_text(report.latency_s)}, between {seconds_text(report.low_s)} and {seconds_text(report.high_s)}"
        )
        notes = [f'<p class="note">{escape(note)}</p>' for note in report.notes]
        shown = _figures(bound_figures(longest, f"{report.device}: {seconds_text(report.latency_s)}"))
        sections.append(
            _section(f"{escape(report.device)}: {ends}", *notes, shown, _table("operator", longest, _BOUNDS))
        )
    _write(out, _page(title, sections))


def _write(out: str | Path, text: str) -> None:
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    except OSError as err:
        raise PredictorError(f"cannot write {out}: {reason(err)}") from err


def report_html(report: RunReport) -> str:
    """The page."""
    title = f"cdmpp report: {report.name}"
    sections = [
        _head(report, title),
        _section(
            "Predicted against measured",
            _figures(scatter_figures(report.records, report.scores["overall"]["noise_floor_mape"])),
        ),
        _errors(report),
        _ranking(report),
        _intervals(report),
        _training(report),
    ]
    return _page(title, sections)


def _page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _head(report: RunReport, title: str) -> str:
    overall = report.scores["overall"]
    interval = overall["interval"] or {"coverage": 0.9, "covered": None}
    cards = {
        "MAPE": overall["mape"],
        "noise floor of the labels": overall["noise_floor_mape"],
        "median error": overall["median_ape"],
        "within 20 %": overall["within_20pct"],
        "pairwise accuracy within a task": overall["pairwise_accuracy"],
        "top-1 regret, mean over the tasks": overall["top1_regret"],
        "top-1 regret, median of tasks of 32 programs or more": overall["top1_regret_of_32"],
        f"covered by {100 * interval['coverage']:g} % intervals": interval["covered"],
    }
    shown = "".join(
        f'<div class="card"><b>{_percent(value)}</b><span>{name}</span></div>'
        for name, value in cards.items()
        if value is not None
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    tasks, devices = report.records["task"].nunique(), report.records["device"].nunique()
    return (
        f"<h1>{escape(title)}</h1>\n<p>Scored on {overall['n']} records of {tasks} tasks on "
        f'{devices} device{"s" if devices > 1 else ""}.</p>\n<div class="cards">{shown}</div>\n{notes}'
    )


def _errors(report: RunReport) -> str:
    parts = [
        _about(
            "Worst first. Bias is the median of predicted / measured, minus one: below zero, programs are slower than "
            "predicted. A task of several networks counts in each of them. A network is all its sizes and batches."
        ),
        '<p class="about narrow">A wider page has more columns.</p>',
    ]
    for grouping, heading in (
        ("device", "By device"),
        ("network", "By network"),
        ("family", "By family"),
        ("latency", "By measured latency"),
        ("task", "The worst tasks"),
    ):
        if rows := report.groups[grouping]:
            parts.append(f"<h3>{heading}</h3>{_table(grouping, rows, _METRICS)}")
    return _section("Where it is wrong", *parts)


def _ranking(report: RunReport) -> str:
    if not report.ranking:
        return _section("Ranking within tasks", _about("No task has two scored programs on a device."))
    return _section(
        "Ranking within tasks",
        _about(f"{len(report.ranking)} tasks (on each device) with at least two programs."),
        _figures(ranking_figures(report.ranking)),
    )


def _intervals(report: RunReport) -> str:
    if not report.coverage:
        return _section("Intervals", _about("There are none: see the notes at the top."))
    pooled = _list(report.coverage[0]["pooled_devices"], "devices")
    rows = [{"name": f"{100 * entry['coverage']:g} %", **entry} for entry in report.coverage]
    columns = [
        _Column("covered", "of the records", _percent, wide=False),
        _Column("covered_by_task", "every task the same", _percent, wide=False),
        _Column("width", "high / low, median", _number, wide=False),
    ]
    return _section(
        "Intervals",
        _about(
            "Calibrated on the validation part (split conformal). What is promised is for tasks drawn as those were."
        ),
        f'<div class="about">Intervals of all devices pooled were taken for {pooled}</div>' if pooled else "",
        _figures(coverage_figures(report.coverage)),
        _table("asked for", rows, columns),
    )


def _training(report: RunReport) -> str:
    training, floor = report.training, report.training.get("noise_floor_mape")
    scored = report.scores["split"]
    facts = {
        "records": escape(f"{training.get('records')}, {training.get('programs')} programs"),
        "by device": _list([f"{name}: {n}" for name, n in training.get("records_by_device", {}).items()], "devices"),
        "networks": _list(_by_architecture(training.get("networks", ())), "networks"),
        "split": escape(str(training.get("split"))),
        "split scored": escape(scored) if scored != training.get("split") else "",
        "seed": escape(str(training.get("seed"))),
        "epochs": escape(f"{training.get('epochs')}, the best was {training.get('best_epoch')}"),
        "validation MAPE": _percent(training.get("valid_mape")),
        "noise floor": _percent(floor),
        "data scored": _list(report.data, "datasets", "<br>"),
    }
    body = "".join(
        f'<tr><th class="text">{name}</th><td class="text">{value}</td></tr>' for name, value in facts.items() if value
    )
    history = [_about("The run has no history.")]
    if report.history:
        seconds = sum(line["elapsed_s"] for line in report.history)
        history = [
            _figures(history_figures(report.history, floor)),
            _about(f"{len(report.history)} epochs in {seconds:.3g} s."),
        ]
    return _section(
        "Training",
        *history,
        f'<div class="scroll"><table>{body}</table></div>',
        f"<details><summary>Configuration</summary><pre>{escape(report.config)}</pre></details>",
    )


def _section(heading: str, *parts: str) -> str:
    return "\n".join([f"<h2>{heading}</h2>", *parts])


def _about(text: str) -> str:
    return f'<p class="about">{escape(text)}</p>'


def _figures(figures: Mapping[str, bytes]) -> str:
    images = (
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'
        for alt, png in figures.items()
    )
    return f'<div class="figures">{"".join(images)}</div>'


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


_METRICS = [
    _Column("mape", "MAPE", _percent, wide=False),
    _Column("bias", "bias", _signed, wide=False),
    _Column("median_ape", "median", _percent),
    _Column("within_20pct", "within 20\N{NO-BREAK SPACE}%", _percent),
    _Column("pairwise_accuracy", "pairwise", _percent),
    _Column("spearman", "Spearman", _number),
    _Column("top1_regret", "top-1 regret", _percent),
    _Column("top5_regret", "top-5 regret", _percent),
    _Column("noise_floor_mape", "noise floor", _percent),
    _Column("n", "n", str, wide=False),
]
_BOUNDS = [
    _Column("together", "together", seconds_text, wide=False),
    _Column("share", "share", _percent, wide=False),
    _Column("runs", "runs", _number),
    _Column("bound", "bound by", escape, wide=False),
    _Column("part", "busy", _percent),
    _Column("full", "cores", _percent),
    _Column("correction", "learned", _number),
    _Column("kernel", "likely kernel", escape),
    _Column("nearest", "nearest measured", escape),
    _Column("on", "on", escape),
    _Column("far", "far", _number),
]


def _table(first: str, rows: Sequence[Row], columns: Sequence[_Column]) -> str:
    """Rows under their names, without columns of which no row knows anything; see :data:`SHOWN`."""
    known = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    heads = "".join(f"<th{_class(column)}>{escape(column.heading)}</th>" for column in known)
    bodies = [_body(row, known) for row in rows]
    more = [f"<tbody>{body}</tbody>" for body in bodies[:SHOWN]]
    if rest := bodies[SHOWN:]:
        summary = f'<details class="more"><summary>{len(rest)} more</summary></details>'
        more.append(f'<tbody><tr><td class="text" colspan="{len(known) + 1}">{summary}</td></tr></tbody>')
        more += [f'<tbody class="rest">{body}</tbody>' for body in rest]
    return (
        f'<div class="scroll"><table><thead><tr><th class="text">{escape(first)}</th>{heads}</tr></thead>'
        f"{''.join(more)}</table></div>"
    )


def _body(row: Row, columns: Sequence[_Column], css: str = "") -> str:
    """A row, and those of its sizes folded below it."""
    name = escape(row.get("label") or row["name"])
    if "networks" in row:
        name += f"<small>{escape(row['name'])} {_list(_by_architecture(row['networks']), 'networks')}</small>"
    sizes = row.get("sizes", ())
    if sizes:
        name = f"<details><summary>{name} ({len(sizes)} sizes)</summary></details>"
    cells = "".join(f"<td{_class(column)}>{column.form(row.get(column.key))}</td>" for column in columns)
    below = "".join(_body(size, columns, ' class="size"') for size in sizes)
    return f'<tr{css}><td class="text">{name}</td>{cells}</tr>{below}'


def _class(column: _Column) -> str:
    return ' class="wide"' if column.wide else ""


def _list(items: Sequence[str], what: str, separator: str = ", ") -> str:
    text = separator.join(map(escape, items))
    return text if len(items) <= SHOWN else f"<details><summary>{len(items)} {what}</summary>{text}</details>"


def _by_architecture(networks: Iterable[str]) -> list[str]:
    """Networks with their sizes counted: ``resnet50 (20 sizes)``."""
    from cdmpp.dataset.split import architecture

    sizes: dict[str, list[str]] = {}
    for name in networks:
        sizes.setdefault(architecture(name), []).append(name)
    return [names[0] if len(names) == 1 else f"{key} ({len(names)} sizes)" for key, names in sizes.items()]
