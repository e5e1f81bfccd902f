"""Measurements until a search comes within 1 % of the best, with and without validity-driven initialisation.

    python benchmarks/validity.py --data ../shared/data/benchmark_hub.parquet --out runs/bench-validity --json validity.json
    python benchmarks/validity.py --data ... --quick --out /tmp/bench-validity        # does it run? figures mean nothing

The space is Kernel Tuner's 2-D convolution (4096 x 4096, filter 15 x 15), every configuration of which was measured on an RTX
2080 Ti and on an RTX 3060 laptop: 6,768 configurations, some 22 % of which do not compile or run. A search looks its
measurements up. A failed one costs as much as another.

Searches, all with rounds of 16 measurements, the first of which are 16 random configurations:

* ``tuner``: the tuner's own. Its cost model (:class:`cdmpp.tuner.online.OnlineModel` beside the analytical estimate, no
  predictor) learns from every round; an evolutionary search over the parameters (population 256, 3 generations) proposes by
  it; 5 % of the candidates are random. Failures are not measured again, but nothing is learned from them.
* ``xgb``: the same search by gradient-boosted trees on the parameters, as TVM's tuners do it: a failure is a throughput of 0.
* ``random``: no model; configurations in random order.

Arms, for each of them:

* ``plain``: as above.
* ``valid``: the first 16 are likely valid ones; nothing else changes.
* ``diverse``: the first 16 represent the space (k-means on pooled AST features), valid or not.
* ``both``: valid and diverse.
* ``full``: the same, and candidates that are likely invalid are skipped throughout; failures of the search itself are learned.
* ``latencies``: ``full``, with the first 16 chosen by the other GPU's latencies besides, which the others do not know.

P(valid) is learned from the *other* GPU's failures alone. ``measurements_ratio`` is that of ``full`` over ``plain`` for the
search ``tuner``: geometric means over the seeds, and of both GPUs. A search that is not there after ``--cap`` measurements
counts as if it then were; how many there were is in the JSON. Every run depends on its seed alone. ``--out`` keeps ASTs and
finished runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cdmpp.program.ast import CompactAST
    from cdmpp.tuner.validity import ValidityModel

KERNEL = "convolution"
GPUS = {"RTX_2080_Ti": "rtx-2080-ti", "RTX_3060_laptop": "rtx-3060-laptop"}
SEARCHES = ("tuner", "xgb", "random")
ARMS = ("plain", "valid", "diverse", "both", "full", "latencies")
WITHIN = 1.01
BATCH, POPULATION, GENERATIONS, MUTATED, RANDOM_SHARE = 16, 256, 3, 0.85, 0.05
#: Part of a generation that descends from the best configurations measured.
MEASURED_SHARE = 0.2
#: Random configurations that the initial ones are chosen from.
SAMPLED = 512
#: Candidates less likely valid than this are skipped.
SKIP_BELOW = 0.2

IntArray = np.ndarray
FloatArray = np.ndarray


@dataclass
class Space:
    """All configurations on one GPU.

    Attributes
    ----------
    device
        Name.
    choices
        Number of the value that each configuration has of each parameter, (n, parameters).
    values
        The values themselves, (n, parameters).
    latency_s
        Infinite where it failed, (n,).
    asts
        A program each; some configurations are the same program.
    """

    device: str
    choices: IntArray
    values: FloatArray
    latency_s: FloatArray
    asts: list[CompactAST]

    def __post_init__(self) -> None:
        from cdmpp.device import get_device
        from cdmpp.tuner.prior import AnalyticalPrior
        from cdmpp.tuner.validity_features import limits_of, validity_features

        device = get_device(self.device)
        self.sizes = self.choices.max(0) + 1
        self.rows = np.full(self.sizes, -1)
        self.rows[tuple(self.choices.T)] = np.arange(len(self.choices))
        self.encoded = AnalyticalPrior(device).encode(self.asts)
        self.features = validity_features(self.asts, limits_of(device), device)

    def mutants(self, rows: IntArray, rng: np.random.Generator) -> IntArray:
        """Each with another value of one parameter, a third of them of two; itself where that is no configuration."""
        choices = self.choices[rows].copy()
        for share in (1.0, 1 / 3):
            chosen = np.flatnonzero(rng.random(len(rows)) < share)
            parameter = rng.integers(0, len(self.sizes), len(chosen))
            choices[chosen, parameter] = rng.integers(0, self.sizes[parameter])
        found = self.rows[tuple(choices.T)]
        return np.where(found < 0, rows, found)


def load_spaces(path: Path, out: Path) -> list[Space]:
    """The two spaces; ASTs are made once and kept in `out`."""
    import pandas as pd

    from cdmpp.dataset import load_datasets
    from cdmpp.dataset.importers import import_benchmark_hub
    from cdmpp.predictor.data import collect_asts

    frame = pd.read_parquet(path)
    frame = frame[(frame["kernel"] == KERNEL) & frame["gpu"].isin(list(GPUS))].reset_index(drop=True)
    if not (out / "hub" / "meta.json").exists():
        table = out / "convolution.parquet"
        frame.to_parquet(table)
        import_benchmark_hub(table, out / "hub")
    view = load_datasets(out / "hub")
    records = view.records
    asts = collect_asts(view, records["program"].unique())
    program = {
        json.loads(meta)["row"]: p for meta, p in zip(records["meta"], records["program"], strict=True)
    }
    columns = [c for c in frame if c.startswith("p_") and len(frame[c].dropna().unique()) > 1]
    spaces = []
    for gpu, device in GPUS.items():
        rows = frame[frame["gpu"] == gpu].sort_values(columns)
        values = rows[columns].to_numpy(dtype=np.float64)
        choices = np.stack([np.unique(v, return_inverse=True)[1] for v in values.T], axis=1)
        ok = (rows["status"] == "ok").to_numpy()
        latency_s = np.where(ok, rows["latency_ms"].to_numpy(dtype=np.float64) / 1e3, np.inf)
        spaces.append(Space(device, choices, values, latency_s, [asts[program[i]] for i in rows.index]))
    if not np.array_equal(spaces[0].values, spaces[1].values):
        sys.exit("the two GPUs were not measured on the same configurations")
    return spaces


def failures_of(space: Space, folder: Path) -> ValidityModel:
    """P(valid) from a GPU's failures; fitted once and kept in `folder`. No latency goes into it."""
    import pandas as pd

    from cdmpp.tuner.validity import ValidityModel
    from cdmpp.tuner.validity_data import ValidityData

    if folder.is_dir():
        return ValidityModel.load(folder)
    names = [f"c{i}" for i in range(len(space.asts))]
    table = pd.DataFrame({"program": names, "task": KERNEL, "device": space.device, "origin": "generator"})
    table = table.assign(valid=np.isfinite(space.latency_s), kind="")
    model = ValidityModel().fit(ValidityData(table, dict(zip(names, space.asts, strict=True))))
    model.save(folder)
    return model


