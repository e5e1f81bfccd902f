"""What parameters hold while a program is timed, and comparing outputs with the reference of the task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cdmpp.profiler.cpu import Arguments
from cdmpp.profiler.gpu.build import task_reference
from tests.samples.programs import matmul_task

from cdmpp.profiler.arguments import (  # isort: skip
    TOLERANCE, Reference, index_bound, integer_range, output_error, positions, reference_inputs, summarise_outputs,
)  # fmt: skip

SPECS = (((6, 9), "float32"), ((5, 7), "int64"), ((300,), "int8"), ((300,), "uint8"))


@given(st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1).map(tuple), st.just("float32"))))
def test_indices_are_valid_into_every_dimension_of_the_floats(specs: list[tuple[tuple[int, ...], str]]) -> None:
    low, high = integer_range("int64", index_bound(specs))
    assert low == 0 < high
    assert all(high <= extent for shape, _ in specs for extent in shape)


def test_both_profilers_fill_with_valid_indices_and_masks_that_hide_nothing() -> None:
    on_cpu = [tensor.numpy() for tensor in Arguments(0).get(SPECS)]
    for floats, indices, *masks in (on_cpu, reference_inputs(SPECS, 0)):
        assert floats.min() > 0
        assert set(np.unique(indices)) <= set(range(6)) and len(np.unique(indices)) > 1
        assert all(mask.min() >= 1 and mask.max() > mask.min() for mask in masks)


def test_inputs_are_the_same_every_time() -> None:
    specs = (((4, 5), "float32"), ((7,), "int64"), ((3,), "bool"))
    first, again = reference_inputs(specs, 3), reference_inputs(specs, 3)
    for a, b, (shape, dtype) in zip(first, again, specs, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == shape and a.dtype == dtype
    assert first[0].min() >= 0.1 and first[0].max() < 1
    # RandomState's numbers are frozen, so a bundle holds for every version of NumPy.
    assert first[0][0, 0] == pytest.approx(0.1 + 0.9 * 0.5507979, rel=1e-6)


def test_positions_cover_the_output_from_end_to_end() -> None:
    assert list(positions(3)) == [0, 1, 2]
    chosen = positions(10**6)
    assert chosen[0] == 0 and chosen[-1] == 10**6 - 1 and len(chosen) == 1024


def summary(values: NDArray[np.float64]) -> Reference:
    return summarise_outputs("t", 0, {2: values})


ONES, LINE, ODD = np.ones(10**6), np.linspace(1, 2, 500), np.array([1.0, np.nan, 2.0])


def put(values: NDArray[np.float64], index: object, value: float) -> NDArray[np.float64]:
    changed = values.copy()
    changed[index] = value  # type: ignore[call-overload]
    return changed


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        (LINE * (1 + TOLERANCE / 2), LINE, True),
        (LINE * (1 + 2 * TOLERANCE), LINE, False),
        # wrong between the positions that are kept: it shows in the mean
        (put(np.zeros(10**6), positions(10**6), 1.0), ONES, False),
        # a sum that cancels is not asked for digits that it lacks
        (put(np.ones(100), 3, 1e-4), put(np.ones(100), 3, 0.0), True),
        (ODD, ODD, True),
        (put(ODD, 1, 5.0), ODD, False),
        (ODD, put(ODD, 1, 5.0), False),
    ],
)
def test_outputs_are_equal_up_to_the_tolerance(found: NDArray[np.float64], expected: NDArray[np.float64], equal: bool) -> None:
    assert (output_error(summary(found), summary(expected)) <= TOLERANCE) is equal
    worst = output_error(summary(put(np.ones(1000), 17, 1.5)), summary(np.ones(1000)))
    assert worst == pytest.approx(0.5), "that of the worst element"


def test_the_reference_of_a_task_is_what_numpy_computes() -> None:
    task = matmul_task(16)
    reference = task_reference(task, seed=5)
    a, b, _ = reference_inputs([((16, 16), "float32")] * 3, 5)
    assert output_error(reference, summarise_outputs(task.hash, 5, {2: a @ b})) < 1e-5
    assert set(reference.outputs) == {2}
