"""Training records a second, and error against wall time: our network against CDMPP's as released.

    python benchmarks/training_speed.py --data data --json training_speed.json
    python benchmarks/training_speed.py --quick            # does it run? seconds, figures mean nothing

Both train on the same records and the same split in this process, in turns, each with its own batch size, with a torch
thread a core. A rate is that of one epoch, validation included, as a user pays for it; features are encoded before. The
released network runs without padding in its encoder (see ``CdmppReleased``), as the released code does.

For the error against wall time, each trains anew for every budget, with a learning-rate schedule that ends with it: ours
for as many epochs as its rate says fit, the released network for the budget, or for the time ours took if that was
longer. The error is the validation MAPE of the best epoch; the test part is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor import Config, TrainingData
    from cdmpp.predictor.baselines.fitting import NetworkModel

#: Sizes of the released network for --quick.
_QUICK_SIZES = {
    "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64, "input_dim": 32, "hidden_dims": (32,),
    "embedding_dim": 8, "device_dims": (8,), "decoder_dims": (32,),
}  # fmt: skip


def made_up_data(tasks: int = 8, per_task: int = 40) -> TrainingData:
    """Programs of random leaves whose latency is the sum of one of their columns."""
    import pandas as pd

    from cdmpp.device import get_device
    from cdmpp.predictor import TrainingData
    from cdmpp.program.ast import LEAF_FEATURES, CompactAST

    rng = np.random.default_rng(0)
    device = get_device("this-cpu@1")
    asts, rows = {}, []
    for task in range(tasks):
        n_leaves = 1 + task % 4
        for number in range(per_task):
            leaves = np.exp(rng.uniform(0, 8, (n_leaves, len(LEAF_FEATURES)))).astype(np.float32)
            positions = 3 * np.arange(1, n_leaves + 1, dtype=np.int32)
            asts[f"p{task}_{number}"] = CompactAST(leaves, positions, int(positions[-1]) + 1)
            rows.append((f"p{task}_{number}", f"t{task}", device.name, 1e-6 * float(leaves[:, 0].sum())))
    labels = pd.DataFrame(rows, columns=["program", "task", "device", "latency_s"])
    labels = labels.assign(noise=0.0, origin="random", n_records=1, error_floor=0.0)
    return TrainingData(labels, asts, {device.name: device}, {}, {})


class Ours:
    """Our network under a configuration."""

    name = "cdmpp"

    def __init__(self, config: Config) -> None:
        self._config = config

    def fit(self, data: TrainingData, split: Split, epochs: int) -> list[dict[str, Any]]:
        """Train for so many epochs; returns the history."""
        from cdmpp.predictor.baselines import CdmppModel

        train = self._config.train.model_copy(update={"epochs": epochs, "patience": epochs})
        lines: list[dict[str, Any]] = []
        model = CdmppModel(self._config.model_copy(update={"train": train}), progress=lines.append)
        model.fit(data, split)
        assert model.predictor_ is not None, "it was fitted"
        self.parameters = sum(p.numel() for p in model.predictor_.network.parameters())
        return lines


class Released:
    """CDMPP's network as released."""

    name = "released"

    def __init__(self, seed: int, threads: int, sizes: dict[str, Any] | None) -> None:
        self._seed, self._threads, self._sizes = seed, threads, sizes

    def fit(
        self, data: TrainingData, split: Split, epochs: int, max_seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """Train for so many epochs or so long; returns the history."""
        from cdmpp.predictor.baselines import make_model

        train = {"epochs": epochs, "patience": epochs, "threads": self._threads}
        options = {"sizes": self._sizes} if self._sizes else {}
        model: NetworkModel = make_model(  # type: ignore[assignment]
            "released", self._seed, train=train, max_seconds=max_seconds, **options
        )
        model.fit(data, split)
        assert model.network_ is not None, "it was fitted"
        self.parameters = sum(p.numel() for p in model.network_.parameters())
        return model.history_


def rates(
    ours: Ours, released: Released, data: TrainingData, split: Split, rounds: int
) -> dict[str, list[float]]:
    """Records a second of one epoch of each, in turns."""
    found: dict[str, list[float]] = {ours.name: [], released.name: []}
    for number in range(rounds):
        for side in (ours, released) if number % 2 == 0 else (released, ours):
            found[side.name].append(side.fit(data, split, 1)[-1]["samples_per_s"])
            print(f"round {number} {side.name:9s} {found[side.name][-1]:.0f} records/s", file=sys.stderr)
    return found


def reached(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Where a training ended: seconds, epochs, validation MAPE, and how it went there."""
    elapsed_s = np.cumsum([line["elapsed_s"] for line in history])
    return {
        "seconds": float(elapsed_s[-1]),
        "epochs": len(history),
        "valid_mape": min(line["valid_mape"] for line in history),
        "curve": [
            [round(float(s), 2), line["valid_mape"]] for s, line in zip(elapsed_s, history, strict=True)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", nargs="+", default=["data"], metavar="DIR", help="dataset folders")
    parser.add_argument("--config", metavar="FILE", help="of ours (default: the default configuration)")
    parser.add_argument("--split", metavar="SPEC", help="in place of the configuration's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate-records", type=int, default=3000, metavar="N", help="training records of a rate's epoch"
    )
    parser.add_argument(
        "--budgets", type=float, nargs="*", default=[30.0, 120.0, 480.0], metavar="S", help="wall time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="does it run: made-up programs, tiny networks")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    from cdmpp.predictor import config_from_dict, gather, load_config, split_data

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.quick:
        args.rounds, args.budgets = 1, [0.5]
        config = load_config("configs/smoke.yaml")
        data, spec = made_up_data(), "within_task:seed=0"
    else:
        data, spec = gather(args.data, config.data), args.split or config.split.spec
    cores = len(os.sched_getaffinity(0))
    train = config.train.model_copy(update={"threads": cores, "seed": args.seed})
    split = split_data(spec, data)
    rng = np.random.default_rng(args.seed)
    few, few_valid = args.rate_records, max(2, args.rate_records // 5)
    part = replace(
        split,
        train=np.sort(rng.permutation(split.train)[:few]),
        valid=np.sort(rng.permutation(split.valid)[:few_valid]),
    )
    ours = Ours(config.model_copy(update={"train": train}))
    released = Released(args.seed, cores, _QUICK_SIZES if args.quick else None)
    rate = rates(ours, released, data, part, args.rounds)
    pairs = [a / b for a, b in zip(rate[ours.name], rate[released.name], strict=True)]
    ours_rate, their_rate = (statistics.median(rate[side.name]) for side in (ours, released))

    budgets = []
    for budget_s in args.budgets:
        epochs = max(1, int(budget_s * ours_rate / len(split.train)))
        started = time.perf_counter()
        mine = reached(ours.fit(data, split, epochs))
        theirs = reached(released.fit(data, split, 100_000, max(budget_s, mine["seconds"])))
        budgets.append({"budget_s": budget_s, ours.name: mine, released.name: theirs})
        print(f"budget {budget_s:.0f} s done in {time.perf_counter() - started:.0f} s", file=sys.stderr)

    result = {
        "ratio": statistics.median(pairs),
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
        "ours_records_per_s": ours_rate,
        "released_records_per_s": their_rate,
        "error_at": budgets,
        "parameters": {side.name: side.parameters for side in (ours, released)},
        "records": {"train": len(split.train), "valid": len(split.valid), "of_a_rate": len(part.train)},
        "rounds": args.rounds,
        "split": split.spec,
        "seed": args.seed,
        "torch_threads": cores,
        "quick": args.quick,
        "machine": platform.processor() or platform.machine(),
        "versions": {p: metadata.version(p) for p in ("cdmpp", "torch")},
    }
    print(f"{'':10s}{'records/s':>11s}{'parameters':>13s}")
    for side, value in ((ours, ours_rate), (released, their_rate)):
        print(f"{side.name:10s}{value:11.0f}{side.parameters:13d}")
    print(f"ratio {result['ratio']:.1f} ({min(pairs):.1f} to {max(pairs):.1f} over {args.rounds} rounds)")
    for row in budgets:
        errors = ", ".join(
            f"{side.name} {100 * row[side.name]['valid_mape']:.1f} % ({row[side.name]['epochs']} epochs)"
            for side in (ours, released)
        )
        print(f"after {row['budget_s']:.0f} s: validation MAPE {errors}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
