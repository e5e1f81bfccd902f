"""``cdmpp tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli.options import NETWORK, Bar, Namespace, Parser, Verbs, add, add_settings, hide, say, settings, show_table
from cdmpp.errors import TunerError
from cdmpp.tuner import Objective, TuneConfig

if TYPE_CHECKING:
    from cdmpp.tuner import TuneReport


def _add_tune(sub: Parser) -> None:
    sub.add_argument("network", metavar="NETWORK", help=NETWORK)
    share = "a device of this machine with the share to tune for: this-cpu@1, or h200@0.5, half of its SMs"
    add(sub, "device", required=True, help=share)
    shares = "the same as --device D@S; several, such as 1,2: tune for each, in separate folders"
    add(sub, "share", metavar="S", help=shares)
    add(sub, "out", required=True, help="folder for database, measurements and report")
    add_settings(sub, Objective)
    add(sub, "resume")
    learned_from = "datasets, tunings or databases to learn from; auto: the cache of earlier tunings"
    add(sub, "warm_start", nargs="+", default=[], metavar="DIR", help=learned_from)
    hide(sub, "--anchors", nargs="+", default=[])
    add(sub, "no_trim", action="store_true", help="measure every candidate in full")
    predictor = "of cdmpp's cost model (default: the one that ships); 'none' for an analytical estimate"
    add_settings(sub, TuneConfig, predictor=predictor)


def devices_with_shares(device: str, shares: str | None) -> list[str]:
    """``D@S`` for every share of a list such as ``1,2``, else the device alone (TunerError where it names another share)."""
    base, at, named = device.partition("@")
    if shares is None or named == shares:
        return [device]
    if at:
        raise TunerError(f"--device {device} and --share {shares}: give the share once")
    return [f"{base}@{share.strip()}" for share in shares.split(",")]


def _tune(args: Namespace, console: Console, errors: Console) -> Any:
    """Find fast schedules for a network on this machine, with few measurements.

    cdmpp tune mlp --device this-cpu@1 --trials 64 --out runs/tuned
    cdmpp tune resnet18 --device this-cpu@1 --trials 2000 --budget 1h --shards auto --out runs/fast
    """
    if args.anchors:
        errors.print("--anchors is ignored: it is not needed any more")
    devices = devices_with_shares(args.device, args.share)
    if len(devices) == 1:
        return _tune_at(devices[0], Path(args.out), args, console, errors).to_json()
    from cdmpp.tuner.measure import device_of_this_machine
    from cdmpp.tuner.results import check_folder

    folders = {device: Path(args.out) / f"share-{device.partition('@')[2]}" for device in devices}
    for device, folder in folders.items():  # all of them before hours are spent on the first
        if args.ray is None and args.rpc is None:
            device_of_this_machine(device)
        check_folder(folder, args.resume)
    return {"tunings": {d: _tune_at(d, out, args, console, errors).to_json() for d, out in folders.items()}}


def _tune_at(device: str, out: Path, args: Namespace, console: Console, errors: Console) -> TuneReport:
    from cdmpp.tuner import tune
    from cdmpp.tuner.results import COLUMNS, summary_lines, task_rows

    config = settings(
        args,
        TuneConfig,
        objective=settings(args, Objective),
        predictor=None if args.predictor == "none" else args.predictor,
        trim=None if args.no_trim else args.trim,
        validity=None if args.validity == "none" else args.validity,
    )
    with Bar(errors, "trials") as bar:
        report = tune(
            args.network,
            device=device,
            out=out,
            config=config,
            resume=args.resume,
            warm_start=args.warm_start,
            progress=bar.tuning,
            notify=bar.say,
        )
    title = f"{report.name} on {report.device}, cost model {report.cost_model}"
    show_table(console, title, COLUMNS, task_rows(report.tasks))
    for line in summary_lines(report):
        say(console, line)
    say(console, f"Written to {out}.")
    return report


VERBS: Verbs = {"tune": (_add_tune, _tune)}
