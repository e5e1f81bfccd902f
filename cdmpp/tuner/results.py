"""What a tuning gives: a line a task, the whole network, what it cost; as JSON, as a picture, as one HTML page."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from cdmpp.errors import TunerError
from cdmpp.files import seconds_text, write_text
from cdmpp.program.types import Task
from cdmpp.tuner.deployment import NetworkLatency
from cdmpp.tuner.objective import Costs, Curve
from cdmpp.tuner.scheduler import TaskState
from cdmpp.tuner.store import writing

logger = logging.getLogger(__name__)

JSON_FILE = "report.json"
FIGURE_FILE = "curve.png"
HTML_FILE = "report.html"
#: So much of a network's latency may be measured while others used the core before it is said.
_DISTURBED = 0.05
#: A latency that falls by more is drawn on a logarithmic axis.
_STEEP = 5.0

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.88rem; }
th, td { padding: 0.18rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class TaskResult:
    """What became of a task, by its hash."""

    task: str
    name: str
    weight: float
    #: Latency of what runs untuned, and of what is used: the faster of that and of the best schedule found.
    untuned_s: float | None
    best_s: float | None
    #: What is used: ``untuned``, or the origin and the hash of the schedule; "" where nothing runs.
    used: str
    #: Of the best schedule, used or not.
    scheduled_s: float | None
    #: Part of the network's time, weighted, before and after; None where a task of it is unknown.
    share_before: float | None
    share_after: float | None
    measured: int
    failed: int
    dropped: int
    finished: str

    @classmethod
    def all_of(cls, tasks: Sequence[tuple[Task, float]], states: Sequence[TaskState]) -> list[TaskResult]:
        """Of all tasks of a network, by where their tuning ended."""

        def shares(seconds: Sequence[float | None]) -> list[float | None]:
            parts = [state.weight * s for state, s in zip(states, seconds, strict=True) if s is not None]
            known = len(parts) == len(states) and sum(parts) > 0
            return [part / sum(parts) for part in parts] if known else [None] * len(states)

        before, after = shares([s.untuned_s for s in states]), shares([s.latency_s for s in states])
        found = []
        for (task, _), state, part_before, part_after in zip(tasks, states, before, after, strict=True):
            names = ("name", "weight", "untuned_s", "used", "measured", "failed", "dropped", "finished")
            known: dict[str, Any] = {name: getattr(state, name) for name in names}
            known |= {"best_s": state.latency_s, "scheduled_s": state.best_s}
            found.append(cls(task.hash, share_before=part_before, share_after=part_after, **known))
        return found


#: Columns of the table of tasks; "<" is to the left. The shares are parts of the network's time, before and after.
COLUMNS = ("<task", "runs", "untuned", "share", "best", "share", "used", "measured")


def task_rows(tasks: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """The table of tasks, those first that the untuned network spends most on; what is used is ``untuned`` or a hash."""

    def part(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f} %"

    return [
        (
            *(task.name, f"{task.weight:g}"),
            *(seconds_text(task.untuned_s), part(task.share_before), seconds_text(task.best_s), part(task.share_after)),
            *(task.used.rpartition(" ")[2] or "-", str(task.measured)),
        )
        for task in sorted(tasks, key=lambda task: -(task.share_before or 0.0))
    ]


@dataclass(frozen=True)
class TuneReport:
    """What a tuning gave."""

    name: str
    device: str
    cost_model: str
    seed: int
    #: Why it ended.
    stopped: str
    tasks: list[TaskResult]
    #: Sums over the tasks, weighted, of the untuned tasks and of the best of each, measured alone; None where a task has no
    #: program that works.
    untuned_s: float | None
    tuned_s: float | None
    #: Fraction that another minute is expected to bring; None if it cannot be told.
    gain_next_minute: float | None
    costs: Costs
    curve: Curve
    #: What the cost model learned (of ours).
    learned: dict[str, Any] = field(default_factory=dict)
    #: Latencies of the whole network, compiled with and without the schedules; None where it was not run.
    network: NetworkLatency | None = None
    #: Workers that tuned at the same time, each on a device of that name; None where one search had the machine.
    shards: int | str | None = None

    @property
    def speedup(self) -> float | None:
        """Untuned over tuned latency: of the whole network where it was run, else of the sums over the tasks."""
        if self.network is not None:
            return self.network.latency_s["untuned"] / self.network.latency_s["tuned"]
        return None if not (self.untuned_s and self.tuned_s) else self.untuned_s / self.tuned_s

    def to_json(self) -> dict[str, Any]:
        """As JSON values: the fields, the points of the curve, and what others script against beside them."""
        found = asdict(self)
        network = self.network
        if network is not None:
            found["network"] |= {name: network.of_each(name) for name in ("latency_s", "noise", "disturbed")}
            found["network"] |= {f"{name}_s": seconds for name, seconds in network.latency_s.items()}
        return {
            **found,
            "curve": found["curve"]["points"],
            "costs": {**found["costs"], "cpu_s": self.costs.cpu_s},
            "speedup": self.speedup,
            "wall_s": self.costs.wall_s,
            "trials": self.costs.trials,
        }


def write_report(report: TuneReport, folder: Path) -> None:
    """Write ``report.json`` and, where matplotlib is installed and there is a curve, ``curve.png`` and ``report.html``."""
    text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
    with writing(folder / JSON_FILE):
        (folder / JSON_FILE).write_text(text, encoding="utf-8")
    if not report.curve.points:
        return
    try:
        png = curve_figure(report)
    except ImportError:
        logger.warning("no figure: matplotlib is not installed (pip install 'cdmpp[report]')")
        return
    with writing(folder / HTML_FILE):
        (folder / FIGURE_FILE).write_bytes(png)
        (folder / HTML_FILE).write_text(_html(report, png), encoding="utf-8")


def write_page(folder: Path, out: Path) -> dict[str, Any]:
    """Write the HTML page of a tuning's folder to another place; gives its ``report.json``. TunerError where it did not end."""
    try:
        page = (folder / HTML_FILE).read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise TunerError(f"{folder} holds no report of a tuning that has ended: {err}") from err
    with writing(out):
        write_text(out, page)
    return content


