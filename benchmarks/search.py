"""Cost and proposals of a search: ours over schedule decisions, against TVM's evolutionary search with the same predictor.

    python benchmarks/search.py --json benchmarks/results/search.json
    python benchmarks/search.py --quick                    # does it run? figures mean nothing

Nothing is built or measured: each proposed program counts as measured at its predicted latency. CPU seconds are the process's
own, without generating design spaces. Ratios are ours over TVM's: ``cpu``; ``best``, the lowest predicted latency of all
rounds; ``mean of 8``, the geometric mean of the 8 lowest. ``first`` is after the first round, which for ours is a half one (8).
Tasks are of networks that the predictor never saw, as in `benchmarks/tuning.py`. Means are geometric, the interval over tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Figure, arguments, bootstrap, figure, provenance, report, start
from tuning import DEVICE, NETWORKS, held_out_predictor, held_out_tasks

from cdmpp.predictor import Predictor
from cdmpp.program.types import Task
from cdmpp.tuner.candidates import Candidate, DecisionSearch, TaskTuner
from cdmpp.tuner.cost_model import CostModel
from cdmpp.tuner.measure import device_of_this_machine
from cdmpp.tuner.results import tuning_record

RATIOS = ("cpu", "best", "mean of 8", "first: cpu", "first: best", "first: mean of 8")


def searched(args: Any, task: Task, predictor: Predictor, seed: int, ours: bool) -> dict[str, Any]:
    """Run the rounds of a search: its CPU seconds and lowest predictions, after the first round and after all of them."""
    from tvm.s_tir.meta_schedule.database import MemoryDatabase

    tuner = TaskTuner(task, device_of_this_machine(DEVICE), seed + 1, args.population, args.generations)
    model, database = CostModel(predictor, DEVICE), MemoryDatabase()

    def seconds(found: Sequence[Candidate]) -> np.ndarray:
        return model.predict_s(tuner.context, [candidate.measure for candidate in found])

    began, rounds, found = time.process_time(), [], list[Candidate]()
    if ours:
        search = DecisionSearch(tuner, lambda m: np.log(model.predict_s(tuner.context, m)), args.batch, seed)
    else:
        tuner.start(database, model, args.batch)
    for _ in range(args.rounds):
        new = search.propose({c.hash for c in found}) if ours else tuner.propose()
        found += new
        spent_s, lowest = time.process_time() - began, np.sort(seconds(found))[: args.batch // 2]
        rounds.append({"cpu": spent_s, "best": lowest[0], "mean of 8": np.exp(np.log(lowest).mean())})
        if not ours and new:
            for candidate, latency_s in zip(new, seconds(new), strict=True):
                database.commit_tuning_record(tuning_record(database, tuner, candidate, float(latency_s)))
    counts = search.describe() if ours else {"replayed": model.cache.computed}
    own = {**rounds[-1], **{f"first: {name}": value for name, value in rounds[0].items()}}
    key = {"task": task.hash, "name": task.name, "seed": seed, "ours": ours}
    return {**key, "proposed": len(found), **own, "counts": counts}


def ratios(rows: Sequence[dict[str, Any]]) -> Figure:
    """The figure of ratios, ours over TVM's."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    logs = {name: [float(np.log(mine[name] / theirs[name])) for mine, theirs in pairs] for name in RATIOS}
    tasks, values = [mine["task"] for mine, _ in pairs], {name: np.exp(np.mean(log)) for name, log in logs.items()}
    interval = {name: np.exp(bootstrap(log, tasks)).tolist() for name, log in logs.items()}
    values["cpu s a round"] = float(np.mean([mine["cpu"] for mine, _ in pairs])) / rows[0]["rounds"]
    return figure("our search over TVM's", values, len(pairs), [r["seed"] for r in rows], interval=interval)


def main() -> None:
    args = arguments(__doc__, __file__, networks={"default": list(NETWORKS)}).parse_args()
    if args.quick:
        args.networks, args.tasks, args.rounds, args.batch, args.population, args.seeds = ["gcn"], 1, 2, 4, 16, [0]
    args.trials = args.rounds * args.batch
    made = provenance(__file__, (), args.predictor, args.seeds)
    predictor = held_out_predictor(args.predictor, args.networks)
    rows = [
        {**searched(args, task, predictor, seed, ours), "rounds": args.rounds}
        for task in held_out_tasks(args, predictor)
        for seed in args.seeds
        for ours in (True, False)
    ]
    report(args.json, made, [ratios(rows)], runs=rows)


if __name__ == "__main__":
    start(main)
