"""Candidates a second from TIR to predictions, ours against TVM's XGBModel; and compact ASTs against TVM's PerStoreFeature.

    python benchmarks/prediction_speed.py --json prediction_speed.json
    python benchmarks/prediction_speed.py --asts-only --candidates 300 --json ast_speed.json
    python benchmarks/prediction_speed.py --quick          # does it run? seconds, figures mean nothing

Ours is ``Predictor.predict(funcs, device)``: compact ASTs, batching, network. Theirs is ``XGBModel.predict(context,
candidates)``: PerStoreFeature and boosted trees, trained on our predictions for some candidates. Both start from scheduled
TIR in memory, have not seen the programs before, and take turns batch by batch. Threads are the defaults: for TVM one per
physical core, for torch one per core. Candidates are ordered by task, as a tuner requests them. The comparison of ASTs and
PerStoreFeature uses one thread, and tasks and programs that neither has seen.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import Figure, arguments, in_turn, provenance, ratio_figure, report, start

from cdmpp.errors import ProgramError
from cdmpp.predictor import Predictor
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler.engine import BuildJob
from cdmpp.program import import_tvm, quiet
from cdmpp.program.ast import compact_ast, compact_asts
from cdmpp.program.network import extract_tasks
from cdmpp.program.space import Rebuilder, TaskSpaces

NETWORKS = (
    "resnet18", "mobilenet_v3", "bert_tiny", "gpt2", "lstm", "unet", "shufflenet_v2", "mlp_mixer", "densenet121",
    "squeezenet",
)  # fmt: skip
BATCH_SIZES = (64, 512, 4096)
DEVICE = "this-cpu@1"


def draw(networks: Sequence[str], count: int, seed: int, deadline: float = math.inf) -> list[BuildJob]:
    """Draw up to `count` random programs, those of a task together. `deadline` is a monotonic time to stop at."""
    tasks = extract_tasks(networks)
    found: list[BuildJob] = []
    for turn, index in enumerate(np.random.default_rng(seed).permutation(len(tasks))):
        # later tasks make up for what the spaces of earlier ones could not give
        wanted = -(-(count - len(found)) // (len(tasks) - turn))
        task = tasks[index]
        try:
            spaces = TaskSpaces(task)
            programs = spaces.sample(wanted, seed)
            found += [BuildJob(p, task, spaces.space_of(p)) for p in programs]
        except ProgramError as err:
            print(f"task {task.name} is left out: {err}", file=sys.stderr)
        if time.monotonic() > deadline:
            print(f"{len(found)} of {count} programs in the time", file=sys.stderr)
            break
    return found[:count]


def rebuilt(jobs: Sequence[BuildJob]) -> list[Any]:
    """The scheduled PrimFuncs of the programs."""
    rebuild = Rebuilder()
    return [rebuild(job.program, job.task, job.space) for job in jobs]


class TvmXgb:
    """TVM's XGBModel, trained on the first candidates, as many as there are latencies."""

    def __init__(self, funcs: Sequence[Any], latency_s: np.ndarray) -> None:
        tvm = import_tvm()
        from tvm.s_tir import Schedule
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.meta_schedule.cost_model import XGBModel

        mods = [tvm.IRModule({"main": func}) for func in funcs]
        self.candidates = [ms.MeasureCandidate(Schedule(mod), []) for mod in mods]
        self.context = ms.TuneContext(mod=mods[0], target=tvm.target.Target({"kind": "llvm", "num-cores": 1}))
        # with fewer samples than num_warmup_samples its predictions would be random
        warm_up = min(100, len(latency_s))
        self.model = XGBModel(extractor="per-store-feature", num_warmup_samples=warm_up, verbose_eval=False)
        results = [ms.runner.RunnerResult([float(s)], None) for s in latency_s]
        self.model.update(self.context, self.candidates[: len(latency_s)], results)
        assert self.model.booster is not None, "it was trained"

    def predict(self, begin: int, end: int) -> np.ndarray:
        """Scores of the candidates ``begin:end``."""
        return self.model.predict(self.context, self.candidates[begin:end])


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(predictor: Predictor, funcs: Sequence[Any], theirs: TvmXgb, size: int, limit: int, repeats: int) -> Figure:
    """The figure of both on the same batches, measured in turns, `repeats` times."""
    count = len(funcs) // size  # of batches; those measured are spread evenly over them
    batches = [size * int(n) for n in np.unique(np.linspace(0, count - 1, min(limit, count)).round())]
    rates: dict[str, list[float]] = {"ours": [], "tvm": []}
    ast_parts = []
    for repeat in range(repeats):
        for turn, begin in enumerate(batches):
            part = list(funcs[begin : begin + size])
            sides: dict[str, Callable[[], Any]] = {
                "ours": lambda part=part: predictor.predict(part, DEVICE),
                "tvm": lambda begin=begin: theirs.predict(begin, begin + size),
            }
            for name in in_turn(list(sides), repeat + turn):
                rates[name].append(size / seconds(sides[name]))
            ast_parts.append(seconds(lambda part=part: compact_asts(part)) * rates["ours"][-1] / size)
    name = f"candidates a second against XGBModel, batches of {size}"
    found = ratio_figure(name, rates["ours"], rates["tvm"], more_is_better=True)
    found["values"]["part of ours spent on ASTs"] = float(np.median(ast_parts))
    return found


