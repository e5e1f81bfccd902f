"""A training run from configuration and datasets to a folder with a predictor.

The run folder holds ``config.yaml``, ``split.json``, ``history.jsonl`` (one line an epoch),
``checkpoint.safetensors`` and, when training is done, ``predictor/``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.config import Config, dump_config
from cdmpp.predictor.data import TrainingData, gather, split_data
from cdmpp.predictor.elsewhere import DeviceScaling, fit_scaling
from cdmpp.predictor.encoding import FeatureEncoder
from cdmpp.predictor.evidence import NO_EVIDENCE, Evidence
from cdmpp.predictor.familiarity import Familiarity
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.transforms import LabelTransform, fit_transform
from cdmpp.predictor.uncertainty import Calibration

if TYPE_CHECKING:
    import torch

    from cdmpp.dataset import DatasetView, Split
    from cdmpp.device import Device
    from cdmpp.predictor.batching import GeneralInputs, LabelledArrays
    from cdmpp.predictor.trainer import ProgressCallback, Trainer, TrainerState

logger = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.safetensors"
HISTORY_FILE = "history.jsonl"


@dataclass(frozen=True)
class TrainResult:
    """What a training run gives.

    Attributes
    ----------
    predictor
        The predictor of the best epoch.
    data, split
        What it was trained on, to be evaluated with.
    history
        One line an epoch, as in ``history.jsonl``.
    """

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
) -> TrainResult:
    """Train a predictor and write the run folder.

    Parameters
    ----------
    config
        See :mod:`cdmpp.predictor.config`.
    datasets
        Data or dataset folders; None takes ``config.data.paths``.
    out
        The run folder.
    progress
        Called with every epoch's history line.
    resume
        Continue the run in ``out`` if there is one; the result is that of an unbroken run.

    Raises
    ------
    PredictorError
        ``out`` holds a run and ``resume`` is off, or it belongs to another configuration or other records;
        training diverged.
    DatasetError, SplitError
        No records; a split that cannot be made.
    """
    out = Path(out)
    if not resume and any((out / name).exists() for name in (CHECKPOINT_FILE, HISTORY_FILE, "predictor")):
        raise PredictorError(f"{out} holds a training run: resume it, or choose another folder")
    data = _as_data(config, datasets)
    split = split_data(config.split.spec, data)
    fitted = prepare(config, data, split)
    fingerprint = _fingerprint(config, data, split)
    out.mkdir(parents=True, exist_ok=True)
    state = _restore(fitted.trainer, out, fingerprint) if resume else None
    history = _read_history(out, state.epoch if state else 0)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (out / "split.json").write_text(split.to_json(), encoding="utf-8")
    final = _fit(fitted.trainer, out, fingerprint, history, progress)
    predictor = fitted.predictor(final.best, training_summary(config, data, split, final))
    predictor = calibrated(predictor, data, split)
    predictor.save(out / "predictor")
    return TrainResult(predictor, data, split, history)


@dataclass(frozen=True)
class Fitted:
    """A trainer with everything that was fitted on the training part of a split.

    Attributes
    ----------
    encoder, transform
        Fitted on training programs, training devices and training labels alone.
    arrays
        All pairs, encoded.
    trainer
        Ready to fit.
    devices, specs
        Training devices: name -> raw features, and specification.
    """

    encoder: FeatureEncoder
    transform: LabelTransform
    arrays: LabelledArrays
    trainer: Trainer
    devices: dict[str, NDArray[np.float64]]
    specs: Mapping[str, Device]

    def predictor(self, weights: dict[str, Any], training: dict[str, Any]) -> Predictor:
        """The predictor with these weights; takes over the trainer's network."""
        network = self.trainer.network.cpu()
        network.load_state_dict(weights)
        network.eval()
        return Predictor(
            network, self.encoder, self.transform, self.devices, training, specs=dict(self.specs)
        )


