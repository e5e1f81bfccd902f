"""Tuning a whole network with one worker, and sharded over the shares of the machine.

    python benchmarks/sharing.py --out runs/bench-sharing --json sharing.json            # under 20 minutes on two idle cores
    python benchmarks/sharing.py --table --out runs/bench-sharing --json sharing.json    # and tuned-at-share x run-at-share
    python benchmarks/sharing.py --records data/xeon-cascadelake-1core data/xeon-cascadelake-2cores
    python benchmarks/sharing.py --quick --out /tmp/bench-sharing                        # does it run? figures mean nothing

The tasks of a network are tuned from nothing, with the same search, seed and number of trials, in three ways:

* ``one``: one worker on one share: it searches, builds and measures there and nowhere else (``--shards 1``).
* ``sharded``: as many such workers as shares fit on this machine (``--shards auto``).
* ``pipeline``: what ``cdmpp tune`` does without shards: one search and one measuring process, builders on all cores.

``speedup`` is the wall time of ``one`` over that of ``sharded``, the median over the repetitions (a seed each), from the start
of the workers to the finished database; ``efficiency`` is speedup / shares. ``speedup_over_pipeline`` is the same against
``pipeline``, which has all cores too: there the gain is what a single search leaves idle. Ways take turns in coming first,
and what is done is kept in ``--out`` after every tuning: a run that is started again goes on with the next one (a tuning that
was interrupted is begun anew, its time would mean nothing).

The best program of every task and tuning is measured again at the end, alone, all by one procedure; ``final_latency_ratio`` is
sharded over one, the geometric mean over the repetitions.

``--table`` tunes the network at every share and runs what was found at every share; ``--records`` only asks datasets of the
same programs at several shares how slow the best of one share is at another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from kept_rows import KeptRows
from tuning import described

if TYPE_CHECKING:
    from cdmpp.program.types import Task
    from cdmpp.tuner.tuning import TuneConfig

#: Ways to tune, with the number of shards of each.
WAYS: dict[str, int | str | None] = {"one": 1, "sharded": "auto", "pipeline": None}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--device", default="this-cpu@1", help="with the share of a worker")
    parser.add_argument("--cost-model", default="cdmpp", choices=("cdmpp", "xgb", "random"))
    parser.add_argument("--predictor", default="default", metavar="DIR", help="'none' for an estimate")
    parser.add_argument("--trials", type=int, default=224, metavar="N", help="of the network")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="trials of a round")
    parser.add_argument("--population", type=int, default=256, metavar="N", help="of the search")
    parser.add_argument("--generations", type=int, default=3, metavar="N", help="of the search")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="with a seed each")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of the final measurements")
    parser.add_argument("--table", action="store_true", help="tune at every share, run at every share")
    parser.add_argument(
        "--records",
        nargs="+",
        metavar="DIR",
        help="only: what is best at a share of the records, at the other",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="of tunings and results")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="does it run: few trials, one repetition")
    args = parser.parse_args()
    if args.out is None and not args.records:
        parser.error("--out is needed")
    if args.quick:
        args.predictor, args.trials, args.batch, args.population = "none", 8, 4, 16
        args.generations, args.repetitions, args.repeats = 1, 1, 1
    return args


def tune_config(args: argparse.Namespace, seed: int, shards: int | str | None) -> TuneConfig:
    from cdmpp.tuner.objective import Objective
    from cdmpp.tuner.task_tuner import SearchConfig
    from cdmpp.tuner.tuning import TuneConfig

    return TuneConfig(
        Objective(args.trials),
        cost_model=args.cost_model,
        predictor=None if args.predictor == "none" else args.predictor,
        trim=None,
        batch=args.batch,
        search=SearchConfig(args.population, args.generations),
        seed=seed,
        shards=shards,
    )


def busy_s() -> float:
    """Seconds that this machine's cores have worked since it started, others' work included."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0))


