"""Padded batches of ASTs with different numbers of leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import ProgramError
from cdmpp.program.ast import CompactAST
from cdmpp.program.batching import batches_by_length, pad_asts


def make(leaves: int, start: float = 1.0) -> CompactAST:
    values = start + np.arange(leaves * 3, dtype=np.float32).reshape(leaves, 3)
    return CompactAST(values, np.arange(1, leaves + 1, dtype=np.int32) * 2, 3 * leaves)


def test_padding_and_mask() -> None:
    batch = pad_asts([make(2), make(1, 100.0), make(3, 200.0)])
    assert batch.leaves.shape == (3, 3, 3)
    assert batch.leaves.dtype == np.float32
    assert batch.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert batch.positions.tolist() == [[2, 4, 0], [2, 0, 0], [2, 4, 6]]
    assert batch.leaves[1].tolist() == [[100, 101, 102], [0, 0, 0], [0, 0, 0]]
    assert batch.lengths.tolist() == [2, 1, 3]
    assert len(batch) == 3


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_every_leaf_is_kept_whatever_their_number(sizes: list[int]) -> None:
    asts = [make(n, 1000.0 * (i + 1)) for i, n in enumerate(sizes)]
    batch = pad_asts(asts)
    for i, ast in enumerate(asts):
        np.testing.assert_array_equal(batch.leaves[i][batch.mask[i]], ast.leaves)
        np.testing.assert_array_equal(batch.positions[i][batch.mask[i]], ast.positions)
        assert not batch.leaves[i][~batch.mask[i]].any()


def test_fixed_lengths() -> None:
    assert pad_asts([make(2)], length=5).mask.tolist() == [[True, True, False, False, False]]
    with pytest.raises(ProgramError, match="program 1 has 4 leaves"):
        pad_asts([make(2), make(4)], length=3)
    with pytest.raises(ProgramError, match="at least one"):
        pad_asts([])


@given(st.lists(st.integers(1, 30), max_size=50), st.integers(1, 8))
def test_batches_hold_every_program_once_and_like_lengths_together(lengths: list[int], size: int) -> None:
    batches = list(batches_by_length(lengths, size))
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
    assert all(0 < len(batch) <= size for batch in batches)
    ordered = [lengths[i] for batch in batches for i in batch]
    assert ordered == sorted(lengths)


def test_batch_sizes_below_one_are_refused() -> None:
    with pytest.raises(ProgramError, match="batch size of 0"):
        list(batches_by_length([1], 0))
