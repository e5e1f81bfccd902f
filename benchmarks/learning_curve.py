"""What more data would bring: held-out error against the part of the training records that models get.

    python benchmarks/learning_curve.py --data data --json learning_curve.json
    python benchmarks/learning_curve.py --devices epyc-zen4-2.6ghz@1 --models xgboost-ast-codegen

A ``by_network`` split as in ``benchmarks/accuracy.py``; of its training part a fraction is kept, drawn by the seed: of the
tasks with all their programs (``tasks``), of the programs of every task (``programs``), or of the networks with all their
tasks (``networks``). Validation and test stay as they are. Which of these helps most says what to collect.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accuracy import keep, scored_told
from kept_rows import KeptRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cdmpp.predictor import TrainingData

KINDS = ("tasks", "programs", "networks")


def part_of(
    data: TrainingData, rows: NDArray[np.int64], kind: str, fraction: float, seed: int
) -> NDArray[np.int64]:
    """The rows, sorted int64, that are left of these when a fraction of what ``kind`` names is kept."""
    from cdmpp.dataset.split import architecture

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


def main() -> int:
    from cdmpp.predictor import gather, load_config, split_data
    from cdmpp.predictor.baselines import COMPILED_NAMES, MODEL_NAMES, CdmppModel, evaluate_models, make_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", nargs="+", default=["data"], metavar="DIR")
    parser.add_argument("--config", default="configs/demo.yaml", help="of our predictor")
    parser.add_argument("--devices", nargs="+", metavar="D", help="records of these alone (default: all)")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["ours", "xgboost-ast-codegen"],
        choices=MODEL_NAMES + COMPILED_NAMES,
    )
    parser.add_argument("--of", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.25, 0.5, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not all(0 < fraction <= 1 for fraction in args.fractions):
        parser.error("fractions are above 0 and at most 1")

    config = load_config(args.config)
    data = gather(args.data, config.data.model_copy(update={"devices": args.devices}))
    results = KeptRows(args.json, {"data": args.data, "devices": sorted(data.devices), "records": len(data)})
    for seed in args.seeds:
        split = split_data(f"by_network:seed={seed}", data)
        for kind in args.of:
            for fraction in args.fractions:
                part = replace(split, train=part_of(data, split.train, kind, fraction, seed))
                for name in args.models:
                    # all of the records are the same whatever they are a part of
                    key = {
                        "of": "all" if fraction == 1 else kind,
                        "fraction": fraction,
                        "seed": seed,
                        "model": name,
                    }
                    if results.find(**key) is not None:
                        continue
                    model = make_model(name, seed, **({"config": config} if name == "ours" else {}))
                    (found,) = evaluate_models([model], data, part).values()
                    if isinstance(model, CdmppModel):
                        for told, overall in scored_told(model.predictor_, data, part).items():
                            keep(results, {**overall, "n_train": len(part.train)}, **{**key, "model": told})
                    keep(results, {**found["overall"], "n_train": len(part.train)}, **key)
    return 0


if __name__ == "__main__":
    sys.exit(main())
