"""A part of the records, spread over kinds of tasks and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sampled import even_shares, sample_evenly
from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError
from tests.samples.datasets import DEVICE, OTHER_DEVICE, add_measured, failure, record


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


def test_records_of_some_devices(dataset: Dataset) -> None:
    sampled = sample_evenly(dataset, 6, devices=[OTHER_DEVICE])
    assert sampled.device_names == [OTHER_DEVICE] and len(sampled.records) == 6
    assert dataset.records["device"].iloc[sampled.rows].eq(OTHER_DEVICE).all()
    for number, devices, message in ((6, ["t4"], "no ok record"), (0, None, "expected at least 1")):
        with pytest.raises(DatasetError, match=message):
            sample_evenly(dataset, number, devices=devices)
