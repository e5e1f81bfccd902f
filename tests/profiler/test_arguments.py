"""What integer parameters hold while a program is timed: valid indices, and masks that hide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.profiler.arguments import index_bound, integer_range
from cdmpp.profiler.cpu import _Arguments
from cdmpp.profiler.gpu.check import reference_inputs

SPECS = (((6, 9), "float32"), ((5, 7), "int64"), ((300,), "int8"), ((300,), "uint8"))


@given(st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1).map(tuple), st.just("float32"))))
def test_indices_are_valid_into_every_dimension_of_the_floats(
    specs: list[tuple[tuple[int, ...], str]],
) -> None:
    low, high = integer_range("int64", index_bound(specs))
    assert low == 0 < high
    assert all(high <= extent for shape, _ in specs for extent in shape)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_bytes_are_never_zero_and_fit(dtype: str) -> None:
    low, high = integer_range(dtype, 1)
    assert 0 < low < high - 1 <= np.iinfo(dtype).max


def test_both_profilers_fill_so() -> None:
    on_cpu = [tensor.numpy() for tensor in _Arguments(0).get(SPECS)]
    for floats, indices, *masks in (on_cpu, reference_inputs(SPECS, 0)):
        assert floats.min() > 0
        assert set(np.unique(indices)) <= set(range(6)) and len(np.unique(indices)) > 1
        assert all(mask.all() for mask in masks)
