"""Losses: known answers."""

from __future__ import annotations

import math

import pytest
import torch

from cdmpp.predictor.config import LossConfig
from cdmpp.predictor.encoding import LabelTransform
from cdmpp.predictor.losses import central_moment_discrepancy, hybrid_loss, relative_error


def test_relative_error_is_exact_up_to_the_cap_and_linear_with_a_bounded_gradient_beyond():
    error = relative_error(torch.log(torch.tensor([0.5, 1.0, 1.5, 2.0])), torch.zeros(4), cap=2.0)
    assert error.tolist() == pytest.approx([0.5, 0.0, 0.5, 1.0])
    log_predicted = torch.tensor([math.log(2.0) + 3.0, 200.0], requires_grad=True)
    error = relative_error(log_predicted, torch.zeros(2), cap=2.0)
    assert error[0].item() == pytest.approx(1.0 + 2.0 * 3.0)
    error.sum().backward()
    assert log_predicted.grad.tolist() == pytest.approx([2.0, 2.0])


def test_hybrid_loss_known_answer():
    # identity-like transform: label = log seconds
    transform = LabelTransform("log", 0.0, 1.0, -30.0, 30.0)
    config = LossConfig(mse_weight=2.0, mape_weight=0.5, mape_cap=4.0)
    label, target = torch.log(torch.tensor([1.5, 0.8])), torch.zeros(2)
    mse = (math.log(1.5) ** 2 + math.log(0.8) ** 2) / 2
    mape = (0.5 + 0.2) / 2
    loss = hybrid_loss(config, transform, label, target, target)
    assert loss.item() == pytest.approx(2.0 * mse + 0.5 * mape, rel=1e-5)


def test_cmd_against_a_hand_computation():
    # means 0.5 and 0.25; centred values are +-0.5 and +-0.25, so odd moments vanish and
    # c2 = 0.25 / 0.0625, c4 = 0.0625 / 0.00390625; the bounds -1 and 1 are 2 apart
    source, target = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [0.5]])
    expected = 0.25 / 2 + (0.25 - 0.0625) / 4 + 0.0 + (0.0625 - 0.00390625) / 16 + 0.0
    assert central_moment_discrepancy(source, target, 5).item() == pytest.approx(expected, abs=1e-6)
    source, target = torch.tensor([[-1.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    # |0 - 0.5| / 2 + |1 - 0.25| / 4 + 0 + |1 - 0.0625| / 16
    assert central_moment_discrepancy(source, target, 5).item() == pytest.approx(0.25 + 0.1875 + 0.05859375, abs=1e-6)


def test_cmd_uses_the_norm_over_dimensions_and_is_zero_for_equal_samples():
    source = torch.tensor([[0.0, 0.0], [0.6, 0.8]])
    assert central_moment_discrepancy(source, source.flip(0), 5).item() == pytest.approx(0, abs=1e-6)
    shifted = central_moment_discrepancy(source, source + torch.tensor([0.3, 0.4]), moments=1)
    assert shifted.item() == pytest.approx(0.25, abs=1e-6)
