"""``cdmpp latency``: options and rendering; the work is :mod:`cdmpp.endtoend`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.endtoend import Comparison, LatencyReport


def add_latency_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument(
        "network",
        metavar="NETWORK",
        help="zoo name (name@b4, name@s160), .onnx or .pt2 file, or networks/*.json of imported traces",
    )
    sub.add_argument("--device", required=True, metavar="D[,D...]", help="several are ranked")
    sub.add_argument(
        "--predictor", default="default", metavar="DIR", help="a run or predictor folder, or 'default'"
    )
    sub.add_argument(
        "--schedule",
        default="untuned",
        metavar="untuned|best|DIR",
        help="a task's program: as it is (default), the best predicted of some, or of this MetaSchedule database",
    )
    sub.add_argument(
        "--programs-per-task", type=int, default=64, metavar="N", help="of --schedule best (default: 64)"
    )
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument(
        "--streams", type=int, default=1, metavar="N", help="kernels at the same time, at most (GPU)"
    )
    sub.add_argument(
        "--launch-us", type=float, metavar="F", help="between two launches (default: the device's, if known)"
    )
    sub.add_argument(
        "--price",
        metavar="FILE",
        help="YAML or JSON of device names and prices of an hour: rank by cost, too",
    )
    sub.add_argument(
        "--data", metavar="DIR", help="dataset with a trace's tasks (default: the one it lies in)"
    )
    sub.add_argument(
        "--layers", type=int, default=20, metavar="N", help="longest layers shown, 0 for all (default: 20)"
    )


def run_latency(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Predict, show, and give the numbers: one device's report, or with several devices all of them and their order."""
    from cdmpp.endtoend import compare_devices, read_prices
    from cdmpp.errors import UnknownDeviceError

    devices = [name.strip() for name in args.device.split(",") if name.strip()]
    if not devices:
        raise UnknownDeviceError("--device names no device")
    comparison = compare_devices(
        args.network,
        devices,
        args.predictor,
        prices=None if args.price is None else read_prices(args.price),
        data=args.data,
        schedule=args.schedule,
        streams=args.streams,
        launch_overhead_us=args.launch_us,
        programs_per_task=args.programs_per_task,
        seed=args.seed,
    )
    if len(comparison.reports) == 1:
        (report,) = comparison.reports
        _show_layers(console, report, args.layers)
        _show_report(console, report)
        for note in comparison.notes:
            console.print(f"[yellow]{note}[/]")
        return report.to_json()
    _show_comparison(console, comparison)
    return comparison.to_json()


def _show_layers(console: Console, report: LatencyReport, shown: int) -> None:
    from rich.table import Table

    from cdmpp.dataset.labels import seconds_text

    layers = [layer for layer in report.layers if layer.tasks]
    longest = sorted(layers, key=lambda layer: -layer.fraction)[: shown or None]
    what = f"the {len(longest)} longest of {len(layers)} layers" if len(longest) < len(layers) else "layers"
    table = Table(title=f"{report.network} on {report.device}: {what}, in the order of execution")
    measured = any(layer.measured_s is not None for layer in layers)
    columns = ["layer", "programs", "runs", "latency", f"{100 * report.coverage:g} % interval", "gap", "part"]
    for name in (*columns, *(["measured"] if measured else [])):
        table.add_column(name, justify="left" if name in ("layer", "programs") else "right")
    for layer in (layer for layer in layers if layer in longest):
        interval = "-"
        if layer.low_s is not None and layer.high_s is not None:
            interval = f"{seconds_text(layer.low_s)} to {seconds_text(layer.high_s)}"
        cells = [
            layer.name,
            layer.origin + (" [yellow]unfamiliar[/]" if layer.unfamiliar else ""),
            f"{layer.repeat:g}",
            seconds_text(layer.latency_s),
            interval,
            seconds_text(layer.gap_s) if layer.gap_s else "-",
            f"{100 * layer.fraction:.1f} %",
        ]
        if measured:
            cells.append("-" if layer.measured_s is None else seconds_text(layer.measured_s))
        table.add_row(*cells)
    console.print(table)


def _show_report(console: Console, report: LatencyReport) -> None:
    from cdmpp.dataset.labels import seconds_text

    gaps = f", {seconds_text(report.gap_s)} of it launch gaps" if report.gap_s else ""
    console.print(
        f"[bold]{seconds_text(report.latency_s)}[/] a run on {report.device} ({report.launches:g} kernels, schedule "
        f"{report.schedule}{gaps})"
    )
    if report.streams > 1:
        console.print(f"on one stream instead of {report.streams}: {seconds_text(report.serial_s)}")
    if report.low_s is not None and report.high_s is not None:
        console.print(
            f"between {seconds_text(report.low_s)} and {seconds_text(report.high_s)} if all tasks' errors go the same way"
        )
    if report.independent_low_s is not None and report.independent_high_s is not None:
        console.print(
            f"between {seconds_text(report.independent_low_s)} and {seconds_text(report.independent_high_s)} if they differ by "
            "chance"
        )
    if report.measured_s is not None and report.ape is not None:
        console.print(
            f"measured: {seconds_text(report.measured_s)}, so the error is {100 * report.ape:.1f} %"
        )
    if report.cost_per_million is not None:
        console.print(
            f"a million runs cost {report.cost_per_million:.4g} at {report.price_per_hour:g} an hour"
        )
    for note in report.notes:
        console.print(f"[yellow]{note}[/]")


def _show_comparison(console: Console, comparison: Comparison) -> None:
    from rich.table import Table

    from cdmpp.dataset.labels import seconds_text

    first = comparison.reports[0]
    table = Table(
        title=f"{comparison.network} on {len(comparison.reports)} devices, schedule {first.schedule}"
    )
    names = ["device", "latency", f"{100 * first.coverage:g} % interval", "to the fastest"]
    if comparison.by_cost:
        names += ["a million runs", "rank by cost"]
    for name in names:
        table.add_column(name, justify="left" if name == "device" else "right")
    for report in comparison.reports:
        interval = "-"
        if report.low_s is not None and report.high_s is not None:
            interval = f"{seconds_text(report.low_s)} to {seconds_text(report.high_s)}"
        cells = [
            report.device,
            seconds_text(report.latency_s),
            interval,
            f"{report.latency_s / first.latency_s:.2f}",
        ]
        if comparison.by_cost:
            priced = report.cost_per_million is not None
            cells.append(f"{report.cost_per_million:.4g}" if priced else "-")
            cells.append(str(comparison.by_cost.index(report.device) + 1) if priced else "-")
        table.add_row(*cells)
    console.print(table)
    for note in comparison.notes:
        console.print(f"[yellow]{note}[/]")
    for report in comparison.reports:
        for note in report.notes:
            console.print(f"[yellow]{report.device}: {note}[/]")
