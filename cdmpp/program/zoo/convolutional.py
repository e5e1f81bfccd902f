"""Networks of convolutions, built here after their papers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Activation = Callable[[], nn.Module]
Branch = tuple[tuple[int, int | tuple[int, int]], ...]


class ConvNormAct(nn.Sequential):
    """Convolution without bias, batch normalisation, activation (None for none). NCHW in, NCHW out."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int | tuple[int, int] = 3, stride: int = 1, groups: int = 1,
        act: Activation | None = nn.ReLU, padding: int | tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if padding is None:
            padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        layers: list[nn.Module] = [
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(channels_out),
        ]
        super().__init__(*layers, *([] if act is None else [act()]))


class Mean(nn.Module):
    """Mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


def head(channels: int, classes: int = 1000) -> nn.Module:
    """Global average pooling and a linear classifier."""
    return nn.Sequential(Mean(2, 3), nn.Linear(channels, classes))


class Branches(nn.Module):
    """Parallel branches over the same input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class SqueezeExcite(nn.Module):
    """Channel attention: global mean, two 1x1 convolutions, gate."""

    def __init__(
        self, channels: int, squeezed: int, act: Activation = nn.ReLU, gate: Activation = nn.Sigmoid
    ) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.act = act()
        self.gate = gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.act(self.reduce(scale))))


class Residual(nn.Module):
    """The sum of a body and a shortcut, and an activation of it."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: Activation = nn.ReLU) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.act = act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.body(x) + self.shortcut(x))


# -- one convolution after the other ---------------------------------------------------------------------------

_VGG: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
}


def _classifier(features: int) -> list[nn.Module]:
    hidden = [nn.Linear(features, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return [nn.Flatten(), *hidden, nn.Linear(4096, 1000)]


def alexnet() -> nn.Module:
    """AlexNet (Krizhevsky 2012) as in torchvision (one tower)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for channels_in, channels_out in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2), *_classifier(256 * 6 * 6))


def vgg(depth: int) -> nn.Module:
    """VGG-11 or VGG-16 (Simonyan 2014) without batch normalisation."""
    layers: list[nn.Module] = []
    channels = 3
    for item in _VGG[depth]:
        if isinstance(item, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, item, 3, 1, 1), nn.ReLU()]
            channels = item
    return nn.Sequential(*layers, *_classifier(512 * 7 * 7))


