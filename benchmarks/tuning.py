"""Trials and time to tune tasks of networks that the predictor never saw: cost models cdmpp, xgb and random, and trimming.

    python benchmarks/tuning.py --out runs/bench-tuning --json tuning.json
    python benchmarks/tuning.py --runs cdmpp trimmed --out runs/bench-tuning --json trimming.json
    python benchmarks/tuning.py --quick --out /tmp/bench-tuning          # does it run? figures mean nothing

The predictor must not have seen the networks. Some of their tasks, spread evenly over the range of their work, are tuned: each
alone, from nothing, with every cost model and seed, with the same number of trials and profiler. TVM's cost models use TVM's
evolutionary search, ``cdmpp`` its own; ``evolutionary`` is cdmpp's cost model with TVM's search. ``trimmed`` is ``cdmpp`` that
drops candidates whose predicted interval lies above the best so far; ``all`` measures every candidate that it compiles, not one
of four. ``two`` tunes for two cores; so does ``warm``, starting from the results of ``cdmpp`` for one. All is kept in
``--out``. The best program of each run (by its own label) is measured again at the end, all by one procedure: alone, without
builds meanwhile, in turn, ``--repeats`` times; the median counts. Ratios are of cdmpp over another run:

* ``trials``: measurements until its best label was within 1 % of the other's final one, over the other's measurements; twice
  these if it never was (``reached`` is the fraction of runs that were). ``time`` is the same in wall seconds. ``needed`` is
  over the measurements until the other was there itself; ``search`` is the CPU time of the search over the wall time.
* ``final latency``: measured again. ``trimmed`` over ``cdmpp`` also has ``cost``, the CPU seconds of search, building and
  measuring, and ``equal``, the fraction that is at most 2 % slower; ``on the device``, the seconds there; and ``at as many``,
  the best label over cdmpp's best after as many measurements. ``stopped`` cuts the trimmed runs' curves where
  ``--stop-when-gain-per-minute-below`` would stop, and reduces the cost in proportion to the wall time.

All are geometric means over tasks and seeds. The spread is that of the means of each seed, the interval is over tasks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Figure, Results, Row, arguments, bootstrap, figure, provenance, report, spread_of, start

from cdmpp.dataset import Dataset
from cdmpp.errors import ProgramError
from cdmpp.predictor import Predictor
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler.engine import BuildJob
from cdmpp.program.network import extract_tasks
from cdmpp.program.types import Task
from cdmpp.tuner.candidates import TaskTuner
from cdmpp.tuner.config import Objective, Point, TuneConfig, curve_gain
from cdmpp.tuner.measure import device_of_this_machine, make_engine
from cdmpp.tuner.tuning import tune_tasks

NETWORKS = ("densenet121", "gcn", "inception_v3", "vgg16")
RUNS = ("cdmpp", "xgb", "random", "trimmed", "evolutionary", "all", "two", "warm")
DEVICE, OTHER = "this-cpu@1", "this-cpu@2"
#: Fraction by which repeated labels differ, about.
TOLERANCE = 0.01
#: A run that never reaches a latency counts with its trials and time multiplied by this.
NEVER = 2.0
#: A final latency that is slower by at most this fraction counts as equal.
EQUAL = 0.02


def held_out_predictor(predictor_name: str, networks: Sequence[str]) -> Predictor:
    """Load a predictor; SystemExit if it was trained on one of the networks."""
    predictor = load_predictor(predictor_name)
    seen = set(networks) & set(predictor.training.get("networks", ()))
    if seen:
        sys.exit(f"{predictor_name}: the predictor was trained on {', '.join(sorted(seen))}")
    return predictor


def held_out_tasks(args: argparse.Namespace, predictor: Predictor) -> list[Task]:
    """Tasks of the networks that the predictor never saw, spread evenly over the range of their work.

    A task whose space has fewer programs than there are trials, such as most poolings, is replaced by the next one.
    """
    known = set(predictor.training.get("tasks", ()))
    unseen = [t for t in extract_tasks(args.networks) if t.hash not in known and t.flops > 0]
    # in tasks of some hundred nanoseconds there is nothing to tune
    tasks = sorted([t for t in unseen if t.flops >= 1e5] or unseen, key=lambda t: t.flops)
    chosen: dict[int, Task] = {}
    for place in range(args.tasks):
        number = place * len(tasks) // args.tasks
        while number < len(tasks) and (number in chosen or not enough_programs(tasks[number], args.trials)):
            number += 1
        if number < len(tasks):
            chosen[number] = tasks[number]
    return list(chosen.values())


def enough_programs(task: Task, trials: int) -> bool:
    """Whether a task's space has at least as many different programs as there are trials."""
    try:
        tuner = TaskTuner(task, device_of_this_machine(DEVICE), 0)
    except ProgramError:
        return False
    return len(tuner.sample(trials, 0)) == trials


