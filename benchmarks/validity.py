"""Measurements until a search comes within 1 % of the best, with and without validity-driven initialisation.

    python benchmarks/validity.py --data ../shared/data/benchmark_hub.parquet --out runs/bench-validity --json validity.json
    python benchmarks/validity.py --data ... --quick --out /tmp/bench-validity        # does it run? figures mean nothing

The space is Kernel Tuner's 2-D convolution (4096 x 4096, filter 15 x 15), every configuration of which was measured on an RTX
2080 Ti and on an RTX 3060 laptop: 6,768 configurations, of which some 22 % fail. A failure costs as much as a measurement.

The search is the tuner's own, with rounds of 16 measurements, the first of random configurations. Its cost model
(:class:`cdmpp.tuner.cost_model.OnlineModel` with the analytical estimate, no predictor) learns from every round and guides an
evolutionary search over the parameters (population 256, 3 generations); 5 % of the candidates are random. In ``plain``,
failures are not measured again, but nothing is learned from them. With ``initial``, the first 16 are likely valid and
represent the space (k-means on pooled AST features). With ``skip``, candidates that are likely invalid are skipped throughout,
and P(valid) also learns from the search's own failures. ``full`` is both. ``random`` is a random search, with the same four
arms.

P(valid) is first learned from the *other* GPU's failures alone. Ratios are of geometric means over seeds and both GPUs, over
those of ``plain``; their interval is over resampled seeds. A search that has not come within 1 % after ``--cap`` measurements
counts as if it had then (``never``). Every run depends only on its seed. ``--out`` keeps ASTs and finished runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from cdmpp.dataset import load_datasets
from cdmpp.dataset.importers import import_benchmark_hub
from cdmpp.device import get_device
from cdmpp.predictor.data import collect_asts
from cdmpp.program.ast import CompactAST
from cdmpp.tuner import validity
from cdmpp.tuner.cost_model import AnalyticalPrior, OnlineModel
from cdmpp.tuner.validity import ValidityModel

KERNEL = "convolution"
GPUS = {"RTX_2080_Ti": "rtx-2080-ti", "RTX_3060_laptop": "rtx-3060-laptop"}
ARMS, SEARCHES = ("plain", "initial", "skip", "full"), ("tuner", "random")
WITHIN = 1.01
BATCH, POPULATION, GENERATIONS, MUTATED, RANDOM_SHARE = 16, 256, 3, 0.85, 0.05
#: Fraction of the first population that consists of the best configurations measured.
MEASURED_SHARE = 0.2
#: Number of random configurations that the initial ones are chosen from.
SAMPLED = 512


@dataclass
class Space:
    """All n configurations on one GPU, each with a program; some of the programs are identical."""

    device: str
    #: Index of each configuration's value of each parameter, (n, parameters).
    choices: np.ndarray
    #: Infinite for failures, (n,).
    latency_s: np.ndarray
    asts: list[CompactAST]

    def __post_init__(self) -> None:
        device = get_device(self.device)
        self.sizes = self.choices.max(0) + 1
        self.rows = np.full(self.sizes, -1)
        self.rows[tuple(self.choices.T)] = np.arange(len(self.choices))
        self.encoded = AnalyticalPrior(device).encode(self.asts)
        self.features = validity.validity_features(self.asts, device)

    def mutants(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Each row with one parameter's value drawn anew, for a third also another's; unchanged if that is no configuration."""
        choices = self.choices[rows].copy()
        for share in (1.0, 1 / 3):
            chosen = np.flatnonzero(rng.random(len(rows)) < share)
            parameter = rng.integers(0, len(self.sizes), len(chosen))
            choices[chosen, parameter] = rng.integers(0, self.sizes[parameter])
        found = self.rows[tuple(choices.T)]
        return np.where(found < 0, rows, found)


