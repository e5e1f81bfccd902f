"""A trained predictor taught a new device by the records of a few tasks.

What is learned grows with what was measured. From few tasks it is a correction of what the predictor says
(:mod:`cdmpp.predictor.correction`), or nothing, where none helps on tasks left out. From :data:`TASKS_TO_TRAIN` on the weights
are trained further, at a low learning rate, with the label transform and encoding that the predictor has; they are kept where
they err less than the correction on tasks that neither saw. Tasks left out also calibrate intervals on the device, if there are
enough.

The run folder holds ``config.yaml``, ``tasks.json`` (what was chosen, and how), ``split.json`` (whose test part are the
device's other tasks), ``history.jsonl`` of what was trained, and ``predictor/``.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, Split
from cdmpp.dataset.split import ordered
from cdmpp.dataset.view import unite_devices
from cdmpp.device import get_device
from cdmpp.errors import PredictorError, SplitError
from cdmpp.predictor.config import Config, TrainConfig, dump_config
from cdmpp.predictor.correction import Fit, fit_correction
from cdmpp.predictor.data import TrainingData, gather, split_data, subset
from cdmpp.predictor.encoding import AST, COMPILED, Correction, FeatureEncoder, signed_log1p
from cdmpp.predictor.evidence import NO_EVIDENCE, DeviceScaling, Evidence, fit_scaling
from cdmpp.predictor.network import correction_inputs
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.selection import TaskSelection, select_tasks, write_task_file
from cdmpp.predictor.trainer import ProgressCallback, Trainer
from cdmpp.predictor.training import HISTORY_FILE, Fitted, calibrated, encode, recorder, training_summary

logger = logging.getLogger(__name__)

TASK_FILE = "tasks.json"
_IN_MEMORY = "a predictor in memory"

#: Tasks from which on weights are trained, and the part of them that training stops by and is judged on.
TASKS_TO_TRAIN = 15
HELD_OUT_TASKS = 0.2

#: Two encoded device features closer than this are equal.
_SAME = 1e-5

#: Few records make few batches: they are gone through again until an epoch has so many.
_BATCHES_PER_EPOCH = 20


@dataclass(frozen=True)
class FinetuneResult:
    """What a finetuning gives. Without records of the device ``predictor`` is None, ``selection.tasks`` empty, and
    ``next_command`` profiles the tasks of ``task_file``. ``split`` is the few-shot split to score by; None where no record is
    left to score."""

    predictor: Predictor | None
    split: Split | None
    data: TrainingData
    selection: TaskSelection
    task_file: Path
    next_command: str | None
    history: list[dict[str, Any]]


def finetune_config(seed: int = 0, **train: Any) -> Config:
    """The configuration of a finetuning unless one is given: a low learning rate, few epochs; ``train`` changes fields of
    :class:`~cdmpp.predictor.config.TrainConfig`."""
    defaults = {"epochs": 30, "patience": 8, "batch_size": 64, "learning_rate": 2e-4, "ema_decay": 0.99}
    return Config(train=TrainConfig(**{**defaults, "seed": seed, **train}))


def finetune(
    predictor: Predictor | str | Path,
    datasets: TrainingData | DatasetView | str | Path | Sequence[str | Path],
    device: str,
    out: str | Path,
    *,
    tasks: int | Sequence[str] | None = None,
    select: str = "kmeans",
    seed: int = 0,
    adapt: float = 0.0,
    config: Config | None = None,
    progress: ProgressCallback | None = None,
) -> FinetuneResult:
    """Teach a predictor (or the one in a folder) a device by the chosen tasks' records of it, and write a run folder. Where
    weights are trained, half of each batch, at most, are records that they were trained on before. Without records of the
    device the result is a file of the chosen tasks and the command that profiles them.

    ``datasets`` are data or dataset folders: the device's records and, to be kept in mind, others. ``tasks`` is how many to
    choose, or which; None takes every task with records of the device. ``select`` and ``seed`` are how (the choice is the same
    before and after the device is profiled); the seed is also that of training unless ``config`` is given, whose ``loss``,
    ``train`` and ``data`` are used. ``adapt`` is the fraction of the device's other programs that may be looked at without
    labels, and are not scored, for ``config.loss.cmd_weight``.

    PredictorError: ``out`` holds a run; nothing to choose from; fewer than two programs to learn from; training diverged.
    UnknownDeviceError, DatasetError: no such device; no data.
    """
    out = Path(out)
    if any((out / name).exists() for name in (HISTORY_FILE, "predictor")):
        raise PredictorError(f"{out} holds a training run: choose another folder")
    source = _IN_MEMORY if isinstance(predictor, Predictor) else str(predictor)
    base = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    config = config or finetune_config(seed)
    data = datasets if isinstance(datasets, TrainingData) else gather(datasets, config.data)
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
        return FinetuneResult(None, None, data, selection, task_file, command, [])
    job = _Job(base, data, name, selection, config, adapt)
    (out / "config.yaml").write_text(dump_config(job.config), encoding="utf-8")
    if job.split is not None:  # cdmpp report scores a run by it
        (out / "split.json").write_text(job.split.to_json(), encoding="utf-8")
    history: list[dict[str, Any]] = []
    tuned = _tune(job, source, recorder(out, history, progress))
    tuned.save(out / "predictor")
    return FinetuneResult(tuned, job.split, data, selection, task_file, None, history)


def few_shot(
    predictor: Predictor,
    data: TrainingData,
    device: str,
    k: int,
    select: str = "kmeans",
    seed: int = 0,
    *,
    config: Config | None = None,
    adapt: float = 0.0,
) -> tuple[Predictor, Split]:
    """A predictor that saw ``k`` tasks of a device, from one that never saw it, and the split whose test part are the device's
    other tasks. Tasks are chosen among those with records on the device and on another; other arguments as of :func:`finetune`.
    PredictorError: the predictor was trained on the device; no records of it; fewer than two programs. SplitError: no task is
    left to test."""
    name = _device_name(device, data)
    if name in predictor.training.get("records_by_device", predictor.devices):
        raise PredictorError(f"the predictor was trained on {name}: few-shot starts from one that never saw it")
    selection = choose_tasks(predictor, data, name, k, select, seed)
    if not selection.tasks:
        raise PredictorError(f"there are no records of {name}")
    job = _Job(predictor, data, name, selection, config or finetune_config(seed), adapt)
    if job.split is None:
        raise SplitError(f"every task with records on {name} is chosen: none is left to test")
    return _tune(job), job.split


def choose_tasks(
    predictor: Predictor,
    data: TrainingData,
    device: str,
    tasks: int | Sequence[str] | None,
    select: str = "kmeans",
    seed: int = 0,
) -> TaskSelection:
    """The tasks to teach a device (canonical name) by, see :func:`finetune`; without records of it, ``tasks`` is empty.
    PredictorError where no named task has records on the device, or there is nothing to choose from."""
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


class _Job:
    """What a finetuning starts from: ``spec`` and ``split`` test the device's other tasks (None: there are none), and
    ``shots``, bool (n,), are the records of the chosen tasks there. ``config`` has the model and the label transform of the
    predictor."""

    def __init__(
        self, base: Predictor, data: TrainingData, device: str, selection: TaskSelection, config: Config, adapt: float
    ) -> None:
        self.base, self.data, self.device, self.selection = base, data, device, selection
        transform = {"transform": base.transform.kind, "relative_to": base.transform.relative_to or "none"}
        label = config.label.model_copy(update=transform)
        self.config = config.model_copy(update={"model": base.network.config, "label": label})
        # nothing of the split is spared to validate
        extra = f";adapt={adapt:g}" if adapt else ""
        tasks = "+".join(selection.tasks)
        self.spec = f"by_device:heldout={device};tasks={tasks};valid=0{extra};seed={selection.seed}"
        on_device = (data.labels["device"] == device).to_numpy(dtype=bool)
        self.shots = on_device & data.labels["task"].isin(selection.tasks).to_numpy()
        self.split: Split | None = split_data(self.spec, data) if (on_device & ~self.shots).any() else None


def _tune(job: _Job, source: str = _IN_MEMORY, progress: ProgressCallback | None = None) -> Predictor:
    """The base with what the chosen tasks say of its errors; or trained further, where there are tasks enough to show, on some
    that are left out, that this is better."""
    shots = np.flatnonzero(job.shots)
    if len(set(job.data.labels["program"].iloc[shots])) < 2:
        raise PredictorError(f"finetuning needs at least two programs of the chosen tasks on {job.device}")
    fits = _fits(job, shots)
    chosen = _corrected(job, fits)
    errors = {kind: {"before": fit.before, "corrected": fit.error} for kind, fit in fits.items()}
    learned = "correction" if job.device in chosen.corrections else "nothing"
    if len(job.selection.tasks) >= TASKS_TO_TRAIN:
        held_out = ordered(job.selection.tasks, job.selection.seed, "finetune")
        held_out = held_out[: max(1, round(HELD_OUT_TASKS * len(held_out)))]
        stop = job.shots & job.data.labels["task"].isin(held_out).to_numpy()
        without = _corrected(job, _fits(job, np.flatnonzero(job.shots & ~stop)))
        trained = _train(job, stop, fits, progress)
        for kind, fit in _fits(job, np.flatnonzero(stop), without).items():
            errors[kind]["corrected, on tasks held out"] = fit.before
        for kind, fit in _fits(job, np.flatnonzero(stop), trained).items():
            errors[kind]["trained, on tasks held out"] = fit.before
        if better(errors):
            chosen, learned = trained, "weights"
    return _described(job, source, chosen, learned, errors)


def better(errors: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether trained weights err less than the correction on tasks that neither saw, with and without instruction counts."""
    trained, corrected = "trained, on tasks held out", "corrected, on tasks held out"
    return all(error[trained] < error[corrected] for error in errors.values())


