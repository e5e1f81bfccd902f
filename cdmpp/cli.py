"""The ``cdmpp`` command: parse, call one public function, render. Everything it does can be done from Python."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import CdmppError

if TYPE_CHECKING:
    from rich.console import Console

Namespace = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for bad input, 130 after Ctrl-C)."""
    args = _parser().parse_args(argv)
    level = logging.DEBUG if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    # A long run that is told to end (by kill, or by a scheduler) ends as after Ctrl-C, also where a shell started it
    # in the background and so made it deaf to Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
    try:
        result = args.run(args)
        if args.json is not None:
            _write_json(args.json, result)
    except CdmppError as err:
        print(f"cdmpp: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cdmpp: interrupted; what was measured or trained so far is kept (--resume)", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away, as `head` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        return 0
    return 0


def _write_json(path: str, result: Any) -> None:
    text = json.dumps(result, indent=1, allow_nan=False, default=_jsonable) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as err:
        raise CdmppError(f"cannot write {path}: {err.strerror or err}") from err


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _console(*, err: bool = False) -> Console:
    from rich.console import Console

    # Wide tables are cut to 80 columns in a pipe unless told otherwise.
    wide = None if (sys.stderr if err else sys.stdout).isatty() else 140
    return Console(stderr=err, width=wide, highlight=False)


# -- parsing ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    from cdmpp import __version__
    from cdmpp.cli_bundle import add_bundle_arguments
    from cdmpp.cli_codegen import add_codegen_arguments
    from cdmpp.cli_devices import add_devices_arguments
    from cdmpp.cli_finetune import add_finetune_arguments
    from cdmpp.cli_import import add_import_arguments
    from cdmpp.cli_latency import add_latency_arguments
    from cdmpp.cli_measure import add_measure_arguments
    from cdmpp.cli_report import add_report_arguments
    from cdmpp.cli_search import add_search_arguments
    from cdmpp.cli_tune import add_tune_arguments

    parser = argparse.ArgumentParser(
        prog="cdmpp", description="Predicts how long a tensor program takes on a device."
    )
    parser.add_argument("--version", action="version", version=f"cdmpp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument("--json", metavar="FILE", help="write the same numbers as JSON")
        sub.add_argument("--verbose", action="store_true", help="log what happens inside")
        sub.set_defaults(run=run)
        return sub

    add_devices_arguments(
        command("devices", _devices, "known devices, and this machine as detected or measured")
    )
    command("networks", _networks, "the zoo: family, inputs, number of tasks")

    sub = command(
        "dataset", _dataset, "what datasets hold: records, failures, tasks, networks, devices, noise floor"
    )
    sub.add_argument("paths", nargs="+", metavar="DIR", help="dataset folders, or folders of them")

    sub = command("profile", _profile, "measure programs of networks on a device")
    sub.add_argument(
        "networks",
        nargs="*",
        metavar="NETWORK",
        help="zoo name (name@b4, name@s160), .onnx or .pt2 file, or 'zoo'",
    )
    sub.add_argument("--device", default="this-cpu@1", metavar="D", help="such as this-cpu@1 (default)")
    sub.add_argument("--out", required=True, metavar="DIR", help="dataset folder")
    sub.add_argument("--programs-per-task", type=int, default=64, metavar="N")
    sub.add_argument(
        "--workers", default="auto", metavar="auto|N", help="measuring processes; auto calibrates"
    )
    sub.add_argument("--builders", type=int, metavar="N", help="building processes (default: one per core)")
    sub.add_argument(
        "--search-fraction", type=float, default=0.25, metavar="F", help="part drawn from a search"
    )
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--resume", action="store_true", help="go on; nothing is measured twice")
    sub.add_argument(
        "--tasks", metavar="FILE", help="profile these tasks only (JSON with 'tasks', or a hash a line)"
    )
    sub.add_argument(
        "--unscheduled", action="store_true", help="each task as it is, as an untuned network runs it"
    )
    sub.add_argument("--programs-of", metavar="DIR", help="measure the programs of this dataset instead")
    sub.add_argument(
        "--limit", type=int, metavar="N", help="with --programs-of: so many, evenly over the tasks"
    )
    sub.add_argument(
        "--remeasure", action="store_true", help="with --programs-of: also what --out has already"
    )
    sub.add_argument(
        "--build-timeout", type=float, default=20.0, metavar="S", help="CPU seconds of one build"
    )
    sub.add_argument("--run-timeout", type=float, default=2.0, metavar="S", help="seconds of one run")
    sub.add_argument(
        "--object-cache", metavar="DIR", help="keep shared objects, to measure them again elsewhere"
    )
    sub.add_argument(
        "--max-seconds", type=float, metavar="S", help="stop after this time (go on with --resume)"
    )

    add_bundle_arguments(command("bundle", _bundle, "compile programs for a GPU that is elsewhere"))
    add_measure_arguments(command("measure", _measure, "measure a bundle on the GPU of this machine"))
    add_import_arguments(
        command("import", _import, "turn public measurements into a dataset of the same form")
    )

    sub = command("train", _train, "train a predictor")
    sub.add_argument("--config", metavar="FILE", help="configs/*.yaml (default: configs/cpu.yaml's values)")
    sub.add_argument(
        "--data", nargs="+", metavar="DIR", help="dataset folders (default: those of the configuration)"
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="run folder")
    sub.add_argument("--split", metavar="SPEC", help="in place of the configuration's, such as by_network")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")

    add_search_arguments(
        command("search", _search, "search for hyper-parameters, judged by the validation part")
    )

    add_finetune_arguments(
        command("finetune", _finetune, "teach a predictor a device by the records of a few tasks")
    )

    add_codegen_arguments(
        command("codegen", _codegen, "count the instructions of a dataset's programs, for training")
    )

    sub = command("evaluate", _evaluate, "score a predictor on measured programs")
    sub.add_argument(
        "--predictor", default="default", metavar="DIR", help="a run or predictor folder, or 'default'"
    )
    sub.add_argument("--data", nargs="+", required=True, metavar="DIR")
    sub.add_argument(
        "--split", metavar="SPEC", help="by_network, by_task:seed=1, ..., or all (default: of training)"
    )
    sub.add_argument(
        "--compiled",
        action="store_true",
        help="tell it the counted instructions of the programs (cdmpp codegen)",
    )
    sub.add_argument(
        "--measured",
        action="store_true",
        help="tell it what the same programs took on the other devices of the data",
    )
    sub.add_argument("--part", choices=("train", "valid", "test"), default="test")
    sub.add_argument(
        "--by", default="device,network", metavar="G,G", help="device, network, task, family, origin"
    )

    sub = command("predict", _predict, "predict the latency of programs or of a network's tasks")
    sub.add_argument(
        "target", metavar="PROGRAM.json|NETWORK", help="TIR as JSON, or a network (zoo, .onnx, .pt2)"
    )
    sub.add_argument("--predictor", default="default", metavar="DIR")
    sub.add_argument("--device", required=True, metavar="D")
    sub.add_argument(
        "--programs-per-task", type=int, default=64, metavar="N", help="schedules tried per task"
    )
    sub.add_argument(
        "--compile",
        type=int,
        default=0,
        metavar="N",
        help="compile (not run) the N best programs of a task, or the program, and predict from their instructions",
    )
    sub.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="D=LATENCY",
        help="what PROGRAM.json took on another device, such as rtx-3060=1.3ms; may be repeated",
    )
    sub.add_argument("--seed", type=int, default=0)

    add_latency_arguments(
        command("latency", _latency, "predict a whole network's latency on a device, or rank devices by it")
    )

    add_tune_arguments(command("tune", _tune, "find fast schedules for a network's tasks, by measuring few"))

    add_report_arguments(
        command("report", _report, "what there is to say about a training run, as one HTML file")
    )

    sub = command("demo", _demo, "train on the data that ships, show held-out error, predict a program")
    sub.add_argument("--data", nargs="+", metavar="DIR", help="default: the datasets in data/")
    sub.add_argument("--out", default="runs/demo", metavar="DIR")
    sub.add_argument("--config", default="configs/demo.yaml", metavar="FILE")
    return parser


# -- verbs -----------------------------------------------------------------------------------------------------


def _devices(args: Namespace) -> Any:
    from cdmpp.cli_devices import run_devices

    return run_devices(args, _console())


def _networks(args: Namespace) -> Any:
    from cdmpp.cli_render import show_networks
    from cdmpp.program.zoo import task_counts, zoo_entry, zoo_networks

    counts = task_counts()
    rows = [
        {
            "name": entry.name,
            "family": entry.family,
            "inputs": [str(i) for i in entry.inputs],
            "tasks": counts.get(entry.name),
            "description": entry.description,
        }
        for entry in map(zoo_entry, zoo_networks())
    ]
    show_networks(_console(), rows)
    return rows


def _dataset(args: Namespace) -> Any:
    from cdmpp.cli_render import show_summary
    from cdmpp.dataset import load_datasets

    summary = load_datasets(args.paths).summary()
    show_summary(_console(), summary)
    return summary


def _profile(args: Namespace) -> Any:
    from cdmpp.cli_measure import run_profile_gpu
    from cdmpp.cli_render import ProfileBar
    from cdmpp.device import get_device
    from cdmpp.errors import ProfilerError
    from cdmpp.profiler.profile import ProfileConfig, profile, read_task_file
    from cdmpp.program.zoo import zoo_networks

    if bool(args.networks) == bool(args.programs_of):
        raise ProfilerError("name networks to profile, or a dataset with --programs-of, not both")
    networks = [n for name in args.networks for n in (zoo_networks() if name == "zoo" else [name])]
    if args.unscheduled and args.programs_of:
        raise ProfilerError("--unscheduled measures the tasks of networks, not the programs of a dataset")
    if get_device(args.device).kind == "gpu":
        return run_profile_gpu(args, networks, _console(), _console(err=True))
    workers = args.workers if args.workers == "auto" else _whole("--workers", args.workers)
    config = ProfileConfig(
        programs_per_task=args.programs_per_task,
        unscheduled=args.unscheduled,
        search_fraction=args.search_fraction,
        workers=workers,
        builders=args.builders,
        seed=args.seed,
        build_timeout_s=args.build_timeout,
        run_timeout_s=args.run_timeout,
        object_cache=args.object_cache,
        limit=args.limit,
        max_seconds=args.max_seconds,
    )
    with ProfileBar(_console(err=True)) as bar:
        report = profile(
            networks,
            device=args.device,
            out=args.out,
            config=config,
            tasks=None if args.tasks is None else read_task_file(args.tasks),
            programs_of=args.programs_of,
            resume=args.resume,
            remeasure=args.remeasure,
            progress=bar.update,
            notify=bar.say,
        )
    failures = ", ".join(f"{n} {kind}" for kind, n in sorted(report.failures.items())) or "none"
    print(
        f"{report.path}: {report.ok} labels on {report.device} in {report.elapsed_s:.0f} s "
        f"({report.new / max(report.elapsed_s, 1e-9):.1f}/s, degree {report.workers}); failures: {failures}"
    )
    return {
        "path": str(report.path),
        "device": report.device,
        "new": report.new,
        "ok": report.ok,
        "failures": report.failures,
        "elapsed_s": report.elapsed_s,
        "workers": report.workers,
        "calibration": None if report.calibration is None else report.calibration.to_json(),
    }


def _import(args: Namespace) -> Any:
    from cdmpp.cli_import import run_import

    return run_import(args, _console(), _console(err=True))


def _whole(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as err:
        raise CdmppError(f"{option} takes auto or a whole number, not {text!r}") from err


def _train(args: Namespace) -> Any:
    from cdmpp.cli_render import TrainTable, show_metrics
    from cdmpp.predictor import config_from_dict, evaluate, load_config, train

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.split:
        config = config.model_copy(update={"split": config.split.model_copy(update={"spec": args.split})})
    if args.data:  # so that the run's config.yaml says what it was trained on
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"paths": tuple(args.data)})}
        )
    with TrainTable(_console(err=True)) as table:
        result = train(config, args.data, args.out, progress=table.update, resume=args.resume)
    scores = evaluate(result.predictor, result.data, result.split)
    show_metrics(_console(), f"{args.out}: held-out part of {scores['split']}", {"cdmpp": scores["overall"]})
    return scores


