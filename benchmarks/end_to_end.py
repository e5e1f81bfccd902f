"""Whole networks on this CPU: latency measured in the Relax VM against `cdmpp latency`'s prediction.

    python benchmarks/end_to_end.py --predictor runs/p1 --out runs/bench-end-to-end --json end_to_end.json
    python benchmarks/end_to_end.py --predictor runs/p1 --networks mlp --database mlp=runs/tuned-mlp --out runs/e2e

Every network is compiled untuned, and with the schedules of a database of `cdmpp tune` where one is given, and run in a
process that is pinned to the cores of ``--device`` with as many threads; both variants in turn. What is measured is defined in
`cdmpp/tuner/deployment.py`: ``measured_s`` is the mean of the faster half of the undisturbed whole runs (``method`` is
``runs``) or, where a run is too long to be left alone, the sum over the functions it calls, each the mean of the faster half
of its undisturbed samples (``calls``). ``disturbed`` is the part of that time during which somebody else used the core,
``plain_s`` the mean of the faster half of all whole runs in the fastest round.

All networks are measured in ``--rounds`` rounds, each in a new process. The round in the middle counts, of those with at most
5 % disturbed; the least disturbed one where there is none. What has been measured is kept in ``--out``; a run that is
started again predicts anew.

``ape`` is ``|predicted / measured - 1|``, ``plain_ape`` against ``plain_s``. ``seen`` says whether the predictor was trained
on programs of the network, ``inside`` whether the measured latency lies in the interval that takes all tasks at the same end,
``layer_ape`` is the sum of the calls' absolute errors over that of their measured times: it shows what cancels in the total.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, Results, Row, arguments, bootstrap, figure, provenance, report, start

from cdmpp.device import Device
from cdmpp.endtoend import predict_latency
from cdmpp.endtoend.graph import graph_of_fused
from cdmpp.endtoend.latency import LayerLatency
from cdmpp.predictor import Predictor
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.program.fusion import FusedNetwork
from cdmpp.program.network import Network, load_network
from cdmpp.program.tvm_env import import_tvm
from cdmpp.tuner.deployment import apply_database, import_network, measure_network
from cdmpp.tuner.measure import device_of_this_machine
from cdmpp.tuner.store import json_database

#: Of many families, from milliseconds to seconds; the weights that ship have not seen gcn, densenet121 and inception_v3.
NETWORKS = (
    "mlp", "lstm", "gcn", "espcn", "bert_tiny", "mobilenet_v2", "squeezenet", "resnet18", "densenet121", "inception_v3",
)  # fmt: skip
UNTUNED, TUNED = "untuned", "tuned"
#: A round of which a larger part was disturbed counts only where no other is better.
MOSTLY_QUIET = 0.05


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


def layer_error(calls: Sequence[Mapping[str, Any]], layers: Sequence[LayerLatency]) -> float | None:
    """Sum of the absolute errors of the calls that are predicted too over the sum of their measured times; None without any."""
    numbers: Counter[str] = Counter()
    predicted_s = {layer.name: layer.latency_s for layer in layers}
    error_s = measured_s = 0.0
    for call in calls:
        name, call_s = call["name"], call["latency_s"]
        numbers[name] += 1
        name += f"#{numbers[name]}" if numbers[name] > 1 else ""
        if name in predicted_s:
            error_s += abs(predicted_s[name] - call_s)
            measured_s += call_s
    return error_s / measured_s if measured_s else None


def rows_of(case: Case, predictor: Predictor, device: Device, rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Measured against predicted, a row a variant."""
    network = case.network
    source = graph_of_fused(case.fused, network.name)
    seen = {known.split("@")[0] for known in predictor.training.get("networks", ())}
    rows = []
    for variant in rounds[0]["variants"]:
        measurements = [found["variants"][variant] for found in rounds]
        counts = round_that_counts(measurements)
        measured_s = counts["latency_s"]
        plain_s = min(found["plain_s"] for found in measurements)
        labels_s = [found["latency_s"] for found in measurements]
        schedule = UNTUNED if variant == UNTUNED or case.database is None else case.database
        latency = predict_latency(source, device, predictor, schedule=schedule)
        ends = latency.low_s, latency.high_s
        inside = None if None in ends else ends[0] <= measured_s <= ends[1]
        rows.append(
            {
                "network": network.name,
                "schedule": variant,
                "seen": network.name.split("@")[0] in seen,
                "kernels": latency.launches,
                "measured_s": measured_s,
                **{k: counts[k] for k in ("method", "disturbed", "quiet_runs", "runs", "calls_s", "noise")},
                "plain_s": plain_s,
                "spread": max(labels_s) / min(labels_s) - 1,
                "rounds": len(rounds),
                "predicted_s": latency.latency_s,
                "low_s": latency.low_s,
                "high_s": latency.high_s,
                "inside": inside,
                "ape": abs(latency.latency_s / measured_s - 1),
                "plain_ape": abs(latency.latency_s / plain_s - 1),
                "layer_ape": layer_error(counts["calls"], latency.layers),
            }
        )
    return rows


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Median errors by schedule, of all networks and of those that the predictor has not seen; then every network."""
    found = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == schedule]
        for what, part in (("", own), (", never seen", [row for row in own if not row["seen"]])):
            if part:
                values = {
                    "median_ape": statistics.median(row["ape"] for row in part),
                    "against all runs": statistics.median(row["plain_ape"] for row in part),
                    "inside the interval": sum(bool(row["inside"]) for row in part),
                }
                errors = [row["ape"] for row in part]
                ends = {"median_ape": bootstrap(errors, [row["network"] for row in part], median=True)}
                name = f"median of the networks{what}, {schedule}"
                found.append(figure(name, values, len(part), interval=ends if len(part) > 4 else {}))
    for row in rows:
        values = {
            "median_ape": row["ape"],
            "against all runs": row["plain_ape"],
            "measured ms": 1e3 * row["measured_s"],
            "predicted ms": 1e3 * row["predicted_s"],
            "rounds differ by": row["spread"],
        }
        found.append(figure(f"{row['network']}, {row['schedule']}", values, row["rounds"]))
    return found


def databases(texts: list[str]) -> dict[str, Path]:
    """``NETWORK=DIR`` -> network and folder; SystemExit for anything else."""
    found = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not (Path(folder) / "database_tuning_record.json").is_file():
            sys.exit(f"--database {text}: expected NETWORK=DIR with a folder that cdmpp tune wrote")
        found[name] = Path(folder)
    return found


def main() -> None:
    args = arguments(__doc__, __file__, networks={"default": list(NETWORKS)}).parse_args()

    logging.basicConfig(level=logging.WARNING)
    device = device_of_this_machine(args.device)
    tuned = databases(args.database)
    predictor = load_predictor(args.predictor)
    # what was measured does not depend on the weights
    measured = Results(args.out / "measured.json", provenance(__file__))
    networks = {name: load_network(name) for name in args.networks}
    cases = [Case(network, import_network(network), tuned.get(name)) for name, network in networks.items()]
    for turn in range(args.rounds):
        for case in cases:
            run = partial(measure, case, device, not args.no_realtime)
            measured.once(run, case=case.key(device), round=turn)
    rows: list[Row] = []
    for case in cases:
        rounds = [row for row in measured.rows if row["case"] == case.key(device)]
        rows += rows_of(case, predictor, device, rounds)
    made = provenance(__file__, tuned.values(), args.predictor)
    report(args.json, made, figures(rows), rows=rows, device=device.name, realtime=not args.no_realtime)


if __name__ == "__main__":
    start(main)
