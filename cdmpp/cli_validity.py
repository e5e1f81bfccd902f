"""``cdmpp validity-data``: options and rendering; the work is :func:`cdmpp.profiler.validity_run.collect_validity`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.profiler.validity_run import ValidityProgress

#: Judged programs between two lines of progress.
_EVERY = 100


def add_validity_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    from cdmpp.profiler.validity import ARCHS

    sub.add_argument(
        "networks", nargs="+", metavar="NETWORK", help="zoo name, .onnx or .pt2 file, or 'zoo' for all"
    )
    sub.add_argument(
        "--arch", default=",".join(ARCHS), metavar="A,A", help="architectures (default: %(default)s)"
    )
    sub.add_argument(
        "--programs", type=int, default=10_000, metavar="N", help="in all, evenly over the tasks"
    )
    sub.add_argument("--tasks-of", metavar="DIR", help="a dataset that has the tasks of these networks")
    sub.add_argument(
        "--timeout", type=float, default=20.0, metavar="S", help="CPU seconds of one compilation"
    )
    sub.add_argument("--workers", type=int, default=1, metavar="N", help="compiling processes")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--resume", action="store_true", help="go on with the folder in --out")
    sub.add_argument("--out", required=True, metavar="DIR")


def run_validity(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Collect, and show the counts."""
    from rich.table import Table

    from cdmpp.profiler.validity import ValidityConfig
    from cdmpp.profiler.validity_run import collect_validity
    from cdmpp.program.zoo import zoo_networks

    networks = [n for name in args.networks for n in (zoo_networks() if name == "zoo" else [name])]
    config = ValidityConfig(
        archs=tuple(a for a in args.arch.split(",") if a),
        programs=args.programs,
        timeout_s=args.timeout,
        seed=args.seed,
    )

    def show(progress: ValidityProgress) -> None:
        if progress.done % _EVERY == 0:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(progress.kinds.items()))
            errors.print(f"{progress.done} of {progress.total}: {kinds}")

    summary = collect_validity(
        networks,
        args.out,
        config,
        tasks_of=args.tasks_of,
        resume=args.resume,
        workers=args.workers,
        progress=show,
        notify=errors.print,
    )
    table = Table(title=f"{args.out}: {summary['programs']} programs of {summary['tasks']} tasks")
    for name in ("architecture", "valid", "invalid"):
        table.add_column(name, justify="left" if name == "architecture" else "right")
    for arch, counts in summary["verdicts_by_arch"].items():
        table.add_row(arch, str(counts["valid"]), str(counts["invalid"]))
    console.print(table)
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(summary["programs_by_kind"].items()))
    console.print(f"programs: {kinds}")
    rules = summary["rules"]
    console.print(
        f"{summary['compiled']} compilations; the compiler accepts {rules['of_them_valid']} of "
        f"{rules['excluded_and_compiled']} that a rule excludes and refuses {rules['of_them_invalid']} of "
        f"{rules['not_excluded_and_compiled']} others"
    )
    return summary
