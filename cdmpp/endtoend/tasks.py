"""Predicting the tasks of a network: which program runs for each, and its latency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.endtoend.graph import NetworkTasks
from cdmpp.errors import PredictorError, ProgramError, TunerError
from cdmpp.predictor import Predictor
from cdmpp.predictor.evidence import NO_EVIDENCE, Evidence
from cdmpp.predictor.predictor import COVERAGE, Pairs, prediction_note, seconds_interval
from cdmpp.profiler.core_rates import with_known_clock
from cdmpp.program import import_tvm, quiet
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.network import Network, extract_tasks, load_network
from cdmpp.program.space import TaskSpaces
from cdmpp.program.types import Task
from cdmpp.tuner.results import RECORD_FILE, TUNING_FILE, WORKLOAD_FILE, json_database

#: The unscheduled PrimFunc. LLVM compiles its loops as they are; on a GPU it stands for what a vendor library runs.
UNTUNED = "untuned"
#: The random program that is predicted fastest.
BEST = "best"


class Candidates(NamedTuple):
    """Programs of one task, at least one; the one that is predicted fastest runs."""

    #: PrimFuncs.
    funcs: Sequence[Any]
    asts: Sequence[CompactAST]
    #: ``untuned``, ``library``, ``random`` (points of the design space) or ``database``.
    origin: str


class TaskLatency(NamedTuple):
    """Prediction for the program that runs for a task."""

    latency_s: float
    #: Whether it is far from the training data; None where the predictor cannot tell.
    unfamiliar: bool | None
    #: As in :class:`Candidates`.
    origin: str
    #: Width of its interval in log seconds, relative to the usual width.
    difficulty: float = 1.0


class Fastest(NamedTuple):
    """Predictions for all candidates, and the fastest candidate of each task."""

    #: (candidates,)
    latency_s: NDArray[np.float64]
    #: (tasks,): indices of the fastest candidates, and the evidence about these besides their ASTs.
    best: NDArray[np.int64]
    evidence: Evidence


def fastest(
    predictor: Predictor,
    network: str,
    tasks: Mapping[str, Task],
    programs: Mapping[str, Candidates],
    device: Device,
    compile_best: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fastest:
    """Find the fastest of each task's candidates, by task hash. With `compile_best`, that many of the best predicted ones are
    compiled (not run) and predicted again from their instructions, and the fastest of these counts. Raises PredictorError if a
    prediction is not a latency."""
    _check_number(compile_best)
    owners = np.repeat(list(programs), [len(item.asts) for item in programs.values()])
    funcs = [func for item in programs.values() for func in item.funcs]
    asts = [ast for item in programs.values() for ast in item.asts]

    def checked(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        wrong = ~(np.isfinite(seconds) & (seconds > 0))
        if wrong.any():
            task = tasks[owners[wrong][0]]
            raise PredictorError(
                f"the predictor says {seconds[wrong][0]} s for task {task.name} ({task.hash}) of {network} on {device.name}: "
                "no latency can be made of it"
            )
        return seconds

    seconds = checked(np.array(predictor.predict(asts, device), dtype=np.float64))
    kept, evidence = np.arange(len(asts)), NO_EVIDENCE
    if compile_best:
        kept = np.flatnonzero(pd.Series(seconds).groupby(owners, sort=False).rank(method="first") <= compile_best)
        evidence = predictor.evidence([funcs[i] for i in kept], device, compiled=True, progress=progress)
        seconds[kept] = predictor.predict_asts([asts[i] for i in kept], device, evidence)
        checked(seconds)
    best = pd.Series(seconds[kept]).groupby(owners[kept], sort=False).idxmin().to_numpy()
    return Fastest(seconds, kept[best], evidence.take(best.tolist()))


def _check_number(compile_best: int) -> None:
    if compile_best < 0:
        raise PredictorError(f"compile_best must be 0 or more, got {compile_best}")


def predict_tasks(
    predictor: Predictor,
    source: NetworkTasks,
    programs: Mapping[str, Candidates],
    device: Device,
    compile_best: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, TaskLatency], Evidence]:
    """Predict each task's program, as :func:`fastest` chooses it; also returns the evidence about these besides their ASTs."""
    found = fastest(predictor, source.graph.name, source.tasks, programs, device, compile_best, progress)
    asts = [ast for item in programs.values() for ast in item.asts]
    chosen = [asts[i] for i in found.best]
    flags = [None] * len(chosen) if predictor.familiarity is None else predictor.unfamiliar(chosen, device).tolist()
    difficulty = predictor.difficulty(Pairs.of(chosen, device, found.evidence))
    return {
        task: TaskLatency(float(found.latency_s[i]), far, item.origin, float(d))
        for (task, item), i, far, d in zip(programs.items(), found.best, flags, difficulty, strict=True)
    }, found.evidence


