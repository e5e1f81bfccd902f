"""Convolutional networks, built here as their papers describe them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

Make = Callable[[], nn.Module]


class Mean(nn.Module):
    """Mean over some axes."""

    def __init__(self, *axes: int, keepdim: bool = False) -> None:
        super().__init__()
        self.axes, self.keepdim = axes, keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes, keepdim=self.keepdim)


class Joined(nn.Module):
    """Branches over the same input, and a function that joins their outputs."""

    def __init__(self, join: Callable[..., torch.Tensor], *branches: nn.Module) -> None:
        super().__init__()
        self.join, self.branches = join, nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(*[branch(x) for branch in self.branches])


def _concat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def _conv(
    channels_in: int, channels_out: int, kernel: int | tuple[int, int] = 3, stride: int = 1, groups: int = 1,
    act: Make = nn.ReLU, padding: int | tuple[int, int] | None = None,
) -> nn.Module:  # fmt: skip
    """Convolution without bias, batch normalisation, activation. The default padding keeps the size."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out), act())


def _chain(channels: int, *layers: tuple[Any, ...]) -> nn.Module:
    """Convolutions of :func:`_conv` one after the other; a layer is the arguments after ``channels_in``."""
    inputs = (channels, *(layer[0] for layer in layers))
    return nn.Sequential(*(_conv(n, *layer) for n, layer in zip(inputs, layers, strict=False)))


def _plain(channels: int, *layers: tuple[Any, ...]) -> list[nn.Module]:
    """Convolutions with bias and ReLU; a layer is the arguments of Conv2d after the first."""
    inputs = (channels, *(layer[0] for layer in layers))
    pairs = [(nn.Conv2d(n, *layer), nn.ReLU()) for n, layer in zip(inputs, layers, strict=False)]
    return list(itertools.chain(*pairs))


def _stages(channels: int, stages: Iterable[Sequence[Any]], block: Callable[..., nn.Module]) -> list[nn.Module]:
    """Blocks of all stages, each (channels out, depth, stride of the first block, further arguments of ``block``).

    ``block`` takes channels in, channels out, the stride and the further arguments."""
    layers = []
    for width, depth, stride, *more in stages:
        for index in range(depth):
            layers.append(block(channels, width, 1 if index else stride, *more))
            channels = width
    return layers


def _head(channels: int) -> nn.Module:
    """Global average pooling and a linear classifier."""
    return nn.Sequential(Mean(2, 3), nn.Linear(channels, 1000))


def _squeeze_excite(channels: int, squeezed: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid) -> nn.Module:
    """Channel attention: global mean, two 1x1 convolutions, gate."""
    reduce, expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
    scale = nn.Sequential(Mean(2, 3, keepdim=True), reduce, act(), expand, gate())
    return Joined(torch.mul, nn.Identity(), scale)


# -- one convolution after the other ---------------------------------------------------------------------------


