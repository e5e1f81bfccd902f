"""Devices never measured: leave one out of the public measurements, against NeuSight's, Habitat's, Li's and roofline's figures.

    python benchmarks/cross_device.py --data ../shared/data --json cross_device.json
    python benchmarks/cross_device.py --only-device v100-pcie-32gb --records 7000 --few-shot 20 --json v100.json
    python benchmarks/cross_device.py --predictor default --unseen h100_traces.parquet h100_e2e.csv --json unseen.json

For each device in turn a predictor is trained on the records of the others (``--records`` of them, as many of every operator
and device) and asked about this one:

* **operators** measured alone: MAPE by family;
* **nodes** of the traces: APE by family, forward and backward; ``nodes_of_consistent_networks`` leaves out those of networks
  whose nodes do not add up to the whole;
* **end to end**: what ``cdmpp latency`` says of the traced networks, inference and training, against the whole network's
  measured latency; ``in_trace`` is the sum of its nodes' measured times: what a perfect predictor of nodes would score.

Nodes and networks are compared with the authors' own predictions for the same rows (``micro`` is Li's model): ``ape_mean``
is over the ``n_common`` rows that all sources have, ``n_own`` says how many each has. NeuSight was trained on all of these
devices; ours never saw the one that is left out. Then K measurements of the new device are learned (``cdmpp finetune``), of
tasks chosen by KMeans and at random, and the device's other records, its nodes and networks are predicted again.

``--unseen`` takes files of the same columns with devices that are in none of the above: they are predicted by what was
trained on all. ``--predictor`` judges given weights in place of training; a device that these have seen is marked
``in_training`` and counts for no goal. What is imported and trained is kept in ``--work``, results after every step in
``--json``: a run with the same options goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cross_device_report import goals, percent, tables
from kept_rows import KeptGroups
from search_cost import nearest_device
from traces import compare_networks, compare_nodes, consistent, network_row, node_rows, operator_errors

from cdmpp.errors import CdmppError

if TYPE_CHECKING:
    from cdmpp.dataset import DatasetView
    from cdmpp.endtoend.graph import NetworkGraph
    from cdmpp.predictor import Config, Predictor, TrainingData

FILES = ("neusight_ops.parquet", "neusight_traces.parquet", "neusight_e2e.csv")
DEVICES = "neusight_devices.csv"


@dataclass(frozen=True)
class Bench:
    """Everything that is judged against.

    Attributes
    ----------
    data
        The sampled records of all devices.
    graphs
        Device -> its traced networks.
    view
        The datasets, for the networks' tasks.
    pool
        Devices to train on, less the one that is left out.
    unseen
        Devices of ``--unseen`` that are not among them.
    """

    args: argparse.Namespace
    config: Config
    data: TrainingData
    view: DatasetView
    graphs: Mapping[str, Sequence[NetworkGraph]]
    pool: Sequence[str]
    unseen: Sequence[str]

    def records_for(self, device: str) -> TrainingData:
        """Records of the device, and of those that may be trained on when it is left out."""
        from cdmpp.predictor.data import subset

        allowed = [*self.pool, device]
        return subset(self.data, np.flatnonzero(self.data.labels["device"].isin(allowed)))

    def rows_of(self, data: TrainingData, device: str) -> np.ndarray:
        return np.flatnonzero(data.labels["device"] == device)


def options(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """What results depend on."""
    return {
        "records": args.records,
        "seed": args.seed,
        "limit": args.limit,
        "predictor": args.predictor,
        "unseen": [str(path) for path in args.unseen],
        "config": config.model_dump(mode="json"),
    }


def imported(name: str, files: Sequence[Path], work: Path, limit: int | None) -> Path:
    """The dataset of these files; imported where it is not there yet."""
    from cdmpp.dataset.importers import import_neusight

    out = work / (name if limit is None else f"{name}-{limit}")
    if not out.exists():
        draft = out.with_name(out.name + f".{int(time.time())}.part")
        report = import_neusight(files, draft, limit=limit)
        draft.rename(out)
        print(f"imported {report.records} records, {len(report.graphs)} networks to {out}", flush=True)
        for operator, count in report.unknown_operators.items():
            print(f"left out: {count} of the unknown operator {operator}")
    return out


def gathered(args: argparse.Namespace, config: Config) -> Bench:
    from cdmpp.dataset import load_datasets
    from cdmpp.dataset.sampled import SampledView, sample_evenly
    from cdmpp.endtoend.graph import load_graphs
    from cdmpp.predictor import gather

    args.work.mkdir(parents=True, exist_ok=True)
    folders = [imported("neusight", [args.data / name for name in FILES], args.work, args.limit)]
    if args.unseen:
        stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in args.unseen]
        digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:8]
        folders.append(imported(f"unseen-{digest}", args.unseen, args.work, None))
    view = load_datasets(folders)
    graphs: dict[str, dict[str, NetworkGraph]] = {}
    for folder in folders:
        for graph in load_graphs(folder).values():
            for device in graph.meta["devices"]:
                graphs.setdefault(device, {}).setdefault(graph.name, graph)
    pool = load_datasets(folders[:1]).device_names
    rows = sample_evenly(view, args.records, args.seed, pool).rows
    further = sorted(set(view.device_names) - set(pool))
    if further:
        # drawn by themselves, so that what is trained on does not hang on them
        number = args.records // len(pool) * len(further)
        rows = np.concatenate([rows, sample_evenly(view, number, args.seed, further).rows])
    data = gather(SampledView(view, np.sort(rows)), progress=show_progress)
    unseen = {
        name for folder in folders[1:] for g in load_graphs(folder).values() for name in g.meta["devices"]
    }
    by_device = {device: list(own.values()) for device, own in graphs.items()}
    return Bench(args, config, data, view, by_device, pool, sorted({*further, *unseen} - set(pool)))


def show_progress(done: int, total: int) -> None:
    if done == total or done % 4096 == 0:
        print(f"compact ASTs: {done} of {total}", file=sys.stderr, flush=True)


def trained_without(bench: Bench, device: str) -> Predictor:
    """A predictor of all records of the pool but the device's, trained once and kept in the work folder."""
    from cdmpp.device import DEVICE_FEATURES
    from cdmpp.predictor import Predictor, train
    from cdmpp.predictor.predictor_store import FORMAT_VERSION
    from cdmpp.program.ast import FEATURE_SET

    args, data = bench.args, bench.records_for(device)
    others = sorted(set(bench.pool) - {device})
    # without records of the device there is nothing to leave out; a split has to test something
    spec = f"by_device:heldout={device};seed={args.seed}" if device in data.devices else "by_task:test=0.01"
    config = bench.config.model_copy(
        update={"split": bench.config.split.model_copy(update={"spec": spec}),
                "train": bench.config.train.model_copy(update={"seed": args.seed})}
    )  # fmt: skip
    settings = [others, args.records, args.seed, args.limit, bench.config.model_dump(mode="json")]
    settings += [FORMAT_VERSION, FEATURE_SET, DEVICE_FEATURES]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    out = args.work / "predictors" / digest
    if (out / "predictor").exists():
        return Predictor.load(out)
    print(f"training on {', '.join(others)} in {out}", flush=True)
    return train(config, data, out, resume=True).predictor


