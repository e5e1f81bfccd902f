"""The network: masking, bounded embeddings, sensitivity to what it must see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cdmpp.predictor.batching import Context, PaddedBatch
from cdmpp.predictor.config import ModelConfig
from cdmpp.predictor.network import LatencyNetwork, PreOrderEncoding, positional_encoding

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
    return PaddedBatch(leaves, positions, padding), Context.of_devices(devices)


def pad(batch: PaddedBatch, extra: int, value: float) -> PaddedBatch:
    n = len(batch.leaves)
    return PaddedBatch(
        torch.cat([batch.leaves, torch.full((n, extra, LEAF_DIM), value)], 1),
        torch.cat([batch.positions, torch.full((n, extra), 17)], 1),
        torch.cat([batch.padding, torch.ones(n, extra, dtype=torch.bool)], 1),
    )


VARIANTS = list(itertools.product(("sum", "mean", "attention", "flatten"), ("film", "token", "none")))


@pytest.mark.parametrize(("pooling", "device"), VARIANTS)
def test_padding_changes_nothing_whatever_it_holds(pooling, device):
    network = make_network(pooling=pooling, device=device)
    batch, devices = make_batch()
    with torch.no_grad():
        plain, padded = network(batch, devices), network(pad(batch, 5, 1e4), devices)
    assert plain.shape == (3,)
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing_in_training_mode_either():
    network = make_network(dropout=0.0).train()
    batch, devices = make_batch()
    torch.testing.assert_close(
        network(pad(batch, 3, 7.0), devices), network(batch, devices), rtol=1e-4, atol=1e-5
    )


def test_a_program_is_predicted_alone_as_in_a_batch():
    network = make_network()
    batch, devices = make_batch()
    with torch.no_grad():
        together = network(batch, devices)
        alone = network(
            PaddedBatch(batch.leaves[1:2], batch.positions[1:2], batch.padding[1:2]),
            devices.take(torch.tensor([1])),
        )
    torch.testing.assert_close(alone, together[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("activation", "low", "high"), [("tanh", -1.0, 1.0), ("sigmoid", 0.0, 1.0)])
def test_embeddings_are_bounded(activation, low, high):
    batch, devices = make_batch()
    embedding = make_network(embedding_activation=activation).embed(
        PaddedBatch(batch.leaves * 1e3, batch.positions, batch.padding), devices.device
    )
    assert embedding.shape == (3, SMALL["embedding_dim"])
    assert embedding.min() >= low and embedding.max() <= high


@pytest.mark.parametrize("device", ["film", "token", "none"])
def test_the_device_matters_unless_hidden(device):
    network = make_network(device=device)
    batch, devices = make_batch()
    with torch.no_grad():
        changed = not torch.equal(
            network(batch, devices), network(batch, Context.of_devices(devices.device + 1.0))
        )
    assert changed == (device != "none")


@pytest.mark.parametrize("positional", ["standard", "paper", "none"])
def test_positions_matter_unless_turned_off(positional):
    network = make_network(positional=positional)
    batch, devices = make_batch()
    moved = PaddedBatch(batch.leaves, batch.positions * 5, batch.padding)
    with torch.no_grad():
        changed = not torch.equal(network(batch, devices), network(moved, devices))
    assert changed == (positional != "none")


def test_positional_table_grows_and_agrees_with_the_encoding():
    encoding = PreOrderEncoding(8, "standard")
    for positions in ([[1, 2]], [[5, 3000]], [[0, 7]]):
        expected = positional_encoding(np.asarray(positions), 8, "standard")
        np.testing.assert_allclose(encoding(torch.tensor(positions)).numpy(), expected, atol=1e-6)
    assert not encoding.state_dict()  # it is computed, not stored


@pytest.mark.parametrize(("pooling", "device"), VARIANTS)
def test_every_parameter_gets_a_gradient(pooling, device):
    network = make_network(pooling=pooling, device=device).train()
    batch, devices = make_batch()
    network(batch, devices).square().sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []
