"""A training run, from configuration and datasets to a run folder: ``config.yaml``, ``split.json``, ``history.jsonl`` (one
line per epoch), ``checkpoint.safetensors`` and, when training is done, ``predictor/``. With several networks
(``train.members``), those after the first have the same files in ``member1`` and so on, without ``predictor/``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from cdmpp.dataset import DatasetView, Split, noise_floor_mape
from cdmpp.dataset.split import read_spec
from cdmpp.device import DEVICE_FEATURES, Device, device_features, get_device
from cdmpp.errors import PredictorError
from cdmpp.files import write_text
from cdmpp.predictor import encoding
from cdmpp.predictor.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from cdmpp.predictor.config import Config, dump_config
from cdmpp.predictor.data import TrainingData, gather, split_data, subset
from cdmpp.predictor.evidence import NO_EVIDENCE, Evidence, fit_scaling
from cdmpp.predictor.pair_features import CODE_FEATURES, GENERAL_PAIRS, LOOP_CODE_FEATURES, PAIR_FEATURES
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.processes import Processes, torchrun_processes
from cdmpp.predictor.trainer import ProgressCallback, Trainer
from cdmpp.predictor.uncertainty import Calibration, Familiarity
from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURES
from cdmpp.program.codegen.core import counts_key

logger = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.safetensors"
HISTORY_FILE = "history.jsonl"
#: With fewer validation tasks, too little tells which predictions have larger errors than others.
_TASKS_FOR_DIFFICULTY = 100


@dataclass(frozen=True)
class TrainResult:
    """The predictor of the best epoch, the data and split to evaluate it with, and the lines of ``history.jsonl``."""

    predictor: Predictor
    data: TrainingData
    split: Split
    history: list[dict[str, Any]]


def train(
    config: Config,
    datasets: TrainingData | DatasetView | str | Path | Sequence[str | Path] | None,
    out: str | Path,
    progress: ProgressCallback | None = None,
    resume: bool = False,
    split: Split | None = None,
) -> TrainResult:
    """Train a predictor and write the run folder. ``datasets`` are data or dataset folders, None takes ``config.data.paths``;
    ``split`` replaces the configuration's. ``progress`` is called with the history line of every epoch. With ``resume``, a run
    in ``out`` is continued if there is one, with the same result as an uninterrupted run. Processes that torchrun started train
    together (:mod:`cdmpp.predictor.processes`).

    Raises PredictorError if ``out`` holds a run and ``resume`` is off, if that run has another configuration or other records,
    or if training diverged; DatasetError or SplitError if there are no records or the split cannot be made."""
    out = Path(out)
    if not resume and any((out / name).exists() for name in (CHECKPOINT_FILE, HISTORY_FILE, "member1", "predictor")):
        raise PredictorError(f"{out} holds a training run: resume it, or choose another folder")
    with torchrun_processes(config.train.device, config.train.batch_size) as processes:
        with processes.first_alone():
            data = as_data(config, datasets)
        split = split or split_data(config.split.spec, data)
        taught, trained = (data, split), list[Predictor]()
        for i in [*range(1, config.train.members), 0]:
            if i == 0 and config.data.unmeasured:
                teacher = replace(trained[0], members=tuple(other.network for other in trained[1:]))
                taught = with_unmeasured(data, split, teacher)
            own = config.model_copy(update={"train": config.train.model_copy(update={"seed": config.train.seed + i})})
            folder = out if i == 0 else out / f"member{i}"
            fitted, final, history = _train_network(own, *taught, folder, progress, resume, processes)
            trained.append(fitted.predictor(final.best, training_summary(config, data, split, final)))
        networks = [each.network for each in trained]
        if len(networks) > 1:
            with torch.no_grad():  # rounded to half precision: saved without loss, several take no more room than one
                for weights in [weights for network in networks for weights in network.parameters()]:
                    weights.copy_(weights.half())
        predictor = calibrated(replace(trained[-1], members=tuple(networks[:-1])), data, split)
        if processes.rank == 0:
            predictor.save(out / "predictor")
        return TrainResult(predictor, data, split, history)


def with_unmeasured(data: TrainingData, split: Split, teacher: Predictor) -> tuple[TrainingData, Split]:
    """Add pairs of programs and training CPUs that were compiled but not measured to the data and to the split's training part.
    First come programs without any label, if the split leaves their task to training; last come programs that are measured in
    training on another CPU. Their labels, with ``n_records`` 0, are the teacher's predictions from the compiled code: these err
    half as much as those from the AST (Hinton et al., *Distilling the knowledge in a neural network*, 2015). Raises
    PredictorError if there are no such pairs."""
    train = data.labels.iloc[split.train]
    hidden = data.labels.iloc[np.concatenate([split.valid, split.test])]
    of_train = train[~train["program"].isin(hidden["program"])].groupby("program").first()[["task", "origin"]]
    stored = {} if data.view is None else data.view.programs
    names = sorted((stored.keys() & data.asts.keys()) - set(train["program"]) - set(hidden["program"]))
    drawn = [(stored[name].task_hash, stored[name].origin) for name in names]
    programs = pd.concat([of_train, pd.DataFrame(drawn, names, of_train.columns).astype(of_train.dtypes)])
    known = {*zip(train["program"], train["device"], strict=True)}
    codes = {name: counts_key(data.devices[name]) for name in sorted(train["device"].unique())}
    pairs = [
        (program, name)
        for name, code in codes.items()
        for program in programs.index
        if (program, code) in data.codegen and (program, name) not in known
    ]
    more = pd.DataFrame(pairs, columns=["program", "device"]).join(programs, on="program")
    labels = pd.concat([data.labels, more.assign(n_records=0)], ignore_index=True)
    united, rows = replace(data, labels=labels), len(data) + np.arange(len(more))
    allowed = np.isin(rows, split_data(split.spec, united).train) & ~more["task"].isin(hidden["task"])
    measured = more["program"].isin(of_train.index).to_numpy()
    rows = np.concatenate([rows[allowed & ~measured], rows[measured]])
    united, rows = subset(united, np.concatenate([np.arange(len(data)), rows])), len(data) + np.arange(len(rows))
    if not len(rows):
        raise PredictorError("data.unmeasured: all compiled programs were measured; see cdmpp codegen --device")
    code = Evidence.of_rows(united, rows, compiled=True)
    united.labels.loc[rows, "latency_s"] = teacher.predict_rows(united, rows, code)
    return united, replace(split, train=np.concatenate([split.train, rows]))


def _train_network(
    config: Config, data: TrainingData, split: Split, out: Path, progress: ProgressCallback | None, resume: bool,
    processes: Processes,
) -> tuple[Fitted, TrainerState, list[dict[str, Any]]]:  # fmt: skip
    """Train one network of a predictor: what was fitted, its last state and its history."""
    fitted = prepare(config, data, split, processes=processes)
    trainer, checkpoint = fitted.trainer, out / CHECKPOINT_FILE
    arrays: list[NDArray[Any]] = [data.latency_s, split.train, split.valid]
    if data.codegen_counts is not None and (config.loss.codegen_weight or config.model.compiled):
        arrays.insert(1, data.codegen_counts)
    adapt = [*sorted(data.unlabelled), config.data.adapt_devices] if config.loss.cmd_weight else []
    run = fingerprint(config, [FEATURE_SET, *adapt], data, arrays)
    history: list[dict[str, Any]] = []
    if resume and checkpoint.exists():
        trainer.restore(load_checkpoint(checkpoint, run))
        lines = (out / HISTORY_FILE).read_text(encoding="utf-8").splitlines()
        history = [json.loads(line) for line in lines[: trainer.state().epoch]]
    processes.check_same("records or runs", int(run[:12], 16) + trainer.state().step)

    def record(line: dict[str, Any]) -> None:
        history.append(line)
        write_text(out / HISTORY_FILE, "".join(json.dumps(known) + "\n" for known in history))
        # after the history: resuming drops a line without a checkpoint, but cannot make up a missing one
        save_checkpoint(checkpoint, trainer.state(), run)
        if progress is not None:
            progress(line)

    if processes.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (out / "split.json").write_text(split.to_json(), encoding="utf-8")
    final = trainer.fit(record if processes.rank == 0 else history.append)
    return fitted, final, history


@dataclass(frozen=True)
class Fitted:
    """A trainer, ready to fit, with everything that was fitted on the training part of a split alone. ``arrays`` are all
    pairs, encoded; ``specs`` are the specifications of the training devices."""

    encoder: encoding.FeatureEncoder
    transform: encoding.LabelTransform
    arrays: encoding.LabelledArrays
    trainer: Trainer
    specs: Mapping[str, Device]

    def predictor(self, weights: dict[str, Any], training: dict[str, Any]) -> Predictor:
        """The predictor with these weights. It takes over the trainer's network."""
        network: Any = self.trainer.network.cpu()
        network.load_state_dict(weights)
        network.eval()
        return Predictor(network, self.encoder, self.transform, tuple(self.specs), training, specs=dict(self.specs))


