"""A device that comes to a trained network: what tells it from the known ones, and what its programs have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.predictor.encoding import FeatureEncoder, signed_log1p

if TYPE_CHECKING:
    import torch

    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.predictor import Predictor

#: A device's factor is shrunk as if so many tasks more had shown none: few, as tasks of a device differ less than devices.
_TASKS_WITHOUT_FACTOR = 0.5

#: Two encoded device features closer than this are equal.
_SAME = 1e-5


def device_factor(
    base: Predictor, data: TrainingData, device: str, rows: NDArray[np.int64]
) -> dict[str, float]:
    """By how much a device that is new to a predictor is slower than it expects: the median over the tasks of these rows of
    the label table of the median of their programs, shrunk for few tasks; ``{device: factor}``.

    Empty for a device it knows, and for a GPU that it predicts from what GPUs share: the network starts from another
    prediction, that of all that is known of it.
    """
    from cdmpp.predictor.scoring import predict_rows

    if device in base.devices or base.told_less(data.devices[device]):
        return {}
    table = data.labels.iloc[rows]
    logs = np.log(table["latency_s"].to_numpy(dtype=np.float64) / predict_rows(base, data, rows))
    medians = [float(np.median(logs[at])) for at in table.groupby("task", observed=True).indices.values()]
    shrunk = len(medians) / (len(medians) + _TASKS_WITHOUT_FACTOR)
    return {device: math.exp(shrunk * float(np.median(medians)))}


def twins_of(base: Predictor, encoder: FeatureEncoder, data: TrainingData, device: str) -> list[str]:
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
    """Make device features that were constant in training, and so are hidden, tell a new device from the known.

    Known devices are encoded as before, and so are all features that varied. Where a feature did not vary and has
    another value on the new device, that is encoded as 1 or -1.

    Parameters
    ----------
    known
        Raw features of the training devices.
    vector
        Raw features of the new device, float64 (device_features,).

    Returns
    -------
    The encoder, and the columns of an encoded device that were 0 in training and are not on the new device.
    """
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
