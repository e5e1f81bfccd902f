"""``cdmpp finetune``: options and rendering; the work is :func:`cdmpp.predictor.finetune`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_finetune_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("--predictor", default="default", metavar="DIR", help="where to start, or 'default'")
    sub.add_argument(
        "--data", nargs="+", required=True, metavar="DIR", help="records of D, and of other devices"
    )
    sub.add_argument("--device", required=True, metavar="D")
    sub.add_argument(
        "--tasks", metavar="K|FILE", help="how many tasks to choose, or which (default: all of D's)"
    )
    sub.add_argument("--select", choices=("kmeans", "random"), default="kmeans", help="how to choose K tasks")
    sub.add_argument("--seed", type=int, default=0, help="of the choice, and of training without --config")
    sub.add_argument(
        "--adapt", type=float, default=0.0, metavar="F", help="part of D's other programs seen without labels"
    )
    sub.add_argument("--config", metavar="FILE", help="its loss, train and data sections are used")
    sub.add_argument("--out", required=True, metavar="DIR", help="run folder")


def run_finetune(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Finetune, show the error on the device's other tasks, or say what to profile."""
    from cdmpp.cli_render import TrainTable, show_metrics
    from cdmpp.predictor import Predictor, evaluate, finetune, load_config
    from cdmpp.profiler.session import read_task_file

    tasks = args.tasks
    if tasks is not None:
        tasks = int(tasks) if tasks.isdigit() else read_task_file(tasks)
    with TrainTable(errors) as table:
        result = finetune(
            Predictor.default() if args.predictor == "default" else args.predictor,
            args.data,
            args.device,
            args.out,
            tasks=tasks,
            select=args.select,
            seed=args.seed,
            adapt=args.adapt,
            config=load_config(args.config) if args.config else None,
            progress=table.update,
        )
    summary = {
        "task_file": str(result.task_file),
        "selection": result.selection.to_json(),
        "next_command": result.next_command,
    }
    if result.predictor is None:
        console.print(
            f"There are no records of {args.device} yet. Measure the {len(result.selection.wanted)} tasks"
        )
        console.print(f"chosen, which {result.task_file} names, and finetune again with DIR beside --data:")
        print(result.next_command)
        return summary
    chosen = f"{len(result.selection.tasks)} tasks of {args.device}"
    valid = result.predictor.training["valid_mape"]
    console.print(f"{args.out}: finetuned on {chosen}; MAPE {100 * valid:.1f} % on programs of them held out")
    if result.split is None:
        return {**summary, "valid_mape": valid}
    scores = evaluate(result.predictor, result.data, result.split)
    show_metrics(console, f"the other tasks on {args.device}", {"cdmpp": scores["overall"]})
    return {**summary, "valid_mape": valid, **scores}
