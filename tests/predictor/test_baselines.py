"""Baselines and the harness that compares models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.errors import DatasetError, FeatureMismatchError, PredictorError
from cdmpp.predictor.baselines import MODEL_NAMES, CdmppModel, TaskMedian, XGBoostModel, evaluate_models, make_model
from cdmpp.predictor.baselines.networks import CdmppReleased, LstmModel, LstmNetwork, ReleasedNetwork, ReleasedSizes

from cdmpp.predictor.baselines.xgboost import (  # isort: skip
    AGGREGATED_DIM, PER_STORE_DIM, aggregate_per_store, load_per_store, save_per_store,
)  # fmt: skip
from cdmpp.predictor.config import Config, TrainConfig
from cdmpp.predictor.data import split_data
from cdmpp.predictor.encoding import Context, PaddedBatch
from tests.samples.training import changed, make_ast, with_counts


@pytest.fixture(scope="module")
def split(data):
    return split_data("by_task:seed=0", data)


def test_a_split_without_validation_leaves_programs_to_stop_by(data):
    """As few-shot training makes it: the baselines learn from the same tasks."""
    tasks = "+".join(sorted(set(data.labels["task"]))[:3])
    without = split_data(f"by_device:heldout=fast;tasks={tasks};valid=0;seed=0", data)
    assert not len(without.valid)
    kept = []

    class Kept(XGBoostModel):
        def fit(self, data, split):
            kept.append(split)
            super().fit(data, split)

    results = evaluate_models([Kept("ast", rounds=20)], data, without)
    (used,) = kept
    programs = data.labels["program"]
    assert not set(programs.iloc[used.train]) & set(programs.iloc[used.valid])
    assert sorted([*used.train, *used.valid]) == sorted(without.train)
    assert 0.05 < len(used.valid) / len(without.train) < 0.2
    assert results["xgboost-ast"]["overall"]["n"] == len(without.test)


def test_trees_have_the_factor_that_is_best_on_validation(data, split):
    model = XGBoostModel("ast", rounds=20)
    model.fit(data, split)
    ratio = model.predict(data, split.valid) / data.latency_s[split.valid]
    mapes = [np.abs(factor * ratio - 1).mean() for factor in (1, 0.98, 1.02)]
    assert mapes[0] == min(mapes) and model.shift_ != 0


def test_the_harness_scores_all_models_on_the_same_records(data, split, config):
    models = [TaskMedian(), XGBoostModel("ast", rounds=80), CdmppModel(changed(config, train={"epochs": 2}))]
    results = evaluate_models(models, data, split)
    assert list(results) == ["task_median", "xgboost-ast", "cdmpp"]
    assert {r["overall"]["n"] for r in results.values()} == {len(split.test)}
    assert results["xgboost-ast"]["overall"]["mape"] < 0.7 * results["task_median"]["overall"]["mape"]


def test_task_median_known_answer(data):
    split = split_data("within_task:seed=0", data)
    model = TaskMedian()
    model.fit(data, split)
    train = data.labels.iloc[split.train]
    row = int(split.test[0])
    task, device = data.labels["task"][row], data.labels["device"][row]
    mine = train[(train["task"] == task) & (train["device"] == device)]
    assert model.predict(data, np.array([row])) == pytest.approx([np.exp(np.median(np.log(mine["latency_s"])))])
    split = split_data("by_task:seed=0", data)  # tasks never seen: the median of the device
    model.fit(data, split)
    predicted, fast = model.predict(data, split.test), (data.labels["device"].iloc[split.test] == "fast").to_numpy()
    assert len(set(predicted[fast])) == 1 and predicted[fast][0] < predicted[~fast][0]


def test_aggregation_known_answer():
    matrix = np.zeros((2, PER_STORE_DIM))
    matrix[:, 0], matrix[:, 1] = [1, 2], [-3, -1]
    vector = aggregate_per_store(matrix)
    assert vector.shape == (AGGREGATED_DIM,)
    assert vector[:2].tolist() == [3, -4]
    assert vector[PER_STORE_DIM : PER_STORE_DIM + 2].tolist() == [2, -1]
    assert vector[-1] == 2
    with pytest.raises(FeatureMismatchError):
        aggregate_per_store(np.zeros((2, 3)))


def test_per_store_file_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    features = {f"p{i}": (rng.normal(size=AGGREGATED_DIM) * 10).astype(np.float32) for i in range(5)}
    save_per_store(tmp_path / "f.parquet", features)
    loaded = load_per_store(tmp_path / "f.parquet")
    assert list(loaded) == list(features)
    for program, vector in features.items():
        np.testing.assert_allclose(loaded[program], vector, rtol=1e-3, atol=1e-6)
    (tmp_path / "f.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot read"):
        load_per_store(tmp_path / "f.parquet")


def test_one_needs_instruction_counts_and_uses_them(data):
    split = split_data("within_task:seed=0", data)
    with pytest.raises(PredictorError, match="cdmpp codegen"):
        make_model("xgboost-ast-codegen", rounds=2).fit(data, split)
    counted = with_counts(data, dict(zip(data.labels["program"], 1e9 * data.labels["latency_s"], strict=True)))
    models = [make_model("xgboost-ast", rounds=40), make_model("xgboost-ast-codegen", rounds=40)]
    plain, told = evaluate_models(models, counted, split).values()
    assert told["overall"]["mape"] < plain["overall"]["mape"]


TINY = ReleasedSizes(16, 1, 2, 32, 0.0, 24, (24,), 8, (8,), (16,))
TRAIN = TrainConfig(epochs=2, patience=2, batch_size=64, learning_rate=0.01, threads=1)


def released(progress=None, **train) -> CdmppReleased:
    return CdmppReleased(TINY, TRAIN.model_copy(update=train), progress=progress)


def lstm(progress=None, **train) -> LstmModel:
    return LstmModel(16, 1, 0.0, TRAIN.model_copy(update=train), progress=progress)


@pytest.fixture(scope="module")
def within(data):
    return split_data("within_task:seed=0", data)


@pytest.mark.parametrize("make", [released, lstm])
def test_it_beats_the_task_median_within_tasks(data, within, make):
    lines = []
    model = make(epochs=12, patience=12, progress=lines.append)
    scores = evaluate_models([model, TaskMedian()], data, within)
    assert scores[model.name]["overall"]["mape"] < 0.7 * scores["task_median"]["overall"]["mape"]
    assert len(lines) == 12


def trees(seed=0, **_) -> XGBoostModel:
    return XGBoostModel("ast", rounds=20, seed=seed)


@pytest.mark.parametrize("make", [released, lstm, trees])
def test_seed_and_known_labels_alone_decide(data, within, make):
    latency_s = data.labels["latency_s"].to_numpy().copy()
    latency_s[within.test] *= 100
    wild = replace(data, labels=data.labels.assign(latency_s=latency_s))
    predictions = []
    for given, seed in ((data, 3), (wild, 3), (data, 4)):
        model = make(seed=seed, epochs=1)
        model.fit(given, within)
        predictions.append(model.predict(data, within.test))
    assert (predictions[0] == predictions[1]).all()
    assert (predictions[0] != predictions[2]).any()
    assert np.isfinite(predictions[0]).all() and (predictions[0] > 0).all()


def test_a_time_budget_ends_training_within_an_epoch(data, within):
    lines = []
    model = LstmModel(16, 1, train=TRAIN.model_copy(update={"batch_size": 2}), max_seconds=1e-6, progress=lines.append)
    model.fit(data, within)
    assert len(lines) == 1 and lines[0]["step"] == 1
    with pytest.raises(PredictorError, match="max_seconds"):
        LstmModel(max_seconds=0)


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


@pytest.mark.parametrize("network", [ReleasedNetwork(5, 3, 6, TINY).eval(), LstmNetwork(5, 3, 16, 2, 0.0).eval()])
def test_padding_changes_nothing(network):
    device = Context(torch.ones(3, 3), torch.zeros(3, 0), torch.zeros(3, 0), torch.zeros(3).bool())
    expected = network(batch_of(4, 2, 4), device)
    torch.testing.assert_close(network(batch_of(4, 2, 4, pad_to=9), device), expected)
    torch.testing.assert_close(network(batch_of(4), device.take(torch.arange(1))), expected[:1])


def test_released_sizes_are_the_published_ones():
    network = ReleasedNetwork(273, 30, 5, ReleasedSizes())
    layer = network.encoder.layers[0]
    assert len(network.encoder.layers) == 11
    assert layer.self_attn.embed_dim == 164 and layer.self_attn.num_heads == 4
    assert layer.linear1.out_features == 2048
    assert network.flatten[0].in_features == 5 * 164
    assert [m.out_features for m in network.decoder.modules() if isinstance(m, torch.nn.Linear)] == [930, 930, 930, 1]
    with pytest.raises(PredictorError, match="multiple of heads"):
        ReleasedSizes(dim=10, heads=4)


def test_released_cuts_longer_programs_and_says_how_many(data, within, caplog):
    model = released(epochs=1)
    model.fit(data, within)
    longest = model.max_leaves_
    assert longest == max(data.asts[p].n_leaves for p in data.labels["program"].iloc[within.train])
    long = make_ast(np.random.default_rng(0), longest + 3)
    cut = replace(long, leaves=long.leaves[:longest], positions=long.positions[:longest])
    row = int(within.test[0])
    program = data.labels["program"][row]
    predictions = []
    for ast in (long, cut):
        caplog.clear()
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
    with pytest.raises(PredictorError, match="features"):
        XGBoostModel("pixels")
    for model in (CdmppModel(Config()), LstmModel()):
        with pytest.raises(PredictorError, match="not fitted"):
            model.predict(None, np.array([0]))


def test_one_training_record_is_too_few(data, within):
    with pytest.raises(PredictorError, match="at least two"):
        lstm().fit(data, replace(within, train=within.train[:1]))