def _fits(job: _Job, rows: NDArray[np.int64], predictor: Predictor | None = None) -> dict[str, Fit]:
    """Corrections of a predictor (None: the base) fitted to records of the device: from ASTs and, where all of them have
    instruction counts, with these."""
    predictor, data = predictor or job.base, job.data
    table, found = data.labels.iloc[rows], {}
    code = Evidence.of_rows(data, rows, compiled=True) if predictor.encoder.code_dim else NO_EVIDENCE
    known = {AST: NO_EVIDENCE}
    if code.code is not None and code.known(len(rows)).all():
        known[COMPILED] = code
    for kind, evidence in known.items():
        pairs = predictor.pairs_of_rows(data, rows, evidence)
        errors = np.log(table["latency_s"].to_numpy(dtype=np.float64) / predictor.predict_pairs(pairs))
        inputs = correction_inputs(predictor.network, predictor.encode(*pairs[:3], evidence.code))
        found[kind] = fit_correction(errors, table["task"].tolist(), *inputs, seed=job.selection.seed)
    return found


def _corrected(job: _Job, fits: Mapping[str, Fit]) -> Predictor:
    """The base with these corrections, and intervals on the device from the tasks that were left out."""
    base, name = job.base, job.device
    own = {kind: fit.correction for kind, fit in fits.items() if fit.correction is not None}
    corrections = {**base.corrections, name: own} if own else base.corrections
    plain, code = base.calibration, base.compiled_calibration
    if plain is not None:
        plain = plain.with_device(name, fits[AST].left, fits[AST].tasks)
    if code is not None and COMPILED in fits:
        code = code.with_device(name, fits[COMPILED].left, fits[COMPILED].tasks)
    specs = {name: job.data.devices[name], **base.specs}
    return replace(base, corrections=corrections, specs=specs, calibration=plain, compiled_calibration=code)


