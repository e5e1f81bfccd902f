"""Tables and progress bars of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.device import Device
    from cdmpp.profiler.session import Progress as ProfileProgress


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _interval(low_s: float, high_s: float) -> str:
    return f"{_seconds(low_s)} to {_seconds(high_s)}"


def _number(value: Any, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


def show_devices(console: Console, here: Device, known: Sequence[Device]) -> None:
    """The device table; this machine first."""
    table = Table(title="devices")
    for name in ("name", "kind", "model", "cores/SMs", "clock MHz", "memory GB", "GB/s", "fp32 GFLOP/s"):
        table.add_column(name, justify="left" if name in ("name", "kind", "model") else "right")
    for device in [here, *(d for d in known if d.name != here.name)]:
        mark = " (this machine)" if device is here else ""
        table.add_row(
            device.name + mark,
            device.kind,
            device.model,
            _number(device.cores),
            _number(device.clock_mhz, ".0f"),
            _number(device.mem_gb, ".0f"),
            _number(device.bandwidth_gb_s, ".0f"),
            _number(device.peak_gflops.get("float32"), ".0f"),
        )
    console.print(table)
    console.print(
        f"[bold]{here.base}@1[/] (or this-cpu@1) is one core of this machine; "
        f"append .x86-64-v2 to the base for 128-bit SIMD code; h200@0.5 is half the SMs of a GPU."
    )


def show_networks(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The zoo."""
    table = Table(title="networks")
    for name in ("name", "family", "inputs", "tasks", "description"):
        table.add_column(name, justify="right" if name == "tasks" else "left")
    for row in rows:
        table.add_row(
            row["name"], row["family"], "\n".join(row["inputs"]), _number(row["tasks"]), row["description"]
        )
    console.print(table)
    console.print(
        "Append a batch size as in resnet18@b4, an image size or sequence length as in resnet18@s160, or both, "
        "or give an .onnx or .pt2 file in place of a name."
    )


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """``cdmpp dataset``."""
    table = Table(title="datasets")
    for name in (
        "dataset",
        "records",
        "ok",
        "tasks",
        "networks",
        "devices",
        "origins",
        "failures",
        "noise floor",
    ):
        table.add_column(name, justify="left" if name in ("dataset", "origins", "failures") else "right")

    def listed(counts: Mapping[str, int]) -> str:
        return "\n".join(f"{kind} {n}" for kind, n in counts.items() if n) or "-"

    def add(name: str, row: Mapping[str, Any], style: str | None = None) -> None:
        table.add_row(
            name,
            str(row["records"]),
            str(row["ok"]),
            str(row["tasks"]),
            str(row["networks"]),
            str(row["devices"]),
            listed(row.get("origins", {})),
            listed(row["failures"]),
            _percent(row["noise_floor_mape"]),
            style=style,
        )

    for row in summary["datasets"]:
        add(str(row["path"]), row)
    add("total", summary["total"], "bold")
    console.print(table)
    for row in summary["datasets"]:
        for device, n in row.get("by_device", {}).items():
            line = f"{row['path']}: {device}: {n['ok']} ok"
            if n["split_half_median"] is not None:
                line += f"; labels of split halves differ by {_percent(n['split_half_median'])} in the median"
                line += f", {_percent(n['split_half_mean'])} in the mean"
            console.print(line)
        if row.get("remeasured"):
            console.print(
                f"{row['path']}: {row['remeasured']} programs were measured again, "
                f"their labels differ by {_percent(row['remeasured_difference'])} in the median, "
                f"{_percent(row['remeasured_mean'])} in the mean, {_percent(row['remeasured_p90'])} in the worst tenth"
            )
        if row.get("corrupt_lines"):
            console.print(f"[yellow]{row['path']}: {row['corrupt_lines']} damaged lines were skipped[/]")


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


