"""The network: a transformer encoder over the leaves of a compact AST, and a decoder to one label.

It follows CDMPP (EuroSys'24), but uses a padding mask and pooling instead of one network per number of leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.encoding import Context, LabelledArrays, PaddedBatch, PairArrays, inference_batches
from cdmpp.predictor.pair_features import CODE_FEATURES, LOOP_CODE_FEATURES, TIME_PARTS
from cdmpp.program.codegen import LOOPS, STATIC_FEATURES

#: The table of positional encodings grows in steps of this many positions.
_POSITION_STEP = 256
#: Pairs per inference batch.
INFERENCE_BATCH = 1024
#: Lower edge of unused bins, which no value reaches (encoded values are clipped far below it).
_NEVER = 1e6


def positional_encoding(positions: ArrayLike, dim: int, variant: str = "standard") -> NDArray[np.float32]:
    """Encode pre-order positions, float32 ``positions.shape + (dim,)``: column ``k`` is ``sin(pos * f_k)`` for even ``k`` and
    ``cos(pos * f_k)`` for odd ``k``. In ``standard`` a sine and a cosine share a frequency, ``f_k = 10000 ** (-2 * (k // 2) /
    dim)``, as in *Attention is all you need*. In ``paper``, CDMPP's formula, every column has its own: ``10000 ** (-2 * k /
    dim)``."""
    column = np.arange(dim)
    exponent = 2.0 * (column // 2 if variant == "standard" else column) / dim
    angle = np.asarray(positions, dtype=np.float64)[..., None] * 10000.0**-exponent
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


class PreOrderEncoding(nn.Module):
    """Looks up the positional encoding of pre-order node positions; the table grows as needed."""

    def __init__(self, dim: int, variant: str) -> None:
        super().__init__()
        self._dim, self._variant = dim, variant
        self._table: torch.Tensor
        self.register_buffer("_table", torch.zeros(0, dim), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 (...) -> float32 (..., dim)."""
        table = self._table
        needed = int(positions.max()) + 1
        if needed > table.shape[0]:
            size = -(-needed // _POSITION_STEP) * _POSITION_STEP
            values = positional_encoding(np.arange(size), self._dim, self._variant)
            self._table = table = torch.from_numpy(values).to(positions.device)
        return table[positions]


class PiecewiseLinear(nn.Module):
    """Piecewise-linear encoding of numerical features (Gorishniy et al., NeurIPS 2022, section 3.2). Each feature is cut into
    bins at quantiles of the training data (fewer if it has few distinct values). A value fills the bins below it, its own in
    part, and none above. A linear layer on top can then treat an extent of 7 unlike 8, which it cannot by the value alone."""

    def __init__(self, features: int, bins: int) -> None:
        super().__init__()
        self.low: torch.Tensor
        self.width: torch.Tensor
        self.register_buffer("low", torch.full((features, bins), _NEVER))
        self.register_buffer("width", torch.ones(features, bins))

    def fit(self, rows: torch.Tensor) -> None:
        """Place the bins at quantiles of the training values, float32 (n, features)."""
        values = rows.double().numpy()
        bins = self.low.shape[1]
        at = np.linspace(0, 1, bins + 1)
        self.low.fill_(_NEVER)
        self.width.fill_(1.0)
        for j in range(values.shape[1]):
            distinct = np.unique(values[:, j])
            edges = np.unique(np.quantile(values[:, j], at))
            if len(edges) - 1 <= bins // 2:  # most values are the same: use quantiles of the distinct ones
                edges = np.unique(np.quantile(distinct, at))
            if len(edges) > 1:
                low = torch.from_numpy(edges.astype(np.float32))
                self.low[j, : len(edges) - 1] = low[:-1]
                self.width[j, : len(edges) - 1] = low.diff()

    def used(self) -> torch.Tensor:
        """Indices of the columns of :meth:`forward` that are not always 0, int64; few distinct values need fewer bins."""
        return (self.low.flatten() < _NEVER).nonzero().squeeze(1)

    def forward(self, x: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """float32 (..., features) -> (..., features * bins), between 0 and 1, or only the given ``columns`` of that."""
        if columns is None:
            columns = torch.arange(self.low.numel(), device=x.device)
        filled = x.index_select(-1, columns // self.low.shape[1])
        # in place, as this takes most of the time of a prediction
        return filled.sub_(self.low.flatten()[columns]).div_(self.width.flatten()[columns]).clamp_(0, 1)


class Dropout(nn.Dropout):
    """Drop-out with one random byte per value (``p`` in steps of 1/256): torch's draws take a tenth of a CPU step (by hand)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of any shape -> the same shape."""
        if not self.training:
            return x
        dropped = min(round(256 * self.p), 255)
        drawn = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        return x * (drawn.view(torch.uint8)[: x.numel()].view(x.shape) >= dropped) * (256 / (256 - dropped))


class AttentionPooling(nn.Module):
    """Weighted mean of the leaves with learned weights, one set per head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.score = nn.Linear(dim, heads, bias=False)  # a bias would cancel in the softmax

    def forward(self, leaves: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) and its mask -> (batch, dim)."""
        batch, length, dim = leaves.shape
        scores = self.score(leaves).masked_fill(padding[:, :, None], float("-inf"))
        weights = torch.softmax(scores, dim=1)[..., None]
        heads = leaves.view(batch, length, self._heads, dim // self._heads)
        return (weights * heads).sum(1).reshape(batch, dim)


class CompiledDecoder(nn.Module):
    """Predicts the label of a compiled program from the times that the core model gives for its loops and the rest
    (:data:`cdmpp.predictor.pair_features.TIME_PARTS`): each is multiplied by a learned ratio, and they are summed. One network
    gives the ratios of all loops. ``known`` is the width of the other inputs: embedding, device and pair."""

    def __init__(self, config: ModelConfig, known: int) -> None:
        super().__init__()
        dim, parts = config.embedding_dim, len(TIME_PARTS)
        self.program = nn.Sequential(
            nn.Linear(known + len(CODE_FEATURES), config.decoder_dim), nn.GELU(), Dropout(config.dropout),
            nn.Linear(config.decoder_dim, dim), nn.GELU(), Dropout(config.dropout),
        )  # fmt: skip
        self.loop = nn.Sequential(
            nn.Linear(dim + len(LOOP_CODE_FEATURES), dim), nn.GELU(), Dropout(config.dropout),
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1),
        )  # fmt: skip
        self.others = nn.Linear(dim, parts - LOOPS)
        nn.init.zeros_(self.others.weight)
        nn.init.zeros_(self.others.bias)
        self.whole = nn.Linear(dim, 1)
        # label units per unit of the logarithm of the time
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, embedding: torch.Tensor, known: list[torch.Tensor], code: torch.Tensor) -> torch.Tensor:
        """Embeddings (batch, embedding_dim), device and pair inputs, encoded code, (batch, n) each -> labels (batch,)."""
        widths = (len(CODE_FEATURES), LOOPS * len(LOOP_CODE_FEATURES), len(TIME_PARTS))
        program, loops, times = code.split(widths, dim=1)
        hidden = _decode(self.program, embedding, [*known, program])
        around = hidden[:, None, :].expand(-1, LOOPS, -1)
        ratios = self.loop(torch.cat([around, loops.unflatten(1, (LOOPS, -1))], dim=2)).squeeze(2)
        total = torch.logsumexp(times + torch.cat([ratios, self.others(hidden)], dim=1), dim=1)
        label: torch.Tensor = self.scale * total + self.whole(hidden).squeeze(1)
        return label


class LatencyNetwork(nn.Module):
    """Leaves, positions, mask and device -> one standardised label per program. The constructor takes the widths of an
    encoded leaf and of the parts of a :class:`~cdmpp.predictor.encoding.Context`."""

    def __init__(self, config: ModelConfig, leaf_dim: int, device_dim: int, pair_dim: int = 0, code_dim: int = 0) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.bins = PiecewiseLinear(leaf_dim, config.bins) if config.bins else None
        self.pair_bins = PiecewiseLinear(pair_dim, config.bins) if config.bins and pair_dim else None
        self.leaf_projection = nn.Linear(leaf_dim * (1 + config.bins), dim)
        self.position = PreOrderEncoding(dim, config.positional)
        self.device_projection: nn.Module | None = None
        decoder_in = config.embedding_dim + pair_dim * (1 + config.bins)
        if config.device != "none":
            self.device_projection = nn.Sequential(nn.Linear(device_dim, dim), nn.GELU(), nn.Linear(dim, 2 * dim))
            decoder_in += device_dim
        layer = nn.TransformerEncoderLayer(
            dim, config.heads, config.ffn_dim, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        layer.dropout, layer.dropout1, layer.dropout2 = (Dropout(config.dropout) for _ in range(3))
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.pool = AttentionPooling(dim, config.heads)
        # the latency grows with the number of leaves, so the pooled vector also carries its logarithm
        self.embedding = nn.Linear(dim + 1, config.embedding_dim)
        self.decoder = _decoder(config, decoder_in)
        self.compiled_decoder = CompiledDecoder(config, decoder_in) if code_dim else None
        self.codegen = nn.Linear(config.embedding_dim, len(STATIC_FEATURES)) if config.codegen else None

    def fit_bins(self, train: LabelledArrays) -> None:
        """Fit the bins of the piecewise-linear encodings, if there are any, to the training pairs."""
        if self.bins is not None:
            self.bins.fit(train.leaves)
        if self.pair_bins is not None:
            self.pair_bins.fit(train.pair)

    def forward(self, batch: PaddedBatch, context: Context) -> torch.Tensor:
        """Standardised labels, shape (batch,)."""
        return self.decode(self.embed(batch, context.device), context)

    def embed(self, batch: PaddedBatch, device: torch.Tensor) -> torch.Tensor:
        """Bounded embedding of each program on its device, shape (batch, embedding_dim)."""
        padding = batch.padding
        leaves = self._project(batch) + self.position(batch.positions)
        if self.device_projection is not None:
            scale, shift = self.device_projection(device)[:, None, :].chunk(2, dim=-1)
            leaves = leaves * (1 + scale) + shift
        hidden = self.norm(self.encoder(leaves, src_key_padding_mask=padding))
        count = (~padding).sum(1, keepdim=True).to(hidden.dtype)
        # bounded, so that the central moment discrepancy (CMD) is defined
        return torch.tanh(self.embedding(torch.cat([self.pool(hidden, padding), torch.log(count)], dim=1)))

    def _project(self, batch: PaddedBatch) -> torch.Tensor:
        """``leaf_projection`` of leaves and their bins, (batch, length, dim), 0 for padding. To save work, it skips padding
        and bins that are never filled."""
        real = ~batch.padding
        rows, weight = batch.leaves[real], self.leaf_projection.weight
        width = rows.shape[1]
        projected = nn.functional.linear(rows, weight[:, :width], self.leaf_projection.bias)
        if self.bins is not None:
            used = self.bins.used()
            projected = projected + nn.functional.linear(self.bins(rows, used), weight[:, width:].index_select(1, used))
        leaves = projected.new_zeros(*batch.padding.shape, projected.shape[1])
        leaves[real] = projected
        return leaves

    def decode(self, embedding: torch.Tensor, context: Context) -> torch.Tensor:
        """Standardised labels, shape (batch,); uses the code-aware decoder for rows that have instruction counts."""
        labels = self.decode_plain(embedding, context)
        if self.compiled_decoder is not None and context.has_code.any():
            known = context.has_code
            labels = labels.clone()
            labels[known] = self.decode_compiled(embedding[known], context.take(known))
        return labels

    def decode_plain(self, embedding: torch.Tensor, context: Context) -> torch.Tensor:
        """Standardised labels without instruction counts, shape (batch,)."""
        return _decode(self.decoder, embedding, self._device_and_pair(context)).squeeze(-1)

    def decode_compiled(self, embedding: torch.Tensor, context: Context) -> torch.Tensor:
        """Standardised labels, shape (batch,), from instruction counts, which all rows must have: learned corrections of the
        times that the core model gives (:mod:`cdmpp.predictor.pair_features`)."""
        assert self.compiled_decoder is not None
        labels: torch.Tensor = self.compiled_decoder(embedding, self._device_and_pair(context), context.code)
        return labels

    def _device_and_pair(self, context: Context) -> list[torch.Tensor]:
        """Inputs of both decoders besides the embedding: device and pair, and the bins of the pair."""
        parts = [context.device] if self.device_projection is not None else []
        parts.append(context.pair)
        if self.pair_bins is not None:
            parts.append(self.pair_bins(context.pair))
        return parts


def _decode(decoder: nn.Sequential, embedding: torch.Tensor, known: list[torch.Tensor]) -> torch.Tensor:
    """A decoder's output for the concatenation of the embedding and the ``known`` inputs.

    The first layer multiplies the two separately: ``known`` is most of the input width and needs no gradient."""
    first, rest = decoder[0], decoder[1:]
    assert isinstance(first, nn.Linear)
    width = embedding.shape[1]
    hidden = nn.functional.linear(torch.cat(known, dim=1), first.weight[:, width:], first.bias)
    output: torch.Tensor = rest(hidden + nn.functional.linear(embedding, first.weight[:, :width]))
    return output


def _decoder(config: ModelConfig, width: int) -> nn.Sequential:
    """The MLP to one label."""
    widths = [width] + [config.decoder_dim] * config.decoder_layers
    hidden: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        hidden += [nn.Linear(before, after), nn.GELU(), Dropout(config.dropout)]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 1))


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Run the block without gradients and drop-out, then restore the network's training mode."""
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        network.train(training)


def correction_inputs(
    network: LatencyNetwork, arrays: PairArrays, embeddings: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Two descriptions of each pair, both float64: its features of program and device together and of the compiled code (n, r),
    and its embedding by the network (n, h; computed unless given)."""
    known = torch.cat([arrays.pair, arrays.code * arrays.has_code[:, None]], dim=1).double().numpy()
    if embeddings is None:
        where = next(network.parameters()).device
        embeddings = np.empty((len(arrays), network.config.embedding_dim))
        with evaluating(network):
            for rows in inference_batches(arrays.packed.lengths[arrays.program], INFERENCE_BATCH):
                batch, context = arrays.batch(rows, where)
                embeddings[rows] = network.embed(batch, context.device).cpu().numpy()
    return known, embeddings


def predict_labels(networks: Sequence[nn.Module], arrays: PairArrays) -> np.ndarray:
    """Standardised labels of (program, device) pairs by each network, float64 (networks, n), in evaluation mode."""
    where = next(networks[0].parameters()).device
    labels = np.empty((len(networks), len(arrays)), dtype=np.float64)
    with ExitStack() as stack:
        for network in networks:
            stack.enter_context(evaluating(network))
        for rows in inference_batches(arrays.packed.lengths[arrays.program], INFERENCE_BATCH):
            batch = arrays.batch(rows, where)
            for number, network in enumerate(networks):
                labels[number, rows] = network(*batch).double().cpu().numpy()
    return labels
