"""Finding a fast schedule on a GPU never measured, from what is known of others: the benchmark hub's kernels.

    python benchmarks/schedule_transfer.py --data ../shared/data/benchmark_hub.parquet --json schedule_transfer.json
    python benchmarks/schedule_transfer.py --only-gpu rtx-a4000 --candidates 500 --records 600 --epochs 2 --json quick.json

For each GPU in turn a predictor is trained on ``--records`` labels of the other GPUs (as many of every kernel and GPU) and
ranks all configurations of every kernel on this one. A method is an order in which to measure, or a way to choose the next:

* ``cdmpp``: the predicted order;
* ``cdmpp_measured``: the predicted order, told what each configuration took on the other GPUs (``predict(measured=...)``);
  one that failed on one of them comes after those that failed on fewer;
* ``cdmpp_online``: the same, corrected after every ``--batch`` measurements as ``cdmpp tune`` does;
* ``nearest``: the order measured on the GPU whose features are nearest of those that ran the kernel, the best configuration
  there first; what was not measured there (``n_measured_on_nearest`` was) comes last;
* ``others``: the order of the mean slowdown (against the GPU's best) on all other GPUs: a table, no predictor;
* ``random``: without knowledge; expectation and median, computed.

``measurements`` counts until a configuration is within 5 % of the best of all; one that fails counts too. ``regret`` is how
much slower the first one that works is than the best; ``spearman`` compares predicted and measured (of ``nearest``: measured
there) over those that work. ``--candidates`` takes so many configurations of a kernel, the same on all GPUs. What is imported
and trained is kept in ``--work``, results after every step in ``--json``: a run with the same options goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kept_rows import KeptGroups
from numpy.typing import NDArray
from search_cost import (
    measurements_by_chance,
    measurements_in_order,
    nearest_device,
    nearly_best,
    order_of_others,
    regret_in_order,
)

from cdmpp.errors import CdmppError

if TYPE_CHECKING:
    from cdmpp.dataset import DatasetView
    from cdmpp.predictor import Config, Predictor, TrainingData
    from cdmpp.program.ast import CompactAST
    from cdmpp.tuner.online import OnlineModel
    from cdmpp.tuner.prior import Encoded

METHODS = ("cdmpp", "cdmpp_measured", "cdmpp_online", "nearest", "others", "random_expected", "random_median")

#: Program hash -> seconds, infinite for a failure.
Latencies = Mapping[str, float]


def imported(path: Path, work: Path) -> Path:
    """The dataset of the file; imported where it is not there yet."""
    from cdmpp.dataset.importers import import_benchmark_hub

    out = work / "hub"
    if not out.exists():
        draft = out.with_name(f"hub.{int(time.time())}.part")
        report = import_benchmark_hub(path, draft)
        draft.rename(out)
        print(f"imported {report.records} of {report.programs} programs to {out}", flush=True)
    return out


def latencies(view: DatasetView, candidates: int | None, seed: int) -> dict[str, dict[str, Latencies]]:
    """Kernel -> GPU -> latency of each of its configurations there."""
    from cdmpp.dataset.split_makers import ordered

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


def show_progress(done: int, total: int) -> None:
    if done == total or done % 4096 == 0:
        print(f"compact ASTs: {done} of {total}", file=sys.stderr, flush=True)


def options(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """What results depend on."""
    names = ("records", "candidates", "batch", "online", "seed")
    return {**{name: getattr(args, name) for name in names}, "config": config.model_dump(mode="json")}


def trained_without(args: argparse.Namespace, config: Config, data: TrainingData, gpu: str) -> Predictor:
    """A predictor of the sampled records of all other GPUs, trained once and kept in the work folder."""
    from cdmpp.device import DEVICE_FEATURES
    from cdmpp.predictor import Predictor, train
    from cdmpp.predictor.data import subset
    from cdmpp.predictor.predictor_store import FORMAT_VERSION
    from cdmpp.program.ast import FEATURE_SET

    settings = [gpu, args.records, args.seed, config.model_dump(mode="json")]
    settings += [FORMAT_VERSION, FEATURE_SET, DEVICE_FEATURES]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    out = args.work / "predictors" / digest
    if (out / "predictor").exists():
        return Predictor.load(out)
    others = subset(data, np.flatnonzero(data.labels["device"] != gpu))
    print(f"training on {len(others)} labels of {', '.join(sorted(others.devices))}", flush=True)
    # by tasks there would be nothing to validate with: a kernel is one
    spec = f"within_task:test=0.01;valid=0.1;seed={args.seed}"
    config = config.model_copy(update={"split": config.split.model_copy(update={"spec": spec})})
    return train(config, others, out, resume=True).predictor


def measurements_online(
    model: OnlineModel, programs: Encoded, latency_s: NDArray[np.float64], batch: int, most: int
) -> int:
    """Measurements until one is nearly the best; the order is corrected after every batch until there are `most`."""
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
    args: argparse.Namespace,
    predictor: Predictor,
    gpu: str,
    by_gpu: Mapping[str, Latencies],
    asts: Mapping[str, CompactAST],
) -> dict[str, Any]:
    """All methods on one kernel and one GPU."""
    from cdmpp.device import device_features, get_device
    from cdmpp.tuner.online import OnlineModel
    from cdmpp.tuner.prior import PredictorPrior

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
    told_s = predictor.predict(
        chosen, gpu, measured={name: np.where(np.isinf(s), math.nan, s) for name, s in elsewhere.items()}
    )
    failures = np.sum([np.isinf(s) for s in elsewhere.values()], axis=0)
    orders = {
        "cdmpp": np.argsort(predicted_s, kind="stable"),
        "cdmpp_measured": np.lexsort((told_s, failures)),
        "nearest": order_of_others([elsewhere[near]], args.seed),
        "others": order_of_others(list(elsewhere.values()), args.seed),
    }
    expected, median = measurements_by_chance(latency_s)
    measurements: dict[str, float] = {
        name: measurements_in_order(latency_s, order) for name, order in orders.items()
    }
    if args.online:
        model = OnlineModel(PredictorPrior(predictor, get_device(gpu)))
        measurements["cdmpp_online"] = measurements_online(
            model, model.prior.encode(chosen), latency_s, args.batch, args.online
        )
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
            "cdmpp_measured": spearman(told_s[works], latency_s[works]),
            "nearest": spearman(elsewhere[near][both], latency_s[both]),
        },
    }


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Rank correlation; None of fewer than three."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if len(a) > 2 else None


def summary(kernels: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Over all kernels and GPUs: geometric mean and median of measurements, mean regret and Spearman, by method.

    ``fewer_than_random`` is the geometric mean of the expected number by chance over the method's.
    """
    cases = [case for by_gpu in kernels.values() for case in by_gpu.values()]

    def gathered(key: str, collect: Callable[[list[float]], float]) -> dict[str, float]:
        methods = dict.fromkeys(method for case in cases for method in case[key])
        values = {m: [c[key][m] for c in cases if c[key].get(m) is not None] for m in methods}
        return {method: collect(found) for method, found in values.items() if found}

    counted = gathered("measurements", statistics.geometric_mean)
    chance = counted.get("random_expected")
    return {
        "cases": len(cases),
        "measurements_geomean": counted,
        "measurements_median": gathered("measurements", statistics.median),
        "fewer_than_random": {m: chance / value for m, value in counted.items()} if chance else {},
        "top1_regret_mean": gathered("top1_regret", statistics.fmean),
        "spearman_mean": gathered("spearman", statistics.fmean),
    }


