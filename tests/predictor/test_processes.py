"""torchrun: several processes train as one does, and one goes on with what several began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from cdmpp.cli import main
from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor, load_config, split_data, train, trainer
from cdmpp.predictor.processes import pick_device, torchrun_processes
from cdmpp.predictor.training import prepare
from tests.golden.golden import FOLDER, SMALL
from tests.samples.gradients import ROWS, gradients
from tests.samples.training import changed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes of torchrun wrote."""
    out = tmp_path_factory.mktemp("torchrun")
    config = yaml.safe_load(SMALL.read_text())
    config["model"]["dropout"] = 0.0  # each process draws its own
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.samples.gradients"]
    verb = ["train", "--config", out / "config.yaml", "--data", FOLDER, "--out", out / "run", "--json", out / "scores"]
    command = [sys.executable, *torchrun, out, *verb]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out part") == 1, "the first process alone shows the result"
    return out


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_of_two_processes_are_those_of_one(two, rows):
    expected = gradients(rows)
    for rank in (0, 1):
        found = torch.load(two / f"{rows}-{rank}", weights_only=True)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-6, atol=1e-6), name


def test_one_process_ends_what_two_began(two):
    """The weights are those of two that were not interrupted."""
    assert json.loads((two / "cut" / "history.jsonl").read_text())["epoch"] == 1
    resumed = train(load_config(two / "config.yaml"), FOLDER, two / "cut", resume=True)
    assert [line["epoch"] for line in resumed.history] == [1, 2]
    expected = Predictor.load(two / "run").network.state_dict()
    for name, value in resumed.predictor.network.state_dict().items():
        assert torch.allclose(value, expected[name], atol=5e-6), name
    assert json.loads((two / "scores").read_text())["overall"]["n"]


@pytest.fixture()
def torchrun(monkeypatch):
    """The environment of the last of three processes."""
    names = {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "TORCHELASTIC_RUN_ID": "r"}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def test_what_torchrun_cannot_do_is_said(torchrun, monkeypatch, capsys):
    with pytest.raises(PredictorError, match="batch_size is 2: 3 processes need"), torchrun_processes("cpu", 2):
        pass
    assert main(["evaluate", "--predictor", "default", "--data", "d"]) == 2
    said = capsys.readouterr().err
    assert said == "cdmpp: torchrun is for cdmpp train: several processes would do the same evaluate\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PredictorError, match="started 3 processes here, but torch sees 2 CUDA devices"):
        pick_device("cuda")


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(PredictorError, match="no CUDA device"):
        pick_device("cuda")


def test_bf16_is_refused_or_learns_alike(data, config, monkeypatch):
    def losses(precision: str) -> list[float]:
        lines: list[dict[str, float]] = []
        settings = changed(config, train={"precision": precision})
        made = prepare(settings, data, split_data("within_task:seed=1", data)).trainer
        made.fit(progress=lines.append)
        assert all(p.dtype == torch.float32 for p in made.network.parameters())
        return [line["train_loss"] for line in lines]

    monkeypatch.setattr(trainer, "_has_bf16", lambda where: True)
    half, full = losses("bf16"), losses("float32")
    assert half != full and half == pytest.approx(full, rel=0.2)
    monkeypatch.setattr(trainer, "_has_bf16", lambda where: False)
    with pytest.raises(PredictorError, match="bf16, which this cpu has no arithmetic for"):
        losses("bf16")
