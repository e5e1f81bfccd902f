"""The verbs that make data: ``profile``, ``bundle``, ``measure``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli import options as ui
from cdmpp.errors import ProfilerError

if TYPE_CHECKING:
    from cdmpp.profiler.gpu.measure import MeasureReport
    from cdmpp.profiler.library import LibraryReport

#: Options of ``cdmpp profile`` that are taken by all, by --compile-only, and for a GPU.
_BY_ALL = "device out resume library compile_only"
_TO_COMPILE = f"{_BY_ALL} programs_per_task builders build_timeout_s object_cache max_seconds seed"
_OF_GPUS = f"{_BY_ALL} tasks programs_per_task builders build_timeout_s run_timeout_s limit max_seconds seed"
_TASKS = "only these tasks (JSON with 'tasks', or one hash per line)"


def _add_profile(sub: ui.Parser) -> None:
    from cdmpp.profiler.session import ProfileConfig, read_task_file

    sub.add_argument("networks", nargs="*", metavar="NETWORK", help=ui.NETWORKS)
    ui.add(sub, "device", default="this-cpu@1")
    ui.add(sub, "out", required=True, help="dataset folder")
    ui.add(sub, "resume")
    ui.add(sub, "tasks", metavar="FILE", type=read_task_file, help=_TASKS)
    ui.add(sub, "programs_of", metavar="DIR", help="measure the programs of this dataset instead")
    ui.add(sub, "remeasure", action="store_true", help="with --programs-of: also measure again what --out has")
    ui.add(sub, "library", action="store_true", help="measure PyTorch's own kernels in place of TVM's programs")
    ui.add(sub, "compile_only", action="store_true", help="compile random programs for D without measuring them")
    ui.add_settings(sub, ProfileConfig)


def _profile(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Measure programs of networks on a device of this machine, as training data.

    cdmpp profile mlp resnet18 --out runs/mine          64 programs of each task, on one core
    cdmpp profile zoo --library --out runs/library --resume    PyTorch's own operators
    """
    from cdmpp.device import get_device
    from cdmpp.profiler.session import ProfileConfig, profile

    networks = ui.networks_of(args.networks)
    if bool(networks) == bool(args.programs_of):
        raise ProfilerError("name networks to profile, or a dataset with --programs-of, not both")
    if args.unscheduled and args.programs_of:
        raise ProfilerError("--unscheduled measures the tasks of networks, not the programs of a dataset")
    if sum(map(bool, (args.library, args.ray, args.rpc, args.compile_only))) > 1:
        raise ProfilerError("--library, --ray and --rpc measure in different places, --compile-only nowhere: use one")
    if args.library:
        from cdmpp.profiler.library import profile_library

        ui.refuse(args, _add_profile, _BY_ALL, "is of programs: --library measures every operator of the networks")
        with ui.Bar(errors, "measuring") as bar:
            found = profile_library(networks, args.device, args.out, resume=args.resume, progress=bar.update)
        return _shown_labels(found, console)
    if args.compile_only:
        from cdmpp.profiler.compiled import compile_programs

        ui.refuse(args, _add_profile, _TO_COMPILE, "is of measuring: --compile-only compiles random programs")
        with ui.Bar(errors, "compiling") as bar:
            made = compile_programs(networks, config=ui.settings(args, ProfileConfig), **_run(args, bar))
        what = f"{made.ok} programs compiled for {made.device}, none measured"
        ui.say(console, f"{made.path}: {what}; failures: {ui.counts_text(made.failures)}")
        return asdict(made)
    if args.ray is None and args.rpc is None and get_device(args.device).kind == "gpu":
        return _profile_gpu(networks, args, console, errors)
    with ui.Bar(errors, "measuring") as bar:
        chosen: dict[str, Any] = {"tasks": args.tasks, "programs_of": args.programs_of, "remeasure": args.remeasure}
        report = profile(networks, config=ui.settings(args, ProfileConfig), **chosen, **_run(args, bar))
    ui.say(
        console,
        f"{report.path}: {report.ok} labels on {report.device} in {report.elapsed_s:.0f} s "
        f"({report.new / max(report.elapsed_s, 1e-9):.1f}/s, degree {report.workers}); "
        f"failures: {ui.counts_text(report.failures)}",
    )
    return asdict(report)


def _run(args: ui.Namespace, bar: ui.Bar) -> dict[str, Any]:
    """Arguments of everything that measures or compiles: for what, where to, and what shows its progress."""
    given = {name: getattr(args, name) for name in ("device", "out", "resume")}
    return {**given, "progress": bar.follow, "notify": bar.say}


def _shown_labels(report: LibraryReport, console: Console) -> Any:
    """Say how many operators were measured; the same as JSON values."""
    ui.say(
        console,
        f"{report.path}: {report.labels} labels on {report.device}, {report.new} operators in {report.elapsed_s:.0f} s; "
        f"failures: {ui.counts_text(report.failures)}",
    )
    return asdict(report)


