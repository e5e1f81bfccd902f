"""The weights that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import cdmpp
from cdmpp.device import get_device
from cdmpp.device.table import ROOT_VARIABLE
from cdmpp.errors import DatasetError, PredictorError
from cdmpp.predictor import Predictor, TrainingData, evaluate, gather
from cdmpp.predictor.config import DataConfig
from cdmpp.predictor.data import subset
from tests.machines import FIVE, MACHINES, write_machine
from tests.samples.programs import matmul_task

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def default() -> Predictor:
    return Predictor.default()


@pytest.fixture(scope="module")
def x86_64_v2() -> TrainingData:
    folders = [DATA / f"xeon-cascadelake-1core{suffix}" for suffix in ("", "-x86-64-v2")]
    return gather(folders, DataConfig(devices=("xeon-cascadelake-2.5ghz.x86-64-v2@1",)))


def test_they_are_small_and_have_a_model_card() -> None:
    folder = Path(cdmpp.__file__).parent / "predictor" / "weights" / "default"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    assert Predictor.default().training["split"] in (folder / "README.md").read_text(encoding="utf-8")


def test_they_predict_networks_never_seen(default: Predictor, x86_64_v2: TrainingData) -> None:
    """On real records of held-out networks: far better than guessing, and intervals that mostly hold."""
    scores = evaluate(default, x86_64_v2, by=())
    overall = scores["overall"]
    assert scores["n_trained_tasks"] == 0
    assert overall["n"] > 300
    assert overall["pairwise_accuracy"] > 0.75
    assert overall["median_ape"] < 0.4
    assert overall["interval"]["covered"] > 0.8


def test_a_gpu_is_known_by_its_other_names(default: Predictor, x86_64_v2: TrainingData) -> None:
    asts = [x86_64_v2.asts[program] for program in x86_64_v2.labels["program"].iloc[:3]]
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


FOLDER = Path(__file__).parents[2] / "data" / "epyc-zen4-1core-unscheduled"
ZEN4 = "epyc-zen4-2.6ghz@1"


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return gather(FOLDER)


def test_a_whole_cpu_is_predicted_like_those_of_its_cores_that_were_measured(default: Predictor, data: TrainingData) -> None:
    """An EPYC 9654 has the cores of the virtual Zen 4 in training; its other facts were not learned from any CPU."""
    asts = [data.asts[program] for program in data.labels["program"].iloc[::9]]
    part, whole = (default.predict(asts, name) for name in (ZEN4, "epyc-9654@1"))
    assert np.abs(np.log(whole / part)).mean() < 0.1
    measured = replace(default.specs[ZEN4], bandwidth_gb_s=12.0, launch_overhead_us=0.1)
    assert default.predict(asts, measured) == pytest.approx(part)


@pytest.fixture(scope="module")
def scores(default: Predictor, data: TrainingData) -> dict[str, Any]:
    return evaluate(default, data, "all", by=("device",), compiled=True)


@pytest.mark.parametrize("machine", FIVE)
def test_figures_are_those_of_the_model_card_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: Predictor, scores: dict[str, Any], machine: str
) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(write_machine(tmp_path, MACHINES[machine])))
    here = gather(FOLDER)
    assert here.devices[ZEN4].target["mcpu"] == "znver4"
    assert here.count_coverage(here.labels.index.to_numpy()) == {ZEN4: (len(here), len(here))}
    assert evaluate(default, here, "all", by=("device",), compiled=True) == scores


def test_counts_of_another_target_are_no_counts(default: Predictor, data: TrainingData) -> None:
    zen4 = data.devices[ZEN4]
    elsewhere = replace(zen4, target={**zen4.target, "mcpu": "znver5"})
    with pytest.raises(PredictorError, match=rf"no scored program of {ZEN4} has instruction counts for its"):
        # the predictor's own Zen 4 is another device now; one without its specification does not mind
        evaluate(replace(default, specs={}), replace(data, devices={ZEN4: elsewhere}), "all", compiled=True)


def test_counts_of_some_programs_are_stated(
    default: Predictor, data: TrainingData, scores: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert scores["n_compiled"] == scores["groups"]["device"][ZEN4]["n_compiled"] == len(data)
    some = dict(list(data.codegen.items())[: len(data.codegen) // 2])
    found = evaluate(default, replace(data, codegen=some), "all", by=("device",), compiled=True)
    n = found["groups"]["device"][ZEN4]["n_compiled"]
    assert 0 < n < len(data) and f"{n} of {len(data)} records of {ZEN4}" in caplog.text


def test_a_device_that_is_not_the_one_of_training_is_refused(default: Predictor, data: TrainingData) -> None:
    other = replace(data.devices[ZEN4], arch="zen3")
    with pytest.raises(DatasetError, match="training and in the data: arch zen4 / zen3"):
        evaluate(default, replace(data, devices={ZEN4: other}), "all")
    with pytest.raises(PredictorError, match=rf"{ZEN4} is not the device .*: arch zen4 / zen3"):
        default.predict(next(iter(data.asts.values())), other)
    assert default.device(ZEN4) == default.specs[ZEN4]
    assert default.device("rtx-4090") == get_device("rtx-4090")


def test_a_dataset_of_this_project_describes_its_devices() -> None:
    for meta in sorted(FOLDER.parent.glob("*/meta.json")):
        described = set(json.loads(meta.read_text())["devices"])
        assert described == set(pd.read_parquet(meta.with_name("records.parquet"), columns=["device"])["device"])
