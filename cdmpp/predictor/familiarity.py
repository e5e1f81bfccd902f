"""Is a program like those that were trained on?

A (program, device) pair is described by what the network is given of it: the mean of the program's encoded leaves,
the logarithm of their number, and the encoded device. Inputs rather than the network's embedding, because a network
is free to map what it never saw next to what it knows. A pair is *unfamiliar* if

* its Euclidean distance to the nearest of some 200 KMeans centres of training pairs is above a threshold, the 99 %
  quantile of the distances of the validation pairs (so where the split holds out tasks: farther than all but 1 % of
  new tasks' programs were), or
* a leaf has another value than all of training in a feature that did not vary there. The encoder hides such
  features, so no distance can show them.

An unfamiliar program is not known to be predicted badly, nor a familiar one well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import FeatureEncoder, signed_log1p

if TYPE_CHECKING:
    from cdmpp.predictor.data import TrainingData
    from cdmpp.program.ast import CompactAST

#: Part of the validation pairs that is nearer than the threshold.
QUANTILE = 0.99

#: Most centres, and most numbers in all of them: 64,000 of single precision are 256 kB.
MAX_CENTRES = 256
_MAX_NUMBERS = 64_000

#: Training and validation pairs looked at, drawn at random where there are more.
_MAX_PAIRS = 8192

#: Programs whose leaves are encoded at a time.
_CHUNK = 512

#: Change of a signed logarithm from which on a value differs from a training constant.
_NOVEL_LOG = 0.01


@dataclass(frozen=True)
class Familiarity:
    """Centres of the training pairs and how far from them is far.

    Attributes
    ----------
    centres
        float32 (m, leaf_dim + 1 + device_dim).
    threshold
        Distance above which a pair is unfamiliar.
    """

    centres: NDArray[np.float32]
    threshold: float

    @classmethod
    def fit(
        cls,
        encoder: FeatureEncoder,
        data: TrainingData,
        train_rows: NDArray[np.int64],
        valid_rows: NDArray[np.int64],
        seed: int = 0,
    ) -> Familiarity:
        """Cluster the training pairs and set the threshold on the validation pairs.

        Parameters
        ----------
        encoder
            Fitted on the training part.
        train_rows, valid_rows
            Rows of ``data.labels``, one at least each.
        """
        from sklearn.cluster import KMeans

        rng = np.random.default_rng(seed)
        train, valid = (
            _describe_rows(encoder, data, _sample(rng, rows)) for rows in (train_rows, valid_rows)
        )
        distinct = len(np.unique(train, axis=0))
        number = min(MAX_CENTRES, max(1, _MAX_NUMBERS // train.shape[1]), distinct)
        clusters = KMeans(number, n_init=1, max_iter=25, random_state=seed).fit(train)
        centres = np.asarray(clusters.cluster_centers_, dtype=np.float32)
        return cls(centres, float(np.quantile(_nearest(valid, centres), QUANTILE)))

    def unfamiliar(
        self, encoder: FeatureEncoder, asts: Sequence[CompactAST], device: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether each program is unfamiliar on the device of these raw features, bool (n,)."""
        if not asts:
            return np.zeros(0, dtype=bool)
        pairs = describe_pairs(encoder, asts, np.broadcast_to(device, (len(asts), len(device))))
        return (_nearest(pairs, self.centres) > self.threshold) | _novel(encoder, asts)

    def to_json(self) -> dict[str, Any]:
        """The threshold; the centres are in :meth:`to_arrays`."""
        return {"threshold": self.threshold, "quantile": QUANTILE}

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """The centres, to be stored beside the weights."""
        return {"familiarity.centres": self.centres}

    @classmethod
    def from_arrays(
        cls, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], encoder: FeatureEncoder
    ) -> Familiarity:
        """Rebuild from :meth:`to_json` and :meth:`to_arrays`; KeyError or PredictorError if they do not fit."""
        centres = np.asarray(arrays["familiarity.centres"], dtype=np.float32)
        width = encoder.leaf_dim + 1 + encoder.device_dim
        if centres.ndim != 2 or centres.shape[1] != width or not len(centres):
            raise PredictorError(f"familiarity centres are of shape {centres.shape}, not (n, {width})")
        return cls(centres, float(state["threshold"]))


def describe_pairs(
    encoder: FeatureEncoder, asts: Sequence[CompactAST], devices: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Mean encoded leaf, log of the number of leaves, and encoded device.

    Parameters
    ----------
    asts
        n programs.
    devices
        Raw features of the device of each, (n, n_device_features).

    Returns
    -------
    float32 (n, leaf_dim + 1 + device_dim).
    """
    lengths = np.asarray([ast.leaves.shape[0] for ast in asts])
    means = np.empty((len(asts), encoder.leaf_dim), dtype=np.float32)
    for begin in range(0, len(asts), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        encoded = encoder.encode_leaves(np.concatenate([ast.leaves for ast in asts[part]]))
        starts = np.concatenate([[0], np.cumsum(lengths[part])[:-1]])
        means[part] = np.add.reduceat(encoded, starts, axis=0) / lengths[part, None]
    counts = np.log(lengths).astype(np.float32)[:, None]
    return np.concatenate([means, counts, encoder.encode_devices(devices)], axis=1)


def _describe_rows(
    encoder: FeatureEncoder, data: TrainingData, rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    table, vectors = data.labels.iloc[rows], data.device_vectors()
    devices = np.stack([vectors[name] for name in table["device"]])
    return describe_pairs(encoder, [data.asts[program] for program in table["program"]], devices)


def _sample(rng: np.random.Generator, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return rows if len(rows) <= _MAX_PAIRS else np.sort(rng.choice(rows, _MAX_PAIRS, replace=False))


def _nearest(pairs: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.float64]:
    """Distance of each pair to the nearest centre, float64 (n,)."""
    a, b = pairs.astype(np.float64), centres.astype(np.float64)
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.sqrt(np.maximum(squares.min(1), 0.0))


def _novel(encoder: FeatureEncoder, asts: Sequence[CompactAST]) -> NDArray[np.bool_]:
    """Whether a leaf of each program differs from training in a feature that was constant there, bool (n,)."""
    constant = ~encoder.leaf.active
    expected = encoder.leaf.mean[constant]
    return np.asarray(
        [bool((np.abs(signed_log1p(ast.leaves[:, constant]) - expected) > _NOVEL_LOG).any()) for ast in asts]
    )
