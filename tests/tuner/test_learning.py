"""What is learned while tuning: the Gaussian process on residuals, and the model beside a predictor or from nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor
from cdmpp.predictor.training import TrainResult
from cdmpp.program.ast import CompactAST
from cdmpp.tuner.cost_model import AnalyticalPrior, Correction, Kernel, OnlineModel, PredictorPrior, fit_correction
from tests.samples.training import make_ast, make_device

pytestmark = pytest.mark.usefixtures("on_zen3")


@pytest.fixture(scope="module")
def predictor(trained: TrainResult) -> Predictor:
    return trained.predictor


@pytest.fixture
def model(predictor: Predictor) -> OnlineModel:
    return OnlineModel(PredictorPrior(predictor, make_device("slow", 1000.0)))


def programs(n: int, seed: int = 0) -> tuple[list[CompactAST], np.ndarray]:
    """ASTs and latencies on ``slow`` as the synthetic data has them, three times as long."""
    rng = np.random.default_rng(seed)
    asts = [make_ast(rng, 2) for _ in range(n)]
    work = [(a.leaves[:, 0] * np.where(a.leaves[:, 10] > 0, 1.0, 4.0)).sum() for a in asts]
    return asts, 3e-6 * np.asarray(work)


def error(model: OnlineModel, task: str, asts: list[CompactAST], label_s: np.ndarray) -> float:
    return float(np.mean(np.abs(np.log(model.predict(task, model.prior.encode(asts)) / label_s))))


def taught(model: OnlineModel, task: str, asts: list[CompactAST], label_s: np.ndarray) -> OnlineModel:
    model.learn(task, [f"p{i}" for i in range(len(asts))], model.prior.encode(asts), label_s)
    model.fit()
    return model


def test_before_measurements_it_says_what_the_predictor_says(predictor: Predictor, model: OnlineModel) -> None:
    asts, _ = programs(9)
    assert model.predict("t", model.prior.encode(asts)) == pytest.approx(predictor.predict(asts, "slow"), rel=1e-5)
    model.fit()
    assert model.describe()["records"] == 0


def test_measurements_make_it_better(model: OnlineModel) -> None:
    asts, label_s = programs(60)
    before = error(model, "t", asts[32:], label_s[32:])
    taught(model, "t", asts[:32], label_s[:32])
    assert error(model, "t", asts[32:], label_s[32:]) < 0.6 * before
    taught(model, "t", asts[:32], label_s[:32])
    assert model.describe()["records"] == 32, "measured again they replace the first"
    assert error(model, "never seen", asts[32:], label_s[32:]) <= before + 1e-9, "other tasks do not suffer"


def test_without_a_predictor_it_works_from_nothing_and_gets_better() -> None:
    asts, label_s = programs(80)
    model = OnlineModel(AnalyticalPrior(get_device("this-cpu@1")))
    before = error(model, "t", asts[40:], label_s[40:])
    assert np.isfinite(before)
    low, high = model.interval("t", model.prior.encode(asts), 0.9)
    assert (low == 0).all() and np.isinf(high).all(), "nothing tells how far off it is"
    taught(model, "t", asts[:40], label_s[:40])
    assert error(model, "t", asts[40:], label_s[40:]) < 0.5 * before
    low, high = model.interval("t", model.prior.encode(asts[40:]), 0.9)
    assert np.mean((low <= label_s[40:]) & (label_s[40:] <= high)) > 0.7
    assert (high / low).max() < 1e4


def test_intervals_are_the_predictors_until_there_are_enough_records(predictor: Predictor, model: OnlineModel) -> None:
    asts, label_s = programs(40)
    coverage = 0.5
    low, high = model.interval("t", model.prior.encode(asts), coverage)
    assert predictor.calibration is not None
    width = np.abs(predictor.calibration.ends("slow", coverage)).max()
    assert np.log(high / low) == pytest.approx(np.full(40, 2 * width))
    taught(model, "t", asts[:30], label_s[:30])
    low, high = model.interval("t", model.prior.encode(asts[:30]), coverage)
    assert not np.allclose(np.log(high / low), 2 * width)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_latency_is_refused(bad: float) -> None:
    asts, label_s = programs(2)
    model = OnlineModel(AnalyticalPrior(get_device("this-cpu@1")))
    with pytest.raises(PredictorError, match="finite and above 0"):
        model.learn("t", ["a", "b"], model.prior.encode(asts), [label_s[0], bad])


def test_a_device_never_seen_is_extrapolated_to_with_one_warning(predictor: Predictor, caplog) -> None:
    asts, label_s = programs(40)
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


KERNEL = Kernel(noise=0.04, offset=0.5, own=0.3, shared=0.2, common=0.1, length=1.5)


def records(n: int, tasks: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    task = rng.integers(0, tasks, n)
    return z, task, np.sin(z[:, 0]) + 0.5 * task + rng.normal(0, 0.05, n)


def test_one_record_of_known_answer() -> None:
    z, task, residual = np.zeros((1, 2)), np.zeros(1, np.int64), np.array([1.0])
    correction = Correction(Kernel(noise=0.25, offset=1.0), z, task, residual)
    mean, deviation = correction.mean(z, 0), correction.deviation(z, 0)
    assert mean == pytest.approx([1 / 1.25]), "prior variance over prior variance plus noise"
    assert deviation == pytest.approx([math.sqrt(1 - 1 / 1.25 + 0.25)])
    mean, deviation = correction.mean(z, 1), correction.deviation(z, 1)
    assert mean == pytest.approx([0.0]), "another task has an offset of its own"
    assert deviation == pytest.approx([math.sqrt(1.25)])


def test_leaving_one_out_is_what_fitting_the_others_gives() -> None:
    z, task, residual = records(12)
    left_out = Correction(KERNEL, z, task, residual)
    for i in range(12):
        others = np.arange(12) != i
        fitted = Correction(KERNEL, z[others], task[others], residual[others])
        one = z[i : i + 1], int(task[i])
        assert left_out.error[i] == pytest.approx(residual[i] - fitted.mean(*one)[0])
        assert left_out.error_deviation[i] == pytest.approx(fitted.deviation(*one)[0])


def test_nothing_is_corrected_where_that_does_no_good() -> None:
    rng = np.random.default_rng(1)
    n = 40
    # errors without offset or shape: every correction of a program by the others makes it worse
    residual = np.tile([0.3, -0.3], n // 2)
    z = np.repeat(rng.normal(size=(n // 2, 3)), 2, axis=0)
    correction = fit_correction(z, np.arange(n) // 2, residual)
    assert correction.kernel.variance == 0, "rolled back"
    assert correction.mean(z, 0) == pytest.approx(np.zeros(n))


def test_tasks_learn_from_each_other_only_where_it_helps() -> None:
    rng = np.random.default_rng(2)
    z, task = rng.normal(size=(60, 3)), np.arange(60) % 4
    together = np.full(60, 1.0) + rng.normal(0, 0.05, 60)
    kernel = fit_correction(z, task, together, common=1.0).kernel
    assert kernel.shared > 0 and kernel.common > 0
    opposite = np.where(task % 2 == 0, 1.0, -1.0) + rng.normal(0, 0.05, 60)
    assert fit_correction(z, task, opposite).kernel.shared == 0


def test_intervals_hold_what_they_promise() -> None:
    z, task, residual = records(400, tasks=3, seed=5)
    correction = fit_correction(z[:200], task[:200], residual[:200])
    width = correction.width(0.9)
    assert width is not None
    covered = []
    for number in range(3):
        rows = np.flatnonzero(task[200:] == number) + 200
        mean, deviation = correction.mean(z[rows], number), correction.deviation(z[rows], number)
        covered += list(np.abs(residual[rows] - mean) <= width * deviation)
    assert 0.8 < np.mean(covered) < 0.98


def test_too_few_records_for_an_interval() -> None:
    z, task, residual = records(8)
    correction = Correction(KERNEL, z, task, residual)
    assert correction.width(0.9) is None, "nine are needed"
    assert correction.width(0.5) is not None
    same = 3.0 + 1e-7 * np.random.default_rng(0).normal(
        size=(40, 128)
    )  # one program, embedded again and again with the accuracy of float32
    assert fit_correction(same, np.arange(40) % 2, 8.0 * (np.arange(40) % 2), common=0.25).mean_square > 0
    empty = fit_correction(z[:0], task[:0], residual[:0])
    assert len(empty) == 0 and empty.width(0.5) is None
    assert empty.mean(z, 0) == pytest.approx(np.zeros(8))