def _fire(channels_in: int, squeezed: int, expanded: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, squeezed, 1),
        nn.ReLU(),
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeezed, expanded, 3, 1, 1), nn.ReLU()),
        ),
    )


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1 (Iandola 2016)."""
    stages = (
        ((64, 16, 64), (128, 16, 64)),
        ((128, 32, 128), (256, 32, 128)),
        ((256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256)),
    )
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU()]
    for stage in stages:
        layers += [nn.MaxPool2d(3, 2), *(_fire(*sizes) for sizes in stage)]
    return nn.Sequential(*layers, nn.Conv2d(512, 1000, 1), nn.ReLU(), Mean(2, 3))


# -- residual ones ---------------------------------------------------------------------------------------------


def _projected(body: nn.Module, channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """A residual block whose shortcut is projected where the body changes the shape."""
    if stride == 1 and channels_in == channels_out:
        return Residual(body)
    return Residual(body, ConvNormAct(channels_in, channels_out, 1, stride, act=None))


def resnet(
    depths: tuple[int, ...], *, bottleneck: bool = True, groups: int = 1, group_width: int = 64
) -> nn.Module:
    """ResNet (He 2015; stride in the 3x3 convolution, as torchvision has it) and ResNeXt (Xie 2016)."""
    layers: list[nn.Module] = [ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        out, inner = (width * 4, width * group_width // 64 * groups) if bottleneck else (width, width)
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            if bottleneck:
                body = nn.Sequential(
                    ConvNormAct(channels, inner, 1),
                    ConvNormAct(inner, inner, 3, stride, groups),
                    ConvNormAct(inner, out, 1, act=None),
                )
            else:
                body = nn.Sequential(
                    ConvNormAct(channels, out, 3, stride), ConvNormAct(out, out, 3, act=None)
                )
            layers.append(_projected(body, channels, out, stride))
            channels = out
    return nn.Sequential(*layers, head(channels))


def regnet_y_400mf() -> nn.Module:
    """RegNetY-400MF (Radosavovic 2020): grouped convolutions of 8 channels, squeeze-and-excite."""
    layers: list[nn.Module] = [ConvNormAct(3, 32, 3, 2)]
    channels = 32
    for width, depth in ((48, 1), (104, 3), (208, 6), (440, 6)):
        for index in range(depth):
            stride = 2 if index == 0 else 1
            body = nn.Sequential(
                ConvNormAct(channels, width, 1),
                ConvNormAct(width, width, 3, stride, groups=width // 8),
                SqueezeExcite(width, round(channels / 4)),
                ConvNormAct(width, width, 1, act=None),
            )
            layers.append(_projected(body, channels, width, stride))
            channels = width
    return nn.Sequential(*layers, head(channels))


def resnet3d() -> nn.Module:
    """A slim ResNet-3D-8 (Tran 2017) over 8 frames of 112x112 (batch normalisation folded away)."""
    layers: list[nn.Module] = [nn.Conv3d(3, 16, (3, 7, 7), (1, 2, 2), (1, 3, 3)), nn.ReLU()]
    for channels, width, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        body = nn.Sequential(
            nn.Conv3d(channels, width, 3, stride, 1), nn.ReLU(), nn.Conv3d(width, width, 3, 1, 1)
        )
        layers.append(Residual(body, nn.Conv3d(channels, width, 1, stride) if stride > 1 else None))
    return nn.Sequential(*layers, Mean(2, 3, 4), nn.Linear(64, 400))


# -- depthwise ones --------------------------------------------------------------------------------------------


def _inverted_residual(
    channels_in: int, expanded: int, channels_out: int, kernel: int, stride: int, act: Activation,
    excite: nn.Module | None = None,
) -> nn.Module:  # fmt: skip
    """1x1 expansion, depthwise convolution, optional squeeze-and-excite, 1x1 projection (Sandler 2018)."""
    layers: list[nn.Module] = []
    if expanded != channels_in:
        layers.append(ConvNormAct(channels_in, expanded, 1, act=act))
    layers.append(ConvNormAct(expanded, expanded, kernel, stride, groups=expanded, act=act))
    if excite is not None:
        layers.append(excite)
    body = nn.Sequential(*layers, ConvNormAct(expanded, channels_out, 1, act=None))
    return Residual(body, act=nn.Identity) if stride == 1 and channels_in == channels_out else body


def _inverted_residuals(
    stages: tuple[tuple[int, int, int, int, int], ...], act: Activation, *, excited: bool
) -> nn.Module:
    """Stages of (expansion, kernel, stride, width, depth)."""
    layers: list[nn.Module] = [ConvNormAct(3, 32, 3, 2, act=act)]
    channels = 32
    for expansion, kernel, stride, width, depth in stages:
        for index in range(depth):
            expanded = channels * expansion
            excite = SqueezeExcite(expanded, max(1, channels // 4), act=act) if excited else None
            step = stride if index == 0 else 1
            layers.append(_inverted_residual(channels, expanded, width, kernel, step, act, excite))
            channels = width
    return nn.Sequential(*layers, ConvNormAct(channels, 1280, 1, act=act), head(1280))


def mobilenet_v2() -> nn.Module:
    """MobileNet V2, width 1.0."""
    stages = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 3, 2, 32, 3), (6, 3, 2, 64, 4), (6, 3, 1, 96, 3), (6, 3, 2, 160, 3),
        (6, 3, 1, 320, 1),
    )  # fmt: skip
    return _inverted_residuals(stages, nn.ReLU6, excited=False)


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 (Tan 2019): SiLU and squeeze-and-excite throughout."""
    stages = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )  # fmt: skip
    return _inverted_residuals(stages, nn.SiLU, excited=True)


def mobilenet_v3_small() -> nn.Module:
    """MobileNet V3 small (Howard 2019): h-swish and squeeze-and-excite."""
    rows: tuple[tuple[int, int, int, int, Activation, int], ...] = (
        (3, 16, 16, 8, nn.ReLU, 2), (3, 72, 24, 0, nn.ReLU, 2), (3, 88, 24, 0, nn.ReLU, 1),
        (5, 96, 40, 24, nn.Hardswish, 2), (5, 240, 40, 64, nn.Hardswish, 1), (5, 240, 40, 64, nn.Hardswish, 1),
        (5, 120, 48, 32, nn.Hardswish, 1), (5, 144, 48, 40, nn.Hardswish, 1), (5, 288, 96, 72, nn.Hardswish, 2),
        (5, 576, 96, 144, nn.Hardswish, 1), (5, 576, 96, 144, nn.Hardswish, 1),
    )  # fmt: skip
    layers: list[nn.Module] = [ConvNormAct(3, 16, 3, 2, act=nn.Hardswish)]
    channels = 16
    for kernel, expanded, width, squeezed, act, stride in rows:
        excite = SqueezeExcite(expanded, squeezed, gate=nn.Hardsigmoid) if squeezed else None
        layers.append(_inverted_residual(channels, expanded, width, kernel, stride, act, excite))
        channels = width
    return nn.Sequential(*layers, ConvNormAct(channels, 576, 1, act=nn.Hardswish), head(576))


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
    return nn.Sequential(*layers, ConvNormAct(channels, 1024, 1), head(1024))