def _described(job: _Job, source: str, tuned: Predictor, learned: str, errors: Mapping[str, Any]) -> Predictor:
    """With the summary of both trainings, and with scaling between the device and others as the chosen tasks show it."""
    before, shots = job.base.training, np.flatnonzero(job.shots)
    tasks = set(job.selection.tasks)
    summary = {**before, **tuned.training, "split": job.spec}
    summary["tasks"] = sorted(tasks.union(before.get("tasks", ())))
    networks = {name for task in tasks for name in job.data.networks.get(task, ())}
    summary["networks"] = sorted(networks.union(before.get("networks", ())))
    summary["records_by_device"] = {
        **before.get("records_by_device", {}), **tuned.training.get("records_by_device", {}), job.device: len(shots)
    }  # fmt: skip
    summary["finetuned"] = {
        "predictor": source,
        "device": job.device,
        "learned": learned,
        "errors": errors,
        "records_of_device": len(shots),
        "selection": job.selection.to_json(),
        "before": {name: value for name, value in before.items() if name not in ("tasks", "networks")},
    }
    scaling = job.base.scaling or DeviceScaling()
    shown = fit_scaling(tuned.predict_rows, job.data, shots[:0], learned=shots)
    pairs = {**scaling.pairs, **shown.pairs}
    return replace(tuned, training=summary, scaling=replace(scaling, pairs=pairs))


