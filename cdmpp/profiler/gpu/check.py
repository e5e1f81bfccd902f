"""Does a program compute what its task says? Reference inputs, reference outputs, and the comparison.

The reference is the unscheduled task compiled for the CPU (the loops as they are written, in order), run when the
bundle is made. It is kept as values at evenly spaced positions of each output and the mean of all absolute values, so that
a machine without TVM can compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.profiler.arguments import ArgSpec, index_bound, integer_range
from cdmpp.profiler.gpu.bundle import Reference

#: Values kept of each output.
_POSITIONS = 1024
#: Allowed difference, relative to the value and to the mean of the output: sums in another order, and the fast
#: approximations of exp, tanh and division that both compilers were asked for.
TOLERANCE = 2e-3


def positions(size: int) -> NDArray[np.int64]:
    """Evenly spaced positions of a flattened output of `size` elements."""
    return np.unique(np.linspace(0, size - 1, min(size, _POSITIONS)).astype(np.int64))


def reference_inputs(params: Sequence[ArgSpec], seed: int) -> list[NDArray[Any]]:
    """Values of all parameters: floats in [0.1, 1), integers by :func:`~cdmpp.profiler.arguments.integer_range`.

    ``RandomState`` because its numbers are the same in every version of NumPy.
    """
    rng = np.random.RandomState(seed)
    bound = index_bound(params)
    arrays: list[NDArray[Any]] = []
    for shape, dtype in params:
        if dtype == "bool":
            arrays.append(rng.randint(0, 2, shape).astype(bool))
        elif "int" in dtype:
            arrays.append(rng.randint(*integer_range(dtype, bound), shape).astype(dtype))
        else:
            arrays.append((rng.random_sample(shape) * 0.9 + 0.1).astype(dtype))
    return arrays


def summarise_outputs(task: str, seed: int, outputs: dict[int, NDArray[Any]]) -> Reference:
    """Outputs by parameter as a :class:`~cdmpp.profiler.gpu.bundle.Reference`."""
    flat = {number: np.asarray(value).ravel() for number, value in outputs.items()}
    return Reference(
        task,
        seed,
        {number: value[positions(value.size)].astype(np.float32) for number, value in flat.items()},
        {number: float(np.abs(value.astype(np.float64)).mean()) for number, value in flat.items()},
    )


def output_error(found: Reference, expected: Reference) -> float:
    """Largest difference of outputs from a reference of the same task and seed; up to :data:`TOLERANCE` they are equal.

    It is relative to the larger of the expected value and the output's mean, so that a sum that cancels is not asked for
    digits that it does not have. NaN equals NaN.
    """
    worst = 0.0
    for number, values in expected.outputs.items():
        other, scale = found.outputs[number], expected.means[number]
        both_nan = np.isnan(values) & np.isnan(other)
        allowed = np.maximum(np.abs(values), scale) + np.finfo(np.float32).tiny
        with np.errstate(invalid="ignore"):
            difference = np.where(both_nan | (values == other), 0.0, np.abs(other - values) / allowed)
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
        if np.isfinite(scale):
            mean = abs(found.means[number] - scale) / (scale + np.finfo(np.float32).tiny)
            worst = max(worst, float(np.nan_to_num(mean, nan=np.inf)))
    return worst


def task_reference(
    func: Any, params: Sequence[ArgSpec], outputs: Sequence[int], task: str, seed: int
) -> Reference:
    """Run an unscheduled PrimFunc on the CPU (imports TVM)."""
    from cdmpp.program.tvm_env import import_tvm, quiet

    tvm = import_tvm()
    with quiet():
        executable = tvm.compile(
            tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=tvm.target.Target("llvm")
        )
    arrays = [tvm.runtime.tensor(a) for a in reference_inputs(params, seed)]
    executable["main"](*arrays)
    return summarise_outputs(task, seed, {number: arrays[number].numpy() for number in outputs})
