"""The verbs that predict: ``predict``, ``latency``; and ``demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.cli.options import NETWORK, Namespace, Parser, Verbs, add
from cdmpp.errors import CdmppError, UnknownDeviceError

if TYPE_CHECKING:
    from rich.console import Console


def _add_predict(sub: Parser) -> None:
    sub.add_argument("target", metavar="PROGRAM.json|NETWORK", help=f"TIR as JSON; or a network: {NETWORK}")
    add(sub, "device", required=True)
    add(sub, "predictor", default="default")
    add(sub, "programs_per_task", type=int, default=64)
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
    add(sub, "seed", type=int, default=0)


def _predict(args: Namespace, console: Console, errors: Console) -> Any:
    """How long a program takes, or each task of a network, on a device that need not be here.

    cdmpp predict mlp --device h200
    cdmpp predict program.json --device epyc-7763@1 --measured this-cpu@1=1.3ms
    """
    from cdmpp.cli.render import show_predictions
    from cdmpp.predictor import Predictor
    from cdmpp.predictor.evidence import measured_latencies
    from cdmpp.predictor.predictor import predict_program_file

    predictor = Predictor.default() if args.predictor == "default" else Predictor.load(args.predictor)
    measured = measured_latencies(args.measured)
    if args.target.endswith(".json"):
        result = predict_program_file(
            predictor, args.target, args.device, compiled=args.compile > 0, measured=measured
        )
    elif measured:
        raise CdmppError("--measured is of one program (PROGRAM.json), a network has many")
    else:
        from cdmpp.endtoend.tasks import predict_network

        with errors.status("drawing and predicting programs"):
            result = predict_network(
                predictor,
                args.target,
                args.device,
                programs_per_task=args.programs_per_task,
                compile_best=args.compile,
                seed=args.seed,
            )
    show_predictions(console, result)
    return result


def _add_latency(sub: Parser) -> None:
    sub.add_argument("network", metavar="NETWORK", help=f"{NETWORK}, or networks/*.json of imported traces")
    add(
        sub,
        "device",
        required=True,
        metavar="D[,D...]",
        help="device name (see cdmpp devices); several are ranked",
    )
    add(sub, "predictor", default="default")
    sub.add_argument(
        "--schedule",
        default="untuned",
        metavar="untuned|best|DIR",
        help="a task's program: as it is (default), the best predicted of some, or of this MetaSchedule database",
    )
    add(sub, "programs_per_task", type=int, default=64, help="of --schedule best")
    add(sub, "seed", type=int, default=0)
    sub.add_argument(
        "--streams",
        type=int,
        default=1,
        metavar="N",
        help="kernels at the same time on a GPU, at most (default: 1)",
    )
    sub.add_argument(
        "--launch-us", type=float, metavar="F", help="between two launches (default: the device's, if known)"
    )
    sub.add_argument(
        "--price",
        metavar="FILE",
        help="YAML or JSON of device names and prices of an hour: rank by cost, too",
    )
    add(sub, "data", nargs=None, help="dataset with a trace's tasks (default: the one it lies in)")
    sub.add_argument(
        "--layers", type=int, default=20, metavar="N", help="longest layers shown, 0 for all (default: 20)"
    )


def _latency(args: Namespace, console: Console, errors: Console) -> Any:
    """How long a whole network takes; or which of several devices is fastest, or cheapest.

    cdmpp latency resnet18@b4 --device h200
    cdmpp latency model.onnx --device h200,a100-pcie-40gb,t4 --price prices.yaml
    """
    from cdmpp.cli.render import show_comparison, show_latency
    from cdmpp.endtoend import compare_devices, read_prices

    devices = [name.strip() for name in args.device.split(",") if name.strip()]
    if not devices:
        raise UnknownDeviceError("--device names no device")
    with errors.status("reading the network, predicting its tasks"):
        comparison = compare_devices(
            args.network,
            devices,
            args.predictor,
            prices=None if args.price is None else read_prices(args.price),
            data=args.data,
            schedule=args.schedule,
            streams=args.streams,
            launch_overhead_us=args.launch_us,
            programs_per_task=args.programs_per_task,
            seed=args.seed,
        )
    if len(comparison.reports) == 1:
        show_latency(console, comparison, args.layers)
        return comparison.reports[0].to_json()
    show_comparison(console, comparison)
    return comparison.to_json()


def _add_demo(sub: Parser) -> None:
    add(sub, "data", default=["data"], help="the data that ship (default: data)")
    add(sub, "out", default="runs/demo", help="what is measured there already is used again")


def _demo(args: Namespace, console: Console, errors: Console) -> Any:
    """Measure a small network here, predict it, learn from it, compare: in minutes.

    cdmpp demo
    cdmpp demo --out /tmp/demo --json demo.json
    """
    from cdmpp.cli.demo import run_demo

    return run_demo(console, errors, args.data, args.out)


VERBS: Verbs = {
    "demo": (_add_demo, _demo),
    "predict": (_add_predict, _predict),
    "latency": (_add_latency, _latency),
}
