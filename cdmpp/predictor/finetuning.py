"""Finetuning: adapt a trained predictor to a new device with the records of a few tasks. It fits a correction of the
predictions (:mod:`cdmpp.predictor.correction`), or none if none helps on tasks left out. The errors on these tasks also
calibrate intervals on the device. The network's weights do not change: with records of many tasks, train on them instead.

The run folder holds ``tasks.json`` (which tasks were chosen, and how), ``split.json`` (whose test part is the device's other
tasks) and ``predictor/``.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, Split
from cdmpp.dataset.view import unite_devices
from cdmpp.device import get_device
from cdmpp.errors import PredictorError, SplitError
from cdmpp.predictor.correction import Fit, fit_correction
from cdmpp.predictor.data import TrainingData, gather, split_data
from cdmpp.predictor.encoding import AST, COMPILED
from cdmpp.predictor.evidence import DeviceScaling, Evidence, fit_scaling
from cdmpp.predictor.predictor import Predictor, load_predictor
from cdmpp.predictor.selection import TaskSelection, select_tasks, write_task_file
from cdmpp.predictor.training import HISTORY_FILE

logger = logging.getLogger(__name__)

TASK_FILE = "tasks.json"
_IN_MEMORY = "a predictor in memory"


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a finetuning. Without records of the device ``predictor`` is None, ``selection.tasks`` is empty, and
    ``next_command`` profiles the tasks of ``task_file``. ``split`` is the few-shot split to score with, if any is left."""

    predictor: Predictor | None
    split: Split | None
    data: TrainingData
    selection: TaskSelection
    task_file: Path
    next_command: str | None


def finetune(
    predictor: Predictor | str | Path,
    datasets: TrainingData | DatasetView | str | Path | Sequence[str | Path],
    device: str,
    out: str | Path,
    *,
    tasks: int | Sequence[str] | None = None,
    select: str = "kmeans",
    seed: int = 0,
) -> FinetuneResult:
    """Adapt a predictor, a folder's or ``"default"``, to a device by its records of the chosen tasks; writes a run folder. If
    there are no records of the device, the result is a file of the chosen tasks and the command that profiles them.

    ``datasets`` are data or dataset folders, with the device's records and others to choose tasks from. ``tasks`` is the number
    of tasks to choose, or their hashes; None takes every task with records on the device. ``select`` and ``seed`` say how to
    choose (the choice is the same before and after the device is profiled).

    PredictorError: ``out`` holds a run; nothing to choose from; fewer than two programs to learn from. UnknownDeviceError: no
    such device. DatasetError: no data."""
    out = Path(out)
    if any((out / name).exists() for name in (HISTORY_FILE, "predictor")):
        raise PredictorError(f"{out} holds a training run: choose another folder")
    source = _IN_MEMORY if isinstance(predictor, Predictor) else str(predictor)
    base = load_predictor(predictor)
    data = datasets if isinstance(datasets, TrainingData) else gather(datasets)
    unite_devices({"the predictor's training": base.specs, "the data": data.devices})
    name = _device_name(device, data)
    selection = choose_tasks(base, data, name, tasks, select, seed)
    task_file = out / TASK_FILE
    networks = _networks(data, selection.wanted)
    write_task_file(task_file, selection, device=name, predictor=source, networks=networks)
    if not selection.tasks:
        command = (
            f"cdmpp profile {shlex.join(networks) or 'NETWORK...'} --device {shlex.quote(device)} "
            f"--tasks {shlex.quote(str(task_file))} --out DIR"
        )
        return FinetuneResult(None, None, data, selection, task_file, command)
    tuned, split = _tune(base, data, name, selection, source)
    if split is not None:  # cdmpp report scores a run by it
        (out / "split.json").write_text(split.to_json(), encoding="utf-8")
    tuned.save(out / "predictor")
    return FinetuneResult(tuned, split, data, selection, task_file, None)


def few_shot(
    predictor: Predictor, data: TrainingData, device: str, k: int, select: str = "kmeans", seed: int = 0
) -> tuple[Predictor, Split]:
    """Finetune a predictor that never saw a device on ``k`` of its tasks; also gives the split that tests on its other tasks.
    Tasks are chosen among those with records on the device and on another one; other arguments as in :func:`finetune`.
    PredictorError: the predictor was trained on the device; no records; fewer than two programs. SplitError: no test left."""
    name = _device_name(device, data)
    if name in predictor.training.get("records_by_device", predictor.devices):
        raise PredictorError(f"the predictor was trained on {name}: few-shot starts from one that never saw it")
    selection = choose_tasks(predictor, data, name, k, select, seed)
    if not selection.tasks:
        raise PredictorError(f"there are no records of {name}")
    tuned, split = _tune(predictor, data, name, selection, _IN_MEMORY)
    if split is None:
        raise SplitError(f"every task with records on {name} is chosen: none is left to test")
    return tuned, split


