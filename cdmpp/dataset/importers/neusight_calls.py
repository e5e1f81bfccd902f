"""The operators of a node of NeuSight's traces as calls of generators of library tasks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import Any

from cdmpp.errors import DatasetError
from cdmpp.program.library_ops import BINARY, ELEMENTWISE_FLOPS

#: A generator and its arguments.
Call = tuple[str, dict[str, Any]]
Shape = tuple[int, ...]

#: Nodes without operators that nevertheless run a kernel: it reads the tensors of the output's size and writes that.
_MOVES = re.compile(
    r"(^|_)(max|masked_fill_?|embeddings?|wpe|wte|sub|lt|full|ones|zeros|bool|where|arange|cumsum|tril|"
    r"triu|gather|index_select|cat|stack|pad|clone|copy_?)$"
)
#: Nodes that run none: views, shapes and numbers of Python, dropout that is off, conversions (most are to the same type).
_VIEWS = re.compile(
    r"(^|_)(size|getitem|getattr|view|permute|transpose|t|expand|expand_as|unsqueeze|squeeze|split|chunk|unbind|dim|eq|ne|"
    r"gt|to|long|float|type|type_as|dropout|drop|tensor|finfo|device|output|flatten|detach|add|mul|truediv|floordiv|pow|and_|"
    r"not_|is_floating_point)$"
)
#: Nodes that look rows of a table up: their gradient is added to those rows.
_LOOKUPS = re.compile(r"(^|_)(embeddings?|wpe|wte)$")


class UnknownOperatorError(DatasetError):
    """An operator that no generator stands for."""


def literal(text: Any, what: str) -> Any:
    """The Python literal in a cell.

    Raises
    ------
    DatasetError
        It is none.
    """
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as err:
        raise DatasetError(f"{what}: {text[:80]!r} is no list of operators or shapes") from err


def shapes(value: Any) -> tuple[Shape, ...]:
    """A list of shapes; what is none (a number, None) is a single value."""
    return tuple(shape(item) for item in value) if isinstance(value, list | tuple) else ()


def shape(value: Any) -> Shape:
    """One shape."""
    if isinstance(value, list | tuple) and all(isinstance(size, int) for size in value):
        return tuple(value)
    return (1,)


def base_name(name: str) -> str:
    """The name of a node without its number: ``masked_fill_1`` -> ``masked_fill``."""
    return re.sub(r"(_\d+)+$", "", name)


def forward_calls(
    name: str, operator: str, ops: Sequence[Any], inputs: Sequence[Shape], output: Shape, before: str = ""
) -> tuple[str, list[Call]]:
    """Kind of a node (see :mod:`cdmpp.program.graph`) and what its forward pass runs.

    Parameters
    ----------
    before
        Name of the node before: ``contiguous`` and ``reshape`` copy what was transposed, and nothing else.

    Raises
    ------
    UnknownOperatorError
        The message is the operator's name.
    """
    if operator in ("getitem", "output"):
        return "view", []
    base = base_name(name)
    if base in ("contiguous", "reshape"):
        transposed = base_name(before) in ("transpose", "permute", "t")
        return ("kernel", [_move(inputs[:1], output)]) if transposed else ("view", [])
    if ops:
        calls = [_call(op, inputs if number == 0 else (), output) for number, op in enumerate(ops)]
        return "kernel", calls
    if not inputs or math.prod(output) == 1:
        return "view", []  # a placeholder, a weight, a number
    if _MOVES.search(base):
        return "kernel", [_move(inputs, output)]
    if _VIEWS.search(base):
        return "view", []
    raise UnknownOperatorError(base)


def phase_calls(operator: str, ops: Sequence[Any]) -> list[Call]:
    """What a backward or accumulation phase runs (UnknownOperatorError as :func:`forward_calls`).

    NeuSight lets the gradient of a sum and of a tuple's element move memory; PyTorch hands it on as it is.
    """
    if operator in ("VECadd", "VECaddu", "getitem") and all(op[0] == "MEM" for op in ops):
        return []
    return [_call(op, (), ()) for op in ops]


def unlisted_backward_calls(name: str, inputs: Sequence[Shape], output: Shape) -> list[Call]:
    """What the backward pass of a node runs for which the trace lists no operator; nothing for a view.

    The maximum of two tensors has, in PyTorch, the gradient ``where(a == b, grad / 2, grad).masked_fill(a < b, 0)``:
    two comparisons, which read a tensor and write next to nothing, a division, a selection and a fill. NeuSight
    counts it as nothing; it is an eighth of OPT's training. A lookup's gradient is a table of zeros (where the
    trace tells its size) to which rows are added.
    """
    base = base_name(name)
    elements = math.prod(output)
    if elements == 1:
        return []
    if re.search(r"(^|_)max$", base) and len(inputs) == 2:
        return [("memory", {"elements": elements, "inputs": read}) for read in (0, 1, 2, 0, 1)]
    if _LOOKUPS.search(base):
        rows: Call = ("memory", {"elements": elements, "inputs": 2})
        table = math.prod(inputs[1]) if len(inputs) == 2 else 0
        return [("memory", {"elements": table, "inputs": 0}), rows] if table else [rows]
    return []


def _call(op: Any, inputs: Sequence[Shape], output: Shape) -> Call:
    try:
        name, sizes = op
        if name == "Linear":
            m, n, k = sizes
            return "linear", {"m": m, "n": n, "k": k}
        if name == "BMM":
            b, m, n, k = sizes
            return "bmm", {"b": b, "m": m, "n": n, "k": k}
        if name == "MEM":
            moved = shapes(sizes)
            return _move(moved[:-1], moved[-1])
        kind = name.removeprefix("VEC")
        if name.startswith("VEC") and kind in ("softmax", "ln"):
            rows, columns = sizes
            return ("softmax" if kind == "softmax" else "layer_norm"), {"rows": rows, "columns": columns}
        if name.startswith("VEC") and kind in ELEMENTWISE_FLOPS:
            rows, columns = sizes
            return _elementwise(kind, (rows, columns), inputs, output)
    except (TypeError, ValueError, IndexError) as err:
        raise DatasetError(f"operator {op!r} has not the sizes that its kind has") from err
    raise UnknownOperatorError(str(name))


def _move(inputs: Sequence[Shape], output: Shape) -> Call:
    """Reading the inputs of the size of the largest tensor, and writing the output if it is as large."""
    largest = max(math.prod(s) for s in (*inputs, output))
    read = sum(math.prod(s) == largest for s in inputs)
    if math.prod(output) < largest:
        read -= 1  # a reduction reads one tensor and writes next to nothing: the traffic of a fill
    return "memory", {"elements": largest, "inputs": max(read, 0)}


def _elementwise(op: str, flat: Shape, inputs: Sequence[Shape], output: Shape) -> Call:
    """The operator with its real second tensor: a number, a broadcast one, or one of the same shape."""
    same = ("elementwise", {"op": op, "shape": list(flat)})
    if op not in BINARY or len(inputs) != 2:
        return same
    sizes = [math.prod(s) for s in inputs]
    total = math.prod(flat)
    if 1 in sizes and total > 1:
        return "elementwise", {"op": f"{op}u", "shape": list(flat)}
    if sizes[0] == sizes[1] or max(sizes) != total:
        return same
    small = inputs[0] if sizes[0] < sizes[1] else inputs[1]
    first, second = _collapse(output, (1,) * (len(output) - len(small)) + small)
    return "elementwise", {"op": op, "shape": first, "other": second}


def _collapse(output: Shape, small: Shape) -> tuple[list[int], list[int]]:
    """Neighbouring dimensions that are broadcast alike taken together."""
    first: list[int] = []
    second: list[int] = []
    before: bool | None = None
    for size, other in zip(output, small, strict=True):
        if size == 1:
            continue
        there = other == size
        if there == before:
            first[-1] *= size
            second[-1] *= size if there else 1
        else:
            first.append(size)
            second.append(size if there else 1)
        before = there
    return first, second
