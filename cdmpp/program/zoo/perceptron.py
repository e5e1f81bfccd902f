"""Networks without convolution or attention: MLP, MLP-Mixer, DLRM, GCN."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Module:
    """Four linear layers, 784-1024-512-256-10."""
    return nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
        nn.Softmax(dim=-1),
    )


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.norm_tokens = nn.LayerNorm(width)
        self.mix_tokens = nn.Sequential(
            nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens)
        )
        self.norm_channels = nn.LayerNorm(width)
        self.mix_channels = nn.Sequential(
            nn.Linear(width, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mix_channels(self.norm_channels(x))


class _Mixer(nn.Module):
    def __init__(self, width: int, depth: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(
            *[_MixerBlock(tokens, width, width // 2, width * 4) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def mlp_mixer() -> nn.Module:
    """MLP-Mixer S/16 (Tolstikhin 2021), 8 blocks of width 512."""
    return _Mixer(512, 8, 16, 196)


class _Dlrm(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )
        pairs = (tables + 1) * (tables + 1)
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom] + [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, dim=1)
        interaction = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([bottom, interaction], dim=1)))


def dlrm() -> nn.Module:
    """DLRM (Naumov 2019): 8 embedding tables of 10,000 x 64, dot interactions, two MLPs."""
    return _Dlrm(8, 10_000, 64)


class _Gcn(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.bmm(adjacency, self.first(x)))
        x = torch.relu(torch.bmm(adjacency, self.second(x)))
        return torch.log_softmax(torch.bmm(adjacency, self.third(x)), dim=-1)


def gcn() -> nn.Module:
    """Three graph convolutions (Kipf 2016) over a dense adjacency matrix of 256 nodes."""
    return _Gcn(128, 64, 16)
