"""An LSTM over the leaves of the compact AST, after Tiramisu's cost model (Baghdadi et al., MLSys'21)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from cdmpp.predictor.baselines.fitting import NetworkModel
from cdmpp.predictor.batching import Context, LabelledArrays, PaddedBatch
from cdmpp.predictor.config import Config, LossConfig, TrainConfig
from cdmpp.predictor.trainer import ProgressCallback


class LstmNetwork(nn.Module):
    """Leaves in pre-order -> last state, device features -> one standardised label.

    Parameters
    ----------
    leaf_dim, device_dim
        Widths of an encoded leaf and an encoded device.
    hidden, layers
        Width and number of LSTM layers; ``hidden`` is also the width of the layers around it.
    dropout
        Between LSTM layers and before the output.
    """

    def __init__(self, leaf_dim: int, device_dim: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        # one more: the position in the AST, which the order of the leaves does not tell
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
    """An LSTM over the leaves; predicts log seconds with the loss of our own network.

    Tiramisu's is a recursive network over the loop tree with one LSTM a level. The compact AST is flat, so one
    LSTM reads the leaves in pre-order with their positions.

    Parameters
    ----------
    hidden, layers, dropout
        See :class:`LstmNetwork`.
    train, loss, max_seconds, progress
        See :class:`~cdmpp.predictor.baselines.fitting.NetworkModel`.
    """

    name = "lstm"
    label = "log"

    def __init__(
        self,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.05,
        train: TrainConfig | None = None,
        loss: LossConfig | None = None,
        max_seconds: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        defaults = Config()
        super().__init__(train or defaults.train, loss or defaults.loss, max_seconds, progress)
        self.hidden, self.layers, self.dropout = hidden, layers, dropout

    def make_network(self, train: LabelledArrays, leaf_dim: int, device_dim: int) -> nn.Module:
        return LstmNetwork(leaf_dim, device_dim, self.hidden, self.layers, self.dropout)
