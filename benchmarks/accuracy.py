"""Held-out error of our predictor and of every baseline on the same records, for every kind of split.

    python benchmarks/accuracy.py --data data --json accuracy.json
    python benchmarks/accuracy.py --splits by_network --models ours xgboost-perstore roofline --seeds 0 1 2 --json a.json

All models of a split and a seed are trained on the same records in this process. Results are written after every model, and a
run that goes on with the same file skips what is there. ``by_device`` is zero-shot on each device in turn;
``few_shot`` teaches the predictor that saw the other devices the records of K tasks, chosen by KMeans and at random, and
tests on the device's other tasks. The baselines get the same K tasks as training records (chosen at random).

``ours-compiled`` is our predictor when it is told the instructions that the compiler made of each program, where
``model.compiled`` taught it that; ``xgboost-ast-codegen`` is told them too. Their distance from ours and xgboost-ast
is what the compact AST does not say. ``ours-measured`` is our predictor told what the same programs took on the other
devices (``predict(..., measured=...)``); ``measured-by-estimate`` scales these latencies by the ratio of two analytical
estimates alone. Programs measured nowhere else are predicted without; ``n_measured`` in a row says how many were not.

The table gives mean and standard deviation over seeds (and over devices where they vary), the number of test records, and the
noise floor: what a perfect predictor would score.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import defaultdict
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from kept_rows import KeptRows

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor import Config, Predictor, TrainingData

SPLITS = ("within_task", "by_task", "by_network", "by_device", "few_shot")
#: Our predictor, told the instructions of the compiled programs as well (``predict(..., compiled=True)``).
COMPILED = "ours-compiled"
#: The same told latencies on other devices, and these scaled without it.
MEASURED, BY_ESTIMATE = "ours-measured", "measured-by-estimate"
METRICS = (
    "mape",
    "median_ape",
    "within_20pct",
    "pairwise_accuracy",
    "spearman",
    "top1_regret",
    "top1_regret_of_32",
)


def keep(results: KeptRows, overall: dict[str, Any], **key: Any) -> None:
    """Keep and print what a model scored."""
    results.add({**key, **overall})
    print(" ".join(f"{k}={v}" for k, v in key.items()), f"MAPE {100 * overall['mape']:.1f} %", flush=True)


def scored_compiled(predictor: Predictor, data: TrainingData, split: Split) -> dict[str, Any] | None:
    """Metrics of our predictor told the compiled code; None for one that cannot be told or where none was compiled."""
    from cdmpp.predictor import evaluate

    if not predictor.encoder.code_dim or not data.counted(split.test).any():
        return None
    told = evaluate(predictor, data, split, by=(), compiled=True)
    return {**told["overall"], "spec": split.spec, "n_compiled": told["n_compiled"]}


def scored_told(predictor: Predictor, data: TrainingData, split: Split) -> dict[str, dict[str, Any]]:
    """Our predictor, and what scales without it, told what can be told of the test programs: name -> metrics."""
    from cdmpp.predictor import evaluate
    from cdmpp.predictor.scaling import DeviceScaling, fit_scaling, predict_rows_scaled

    found: dict[str, dict[str, Any]] = {}
    told_code = scored_compiled(predictor, data, split)
    if told_code is not None:
        found[COMPILED] = told_code
    if predictor.scaling is None:
        hidden = np.concatenate([split.test, split.adapt])
        predictor = replace(predictor, scaling=fit_scaling(predictor, data, split.valid, hidden))
    # so wrong that it does not count beside what was measured
    without = replace(predictor, scaling=DeviceScaling(estimate_part=1.0, own_error=1e6))
    if predict_rows_scaled(without, data, split.test)[1].any():
        for name, model in ((MEASURED, predictor), (BY_ESTIMATE, without)):
            told = evaluate(model, data, split, by=(), measured=True)
            found[name] = {**told["overall"], "spec": split.spec, "n_measured": told["n_measured"]}
    return found


def baseline_options(
    files: list[Path], epochs: int, network_seconds: float | None
) -> dict[str, dict[str, Any]]:
    """Arguments of the baselines: name -> what a search found. Networks train ``epochs`` epochs, as ours does and searches need
    not, at most so many seconds."""
    networks = {} if network_seconds is None else {"max_seconds": network_seconds}
    found: dict[str, dict[str, Any]] = {name: dict(networks) for name in ("lstm", "released")}
    for file in files:
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(options, dict) or "name" not in options:
            raise SystemExit(f"{file} is not a best.yaml of a baseline that cdmpp search wrote")
        options = {key: value for key, value in options.items() if key not in ("seed", "threads")}
        if "train" in options:
            options["train"] = {**options["train"], "epochs": epochs}
        name = options.pop("name")
        found[name] = {**found.get(name, {}), **options}
    return found


def specifications(kind: str, args: argparse.Namespace, seed: int) -> list[tuple[str, str]]:
    """(split specification, what is held out) for one seed."""
    if kind == "by_device":
        return [(f"by_device:heldout={name};seed={seed}", name) for name in args.devices]
    if kind == "by_network" and args.heldout:
        valid = f";valid={args.valid}" if args.valid else ""
        return [(f"by_network:heldout={args.heldout}{valid};seed={seed}", args.heldout)]
    return [(f"{kind}:seed={seed}", "")]


def score_models(
    kind: str,
    data: TrainingData,
    args: argparse.Namespace,
    config: Config,
    results: KeptRows,
    unseen: dict[str, Predictor],
) -> None:
    """Every model on one kind of split; ``unseen`` takes our predictors of ``by_device``, by the device left out."""
    from cdmpp.predictor import split_data
    from cdmpp.predictor.baselines import CdmppModel, evaluate_models, make_model

    for seed in args.seeds:
        for spec, held in specifications(kind, args, seed):
            split = split_data(spec, data)
            for name in args.models:
                key = {"split": kind, "held_out": held, "seed": seed, "model": name}
                if results.find(**key) is not None:
                    continue
                options = {"config": config} if name == "ours" else args.baselines.get(name, {})
                model = make_model(name, seed, **options)
                (found,) = evaluate_models([model], data, split).values()
                trained = model.predictor_ if isinstance(model, CdmppModel) else None
                if trained is not None:
                    for told, overall in scored_told(trained, data, split).items():
                        keep(results, overall, **{**key, "model": told})
                if kind == "by_device" and seed == 0 and trained is not None:
                    unseen[held] = trained
                times = {k: found[k] for k in ("fit_s", "predict_s")}
                keep(
                    results,
                    {**found["overall"], **times, "spec": split.spec, "n_train": len(split.train)},
                    **key,
                )


def score_few_shot(
    data: TrainingData,
    args: argparse.Namespace,
    config: Config,
    results: KeptRows,
    unseen: dict[str, Predictor],
) -> None:
    """Every device taught by K tasks, starting from the predictors in ``unseen``, or else from one trained here."""
    from cdmpp.predictor import evaluate, few_shot, split_data
    from cdmpp.predictor.baselines import evaluate_models, make_model
    from cdmpp.predictor.run import prepare, training_summary

    for device in args.devices:
        base = unseen.get(device)
        for seed in args.few_shot_seeds:
            for k in args.tasks:
                for select in ("kmeans", "random"):
                    key = {"split": "few_shot", "held_out": device, "seed": seed, "k": k, "select": select}
                    if results.find(**key, model="ours") is None:
                        if base is None:
                            split = split_data(f"by_device:heldout={device};seed=0", data)
                            fitted = prepare(config, data, split)
                            state = fitted.trainer.fit()
                            base = fitted.predictor(state.best, training_summary(config, data, split, state))
                        tuned, split = few_shot(base, data, device, k, select, seed)
                        overall = evaluate(tuned, data, split, by=())["overall"]
                        for told, scores in scored_told(tuned, data, split).items():
                            keep(results, scores, **key, model=told)
                        keep(results, {**overall, "spec": split.spec}, **key, model="ours")
                    if select == "random":
                        spec = next(row["spec"] for row in results.rows if key.items() <= row.items())
                        for name in [m for m in args.models if m != "ours"]:
                            if results.find(**key, model=name) is None:
                                model = make_model(name, seed, **args.baselines.get(name, {}))
                                (found,) = evaluate_models([model], data, split_data(spec, data)).values()
                                keep(results, {**found["overall"], "spec": spec}, **key, model=name)


def table(rows: list[dict[str, Any]]) -> str:
    """One line a split and model: mean and standard deviation over seeds and held-out devices."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["split"], row.get("k"), row.get("select"), row["model"]].append(row)
    lines = [
        f"{'split':22}{'model':18}"
        + "".join(f"{m:>20}" for m in METRICS)
        + f"{'runs':>6}{'n':>8}{'floor':>8}"
    ]
    for (kind, k, select, model), found in groups.items():
        name = kind if k is None else f"{kind} K={k} {select}"
        cells = ""
        for metric in METRICS:
            values = [row[metric] for row in found if row.get(metric) is not None]
            cells += f"{np.mean(values):>12.3f} ± {np.std(values):.3f}" if values else f"{'-':>20}"
        floors = [row["noise_floor_mape"] for row in found if row["noise_floor_mape"] is not None]
        floor = f"{np.mean(floors):8.4f}" if floors else f"{'-':>8}"
        lines.append(
            f"{name:22}{model:18}{cells}{len(found):6d}{round(np.mean([r['n'] for r in found])):8d}{floor}"
        )
    return "\n".join(lines)


