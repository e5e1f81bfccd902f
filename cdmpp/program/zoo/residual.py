"""Residual networks: ResNet (He 2015), ResNeXt (Xie 2016), RegNet (Radosavovic 2020), ResNet-3D (Tran 2017)."""

from __future__ import annotations

import torch
from torch import nn

from cdmpp.program.zoo.layers import ConvNormAct, Head, SqueezeExcite


class _Residual(nn.Module):
    """A body beside a shortcut, which is projected where the body changes the shape."""

    def __init__(self, body: nn.Module, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = ConvNormAct(channels_in, channels_out, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Basic(_Residual):
    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, groups: int, group_width: int) -> None:
        body = nn.Sequential(
            ConvNormAct(channels_in, width, 3, stride), ConvNormAct(width, width, 3, act=None)
        )
        super().__init__(body, channels_in, width, stride)


class _Bottleneck(_Residual):
    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, groups: int, group_width: int) -> None:
        inner = width * group_width // 64 * groups
        body = nn.Sequential(
            ConvNormAct(channels_in, inner, 1),
            ConvNormAct(inner, inner, 3, stride, groups=groups),
            ConvNormAct(inner, width * 4, 1, act=None),
        )
        super().__init__(body, channels_in, width * 4, stride)


def _resnet(
    block: type[_Basic] | type[_Bottleneck], depths: tuple[int, ...], groups: int = 1, group_width: int = 64
) -> nn.Module:
    layers: list[nn.Module] = [ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(block(channels, width, stride, groups, group_width))
            channels = width * block.expansion
    layers.append(Head(channels))
    return nn.Sequential(*layers)


def resnet18() -> nn.Module:
    """ResNet-18."""
    return _resnet(_Basic, (2, 2, 2, 2))


def resnet50() -> nn.Module:
    """ResNet-50 (stride in the 3x3 convolution, as torchvision has it)."""
    return _resnet(_Bottleneck, (3, 4, 6, 3))


def resnext50() -> nn.Module:
    """ResNeXt-50 32x4d: ResNet-50 with grouped convolutions."""
    return _resnet(_Bottleneck, (3, 4, 6, 3), groups=32, group_width=4)


class _RegNetY(_Residual):
    def __init__(self, channels_in: int, width: int, stride: int, group_width: int) -> None:
        body = nn.Sequential(
            ConvNormAct(channels_in, width, 1),
            ConvNormAct(width, width, 3, stride, groups=width // group_width),
            SqueezeExcite(width, round(channels_in / 4)),
            ConvNormAct(width, width, 1, act=None),
        )
        super().__init__(body, channels_in, width, stride)


def regnet_y_400mf() -> nn.Module:
    """RegNetY-400MF: grouped convolutions of 8 channels, squeeze-and-excite with a sigmoid gate."""
    layers: list[nn.Module] = [ConvNormAct(3, 32, 3, 2)]
    channels = 32
    for width, depth in ((48, 1), (104, 3), (208, 6), (440, 6)):
        for index in range(depth):
            layers.append(_RegNetY(channels, width, 2 if index == 0 else 1, group_width=8))
            channels = width
    layers.append(Head(channels))
    return nn.Sequential(*layers)


class _Basic3d(nn.Module):
    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(channels_in, width, 3, stride, 1)
        self.second = nn.Conv3d(width, width, 3, 1, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != width:
            self.shortcut = nn.Conv3d(channels_in, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class _Resnet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 16, (3, 7, 7), (1, 2, 2), (1, 3, 3))
        self.blocks = nn.Sequential(_Basic3d(16, 16, 1), _Basic3d(16, 32, 2), _Basic3d(32, 64, 2))
        self.linear = nn.Linear(64, 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.blocks(torch.relu(self.stem(x))).mean((2, 3, 4)))


def resnet3d() -> nn.Module:
    """A slim ResNet-3D-8 over 8 frames of 112x112 (batch normalisation folded away)."""
    return _Resnet3d()
