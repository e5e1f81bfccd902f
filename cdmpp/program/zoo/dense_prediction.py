"""Networks with images (or signals) as output: U-Net, DCGAN generator, ESPCN; and a 1-D audio network."""

from __future__ import annotations

import torch
from torch import nn

from cdmpp.program.zoo.layers import ConvNormAct


class _Unet(nn.Module):
    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList()
        channels = 3
        for item in widths:
            self.down.append(nn.Sequential(ConvNormAct(channels, item), ConvNormAct(item, item)))
            channels = item
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for item in reversed(widths[:-1]):
            self.up.append(nn.ConvTranspose2d(channels, item, 2, 2))
            self.merge.append(nn.Sequential(ConvNormAct(2 * item, item), ConvNormAct(item, item)))
            channels = item
        self.classify = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.classify(x)


def unet() -> nn.Module:
    """U-Net (Ronneberger 2015), 4 levels, 32 to 256 channels, padded convolutions, for 128x128 images."""
    return _Unet(32, 4, 21)


def dcgan() -> nn.Module:
    """DCGAN generator (Radford 2015): a 100-vector to a 64x64 image, transposed convolutions."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
    channels = 512
    for width in (256, 128, 64):
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        layers.append(nn.ConvTranspose2d(channels, width, 4, 2, 1, bias=False))
        channels = width
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers)


def espcn() -> nn.Module:
    """ESPCN (Shi 2016): 3x super-resolution of a 112x112 luminance image by sub-pixel convolution."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 5, 1, 2),
        nn.Tanh(),
        nn.Conv2d(64, 32, 3, 1, 1),
        nn.Tanh(),
        nn.Conv2d(32, 9, 3, 1, 1),
        nn.PixelShuffle(3),
    )


class _DilatedResidual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.filter = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.gate = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x)))


def wavenet() -> nn.Module:
    """A small WaveNet-like stack (van den Oord 2016) of dilated 1-D convolutions over 4,000 samples."""
    return nn.Sequential(
        nn.Conv1d(1, 64, 1),
        *[_DilatedResidual(64, 2**level) for level in range(6)],
        nn.ReLU(),
        nn.Conv1d(64, 256, 1),
    )
