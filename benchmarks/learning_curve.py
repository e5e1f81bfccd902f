"""What more data would bring: held-out error against the part of the training records that models get.

    python benchmarks/learning_curve.py --data data --json learning_curve.json
    python benchmarks/learning_curve.py --devices epyc-zen4-2.6ghz@1 --models xgboost-ast-codegen

A ``by_network`` split as in ``benchmarks/accuracy.py``; of its training part a fraction is kept, drawn by the seed: of the
tasks with all their programs (``tasks``), of the programs of every task (``programs``), or of the networks with all their
tasks (``networks``). Validation and test stay as they are. Which of these helps most says what to collect.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
from accuracy import score_model
from common import TITLES, Figure, Results, Row, arguments, mean_figure, provenance
from numpy.typing import NDArray

from cdmpp.dataset.split import architecture
from cdmpp.predictor import TrainingData, gather, load_config, split_data
from cdmpp.predictor.baselines import COMPILED_NAMES, MODEL_NAMES, make_model

KINDS = ("tasks", "programs", "networks")


def part_of(
    data: TrainingData, rows: NDArray[np.int64], kind: str, fraction: float, seed: int
) -> NDArray[np.int64]:
    """The rows, sorted int64, that are left of these when a fraction of what ``kind`` names is kept."""
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


def figures(rows: list[Row]) -> list[Figure]:
    """One of each part and model: the mean over its seeds."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        part = "all records" if row["fraction"] == 1 else f"{100 * row['fraction']:g} % of the {row['of']}"
        groups[f"{part}: {row['model']}"].append(row)
    return [mean_figure(name, found, TITLES) for name, found in groups.items()]


def main() -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    models = MODEL_NAMES + COMPILED_NAMES
    add("--data", nargs="+", default=["data"], metavar="DIR")
    add("--config", default="configs/demo.yaml", help="of our predictor")
    add("--devices", nargs="+", metavar="D", help="records of these alone (default: all)")
    add("--models", nargs="+", default=["ours", "xgboost-ast-codegen"], choices=models)
    add("--of", nargs="+", default=list(KINDS), choices=KINDS)
    add("--fractions", nargs="+", type=float, default=[0.25, 0.5, 1.0])
    add("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    if not all(0 < fraction <= 1 for fraction in args.fractions):
        parser.error("fractions are above 0 and at most 1")

    config = load_config(args.config)
    data = gather(args.data, config.data.model_copy(update={"devices": args.devices}))
    options = {
        "devices": sorted(data.devices),
        "records": len(data),
        "config": config.model_dump(mode="json"),
    }
    results = Results(args.json, provenance(__file__, args.data, seeds=args.seeds), options, figures)
    for seed in args.seeds:
        split = split_data(f"by_network:seed={seed}", data)
        for kind in args.of:
            for fraction in args.fractions:
                part = replace(split, train=part_of(data, split.train, kind, fraction, seed))
                for name in args.models:
                    # all of the records are the same whatever they are a part of
                    of = "all" if fraction == 1 else kind
                    key = {"of": of, "fraction": fraction, "seed": seed, "model": name}
                    if results.find(**key) is None:
                        model = make_model(name, seed, **({"config": config} if name == "ours" else {}))
                        score_model(results, model, data, part, key)
    results.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
