"""Networks of parallel branches and dense connections: GoogLeNet, Inception V3, DenseNet-121."""

from __future__ import annotations

import torch
from torch import nn

from cdmpp.program.zoo.layers import Branches, ConvNormAct, Head


def _inception(
    channels_in: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int
) -> nn.Module:
    return Branches(
        ConvNormAct(channels_in, one, 1),
        nn.Sequential(ConvNormAct(channels_in, three[0], 1), ConvNormAct(three[0], three[1], 3)),
        nn.Sequential(ConvNormAct(channels_in, five[0], 1), ConvNormAct(five[0], five[1], 3)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNormAct(channels_in, pool, 1)),
    )


def googlenet() -> nn.Module:
    """GoogLeNet (Szegedy 2014) without the auxiliary heads; 3x3 in the third branch, like torchvision."""
    return nn.Sequential(
        ConvNormAct(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        ConvNormAct(64, 64, 1),
        ConvNormAct(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),
        _inception(192, 64, (96, 128), (16, 32), 32),
        _inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, 2, 1),
        _inception(480, 192, (96, 208), (16, 48), 64),
        _inception(512, 160, (112, 224), (24, 64), 64),
        _inception(512, 128, (128, 256), (24, 64), 64),
        _inception(512, 112, (144, 288), (32, 64), 64),
        _inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(3, 2, 1),
        _inception(832, 256, (160, 320), (32, 128), 128),
        _inception(832, 384, (192, 384), (48, 128), 128),
        Head(1024),
    )


def _valid(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
    return ConvNormAct(channels_in, channels_out, kernel, stride, padding=0)


def _pool_branch(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNormAct(channels_in, channels_out, 1))


def _inception_a(channels_in: int, pool: int) -> nn.Module:
    return Branches(
        ConvNormAct(channels_in, 64, 1),
        nn.Sequential(ConvNormAct(channels_in, 48, 1), ConvNormAct(48, 64, 5)),
        nn.Sequential(ConvNormAct(channels_in, 64, 1), ConvNormAct(64, 96, 3), ConvNormAct(96, 96, 3)),
        _pool_branch(channels_in, pool),
    )


def _inception_c(channels_in: int, width: int) -> nn.Module:
    row, column = (1, 7), (7, 1)
    return Branches(
        ConvNormAct(channels_in, 192, 1),
        nn.Sequential(
            ConvNormAct(channels_in, width, 1),
            ConvNormAct(width, width, row),
            ConvNormAct(width, 192, column),
        ),
        nn.Sequential(
            ConvNormAct(channels_in, width, 1),
            ConvNormAct(width, width, column),
            ConvNormAct(width, width, row),
            ConvNormAct(width, width, column),
            ConvNormAct(width, 192, row),
        ),
        _pool_branch(channels_in, 192),
    )


def _inception_e(channels_in: int) -> nn.Module:
    def fork() -> nn.Module:
        return Branches(ConvNormAct(384, 384, (1, 3)), ConvNormAct(384, 384, (3, 1)))

    return Branches(
        ConvNormAct(channels_in, 320, 1),
        nn.Sequential(ConvNormAct(channels_in, 384, 1), fork()),
        nn.Sequential(ConvNormAct(channels_in, 448, 1), ConvNormAct(448, 384, 3), fork()),
        _pool_branch(channels_in, 192),
    )


def inception_v3() -> nn.Module:
    """Inception V3 (Szegedy 2015) for 299x299 images, without the auxiliary head."""
    return nn.Sequential(
        _valid(3, 32, 3, 2),
        _valid(32, 32, 3),
        ConvNormAct(32, 64, 3),
        nn.MaxPool2d(3, 2),
        _valid(64, 80, 1),
        _valid(80, 192, 3),
        nn.MaxPool2d(3, 2),
        _inception_a(192, 32),
        _inception_a(256, 64),
        _inception_a(288, 64),
        Branches(
            _valid(288, 384, 3, 2),
            nn.Sequential(ConvNormAct(288, 64, 1), ConvNormAct(64, 96, 3), _valid(96, 96, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        _inception_c(768, 128),
        _inception_c(768, 160),
        _inception_c(768, 160),
        _inception_c(768, 192),
        Branches(
            nn.Sequential(ConvNormAct(768, 192, 1), _valid(192, 320, 3, 2)),
            nn.Sequential(
                ConvNormAct(768, 192, 1),
                ConvNormAct(192, 192, (1, 7)),
                ConvNormAct(192, 192, (7, 1)),
                _valid(192, 192, 3, 2),
            ),
            nn.MaxPool2d(3, 2),
        ),
        _inception_e(1280),
        _inception_e(2048),
        Head(2048),
    )


class _DenseLayer(nn.Module):
    def __init__(self, channels_in: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels_in)
        self.bottleneck = ConvNormAct(channels_in, 4 * growth, 1)
        self.conv = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.conv(self.bottleneck(torch.relu(self.norm(x))))
        return torch.cat([x, new], dim=1)


def densenet121() -> nn.Module:
    """DenseNet-121 (Huang 2016), growth 32."""
    layers: list[nn.Module] = [ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    depths = (6, 12, 24, 16)
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            layers.append(_DenseLayer(channels, 32))
            channels += 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if stage < len(depths) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    layers.append(Head(channels))
    return nn.Sequential(*layers)
