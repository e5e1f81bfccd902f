"""Trials and time to tune tasks of networks that the predictor never saw: cost models cdmpp, xgb and random.

    python benchmarks/tuning.py --data data --out runs/bench-tuning --json tuning.json
    python benchmarks/tuning.py --quick --out /tmp/bench-tuning          # does it run? figures mean nothing

The predictor is trained here on the records of all networks but those named by ``--networks`` (and without every task that
they contain), or given by ``--predictor``, and then checked to have seen none of these tasks. Tasks are drawn evenly over the
range of their work. Every task is tuned alone, from nothing, with every cost model and every seed: the same
search (TVM's evolutionary search), the same number of trials, the same profiler, no trimming. Everything is kept in
``--out``: a run that is started again goes on where it was, measuring nothing twice.

The best program of each run (by its own label) is measured again at the end, all of them by one procedure: alone, with
nothing built meanwhile, in turn, ``--repeats`` times; the median counts.

* ``final_latency_ratio``: cdmpp's final latency over xgb's, measured again.
* ``trials_ratio``: trials until cdmpp's best label was within 1 % of xgb's final one, over xgb's trials. A run that never
  came so far counts as twice its trials; how many there were is in the JSON.
* ``time_ratio``: the same in wall seconds, over those of xgb's whole run.

All are geometric means over tasks and seeds; the spread is that of the seeds' own means. ``--network`` is also tuned end to
end, and run whole in the Relax VM.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_rows import KeptRows

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.program.types import Task

NETWORKS = ("densenet121", "gcn", "inception_v3", "vgg16")
MODELS = ("cdmpp", "xgb", "random")
DEVICE = "this-cpu@1"
#: Labels repeat to about so much.
TOLERANCE = 0.01
#: A run that never reached a latency counts as so many times its trials and time.
NEVER = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that benchmarks of the tuner share."""
    parser.add_argument(
        "--data", nargs="+", default=["data"], metavar="DIR", help="to train the predictor on"
    )
    parser.add_argument("--config", default="configs/cpu.yaml", help="of the predictor")
    parser.add_argument("--predictor", metavar="DIR", help="in place of one trained here")
    parser.add_argument(
        "--networks", nargs="+", default=list(NETWORKS), help="held out; their tasks are tuned"
    )
    parser.add_argument("--tasks", type=int, default=8, metavar="N")
    parser.add_argument("--trials", type=int, default=128, metavar="N", help="of a task")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="trials of a round")
    parser.add_argument("--population", type=int, default=256, metavar="N", help="of the search")
    parser.add_argument("--generations", type=int, default=3, metavar="N", help="of the search")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of the final measurements")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="does it run: two tasks of a small network")


def shrink(args: argparse.Namespace) -> None:
    """The settings of ``--quick``."""
    args.networks, args.config, args.tasks, args.trials = ["mlp"], "configs/smoke.yaml", 2, 12
    args.batch, args.population, args.generations, args.seeds, args.repeats = 4, 16, 1, [0], 1


def held_out_predictor(args: argparse.Namespace) -> Predictor:
    """A predictor that never saw the networks; SystemExit for one that did."""
    from cdmpp.predictor import Predictor, load_config, train

    folder = args.predictor or args.out / "predictor"
    if args.predictor is None and not (folder / "predictor").exists():
        config = load_config(args.config)
        spec = f"by_network:heldout={held_out_names(args)};seed=0"
        config = config.model_copy(update={"split": config.split.model_copy(update={"spec": spec})})
        resume = (folder / "config.yaml").exists()
        train(config, args.data, folder, resume=resume, progress=lambda line: print(line, file=sys.stderr))
    predictor = Predictor.load(folder)
    seen = set(args.networks) & set(predictor.training.get("networks", ()))
    if seen:
        sys.exit(f"{folder}: the predictor was trained on {', '.join(sorted(seen))}")
    return predictor


def held_out_names(args: argparse.Namespace) -> str:
    """What the split holds out: the networks to be tuned that there are records of, else any one."""
    from cdmpp.dataset import load_datasets

    measured = {name for task in load_datasets(args.data).tasks.values() for name in task.networks}
    return "+".join(name for name in args.networks if name in measured) or "1"


def held_out_tasks(args: argparse.Namespace, predictor: Predictor) -> list[Task]:
    """Tasks of the networks that the predictor never saw, evenly over the range of their work.

    In place of a task whose space has fewer programs than there are trials, such as most poolings, the next one is taken.
    """
    from cdmpp.program.tasks import extract_tasks

    known = set(predictor.training.get("tasks", ()))
    tasks = sorted(
        (t for t in extract_tasks(args.networks) if t.hash not in known and t.flops > 0),
        key=lambda t: t.flops,
    )
    # what takes some hundred nanoseconds has nothing to tune
    tasks = [t for t in tasks if t.flops >= 1e5] or tasks
    chosen: dict[int, Task] = {}
    for place in range(args.tasks):
        number = place * len(tasks) // args.tasks
        while number < len(tasks) and (number in chosen or not enough_programs(tasks[number], args.trials)):
            number += 1
        if number < len(tasks):
            chosen[number] = tasks[number]
    return list(chosen.values())


