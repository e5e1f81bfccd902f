"""``cdmpp tune``: options and rendering; the work is :func:`cdmpp.tuner.tune`'s."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.tuner.progress import Progress
    from cdmpp.tuner.results import TuneReport


def add_tune_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("network", metavar="NETWORK", help="zoo name (name@b4, name@s160), .onnx or .pt2 file")
    sub.add_argument(
        "--device",
        required=True,
        metavar="D",
        help="a device of this machine with the share to tune for, such as this-cpu@1, or h200@0.5: half of a CUDA "
        "GPU's multiprocessors (needs TVM and the GPU on one machine)",
    )
    sub.add_argument(
        "--share",
        metavar="S",
        help="what the network will be served with: cores of a CPU, a fraction of a GPU; the same as --device D@S. "
        "Several, such as 1,2: tunes for each, into a folder of its own",
    )
    sub.add_argument("--cost-model", choices=("cdmpp", "xgb", "random"), default="cdmpp")
    sub.add_argument(
        "--predictor", default="default", metavar="DIR", help="of cdmpp's cost model; 'none' for an estimate"
    )
    sub.add_argument(
        "--trials",
        type=int,
        required=True,
        metavar="N",
        help="candidates proposed, in all, with earlier runs",
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="database, measurements, report")
    sub.add_argument("--resume", action="store_true", help="go on; nothing is measured twice")
    sub.add_argument(
        "--warm-start",
        nargs="+",
        default=[],
        metavar="DIR",
        help="datasets, tunings or databases to learn from",
    )
    sub.add_argument("--budget", metavar="T", help="wall time, such as 10m, in all, with earlier runs")
    sub.add_argument("--max-measurements", type=int, metavar="N", help="candidates built and measured")
    sub.add_argument(
        "--stop-when-gain-per-minute-below", metavar="F", help="fraction or percentage, such as 0.5%%"
    )
    sub.add_argument(
        "--trim",
        type=float,
        default=0.9,
        metavar="C",
        help="coverage of the intervals by which candidates are dropped",
    )
    sub.add_argument("--no-trim", action="store_true", help="measure every candidate")
    sub.add_argument("--anchors", nargs="+", default=[], help=argparse.SUPPRESS)
    sub.add_argument(
        "--validity",
        metavar="DIR",
        help="start from programs that run, skip others: learned from the failures of a dataset or of data/validity-cuda, "
        "or a saved model ('online': learned here alone)",
    )
    sub.add_argument("--batch", type=int, default=16, metavar="N", help="candidates of a round")
    sub.add_argument("--population", type=int, default=256, metavar="N", help="of the evolutionary search")
    sub.add_argument("--generations", type=int, default=3, metavar="N", help="of the evolutionary search")
    sub.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="measuring processes; of a GPU: programs measured side by side",
    )
    sub.add_argument(
        "--shards",
        type=_shards,
        metavar="N",
        help="tune so many tasks at once, each on such a share of its own (auto: as many as fit; h200@0.5: 2)",
    )
    sub.add_argument("--builders", type=int, metavar="N", help="building processes (default: one per core)")
    sub.add_argument(
        "--build-timeout", type=float, default=20.0, metavar="S", help="CPU seconds of one build"
    )
    sub.add_argument("--run-timeout", type=float, default=2.0, metavar="S", help="seconds of one run")
    sub.add_argument("--seed", type=int, default=0)


def _shards(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def devices_with_shares(device: str, shares: str | None) -> list[str]:
    """``D@S`` for a device and every share of a list such as ``1,2``; the device alone where there is none.

    Raises
    ------
    TunerError
        The device names another share.
    """
    from cdmpp.errors import TunerError

    base, at, named = device.partition("@")
    if shares is None or named == shares:
        return [device]
    if at:
        raise TunerError(f"--device {device} and --share {shares}: give the share once")
    return [f"{base}@{share.strip()}" for share in shares.split(",")]


def run_tune(args: argparse.Namespace, console: Console, errors: Console) -> dict[str, Any]:
    """Tune, with progress on ``errors``; show what it gave on ``console``."""
    if args.anchors:
        errors.print("--anchors is ignored: it is not needed any more")
    devices = devices_with_shares(args.device, args.share)
    if len(devices) == 1:
        return _tune_at(devices[0], Path(args.out), args, console, errors).to_json()
    from cdmpp.tuner.measure import device_of_this_machine
    from cdmpp.tuner.store import check_folder

    folders = {device: Path(args.out) / f"share-{device.partition('@')[2]}" for device in devices}
    for device, folder in folders.items():  # all of them before hours are spent on the first
        device_of_this_machine(device)
        check_folder(folder, args.resume)
    return {"tunings": {d: _tune_at(d, out, args, console, errors).to_json() for d, out in folders.items()}}


def _tune_at(
    device: str, out: Path, args: argparse.Namespace, console: Console, errors: Console
) -> TuneReport:
    from cdmpp.tuner.candidates import SearchConfig
    from cdmpp.tuner.config import TuneConfig
    from cdmpp.tuner.objective import Objective, parse_duration, parse_fraction
    from cdmpp.tuner.tuning import tune

    gain = args.stop_when_gain_per_minute_below
    objective = Objective(
        trials=args.trials,
        max_measurements=args.max_measurements,
        budget_s=None if args.budget is None else parse_duration(args.budget),
        least_gain_per_minute=None if gain is None else parse_fraction(gain),
    )
    config = TuneConfig(
        objective,
        cost_model=args.cost_model,
        predictor=None if args.predictor == "none" else args.predictor,
        trim=None if args.no_trim else args.trim,
        validity=args.validity,
        batch=args.batch,
        search=SearchConfig(args.population, args.generations),
        seed=args.seed,
        workers=args.workers,
        builders=args.builders,
        shards=args.shards,
        build_timeout_s=args.build_timeout,
        run_timeout_s=args.run_timeout,
    )
    with TuneBar(errors) as bar:
        report = tune(
            args.network,
            device=device,
            out=out,
            config=config,
            resume=args.resume,
            warm_start=args.warm_start,
            progress=bar.update,
            notify=bar.say,
        )
    show_tuning(console, report)
    console.print(f"Written to {out}.")
    return report


def show_tuning(console: Console, report: TuneReport) -> None:
    """A line a task, and what it all gave."""
    from rich.table import Table

    from cdmpp.dataset.labels import seconds_text
    from cdmpp.tuner.results import summary_lines

    table = Table(title=f"{report.name} on {report.device}, cost model {report.cost_model}")
    for name in ("task", "runs", "untuned", "best", "measured", "failed", "dropped", "ended"):
        table.add_column(name, justify="left" if name in ("task", "ended") else "right")
    for task in report.tasks:
        table.add_row(
            task.name,
            f"{task.weight:g}",
            "-" if task.untuned_s is None else seconds_text(task.untuned_s),
            "-" if task.best_s is None else seconds_text(task.best_s),
            str(task.measured),
            str(task.failed),
            str(task.dropped),
            task.finished,
        )
    console.print(table)
    for line in summary_lines(report):
        console.print(line)


class TuneBar:
    """Progress of a tuning: trials, latency, what another minute would bring."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = console
        self._bar = Bar(
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task: Any = None
        self._last_line_s = float("-inf")

    def __enter__(self) -> TuneBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line of news above the bar."""
        self._bar.console.print(line)

    def update(self, state: Progress) -> None:
        """Show where the tuning stands; a line every half minute where there is no terminal."""
        from cdmpp.dataset.labels import seconds_text

        latency = "-" if state.latency_s is None else seconds_text(state.latency_s)
        gain = "" if state.gain is None else f", next minute {100 * state.gain:.2g} %"
        text = f"{latency}{gain}, {state.costs.measurements} measured, {state.costs.dropped} dropped"
        if not self._console.is_terminal:
            if state.costs.wall_s - self._last_line_s >= 30:
                self._last_line_s = state.costs.wall_s
                self._console.print(f"{state.costs.trials}/{state.trials} trials: {text}")
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("tuning", total=state.trials, state=text)
        self._bar.update(self._task, completed=state.costs.trials, state=text)
