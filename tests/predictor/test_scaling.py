"""Predictions told what the same programs took on other devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.errors import PredictorError
from cdmpp.predictor import Predictor, evaluate

from cdmpp.predictor.evidence import (  # isort: skip
    DevicePair, DeviceScaling, Evidence, combine, device_distance, fit_scaling, measured_latencies,
)  # fmt: skip
from cdmpp.predictor.pair_features import share_ratio
from cdmpp.predictor.training import train
from tests.samples.training import change_state, make_data, small_config

SPEC = "by_task:seed=0"


@pytest.fixture(scope="module")
def data():
    return make_data(n_tasks=48, per_task=10)


@pytest.fixture(scope="module")
def hidden(data):
    """Programs that are up to e^1.5 times slower than they look, on all devices alike; some were not measured on "slow"."""
    rng = np.random.default_rng(0)
    factor = {program: np.exp(rng.uniform(-1.5, 1.5)) for program in data.asts}
    slowed = data.labels["latency_s"] * [factor[program] for program in data.labels["program"]]
    labels = data.labels.assign(latency_s=slowed)
    gone = (labels["device"] == "slow") & labels["program"].str.endswith("5")
    return replace(data, labels=labels[~gone].reset_index(drop=True))


@pytest.fixture(scope="module")
def trained(hidden, tmp_path_factory):
    return train(small_config(SPEC, epochs=12, batch_size=32), hidden, tmp_path_factory.mktemp("run") / "run")


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_the_formula(data):
    """z = y_s (f_t/f_s)^(1-c) (e_t/e_s)^c e^b, averaged with f_t by inverse squares of errors; by hand."""
    slow, fast = data.devices["slow"], data.devices["fast"]
    pairs = {("slow", "fast"): DevicePair(bias=np.log(1.1), error=0.1, tasks=9)}
    scaling = DeviceScaling(0.25, own_error=0.2, error_by_distance=9.0, pairs=pairs)
    source = (slow, column(8e-3, np.nan), column(6e-3, 1.0), column(2e-3, 1.0))
    found = combine(scaling, fast, column(3e-3, 5e-3), column(1e-3, 1e-3), [source])
    scaled = 8e-3 * (3 / 6) ** 0.75 * (1 / 2) ** 0.25 * 1.1
    weights = (1 / 0.2**2, 1 / 0.1**2)
    expected = np.exp((weights[0] * np.log(3e-3) + weights[1] * np.log(scaled)) / sum(weights))
    assert found == pytest.approx([expected, 5e-3])


def test_devices_that_were_never_compared_count_by_their_distance(data):
    slow, fast = data.devices["slow"], data.devices["fast"]
    assert device_distance(slow, slow) == 0 and device_distance(slow, fast) == device_distance(fast, slow) > 0
    error = 0.5 * device_distance(slow, fast)
    scaling = DeviceScaling(0.0, own_error=0.2, error_by_distance=0.5)
    one = column(1.0)
    found = combine(scaling, fast, one, one, [(slow, column(2.0), one, one)])
    weight = error**-2 / (error**-2 + 0.2**-2)
    assert found == pytest.approx([2.0**weight])
    of_kind = replace(scaling, own={fast.kind: 0.4})  # in place of all kinds': predictions of this one are worse
    found = combine(of_kind, fast, one, one, [(slow, column(2.0), one, one)])
    assert found == pytest.approx([2.0 ** (error**-2 / (error**-2 + 0.4**-2))])


def test_a_latency_on_other_cores_of_the_same_cpu_counts_alone(trained, hidden):
    one, ast = hidden.devices["slow"], next(iter(hidden.asts.values()))
    two = replace(one, name="slow@2", cores_used=2.0)
    measured = {"slow": 3e-3, "fast": 9e-3}
    expected = 3e-3 * share_ratio([ast], np.array([3e-3]), one, two)
    assert trained.predictor.predict([ast], two, measured=measured) == pytest.approx(expected)


def test_without_an_estimate_the_predictors_ratio_is_taken(data):
    slow, fast = data.devices["slow"], data.devices["fast"]
    pairs = {("slow", "fast"): DevicePair(0.0, 0.1, 9)}
    source = [(slow, column(3.0), column(2.0), column(1.0))]
    rules = [DeviceScaling(part, pairs=pairs) for part in (0.0, 0.5, 1.0)]
    found = [combine(rule, fast, column(1.0), column(np.nan), source) for rule in rules]
    assert np.isfinite(found).all() and found[0] == found[1] == found[2]


def test_being_told_helps_where_programs_hide_what_they_take(trained, hidden):
    plain = evaluate(trained.predictor, hidden, trained.split, by=())
    told = evaluate(trained.predictor, hidden, trained.split, by=(), measured=True)
    assert told["overall"]["mape"] < 0.6 * plain["overall"]["mape"]
    assert plain["n_measured"] == 0 and 0 < told["n_measured"] < told["overall"]["n"]
    intervals = [result["overall"]["interval"] for result in (plain, told)]
    if all(intervals):
        assert intervals[1]["width"] < intervals[0]["width"]


def test_predict_is_what_evaluate_scores(trained, hidden):
    rows = np.flatnonzero((hidden.labels["device"] == "fast") & hidden.labels["program"].str.endswith("4"))
    programs = hidden.labels["program"].iloc[rows]
    there = hidden.labels[hidden.labels["device"] == "slow"].set_index("program")["latency_s"]
    predictor = replace(trained.predictor, specs=dict(hidden.devices))
    asts = [hidden.asts[program] for program in programs]
    told = predictor.predict(asts, "fast", measured={"slow": there.loc[programs].to_numpy()})
    assert told == pytest.approx(predictor.predict_rows(hidden, rows, Evidence.of_rows(hidden, rows, measured=True)))
    one = predictor.predict(asts[0], "fast", measured={"slow": there.loc[programs.iloc[0]]})
    assert isinstance(one, float) and one == pytest.approx(told[0])
    unknown = predictor.predict(asts, "fast", measured={"slow": np.full(len(asts), np.nan)})
    assert unknown == pytest.approx(predictor.predict(asts, "fast"))
    low, high = predictor.predict_interval(asts[:2], "fast", 0.5, measured={"slow": there.loc[programs[:2]]})
    below, above = predictor.measured_calibration.ends("fast", 0.5)
    assert np.log(low / told[:2]) * above == pytest.approx(np.log(high / told[:2]) * below, rel=1e-4)


def test_labels_of_hidden_rows_are_not_looked_at(trained, hidden):
    rows = trained.split.valid
    on_slow = np.flatnonzero(hidden.labels["device"] == "slow")
    some = on_slow[::2]
    spoilt = hidden.labels["latency_s"].to_numpy().copy()
    spoilt[some] *= 100
    other = replace(hidden, labels=hidden.labels.assign(latency_s=spoilt))
    own = np.setdiff1d(rows, some)
    predict = trained.predictor.predict_rows
    assert fit_scaling(predict, other, own, some) == fit_scaling(predict, hidden, own, some)
    assert fit_scaling(predict, other, own) != fit_scaling(predict, hidden, own)


def test_saved_and_loaded_it_is_the_same(trained, tmp_path: Path):
    predictor = trained.predictor
    assert predictor.scaling.pairs.keys() == {("slow", "fast"), ("fast", "slow")}
    assert predictor.scaling.own.keys() == {"slow", "fast", predictor.specs["fast"].kind}
    predictor.save(tmp_path)
    loaded = Predictor.load(tmp_path)
    assert loaded.scaling == predictor.scaling
    ends = [each.measured_calibration.ends("fast", 0.5) for each in (loaded, predictor)]
    assert ends[0] == pytest.approx(ends[1])
    change_state(tmp_path, lambda state: state.pop("scaling"))
    with pytest.raises(PredictorError, match="not taught to scale"):
        replace(Predictor.load(tmp_path), specs=predictor.specs).predict([], "fast", measured={"slow": []})


def test_one_device_has_nothing_to_be_scaled_from(trained, hidden):
    from cdmpp.predictor.data import subset

    alone = subset(hidden, np.flatnonzero(hidden.labels["device"] == "fast"))
    assert not fit_scaling(trained.predictor.predict_rows, alone, np.arange(50)).pairs
    with pytest.raises(PredictorError, match="measured on another"):
        evaluate(trained.predictor, alone, "all", measured=True)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "names no device"),
        ({"fast": [1.0]}, "needs no prediction"),
        ({"h200": [1.0]}, "of another kind|say too little"),
        ({"slow": [1.0, 2.0]}, "expected 1 seconds"),
        ({"slow": [0.0]}, "above 0"),
        ({"slow": [np.inf]}, "above 0"),
    ],
)
def test_what_is_no_measurement_elsewhere_is_refused(trained, hidden, measured, message: str):
    predictor = replace(trained.predictor, specs=dict(hidden.devices))
    ast = next(iter(hidden.asts.values()))
    with pytest.raises(PredictorError, match=message):
        predictor.predict([ast], "fast", measured=measured)


def test_instructions_and_measurements_do_not_go_together_and_errors_are_checked(trained, hidden):
    with pytest.raises(PredictorError, match="not both"):
        trained.predictor.predict([], "fast", compiled=True, measured={"slow": []})
    with pytest.raises(PredictorError, match="not both"):
        evaluate(trained.predictor, hidden, trained.split, compiled=True, measured=True)
    with pytest.raises(PredictorError, match="finite"):
        DeviceScaling(own_error=float("nan"))
    with pytest.raises(PredictorError, match="at least 0"):
        DeviceScaling(pairs={("a", "b"): DevicePair(0.0, -1.0, 5)})


def test_latencies_in_words():
    found = measured_latencies(["rtx-3060=1.3ms", "this-cpu@1=20us", "a=2s", "b=1e3ns"])
    assert found == pytest.approx({"rtx-3060": 1.3e-3, "this-cpu@1": 2e-5, "a": 2.0, "b": 1e-6})
    assert measured_latencies([]) is None


@pytest.mark.parametrize("text", ["rtx-3060", "rtx-3060=1.3", "=1ms", "a=ms", "a=1.2.3ms", "a=-1ms"])
def test_what_is_no_latency_is_refused(text: str):
    for texts, said in (([text], "expected DEVICE=LATENCY"), (["a=1ms", "a=2ms"], "twice")):
        with pytest.raises(PredictorError, match=said):
            measured_latencies(texts)