def enough_programs(task: Task, trials: int) -> bool:
    """Whether a task's space has so many different programs."""
    from cdmpp.errors import ProgramError
    from cdmpp.tuner.prepare import device_of_this_machine
    from cdmpp.tuner.task_tuner import SearchConfig, TaskTuner

    try:
        tuner = TaskTuner(task, device_of_this_machine(DEVICE), SearchConfig(), 0)
    except ProgramError:
        return False
    return len(tuner.sample(trials, 0)) == trials


def tune_alone(
    args: argparse.Namespace, task: Task, name: str, results: KeptRows, **options: Any
) -> dict[str, Any]:
    """Tune one task; the row says how, what was found, and the best label after each trial."""
    from cdmpp.tuner.objective import Objective
    from cdmpp.tuner.task_tuner import SearchConfig
    from cdmpp.tuner.tuning import TuneConfig, tune_tasks

    key = {"task": task.hash, "run": name, "seed": options["seed"]}
    row = results.find(**key)
    if row is not None:
        return row
    out = args.out / "runs" / f"{task.hash}-{name}-{options['seed']}"
    config = TuneConfig(
        Objective(args.trials),
        batch=args.batch,
        search=SearchConfig(args.population, args.generations),
        **options,
    )
    started = time.perf_counter()
    report = tune_tasks(
        task.name, [(task, 1.0)], device=DEVICE, out=out, config=config, resume=(out / "tuning.json").exists()
    )
    row = {
        **key,
        "name": task.name,
        "trials": report.costs.trials,
        "costs": report.to_json()["costs"],
        "curve": report.to_json()["curve"],
        "labels_s": measured_labels(out),
        "best_s": report.tasks[0].best_s,
        "folder": str(out.relative_to(args.out)),
    }
    results.add(row)
    best = "nothing" if row["best_s"] is None else f"{1e6 * row['best_s']:.1f} us"
    print(
        f"{task.name} {name} seed {options['seed']}: {best} in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return row


def measured_labels(out: Path) -> list[float | None]:
    """Labels of a tuning's programs in the order in which they were measured, None for failures."""
    from cdmpp.dataset import Dataset

    frame = Dataset.open(out / "measured").records
    frame = frame[frame["origin"] != "unscheduled"]
    return [float(r.latency_s) if r.status == "ok" else None for r in frame.itertuples()]


def measure_again(args: argparse.Namespace, rows: Sequence[dict[str, Any]], results: KeptRows) -> None:
    """Measure the best program of every run by one procedure; adds ``final_s`` to the rows."""
    from cdmpp.dataset import Dataset
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.tuner.prepare import alone_engine

    todo = [row for row in rows if row["best_s"] is not None and "final_s" not in row]
    jobs: dict[str, BuildJob] = {}
    best: list[tuple[dict[str, Any], str]] = []
    for row in todo:
        dataset = Dataset.open(args.out / row["folder"] / "measured")
        frame = dataset.records
        frame = frame[(frame["status"] == "ok") & (frame["origin"] != "unscheduled")]
        digest = str(frame.loc[frame["latency_s"].idxmin(), "program"])
        program = dataset.programs[digest]
        jobs[digest] = BuildJob(
            program, dataset.tasks[program.task_hash], dataset.spaces[str(program.space_hash)]
        )
        best.append((row, digest))
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats if jobs else 0):
        with alone_engine(DEVICE) as engine:
            for outcome in engine.run(iter(jobs.values())):
                if outcome.latency_s is not None:
                    found[outcome.job.program.hash].append(outcome.latency_s)
    for row, digest in best:
        if found[digest]:
            row["final_s"] = statistics.median(found[digest])
            row["final_spread"] = max(found[digest]) / min(found[digest]) - 1
    results.write()


def trials_until(labels_s: Iterable[float | None], latency_s: float) -> int | None:
    """Trials after which a label was within :data:`TOLERANCE` of a latency."""
    for number, label_s in enumerate(labels_s, start=1):
        if label_s is not None and label_s <= latency_s * (1 + TOLERANCE):
            return number
    return None


def seconds_until(curve: Sequence[dict[str, Any]], latency_s: float) -> float | None:
    """Wall seconds after which the best was within :data:`TOLERANCE` of a latency, the untuned task left out."""
    for point in curve:
        if point["measurements"] and point["latency_s"] <= latency_s * (1 + TOLERANCE):
            return float(point["wall_s"])
    return None


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float] | None:
    """Ratios of two runs of a task with one seed; None where one found nothing."""
    if ours.get("final_s") is None or theirs.get("final_s") is None:
        return None
    trials = trials_until(ours["labels_s"], theirs["best_s"])
    seconds = seconds_until(ours["curve"], theirs["best_s"])
    wall_s = theirs["costs"]["wall_s"]
    return {
        "final_latency_ratio": ours["final_s"] / theirs["final_s"],
        "trials_ratio": NEVER if trials is None else trials / theirs["trials"],
        "time_ratio": NEVER * ours["costs"]["wall_s"] / wall_s if seconds is None else seconds / wall_s,
        "reached": float(trials is not None),
    }


