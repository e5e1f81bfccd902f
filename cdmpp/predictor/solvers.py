"""Which kernel of a library runs an operator: MIOpen's solvers for convolutions on AMD GPUs, ranked.

Small networks, which are averaged, have the same inputs as those of :mod:`cdmpp.predictor.operators`. For every solver they
predict how much longer than the operator's estimate it takes, and the probability that it can run. Only the ranking is used:
the latency itself comes from the operator model, whose correction is checked on left-out devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

#: Kernels are ranked for this operator on GPUs of this vendor, from the rows of this framework.
OPERATOR, VENDOR, FRAMEWORK = "conv", "amd", "miopen"
#: Standardised features are clipped at plus and minus this: nothing is known farther from the training data.
FAR = 4.0
#: Rows of a training step, highest learning rate; for solvers the fewest epochs and the fewest steps.
_BATCH, _RATE, _EPOCHS, _STEPS = 1024, 3e-3, 20, 400
_WIDTH, _MEMBERS = 96, 2
#: Weight in the loss of whether a solver can run, relative to how much slower it is.
_RUNS = 0.1


@dataclass(frozen=True)
class SolverModel:
    """Names of the solvers, with the layout appended if it is not NCHW; networks, with the mean and std of their inputs."""

    names: Sequence[str]
    networks: Sequence[nn.Module]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def rank(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """log(seconds / estimate) of every solver, and the probability that it can run, each float64 (n, solvers)."""
        scaled = standardised(rows, self.mean, self.std)
        with torch.inference_mode():
            found = np.mean([network(scaled).double().numpy() for network in self.networks], axis=0)
        logs, runs = np.split(found, 2, axis=1)
        return logs, 1 / (1 + np.exp(-runs))


def fit_solvers(rows: NDArray[np.float32], logs: NDArray[np.float64], names: Sequence[str], seed: int = 0) -> SolverModel:
    """Fit a model to log(seconds / estimate), (n, solvers), NaN where a solver did not run."""
    mean, std = rows.mean(0), rows.std(0)
    std = np.where(std > 1e-4, std, 1e6).astype(np.float32)
    measured = torch.from_numpy(~np.isnan(logs)).float()
    labels = torch.from_numpy(np.nan_to_num(logs).astype(np.float32))

    def loss(found: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        slower, runs = found.chunk(2, dim=1)
        off = nn.functional.huber_loss(slower, labels[at], reduction="none", delta=0.2) * measured[at]
        return off.sum() / measured[at].sum() + _RUNS * nn.functional.binary_cross_entropy_with_logits(runs, measured[at])

    scaled = standardised(rows, mean, std)
    epochs = max(_EPOCHS, _STEPS // max(1, len(rows) // _BATCH))
    networks = [fit_network(scaled, 2 * len(names), _WIDTH, epochs, seed + i, loss) for i in range(_MEMBERS)]
    return SolverModel(tuple(names), tuple(networks), mean, std)


def standardised(rows: NDArray[np.float32], mean: NDArray[np.float32], std: NDArray[np.float32]) -> torch.Tensor:
    """Rows standardised and clipped, as the networks' input."""
    return torch.from_numpy(np.clip((rows - mean) / std, -FAR, FAR))


def network_of(inputs: int, width: int, outputs: int = 1) -> nn.Sequential:
    """A network of three linear layers."""
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs))


def fit_network(
    rows: torch.Tensor,
    outputs: int,
    width: int,
    epochs: int,
    seed: int,
    loss: Callable[[torch.Tensor, torch.Tensor], Any],
    rate: float = _RATE,
) -> nn.Module:
    """Train a network; ``loss`` takes the outputs of a batch and the numbers of its rows, ``rate`` is the highest."""
    torch.manual_seed(seed)
    network = network_of(rows.shape[1], width, outputs)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-2)
    batch = min(_BATCH, len(rows))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * (len(rows) // batch) + 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(rows), generator=generator)
        for first in range(0, len(rows) - batch + 1, batch):
            at = order[first : first + batch]
            optimizer.zero_grad()
            loss(network(rows[at]), at).backward()
            optimizer.step()
            schedule.step()
    return network.eval()
