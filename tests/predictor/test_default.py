"""The weights that ship."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cdmpp
from cdmpp.predictor import Predictor, TrainingData, evaluate, gather
from cdmpp.predictor.config import DataConfig
from cdmpp.predictor.data import subset
from tests.samples.programs import matmul_task

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def default() -> Predictor:
    return Predictor.default()


@pytest.fixture(scope="module")
def data() -> TrainingData:
    folders = [DATA / f"xeon-cascadelake-1core{suffix}" for suffix in ("", "-x86-64-v2")]
    return gather(folders, DataConfig(devices=("xeon-cascadelake-2.5ghz.x86-64-v2@1",)))


def test_they_are_small_and_have_a_model_card() -> None:
    folder = Path(cdmpp.__file__).parent / "predictor" / "weights" / "default"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert Predictor.default().training["split"] in card


def test_they_predict_networks_never_seen(default: Predictor, data: TrainingData) -> None:
    """On real records of held-out networks: far better than guessing, and intervals that mostly hold."""
    scores = evaluate(default, data, by=())
    overall = scores["overall"]
    assert scores["n_trained_tasks"] == 0
    assert overall["n"] > 300
    assert overall["pairwise_accuracy"] > 0.75
    assert overall["median_ape"] < 0.4
    assert overall["interval"]["covered"] > 0.8


def test_intervals_and_familiarity_come_with_them(default: Predictor, data: TrainingData) -> None:
    asts = [data.asts[program] for program in data.labels["program"].iloc[:20]]
    device = str(data.labels["device"].iloc[0])
    low, high = default.predict_interval(asts, device)
    seconds = default.predict(asts, device)
    assert (low < seconds).all() and (seconds < high).all()
    assert default.unfamiliar(asts, device).dtype == np.bool_


def test_a_gpu_is_known_by_its_other_names(default: Predictor, data: TrainingData) -> None:
    asts = [data.asts[program] for program in data.labels["program"].iloc[:3]]
    assert default.predict(asts, "Tesla T4") == pytest.approx(default.predict(asts, "t4"))


def test_told_the_instructions_they_are_nearer(default: Predictor) -> None:
    """On real records of networks never seen, and on a program that is compiled here."""
    data = gather([DATA / "xeon-cascadelake-1core"])
    data = subset(data, np.arange(0, len(data), 5))
    plain = evaluate(default, data, by=())["overall"]
    told = evaluate(default, data, by=(), compiled=True)
    assert told["n_trained_tasks"] == 0 and told["n_compiled"] > 0.9 * told["overall"]["n"]
    assert told["overall"]["mape"] < 0.85 * plain["mape"]
    assert told["overall"]["pairwise_accuracy"] > plain["pairwise_accuracy"] + 0.03


def test_a_program_is_compiled_for_its_prediction() -> None:
    func, device = matmul_task(64).prim_func(), "xeon-cascadelake-2.5ghz@1"
    plain, told = cdmpp.predict(func, device), cdmpp.predict(func, device, compiled=True)
    assert 0 < told != plain
    low, high = Predictor.default().predict_interval(func, device, compiled=True)
    assert low < told < high
