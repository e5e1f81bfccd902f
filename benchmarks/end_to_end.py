"""Whole networks on this CPU: latency measured in the Relax VM against `cdmpp latency`'s prediction.

    python benchmarks/end_to_end.py --predictor runs/p1 --out runs/bench-end-to-end --json end_to_end.json
    python benchmarks/end_to_end.py --predictor runs/p1 --networks mlp --database mlp=runs/tuned-mlp --out runs/e2e

Every network is compiled untuned, and with the schedules of a database of `cdmpp tune` where one is given, and run in a process
that is pinned to the cores of ``--device`` with as many threads; both variants in turn. All networks are measured in
``--rounds`` rounds, each time in a new process, because neighbours disturb a machine for minutes: the fastest round counts,
and how much longer the slowest took is in the JSON as ``spread``. Within a round a figure is the mean of the faster half of
the samples, as every label is; their split-half difference is ``noise``. What has been measured is kept in ``--out``: a run
that is started again goes on where it was, and predicts anew with the predictor it is given.

``ape`` is ``|predicted / measured - 1|`` and ``median_ape`` its median over networks. ``seen`` says whether the
predictor was trained on programs of the network: figures on those that it was not are ``median_ape_unseen``. ``inside`` says
whether the measured latency lies in the interval that takes all tasks at the same end.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.device import Device
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


class Measured:
    """Measured latencies, a row a round, kept in a file after every network."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self.rows = json.loads(path.read_text(encoding="utf-8"))

    def rounds(self, key: str) -> list[dict[str, Any]]:
        """What was measured of a network so far."""
        return self.rows.setdefault(key, [])

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep what was measured of a network."""
        self.rounds(key).append(dict(row))
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)


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
    """Latency and noise of the variants of a network."""
    from cdmpp.profiler.calibration import core_groups
    from cdmpp.profiler.machine import usable_cores
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
        "latency_s": dict(found.latency_s),
        "noise": dict(found.noise),
        "output_difference": found.output_difference,
        "cores": list(cores),
    }


def rows_of(case: Case, predictor: Predictor, device: Device, measured: Measured) -> list[dict[str, Any]]:
    """Measured against predicted, a row a variant."""
    from cdmpp.endtoend import predict_latency
    from cdmpp.endtoend.from_relax import graph_of_fused
    from cdmpp.endtoend.sources import NetworkTasks

    network, rounds = case.network, measured.rounds(case.key(device))
    source = NetworkTasks(*graph_of_fused(case.fused, network.name))
    seen = {known.split("@")[0] for known in predictor.training.get("networks", ())}
    rows = []
    for variant in rounds[0]["latency_s"]:
        fastest = min(rounds, key=lambda found: found["latency_s"][variant])
        measured_s = fastest["latency_s"][variant]
        schedule = UNTUNED if variant == UNTUNED or case.database is None else case.database
        report = predict_latency(source, device, predictor, schedule=schedule)
        inside = None
        if report.low_s is not None and report.high_s is not None:
            inside = report.low_s <= measured_s <= report.high_s
        rows.append(
            {
                "network": network.name,
                "family": network.family,
                "schedule": variant,
                "seen": network.name.split("@")[0] in seen,
                "kernels": report.launches,
                "measured_s": measured_s,
                "noise": fastest["noise"][variant],
                "spread": max(found["latency_s"][variant] for found in rounds) / measured_s - 1,
                "rounds": len(rounds),
                "predicted_s": report.latency_s,
                "low_s": report.low_s,
                "high_s": report.high_s,
                "inside": inside,
                "ape": abs(report.latency_s / measured_s - 1),
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

    from cdmpp.predictor import Predictor
    from cdmpp.program.network import load_network
    from cdmpp.tuner.deployment import import_network
    from cdmpp.tuner.prepare import device_of_this_machine

    logging.basicConfig(level=logging.WARNING)
    device = device_of_this_machine(args.device)
    tuned = databases(args.database)
    predictor = Predictor.default() if args.predictor == "default" else Predictor.load(args.predictor)
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
        f"{'network':18}{'schedule':>10}{'measured ms':>13}{'noise':>8}{'spread':>8}{'predicted ms':>14}{'APE':>8}"
    )
    for case in cases:
        for row in rows_of(case, predictor, device, measured):
            rows.append(row)
            print(
                f"{row['network']:18}{row['schedule']:>10}{1e3 * row['measured_s']:13.4g}{row['noise']:8.1%}"
                f"{row['spread']:8.1%}{1e3 * row['predicted_s']:14.4g}{row['ape']:8.1%}",
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
