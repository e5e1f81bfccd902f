"""Files on disk: a predictor's folder (``predictor.json`` and ``weights.safetensors``), and the checkpoint of a training run,
one safetensors file. A run that is killed while it writes leaves either the old file or the new one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from cdmpp.device import DEVICE_FEATURES, Device
from cdmpp.errors import FeatureMismatchError, PredictorError, raised_as, reason
from cdmpp.files import parse_json, read_json, replacing, write_text
from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.encoding import WAVES, Correction, FeatureEncoder, transform_from_json
from cdmpp.predictor.evidence import DeviceScaling
from cdmpp.predictor.network import LatencyNetwork
from cdmpp.predictor.pair_features import CODE_FEATURES, LOOP_CODE_FEATURES, PAIR_FEATURES
from cdmpp.predictor.uncertainty import Calibration, Familiarity
from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURES
from cdmpp.program.codegen import COUNTING_VERSION

CHECKPOINT_VERSION = 1
FORMAT = "cdmpp-predictor"
FORMAT_VERSION = 7

_JSON_FILE = "predictor.json"
_WEIGHTS_FILE = "weights.safetensors"
#: Calibration -> prefix of the names of its arrays, empty for that of plain predictions.
_PREFIXES = {"calibration": "", "compiled_calibration": "compiled_", "measured_calibration": "measured_"}

#: Fields of the state that a checkpoint keeps besides tensors.
_PROGRESS = ("epoch", "step", "best_epoch", "best_mape")

Tensors = dict[str, torch.Tensor]


@dataclass
class TrainerState:
    """Everything the next epoch depends on: the numbers of epochs and optimiser steps done; state dictionaries of the current
    weights, of their average and of the average at the best epoch; the state of the optimiser (parameter number -> name ->
    tensor); the best epoch (from 1) and its validation MAPE, 0 and infinity before the first epoch."""

    epoch: int = 0
    step: int = 0
    weights: Tensors = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    best: Tensors = field(default_factory=dict)
    optimizer: dict[int, Tensors] = field(default_factory=dict)
    best_epoch: int = 0
    best_mape: float = float("inf")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as draft:
        draft.write_bytes(save(contiguous, metadata=dict(metadata)))


def load_tensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file and its metadata. Raises PredictorError if it is missing or damaged."""
    unreadable = raised_as(PredictorError, f"{path}: expected a safetensors file, cannot read it", SafetensorError)
    with unreadable, safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, dict(file.metadata() or {})


def save_checkpoint(path: Path, state: TrainerState, fingerprint: str) -> None:
    """Write a checkpoint; ``fingerprint`` identifies configuration and records."""
    groups = ("weights", "average", "best")
    tensors = {f"{group}/{k}": v for group in groups for k, v in getattr(state, group).items()}
    for number, values in state.optimizer.items():
        tensors.update({f"optimizer/{number}/{k}": v for k, v in values.items()})
    progress = {name: getattr(state, name) for name in _PROGRESS}
    progress.update(version=CHECKPOINT_VERSION, fingerprint=fingerprint)
    save_tensors(path, tensors, {"progress": json.dumps(progress)})


def load_checkpoint(path: Path, fingerprint: str) -> TrainerState:
    """Read a checkpoint. PredictorError if it is damaged or of another version, another configuration or other records."""
    tensors, metadata = load_tensors(path)
    try:
        progress: dict[str, Any] = parse_json(metadata["progress"])
        if progress["version"] != CHECKPOINT_VERSION:
            raise PredictorError(f"{path}: checkpoint version {progress['version']}, expected {CHECKPOINT_VERSION}")
        if progress["fingerprint"] != fingerprint:
            raise PredictorError(f"{path}: belongs to another configuration or other records; start a new run")
        state = TrainerState(**{name: progress[name] for name in _PROGRESS})
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            if group == "optimizer":
                number, _, key = rest.partition("/")
                state.optimizer.setdefault(int(number), {})[key] = tensor
            else:
                getattr(state, group)[rest] = tensor
    except (KeyError, ValueError, AttributeError) as err:
        raise PredictorError(f"{path}: not a complete cdmpp checkpoint: {err!r}") from err
    return state


