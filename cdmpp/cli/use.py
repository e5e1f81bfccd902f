"""The verbs that predict: ``predict``, ``latency``; and ``demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli import options as ui
from cdmpp.errors import CdmppError, UnknownDeviceError
from cdmpp.files import seconds_text

if TYPE_CHECKING:
    from cdmpp.endtoend import Comparison


#: Programs of a task that are compiled unless told otherwise.
_COMPILED = 4
#: What `latency` predicts -> the options that say something of it, besides those of all three.
_OPTIONS_OF = {
    "networks": "runtime schedule streams launch_us price layers",
    "networks with --runtime tvm": "programs_per_task compile seed data",
    "language models": "dtype kv_dtype framework phase batch seq past generate tp price explain html",
    "lists of operators": "dtype framework explain html",
}
_COMPILE = "compile (not run) the N best programs of a task, or the program, and predict from their instructions"


def _add_predict(sub: ui.Parser) -> None:
    sub.add_argument("target", metavar="PROGRAM.json|NETWORK", help=f"TIR as JSON; or a network: {ui.NETWORK}")
    ui.add(sub, "device", required=True)
    ui.add(sub, "predictor", default="default")
    ui.add(sub, "programs_per_task", default=64)
    compiled = f"{_COMPILE} (default: {_COMPILED} on x86 CPUs, else 0)"
    ui.add(sub, "compile", type=int, default=None, metavar="N", help=compiled)
    measured = "measured latency of PROGRAM.json on another device, such as rtx-3060=1.3ms; may be repeated"
    ui.add(sub, "measured", action="append", default=[], metavar="D=LATENCY", help=measured)
    ui.add(sub, "seed", default=0)


def _predict(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Predict how long a program or each task of a network takes on a device not at hand.

    cdmpp predict mlp --device h200
    cdmpp predict program.json --device epyc-7763@1 --measured this-cpu@1=1.3ms
    """
    from cdmpp.predictor.evidence import measured_latencies
    from cdmpp.predictor.predictor import load_predictor, predict_program_file

    predictor = load_predictor(args.predictor)
    measured = measured_latencies(args.measured)
    compile_best = args.compile
    if compile_best is None:
        compile_best = _COMPILED if not measured and predictor.reads_code_of(predictor.device(args.device)) else 0
    if args.target.endswith(".json"):
        ui.refuse(args, _add_predict, "device predictor compile measured", "is of networks, and a .json file is one program")
        device = args.device
        if device.startswith("this-cpu"):  # of others this would load the profiler for nothing
            from cdmpp.profiler.core_rates import with_known_clock

            device = with_known_clock(device)
        result = predict_program_file(predictor, args.target, device, compiled=compile_best > 0, measured=measured)
        _show_program(console, result)
        return result
    if measured:
        raise CdmppError("--measured is of one program (PROGRAM.json), a network has many")
    from cdmpp.endtoend import predict_network

    drawn = {"programs_per_task": args.programs_per_task, "compile_best": compile_best, "seed": args.seed}
    with ui.Bar(errors, "drawing and predicting programs of tasks") as bar:
        result = predict_network(predictor, args.target, args.device, progress=bar.update, **drawn)
    _show_tasks(console, result)
    return result


def _show_program(console: Console, result: Mapping[str, Any]) -> None:
    ui.say(console, f"{result['program']} on {result['device']}: {seconds_text(result['latency_s'])}")
    if result["low_s"] is not None:
        interval = ui.interval_text(result["low_s"], result["high_s"])
        ui.say(console, f"{100 * result['coverage']:g} % interval: {interval}")
    far = "unfamiliar: the program is far from the training data" if result["unfamiliar"] else ""
    ui.warn(console, far, result["note"])


def _show_tasks(console: Console, result: Mapping[str, Any]) -> None:
    rows = [
        (
            row["name"],
            ui.number(row["weight"]),
            f"{row['programs']}" + (f", [yellow]{row['unfamiliar']} far[/]" if row["unfamiliar"] else ""),
            seconds_text(row["best_s"]),
            ui.interval_text(row["best_low_s"], row["best_high_s"]),
            seconds_text(row["median_s"]),
            seconds_text(row["worst_s"]),
        )
        for row in result["tasks"]
    ]
    interval = f"{100 * result['coverage']:g} % interval"
    columns = ("<task", "runs", "<programs", "best", interval, "median", "worst")
    ui.show_table(console, f"{result['network']} on {result['device']}: predicted latency per task", columns, rows)
    console.print(
        f"All tasks with the best schedule of those tried: [bold]{seconds_text(result['total_best_s'])}[/]; "
        f"with the median one: {seconds_text(result['total_median_s'])}."
    )
    if compiled := max((row["compiled"] for row in result["tasks"]), default=0):
        console.print(
            f"Best: of the {compiled} best predicted programs of each task, predicted again from their instructions; "
            "median and worst: of all, without."
        )
    far = any(row["unfamiliar"] for row in result["tasks"])
    ui.warn(console, "far: programs that are far from the training data" if far else "", result["note"])


