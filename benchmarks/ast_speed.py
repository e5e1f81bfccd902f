"""Programs a second: the compact AST against TVM's PerStoreFeature on the same programs.

    python benchmarks/ast_speed.py --out ast_speed.json

Both run in this process on one thread, in turns, several times over the same scheduled programs of the zoo's
tasks (llvm rules). Making the programs is not timed. Prints a table; the JSON has ``ratio`` (median over the
rounds of PerStoreFeature's time divided by ours), its spread, the machine and the versions.

``ratio`` is that of tasks never seen before, with few programs each, so that the analyses of their block bodies
weigh as much as they can. A tuner asks one builder for hundreds of programs of a task: ``ratio_known_tasks`` is
that of a builder that has seen the tasks, though not the programs' objects. Programs are read by the C++ reader, which
is compiled first if it can be (``reader`` in the JSON says which it was); ``ratio_python`` is that of the Python walk.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

DEFAULT_NETWORKS = ("resnet18", "mobilenet_v3", "bert_tiny", "gpt2", "lstm", "unet", "shufflenet_v2")


def sample_programs(networks: list[str], count: int, seed: int) -> list[tuple[str, Any]]:
    """(task name, scheduled IRModule), spread evenly over the tasks of the networks."""
    from cdmpp.errors import ProgramError
    from cdmpp.program.space import TaskSpaces
    from cdmpp.program.tasks import extract_tasks
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    tasks = extract_tasks(networks)
    per_task = max(4, -(-count // len(tasks)))
    found: list[tuple[str, Any]] = []
    for task in tasks:
        try:
            spaces = TaskSpaces(task, "llvm", num_cores=1)
            by_hash = {space.hash: space for space in spaces.spaces}
            for program in spaces.sample(per_task, seed=seed):
                func = spaces.rebuild(program, by_hash[program.space_hash or ""])
                found.append((task.name, tvm.IRModule({"main": func})))
        except ProgramError:
            continue
        if len(found) >= 4 * count:
            break
    step = max(1, len(found) // count)
    return found[::step][:count]


def batches(programs: list[tuple[str, Any]], size: int) -> list[list[Any]]:
    """Modules in batches, as a tuner asks for them: of one task each, at most `size`."""
    by_task: dict[str, list[Any]] = {}
    for task, mod in programs:
        by_task.setdefault(task, []).append(mod)
    return [mods[i : i + size] for mods in by_task.values() for i in range(0, len(mods), size)]


def copies(mods: list[Any]) -> list[Any]:
    """New objects for the same programs: what Python has once touched of a program, it gets faster again."""
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    return list(tvm.ir.load_json(tvm.ir.save_json(mods)))


def compiled_reader() -> str:
    """Compile the C++ reader if it has not been; which reader there is: "C++" or "Python"."""
    from cdmpp.program.native import WORTH_COMPILING, native_reader

    return "Python" if native_reader(WORTH_COMPILING) is None else "C++"


def run(programs: list[tuple[str, Any]], rounds: int, batch: int) -> dict[str, Any]:
    """Time both on the same programs in turns."""
    from cdmpp.program.ast import AstBuilder, compact_ast
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    context = ms.TuneContext(target=tvm.target.Target({"kind": "llvm", "num-cores": 1}), num_threads=1)
    extractor = PerStoreFeature()
    groups = batches(programs, batch)
    candidates = [[ms.MeasureCandidate(Schedule(mod), []) for mod in group] for group in groups]
    mods = [mod for _, mod in programs]
    ours: list[float] = []
    known: list[float] = []
    walked: list[float] = []
    theirs: list[float] = []
    single: list[float] = []
    everything = [mod for group in groups for mod in group]
    for _ in range(rounds):
        builder = AstBuilder()  # knows no block bodies yet
        first, second = copies(everything), copies(everything)
        start = time.perf_counter()
        asts = builder.build(first)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        builder.build(second)
        known.append(time.perf_counter() - start)
        third = copies(everything)
        start = time.perf_counter()
        AstBuilder(native=False).build(third)
        walked.append(time.perf_counter() - start)
        start = time.perf_counter()
        for group in candidates:
            extractor.extract_from(context, group)
        theirs.append(time.perf_counter() - start)
        start = time.perf_counter()
        for mod in mods[:: max(1, len(mods) // 50)]:
            compact_ast(mod)
        single.append((time.perf_counter() - start) / len(mods[:: max(1, len(mods) // 50)]))
    ratios = [t / o for t, o in zip(theirs, ours, strict=True)]
    known_ratios = [t / o for t, o in zip(theirs, known, strict=True)]
    python_ratios = [t / o for t, o in zip(theirs, walked, strict=True)]
    n = len(everything)
    return {
        "programs": n,
        "leaves": sum(ast.n_leaves for ast in asts),
        "rounds": rounds,
        "ours_ms": statistics.median(ours) / n * 1e3,
        "ours_known_tasks_ms": statistics.median(known) / n * 1e3,
        "ours_python_ms": statistics.median(walked) / n * 1e3,
        "per_store_feature_ms": statistics.median(theirs) / n * 1e3,
        "ours_one_by_one_ms": statistics.median(single) * 1e3,
        "ours_programs_per_s": n / statistics.median(ours),
        "per_store_feature_programs_per_s": n / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_known_tasks": statistics.median(known_ratios),
        "ratio_known_tasks_min": min(known_ratios),
        "ratio_known_tasks_max": max(known_ratios),
        "ratio_python": statistics.median(python_ratios),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import version

    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    packages = ("apache-tvm", "apache-tvm-ffi", "numpy")
    return {"cpu": cpu, "python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--networks", nargs="*", default=list(DEFAULT_NETWORKS), help="names of the zoo")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="programs a call of PerStoreFeature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    programs = sample_programs(args.networks, args.programs, args.seed)
    reader = compiled_reader()
    result = run(programs, args.rounds, args.batch)
    result |= {"reader": reader, "networks": args.networks, "seed": args.seed, "machine": machine()}
    print(f"{'':24}{'ms a program':>14}{'programs/s':>14}")
    print(f"{'compact AST':24}{result['ours_ms']:14.3f}{result['ours_programs_per_s']:14.0f}")
    known = result["ours_known_tasks_ms"]
    print(f"{'  known tasks':24}{known:14.3f}{1e3 / known:14.0f}")
    print(
        f"{'  one call a program':24}{result['ours_one_by_one_ms']:14.3f}{1e3 / result['ours_one_by_one_ms']:14.0f}"
    )
    print(f"{'  read in Python':24}{result['ours_python_ms']:14.3f}{1e3 / result['ours_python_ms']:14.0f}")
    per_store = result["per_store_feature_ms"], result["per_store_feature_programs_per_s"]
    print(f"{'TVM PerStoreFeature':24}{per_store[0]:14.3f}{per_store[1]:14.0f}")
    print(
        f"ratio {result['ratio']:.1f} ({result['ratio_min']:.1f} to {result['ratio_max']:.1f} over {args.rounds} rounds), "
        f"of known tasks {result['ratio_known_tasks']:.1f} ({result['ratio_known_tasks_min']:.1f} to "
        f"{result['ratio_known_tasks_max']:.1f}), {result['programs']} programs, {result['leaves']} leaves"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
