"""ONNX operators as equivalent ATen operators with their sizes: the graph serves to predict latencies, it cannot run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cdmpp.errors import NetworkError
from cdmpp.files import shipped_table
from cdmpp.program.zoo import TensorSpec

#: Most elements of a constant that is computed here.
_MOST = 1 << 24


def onnx_program(name: str, model: Any, inputs: Sequence[TensorSpec]) -> Any:
    """An ONNX model like an ``ExportedProgram`` for :func:`cdmpp.program.aten.calls_of`, by ONNX's shape inference. Values that
    follow from shapes and constants alone are computed first. NetworkError: a result's shape cannot be inferred."""
    import onnx
    import torch
    from torch.export.graph_signature import InputKind

    known, folded, left = _inferred(model, {item.name: item.shape for item in inputs})
    graph, nodes = torch.fx.Graph(), dict[str, Any]()

    def tensor(key: str) -> Any:
        dtype = getattr(torch, str(onnx.helper.tensor_dtype_to_np_dtype(known[key][1])), torch.float32)
        return torch.empty(known[key][0], dtype=dtype, device="meta")

    for key in (*(item.name for item in inputs), *(w.name for w in model.graph.initializer), *folded):
        if key not in nodes:
            nodes[key] = graph.placeholder(f"i{len(nodes)}")
            nodes[key].meta["val"] = tensor(key)
    users = [SimpleNamespace(kind=InputKind.USER_INPUT, arg=SimpleNamespace(name=nodes[i.name].name)) for i in inputs]
    for node in left:
        outs = [out for out in node.output if out]
        for out in set(outs) - known.keys():
            raise NetworkError(f"{name}: ONNX cannot tell the shape of {out}, a result of {node.op_type}")
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        operator, args = _meant(node.op_type, [nodes.get(key) for key in node.input], given)
        made = graph.call_function(_target(operator), args)
        made.meta["val"] = [tensor(out) for out in outs] if len(outs) > 1 else tensor(outs[0])
        for out in outs:
            nodes[out] = made if len(outs) == 1 else graph.call_function(_target("getitem"), (made,))
            nodes[out].meta["val"] = tensor(out) if len(outs) > 1 else made.meta["val"]
    return SimpleNamespace(graph=graph, graph_signature=SimpleNamespace(input_specs=users))


def _inferred(model: Any, fixed: Mapping[str, Sequence[int]]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Shape and ONNX type of each value by name, the values that are constants, and the nodes that compute the others."""
    import onnx
    from onnx.reference import ReferenceEvaluator as Reference

    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    light.graph.name = "light"  # without its weights, as shapes are inferred several times
    numbers = (onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)  # sizes, and the scales of Resize
    sizes = [w for w in model.graph.initializer if w.data_type in numbers and len(w.dims) < 2]
    constants = {w.name: onnx.numpy_helper.to_array(w) for w in sizes}
    known = {i.name: (tuple(fixed[i.name]), i.type.tensor_type.elem_type) for i in model.graph.input if i.name in fixed}
    known |= {w.name: (tuple(w.dims), w.data_type) for w in model.graph.initializer}
    typed = (key for key in known if key not in constants)
    light.graph.input.extend(onnx.helper.make_tensor_value_info(key, *known[key][::-1]) for key in typed)
    light.graph.initializer.extend(sizes)
    left, before = list(model.graph.node), -1
    while len(left) != before:
        before = len(left)
        del light.graph.node[:]
        light.graph.node.extend(left)
        for node in light.graph.node:
            if node.op_type == "GroupNormalization":  # whose shape ONNX does not infer
                node.op_type = "InstanceNormalization"
        for value in onnx.shape_inference.infer_shapes(light, data_prop=True).graph.value_info:
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                known[value.name] = (tuple(dim.dim_value for dim in dims), value.type.tensor_type.elem_type)
        for node in list(left):
            given, found = [key for key in node.input if key], list[Any]()
            small = all(math.prod(known[out][0]) <= _MOST for out in node.output if out in known)
            if node.op_type == "Shape" and node.input[0] in known:
                found = [np.array(known[node.input[0]][0], dtype=np.int64)]
            elif small and all(key in constants for key in given):
                with contextlib.suppress(Exception):  # what the reference cannot compute stays an operator
                    found = list(Reference(node).run(None, {key: constants[key] for key in given}))
            if not found:
                continue
            left.remove(node)
            for out, array in zip(node.output, found, strict=True):
                constants[out] = np.asarray(array)
                light.graph.initializer.append(onnx.numpy_helper.from_array(constants[out], out))
                known[out] = (constants[out].shape, light.graph.initializer[-1].data_type)
    return known, constants, left


def _meant(kind: str, inputs: list[Any], given: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The ATen operator for an ONNX operator, and the arguments that determine its sizes."""
    first: Any = inputs[0] if inputs else None
    dims, present = (2 if first is None else first.meta["val"].dim()) - 2, tuple(i for i in inputs if i is not None)
    if kind in ("Conv", "ConvTranspose"):
        stride, dilation = (list(given.get(key, [1] * dims)) for key in ("strides", "dilations"))
        groups, bias = given.get("group", 1), inputs[2] if len(inputs) > 2 else None
        if kind == "Conv":
            return f"conv{dims}d", (first, inputs[1], bias, stride, 0, dilation, groups)
        return f"conv_transpose{dims}d", (first, inputs[1], bias, stride, 0, 0, groups, dilation)
    if kind == "Gemm":
        return ("linear", present) if given.get("transB") else ("mm", present[:2])
    if kind in ("MaxPool", "AveragePool"):
        return f"{'max' if kind == 'MaxPool' else 'avg'}_pool{dims}d", (first, list(given["kernel_shape"]))
    if kind in ("Softmax", "LogSoftmax"):
        return "softmax", (first, given.get("axis", -1))
    if kind in ("LayerNormalization", "RMSNormalization"):
        name = "layer_norm" if kind[0] == "L" else "rms_norm"
        return name, (first, list(first.meta["val"].shape[given.get("axis", -1) :]), *present[1:])
    if kind == "GroupNormalization":
        return "group_norm", (first, given["num_groups"], *present[1:])
    if kind == "Gather":
        table = first.op == "placeholder" and dims == 0 and given.get("axis", 0) == 0
        return ("embedding" if table else "index_select"), present
    if kind == "Einsum":
        return "einsum", (given["equation"].decode(), list(present))
    if kind in ("LSTM", "GRU"):
        rest = tuple(i for i in inputs[3:4] if i is not None)  # the bias, which is not a matrix
        return kind.lower(), (first, rest, inputs[1:3], True, 1, 0.0, False, False, bool(given.get("layout")))
    if kind == "Resize":
        return ("upsample_nearest2d" if given.get("mode", b"nearest") == b"nearest" else "upsample_bilinear2d"), present
    name = shipped_table("program/onnx.yaml").get(kind, kind.lower())
    return name, (list(present),) if name in ("cat", "stack") else present


def _target(name: str) -> Any:
    """The ATen operator of this name; if there is none, a placeholder class of this name."""
    import torch

    packet = getattr(torch.ops.aten, name, None)
    return type(name, (), {}) if packet is None else getattr(packet, packet.overloads()[0])
