"""Training records a second, and error against wall time: our network against CDMPP's as released.

    python benchmarks/training_speed.py --data data --json training_speed.json
    python benchmarks/training_speed.py --quick            # does it run? seconds, figures mean nothing

Both train on the same records and split in this process, in turns, each with its own batch size and one torch thread per core.
A rate is that of one epoch, including validation; features are encoded before. The released network runs without padding in
its encoder (see ``CdmppReleased``), as the released code does.

For the error against wall time, each network trains anew for every budget, with a learning-rate schedule that ends with it.
Ours trains for as many epochs as fit at its rate; the released network for the budget, or for the time that ours took if that
is longer. The error is the validation MAPE of the best epoch; the test part is not used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from common import arguments, figure, in_turn, provenance, ratio_figure, report, start

from cdmpp.dataset import Split
from cdmpp.predictor import Config, TrainingData, config_from_dict, gather, load_config, split_data
from cdmpp.predictor.baselines import CdmppModel, make_model

History = list[dict[str, Any]]


def fit_ours(config: Config, data: TrainingData, split: Split, epochs: int) -> History:
    """Train our network for a number of epochs."""
    train = config.train.model_copy(update={"epochs": epochs, "patience": epochs})
    lines: History = []
    CdmppModel(config.model_copy(update={"train": train}), progress=lines.append).fit(data, split)
    return lines


def fit_released(data: TrainingData, split: Split, seed: int, epochs: int, max_seconds: float | None = None) -> History:
    """Train CDMPP's network as released for `epochs`, or at most `max_seconds`."""
    train = {"epochs": epochs, "patience": epochs, "threads": len(os.sched_getaffinity(0))}
    lines: History = []
    make_model("released", seed, train=train, max_seconds=max_seconds, progress=lines.append).fit(data, split)
    return lines


def reached(history: History) -> dict[str, Any]:
    """Time, epochs and best validation MAPE of a training, and its curve: seconds and validation MAPE of every epoch."""
    elapsed_s = np.cumsum([line["elapsed_s"] for line in history]).tolist()
    curve = [[s, line["valid_mape"]] for s, line in zip(elapsed_s, history, strict=True)]
    best = min(mape for _, mape in curve)
    return {"seconds": elapsed_s[-1], "epochs": len(history), "valid_mape": best, "curve": curve}


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.quick:
        args.rounds, args.budgets, args.rate_records, args.split = 1, [], 100, "by_task:seed=0"
        config, args.data = load_config("configs/smoke.yaml"), ["data/epyc-zen4-1core-unscheduled"]
    made = provenance(__file__, args.data, seeds=[args.seed])
    data, spec = gather(args.data, config.data), args.split or config.split.spec
    train = config.train.model_copy(update={"threads": len(os.sched_getaffinity(0)), "seed": args.seed})
    config = config.model_copy(update={"train": train})
    split = split_data(spec, data)
    rng = np.random.default_rng(args.seed)
    few, few_valid = args.rate_records, max(2, args.rate_records // 5)
    train_rows, valid_rows = rng.permutation(split.train)[:few], rng.permutation(split.valid)[:few_valid]
    part = replace(split, train=np.sort(train_rows), valid=np.sort(valid_rows))
    sides: dict[str, Callable[[], History]] = {
        "ours": lambda: fit_ours(config, data, part, 1),
        "released": lambda: fit_released(data, part, args.seed, 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.rounds):
        for name in in_turn(list(sides), turn):
            rates[name].append(sides[name]()[-1]["samples_per_s"])
            print(f"round {turn} {name:9s} {rates[name][-1]:.0f} records/s", file=sys.stderr)
    name = "training records a second against the released network"
    figures = [ratio_figure(name, rates["ours"], rates["released"], more_is_better=True)]
    budgets = []
    for budget_s in args.budgets:
        epochs = max(1, int(budget_s * figures[0]["values"]["ours"] / len(split.train)))
        mine = reached(fit_ours(config, data, split, epochs))
        longest_s = max(budget_s, mine["seconds"])
        theirs = reached(fit_released(data, split, args.seed, 100_000, longest_s))
        budgets.append({"budget_s": budget_s, "ours": mine, "released": theirs})
        values = {"ours": 100 * mine["valid_mape"], "theirs": 100 * theirs["valid_mape"]}
        values |= {"our epochs": mine["epochs"], "their epochs": theirs["epochs"]}
        figures.append(figure(f"validation MAPE in % after {budget_s:.0f} s", values))
    records = {"train": len(split.train), "valid": len(split.valid), "of_a_rate": len(part.train)}
    report(args.json, made, figures, budgets=budgets, records=records, split=split.spec)


if __name__ == "__main__":
    start(main)
