"""``cdmpp codegen``: options and rendering; the work is :mod:`cdmpp.profiler.codegen_store`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_codegen_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("data", nargs="+", metavar="DIR", help="dataset folders with labels of x86 CPUs")
    sub.add_argument("--workers", type=int, default=1, metavar="N", help="compiling processes")


def run_codegen(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Count the instructions of the programs that have no counts yet."""
    from rich.progress import Progress, TaskID

    from cdmpp.profiler.codegen_store import CODEGEN_FILE, collect_codegen

    summary: dict[str, int] = {}
    with Progress(console=errors) as bar:
        for folder in args.data:
            task = bar.add_task(folder)

            def update(done: int, total: int, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            summary[folder] = len(collect_codegen(folder, args.workers, update))
    for folder, programs in summary.items():
        console.print(f"{folder}/{CODEGEN_FILE}: {programs} programs")
    return summary