def extraction(groups: Sequence[Sequence[Any]]) -> Callable[[], None]:
    """A function that extracts TVM's PerStoreFeature from groups of programs, one task each, as a tuner does."""
    tvm = import_tvm()
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    context = ms.TuneContext(target=tvm.target.Target({"kind": "llvm", "num-cores": 1}), num_threads=1)
    extractor = PerStoreFeature()
    candidates = [[ms.MeasureCandidate(Schedule(mod), []) for mod in group] for group in groups]

    def extract() -> None:
        for group in candidates:
            extractor.extract_from(context, group)

    return extract


def compare_asts(jobs: Sequence[BuildJob], funcs: Sequence[Any], rounds: int) -> list[Figure]:
    """Milliseconds per compact AST and per PerStoreFeature, measured in turns, `rounds` times."""
    tvm = import_tvm()
    by_task: dict[str, list[Any]] = {}
    for job, func in zip(jobs, funcs, strict=True):
        by_task.setdefault(job.task.hash, []).append(tvm.IRModule({"main": func}))
    groups = [mods[i : i + 64] for mods in by_task.values() for i in range(0, len(mods), 64)]
    mods = [mod for group in groups for mod in group]
    some = mods[:: max(1, len(mods) // 50)]
    extract = extraction(groups)
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any], count: int = len(mods)) -> None:
        took.setdefault(name, []).append(1e3 * seconds(work) / count)

    for _ in range(rounds):
        untouched = list(tvm.ir.load_json(tvm.ir.save_json(mods)))  # objects that Python has accessed before are faster
        timed("new tasks", lambda m=untouched: compact_asts(m))
        timed("PerStoreFeature", extract)
        timed("one call a program", lambda: [compact_ast(mod) for mod in some], len(some))
    theirs = took.pop("PerStoreFeature")
    name = "ms a compact AST against PerStoreFeature"
    return [ratio_figure(f"{name}, {way}", ours, theirs, more_is_better=False) for way, ours in took.items()]


def main() -> None:
    given = {"networks": {"default": list(NETWORKS)}, "candidates": {"default": max(BATCH_SIZES)}}
    args = arguments(__doc__, __file__, **given).parse_args()
    if args.quick:
        args.networks, args.candidates, args.train_candidates = ["mlp"], 64, 32
        args.batches, args.repeats, args.rounds, args.generate_seconds = 1, 1, 1, 60.0

    import torch

    made = provenance(__file__, weights=None if args.asts_only else args.predictor, seeds=[args.seed])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    deadline = time.monotonic() + args.generate_seconds
    jobs = draw(args.networks, args.candidates, args.seed, deadline)
    funcs = rebuilt(jobs)
    detail = {"candidates": len(funcs), "networks": args.networks}
    if args.asts_only:
        report(args.json, made, compare_asts(jobs, funcs, args.rounds), **detail)
        return
    asts = compact_asts(funcs)
    predictor = load_predictor(args.predictor)
    labels_s = predictor.predict(asts[: args.train_candidates], DEVICE)
    with quiet():
        theirs = TvmXgb(funcs, labels_s)
    predictor.predict(funcs[:8], DEVICE)  # warms up both
    theirs.predict(0, 8)

    sizes = [size for size in BATCH_SIZES if size <= len(funcs)]
    figures = [compare(predictor, funcs, theirs, size, args.batches, args.repeats) for size in sizes]
    figures += compare_asts(jobs[::4], funcs[::4], args.rounds)
    detail |= {"torch_threads": torch.get_num_threads(), "trees": theirs.model.booster.num_boosted_rounds()}
    report(args.json, made, figures, **detail)


if __name__ == "__main__":
    start(main)
