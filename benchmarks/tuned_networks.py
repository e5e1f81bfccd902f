"""Whole networks on one core: tuned with cdmpp's cost model and with TVM's XGBModel, untuned, and run eagerly by PyTorch.

    python benchmarks/tuned_networks.py --out runs/bench-networks --json benchmarks/results/tuned_networks.json

The default weights were not trained on these networks: a transformer and a convolutional network of the zoo, and one of each
from `eager.py`. Each is tuned from nothing with every cost model and seed, with the same number of trials and builders;
XGBModel uses TVM's evolutionary search. Then all results run in turn in one process, and PyTorch after them on the same core.
Ratios of latencies are below 1 if the tuned network is faster. ``time`` is the wall time of tuning. ``predicted`` is the
latency that the default weights predict for the network with the same schedules, over the measured one.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial

import torch
from common import Figure, Results, Row, arguments, in_turn, median_figure, provenance, report, start
from eager import measured_s, own_networks

from cdmpp.endtoend import predict_latency
from cdmpp.endtoend.graph import graph_of_fused
from cdmpp.profiler import machine
from cdmpp.program import import_tvm
from cdmpp.program.network import Network, example_inputs, load_network
from cdmpp.program.zoo import zoo_entry
from cdmpp.tuner.config import Objective, TuneConfig
from cdmpp.tuner.deployment import apply_database, import_network, measure_network, weighted_tasks
from cdmpp.tuner.measure import device_of_this_machine
from cdmpp.tuner.results import json_database
from cdmpp.tuner.tuning import tune_tasks

DEVICE = "this-cpu@1"
MODELS = ("cdmpp", "xgb")


def load(name: str) -> tuple[Network, torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A network for TVM, and its PyTorch module with inputs."""
    if name.startswith("own: "):
        module, inputs = own_networks()[name]
        return Network.from_torch(module.eval(), inputs, name.replace(": ", "_")), module.eval(), inputs
    network = load_network(name)
    return network, zoo_entry(name).build().eval(), example_inputs(network)


def tuned(args: argparse.Namespace, name: str, model: str, seed: int) -> Row:
    """Tune a network; the row has its wall time and the folder of its database."""
    network = load(name)[0]
    out = args.out / "runs" / f"{network.name}-{model}-{seed}"
    config = TuneConfig(Objective(args.trials), cost_model=model, trim=None, seed=seed)
    tasks, resume = weighted_tasks(import_network(network), network.name), (out / "tuning.json").exists()
    report = tune_tasks(network.name, tasks, device=DEVICE, out=out, config=config, resume=resume)
    costs = report.to_json()["costs"]
    print(f"{name} {model} seed {seed}: {report.tuned_s} of {report.untuned_s} s by its labels, {costs}", flush=True)
    return {"folder": str(out), "tuned_s": report.tuned_s, "untuned_s": report.untuned_s, "costs": costs}


def measured(name: str, runs: list[Row]) -> Row:
    """Measure a network as tuned by each run, untuned and by PyTorch; with the latencies predicted for each run's schedules."""
    network, module, inputs = load(name)
    fused, device = import_network(network), device_of_this_machine(DEVICE)
    target = import_tvm().target.Target(dict(device.target))
    modules = {"untuned": fused.module}
    for run in runs:
        modules[f"{run['model']} {run['seed']}"], _ = apply_database(fused.module, json_database(run["folder"]), target)
    usable = machine.usable_cores()
    found = measure_network(fused, network, device, modules, cores := machine.core_groups(usable, 1, 1)[0])
    graph = graph_of_fused(fused, network.name)
    predicted_s = {f"{r['model']} {r['seed']}": predict_latency(graph, device, schedule=r["folder"]).latency_s for r in runs}
    machine.pin(cores)
    torch.set_num_threads(1)
    with torch.inference_mode():
        eager_s, noise = measured_s(lambda: module(*inputs))
    machine.pin(usable)
    variants = {variant: asdict(latency) | {"calls": None} for variant, latency in found.variants.items()}
    rest = {"noise": noise, "output_difference": found.output_difference}
    return {"variants": variants, "predicted_s": predicted_s, "eager_s": eager_s, **rest}


def figures(rows: list[Row]) -> list[Figure]:
    """The figure of each network with its ratios, medians over the seeds."""
    found = []
    for row in rows:
        if "eager_s" not in row:
            continue
        runs = {(r["model"], r["seed"]): r for r in rows if r["network"] == row["network"] and "model" in r}
        seconds = {variant: latency["latency_s"] for variant, latency in row["variants"].items()}
        seeds, both = (sorted(seed for model, seed in runs if model == wanted) for wanted in MODELS)
        ours, theirs = ({seed: seconds[f"{model} {seed}"] for seed in seeds if (model, seed) in runs} for model in MODELS)
        wall_s = {key: run["costs"]["wall_s"] for key, run in runs.items()}
        columns = {
            "over PyTorch": [ours[seed] / row["eager_s"] for seed in seeds],
            "over XGBModel": [ours[seed] / theirs[seed] for seed in both],
            "over untuned": [ours[seed] / seconds["untuned"] for seed in seeds],
            "time": [wall_s["cdmpp", seed] / wall_s["xgb", seed] for seed in both],
            "predicted": [row["predicted_s"][f"cdmpp {seed}"] / ours[seed] for seed in seeds],
            "ms": [1e3 * s for s in ours.values()],
            "PyTorch ms": [1e3 * row["eager_s"]],
        }
        found.append(median_figure(row["network"], columns, seeds))
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    made = provenance(__file__, (), "default", args.seeds)
    results = Results(args.out / "results.json", made, {"trials": args.trials}, figures)
    for seed in args.seeds:
        for name in args.networks:
            for model in in_turn(list(MODELS) if seed in args.xgb_seeds else ["cdmpp"], seed):
                results.once(partial(tuned, args, name, model, seed), network=name, model=model, seed=seed)
    for name in args.networks:
        runs = [row for row in results.rows if row["network"] == name and "model" in row]
        results.once(partial(measured, name, runs), network=name, runs=len(runs))
    report(args.json, made, figures(results.rows), options={"trials": args.trials}, rows=results.rows)


if __name__ == "__main__":
    start(main)
