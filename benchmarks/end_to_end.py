"""Whole networks on this CPU: latency measured in the Relax VM against `cdmpp latency`'s prediction.

    python benchmarks/end_to_end.py --predictor runs/p1 --out runs/bench-end-to-end --json end_to_end.json
    python benchmarks/end_to_end.py --predictor runs/p1 --networks mlp --database mlp=runs/tuned-mlp --out runs/e2e

Every network is compiled untuned, and with the schedules of a database of `cdmpp tune` where one is given,
and run in a process that is pinned to the cores of ``--device`` with as many threads; both variants in turn.
What is measured is defined in `cdmpp/tuner/network_runner.py`: ``measured_s`` is the mean of the faster half
of the whole runs during which nobody else used the core (``method`` is ``runs``) or, where a run is too long
to be left alone, the sum over the functions it calls, each the mean of the faster half of its undisturbed
samples or, where a call never was undisturbed, the fastest sample (``calls``). ``disturbed`` is the part of
that time during which somebody else used the core. ``plain_s`` is the mean of the faster half of all whole
runs, disturbed or not, in the fastest round, ``calls_s`` the sum over calls whatever the method. ``noise`` is
the split-half difference of ``measured_s``.

All networks are measured in ``--rounds`` rounds, each time in a new process. The round in the middle counts,
of those with at most 5 % disturbed; the least disturbed one where there is none. ``spread`` is the slowest
round over the fastest, less one. What has been measured is kept in ``--out``: a run that is started again
goes on where it was, and predicts anew with the predictor it is given.

``ape`` is ``|predicted / measured - 1|`` and ``median_ape`` its median over networks; ``plain_ape`` is
against ``plain_s``. ``seen`` says whether the predictor was trained on programs of the network: figures on
those that it was not are ``median_ape_unseen``. ``inside`` says whether the measured latency lies in the
interval that takes all tasks at the same end. ``layers`` holds the calls as measured against the layers as
predicted; ``layer_ape`` is the sum of their absolute errors over the sum of their measured times: it shows
what cancels in the total.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_rows import write_json

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.endtoend.report import LayerLatency
    from cdmpp.predictor import Predictor
    from cdmpp.program.fusion import FusedNetwork
    from cdmpp.program.network import Network

#: Of many families, from milliseconds to seconds; the weights that ship have not seen gcn, densenet121 and inception_v3.
NETWORKS = (
    "mlp",
    "lstm",
    "gcn",
    "espcn",
    "bert_tiny",
    "mobilenet_v2",
    "squeezenet",
    "resnet18",
    "densenet121",
    "inception_v3",
)
UNTUNED, TUNED = "untuned", "tuned"


#: Of what is kept in ``--out``; goes up when what counts as measured is defined anew.
FORMAT = 2
#: A round of which a larger part was disturbed counts only where no other is better.
MOSTLY_QUIET = 0.05


class Measured:
    """Measured latencies, a row a round, kept in a file after every network; SystemExit for a file of another format."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept.get("format") != FORMAT:
                sys.exit(
                    f"{path} was measured in another way by another version: give another folder to --out"
                )
            self.rows = kept["rows"]

    def rounds(self, key: str) -> list[dict[str, Any]]:
        """What was measured of a network so far."""
        return self.rows.setdefault(key, [])

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep what was measured of a network."""
        self.rounds(key).append(dict(row))
        write_json(self._path, {"format": FORMAT, "rows": self.rows})


@dataclass(frozen=True)
class Case:
    """A network, imported and fused, with the database it is tuned by."""

    network: Network
    fused: FusedNetwork
    database: Path | None

    def key(self, device: Device) -> str:
        """What its measurements are kept under."""
        return f"{self.network.name} on {device.name}, {self.database or UNTUNED}"


def measure(case: Case, device: Device, realtime: bool) -> dict[str, Any]:
    """What was measured of the variants of a network."""
    from cdmpp.profiler.machine import core_groups, usable_cores
    from cdmpp.program.tvm_env import import_tvm
    from cdmpp.tuner.deployment import apply_database, measure_network
    from cdmpp.tuner.store import json_database

    fused, database = case.fused, case.database
    modules = {UNTUNED: fused.module}
    if database is not None:
        target = import_tvm().target.Target(dict(device.target))
        modules[TUNED], _ = apply_database(fused.module, json_database(database), target)
    (cores,) = core_groups(usable_cores(), int(device.share), 1)
    found = measure_network(fused, case.network, device, modules, cores, realtime=realtime)
    return {
        "variants": {name: asdict(variant) for name, variant in found.variants.items()},
        "output_difference": found.output_difference,
        "cores": list(cores),
    }


def round_that_counts(rounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of one variant: the middle one of the quiet rounds (of two the faster), else the least disturbed."""
    quiet = [found for found in rounds if found["disturbed"] <= MOSTLY_QUIET]
    if not quiet:
        return min(rounds, key=lambda found: (found["disturbed"], found["latency_s"]))
    return sorted(quiet, key=lambda found: found["latency_s"])[(len(quiet) - 1) // 2]


def layers_of(
    calls: Sequence[Mapping[str, Any]], layers: Sequence[LayerLatency]
) -> tuple[list[dict[str, Any]], float | None]:
    """Measured calls beside predicted layers, in the order of execution, and the error over all that have both."""
    numbers: Counter[str] = Counter()
    predicted = {layer.name: layer for layer in layers}
    rows, error_s, measured_s = [], 0.0, 0.0
    for call in calls:
        numbers[call["name"]] += 1
        number = numbers[call["name"]]
        name = call["name"] if number == 1 else f"{call['name']}#{number}"
        layer = predicted.get(name)
        if layer is not None:
            error_s += abs(layer.latency_s - call["latency_s"])
            measured_s += call["latency_s"]
        rows.append(
            {
                "name": name,
                "measured_s": call["latency_s"],
                "disturbed": call["disturbed"],
                "quiet_samples": call["quiet_samples"],
                "predicted_s": None if layer is None else layer.latency_s,
            }
        )
    return rows, error_s / measured_s if measured_s else None


def rows_of(case: Case, predictor: Predictor, device: Device, measured: Measured) -> list[dict[str, Any]]:
    """Measured against predicted, a row a variant."""
    from cdmpp.endtoend import predict_latency
    from cdmpp.endtoend.from_relax import graph_of_fused
    from cdmpp.endtoend.sources import NetworkTasks

    network, rounds = case.network, measured.rounds(case.key(device))
    source = NetworkTasks(*graph_of_fused(case.fused, network.name))
    seen = {known.split("@")[0] for known in predictor.training.get("networks", ())}
    rows = []
    for variant in rounds[0]["variants"]:
        measurements = [found["variants"][variant] for found in rounds]
        counts = round_that_counts(measurements)
        measured_s = counts["latency_s"]
        plain_s = min(found["plain_s"] for found in measurements)
        labels_s = [found["latency_s"] for found in measurements]
        schedule = UNTUNED if variant == UNTUNED or case.database is None else case.database
        report = predict_latency(source, device, predictor, schedule=schedule)
        inside = None
        if report.low_s is not None and report.high_s is not None:
            inside = report.low_s <= measured_s <= report.high_s
        layers, layer_ape = layers_of(counts["calls"], report.layers)
        rows.append(
            {
                "network": network.name,
                "family": network.family,
                "schedule": variant,
                "seen": network.name.split("@")[0] in seen,
                "kernels": report.launches,
                "measured_s": measured_s,
                "method": counts["method"],
                "disturbed": counts["disturbed"],
                "quiet_runs": counts["quiet_runs"],
                "runs": counts["runs"],
                "plain_s": plain_s,
                "calls_s": counts["calls_s"],
                "noise": counts["noise"],
                "spread": max(labels_s) / min(labels_s) - 1,
                "rounds": len(rounds),
                "predicted_s": report.latency_s,
                "low_s": report.low_s,
                "high_s": report.high_s,
                "inside": inside,
                "ape": abs(report.latency_s / measured_s - 1),
                "plain_ape": abs(report.latency_s / plain_s - 1),
                "layer_ape": layer_ape,
                "layers": layers,
                "notes": list(report.notes),
            }
        )
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median errors by schedule, of all networks and of those that the predictor has not seen."""
    result: dict[str, Any] = {}
    for schedule in (UNTUNED, TUNED):
        own = [row for row in rows if row["schedule"] == schedule]
        if own:
            unseen = [row["ape"] for row in own if not row["seen"]]
            result[schedule] = {
                "networks": len(own),
                "median_ape": statistics.median(row["ape"] for row in own),
                "median_plain_ape": statistics.median(row["plain_ape"] for row in own),
                "unseen": len(unseen),
                "median_ape_unseen": statistics.median(unseen) if unseen else None,
                "inside": sum(bool(row["inside"]) for row in own),
            }
    return result


def databases(texts: list[str]) -> dict[str, Path]:
    """``NETWORK=DIR`` -> network and folder; SystemExit for anything else."""
    found = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not (Path(folder) / "database_tuning_record.json").is_file():
            sys.exit(f"--database {text}: expected NETWORK=DIR with a folder that cdmpp tune wrote")
        found[name] = Path(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--device", default="this-cpu@1", metavar="D")
    parser.add_argument("--predictor", default="default", metavar="DIR")
    parser.add_argument(
        "--database", nargs="+", default=[], metavar="NETWORK=DIR", help="what cdmpp tune wrote"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of measuring all networks")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="what was measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--no-realtime", action="store_true", help="without real-time priority: for a machine that others use"
    )
    args = parser.parse_args()

    from cdmpp.predictor.predictor import load_predictor
    from cdmpp.program.network import load_network
    from cdmpp.tuner.deployment import import_network
    from cdmpp.tuner.prepare import device_of_this_machine

    logging.basicConfig(level=logging.WARNING)
    device = device_of_this_machine(args.device)
    tuned = databases(args.database)
    predictor = load_predictor(args.predictor)
    args.out.mkdir(parents=True, exist_ok=True)
    measured = Measured(args.out / "measured.json")
    rows: list[dict[str, Any]] = []
    cases: list[Case] = []
    for name in args.networks:
        network = load_network(name)
        cases.append(Case(network, import_network(network), tuned.get(name)))
    for number in range(args.rounds):
        for case in cases:
            if len(measured.rounds(case.key(device))) <= number:
                measured.add(case.key(device), measure(case, device, not args.no_realtime))
    print(
        f"{'network':18}{'schedule':>10}{'measured ms':>13}{'by':>7}{'disturbed':>11}{'spread':>8}{'plain ms':>11}"
        f"{'predicted ms':>14}{'APE':>8}"
    )
    for case in cases:
        for row in rows_of(case, predictor, device, measured):
            rows.append(row)
            print(
                f"{row['network']:18}{row['schedule']:>10}{1e3 * row['measured_s']:13.4g}{row['method']:>7}"
                f"{row['disturbed']:11.1%}{row['spread']:8.1%}{1e3 * row['plain_s']:11.4g}"
                f"{1e3 * row['predicted_s']:14.4g}{row['ape']:8.1%}",
                flush=True,
            )
    summary = medians(rows)
    for schedule, found in summary.items():
        print(f"{schedule}: median APE {found['median_ape']:.1%} of {found['networks']} networks")
    if args.json:
        content = {
            "summary": summary,
            "rows": rows,
            "device": device.name,
            "predictor": args.predictor,
            "realtime": not args.no_realtime,
            "machine": platform.processor() or platform.machine(),
            "versions": {name: metadata.version(name) for name in ("cdmpp", "apache-tvm", "torch")},
        }
        args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
