"""The rules that make a label of samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.profiler.engine import SamplingPlan, label, split_half_difference

latencies = st.lists(st.floats(1e-8, 10.0), min_size=2, max_size=40)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([4.0, 1.0, 100.0, 2.0], 1.5),
        ([3.0, 1.0, 2.0], 1.5),  # two of three
        ([7.0], 7.0),
        ([1.0, 1.0, 1.0, 50.0, 90.0, 1.0], 1.0),  # disturbances of half the samples
    ],
)
def test_label_is_the_mean_of_the_lower_half(samples: list[float], expected: float) -> None:
    assert label(samples) == pytest.approx(expected)


def test_split_half_by_hand() -> None:
    # odd samples 1 and 3 -> label 1; even samples 2 and 4 -> label 2; |1 - 2| / 1.5
    assert split_half_difference([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2 / 3)
    assert math.isnan(split_half_difference([1.0]))


@given(latencies)
def test_label_lies_between_minimum_and_median(samples: list[float]) -> None:
    ordered = sorted(samples)
    assert ordered[0] * (1 - 1e-12) <= label(samples) <= ordered[(len(ordered) - 1) // 2] * (1 + 1e-12)


@given(latencies, st.floats(1e-3, 1e3))
def test_noise_does_not_depend_on_the_unit(samples: list[float], scale: float) -> None:
    scaled = [s * scale for s in samples]
    assert split_half_difference(scaled) == pytest.approx(split_half_difference(samples), abs=1e-9)
    assert split_half_difference(samples) >= 0


def test_plan_fills_the_sample_time() -> None:
    plan = SamplingPlan(min_sample_s=0.002)
    assert plan.repeats(1e-6) in (2000, 2001), "rounded up"
    assert plan.repeats(0.0007) == 3
    assert plan.repeats(1.0) == 1


def test_plan_stops_when_quiet_and_goes_on_when_noisy() -> None:
    plan = SamplingPlan(min_samples=4, max_samples=8, target_noise=0.01, max_measure_s=1.0)
    assert plan.needs_more([], 0.0)
    assert plan.needs_more([1e-3] * 3, 0.1)
    assert not plan.needs_more([1e-3] * 4, 0.1)
    noisy = [1e-3, 2e-3] * 4
    assert plan.needs_more(noisy[:4], 0.1)
    assert not plan.needs_more(noisy, 0.1), "max_samples ends it"
    slow = SamplingPlan(max_measure_s=0.5)
    assert slow.needs_more([2.0], 2.0) and not slow.needs_more([2.0, 2.0], 4.0), "two at least"
