"""What searches cost: known answers, the formula of chance against simulation, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedule_transfer import (
    measurements_by_chance,
    measurements_in_order,
    nearly_best,
    order_of_others,
    regret_in_order,
)
from cdmpp.errors import PredictorError
from cdmpp.tuner.warm_start import nearest_device

INF, NAN = math.inf, math.nan


def test_nearly_the_best_within_five_per_cent() -> None:
    assert nearly_best(np.array([1.0, 1.05, 1.06, INF])).tolist() == [True, True, False, False]
    with pytest.raises(PredictorError, match="nothing to search for"):
        nearly_best(np.array([INF, NAN]))


def test_orders_with_failures_and_chance() -> None:
    latency_s = np.array([2.0, INF, 1.0, 1.5])
    for order, measurements in (([1, 0, 3, 2], 4), ([2, 0, 1, 3], 1)):
        assert measurements_in_order(latency_s, np.array(order)) == measurements
    assert regret_in_order(latency_s, np.array([1, 3, 0, 2])) == pytest.approx(0.5), "of the first that works"
    # 1 of 3: found at the first, second or third draw alike
    assert measurements_by_chance(np.array([1.0, 2.0, INF])) == (2.0, 2)
    assert measurements_by_chance(np.array([1.0] + [2.0] * 99)) == (50.5, 50)


@given(good=st.integers(1, 5), bad=st.integers(0, 12))
def test_chance_is_what_random_orders_give(good: int, bad: int) -> None:
    latency_s = np.array([1.0] * good + [2.0] * bad)
    rng = np.random.default_rng(0)
    drawn = [measurements_in_order(latency_s, rng.permutation(good + bad)) for _ in range(2000)]
    expected, median = measurements_by_chance(latency_s)
    assert np.mean(drawn) == pytest.approx(expected, rel=0.1)
    assert abs(np.median(drawn) - median) <= 1


def test_order_of_several_devices_compares_slowdowns() -> None:
    # on the second device everything takes ten times as long, and the first candidate is its best
    order = order_of_others([np.array([2.0, 1.0, 3.0, NAN]), np.array([10.0, 30.0, INF, 11.0])])
    assert order.tolist() == [3, 0, 1, 2]
    (first, *rest) = order_of_others([np.array([3.0, INF, 1.0, NAN])])[1:]
    assert first == 0 and set(rest) == {1, 3}, "what failed or was not measured comes last"


def test_nearest_device_by_logarithms_of_what_both_have() -> None:
    vectors = {
        "small": np.array([1.0, 10.0, 5.0, 1.0]),
        "half": np.array([1.0, 500.0, NAN, 1.0]),
        "large": np.array([1.0, 1000.0, 50.0, NAN]),
    }
    assert nearest_device("large", vectors) == "half"
    assert nearest_device("small", vectors) != "small"
    for name, known in (("large", {"large": vectors["large"]}), ("other", vectors)):
        with pytest.raises(PredictorError, match=f"no device to compare {name} with"):
            nearest_device(name, known)
