"""Pairs of programs and devices as arrays: what training and evaluation take their batches from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cdmpp.predictor.batching import PackedPrograms, PaddedBatch
from cdmpp.predictor.network import predict_labels

if TYPE_CHECKING:
    from cdmpp.predictor.network import LatencyNetwork
    from cdmpp.predictor.transforms import LabelTransform


@dataclass(frozen=True)
class GeneralInputs:
    """What the network is told of devices as if it had never seen them.

    Attributes
    ----------
    device_rows
        float32 (m, device_dim), encoded; of a CPU all that is known.
    pair_keep
        float32 (m, pair_dim): 1 for pair features that are told of programs on the device, 0 for others.
    """

    device_rows: torch.Tensor
    pair_keep: torch.Tensor


@dataclass(frozen=True)
class PairArrays:
    """(program, device) pairs as arrays, without labels.

    Attributes
    ----------
    packed
        The encoded programs.
    device_rows
        float32 (devices, device_dim), encoded.
    program, device
        int64 (n,): program number and row of ``device_rows`` of each pair.
    pair
        float32 (n, joint_dim), encoded (:mod:`cdmpp.predictor.pair_features`); the last ``code_dim`` columns say what is told
        of the compiled program (:meth:`FeatureEncoder.encode_codes`).
    general
        Where the network is to learn to do with less (``model.general_part``).
    code_dim
        Width of what is told of the compiled program; 0 for a network that takes none.
    """

    packed: PackedPrograms
    device_rows: torch.Tensor
    program: NDArray[np.int64]
    device: NDArray[np.int64]
    pair: torch.Tensor
    general: GeneralInputs | None = field(default=None, kw_only=True)
    code_dim: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.program)

    @property
    def leaves(self) -> torch.Tensor:
        """Encoded leaves of the programs of these pairs, each program's once, float32 (leaves, leaf_dim)."""
        of_program = np.repeat(np.arange(len(self.packed)), self.packed.lengths)
        return self.packed.leaves[torch.from_numpy(np.isin(of_program, self.program))]

    def batch(
        self, rows: NDArray[np.int64], where: torch.device, unseen: NDArray[np.bool_] | None = None
    ) -> tuple[PaddedBatch, torch.Tensor]:
        """What the network takes of the pairs with these numbers, on a torch device; of the ``unseen``, bool (n,), as if their
        devices were not in training."""
        number = torch.from_numpy(self.device[rows])
        device, pair = self.device_rows[number], self.pair[torch.from_numpy(rows)]
        if unseen is not None and self.general is not None:
            chosen = torch.from_numpy(unseen)[:, None]
            device = torch.where(chosen, self.general.device_rows[number], device)
            pair = torch.where(chosen, pair * self.general.pair_keep[number], pair)
        context = torch.cat([device, pair], dim=1)
        return self.packed.batch(self.program[rows]).to(where), context.to(where)


@dataclass(frozen=True)
class LabelledArrays(PairArrays):
    """Labelled (program, device) pairs as arrays.

    Attributes
    ----------
    latency_s
        float64 (n,), the labels.
    reference_s
        float64 (n,), where the label transform is relative.
    group
        int64 (n,), equal where task and device are; the ranking loss needs it.
    codegen
        float32 (n, len(CODEGEN_FEATURES)), instruction counts; rows of NaN where there are none.
    """

    latency_s: NDArray[np.float64]
    reference_s: NDArray[np.float64] | None = None
    group: NDArray[np.int64] | None = None
    codegen: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.int64]) -> LabelledArrays:
        """The pairs with these numbers; programs and devices are shared."""
        reference_s = None if self.reference_s is None else self.reference_s[rows]
        return LabelledArrays(
            self.packed,
            self.device_rows,
            self.program[rows],
            self.device[rows],
            self.pair[torch.from_numpy(rows)],
            self.latency_s[rows],
            reference_s,
            None if self.group is None else self.group[rows],
            None if self.codegen is None else self.codegen[rows],
            general=self.general,
            code_dim=self.code_dim,
        )

    def unlabelled(self, rows: NDArray[np.int64]) -> PairArrays:
        """The pairs with these numbers without their labels."""
        pair = self.pair[torch.from_numpy(rows)]
        device = self.device[rows]
        return PairArrays(
            self.packed,
            self.device_rows,
            self.program[rows],
            device,
            pair,
            general=self.general,
            code_dim=self.code_dim,
        )

    def predict(self, network: LatencyNetwork, transform: LabelTransform) -> NDArray[np.float64]:
        """Predicted seconds of every pair, shape (n,), without instruction counts."""
        pair = self.pair
        if self.code_dim:
            pair = pair.clone()
            pair[:, -self.code_dim :] = 0
        labels = predict_labels(network, self.packed, self.program, self.device_rows, self.device, pair)
        return transform.inverse(labels, self.reference_s)