def load_spaces(path: Path, out: Path) -> list[Space]:
    """The two spaces; ASTs are made once and kept in `out`."""
    frame = pd.read_parquet(path)
    frame = frame[(frame["kernel"] == KERNEL) & frame["gpu"].isin(list(GPUS))].reset_index(drop=True)
    if not (out / "hub" / "meta.json").exists():
        table = out / "convolution.parquet"
        frame.to_parquet(table)
        import_benchmark_hub(table, out / "hub")
    view = load_datasets(out / "hub")
    records = view.records
    asts = collect_asts(view, records["program"].unique())
    program = {json.loads(meta)["row"]: p for meta, p in zip(records["meta"], records["program"], strict=True)}
    columns = [c for c in frame if c.startswith("p_") and len(frame[c].dropna().unique()) > 1]
    spaces = []
    for gpu, device in GPUS.items():
        rows = frame[frame["gpu"] == gpu].sort_values(columns)
        values = rows[columns].to_numpy(dtype=np.float64)
        choices = np.stack([np.unique(v, return_inverse=True)[1] for v in values.T], axis=1)
        ok = (rows["status"] == "ok").to_numpy()
        latency_s = np.where(ok, rows["latency_ms"].to_numpy(dtype=np.float64) / 1e3, np.inf)
        spaces.append(Space(device, choices, latency_s, [asts[program[i]] for i in rows.index]))
    if not np.array_equal(spaces[0].choices, spaces[1].choices):
        sys.exit("the two GPUs were not measured on the same configurations")
    return spaces


def failures_of(space: Space) -> ValidityModel:
    """P(valid) learned from a GPU's failures, without its latencies."""
    names = [f"c{i}" for i in range(len(space.asts))]
    table = pd.DataFrame({"program": names, "task": KERNEL, "device": space.device})
    table = table.assign(valid=np.isfinite(space.latency_s))
    return ValidityModel().fit(validity.ValidityData(table, dict(zip(names, space.asts, strict=True))))


def initial(space: Space, arm: str, p_valid: np.ndarray, seed: int, rng: np.random.Generator) -> np.ndarray:
    """The configurations of an arm's first round."""
    drawn = rng.permutation(len(space.asts))[:SAMPLED]
    if arm in ("plain", "skip"):
        return drawn[:BATCH]
    return drawn[validity.initial_population(validity.pooled(space.features[drawn]), p_valid[drawn], BATCH, seed=seed)]


def search(space: Space, way: str, arm: str, seed: int, cap: int, model: ValidityModel) -> common.Row:
    """One run: measurements until within 1 %, how many of them failed, and whether it got there."""
    rng = np.random.default_rng(seed)
    n, goal = len(space.asts), WITHIN * space.latency_s.min()
    online = validity.OnlineValidity(model, get_device(space.device), seed)
    skips = arm in ("skip", "full")
    p_valid = online.predict(space.features)
    batch = initial(space, arm, p_valid, seed, rng)
    cost_model = OnlineModel(AnalyticalPrior(get_device(space.device)))
    measured, failed, order = np.zeros(n, dtype=bool), 0, []
    while len(order) < cap and len(batch):
        for row in batch[: cap - len(order)]:
            order.append(int(row))
            measured[row] = True
            failed += int(np.isinf(space.latency_s[row]))
            if space.latency_s[row] <= goal:
                return {"measurements": len(order), "failed": failed, "reached": True}
        if skips and np.isinf(space.latency_s[batch]).any():
            works = np.isfinite(space.latency_s[batch])
            online.learn([str(r) for r in batch], space.features[batch], works)
            p_valid = online.predict(space.features)
        likely = p_valid >= validity.SKIP_BELOW if skips else np.ones(n, dtype=bool)
        likely = likely if (likely & ~measured).any() else np.ones(n, dtype=bool)
        if way == "random":
            batch = rng.permutation(np.flatnonzero(~measured & likely))[:BATCH]
            continue
        ok = batch[np.isfinite(space.latency_s[batch])]
        cost_model.learn(KERNEL, [str(row) for row in ok], space.encoded.take(ok), space.latency_s[ok])
        cost_model.fit()
        batch = propose(space, cost_model, np.array(order), ~measured & likely, likely, rng)
    return {"measurements": cap, "failed": failed, "reached": False}