def choose_tasks(
    predictor: Predictor,
    data: TrainingData,
    device: str,
    tasks: int | Sequence[str] | None,
    select: str = "kmeans",
    seed: int = 0,
) -> TaskSelection:
    """The tasks to finetune with on a device (canonical name), see :func:`finetune`; without records of it, ``tasks`` is empty.
    PredictorError: no named task has records on the device, or there is nothing to choose from."""
    on_device = (data.labels["device"] == device).to_numpy(dtype=bool)
    measured = sorted(set(data.labels["task"][on_device]))
    if isinstance(tasks, int):
        rows = np.flatnonzero(~on_device) if not on_device.all() else None
        pool = set(data.labels["task"] if rows is None else data.labels["task"].iloc[rows])
        free = pool.intersection(measured) if measured else None
        if free is not None and not free:
            raise PredictorError(f"no task has records on {device} and on another device: nothing to choose from")
        chosen = select_tasks(data, tasks, select, seed, predictor=predictor, rows=rows, available=free)
        return chosen if measured else replace(chosen, tasks=())
    if tasks is None and measured:
        return TaskSelection(tuple(measured), tuple(measured), "all", seed, "none", len(measured))
    wanted = sorted(set(tasks or ()))
    if not wanted:
        raise PredictorError(f"there are no records of {device}: say how many tasks to choose to be profiled")
    chosen_tasks = tuple(task for task in wanted if task in set(measured))
    if measured and not chosen_tasks:
        raise PredictorError(f"none of the {len(wanted)} tasks named has records on {device}")
    if measured and len(chosen_tasks) < len(wanted):
        logger.warning("%d of %d tasks have no records on %s", len(wanted) - len(chosen_tasks), len(wanted), device)
    return TaskSelection(chosen_tasks, tuple(wanted), "named", seed, "none", len(measured))


def _tune(
    base: Predictor, data: TrainingData, device: str, selection: TaskSelection, source: str
) -> tuple[Predictor, Split | None]:
    """The base predictor, corrected, calibrated and able to scale latencies by its errors on the chosen tasks of a device; and
    the split that tests on the device's other tasks, None if there are none."""
    if device in base.corrections:
        logger.warning("an earlier finetuning on %s is dropped: only what is measured in these tasks counts", device)
    others = {name: known for name, known in base.corrections.items() if name != device}
    base = replace(base, corrections=others)
    # valid=0: no validation part
    spec = f"by_device:heldout={device};tasks={'+'.join(selection.tasks)};valid=0;seed={selection.seed}"
    on_device = (data.labels["device"] == device).to_numpy(dtype=bool)
    chosen = on_device & data.labels["task"].isin(selection.tasks).to_numpy()
    split, shots = split_data(spec, data) if (on_device & ~chosen).any() else None, np.flatnonzero(chosen)
    if data.labels["program"].iloc[shots].nunique() < 2:
        raise PredictorError(f"finetuning needs at least two programs of the chosen tasks on {device}")
    fits = _fits(base, data, shots, selection.seed)
    own = {kind: fit.correction for kind, fit in fits.items() if fit.correction is not None}
    plain, code = base.calibration, base.compiled_calibration
    if plain is not None:
        plain = plain.with_device(device, fits[AST].left, fits[AST].tasks)
    if code is not None and COMPILED in fits:
        code = code.with_device(device, fits[COMPILED].left, fits[COMPILED].tasks)
    before = base.training
    networks = {name for task in selection.tasks for name in data.networks.get(task, ())}
    summary = {
        **before,
        "split": spec,
        "tasks": sorted({*selection.tasks, *before.get("tasks", ())}),
        "networks": sorted(networks.union(before.get("networks", ()))),
        "records_by_device": {**before.get("records_by_device", {}), device: len(shots)},
        "finetuned": {
            "predictor": source,
            "device": device,
            "learned": "correction" if own else "nothing",
            "errors": {kind: {"before": fit.before, "corrected": fit.error} for kind, fit in fits.items()},
            "records_of_device": len(shots),
            "selection": selection.to_json(),
            "before": {name: value for name, value in before.items() if name not in ("tasks", "networks")},
        },
    }
    tuned = replace(
        base,
        corrections={**others, device: own} if own else others,
        specs={device: data.devices[device], **base.specs},
        calibration=plain,
        compiled_calibration=code,
        training=summary,
    )
    scaling = base.scaling or DeviceScaling()
    shown = fit_scaling(tuned.predict_rows, data, shots[:0], learned=shots)
    return replace(tuned, scaling=replace(scaling, pairs={**scaling.pairs, **shown.pairs})), split


def _fits(predictor: Predictor, data: TrainingData, shots: NDArray[np.int64], seed: int) -> dict[str, Fit]:
    """Corrections of the predictor: from ASTs on all of these rows, from instruction counts on those that have them.
    Errors that are left are divided by the difficulty of the prediction, as intervals are multiplied by it."""
    found = {}
    counted = shots[data.counted(shots)] if predictor.encoder.code_dim else shots[:0]
    for kind, rows in ((AST, shots), (COMPILED, counted)):
        if not len(rows):
            continue
        evidence = Evidence.of_rows(data, rows, compiled=kind == COMPILED)
        pairs = predictor.pairs_of_rows(data, rows, evidence)
        arrays = predictor.encode(*pairs[:3], evidence.code)
        errors = np.log(data.latency_s[rows] / predictor.predict_pairs(pairs, arrays))
        known, seen = predictor.correction_inputs(arrays)
        # effects of size do not carry over to a network's largest matrix products, which nobody measured
        known = known * (kind == COMPILED)
        fit = fit_correction(errors, data.labels["task"].iloc[rows].tolist(), known, seen, seed=seed)
        found[kind] = fit._replace(left=fit.left / predictor.difficulty(pairs, arrays)[fit.rows])
    return found


def _device_name(device: str, data: TrainingData) -> str:
    return device if device in data.devices else get_device(device).name


def _networks(data: TrainingData, tasks: Sequence[str]) -> list[str]:
    """A few networks that together contain all of these tasks: greedily, the one with the most remaining tasks each time."""
    members: dict[str, set[str]] = {}
    for task in tasks:
        for network in data.networks.get(task, ()):
            members.setdefault(network, set()).add(task)
    left = set().union(*members.values()) if members else set()
    chosen: list[str] = []
    while left:
        best = max(sorted(members), key=lambda name: len(members[name] & left))
        chosen.append(best)
        left -= members[best]
    return sorted(chosen)
