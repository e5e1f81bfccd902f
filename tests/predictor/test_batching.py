"""Packing, padding and batching of programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.predictor.encoding import FeatureEncoder, PackedPrograms, inference_batches, training_batches
from tests.samples.training import make_ast


@pytest.fixture(scope="module")
def packed_and_asts():
    rng = np.random.default_rng(0)
    asts = [make_ast(rng, n) for n in (3, 1, 5, 2)]
    leaves = np.concatenate([ast.leaves for ast in asts])
    names = [f"l{i}" for i in range(leaves.shape[1])]
    parts = {"leaf": (leaves, names), "device": (np.array([[1.0], [2.0]]), ["d"])}
    encoder = FeatureEncoder.fit("t", parts)
    return PackedPrograms.pack(asts, encoder), asts, encoder


def test_a_batch_holds_the_leaves_of_its_programs_in_order_and_marks_padding(packed_and_asts):
    packed, asts, encoder = packed_and_asts
    batch = packed.batch(np.array([2, 0]))
    assert batch.leaves.shape[:2] == (2, 5)
    assert (batch.leaves[0].numpy() == encoder.encode_leaves(asts[2].leaves)).all()
    assert (batch.leaves[1, :3].numpy() == encoder.encode_leaves(asts[0].leaves)).all()
    assert (batch.positions[1, :3].numpy() == asts[0].positions).all()
    batch = packed.batch(np.array([1, 2, 3]))
    assert batch.padding.tolist() == [[False] + [True] * 4, [False] * 5, [False] * 2 + [True] * 3]
    assert (batch.leaves[batch.padding] == 0).all()
    assert (batch.positions[batch.padding] == 0).all()


lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=200)


@given(lengths_lists, st.integers(1, 20), st.integers(0, 5))
def test_training_batches_hold_every_row_once(lengths, batch_size, seed):
    batches = training_batches(np.asarray(lengths), batch_size, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert max(map(len, batches)) <= batch_size
    assert len(batches) == -(-len(lengths) // batch_size)


@given(lengths_lists, st.integers(1, 20), st.integers(1, 100))
def test_inference_batches_hold_every_row_once_within_the_budget(lengths, batch_size, max_leaves):
    sizes = np.asarray(lengths)
    batches = list(inference_batches(sizes, batch_size, max_leaves))
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * sizes[b].max() <= max_leaves for b in batches)


def test_batches_are_bucketed_by_length():
    lengths = np.random.default_rng(0).integers(1, 64, 4096)
    batches = training_batches(lengths, 64, np.random.default_rng(1))
    assert sum(len(b) * lengths[b].max() for b in batches) < 1.15 * lengths.sum()
