"""``cdmpp demo``: it scores other tasks than it learns from, and says what it did; on a network of a few layers."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch import nn

from cdmpp.cli import _parser, demo
from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.predictor import Predictor
from cdmpp.program.network import Network, extract_tasks
from cdmpp.program.zoo import zoo_networks
from tests.samples.command import Command

pytestmark = pytest.mark.usefixtures("real_machine")
MODELS = [
    "cdmpp as it ships", "cdmpp as it ships, compiled", "cdmpp after learning", "cdmpp after learning, compiled",
    "XGBoost on TVM's features", "XGBoost on ours, compiled",
]  # fmt: skip


def tiny() -> Network:
    layer = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(45, 7), nn.Softmax(1))
    return Network.from_torch(layer.eval(), (torch.zeros(1, 3, 8, 8),), "tiny-demo")


class Demo:
    """A demo that was run in ``folder``: its result, what it printed, and what the two learners were given."""

    def __init__(self, folder: Path, data: Sequence[Path]) -> None:
        text, self.calls = io.StringIO(), {}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("finetune", "evaluate_models"):
                patch.setattr(demo, name, self._recording(name))
            patch.chdir(folder)
            consoles = Console(file=text, width=140), Console(file=io.StringIO())
            self.result = demo.run_demo(*consoles, list(map(str, data)), network=tiny(), programs_per_task=2)
        self.text, self.out = text.getvalue(), folder / "runs" / "demo"
        self.records = Dataset.open(self.out / "measured").records

    def _recording(self, name: str) -> Any:
        function = getattr(demo, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] = (args, options)
            return function(*args, **options)

        return call


@pytest.fixture(scope="module")
def first(real_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Told that data which ship have one of the network's tasks."""
    folder = tmp_path_factory.mktemp("demo")
    with Dataset.open_or_create(folder / "data") as dataset:
        dataset.add_task(extract_tasks([tiny()])[0])
    return Demo(folder, [folder / "data", Path("data/xeon-cascadelake-2cores").resolve()])


def test_both_learn_from_the_same_records_and_are_scored_on_other_tasks(first: Demo) -> None:
    learned, scored = (set(first.result[f"{part}_tasks"]) for part in ("learned", "scored"))
    assert learned and scored and not learned & scored
    assert learned | scored == set(first.records["task"])
    assert set(first.calls["finetune"][1]["tasks"]) == learned
    _, data, split = first.calls["evaluate_models"][0]
    assert set(data.labels["task"].iloc[split.train]) == learned
    assert set(data.labels["task"].iloc[split.test]) == scored
    assert first.result["known_tasks"] == {"data": 1, "weights": 0}
    assert "Of these tasks, 1 are among" in first.text


def test_every_model_is_scored_on_every_scored_program_and_shown(first: Demo) -> None:
    n = int(first.records["task"].isin(first.result["scored_tasks"]).sum())
    assert list(first.result["models"]) == MODELS
    lines = first.text.splitlines()
    for name, score in first.result["models"].items():
        overall = score["overall"]
        (row,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert f"{100 * overall['mape']:.1f} %" in row and f" {n} " in row and overall["n"] == n > 2
    assert f"MAPE of {100 * overall['noise_floor_mape']:.1f} %" in first.text and f"slowed 0 of the {n}" in first.text
    report = (first.out / "report.html").read_text()
    assert f"{100 * first.result['models']['cdmpp after learning']['overall']['mape']:.1f} %" in report


def test_it_fits_a_screen_and_ends_with_commands_that_exist(first: Demo) -> None:
    lines = first.text.rstrip().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert "report.html" in first.text and lines[-1].split()[:2] == ["make", "train"]
    for line in lines[-3:-1]:
        command = shlex.split(line.strip().split("  ")[0])
        assert command[0] == "cdmpp" and _parser().parse_args(command[1:])


def test_a_program_and_the_network_are_shown_beside_what_they_took(first: Demo) -> None:
    (program, network) = first.result["examples"].values()
    for predicted_s, low_s, high_s, measured_s in (program, network):
        assert 0 < low_s < predicted_s < high_s and measured_s > 0
    scored = first.records[first.records["task"].isin(first.result["scored_tasks"])]
    assert program[3] in set(scored["latency_s"])
    as_it_is = first.records[first.records["origin"] == "unscheduled"]
    assert network[3] == pytest.approx(as_it_is["latency_s"].sum())
    json.dumps(first.result, allow_nan=False)


def test_another_run_measures_nothing_twice(first: Demo) -> None:
    measured = demo._measure(Console(file=io.StringIO()), tiny(), get_device("this-cpu@1"), first.out, 2)
    assert len(measured) == len(first.records)
    assert Dataset.open(first.out / "measured").records.equals(first.records)


def test_data_that_are_not_there_are_one_line(tmp_path: Path, command: Command) -> None:
    assert "none" in command.error("demo", "--data", tmp_path / "none", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_ships_has_a_task_of_the_demo() -> None:
    network = demo.demo_network()
    tasks = {task.hash for task in extract_tasks([network])}
    files = list(Path("data").glob("*/tasks.parquet"))
    assert len(tasks) > 15 and len(files) > 5 and network.name not in zoo_networks()
    known = {file: set(pq.read_table(file, columns=["hash"])["hash"].to_pylist()) for file in files}
    assert [str(file) for file, hashes in known.items() if tasks & hashes] == []
    assert not tasks & set(Predictor.default().training["tasks"])
