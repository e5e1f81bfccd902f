"""The weights and data that ship give the same figures on every machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cdmpp import Predictor
from cdmpp.device import get_device
from cdmpp.device.detect import ROOT_VARIABLE
from cdmpp.errors import DatasetError, PredictorError
from cdmpp.predictor import evaluate, gather
from cdmpp.predictor.data import TrainingData
from tests.machines import FIVE, MACHINES, write_machine

FOLDER = Path(__file__).parents[2] / "data" / "epyc-zen4-1core-unscheduled"
ZEN4 = "epyc-zen4-2.6ghz@1"


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.default()


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return gather(FOLDER)


@pytest.fixture(scope="module")
def scores(predictor: Predictor, data: TrainingData) -> dict[str, Any]:
    return evaluate(predictor, data, "all", by=("device",), compiled=True)


@pytest.mark.parametrize("machine", FIVE)
def test_figures_are_those_of_the_model_card_on_any_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    predictor: Predictor,
    scores: dict[str, Any],
    machine: str,
) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(write_machine(tmp_path, MACHINES[machine])))
    here = gather(FOLDER)
    assert here.devices[ZEN4].target["mcpu"] == "znver4"
    assert here.count_coverage(here.labels.index.to_numpy()) == {ZEN4: (len(here), len(here))}
    assert evaluate(predictor, here, "all", by=("device",), compiled=True) == scores


def test_every_group_says_how_many_counts_it_had(data: TrainingData, scores: dict[str, Any]) -> None:
    assert scores["n_compiled"] == scores["groups"]["device"][ZEN4]["n_compiled"] == len(data)


def test_counts_of_another_target_are_no_counts(predictor: Predictor, data: TrainingData) -> None:
    zen4 = data.devices[ZEN4]
    elsewhere = replace(zen4, target={**zen4.target, "mcpu": "znver5"})
    with pytest.raises(PredictorError, match=rf"no scored program of {ZEN4} has instruction counts for its"):
        # the predictor's own Zen 4 is another device now; one without its specification does not mind
        evaluate(replace(predictor, specs={}), replace(data, devices={ZEN4: elsewhere}), "all", compiled=True)


def test_counts_of_some_programs_are_stated(
    predictor: Predictor, data: TrainingData, caplog: pytest.LogCaptureFixture
) -> None:
    some = dict(list(data.codegen.items())[: len(data.codegen) // 2])
    found = evaluate(predictor, replace(data, codegen=some), "all", by=("device",), compiled=True)
    n = found["groups"]["device"][ZEN4]["n_compiled"]
    assert 0 < n < len(data) and f"{n} of {len(data)} records of {ZEN4}" in caplog.text


def test_a_device_that_is_not_the_one_of_training_is_refused(
    predictor: Predictor, data: TrainingData
) -> None:
    other = replace(data.devices[ZEN4], arch="zen3")
    with pytest.raises(DatasetError, match="training and in the data: arch zen4 / zen3"):
        evaluate(predictor, replace(data, devices={ZEN4: other}), "all")
    with pytest.raises(PredictorError, match=rf"{ZEN4} is not the device .*: arch zen4 / zen3"):
        predictor.predict(next(iter(data.asts.values())), other)
    assert predictor.device(ZEN4) == predictor.specs[ZEN4]
    assert predictor.device("rtx-4090") == get_device("rtx-4090")


def test_a_dataset_of_this_project_describes_its_devices() -> None:
    for meta in sorted(FOLDER.parent.glob("*/meta.json")):
        described = set(json.loads(meta.read_text())["devices"])
        assert described == set(
            pd.read_parquet(meta.with_name("records.parquet"), columns=["device"])["device"]
        )
