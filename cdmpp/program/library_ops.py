"""Operators as a vendor library runs them, as canonical tasks: unscheduled PrimFuncs in float32.

One function per operator turns its dimensions into a PrimFunc. They are generators (:mod:`cdmpp.program.generators`), so a task
is stored as its dimensions (:func:`cdmpp.program.network.library_task`). Elementwise operators and copies are one block each,
because a library runs them in one kernel. Matrix products have a separate block for the bias. Softmax and layer normalisation
are TVM's own formulations, as in imported networks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program import import_tvm, normalise

#: Elementwise operators -> floating-point operations per element, as TVM counts them (special functions count as 0).
ELEMENTWISE_FLOPS: dict[str, int] = {
    "add": 1, "mul": 1, "div": 1, "pow": 0, "addu": 1, "mulu": 1, "divu": 1, "powu": 0,
    "tanh": 0, "relu": 1, "gelu": 4,
}  # fmt: skip

#: Elementwise operators of two tensors; other binary ones (``addu``, ...) take a tensor and a number.
BINARY: tuple[str, ...] = ("add", "mul", "div", "pow")

#: Floating-point operations per element of TVM's softmax (maximum, difference, sum, quotient) and layer normalisation.
_SOFTMAX_FLOPS, _LAYER_NORM_FLOPS = 4, 11

#: The number that ``addu`` and the like take. Its value does not affect the time.
_NUMBER = 0.5


def linear(m: int, n: int, k: int) -> Any:
    """``y[m, k] = sum_n x[m, n] w[k, n] + b[k]``: `n` is the reduction, `k` the output (NeuSight's names)."""
    ex = te()
    x, w, b = placeholders(x=(m, n), w=(k, n), b=(k,))
    r = ex.reduce_axis((0, n), name="r")
    product = ex.compute((m, k), lambda i, j: ex.sum(x[i, r] * w[j, r], axis=r), name="matmul")
    return prim_func([x, w, b], ex.compute((m, k), lambda i, j: product[i, j] + b[j], name="add"))


def bmm(b: int, m: int, n: int, k: int) -> Any:
    """``z[b, m, k] = sum_n x[b, m, n] y[b, n, k]``: `n` is the reduction, `k` the output (NeuSight's names)."""
    ex = te()
    x, y = placeholders(x=(b, m, n), y=(b, n, k))
    r = ex.reduce_axis((0, n), name="r")
    product = ex.compute((b, m, k), lambda h, i, j: ex.sum(x[h, i, r] * y[h, r, j], axis=r), name="matmul")
    return prim_func([x, y], product)


def conv2d(batch: int, in_channels: int, out_channels: int, kernel: int, size: int, stride: int, padding: int) -> Any:
    """Square 2-D convolution of ``(batch, in_channels, size, size)``, without bias."""
    x, w = placeholders(x=(batch, in_channels, size, size), w=(out_channels, in_channels, kernel, kernel))
    from tvm import topi

    return prim_func([x, w], topi.nn.conv2d_nchw(x, w, stride, padding, 1))


def elementwise(op: str, shape: Sequence[int], other: Sequence[int] = ()) -> Any:
    """An operator of :data:`ELEMENTWISE_FLOPS` on a tensor of `shape`; ``other`` is the shape of a binary operator's second
    tensor, 1 in broadcast dimensions, or empty for the same shape."""
    ex = te()
    from tvm import tirx

    if op not in ELEMENTWISE_FLOPS:
        raise ProgramError(f"no elementwise operator {op!r}; there are {', '.join(ELEMENTWISE_FLOPS)}")
    number = tirx.const(_NUMBER, "float32")
    one, half = tirx.const(1.0, "float32"), tirx.const(0.5, "float32")
    binary = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "pow": tirx.pow}
    unary = {
        "tanh": tirx.tanh,
        "relu": lambda a: tirx.max(a, tirx.const(0.0, "float32")),
        "gelu": lambda a: half * a * (one + tirx.erf(a * tirx.const(math.sqrt(0.5), "float32"))),
        **{f"{name}u": (lambda a, f=function: f(a, number)) for name, function in binary.items()},
    }
    (x,) = placeholders(x=shape)
    if op not in binary:
        return prim_func([x], ex.compute(tuple(shape), lambda *i: unary[op](x(*i)), name=op))
    sizes = tuple(other) or tuple(shape)
    (y,) = placeholders(y=sizes)

    def there(index: Sequence[Any]) -> list[Any]:
        return [0 if size == 1 else i for i, size in zip(index, sizes, strict=True)]

    return prim_func([x, y], ex.compute(tuple(shape), lambda *i: binary[op](x(*i), y(*there(i))), name=op))