def prepare(
    config: Config,
    data: TrainingData,
    split: Split,
    make_network: Callable[[encoding.LabelledArrays, encoding.FeatureEncoder], nn.Module] | None = None,
    max_seconds: float | None = None,
    processes: Processes | None = None,
) -> Fitted:
    """Fit encoder and label transform on the training part and make the trainer, of our network or of the one that
    ``make_network`` returns for the training pairs."""
    if not len(split.train):
        raise PredictorError("the split leaves no training records")
    real = data.labels["n_records"].to_numpy() > 0
    measured = split.train[real[split.train]]  # labels that another predictor gave fit nothing but weights
    table = data.labels.iloc[measured]
    specs = {name: data.devices[name] for name in sorted(table["device"].unique())}
    leaves = [data.asts[program].leaves for program in table["program"].unique()]
    parts: dict[str, tuple[NDArray[Any], Sequence[str]]] = {
        "leaf": (np.concatenate(leaves), LEAF_FEATURES),
        "device": (np.stack([device_features(device) for device in specs.values()]), DEVICE_FEATURES),
    }
    if config.model.pairs:
        parts["pair"] = (data.pair_features[measured], PAIR_FEATURES)
    if config.model.compiled and data.counted(measured).any():
        code = data.code_features(config.label.relative)
        parts["code"] = (code.program[measured], CODE_FEATURES)
        parts["loop"] = (code.loops[measured].reshape(-1, len(LOOP_CODE_FEATURES)), LOOP_CODE_FEATURES)
    elif config.model.compiled:
        logger.warning(
            "the training programs have no instruction counts, so the network cannot learn from any: cdmpp codegen DIR "
            "makes them"
        )
    encoder = encoding.FeatureEncoder.fit(FEATURE_SET, parts)
    del parts, leaves  # gigabytes
    arrays = encode(data, encoder, config.label.relative)
    arrays = replace(arrays, has_code=arrays.has_code & torch.from_numpy(real))
    if config.model.general_part:  # devices in order of their names, as if the network had never seen them
        on_gpu = np.array([device.kind == "gpu" for device in data.numbered_pairs()[1]])[:, None]
        seen = arrays.device_rows.numpy()
        rows = torch.from_numpy(np.where(on_gpu, encoder.general_devices(seen), seen))
        keep = torch.from_numpy(np.where(on_gpu, GENERAL_PAIRS[: encoder.pair_dim], np.float32(1)))
        arrays = replace(arrays, general=encoding.GeneralInputs(rows, keep))
    fitting = arrays.take(split.train)
    references = None if arrays.reference_s is None else arrays.reference_s[measured]
    transform = encoding.fit_transform(config.label.transform, data.latency_s[measured], references)
    trainer = Trainer(
        config,
        transform,
        fitting,
        arrays.take(split.valid),
        pairs_to_adapt_to(config, data, split, encoder, specs),
        taught=int(data.labels["program"].iloc[split.train[~real[split.train]]].isin(table["program"]).sum()),
        make_network=None if make_network is None else partial(make_network, fitting, encoder),
        max_seconds=max_seconds,
        processes=processes,
    )
    return Fitted(encoder, transform, arrays, trainer, specs)


