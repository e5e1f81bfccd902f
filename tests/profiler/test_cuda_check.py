"""Comparing outputs with the reference of the task."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cdmpp.profiler.contents import index_bound
from cdmpp.profiler.cuda_check import (
    TOLERANCE,
    compare,
    places,
    reference_inputs,
    summarise_outputs,
    task_reference,
)
from tests.samples.programs import matmul_task


def summary(values: NDArray[np.float64]) -> object:
    return summarise_outputs("t", 0, {2: values})


def test_inputs_are_random_positive_and_the_same_every_time() -> None:
    specs = (((4, 5), "float32"), ((7,), "int64"), ((3,), "bool"), ((100,), "int8"))
    first, again = reference_inputs(specs, 3), reference_inputs(specs, 3)
    for a, b, (shape, dtype) in zip(first, again, specs, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == shape and a.dtype == dtype
    assert first[0].min() >= 0.1 and first[0].max() < 1
    assert first[1].min() >= 0 and first[1].max() < index_bound(specs) == 4
    assert first[3].min() >= 1, "a mask that is zero throughout skips what is timed"
    # RandomState's numbers are frozen, so a bundle holds for every version of NumPy.
    assert first[0][0, 0] == pytest.approx(0.1 + 0.9 * 0.5507979, rel=1e-6)


def test_places_cover_the_output_from_end_to_end() -> None:
    assert list(places(3)) == [0, 1, 2]
    chosen = places(10**6)
    assert chosen[0] == 0 and chosen[-1] == 10**6 - 1 and len(chosen) == 1024


def test_equal_outputs_are_equal_and_small_differences_allowed() -> None:
    values = np.linspace(1, 2, 500)
    assert compare(summary(values), summary(values)).error == 0  # type: ignore[arg-type]
    assert compare(summary(values * (1 + TOLERANCE / 2)), summary(values)).equal  # type: ignore[arg-type]
    assert not compare(summary(values * (1 + 2 * TOLERANCE)), summary(values)).equal  # type: ignore[arg-type]


def test_one_wrong_element_is_seen() -> None:
    values = np.ones(1000)
    wrong = values.copy()
    wrong[17] = 1.5
    result = compare(summary(wrong), summary(values))  # type: ignore[arg-type]
    assert not result.equal and result.error == pytest.approx(0.5)


def test_wrong_elements_between_the_places_show_in_the_mean() -> None:
    values = np.ones(10**6)
    wrong = np.zeros(10**6)
    wrong[places(10**6)] = 1
    assert not compare(summary(wrong), summary(values)).equal  # type: ignore[arg-type]


def test_a_sum_that_cancels_is_not_asked_for_digits_it_lacks() -> None:
    values = np.ones(100)
    values[3] = 0.0
    other = values.copy()
    other[3] = 1e-4
    assert compare(summary(other), summary(values)).equal  # type: ignore[arg-type]


def test_nan_equals_nan_and_nothing_else() -> None:
    values = np.array([1.0, np.nan, 2.0])
    assert compare(summary(values), summary(values)).equal  # type: ignore[arg-type]
    assert not compare(summary(np.array([1.0, 5.0, 2.0])), summary(values)).equal  # type: ignore[arg-type]
    assert not compare(summary(values), summary(np.array([1.0, 5.0, 2.0]))).equal  # type: ignore[arg-type]


def test_the_reference_of_a_task_is_what_numpy_computes() -> None:
    task = matmul_task(16)
    specs = tuple([((16, 16), "float32")] * 3)
    reference = task_reference(task.prim_func(), specs, (2,), task.hash, seed=5)
    a, b, _ = reference_inputs(specs, 5)
    expected = summarise_outputs(task.hash, 5, {2: a @ b})
    assert compare(reference, expected).error < 1e-5
