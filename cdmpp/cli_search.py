"""``cdmpp search``: arguments and output."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Trials in the table; all of them are in ``summary.json``.
_ROWS = 10


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``cdmpp search``."""
    parser.add_argument("--config", metavar="FILE", help="what is not searched (default: as of cdmpp train)")
    parser.add_argument(
        "--data", nargs="+", metavar="DIR", help="dataset folders (default: those of the configuration)"
    )
    parser.add_argument(
        "--trials", type=int, required=True, metavar="N", help="in all, with those done before"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="search folder")
    parser.add_argument("--split", metavar="SPEC", help="in place of the configuration's")
    parser.add_argument("--resume", action="store_true", help="go on with the search in --out")
    parser.add_argument(
        "--model",
        default="ours",
        choices=("ours", "xgboost-perstore", "xgboost-ast", "xgboost-ast-codegen", "lstm", "released"),
        help="whose hyper-parameters (default: ours)",
    )


def run_search(args: argparse.Namespace, console: Console, progress: Console) -> dict[str, Any]:
    """Run the search, show a line a trial on ``progress`` and the best ones on ``console``."""
    from cdmpp.predictor import config_from_dict, load_config
    from cdmpp.predictor.search import BEST_FILE, search

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.split:
        config = config.model_copy(update={"split": config.split.model_copy(update={"spec": args.split})})
    result = search(
        config,
        args.data,
        args.out,
        args.trials,
        args.model,
        args.resume,
        progress=lambda line: progress.print(_text(line)),
    )
    show_search(console, result.summary)
    console.print(f"The best values are in {args.out}/{BEST_FILE}.")
    return result.summary


def show_search(console: Console, summary: Mapping[str, Any]) -> None:
    """The best trials of a search and what became of the others."""
    from rich.table import Table

    lines = summary["trials"]
    complete = sorted((line for line in lines if line["state"] == "complete"), key=lambda line: line["value"])
    table = Table(title=f"{summary['model']}, {summary['split']}: validation MAPE of the best trials")
    for name in ("trial", "MAPE", "time", "values"):
        table.add_column(name, justify="left" if name == "values" else "right")
    for line in complete[:_ROWS]:
        table.add_row(str(line["trial"]), _mape(line), f"{line['seconds']:.0f} s", _values(line["values"]))
    console.print(table)
    counts = {state: sum(line["state"] == state for line in lines) for state in _STATES}
    console.print(
        f"{len(lines)} trials in {summary['seconds']:.0f} s: "
        + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
        + f"; {summary['n_train']} records trained, {summary['n_valid']} judged, the test part was not looked at."
    )


_STATES = ("complete", "pruned", "failed", "interrupted")


def _text(line: Mapping[str, Any]) -> str:
    said = line["error"] or f"validation MAPE {_mape(line)}"
    return f"trial {line['trial']:3d}  {line['state']:8s}  {said}  {line['seconds'] or 0:.0f} s"


def _mape(line: Mapping[str, Any]) -> str:
    errors = [line[name] for name in ("valid_mape", "valid_mape_compiled") if line[name] is not None]
    return ", ".join(f"{100 * error:.1f} %" for error in errors) or "-"


def _values(values: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
