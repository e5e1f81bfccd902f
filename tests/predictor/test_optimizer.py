"""Muon against torch's, and AdamW for the rest; drop-out."""

from __future__ import annotations

import copy

import torch
from torch.nn import GELU, Linear, Sequential

from cdmpp.predictor.network import Dropout
from cdmpp.predictor.optimizer import MuonAdamW


def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw():
    torch.manual_seed(0)
    ours = Sequential(Linear(40, 32), GELU(), Linear(32, 96), GELU(), Linear(96, 1))
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    one = MuonAdamW(ours.parameters(), weight_decay=0.1)  # at 1e-3
    first, one_bias, second, another, *rest = theirs.parameters()
    muon = torch.optim.Muon([first, second], lr=1e-3, weight_decay=0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw")
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


def test_dropout_scales_what_it_keeps() -> None:
    kept = Dropout(0.25)(torch.ones(101, 41))
    assert torch.equal(kept.unique(), torch.tensor([0.0, 4 / 3])) and 0.95 < kept.mean() < 1.05
    assert torch.equal(Dropout(0.25).eval()(kept), kept)
