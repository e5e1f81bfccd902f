"""Arguments of a program: their shapes and dtypes, and what integers hold while it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cdmpp.errors import ProgramError

#: Shape and dtype of a parameter or workspace.
ArgSpec = tuple[tuple[int, ...], str]

_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "float64": 8, "int64": 8, "uint64": 8,
}  # fmt: skip


def argument_bytes(spec: ArgSpec) -> int:
    """Bytes of an argument; elements of a dtype that is not listed have 4."""
    return math.prod(spec[0]) * _BYTES.get(spec[1], 4)


def argument_specs(func: Any) -> tuple[ArgSpec, ...]:
    """The parameters of a PrimFunc, in order (ProgramError if one is not a buffer of fixed shape)."""
    specs: list[ArgSpec] = []
    for param in func.params:
        extents = getattr(param, "shape", None)  # a buffer is a variable with a shape in this TVM
        if extents is None:
            raise ProgramError(f"parameter {param} is not a buffer")
        try:
            shape = tuple(int(extent) for extent in extents)
        except (TypeError, ValueError) as err:
            raise ProgramError(f"parameter {param} has the dynamic shape {extents}") from err
        specs.append((shape, str(param.dtype)))
    return tuple(specs)


def index_bound(params: Sequence[ArgSpec]) -> int:
    """Integers below this are valid indices into whatever the float parameters are."""
    extents = [n for shape, dtype in params if "float" in dtype for n in shape]
    return max(1, min([127, *extents]))


def integer_range(dtype: str, bound: int) -> tuple[int, int]:
    """Integers of `dtype` are drawn from low (included) to high (excluded): valid indices, given :func:`index_bound`.

    Bytes index nothing: they are data, or masks that Relax keeps as ``int8``. They are never zero: a mask of zeros lets a
    program skip what it is there to compute. A softmax whose rows were all masked took 12 us, and 7.9 ms where none is.
    """
    return (1, 128) if dtype in ("int8", "uint8") else (0, bound)
