"""Arguments of a program: their shapes and dtypes, their values while it is timed, and a check that it computes what its task
says. The reference is the unscheduled task on a CPU. It is kept as values at evenly spaced positions of each output and the
mean of all absolute values, so that a machine without TVM can compare."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError

#: Shape and dtype of a parameter or workspace.
ArgSpec = tuple[tuple[int, ...], str]

#: Number of values kept of each output.
_POSITIONS = 1024
#: Allowed difference, relative to the larger of the value and the mean of the output. It covers sums in another order, and the
#: fast approximations of exp, tanh and division that both compilers were asked for.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Reference:
    """What a task computes for the :func:`reference_inputs` of a seed."""

    task: str
    seed: int
    #: Output parameter -> float32 values at evenly spaced positions of the flattened output.
    outputs: dict[int, NDArray[np.float32]]
    #: Output parameter -> mean of all absolute values.
    means: dict[int, float]


def argument_bytes(spec: ArgSpec) -> int:
    """Bytes of an argument; the dtype's name gives its number of bits, except for ``bool``, which takes one byte."""
    bits = re.search(r"\d+", spec[1])
    return math.prod(spec[0]) * (max(1, int(bits[0]) // 8) if bits else 1)


def argument_specs(func: Any) -> tuple[ArgSpec, ...]:
    """The parameters of a PrimFunc, in order (ProgramError if one is not a buffer of fixed shape)."""
    specs: list[ArgSpec] = []
    for param in func.params:
        extents = getattr(param, "shape", None)  # in this TVM a buffer is a variable with a shape
        if extents is None:
            raise ProgramError(f"parameter {param} is not a buffer")
        try:
            shape = tuple(int(extent) for extent in extents)
        except (TypeError, ValueError) as err:
            raise ProgramError(f"parameter {param} has the dynamic shape {extents}") from err
        specs.append((shape, str(param.dtype)))
    return tuple(specs)


def index_bound(params: Sequence[ArgSpec]) -> int:
    """Integers from 0 to below this bound are valid indices along every dimension of every float parameter."""
    extents = [n for shape, dtype in params if "float" in dtype for n in shape]
    return max(1, min([127, *extents]))


def integer_range(dtype: str, bound: int) -> tuple[int, int]:
    """Low (included) and high (excluded) of the random integers of `dtype`: valid indices, given :func:`index_bound`. Bytes
    are not indices: they are data, or masks, which are never zero here. A mask of zeros lets a program skip the work that is
    to be timed: a softmax whose rows were all masked took 12 us in place of 7.9 ms."""
    return (1, 128) if dtype in ("int8", "uint8") else (0, bound)


def reference_inputs(params: Sequence[ArgSpec], seed: int) -> list[NDArray[Any]]:
    """:func:`random_values` for a seed; ``RandomState`` gives the same numbers in every version of NumPy."""
    return list(random_values(params, np.random.RandomState(seed)))


def random_values(params: Sequence[ArgSpec], rng: np.random.RandomState) -> Iterator[NDArray[Any]]:
    """Random values of all parameters: floats in [0.1, 1), away from zero and denormals; integers by :func:`integer_range`."""
    bound = index_bound(params)
    for shape, dtype in params:
        yield np.array(drawn(dtype, shape, bound, rng), dtype)


def drawn(dtype: str, shape: int | tuple[int, ...], bound: int, rng: Any) -> Any:
    """Random values for a parameter, not yet cast to its dtype; `rng` is a ``RandomState`` of NumPy or of cupy."""
    if dtype == "bool":
        return rng.randint(0, 2, shape)
    if "int" in dtype:
        return rng.randint(*integer_range(dtype, bound), shape)
    return rng.random_sample(shape) * 0.9 + 0.1


def positions(size: int) -> NDArray[np.int64]:
    """Evenly spaced positions of a flattened output of `size` elements."""
    return np.unique(np.linspace(0, size - 1, min(size, _POSITIONS)).astype(np.int64))


def summarise_outputs(task: str, seed: int, outputs: Mapping[int, NDArray[Any]]) -> Reference:
    """The :class:`Reference` made of a task's outputs, which are given by parameter."""
    flat = {number: np.asarray(value).ravel() for number, value in outputs.items()}
    return Reference(
        task,
        seed,
        {number: value[positions(value.size)].astype(np.float32) for number, value in flat.items()},
        {number: float(np.abs(value.astype(np.float64)).mean()) for number, value in flat.items()},
    )


def output_error(found: Reference, expected: Reference) -> float:
    """Largest difference of outputs from a reference of the same task and seed, relative to the larger of the expected value
    and the output's mean, as a sum may cancel. NaN equals NaN. Outputs count as equal up to :data:`TOLERANCE`."""
    worst, tiny = 0.0, np.finfo(np.float32).tiny
    for number, values in expected.outputs.items():
        other, scale = found.outputs[number], expected.means[number]
        same = (values == other) | (np.isnan(values) & np.isnan(other))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(other - values) / (np.maximum(np.abs(values), scale) + tiny))
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
        if np.isfinite(scale):
            mean = abs(found.means[number] - scale) / (scale + tiny)
            worst = max(worst, float(np.nan_to_num(mean, nan=np.inf)))
    return worst
