"""Muon against torch's, and AdamW for the rest."""

from __future__ import annotations

import copy

import torch
from torch.nn import GELU, Linear, Sequential

from cdmpp.predictor.optimizer import MuonAdamW


def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw():
    torch.manual_seed(0)
    ours = Sequential(Linear(40, 32), GELU(), Linear(32, 96), GELU(), Linear(96, 1))
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    one = MuonAdamW(ours.parameters(), weight_decay=0.1)  # at 1e-3
    first, one_bias, second, another, *rest = theirs.parameters()
    muon = torch.optim.Muon([first, second], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([one_bias, another, *rest], lr=1e-3, weight_decay=0.1)
    inputs = torch.randn(64, 40)
    for _ in range(3):
        for network, optimizers in ((ours, [one]), (theirs, [muon, adamw])):
            network.zero_grad()
            network(inputs).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, other, start in zip(ours.parameters(), theirs.parameters(), before.parameters(), strict=True):
        assert (mine - other).norm() < 0.1 * (mine - start).norm()  # torch's Muon is in bfloat16
