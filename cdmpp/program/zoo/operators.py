"""Randomly drawn operators, fifty per network, of kinds, shapes and epilogues that are rare or missing in the zoo's networks.

A predictor learns about a task from similar tasks. More sizes of the zoo's networks only add to the kinds that they already
have. The draws have pools, norms, gates, attention, dilated, grouped and transposed convolutions, reductions and data movement,
with odd and prime extents and batches of 1 to 64. The same number gives the same draw everywhere. Numbers from 1,001 draw
recurrent layers, batched products and fused attention, from 2,001 convolutions of signals, from 3,001 windows of images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cdmpp.program.zoo import TensorSpec

#: Number of operators in a draw.
_OPERATORS = 50
#: Most elements of a tensor, and most multiply-adds of an operator: some tens of milliseconds on a core.
_MOST_ELEMENTS, _MOST_WORK = 1 << 21, 3e8

_Shape = tuple[int, ...]
#: A module and the shapes of its inputs (its weights are not inputs).
_Operator = tuple[nn.Module, Sequence[_Shape]]


class _Call(nn.Module):
    """A function as a module, after an optional module that has weights."""

    def __init__(self, function: Callable[..., torch.Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.inner is not None:
            inputs = (self.inner(inputs[0]), *inputs[1:])
        return self.function(*inputs)


class Operators(nn.Module):
    """Runs each operator on inputs of its own, float32, and returns all outputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = _Draw(np.random.default_rng([20261123, number]))
        kinds = ((3001, draw.window), (2001, draw.signal), (1001, draw.of_sequences), (0, draw.operator))
        of = next(of for first, of in kinds if number >= first)
        drawn = [of() for _ in range(_OPERATORS)]
        self.operators = nn.ModuleList(module for module, _ in drawn)
        self.shapes = [shapes for _, shapes in drawn]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of all operators, one operator after the other."""
        every = [shape for shapes in self.shapes for shape in shapes]
        return tuple(TensorSpec(f"x{number}", shape) for number, shape in enumerate(every))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest, outputs = list(inputs), []
        for module, shapes in zip(self.operators, self.shapes, strict=True):
            outputs.append(module(*rest[: len(shapes)]))
            rest = rest[len(shapes) :]
        return tuple(outputs)


_UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.relu, torch.sigmoid, torch.tanh, torch.exp, F.gelu, F.silu, F.hardswish, F.relu6, F.softplus, F.leaky_relu,
    torch.rsqrt, torch.abs, torch.square,
)  # fmt: skip
_variance = functools.partial(torch.var, correction=0)
_BINARY = (torch.add, torch.mul, torch.sub, torch.div, torch.maximum)


class _Draw:
    """Draws operators."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def operator(self) -> _Operator:
        """An operator of any kind; kinds that are listed several times, such as convolutions, are more likely."""
        kinds = (
            self.convolution, self.convolution, self.convolution, self.transposed, self.product, self.product, self.attention,
            self.pool, self.pool, self.global_pool, self.norm, self.norm, self.softmax, self.gate, self.reduction,
            self.elementwise, self.move, self.resize,
        )  # fmt: skip
        while True:
            module, shapes = self.one_of(kinds)()
            if all(np.prod(shape) <= _MOST_ELEMENTS for shape in shapes):
                return module, shapes

    def of_sequences(self) -> _Operator:
        """A recurrent layer, a recurrent cell, a batched product or attention in one call."""
        kinds = (self.recurrent, self.recurrent, self.cell, self.batched, self.fused_attention)
        operator: _Operator = self.one_of(kinds)()
        return operator

    def one_of(self, choices: Sequence[Any]) -> Any:
        """One of the choices, all equally likely."""
        return choices[int(self.rng.integers(len(choices)))]

    def between(self, low: int, high: int) -> int:
        """A whole number, small ones more often; half of them multiples of the largest power of two up to a quarter of it."""
        value = int(np.exp(self.rng.uniform(np.log(low), np.log(high + 1))))
        step = 1 << max(0, value.bit_length() - 3)
        return max(low, value // step * step) if self.rng.random() < 0.5 else value

    def batch(self) -> int:
        """A batch size: mostly 1, at most 64."""
        return 1 if self.rng.random() < 0.5 else self.between(2, 64)

    def image(self, channels: int | None = None, low: int = 4, high: int = 160) -> _Shape:
        """A shape of batch, channels, height and width; mostly square."""
        height = self.between(low, high)
        width = height if self.rng.random() < 0.7 else self.between(low, high)
        batch, channels = self.batch(), channels or self.between(3, 512)
        while batch * channels * height * width > _MOST_ELEMENTS and batch > 1:
            batch //= 2
        return batch, channels, height, width

    def tokens(self) -> _Shape:
        """A shape of batch, length and width."""
        return self.batch(), self.between(4, 384), self.between(16, 1024)

    def tensor(self) -> _Shape:
        """A shape of two to four dimensions."""
        return self.one_of((lambda: self.tokens()[1:], self.tokens, self.image))()

    def epilogue(self, shape: _Shape, inner: nn.Module) -> _Operator:
        """The module, perhaps followed by an activation or combined with another tensor."""
        x = inner(torch.zeros(shape))
        kind = self.rng.random()
        if kind < 0.3:
            return inner, [shape]
        if kind < 0.7:
            return _Call(self.one_of(_UNARY), inner), [shape]
        function, then = self.one_of(_BINARY[:2]), self.one_of((torch.relu, torch.sigmoid, nn.Identity()))
        return _Call(lambda a, b: then(function(a, b)), inner), [shape, tuple(x.shape)]

    def convolution(self) -> _Operator:
        """A convolution in one to three dimensions: dense, grouped or depthwise, dilated or strided."""
        rank = self.one_of((1, 2, 2, 2, 2, 3))
        while True:
            before, after = self.between(3, 384), self.between(4, 384)
            size = tuple(self.between(4, (4000, 112, 20)[rank - 1]) for _ in range(rank))
            if rank == 2 and self.rng.random() < 0.7:
                size = (size[0], size[0])
            groups = self.one_of((1, 1, 1, 2, 4, 8, 0))
            if groups == 0:
                groups, after = before, before * self.one_of((1, 1, 2))
            else:
                before, after = -(-before // groups) * groups, -(-after // groups) * groups
            kernel, stride = self.one_of((1, 1, 3, 3, 3, 5, 7)), self.one_of((1, 1, 1, 2, 3))
            dilation = self.one_of((1, 1, 1, 2, 4))
            reach = dilation * (kernel - 1)
            padding = self.one_of((0, reach // 2, reach // 2))
            if min(size) + 2 * padding <= reach:
                continue
            shape = (self.batch(), before, *size)
            out = np.prod([(n + 2 * padding - reach - 1) // stride + 1 for n in size])
            work = shape[0] * after * out * before / groups * kernel**rank
            if work <= _MOST_WORK and shape[0] * after * out <= _MOST_ELEMENTS and np.prod(shape) <= _MOST_ELEMENTS:
                break
        layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        bias = self.rng.random() < 0.5
        return self.epilogue(shape, layer(before, after, kernel, stride, padding, dilation, groups, bias))

    def signal(self) -> _Operator:
        """A convolution of a signal with a long kernel, as at the start of audio networks."""
        while True:
            before, after, kernel = self.one_of((1, 1, 2, 4, 16, 64)), self.between(8, 256), self.between(8, 256)
            shape, stride = (self.batch(), before, self.between(2 * kernel, 32000)), self.between(1, 16)
            out = shape[0] * after * ((shape[2] - kernel) // stride + 1)
            if out * before * kernel <= _MOST_WORK and max(out, np.prod(shape)) <= _MOST_ELEMENTS:
                break
        return self.epilogue(shape, nn.Conv1d(before, after, kernel, stride))

    def window(self) -> _Operator:
        """A pool, or a dense convolution with bias and ReLU, over images of the sizes that networks have."""
        while True:
            shape, after = self.image(self.between(3, 1024), 7, 224), self.between(8, 512)
            stride, long = self.one_of((1, 1, 2)), self.one_of((1, 1, 3, 3, 5, 7))
            kernel = self.one_of(((long, long), (long, long), (1, long), (long, 1)))
            outputs = shape[0] * after * shape[2] * shape[3] / stride**2
            if outputs * shape[1] * np.prod(kernel) <= _MOST_WORK and max(outputs, np.prod(shape)) <= _MOST_ELEMENTS:
                break
        layer = nn.Sequential(nn.Conv2d(shape[1], after, kernel, stride, (kernel[0] // 2, kernel[1] // 2)), nn.ReLU())
        return self.pool_layer() if self.rng.random() < 0.5 else layer, [shape]

    def transposed(self) -> _Operator:
        """A transposed convolution."""
        while True:
            batch, before, height, width = self.image(self.between(4, 192), 4, 48)
            after, kernel, stride = self.between(3, 128), self.one_of((2, 3, 4, 5)), self.one_of((1, 2, 2))
            if batch * before * after * height * width * kernel**2 <= _MOST_WORK:
                break
        layer = nn.ConvTranspose2d(before, after, kernel, stride, self.one_of((0, 1)))
        return self.epilogue((batch, before, height, width), layer)

    def product(self) -> _Operator:
        """A linear layer, or a product of two inputs."""
        while True:
            batch, m, n, k = self.batch(), self.between(1, 512), self.between(8, 2048), self.between(8, 2048)
            if batch * m * n * k <= _MOST_WORK and max(m * n, n * k, m * k) * batch <= _MOST_ELEMENTS:
                break
        if self.rng.random() < 0.6:
            shape = (batch * m, n) if self.rng.random() < 0.5 else (batch, m, n)
            return self.epilogue(shape, nn.Linear(n, k, self.rng.random() < 0.7))
        if self.rng.random() < 0.5:
            return _Call(torch.matmul), [(batch, m, n), (batch, n, k)]
        return _Call(lambda x, y: torch.matmul(x, y.transpose(-1, -2))), [(batch, m, n), (batch, k, n)]

    def attention(self) -> _Operator:
        """Scores of queries and keys with a mask, the product of scores and values, or the whole attention."""
        while True:
            batch, heads, queries = self.batch(), self.between(1, 16), self.between(1, 256)
            depth = self.one_of((16, 24, 32, 64, 80, 128))
            keys = queries if self.rng.random() < 0.6 else self.between(8, 512)
            if batch * heads * queries * keys * depth <= _MOST_WORK:
                break
        x, y, scores = ((batch, heads, queries, depth), (batch, heads, keys, depth), (batch, heads, queries, keys))
        scale = depth**-0.5

        def score(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.matmul(q, k.transpose(-1, -2)) * scale + mask

        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.matmul(torch.softmax(torch.matmul(q * scale, k.transpose(-1, -2)), -1), v)

        kind = self.rng.integers(3)
        if kind == 0:
            return _Call(score), [x, y, (1, 1, queries, keys)]
        return (_Call(torch.matmul), [scores, y]) if kind == 1 else (_Call(whole), [x, y, y])

    def recurrent(self) -> _Operator:
        """Layers of an LSTM or GRU over a sequence, in one direction or both."""
        while True:
            batch, length = self.batch(), self.between(4, 128)
            width, hidden = self.between(16, 768), self.between(16, 768)
            layers, directions = self.one_of((1, 1, 2)), self.one_of((1, 2))
            steps, weights = length * layers * directions, 4 * hidden * (max(width, directions * hidden) + hidden)
            if batch * steps * weights <= _MOST_WORK:
                break
        layer = self.one_of((nn.LSTM, nn.GRU))(width, hidden, layers, batch_first=True, bidirectional=directions == 2)
        return _Call(lambda outputs: outputs[0], layer), [(batch, length, width)]

    def cell(self) -> _Operator:
        """One step of an LSTM or GRU cell."""
        batch, width, hidden = self.batch(), self.between(16, 1024), self.between(16, 1024)
        if self.rng.random() < 0.5:
            return nn.GRUCell(width, hidden), [(batch, width)]
        return _Call(lambda states: states[0], nn.LSTMCell(width, hidden)), [(batch, width)]

    def batched(self) -> _Operator:
        """Products of pairs of matrices."""
        while True:
            batch, m, n, k = self.batch(), self.between(1, 768), self.between(4, 768), self.between(4, 768)
            if batch * m * n * k <= _MOST_WORK:
                return _Call(torch.bmm), [(batch, m, k), (batch, k, n)]

    def fused_attention(self) -> _Operator:
        """Attention in one call, causal or not."""
        while True:
            batch, heads, queries = self.batch(), self.between(1, 16), self.between(1, 512)
            depth, causal = self.one_of((16, 24, 32, 64, 80, 128)), bool(self.rng.random() < 0.5)
            keys = queries if causal or self.rng.random() < 0.6 else self.between(8, 512)
            if batch * heads * queries * keys * depth <= _MOST_WORK:
                break
        q, k = (batch, heads, queries, depth), (batch, heads, keys, depth)
        return _Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)), [q, k, k]

    def pool(self) -> _Operator:
        """Maximum or mean over windows, perhaps with an epilogue."""
        return self.epilogue(self.image(low=8), self.pool_layer())

    def pool_layer(self) -> Any:
        """Maximum or mean over windows."""
        kernel = self.one_of((2, 2, 3, 3, 3, 5, 7))
        stride, padding = self.one_of((1, 2, 2, kernel)), self.one_of((0, kernel // 2))
        mean = nn.AvgPool2d(kernel, stride, padding, count_include_pad=self.rng.random() < 0.5)
        return self.one_of((nn.MaxPool2d(kernel, stride, padding), mean))

    def global_pool(self) -> _Operator:
        """Mean pooling to an image of a given size."""
        return self.epilogue(self.image(low=8), nn.AdaptiveAvgPool2d(self.one_of((1, 1, 2, 4, 7))))

    def norm(self) -> _Operator:
        """A norm over the width, over groups of channels or over each channel; by mean and variance or by the mean square."""
        kind = self.rng.integers(5)
        if kind < 2:
            shape = self.tokens()
            return self.epilogue(shape, (nn.LayerNorm, nn.RMSNorm)[kind](shape[-1]))
        groups = self.one_of((1, 2, 4, 8, 16))
        shape = self.image(groups * self.between(1, 32))
        layers = (nn.GroupNorm(groups, shape[1]), nn.InstanceNorm2d(shape[1]), nn.BatchNorm2d(shape[1]))
        return self.epilogue(shape, layers[kind - 2])

    def softmax(self) -> _Operator:
        """Softmax or its logarithm, over any axis, perhaps with a mask."""
        shape = self.tensor()
        axis = -1 if self.rng.random() < 0.7 else int(self.rng.integers(len(shape)))
        function = self.one_of((torch.softmax, torch.softmax, torch.log_softmax))
        if self.rng.random() < 0.3:
            return _Call(lambda x, mask: function(x + mask, axis)), [shape, shape[-1:]]
        return _Call(lambda x: function(x, axis)), [shape]

    def gate(self) -> _Operator:
        """One tensor, or half of one, scales another or the other half."""
        act = self.one_of((torch.sigmoid, F.silu, F.gelu, F.hardsigmoid, torch.tanh))
        if self.rng.random() < 0.5:
            batch, length, width = self.tokens()
            if self.rng.random() < 0.5:
                return _Call(lambda x, y: act(x) * y), [(batch, length, width)] * 2
            return _Call(lambda x: act(x[..., :width]) * x[..., width:]), [(batch, length, 2 * width)]
        batch, channels, height, width = self.image()
        gates = (batch, channels, 1, 1) if self.rng.random() < 0.7 else (batch, 1, height, width)
        return _Call(lambda x, y: x * act(y)), [(batch, channels, height, width), gates]

    def reduction(self) -> _Operator:
        """A reduction over one or more axes."""
        shape = self.tensor()
        axes = sorted(self.rng.choice(len(shape), int(self.rng.integers(1, len(shape))), replace=False).tolist())
        function = self.one_of((torch.sum, torch.mean, _variance, torch.linalg.vector_norm))
        keep = bool(self.rng.random() < 0.5)
        return _Call(lambda x: function(x, dim=axes, keepdim=keep)), [shape]

    def elementwise(self) -> _Operator:
        """A chain of one to four elementwise functions; the first takes two tensors, the second of them perhaps broadcast."""
        shape = self.tensor()
        other = self.one_of((shape, shape, shape[-1:], (*shape[:-1], 1), (shape[0], *[1] * (len(shape) - 1))))
        chain = [self.one_of(_UNARY) for _ in range(int(self.rng.integers(0, 4)))]
        function = self.one_of(_BINARY)

        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = function(x, y)
            for each in chain:
                x = each(x)
            return x

        return _Call(run), [shape, other]

    def move(self) -> _Operator:
        """A permutation, concatenation, slice, padding, shift or reversal."""
        shape = self.tensor()
        axis, order = int(self.rng.integers(len(shape))), self.rng.permutation(len(shape)).tolist()
        half, pad = max(1, shape[axis] // 2), [self.between(1, 4) for _ in range(4)]
        kind = int(self.rng.integers(6))
        if kind == 1:
            return _Call(lambda x, y: torch.cat([x, y], axis)), [shape, shape]
        functions: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
            lambda x: x.permute(order).contiguous() + 0.0,
            lambda x: x,
            lambda x: torch.relu(x.narrow(axis, shape[axis] - half, half)),
            lambda x: F.pad(x, pad),
            lambda x: torch.roll(x, half, axis),
            lambda x: x.flip(axis),
        )
        return _Call(functions[kind]), [shape]

    def resize(self) -> _Operator:
        """An enlarged image: by copies, by interpolation or by pixel shuffle from channels."""
        shape = self.image(4 * self.between(1, 64), 4, 64)
        mode = self.one_of(("nearest", "bilinear", "shuffle"))
        if mode == "shuffle":
            return _Call(lambda x: F.pixel_shuffle(x, 2)), [shape]
        return _Call(lambda x: F.interpolate(x, scale_factor=2.0, mode=mode)), [shape]
