"""Recurrent networks, unrolled over a short sequence: every step is the same tasks."""

from __future__ import annotations

import torch
from torch import nn


class _Unrolled(nn.Module):
    def __init__(
        self, cell: type[nn.LSTMCell] | type[nn.GRUCell], width_in: int, width: int, classes: int
    ) -> None:
        super().__init__()
        self.cell = cell(width_in, width)
        self.classify = nn.Linear(width, classes)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[0], self.width)
        memory = torch.zeros(x.shape[0], self.width)
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, memory = self.cell(x[:, step], (hidden, memory))
            else:
                hidden = self.cell(x[:, step], hidden)
        return self.classify(hidden)


def lstm() -> nn.Module:
    """LSTM cell, 128 -> 256, unrolled over 8 steps, and a classifier."""
    return _Unrolled(nn.LSTMCell, 128, 256, 1000)


def gru() -> nn.Module:
    """GRU cell, 128 -> 512, unrolled over 8 steps, and a classifier."""
    return _Unrolled(nn.GRUCell, 128, 512, 1000)
