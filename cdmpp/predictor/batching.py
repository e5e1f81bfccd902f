"""Programs and (program, device) pairs in memory, and the batches that the network takes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cdmpp.predictor.encoding import FeatureEncoder
from cdmpp.predictor.pair_features import CodeRows
from cdmpp.program.ast import CompactAST

#: Shuffled rows are sorted by length inside windows of this many batches.
_BUCKET_BATCHES = 16

IntArray = NDArray[np.int64]


class PaddedBatch(NamedTuple):
    """A batch of programs: leaves float32 (batch, length, features), pre-order node positions int64 (batch, length), and
    padding bool (batch, length), True where there is no leaf; leaves and positions are 0 there."""

    leaves: torch.Tensor
    positions: torch.Tensor
    padding: torch.Tensor

    def to(self, device: torch.device) -> PaddedBatch:
        """The batch on another torch device."""
        return PaddedBatch(*(part.to(device) for part in self))


class Context(NamedTuple):
    """What the network takes besides the programs, one row each, float32: encoded ``device`` (batch, device_dim) and ``pair``
    (batch, pair_dim, :mod:`cdmpp.predictor.pair_features`), and ``code`` (batch, code_dim) as of
    :meth:`~cdmpp.predictor.encoding.FeatureEncoder.encode_codes`; zeros where ``has_code``, bool (batch,), is not set."""

    device: torch.Tensor
    pair: torch.Tensor
    code: torch.Tensor
    has_code: torch.Tensor

    @classmethod
    def of_devices(cls, device: torch.Tensor) -> Context:
        """Devices alone, float32 (batch, device_dim), for a network that takes neither pairs nor code."""
        nothing = device.new_zeros(len(device), 0)
        return cls(device, nothing, nothing, torch.zeros(len(device), dtype=torch.bool, device=device.device))

    def take(self, rows: torch.Tensor) -> Context:
        """The rows with these numbers, int64, or where True, bool (batch,)."""
        return Context(*(part[rows] for part in self))

    def to(self, where: torch.device) -> Context:
        """The same on another torch device."""
        return Context(*(part.to(where) for part in self))


@dataclass(frozen=True)
class PackedPrograms:
    """Encoded leaves of many programs: float32 (total leaves, features), positions int64 (total leaves,), and offsets int64
    (programs + 1,): program i owns leaves ``offsets[i]:offsets[i + 1]``."""

    leaves: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def pack(cls, asts: Sequence[CompactAST], encoder: FeatureEncoder) -> PackedPrograms:
        """Encode and concatenate; every AST has at least one leaf."""
        offsets = np.cumsum([0, *(ast.n_leaves for ast in asts)], dtype=np.int64)
        leaves = np.concatenate([ast.leaves for ast in asts]) if asts else np.zeros((0, encoder.leaf_dim), np.float32)
        positions = np.concatenate([np.zeros(0, np.int64), *(ast.positions for ast in asts)])
        return cls(*map(torch.from_numpy, (encoder.encode_leaves(leaves), positions, offsets)))

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


@dataclass(frozen=True)
class GeneralInputs:
    """What the network is given of m devices as if they had not been in training: encoded devices float32 (m, device_dim),
    of a CPU all that is known; and ``pair_keep`` float32 (m, pair_dim), 1 for pair features that are given of programs on
    the device, 0 for others."""

    device_rows: torch.Tensor
    pair_keep: torch.Tensor


@dataclass(frozen=True)
class PairArrays:
    """n (program, device) pairs: numbers of the program and of the row of ``device_rows``, float32 (devices, device_dim),
    encoded; ``pair``, ``code`` and ``has_code`` as of :class:`Context`; ``general`` where the network is to learn to do
    with less (``model.general_part``)."""

    packed: PackedPrograms
    device_rows: torch.Tensor
    program: NDArray[np.int64]
    device: NDArray[np.int64]
    pair: torch.Tensor
    code: torch.Tensor
    has_code: torch.Tensor
    general: GeneralInputs | None = field(default=None, kw_only=True)

    @classmethod
    def encode(
        cls,
        encoder: FeatureEncoder,
        asts: Sequence[CompactAST],
        device_rows: NDArray[np.float32],
        program: NDArray[np.int64],
        device: NDArray[np.int64],
        pair: NDArray[np.float64] | None,
        code: CodeRows | None,
    ) -> PairArrays:
        """Of programs, devices that are encoded already, raw pair features (n, n_pair_features) and compiled code; None for
        what the encoder does not take or is not known."""
        n = len(program)
        pairs = np.zeros((n, 0), np.float32) if pair is None or encoder.pair is None else encoder.pair.transform(pair)
        codes, known = np.zeros((n, encoder.code_dim), np.float32), np.zeros(n, bool)
        if code is not None:
            codes, known = encoder.encode_codes(code)
        parts = map(torch.from_numpy, (pairs, codes, known))
        packed = PackedPrograms.pack(asts, encoder)
        return PairArrays(packed, torch.from_numpy(device_rows), program, device, *parts)

    def __len__(self) -> int:
        return len(self.program)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of an encoded leaf, device, pair and code."""
        parts = (self.packed.leaves, self.device_rows, self.pair, self.code)
        leaf, device, pair, code = (part.shape[1] for part in parts)
        return leaf, device, pair, code

    @property
    def leaves(self) -> torch.Tensor:
        """Encoded leaves of the programs of these pairs, each program's once, float32 (leaves, leaf_dim)."""
        of_program = np.repeat(np.arange(len(self.packed)), self.packed.lengths)
        return self.packed.leaves[torch.from_numpy(np.isin(of_program, self.program))]

    def batch(
        self, rows: NDArray[np.int64], where: torch.device, unseen: NDArray[np.bool_] | None = None
    ) -> tuple[PaddedBatch, Context]:
        """What the network takes of the pairs with these numbers, on a torch device; of the ``unseen``, bool (n,), as if their
        devices were not in training."""
        return self.packed.batch(self.program[rows]).to(where), self.context(rows, where, unseen)

    def context(self, rows: NDArray[np.int64], where: torch.device, unseen: NDArray[np.bool_] | None = None) -> Context:
        """The second part of :meth:`batch`."""
        index = torch.from_numpy(rows)
        number = torch.from_numpy(self.device[rows])
        device, pair = self.device_rows[number], self.pair[index]
        if unseen is not None and self.general is not None:
            chosen = torch.from_numpy(unseen)[:, None]
            device = torch.where(chosen, self.general.device_rows[number], device)
            pair = torch.where(chosen, pair * self.general.pair_keep[number], pair)
        return Context(device, pair, self.code[index], self.has_code[index]).to(where)

    def without_code(self) -> Self:
        """The same pairs, of whose compiled code nothing is known."""
        return replace(self, code=torch.zeros_like(self.code), has_code=torch.zeros_like(self.has_code))

    def unlabelled(self, rows: NDArray[np.int64]) -> PairArrays:
        """The pairs with these numbers, without labels; programs and devices are shared."""
        parts = {name: getattr(self, name)[rows] for name in ("program", "device", "pair", "code", "has_code")}
        return PairArrays(self.packed, self.device_rows, **parts, general=self.general)


@dataclass(frozen=True)
class LabelledArrays(PairArrays):
    """Labelled pairs: ``latency_s`` float64 (n,), ``reference_s`` where labels are relative to it, ``group`` int64
    (n,), equal where task and device are (for the ranking loss), and ``codegen``, instruction counts, float32 (n,
    len(CODEGEN_FEATURES)), NaN for none."""

    latency_s: NDArray[np.float64]
    reference_s: NDArray[np.float64] | None = None
    group: NDArray[np.int64] | None = None
    codegen: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.int64]) -> LabelledArrays:
        """The pairs with these numbers; programs and devices are shared."""
        shared = ("packed", "device_rows", "general")
        every = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}
        return replace(self, **{name: values[rows] for name, values in every.items() if values is not None})


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
