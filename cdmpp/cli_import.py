"""``cdmpp import``: options and rendering; the work is :mod:`cdmpp.dataset.importers`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.dataset.importers import ImportReport


def add_import_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("source", choices=("neusight", "benchmark-hub"), help="whose files they are")
    sub.add_argument(
        "files", nargs="+", metavar="FILE", help="parquet or CSV files, told apart by their columns"
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="new dataset folder")
    sub.add_argument("--devices", nargs="+", default=(), metavar="FILE", help="YAML files of further devices")
    sub.add_argument("--limit", type=int, metavar="N", help="so many rows of each file, spread evenly")


def run_import(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Import, and say what came of it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cdmpp.dataset.importers import import_benchmark_hub, import_neusight
    from cdmpp.device import load_table

    run = import_neusight if args.source == "neusight" else import_benchmark_hub
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        shown = bar.add_task("reading", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)

        report = run(args.files, args.out, table=load_table(args.devices), limit=args.limit, progress=update)
    _show(console, report)
    return report.to_json()


def _show(console: Console, report: ImportReport) -> None:
    failures = ", ".join(f"{n} {status}" for status, n in sorted(report.records.items()) if status != "ok")
    console.print(
        f"{report.path}: {report.records.get('ok', 0)} labels ({failures or 'no'} failures) of {report.programs} "
        f"programs of {report.tasks} tasks on {', '.join(report.devices) or 'no device'}"
    )
    if report.graphs:
        console.print(f"{len(report.graphs)} networks as graphs of tasks: {', '.join(report.graphs)}")
    for name, count in report.unknown_operators.items():
        console.print(f"left out: {count} of the unknown operator {name}")
    for note in report.notes:
        console.print(note)