def tune_config(args: argparse.Namespace, trials: int, **options: Any) -> Any:
    """The configuration of a tuning, with the settings that the benchmarks share."""
    search = {"population": args.population, "generations": args.generations}
    return TuneConfig(Objective(trials), batch=args.batch, **search, **options)


def device_of(run: str) -> str:
    """The device (number of cores) that a run tunes for."""
    return OTHER if run in ("two", "warm") else DEVICE


def tuned_alone(args: argparse.Namespace, task: Task, run: str, name: str, seed: int, predictor: Predictor) -> Row:
    """Tune one task; the row has its costs and curve, the labels in the order of measurement, and the best one."""
    out = args.out / "runs" / f"{task.hash}-{name}-{seed}"
    trim, model = args.coverage if run == "trimmed" else None, run if run in ("xgb", "random") else "cdmpp"
    search = "metaschedule" if run == "evolutionary" else "cdmpp"
    options = {"trim": trim, "seed": seed, "search": search, "compile": 1 if run == "all" else None}
    config = tune_config(args, args.trials, cost_model=model, predictor=predictor, **options)
    resume = (out / "tuning.json").exists()
    earlier = [out.with_name(f"{task.hash}-cdmpp-{seed}")] if run == "warm" else []
    where: dict[str, Any] = {"device": device_of(run), "out": out, "warm_start": earlier}
    tuned = tune_tasks(task.name, [(task, 1.0)], config=config, resume=resume, **where)
    written = tuned.to_json()
    print(f"{task.name} {name} seed {seed}: {tuned.tasks[0].scheduled_s} s", flush=True)
    return {
        "name": task.name,
        "weights": {task.hash: 1.0},
        "trials": tuned.costs.trials,
        "costs": written["costs"],
        "curve": written["curve"],
        "labels_s": measured_labels(out),
        "best_s": tuned.tasks[0].scheduled_s,
        "folder": str(out.relative_to(args.out)),
    }


def measured_labels(out: Path) -> list[float | None]:
    """First labels of a tuning's programs in the order of measurement, None for failures."""
    frame = Dataset.open(out / "measured").records
    frame = frame[frame["origin"] != "unscheduled"].drop_duplicates("program")
    return [float(r.latency_s) if r.status == "ok" else None for r in frame.itertuples()]


def best_programs(folder: Path) -> dict[str, Any]:
    """The fastest program of each task of a tuning, by its own labels, as a job; it may be the untuned program."""
    dataset = Dataset.open(folder / "measured")
    frame = dataset.records
    frame = frame[frame["status"] == "ok"]
    best = {}
    for index in frame.groupby("task")["latency_s"].idxmin():
        program = dataset.programs[str(frame.loc[index, "program"])]
        space = None if program.space_hash is None else dataset.spaces[program.space_hash]
        best[program.task_hash] = BuildJob(program, dataset.tasks[program.task_hash], space)
    return best


