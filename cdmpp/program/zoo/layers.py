"""Building blocks that several networks of the zoo share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class ConvNormAct(nn.Sequential):
    """Convolution without bias, batch normalisation, activation (None for none). NCHW in, NCHW out."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        groups: int = 1,
        act: Callable[[], nn.Module] | None = nn.ReLU,
        padding: int | tuple[int, int] | None = None,
    ) -> None:
        if padding is None:
            padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        layers: list[nn.Module] = [
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(channels_out),
        ]
        if act is not None:
            layers.append(act())
        super().__init__(*layers)


class SqueezeExcite(nn.Module):
    """Channel attention: global mean, two 1x1 convolutions, gate."""

    def __init__(
        self,
        channels: int,
        squeezed: int,
        act: Callable[[], nn.Module] = nn.ReLU,
        gate: Callable[[], nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.act = act()
        self.gate = gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.act(self.reduce(scale))))


class Head(nn.Module):
    """Global average pooling and a linear classifier."""

    def __init__(self, channels: int, classes: int = 1000) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


class Branches(nn.Module):
    """Parallel branches over the same input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)