def _add_latency(sub: ui.Parser) -> None:
    from cdmpp.cli.serving import add_options

    listed = "a language model's config.json or name, or operators as .parquet or .csv"
    network = f"{ui.NETWORK}, networks/*.json of imported traces, {listed}"
    sub.add_argument("network", metavar="NETWORK", help=network)
    devices = "device name (see cdmpp devices); several are ranked"
    ui.add(sub, "device", required=True, metavar="D[,D...]", help=devices)
    ui.add(sub, "predictor", default="default")
    runtime = "what runs the network: eager PyTorch (default), TVM's unscheduled programs, or the best predicted ones"
    ui.add(sub, "runtime", choices=("torch", "tvm", "tvm-tuned"), default=None, help=runtime)
    schedule = "program of each task: unscheduled (default), the best predicted, or that of a MetaSchedule database"
    ui.add(sub, "schedule", default="untuned", metavar="untuned|best|DIR", help=schedule)
    ui.add(sub, "programs_per_task", default=64, help="programs of each task, for --schedule best")
    ui.add(sub, "compile", type=int, default=_COMPILED, metavar="N", help=f"for TVM on an x86 CPU {_COMPILE}")
    ui.add(sub, "seed", default=0)
    ui.add(sub, "streams", default=1, metavar="N", help="most kernels at the same time on a GPU")
    shares = "predict the shares of one device, and name the smallest that is as fast as the whole within 5 %%"
    ui.add(sub, "shares", action="store_true", help=shares)
    launch = "microseconds between two launches (default: the device's, if known)"
    ui.add(sub, "launch_us", type=float, metavar="F", help=launch)
    price = "YAML or JSON file with the price of an hour of each device: rank by cost, too"
    ui.add(sub, "price", metavar="FILE", help=price)
    ui.add(sub, "data", nargs=None, help="dataset with a trace's tasks (default: the one it lies in)")
    ui.add(sub, "layers", default=20, metavar="N", help="number of layers shown, the longest first; 0 for all")
    add_options(sub)


