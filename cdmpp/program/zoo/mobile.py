"""Networks of depthwise convolutions: MobileNet V2/V3, EfficientNet-B0, ShuffleNet V2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from cdmpp.program.zoo.layers import ConvNormAct, Head, SqueezeExcite

Activation = Callable[[], nn.Module]


def _round_channels(channels: float, divisor: int = 8) -> int:
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, optional squeeze-and-excite, 1x1 projection (Sandler 2018)."""

    def __init__(
        self,
        channels_in: int,
        expanded: int,
        channels_out: int,
        kernel: int,
        stride: int,
        act: Activation,
        excite: nn.Module | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != channels_in:
            layers.append(ConvNormAct(channels_in, expanded, 1, act=act))
        layers.append(ConvNormAct(expanded, expanded, kernel, stride, groups=expanded, act=act))
        if excite is not None:
            layers.append(excite)
        layers.append(ConvNormAct(expanded, channels_out, 1, act=None))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and channels_in == channels_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v2() -> nn.Module:
    """MobileNet V2, width 1.0."""
    layers: list[nn.Module] = [ConvNormAct(3, 32, 3, 2, act=nn.ReLU6)]
    channels = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
    for expansion, width, depth, stride in (*stages, (6, 320, 1, 1)):
        for index in range(depth):
            step = stride if index == 0 else 1
            layers.append(InvertedResidual(channels, channels * expansion, width, 3, step, nn.ReLU6))
            channels = width
    layers += [ConvNormAct(channels, 1280, 1, act=nn.ReLU6), Head(1280)]
    return nn.Sequential(*layers)


def mobilenet_v3_small() -> nn.Module:
    """MobileNet V3 small (Howard 2019): h-swish and squeeze-and-excite."""
    rows: tuple[tuple[int, int, int, bool, Activation, int], ...] = (
        (3, 16, 16, True, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 2),
        (3, 88, 24, False, nn.ReLU, 1),
        (5, 96, 40, True, nn.Hardswish, 2),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 240, 40, True, nn.Hardswish, 1),
        (5, 120, 48, True, nn.Hardswish, 1),
        (5, 144, 48, True, nn.Hardswish, 1),
        (5, 288, 96, True, nn.Hardswish, 2),
        (5, 576, 96, True, nn.Hardswish, 1),
        (5, 576, 96, True, nn.Hardswish, 1),
    )
    layers: list[nn.Module] = [ConvNormAct(3, 16, 3, 2, act=nn.Hardswish)]
    channels = 16
    for kernel, expanded, width, excited, act, stride in rows:
        excite = None
        if excited:
            excite = SqueezeExcite(expanded, _round_channels(expanded / 4), gate=nn.Hardsigmoid)
        layers.append(InvertedResidual(channels, expanded, width, kernel, stride, act, excite))
        channels = width
    layers += [ConvNormAct(channels, 576, 1, act=nn.Hardswish), Head(576)]
    return nn.Sequential(*layers)


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 (Tan 2019): SiLU and squeeze-and-excite throughout."""
    layers: list[nn.Module] = [ConvNormAct(3, 32, 3, 2, act=nn.SiLU)]
    channels = 32
    stages = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3))
    for expansion, kernel, stride, width, depth in (*stages, (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)):
        for index in range(depth):
            expanded = channels * expansion
            excite = SqueezeExcite(expanded, max(1, channels // 4), act=nn.SiLU)
            step = stride if index == 0 else 1
            layers.append(InvertedResidual(channels, expanded, width, kernel, step, nn.SiLU, excite))
            channels = width
    layers += [ConvNormAct(channels, 1280, 1, act=nn.SiLU), Head(1280)]
    return nn.Sequential(*layers)


class _ShuffleUnit(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.split = stride == 1
        width = channels_out // 2
        branch_in = channels_in // 2 if self.split else channels_in
        self.shortcut: nn.Module = nn.Identity()
        if not self.split:
            self.shortcut = nn.Sequential(
                ConvNormAct(channels_in, channels_in, 3, stride, groups=channels_in, act=None),
                ConvNormAct(channels_in, width, 1),
            )
        self.body = nn.Sequential(
            ConvNormAct(branch_in, width, 1),
            ConvNormAct(width, width, 3, stride, groups=width, act=None),
            ConvNormAct(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=1) if self.split else (x, x)
        y = torch.cat([self.shortcut(left), self.body(right)], dim=1)
        batch, channels, height, width = y.shape
        return y.reshape(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(y.shape)


def shufflenet_v2() -> nn.Module:
    """ShuffleNet V2 1.0x (Ma 2018)."""
    layers: list[nn.Module] = [ConvNormAct(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for width, depth in ((116, 4), (232, 8), (464, 4)):
        for index in range(depth):
            layers.append(_ShuffleUnit(channels, width, 2 if index == 0 else 1))
            channels = width
    layers += [ConvNormAct(channels, 1024, 1), Head(1024)]
    return nn.Sequential(*layers)
