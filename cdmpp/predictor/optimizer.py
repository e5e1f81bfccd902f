"""The optimiser that updates a network's weights in training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

#: Coefficients of the quintic iteration that makes a matrix nearly orthogonal, number of iterations (Muon: five, which takes
#: longer and gives larger validation errors, by hand), and decay of the momentum.
_COEFFICIENTS, _ITERATIONS, _MOMENTUM = (3.4445, -4.7750, 2.0315), 3, 0.95
#: A matrix moves by Muon if it has at least this many rows and columns: one with fewer is an output layer.
_LEAST = 16


class MuonAdamW(torch.optim.AdamW):
    """AdamW, except for matrices: these move along their momentum, made nearly orthogonal (Jordan et al., *Muon*, 2024), as far
    as AdamW would move them (Liu et al., *Muon is scalable for LLM training*, 2025). Works in float32, as ``torch.optim.Muon``
    uses bfloat16, which is slow on a CPU without bfloat16 arithmetic."""

    def __init__(self, weights: Iterable[nn.Parameter], weight_decay: float) -> None:
        groups: list[list[nn.Parameter]] = [[], []]
        for each in weights:
            groups[each.ndim == 2 and min(each.shape) >= _LEAST].append(each)
        super().__init__([{"params": group} for group in groups], weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step with the current gradients."""
        rate = self.param_groups[1]["lr"]
        for matrix in self.param_groups[1]["params"]:
            if matrix.grad is not None:
                state = self.state[matrix]
                if not state:  # with ``step``, which AdamW needs to restore a state
                    state.update(step=torch.zeros(()), momentum=torch.zeros_like(matrix))
                state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                direction = orthogonal(matrix.grad.lerp(state["momentum"], _MOMENTUM))
                matrix.mul_(1 - rate * self.param_groups[1]["weight_decay"])
                matrix.add_(direction, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)
                matrix.grad = None  # so that AdamW leaves it as it is
        super().step()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` (m, n) with its singular values set to about 1, except for small ones. Iterates on its smaller side."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    rows = (matrix.T if tall else matrix) / matrix.norm().clamp(min=1e-7)
    gram, changes = rows @ rows.T, list[torch.Tensor]()
    for _ in range(_ITERATIONS):
        if changes:
            gram = changes[-1] @ gram @ changes[-1]
        changes.append(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        changes[-1].diagonal().add_(a)
    found = torch.linalg.multi_dot([*reversed(changes), rows])
    return found.T if tall else found
