"""A training run as one HTML file: figures embedded, nothing loaded from elsewhere, nothing wider than the page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import PredictorError, reason
from cdmpp.files import write_text
from cdmpp.report.content import Row, RunReport, collect_report
from cdmpp.report.figures import coverage_figures, history_figures, ranking_figures, scatter_figures

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdmpp.predictor import TrainingData

#: Rows of a table, and names of a list, that are shown; more are folded.
SHOWN = 15

#: How values are written; one that is unknown is a dash.
_FORMS: Mapping[str, str] = {"percent": "{:.1%}", "signed": "{:+.1%}", "number": "{:.3g}", "text": "{}"}


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
    text = report_html(report)
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    except OSError as err:
        raise PredictorError(f"cannot write {out}: {reason(err)}") from err
    return report


def report_html(report: RunReport) -> str:
    """The page (``report.html.j2``)."""
    from jinja2 import Environment, FileSystemLoader

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters.update(
        base64=lambda png: base64.b64encode(png).decode("ascii"),
        by_architecture=_by_architecture,
        form=_form,
        known=_known,
    )
    floor = report.scores["overall"]["noise_floor_mape"]
    figures = {
        "scatter": scatter_figures(report.records, floor),
        "ranking": ranking_figures(report.ranking) if report.ranking else {},
        "coverage": coverage_figures(report.coverage) if report.coverage else {},
        "history": history_figures(report.history, report.training.get("noise_floor_mape")) if report.history else {},
    }
    coverage = [{"name": f"{100 * entry['coverage']:g} %", **entry} for entry in report.coverage]
    by_device = [f"{name}: {n}" for name, n in report.training.get("records_by_device", {}).items()]
    page = pages.get_template("report.html.j2")
    return page.render(report=report, figures=figures, coverage=coverage, by_device=by_device, shown=SHOWN)


def _form(value: Any, form: str) -> str:
    """A value as text, such as ``12.3 %``."""
    return "-" if value is None else _FORMS[form].format(value).replace("%", " %")


def _known(columns: Sequence[Sequence[str]], rows: Sequence[Row]) -> list[Sequence[str]]:
    """The columns, by the keys of their values, of which any row knows something."""
    return [column for column in columns if any(row.get(column[0]) is not None for row in rows)]


def _by_architecture(networks: Iterable[str]) -> list[str]:
    """Networks with their sizes counted: ``resnet50 (20 sizes)``."""
    from cdmpp.dataset.split import architecture

    sizes: dict[str, list[str]] = {}
    for name in networks:
        sizes.setdefault(architecture(name), []).append(name)
    return [names[0] if len(names) == 1 else f"{key} ({len(names)} sizes)" for key, names in sizes.items()]
