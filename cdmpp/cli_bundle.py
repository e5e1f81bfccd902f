"""``cdmpp bundle``: options and rendering; the work is :func:`cdmpp.profiler.gpu.make.make_bundle`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.profiler.session import Progress

#: Built programs between two lines of progress.
_EVERY = 50


def add_bundle_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument(
        "networks", nargs="+", metavar="NETWORK", help="zoo name, .onnx or .pt2 file, or 'zoo' for all"
    )
    sub.add_argument("--device", required=True, metavar="D", help="a CUDA device, such as h200")
    sub.add_argument("--out", required=True, metavar="FILE", help="the bundle")
    sub.add_argument("--programs-per-task", type=int, default=16, metavar="N", help="that can run")
    sub.add_argument(
        "--invalid-per-task", type=int, default=2, metavar="N", help="that cannot, kept as records"
    )
    sub.add_argument("--builders", type=int, metavar="N", help="building processes (default: one per core)")
    sub.add_argument(
        "--build-timeout", type=float, default=30.0, metavar="S", help="CPU seconds of one program"
    )
    sub.add_argument("--task-seconds", type=float, default=120.0, metavar="S", help="spent on one task")
    sub.add_argument(
        "--code", choices=("both", "cubin", "source"), default="both", help="what is kept (default: both)"
    )
    sub.add_argument("--tasks-of", metavar="DIR", help="a dataset that has the tasks of these networks")
    sub.add_argument("--mutants-of", metavar="DIR", help="records on D: draw mutants of the fastest programs")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--resume", action="store_true", help="go on with a bundle that was not finished")


def run_bundle(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Make the bundle and say what it holds."""
    from cdmpp.profiler.gpu.make import BundleConfig, make_bundle
    from cdmpp.program.zoo import zoo_networks

    networks = [n for name in args.networks for n in (zoo_networks() if name == "zoo" else [name])]
    config = BundleConfig(
        programs_per_task=args.programs_per_task,
        invalid_per_task=args.invalid_per_task,
        builders=args.builders,
        build_timeout_s=args.build_timeout,
        task_seconds=args.task_seconds,
        cubins=args.code != "source",
        sources=args.code != "cubin",
        seed=args.seed,
    )
    said = 0

    def show(progress: Progress) -> None:
        nonlocal said
        if progress.done >= said + _EVERY:
            said = progress.done
            counts = {"ok": progress.ok, **progress.failures}
            statuses = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
            errors.print(f"{progress.done} of {progress.total}: {statuses}")

    report = make_bundle(
        networks,
        device=args.device,
        out=args.out,
        config=config,
        tasks_of=args.tasks_of,
        mutants_of=args.mutants_of,
        resume=args.resume,
        progress=show,
        notify=errors.print,
    )
    statuses = ", ".join(f"{n} {status}" for status, n in sorted(report.statuses.items()))
    console.print(
        f"{report.path}: {statuses} of {report.tasks} tasks for {report.device} by {report.compiler}; "
        f"{report.references} references; {report.bytes / 1e6:.1f} MB"
    )
    return {
        "path": str(report.path),
        "device": report.device,
        "compiler": report.compiler,
        "tasks": report.tasks,
        "references": report.references,
        "statuses": report.statuses,
        "bytes": report.bytes,
    }
