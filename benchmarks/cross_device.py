"""Devices without measurements: leave one out of the public data, against NeuSight's, Habitat's, Li's and roofline's figures.

    python benchmarks/cross_device.py --data ../shared/data --json cross_device.json
    python benchmarks/cross_device.py --only-device v100-pcie-32gb --records 7000 --few-shot 20 --seeds 0 --json v100.json
    python benchmarks/cross_device.py --predictor default --unseen h100_traces.parquet h100_e2e.csv --json unseen.json

For each device in turn a predictor is trained on the records of the others (``--records`` in all, equally many of every
operator and device) and predicts three things on this one: **operators** measured alone (MAPE by family), **nodes** of the
traces (APE by family, forward and backward), and the traced networks **end to end**, inference and training: the latency by
``cdmpp latency`` against the whole network's measured latency. ``in_trace`` is the sum of the nodes' measured times, which is
the score of a perfect predictor of nodes.

Nodes and networks are compared with the authors' own predictions for the same rows (``micro`` is Li's model); NeuSight was
trained on all of these devices. ``ape_mean`` is over the ``n_common`` rows that all sources predict, ``n_own`` is the number
of rows of each. Then the predictor is finetuned (``cdmpp finetune``) on K tasks of the new device, chosen by KMeans, and
predicts its other records and networks again. The seed sets the network's weights and the choice of tasks.

``--unseen`` takes files with the same columns and devices that are in none of the above. ``--predictor`` scores given weights
in place of training; devices that these were trained on are left out of the means. Imports and predictors are kept in
``--work``. Intervals are over tasks for operators, and over networks end to end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Figure, Results, Row, arguments, bootstrap, figure, mean_figure, provenance, start
from sampled import SampledView, sample_evenly
from traces import FAMILIES, compare_networks, compare_nodes, network_row, node_rows, operator_errors

from cdmpp.dataset import DatasetView, load_datasets
from cdmpp.dataset.importers import import_neusight
from cdmpp.device import DEVICE_FEATURES, get_device
from cdmpp.endtoend import NetworkTasks, predict_latency
from cdmpp.predictor import Config, Predictor, TrainingData, few_shot, gather, load_config, train
from cdmpp.predictor.checkpoint import FORMAT_VERSION
from cdmpp.predictor.data import subset
from cdmpp.predictor.predictor import load_predictor
from cdmpp.program.ast import FEATURE_SET
from cdmpp.program.graph import NetworkGraph, load_graphs

FILES = ("neusight_ops.parquet", "neusight_traces.parquet", "neusight_e2e.csv")


@dataclass(frozen=True)
class Bench:
    """The data to train and score with: sampled records of all devices, the datasets with the networks' tasks, device -> its
    traced networks, the pool of devices to train on (without the one left out), and devices of ``--unseen`` not in the pool."""

    args: argparse.Namespace
    config: Config
    data: TrainingData
    view: DatasetView
    graphs: Mapping[str, Sequence[NetworkGraph]]
    pool: Sequence[str]
    unseen: Sequence[str]

    def records_for(self, device: str) -> TrainingData:
        """Records of the device, and of the pool that may be trained on when it is left out."""
        allowed = [*self.pool, device]
        return subset(self.data, np.flatnonzero(self.data.labels["device"].isin(allowed)))


def imported(out: Path, make: Callable[[Path], Any]) -> Path:
    """The folder of a dataset, imported if it does not exist yet."""
    if not out.exists():
        draft = out.with_name(f"{out.name}.{int(time.time())}.part")
        print(f"imported {make(draft).records} records to {out}", flush=True)
        draft.rename(out)
    return out


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def gathered(args: argparse.Namespace, config: Config) -> Bench:
    args.work.mkdir(parents=True, exist_ok=True)
    files, limit = [args.data / name for name in FILES], args.limit
    out = args.work / ("neusight" if limit is None else f"neusight-{limit}")
    folders = [imported(out, lambda draft: import_neusight(files, draft, limit=limit))]
    if args.unseen:
        stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in args.unseen]
        out = args.work / f"unseen-{digest_of(stamps)[:8]}"
        folders.append(imported(out, lambda draft: import_neusight(args.unseen, draft)))
    view = load_datasets(folders)
    graphs: dict[str, dict[str, NetworkGraph]] = {}
    for folder in folders:
        for graph in load_graphs(folder).values():
            for device in graph.meta["devices"]:
                graphs.setdefault(device, {}).setdefault(graph.name, graph)
    pool = load_datasets(folders[:1]).device_names
    rows = sample_evenly(view, args.records, 0, pool).rows
    further = sorted(set(view.device_names) - set(pool))
    if further:
        # drawn separately, so that the training records do not depend on them
        count = args.records // len(pool) * len(further)
        rows = np.concatenate([rows, sample_evenly(view, count, 0, further).rows])
    data = gather(SampledView(view, np.sort(rows)))
    unseen = {name for folder in folders[1:] for g in load_graphs(folder).values() for name in g.meta["devices"]}
    by_device = {device: list(own.values()) for device, own in graphs.items()}
    return Bench(args, config, data, view, by_device, pool, sorted({*further, *unseen} - set(pool)))


def trained_once(config: Config, data: TrainingData, settings: list[Any], work: Path) -> Predictor:
    """A predictor trained on these records, only once: it is kept in the work folder, named by a hash of all it depends on."""
    settings = [*settings, config.model_dump(mode="json"), FORMAT_VERSION, FEATURE_SET, DEVICE_FEATURES]
    out = work / "predictors" / digest_of(settings)[:12]
    if (out / "predictor").exists():
        return Predictor.load(out)
    print(f"training on {len(data)} labels of {', '.join(sorted(data.devices))} in {out}", flush=True)
    return train(config, data, out, resume=True).predictor


def trained_without(bench: Bench, device: str, seed: int) -> Predictor:
    """A predictor trained on all records of the pool except the device's."""
    args, data = bench.args, bench.records_for(device)
    # without records of the device there is nothing to leave out, but a split needs a test part
    spec = f"by_device:heldout={device};seed={seed}" if device in data.devices else "by_task:test=0.01"
    config = bench.config.model_copy(
        update={"split": bench.config.split.model_copy(update={"spec": spec}),
                "train": bench.config.train.model_copy(update={"seed": seed})}
    )  # fmt: skip
    others = sorted(set(bench.pool) - {device})
    return trained_once(config, data, [others, args.records, seed, args.limit], args.work)


