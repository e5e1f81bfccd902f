"""What each part of the predictor brings: the error without it, on the same records, split and seeds.

    python benchmarks/ablation.py --data data --json ablation.json

Starts from the shipped configuration and changes one thing at a time; the last lines compare the compact AST's features with
TVM's PerStoreFeature under one model (gradient-boosted trees). The split keeps a part of the held-out networks' programs
to adapt to (``adapt``), unlabelled, so that CMD has something to align with; it is the same for every variant, and none is
scored on it. A variant's second row is the same predictor told the compiled code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from accuracy import COMPILED, keep, scored_compiled, table
from kept_rows import KeptRows

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


def main() -> int:
    from cdmpp.predictor import config_from_dict, gather, load_config, split_data
    from cdmpp.predictor.baselines import CdmppModel, evaluate_models, make_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", nargs="+", default=["data"], metavar="DIR")
    parser.add_argument("--config", default="configs/cpu.yaml", help="the base")
    parser.add_argument("--split", default=SPLIT, help="without the seed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    base = load_config(args.config).model_dump(mode="json")
    data = gather(args.data)
    results = KeptRows(
        args.json, {"data": args.data, "records": len(data), "split": args.split, "base": base}
    )
    for seed in args.seeds:
        split = split_data(f"{args.split};seed={seed}", data)
        done: dict[str, str] = {}
        for variant in args.variants:
            values = {s: {**v, **VARIANTS[variant].get(s, {})} for s, v in base.items()}
            config = config_from_dict(values)
            key = {"split": "ablation", "seed": seed, "model": variant}
            # A variant that is the base already is not trained again.
            twin = done.setdefault(config.model_dump_json(), variant)
            if results.find(**key) is not None or twin != variant:
                continue
            model = make_model("ours", seed, config=config)
            (found,) = evaluate_models([model], data, split).values()
            assert isinstance(model, CdmppModel) and model.predictor_ is not None
            told = scored_compiled(model.predictor_, data, split)
            if told is not None:
                keep(results, told, **{**key, "model": f"{variant} ({COMPILED})"})
            keep(results, {**found["overall"], "fit_s": found["fit_s"], "spec": split.spec}, **key)
        for name in FEATURE_MODELS:
            key = {"split": "ablation", "seed": seed, "model": name}
            if results.find(**key) is None:
                (found,) = evaluate_models([make_model(name, seed)], data, split).values()
                keep(results, {**found["overall"], "fit_s": found["fit_s"], "spec": split.spec}, **key)
    print(table(results.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
