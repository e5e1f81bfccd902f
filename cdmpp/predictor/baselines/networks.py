"""Neural baselines with the inputs and the trainer of our network: an LSTM, and CDMPP's network as released."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from cdmpp.dataset import Split
from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.models import TrainedModel
from cdmpp.predictor.config import Config, LossConfig, TrainConfig, config_from_dict
from cdmpp.predictor.data import TrainingData
from cdmpp.predictor.encoding import Context, FeatureEncoder, LabelledArrays, PaddedBatch
from cdmpp.predictor.network import PreOrderEncoding

logger = logging.getLogger(__name__)

#: The baselines are published models, so they do not get our features of program and device together.
_MODEL = config_from_dict({"model": {"pairs": False}}).model


class NetworkModel(TrainedModel):
    """A network from a padded batch and the device to one standardised label per program.

    It gets the inputs of our network, encoded in the same way, except for the features of program and device together. Of
    ``loss``, only ``mse_weight`` and ``mape_weight`` count. With ``max_seconds``, training stops after that time, and the
    learning rate falls with the time spent."""

    #: Label transform, see :class:`cdmpp.predictor.config.LabelConfig`.
    label: Literal["box-cox", "log"] = "box-cox"

    def __init__(self, train: TrainConfig, loss: LossConfig, **more: Any) -> None:
        config = config_from_dict({"label": {"transform": self.label}})
        super().__init__(config.model_copy(update={"model": _MODEL, "train": train, "loss": loss}), **more)
        self.train, self.loss = train, loss

    def fit(self, data: TrainingData, split: Split) -> None:
        if len(split.train) < 2:
            raise PredictorError(f"training needs at least two training records, got {len(split.train)}")
        super().fit(data, split)


class LstmNetwork(nn.Module):
    """An LSTM reads the leaves in pre-order; its last state and the device's features give one standardised label. ``hidden``
    is also the width of the layers around the LSTM."""

    config = _MODEL

    def __init__(self, leaf_dim: int, device_dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        # one more input: the position in the AST, which does not follow from the order of the leaves
        self.leaf_projection = nn.Sequential(nn.Linear(leaf_dim + 1, hidden), nn.GELU())
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Sequential(
            nn.Linear(hidden + device_dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 1)
        )

    def forward(self, batch: PaddedBatch, context: Context) -> torch.Tensor:
        """Standardised labels, shape (batch,)."""
        positions = torch.log1p(batch.positions.to(batch.leaves.dtype))[:, :, None]
        leaves = self.leaf_projection(torch.cat([batch.leaves, positions], dim=2))
        lengths = (~batch.padding).sum(1).cpu()
        packed = pack_padded_sequence(leaves, lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        return self.decoder(torch.cat([state[-1], context.device], dim=1)).squeeze(-1)


class LstmModel(NetworkModel):
    """An LSTM over the leaves, after Tiramisu's cost model (Baghdadi et al., MLSys'21); predicts log seconds. Tiramisu's is
    recursive, with one LSTM per level of the loop tree. The compact AST is flat, so a single LSTM reads it in pre-order."""

    name = "lstm"
    label = "log"

    def __init__(
        self,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.05,
        train: TrainConfig | None = None,
        loss: LossConfig | None = None,
        **more: Any,
    ) -> None:
        super().__init__(train or Config().train, loss or Config().loss, **more)
        self.hidden, self.layers, self.dropout = hidden, layers, dropout

    def make_network(self, train: LabelledArrays, encoder: FeatureEncoder) -> nn.Module:
        return LstmNetwork(encoder.leaf_dim, encoder.device_dim, self.hidden, self.layers, self.dropout)


#: Optimisation settings of the released configuration, as far as our training loop has them: batch size, weight decay and the
#: peak of its cyclic learning rate. It does not average weights.
RELEASED_TRAIN: TrainConfig = Config().train.model_copy(
    update={"batch_size": 600, "learning_rate": 1.7e-4, "weight_decay": 1.3e-3, "ema_decay": 0.0}
)

#: MSE + MAPE with equal weights.
RELEASED_LOSS: LossConfig = Config().loss.model_copy(update={"mse_weight": 1.0, "mape_weight": 1.0})


@dataclass(frozen=True)
class ReleasedSizes:
    """Sizes of the network; the defaults are those of the released configuration. ``dim`` to ``dropout`` are of the
    transformer encoder (post-norm, ReLU). The others are widths of layers: ``input_dim``, ``hidden_dims`` and ``embedding_dim``
    from the flattened leaves to the program's embedding, ``device_dims`` from the device's features to its embedding of the
    same width, and ``decoder_dims`` from both embeddings to the label."""

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
    """CDMPP's network over the first ``max_leaves`` leaves; :class:`CdmppReleased` says where it differs from the released."""

    config = _MODEL

    def __init__(self, leaf_dim: int, device_dim: int, max_leaves: int, sizes: ReleasedSizes) -> None:
        super().__init__()
        self.max_leaves, self.dim = max_leaves, sizes.dim
        self.leaf_projection = nn.Linear(leaf_dim, sizes.dim)
        self.position = PreOrderEncoding(sizes.dim, "paper")
        layer = nn.TransformerEncoderLayer(sizes.dim, sizes.heads, sizes.ffn_dim, sizes.dropout, "relu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.flatten = nn.Sequential(nn.Linear(max_leaves * sizes.dim, sizes.input_dim), nn.BatchNorm1d(sizes.input_dim))
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
        both = torch.cat([self.embedding(self.flatten(flat)), self.device_embedding(context.device)], dim=1)
        return self.decoder(self.norm(both)).squeeze(-1)


class CdmppReleased(NetworkModel):
    """CDMPP's network as its authors released it (EuroSys'24, sections 4 and 5), on the same records, features and
    split: 11 transformer layers without an attention mask, the paper's positional encoding, an embedding of the flattened
    leaves beside the device's, batch normalisation throughout, Box-Cox labels, MSE + MAPE, and the sizes, batch size and
    weight decay of its configuration.

    Differences from the release: leaves have more features than the transformer is wide, so a linear layer projects them. One
    network takes programs with any number of leaves (the release has one for each): the encoder runs over programs of one
    length at a time, so no leaf attends to padding, and flattened leaves are padded to the longest training program; longer
    ones are cut, with a warning. The learning rate has our warm-up and decay, with the peak of the released cycle, and training
    stops early. The two embeddings are concatenated, as in the paper's figure; the released code adds them."""

    name = "released"

    def __init__(
        self,
        sizes: ReleasedSizes | None = None,
        train: TrainConfig = RELEASED_TRAIN,
        loss: LossConfig = RELEASED_LOSS,
        **more: Any,
    ) -> None:
        super().__init__(train, loss, **more)
        self.sizes = sizes or ReleasedSizes()
        self.max_leaves_ = 0

    def make_network(self, train: LabelledArrays, encoder: FeatureEncoder) -> nn.Module:
        self.max_leaves_ = int(train.packed.lengths[train.program].max())
        return ReleasedNetwork(encoder.leaf_dim, encoder.device_dim, self.max_leaves_, self.sizes)

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        seconds = super().predict(data, rows)
        leaves = [data.asts[program].n_leaves for program in data.labels["program"].iloc[rows]]
        longer = int((np.array(leaves) > self.max_leaves_).sum())
        if longer:
            message = "%d of %d programs have more leaves than any in training: only the first %d are seen"
            logger.warning(message, longer, len(leaves), self.max_leaves_)
        return seconds


def _mlp(*widths: int) -> nn.Sequential:
    """Linear, batch normalisation and ReLU from each width to the next."""
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*parts)