# -- the searches ----------------------------------------------------------------------------------------------


class OwnModel:
    """The tuner's cost model: scores are speeds relative to the fastest."""

    def __init__(self, space: Space, seed: int) -> None:
        from cdmpp.device import get_device
        from cdmpp.tuner.online import OnlineModel
        from cdmpp.tuner.prior import AnalyticalPrior

        self._space, self._model = space, OnlineModel(AnalyticalPrior(get_device(space.device)))

    def learn(self, rows: IntArray, latency_s: FloatArray) -> None:
        ok = np.isfinite(latency_s)
        names = [str(row) for row in rows[ok]]
        self._model.learn(KERNEL, names, self._space.encoded.take(rows[ok]), latency_s[ok])
        self._model.fit()

    def scores(self, rows: IntArray) -> FloatArray:
        seconds = self._model.predict(KERNEL, self._space.encoded.take(rows))
        return seconds.min() / seconds


class TreesModel:
    """TVM's way: trees predict the throughput relative to the best, which is 0 for a failure."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed, self._trees = space, seed, None
        self._rows, self._latency_s = np.zeros(0, dtype=np.int64), np.zeros(0)

    def learn(self, rows: IntArray, latency_s: FloatArray) -> None:
        import xgboost as xgb

        self._rows = np.concatenate([self._rows, rows])
        self._latency_s = np.concatenate([self._latency_s, latency_s])
        if np.isfinite(self._latency_s).any():
            data = xgb.DMatrix(self._space.values[self._rows], self._latency_s.min() / self._latency_s)
            params = {"max_depth": 6, "eta": 0.2, "nthread": 1, "seed": self._seed}
            self._trees = xgb.train(params, data, num_boost_round=40)

    def scores(self, rows: IntArray) -> FloatArray:
        import xgboost as xgb

        if self._trees is None:
            return np.ones(len(rows))
        return np.maximum(0.0, self._trees.predict(xgb.DMatrix(self._space.values[rows])).astype(np.float64))


MODELS: dict[str, Callable[[Space, int], Any]] = {"tuner": OwnModel, "xgb": TreesModel}


@dataclass(frozen=True)
class Outcome:
    """Measurements until within 1 %, how many of them failed, and whether it got there."""

    measurements: int
    failed: int
    reached: bool


def initial(
    space: Space, arm: str, p_valid: FloatArray, log_s: FloatArray | None, seed: int, rng: np.random.Generator
) -> IntArray:
    """The first round of an arm."""
    from cdmpp.tuner.validity_features import pooled
    from cdmpp.tuner.validity_population import initial_population

    drawn = rng.permutation(len(space.asts))[:SAMPLED]
    if arm == "plain":
        return drawn[:BATCH]
    unknown = np.ones(len(drawn))
    chosen = initial_population(
        pooled(space.features[drawn]),
        unknown if arm == "diverse" else p_valid[drawn],
        BATCH,
        log_s=log_s[drawn] if arm == "latencies" and log_s is not None else None,
        diverse=arm != "valid",
        seed=seed,
    )
    return drawn[chosen]


def search(
    space: Space, name: str, arm: str, seed: int, cap: int, model: ValidityModel, log_s: FloatArray
) -> Outcome:
    """One run."""
    from cdmpp.device import get_device
    from cdmpp.tuner.validity_online import OnlineValidity

    rng = np.random.default_rng(seed)
    n, goal = len(space.asts), WITHIN * space.latency_s.min()
    validity = OnlineValidity(model, get_device(space.device), seed)
    skips = arm in ("full", "latencies")
    p_valid = validity.predict(space.features)
    batch = initial(space, arm, p_valid, log_s, seed, rng)
    cost_model = MODELS[name](space, seed) if name in MODELS else None
    measured, failed, order = np.zeros(n, dtype=bool), 0, []
    while len(order) < cap and len(batch):
        for row in batch[: cap - len(order)]:
            order.append(int(row))
            measured[row] = True
            failed += int(np.isinf(space.latency_s[row]))
            if space.latency_s[row] <= goal:
                return Outcome(len(order), failed, True)
        if skips and np.isinf(space.latency_s[batch]).any():
            validity.learn(
                [str(r) for r in batch], space.features[batch], np.isfinite(space.latency_s[batch])
            )
            p_valid = validity.predict(space.features)
        likely = p_valid >= SKIP_BELOW if skips else np.ones(n, dtype=bool)
        likely = likely if (likely & ~measured).any() else np.ones(n, dtype=bool)
        free = np.flatnonzero(~measured & likely)
        if cost_model is None:
            batch = rng.permutation(free)[:BATCH]
            continue
        cost_model.learn(batch, space.latency_s[batch])
        batch = propose(space, cost_model, np.array(order), measured, likely, free, rng)
    return Outcome(cap, failed, False)


def propose(
    space: Space, cost_model: Any, order: IntArray, measured: IntArray, likely: IntArray, free: IntArray,
    rng: np.random.Generator,
) -> IntArray:  # fmt: skip
    """The next round: the best of the generations by the cost model, and a few at random."""
    n = len(measured)
    working = order[np.isfinite(space.latency_s[order])]
    best = working[np.argsort(space.latency_s[working], kind="stable")][: int(MEASURED_SHARE * POPULATION)]
    population = np.unique(np.concatenate([best, rng.integers(0, n, POPULATION - len(best))]))
    known: dict[int, float] = {}

    def scores(rows: IntArray) -> FloatArray:
        new = np.array([row for row in rows if int(row) not in known], dtype=np.int64)
        if len(new):
            known.update(zip(new.tolist(), cost_model.scores(new) * likely[new], strict=True))
        return np.array([known[int(row)] for row in rows])

    for _ in range(GENERATIONS):
        weights = scores(population) + 1e-12
        parents = rng.choice(population, POPULATION, p=weights / weights.sum())
        children = np.where(rng.random(POPULATION) < MUTATED, space.mutants(parents, rng), parents)
        population = np.unique(children)
    scores(population)
    seen = np.array(sorted(known), dtype=np.int64)
    seen = seen[~measured[seen] & likely[seen]]
    seen = seen[np.argsort(-scores(seen), kind="stable")] if len(seen) else seen
    n_random = max(1, round(RANDOM_SHARE * BATCH))
    top = seen[: BATCH - n_random]
    rest = np.setdiff1d(free, top)
    return np.concatenate([top, rng.permutation(rest)[: BATCH - len(top)]])


# -- what it gives ---------------------------------------------------------------------------------------------


def described(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Median and spread of the measurements over the seeds."""
    counts = np.array([o.measurements for o in outcomes], dtype=np.float64)
    low, first, middle, third, high = np.quantile(counts, [0.1, 0.25, 0.5, 0.75, 0.9]).tolist()
    return {
        "runs": len(counts),
        "median": middle,
        "quartiles": [first, third],
        "tenths": [low, high],
        "mean": float(counts.mean()),
        "geometric_mean": float(np.exp(np.log(counts).mean())),
        "failed_mean": float(np.mean([o.failed for o in outcomes])),
        "never": sum(not o.reached for o in outcomes),
    }


