"""What is known about programs before anything is measured: predicted latency, and where programs lie to each other."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.program.ast import CompactAST

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

#: Variance, in squared log seconds, of the common error of predictions for a device that was never seen: a factor of e.
_UNSEEN_DEVICE = 1.0


@dataclass(frozen=True)
class Encoded:
    """Programs as the correction sees them.

    Attributes
    ----------
    log_s
        Log of the predicted seconds, float64 (n,).
    z
        Embeddings, float64 (n, d).
    """

    log_s: FloatArray
    z: FloatArray

    def __len__(self) -> int:
        return len(self.log_s)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Encoded:
        """Some of the programs."""
        return Encoded(self.log_s[rows], self.z[rows])

    @classmethod
    def stack(cls, parts: Sequence[Encoded]) -> Encoded:
        """Several together; one part at least."""
        return cls(np.concatenate([p.log_s for p in parts]), np.concatenate([p.z for p in parts]))


class Prior(Protocol):
    """Predicts without measurements of the tuning.

    Attributes
    ----------
    fingerprint
        Equal for equal weights and device.
    common
        Variance of an error that all its predictions on the device have in common, squared log seconds.
    """

    fingerprint: str
    common: float

    def encode(self, asts: Sequence[CompactAST]) -> Encoded:
        """Predict and embed, n >= 1 programs."""

    def half_width(self, coverage: float) -> float | None:
        """Half the width of an interval of one prediction, log seconds; None if it cannot be told."""


class PredictorPrior:
    """A trained predictor: its predictions, and its network's embeddings of programs on the device.

    Parameters
    ----------
    predictor, device
        The predictor and the device to predict for. One it never saw is extrapolated to, with a warning.

    Raises
    ------
    PredictorError
        It never saw a device of this kind (CPU, GPU).
    """

    def __init__(self, predictor: Predictor, device: Device) -> None:
        self._predictor, self._device = predictor, device
        self.common = 0.0
        if device.name not in predictor.devices:
            self.common = _UNSEEN_DEVICE
            _check_kind(predictor, device)
            logger.warning(
                "the predictor was trained on %s, not on %s: its predictions are extrapolations until some "
                "programs have been measured",
                ", ".join(predictor.devices),
                device.name,
            )
        self.fingerprint = _fingerprint(predictor, device)

    def encode(self, asts: Sequence[CompactAST]) -> Encoded:
        """Predict and embed in one pass through the network."""
        import torch

        from cdmpp.predictor.batching import inference_batches
        from cdmpp.predictor.roofline import reference_s

        predictor = self._predictor
        arrays = predictor.encode(asts, [self._device], np.zeros(len(asts), dtype=np.int64))
        labels = np.empty(len(asts))
        z = np.empty((len(asts), predictor.network.config.embedding_dim))
        predictor.network.eval()
        with torch.inference_mode():
            for rows in inference_batches(arrays.packed.lengths, 1024):
                batch, context = arrays.batch(rows, torch.device("cpu"))
                embedding = predictor.network.embed(batch, context.device)
                labels[rows] = predictor.network.decode(embedding, context).double().numpy()
                z[rows] = embedding.double().numpy()
        transform = predictor.transform
        reference = reference_s(transform.relative_to, asts, self._device) if transform.relative else None
        latency_s = transform.inverse(labels, reference) * predictor.device_factor(self._device)
        return Encoded(np.log(latency_s), z)

    def half_width(self, coverage: float) -> float | None:
        """Of the predictor's calibration, see :mod:`cdmpp.predictor.uncertainty`."""
        calibration = self._predictor.calibration
        if calibration is None or not calibration.supports(coverage):
            return None
        return calibration.half_width(self._device.name, coverage)


class AnalyticalPrior:
    """No predictor: the analytical estimate of :mod:`cdmpp.predictor.roofline`; programs lie as their leaf vectors do.

    The embedding is the logarithm of the sums and of the maxima of all leaf features.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.common = _UNSEEN_DEVICE
        self.fingerprint = hashlib.blake2b(f"estimate:{device.name}".encode(), digest_size=8).hexdigest()

    def encode(self, asts: Sequence[CompactAST]) -> Encoded:
        """Estimate and embed."""
        from cdmpp.predictor.encoding import signed_log1p
        from cdmpp.predictor.roofline import estimate_s

        z = np.stack([np.concatenate([ast.leaves.sum(0), ast.leaves.max(0)]) for ast in asts])
        return Encoded(np.log(estimate_s(asts, self._device)), signed_log1p(z.astype(np.float64)))

    def half_width(self, coverage: float) -> float | None:
        """Nothing tells how far off it is."""
        return None


def make_prior(predictor: Predictor | None, device: Device) -> Prior:
    """The prior of a predictor, or without one the analytical estimate.

    Raises
    ------
    PredictorError
        The predictor never saw a device of this kind.
    """
    return AnalyticalPrior(device) if predictor is None else PredictorPrior(predictor, device)


def _check_kind(predictor: Predictor, device: Device) -> None:
    from cdmpp.device import DEVICE_FEATURES

    column = DEVICE_FEATURES.index(f"is_{device.kind}")
    if not any(vector[column] > 0 for vector in predictor.devices.values()):
        raise PredictorError(
            f"the predictor was trained on {', '.join(predictor.devices)} and never saw a {device.kind}: it says "
            f"nothing about {device.name}; finetune it on records of that device, or tune without a predictor"
        )


def _fingerprint(predictor: Predictor, device: Device) -> str:
    digest = hashlib.blake2b(device.name.encode(), digest_size=8)
    for name, value in sorted(predictor.network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