def prepare(config: Config, data: TrainingData, split: Split) -> Fitted:
    """Fit encoder and label transform on the training part and make the trainer."""
    from cdmpp.device import DEVICE_FEATURES
    from cdmpp.predictor.instruction_time import CODE_FEATURES
    from cdmpp.predictor.pair_features import PAIR_FEATURES
    from cdmpp.predictor.trainer import Trainer
    from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURES

    train_rows, valid_rows = np.asarray(split.train), np.asarray(split.valid)
    labels = data.labels
    if not len(train_rows):
        raise PredictorError("the split leaves no training records")
    programs = labels["program"].iloc[train_rows].unique()
    vectors = data.device_vectors()
    train_devices = sorted(labels["device"].iloc[train_rows].unique())
    pairs = raw_pairs(data) if config.model.pairs else None
    counted = config.model.compiled and _any_counted(data, train_rows)
    encoder = FeatureEncoder.fit(
        np.concatenate([data.asts[program].leaves for program in programs]),
        np.stack([vectors[name] for name in train_devices]),
        feature_set=FEATURE_SET,
        leaf_features=LEAF_FEATURES,
        device_features=DEVICE_FEATURES,
        pairs=None if pairs is None else pairs[train_rows],
        pair_features=PAIR_FEATURES,
        codes=data.code_features[0][train_rows] if counted else None,
        code_features=CODE_FEATURES,
        clip=config.encoder.clip,
    )
    arrays = encode(data, encoder, config.label.relative_to, pairs)
    if config.model.general_part:
        arrays = replace(arrays, general=general_inputs(data, encoder, arrays.device_rows))
    fitting = arrays.take(train_rows)
    transform = fit_transform(
        config.label.transform, fitting.latency_s, fitting.reference_s, config.label.relative_to
    )
    trainer = Trainer(
        config,
        transform,
        arrays.take(train_rows),
        arrays.take(valid_rows),
        encoder.leaf_dim,
        encoder.device_dim,
        encoder.pair_dim,
        arrays.unlabelled(np.asarray(split.adapt)),
    )
    return Fitted(
        encoder,
        transform,
        arrays,
        trainer,
        {name: vectors[name] for name in train_devices},
        {name: data.devices[name] for name in train_devices},
    )


def general_inputs(data: TrainingData, encoder: FeatureEncoder, device_rows: torch.Tensor) -> GeneralInputs:
    """What a network is given of the devices of the data (in order of their names) as if it had never seen them."""
    import torch

    from cdmpp.predictor.batching import GeneralInputs

    on_gpu = np.array([data.devices[name].kind == "gpu" for name in sorted(data.devices)])[:, None]
    rows = np.where(on_gpu, encoder.general_devices(device_rows.numpy()), device_rows.numpy())
    keep = np.where(on_gpu, encoder.general_pairs(), np.float32(1))
    return GeneralInputs(torch.from_numpy(rows), torch.from_numpy(keep))


def _any_counted(data: TrainingData, rows: NDArray[np.int64]) -> bool:
    """Whether any of these rows has instruction counts; a warning says that none has."""
    counted = bool(data.counted(rows).any())
    if not counted:
        logger.warning(
            "the training programs have no instruction counts, so the network cannot learn from any: cdmpp codegen DIR "
            "makes them"
        )
    return counted


def raw_pairs(data: TrainingData) -> NDArray[np.float64]:
    """What is known of program and device together for every row of the label table, float64 (n, len(PAIR_FEATURES))."""
    from cdmpp.predictor.pair_features import pair_rows

    return pair_rows(*data.numbered_pairs())


def encode(
    data: TrainingData,
    encoder: FeatureEncoder,
    relative_to: str = "",
    pairs: NDArray[np.float64] | None = None,
) -> LabelledArrays:
    """All pairs of the data as arrays, encoded with a fitted encoder.

    ``relative_to`` names the reference latencies that come with them, "" or "none" for none; ``pairs`` is what
    :func:`raw_pairs` gives, where it is known already.
    """
    import torch

    from cdmpp.predictor.batching import LabelledArrays, PackedPrograms

    programs = list(dict.fromkeys(data.labels["program"]))
    number = {program: i for i, program in enumerate(programs)}
    devices = sorted(data.devices)
    vectors = data.device_vectors()
    device_number = {name: i for i, name in enumerate(devices)}
    if pairs is None and encoder.pair_dim:
        pairs = raw_pairs(data)
    encoded = (
        np.zeros((len(data), 0), np.float32)
        if pairs is None or not encoder.pair_dim
        else encoder.encode_pairs(pairs)
    )
    code, has_code = np.zeros((len(data), 0), np.float32), np.zeros(len(data), bool)
    if encoder.code_dim:
        code, has_code = encoder.encode_codes(*data.code_features)
    reference = data.reference_s(relative_to) if relative_to not in ("", "none") else None
    return LabelledArrays(
        PackedPrograms.pack([data.asts[program] for program in programs], encoder),
        torch.from_numpy(encoder.encode_devices(np.stack([vectors[name] for name in devices]))),
        np.asarray([number[program] for program in data.labels["program"]], dtype=np.int64),
        np.asarray([device_number[name] for name in data.labels["device"]], dtype=np.int64),
        torch.from_numpy(encoded),
        torch.from_numpy(code),
        torch.from_numpy(has_code),
        data.labels["latency_s"].to_numpy(dtype=np.float64),
        reference,
        group=data.labels.groupby(["task", "device"], observed=True).ngroup().to_numpy(dtype=np.int64),
        codegen=data.codegen_counts,
    )