def _train(job: _Job, stop: NDArray[np.bool_], fits: Mapping[str, Fit], progress: ProgressCallback | None) -> Predictor:
    """The base trained further on the chosen tasks but for records to stop by, bool (n,), and on records of other devices; what
    they show to be the same for all programs comes first."""
    base, data, config, name = job.base, job.data, job.config, job.device
    vectors, labels = data.device_vectors(), data.labels
    encoder, fresh = extend_encoder(base.encoder, list(base.devices.values()), vectors[name])
    seen_as_it = devices_seen_as(base, encoder, data, name)
    if seen_as_it:
        logger.warning("not replayed, as the network cannot tell them from %s: %s", name, ", ".join(seen_as_it))
    # what is held out to stop by is not replayed on other devices either
    held_out = labels["program"].isin(labels["program"][stop])
    replayed = ~held_out & ~labels["device"].isin([name, *seen_as_it])
    if "tasks" in base.training:
        replayed &= labels["task"].isin(list(base.training["tasks"]))
    new, replay, valid = (np.flatnonzero(mask) for mask in (job.shots & ~stop, replayed, stop))
    parts = (new, replay, valid, np.zeros(0, np.int64) if job.split is None else job.split.adapt)
    rows = np.concatenate(parts)
    arrays = encode(subset(data, rows), encoder, base.transform.relative_to)
    # by how much a device that is new to it is slower than it expects; of one that it knows, and of a GPU predicted from what
    # GPUs share, training starts from another prediction, that of all that is known of it
    found = fits[AST].correction
    another = name in base.devices or base.uses_general_features_only(data.devices[name])
    shift = 0.0 if another or found is None else found.constant
    factor = np.where(labels["device"].iloc[rows] == name, math.exp(shift), 1.0)
    arrays = replace(arrays, latency_s=arrays.latency_s / factor)
    ends = np.cumsum([len(part) for part in parts])
    known, to_stop, target = np.split(np.arange(ends[-1]), ends[1:3])
    trainer = Trainer(
        config,
        base.transform,
        arrays.take(known),
        arrays.take(to_stop),
        arrays.unlabelled(target),
        starting_weights(base, fresh),
        lambda rng: mixed_batches(len(new), len(replay), config.train.batch_size, rng),
    )
    state = trainer.fit(progress=progress)
    train = np.sort(np.concatenate([new, replay]))
    used = Split("by_device", job.spec, job.selection.seed, train, valid, np.zeros(0, dtype=np.int64))
    devices = {of: vectors[of] for of in sorted(set(labels["device"].iloc[train]))}
    specs = {**{of: data.devices[of] for of in devices}, **base.specs}
    fitted = Fitted(encoder, base.transform, arrays, trainer, {**devices, **base.devices}, specs)
    tuned = fitted.predictor(state.best, training_summary(config, data, used, state))
    constant = Correction.of(shift, encoder.pair_dim + encoder.code_dim + config.model.embedding_dim)
    corrections = {**base.corrections, name: {AST: constant, COMPILED: constant}}
    return calibrated(replace(tuned, corrections=corrections), data, used, scaling=base.scaling or DeviceScaling())


