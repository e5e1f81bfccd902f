"""The network: masking, bounded embeddings, sensitivity to what it must see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.encoding import Context, PaddedBatch
from cdmpp.predictor.network import LatencyNetwork, PiecewiseLinear, PreOrderEncoding, positional_encoding

LEAF_DIM, DEVICE_DIM = 7, 3
SMALL = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 32, "embedding_dim": 12, "decoder_dim": 16}


def make_network(**changes) -> LatencyNetwork:
    torch.manual_seed(0)
    return LatencyNetwork(ModelConfig(**{**SMALL, **changes}), LEAF_DIM, DEVICE_DIM).eval()


def make_batch(batch=3, length=4, seed=0) -> tuple[PaddedBatch, Context]:
    generator = torch.Generator().manual_seed(seed)
    leaves = torch.randn(batch, length, LEAF_DIM, generator=generator)
    positions = torch.arange(length).repeat(batch, 1) * 3 + 1
    padding = torch.zeros(batch, length, dtype=torch.bool)
    devices = torch.randn(batch, DEVICE_DIM, generator=generator)
    nothing = torch.zeros(batch, 0)
    return PaddedBatch(leaves, positions, padding), Context(devices, nothing, nothing, torch.zeros(batch).bool())


def pad(batch: PaddedBatch, extra: int, value: float) -> PaddedBatch:
    n = len(batch.leaves)
    return PaddedBatch(
        torch.cat([batch.leaves, torch.full((n, extra, LEAF_DIM), value)], 1),
        torch.cat([batch.positions, torch.full((n, extra), 17)], 1),
        torch.cat([batch.padding, torch.ones(n, extra, dtype=torch.bool)], 1),
    )


@pytest.mark.parametrize("device", ["film", "none"])
def test_padding_changes_nothing_whatever_it_holds(device):
    network = make_network(device=device)
    batch, devices = make_batch()
    with torch.no_grad():
        plain, padded = network(batch, devices), network(pad(batch, 5, 1e4), devices)
    assert plain.shape == (3,)
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


def test_embeddings_are_bounded():
    batch, devices = make_batch()
    embedding = make_network().embed(PaddedBatch(batch.leaves * 1e3, batch.positions, batch.padding), devices.device)
    assert embedding.shape == (3, SMALL["embedding_dim"])
    assert embedding.min() >= -1 and embedding.max() <= 1


@pytest.mark.parametrize(("device", "positional"), [("film", "standard"), ("none", "paper")])
def test_the_device_matters_unless_turned_off_and_positions_always(device, positional):
    network = make_network(device=device, positional=positional)
    batch, devices = make_batch()
    moved, other = batch._replace(positions=batch.positions * 5), devices._replace(device=devices.device + 1.0)
    with torch.no_grad():
        plain, *changed = network(batch, devices), network(batch, other), network(moved, devices)
    assert [not torch.equal(plain, each) for each in changed] == [device != "none", True]


def test_positional_table_grows_and_agrees_with_the_encoding():
    encoding = PreOrderEncoding(8, "standard")
    for positions in ([[1, 2]], [[5, 3000]], [[0, 7]]):
        expected = positional_encoding(np.asarray(positions), 8, "standard")
        np.testing.assert_allclose(encoding(torch.tensor(positions)).numpy(), expected, atol=1e-6)
    assert not encoding.state_dict()  # it is computed, not stored


@pytest.mark.parametrize("device", ["film", "none"])
def test_every_parameter_gets_a_gradient(device):
    network = make_network(device=device).train()
    batch, devices = make_batch()
    network(batch, devices).square().sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []


def test_known_answer() -> None:
    encoding = PiecewiseLinear(1, 2)
    encoding.fit(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]))  # quantiles 0, 2, 4
    given = torch.tensor([[-1.0], [0.0], [1.0], [2.0], [3.0], [9.0]])
    expected = torch.tensor([[0, 0], [0, 0], [0.5, 0], [1, 0], [1, 0.5], [1, 1]])
    assert torch.allclose(encoding(given), expected)


def test_a_feature_with_one_value_fills_no_bin() -> None:
    encoding = PiecewiseLinear(2, 3)
    encoding.fit(torch.tensor([[5.0, 0.0], [5.0, 1.0]]))
    out = encoding(torch.tensor([[5.0, 1.0], [7.0, 0.5]])).view(2, 2, 3)
    assert not out[:, 0].any()
    assert out[0, 1].sum() == 3.0 and out[1, 1].sum() == 1.5


def test_rare_values_get_bins_where_most_values_are_the_same() -> None:
    rows = torch.zeros(1000, 1)
    rows[:3, 0] = torch.tensor([1.0, 2.0, 3.0])
    encoding = PiecewiseLinear(1, 3)
    encoding.fit(rows)
    assert torch.allclose(encoding(torch.tensor([[2.0]])), torch.tensor([[1.0, 1.0, 0.0]]))


def test_columns_left_out_are_always_0() -> None:
    rows = torch.stack([torch.zeros(50), torch.arange(50.0), torch.arange(50.0) % 3], dim=1)
    encoding = PiecewiseLinear(3, 6)
    encoding.fit(rows)
    columns, whole = encoding.used(), encoding(rows)
    assert 6 <= len(columns) < 18
    assert torch.equal(encoding(rows, columns), whole[:, columns])
    left_out = [column for column in range(18) if column not in columns.tolist()]
    assert not whole[:, left_out].any()


def test_leaves_are_projected_with_their_bins() -> None:
    torch.manual_seed(0)
    config = ModelConfig(dim=8, layers=1, heads=2, ffn_dim=8, bins=4)  # type: ignore[call-arg]
    network = LatencyNetwork(config, 3, 2)
    assert network.bins is not None
    leaves = torch.randn(2, 5, 3)
    leaves[..., 1] = 1.0
    network.bins.fit(leaves.flatten(0, 1))
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    batch = PaddedBatch(leaves, torch.arange(5).repeat(2, 1), padding)
    expected = network.leaf_projection(torch.cat([leaves, network.bins(leaves)], dim=-1))
    torch.testing.assert_close(network._project(batch)[~padding], expected[~padding])
    assert not network._project(batch)[padding].any()


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


@pytest.mark.parametrize("variant", ["standard", "paper"])
def test_positions_are_told_apart(variant: str) -> None:
    found = positional_encoding(np.arange(60).reshape(3, 20), 5, variant)
    assert found.shape == (3, 20, 5) and np.abs(found).max() <= 1
    assert len(np.unique(found.reshape(60, 5), axis=0)) == 60
