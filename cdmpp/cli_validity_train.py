"""``cdmpp validity-train``: options and rendering; the work is :mod:`cdmpp.tuner.validity`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_validity_train_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("--data", nargs="+", default=[], metavar="DIR", help="datasets with failure records")
    sub.add_argument(
        "--verdicts", nargs="+", default=[], metavar="DIR", help="folders of cdmpp validity-data"
    )
    sub.add_argument("--devices", metavar="D,D", help="learn from these devices and architectures only")
    sub.add_argument(
        "--split", metavar="SPEC", help="score on a part that is not learned from, such as by_task:valid=0"
    )
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--out", required=True, metavar="DIR", help="folder of the model")


def run_validity_train(args: argparse.Namespace, console: Console, errors: Console) -> dict[str, Any]:
    """Train, save, and show how good it is on programs that it did not learn from."""
    from rich.table import Table

    from cdmpp.tuner.validity import ForestConfig, train_validity

    result = train_validity(
        args.data,
        args.verdicts,
        args.out,
        devices=args.devices.split(",") if args.devices else None,
        split=args.split,
        config=ForestConfig(seed=args.seed),
    )
    training = result["training"]
    console.print(
        f"{args.out}: learned from {training['rows']} programs on {', '.join(training['devices'])}, "
        f"{training['rows'] - training['valid']} of them invalid"
    )
    table = Table(title="programs it did not learn from")
    for name in ("", "programs", "invalid", "AUC", "Brier score", "found at 1 % loss", "at 5 % loss"):
        table.add_column(name, justify="right" if name else "left")
    parts = {"left out in turn": training.get("out_of_fold"), **result["test"]}
    for name, scores in parts.items():
        if scores is not None:
            found = scores["found_at_loss"]
            numbers = (scores["auc"], scores["brier"], found["0.01"], found["0.05"])
            texts = ["-" if number is None else f"{number:.3f}" for number in numbers]
            table.add_row(name, str(scores["n"]), f"{100 * scores['invalid']:.1f} %", *texts)
    console.print(table)
    return result
