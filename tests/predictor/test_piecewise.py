"""The piecewise-linear encoding of leaf features."""

from __future__ import annotations

import numpy as np
import torch

from cdmpp.predictor.batching import PaddedBatch
from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.network import LatencyNetwork, PiecewiseLinear


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


def test_outputs_are_monotone_and_bounded() -> None:
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(500, 4)).astype(np.float32))
    encoding = PiecewiseLinear(4, 8)
    encoding.fit(rows)
    line = torch.linspace(-5, 5, 101)[:, None].expand(101, 4)
    out = encoding(line)
    assert out.shape == (101, 32)
    assert out.min() == 0 and out.max() == 1
    assert (out.diff(dim=0) >= 0).all()


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


def test_the_bins_are_part_of_the_weights() -> None:
    config = ModelConfig(dim=8, layers=1, heads=2, ffn_dim=8, bins=4)  # type: ignore[call-arg]
    network = LatencyNetwork(config, 3, 2)
    assert network.bins is not None
    network.bins.fit(torch.randn(50, 3))
    other = LatencyNetwork(config, 3, 2)
    other.load_state_dict(network.state_dict())
    assert other.bins is not None and torch.equal(other.bins.low, network.bins.low)
