"""Which program runs for a task: the task as it is, the best of some, or what a tuning found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError, TunerError

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST
    from cdmpp.program.types import Task

#: The unscheduled PrimFunc. LLVM compiles its loops as they are; on a GPU it stands for what a vendor library runs.
UNTUNED = "untuned"
#: The program predicted fastest of some random ones.
BEST = "best"


@dataclass(frozen=True)
class Candidates:
    """Programs of one task, of which the one predicted fastest runs.

    Attributes
    ----------
    asts
        One at least.
    origin
        ``untuned``, ``library``, ``random`` (points of the design space) or ``database``.
    """

    asts: tuple[CompactAST, ...]
    origin: str


def candidates(
    tasks: Iterable[Task],
    schedule: str | Path,
    device: Device,
    *,
    library: bool = False,
    programs_per_task: int = 64,
    seed: int = 0,
) -> tuple[dict[str, Candidates], list[str]]:
    """Programs of each task by its hash, and what is to be said about them.

    Parameters
    ----------
    schedule
        :data:`UNTUNED`, :data:`BEST`, or the folder of a MetaSchedule JSON database (``cdmpp tune`` writes one); tasks that it
        has no schedule for are as they are.
    library
        Whether a vendor library runs the tasks: :data:`UNTUNED` alone makes sense then.
    programs_per_task, seed
        Of :data:`BEST`.

    Raises
    ------
    TunerError
        There is no such schedule or database, or no program is asked for.
    """
    from cdmpp.program.ast import compact_asts

    kind = str(schedule)
    if library and kind != UNTUNED:
        raise TunerError(
            f"schedule {kind}: the tasks of an imported trace are run by a library, which has its own"
        )
    if programs_per_task < 1:
        raise TunerError(f"one program per task at least, got {programs_per_task}")
    tasks = list(tasks)
    if kind == BEST:
        found = {task.hash: _drawn(task, device, programs_per_task, seed) for task in tasks}
        lacking = sum(item.origin != "random" for item in found.values())
        return found, [f"{lacking} tasks have no design space and are as they are"] if lacking else []
    origin = "library" if library else UNTUNED
    funcs = {task.hash: (task.prim_func(), origin) for task in tasks}
    notes: list[str] = []
    if kind != UNTUNED:
        tuned = _of_database(Path(schedule), funcs, device, notes)
        funcs.update({task: (func, "database") for task, func in tuned.items()})
        lacking = len(funcs) - len(tuned)
        if lacking:
            notes.append(f"{lacking} of {len(funcs)} tasks are not in {schedule} and are untuned")
    asts = compact_asts([func for func, _ in funcs.values()])
    pairs = zip(funcs.items(), asts, strict=True)
    return {task: Candidates((ast,), source) for (task, (_, source)), ast in pairs}, notes


def random_programs(task: Task, device: Device, n: int, seed: int) -> list[Any]:
    """PrimFuncs of up to `n` random points of a task's design space for a device; none where it has no space."""
    from cdmpp.program.space import TaskSpaces

    rule = "llvm" if device.kind == "cpu" else "cuda"
    try:
        spaces = TaskSpaces(task, rule, int(device.share) if rule == "llvm" else 0)
        programs = spaces.sample(n, seed)
    except ProgramError:
        return []
    by_hash = {space.hash: space for space in spaces.spaces}
    return [spaces.rebuild(program, by_hash[str(program.space_hash)]) for program in programs]


def _drawn(task: Task, device: Device, n: int, seed: int) -> Candidates:
    from cdmpp.program.ast import compact_asts

    funcs = random_programs(task, device, n, seed)
    return Candidates(tuple(compact_asts(funcs or [task.prim_func()])), "random" if funcs else UNTUNED)


def _of_database(
    folder: Path, funcs: Mapping[str, tuple[Any, str]], device: Device, notes: list[str]
) -> dict[str, Any]:
    """The best schedule of every task that a database has one for."""
    from cdmpp.program.tvm_env import import_tvm, quiet
    from cdmpp.tuner.store import RECORD_FILE, TUNING_FILE, WORKLOAD_FILE, json_database

    absent = [name for name in (WORKLOAD_FILE, RECORD_FILE) if not (folder / name).is_file()]
    if absent:
        raise TunerError(
            f"schedule {folder}: expected {UNTUNED}, {BEST} or the folder of a database, there is no {absent[0]} in it"
        )
    tvm = import_tvm()
    database = json_database(folder)
    tuned_for = _device_of(folder / TUNING_FILE)
    if tuned_for and tuned_for != device.name:
        notes.append(f"the schedules of {folder} were found on {tuned_for}, not on {device.name}")
    target = tvm.target.Target(dict(device.target) or {"kind": "llvm", "num-cores": 1})
    found = {}
    with quiet():
        for task, (func, _) in funcs.items():
            best = database.query_ir_module(tvm.IRModule({"main": func}), target, "main")
            if best is not None:
                found[task] = best["main"]
    return found


def _device_of(path: Path) -> str:
    """The device that ``tuning.json`` names; "" where there is none."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