def seen_by(predictor: Predictor, device: str) -> bool:
    return device in predictor.training.get("records_by_device", predictor.devices)


def judged(
    bench: Bench, predictor: Predictor, data: TrainingData, device: str, rows: np.ndarray
) -> dict[str, Any]:
    """Errors of a predictor on operators (these rows of the data), nodes and networks of a device."""
    from cdmpp.endtoend import predict_latency
    from cdmpp.endtoend.sources import NetworkTasks

    found: dict[str, Any] = {}
    if len(rows):
        table = data.labels.iloc[rows]
        predicted_s = predictor.predict([data.asts[program] for program in table["program"]], device)
        names = [bench.view.tasks[task].name for task in table["task"]]
        found["operators"] = operator_errors(names, table["latency_s"], predicted_s)
        found["operator_mape"] = found["operators"]["mape"]
    nodes: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    for graph in bench.graphs.get(device, ()):
        tasks = {task: bench.view.tasks[task] for task in graph.task_weights()}
        report = predict_latency(NetworkTasks(graph, tasks, library=True), device, predictor)
        nodes.extend(node_rows(graph, report))
        row = network_row(graph, report)
        networks.extend([row] if row else [])
    if nodes:
        found["nodes"] = compare_nodes(nodes)
        found["nodes_of_consistent_networks"] = compare_nodes(consistent(nodes, networks))
    if networks:
        found["end_to_end"] = compare_networks(networks)
        for source, errors in found["end_to_end"]["sources"].items():
            prefix = "" if source == "cdmpp" else f"{source}_"
            found[f"{prefix}end_to_end_ape_mean"] = errors["ape_mean"]
    return found


def unresolved(path: Path) -> list[str]:
    """Names of the authors' device table that ours does not know; none without the file."""
    from cdmpp.dataset.importers.common import read_table
    from cdmpp.device import load_table
    from cdmpp.errors import UnknownDeviceError

    if not path.exists():
        return []
    table, unknown = load_table(), []
    for name in read_table(path)["Device"]:
        try:
            table.get(str(name))
        except UnknownDeviceError:
            unknown.append(str(name))
    return unknown


