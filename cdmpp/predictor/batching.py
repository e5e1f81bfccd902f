"""Programs packed back to back in memory, and batches of similar length padded with a mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cdmpp.predictor.encoding import FeatureEncoder

if TYPE_CHECKING:
    from cdmpp.program.ast import CompactAST

#: Shuffled rows are sorted by length inside windows of this many batches.
_BUCKET_BATCHES = 16

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class PaddedBatch:
    """A batch the network takes.

    Attributes
    ----------
    leaves
        float32 (batch, length, features), zeros where padded.
    positions
        int64 (batch, length), pre-order node positions, 0 where padded.
    padding
        bool (batch, length), True where there is no leaf.
    """

    leaves: torch.Tensor
    positions: torch.Tensor
    padding: torch.Tensor

    def to(self, device: torch.device) -> PaddedBatch:
        """The batch on another torch device."""
        return PaddedBatch(self.leaves.to(device), self.positions.to(device), self.padding.to(device))


@dataclass(frozen=True)
class PackedPrograms:
    """Encoded leaves of many programs.

    Attributes
    ----------
    leaves
        float32 (total leaves, features).
    positions
        int64 (total leaves,).
    offsets
        int64 (programs + 1,): program i owns leaves ``offsets[i]:offsets[i + 1]``.
    """

    leaves: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def pack(cls, asts: Sequence[CompactAST], encoder: FeatureEncoder) -> PackedPrograms:
        """Encode and concatenate; every AST has at least one leaf."""
        lengths = [ast.leaves.shape[0] for ast in asts]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if asts:
            leaves = encoder.encode_leaves(np.concatenate([ast.leaves for ast in asts]))
            positions = np.concatenate([ast.positions for ast in asts]).astype(np.int64)
        else:
            leaves, positions = np.zeros((0, encoder.leaf_dim), np.float32), np.zeros(0, np.int64)
        return cls(torch.from_numpy(leaves), torch.from_numpy(positions), torch.from_numpy(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Leaves of each program, shape (programs,)."""
        return np.diff(self.offsets.numpy())

    def batch(self, programs: IntArray) -> PaddedBatch:
        """Pad the programs with these numbers, shape (batch,), to the longest of them."""
        rows = torch.from_numpy(np.asarray(programs, dtype=np.int64))
        start = self.offsets[rows]
        lengths = self.offsets[rows + 1] - start
        step = torch.arange(int(lengths.max()))
        padding = step[None, :] >= lengths[:, None]
        index = torch.where(padding, start[:, None], start[:, None] + step[None, :])
        leaves = self.leaves[index].masked_fill(padding[:, :, None], 0.0)
        return PaddedBatch(leaves, self.positions[index].masked_fill(padding, 0), padding)


def training_batches(lengths: IntArray, batch_size: int, rng: np.random.Generator) -> list[IntArray]:
    """Split ``range(len(lengths))`` into shuffled batches whose members have similar lengths."""
    order = rng.permutation(len(lengths))
    window = batch_size * _BUCKET_BATCHES
    batches: list[IntArray] = []
    for begin in range(0, len(order), window):
        chunk = order[begin : begin + window]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches.extend(chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size))
    return [batches[i] for i in rng.permutation(len(batches))]


def inference_batches(lengths: IntArray, batch_size: int, max_leaves: int = 65536) -> Iterator[IntArray]:
    """Split ``range(len(lengths))`` in batches sorted by length, of ``max_leaves`` padded leaves at most."""
    order = np.argsort(lengths, kind="stable")
    begin = 0
    while begin < len(order):
        end = min(begin + batch_size, len(order))
        while end - begin > 1 and (end - begin) * int(lengths[order[end - 1]]) > max_leaves:
            end = begin + max(1, (end - begin) // 2)
        yield order[begin:end]
        begin = end
