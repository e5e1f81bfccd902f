"""Schedules on unseen GPUs, and samples of records: known answers, and the formula of chance against simulation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sampled import even_shares, sample_evenly
from benchmarks.tuning import compare
from cdmpp.dataset import Dataset
from cdmpp.errors import PredictorError
from cdmpp.tuner.cost_model import Encoded, OnlineModel
from cdmpp.tuner.warm_start import nearest_device
from tests.samples.datasets import DEVICE, OTHER_DEVICE, add_measured, failure, program, record

from benchmarks.schedule_transfer import (  # isort: skip
    figures, latencies, measurements_by_chance, measurements_in_order, measurements_online, nearly_best, order_of_others,
    regret_in_order,
)  # fmt: skip


def test_tunings_are_compared_by_what_both_measured() -> None:
    ours = {"labels_s": [3.0, None, 1.0], "curve": [], "costs": {"wall_s": 2.0, "search_cpu_s": 1.0}, "final_s": 1.0}
    found = compare(ours, {**ours, "labels_s": [4.0, 1.0, 2.0, 3.0], "best_s": 1.0, "trials": 16})
    assert (found["trials"], found["needed"], found["search"]) == (0.75, 1.5, 0.5)


class Flat:
    """A prior for which all programs are alike: only measurements tell them apart."""

    fingerprint = "flat"
    common = 1.0

    def encode(self, asts: object) -> Encoded:
        raise NotImplementedError

    def half_width(self, coverage: float) -> float | None:
        return None


def test_measuring_online_finds_what_the_order_alone_would_not() -> None:
    # every second program is of a kind that is fast, and the best of these is the last of the predicted order
    fast = np.arange(40) % 2 == 1
    z = np.where(fast, 5.0, 0.0)[:, None] + np.linspace(0, 0.1, 40)[:, None]
    latency_s = np.where(fast, 1.2, 10.0)
    latency_s[-1] = 1.0
    programs = Encoded(np.linspace(0, 0.01, 40), z)
    alone = measurements_online(OnlineModel(Flat()), programs, latency_s, 8, 0)
    online = measurements_online(OnlineModel(Flat()), programs, latency_s, 8, 40)
    assert alone == 40
    assert online <= 24, "the first batch shows which kind is fast: 4 slow programs are measured and no more"


def test_latencies_by_kernel_and_device(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "data") as made:
        add_measured(made, *range(4))
        made.add_record(record(1, device=OTHER_DEVICE, latency_s=3.0))
        made.add_record(failure(2, device=OTHER_DEVICE))
    view = Dataset.open(tmp_path / "data")
    (by_device,) = latencies(view, None, 0).values()
    assert len(by_device[DEVICE]) == 4
    assert by_device[OTHER_DEVICE] == {program(1).hash: 3.0, program(2).hash: math.inf}
    some = latencies(view, 2, 0)["fused_1"]
    assert len(some[DEVICE]) == 2 and set(some.get(OTHER_DEVICE, {})) <= set(some[DEVICE])


def test_figures_over_kernels_and_gpus() -> None:
    def case(gpu: str, ours: float, chance: float, correlation: float | None) -> dict[str, Any]:
        measurements = {"cdmpp": ours, "random_expected": chance}
        quality = {"top1_regret": {"cdmpp": 0.1}, "spearman": {"cdmpp": correlation}}
        return {"kernel": "gemm", "gpu": gpu, "n": 300, "measurements": measurements, **quality}

    ours, chance, *cases = figures([case("a", 2, 50, 0.5), case("b", 8, 200, None)])
    assert (ours["name"], ours["n"]) == ("cdmpp", 2)
    assert ours["values"] == {
        "measurements (geometric mean)": pytest.approx(4), "median": 5, "top1_regret": 0.1, "spearman": 0.5,
    }  # fmt: skip
    assert chance["values"]["measurements (geometric mean)"] == pytest.approx(100)
    assert [shown["name"] for shown in cases] == ["gemm on a", "gemm on b"]
    assert figures([]) == []


INF, NAN = math.inf, math.nan


def test_nearly_the_best_and_orders_with_failures_and_chance() -> None:
    assert nearly_best(np.array([1.0, 1.05, 1.06, INF])).tolist() == [True, True, False, False]
    with pytest.raises(PredictorError, match="nothing to search for"):
        nearly_best(np.array([INF, NAN]))
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


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8), total=st.integers(1, 200))
def test_even_shares_fit_and_are_as_equal_as_can_be(counts: list[int], total: int) -> None:
    shares = even_shares(counts, total)
    assert sum(shares) == min(total, sum(counts))
    assert all(share <= count for share, count in zip(shares, counts, strict=True))
    cut = [share for share, count in zip(shares, counts, strict=True) if share < count]
    assert not cut or max(shares) <= min(cut) + 1


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Task 1 with 20 programs and task 2 with 4 on one device, 10 of the first on another; one failure."""
    with Dataset.create(tmp_path / "data") as made:
        add_measured(made, *range(20))
        add_measured(made, *range(4), of_task=2)
        for number in range(10):
            made.add_record(record(number, device=OTHER_DEVICE))
        made.add_record(failure(0, 2, device=OTHER_DEVICE))
    return Dataset.open(tmp_path / "data")


def test_records_are_spread_and_devices_share_programs(dataset: Dataset) -> None:
    sampled = sample_evenly(dataset, 14)
    groups = sampled.records.groupby(["task", "device"], observed=True)["program"].apply(set)
    first, second = f"{1:016x}", f"{2:016x}"
    sizes = {key: len(programs) for key, programs in groups.items()}
    assert sizes == {(first, DEVICE): 5, (first, OTHER_DEVICE): 5, (second, DEVICE): 4}
    assert (sampled.records["status"] == "ok").all()
    # the order of programs is one for all devices: what the second device has of it is not further down its own
    own, other = groups[first, DEVICE], groups[first, OTHER_DEVICE]
    on_other = set(dataset.records.query("device == @OTHER_DEVICE")["program"])
    assert own & on_other <= other
    assert sampled.tasks is dataset.tasks and sampled.parts[0].path == dataset.path
    assert sampled.devices == dataset.devices
