"""``cdmpp codegen``: options and rendering; the work is :mod:`cdmpp.dataset.codegen`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_codegen_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("data", nargs="+", metavar="DIR", help="dataset folders with labels of x86 CPUs")
    sub.add_argument("--workers", type=int, default=1, metavar="N", help="compiling processes")
    sub.add_argument(
        "--object-cache", metavar="DIR", help="keep what is compiled, and what cdmpp profile compiled"
    )


def run_codegen(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Count the instructions of the programs that have no counts yet."""
    from cdmpp.cli_render import CountBar
    from cdmpp.dataset.codegen import CODEGEN_FILE, collect_codegen

    summary: dict[str, int] = {}
    for folder in args.data:
        with CountBar(errors, f"programs of {folder} without counts") as bar:
            summary[folder] = len(collect_codegen(folder, args.workers, bar.update, args.object_cache))
        console.print(f"{folder}/{CODEGEN_FILE}: {summary[folder]} programs")
    return summary
