"""Whole networks on this CPU: latency measured in the Relax VM against the prediction of `cdmpp latency`.

    python benchmarks/end_to_end.py --predictor runs/p1 --out runs/bench-end-to-end --json end_to_end.json

Every network is compiled untuned (`tuned_networks.py` has tuned ones) and run in a process that is pinned to the cores of
``--device`` with as many threads. `cdmpp/tuner/deployment.py` defines the measurement: ``measured_s`` is the mean of the
faster half of the undisturbed whole runs (``method`` is ``runs``). If a run is too long to stay undisturbed, it is the sum
over the functions called, each the mean of the faster half of its undisturbed samples (``calls``). ``disturbed`` is the part
of that time during which another process used the core. ``plain_s`` is the mean of the faster half of all whole runs in the
fastest round.

All networks are measured in ``--rounds`` rounds, each in a new process. The median round counts among those with at most
5 % disturbed; if there is none, the least disturbed one does. Measurements are kept in ``--out``; a run that is started
again only predicts anew.

``ape`` is ``|predicted / measured - 1|``, ``plain_ape`` the same against ``plain_s``. ``seen`` says whether the predictor was
trained on programs of the network, ``inside`` whether the measured latency lies in the interval that takes all tasks at the
same end. ``layer_ape`` is the sum of the calls' absolute errors over that of their measured times: errors cannot cancel in it.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from common import Figure, Results, Row, arguments, bootstrap, figure, provenance, report, start

from cdmpp.device import Device
from cdmpp.endtoend import predict_latency
from cdmpp.endtoend.graph import graph_of_fused
from cdmpp.endtoend.latency import LayerLatency
from cdmpp.predictor import Predictor
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.program.network import FusedNetwork, Network, load_network
from cdmpp.tuner.deployment import import_network, measure_network
from cdmpp.tuner.measure import device_of_this_machine

#: Many families, from milliseconds to seconds; gcn, densenet121 and inception_v3 were not used to train the default weights.
NETWORKS = (
    "mlp", "lstm", "gcn", "espcn", "bert_tiny", "mobilenet_v2", "squeezenet", "resnet18", "densenet121", "inception_v3",
)  # fmt: skip
UNTUNED = "untuned"
#: A round with a larger disturbed part counts only if no other is better.
MOSTLY_QUIET = 0.05


def measure(network: Network, fused: FusedNetwork, device: Device, realtime: bool) -> dict[str, Any]:
    """Measure a network once."""
    (cores,) = core_groups(usable_cores(), int(device.share), 1)
    found = measure_network(fused, network, device, {UNTUNED: fused.module}, cores, realtime=realtime)
    return asdict(found.variants[UNTUNED]) | {"cores": list(cores)}


def round_that_counts(rounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The median of the quiet rounds (the faster of two), else the least disturbed round."""
    quiet = [found for found in rounds if found["disturbed"] <= MOSTLY_QUIET]
    if not quiet:
        return min(rounds, key=lambda found: (found["disturbed"], found["latency_s"]))
    return sorted(quiet, key=lambda found: found["latency_s"])[(len(quiet) - 1) // 2]


def layer_error(calls: Sequence[Mapping[str, Any]], layers: Sequence[LayerLatency]) -> float | None:
    """Sum of absolute errors of the calls that have a prediction, over the sum of their measured times; None without any."""
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


def row_of(
    network: Network, fused: FusedNetwork, predictor: Predictor, device: Device, rounds: Sequence[Mapping[str, Any]]
) -> Row:
    """The row of a network: measured and predicted latency, and errors."""
    seen = {known.split("@")[0] for known in predictor.training.get("networks", ())}
    counts = round_that_counts(rounds)
    measured_s = counts["latency_s"]
    plain_s = min(found["plain_s"] for found in rounds)
    labels_s = [found["latency_s"] for found in rounds]
    latency = predict_latency(graph_of_fused(fused, network.name), device, predictor)
    ends = latency.low_s, latency.high_s
    return {
        "network": network.name,
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
        "inside": None if None in ends else ends[0] <= measured_s <= ends[1],
        "ape": abs(latency.latency_s / measured_s - 1),
        "plain_ape": abs(latency.latency_s / plain_s - 1),
        "layer_ape": layer_error(counts["calls"], latency.layers),
    }


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Median errors of all networks and of those that the predictor has not seen; then every network."""
    found = []
    for what, part in (("", rows), (", never seen", [row for row in rows if not row["seen"]])):
        if part:
            values = {
                "median_ape": statistics.median(row["ape"] for row in part),
                "against all runs": statistics.median(row["plain_ape"] for row in part),
                "inside the interval": sum(bool(row["inside"]) for row in part),
            }
            errors = [row["ape"] for row in part]
            ends = {"median_ape": bootstrap(errors, [row["network"] for row in part], median=True)}
            found.append(
                figure(f"median of the networks{what}, {UNTUNED}", values, len(part), interval=ends if len(part) > 4 else {})
            )
    for row in rows:
        values = {
            "median_ape": row["ape"],
            "against all runs": row["plain_ape"],
            "measured ms": 1e3 * row["measured_s"],
            "predicted ms": 1e3 * row["predicted_s"],
            "rounds differ by": row["spread"],
        }
        found.append(figure(f"{row['network']}, {UNTUNED}", values, row["rounds"]))
    return found


def main() -> None:
    args = arguments(__doc__, __file__, networks={"default": list(NETWORKS)}).parse_args()

    logging.basicConfig(level=logging.WARNING)
    device = device_of_this_machine(args.device)
    predictor = load_predictor(args.predictor)
    # measurements do not depend on the weights
    measured = Results(args.out / "measured.json", provenance(__file__))
    cases = [(network, import_network(network)) for network in map(load_network, args.networks)]
    for turn in range(args.rounds):
        for network, fused in cases:
            run = partial(measure, network, fused, device, not args.no_realtime)
            measured.once(run, network=network.name, device=device.name, round=turn)
    rows = []
    for network, fused in cases:
        rounds = [row for row in measured.rows if (row["network"], row["device"]) == (network.name, device.name)]
        rows.append(row_of(network, fused, predictor, device, rounds))
    made = provenance(__file__, (), args.predictor)
    report(args.json, made, figures(rows), rows=rows, device=device.name, realtime=not args.no_realtime)


if __name__ == "__main__":
    start(main)