def _latency(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Predict the latency of a whole network, and rank devices by it or by cost.

    cdmpp latency resnet18@b4 --device h200
    cdmpp latency llama-3.1-8b --device h200,l40s --dtype fp8 --batch 8 --seq 2048 --generate 256
    """
    from cdmpp.device import get_device, load_table

    devices = list({get_device(name).name: name for name in map(str.strip, args.device.split(",")) if name}.values())
    if not devices:
        raise UnknownDeviceError("--device names no device")
    for name in devices:
        if others := load_table().variants(name):
            ui.warn(errors, f"{name} is taken for {get_device(name).base}; there are {', '.join(others)}")
    if not args.shares:
        return _latency_on(args, devices, console, errors)
    from cdmpp.endtoend import shares_of, smallest_share

    if len(devices) > 1:
        raise UnknownDeviceError("--shares is of one device")
    shares = [device.name for device in shares_of(devices[0])]
    result = _latency_on(args, shares, console, errors)
    latency_s = {report["device"]: report["latency_s"] for report in result["reports"]}
    if None in latency_s.values():
        return {**result, "smallest_share": None}
    smallest = shares[smallest_share([latency_s[share] for share in shares])]
    ui.say(console, f"The smallest share that is as fast as {shares[-1]}, within 5 %: [bold]{smallest}[/].")
    return {**result, "smallest_share": smallest}


def _check_options(args: ui.Namespace, *whats: str) -> None:
    """Refuse options that say nothing of what is predicted, rather than ignore them."""
    if args.layers < 0:
        raise CdmppError(f"--layers is {args.layers}, expected 0 (all) or more")
    for key, name in ui.given(args, _add_latency).items():
        of = [kind for kind, own in _OPTIONS_OF.items() if key in own.split()]
        if of and not {*of} & {*whats} and getattr(args, key) != "torch":  # all have library kernels
            taken = f"{args.network} is taken for one of the {whats[0]} (cdmpp networks lists names)"
            raise CdmppError(f"{name} is of {' and '.join(of)}, and {taken}")


def _latency_on(args: ui.Namespace, devices: Sequence[str], console: Console, errors: Console) -> Any:
    from cdmpp.cli.serving import run as run_serving
    from cdmpp.endtoend import compare_devices, read_prices
    from cdmpp.endtoend.latency import runs_eagerly
    from cdmpp.program.llm import MODELS, is_config, model_name

    if (config := Path(args.network) / "config.json").is_file():  # a folder of weights
        args.network = str(config)
    listed = args.network.lower().endswith((".parquet", ".csv"))
    if listed or model_name(args.network) in MODELS or (args.network.endswith(".json") and is_config(args.network)):
        _check_options(args, "lists of operators" if listed else "language models")
        return run_serving(args, devices, console, errors)
    tuned = args.runtime == "tvm-tuned"
    runtime = "tvm" if tuned else args.runtime
    schedule = "best" if tuned and args.schedule == "untuned" else args.schedule
    by_torch = runs_eagerly(args.network, runtime, schedule)
    _check_options(args, "networks", *([] if by_torch else ["networks with --runtime tvm"]))
    options = {name: getattr(args, name) for name in ("data", "streams", "programs_per_task", "seed")}
    options |= {"runtime": runtime, "schedule": schedule, "launch_overhead_us": args.launch_us, "compile_best": args.compile}
    prices = None if args.price is None else read_prices(args.price)
    reading = errors.status("reading the network, predicting its tasks")

    def compiled(done: int, total: int) -> None:
        reading.stop()
        bar.update(done, total)

    with reading, ui.Bar(errors, "programs compiled") as bar:
        comparison = compare_devices(args.network, devices, args.predictor, prices=prices, progress=compiled, **options)
    if len(comparison.reports) == 1:  # its numbers also stand on top
        _show_layers(console, comparison, args.layers)
        return {**comparison.to_json(), **comparison.reports[0].to_json()}
    _show_devices(console, comparison, devices[-1] if args.shares else None)
    return comparison.to_json()


def _show_layers(console: Console, comparison: Comparison, shown: int) -> None:
    """The longest layers on one device (``shown`` of them, 0 for all), and the network."""
    report = comparison.reports[0]
    layers = [layer for layer in report.layers if layer.tasks]
    longest = sorted(layers, key=lambda layer: -layer.fraction)[: shown or None]
    what = f"the {len(longest)} longest of {len(layers)} layers" if len(longest) < len(layers) else "layers"
    interval = f"{100 * report.coverage:g} % interval"
    columns = ("<layer", "<programs", "runs", "latency", interval, "part", "?gap", "?measured")
    rows = [
        (
            layer.name,
            layer.origin + (" [yellow]unfamiliar[/]" if layer.unfamiliar else ""),
            f"{layer.repeat:g}",
            seconds_text(layer.latency_s),
            ui.interval_text(layer.low_s, layer.high_s),
            ui.percent(layer.fraction),
            seconds_text(layer.gap_s or None),
            seconds_text(layer.measured_s),
        )
        for layer in layers
        if layer in longest
    ]
    title = f"{report.network} on {report.device}: {what}, in the order of execution"
    ui.show_table(console, title, columns, rows)
    of_gaps = f", {seconds_text(report.gap_s)} of it launch gaps" if report.gap_s else ""
    kernels = f"{report.launches:g} kernels, schedule {report.schedule}{of_gaps}"
    ui.say(console, f"[bold]{seconds_text(report.latency_s)}[/] a run on {report.device} ({kernels})")
    if report.streams > 1:
        ui.say(console, f"on one stream instead of {report.streams}: {seconds_text(report.serial_s)}")
    for low_s, high_s, when in (
        (report.low_s, report.high_s, "all tasks' errors go the same way"),
        (report.independent_low_s, report.independent_high_s, "they differ by chance"),
    ):
        if low_s is not None and high_s is not None:
            ui.say(console, f"between {seconds_text(low_s)} and {seconds_text(high_s)} if {when}")
    if report.measured_s is not None:
        ui.say(console, f"measured: {seconds_text(report.measured_s)}, so the error is {ui.percent(report.ape)}")
    if report.cost_per_million is not None:
        ui.say(console, f"a million runs cost {report.cost_per_million:.4g} at {report.price_per_hour:g} an hour")
    ui.warn(console, *report.notes, *comparison.notes)


def _show_devices(console: Console, comparison: Comparison, whole: str | None) -> None:
    """A network on several devices, the fastest first; of shares the notes of the `whole` alone."""
    from cdmpp.cli.serving import show_ranked

    def rank(report: Any) -> str:
        priced = report.device in comparison.by_cost
        return str(comparison.by_cost.index(report.device) + 1) if priced else "-"

    cost = {"?a million runs": lambda report: ui.number(report.cost_per_million, ".4g"), "?rank by cost": rank}
    eager = any(report.schedule == "torch" for report in comparison.reports)
    how = "run by PyTorch" if eager else f"schedule {comparison.reports[0].schedule}"
    title = f"{comparison.network} on {len(comparison.reports)} devices, {how}"
    show_ranked(console, title, comparison.reports, cost)
    noted = [report for report in comparison.reports if whole in (None, report.device)]
    notes = [(report.device, note) for report in noted for note in report.notes]
    ui.warn(console, *(comparison.notes if whole is None else ()))
    ui.warn(console, *(note if device in note else f"{device}: {note}" for device, note in notes))


def _add_demo(sub: ui.Parser) -> None:
    ui.add(sub, "data", default=["data"], help="the data that ship (default: data)")
    ui.add(sub, "out", default="runs/demo", help="folder; measurements already there are reused")


def _demo(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Measure a small network here, predict it, learn from it and compare, in minutes.

    cdmpp demo
    cdmpp demo --out /tmp/demo --json demo.json
    """
    from cdmpp.cli.demo import run_demo

    return run_demo(console, errors, args.data, args.out)


VERBS: ui.Verbs = {"demo": (_add_demo, _demo), "predict": (_add_predict, _predict), "latency": (_add_latency, _latency)}
