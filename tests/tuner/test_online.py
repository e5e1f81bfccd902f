"""The model that learns while tuning: from nothing, beside a predictor, without harm, and back from a file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor
from cdmpp.predictor.training import TrainResult
from cdmpp.program.ast import CompactAST
from cdmpp.tuner.learning import OnlineModel
from cdmpp.tuner.prior import AnalyticalPrior, PredictorPrior, make_prior
from tests.samples.training import make_ast, make_device

pytestmark = pytest.mark.usefixtures("on_zen3")


@pytest.fixture(scope="module")
def predictor(trained: TrainResult) -> Predictor:
    return trained.predictor


def programs(n: int, seed: int = 0) -> tuple[list[CompactAST], np.ndarray]:
    """ASTs and latencies on ``slow`` as the synthetic data has them, three times as long."""
    rng = np.random.default_rng(seed)
    asts = [make_ast(rng, 2) for _ in range(n)]
    work = [(a.leaves[:, 0] * np.where(a.leaves[:, 10] > 0, 1.0, 4.0)).sum() for a in asts]
    return asts, 3e-6 * np.asarray(work)


def error(model: OnlineModel, task: str, asts: list[CompactAST], label_s: np.ndarray) -> float:
    predicted = model.predict(task, model.prior.encode(asts))
    return float(np.mean(np.abs(np.log(predicted / label_s))))


def taught(model: OnlineModel, task: str, asts: list[CompactAST], label_s: np.ndarray) -> OnlineModel:
    model.learn(task, [f"p{i}" for i in range(len(asts))], model.prior.encode(asts), label_s)
    model.fit()
    return model


def test_before_measurements_it_says_what_the_predictor_says(predictor: Predictor) -> None:
    asts, _ = programs(9)
    model = OnlineModel(PredictorPrior(predictor, make_device("slow", 1000.0)))
    predicted = model.predict("t", model.prior.encode(asts))
    assert predicted == pytest.approx(predictor.predict(asts, "slow"), rel=1e-5)
    model.fit()
    assert len(model) == 0


def test_measurements_make_it_better(predictor: Predictor) -> None:
    asts, label_s = programs(60)
    model = OnlineModel(PredictorPrior(predictor, make_device("slow", 1000.0)))
    before = error(model, "t", asts[32:], label_s[32:])
    taught(model, "t", asts[:32], label_s[:32])
    assert error(model, "t", asts[32:], label_s[32:]) < 0.6 * before
    assert error(model, "never seen", asts[32:], label_s[32:]) <= before + 1e-9, "other tasks do not suffer"


def test_without_a_predictor_it_works_from_nothing_and_gets_better() -> None:
    asts, label_s = programs(80)
    model = OnlineModel(make_prior(None, get_device("this-cpu@1")))
    before = error(model, "t", asts[40:], label_s[40:])
    assert np.isfinite(before)
    low, high = model.interval("t", model.prior.encode(asts), 0.9)
    assert (low == 0).all() and np.isinf(high).all(), "nothing tells how far off it is"
    taught(model, "t", asts[:40], label_s[:40])
    assert error(model, "t", asts[40:], label_s[40:]) < 0.5 * before
    low, high = model.interval("t", model.prior.encode(asts[40:]), 0.9)
    assert np.mean((low <= label_s[40:]) & (label_s[40:] <= high)) > 0.7
    assert (high / low).max() < 1e4


def test_intervals_are_the_predictors_until_there_are_enough_records(predictor: Predictor) -> None:
    asts, label_s = programs(40)
    model = OnlineModel(PredictorPrior(predictor, make_device("slow", 1000.0)))
    coverage = 0.5
    low, high = model.interval("t", model.prior.encode(asts), coverage)
    assert predictor.calibration is not None
    width = predictor.calibration.half_width("slow", coverage)
    assert np.log(high / low) == pytest.approx(np.full(40, 2 * width))
    taught(model, "t", asts[:30], label_s[:30])
    low, high = model.interval("t", model.prior.encode(asts[:30]), coverage)
    assert not np.allclose(np.log(high / low), 2 * width)


def test_a_record_measured_again_replaces_the_first(predictor: Predictor) -> None:
    asts, label_s = programs(5)
    model = taught(OnlineModel(AnalyticalPrior(get_device("this-cpu@1"))), "t", asts, label_s)
    taught(model, "t", asts, 2 * label_s)
    assert len(model) == 5


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_latency_is_refused(bad: float) -> None:
    asts, label_s = programs(2)
    model = OnlineModel(AnalyticalPrior(get_device("this-cpu@1")))
    with pytest.raises(PredictorError, match="finite and above 0"):
        model.learn("t", ["a", "b"], model.prior.encode(asts), [label_s[0], bad])


def test_save_and_load_give_the_same_predictions(predictor: Predictor, tmp_path: Path) -> None:
    device = make_device("slow", 1000.0)
    asts, label_s = programs(30)
    model = taught(OnlineModel(PredictorPrior(predictor, device)), "t", asts, label_s)
    model.save(tmp_path / "model")
    again = OnlineModel(PredictorPrior(predictor, device))
    again.load(tmp_path / "model")
    encoded = model.prior.encode(asts)
    assert again.predict("t", encoded) == pytest.approx(model.predict("t", encoded))
    assert again.describe() == model.describe()
    empty = OnlineModel(PredictorPrior(predictor, device))
    empty.save(tmp_path / "empty")
    again.load(tmp_path / "empty")
    assert len(again) == 0


def test_files_of_others_are_refused(predictor: Predictor, tmp_path: Path) -> None:
    asts, label_s = programs(12)
    model = taught(OnlineModel(PredictorPrior(predictor, make_device("slow", 1000.0))), "t", asts, label_s)
    model.save(tmp_path / "model")
    other = OnlineModel(PredictorPrior(predictor, make_device("fast", 4000.0)))
    with pytest.raises(PredictorError, match="another predictor or for another device"):
        other.load(tmp_path / "model")
    (tmp_path / "damaged").write_bytes((tmp_path / "model").read_bytes()[:40])
    with pytest.raises(PredictorError, match="safetensors"):
        model.load(tmp_path / "damaged")
    predictor.save(tmp_path / "predictor")
    with pytest.raises(PredictorError, match="not a complete cost model"):
        model.load(tmp_path / "predictor" / "weights.safetensors")


def test_a_device_never_seen_is_extrapolated_to_with_one_warning(
    predictor: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    asts, label_s = programs(40)
    with caplog.at_level(logging.WARNING):
        model = OnlineModel(PredictorPrior(predictor, make_device("unseen", 2000.0)))
        for _ in range(3):
            model.predict("t", model.prior.encode(asts))
    assert sum("not on unseen" in r.message for r in caplog.records) == 1
    low, high = model.interval("t", model.prior.encode(asts), 0.5)
    assert (low > 0).all() and (high > low).all(), "with the uncertainty of the devices it knows"
    before = error(model, "t", asts[20:], label_s[20:])
    taught(model, "t", asts[:20], label_s[:20])
    assert error(model, "t", asts[20:], label_s[20:]) < before


def test_a_predictor_of_another_kind_of_device_is_refused(predictor: Predictor) -> None:
    gpu = replace(make_device("gpu", 1000.0), kind="gpu")
    with pytest.raises(PredictorError, match=r"never saw a gpu.*finetune"):
        PredictorPrior(predictor, gpu)
