"""What the integer parameters of a program hold while it is timed."""

from __future__ import annotations

from collections.abc import Sequence

#: Of eight bits: they index nothing, but are data, or masks that Relax keeps as ``int8``.
_BYTES = ("int8", "uint8")


def index_bound(params: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """Integers below this are valid indices into whatever the float parameters, (shape, dtype) each, are."""
    extents = [n for shape, dtype in params if "float" in dtype for n in shape]
    return max(1, min([127, *extents]))


def integer_range(dtype: str, bound: int) -> tuple[int, int]:
    """Integers of `dtype` are drawn from low (included) to high (excluded): valid indices, as far as ``bound``.

    Bytes are never zero: a mask of zeros lets a program skip what it is there to compute. A softmax whose rows were all
    masked took 12 us, and 7.9 ms where none is.
    """
    return (1, 128) if dtype in _BYTES else (0, bound)