def _classifier(features: int) -> list[nn.Module]:
    hidden = [nn.Linear(features, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return [nn.Flatten(), *hidden, nn.Linear(4096, 1000)]


def alexnet() -> nn.Module:
    """AlexNet (Krizhevsky 2012) as in torchvision (one tower)."""
    layers = [*_plain(3, (64, 11, 4, 2)), nn.MaxPool2d(3, 2), *_plain(64, (192, 5, 1, 2)), nn.MaxPool2d(3, 2)]
    layers += _plain(192, (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2), *_classifier(256 * 6 * 6))


def vgg(depths: Sequence[int]) -> nn.Module:
    """VGG (Simonyan 2014) without batch normalisation, by the number of convolutions before each pooling."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        layers += [*_plain(channels, *[(width, 3, 1, 1)] * depth), nn.MaxPool2d(2, 2)]
        channels = width
    return nn.Sequential(*layers, *_classifier(512 * 7 * 7))


def squeezenet(stages: Iterable[Iterable[Sequence[int]]]) -> nn.Module:
    """SqueezeNet (Iandola 2016). A stage lists (channels in, squeezed, of each of the two expanding branches) per block."""
    layers = _plain(3, (64, 3, 2))
    for stage in stages:
        layers.append(nn.MaxPool2d(3, 2))
        for channels, squeezed, expanded in stage:
            layers += _plain(channels, (squeezed, 1))
            branches = [nn.Sequential(*_plain(squeezed, row)) for row in ((expanded, 1), (expanded, 3, 1, 1))]
            layers.append(Joined(_concat, *branches))
    return nn.Sequential(*layers, *_plain(512, (1000, 1)), Mean(2, 3))


# -- residual ones ---------------------------------------------------------------------------------------------


def _residual(body: nn.Module, channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """ReLU of the sum of a body and a shortcut; the shortcut is projected if the body changes the shape."""
    same = stride == 1 and channels_in == channels_out
    shortcut = nn.Identity() if same else _conv(channels_in, channels_out, 1, stride, act=nn.Identity)
    return nn.Sequential(Joined(torch.add, body, shortcut), nn.ReLU())


def resnet(depths: Sequence[int], *, bottleneck: bool = True, groups: int = 1, group_width: int = 64) -> nn.Module:
    """ResNet (He 2015; stride in the 3x3 convolution, as torchvision has it) and ResNeXt (Xie 2016)."""

    def block(channels: int, out: int, stride: int) -> nn.Module:
        inner = out // 256 * group_width * groups
        deep = (inner, 1), (inner, 3, stride, groups), (out, 1, 1, 1, nn.Identity)
        body = _chain(channels, *deep if bottleneck else ((out, 3, stride), (out, 3, 1, 1, nn.Identity)))
        return _residual(body, channels, out, stride)

    widths = (256, 512, 1024, 2048) if bottleneck else (64, 128, 256, 512)
    stages = zip(widths, depths, (1, 2, 2, 2), strict=True)
    layers = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *_stages(64, stages, block)]
    return nn.Sequential(*layers, _head(widths[-1]))


def regnet_y_400mf() -> nn.Module:
    """RegNetY-400MF (Radosavovic 2020): grouped convolutions of 8 channels, squeeze-and-excite."""

    def block(channels: int, width: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            _chain(channels, (width, 1), (width, 3, stride, width // 8)),
            _squeeze_excite(width, round(channels / 4)),
            _conv(width, width, 1, act=nn.Identity),
        )
        return _residual(body, channels, width, stride)

    stages = (48, 1, 2), (104, 3, 2), (208, 6, 2), (440, 6, 2)
    return nn.Sequential(_conv(3, 32, 3, 2), *_stages(32, stages, block), _head(440))


def resnet3d() -> nn.Module:
    """A slim ResNet-3D-8 (Tran 2017) over 8 frames of 112x112 (batch normalisation folded away)."""

    def block(channels: int, width: int, stride: int) -> nn.Module:
        first, second = nn.Conv3d(channels, width, 3, stride, 1), nn.Conv3d(width, width, 3, 1, 1)
        shortcut = nn.Conv3d(channels, width, 1, stride) if stride > 1 else nn.Identity()
        return Joined(torch.add, nn.Sequential(first, nn.ReLU(), second), shortcut)

    layers: list[nn.Module] = [nn.Conv3d(3, 16, (3, 7, 7), (1, 2, 2), (1, 3, 3)), nn.ReLU()]
    for stage in _stages(16, ((16, 1, 1), (32, 1, 2), (64, 1, 2)), block):
        layers += [stage, nn.ReLU()]
    return nn.Sequential(*layers, Mean(2, 3, 4), nn.Linear(64, 400))


# -- depthwise ones --------------------------------------------------------------------------------------------


def _inverted_residual(
    channels: int, out: int, stride: int, kernel: int, expanded: int, squeezed: int, act: Make,
    excite_acts: tuple[Make, Make],
) -> nn.Module:  # fmt: skip
    """1x1 expansion, depthwise convolution, squeeze-and-excite unless ``squeezed`` is 0, 1x1 projection (Sandler 2018)."""
    excite = [_squeeze_excite(expanded, squeezed, *excite_acts)] if squeezed else []
    expand = [_conv(channels, expanded, 1, act=act)] if expanded != channels else []
    depthwise = _conv(expanded, expanded, kernel, stride, expanded, act)
    body = nn.Sequential(*expand, depthwise, *excite, _conv(expanded, out, 1, act=nn.Identity))
    return Joined(torch.add, body, nn.Identity()) if stride == 1 and channels == out else body


def inverted_residuals(stages: Iterable[Sequence[int]], activation: str, *, excited: bool) -> nn.Module:
    """MobileNet V2 and EfficientNet (Tan 2019). A stage is (width, depth, stride, expansion, kernel)."""
    act = getattr(nn, activation)

    def block(channels: int, width: int, stride: int, expansion: int, kernel: int) -> nn.Module:
        inner = channels // 4 if excited else 0
        return _inverted_residual(channels, width, stride, kernel, channels * expansion, inner, act, (act, nn.Sigmoid))

    layers = [_conv(3, 32, 3, 2, act=act), *_stages(32, stages, block), _conv(320, 1280, 1, act=act)]
    return nn.Sequential(*layers, _head(1280))


def mobilenet_v3_small() -> nn.Module:
    """MobileNet V3 small (Howard 2019): h-swish and squeeze-and-excite."""
    act, acts = nn.Hardswish, (nn.ReLU, nn.Hardsigmoid)
    # width, depth, stride, kernel, expanded, squeezed
    stages = (
        (16, 1, 2, 3, 16, 8, nn.ReLU, acts), (24, 1, 2, 3, 72, 0, nn.ReLU, acts), (24, 1, 1, 3, 88, 0, nn.ReLU, acts),
        (40, 1, 2, 5, 96, 24, act, acts), (40, 2, 1, 5, 240, 64, act, acts), (48, 1, 1, 5, 120, 32, act, acts),
        (48, 1, 1, 5, 144, 40, act, acts), (96, 1, 2, 5, 288, 72, act, acts), (96, 2, 1, 5, 576, 144, act, acts),
    )  # fmt: skip
    layers = [_conv(3, 16, 3, 2, act=act), *_stages(16, stages, _inverted_residual)]
    return nn.Sequential(*layers, _conv(96, 576, 1, act=act), _head(576))


class _ShuffleUnit(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.split, width = stride == 1, out // 2
        left = [] if self.split else [(channels, 3, stride, channels, nn.Identity), (width, 1)]
        self.shortcut = _chain(channels, *left)
        right = (width, 1), (width, 3, stride, width, nn.Identity), (width, 1)
        self.body = _chain(channels // 2 if self.split else channels, *right)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=1) if self.split else (x, x)
        y = torch.cat([self.shortcut(left), self.body(right)], dim=1)
        batch, channels, height, width = y.shape
        return y.reshape(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(y.shape)


def shufflenet_v2() -> nn.Module:
    """ShuffleNet V2 1.0x (Ma 2018)."""
    layers = [_conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    layers += _stages(24, ((116, 4, 2), (232, 8, 2), (464, 4, 2)), _ShuffleUnit)
    return nn.Sequential(*layers, _conv(464, 1024, 1), _head(1024))


# -- parallel branches and dense connections -------------------------------------------------------------------


def googlenet(stages: Iterable[Iterable[Any]]) -> nn.Module:
    """GoogLeNet (Szegedy 2014) without the auxiliary heads; 3x3 in the third branch, like torchvision. A stage lists blocks:
    the width of the 1x1 branch, two widths for each of the next two branches, and the width after the pooling."""
    layers = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), _chain(64, (64, 1), (192, 3))]
    channels = 192
    for stage in stages:
        layers.append(nn.MaxPool2d(3, 2, 1))
        for one, three, five, pool in stage:
            chains = ((one, 1),), *(((first, 1), (last, 3)) for first, last in (three, five))
            branches = [_chain(channels, *chain) for chain in chains]
            pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(channels, pool, 1))
            layers.append(Joined(_concat, *branches, pooled))
            channels = one + three[1] + five[1] + pool
    return nn.Sequential(*layers, _head(1024))


def _inception(channels: int, pool: int, *branches: nn.Module) -> nn.Module:
    """Branches and an average pooling, concatenated."""
    return Joined(_concat, *branches, nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, pool, 1)))


def _inception_e(channels: int) -> nn.Module:
    def forked(before: nn.Module) -> nn.Module:
        return nn.Sequential(before, Joined(_concat, _conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))))

    forks = (((384, 1),), ((448, 1), (384, 3)))
    branches = _conv(channels, 320, 1), *(forked(_chain(channels, *chain)) for chain in forks)
    return _inception(channels, 192, *branches)


def inception_v3() -> nn.Module:
    """Inception V3 (Szegedy 2015) for 299x299 images, without the auxiliary head."""

    def reduced(*branches: nn.Module) -> nn.Module:
        return Joined(_concat, *branches, nn.MaxPool2d(3, 2))

    row, column = (1, 7), (7, 1)
    #: Arguments of a 3x3 convolution without padding: kernel, stride, groups, ...
    valid, halving = (3, 1, 1, nn.ReLU, 0), (3, 2, 1, nn.ReLU, 0)
    layers = [
        _chain(3, (32, *halving), (32, *valid), (64, 3)), nn.MaxPool2d(3, 2), _chain(64, (80, 1), (192, *valid)),
        nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    for channels, pool in ((192, 32), (256, 64), (288, 64)):
        chains = ((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3))
        layers.append(_inception(channels, pool, *(_chain(channels, *chain) for chain in chains)))
    layers.append(reduced(_chain(288, (384, *halving)), _chain(288, (64, 1), (96, 3), (96, *halving))))
    for width in (128, 160, 160, 192):
        once = (width, 1), (width, row), (192, column)
        twice = (width, 1), (width, column), (width, row), (width, column), (192, row)
        layers.append(_inception(768, 192, *(_chain(768, *chain) for chain in (((192, 1),), once, twice))))
    across = (192, 1), (192, row), (192, column), (192, *halving)
    layers.append(reduced(_chain(768, (192, 1), (320, *halving)), _chain(768, *across)))
    return nn.Sequential(*layers, _inception_e(1280), _inception_e(2048), _head(2048))


def densenet121() -> nn.Module:
    """DenseNet-121 (Huang 2016), growth 32."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for depth in (6, 12, 24, 16):
        for _ in range(depth):
            new = (nn.BatchNorm2d(channels), nn.ReLU(), _conv(channels, 128, 1), nn.Conv2d(128, 32, 3, 1, 1, bias=False))
            layers.append(Joined(_concat, nn.Identity(), nn.Sequential(*new)))
            channels += 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if depth != 16:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    return nn.Sequential(*layers, _head(channels))


# -- images or signals as output -------------------------------------------------------------------------------


def unet(width: int, levels: int, classes: int) -> nn.Module:
    """U-Net (Ronneberger 2015) with padded convolutions."""

    def level(channels: int, width: int, below: int) -> nn.Module:
        """One level and those below it, whose outputs are concatenated to its own."""
        down = _chain(channels, (width, 3), (width, 3))
        if not below:
            return down
        inner = level(width, 2 * width, below - 1)
        lower = nn.Sequential(nn.MaxPool2d(2, 2), inner, nn.ConvTranspose2d(2 * width, width, 2, 2))
        joined = Joined(_concat, nn.Identity(), lower)
        return nn.Sequential(down, joined, _chain(2 * width, (width, 3), (width, 3)))

    return nn.Sequential(level(3, width, levels - 1), nn.Conv2d(width, classes, 1))


def dcgan() -> nn.Module:
    """DCGAN generator (Radford 2015): a 100-vector to a 64x64 image, transposed convolutions."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
    for channels, width in itertools.pairwise((512, 256, 128, 64, 3)):
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        layers.append(nn.ConvTranspose2d(channels, width, 4, 2, 1, bias=width == 3))
    return nn.Sequential(*layers, nn.Tanh())


def espcn() -> nn.Module:
    """ESPCN (Shi 2016): 3x super-resolution of a 112x112 luminance image by sub-pixel convolution."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 5, 1, 2), nn.Tanh(), nn.Conv2d(64, 32, 3, 1, 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3))


def wavenet() -> nn.Module:
    """A small WaveNet-like stack (van den Oord 2016) of dilated 1-D convolutions over 4,000 samples."""

    def block(dilation: int) -> nn.Module:
        gated = [
            nn.Sequential(nn.Conv1d(64, 64, 3, padding=dilation, dilation=dilation), act()) for act in (nn.Tanh, nn.Sigmoid)
        ]
        mixed = nn.Sequential(Joined(torch.mul, *gated), nn.Conv1d(64, 64, 1))
        return Joined(torch.add, nn.Identity(), mixed)

    layers = [nn.Conv1d(1, 64, 1), *(block(2**level) for level in range(6))]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv1d(64, 256, 1))
