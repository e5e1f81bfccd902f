"""Training losses: hybrid MSE + MAPE, and central moment discrepancy between embeddings."""

from __future__ import annotations

import math

import torch

from cdmpp.predictor.config import LossConfig
from cdmpp.predictor.encoding import LabelTransform


def relative_error(log_predicted: torch.Tensor, log_target: torch.Tensor, cap: float) -> torch.Tensor:
    """``|predicted - target| / target`` from logarithms, shape (n,), with a bounded gradient.

    Up to ``predicted = cap * target`` it is exactly the relative error. Beyond, where that would explode on an untrained
    network, it continues along its tangent in the log ratio, so value and slope are continuous."""
    log_cap = math.log(cap)
    ratio = log_predicted - log_target
    inside = torch.expm1(ratio.clamp(max=log_cap)).abs()
    return inside + cap * (ratio - log_cap).clamp(min=0)


def hybrid_loss(
    config: LossConfig,
    transform: LabelTransform,
    label: torch.Tensor,
    target: torch.Tensor,
    log_target_s: torch.Tensor,
    log_reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """``mse_weight * MSE`` of standardised labels (n,), predicted and true, plus ``mape_weight * MAPE`` of seconds.

    ``log_target_s`` (n,) is the natural logarithm of the true latency, ``log_reference`` that of the reference, if any."""
    loss = config.mse_weight * torch.mean((label - target) ** 2)
    if config.mape_weight:
        log_predicted = transform.log_inverse(label, log_reference)
        loss = loss + config.mape_weight * relative_error(log_predicted, log_target_s, config.mape_cap).mean()
    return loss


def central_moment_discrepancy(source: torch.Tensor, target: torch.Tensor, moments: int) -> torch.Tensor:
    """CMD between samples (n, d) and (m, d) of embeddings bounded to [-1, 1] (Zellinger et al. 2017, equation 1).

    ``|E x - E y| / 2 + sum_{k=2..K} |c_k(x) - c_k(y)| / 2^k``, where ``c_k`` is the vector of k-th central moments, K is
    ``moments`` (at least 1), and ``|.|`` is the Euclidean norm."""
    width = 2.0
    source_mean, target_mean = source.mean(0), target.mean(0)
    total = _norm(source_mean - target_mean) / width
    source_centred, target_centred = source - source_mean, target - target_mean
    for k in range(2, moments + 1):
        difference = (source_centred**k).mean(0) - (target_centred**k).mean(0)
        total = total + _norm(difference) / width**k
    return total


def _norm(vector: torch.Tensor) -> torch.Tensor:
    # the tiny constant keeps the gradient of the norm defined at zero
    return torch.sqrt((vector**2).sum() + 1e-16)
