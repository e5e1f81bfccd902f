"""What each part of the predictor brings: the error without it, on the same records, split and seeds.

    python benchmarks/ablation.py --data data --json ablation.json

Starts from a configuration and changes one thing at a time; the last lines compare the compact AST's features with TVM's
PerStoreFeature under one model (gradient-boosted trees). The split keeps a part of the held-out networks' programs to adapt
to (``adapt``), unlabelled, so that CMD has something to align with; it is the same for every variant, and none is scored on
it. A variant's second row is the same predictor given the compiled code.
"""

from __future__ import annotations

import sys
from typing import Any

from accuracy import score_model
from common import TITLES, Figure, Results, Row, arguments, mean_figure, provenance

from cdmpp.predictor import config_from_dict, gather, load_config, split_data
from cdmpp.predictor.baselines import make_model

#: Variant -> what differs from the base configuration, by section.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {},
    "no positional encoding": {"model": {"positional": "none"}},
    "paper's positional encoding": {"model": {"positional": "paper"}},
    "standard positional encoding": {"model": {"positional": "standard"}},
    "no CMD": {"loss": {"cmd_weight": 0.0}},
    "CMD 0.1": {"loss": {"cmd_weight": 0.1}},
    "no ranking term": {"loss": {"rank_weight": 0.0}},
    "ranking term 0.3": {"loss": {"rank_weight": 0.3}},
    "no device features": {"model": {"device": "none"}},
    "absolute labels": {"label": {"relative_to": "none"}},
    "labels relative to the roofline": {"label": {"relative_to": "roofline"}},
    "labels relative to the estimate": {"label": {"relative_to": "estimate"}},
    "Box-Cox labels": {"label": {"transform": "box-cox"}},
    "log labels": {"label": {"transform": "log"}},
    "no piecewise-linear encoding": {"model": {"bins": 0}},
    "no instruction counts": {"loss": {"codegen_weight": 0.0}},
    "flatten": {"model": {"pooling": "flatten"}},
    "sum pooling": {"model": {"pooling": "sum"}},
    "mean pooling": {"model": {"pooling": "mean"}},
    "attention pooling": {"model": {"pooling": "attention"}},
}
#: The networks that the configurations that ship hold out and validate with.
SPLIT = "by_network:heldout=densenet121+gcn+inception_v3+vgg16;valid=efficientnet_b0+gpt2+mlp_mixer+unet;adapt=0.3"
FEATURE_MODELS = ("xgboost-ast", "xgboost-perstore")


def figures(rows: list[Row]) -> list[Figure]:
    """One of each variant: the mean over its seeds."""
    names = dict.fromkeys(row["model"] for row in rows)
    return [mean_figure(name, [row for row in rows if row["model"] == name], TITLES) for name in names]


def main() -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--data", nargs="+", default=["data"], metavar="DIR")
    add("--config", default="configs/cpu.yaml", help="the base")
    add("--split", default=SPLIT, help="without the seed")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()

    base = load_config(args.config).model_dump(mode="json")
    data = gather(args.data)
    options = {"records": len(data), "split": args.split, "config": base}
    results = Results(args.json, provenance(__file__, args.data, seeds=args.seeds), options, figures)
    for seed in args.seeds:
        split = split_data(f"{args.split};seed={seed}", data)
        done: dict[str, str] = {}
        for variant in args.variants:
            values = {s: {**v, **VARIANTS[variant].get(s, {})} for s, v in base.items()}
            config = config_from_dict(values)
            key = {"split": "ablation", "seed": seed, "model": variant}
            # a variant that is the base already is not trained again
            twin = done.setdefault(config.model_dump_json(), variant)
            if results.find(**key) is None and twin == variant:
                model = make_model("ours", seed, config=config)
                score_model(results, model, data, split, key, measured=False)
        for name in FEATURE_MODELS:
            key = {"split": "ablation", "seed": seed, "model": name}
            if results.find(**key) is None:
                score_model(results, make_model(name, seed), data, split, key)
    results.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