def _profile_gpu(networks: list[str], args: ui.Namespace, console: Console, errors: Console) -> Any:
    from cdmpp.profiler.gpu.make import BundleConfig
    from cdmpp.profiler.gpu.measure import MeasureConfig, profile_gpu

    more = "is for CPUs: for a GPU, cdmpp bundle and cdmpp measure have more options"
    ui.refuse(args, _add_profile, _OF_GPUS, more)
    with ui.Bar(errors, "measuring") as bar:
        build, measure = ui.settings(args, BundleConfig), ui.settings(args, MeasureConfig)
        report = profile_gpu(networks, bundle_config=build, measure_config=measure, tasks=args.tasks, **_run(args, bar))
    return _shown(report, console)


def _add_bundle(sub: ui.Parser) -> None:
    from cdmpp.profiler.gpu.make import BundleConfig
    from cdmpp.profiler.session import read_task_file

    sub.add_argument("networks", nargs="+", metavar="NETWORK", help=ui.NETWORKS)
    ui.add(sub, "device", required=True, help="a CUDA device, such as h200")
    ui.add(sub, "out", required=True, metavar="FILE", help="the bundle")
    ui.add(sub, "resume")
    ui.add(sub, "code", choices=("both", "cubin", "source"), default="both", help="form of the code in the bundle")
    ui.add(sub, "tasks", metavar="FILE", type=read_task_file, help=_TASKS)
    ui.add(sub, "tasks_of", metavar="DIR", help="a dataset that has the tasks of these networks")
    ui.add(sub, "mutants_of", metavar="DIR", help="records on D: mutate their fastest programs")
    ui.add_settings(sub, BundleConfig)


def _bundle(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Compile programs into one file, for a GPU of another machine.

    cdmpp bundle resnet18 bert_tiny --device h200 --out h200.bundle
    cdmpp bundle zoo --device t4 --programs-per-task 4 --out t4.bundle --resume
    """
    from cdmpp.profiler.gpu.make import BundleConfig, make_bundle

    with ui.Bar(errors, "compiling") as bar:
        config = ui.settings(args, BundleConfig, cubins=args.code != "source", sources=args.code != "cubin")
        drawn = {"tasks": args.tasks, "tasks_of": args.tasks_of, "mutants_of": args.mutants_of}
        report = make_bundle(ui.networks_of(args.networks), config=config, **drawn, **_run(args, bar))
    ui.say(
        console,
        f"{report.path}: {ui.counts_text(report.statuses)} of {report.tasks} tasks for {report.device} by "
        f"{report.compiler}; {report.references} references; {report.bytes / 1e6:.1f} MB",
    )
    return asdict(report)


def _add_measure(sub: ui.Parser) -> None:
    from cdmpp.profiler.gpu.measure import MeasureConfig

    what = "a bundle of cdmpp bundle, or a .csv of operators for PyTorch to run (cdmpp finetune --tasks K without --data)"
    sub.add_argument("bundle", metavar="FILE", help=what)
    ui.add(sub, "device", help="the bundle's device (default) or a share, such as h200@0.5; of operators the GPU or CPU here")
    ui.add(sub, "out", required=True, help="dataset folder")
    ui.add(sub, "resume")
    ui.add(sub, "cache", choices=("warm", "cold"), default="warm", help="state of the L2 cache before a sample")
    ui.add_settings(sub, MeasureConfig)


def _measure(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Measure a bundle, or a list of operators, on this machine's GPU, without TVM.

    cdmpp measure h200.bundle --device h200@0.5 --out runs/half --budget 10m
    cdmpp measure operators.csv --out runs/operators                of libraries, by PyTorch
    """
    from cdmpp.profiler.gpu.measure import MeasureConfig, measure

    if args.bundle.lower().endswith(".csv"):
        from cdmpp.profiler.library import measure_operators

        ui.refuse(args, _add_measure, "device out resume max_seconds", "is of bundles, and a .csv file lists operators")
        with ui.Bar(errors, "measuring") as bar:
            when = {"resume": args.resume, "max_seconds": args.max_seconds}
            found = measure_operators(args.bundle, args.out, args.device, progress=bar.update, **when)
        return _shown_labels(found, console)
    with ui.Bar(errors, "measuring") as bar:
        config = ui.settings(args, MeasureConfig, cold=args.cache == "cold")
        report = measure(args.bundle, config=config, **_run(args, bar))
    return _shown(report, console)


def _shown(report: MeasureReport, console: Console) -> Any:
    """Say what was measured on a GPU; the same as JSON values."""
    ui.say(
        console,
        f"{report.path}: {report.ok} labels on {report.device} in {report.elapsed_s:.0f} s "
        f"({report.labels_per_s:.1f}/s), {report.checked} outputs checked, {report.restarts} restarts; "
        f"failures: {ui.counts_text(report.failures)}",
    )
    values = asdict(report)
    return {**values, "gpu": values.pop("facts")}


VERBS: ui.Verbs = {"profile": (_add_profile, _profile), "bundle": (_add_bundle, _bundle), "measure": (_add_measure, _measure)}
