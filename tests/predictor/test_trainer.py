"""The training loop: it learns, is deterministic, and resumes exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cdmpp.errors import PredictorError
from cdmpp.predictor.checkpoint import load_checkpoint, save_checkpoint
from cdmpp.predictor.run import prepare
from cdmpp.predictor.splitting import split_data
from cdmpp.predictor.trainer import learning_rate, pick_device


@pytest.fixture()
def make_trainer(data, config):
    split = split_data("by_task:seed=0", data)

    def make(**train):
        changed = config.model_copy(update={"train": config.train.model_copy(update=train)})
        return prepare(changed, data, split).trainer

    return make


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns(make_trainer):
    lines = []
    make_trainer(epochs=15, patience=15, batch_size=32).fit(progress=lines.append)
    assert lines[-1]["train_loss"] < 0.3 * lines[0]["train_loss"]
    assert lines[-1]["best_mape"] < 0.6 * lines[0]["valid_mape"]
    assert [line["epoch"] for line in lines] == list(range(1, 16))


def test_same_seed_same_weights_other_seed_other_weights(make_trainer):
    first, second, other = (make_trainer(epochs=2, seed=seed).fit().best for seed in (3, 3, 4))
    assert_same(first, second)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_callers_random_state_is_left_alone(make_trainer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_trainer(epochs=1).fit()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("cut", [1, 3])
def test_resuming_gives_the_result_of_an_unbroken_run(make_trainer, tmp_path, cut):
    unbroken = []
    expected = make_trainer(epochs=4).fit(progress=unbroken.append)

    class Killed(Exception):
        pass

    def kill(line):
        if line["epoch"] == cut:
            raise Killed

    path = tmp_path / "c.safetensors"
    with pytest.raises(Killed):
        make_trainer(epochs=4).fit(lambda state: save_checkpoint(path, state, "f"), kill)
    resumed, lines = make_trainer(epochs=4), []
    resumed.restore(load_checkpoint(path, "f"))
    state = resumed.fit(progress=lines.append)
    assert_same(state.best, expected.best)
    assert_same(resumed.state().weights, expected.weights)
    timeless = [{k: v for k, v in line.items() if not k.endswith("_s")} for line in unbroken]
    assert [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines] == timeless[cut:]


def test_the_best_epoch_is_kept_not_the_last(make_trainer):
    trainer, lines = make_trainer(epochs=6, learning_rate=0.05, ema_decay=0.0), []
    snapshots = {}
    trainer.fit(
        lambda state: snapshots.update({state.epoch: {k: v.clone() for k, v in state.weights.items()}}),
        lines.append,
    )
    best = min(lines, key=lambda line: line["valid_mape"])
    assert lines[-1]["best_epoch"] == best["epoch"]
    assert_same(trainer.best_weights, snapshots[best["epoch"]])


def test_early_stopping(make_trainer):
    lines = []
    # a vanishing learning rate cannot improve for long: averaging settles
    make_trainer(epochs=50, patience=2, learning_rate=1e-12, ema_decay=0.0).fit(progress=lines.append)
    assert len(lines) < 50
    assert lines[-1]["epoch"] - lines[-1]["best_epoch"] == 2


def test_learning_rate_schedule():
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[10] == pytest.approx(2.0) == max(rates)
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert (np.diff(rates[10:]) < 0).all()


def test_divergence_is_an_error(make_trainer):
    trainer = make_trainer(epochs=1)
    with torch.no_grad():
        next(trainer.network.parameters()).fill_(math.nan)
    with pytest.raises(PredictorError, match="diverged"):
        trainer.fit()


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(PredictorError, match="no CUDA device"):
        pick_device("cuda")


def test_a_checkpoint_of_another_run_or_damaged_is_refused(make_trainer, tmp_path):
    trainer, path = make_trainer(epochs=1), tmp_path / "c.safetensors"
    trainer.fit(lambda state: save_checkpoint(path, state, "this run"))
    with pytest.raises(PredictorError, match="another configuration"):
        load_checkpoint(path, "that run")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PredictorError, match="cannot read"):
        load_checkpoint(path, "this run")
    with pytest.raises(PredictorError, match="cannot read"):
        load_checkpoint(tmp_path / "none", "this run")
