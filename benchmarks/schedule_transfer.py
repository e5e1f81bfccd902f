"""Finding a fast schedule on a GPU without measurements, from data of other GPUs: the benchmark hub's kernels.

    python benchmarks/schedule_transfer.py --data ../shared/data/benchmark_hub.parquet --json schedule_transfer.json
    python benchmarks/schedule_transfer.py --only-gpu rtx-a4000 --candidates 500 --records 600 --epochs 2 --json quick.json

For each GPU in turn a predictor is trained on ``--records`` labels of the other GPUs (equally many of every kernel and GPU) and
ranks all configurations of every kernel on this GPU. A method is an order in which to measure, or a way to choose the next:

* ``cdmpp``: the predicted order;
* ``cdmpp_measured``: the predicted order given each configuration's latencies on the other GPUs (``predict(measured=...)``);
  configurations that failed on more of these GPUs come later;
* ``cdmpp_online``: the order of ``cdmpp``, corrected after every ``--batch`` measurements as ``cdmpp tune`` does;
* ``nearest``: the order measured on the GPU with the nearest features among those that ran the kernel, the best configuration
  first; configurations that were not measured there come last (``n_measured_on_nearest`` were);
* ``others``: the order of the mean slowdown (against the GPU's best) on all other GPUs: a table, no predictor;
* ``random``: a random order; expectation and median, computed.

``measurements`` counts until a configuration is within 5 % of the best of all, failures included. Regret is how much slower the
first configuration that works is than the best. Spearman compares predictions and measurements (for ``nearest``: measurements
on both GPUs) of the configurations that work. Imports and trained predictors are kept in ``--work``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from common import Figure, Results, Row, arguments, bootstrap, figure, provenance, start
from cross_device import imported, trained_once
from numpy.typing import NDArray
from sampled import sample_evenly
from scipy.stats import spearmanr

from cdmpp.dataset import DatasetView, load_datasets
from cdmpp.dataset.importers import import_benchmark_hub
from cdmpp.dataset.split import ordered
from cdmpp.device import device_features, get_device
from cdmpp.errors import PredictorError
from cdmpp.predictor import Config, Predictor, TrainingData, gather, load_config
from cdmpp.predictor.data import collect_asts, subset
from cdmpp.program.ast import CompactAST
from cdmpp.tuner.cost_model import Encoded, OnlineModel, PredictorPrior
from cdmpp.tuner.warm_start import nearest_device

METHODS = ("cdmpp", "cdmpp_measured", "cdmpp_online", "nearest", "others", "random_expected", "random_median")

#: Program hash -> seconds, infinite for a failure.
Latencies = Mapping[str, float]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
#: The search ends at a configuration that is at most this fraction slower than the best.
WITHIN = 0.05


def nearly_best(latency_s: FloatArray, within: float = WITHIN) -> NDArray[np.bool_]:
    """Which candidates are at most the fraction `within` slower than the best, (n,); latencies are infinite for failures."""
    if not np.isfinite(latency_s).any():
        raise PredictorError("no candidate has a latency: there is nothing to search for")
    return np.asarray(latency_s <= (1 + within) * np.min(latency_s), dtype=bool)


def measurements_in_order(latency_s: FloatArray, order: IntArray, within: float = WITHIN) -> int:
    """Number of measurements until a candidate is nearly the best, if all of them are measured in this order, (n,)."""
    return int(np.argmax(nearly_best(latency_s, within)[order])) + 1


def regret_in_order(latency_s: FloatArray, order: IntArray) -> float:
    """How much slower the first candidate that works in an order is than the best: 0.1 is 10 %."""
    ranked = latency_s[order]
    return float(ranked[np.isfinite(ranked)][0] / np.min(latency_s) - 1)


def measurements_by_chance(latency_s: FloatArray, within: float = WITHIN) -> tuple[float, int]:
    """Expected and median number of measurements until one is nearly the best, if candidates are drawn at random, none twice.

    With `good` of `n` candidates nearly the best, the first of them is expected at ``(n + 1) / (good + 1)``; the median is the
    smallest number of draws that hit one with a probability of one half (hypergeometric)."""
    good, n = int(nearly_best(latency_s, within).sum()), len(latency_s)
    miss, draws = 1.0, 0
    while miss > 0.5:
        miss *= (n - good - draws) / (n - draws)
        draws += 1
    return (n + 1) / (good + 1), draws


def order_of_others(others_s: Sequence[FloatArray], seed: int = 0) -> IntArray:
    """Candidates ordered by their latencies on other devices, the fastest first, (n,).

    Latencies are (n,) per device: infinite for a failure, NaN if not measured. The key is the log of a candidate's slowdown
    against the device's best, its mean over the devices that measured the candidate. Candidates that failed on any device, or
    were measured on none, come last, in an order drawn by the seed."""
    slowdowns = []
    for latency_s in others_s:
        works = np.isfinite(latency_s)
        slowdowns.append(latency_s / (np.min(latency_s[works]) if works.any() else 1.0))
    mean = pd.DataFrame(np.log(slowdowns)).mean().fillna(math.inf).to_numpy()
    chance = np.random.default_rng(seed).permutation(len(mean))
    return np.lexsort((chance, mean))


def latencies(view: DatasetView, candidates: int | None, seed: int) -> dict[str, dict[str, Latencies]]:
    """Kernel -> GPU -> latency of each of its configurations there."""
    records = view.records
    found: dict[str, dict[str, Latencies]] = {}
    for task, own in records.groupby("task", observed=True):
        programs = ordered(own["program"].unique(), seed, "candidates")[:candidates]
        own = own[own["program"].isin(programs)]
        works = own["status"] == "ok"
        seconds = own["latency_s"].where(works, math.inf)
        table = seconds.groupby([own["device"], own["program"]], observed=True).min()
        name = view.tasks[task].name
        found[name if name not in found else f"{name}-{task}"] = {
            str(gpu): part.droplevel(0).to_dict() for gpu, part in table.groupby(level=0, observed=True)
        }
    return found


def trained_without(args: argparse.Namespace, config: Config, data: TrainingData, gpu: str) -> Predictor:
    """A predictor trained on the sampled records of all other GPUs."""
    others = subset(data, np.flatnonzero(data.labels["device"] != gpu))
    # a kernel is one task: a split by tasks would leave nothing to validate with
    spec = f"within_task:test=0.01;valid=0.1;seed={args.seed}"
    config = config.model_copy(update={"split": config.split.model_copy(update={"spec": spec})})
    return trained_once(config, others, [gpu, args.records, args.seed], args.work)


def measurements_online(model: OnlineModel, programs: Encoded, latency_s: FloatArray, batch: int, most: int) -> int:
    """Number of measurements until a candidate is nearly the best; the order is corrected after every batch, up to `most`."""
    good, left, done = nearly_best(latency_s), np.arange(len(programs)), 0
    while True:
        left = left[np.argsort(model.predict("kernel", programs.take(left)), kind="stable")]
        chosen = left[:batch] if done < most else left
        if good[chosen].any():
            return done + int(np.argmax(good[chosen])) + 1
        done += len(chosen)
        left = left[len(chosen) :]
        works = chosen[np.isfinite(latency_s[chosen])]
        if len(works):
            model.learn("kernel", [str(i) for i in works], programs.take(works), latency_s[works])
            model.fit()


def evaluate_case(
    args: argparse.Namespace, predictor: Predictor, gpu: str, by_gpu: Mapping[str, Latencies], asts: Mapping[str, CompactAST]
) -> dict[str, Any]:
    """The row of one kernel on one GPU: the scores of all methods."""
    programs = [program for program in sorted(by_gpu[gpu]) if program in asts]
    latency_s = np.array([by_gpu[gpu][program] for program in programs])
    works = np.isfinite(latency_s)
    elsewhere = {
        other: np.array([known.get(program, math.nan) for program in programs])
        for other, known in by_gpu.items()
        if other != gpu
    }
    near = nearest_device(gpu, {name: device_features(get_device(name)) for name in by_gpu})
    chosen = [asts[program] for program in programs]
    predicted_s = predictor.predict(chosen, gpu)
    measured = {name: np.where(np.isinf(s), math.nan, s) for name, s in elsewhere.items()}
    given_s = predictor.predict(chosen, gpu, measured=measured)
    failures = np.sum([np.isinf(s) for s in elsewhere.values()], axis=0)
    orders = {
        "cdmpp": np.argsort(predicted_s, kind="stable"),
        "cdmpp_measured": np.lexsort((given_s, failures)),
        "nearest": order_of_others([elsewhere[near]], args.seed),
        "others": order_of_others(list(elsewhere.values()), args.seed),
    }
    expected, median = measurements_by_chance(latency_s)
    measurements = {name: measurements_in_order(latency_s, order) for name, order in orders.items()}
    if args.online:
        model = OnlineModel(PredictorPrior(predictor, get_device(gpu)))
        encoded = model.prior.encode(chosen)
        measurements["cdmpp_online"] = measurements_online(model, encoded, latency_s, args.batch, args.online)
    both = works & np.isfinite(elsewhere[near])
    return {
        "n": len(programs),
        "n_failed": int((~works).sum()),
        "n_within_5_percent": int(nearly_best(latency_s).sum()),
        "nearest_gpu": near,
        "n_measured_on_nearest": int((~np.isnan(elsewhere[near])).sum()),
        "measurements": {**measurements, "random_expected": expected, "random_median": median},
        "top1_regret": {name: regret_in_order(latency_s, order) for name, order in orders.items()},
        "spearman": {
            "cdmpp": spearman(predicted_s[works], latency_s[works]),
            "cdmpp_measured": spearman(given_s[works], latency_s[works]),
            "nearest": spearman(elsewhere[near][both], latency_s[both]),
        },
    }


def spearman(a: FloatArray, b: FloatArray) -> float | None:
    """Rank correlation; None for fewer than three values."""
    return float(spearmanr(a, b).statistic) if len(a) > 2 else None


def figures(rows: Sequence[Row]) -> list[Figure]:
    """By method, over all kernels and GPUs: geometric mean and median of measurements, mean regret of the first program and
    mean Spearman; then the measurements of every case."""
    found = []
    for method in METHODS:
        counts = [row["measurements"][method] for row in rows if method in row["measurements"]]
        if not counts:
            continue
        regrets = [row["top1_regret"][method] for row in rows if method in row["top1_regret"]]
        correlations = [row["spearman"].get(method) for row in rows]
        known = [value for value in correlations if value is not None]
        values = {
            "measurements (geometric mean)": statistics.geometric_mean(counts),
            "median": statistics.median(counts),
            "top1_regret": statistics.fmean(regrets) if regrets else None,
            "spearman": statistics.fmean(known) if known else None,
        }
        cases = np.arange(len(counts))
        ends = {"measurements (geometric mean)": np.exp(bootstrap(np.log(counts), cases)).tolist()}
        if regrets:
            ends["top1_regret"] = bootstrap(regrets, np.arange(len(regrets)))
        found.append(figure(method, values, len(counts), interval=ends))
    for row in rows:
        counts = {method: row["measurements"].get(method) for method in METHODS}
        found.append(figure(f"{row['kernel']} on {row['gpu']}", counts, row["n"]))
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    if not args.data.is_file():
        print(f"skipped: there is no {args.data}", file=sys.stderr)
        return

    config = load_config(args.config)
    settings = {"epochs": args.epochs, "seed": args.seed}
    config = config.model_copy(update={"train": config.train.model_copy(update=settings)})
    options = {name: getattr(args, name) for name in ("records", "candidates", "batch", "online", "seed")}
    options["config"] = config.model_dump(mode="json")
    results = Results(args.json, provenance(__file__, [args.data], seeds=[args.seed]), options, figures)
    args.work.mkdir(parents=True, exist_ok=True)
    view = load_datasets(imported(args.work / "hub", lambda draft: import_benchmark_hub(args.data, draft)))
    known = latencies(view, args.candidates, args.seed)
    gpus = sorted({gpu for by_gpu in known.values() for gpu in by_gpu})
    wanted = [get_device(name).name for name in args.only_gpu] or gpus
    absent = sorted(set(wanted) - set(gpus))
    if absent:
        sys.exit(f"there are no records of {', '.join(absent)}; there are {', '.join(gpus)}")
    every = {program for by_gpu in known.values() for programs in by_gpu.values() for program in programs}
    asts = collect_asts(view, sorted(every))
    data = gather(sample_evenly(view, args.records, args.seed))
    for gpu in wanted:
        missing = [kernel for kernel in known if gpu in known[kernel] and results.find(kernel=kernel, gpu=gpu) is None]
        cases = {kernel: known[kernel] for kernel in missing}
        predictor = trained_without(args, config, data, gpu) if cases else None
        for kernel, by_gpu in cases.items():
            case = evaluate_case(args, predictor, gpu, by_gpu, asts)
            results.add({"kernel": kernel, "gpu": gpu, **case})
            counts = ", ".join(f"{m} {n:.0f}" for m, n in case["measurements"].items())
            print(f"{kernel} on {gpu}: {counts}", flush=True)
    results.finish()


if __name__ == "__main__":
    start(main)
