"""Torch modules, ``.pt2`` and ``.onnx`` files into Relax, with errors that name what is wrong.

Relax's front ends raise whatever Python raises where they meet something unforeseen (AssertionError,
KeyError, TVM's own errors), so the calls into them, and only those, catch ``Exception``.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError, UnsupportedOpError
from cdmpp.program.tvm_env import import_tvm
from cdmpp.program.zoo import TensorSpec

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

_ENVIRONMENT = threading.Lock()
_ONNX_UNSUPPORTED = re.compile(r"operators are not supported for frontend ONNX: *([^\n]+)")
_TORCH_UNSUPPORTED = re.compile(r"Unsupported function types? \[([^\]]*)\]")


def export_torch(name: str, module: nn.Module, args: Sequence[Any]) -> Any:
    """``torch.export`` of a module in evaluation mode with example inputs.

    Raises
    ------
    NetworkError
        The module cannot be exported.
    """
    import torch

    was_training = module.training
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(module.eval(), tuple(args))
    except Exception as err:  # torch.export runs the user's code
        raise NetworkError(f"{name}: torch.export failed: {_first_line(err)}") from err
    finally:
        module.train(was_training)


def import_exported(name: str, exported: Any, shapes: Mapping[str, Sequence[int]], batch: int) -> Any:
    """A ``torch.export.ExportedProgram`` as a Relax module with constant weights and fixed shapes.

    Raises
    ------
    UnsupportedOpError
        TVM cannot import an operator; the message names it.
    NetworkError
        Anything else that stops the import, or a shape that is not known.
    """
    tvm = import_tvm()
    from tvm.relax.frontend.torch import from_exported_program

    try:
        with _quiet():
            module = from_exported_program(exported)
    except Exception as err:
        found = _TORCH_UNSUPPORTED.search(str(err))
        if found:
            ops = ", ".join(sorted(op.strip(" '\"") for op in found.group(1).split(",")))
            raise UnsupportedOpError(f"{name}: TVM cannot import the operator(s) {ops}") from err
        raise _import_error(name, err) from err
    bound = _bindings(name, module["main"].params, shapes, batch)
    if bound:
        module = tvm.relax.transform.BindSymbolicVars(bound, "main")(module)
    return module


def load_pt2(path: Path) -> Any:
    """The ``ExportedProgram`` of a ``.pt2`` file; a file that holds pickled code is refused.

    Raises
    ------
    NetworkError
        Not a file that ``torch.export.save`` wrote.
    """
    import zipfile

    import torch

    if not zipfile.is_zipfile(path):
        raise NetworkError(f"{path} is not a .pt2 file (torch.export.save writes a zip archive)")
    try:
        with _quiet(), _weights_only():
            return torch.export.load(str(path))
    except Exception as err:
        raise NetworkError(f"{path} is not a readable .pt2 file: {_first_line(err)}") from err


def exported_inputs(exported: Any) -> tuple[TensorSpec, ...]:
    """Names, shapes and types of an exported program's inputs; a dynamic extent is 0."""
    from torch.export.graph_signature import InputKind

    names = [
        spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT
    ]
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = []
    for name in names:
        value = values.get(name)
        if value is None or not hasattr(value, "shape"):
            continue
        shape = tuple(extent if isinstance(extent, int) else 0 for extent in value.shape)
        inputs.append(TensorSpec(name, shape, str(value.dtype).removeprefix("torch.")))
    return tuple(inputs)


def load_onnx(path: Path) -> Any:
    """The ``ModelProto`` of an ``.onnx`` file.

    Raises
    ------
    NetworkError
        Not an ONNX file, cut off, or without any node.
    """
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception as err:  # protobuf raises differing classes by its implementation
        raise NetworkError(f"{path} is not a readable .onnx file: {_first_line(err)}") from err
    if not model.graph.node:
        raise NetworkError(f"{path} is not an ONNX model: it has no graph")
    return model


def onnx_inputs(model: Any) -> tuple[TensorSpec, ...]:
    """Names, shapes and types of an ONNX model's inputs; a dynamic extent is 0."""
    import onnx

    weights = {initializer.name for initializer in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name in weights:
            continue
        tensor = value.type.tensor_type
        shape = tuple(
            int(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value > 0 else 0
            for dim in tensor.shape.dim
        )
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)) if tensor.elem_type else "float32"
        inputs.append(TensorSpec(value.name, shape, dtype))
    return tuple(inputs)


