"""A predictor's folder: ``predictor.json`` and ``weights.safetensors``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import FeatureMismatchError, PredictorError
from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.encoding import FeatureEncoder
from cdmpp.predictor.familiarity import Familiarity
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.scaling import DeviceScaling
from cdmpp.predictor.transforms import transform_from_json
from cdmpp.predictor.uncertainty import Calibration

FORMAT = "cdmpp-predictor"
FORMAT_VERSION = 2

_JSON_FILE = "predictor.json"
_WEIGHTS_FILE = "weights.safetensors"
#: Before the names of the arrays of calibrations other than that of plain predictions.
_PREFIXES = {"compiled_calibration": "compiled_", "measured_calibration": "measured_"}


def save_predictor(predictor: Predictor, folder: Path) -> None:
    """Write ``predictor.json`` and ``weights.safetensors`` into a folder (made if missing)."""
    import torch

    import cdmpp
    from cdmpp.predictor.checkpoint import save_tensors
    from cdmpp.program.codegen import COUNTING_VERSION

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"network.{k}": v for k, v in predictor.network.state_dict().items()}
    extras = {
        "calibration": predictor.calibration,
        "familiarity": predictor.familiarity,
        "compiled_calibration": predictor.compiled_calibration,
        "measured_calibration": predictor.measured_calibration,
        "scaling": predictor.scaling,
    }
    for name, part in (("encoder", predictor.encoder), *extras.items()):
        if part is not None and not isinstance(part, DeviceScaling):
            prefix = _PREFIXES.get(name, "")
            arrays = {prefix + k: torch.from_numpy(v.copy()) for k, v in part.to_arrays().items()}
            tensors.update(arrays)
    save_tensors(folder / _WEIGHTS_FILE, tensors, {"format": FORMAT})
    state = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "cdmpp_version": getattr(cdmpp, "__version__", "unknown"),
        "model": predictor.network.config.model_dump(mode="json"),
        "encoder": predictor.encoder.to_json(),
        "counting_version": COUNTING_VERSION,
        "label_transform": predictor.transform.to_json(),
        "devices": {name: _to_json(vector) for name, vector in predictor.devices.items()},
        "specs": {name: device.to_json() for name, device in predictor.specs.items()},
        "training": dict(predictor.training),
        "device_factors": dict(predictor.device_factors),
        **{name: part.to_json() for name, part in extras.items() if part is not None},
    }
    temporary = folder / (_JSON_FILE + ".tmp")
    temporary.write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(folder / _JSON_FILE)


def read_predictor(folder: Path) -> Predictor:
    """Read a predictor's folder, or the run folder that holds one; errors as of :meth:`Predictor.load`."""
    if not (folder / _JSON_FILE).exists() and (folder / "predictor" / _JSON_FILE).exists():
        folder = folder / "predictor"
    state = _read_state(folder)
    _check_features(state, folder)
    return _build(state, folder)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / _JSON_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise PredictorError(
            f"{folder}: no predictor here, expected {_JSON_FILE} and {_WEIGHTS_FILE}"
        ) from err
    except ValueError as err:
        raise PredictorError(f"{path}: expected JSON, but it is damaged: {err}") from err
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise PredictorError(f'{path}: expected "format": "{FORMAT}"')
    if state.get("format_version") != FORMAT_VERSION:
        raise PredictorError(
            f"{path}: predictor format {state.get('format_version')}, this cdmpp reads {FORMAT_VERSION}"
        )
    return state


def _check_features(state: Mapping[str, Any], folder: Path) -> None:
    from cdmpp.device import DEVICE_FEATURES
    from cdmpp.predictor.instruction_time import CODE_FEATURES
    from cdmpp.predictor.pair_features import PAIR_FEATURES
    from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURES
    from cdmpp.program.codegen import COUNTING_VERSION

    encoder = state.get("encoder")
    if not isinstance(encoder, dict):
        raise PredictorError(f"{folder / _JSON_FILE}: expected an object under 'encoder'")
    if encoder.get("feature_set") != FEATURE_SET or encoder.get("leaf_features") != list(LEAF_FEATURES):
        raise FeatureMismatchError(
            f"{folder}: trained on features {encoder.get('feature_set')}, this cdmpp computes {FEATURE_SET}"
        )
    for part, known in (("device", DEVICE_FEATURES), ("pair", PAIR_FEATURES), ("code", CODE_FEATURES)):
        names = encoder.get(f"{part}_features")
        if names != list(known) and (names or part == "device"):
            raise FeatureMismatchError(
                f"{folder}: trained on {part} features {names}, this cdmpp computes {list(known)}"
            )
    counting = state.get("counting_version", 1)
    if encoder.get("code_features") and counting != COUNTING_VERSION:
        raise FeatureMismatchError(
            f"{folder}: trained on instructions counted by version {counting}, this cdmpp counts by {COUNTING_VERSION}"
        )


def _build(state: Mapping[str, Any], folder: Path) -> Predictor:
    from pydantic import ValidationError

    from cdmpp.device import Device
    from cdmpp.predictor.checkpoint import load_tensors
    from cdmpp.predictor.network import LatencyNetwork

    tensors, _ = load_tensors(folder / _WEIGHTS_FILE)
    arrays = {name: t.numpy() for name, t in tensors.items() if not name.startswith("network.")}
    weights = {name.removeprefix("network."): t for name, t in tensors.items() if name.startswith("network.")}
    path = folder / _JSON_FILE
    try:
        encoder = FeatureEncoder.from_arrays(state["encoder"], arrays)
        transform = transform_from_json(state["label_transform"])
        devices = {str(name): _from_json(vector) for name, vector in state["devices"].items()}
        network = LatencyNetwork(
            ModelConfig.model_validate(state["model"]),
            encoder.leaf_dim,
            encoder.device_dim,
            encoder.pair_dim,
            encoder.code_dim,
        )
        specs = {str(name): Device.from_json(spec) for name, spec in state["specs"].items()}
        training = dict(state["training"])
        factors = {str(name): float(factor) for name, factor in state.get("device_factors", {}).items()}
        if not all(0 < factor < math.inf for factor in factors.values()):
            raise ValueError("device_factors must be finite and above 0")
        calibration = (
            Calibration.from_arrays(state["calibration"], arrays) if "calibration" in state else None
        )
        others = {
            name: Calibration.from_arrays(
                state[name], {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            )
            for name, prefix in _PREFIXES.items()
            if name in state
        }
        scaling = DeviceScaling.from_json(state["scaling"]) if "scaling" in state else None
        familiarity = (
            Familiarity.from_arrays(state["familiarity"], arrays, encoder) if "familiarity" in state else None
        )
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as err:
        raise PredictorError(
            f"{path}: incomplete or malformed: {' '.join(str(err).split()) or err!r}"
        ) from err
    try:
        network.load_state_dict(weights)
    except RuntimeError as err:
        raise PredictorError(f"{folder}: weights do not fit the network of {_JSON_FILE}: {err}") from err
    network.eval()
    return Predictor(
        network,
        encoder,
        transform,
        devices,
        training,
        calibration,
        familiarity,
        specs,
        compiled_calibration=others.get("compiled_calibration"),
        measured_calibration=others.get("measured_calibration"),
        scaling=scaling,
        device_factors=factors,
    )


def _to_json(vector: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in vector]


def _from_json(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)