def softmax(rows: int, columns: int) -> Any:
    """Softmax over the columns."""
    (x,) = placeholders(x=(rows, columns))
    from tvm import topi

    return prim_func([x], topi.nn.softmax(x, axis=-1))


def layer_norm(rows: int, columns: int) -> Any:
    """Layer normalisation over the columns, with scale and bias."""
    x, scale, bias = placeholders(x=(rows, columns), scale=(columns,), bias=(columns,))
    from tvm import topi

    return prim_func([x, scale, bias], topi.nn.layer_norm(x, scale, bias, axis=[1], epsilon=1e-5))


def memory(elements: int, inputs: int = 1) -> Any:
    """Move memory: read `inputs` tensors of ``elements`` elements each and write one (a fill, a copy, a masked copy, ...)."""
    ex = te()
    from tvm import tirx

    sources = placeholders(**{f"x{i}": (elements,) for i in range(inputs)})

    def value(i: Any) -> Any:
        if not sources:
            return tirx.const(0.0, "float32")
        if len(sources) == 1:
            return sources[0][i]
        first, *rest = sources
        kept = rest[-1][i]
        for mask in rest[:-1]:
            kept = tirx.Select(mask[i] > tirx.const(0.0, "float32"), kept, tirx.const(0.0, "float32"))
        return tirx.Select(first[i] > tirx.const(0.0, "float32"), kept, tirx.const(0.0, "float32"))

    return prim_func(sources, ex.compute((elements,), value, name="memory"))


def operator_work(name: str, a: Mapping[str, Any]) -> tuple[Any, Any]:
    """Floating-point operations of an operator, and the number of elements of all its inputs and outputs, each counted once.
    Its arguments may be arrays with one value per instance."""
    if name == "linear":
        m, n, k = a["m"], a["n"], a["k"]
        return 2 * m * n * k + m * k, m * n + n * k + k + m * k
    if name == "bmm":
        b, m, n, k = a["b"], a["m"], a["n"], a["k"]
        return 2 * b * m * n * k, b * (m * n + n * k + m * k)
    if name == "conv2d":
        out = (a["size"] + 2 * a["padding"] - a["kernel"]) // a["stride"] + 1
        weights = a["in_channels"] * a["out_channels"] * a["kernel"] ** 2
        image = a["in_channels"] * a["size"] ** 2 + a["out_channels"] * out**2
        return 2 * a["batch"] * weights * out**2, a["batch"] * image + weights
    if name == "elementwise":
        size = math.prod(a["shape"])
        second = math.prod(a.get("other") or a["shape"]) if a["op"] in BINARY else 0
        return ELEMENTWISE_FLOPS[a["op"]] * size, 2 * size + second
    if name == "softmax":
        return _SOFTMAX_FLOPS * a["rows"] * a["columns"], 2 * a["rows"] * a["columns"]
    if name == "layer_norm":
        return (_LAYER_NORM_FLOPS * a["columns"] + 1) * a["rows"], 2 * (a["rows"] + 1) * a["columns"]
    return 0, a["elements"] * (1 + a.get("inputs", 1))


def te() -> Any:
    """``tvm.te`` (imports TVM)."""
    import_tvm()
    from tvm import te as module

    return module


def placeholders(**shapes: Sequence[int]) -> list[Any]:
    """Float32 inputs of a tensor expression, given as names and shapes."""
    return [te().placeholder(tuple(shape), name=name) for name, shape in shapes.items()]


def prim_func(inputs: Sequence[Any], output: Any) -> Any:
    """The PrimFunc of tensor expressions, with the name and attributes that tasks of networks have."""
    return normalise(te().create_prim_func([*inputs, output]))
