"""Tuning that builds and measures candidates in parallel, against one step at a time: wall time to equal quality.

    python benchmarks/doppler.py --out runs/bench-doppler --json benchmarks/results/doppler.json

Tasks that the predictor never saw are tuned together, with the same search, seed and trials, in three ways: ``one by one``
builds a batch on all cores and then measures it, with no builds meanwhile, as TVM does; ``degree 1`` builds while one program
is measured; ``auto`` measures as many programs at a time as a calibration allows (``--workers auto``), and its wall time
includes the calibration. Ratios are over ``one by one``: ``time`` is the wall seconds until a way's best label was within 1 %
of the other's final one, over the other's wall time (twice its own if it never was); ``final latency`` is measured again,
alone. ``of the bound`` is labels a second over cores / (core seconds to build and to measure a label).

``simulated`` is not measured: labels a second by the pipeline of ``scale.py`` on one machine with so many cores, with the times
in the records of ``degree 1``. It has three columns: all built, then measured one by one; degree 1; and the best degree.
Builders use the cores that do not measure, and disturbance by neighbours is not simulated: of two cores it says too little.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common import Figure, Results, Row, arguments, figure, in_turn, median_figure, provenance, report, start
from scale import driver_seconds, simulate, times_of
from tuning import DEVICE, NETWORKS, NEVER, held_out_predictor, held_out_tasks, measure_again, seconds_until, tune_config

from cdmpp.dataset import Dataset
from cdmpp.predictor import Predictor
from cdmpp.profiler.machine import usable_cores
from cdmpp.program.types import Task
from cdmpp.tuner.measure import Measurer, device_of_this_machine, make_engine
from cdmpp.tuner.tuning import tune_tasks

WAYS = ("one by one", "degree 1", "auto")
#: Cores of the machines that are simulated.
CORES = (2, 8, 32, 96)


def tuned_once(args: argparse.Namespace, tasks: Sequence[Task], way: str, seed: int, predictor: Predictor) -> Row:
    """Tune the tasks in one way; the row has its costs and results."""
    out = args.out / "runs" / f"{way.replace(' ', '-')}-{seed}"
    workers: int | str = "auto" if way == "auto" else 1
    options = {"predictor": predictor, "trim": None, "seed": seed, "workers": workers, "compile": 1}
    config = tune_config(args, args.trials * len(tasks), builders=args.builders, **options)
    began = time.perf_counter()
    with contextlib.ExitStack() as open_:
        measurer = None
        if way == "one by one":
            engine = make_engine(config, device_of_this_machine(DEVICE), 1, overlap=False)
            measurer = open_.enter_context(Measurer(engine))
        weighted = [(task, 1.0) for task in tasks]
        tuned = tune_tasks("tasks", weighted, device=DEVICE, out=out, config=config, measurer=measurer)
    wall_s, costs = time.perf_counter() - began, tuned.costs
    print(f"{way} seed {seed}: {wall_s:.0f} s, {tuned.tuned_s} s", flush=True)
    written = tuned.to_json()
    bound = len(usable_cores()) / ((costs.build_s + costs.device_s) / costs.measurements)
    return {
        "weights": {task.hash: 1.0 for task in tasks},
        "wall_s": wall_s,
        "costs": written["costs"],
        "curve": written["curve"],
        "best_s": tuned.tuned_s,
        "labels_per_s": costs.measurements / wall_s,
        "of_bound": costs.measurements / wall_s / bound,
        "folder": str(out.relative_to(args.out)),
    }


def compared(way: str, rows: Sequence[tuple[Row, Row]], seeds: Sequence[int]) -> Figure:
    """The figure of one way over ``one by one``, medians over the seeds."""
    times = []
    for ours, theirs in rows:
        seconds = seconds_until(ours["curve"], theirs["best_s"])
        before_s = ours["wall_s"] - ours["costs"]["wall_s"]
        times.append((NEVER * ours["wall_s"] if seconds is None else before_s + seconds) / theirs["wall_s"])
    columns = {
        "time": times,
        "final latency": [ours["final_s"] / theirs["final_s"] for ours, theirs in rows],
        "wall s": [ours["wall_s"] for ours, _ in rows],
        "labels/s": [ours["labels_per_s"] for ours, _ in rows],
        "of the bound": [ours["of_bound"] for ours, _ in rows],
    }
    return median_figure(way, columns, seeds)


def simulated(folder: Path, cores: int, programs: int = 2000) -> Figure:
    """The figure of simulated labels a second on one machine with so many cores."""
    times = times_of(Dataset.open(folder / "measured").records, math.inf, driver_seconds(), 0.0)
    chosen = [number % len(times.build_s) for number in range(programs)]
    build_s, run_s = (float(of[chosen].sum()) for of in (times.build_s, times.run_s))
    degrees = sorted({2**k for k in range(cores.bit_length()) if 2**k < cores})
    rates = {d: simulate(times, chosen, cores - d, d)["labels_per_s"] for d in degrees}
    best = max(rates, key=rates.__getitem__)
    values = {"one by one": programs / (build_s / cores + run_s), "degree 1": rates[1], "best degree": rates[best]}
    return figure(f"simulated: labels/s on {cores} cores", {**values, "degree": best}, programs)


def main() -> None:
    args = arguments(__doc__, __file__, networks={"default": list(NETWORKS)}).parse_args()
    if args.quick:
        args.networks, args.tasks, args.trials, args.batch, args.seeds, args.repeats = ["gcn"], 1, 8, 4, [0], 1
    made = provenance(__file__, (), args.predictor, args.seeds)
    names = ("tasks", "trials", "batch", "population", "generations")
    results = Results(args.out / "results.json", made, {name: getattr(args, name) for name in names})
    predictor = held_out_predictor(args.predictor, args.networks)
    tasks = held_out_tasks(args, predictor)
    rows = {}
    for seed in args.seeds:
        for way in in_turn(WAYS, seed):
            rows[way, seed] = results.once(partial(tuned_once, args, tasks, way, seed, predictor), way=way, seed=seed)
    measure_again(args, DEVICE, list(rows.values()), results)
    figures = [compared(way, [(rows[way, s], rows[WAYS[0], s]) for s in args.seeds], args.seeds) for way in WAYS]
    folder = args.out / rows["degree 1", args.seeds[0]]["folder"]
    figures += [simulated(folder, cores) for cores in CORES]
    report(args.json, made, figures, runs=list(rows.values()))


if __name__ == "__main__":
    start(main)