def _metrics_table(title: str, first: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for _, heading, _ in _METRICS:
        table.add_column(heading, justify="right")
    return table


def show_metrics(console: Console, title: str, models: Mapping[str, Mapping[str, Any]]) -> None:
    """One row of metrics a model, the noise floor below."""
    table = _metrics_table(title, "model")
    for name, metrics in models.items():
        table.add_row(name, *(form(metrics.get(key)) for key, _, form in _METRICS))
    console.print(table)
    floor = next(iter(models.values())).get("noise_floor_mape")
    console.print(
        f"A perfect predictor would score a MAPE of {_percent(floor)}: the noise of the labels themselves."
    )
    for name, metrics in models.items():
        if interval := metrics.get("interval"):
            console.print(
                f"{name}: intervals of {100 * interval['coverage']:g} % hold {_percent(interval['covered'])} of the "
                f"records; their upper end is {interval['width']:.3g} times the lower in the median."
            )


def show_groups(console: Console, groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One table of metrics a grouping."""
    for grouping, rows in groups.items():
        table = _metrics_table(f"by {grouping}", grouping)
        for name, metrics in rows.items():
            table.add_row(name, *(form(metrics.get(key)) for key, _, form in _METRICS))
        console.print(table)


def show_predictions(console: Console, result: Mapping[str, Any]) -> None:
    """``cdmpp predict``."""
    if "latency_s" in result:
        console.print(f"{result['program']} on {result['device']}: {_seconds(result['latency_s'])}")
        if result["low_s"] is not None:
            console.print(
                f"{100 * result['coverage']:g} % interval: {_interval(result['low_s'], result['high_s'])}"
            )
        if result["unfamiliar"]:
            console.print("[yellow]unfamiliar: the program is far from the training data[/]")
        if result["note"]:
            console.print(f"[yellow]{result['note']}[/]")
        return
    table = Table(title=f"{result['network']} on {result['device']}: predicted latency per task")
    interval = f"{100 * result['coverage']:g} % interval of best"
    for name in ("task", "name", "runs", "best of", "best", interval, "median", "worst", "unfamiliar"):
        table.add_column(name, justify="left" if name in ("task", "name") else "right")
    for row in result["tasks"]:
        far = row["unfamiliar"]
        table.add_row(
            row["task"],
            row["name"],
            _number(row["weight"]),
            str(row["programs"]),
            _seconds(row["best_s"]),
            "-" if row["best_low_s"] is None else _interval(row["best_low_s"], row["best_high_s"]),
            _seconds(row["median_s"]),
            _seconds(row["worst_s"]),
            "-" if far is None else f"[yellow]{far} of {row['programs']}[/]" if far else "no",
        )
    console.print(table)
    console.print(
        f"All tasks with the best schedule of those tried: [bold]{_seconds(result['total_best_s'])}[/]; "
        f"with the median one: {_seconds(result['total_median_s'])}."
    )
    compiled = max((row["compiled"] for row in result["tasks"]), default=0)
    if compiled:
        console.print(
            f"Best: of the {compiled} best predicted programs of each task, compiled and told their instructions; "
            "median and worst: of all, without."
        )
    if result.get("note"):
        console.print(f"[yellow]{result['note']}[/]")


class ProfileBar:
    """Progress of a profiling run: rate, time left, failures."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[failed]}"),
            console=console,
        )
        self._task: Any = None
        self._last_line_s = 0.0

    def __enter__(self) -> ProfileBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line of news above the bar."""
        self._progress.console.print(line)

    def update(self, state: ProfileProgress) -> None:
        """Show where the run stands; one line a minute where there is no terminal."""
        rate = state.rate_per_s
        left_s = (state.total - state.done) / rate if rate > 0 else 0.0
        shown: dict[str, Any] = {
            "rate": f"{rate:.1f}/s",
            "left": f"{left_s // 60:.0f} min left" if left_s >= 60 else f"{left_s:.0f} s left",
            "failed": f"{sum(state.failures.values())} failed",
        }
        if not self._console.is_terminal:
            if state.elapsed_s - self._last_line_s >= 60:
                self._last_line_s = state.elapsed_s
                self._console.print(
                    f"{state.done}/{state.total} {shown['rate']}, {shown['left']}, {shown['failed']}"
                )
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("measuring", total=state.total, **shown)
        self._progress.update(self._task, completed=state.done, total=state.total, **shown)


class CountBar:
    """A bar for work that says how much of it is done; shown only if there is any."""

    def __init__(self, console: Console, text: str) -> None:
        self._text = text
        self._progress = Progress(
            TextColumn(text),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> CountBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """`done` of `total` are done."""
        if self._task is None:
            if self._progress.console.is_terminal:
                self._progress.start()
            else:  # nothing to draw on
                self._progress.console.print(f"{self._text}: {total}")
            self._task = self._progress.add_task(self._text, total=total)
        self._progress.update(self._task, completed=done, total=total)


class TrainTable:
    """Progress of a training run: one line an epoch that got better, or every tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best = float("inf")

    def __enter__(self) -> TrainTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, line: Mapping[str, Any]) -> None:
        """Show an epoch."""
        epoch, mape = int(line["epoch"]), line.get("valid_mape")
        better = mape is not None and mape < self._best
        if better:
            self._best = float(mape)  # type: ignore[arg-type]
        if better or epoch % 10 == 0 or epoch == 1:
            loss = line.get("train_loss")
            text = f"epoch {epoch:3d}  training loss {_number(loss, '.4f')}  validation MAPE {_percent(mape)}"
            self._console.print(text + ("  best so far" if better else ""))