def _search(args: Namespace) -> Any:
    from cdmpp.cli_search import run_search

    return run_search(args, _console(), _console(err=True))


def _bundle(args: Namespace) -> Any:
    from cdmpp.cli_bundle import run_bundle

    return run_bundle(args, _console(), _console(err=True))


def _measure(args: Namespace) -> Any:
    from cdmpp.cli_measure import run_measure

    return run_measure(args, _console(), _console(err=True))


def _codegen(args: Namespace) -> Any:
    from cdmpp.cli_codegen import run_codegen

    return run_codegen(args, _console(), _console(err=True))


def _finetune(args: Namespace) -> Any:
    from cdmpp.cli_finetune import run_finetune

    return run_finetune(args, _console(), _console(err=True))


def _evaluate(args: Namespace) -> Any:
    from cdmpp.cli_render import show_groups, show_metrics
    from cdmpp.predictor import evaluate, gather
    from cdmpp.predictor.predictor import load_predictor

    predictor = load_predictor(args.predictor)
    by = [g for g in args.by.split(",") if g]
    data = gather(args.data)
    result = evaluate(predictor, data, args.split, by, args.part, args.compiled, args.measured)
    console = _console()
    told = f", {result['n_compiled']} told their instructions" if args.compiled else ""
    told += f", {result['n_measured']} told what they took elsewhere" if args.measured else ""
    show_metrics(console, f"{args.part} part of {result['split']}{told}", {"cdmpp": result["overall"]})
    show_groups(console, result["groups"])
    return result


