"""Candidates a second: TIR in, predictions out, our cost-model path against TVM's XGBModel on the same candidates.

    python benchmarks/prediction_speed.py --json prediction_speed.json
    python benchmarks/prediction_speed.py --quick          # does it run? seconds, figures mean nothing

Ours is ``Predictor.predict(funcs, device)``: compact ASTs, batching, network. Theirs is ``XGBModel.predict(context,
candidates)``: PerStoreFeature and boosted trees, trained on some candidates first. Both start from scheduled TIR that is
in memory, know none of the programs before, and take turns batch by batch in one process.

Threads are as users get them: XGBModel's trees and TVM's feature extraction use TVM's defaults (one thread a physical
core); ours uses one torch thread a core, and its ASTs are made by one thread, in C++ if the reader can be compiled
(``reader`` in the JSON). The candidates are ordered by task, so that a batch of 64 is of one task mostly, as a tuner
asks for it, and larger ones mix tasks.

The speed of both does not depend on what was learned: without ``--predictor`` the network is one of the default
configuration that saw one epoch of made-up labels. XGBModel is trained on labels made up in the same way (the number of
its trees, which its early stopping decides, is in the JSON).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.program.ast import CompactAST

NETWORKS = (
    "resnet18", "mobilenet_v3", "bert_tiny", "gpt2", "lstm", "unet", "shufflenet_v2", "mlp_mixer", "densenet121",
    "squeezenet",
)  # fmt: skip
BATCH_SIZES = (64, 512, 4096)
DEVICE = "this-cpu@1"


def generate(networks: Sequence[str], count: int, seed: int, max_seconds: float) -> list[Any]:
    """Up to `count` scheduled PrimFuncs, ordered by task: as many of each task as its spaces give in the time."""
    from cdmpp.errors import ProgramError
    from cdmpp.program.space import TaskSpaces
    from cdmpp.program.tasks import extract_tasks

    deadline = time.monotonic() + max_seconds
    tasks = extract_tasks(networks)
    order = np.random.default_rng(seed).permutation(len(tasks))
    funcs: list[Any] = []
    for turn, index in enumerate(order):
        # what earlier tasks could not give, later ones have to
        wanted = -(-(count - len(funcs)) // (len(tasks) - turn))
        try:
            spaces = TaskSpaces(tasks[index])
            by_hash = {space.hash: space for space in spaces.spaces}
            programs = spaces.sample(wanted, seed)
            funcs += [spaces.rebuild(program, by_hash[str(program.space_hash)]) for program in programs]
        except ProgramError as err:
            print(f"task {tasks[index].name} is left out: {err}", file=sys.stderr)
        if time.monotonic() > deadline:
            print(f"{len(funcs)} of {count} candidates in {max_seconds:.0f} s", file=sys.stderr)
            break
    return funcs[:count]


def made_up_latency_s(asts: Sequence[CompactAST]) -> np.ndarray:
    """Seconds that depend on the programs, so that models have something to fit, shape (n,)."""
    from cdmpp.predictor.encoding import signed_log1p

    sums = np.asarray([signed_log1p(ast.leaves).mean(1).sum() for ast in asts])
    return 1e-4 * np.exp((sums - sums.mean()) / max(float(sums.std()), 1e-9))


def barely_trained(asts: Sequence[CompactAST]) -> Predictor:
    """A predictor of the default configuration after one epoch of made-up labels."""
    import pandas as pd

    from cdmpp.device import get_device
    from cdmpp.predictor import TrainingData, config_from_dict, split_data
    from cdmpp.predictor.baselines import CdmppModel

    device = get_device(DEVICE)
    labels = pd.DataFrame(
        {
            "program": [f"p{i}" for i in range(len(asts))],
            "task": [f"t{i % 4}" for i in range(len(asts))],
            "device": device.name,
            "latency_s": made_up_latency_s(asts),
            "noise": 0.0,
            "origin": "random",
            "n_records": 1,
            "error_floor": 0.0,
        }
    )
    programs = dict(zip(labels["program"], asts, strict=True))
    data = TrainingData(labels, programs, {device.name: device}, {}, {})
    model = CdmppModel(config_from_dict({"train": {"epochs": 1}}))
    model.fit(data, split_data("within_task:seed=0", data))
    assert model.predictor_ is not None, "it was fitted"
    return model.predictor_


class TvmXgb:
    """TVM's XGBModel, trained on the first `n_train` candidates."""

    def __init__(self, funcs: Sequence[Any], n_train: int, latency_s: np.ndarray) -> None:
        from cdmpp.program.tvm_env import import_tvm

        tvm = import_tvm()
        from tvm.s_tir import Schedule
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.meta_schedule.cost_model import XGBModel

        mods = [tvm.IRModule({"main": func}) for func in funcs]
        self.candidates = [ms.MeasureCandidate(Schedule(mod), []) for mod in mods]
        self.context = ms.TuneContext(mod=mods[0], target=tvm.target.Target({"kind": "llvm", "num-cores": 1}))
        # with fewer samples than its warm-up wants it would answer at random
        self.model = XGBModel(
            extractor="per-store-feature", num_warmup_samples=min(100, n_train), verbose_eval=False
        )
        results = [ms.runner.RunnerResult([float(s)], None) for s in latency_s[:n_train]]
        self.model.update(self.context, self.candidates[:n_train], results)
        assert self.model.booster is not None, "it was trained"

    def predict(self, begin: int, end: int) -> np.ndarray:
        """Scores of the candidates ``begin:end``."""
        return self.model.predict(self.context, self.candidates[begin:end])


