"""CDMPP's network as its authors released it (EuroSys'24, sections 4 and 5), on our features and our splits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.fitting import NetworkModel
from cdmpp.predictor.batching import Context, LabelledArrays, PaddedBatch
from cdmpp.predictor.config import Config, LossConfig, TrainConfig
from cdmpp.predictor.network import PreOrderEncoding
from cdmpp.predictor.trainer import ProgressCallback

logger = logging.getLogger(__name__)

#: Optimisation of the released configuration, as far as our loop has it: batch, weight decay and the top of its
#: cyclic learning rate. It averages no weights.
RELEASED_TRAIN: TrainConfig = Config().train.model_copy(
    update={"batch_size": 600, "learning_rate": 1.7e-4, "weight_decay": 1.3e-3, "ema_decay": 0.0}
)

#: MSE + MAPE with equal weights.
RELEASED_LOSS: LossConfig = Config().loss.model_copy(update={"mse_weight": 1.0, "mape_weight": 1.0})


@dataclass(frozen=True)
class ReleasedSizes:
    """Sizes of the network; the defaults are those of the released configuration.

    Attributes
    ----------
    dim, layers, heads, ffn_dim, dropout
        Of the transformer encoder (post-norm, ReLU).
    input_dim, hidden_dims, embedding_dim
        From the flattened leaves to the program's embedding.
    device_dims
        Hidden widths from the device's features to its embedding, which has ``embedding_dim`` numbers too.
    decoder_dims
        Hidden widths from both embeddings to the label.
    """

    dim: int = 164
    layers: int = 11
    heads: int = 4
    ffn_dim: int = 2048
    dropout: float = 0.1
    input_dim: int = 716
    hidden_dims: Sequence[int] = (985, 985, 985)
    embedding_dim: int = 69
    device_dims: Sequence[int] = (128, 128, 128)
    decoder_dims: Sequence[int] = (930, 930, 930)

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise PredictorError(f"dim must be a multiple of heads, got dim={self.dim}, heads={self.heads}")


class ReleasedNetwork(nn.Module):
    """The network; see :class:`CdmppReleased` for where it differs from the released one.

    Parameters
    ----------
    leaf_dim, device_dim
        Widths of an encoded leaf and an encoded device.
    max_leaves
        Leaves that are flattened; of longer programs the first so many.
    sizes
        See :class:`ReleasedSizes`.
    """

    def __init__(self, leaf_dim: int, device_dim: int, max_leaves: int, sizes: ReleasedSizes) -> None:
        super().__init__()
        self.max_leaves, self.dim = max_leaves, sizes.dim
        self.leaf_projection = nn.Linear(leaf_dim, sizes.dim)
        self.position = PreOrderEncoding(sizes.dim, "paper")
        layer = nn.TransformerEncoderLayer(
            sizes.dim, sizes.heads, sizes.ffn_dim, sizes.dropout, "relu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.flatten = nn.Sequential(
            nn.Linear(max_leaves * sizes.dim, sizes.input_dim), nn.BatchNorm1d(sizes.input_dim)
        )
        self.embedding = _mlp(sizes.input_dim, *sizes.hidden_dims, sizes.embedding_dim)
        self.device_embedding = _mlp(device_dim, *sizes.device_dims, sizes.embedding_dim)
        self.norm = nn.BatchNorm1d(2 * sizes.embedding_dim, affine=False)
        widths = (2 * sizes.embedding_dim, *sizes.decoder_dims)
        self.decoder = nn.Sequential(_mlp(*widths), nn.Linear(widths[-1], 1))

    def forward(self, batch: PaddedBatch, context: Context) -> torch.Tensor:
        """Standardised labels, shape (batch,)."""
        lengths = (~batch.padding).sum(1).clamp(max=self.max_leaves)
        flat = batch.leaves.new_zeros(len(lengths), self.max_leaves * self.dim)
        for length in torch.unique(lengths).tolist():
            rows = torch.nonzero(lengths == length).squeeze(1)
            leaves = self.leaf_projection(batch.leaves[rows, :length])
            leaves = leaves + self.position(batch.positions[rows, :length])
            flat[rows, : length * self.dim] = self.encoder(leaves).flatten(1)
        program = self.embedding(self.flatten(flat))
        both = torch.cat([program, self.device_embedding(context.device)], dim=1)
        return self.decoder(self.norm(both)).squeeze(-1)


class CdmppReleased(NetworkModel):
    """CDMPP's network as released, on the same records, features and split as the others.

    As released: 11 transformer layers of width 164 with 4 heads and FFN 2048 without an attention mask, the
    paper's positional encoding, flattened leaves to an embedding, the device's embedding beside it, a decoder
    930 x 3, batch normalisation throughout, Box-Cox labels, MSE + MAPE, and the sizes, batch and weight decay
    of the released configuration.

    Not as released, so that it can take part in a comparison on clean splits:

    * A leaf there has 164 numbers, which is the width of the transformer. Ours has more, and all of them are
      given, through a linear projection to 164: less would handicap the baseline, another width would not be
      the released network.
    * There, programs of every number of leaves have a network of their own, too little data each for some
      thousands of records. Here one network takes all: the encoder runs over the programs of one number of
      leaves at a time, so no leaf attends to padding, as there; the flattened leaves are zero-padded to the
      longest program of training. Longer programs are cut when predicted, and a warning says how many.
    * Warm-up and cosine decay to the peak of the released cyclic learning rate, gradient clipping and early
      stopping on the validation part, as for our own network.
    * The released code adds the two embeddings; the paper's figure concatenates them, and so does this.

    Parameters
    ----------
    sizes
        Of the network.
    train, loss, max_seconds, progress
        See :class:`~cdmpp.predictor.baselines.fitting.NetworkModel`.
    """

    name = "released"
    label = "box-cox"

    def __init__(
        self,
        sizes: ReleasedSizes | None = None,
        train: TrainConfig = RELEASED_TRAIN,
        loss: LossConfig = RELEASED_LOSS,
        max_seconds: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(train, loss, max_seconds, progress)
        self.sizes = sizes or ReleasedSizes()
        self.max_leaves_ = 0

    def make_network(self, train: LabelledArrays, leaf_dim: int, device_dim: int) -> nn.Module:
        self.max_leaves_ = int(train.packed.lengths[train.program].max())
        return ReleasedNetwork(leaf_dim, device_dim, self.max_leaves_, self.sizes)

    def check_programs(self, arrays: LabelledArrays) -> None:
        longer = int((arrays.packed.lengths[arrays.program] > self.max_leaves_).sum())
        if longer:
            logger.warning(
                "%d of %d programs have more leaves than any in training: only the first %d are seen",
                longer,
                len(arrays),
                self.max_leaves_,
            )


def _mlp(*widths: int) -> nn.Sequential:
    """Linear, batch normalisation and ReLU from each width to the next."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*parts)
