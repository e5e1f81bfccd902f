"""Candidates a second: TIR in, predictions out, our cost-model path against TVM's XGBModel on the same candidates.

    python benchmarks/prediction_speed.py --json prediction_speed.json
    python benchmarks/prediction_speed.py --quick          # does it run? seconds, figures mean nothing

Ours is ``Predictor.predict(funcs, device)``: compact ASTs, batching, network. Theirs is ``XGBModel.predict(context,
candidates)``: PerStoreFeature and boosted trees, trained on what ours predicts of some candidates (what was learned does not
change the speed, but for the number of trees, which is in the JSON). Both start from scheduled TIR that is in memory, know
none of the programs before, and take turns batch by batch in one process.

Threads are as users get them: TVM's defaults (one a physical core); for ours one torch thread a core, and one for ASTs. The
candidates are ordered by task, so that a batch of 64 is of one task mostly, as a tuner asks for it, and larger ones mix tasks.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from common import Figure, arguments, provenance, ratio_figure, report

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.build import BuildJob

NETWORKS = (
    "resnet18", "mobilenet_v3", "bert_tiny", "gpt2", "lstm", "unet", "shufflenet_v2", "mlp_mixer", "densenet121",
    "squeezenet",
)  # fmt: skip
BATCH_SIZES = (64, 512, 4096)
DEVICE = "this-cpu@1"


def draw(networks: Sequence[str], count: int, seed: int, deadline: float = math.inf) -> list[BuildJob]:
    """Up to `count` random programs, those of a task together: as many of each as its spaces give until the monotonic time."""
    from cdmpp.errors import ProgramError
    from cdmpp.profiler.build import BuildJob
    from cdmpp.program.space import TaskSpaces
    from cdmpp.program.tasks import extract_tasks

    tasks = extract_tasks(networks)
    found: list[BuildJob] = []
    for turn, index in enumerate(np.random.default_rng(seed).permutation(len(tasks))):
        # what earlier tasks could not give, later ones have to
        wanted = -(-(count - len(found)) // (len(tasks) - turn))
        task = tasks[index]
        try:
            spaces = TaskSpaces(task)
            by_hash = {space.hash: space for space in spaces.spaces}
            programs = spaces.sample(wanted, seed)
            found += [BuildJob(p, task, by_hash[str(p.space_hash)]) for p in programs]
        except ProgramError as err:
            print(f"task {task.name} is left out: {err}", file=sys.stderr)
        if time.monotonic() > deadline:
            print(f"{len(found)} of {count} programs in the time", file=sys.stderr)
            break
    return found[:count]


def rebuilt(jobs: Sequence[BuildJob]) -> list[Any]:
    """Scheduled PrimFuncs."""
    from cdmpp.program.space import Rebuilder

    rebuild = Rebuilder()
    return [rebuild(job.program, job.task, job.space) for job in jobs]


class TvmXgb:
    """TVM's XGBModel, trained on the first candidates: those that have a latency."""

    def __init__(self, funcs: Sequence[Any], latency_s: np.ndarray) -> None:
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
            extractor="per-store-feature", num_warmup_samples=min(100, len(latency_s)), verbose_eval=False
        )
        results = [ms.runner.RunnerResult([float(s)], None) for s in latency_s]
        self.model.update(self.context, self.candidates[: len(latency_s)], results)
        assert self.model.booster is not None, "it was trained"

    def predict(self, begin: int, end: int) -> np.ndarray:
        """Scores of the candidates ``begin:end``."""
        return self.model.predict(self.context, self.candidates[begin:end])


def spread_batches(count: int, size: int, limit: int) -> list[tuple[int, int]]:
    """At most `limit` batches (begin, end) of `size` candidates, evenly over all of them; none if too few."""
    whole = [(begin, begin + size) for begin in range(0, count - size + 1, size)]
    if not whole:
        return []
    chosen = np.unique(np.linspace(0, len(whole) - 1, min(limit, len(whole))).round().astype(int))
    return [whole[i] for i in chosen]


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    predictor: Predictor, funcs: Sequence[Any], theirs: TvmXgb, size: int, limit: int, repeats: int
) -> Figure | None:
    """Both on the same batches in turns, `repeats` times; None where there are fewer candidates than a batch."""
    from cdmpp.program.ast import compact_asts

    batches = spread_batches(len(funcs), size, limit)
    rates: dict[str, list[float]] = {"ours": [], "tvm": []}
    ast_parts = []
    for repeat in range(repeats):
        for turn, (begin, end) in enumerate(batches):
            part = list(funcs[begin:end])
            sides: dict[str, Callable[[], Any]] = {
                "ours": lambda part=part: predictor.predict(part, DEVICE),
                "tvm": lambda begin=begin, end=end: theirs.predict(begin, end),
            }
            for name in list(sides) if (repeat + turn) % 2 == 0 else list(sides)[::-1]:
                rates[name].append(size / seconds(sides[name]))
            ast_parts.append(seconds(lambda part=part: compact_asts(part)) * rates["ours"][-1] / size)
    if not batches:
        return None
    name = f"candidates a second against XGBModel, batches of {size}"
    found = ratio_figure(name, rates["ours"], rates["tvm"], more_is_better=True)
    found["values"]["part of ours spent on ASTs"] = float(np.median(ast_parts))
    return found


def main() -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--predictor", default="default", metavar="DIR")
    add("--networks", nargs="+", default=list(NETWORKS), metavar="NETWORK")
    add("--candidates", type=int, default=max(BATCH_SIZES), metavar="N")
    add("--train-candidates", type=int, default=512, metavar="N", help="XGBModel learns from")
    add("--batches", type=int, default=8, metavar="N", help="most batches of a size in a repeat")
    add("--repeats", type=int, default=5)
    add("--generate-seconds", type=float, default=600.0, metavar="S", help="time for making candidates")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="does it run: 64 candidates of one network")
    args = parser.parse_args()
    if args.quick:
        args.networks, args.candidates, args.train_candidates = ["mlp"], 64, 32
        args.batches, args.repeats, args.generate_seconds = 1, 1, 60.0

    import torch

    from cdmpp.predictor.predictor import load_predictor
    from cdmpp.program.ast import compact_asts
    from cdmpp.program.native import WORTH_COMPILING, native_reader
    from cdmpp.program.tvm_env import quiet

    made = provenance(__file__, weights=args.predictor, seeds=[args.seed])
    reader = "Python" if native_reader(WORTH_COMPILING) is None else "C++"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    deadline = time.monotonic() + args.generate_seconds
    funcs = rebuilt(draw(args.networks, args.candidates, args.seed, deadline))
    asts = compact_asts(funcs)
    predictor = load_predictor(args.predictor)
    labels_s = predictor.predict(asts[: args.train_candidates], DEVICE)
    with quiet():
        theirs = TvmXgb(funcs, labels_s)
    predictor.predict(funcs[:8], DEVICE)  # both are warm
    theirs.predict(0, 8)

    found = [compare(predictor, funcs, theirs, size, args.batches, args.repeats) for size in BATCH_SIZES]
    report(
        args.json,
        made,
        [shown for shown in found if shown is not None],
        candidates=len(funcs),
        networks=args.networks,
        xgbmodel={
            "trained_on": len(labels_s),
            "trees": theirs.model.booster.num_boosted_rounds(),
            "tree_threads": theirs.model.config.nthread,
            "feature_threads": int(theirs.context.num_threads),
        },
        ours={"torch_threads": torch.get_num_threads(), "ast_threads": 1, "reader": reader},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