def measure_again(args: argparse.Namespace, device: str, rows: Sequence[Row], results: Results) -> None:
    """Measure the best programs of every run by one procedure; adds ``final_s``, weighted over the run's tasks, to the rows."""
    todo = [row for row in rows if "final_s" not in row]
    best = [best_programs(args.out / row["folder"]) for row in todo]
    jobs = {job.program.hash: job for found in best for job in found.values()}
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats if jobs else 0):
        with make_engine(TuneConfig(Objective(1)), device_of_this_machine(device), 1, overlap=False) as engine:
            for outcome in engine.run(iter(jobs.values())):
                if outcome.latency_s is not None:
                    seconds[outcome.job.program.hash].append(outcome.latency_s)
    for row, found in zip(todo, best, strict=True):
        parts = [(weight, found.get(task)) for task, weight in row["weights"].items()]
        values = [(weight, seconds[job.program.hash]) for weight, job in parts if job is not None]
        if len(values) == len(parts) and all(measured for _, measured in values):
            row["final_s"] = sum(weight * statistics.median(measured) for weight, measured in values)
            row["final_spread"] = max(max(measured) / min(measured) - 1 for _, measured in values)
    results.write()


def trials_until(labels_s: Iterable[float | None], latency_s: float) -> int | None:
    """Number of trials until a label was within :data:`TOLERANCE` of a latency; None if none was."""
    for number, label_s in enumerate(labels_s, start=1):
        if label_s is not None and label_s <= latency_s * (1 + TOLERANCE):
            return number
    return None


def seconds_until(curve: Sequence[dict[str, Any]], latency_s: float) -> float | None:
    """Wall seconds until the best was within :data:`TOLERANCE` of a latency, not counting the untuned task; None if never."""
    for point in curve:
        if point["measurements"] and point["latency_s"] <= latency_s * (1 + TOLERANCE):
            return float(point["wall_s"])
    return None


def compare(ours: Row, theirs: Row) -> dict[str, float]:
    """Ratios of two runs of a task with one seed."""
    trials = trials_until(ours["labels_s"], theirs["best_s"])
    seconds = seconds_until(ours["curve"], theirs["best_s"])
    wall_s, measured = theirs["costs"]["wall_s"], len(theirs["labels_s"])
    taken = NEVER * measured if trials is None else trials
    return {
        "trials": taken / measured,
        "needed": taken / (trials_until(theirs["labels_s"], theirs["best_s"]) or measured),
        "search": ours["costs"]["search_cpu_s"] / ours["costs"]["wall_s"],
        "time": NEVER * ours["costs"]["wall_s"] / wall_s if seconds is None else seconds / wall_s,
        "final latency": ours["final_s"] / theirs["final_s"],
        "reached": float(trials is not None),
    }


def compare_trimmed(plain: Row, trimmed: Row) -> dict[str, float]:
    """Ratios of cost and latency, trimmed over plain, and the fraction of the candidates that was dropped."""
    latency = trimmed["final_s"] / plain["final_s"]
    as_many = [label_s for label_s in plain["labels_s"][: len(trimmed["labels_s"])] if label_s is not None]
    return {
        "cost": trimmed["costs"]["cpu_s"] / plain["costs"]["cpu_s"],
        "on the device": trimmed["costs"]["device_s"] / plain["costs"]["device_s"],
        "at as many": trimmed["best_s"] / min(as_many),
        "final latency": latency,
        "equal": float(latency <= 1 + EQUAL),
        "dropped": trimmed["costs"]["dropped"] / trimmed["costs"]["trials"],
    }


def stopped(plain: Row, trimmed: Row, least_gain: float) -> dict[str, float]:
    """The ratios if the trimmed run had ended where another minute promises less than `least_gain`, by the runs' own labels."""
    points = [Point(**point) for point in trimmed["curve"]]
    gains = [curve_gain(points[: n + 1]) for n in range(len(points))]
    end = next((n for n, gain in enumerate(gains) if gain is not None and gain < least_gain), -1)
    done = points[end].wall_s / trimmed["costs"]["wall_s"]
    latency = points[end].latency_s / plain["curve"][-1]["latency_s"]
    cost = done * trimmed["costs"]["cpu_s"] / plain["costs"]["cpu_s"]
    return {"cost": cost, "final latency": latency, "equal": float(latency <= 1 + EQUAL)}