def ratio(arm: Sequence[Sequence[Outcome]], plain: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """Geometric means of an arm over those of another, per GPU and together; the interval is over resampled seeds."""
    logs = [
        [np.log([o.measurements for o in outcomes]) for outcomes in arms]
        for arms in zip(arm, plain, strict=True)
    ]
    each = [float(np.exp(a.mean() - b.mean())) for a, b in logs]
    rng = np.random.default_rng(0)

    def resampled(values: FloatArray) -> FloatArray:
        return values[rng.integers(0, len(values), (2000, len(values)))].mean(1)

    drawn = np.mean([resampled(a) - resampled(b) for a, b in logs], axis=0)
    return {
        "ratio": float(np.exp(np.log(each).mean())),
        "interval_95": np.exp(np.quantile(drawn, [0.025, 0.975])).tolist(),
        "by_gpu": each,
    }


class Runs:
    """Finished runs, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[Any, ...], Outcome] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._known[tuple(entry["key"])] = Outcome(**entry["outcome"])

    def get(self, key: tuple[Any, ...], run: Callable[[], Outcome]) -> Outcome:
        if key not in self._known:
            self._known[key] = run()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "outcome": vars(self._known[key])}) + "\n")
        return self._known[key]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="benchmark_hub.parquet")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=100, metavar="N")
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--cap", type=int, default=3000, metavar="N", help="measurements of a run")
    parser.add_argument("--quick", action="store_true", help="does it run: two seeds")
    args = parser.parse_args()
    if args.quick:
        args.seeds = 2
    if not args.data.exists():
        sys.exit(f"{args.data} is not there: it is the AutoTuning Association's benchmark hub as one table")
    args.arms = list(dict.fromkeys(["plain", *args.arms]))
    args.out.mkdir(parents=True, exist_ok=True)
    spaces = load_spaces(args.data, args.out)
    from cdmpp.tuner.validity import validity_scores

    models = [failures_of(space, args.out / f"failures-of-{space.device}") for space in spaces]
    others = models[::-1]
    runs, started = Runs(args.out / "runs.jsonl"), time.monotonic()
    results: dict[str, dict[str, list[list[Outcome]]]] = {
        s: {a: [] for a in args.arms} for s in args.searches
    }
    for i, space in enumerate(spaces):
        # Infinite where the other GPU failed: such a program is chosen last.
        log_s = np.log(spaces[1 - i].latency_s)
        for name in args.searches:
            for arm in args.arms:
                results[name][arm].append(
                    [
                        runs.get(
                            (space.device, name, arm, seed, args.cap),
                            lambda a=(space, name, arm, seed, args.cap, others[i], log_s): search(*a),  # type: ignore[misc]
                        )
                        for seed in range(args.seeds)
                    ]
                )
                shown = described(results[name][arm][-1])
                print(
                    f"{space.device:17}{name:8}{arm:11}median {shown['median']:6.1f}  quartiles "
                    f"{shown['quartiles'][0]:6.1f} to {shown['quartiles'][1]:6.1f}  failed {shown['failed_mean']:5.1f}"
                    f"  ({time.monotonic() - started:.0f} s)",
                    flush=True,
                )
    ratios = {
        name: {arm: ratio(arms[arm], arms["plain"]) for arm in args.arms if arm != "plain"}
        for name, arms in results.items()
    }
    for name, of_arms in ratios.items():
        for arm, found in of_arms.items():
            low, high = found["interval_95"]
            print(f"{name:8}{arm:11}{found['ratio']:.3f} of plain's measurements ({low:.3f} to {high:.3f})")
    content = {
        "measurements_ratio": ratios.get("tuner", {}).get("full", {}).get("ratio"),
        "ratios": ratios,
        "measurements": {
            name: {
                arm: dict(zip(GPUS.values(), map(described, outcomes), strict=True))
                for arm, outcomes in arms.items()
            }
            for name, arms in results.items()
        },
        "validity_model": {
            space.device: {
                "learned_from": spaces[1 - i].device,
                **validity_scores(np.isfinite(space.latency_s), sigmoid_of(others[i], space)),
            }
            for i, space in enumerate(spaces)
        },
        "spaces": {
            s.device: {
                "configurations": len(s.asts),
                "invalid": float(np.isinf(s.latency_s).mean()),
                "within_1_percent": int((s.latency_s <= WITHIN * s.latency_s.min()).sum()),
            }
            for s in spaces
        },
        "settings": {
            "seeds": args.seeds, "cap": args.cap, "batch": BATCH, "population": POPULATION, "generations": GENERATIONS,
            "skip_below": SKIP_BELOW, "sampled": SAMPLED,
        },
        "machine": platform.processor() or platform.machine(),
        "versions": {name: metadata.version(name) for name in ("cdmpp", "numpy", "scikit-learn", "xgboost-cpu")},
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def sigmoid_of(model: ValidityModel, space: Space) -> FloatArray:
    """P(valid) of all configurations."""
    from cdmpp.tuner.validity import sigmoid

    return sigmoid(model.log_odds(space.features))


if __name__ == "__main__":
    sys.exit(main())
