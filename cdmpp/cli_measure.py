"""``cdmpp measure``: options and rendering; the work is :func:`cdmpp.profiler.gpu.measure.measure`'s."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.profiler.gpu.measure import MeasureConfig, MeasureReport
    from cdmpp.profiler.session import Progress

#: Seconds between two lines of progress.
_EVERY_S = 5.0


def add_measure_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("bundle", metavar="FILE", help="what cdmpp bundle wrote")
    sub.add_argument("--out", required=True, metavar="DIR", help="dataset folder")
    sub.add_argument("--device", metavar="D", help="the bundle's device or a share of it, such as h200@0.5")
    sub.add_argument(
        "--degree", default="auto", metavar="auto|N", help="programs side by side; auto calibrates"
    )
    sub.add_argument(
        "--cache", choices=("warm", "cold"), default="warm", help="level-2 cache before a sample"
    )
    sub.add_argument(
        "--from-source", action="store_true", help="compile here, although the bundle has cubins"
    )
    sub.add_argument("--no-overlap", action="store_true", help="one program at a time through all stages")
    sub.add_argument("--compilers", type=int, metavar="N", help="compiling processes (default: cores - 1)")
    sub.add_argument("--run-timeout", type=float, default=2.0, metavar="S", help="seconds of one run")
    sub.add_argument(
        "--check", type=int, default=2, metavar="N", help="programs a task compared with its reference"
    )
    sub.add_argument("--limit", type=int, metavar="N", help="so many programs, evenly over the tasks")
    sub.add_argument(
        "--max-seconds", type=float, metavar="S", help="stop after this time (go on with --resume)"
    )
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--resume", action="store_true", help="go on; nothing is measured twice")


def run_measure(args: argparse.Namespace, console: Console, errors: Console) -> Any:
    """Measure, and say what was measured."""
    from cdmpp.profiler.gpu.measure import measure

    return _shown(
        measure(
            args.bundle,
            out=args.out,
            device=args.device,
            config=_config(args),
            resume=args.resume,
            progress=_Lines(errors),
            notify=errors.print,
        ),
        console,
    )


def run_profile_gpu(args: argparse.Namespace, networks: list[str], console: Console, errors: Console) -> Any:
    """``cdmpp profile`` of a GPU of this machine: compile and measure."""
    from cdmpp.errors import ProfilerError
    from cdmpp.profiler.gpu.make import BundleConfig
    from cdmpp.profiler.gpu.measure import MeasureConfig, profile_gpu

    for option in ("tasks", "programs_of", "remeasure", "unscheduled", "object_cache"):
        if getattr(args, option):
            raise ProfilerError(
                f"--{option.replace('_', '-')} is for CPUs: for a GPU, cdmpp bundle and cdmpp measure have more options"
            )
    report = profile_gpu(
        networks,
        device=args.device,
        out=args.out,
        bundle_config=BundleConfig(
            programs_per_task=args.programs_per_task,
            builders=args.builders,
            build_timeout_s=args.build_timeout,
            seed=args.seed,
        ),
        measure_config=MeasureConfig(
            run_timeout_s=args.run_timeout, limit=args.limit, max_seconds=args.max_seconds, seed=args.seed
        ),
        resume=args.resume,
        progress=_Lines(errors),
        notify=errors.print,
    )
    return _shown(report, console)


def _config(args: argparse.Namespace) -> MeasureConfig:
    from cdmpp.errors import CdmppError
    from cdmpp.profiler.gpu.measure import MeasureConfig

    if args.degree != "auto" and not args.degree.isdigit():
        raise CdmppError(f"--degree takes auto or a whole number, not {args.degree!r}")
    return MeasureConfig(
        degree="auto" if args.degree == "auto" else int(args.degree),
        cold=args.cache == "cold",
        from_source=args.from_source,
        overlap=not args.no_overlap,
        builders=args.compilers,
        run_timeout_s=args.run_timeout,
        check_per_task=args.check,
        limit=args.limit,
        max_seconds=args.max_seconds,
        seed=args.seed,
    )


class _Lines:
    """Prints a line of progress every few seconds."""

    def __init__(self, errors: Console) -> None:
        self._errors, self._said_s = errors, 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.elapsed_s >= self._said_s + _EVERY_S:
            self._said_s = progress.elapsed_s
            failures = ", ".join(f"{n} {kind}" for kind, n in sorted(progress.failures.items())) or "none"
            rate = progress.new / progress.elapsed_s
            self._errors.print(
                f"{progress.done} of {progress.total}: {progress.ok} ok, {rate:.1f}/s; failures: {failures}"
            )


def _shown(report: MeasureReport, console: Console) -> Any:
    """Say what was measured; the same as JSON values."""
    failures = ", ".join(f"{n} {kind}" for kind, n in sorted(report.failures.items())) or "none"
    console.print(
        f"{report.path}: {report.ok} labels on {report.device} in {report.elapsed_s:.0f} s "
        f"({report.labels_per_s:.1f}/s), {report.checked} outputs checked, {report.restarts} restarts; "
        f"failures: {failures}"
    )
    return {
        "path": str(report.path),
        "device": report.device,
        "new": report.new,
        "ok": report.ok,
        "failures": report.failures,
        "elapsed_s": report.elapsed_s,
        "labels_per_s": report.labels_per_s,
        "restarts": report.restarts,
        "checked": report.checked,
        "degrees": {str(group): degree for group, degree in report.degrees.items()},
        "calibration": report.calibration,
        "gpu": asdict(report.facts),
    }