def geometric_figure(name: str, pairs: Sequence[Row]) -> Figure:
    """Geometric means of ratios over tasks and seeds, with the spread of the means of each seed and the interval over tasks;
    arithmetic means of fractions."""
    seed, task = (np.array([pair[key] for pair in pairs]) for key in ("seed", "task"))
    values, spread, interval = {}, {}, {}
    for metric in pairs[0]:
        if metric in ("equal", "dropped", "reached", "search"):
            values[metric] = statistics.fmean(pair[metric] for pair in pairs)
        elif metric not in ("run", "task", "seed"):
            logs = np.log([pair[metric] for pair in pairs])
            values[metric] = float(np.exp(logs.mean()))
            spread[metric] = spread_of([float(np.exp(logs[seed == s].mean())) for s in np.unique(seed)])
            interval[metric] = np.exp(bootstrap(logs, task)).tolist()
    return figure(name, values, len(pairs), seed.tolist(), spread, interval)


def kept(rows: Iterable[Row]) -> list[Row]:
    """The entries of runs that the result file keeps; ``--out`` has their labels, curves and costs."""
    left_out = ("labels_s", "curve", "costs", "weights", "folder")
    return [
        {**{k: row["costs"][k] for k in ("wall_s", "cpu_s", "search_cpu_s", "dropped")},
         **{k: v for k, v in row.items() if k not in left_out}}
        for row in rows
    ]  # fmt: skip


def main() -> None:
    given = {"networks": {"default": list(NETWORKS)}, "runs": {"choices": RUNS}}
    args = arguments(__doc__, __file__, **given).parse_args()
    if args.quick:
        args.networks, args.tasks, args.trials = ["gcn"], 2, 12
        args.batch, args.population, args.generations, args.seeds, args.repeats = 4, 16, 1, [0], 1
    made = provenance(__file__, (), args.predictor, args.seeds)
    names = ("trials", "batch", "population", "generations")
    results = Results(args.out / "results.json", made, {name: getattr(args, name) for name in names})
    predictor = held_out_predictor(args.predictor, args.networks)
    tasks = held_out_tasks(args, predictor)
    # all runs of a task and a seed follow each other, so that a drift of the machine affects them equally
    rows = {}
    for seed, task, run in itertools.product(args.seeds, tasks, args.runs):
        name = f"trimmed-{args.coverage:g}" if run == "trimmed" else run
        tune = partial(tuned_alone, args, task, run, name, seed, predictor)
        rows[task.hash, seed, run] = results.once(tune, task=task.hash, run=name, seed=seed)
    for device in (DEVICE, OTHER):
        measure_again(args, device, [row for row in rows.values() if device_of(row["run"]) == device], results)

    figures, pairs = [], []
    for run in [name for name in args.runs if name not in ("cdmpp", "two")] if "cdmpp" in args.runs else ():
        base = "two" if run == "warm" else "cdmpp"
        both = {
            (task, seed): (rows[task, seed, base], row)
            for (task, seed, name), row in rows.items()
            if name == run and "final_s" in row and "final_s" in rows.get((task, seed, base), ())
        }
        measures: dict[str, Callable[[Row, Row], dict[str, float]]] = {f"cdmpp over {run}": compare}
        if run == "trimmed":
            stop = partial(stopped, least_gain=args.least_gain)
            measures = {f"trimmed at {args.coverage:g} over cdmpp": compare_trimmed}
            measures[f"and stopped below {100 * args.least_gain:g} % a minute"] = stop
        elif run == "all":
            measures = {"compiled over all measured": lambda ours, every: compare_trimmed(every, ours)}
        elif run == "warm":
            measures = {"two cores, warm over cold": lambda cold, warm: compare(warm, cold)}
        for name, measure in measures.items() if both else ():
            found = [{"run": name, "task": t, "seed": s, **measure(*own)} for (t, s), own in both.items()]
            figures.append(geometric_figure(name, found))
            pairs += found
    report(args.json, made, figures, pairs=pairs, runs=kept(rows.values()))


if __name__ == "__main__":
    start(main)