def evaluate_device(bench: Bench, given: Predictor | None, device: str, results: KeptGroups) -> None:
    from cdmpp.device import get_device
    from cdmpp.predictor import few_shot

    args, found = bench.args, results.of(device)
    base = given
    data = bench.records_for(device)
    rows = bench.rows_of(data, device)
    if "zero_shot" not in found:
        started = time.perf_counter()
        base = base or trained_without(bench, device)
        vectors = {**base.devices, device: base.device_vector(get_device(device))}
        found.update(
            {
                "vendor": get_device(device).vendor,
                "in_training": seen_by(base, device),
                "trained_on": sorted(base.training.get("records_by_device", base.devices)),
                "n_training_records": base.training.get("records"),
                "nearest_training_device": device
                if seen_by(base, device)
                else nearest_device(device, vectors),
            }
        )
        found["zero_shot"] = judged(bench, base, data, device, rows)
        found["zero_shot"]["wall_s"] = round(time.perf_counter() - started, 1)
        report_step(f"{device} zero-shot", found["zero_shot"])
        results.write()
    if found["in_training"] or not len(rows):
        return
    shots = found.setdefault("few_shot", {})
    for k in args.few_shot:
        if k >= data.labels["task"].iloc[rows].nunique():
            print(f"{device}: has no {k} tasks to learn and others to test", file=sys.stderr)
            continue
        for select in args.select:
            for seed in args.few_shot_seeds:
                done = shots.setdefault(select, {}).setdefault(str(k), {})
                if str(seed) in done:
                    continue
                started = time.perf_counter()
                base = base or trained_without(bench, device)
                tuned, split = few_shot(base, data, device, k, select, seed)
                done[str(seed)] = judged(bench, tuned, data, device, np.asarray(split.test))
                done[str(seed)]["wall_s"] = round(time.perf_counter() - started, 1)
                report_step(f"{device} {select} K={k} seed {seed}", done[str(seed)])
                results.write()


def report_step(what: str, found: Mapping[str, Any]) -> None:
    figures = [f"operators MAPE {percent(found.get('operator_mape'))}"]
    figures += [
        f"{source or 'cdmpp'} end to end {percent(found.get(f'{source}_end_to_end_ape_mean'.lstrip('_')))}"
        for source in ("", "neusight")
    ]
    print(f"{what}: {', '.join(figures)} ({found['wall_s']} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/cross-device"),
        metavar="DIR",
        help="what is imported and trained",
    )
    parser.add_argument(
        "--unseen",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="of further devices, never trained on",
    )
    parser.add_argument(
        "--only-device", nargs="+", default=[], metavar="D", help="of these (default: all with operators)"
    )
    parser.add_argument("--config", default="configs/cpu.yaml", help="of our predictor")
    parser.add_argument(
        "--records", type=int, default=28000, metavar="N", help="in all, spread over operators and devices"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="import so many rows of operators: does it run?"
    )
    parser.add_argument("--predictor", metavar="DIR", help="given weights, or default: nothing is trained")
    parser.add_argument(
        "--few-shot", type=int, nargs="*", default=[5, 20, 100], metavar="K", help="none: zero-shot alone"
    )
    parser.add_argument("--select", nargs="+", default=["kmeans", "random"], choices=("kmeans", "random"))
    parser.add_argument("--few-shot-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    missing = [name for name in FILES if not (args.data / name).is_file()]
    if missing:
        print(f"skipped: {args.data} has no {', '.join(missing)}", file=sys.stderr)
        return 0

    from cdmpp.device import get_device
    from cdmpp.predictor import load_config
    from cdmpp.predictor.predictor import load_predictor

    config = load_config(args.config)
    notes = {
        "options": options(args, config),
        "unresolved_devices": unresolved(args.data / DEVICES),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: metadata.version(name) for name in ("cdmpp", "torch", "scikit-learn")},
    }
    results = KeptGroups(args.json, notes, "devices", ("goals", goals))
    given = None
    if args.predictor:
        given = load_predictor(args.predictor)
    bench = gathered(args, config)
    known = {*bench.graphs, *bench.data.devices}
    devices = [get_device(name).name for name in args.only_device] or bench.unseen or bench.pool
    for device in devices:
        if device not in known:
            sys.exit(f"nothing was measured on {device}; there are {', '.join(sorted(known))}")
        evaluate_device(bench, given, device, results)
    results.write()
    print(tables(results.content))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CdmppError as error:
        sys.exit(f"error: {error}")