def propose(
    space: Space, cost_model: OnlineModel, order: np.ndarray, free: np.ndarray, likely: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The next round: the best of all generations by the cost model, and a few at random."""
    n = len(free)
    working = order[np.isfinite(space.latency_s[order])]
    best = working[np.argsort(space.latency_s[working], kind="stable")][: int(MEASURED_SHARE * POPULATION)]
    population = np.unique(np.concatenate([best, rng.integers(0, n, POPULATION - len(best))]))
    known: dict[int, float] = {}

    def scores(rows: np.ndarray) -> np.ndarray:
        new = np.array([row for row in rows if int(row) not in known], dtype=np.int64)
        if len(new):
            seconds = cost_model.predict(KERNEL, space.encoded.take(new))
            known.update(zip(new.tolist(), seconds.min() / seconds * likely[new], strict=True))
        return np.array([known[int(row)] for row in rows])

    for _ in range(GENERATIONS):
        weights = scores(population) + 1e-12
        parents = rng.choice(population, POPULATION, p=weights / weights.sum())
        children = np.where(rng.random(POPULATION) < MUTATED, space.mutants(parents, rng), parents)
        population = np.unique(children)
    scores(population)
    seen = np.array(sorted(known), dtype=np.int64)
    seen = seen[free[seen]]
    seen = seen[np.argsort(-scores(seen), kind="stable")] if len(seen) else seen
    n_random = max(1, round(RANDOM_SHARE * BATCH))
    top = seen[: BATCH - n_random]
    rest = np.setdiff1d(np.flatnonzero(free), top)
    return np.concatenate([top, rng.permutation(rest)[: BATCH - len(top)]])


def figures(rows: Sequence[common.Row]) -> list[common.Figure]:
    """The ratio of each arm over ``plain``, for both GPUs together; then the measurements of every arm on each GPU."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    runs = defaultdict[tuple[str, str, str], list[common.Row]](list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        runs[row["search"], row["arm"], row["device"]].append(row)
    logs = {key: np.log([row["measurements"] for row in own]) for key, own in runs.items()}
    found = []
    for way, arm in dict.fromkeys((way, arm) for way, arm, _ in runs if arm != "plain"):
        by_gpu = np.array([logs[way, arm, device] - logs[way, "plain", device] for device in devices])
        each, both = np.exp(by_gpu.mean(1)), by_gpu.mean(0)
        ends = np.exp(common.bootstrap(both, np.arange(len(both)), resamples=2000)).tolist()
        values, spread = {"ratio": float(np.exp(both.mean()))}, {"ratio": common.spread_of(each.tolist())}
        name = f"{way}: {arm} over plain"
        found.append(common.figure(name, values, len(both), spread=spread, interval={"ratio": ends}))
    for (way, arm, device), own in runs.items():
        counts = {"measurements (median)": [row["measurements"] for row in own]}
        of_arm = common.median_figure(f"{way}: {arm}, {device}", counts)
        of_arm["values"] |= {
            "geometric mean": float(np.exp(logs[way, arm, device].mean())),
            "failed (mean)": float(np.mean([row["failed"] for row in own])),
            "never": sum(not row["reached"] for row in own),
        }
        found.append(of_arm)
    return found


def main() -> None:
    args = common.arguments(__doc__, __file__).parse_args()
    if args.quick:
        args.seeds = 2
    if not args.data.exists():
        sys.exit(f"{args.data} is not there: it is the AutoTuning Association's benchmark hub as one table")
    args.out.mkdir(parents=True, exist_ok=True)
    made = common.provenance(__file__, [args.data], seeds=range(args.seeds))
    spaces = load_spaces(args.data, args.out)
    others = [failures_of(space) for space in spaces][::-1]
    runs = common.Results(args.out / "runs.json", made)
    rows = []
    for space, model in zip(spaces, others, strict=True):
        for way, arm in itertools.product(SEARCHES, ARMS):
            for seed in range(args.seeds):
                key = {"device": space.device, "search": way, "arm": arm, "seed": seed, "cap": args.cap}
                rows.append(runs.once(partial(search, space, way, arm, seed, args.cap, model), **key))
            print(f"{space.device} {way} {arm}: done", file=sys.stderr, flush=True)
    found = figures(rows)
    for space, model, other in zip(spaces, others, spaces[::-1], strict=True):
        valid = np.isfinite(space.latency_s)
        auc = float(roc_auc_score(valid, model.log_odds(space.features)))
        values = {"AUC": auc, "invalid": float(1 - valid.mean())}
        name = f"P(valid) on {space.device}, learned on {other.device}"
        found.append(common.figure(name, values, len(valid)))
    common.report(args.json, made, found)


if __name__ == "__main__":
    common.start(main)
