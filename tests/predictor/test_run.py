"""Training runs on disk: what is written, resuming after a kill, leakage, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.device import device_features
from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor, evaluate, load_config, pair_features, train
from cdmpp.predictor.data import split_data
from cdmpp.predictor.training import prepare
from tests.samples.training import changed, make_data

ROOT = Path(__file__).parents[2]


@pytest.fixture()
def by_task(config):
    return changed(config, split={"spec": "by_task:seed=0"})


def test_a_run_folder_holds_everything(data, by_task, tmp_path):
    lines = []
    result = train(by_task, data, tmp_path / "run", progress=lines.append)
    assert load_config(tmp_path / "run" / "config.yaml") == by_task
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert history == lines == result.history
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert split["train"] and split["test"]
    loaded = Predictor.load(tmp_path / "run")
    assert loaded.training["valid_mape"] == min(line["valid_mape"] for line in lines)
    assert loaded.training["records_by_device"].keys() == {"fast", "slow"}
    assert evaluate(loaded, data, result.split)["overall"] == evaluate(result.predictor, data)["overall"]


def test_a_run_is_not_overwritten_but_resumed(data, by_task, tmp_path, monkeypatch):
    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr("cdmpp.predictor.training.write_text", lambda *_: sys.exit())
        train(by_task, data, tmp_path)
    assert len(train(by_task, data, tmp_path, resume=True).history) == by_task.train.epochs
    (tmp_path / "several" / "member1").mkdir(parents=True)  # of several networks, this one is trained first
    for out in (tmp_path, tmp_path / "several"):
        with pytest.raises(PredictorError, match="holds a training run"):
            train(by_task, data, out)
    # resuming a finished run gives it back
    assert len(train(by_task, data, tmp_path, resume=True).history) == by_task.train.epochs


def test_resuming_another_configuration_or_other_data_is_refused(data, by_task, tmp_path):
    train(by_task, data, tmp_path)
    with pytest.raises(PredictorError, match="another configuration"):
        train(changed(by_task, loss={"mape_weight": 0.9}), data, tmp_path, resume=True)
    labels = data.labels.assign(latency_s=data.labels["latency_s"] * 1.001)
    with pytest.raises(PredictorError, match="other records"):
        train(by_task, replace(data, labels=labels), tmp_path, resume=True)


SCRIPT = """
import sys
from tests.samples.training import make_data
from cdmpp.predictor import load_config, train
train(load_config(sys.argv[1]), make_data(8, 15), sys.argv[2], resume=True)
"""


def test_a_killed_run_resumes_to_the_same_predictor(by_task, tmp_path):
    epochs = 10
    config = changed(by_task, train={"epochs": epochs, "patience": epochs})
    data, run = make_data(8, 15), tmp_path / "killed"
    expected = train(config, data, tmp_path / "unbroken")
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, f"{tmp_path}/unbroken/config.yaml", str(run)], cwd=ROOT)
    history = run / "history.jsonl"
    deadline = time.monotonic() + 60
    while not history.exists() or history.read_text().count("\n") < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (run / "predictor").exists(), "it finished before it was killed"
    resumed = train(config, data, run, resume=True)
    weights, reference = resumed.predictor.network.state_dict(), expected.predictor.network.state_dict()
    assert all((weights[name] == reference[name]).all() for name in reference)
    assert [line["epoch"] for line in resumed.history] == list(range(1, epochs + 1))
    assert history.read_text().count("\n") == epochs


def test_nothing_is_fitted_on_validation_or_test(data, by_task):
    """Wild values outside the training part change neither encoder nor label transform."""
    split = split_data("by_task:seed=0", data)
    fitted = prepare(by_task, data, split)
    outside = np.concatenate([split.valid, split.test])
    latency_s = data.labels["latency_s"].to_numpy().copy()
    latency_s[outside] *= 1e3
    programs = set(data.labels["program"].iloc[outside])
    asts = {p: replace(ast, leaves=ast.leaves * 99) if p in programs else ast for p, ast in data.asts.items()}
    wild = replace(data, labels=data.labels.assign(latency_s=latency_s), asts=asts)
    again = prepare(by_task, wild, split)
    assert again.transform == fitted.transform
    for name, array in fitted.encoder.to_arrays().items():
        assert (again.encoder.to_arrays()[name] == array).all()


def test_a_device_only_in_test_is_not_fitted_on(data, by_task):
    fitted = prepare(by_task, data, split_data("by_device:heldout=fast;seed=0", data))
    assert fitted.specs.keys() == {"slow"}
    # one training device: every device column is constant, so encoded as 0
    encoded = fitted.encoder.encode_devices(device_features(data.devices["fast"])[None])
    assert not encoded[:, : fitted.encoder.device_dim // 2].any()


def test_evaluate_reports_groups_and_trained_tasks(data, by_task, tmp_path):
    result = train(by_task, data, tmp_path)
    scores = evaluate(result.predictor, data, by=("device", "network", "task", "family"))
    assert scores["n_trained_tasks"] == 0
    assert scores["split"] == result.split.spec and scores["seed"] == 0
    assert scores["groups"]["device"].keys() == {"fast", "slow"}
    assert sum(g["n"] for g in scores["groups"]["task"].values()) == scores["overall"]["n"] == len(result.split.test)
    assert scores["groups"]["family"].keys() <= {"cnn", "transformer", "mlp"}
    json.dumps(scores, allow_nan=False)
    everything = evaluate(result.predictor, data, "all")
    assert everything["overall"]["n"] == len(data) and everything["n_trained_tasks"] > 0
    assert evaluate(result.predictor, data, "by_task")["overall"] == scores["overall"]
    for asked, said in (({"by": ("colour",)}, "cannot group by 'colour'"), ({"part": "dev"}, "unknown part")):
        with pytest.raises(PredictorError, match=said):
            evaluate(result.predictor, data, **asked)


def test_no_data_is_said(config, tmp_path):
    with pytest.raises(PredictorError, match="no data"):
        train(config, None, tmp_path)


def test_train_py_reports_bad_input_in_one_line(tmp_path):
    command = [sys.executable, "train.py", "--config", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_labels_relative_to_the_estimate(data, by_task, tmp_path, monkeypatch):
    config = changed(by_task, label={"transform": "log", "relative": True})
    result = train(config, data, tmp_path / "run")
    assert result.predictor.transform.relative
    loaded = Predictor.load(tmp_path / "run" / "predictor")
    program, device = next(iter(data.asts.values())), data.devices["slow"]
    assert loaded.predict(program, device) == pytest.approx(result.predictor.predict(program, device))
    assert evaluate(result.predictor, data)["overall"]["mape"] > 0
    before, original = loaded.predict(program, device), pair_features.references_s
    monkeypatch.setattr(pair_features, "references_s", lambda *pairs: 10 * original(*pairs))
    assert loaded.predict(program, device) == pytest.approx(10 * before)
