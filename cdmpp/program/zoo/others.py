"""Transformers and recent vision networks from Hugging Face's model code, and networks of linear layers.

Only the *code* of the ``transformers`` package is used: every network is built from a config, nothing is downloaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class _Wrapped(nn.Module):
    """Calls a transformers model with keyword arguments and returns one tensor of its output."""

    def __init__(self, model: nn.Module, keywords: Sequence[str], output: str) -> None:
        super().__init__()
        self.model, self.keywords, self.output = model, keywords, output

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self.model(**dict(zip(self.keywords, args, strict=True))), self.output)
        return found


def huggingface(model: str, output: str = "logits", keywords: Sequence[str] = ("pixel_values",), **settings: Any) -> nn.Module:
    """A model of the transformers package, by its class and the settings of its config.

    With ``attn_implementation="eager"`` attention appears as matmul, softmax and matmul."""
    import transformers

    model_class = getattr(transformers, model)
    return _Wrapped(model_class(model_class.config_class(**settings)), keywords, output)


def _linear(*widths: int) -> list[nn.Module]:
    """Linear layers, each with ReLU."""
    pairs = itertools.pairwise(widths)
    return [layer for before, after in pairs for layer in (nn.Linear(before, after), nn.ReLU())]


def mlp() -> nn.Module:
    """Four linear layers, 784-1024-512-256-10."""
    return nn.Sequential(*_linear(784, 1024, 512, 256), nn.Linear(256, 10), nn.Softmax(dim=-1))


def _mixing(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.mix_tokens = nn.LayerNorm(width), _mixing(tokens, width // 2)
        self.norm_channels, self.mix_channels = nn.LayerNorm(width), _mixing(width, width * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mix_channels(self.norm_channels(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin 2021)."""

    def __init__(self, width: int, depth: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(_MixerBlock(tokens, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Dlrm(nn.Module):
    """DLRM (Naumov 2019): embedding tables, dot interactions, two MLPs."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(*_linear(13, 512, 256, width))
        self.top = nn.Sequential(*_linear(width + (tables + 1) ** 2, 512, 256), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom] + [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, dim=1)
        interaction = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([bottom, interaction], dim=1)))


class Gcn(nn.Module):
    """Three graph convolutions (Kipf 2016) over a dense adjacency matrix."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.bmm(adjacency, self.first(x)))
        x = torch.relu(torch.bmm(adjacency, self.second(x)))
        return torch.log_softmax(torch.bmm(adjacency, self.third(x)), dim=-1)


class Unrolled(nn.Module):
    """An LSTM or GRU cell of 128 inputs, unrolled over the sequence, and a classifier: every step runs the same tasks."""

    def __init__(self, cell: str, width: int) -> None:
        super().__init__()
        self.cell: nn.LSTMCell | nn.GRUCell = getattr(nn, cell)(128, width)
        self.classify = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[0], self.cell.hidden_size)
        memory = torch.zeros(x.shape[0], self.cell.hidden_size)
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, memory = self.cell(x[:, step], (hidden, memory))
            else:
                hidden = self.cell(x[:, step], hidden)
        return self.classify(hidden)