def judged(bench: Bench, predictor: Predictor, data: TrainingData, device: str, rows: np.ndarray) -> Row:
    """Errors of a predictor on operators (these rows of the data), nodes and networks of a device."""
    found: Row = {}
    if len(rows):
        table = data.labels.iloc[rows]
        predicted_s = predictor.predict([data.asts[program] for program in table["program"]], device)
        names = [bench.view.tasks[task].name for task in table["task"]]
        found["operators"] = operator_errors(names, table["latency_s"], predicted_s)
        error = np.abs(predicted_s / table["latency_s"].to_numpy() - 1)
        found["operators"]["interval"] = bootstrap(error, table["task"])
    nodes: list[Row] = []
    networks: list[Row] = []
    for graph in bench.graphs.get(device, ()):
        tasks = {task: bench.view.tasks[task] for task in graph.task_weights()}
        latency = predict_latency(NetworkTasks(graph, tasks, library=True), device, predictor)
        nodes.extend(node_rows(graph, latency))
        networks.extend(filter(None, [network_row(graph, latency)]))
    if nodes:
        found["nodes"] = compare_nodes(nodes)
    if networks:
        found["end_to_end"] = compare_networks(networks)
        error = [abs(row["predicted_s"]["cdmpp"] / row["measured_s"] - 1) for row in networks]
        found["end_to_end"]["interval"] = bootstrap(error, [row["network"] for row in networks])
    return found


def evaluate_device(bench: Bench, given: Predictor | None, device: str, seed: int, results: Results) -> None:
    """Score a device zero-shot first, then with each number of measured tasks (``--few-shot``)."""
    args, data, vendor = bench.args, bench.records_for(device), get_device(device).vendor
    rows = np.flatnonzero(data.labels["device"] == device)
    base = cache(lambda: given or trained_without(bench, device, seed))

    def unseen() -> Row:
        known = sorted(base().training.get("records_by_device", base().devices))
        return {
            "vendor": vendor,
            "in_training": device in known,
            "trained_on": known,
            **judged(bench, base(), data, device, rows),
        }

    def taught(k: int) -> Row:
        tuned, split = few_shot(base(), data, device, k, "kmeans", seed)
        print(f"{device} K={k} seed {seed}", flush=True)
        row = judged(bench, tuned, data, device, np.asarray(split.test))
        row.pop("nodes", None)
        return {"vendor": vendor, **row}

    if results.once(unseen, device=device, k=0, seed=seed)["in_training"] or not len(rows):
        return
    for k in args.few_shot:
        if k >= data.labels["task"].iloc[rows].nunique():
            print(f"{device}: has no {k} tasks to learn and others to test", file=sys.stderr)
            continue
        results.once(partial(taught, k), device=device, k=k, seed=seed)