def pairs_to_adapt_to(
    config: Config, data: TrainingData, split: Split, encoder: encoding.FeatureEncoder, specs: Mapping[str, Device]
) -> encoding.PairArrays | None:
    """Programs of ``data.adapt``, each with every device to adapt to, for the loss's CMD: what embeddings depend on. Pairs that
    validate or test are left out. None without CMD; PredictorError if no pair is left."""
    if not config.loss.cmd_weight:
        return None
    if (names := config.data.adapt_devices) is None:
        devices = [device for device in specs.values() if device.kind == "cpu"]
    else:
        devices = [data.devices.get(name) or get_device(name) for name in names]
    hidden = data.labels.iloc[np.concatenate([split.valid, split.test])]
    tested, programs = {*zip(hidden["program"], hidden["device"], strict=True)}, sorted(data.unlabelled)
    program, device = np.nonzero([[(name, each.name) not in tested for each in devices] for name in programs])
    if not len(program):
        raise PredictorError("loss.cmd_weight is above 0, but there are no programs to adapt to: name datasets in data.adapt")
    asts = [data.unlabelled[name] for name in programs]
    known = encoder.encode_devices(np.stack([device_features(each) for each in devices]))
    return encoding.PairArrays.encode(encoder, asts, known, program, device, None, None)