def summary(pairs: dict[tuple[str, int], dict[str, float]]) -> dict[str, Any]:
    """Geometric means over tasks and seeds, and their spread over the seeds."""
    from cdmpp.tuner.objective import geometric_mean

    seeds = sorted({seed for _, seed in pairs})
    found: dict[str, Any] = {}
    for name in ("trials_ratio", "time_ratio", "final_latency_ratio"):
        by_seed = [geometric_mean([p[name] for (_, s), p in pairs.items() if s == seed]) for seed in seeds]
        found[name] = geometric_mean([p[name] for p in pairs.values()])
        found[f"{name}_by_seed"] = by_seed
        found[f"{name}_spread"] = [min(by_seed), max(by_seed)]
    found["reached"] = sum(p["reached"] for p in pairs.values()) / len(pairs)
    found["pairs"] = len(pairs)
    return found


def tune_networks(args: argparse.Namespace, predictor: Predictor, results: KeptRows) -> list[dict[str, Any]]:
    """One small network end to end with every cost model and seed."""
    from cdmpp.tuner.objective import Objective
    from cdmpp.tuner.task_tuner import SearchConfig
    from cdmpp.tuner.tuning import TuneConfig, tune

    rows = []
    for seed in args.seeds if args.network else ():
        for model in args.models:
            key = {"network": args.network, "run": model, "seed": seed}
            row = results.find(**key)
            if row is None:
                out = args.out / "runs" / f"{args.network}-{model}-{seed}"
                config = TuneConfig(
                    Objective(args.network_trials),
                    cost_model=model,
                    predictor=predictor,
                    trim=None,
                    batch=args.batch,
                    search=SearchConfig(args.population, args.generations),
                    seed=seed,
                )
                resume = (out / "tuning.json").exists()
                report = tune(args.network, device=DEVICE, out=out, config=config, resume=resume)
                written = report.to_json()
                row = {
                    **key,
                    **{k: written[k] for k in ("network", "tuned_s", "untuned_s", "speedup", "costs")},
                }
                row["latency"], row["network"] = row["network"], args.network
                results.add(row)
            rows.append(row)
    return rows


def described(args: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, Any]:
    """What the figures were measured with."""
    from cdmpp.device import get_device

    return {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "tasks": [
            {"task": t.hash, "name": t.name, "flops": t.flops, "networks": dict(t.networks)} for t in tasks
        ],
        "device": get_device(DEVICE).name,
        "machine": platform.processor() or platform.machine(),
        "versions": {p: metadata.version(p) for p in ("cdmpp", "apache-tvm", "torch", "xgboost-cpu")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--network", default="mlp", help="tuned end to end; '' for none")
    parser.add_argument("--network-trials", type=int, default=256, metavar="N")
    args = parser.parse_args()
    if args.quick:
        shrink(args)
        args.network_trials = 12
    args.out.mkdir(parents=True, exist_ok=True)
    results = KeptRows(args.out / "results.json")
    predictor = held_out_predictor(args)
    tasks = held_out_tasks(args, predictor)
    rows: list[dict[str, Any]] = []
    # all models of a task and a seed follow each other, so that a drift of the machine hits them alike
    for seed in args.seeds:
        for task in tasks:
            for model in args.models:
                options = {"cost_model": model, "predictor": predictor, "trim": None, "seed": seed}
                rows.append(tune_alone(args, task, model, results, **options))
    measure_again(args, rows, results)

    by_key = {(row["task"], row["seed"], row["run"]): row for row in rows}
    baselines = [m for m in args.models if m != "cdmpp"]
    comparisons: dict[str, Any] = {}
    for model in baselines if "cdmpp" in args.models else ():
        pairs = {}
        for task in tasks:
            for seed in args.seeds:
                pair = compare(by_key[task.hash, seed, "cdmpp"], by_key[task.hash, seed, model])
                if pair is not None:
                    pairs[task.hash, seed] = pair
        if pairs:
            comparisons[model] = summary(pairs)
    print(f"{'cdmpp against':16}{'trials':>10}{'time':>10}{'latency':>10}{'reached':>10}")
    for model, found in comparisons.items():
        numbers = [found[f"{name}_ratio"] for name in ("trials", "time", "final_latency")]
        print(f"{model:16}" + "".join(f"{n:10.3f}" for n in numbers) + f"{found['reached']:10.2f}")
        for name in ("trials", "time", "final_latency"):
            low, high = found[f"{name}_ratio_spread"]
            print(f"    {name}: seeds from {low:.3f} to {high:.3f}")
    networks = tune_networks(args, predictor, results)
    for row in networks:
        print(
            f"{row['network']} {row['run']} seed {row['seed']}: {row['speedup']:.2f} times as fast as untuned"
        )
    if args.json:
        against = comparisons.get("xgb", {})
        content = {
            **{name: against.get(name) for name in ("trials_ratio", "time_ratio", "final_latency_ratio")},
            "comparisons": comparisons,
            "networks": networks,
            "rows": rows,
            **described(args, tasks),
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