_TITLES = ("mape", "end to end", "NeuSight end to end", "networks")


def figures(rows: list[Row]) -> list[Figure]:
    """Means over the seeds for every device, unseen and with K measured tasks, beside NeuSight; then means over all devices."""
    groups: dict[str, list[Row]] = {}
    means: dict[int, dict[int, list[Row]]] = {}
    seen = {row["device"] for row in rows if row.get("in_training")}
    for row in sorted(rows, key=lambda row: (row["device"], row["k"])):
        what = f"{row['k']} measured" if row["k"] else "in training" if row["device"] in seen else "unseen"
        groups.setdefault(f"{row['device']}, {what}", []).append(_errors_of(row))
        if row["device"] not in seen:
            means.setdefault(row["k"], {}).setdefault(row["seed"], []).append(row)
    for k, by_seed in means.items():
        groups[f"mean, {k} measured" if k else "mean, unseen"] = list(map(_means_of, by_seed.values()))
    unseen = [row for own in means.get(0, {}).values() for row in own if row["vendor"] == "nvidia"]
    return [mean_figure(name, own, _TITLES) for name, own in groups.items()] + node_figures(unseen)


def _errors_of(row: Row) -> Row:
    operators, whole = row.get("operators", {}), row.get("end_to_end", {"sources": {}})
    ends = {"mape": operators.get("interval"), "end to end": whole.get("interval")}
    of = {name: whole["sources"].get(name, {}) for name in ("cdmpp", "neusight")}
    errors = operators.get("mape"), of["cdmpp"].get("ape_mean"), of["neusight"].get("ape_mean_own"), whole.get("n")
    interval = {key: value for key, value in ends.items() if value}
    return {**dict(zip(_TITLES, errors, strict=True)), "interval": interval, "n": operators.get("n", 0), "seed": row["seed"]}


def _means_of(rows: list[Row]) -> Row:
    """Means of one seed: of operators over all devices, of networks over those on NVIDIA's devices."""
    mapes = [row["operators"]["mape"] for row in rows if "operators" in row]
    whole = [r for row in rows if row["vendor"] == "nvidia" for r in row.get("end_to_end", {"rows": ()})["rows"]]
    errors = [abs(row["predicted_s"]["cdmpp"] / row["measured_s"] - 1) for row in whole]
    values = {key: float(np.mean(own)) for key, own in zip(_TITLES, (mapes, errors), strict=False) if own}
    return {**values, "networks": len(errors), "n": len(mapes), "seed": rows[0]["seed"]}


def node_figures(rows: Sequence[Row]) -> list[Figure]:
    """Mean errors of forward nodes by family, pooled over devices: ours and NeuSight's, on the nodes that NeuSight predicts."""
    found = []
    forward = [row["nodes"]["forward"]["families"] for row in rows if "forward" in row.get("nodes", {})]
    for family in FAMILIES:
        theirs = [nodes[family]["sources"].get("neusight", {}) for nodes in forward if family in nodes]
        theirs = [source for source in theirs if source.get("n_own")]
        if theirs:
            counts = [source["n_own"] for source in theirs]
            values = {}
            for title, key in (("APE", "ours_ape_mean_own"), ("NeuSight's APE", "ape_mean_own")):
                values[title] = float(np.average([source[key] for source in theirs], weights=counts))
            found.append(figure(f"nodes, forward, {family}, unseen (NVIDIA's)", values, sum(counts)))
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    missing = [name for name in FILES if not (args.data / name).is_file()]
    if missing:
        print(f"skipped: {args.data} has no {', '.join(missing)}", file=sys.stderr)
        return

    config = load_config(args.config)
    files = [args.data / name for name in FILES] + args.unseen
    options = {name: getattr(args, name) for name in ("records", "limit")}
    options["config"] = config.model_dump(mode="json")
    results = Results(args.json, provenance(__file__, files, args.predictor, args.seeds), options, figures)
    given = load_predictor(args.predictor) if args.predictor else None
    bench = gathered(args, config)
    known = {*bench.graphs, *bench.data.devices}
    devices = [get_device(name).name for name in args.only_device] or bench.unseen or bench.pool
    for device in devices:
        if device not in known:
            sys.exit(f"nothing was measured on {device}; there are {', '.join(sorted(known))}")
        for seed in args.seeds:
            evaluate_device(bench, given, device, seed, results)
    results.finish()


if __name__ == "__main__":
    start(main)
