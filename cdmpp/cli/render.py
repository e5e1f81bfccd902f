"""What the command shows: tables of at most 100 columns, sentences, and progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from cdmpp.dataset.record import seconds_text

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.endtoend import Comparison, LatencyReport
    from cdmpp.tuner import TuneReport

#: Columns of what is written to a file or a pipe.
_WIDTH = 100
#: Characters of a name that a table holds on one line.
_NAME = 40
#: Seconds between two lines of progress where there is no terminal.
_EVERY_S = 30.0


def console(*, err: bool = False) -> Console:
    """Of standard output, or of standard error."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(stderr=err, width=width, highlight=False)


def say(console: Console, text: str) -> None:
    """A sentence, which a terminal may wrap and a file holds as one line."""
    console.print(text, soft_wrap=not console.is_terminal)


def show_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], total: bool = False
) -> None:
    """Columns whose names begin with ``<`` are text, the others numbers; the last row may be a total."""
    table, cells = Table(title=title), list(rows)
    for number, name in enumerate(columns):
        left = name.startswith("<")
        whole = not left or (number == 0 and all(len(row[0]) <= _NAME for row in cells))
        justify: Literal["left", "right"] = "left" if left else "right"
        table.add_column(name.removeprefix("<"), justify=justify, overflow="fold", no_wrap=whole)
    for number, row in enumerate(cells, 1):
        table.add_row(*row, style="bold" if total and number == len(cells) else None)
    console.print(table)


def counts_text(counts: Mapping[str, int]) -> str:
    """Such as ``3 build_error, 1 run_timeout``."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _interval(low_s: float | None, high_s: float | None) -> str:
    return "-" if low_s is None or high_s is None else f"{seconds_text(low_s)} to {seconds_text(high_s)}"


def _number(value: Any, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


# -- progress --------------------------------------------------------------------------------------------------


class Bar:
    """Progress of a run: a bar on a terminal, elsewhere a line every half minute."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
        )
        self._task: Any = None
        self._first: tuple[float, int] | None = None
        self._last_line_s = self._started_s = time.monotonic()
        self._best = float("inf")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        """A line of news above the bar."""
        say(self._console, line)

    def update(self, done: int, total: int, text: str = "") -> None:
        """`done` of `total` are done; there is more to say about it."""
        now_s = time.monotonic()
        self._first = self._first or (now_s, done)
        if self._console.is_terminal:
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task(self._what, text=text)
            self._progress.update(self._task, completed=done, total=total, text=text)
        elif now_s - self._last_line_s >= _EVERY_S:
            self._last_line_s = now_s
            rate = (done - self._first[1]) / max(now_s - self._first[0], 1e-9)
            parts = [f"{self._what}: {done} of {total}", f"{rate:.1f}/s", *([text] if text else [])]
            self.say(", ".join(parts))

    def follow(self, state: Any) -> None:
        """Take the progress of a profiler."""
        failed = f"failures: {counts_text(state.failures)}" if state.failures else ""
        self.update(state.done, state.total, failed)

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Take a line of a training's history; one that is the best so far is news."""
        mape, text = line.get("valid_mape"), f"training loss {_number(line.get('train_loss'), '.4f')}"
        if mape is not None:
            text += f", validation MAPE {_percent(mape)}"
            if mape < self._best:
                self._best = mape
                self.say(f"epoch {int(line['epoch']):3d}  {text}  best so far")
            text += f", best {_percent(self._best)}"
        self.update(int(line["epoch"]), int(line["epochs"]), text)

    def tuning(self, state: Any) -> None:
        """Take the progress of a tuning."""
        latency = "-" if state.latency_s is None else seconds_text(state.latency_s)
        gain = state.curve.gain()
        expected = "" if gain is None else f", next minute {100 * gain:.2g} %"
        text = f"{latency}{expected}, {state.costs.measurements} measured, {state.costs.dropped} dropped"
        self.update(state.costs.trials, state.objective.trials, text)


# -- data ------------------------------------------------------------------------------------------------------