def save_fields(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a :class:`~cdmpp.predictor.predictor.Predictor` into a folder, which is created if missing."""
    import cdmpp

    folder.mkdir(parents=True, exist_ok=True)
    networks = {"network": fields["network"]} | {f"member{i}": one for i, one in enumerate(fields["members"], 1)}
    states = {f"{name}.{k}": v for name, one in networks.items() for k, v in one.state_dict().items()}
    tensors = {key: v.half() if v.is_floating_point() and v.equal(v.half().float()) else v for key, v in states.items()}
    extras = {name: fields[name] for name in (*_PREFIXES, "familiarity", "scaling") if fields[name] is not None}
    for name in ("encoder", *_PREFIXES, "familiarity"):
        if fields[name] is not None:
            prefix = _PREFIXES.get(name, "")
            arrays = fields[name].to_arrays()
            tensors.update({prefix + k: torch.from_numpy(v.copy()) for k, v in arrays.items()})
    save_tensors(folder / _WEIGHTS_FILE, tensors, {"format": FORMAT})
    state = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "cdmpp_version": cdmpp.__version__,
        "model": fields["network"].config.model_dump(mode="json"),
        "encoder": fields["encoder"].to_json(),
        "counting_version": COUNTING_VERSION,
        "label_transform": fields["transform"].to_json(),
        "devices": list(fields["devices"]),
        "specs": {name: device.to_json() for name, device in fields["specs"].items()},
        "training": dict(fields["training"]),
        "corrections": {
            name: {kind: correction.to_json() for kind, correction in own.items()}
            for name, own in fields["corrections"].items()
        },
        **{name: part.to_json() for name, part in extras.items()},
    }
    write_text(folder / _JSON_FILE, json.dumps(state, indent=1, allow_nan=False) + "\n")


def load_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of a predictor from its folder or from the run folder that holds it. Raises the errors of
    :meth:`cdmpp.predictor.predictor.Predictor.load`."""
    if not (folder / _JSON_FILE).exists() and (folder / "predictor" / _JSON_FILE).exists():
        folder = folder / "predictor"
    state = _read_state(folder)
    _check_features(state, folder)
    tensors, _ = load_tensors(folder / _WEIGHTS_FILE)
    arrays = {name: t.numpy() for name, t in tensors.items() if not name.startswith(("network.", "member"))}
    sentence = f"{folder / _JSON_FILE}: incomplete or malformed"
    with raised_as(PredictorError, sentence, KeyError, TypeError, AttributeError):
        fields = _build(state, arrays)
    try:
        fields["network"].load_state_dict(_part(tensors, "network."))
        fields["members"] = []
        while own := _part(tensors, f"member{len(fields['members']) + 1}."):
            fields["members"].append(_network(state["model"], fields["encoder"]))
            fields["members"][-1].load_state_dict(own)
    except RuntimeError as err:
        raise PredictorError(f"{folder}: weights do not fit the network of {_JSON_FILE}: {reason(err)[:400]}") from err
    return fields


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _network(model: Any, encoder: FeatureEncoder) -> LatencyNetwork:
    widths = encoder.leaf_dim, encoder.device_dim, encoder.pair_dim, encoder.code_dim
    return LatencyNetwork(ModelConfig.model_validate(model), *widths).eval()


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / _JSON_FILE
    try:
        state = read_json(path)
    except OSError as err:
        raise PredictorError(f"{folder}: no predictor here, expected {_JSON_FILE} and {_WEIGHTS_FILE}") from err
    except ValueError as err:
        raise PredictorError(f"{path}: expected JSON, but it is damaged: {err}") from err
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise PredictorError(f'{path}: expected "format": "{FORMAT}"')
    if state.get("format_version") != FORMAT_VERSION:
        raise PredictorError(f"{path}: predictor format {state.get('format_version')}, this cdmpp reads {FORMAT_VERSION}")
    return state


def _check_features(state: Mapping[str, Any], folder: Path) -> None:
    encoder = state.get("encoder")
    if not isinstance(encoder, dict):
        raise PredictorError(f"{folder / _JSON_FILE}: expected an object under 'encoder'")
    if encoder.get("feature_set") != FEATURE_SET or encoder.get("leaf_features") != list(LEAF_FEATURES):
        raise FeatureMismatchError(
            f"{folder}: trained on features {encoder.get('feature_set')}, this cdmpp computes {FEATURE_SET}"
        )
    every = {"device": DEVICE_FEATURES, "pair": PAIR_FEATURES, "code": CODE_FEATURES, "loop": LOOP_CODE_FEATURES}
    for part, known in every.items():
        names = encoder.get(f"{part}_features")
        if names != list(known) and (names or part == "device"):
            raise FeatureMismatchError(f"{folder}: trained on {part} features {names}, this cdmpp computes {list(known)}")
    counting = state.get("counting_version", 1)
    if encoder.get("code_features") and counting != COUNTING_VERSION:
        raise FeatureMismatchError(
            f"{folder}: trained on instructions counted by version {counting}, this cdmpp counts by {COUNTING_VERSION}"
        )


def _build(state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    encoder = FeatureEncoder.from_arrays(state["encoder"], arrays)
    fields: dict[str, Any] = {
        "network": _network(state["model"], encoder),
        "encoder": encoder,
        "transform": transform_from_json(state["label_transform"]),
        "devices": tuple(map(str, state["devices"])),
        "specs": {str(name): Device.from_json(spec) for name, spec in state["specs"].items()},
        "training": dict(state["training"]),
        "corrections": {
            str(name): {str(kind): Correction.from_json(values) for kind, values in own.items()}
            for name, own in state.get("corrections", {}).items()
        },
    }
    width = encoder.pair_dim + encoder.code_dim + fields["network"].config.embedding_dim + WAVES
    if any(len(one.weights) != width for own in fields["corrections"].values() for one in own.values()):
        raise ValueError("what it was taught of a device is of an earlier cdmpp: finetune again")
    for name, prefix in _PREFIXES.items():
        if name in state:
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            fields[name] = Calibration.from_arrays(state[name], own)
    if "familiarity" in state:
        fields["familiarity"] = Familiarity.from_arrays(state["familiarity"], arrays, encoder)
    if "scaling" in state:
        fields["scaling"] = DeviceScaling.from_json(state["scaling"])
    return fields