def import_onnx(name: str, model: Any, inputs: Sequence[TensorSpec]) -> Any:
    """An ONNX model as a Relax module with constant weights.

    Parameters
    ----------
    inputs
        All inputs with fixed shapes.

    Raises
    ------
    UnsupportedOpError
        TVM cannot import an operator (or this version of it); the message names it.
    NetworkError
        Anything else that stops the import.
    """
    import_tvm()
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with _quiet():
            return from_onnx(
                model,
                shape_dict={item.name: list(item.shape) for item in inputs},
                dtype_dict={item.name: item.dtype for item in inputs},
            )
    except Exception as err:
        found = _ONNX_UNSUPPORTED.search(str(err))
        if found:
            ops = ", ".join(sorted(op.strip() for op in found.group(1).split(",")))
            raise UnsupportedOpError(f"{name}: TVM cannot import the operator(s) {ops}") from err
        raise _import_error(name, err) from err


def fix_shapes(
    name: str, inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]], batch: int | None
) -> tuple[TensorSpec, ...]:
    """Inputs with every extent known: given by ``shapes``, or the batch where the first extent is dynamic.

    A dynamic first extent is ``batch``, or 1 if that is None, and this is logged.

    Raises
    ------
    NetworkError
        Another extent is dynamic and not given, ``shapes`` does not fit the input, or a batch was asked for
        and no input has a dynamic one.
    """
    unknown = sorted(set(shapes) - {item.name for item in inputs})
    if unknown:
        known = ", ".join(item.name for item in inputs)
        raise NetworkError(f"{name} has no input {', '.join(unknown)}; its inputs are {known}")
    fixed = []
    dynamic_batch = False
    for item in inputs:
        shape = list(item.shape)
        given = shapes.get(item.name)
        if given is not None:
            _check_given(name, item, given)
            shape = [int(extent) for extent in given]
        elif shape and shape[0] == 0:
            dynamic_batch = True
            shape[0] = batch or 1
        if 0 in shape:
            text = "x".join(str(extent) if extent else "?" for extent in shape)
            raise NetworkError(
                f"{name}: input {item.name} has the dynamic shape {text}; give it, as in "
                f"load_network(..., shapes={{{item.name!r}: (1, 128)}}), or export with fixed shapes"
            )
        fixed.append(TensorSpec(item.name, tuple(shape), item.dtype, item.high))
    if dynamic_batch and batch is None:
        logger.warning("%s has a dynamic batch: taken as 1 (write %s@b8 for 8)", name, name)
    if batch is not None and not dynamic_batch:
        raise NetworkError(f"{name} has a fixed batch: @b{batch} asks for another one; export it again")
    return tuple(fixed)


def _check_given(name: str, item: TensorSpec, given: Sequence[int]) -> None:
    fits = len(given) == len(item.shape) and all(
        new > 0 and old in (0, new) for old, new in zip(item.shape, given, strict=False)
    )
    if not fits:
        text = "x".join(str(extent) if extent else "?" for extent in item.shape)
        raise NetworkError(f"{name}: shape {tuple(given)} does not fit input {item.name} of shape {text}")


def _bindings(
    name: str, params: Sequence[Any], shapes: Mapping[str, Sequence[int]], batch: int
) -> dict[str, int]:
    """Values of the symbolic extents of ``main``'s inputs."""
    tvm = import_tvm()
    bound: dict[str, int] = {}
    for param in params:
        given = shapes.get(str(param.name))
        for axis, extent in enumerate(getattr(param.ty, "shape", None) or ()):
            if isinstance(extent, tvm.tirx.IntImm):
                continue
            if not isinstance(extent, tvm.tirx.Var):
                raise NetworkError(f"{name}: input {param.name} has the computed extent {extent}")
            bound.setdefault(str(extent.name), int(given[axis]) if given is not None else batch)
    return bound


def _import_error(name: str, err: Exception) -> NetworkError:
    if isinstance(err, NotImplementedError):
        return UnsupportedOpError(f"{name}: TVM cannot import it: {_first_line(err)}")
    return NetworkError(f"{name}: TVM cannot import it: {type(err).__name__}: {_first_line(err)}")


def _first_line(err: BaseException) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(err).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Front ends warn about each renamed input and about their own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _weights_only() -> Iterator[None]:
    """torch.export.load falls back to unpickling anything; this makes torch refuse to."""
    key = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    with _ENVIRONMENT:
        before = os.environ.get(key)
        os.environ[key] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[key]
            else:
                os.environ[key] = before
