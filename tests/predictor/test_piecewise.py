"""The piecewise-linear encoding of leaf features."""

from __future__ import annotations

import numpy as np
import torch

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


def test_the_bins_are_part_of_the_weights() -> None:
    config = ModelConfig(dim=8, layers=1, heads=2, ffn_dim=8, bins=4)  # type: ignore[call-arg]
    network = LatencyNetwork(config, 3, 2)
    assert network.bins is not None
    network.bins.fit(torch.randn(50, 3))
    other = LatencyNetwork(config, 3, 2)
    other.load_state_dict(network.state_dict())
    assert other.bins is not None and torch.equal(other.bins.low, network.bins.low)
