"""``cdmpp report``: arguments and output."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``cdmpp report``."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="what cdmpp train wrote")
    parser.add_argument(
        "--data", nargs="+", metavar="DIR", help="dataset folders (default: those of the run's configuration)"
    )
    parser.add_argument("--split", metavar="SPEC", help="as of cdmpp evaluate (default: the run's own)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the HTML file")


def run_report(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write the report; returns what ``cdmpp evaluate --json`` would write, and the file's path."""
    from cdmpp.cli_render import show_metrics
    from cdmpp.report.html import write_report

    report = write_report(args.run_dir, args.out, args.data, args.split)
    show_metrics(console, f"test part of {report.scores['split']}", {"cdmpp": report.scores["overall"]})
    console.print(f"Written to {args.out}.")
    return {**report.scores, "path": str(args.out)}
