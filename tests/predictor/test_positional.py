"""Positional encodings against the formulas, number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import PredictorError
from cdmpp.predictor.network import VARIANTS, positional_encoding


def test_standard_frequencies() -> None:
    # dim 4: columns 0 and 1 turn with frequency 1, columns 2 and 3 with 10000 ** (-2 / 4) = 0.01.
    found = positional_encoding([0, 7], 4)
    wanted = [[0, 1, 0, 1], [math.sin(7), math.cos(7), math.sin(0.07), math.cos(0.07)]]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert found.dtype == np.float32


def test_the_papers_frequencies() -> None:
    # dim 4: the columns' own frequencies 1, 0.01, 0.0001 and 0.000001.
    found = positional_encoding([0, 7], 4, "paper")
    wanted = [[0, 1, 0, 1], [math.sin(7), math.cos(0.07), math.sin(0.0007), math.cos(0.000007)]]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 40))
def test_a_shift_is_a_rotation_of_the_standard_encoding(position: int, shift: int, pairs: int) -> None:
    here, there = positional_encoding([position, position + shift], 2 * pairs).astype(float)
    angle = shift * 10000.0 ** (-2 * np.arange(pairs) / (2 * pairs))
    sine = here[0::2] * np.cos(angle) + here[1::2] * np.sin(angle)
    cosine = here[1::2] * np.cos(angle) - here[0::2] * np.sin(angle)
    np.testing.assert_allclose(there[0::2], sine, atol=1e-5)
    np.testing.assert_allclose(there[1::2], cosine, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_shapes_bounds_and_distinct_positions(variant: str, dim: int) -> None:
    positions = np.arange(60).reshape(3, 20)
    found = positional_encoding(positions, dim, variant)
    assert found.shape == (3, 20, dim)
    assert np.abs(found).max() <= 1
    flat = found.reshape(60, dim)
    assert len({row.tobytes() for row in flat}) == 60
    assert positional_encoding(np.zeros(0, int), dim, variant).shape == (0, dim)


def test_bad_arguments() -> None:
    with pytest.raises(PredictorError, match="unknown positional encoding 'sine'"):
        positional_encoding([1], 4, "sine")
    with pytest.raises(PredictorError, match="at least one column"):
        positional_encoding([1], 0)
    with pytest.raises(PredictorError, match="negative"):
        positional_encoding([-1], 4)