def tune_once(
    args: argparse.Namespace, tasks: Sequence[tuple[Task, float]], way: str, seed: int, results: KeptRows
) -> dict[str, Any]:
    """Tune the network in one way; the row says how long it took and what it found."""
    from cdmpp.tuner.report import write_report
    from cdmpp.tuner.tuning import tune_tasks

    row = results.find(way=way, seed=seed)
    if row is not None:
        return row
    out = args.out / "runs" / f"{way}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    config = tune_config(args, seed, WAYS[way])
    started, busy = time.perf_counter(), busy_s()
    report = tune_tasks(args.network, tasks, device=args.device, out=out, config=config)
    wall_s = time.perf_counter() - started
    write_report(report, out)
    row = {
        "way": way,
        "seed": seed,
        "wall_s": wall_s,
        "cores_busy": (busy_s() - busy) / wall_s,
        "trials": report.costs.trials,
        "costs": report.to_json()["costs"],
        "tuned_s": report.tuned_s,
        "untuned_s": report.untuned_s,
        "tasks": report.to_json()["tasks"],
        "folder": str(out.relative_to(args.out)),
    }
    results.add(row)
    print(f"{way} seed {seed}: {wall_s:.0f} s, {row['cores_busy']:.2f} cores busy", flush=True)
    return row