# -- parallel branches and dense connections -------------------------------------------------------------------


def _chain(channels: int, *layers: tuple[int, int | tuple[int, int]]) -> nn.Module:
    """Convolutions of (channels, kernel) one after the other."""
    modules = []
    for channels_out, kernel in layers:
        modules.append(ConvNormAct(channels, channels_out, kernel))
        channels = channels_out
    return nn.Sequential(*modules)


def googlenet() -> nn.Module:
    """GoogLeNet (Szegedy 2014) without the auxiliary heads; 3x3 in the third branch, like torchvision."""
    stages = (
        ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
        (
            (192, (96, 208), (16, 48), 64), (160, (112, 224), (24, 64), 64), (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64), (256, (160, 320), (32, 128), 128),
        ),
        ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
    )  # fmt: skip
    layers: list[nn.Module] = [ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    layers += [ConvNormAct(64, 64, 1), ConvNormAct(64, 192, 3)]
    channels = 192
    for stage in stages:
        layers.append(nn.MaxPool2d(3, 2, 1))
        for one, three, five, pool in stage:
            branches = [_chain(channels, (one, 1))]
            branches += [_chain(channels, (sizes[0], 1), (sizes[1], 3)) for sizes in (three, five)]
            pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNormAct(channels, pool, 1))
            layers.append(Branches(*branches, pooled))
            channels = one + three[1] + five[1] + pool
    return nn.Sequential(*layers, head(1024))


def _valid(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
    return ConvNormAct(channels_in, channels_out, kernel, stride, padding=0)


def _inception(channels: int, pool: int, *chains: Branch) -> nn.Module:
    """Chains of convolutions beside an average pooling."""
    branches = [_chain(channels, *layers) for layers in chains]
    return Branches(*branches, nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNormAct(channels, pool, 1)))


def _inception_e(channels: int) -> nn.Module:
    def fork() -> nn.Module:
        return Branches(ConvNormAct(384, 384, (1, 3)), ConvNormAct(384, 384, (3, 1)))

    return Branches(
        ConvNormAct(channels, 320, 1),
        nn.Sequential(ConvNormAct(channels, 384, 1), fork()),
        nn.Sequential(ConvNormAct(channels, 448, 1), ConvNormAct(448, 384, 3), fork()),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNormAct(channels, 192, 1)),
    )


def inception_v3() -> nn.Module:
    """Inception V3 (Szegedy 2015) for 299x299 images, without the auxiliary head."""
    row, column = (1, 7), (7, 1)
    layers: list[nn.Module] = [
        _valid(3, 32, 3, 2), _valid(32, 32, 3), ConvNormAct(32, 64, 3), nn.MaxPool2d(3, 2),
        _valid(64, 80, 1), _valid(80, 192, 3), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    for channels, pool in ((192, 32), (256, 64), (288, 64)):
        chains: tuple[Branch, ...] = (((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)))
        layers.append(_inception(channels, pool, *chains))
    strided = _valid(288, 384, 3, 2)
    deeper = nn.Sequential(_chain(288, (64, 1), (96, 3)), _valid(96, 96, 3, 2))
    layers.append(Branches(strided, deeper, nn.MaxPool2d(3, 2)))
    for width in (128, 160, 160, 192):
        twice = ((width, 1), (width, column), (width, row), (width, column), (192, row))
        layers.append(_inception(768, 192, ((192, 1),), ((width, 1), (width, row), (192, column)), twice))
    layers.append(
        Branches(
            nn.Sequential(ConvNormAct(768, 192, 1), _valid(192, 320, 3, 2)),
            nn.Sequential(_chain(768, (192, 1), (192, row), (192, column)), _valid(192, 192, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
    )
    return nn.Sequential(*layers, _inception_e(1280), _inception_e(2048), head(2048))


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
    return nn.Sequential(*layers, head(channels))


# -- images or signals as output -------------------------------------------------------------------------------


class Unet(nn.Module):
    """U-Net (Ronneberger 2015) with padded convolutions."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList()
        channels = 3
        for item in widths:
            self.down.append(_chain(channels, (item, 3), (item, 3)))
            channels = item
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for item in reversed(widths[:-1]):
            self.up.append(nn.ConvTranspose2d(channels, item, 2, 2))
            self.merge.append(_chain(2 * item, (item, 3), (item, 3)))
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
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 5, 1, 2), nn.Tanh(), nn.Conv2d(64, 32, 3, 1, 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3))


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
    layers = [nn.Conv1d(1, 64, 1), *(_DilatedResidual(64, 2**level) for level in range(6))]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv1d(64, 256, 1))