def candidates(
    source: NetworkTasks, schedule: str | Path, device: Device, programs_per_task: int = 64, seed: int = 0
) -> tuple[dict[str, Candidates], list[str]]:
    """Programs of each task by its hash, and notes about them.

    The schedule is :data:`UNTUNED`, :data:`BEST` (of `programs_per_task`, by `seed`), or the folder of a MetaSchedule JSON
    database; tasks without a schedule in it stay untuned. Raises TunerError if there is no such schedule, or if a library runs
    the tasks and the schedule is not :data:`UNTUNED`."""
    kind = str(schedule)
    if source.library and kind != UNTUNED:
        raise TunerError(f"schedule {kind}: the tasks of an imported trace are run by a library, which has its own")
    origin = "library" if source.library else UNTUNED
    funcs = {task.hash: ([task.prim_func()], origin) for task in source.tasks.values()}
    notes: list[str] = []
    if kind == BEST:
        drawn = {task: random_programs(source.tasks[task], device, programs_per_task, seed) for task in funcs}
        funcs |= {task: (programs, "random") for task, programs in drawn.items() if programs}
        if lacking := sum(not programs for programs in drawn.values()):
            notes.append(f"{lacking} tasks have no design space and are as they are")
    elif kind != UNTUNED:
        tuned = _of_database(Path(schedule), source.tasks.values(), device, notes)
        funcs |= {task: ([func], "database") for task, func in tuned.items()}
        if lacking := len(funcs) - len(tuned):
            notes.append(f"{lacking} of {len(funcs)} tasks are not in {schedule} and are untuned")
    asts = iter(compact_asts([func for programs, _ in funcs.values() for func in programs]))
    return {
        task: Candidates(programs, [next(asts) for _ in programs], origin) for task, (programs, origin) in funcs.items()
    }, notes


def random_programs(task: Task, device: Device, n: int, seed: int) -> list[Any]:
    """PrimFuncs of up to `n` random points of a task's design space for a device; empty if it has no design space. Raises
    TunerError if `n` is not 1 or more."""
    if n < 1:
        raise TunerError(f"one program per task at least, got {n}")
    rule = "llvm" if device.kind == "cpu" else "cuda"
    try:
        spaces = TaskSpaces(task, rule, int(device.share) if rule == "llvm" else 0)
        programs = spaces.sample(n, seed)
    except ProgramError:
        return []
    return [spaces.rebuild(program, spaces.space_of(program)) for program in programs]


def _of_database(folder: Path, tasks: Iterable[Task], device: Device, notes: list[str]) -> dict[str, Any]:
    """The best schedule from a database, for every task that has one in it."""
    absent = [name for name in (WORKLOAD_FILE, RECORD_FILE) if not (folder / name).is_file()]
    if absent:
        raise TunerError(
            f"schedule {folder}: expected {UNTUNED}, {BEST} or the folder of a database, there is no {absent[0]} in it"
        )
    tvm = import_tvm()
    database = json_database(folder)
    try:
        tuned_for = str(json.loads((folder / TUNING_FILE).read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError):  # MetaSchedule's own databases do not name the device
        tuned_for = device.name
    if tuned_for != device.name:
        notes.append(f"the schedules of {folder} were found on {tuned_for}, not on {device.name}")
    target = tvm.target.Target(dict(device.target) or {"kind": "llvm", "num-cores": 1})
    found = {}
    with quiet():
        for task in tasks:
            best = database.query_ir_module(tvm.IRModule({"main": task.prim_func()}), target, "main")
            if best is not None:
                found[task.hash] = best["main"]
    return found


def predict_network(
    predictor: Predictor,
    network: Network | str,
    device: str | Device,
    *,
    programs_per_task: int = 64,
    compile_best: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Predict the latency of every task of a network, as ``cdmpp predict NETWORK --json`` writes it.

    For each task `programs_per_task` random programs are drawn from MetaSchedule's design space for the device and predicted.
    ``best_s`` is the best prediction among them, ``median_s`` the median one, which a blind choice would get. The interval is
    that of the best program's own prediction; the best of many predictions is more often too low than that of a program picked
    blindly. With `compile_best`, that many of the best predicted programs of each task are compiled (not run) and predicted
    again from their instructions; ``best_s`` is then the best of these.

    ``best_low_s`` and ``best_high_s`` are None if the predictor has no intervals; ``unfamiliar`` is the number of programs that
    are far from the training data, None if it cannot tell; ``total_*_s`` are weighted sums over the tasks."""
    _check_number(compile_best)  # before anything is imported
    resolved = with_known_clock(device)
    loaded = load_network(network)
    rows: list[dict[str, Any]] = []
    tasks = extract_tasks([loaded])
    for task in tasks:
        progress(len(rows), len(tasks))
        funcs = random_programs(task, resolved, programs_per_task, seed) or [task.prim_func()]
        own = Candidates(funcs, compact_asts(funcs), "random")
        found = fastest(predictor, loaded.name, {task.hash: task}, {task.hash: own}, resolved, compile_best)
        (best,), latencies = found.best, found.latency_s
        best_s = float(latencies[best])
        low_s, high_s = seconds_interval(predictor, own.asts[best], best_s, resolved, found.evidence)
        flags = None if predictor.familiarity is None else predictor.unfamiliar(own.asts, resolved)
        rows.append(
            {
                "task": task.hash,
                "name": task.name,
                "weight": task.networks[loaded.name],
                "flops": task.flops,
                "programs": len(funcs),
                "compiled": min(compile_best, len(funcs)),
                "best_s": best_s,
                "median_s": float(np.median(latencies)),
                "worst_s": float(latencies.max()),
                "best_low_s": low_s,
                "best_high_s": high_s,
                "unfamiliar": None if flags is None else int(flags.sum()),
            }
        )
    return {
        "network": loaded.name,
        "device": resolved.name,
        "tasks": rows,
        "coverage": COVERAGE,
        "total_best_s": sum(r["weight"] * r["best_s"] for r in rows),
        "total_median_s": sum(r["weight"] * r["median_s"] for r in rows),
        "note": prediction_note(predictor, resolved),
    }
