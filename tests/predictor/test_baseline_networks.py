"""Baselines that are networks: CDMPP as released and the LSTM, their shared loop, and models by name."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines import MODEL_NAMES, TaskMedian, evaluate_models, make_model
from cdmpp.predictor.baselines.lstm import LstmModel, LstmNetwork
from cdmpp.predictor.baselines.released import CdmppReleased, ReleasedNetwork, ReleasedSizes
from cdmpp.predictor.batching import Context, PaddedBatch
from cdmpp.predictor.config import TrainConfig
from cdmpp.predictor.data import split_data
from tests.samples.training import make_ast, make_data

TINY = ReleasedSizes(16, 1, 2, 32, 0.0, 24, (24,), 8, (8,), (16,))
TRAIN = TrainConfig(epochs=2, patience=2, batch_size=64, learning_rate=0.01, threads=1)


def released(**train) -> CdmppReleased:
    return CdmppReleased(TINY, TRAIN.model_copy(update=train))


def lstm(**train) -> LstmModel:
    return LstmModel(16, 1, 0.0, TRAIN.model_copy(update=train))


@pytest.fixture(scope="module")
def split(data):
    return split_data("within_task:seed=0", data)


@pytest.mark.parametrize("make", [released, lstm])
def test_it_beats_the_task_median_within_tasks(data, split, make):
    model = make(epochs=12, patience=12)
    scores = evaluate_models([model, TaskMedian()], data, split)
    assert scores[model.name]["overall"]["mape"] < 0.7 * scores["task_median"]["overall"]["mape"]
    assert model.samples_per_s_ > 0
    assert len(model.history_) == 12


@pytest.mark.parametrize("make", [released, lstm])
def test_same_seed_same_predictions_other_seed_others(data, split, make):
    predictions = []
    for seed in (3, 3, 4):
        model = make(seed=seed, epochs=1)
        model.fit(data, split)
        predictions.append(model.predict(data, split.test))
    assert (predictions[0] == predictions[1]).all()
    assert (predictions[0] != predictions[2]).any()
    assert np.isfinite(predictions[0]).all() and (predictions[0] > 0).all()


@pytest.mark.parametrize("make", [released, lstm])
def test_the_test_labels_are_ignored(data, split, make):
    latency_s = data.labels["latency_s"].to_numpy().copy()
    latency_s[split.test] *= 100
    predictions = []
    for labels in (data.labels, data.labels.assign(latency_s=latency_s)):
        model = make(epochs=1)
        model.fit(replace(data, labels=labels), split)
        predictions.append(model.predict(data, split.test))
    assert (predictions[0] == predictions[1]).all()


def test_the_best_epoch_is_kept_and_stops_the_rest(data, split):
    # a vanishing learning rate: no epoch is better than the first by much, so patience runs out
    model = lstm(epochs=30, patience=2, learning_rate=1e-12, ema_decay=0.0)
    model.fit(data, split)
    last = model.history_[-1]
    assert len(model.history_) < 30 and last["epoch"] - last["best_epoch"] == 2
    predicted_s = model.predict(data, split.valid)
    mape = np.mean(np.abs(predicted_s / data.labels["latency_s"].to_numpy()[split.valid] - 1))
    assert mape == pytest.approx(last["best_mape"], rel=1e-6)
    assert last["best_mape"] == min(line["valid_mape"] for line in model.history_)


def test_a_time_budget_ends_training_within_an_epoch(data, split):
    lines = []
    model = LstmModel(
        16, 1, train=TRAIN.model_copy(update={"batch_size": 2}), max_seconds=1e-6, progress=lines.append
    )
    model.fit(data, split)
    assert len(lines) == 1 and lines[0]["step"] == 1
    assert lines == model.history_
    with pytest.raises(PredictorError, match="max_seconds"):
        LstmModel(max_seconds=0)


def test_divergence_is_an_error(data, split, monkeypatch):
    def broken(self, batch, context):
        return torch.full((len(context.device),), math.nan, requires_grad=True)

    monkeypatch.setattr(LstmNetwork, "forward", broken)
    with pytest.raises(PredictorError, match="diverged in epoch 1"):
        lstm().fit(data, split)


def test_an_unfitted_model_says_so(data):
    with pytest.raises(PredictorError, match="lstm is not fitted"):
        LstmModel().predict(data, np.array([0]))


def batch_of(*lengths: int, width: int = 5, pad_to: int | None = None) -> PaddedBatch:
    """Programs of random leaves; the same for the same position in the list."""
    longest = pad_to or max(lengths)
    leaves, positions = torch.zeros(len(lengths), longest, width), torch.zeros(len(lengths), longest).long()
    padding = torch.ones(len(lengths), longest, dtype=torch.bool)
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(i)
        leaves[i, :length] = torch.randn(length, width, generator=generator)
        positions[i, :length] = 3 * torch.arange(length) + 1
        padding[i, :length] = False
    return PaddedBatch(leaves, positions, padding)


@pytest.mark.parametrize(
    "network", [ReleasedNetwork(5, 3, 6, TINY).eval(), LstmNetwork(5, 3, 16, 2, 0.0).eval()]
)
def test_padding_changes_nothing(network):
    device = Context.of_devices(torch.ones(3, 3))
    expected = network(batch_of(4, 2, 4), device)
    torch.testing.assert_close(network(batch_of(4, 2, 4, pad_to=9), device), expected)
    alone = network(batch_of(4), device.take(torch.arange(1)))
    torch.testing.assert_close(alone, expected[:1])


def test_released_sizes_are_the_published_ones():
    network = ReleasedNetwork(273, 30, 5, ReleasedSizes())
    layer = network.encoder.layers[0]
    assert len(network.encoder.layers) == 11
    assert layer.self_attn.embed_dim == 164 and layer.self_attn.num_heads == 4
    assert layer.linear1.out_features == 2048
    assert network.flatten[0].in_features == 5 * 164
    decoder = [m.out_features for m in network.decoder.modules() if isinstance(m, torch.nn.Linear)]
    assert decoder == [930, 930, 930, 1]
    with pytest.raises(PredictorError, match="multiple of heads"):
        ReleasedSizes(dim=10, heads=4)


def test_released_cuts_longer_programs_and_says_how_many(data, split, caplog):
    model = released(epochs=1)
    model.fit(data, split)
    longest = model.max_leaves_
    assert longest == max(data.asts[p].n_leaves for p in data.labels["program"].iloc[split.train])
    rng = np.random.default_rng(0)
    long = make_ast(rng, longest + 3)
    cut = replace(long, leaves=long.leaves[:longest], positions=long.positions[:longest])
    row = int(split.test[0])
    program = data.labels["program"][row]
    predictions = []
    for ast in (long, cut):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            changed = replace(data, asts={**data.asts, program: ast})
            predictions.append(float(model.predict(changed, np.array([row, row]))[0]))
        assert ("2 of 2 programs have more leaves" in caplog.text) == (ast is long)
    assert predictions[0] == predictions[1]


def test_models_by_name(config):
    assert make_model("ours", 7, config=config)._config.train.seed == 7
    assert make_model("xgboost-perstore").name == "xgboost-perstore"
    assert make_model("xgboost-ast", 5, rounds=3).params["seed"] == 5
    assert make_model("task-median").name == "task_median"
    model = make_model("lstm", 2, hidden=8, train={"epochs": 3}, loss={"mape_weight": 0.7})
    assert (model.train.seed, model.train.epochs, model.loss.mape_weight, model.hidden) == (2, 3, 0.7, 8)
    model = make_model("released", 1, sizes={"layers": 2}, train={"epochs": 3})
    assert model.sizes.layers == 2 and model.sizes.dim == 164
    assert model.train.batch_size == 600, "what is left out is as released"
    with pytest.raises(PredictorError, match="unknown model 'mlp'") as error:
        make_model("mlp")
    assert all(name in str(error.value) for name in MODEL_NAMES)
    with pytest.raises(PredictorError, match="epoch_count"):
        make_model("lstm", train={"epoch_count": 3})


def test_one_training_record_is_too_few():
    data = make_data(1, 3)
    split = split_data("within_task:seed=0", data)
    with pytest.raises(PredictorError, match="at least two"):
        lstm().fit(data, replace(split, train=split.train[:1]))
