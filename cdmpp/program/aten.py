"""A network as PyTorch runs it eagerly: one row for each ATen operator of its ``torch.export`` graph.

Rows have the columns of :mod:`cdmpp.program.operators`, so that an operator model can predict their latency. Convolutions of
one and three dimensions are folded into two. A transposed one counts as the backward pass of a convolution, and a step of a
recurrent network as one product. Views are left out. Operators without a rule count as element-wise by bytes, and are marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.files import shipped_table
from cdmpp.program.operators import GATES, attention, operator_table

#: The most bytes that copies of an operator's weights may take.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Call:
    """One operator: its node in the graph, its sizes, whether there is a rule for them, and bytes of each weight by node."""

    node: Any
    name: str
    sizes: Mapping[str, Any]
    known: bool
    weight_sizes: Mapping[Any, float]

    @property
    def weight_bytes(self) -> float:
        """Bytes of all its weights together."""
        return sum(self.weight_sizes.values())


def calls_of(exported: Any) -> list[Call]:
    """The operators that an ``ExportedProgram`` with fixed shapes runs, without views."""
    from torch.export.graph_signature import InputKind

    users = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT}
    return _calls(exported.graph, {i for i in exported.graph.nodes if i.op == "placeholder" and i.name not in users})


def _calls(graph: Any, weights: Set[Any]) -> list[Call]:
    calls = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = str(getattr(node.target, "_opname", "") or node.target.__name__)
        kind = _kind(name)
        if not _tensors(node) or kind == "view" or (kind == "maybe_view" and _is_view(node)):
            continue
        made_of = [] if name in _RULES or kind else _made_of(node, weights)
        if any(call.known for call in made_of):
            calls += made_of
            continue
        sizes, known = _sizes(name, node)
        own = [i for i in node.all_input_nodes if i in weights]
        most = _bytes(node) if name == "embedding" else math.inf  # it reads only some rows of its weights
        calls.append(Call(node, name, sizes, known, {i: min(_bytes(i), most) for i in own}))
    return calls


def _made_of(node: Any, weights: Set[Any]) -> list[Call]:
    """What PyTorch runs for an operator such as ``einsum``: nothing for one of its own, or an ONNX one with other arguments."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.node import map_arg

    given = node.all_input_nodes

    def run(*tensors: Any) -> Any:
        values = dict(zip(given, tensors, strict=True))
        return node.target(*map_arg(node.args, values.get), **map_arg(node.kwargs, values.get))

    if not getattr(node.target, "_can_decompose", bool)():
        return []
    try:
        graph = make_fx(run)(*map(_value, given)).graph
    except Exception:  # whatever an operator of ONNX with other arguments raises
        return []
    for inner in graph.nodes:
        inner._rename(f"{node.name}_{inner.name}")
    first = zip(graph.nodes, given, strict=False)  # the inputs
    return _calls(graph, {inner for inner, outer in first if outer in weights})


def table_of(calls: Sequence[Call]) -> pd.DataFrame:
    """A row of sizes for each call, in float32, with ``weight_bytes``, ``known`` and the ATen name (``kernel``). Products are
    named ``linear`` or ``bmm`` where these run the same kernel."""
    same = {"mm": "linear", "addmm": "linear", "baddbmm": "bmm"}
    rows = ({"kernel": same.get(c.name, c.name), "known": c.known, "weight_bytes": c.weight_bytes, **c.sizes} for c in calls)
    return operator_table({"dtype": "float32", **row} for row in rows)


def runs_without_onednn(table: pd.DataFrame, threads: float) -> NDArray[np.bool_]:
    """Whether a CPU's convolutions are PyTorch's own loops, (n,): small ones are, and single images of windows of 1 x 1 on one
    thread (``ConvParams::use_mkldnn`` in ``aten/src/ATen/native/Convolution.cpp`` of PyTorch 2.13)."""
    ends = (("in_channels", "out_channels"), ("height", "out_h"), ("width", "out_w"))
    channels, rows, columns = (table[image].where(table["backward"] != 1, table[result]) for image, result in ends)
    # the rule multiplies the input's first four dimensions, which do not include the width of a volume
    volumes = table["kernel"].astype(str).str.endswith("3d")
    elements = table["batch"] * channels * rows * columns.mask(volumes, 1.0)
    fast = table.eval("stride > 1 or dilation > 1 or batch >= 16 or kernel_h > 1 or kernel_w > 1") | (threads > 1)
    large = table.eval("groups > 1 or batch > 1 or (kernel_h > 3 and kernel_w > 3)") | (elements > 20480)
    return ((table["op"] == "conv") & ~(fast & large)).to_numpy()


def arguments_of(call: Call, copies: int = 1) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Random arguments to run a call with, ``copies`` times. Each further copy has weights of its own, as long as they take no
    more than :data:`_MOST_BYTES` in all, and looks up other rows of an embedding."""
    import torch
    from torch.fx.node import map_arg

    generator = torch.Generator().manual_seed(0)
    rows = next((_value(i).shape[0] for i in call.node.all_input_nodes if call.name == "embedding"), 1)

    def made(node: Any) -> Any:
        value = _value(node)
        if not isinstance(value, torch.Tensor):
            return [_random(v, rows, generator) for v in value] if isinstance(value, list | tuple) else value
        return _random(value, rows, generator)

    shared = {node: made(node) for node in call.node.all_input_nodes}
    most = max(1, int(_MOST_BYTES / max(1.0, sum(map(_bytes, call.weight_sizes)))))
    weights = [shared, *({n: made(n) for n in call.weight_sizes} for _ in range(1, min(copies, most)))]
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for copy in range(copies):
        others = {n: made(n) for n in shared if copy and call.name == "embedding" and n not in call.weight_sizes}
        tensors = {**shared, **weights[copy % len(weights)], **others}
        found.append((map_arg(call.node.args, tensors.get), map_arg(dict(call.node.kwargs), tensors.get)))
    return found


def _random(value: Any, high: int, generator: Any) -> Any:
    import torch

    if value.dtype == torch.bool:
        return torch.ones(value.shape, dtype=torch.bool)
    if not value.dtype.is_floating_point:
        return torch.randint(0, max(1, int(high)), value.shape, generator=generator).to(value.dtype)
    found = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    # positive, since some are variances or arguments of logarithms
    return found.uniform_(0.1, 1.0, generator=generator)


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _tensors(node: Any) -> list[Any]:
    value = _value(node)
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if hasattr(v, "shape") and hasattr(v, "stride")]


def _elements(node: Any) -> float:
    return float(sum(math.prod(v.shape) for v in _tensors(node)))


def _bytes(node: Any) -> float:
    return float(sum(math.prod(v.shape) * v.element_size() for v in _tensors(node)))


def _is_view(node: Any) -> bool:
    """Whether the output can share the input's memory: they have the same type, and the input is contiguous already."""
    before, after = _value(node.args[0]), _value(node)
    return bool(before.dtype == after.dtype and before.is_contiguous())


def _kind(name: str) -> str:
    """The kind of an operator (``aten.yaml``); "" for one that is not listed."""
    return next((kind for kind, names in shipped_table("program/aten.yaml").items() if name in names), "")


def _sizes(name: str, node: Any) -> tuple[dict[str, Any], bool]:
    """Sizes of a call, and whether a rule for it is known."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(node), True
    out, read = max(1.0, _elements(node)), sum(map(_elements, node.all_input_nodes))
    inputs, kind = read / out, _kind(name)
    if kind == "reduction":
        return {"op": "reduce", "m": out, "n": max(1.0, read / out)}, True
    if kind in ("copy", "maybe_view"):
        return {"op": "copy", "m": max(1.0, out / _run(node)), "n": _run(node), "inputs": inputs}, True
    op = "activation" if kind == "activation" else "elementwise"
    return {"op": op, "m": 1.0, "n": out, "inputs": inputs}, kind in ("activation", "elementwise")


def _run(node: Any) -> float:
    """Number of elements that are consecutive in memory in the first input, counted along its last dimensions."""
    run = 1.0
    first = next((zip(v.shape, v.stride(), strict=True) for i in node.all_input_nodes for v in _tensors(i)), ())
    for extent, stride in reversed(list(first)):
        if stride != run:
            break
        run *= extent
    return max(run, 1.0)


def _product(node: Any) -> dict[str, Any]:
    """``mm``, ``bmm``, ``matmul``; ``linear``, with weights (n, k); ``addmm``, ``baddbmm``, whose first argument is added."""
    first = 1 if "add" in str(node.target) else 0
    x, y = (_value(arg).shape for arg in node.args[first : first + 2])
    y = y[::-1] if "linear" in str(node.target) else y
    k = x[-1]
    if len(y) <= 2:
        return {"op": "gemm", "m": math.prod(x[:-1]), "n": y[-1] if len(y) == 2 else 1, "k": k}
    out = _value(node).shape
    rows = out[-2] if len(x) > 1 else 1
    return {"op": "gemm", "batch": math.prod(out) / (rows * out[-1]), "m": rows, "n": out[-1], "k": k}


def _conv(node: Any) -> dict[str, Any]:
    """A convolution with any number of dimensions: all but the last are folded into the height."""
    w = _value(node.args[1]).shape
    x, out = _images(node.args[0], len(w)), _images(node, len(w))
    transposed = "transpose" in str(node.target)
    at = {a.name: i for i, a in enumerate(node.target._schema.arguments)}

    def given(name: str) -> list[int]:
        value = node.args[at[name]] if at[name] < len(node.args) else node.kwargs.get(name, 1)
        return [value] if isinstance(value, int) else list(value)

    groups, dims = given("groups")[0], len(x) - 2
    stride, dilation = (given(name) * (dims if len(given(name)) == 1 else 1) for name in ("stride", "dilation"))
    # a transposed convolution swaps the image and the result
    image, result, ins, outs = (out, x, w[1] * groups, x[1]) if transposed else (x, out, x[1], w[0])
    return {
        "op": "conv", "batch": x[0], "in_channels": ins, "out_channels": outs,
        "height": math.prod(image[2:-1]), "width": image[-1], "kernel_h": math.prod(w[2:-1]), "kernel_w": w[-1],
        "out_h": math.prod(result[2:-1]), "out_w": result[-1], "stride": math.prod(stride), "dilation": math.prod(dilation),
        "groups": groups, "backward": float(transposed),
    }  # fmt: skip


def _attention(node: Any) -> dict[str, Any]:
    q, k = (_value(arg).shape for arg in node.args[:2])
    causal = bool(node.kwargs.get("is_causal", len(node.args) > 5 and node.args[5]))
    images = math.prod(q[:-3])
    sizes = attention(q[-3], k[-3], q[-1], [q[-2]] * images, [max(k[-2], q[-2])] * images, causal)
    pairs = sizes["pairs"] if causal else float(images * q[-2] * k[-2])
    return {"op": "attention", **sizes, "kv_tokens": images * k[-2], "pairs": pairs, "longest": k[-2]}


def _rows(op: str, dims: Callable[[Any], int]) -> Callable[[Any], dict[str, Any]]:
    def rule(node: Any) -> dict[str, Any]:
        n = max(1, dims(node))
        return {"op": op, "m": max(1.0, _elements(node.args[0]) / n), "n": n}

    return rule


def _images(node: Any, dims: int) -> tuple[int, ...]:
    """Shape of a batch of images; PyTorch takes a single image without the batch, too."""
    shape = tuple(_tensors(node)[0].shape)
    return (1,) * (dims - len(shape)) + shape


def _pool(node: Any) -> dict[str, Any]:
    dims = int(str(node.target).partition("_pool")[2][0]) + 2
    x, out = _images(node.args[0], dims), _images(node, dims)
    window = [node.args[1]] if isinstance(node.args[1], int) else list(node.args[1])
    window = window * (len(x) - 2 if len(window) == 1 else 1)
    return {
        "op": "pool", "batch": x[0], "in_channels": x[1], "out_channels": x[1], "height": math.prod(x[2:-1]), "width": x[-1],
        "kernel_h": math.prod(window[:-1]), "kernel_w": window[-1], "out_h": math.prod(out[2:-1]), "out_w": out[-1],
    }  # fmt: skip


def _cell(op: str) -> Callable[[Any], dict[str, Any]]:
    def rule(node: Any) -> dict[str, Any]:
        x, hidden = _value(node.args[0]).shape, _tensors(node)[0].shape[-1]
        return {"op": op, "m": x[0], "n": hidden, "k": x[-1], "tokens": 1}

    return rule


def _recurrent(op: str) -> Callable[[Any], dict[str, Any]]:
    """``nn.LSTM`` or ``nn.GRU``: layers and directions run one after the other and count as a batch of their mean size. ONNX
    has the weights of both directions in one array."""

    def rule(node: Any) -> dict[str, Any]:
        x = _value(node.args[0]).shape
        shapes = [_value(arg).shape for arg in node.args[2]]
        weights = [shape[-2:] for shape in shapes if len(shape) > 1 for _ in range(math.prod(shape[:-2]))]
        runs = len(weights) // 2  # each has weights for the input and for the state
        m = 1 if len(x) == 2 else x[0 if len(node.args) > 8 and node.args[8] else 1]
        n, steps = weights[0][0] / GATES[op], math.prod(x[:-1]) // m
        return {"op": op, "batch": runs, "m": m, "n": n, "k": sum(w[1] for w in weights) / runs - n, "tokens": steps}

    return rule


_last = _rows("softmax", lambda node: _value(node.args[0]).shape[node.args[1]])
_RULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("linear", "mm", "mv", "bmm", "matmul", "linalg_matmul", "addmm", "baddbmm"), _product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _last),
    "layer_norm": _rows("layernorm", lambda node: math.prod(node.args[1])),
    "rms_norm": _rows("rmsnorm", lambda node: math.prod(node.args[1])),
    "group_norm": _rows("layernorm", lambda node: math.prod(_value(node.args[0]).shape[1:]) // node.args[1]),
    "instance_norm": _rows("layernorm", lambda node: math.prod(_value(node.args[0]).shape[2:])),
    "batch_norm": _rows("batchnorm", lambda node: math.prod(_value(node.args[0]).shape[2:])),
    "embedding": lambda node: {"op": "embedding", "m": _elements(node.args[1]), "n": _value(node.args[0]).shape[-1]},
    **dict.fromkeys((f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg")), _pool),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _pool),
    "lstm_cell": _cell("lstm"),
    "gru_cell": _cell("gru"),
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
}