def calibrated(
    predictor: Predictor,
    data: TrainingData,
    split: Split,
    seed: int = 0,
    scaling: DeviceScaling | None = None,
) -> Predictor:
    """The predictor with intervals and familiarity, both from the split it was trained with.

    Intervals are calibrated on the validation part alone (:mod:`cdmpp.predictor.uncertainty`): of plain predictions, of those
    with instruction counts, and of those with latencies on other devices, whose scaling is fitted there too unless it is
    given. Familiarity is fitted to the training part, its threshold to the validation part.

    Raises
    ------
    PredictorError
        The split has no training or no validation records.
    """
    rows = np.asarray(split.valid, dtype=np.int64)
    if not len(rows) or not len(split.train):
        raise PredictorError("calibrating needs training and validation records")
    hidden = np.concatenate([np.asarray(part, dtype=np.int64) for part in (split.test, split.adapt)])

    def fit(evidence: Evidence, known: NDArray[np.bool_] | None = None) -> Calibration | None:
        if known is not None and not known.any():
            return None
        chosen = slice(None) if known is None else known
        table = data.labels.iloc[rows[chosen]]
        return Calibration.fit(
            table["latency_s"].to_numpy(dtype=np.float64),
            predictor.predict_rows(data, rows, evidence)[chosen],
            table["task"].tolist(),
            table["device"].tolist(),
            "record" if split.kind == "within_task" else "task",
        )

    train = np.asarray(split.train, dtype=np.int64)
    familiarity = Familiarity.fit(predictor.encoder, data, train, rows, seed)
    scaling = scaling or fit_scaling(predictor.predict_rows, data, rows, hidden)
    predictor = replace(predictor, scaling=scaling, familiarity=familiarity, compiled_calibration=None)
    if predictor.encoder.code_dim:
        code = Evidence.of_rows(data, rows, compiled=True)
        predictor = replace(predictor, compiled_calibration=fit(code, code.known(len(rows))))
    elsewhere = Evidence.of_rows(data, rows, measured=True, hidden=hidden)
    return replace(
        predictor,
        calibration=fit(NO_EVIDENCE),
        measured_calibration=fit(elsewhere, elsewhere.known(len(rows))),
    )


def training_summary(config: Config, data: TrainingData, split: Split, state: TrainerState) -> dict[str, Any]:
    """JSON values that say what a predictor was trained on and how it ended."""
    from cdmpp.dataset import noise_floor_mape

    table = data.labels.iloc[np.asarray(split.train)]
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


def _as_data(config: Config, datasets: Any) -> TrainingData:
    if isinstance(datasets, TrainingData):
        return datasets
    if datasets is None:
        if not config.data.paths:
            raise PredictorError("no data: give dataset folders, or data.paths in the configuration")
        datasets = config.data.paths
    return gather(datasets, config.data)


def _fit(
    trainer: Trainer,
    out: Path,
    fingerprint: str,
    history: list[dict[str, Any]],
    progress: ProgressCallback | None,
) -> TrainerState:
    from cdmpp.predictor.checkpoint import save_checkpoint

    with recorded(out, history, progress) as record:
        return trainer.fit(lambda state: save_checkpoint(out / CHECKPOINT_FILE, state, fingerprint), record)


@contextmanager
def recorded(
    out: Path, history: list[dict[str, Any]], progress: ProgressCallback | None
) -> Iterator[ProgressCallback]:
    """What to call after every epoch: it adds the line to ``history`` and to the run folder's file, then reports it.

    The file begins with the lines that ``history`` holds already.
    """
    with (out / HISTORY_FILE).open("w", encoding="utf-8") as file:
        for line in history:
            file.write(json.dumps(line) + "\n")
        file.flush()

        def record(line: dict[str, Any]) -> None:
            history.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            if progress is not None:
                progress(line)

        yield record


def _restore(trainer: Trainer, out: Path, fingerprint: str) -> TrainerState | None:
    from cdmpp.predictor.checkpoint import load_checkpoint

    path = out / CHECKPOINT_FILE
    if not path.exists():
        return None
    state = load_checkpoint(path, fingerprint)
    trainer.restore(state)
    return state


def _read_history(out: Path, epochs: int) -> list[dict[str, Any]]:
    """The history lines of the epochs that a checkpoint holds; a line cut by a kill is dropped."""
    path = out / HISTORY_FILE
    if epochs == 0 or not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["epoch"] <= epochs:
            lines.append(line)
    return lines


def _fingerprint(config: Config, data: TrainingData, split: Split) -> str:
    """Identifies everything that the result of a run depends on."""
    from cdmpp.program.ast import FEATURE_SET

    settings = config.model_dump(mode="json", exclude={"data": True, "train": {"threads"}})
    digest = hashlib.sha256(json.dumps([settings, FEATURE_SET], sort_keys=True).encode())
    for column in ("program", "device"):
        digest.update("\n".join(data.labels[column]).encode())
    digest.update(data.labels["latency_s"].to_numpy(dtype=np.float64).tobytes())
    counts = data.codegen_counts if config.loss.codegen_weight or config.model.compiled else None
    if counts is not None:
        digest.update(counts.tobytes())
    for rows in (split.train, split.valid, split.adapt):
        digest.update(np.asarray(rows, dtype=np.int64).tobytes())
    return digest.hexdigest()[:32]
