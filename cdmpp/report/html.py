"""A training run or a serving step as one HTML file that loads nothing from elsewhere and fits the width of the page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.split import architecture
from cdmpp.endtoend.serving import ServingReport
from cdmpp.errors import PredictorError, raised_as
from cdmpp.files import seconds_text, write_text
from cdmpp.predictor import TrainingData
from cdmpp.report.content import Row, RunReport, collect_report
from cdmpp.report.figures import bound_figures, coverage_figures, history_figures, ranking_figures, scatter_figures

if TYPE_CHECKING:
    from collections.abc import Callable

#: Number of rows of a table, and of names in a list, that are shown; the rest is folded.
SHOWN = 15

#: Formats of values; an unknown value is written as a dash.
_FORMS: Mapping[str, str] = {"percent": "{:.1%}", "signed": "{:+.1%}", "number": "{:.3g}", "text": "{}"}


def write_report(
    run: str | Path,
    out: str | Path,
    data: TrainingData | str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunReport:
    """Score a run's predictor, write a report about it as one HTML file, and return the numbers in it.

    Arguments and errors are those of :func:`cdmpp.report.content.collect_report`. Also raises PredictorError if matplotlib is
    not installed or the file cannot be written; its folder is created if missing."""
    report = collect_report(run, data, split, progress)
    _write(out, report_html(report))
    return report


def write_serving(reports: Sequence[ServingReport], out: str | Path) -> None:
    """Write a page with the times of the operators of a serving step, or of a list, on each device: a figure, and what bounds
    them. Raises PredictorError if matplotlib is not installed or the file cannot be written."""
    devices = []
    for report in reports:
        rows = sorted(report.by_name(), key=lambda row: -row["together"])
        for row in rows:
            row["label"] = f"{row['phase']} {row['name']}".strip()
        devices.append((report, rows, bound_figures(rows, f"{report.device}: {seconds_text(report.latency_s)}")))
    title = f"cdmpp latency: {reports[0].network}, {reports[0].dtype}"
    _write(out, _page("serving.html.j2", title=title, devices=devices))


def _write(out: str | Path, text: str) -> None:
    with raised_as(PredictorError, f"cannot write {out}"):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(out), text)


def report_html(report: RunReport) -> str:
    """The report as an HTML page (``report.html.j2``)."""
    floor = report.scores["overall"]["noise_floor_mape"]
    figures = {
        "scatter": scatter_figures(report.records, floor),
        "ranking": ranking_figures(report.ranking) if report.ranking else {},
        "coverage": coverage_figures(report.coverage) if report.coverage else {},
        "history": history_figures(report.history, report.training.get("noise_floor_mape")) if report.history else {},
    }
    coverage = [{"name": f"{100 * entry['coverage']:g} %", **entry} for entry in report.coverage]
    by_device = [f"{name}: {n}" for name, n in report.training.get("records_by_device", {}).items()]
    title = f"cdmpp report: {report.name}"
    return _page("report.html.j2", title=title, report=report, figures=figures, coverage=coverage, by_device=by_device)


def _page(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.globals["shown"] = SHOWN
    pages.filters["base64"] = lambda png: base64.b64encode(png).decode("ascii")
    pages.filters.update(by_architecture=_by_architecture, form=_form, known=_known)
    return pages.get_template(template).render(**values)


def _form(value: Any, form: str) -> str:
    """A value as text, such as ``12.3 %``."""
    if value is None or form == "time":
        return "-" if value is None else seconds_text(value)
    return _FORMS[form].format(value).replace("%", " %")


def _known(columns: Sequence[Sequence[str]], rows: Sequence[Row]) -> list[Sequence[str]]:
    """The columns for which any row has a value; the first item of a column is the key of its values."""
    return [column for column in columns if any(row.get(column[0]) is not None for row in rows)]


def _by_architecture(networks: Iterable[str]) -> list[str]:
    """Names of networks, with several sizes of one combined: ``resnet50 (20 sizes)``."""
    sizes: dict[str, list[str]] = {}
    for name in networks:
        sizes.setdefault(architecture(name), []).append(name)
    return [names[0] if len(names) == 1 else f"{key} ({len(names)} sizes)" for key, names in sizes.items()]
