"""What was tuned at one share of a device, run at another: does a schedule have to be tuned for the share it is served with?"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import TunerError

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.profiler.engine import BuildJob

#: Measures jobs alone on a device: program -> seconds, of those that run.
MeasureAlone = Callable[[str, Sequence["BuildJob"]], Mapping[str, float]]


@dataclass(frozen=True)
class ShareCell:
    """The best of one tuning, run at one share.

    Attributes
    ----------
    tuned_at, run_at
        Devices with their shares.
    latency_s
        Sum over the tasks, weighted; None where one does not run there.
    spread
        Largest sum of a repetition over the smallest, minus 1.
    ratio
        Latency over that of what was tuned at ``run_at``; None where there is no such tuning.
    """

    tuned_at: str
    run_at: str
    latency_s: float | None
    spread: float | None
    ratio: float | None


@dataclass(frozen=True)
class ShareTable:
    """Tuned at x run at.

    Attributes
    ----------
    tuned_at, run_at
        Devices, in the order asked for.
    tasks
        How many the sums are over: those that every tuning found something for.
    cells
        One a pair.
    """

    tuned_at: tuple[str, ...]
    run_at: tuple[str, ...]
    tasks: int
    cells: tuple[ShareCell, ...]

    def cell(self, tuned_at: str, run_at: str) -> ShareCell:
        """Of a pair."""
        return next(c for c in self.cells if (c.tuned_at, c.run_at) == (tuned_at, run_at))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "cells": [asdict(cell) for cell in self.cells]}


def share_table(
    folders: Sequence[str | Path],
    run_at: Sequence[str],
    *,
    repeats: int = 3,
    measure: MeasureAlone | None = None,
) -> ShareTable:
    """Measure what tunings found, by their own labels, at several shares.

    Parameters
    ----------
    folders
        Of tunings of one network, each at a share of its own.
    run_at
        Devices of this machine to run at, with their shares.
    repeats
        Times that everything is measured, with nothing else at work; the median of the sums counts.
    measure
        What measures; None for the profiler on this machine.

    Raises
    ------
    TunerError
        A folder holds no finished tuning, two are of the same share or of different networks, or a share is not here.
    """
    from cdmpp.tuner.prepare import device_of_this_machine
    from cdmpp.tuner.store import read_settings

    if repeats < 1:
        raise TunerError(f"one repetition at least, got {repeats}")
    paths = [Path(folder) for folder in folders]
    settings = [read_settings(path) for path in paths]
    tuned_at = [str(known["device"]) for known in settings]
    if len(set(tuned_at)) < len(tuned_at) or not tuned_at:
        raise TunerError(f"expected tunings at different shares, got {', '.join(tuned_at) or 'none'}")
    if len({known["network"] for known in settings}) > 1:
        raise TunerError(f"tunings of different networks: {', '.join(str(k['network']) for k in settings)}")
    devices = [device_of_this_machine(device).name for device in run_at]
    found = dict(zip(tuned_at, map(best_programs, paths), strict=True))
    common = set.intersection(*(set(best) for best in found.values()))
    if not common:
        raise TunerError("no task has a program that works in all tunings")
    weights = _weights(paths[0])
    jobs = {job.program.hash: job for best in found.values() for task, job in best.items() if task in common}
    sums: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for _ in range(repeats):
        for device in devices:
            seconds = (measure or measure_alone)(device, list(jobs.values()))
            for name, best in found.items():
                parts = [(weights[task], seconds.get(best[task].program.hash)) for task in sorted(common)]
                missing = any(s is None for _, s in parts)
                sums[name, device].append(None if missing else sum(w * s for w, s in parts if s is not None))
    return ShareTable(tuple(tuned_at), tuple(devices), len(common), _cells(tuned_at, devices, sums))


@dataclass(frozen=True)
class RecordsCell:
    """The best programs of one share among records, at another.

    Attributes
    ----------
    best_at, run_at
        Devices with their shares.
    ratio
        Latency at ``run_at`` of what is fastest at ``best_at`` over that of what is fastest at ``run_at``, geometric mean
        over the tasks.
    worst
        The largest of a task.
    tasks
        How many.
    """

    best_at: str
    run_at: str
    ratio: float
    worst: float
    tasks: int


def best_elsewhere(records: pd.DataFrame, least: int = 4) -> list[RecordsCell]:
    """The same question asked of records of the same programs at several shares, of CPUs or GPUs; nothing is measured.

    What is fastest at a share is chosen by the same labels that it is compared by, so noise makes ratios some percent too
    large.

    Parameters
    ----------
    records
        Of :attr:`cdmpp.dataset.Dataset.records`.
    least
        Programs of a task that all devices have run, at least; tasks with fewer are left out.

    Raises
    ------
    TunerError
        Less than two devices, or no task with so many programs.
    """
    from cdmpp.tuner.objective import geometric_mean

    frame = records[(records["status"] == "ok") & (records["origin"] != "unscheduled")]
    latency = frame.pivot_table(
        index=["task", "program"], columns="device", values="latency_s", aggfunc="min"
    )
    latency = latency.dropna()
    latency = latency[latency.groupby("task")[latency.columns[:1]].transform("size") >= least]
    devices = [str(name) for name in latency.columns]
    if len(devices) < 2 or latency.empty:
        raise TunerError(
            f"no task has {least} programs that ran on two devices; there are {', '.join(devices)}"
        )
    by_task = latency.groupby("task")
    best = {device: by_task[device].idxmin() for device in devices}
    cells = []
    for chosen in devices:
        for run in devices:
            own = latency[run].loc[best[run].to_numpy()].to_numpy()
            ratios = latency[run].loc[best[chosen].to_numpy()].to_numpy() / own
            cells.append(RecordsCell(chosen, run, geometric_mean(ratios), float(ratios.max()), len(ratios)))
    return cells


def _cells(
    tuned_at: Sequence[str], run_at: Sequence[str], sums: Mapping[tuple[str, str], Sequence[float | None]]
) -> tuple[ShareCell, ...]:
    latencies: dict[tuple[str, str], float | None] = {}
    spreads: dict[tuple[str, str], float | None] = {}
    for key, values in sums.items():
        known = [value for value in values if value is not None]
        latencies[key] = statistics.median(known) if known else None
        spreads[key] = max(known) / min(known) - 1 if known else None
    cells = []
    for tuned in tuned_at:
        for run in run_at:
            latency_s, own_s = latencies[tuned, run], latencies.get((run, run))
            ratio = latency_s / own_s if latency_s is not None and own_s is not None else None
            cells.append(ShareCell(tuned, run, latency_s, spreads[tuned, run], ratio))
    return tuple(cells)


def best_programs(folder: Path) -> dict[str, BuildJob]:
    """The fastest program of each task, by the tuning's own labels; what runs untuned is one of them."""
    from cdmpp.dataset import Dataset
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.tuner.store import DATASET_FOLDER

    dataset = Dataset.open(folder / DATASET_FOLDER)
    frame = dataset.records
    frame = frame[frame["status"] == "ok"]
    best = {}
    for index in frame.groupby("task")["latency_s"].idxmin():
        program = dataset.programs[str(frame.loc[index, "program"])]
        space = None if program.space_hash is None else dataset.spaces[program.space_hash]
        best[program.task_hash] = BuildJob(program, dataset.tasks[program.task_hash], space)
    return best


def _weights(folder: Path) -> dict[str, float]:
    """How often the network runs each task."""
    from cdmpp.tuner.report import JSON_FILE

    path = folder / JSON_FILE
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return {str(task["task"]): float(task["weight"]) for task in report["tasks"]}
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise TunerError(f"{path} is missing or damaged: has this tuning been finished?") from err


def measure_alone(device: str, jobs: Sequence[BuildJob]) -> dict[str, float]:
    """Seconds of programs on a share of this machine, with nothing built or measured beside them."""
    from cdmpp.tuner.prepare import alone_engine

    with alone_engine(device) as engine:
        outcomes = list(engine.run(iter(jobs)))
    return {o.job.program.hash: o.latency_s for o in outcomes if o.latency_s is not None}