def table(content: Mapping[str, Any]) -> str:
    """One line a kernel and GPU: measurements until within 5 % of the best, then regret and Spearman."""
    head = "".join(f"{m:>17}" for m in METHODS)
    lines = [
        f"{'measurements':20}{'left-out GPU':18}{head}{'of':>7}  {'regret':>8}{'Spearman':>9}  nearest (regret, Spearman)"
    ]
    for kernel, by_gpu in content["kernels"].items():
        for gpu, case in by_gpu.items():
            counts = case["measurements"]
            cells = "".join(f"{counts[m]:>17.0f}" if m in counts else f"{'-':>17}" for m in METHODS)
            figures = [case["top1_regret"], case["spearman"]]
            ours, theirs = ([figure[m] for figure in figures] for m in ("cdmpp", "nearest"))
            lines.append(
                f"{kernel:20}{gpu:18}{cells}{case['n']:>7}  {ours[0]:>8.1%}{number(ours[1]):>9}  "
                f"{case['nearest_gpu']} ({theirs[0]:.1%}, {number(theirs[1])})"
            )
    found = content["summary"]
    for name in ("measurements_geomean", "measurements_median", "fewer_than_random"):
        values = found.get(name, {})
        cells = "".join(f"{values[m]:>17.1f}" if m in values else f"{'-':>17}" for m in METHODS)
        lines.append(f"{name:38}{cells}")
    for name in ("top1_regret_mean", "spearman_mean"):
        lines.append(f"{name:38}  " + ", ".join(f"{m} {v:.3f}" for m, v in found.get(name, {}).items()))
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/benchmark_hub.parquet"), metavar="FILE"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/schedule-transfer"), metavar="DIR")
    parser.add_argument("--only-gpu", nargs="+", default=[], metavar="D", help="leave these out alone")
    parser.add_argument("--config", default="configs/cpu.yaml", help="of our predictor")
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="in place of the configuration's")
    parser.add_argument("--records", type=int, default=6000, metavar="N", help="of all GPUs together")
    parser.add_argument(
        "--candidates", type=int, metavar="N", help="configurations of a kernel (default: all)"
    )
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="measurements before learning")
    parser.add_argument("--online", type=int, default=256, metavar="N", help="learn from so many; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not args.data.is_file():
        print(f"skipped: there is no {args.data}", file=sys.stderr)
        return 0

    from cdmpp.dataset import load_datasets
    from cdmpp.dataset.sampled import sample_evenly
    from cdmpp.device import get_device
    from cdmpp.predictor import gather, load_config
    from cdmpp.predictor.data import collect_asts

    config = load_config(args.config)
    settings = {"epochs": args.epochs, "seed": args.seed}
    config = config.model_copy(update={"train": config.train.model_copy(update=settings)})
    notes = {
        "options": options(args, config),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: metadata.version(name) for name in ("cdmpp", "torch", "scikit-learn")},
    }
    results = KeptGroups(args.json, notes, "kernels", ("summary", summary))
    args.work.mkdir(parents=True, exist_ok=True)
    view = load_datasets(imported(args.data, args.work))
    known = latencies(view, args.candidates, args.seed)
    gpus = sorted({gpu for by_gpu in known.values() for gpu in by_gpu})
    wanted = [get_device(name).name for name in args.only_gpu] or gpus
    if set(wanted) - set(gpus):
        sys.exit(
            f"there are no records of {', '.join(sorted(set(wanted) - set(gpus)))}; there are {', '.join(gpus)}"
        )
    every = {program for by_gpu in known.values() for programs in by_gpu.values() for program in programs}
    asts = collect_asts(view, sorted(every), show_progress)
    data = gather(sample_evenly(view, args.records, args.seed), progress=show_progress)
    for gpu in wanted:
        cases = {k: by_gpu for k, by_gpu in known.items() if gpu in by_gpu and gpu not in results.of(k)}
        if not cases:
            continue
        started = time.perf_counter()
        predictor = trained_without(args, config, data, gpu)
        for kernel, by_gpu in cases.items():
            case = evaluate_case(args, predictor, gpu, by_gpu, asts)
            results.of(kernel)[gpu] = case
            counts = ", ".join(f"{m} {n:.0f}" for m, n in case["measurements"].items())
            print(f"{kernel} on {gpu}: {counts} ({time.perf_counter() - started:.0f} s)", flush=True)
            results.write()
    results.write()
    print(table(results.content))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CdmppError as error:
        sys.exit(f"error: {error}")
