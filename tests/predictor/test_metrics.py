"""Metrics: known answers for every key."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import LabelError, PredictorError
from cdmpp.predictor.metrics import evaluate_groups, evaluate_predictions, least_mape_shift


def score(labels, predictions, task=None, device=None, noise=None):
    n = len(labels)
    return evaluate_predictions(labels, predictions, task or ["t"] * n, device or ["d"] * n, noise)


def test_error_metrics_known_answer():
    result = score([1.0, 2.0, 4.0, 10.0], [1.1, 2.3, 2.0, 10.0], noise=[0.01, 0.03, np.nan, 0.02])
    # relative errors 0.1, 0.15, 0.5, 0
    assert result["mape"] == pytest.approx(0.1875)
    assert result["median_ape"] == pytest.approx(0.125)
    assert result["within_20pct"] == 0.75 and result["n"] == 4
    assert result["rmse_s"] == pytest.approx(np.sqrt((0.01 + 0.09 + 4.0) / 4))
    assert result["noise_floor_mape"] == pytest.approx(0.01)  # half of the mean of 0.01, 0.03 and 0.02
    given = evaluate_predictions([1.0, 2.0], [1.0, 2.0], "tt", "dd", [0.5, 0.5], [0.02, np.nan])
    assert given["noise_floor_mape"] == pytest.approx(0.02), "the mean error floor where given"
    assert score([1.0, 1.0, 1.0, 1.0], [1.0, 0.9, 0.75, 3.0])["within_10pct"] == 0.5, "inclusive"


def test_pairwise_accuracy_counts_pairs_within_task_and_device_and_ties_as_one_half():
    # task a: 1 < 2 < 3 predicted 2, 1, 3: two of three pairs right; task b on two devices: no pairs
    result = score([1, 2, 3, 5, 6], [2, 1, 3, 9, 1], task=list("aaabb"), device=["d", "d", "d", "d", "e"])
    assert result["pairwise_accuracy"] == pytest.approx(2 / 3)
    # 1.00 against 1.04 is within 5 % noise of the second; 1.00/2 and 1.04/2 count and are right
    assert score([1.0, 1.04, 2.0], [1.1, 1.0, 3.0], noise=[0.0, 0.05, 0.0])["pairwise_accuracy"] == 1.0
    assert score([1.0, 1.04, 2.0], [1.1, 1.0, 3.0])["pairwise_accuracy"] == pytest.approx(2 / 3)
    assert score([1.0, 2.0], [5.0, 5.0])["pairwise_accuracy"] == 0.5
    assert score([2.0, 2.0], [1.0, 5.0])["pairwise_accuracy"] is None


def test_spearman_is_the_mean_over_tasks():
    labels, predictions = [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 4, 3, 2, 1]
    assert score(labels, predictions, task=list("aaaabbbb"))["spearman"] == pytest.approx(0.0)
    # one swap in four: 1 - 6 * 2 / (4 * 15) = 0.8
    assert score([1, 2, 3, 4], [2, 1, 3, 4])["spearman"] == pytest.approx(0.8)
    assert score([1, 2, 3, 4], [7, 7, 7, 7])["spearman"] == 0.0


def test_regret_known_answers():
    labels = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    predictions = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0]
    result = score(labels, predictions)
    assert result["top1_regret"] == pytest.approx(1.0)  # picks 2.0, best is 1.0
    assert result["top5_regret"] == pytest.approx(1.0)
    assert score(labels, labels)["top1_regret"] == 0.0
    assert score(labels[:5], predictions[:5])["top5_regret"] is None
    over_tasks = score([1, 2, 1, 3, 1, 7], [2, 1, 2, 1, 1, 2], task=list("aabbcc"))
    assert over_tasks["top1_regret"] == pytest.approx((1 + 2 + 0) / 3)
    assert over_tasks["top1_regret_median"] == pytest.approx(1.0)
    # of 32: the median over tasks with 32 or more programs alone
    labels = [*range(1, 33), *range(1, 33), *range(1, 32)]
    picks = [[0.5 if n == wanted else 1.0 for n in range(1, 33)] for wanted in (2, 4)]
    predictions = [*picks[0], *picks[1], *([1.0] * 30 + [0.5])]
    result = score(labels, predictions, task=["a"] * 32 + ["b"] * 32 + ["c"] * 31)
    assert result["top1_regret_of_32"] == pytest.approx((1 + 3) / 2)
    assert result["top1_regret"] == pytest.approx((1 + 3 + 30) / 3)
    assert score(labels[:31], predictions[:31])["top1_regret_of_32"] is None


def test_all_keys_are_there_and_json():
    result = score([1.0], [2.0])
    regrets = {"top1_regret", "top1_regret_of_32", "top5_regret", "pairwise_accuracy", "spearman"}
    errors = {"mape", "median_ape", "within_10pct", "within_20pct", "rmse_s", "noise_floor_mape", "n"}
    assert regrets | errors <= set(result)
    assert result["pairwise_accuracy"] is None and result["noise_floor_mape"] is None
    json.dumps(result, allow_nan=False)


def test_groups_may_overlap():
    groups = {"network": [("a",), ("a", "b"), ()], "device": [("d",)] * 3}
    result = evaluate_groups([[1, 2, 4], [1, 3, 4], list("ttt"), list("ddd")], groups)
    assert {name: m["n"] for name, m in result["network"].items()} == {"a": 2, "b": 1}
    assert result["network"]["b"]["mape"] == pytest.approx(0.5)
    assert result["device"]["d"]["n"] == 3


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30, unique=True), st.floats(0.1, 10))
def test_ranking_is_perfect_and_blind_to_scale(labels, factor):
    result = score(labels, np.asarray(labels) * factor)
    assert result["pairwise_accuracy"] == 1.0
    assert result["top1_regret"] == 0.0
    assert result["mape"] == pytest.approx(abs(factor - 1), rel=1e-9, abs=1e-9)


def test_many_programs_of_one_task_give_the_same_as_pair_by_pair():
    rng = np.random.default_rng(0)
    labels, predictions, noise = *(rng.exponential(1, (2, 700)) + 0.1), rng.uniform(0, 0.3, 700)
    right = total = 0.0
    for i in range(700):
        later = np.arange(i + 1, 700)
        tied = np.abs(labels[later] - labels[i]) <= np.maximum(noise[later], noise[i]) * np.minimum(labels[later], labels[i])
        later = later[~tied]
        total += len(later)
        right += ((labels[later] > labels[i]) == (predictions[later] > predictions[i])).sum()
    assert score(labels, predictions, noise=noise)["pairwise_accuracy"] == pytest.approx(right / total)


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 3)), min_size=1, max_size=12))
def test_the_shift_has_the_least_mape(records):
    errors, group = np.array([e for e, _ in records]), np.array([g for _, g in records])
    for weights, known in ((np.ones(len(group)), None), (1 / np.bincount(group)[group], group)):
        shift = least_mape_shift(errors, known)
        mape = [(weights * np.abs(np.exp(s - errors) - 1)).sum() for s in (shift, *np.linspace(-2, 2, 41))]
        assert mape[0] <= min(mape) + 1e-9


def test_bad_input_is_refused():
    with pytest.raises(LabelError):
        score([0.0], [1.0])
    for true, predicted, said in (([1.0], [np.nan], "finite"), ([1.0, 2.0], [1.0], "length"), ([], [], "no records")):
        with pytest.raises(PredictorError, match=said):
            score(true, predicted)
