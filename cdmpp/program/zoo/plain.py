"""Plain convolutional networks: AlexNet (Krizhevsky 2012), VGG (Simonyan 2014), SqueezeNet (Iandola 2016)."""

from __future__ import annotations

import torch
from torch import nn

from cdmpp.program.zoo.layers import Branches

_VGG: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
}


def alexnet() -> nn.Module:
    """AlexNet as in torchvision (one tower)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, 1, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )


def vgg(depth: int) -> nn.Module:
    """VGG-11 or VGG-16 without batch normalisation."""
    layers: list[nn.Module] = []
    channels = 3
    for item in _VGG[depth]:
        if isinstance(item, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, item, 3, 1, 1), nn.ReLU()]
            channels = item
    layers += [
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    ]
    return nn.Sequential(*layers)


def _fire(channels_in: int, squeezed: int, expanded: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, squeezed, 1),
        nn.ReLU(),
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeezed, expanded, 3, 1, 1), nn.ReLU()),
        ),
    )


class _GlobalMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        _fire(64, 16, 64),
        _fire(128, 16, 64),
        nn.MaxPool2d(3, 2),
        _fire(128, 32, 128),
        _fire(256, 32, 128),
        nn.MaxPool2d(3, 2),
        _fire(256, 48, 192),
        _fire(384, 48, 192),
        _fire(384, 64, 256),
        _fire(512, 64, 256),
        nn.Conv2d(512, 1000, 1),
        nn.ReLU(),
        _GlobalMean(),
    )