def measure_again(args: argparse.Namespace, rows: Sequence[dict[str, Any]], results: KeptRows) -> None:
    """Measure the best programs of every tuning by one procedure; adds ``final_s`` to the rows."""
    from cdmpp.tuner.share_table import best_programs, measure_alone

    todo = [row for row in rows if "final_s" not in row]
    best = [best_programs(args.out / row["folder"]) for row in todo]
    jobs = {job.program.hash: job for found in best for job in found.values()}
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats if jobs else 0):
        for digest, value in measure_alone(args.device, list(jobs.values())).items():
            seconds[digest].append(value)
    for row, found in zip(todo, best, strict=True):
        parts = [(task["weight"], found.get(task["task"])) for task in row["tasks"]]
        if all(job is not None and seconds[job.program.hash] for _, job in parts):
            row["final_s"] = sum(
                weight * statistics.median(seconds[job.program.hash])
                for weight, job in parts
                if job is not None
            )
    results.write()


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Median and range."""
    return {
        "median": statistics.median(values),
        "spread": [min(values), max(values)],
        "by_seed": list(values),
    }


def tune_shares(args: argparse.Namespace, tasks: Sequence[tuple[Task, float]]) -> dict[str, Any]:
    """Tune at one core, two, and so on in powers of two, and run each at each."""
    from cdmpp.profiler.machine import usable_cores
    from cdmpp.tuner.report import write_report
    from cdmpp.tuner.share_table import share_table
    from cdmpp.tuner.tuning import tune_tasks

    base = args.device.partition("@")[0]
    cores = len(usable_cores())
    shares = sorted({min(2**i, cores) for i in range(cores.bit_length() + 1)})
    folders = []
    for share in shares:
        out = args.out / "runs" / f"share-{share}"
        resume = (out / "tuning.json").exists()
        config = tune_config(args, 0, None)
        report = tune_tasks(
            args.network, tasks, device=f"{base}@{share}", out=out, config=config, resume=resume
        )
        write_report(report, out)
        folders.append(out)
    table = share_table(folders, [f"{base}@{share}" for share in shares], repeats=args.repeats)
    for tuned in table.tuned_at:
        cells = [table.cell(tuned, run) for run in table.run_at]
        texts = [
            "-" if c.latency_s is None else f"{1e6 * c.latency_s:.1f} us ({c.ratio:.2f}x)" for c in cells
        ]
        print(f"tuned at {tuned}: " + ", ".join(texts))
    return table.to_json()


def compare_records(args: argparse.Namespace) -> None:
    """Print and write what records of several shares, of CPUs or GPUs, say."""
    from dataclasses import asdict

    from cdmpp.dataset import load_datasets
    from cdmpp.tuner.share_table import best_elsewhere

    cells = best_elsewhere(load_datasets(args.records).records)
    for cell in cells:
        print(
            f"best at {cell.best_at}, run at {cell.run_at}: {cell.ratio:.3f} times as slow as the best there "
            f"(worst of {cell.tasks} tasks {cell.worst:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")


def main() -> int:
    args = arguments()
    if args.records:
        compare_records(args)
        return 0
    from cdmpp.program.network import load_network
    from cdmpp.tuner.deployment import import_network, weighted_tasks
    from cdmpp.tuner.objective import geometric_mean
    from cdmpp.tuner.prepare import device_of_this_machine
    from cdmpp.tuner.shards import shard_cores

    args.out.mkdir(parents=True, exist_ok=True)
    results = KeptRows(args.out / "results.json")
    device = device_of_this_machine(args.device)
    shares = len(shard_cores(device, "auto"))
    if shares < 2 and not args.quick:
        sys.exit(f"one share of {device.name} is all that fits on this machine: nothing to compare")
    tasks = weighted_tasks(import_network(load_network(args.network)), args.network)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in range(args.repetitions):
        # the order changes, so that a drift of the machine hits all ways alike
        ways = list(WAYS)[seed % len(WAYS) :] + list(WAYS)[: seed % len(WAYS)]
        for way in ways:
            rows[way, seed] = tune_once(args, tasks, way, seed, results)
    measure_again(args, list(rows.values()), results)

    seeds = range(args.repetitions)
    wall_s = {key: row["wall_s"] for key, row in rows.items()}
    speedup = spread_of([wall_s["one", s] / wall_s["sharded", s] for s in seeds])
    pipeline = spread_of([wall_s["pipeline", s] / wall_s["sharded", s] for s in seeds])
    usable = [s for s in seeds if all("final_s" in rows[way, s] for way in WAYS)]
    latency = [rows["sharded", s]["final_s"] / rows["one", s]["final_s"] for s in usable]
    content: dict[str, Any] = {
        "speedup": speedup["median"],
        "efficiency": speedup["median"] / shares,
        "efficiency_spread": [value / shares for value in speedup["spread"]],
        "shares": shares,
        "speedup_by_seed": speedup["by_seed"],
        "speedup_over_pipeline": pipeline["median"],
        "speedup_over_pipeline_by_seed": pipeline["by_seed"],
        "final_latency_ratio": geometric_mean(latency) if latency else None,
        "final_latency_ratio_by_seed": latency,
        "final_s": {way: [rows[way, s].get("final_s") for s in seeds] for way in WAYS},
        "wall_s": {way: [wall_s[way, s] for s in seeds] for way in WAYS},
        "cores_busy": {way: [rows[way, s]["cores_busy"] for s in seeds] for way in WAYS},
    }
    print(
        f"{'':10}{'wall s':>10}{'cores busy':>12}{'final us':>12}   (medians over {args.repetitions} seeds)"
    )
    for way in WAYS:
        final = [1e6 * s for s in content["final_s"][way] if s is not None]
        medians = [statistics.median(content[name][way]) for name in ("wall_s", "cores_busy")]
        last = f"{statistics.median(final):12.1f}" if final else f"{'-':>12}"
        print(f"{way:10}{medians[0]:10.1f}{medians[1]:12.2f}{last}")
    low, high = content["efficiency_spread"]
    print(
        f"speedup {content['speedup']:.2f} on {shares} shares, efficiency {content['efficiency']:.2f} "
        f"({low:.2f} to {high:.2f}); {content['speedup_over_pipeline']:.2f} against the pipeline"
    )
    if args.table:
        content["table"] = tune_shares(args, tasks)
    if args.json:
        content |= {"rows": list(rows.values()), **described(args, [task for task, _ in tasks])}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