def _predict(args: Namespace) -> Any:
    from cdmpp.cli_render import show_predictions
    from cdmpp.endtoend.tasks import measured_latencies, predict_network, predict_program_file
    from cdmpp.predictor.predictor import load_predictor

    predictor = load_predictor(args.predictor)
    measured = measured_latencies(args.measured)
    if args.target.endswith(".json"):
        result = predict_program_file(
            predictor, args.target, args.device, compiled=args.compile > 0, measured=measured
        )
    elif measured:
        raise CdmppError("--measured is of one program (PROGRAM.json), a network has many")
    else:
        result = predict_network(
            predictor,
            args.target,
            args.device,
            programs_per_task=args.programs_per_task,
            compile_best=args.compile,
            seed=args.seed,
        )
    show_predictions(_console(), result)
    return result


def _latency(args: Namespace) -> Any:
    from cdmpp.cli_latency import run_latency

    return run_latency(args, _console())


def _tune(args: Namespace) -> Any:
    from cdmpp.cli_tune import run_tune

    return run_tune(args, _console(), _console(err=True))


def _report(args: Namespace) -> Any:
    from cdmpp.cli_report import run_report

    return run_report(args, _console())


def _demo(args: Namespace) -> Any:
    from cdmpp.demo import run_demo

    return run_demo(_console(), args.config, args.data, args.out)


if __name__ == "__main__":
    sys.exit(main())
