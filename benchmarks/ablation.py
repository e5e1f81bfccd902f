"""What the error depends on: each part of the predictor, and the amount of training data; same records, split and seeds.

    python benchmarks/ablation.py --data data --json ablation.json
    python benchmarks/ablation.py --less tasks programs networks --split by_network --json learning_curve.json

Each variant changes one thing in a configuration. The last lines compare the compact AST's features with TVM's PerStoreFeature
under one model (gradient-boosted trees). A second row is the same predictor given the compiled code. CMD adapts to the programs
of ``--adapt``, which need no label; some of the held-out networks are drawn by
``cdmpp profile densenet121 gcn inception_v3 vgg16 --compile-only --programs-per-task 8 --seed 77 --device epyc-zen4-2.6ghz@1
--out runs/adapt``.

With ``--less`` the models stay as they are, and only a fraction of the training part is kept, drawn by the seed: of the tasks
(with all their programs), of the programs of every task, or of the networks (with all their tasks). It shows what to collect.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from accuracy import score_model
from common import TITLES, Figure, Results, Row, arguments, mean_figure, provenance, start
from numpy.typing import NDArray

from cdmpp.dataset import Split
from cdmpp.dataset.split import architecture
from cdmpp.predictor import Config, TrainingData, config_from_dict, gather, load_config, split_data
from cdmpp.predictor.baselines import COMPILED_NAMES, MODEL_NAMES, make_model

KINDS = ("tasks", "programs", "networks")
#: Variant -> values that replace those of the base configuration, by section.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {},
    "paper's positional encoding": {"model": {"positional": "paper"}},
    "CMD 0.1": {"loss": {"cmd_weight": 0.1}},
    "no device features": {"model": {"device": "none"}},
    "absolute labels": {"label": {"relative": False}},
    "Box-Cox labels": {"label": {"transform": "box-cox"}},
    "no piecewise-linear encoding": {"model": {"bins": 0}},
    "no instruction counts": {"loss": {"codegen_weight": 0.0}},
    "two networks": {"train": {"members": 2}},
    "two networks, unmeasured pairs": {"train": {"members": 2}, "data": {"unmeasured": True}},
}
#: The networks that the package's configurations hold out and validate with.
SPLIT = "by_network:heldout=densenet121+gcn+inception_v3+vgg16;valid=efficientnet_b0+gpt2+mlp_mixer+unet"


def part_of(data: TrainingData, rows: NDArray[np.int64], kind: str, fraction: float, seed: int) -> NDArray[np.int64]:
    """The part of these rows, sorted int64, that is left if only a fraction of the groups that ``kind`` names is kept."""
    if fraction >= 1:
        return rows
    groups: list[tuple[str, ...]]
    if kind == "networks":
        groups = [tuple(map(architecture, names)) for names in data.members("network", rows)]
    else:
        column = data.labels["task" if kind == "tasks" else "program"].iloc[rows]
        groups = [(str(name),) for name in column]
    known = sorted({name for names in groups for name in names})
    chosen = np.random.default_rng(seed).permutation(len(known))[: max(1, round(fraction * len(known)))]
    kept = {known[i] for i in chosen}
    return rows[np.array([not kept.isdisjoint(names) for names in groups])]


def score_variants(
    args: argparse.Namespace, base: Config, data: TrainingData, split: Split, seed: int, results: Results
) -> None:
    """Train and score every variant of the configuration, and trees on two sets of features."""
    for variant in args.variants:
        values = base.model_dump(mode="json")
        config = config_from_dict({s: {**v, **VARIANTS[variant].get(s, {})} for s, v in values.items()})
        score_model(results, make_model("ours", seed, config=config), data, split, {"seed": seed, "model": variant})
    for name in ("xgboost-ast", "xgboost-perstore"):
        score_model(results, make_model(name, seed), data, split, {"seed": seed, "model": name})


def score_less(args: argparse.Namespace, config: Config, data: TrainingData, split: Split, seed: int, results: Results) -> None:
    """Train every model on parts of the training records and score it."""
    for kind in args.less:
        for fraction in args.fractions:
            part = replace(split, train=part_of(data, split.train, kind, fraction, seed))
            for name in args.models:
                key = {"of": "all" if fraction == 1 else kind, "fraction": fraction, "seed": seed, "model": name}
                model = make_model(name, seed, **({"config": config} if name == "ours" else {}))
                score_model(results, model, data, part, key)


def figures(rows: list[Row]) -> list[Figure]:
    """One figure for each variant, or for each part and model: the mean over its seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        fraction = row.get("fraction", 1)
        part = "" if fraction == 1 else f"{100 * fraction:g} % of the {row['of']}: "
        groups.setdefault(part + row["model"], []).append(row)
    return [mean_figure(name, found, TITLES) for name, found in groups.items()]


def main() -> None:
    models, variants = MODEL_NAMES + COMPILED_NAMES, list(VARIANTS)
    more = {"split": {"default": SPLIT}, "variants": {"default": variants, "choices": variants}}
    parser = arguments(__doc__, __file__, less={"choices": KINDS}, models={"choices": models}, **more)
    args = parser.parse_args()
    if not all(0 < fraction <= 1 for fraction in args.fractions):
        parser.error("fractions are above 0 and at most 1")

    config = load_config(args.config)
    chosen = {name: getattr(args, name) for name in ("devices", "adapt", "adapt_devices")}
    config = config_from_dict({**config.model_dump(mode="json"), "data": {**config.data.model_dump(mode="json"), **chosen}})
    data = gather(args.data, config.data)
    options = {"records": len(data), "split": args.split, "config": config.model_dump(mode="json")}
    results = Results(args.json, provenance(__file__, args.data, seeds=args.seeds), options, figures)
    for seed in args.seeds:
        split = split_data(f"{args.split}{';' if ':' in args.split else ':'}seed={seed}", data)
        score = score_less if args.less else score_variants
        score(args, config, data, split, seed, results)
    results.finish()


if __name__ == "__main__":
    start(main)
