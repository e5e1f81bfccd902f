"""Milliseconds a program: the compact AST against TVM's PerStoreFeature on the same programs.

    python benchmarks/ast_speed.py --json ast_speed.json

Both run in this process on one thread, in turns, several times over the same scheduled programs of the zoo's tasks (llvm
rules). Making the programs is not timed. A round's ratio is PerStoreFeature's time divided by ours.

The first figure is of tasks never seen before, with few programs each, so that the analyses of their block bodies weigh as
much as they can. A tuner asks one builder for hundreds of programs of a task: ``known tasks`` is a builder that has seen the
tasks, though not the programs' objects. Programs are read by the C++ reader, which is compiled first if it can be (``reader``
in the JSON says which it was); ``read in Python`` is the Python walk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from common import arguments, provenance, ratio_figure, report
from prediction_speed import draw, rebuilt, seconds

if TYPE_CHECKING:
    from cdmpp.profiler.build import BuildJob

NETWORKS = ("resnet18", "mobilenet_v3", "bert_tiny", "gpt2", "lstm", "unet", "shufflenet_v2")


def copies(mods: Sequence[Any]) -> list[Any]:
    """New objects for the same programs: what Python has once touched of a program, it gets faster again."""
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    return list(tvm.ir.load_json(tvm.ir.save_json(list(mods))))


def extraction(groups: Sequence[Sequence[Any]]) -> Callable[[], None]:
    """TVM's PerStoreFeature of groups of programs of one task each, as a tuner asks for them."""
    from cdmpp.program.tvm_env import import_tvm

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


def run(jobs: Sequence[BuildJob], rounds: int, batch: int) -> dict[str, list[float]]:
    """Milliseconds a program of each way in each round."""
    from cdmpp.program.ast import AstBuilder, compact_ast
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    by_task: dict[str, list[Any]] = {}
    for job, func in zip(jobs, rebuilt(jobs), strict=True):
        by_task.setdefault(job.task.hash, []).append(tvm.IRModule({"main": func}))
    groups = [mods[i : i + batch] for mods in by_task.values() for i in range(0, len(mods), batch)]
    mods = [mod for group in groups for mod in group]
    some = mods[:: max(1, len(mods) // 50)]
    extract = extraction(groups)
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any], count: int = len(mods)) -> None:
        took.setdefault(name, []).append(1e3 * seconds(work) / count)

    for _ in range(rounds):
        builder = AstBuilder()  # knows no block bodies yet
        first, second, third = copies(mods), copies(mods), copies(mods)
        timed("new tasks", lambda b=builder, m=first: b.build(m))
        timed("known tasks", lambda b=builder, m=second: b.build(m))
        timed("read in Python", lambda m=third: AstBuilder(native=False).build(m))
        timed("PerStoreFeature", extract)
        timed("one call a program", lambda: [compact_ast(mod) for mod in some], len(some))
    return took


def main() -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--networks", nargs="*", default=list(NETWORKS), help="names of the zoo")
    add("--programs", type=int, default=300)
    add("--rounds", type=int, default=5)
    add("--batch", type=int, default=64, help="programs a call of PerStoreFeature")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    from cdmpp.program.native import WORTH_COMPILING, native_reader

    made = provenance(__file__, seeds=[args.seed])
    jobs = draw(args.networks, args.programs, args.seed)
    reader = "Python" if native_reader(WORTH_COMPILING) is None else "C++"
    took = run(jobs, args.rounds, args.batch)
    theirs = took.pop("PerStoreFeature")
    figures = [
        ratio_figure(f"ms a compact AST against PerStoreFeature, {name}", ours, theirs, more_is_better=False)
        for name, ours in took.items()
    ]
    report(args.json, made, figures, programs=len(jobs), reader=reader, networks=args.networks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