def spread_batches(count: int, size: int, limit: int) -> list[tuple[int, int]]:
    """At most `limit` batches (begin, end) of `size` candidates, evenly over all of them; none if too few."""
    whole = [(begin, begin + size) for begin in range(0, count - size + 1, size)]
    return (
        [
            whole[i]
            for i in np.unique(np.linspace(0, len(whole) - 1, min(limit, len(whole))).round().astype(int))
        ]
        if whole
        else []
    )


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    predictor: Predictor, funcs: Sequence[Any], theirs: TvmXgb, size: int, limit: int, repeats: int
) -> dict[str, Any] | None:
    """Both on the same batches in turns, `repeats` times; None where there are fewer candidates than a batch."""
    from cdmpp.program.ast import compact_asts

    batches = spread_batches(len(funcs), size, limit)
    if not batches:
        return None
    rows: list[tuple[float, float, float]] = []
    for repeat in range(repeats):
        for number, (begin, end) in enumerate(batches):
            part = list(funcs[begin:end])
            sides: dict[str, Callable[[], Any]] = {
                "ours": lambda part=part: predictor.predict(part, DEVICE),
                "tvm": lambda begin=begin, end=end: theirs.predict(begin, end),
            }
            names = list(sides) if (repeat + number) % 2 == 0 else list(sides)[::-1]
            took = {name: seconds(sides[name]) for name in names}
            ast_s = seconds(lambda part=part: compact_asts(part))
            rows.append((took["ours"], took["tvm"], ast_s))
    ours_s, tvm_s, ast_s = (list(column) for column in zip(*rows, strict=True))
    ratios = [tvm / ours for ours, tvm in zip(ours_s, tvm_s, strict=True)]
    return {
        "batch": size,
        "batches": len(batches),
        "ours_candidates_per_s": size / statistics.median(ours_s),
        "xgbmodel_candidates_per_s": size / statistics.median(tvm_s),
        "ours_part_spent_on_asts": statistics.median(a / o for a, o in zip(ast_s, ours_s, strict=True)),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--predictor", metavar="DIR|default", help="a trained one (default: see above)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--candidates", type=int, default=max(BATCH_SIZES), metavar="N")
    parser.add_argument("--train-candidates", type=int, default=512, metavar="N", help="XGBModel learns from")
    parser.add_argument(
        "--batches", type=int, default=8, metavar="N", help="most batches of a size in a repeat"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--generate-seconds", type=float, default=600.0, metavar="S", help="time for making candidates"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="does it run: 64 candidates of one network")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.networks, args.candidates, args.train_candidates = ["mlp"], 64, 32
        args.batches, args.repeats, args.generate_seconds = 1, 1, 60.0

    import torch

    from cdmpp.predictor.predictor import load_predictor
    from cdmpp.program.ast import compact_asts
    from cdmpp.program.native import WORTH_COMPILING, native_reader
    from cdmpp.program.tvm_env import quiet

    reader = "Python" if native_reader(WORTH_COMPILING) is None else "C++"
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    started = time.perf_counter()
    funcs = generate(args.networks, args.candidates, args.seed, args.generate_seconds)
    asts = compact_asts(funcs)
    print(f"{len(funcs)} candidates in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if args.predictor is None:
        predictor, described = (
            barely_trained(asts[:512]),
            "default configuration, one epoch of made-up labels",
        )
    else:
        predictor = load_predictor(args.predictor)
        described = args.predictor
    with quiet():
        theirs = TvmXgb(funcs, min(args.train_candidates, len(funcs)), made_up_latency_s(asts))
    predictor.predict(funcs[:8], DEVICE)  # both are warm
    theirs.predict(0, 8)

    sizes = {}
    print(f"{'batch':>6s}{'cdmpp/s':>12s}{'XGBModel/s':>12s}{'ratio':>8s}")
    for size in BATCH_SIZES:
        found = compare(predictor, funcs, theirs, size, args.batches, args.repeats)
        sizes[size] = found
        if found is None:
            print(f"{size:6d}   needs {size} candidates, {len(funcs)} are there")
            continue
        rates = f"{found['ours_candidates_per_s']:12.0f}{found['xgbmodel_candidates_per_s']:12.0f}"
        spread = f"({found['ratio_min']:.1f} to {found['ratio_max']:.1f})"
        print(f"{size:6d}{rates}{found['ratio']:8.1f}  {spread}")
    result = {
        **{f"ratio_{size}": None if found is None else found["ratio"] for size, found in sizes.items()},
        "sizes": [found for found in sizes.values() if found is not None],
        "candidates": len(funcs),
        "leaves": sum(ast.n_leaves for ast in asts),
        "repeats": args.repeats,
        "predictor": described,
        "xgbmodel": {
            "trained_on": min(args.train_candidates, len(funcs)),
            "trees": theirs.model.booster.num_boosted_rounds(),
            "tree_threads": theirs.model.config.nthread,
            "feature_threads": int(theirs.context.num_threads),
            "note": "threads are TVM's defaults",
        },
        "ours": {"torch_threads": torch.get_num_threads(), "ast_threads": 1, "reader": reader},
        "cores": cores,
        "networks": args.networks,
        "seed": args.seed,
        "quick": args.quick,
        "machine": platform.processor() or platform.machine(),
        "versions": {p: metadata.version(p) for p in ("cdmpp", "apache-tvm", "torch", "xgboost-cpu")},
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