def curve_figure(report: TuneReport) -> bytes:
    """Best latency against trials and against wall time, as the bytes of a PNG."""
    from matplotlib.figure import Figure

    points = report.curve.points
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    latency_ms = [1e3 * p.latency_s for p in points]
    best = f"best: {seconds_text(points[-1].latency_s)}"
    left.step([p.measurements for p in points], latency_ms, where="post", color="#0072B2", label=best)
    left.set(xlabel="trials measured", ylabel="sum over the tasks in ms")
    right.step([p.wall_s for p in points], latency_ms, where="post", color="#0072B2")
    right.set(xlabel="wall time in s")
    if report.untuned_s is not None:
        untuned = f"untuned: {seconds_text(report.untuned_s)}"
        for axes in (left, right):
            axes.axhline(1e3 * report.untuned_s, color="#777777", linestyle=":", label=untuned)
    if latency_ms[0] > _STEEP * latency_ms[-1]:
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
    else:
        left.set_ylim(0, None)
    left.legend(frameon=False)
    left.grid(color="#eeeeee")
    right.grid(color="#eeeeee")
    buffer = io.BytesIO()
    # Without a date and a version in it, the same numbers give the same file.
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def summary_lines(report: TuneReport) -> list[str]:
    """What the tuning gave and cost, in sentences."""
    costs, ended = report.costs, dict[str, list[str]]()
    for task in report.tasks:
        if task.finished:
            ended.setdefault(task.finished.partition(":")[0].capitalize(), []).append(task.name)
    lines = [f"{why}: {', '.join(names)}." for why, names in ended.items()]
    lines.append(f"Stopped after {report.stopped}.")
    if report.network is not None:
        untuned, tuned = (seconds_text(report.network.latency_s[name]) for name in ("untuned", "tuned"))
        lines.append(
            f"{report.name} on {report.device}: {untuned} untuned, {tuned} tuned, {report.speedup:.2f} times as fast "
            "(the whole network in the Relax VM)."
        )
        disturbed = report.network.of_each("disturbed").items()
        parts = ", ".join(f"{part:.0%} of the time {name}" for name, part in disturbed if part > _DISTURBED)
        if parts:
            lines.append(f"Others used the core while the network ran ({parts}): it may be faster than that.")
    if report.tuned_s is not None:
        untuned, tuned = map(seconds_text, (report.untuned_s, report.tuned_s))
        lines.append(f"Sum over its tasks: {untuned} untuned, {tuned} tuned.")
    lines += [
        f"{costs.trials} trials: {costs.measurements} measured, {costs.failures} of them failed, {costs.dropped} "
        f"dropped without building (some {costs.saved_s:.0f} s saved).",
        f"{costs.wall_s:.0f} s: {costs.search_cpu_s:.0f} CPU seconds of search, {costs.build_s:.0f} s of building, "
        f"{costs.device_s:.0f} s on the device.",
        "Energy: the device does not tell."
        if costs.energy_j is None
        else f"Energy: {costs.energy_j:.0f} J of the whole device, with whatever else ran on it.",
    ]
    if report.gain_next_minute is not None:
        lines.append(f"Another minute is expected to bring {100 * report.gain_next_minute:.1f} %.")
    return lines


def _html(report: TuneReport, png: bytes) -> str:
    table = pd.DataFrame(task_rows(report.tasks), columns=[name.lstrip("<") for name in COLUMNS])
    image = base64.b64encode(png).decode("ascii")
    title = escape(f"cdmpp tune: {report.name} on {report.device}, {report.cost_model}")
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in summary_lines(report))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{paragraphs}\n"
        f'<img alt="best latency against programs measured and wall time" src="data:image/png;base64,{image}">\n'
        f"<h2>Tasks</h2>\n{table.to_html(index=False, border=0)}\n</body>\n</html>\n"
    )