def main() -> int:
    from cdmpp.predictor import gather, load_config
    from cdmpp.predictor.baselines import COMPILED_NAMES, MODEL_NAMES

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", nargs="+", default=["data"], metavar="DIR")
    parser.add_argument("--config", default="configs/cpu.yaml", help="of our predictor")
    parser.add_argument(
        "--found",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="best.yaml of searches for baselines",
    )
    parser.add_argument(
        "--network-seconds",
        type=float,
        metavar="S",
        help="most that a baseline's network trains (default: no limit)",
    )
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    parser.add_argument(
        "--models", nargs="+", default=list(MODEL_NAMES), choices=MODEL_NAMES + COMPILED_NAMES
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", type=int, default=[5, 10, 20], help="K of few_shot")
    parser.add_argument("--few-shot-seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--heldout", help="networks of by_network, joined by '+' (default: drawn by the seed)"
    )
    parser.add_argument(
        "--valid", help="validation networks of by_network with --heldout (default: drawn by the seed)"
    )
    parser.add_argument(
        "--devices", nargs="+", metavar="D", help="held out by by_device and few_shot (default: each)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    config = load_config(args.config)
    args.baselines = baseline_options(args.found, config.train.epochs, args.network_seconds)
    data = gather(args.data, config.data)
    args.devices = args.devices or sorted(data.devices)
    if set(args.devices) - set(data.devices):
        parser.error(f"there are records of {', '.join(sorted(data.devices))}, not of all of {args.devices}")
    notes = {
        "data": args.data,
        "records": len(data),
        "devices": sorted(data.devices),
        "config": config.model_dump(mode="json"),
        "baselines": args.baselines,
        "machine": platform.processor() or platform.machine(),
        "versions": {
            name: metadata.version(name) for name in ("cdmpp", "torch", "xgboost-cpu", "scikit-learn")
        },
    }
    results = KeptRows(args.json, notes)
    started = time.perf_counter()
    unseen: dict[str, Predictor] = {}
    for kind in args.splits:
        if kind in ("by_device", "few_shot") and len(data.devices) < 2:
            print(f"{kind} needs records of two devices", file=sys.stderr)
        elif kind == "few_shot":
            score_few_shot(data, args, config, results, unseen)
        else:
            score_models(kind, data, args, config, results, unseen)
    print(table(results.rows))
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