def devices_seen_as(base: Predictor, encoder: FeatureEncoder, data: TrainingData, device: str) -> list[str]:
    """Other devices that the network sees as this one: their labels would contradict its."""
    vectors = data.device_vectors()
    others = [name for name in sorted(vectors) if name != device]
    if base.network.config.device == "none":
        return others
    encoded = encoder.encode_devices(np.stack([vectors[name] for name in [device, *others]]))
    same = np.abs(encoded[1:] - encoded[0]).max(axis=1, initial=0.0) < _SAME
    return [name for name, is_same in zip(others, same, strict=True) if is_same]


def extend_encoder(
    encoder: FeatureEncoder, known: Sequence[NDArray[np.float64]], vector: NDArray[np.float64]
) -> tuple[FeatureEncoder, NDArray[np.int64]]:
    """The encoder, given raw features of the training devices and of a new one, made to tell these apart: what did not vary,
    and so was hidden, and has another value on the new device is encoded as 1 or -1 there; all else as before. Also the columns
    of an encoded device that were 0 in training and are not on the new one."""
    scaler = encoder.device
    logs = signed_log1p(vector)
    seen = signed_log1p(np.stack(known))
    # a feature that no known device has stands at 0 for them, whatever the mean
    unknown = np.isnan(seen).all(0)
    mean = np.where(unknown, logs - 1.0, scaler.mean)
    distance = np.abs(logs - mean)
    fresh = ~scaler.active & ~np.isnan(logs) & (distance > _SAME)
    newly_missing = np.isnan(logs) & ~np.isnan(seen).any(0)
    device = replace(
        scaler,
        mean=np.where(fresh, mean, scaler.mean),
        std=np.where(fresh, distance, scaler.std),
        active=scaler.active | fresh,
    )
    return replace(encoder, device=device), np.flatnonzero(np.concatenate([fresh, newly_missing]))


def starting_weights(base: Predictor, fresh: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """The predictor's weights; those that device features met which were always 0 are still random: they become 0."""
    weights = {name: value.detach().clone() for name, value in base.network.state_dict().items()}
    if base.network.config.device != "none":
        weights["device_projection.0.weight"][:, fresh] = 0.0
        weights["decoder.0.weight"][:, base.network.config.embedding_dim + fresh] = 0.0
    return weights


def mixed_batches(new: int, replay: int, batch_size: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Batches of pairs ``0..new-1`` (the new device's), each equally often, and as many of ``new..new+replay-1``, drawn at
    random; fewer where the batch is full or there are no more."""
    own = max(1, batch_size - batch_size // 2) if replay else batch_size
    rounds = -(-_BATCHES_PER_EPOCH // -(-new // own))
    batches = []
    for _ in range(rounds):
        order = rng.permutation(new)
        for begin in range(0, new, own):
            rows = order[begin : begin + own]
            number = min(len(rows), batch_size - own, replay)
            batches.append(np.concatenate([rows, new + rng.choice(replay, number, replace=False)]))
    return batches


def _device_name(device: str, data: TrainingData) -> str:
    return device if device in data.devices else get_device(device).name


def _networks(data: TrainingData, tasks: Sequence[str]) -> list[str]:
    """Few networks that have all of these tasks between them: always the one with the most of what is left."""
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