def show_devices(console: Console, here: Device, known: Sequence[Device]) -> None:
    """The device table; this machine first."""
    rows = [
        (
            device.name,
            device.model,
            _number(device.cores),
            _number(device.clock_mhz, ".0f"),
            _number(device.mem_gb, ".0f"),
            _number(device.bandwidth_gb_s, ".0f"),
            _number(device.peak_gflops.get("float32"), ".0f"),
        )
        for device in [here, *(d for d in known if d.name != here.name)]
    ]
    columns = ("<name", "<model", "cores", "MHz", "GB", "GB/s", "GFLOP/s")
    show_table(console, "devices; the first is this machine", columns, rows)
    console.print(
        f"[bold]{here.base}@1[/] (or this-cpu@1) is one core of this machine; "
        f"append .x86-64-v2 to the base for 128-bit SIMD code; h200@0.5 is half the SMs of a GPU. "
        "Cores: SMs of a GPU; GFLOP/s: of float32."
    )


def show_networks(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The zoo."""
    cells = [
        (row["name"], row["family"], _shapes(row["inputs"]), _number(row["tasks"]), row["description"])
        for row in rows
    ]
    show_table(console, "networks", ("<name", "<family", "<inputs", "tasks", "<description"), cells)
    console.print(
        "Append a batch size as in resnet18@b4, an image size or sequence length as in resnet18@s160, or both, "
        "or give an .onnx or .pt2 file in place of a name. Inputs are float32 where nothing else is said."
    )


def _shapes(inputs: Sequence[str]) -> str:
    """``image [1,3,224,224]`` of ``image float32[1, 3, 224, 224]``."""
    return "\n".join(text.replace(", ", ",").replace("float32", "") for text in inputs)


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """``cdmpp dataset``."""

    def cells(name: str, row: Mapping[str, Any]) -> list[str]:
        counts = [str(row[key]) for key in ("records", "ok", "tasks", "networks")]
        failures = "\n".join(f"{kind} {n}" for kind, n in row["failures"].items() if n) or "-"
        return [name, *counts, failures, _percent(row["noise_floor_mape"])]

    rows = [cells(str(row["path"]), row) for row in summary["datasets"]]
    rows.append(cells("total", summary["total"]))
    columns = ("<dataset", "records", "ok", "tasks", "networks", "<failures", "noise")
    show_table(console, "datasets", columns, rows, total=True)
    for row in summary["datasets"]:
        say(console, f"{row['path']}: origins of programs: {counts_text(row.get('origins', {}))}")
        for device, n in row.get("by_device", {}).items():
            line = f"{row['path']}: {device}: {n['ok']} ok"
            if n["split_half_median"] is not None:
                line += f"; labels of split halves differ by {_percent(n['split_half_median'])} in the median"
                line += f", {_percent(n['split_half_mean'])} in the mean"
            say(console, line)
        if row.get("remeasured"):
            say(
                console,
                f"{row['path']}: {row['remeasured']} programs were measured again, "
                f"their labels differ by {_percent(row['remeasured_difference'])} in the median, "
                f"{_percent(row['remeasured_mean'])} in the mean, {_percent(row['remeasured_p90'])} in the worst tenth",
            )
        if row.get("corrupt_lines"):
            say(console, f"[yellow]{row['path']}: {row['corrupt_lines']} damaged lines were skipped[/]")


# -- learn -----------------------------------------------------------------------------------------------------


#: Columns of a metrics table: key, heading, formatter.
_METRICS = (
    ("mape", "MAPE", _percent),
    ("median_ape", "median", _percent),
    ("within_10pct", "within 10 %", _percent),
    ("within_20pct", "within 20 %", _percent),
    ("pairwise_accuracy", "pairwise", _percent),
    ("spearman", "Spearman", lambda v: _number(v, ".3f")),
    ("top1_regret", "top-1 regret", _percent),
    ("top5_regret", "top-5 regret", _percent),
    ("n", "n", _number),
)
#: Those of them that fit beside long names.
_BRIEF = ("mape", "median_ape", "pairwise_accuracy", "n")


def _show_scores(
    console: Console, title: str, first: str, rows: Mapping[str, Mapping[str, Any]], brief: bool = False
) -> None:
    columns = [column for column in _METRICS if not brief or column[0] in _BRIEF]
    cells = [[name, *(form(metrics.get(key)) for key, _, form in columns)] for name, metrics in rows.items()]
    show_table(console, title, (f"<{first}", *(heading for _, heading, _ in columns)), cells)


def show_metrics(
    console: Console, title: str, models: Mapping[str, Mapping[str, Any]], *, brief: bool = False
) -> None:
    """One row of metrics a model, the noise floor and the intervals below; the few most telling metrics if ``brief``."""
    _show_scores(console, title, "model", models, brief)
    floor = next(iter(models.values())).get("noise_floor_mape")
    console.print(
        f"A perfect predictor would score a MAPE of {_percent(floor)}: the noise of the labels themselves."
    )
    if brief:
        return
    for name, metrics in models.items():
        if interval := metrics.get("interval"):
            console.print(
                f"{name}: intervals of {100 * interval['coverage']:g} % hold {_percent(interval['covered'])} of the "
                f"records; their upper end is {interval['width']:.3g} times the lower in the median."
            )


def show_groups(console: Console, groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One table of metrics a grouping."""
    for grouping, rows in groups.items():
        _show_scores(console, f"by {grouping}", grouping, rows)


#: Trials in the table of a search; all of them are in ``summary.json``.
_TRIALS = 10
_STATES = ("complete", "pruned", "failed", "interrupted")


def show_search(console: Console, summary: Mapping[str, Any]) -> None:
    """The best trials of a search and what became of the others."""
    lines = summary["trials"]
    complete = sorted((line for line in lines if line["state"] == "complete"), key=lambda line: line["value"])
    rows = [
        (str(line["trial"]), _trial_mape(line), f"{line['seconds']:.0f} s", _values(line["values"]))
        for line in complete[:_TRIALS]
    ]
    title = f"{summary['model']}, {summary['split']}: validation MAPE of the best trials"
    show_table(console, title, ("trial", "MAPE", "time", "<values"), rows)
    counts = {state: sum(line["state"] == state for line in lines) for state in _STATES}
    console.print(
        f"{len(lines)} trials in {summary['seconds']:.0f} s: "
        + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
        + f"; {summary['n_train']} records trained, {summary['n_valid']} judged, the test part was not looked at."
    )


def trial_text(line: Mapping[str, Any]) -> str:
    """A trial of a search that has ended."""
    result = line["error"] or f"validation MAPE {_trial_mape(line)}"
    return f"trial {line['trial']:3d}  {line['state']:8s}  {result}  {line['seconds'] or 0:.0f} s"


def _trial_mape(line: Mapping[str, Any]) -> str:
    errors = [line[name] for name in ("valid_mape", "valid_mape_compiled") if line[name] is not None]
    return ", ".join(f"{100 * error:.1f} %" for error in errors) or "-"


def _values(values: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


# -- use -------------------------------------------------------------------------------------------------------


def show_predictions(console: Console, result: Mapping[str, Any]) -> None:
    """``cdmpp predict``."""
    if "latency_s" in result:
        say(console, f"{result['program']} on {result['device']}: {seconds_text(result['latency_s'])}")
        if result["low_s"] is not None:
            interval = _interval(result["low_s"], result["high_s"])
            say(console, f"{100 * result['coverage']:g} % interval: {interval}")
        if result["unfamiliar"]:
            say(console, "[yellow]unfamiliar: the program is far from the training data[/]")
        if result["note"]:
            say(console, f"[yellow]{result['note']}[/]")
        return
    rows = [
        (
            row["name"],
            _number(row["weight"]),
            f"{row['programs']}" + (f", [yellow]{row['unfamiliar']} far[/]" if row["unfamiliar"] else ""),
            seconds_text(row["best_s"]),
            _interval(row["best_low_s"], row["best_high_s"]),
            seconds_text(row["median_s"]),
            seconds_text(row["worst_s"]),
        )
        for row in result["tasks"]
    ]
    interval = f"{100 * result['coverage']:g} % interval"
    columns = ("<task", "runs", "<programs", "best", interval, "median", "worst")
    show_table(
        console, f"{result['network']} on {result['device']}: predicted latency per task", columns, rows
    )
    console.print(
        f"All tasks with the best schedule of those tried: [bold]{seconds_text(result['total_best_s'])}[/]; "
        f"with the median one: {seconds_text(result['total_median_s'])}."
    )
    if any(row["unfamiliar"] for row in result["tasks"]):
        console.print("[yellow]far: programs that are far from the training data[/]")
    compiled = max((row["compiled"] for row in result["tasks"]), default=0)
    if compiled:
        console.print(
            f"Best: of the {compiled} best predicted programs of each task, predicted again from their instructions; "
            "median and worst: of all, without."
        )
    if result.get("note"):
        say(console, f"[yellow]{result['note']}[/]")


def show_latency(console: Console, comparison: Comparison, shown: int) -> None:
    """``cdmpp latency`` of one device: its longest layers (``shown`` of them, 0 for all), and the network."""
    report = comparison.reports[0]
    layers = [layer for layer in report.layers if layer.tasks]
    longest = sorted(layers, key=lambda layer: -layer.fraction)[: shown or None]
    what = f"the {len(longest)} longest of {len(layers)} layers" if len(longest) < len(layers) else "layers"
    measured = any(layer.measured_s is not None for layer in layers)
    gaps = any(layer.gap_s for layer in layers)
    interval = f"{100 * report.coverage:g} % interval"
    columns = ["<layer", "<programs", "runs", "latency", interval, "part"]
    columns += ["gap"] * gaps + ["measured"] * measured
    rows = []
    for layer in (layer for layer in layers if layer in longest):
        row = [
            layer.name,
            layer.origin + (" [yellow]unfamiliar[/]" if layer.unfamiliar else ""),
            f"{layer.repeat:g}",
            seconds_text(layer.latency_s),
            _interval(layer.low_s, layer.high_s),
            f"{100 * layer.fraction:.1f} %",
        ]
        if gaps:
            row.append(seconds_text(layer.gap_s) if layer.gap_s else "-")
        if measured:
            row.append("-" if layer.measured_s is None else seconds_text(layer.measured_s))
        rows.append(row)
    title = f"{report.network} on {report.device}: {what}, in the order of execution"
    show_table(console, title, columns, rows)
    _say_latency(console, report)
    for note in comparison.notes:
        say(console, f"[yellow]{note}[/]")


def _say_latency(console: Console, report: LatencyReport) -> None:
    gaps = f", {seconds_text(report.gap_s)} of it launch gaps" if report.gap_s else ""
    lines = [
        f"[bold]{seconds_text(report.latency_s)}[/] a run on {report.device} ({report.launches:g} kernels, schedule "
        f"{report.schedule}{gaps})"
    ]
    if report.streams > 1:
        lines.append(f"on one stream instead of {report.streams}: {seconds_text(report.serial_s)}")
    for low_s, high_s, when in (
        (report.low_s, report.high_s, "all tasks' errors go the same way"),
        (report.independent_low_s, report.independent_high_s, "they differ by chance"),
    ):
        if low_s is not None and high_s is not None:
            lines.append(f"between {seconds_text(low_s)} and {seconds_text(high_s)} if {when}")
    if report.measured_s is not None and report.ape is not None:
        lines.append(f"measured: {seconds_text(report.measured_s)}, so the error is {100 * report.ape:.1f} %")
    if report.cost_per_million is not None:
        lines.append(
            f"a million runs cost {report.cost_per_million:.4g} at {report.price_per_hour:g} an hour"
        )
    for line in (*lines, *(f"[yellow]{note}[/]" for note in report.notes)):
        say(console, line)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """``cdmpp latency`` of several devices, the fastest first."""
    first = comparison.reports[0]
    columns = ["<device", "latency", f"{100 * first.coverage:g} % interval", "to the fastest"]
    columns += ["a million runs", "rank by cost"] if comparison.by_cost else []
    rows = []
    for report in comparison.reports:
        row = [
            report.device,
            seconds_text(report.latency_s),
            _interval(report.low_s, report.high_s),
            f"{report.latency_s / first.latency_s:.2f}",
        ]
        if comparison.by_cost:
            priced = report.cost_per_million is not None
            row.append(f"{report.cost_per_million:.4g}" if priced else "-")
            row.append(str(comparison.by_cost.index(report.device) + 1) if priced else "-")
        rows.append(row)
    title = f"{comparison.network} on {len(comparison.reports)} devices, schedule {first.schedule}"
    show_table(console, title, columns, rows)
    for note in comparison.notes:
        say(console, f"[yellow]{note}[/]")
    for report in comparison.reports:
        for note in report.notes:
            say(console, f"[yellow]{report.device}: {note}[/]")


# -- tune ------------------------------------------------------------------------------------------------------


def show_tuning(console: Console, report: TuneReport) -> None:
    """A line a task, and what it all gave."""
    from cdmpp.tuner.results import summary_lines

    rows = [
        (
            task.name,
            f"{task.weight:g}",
            *("-" if value_s is None else seconds_text(value_s) for value_s in (task.untuned_s, task.best_s)),
            *(str(count) for count in (task.measured, task.failed, task.dropped)),
            task.finished,
        )
        for task in report.tasks
    ]
    columns = ("<task", "runs", "untuned", "best", "measured", "failed", "dropped", "<ended")
    show_table(console, f"{report.name} on {report.device}, cost model {report.cost_model}", columns, rows)
    for line in summary_lines(report):
        say(console, line)
