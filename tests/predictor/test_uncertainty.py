"""Conformal intervals and the flag for unfamiliar programs: known answers, coverage, persistence, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.device import get_device
from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor, evaluate, split_data, train
from cdmpp.predictor.training import calibrated

from cdmpp.predictor.uncertainty import (  # isort: skip
    ALL_DEVICES, FAMILIAR_QUANTILE, MAX_STEPS, MIN_UNITS, UNSEEN, Calibration, ScoreDistribution, interval_metrics,
)  # fmt: skip
from tests.samples.training import change_state, make_ast, make_data, make_device, small_config


@pytest.mark.parametrize(("n", "coverage", "rank"), [(9, 0.9, 9), (19, 0.9, 18), (99, 0.9, 90), (99, 0.95, 95), (10, 0.5, 6)])
def test_quantile_known_answer(n, coverage, rank):
    """The ceil((n + 1) (1 - alpha))-th smallest of n scores."""
    assert rank == math.ceil(round((n + 1) * coverage, 9))
    scores = np.random.default_rng(n).permutation(np.arange(1, n + 1)) / 10
    assert ScoreDistribution.fit(scores, range(n)).quantile(coverage) == rank / 10
    assert ScoreDistribution.fit(np.ones(8), range(8)).quantile(0.9) == math.inf, "too few units"


def test_every_task_weighs_the_same():
    # Three tasks of 1, 2 and 100 records. (3 + 1) * 0.5 = 2 units are needed: "c" gives 1, "b" 1/2 with its smaller
    # score, "a" and "b"'s larger one come next.
    scores = [0.7, 0.2, 0.9, *np.linspace(0.01, 0.1, 100)]
    by_task = ScoreDistribution.fit(scores, ["a", "b", "b", *["c"] * 100])
    assert by_task.units == 3
    assert by_task.quantile(0.5) == 0.7  # 1 + 1/2 + 1 >= 2, without "a" only 1.5
    assert by_task.quantile(0.375) == 0.2  # 1.5 of 1.5
    assert ScoreDistribution.fit(scores, range(103)).quantile(0.5) < 0.1, "records would let 'c' decide"


@given(st.integers(0, 2**31), st.sampled_from([0.5, 0.8, 0.9]), st.sampled_from([1.0, 0.2]))
def test_new_tasks_are_covered(seed, coverage, within):
    """Tasks of 1 to 20 records that share a task's error: a record of a new task is covered often enough."""
    rng = np.random.default_rng(seed)
    trials, covered = 100, 0
    for _ in range(trials):
        tasks = np.repeat(np.arange(30), rng.integers(1, 21, 30))
        shared = rng.normal(0, 1, 31)
        errors = shared[tasks] + within * rng.normal(0, 1, len(tasks))
        q = ScoreDistribution.fit(np.abs(errors), tasks).quantile(coverage)
        covered += abs(shared[30] + within * rng.normal()) <= q
    # four and a half standard errors, so that 10 examples fail once in 30,000 runs
    assert covered / trials >= coverage - 4.5 * math.sqrt(coverage * (1 - coverage) / trials)


def test_many_records_are_kept_in_few_steps_that_are_no_narrower():
    rng = np.random.default_rng(1)
    scores, tasks = rng.random(20_000), rng.integers(0, 100, 20_000)
    few = ScoreDistribution.fit(scores, tasks)
    assert len(few.scores) == MAX_STEPS and few.mass[-1] == pytest.approx(few.units)
    weights = 1 / np.bincount(tasks)[tasks]
    order = np.argsort(scores)
    for coverage in (0.5, 0.9, 0.95):
        needed = coverage * 101
        exact = scores[order][np.searchsorted(np.cumsum(weights[order]), needed)]
        assert exact <= few.quantile(coverage) <= exact + 0.002


