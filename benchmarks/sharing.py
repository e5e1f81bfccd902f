"""Tuning a whole network with one worker, and sharded over workers that each have a share of the machine.

    python benchmarks/sharing.py --out runs/bench-sharing --json sharing.json            # under 20 minutes on two idle cores
    python benchmarks/sharing.py --table --out runs/bench-shares --json shares.json      # tuned at a share, run at another
    python benchmarks/sharing.py --quick --out /tmp/bench-sharing                        # does it run? figures mean nothing

The tasks of a network are tuned from nothing, with the same search, seed and number of trials, in three ways:

* ``one``: one worker, one builder and one measuring process (``--shards 1``).
* ``sharded``: as many of each as shares fit on this machine (``--shards auto``).
* ``pipeline``: what ``cdmpp tune`` does without shards: one search and one measuring process, builders on all cores.

``speedup`` is the wall time of ``one`` over that of ``sharded``, from the start of the workers to the finished database,
the median over the repetitions (a seed each); ``efficiency`` is speedup / shares. ``over the pipeline`` is the same against
``pipeline``, which uses all cores too. The ways take turns in running first. Finished tunings are kept in ``--out``; one that
was interrupted starts anew. The best program of every task and tuning is measured again at the end, alone, all by one
procedure; ``final latency`` is that of ``sharded`` over that of ``one``.

``--table`` tunes the network for one core, two, and so on in powers of two, and measures each result on all of these shares.
A line gives how many times as slow a result is on each share as the one tuned for that share.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

from common import Figure, Results, Row, arguments, figure, in_turn, median_figure, provenance, report, start
from tuning import kept, measure_again, tune_config

from cdmpp.profiler.machine import usable_cores
from cdmpp.program.network import load_network
from cdmpp.program.types import Task
from cdmpp.tuner.deployment import import_network, weighted_tasks
from cdmpp.tuner.measure import device_of_this_machine
from cdmpp.tuner.tuning import tune_tasks
from cdmpp.tuner.workers import worker_cores

#: Ways to tune, with the number of shards of each.
WAYS: dict[str, int | str | None] = {"one": 1, "sharded": "auto", "pipeline": None}


def tuned_once(args: argparse.Namespace, tasks: Sequence[tuple[Task, float]], way: str, device: str, seed: int) -> Row:
    """Tune the network in one way; the row has its wall time, costs and results."""
    out = args.out / "runs" / f"{way}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    options = {"cost_model": "cdmpp", "predictor": args.predictor, "trim": None, "compile": 1}
    config = tune_config(args, args.trials, seed=seed, shards=WAYS.get(way), **options)
    tuned = tune_tasks(args.network, tasks, device=device, out=out, config=config)
    wall_s = time.perf_counter() - started
    print(f"{way} seed {seed}: {wall_s:.0f} s", flush=True)
    return {
        "weights": {task.hash: weight for task, weight in tasks},
        "wall_s": wall_s,
        "costs": tuned.to_json()["costs"],
        "tuned_s": tuned.tuned_s,
        "untuned_s": tuned.untuned_s,
        "folder": str(out.relative_to(args.out)),
    }


def figures(rows: Sequence[Row], shares: int) -> list[Figure]:
    """Speed-ups with their range over the seeds, and the medians of every way."""
    by_way = {way: sorted((r for r in rows if r["way"] == way), key=lambda r: r["seed"]) for way in WAYS}
    seeds = [row["seed"] for row in by_way["one"]]

    def ratios(key: str, way: str, other: str) -> list[float]:
        pairs = zip(by_way[way], by_way[other], strict=True)
        return [a[key] / b[key] for a, b in pairs if key in a and key in b]

    speedups = ratios("wall_s", "one", "sharded")
    columns = {
        "speedup": speedups,
        "efficiency": [value / shares for value in speedups],
        "over the pipeline": ratios("wall_s", "pipeline", "sharded"),
        "final latency": ratios("final_s", "sharded", "one"),
    }
    found = [median_figure(f"{shares} workers on a share each", columns, seeds)]
    for way, own in by_way.items():
        final_us = [1e6 * row["final_s"] for row in own if "final_s" in row]
        columns = {"wall s": [row["wall_s"] for row in own], "final us": final_us}
        found.append(median_figure(way, columns, seeds))
    return found


def table(args: argparse.Namespace, tasks: Sequence[tuple[Task, float]], results: Results) -> list[Figure]:
    """A line for each share that was tuned for: the slow-downs on each share, medians over the seeds."""
    base, cores = args.device.partition("@")[0], len(usable_cores())
    devices = [f"{base}@{share}" for share in sorted({min(2**i, cores) for i in range(cores.bit_length() + 1)})]
    final_s: dict[tuple[str, str, int], float] = {}
    for seed in range(args.repetitions):
        tuned = {}
        for device in devices:
            tune = partial(tuned_once, args, tasks, device, device, seed)
            tuned[device] = results.once(tune, way=device, seed=seed)
        for run_at in devices:
            rows = {device: dict(row) for device, row in tuned.items()}
            measure_again(args, run_at, list(rows.values()), results)
            final_s |= {(device, run_at, seed): row.get("final_s", float("nan")) for device, row in rows.items()}
    found = []
    for device in devices:
        slower = {
            run_at: [final_s[device, run_at, s] / final_s[run_at, run_at, s] for s in range(args.repetitions)]
            for run_at in devices
        }
        values = {f"at {run_at}": statistics.median(ratios) for run_at, ratios in slower.items()}
        found.append(figure(f"tuned at {device}", values, args.repetitions, range(args.repetitions)))
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    if args.quick:
        args.predictor, args.trials, args.batch, args.population = "none", 8, 4, 16
        args.generations, args.repetitions, args.repeats = 1, 1, 1
    args.predictor = None if args.predictor == "none" else args.predictor
    seeds = range(args.repetitions)
    made = provenance(__file__, (), args.predictor, seeds)
    names = ("table", "network", "device", "trials", "batch", "population", "generations")
    results = Results(args.out / "results.json", made, {name: getattr(args, name) for name in names})
    tasks = weighted_tasks(import_network(load_network(args.network)), args.network)
    if args.table:
        report(args.json, made, table(args, tasks, results), runs=kept(results.rows))
        return
    device = device_of_this_machine(args.device)
    shares = len(worker_cores(device, "auto"))
    if shares < 2 and not args.quick:
        sys.exit(f"one share of {device.name} is all that fits on this machine: nothing to compare")
    rows = []
    for seed in seeds:
        for way in in_turn(list(WAYS), seed):
            tune = partial(tuned_once, args, tasks, way, args.device, seed)
            rows.append(results.once(tune, way=way, seed=seed))
    measure_again(args, args.device, rows, results)
    report(args.json, made, figures(rows, shares), runs=kept(rows))


if __name__ == "__main__":
    start(main)
