"""The training loop: it learns, is deterministic, and resumes exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.errors import PredictorError
from cdmpp.predictor.checkpoint import load_checkpoint, save_checkpoint
from cdmpp.predictor.config import config_from_dict
from cdmpp.predictor.data import split_data
from cdmpp.predictor.trainer import learning_rate
from cdmpp.predictor.training import prepare
from tests.samples.training import changed, make_ast, with_counts


@pytest.fixture()
def unlike():
    """Programs without labels, thirty times as large as those that have some."""
    rng = np.random.default_rng(9)
    return {f"u{i}": make_ast(rng, 1 + i % 4, scale=30.0) for i in range(200)}


@pytest.fixture()
def make_trainer(data, config, unlike):
    def make(spec="by_task:seed=0", loss=None, model=None, adapt_devices=None, **train):
        own = changed(config, train=train, loss=loss or {}, model=model or {}, data={"adapt_devices": adapt_devices})
        return prepare(own, replace(data, unlabelled=unlike), split_data(spec, data)).trainer

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


@pytest.mark.parametrize(("cut", "options"), [(1, {}), (3, {}), (2, {"loss": {"cmd_weight": 0.5}})])
def test_resuming_gives_the_result_of_an_unbroken_run(make_trainer, tmp_path, cut, options):
    unbroken = []
    expected = make_trainer(epochs=4, **options).fit(progress=unbroken.append)

    def kill(line):
        save_checkpoint(path, killed.state(), "f")
        if line["epoch"] == cut:
            raise KeyboardInterrupt

    path, killed = tmp_path / "c.safetensors", make_trainer(epochs=4, **options)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(kill)
    resumed, lines = make_trainer(epochs=4, **options), []
    resumed.restore(load_checkpoint(path, "f"))
    state = resumed.fit(progress=lines.append)
    assert_same(state.best, expected.best)
    assert_same(resumed.state().weights, expected.weights)
    timeless = [{k: v for k, v in line.items() if not k.endswith("_s")} for line in unbroken]
    assert [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines] == timeless[cut:]


def test_the_best_epoch_is_kept_not_the_last(make_trainer):
    trainer, epochs = make_trainer(epochs=6, learning_rate=0.05, ema_decay=0.0), []
    trainer.fit(lambda line: epochs.append((line, {k: v.clone() for k, v in trainer.state().weights.items()})))
    best, weights = min(epochs, key=lambda epoch: epoch[0]["valid_mape"])
    assert epochs[-1][0]["best_epoch"] == best["epoch"]
    assert_same(trainer.state().best, weights)


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


def test_a_checkpoint_of_another_run_or_damaged_is_refused(make_trainer, tmp_path):
    trainer, path = make_trainer(epochs=1), tmp_path / "c.safetensors"
    trainer.fit(lambda line: save_checkpoint(path, trainer.state(), "this run"))
    with pytest.raises(PredictorError, match="another configuration"):
        load_checkpoint(path, "that run")
    path.write_bytes(path.read_bytes()[:1000])
    for unreadable in (path, tmp_path / "none"):
        with pytest.raises(PredictorError, match="cannot read"):
            load_checkpoint(unreadable, "this run")


@pytest.mark.parametrize(
    ("spec", "devices"), [("by_network:heldout=net0;valid=0.2", None), ("by_device:heldout=fast", ["fast"])]
)
def test_cmd_draws_the_domains_together(make_trainer, spec, devices):
    """The discrepancy falls far below what it is where its weight is next to nothing."""
    last = {}
    for weight in (1e-9, 3.0):
        lines = []
        trainer = make_trainer(spec, {"cmd_weight": weight}, None, devices, epochs=6, patience=6, ema_decay=0.0)
        trainer.fit(progress=lines.append)
        last[weight] = lines[-1]["train_cmd"]
    assert last[3.0] < 0.7 * last[1e-9]


def test_what_is_tested_changes_nothing_with_cmd_either(data, config, unlike):
    config = changed(config, loss={"cmd_weight": 1.0}, train={"epochs": 2})
    split = split_data("by_network:heldout=net0;valid=0.2;seed=0", data)
    data = replace(data, unlabelled={**data.asts, **unlike})
    expected = prepare(config, data, split).trainer.fit().best
    latency_s = data.labels["latency_s"].to_numpy().copy()
    latency_s[split.test] *= 77
    tested = set(data.labels["program"].iloc[split.test])
    asts = {p: replace(ast, leaves=ast.leaves * 99) if p in tested else ast for p, ast in data.asts.items()}
    wild = replace(data, labels=data.labels.assign(latency_s=latency_s), asts=asts, unlabelled={**asts, **unlike})
    assert_same(prepare(config, wild, split).trainer.fit().best, expected)
    # programs to adapt to do
    more = {**data.asts, **{p: replace(ast, leaves=ast.leaves * 99) for p, ast in unlike.items()}}
    other = prepare(config, replace(data, unlabelled=more), split).trainer.fit().best
    assert any(not torch.equal(expected[name], other[name]) for name in expected)
    with pytest.raises(PredictorError, match=r"no programs to adapt to: name datasets in data\.adapt"):
        prepare(config, replace(data, unlabelled={program: data.asts[program] for program in tested}), split)


def test_instruction_counts_are_learnt_where_there_are_some(data, config):
    loss = {"codegen_weight": 1.0, "mse_weight": 1e-6, "mape_weight": 0.0}
    longer = {"epochs": 12, "patience": 12, "batch_size": 32, "learning_rate": 0.02}
    config = changed(config, model={"codegen": True}, loss=loss, train=longer)
    split = split_data("within_task:seed=0", data)
    half = with_counts(data, {program: data.asts[program].n_leaves for program in list(data.asts)[::2]})
    lines = []
    prepare(config, half, split).trainer.fit(progress=lines.append)
    assert lines[-1]["train_loss"] < 0.5 * lines[0]["train_loss"]


def test_counts_without_a_head_for_them_are_refused():
    with pytest.raises(PredictorError, match=r"model\.codegen"):
        config_from_dict({"loss": {"codegen_weight": 1.0}})