def encode(data: TrainingData, encoder: encoding.FeatureEncoder, relative: bool) -> encoding.LabelledArrays:
    """All pairs of the data as arrays, encoded with a fitted encoder. Labels and times from the code
    are in seconds or ``relative`` to the estimate."""
    asts, devices, program, device = data.numbered_pairs()
    pairs = data.pair_features if encoder.pair_dim else None
    known = encoder.encode_devices(np.stack([device_features(each) for each in devices]))
    code = data.code_features(relative) if encoder.code_dim else None
    arrays = encoding.PairArrays.encode(encoder, asts, known, program, device, pairs, code)
    return encoding.LabelledArrays(
        **vars(arrays),
        latency_s=data.latency_s,
        reference_s=data.reference_s() if relative else None,
        codegen=data.codegen_counts,
    )


def calibrated(predictor: Predictor, data: TrainingData, split: Split) -> Predictor:
    """The predictor with intervals and familiarity fitted on the split it was trained with. Intervals are calibrated on the
    validation part alone (:mod:`cdmpp.predictor.uncertainty`), separately for plain predictions, for those with instruction
    counts, and for those with latencies on other devices, whose scaling is also fitted there. Raises PredictorError if there
    are no training or no validation records."""
    rows = split.valid
    if not len(rows) or not len(split.train):
        raise PredictorError("calibrating needs training and validation records")
    scaling = fit_scaling(predictor.predict_rows, data, rows, split.test)
    familiarity = Familiarity.fit(predictor.encoder, data, split.train, rows)
    predictor = replace(predictor, scaling=scaling, familiarity=familiarity)

    def fit(evidence: Evidence) -> Calibration | None:
        chosen = evidence.known(len(rows))
        if not chosen.any():
            return None
        table = data.labels.iloc[rows[chosen]]
        inputs = None
        if table["task"].nunique() >= _TASKS_FOR_DIFFICULTY:
            inputs = predictor.difficulty_inputs(predictor.pairs_of_rows(data, rows, evidence))[chosen]
        return Calibration.fit(
            table["latency_s"],
            predictor.predict_rows(data, rows, evidence)[chosen],
            table["task"],
            table["device"],
            "record" if split.kind == "within_task" else "task",
            inputs,
        )

    code = Evidence.of_rows(data, rows, compiled=True)
    return replace(
        predictor,
        calibration=fit(NO_EVIDENCE),
        compiled_calibration=fit(code) if predictor.encoder.code_dim and code.code is not None else None,
        measured_calibration=fit(Evidence.of_rows(data, rows, measured=True, hidden=split.test)),
    )


def training_summary(config: Config, data: TrainingData, split: Split, state: TrainerState) -> dict[str, Any]:
    """JSON values that say what a predictor was trained on and how training ended."""
    table = data.labels.iloc[split.train]
    tasks = sorted(table["task"].unique())
    return {
        "split": split.spec,
        "seed": config.train.seed,
        "records": len(table),
        "programs": int(table["program"].nunique()),
        "records_by_device": {str(k): int(v) for k, v in sorted(table["device"].value_counts().items())},
        "networks": sorted({network for task in tasks for network in data.networks.get(task, ())}),
        "tasks": tasks,
        "latency_s_range": [float(table["latency_s"].min()), float(table["latency_s"].max())],
        "noise_floor_mape": noise_floor_mape(table),
        "epochs": state.epoch,
        "best_epoch": state.best_epoch,
        "valid_mape": state.best_mape,
    }


def as_data(config: Config, datasets: Any) -> TrainingData:
    """Data as given, or gathered from dataset folders (None: ``config.data.paths``)."""
    if isinstance(datasets, TrainingData):
        return datasets
    if datasets is None and not config.data.paths:
        raise PredictorError("no data: give dataset folders, or data.paths in the configuration")
    read_spec(config.split.spec)  # a malformed one is refused before gigabytes are read
    return gather(config.data.paths if datasets is None else datasets, config.data)


def fingerprint(config: Config, named: list[Any], data: TrainingData, arrays: Sequence[NDArray[Any]]) -> str:
    """Hash of a configuration (but for data, threads, precision and members), JSON values, the pairs of data, and arrays."""
    settings = config.model_dump(mode="json", exclude={"data": True, "train": {"threads", "precision", "members"}})
    digest = hashlib.sha256(json.dumps([settings, *named], sort_keys=True).encode())
    for column in ("program", "device"):
        digest.update("\n".join(data.labels[column]).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]