def test_devices_have_their_own_scores_where_there_are_enough():
    n, both = MIN_UNITS, np.array([-1.0, 1.0])
    predicted = np.ones(2 * n + 1)
    label = np.concatenate([np.tile([1.1, 1 / 1.1], n // 2), np.tile([2.0, 0.5], n // 2), [1.5]])
    device = ["near"] * n + ["far"] * n + ["rare"]
    calibration = Calibration.fit(label, predicted, [f"t{i}" for i in range(2 * n + 1)], device)
    assert calibration.devices.keys() == {"near", "far"}
    assert calibration.ends("near", 0.9) == pytest.approx(math.log(1.1) * both)
    assert calibration.ends("far", 0.9) == pytest.approx(math.log(2.0) * both)
    for name in ("rare", "never seen"):
        assert calibration.basis(name, 0.9) == ALL_DEVICES
        assert calibration.ends(name, 0.9) == pytest.approx(calibration.pooled.quantile(0.9) * both)
    cpu, gpu = get_device("epyc-zen4-2.6ghz@1"), get_device("h200")
    of_gpu = calibration.for_device(gpu, {"near": cpu, "far": gpu})
    assert of_gpu.ends("never seen", 0.9)[1] == pytest.approx(math.log(2.0)), "what CPUs have is left out"
    unseen = calibration.for_device(get_device("epyc-7763@1"), {"near": cpu, "far": gpu})
    assert unseen.ends("never seen", 0.9)[1] == pytest.approx(UNSEEN * math.log(1.1)), "a Zen 3 is no Zen 4"
    assert unseen.ends("near", 0.9).tolist() == calibration.ends("near", 0.9).tolist()
    # 0.98 is more than 30 tasks of one device give, and less than 61 of all do
    assert calibration.basis("near", 0.9) == "near" and calibration.basis("near", 0.98) == ALL_DEVICES


def test_difficult_predictions_have_wider_intervals():
    """Errors that grow with the first of three inputs, far ones above more often: thirds and ends are covered alike."""
    rng = np.random.default_rng(0)
    n, tasks = 4000, [f"t{i % 400}" for i in range(4000)]
    inputs, scale = rng.normal(size=(n, 3)), 0.1
    measured = np.exp(scale * np.exp(0.6 * inputs[:, 0]) * (rng.gamma(4, size=n) - 4))
    calibration = Calibration.fit(measured[:2000], np.ones(2000), tasks[:2000], ["d"] * 2000, inputs=inputs[:2000])
    assert calibration.difficulty is not None
    difficulty = calibration.difficulty.of(inputs[2000:])
    low, high = calibration.ends("d", 0.9)[:, None] * difficulty
    below, above = np.log(measured[2000:]) < low, np.log(measured[2000:]) > high
    thirds = np.array_split(np.argsort(inputs[2000:, 0]), 3)
    again = Calibration.from_arrays(calibration.to_json(), calibration.to_arrays())
    assert np.array_equal(again.difficulty.of(inputs[2000:]), difficulty) and again.middle == calibration.middle
    plain = Calibration.fit(measured[:2000], np.ones(2000), tasks[:2000], ["d"] * 2000)
    wide = np.abs(np.log(measured[2000:]) - plain.middle) <= plain.ends("d", 0.9)[1] - plain.middle
    assert 0.87 < 1 - below.mean() - above.mean() < 0.93 and -low[0] < 0.8 * high[0]
    assert all(0.03 < side.mean() < 0.07 for side in (below, above))
    covered, by_one_width = ([hits[third].mean() for third in thirds] for hits in (~(below | above), wide))
    assert np.ptp(covered) < 0.7 * np.ptp(by_one_width)


def test_interval_metrics_known_answer():
    calibration = Calibration.fit([2.0, 0.5] * 4 + [2.0], np.ones(9), [f"t{i}" for i in range(9)], ["d"] * 9)
    # high / low is 2 * 2; of task a 1 of 2 is inside, of task b 2 of 2
    scored = interval_metrics(lambda _: calibration, [1.9, 2.1, 0.6, 1.0], np.ones(4), ["a", "a", "b", "b"], ["d"] * 4)
    assert scored is not None and scored["pooled_devices"] == ["d"]
    assert (scored["coverage"], scored["covered"], scored["covered_by_task"]) == (0.9, 0.75, 0.75)
    assert scored["width"] == pytest.approx(4.0) and scored["below"] == 0
    assert scored["factor"] == pytest.approx(np.quantile(np.log([1.9, 2.1, 1 / 0.6, 1.0]), 0.9) / math.log(2))
    assert interval_metrics(lambda _: calibration, [1.9], [1.0], ["a"], ["d"], 0.95) is None, "nine tasks do not do"
    assert interval_metrics(lambda _: None, [1.9], [1.0], ["a"], ["d"]) is None


def test_calibration_errors():
    with pytest.raises(PredictorError, match="no records"):
        Calibration.fit([], [], [], [])
    with pytest.raises(PredictorError, match="network"):
        Calibration.fit([1.0], [1.0], ["t"], ["d"], unit="network")
    few = Calibration.fit([1.0, 2.0], [1.0, 1.0], ["t", "u"], ["d", "d"])
    with pytest.raises(PredictorError, match="needs 9 calibration tasks, this predictor was calibrated on 2"):
        few.ends("d", 0.9)
    with pytest.raises(PredictorError, match="ascending"):
        ScoreDistribution(1, np.asarray([2.0, 1.0]), np.asarray([1.0, 1.0]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = small_config("by_task:test=0.3;valid=0.4;seed=0", epochs=2)
    return train(config, make_data(n_tasks=40, per_task=6), tmp_path_factory.mktemp("run"))


@pytest.fixture()
def asts():
    rng = np.random.default_rng(3)
    return [make_ast(rng, n) for n in (1, 3, 2)]


def test_intervals_of_one_and_of_many(run, asts):
    predictor = run.predictor
    low, high = predictor.predict_interval(asts, "slow")
    assert low.shape == high.shape == (3,) and low.dtype == high.dtype == np.float64
    seconds = predictor.predict(asts, "slow")
    assert (low < seconds).all() and (seconds < high).all()
    ratio = np.divide(*predictor.calibration.ends("slow", 0.9))
    assert np.log(low / seconds) / np.log(high / seconds) == pytest.approx(ratio)
    one = predictor.predict_interval(asts[0], "slow", coverage=0.5)
    assert all(isinstance(value, float) for value in one)
    assert one[1] / one[0] < high[0] / low[0], "less coverage, narrower"
    assert predictor.predict_interval([], "slow")[0].shape == (0,)
    unseen = predictor.predict_interval(asts, make_device("unseen", 2000.0))
    assert np.isfinite(unseen).all()


def test_the_validation_part_alone_calibrates(run):
    """Known answer of the whole: quantile over validation tasks of the saved weights' residuals."""
    data, split, predictor = run.data, run.split, run.predictor
    table = data.labels.iloc[split.valid]
    residuals = np.log(table["latency_s"].to_numpy() / predictor.predict_rows(data, split.valid))
    expected = ScoreDistribution.fit(np.abs(residuals - predictor.calibration.middle), table["task"].tolist())
    assert predictor.calibration.unit == "task" and expected.units == table["task"].nunique()
    assert np.ptp(predictor.calibration.ends("unseen", 0.9)) == pytest.approx(2 * expected.quantile(0.9))
    labels = data.labels.copy()
    labels.loc[split.test, "latency_s"] *= 1e3
    again = calibrated(predictor, replace(data, labels=labels), split)
    assert again.calibration.ends("slow", 0.9).tolist() == predictor.calibration.ends("slow", 0.9).tolist()
    assert calibrated(predictor, data, split_data("within_task:seed=0", data)).calibration.unit == "record"


def test_evaluate_reports_coverage(run):
    scores = evaluate(run.predictor, run.data, run.split)
    interval = scores["overall"]["interval"]
    assert interval["coverage"] == 0.9 and 0 <= interval["covered"] <= 1 and interval["width"] > 1
    json.dumps(scores, allow_nan=False)
    table = run.data.labels.iloc[run.split.test]
    inside = []
    for device, rows in table.groupby("device"):
        low, high = run.predictor.predict_interval([run.data.asts[p] for p in rows["program"]], device)
        inside += [*(low <= rows["latency_s"]) & (rows["latency_s"] <= high)]
    assert interval["covered"] == pytest.approx(np.mean(inside), abs=0.01)
    assert evaluate(replace(run.predictor, calibration=None), run.data, run.split)["overall"]["interval"] is None


def test_save_and_load_keep_intervals_and_flags(run, asts, tmp_path):
    run.predictor.save(tmp_path)
    loaded = Predictor.load(tmp_path)
    for coverage in (0.5, 0.9):
        kept = [predictor.predict_interval(asts[0], "fast", coverage) for predictor in (loaded, run.predictor)]
        assert kept[0] == kept[1]
    far = [make_ast(np.random.default_rng(0), 40, scale=1e6), *asts]
    assert (loaded.unfamiliar(far, "fast") == run.predictor.unfamiliar(far, "fast")).all()
    arrays = [*loaded.calibration.to_arrays().values(), *loaded.familiarity.to_arrays().values()]
    assert sum(array.nbytes for array in arrays) < 300_000


def test_older_predictors_load_and_say_what_they_lack(run, asts, tmp_path):
    run.predictor.save(tmp_path)
    change_state(tmp_path, lambda state: [state.pop(part) for part in ("calibration", "familiarity")])
    old = Predictor.load(tmp_path)
    assert old.predict(asts[0], "fast") > 0
    with pytest.raises(PredictorError, match="not calibrated"):
        old.predict_interval(asts[0], "fast")
    with pytest.raises(PredictorError, match="how far its training data reach"):
        old.unfamiliar(asts[0], "fast")


@pytest.mark.parametrize("coverage", [0, 1, -0.1, 90, math.nan])
def test_coverage_out_of_range(run, asts, coverage):
    with pytest.raises(PredictorError, match="coverage must be between 0 and 1"):
        run.predictor.predict_interval(asts[0], "fast", coverage)


def test_unfamiliar_flags_what_is_far(run, asts):
    predictor = run.predictor
    groups = run.data.labels.iloc[run.split.valid].groupby("device")["program"]
    flags = np.concatenate([predictor.unfamiliar([run.data.asts[p] for p in own], name) for name, own in groups])
    assert flags.mean() == pytest.approx(1 - FAMILIAR_QUANTILE, abs=0.01)
    assert predictor.unfamiliar(asts, "slow").dtype == bool
    assert predictor.unfamiliar(asts[0], "slow") is False
    assert predictor.unfamiliar([], "slow").shape == (0,)
    big = replace(asts[0], leaves=asts[0].leaves * 1e9)
    assert predictor.unfamiliar(big, "slow") is True
    deep = make_ast(np.random.default_rng(1), 5000)
    assert predictor.unfamiliar([asts[0], deep], "slow").tolist() == [False, True]
    leaves = asts[0].leaves.copy()  # a feature that never varied
    leaves[0, 50] = 1.0
    novel = replace(asts[0], leaves=leaves)
    assert predictor.predict(novel, "slow") == predictor.predict(asts[0], "slow")
    assert predictor.unfamiliar(novel, "slow") is True
