"""A dataset written at once is the one that rows make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

from cdmpp.dataset import Dataset
from cdmpp.dataset.store import write_dataset
from cdmpp.errors import DatasetError, LabelError
from tests.samples.datasets import add_all, failure, program, record, small_dataset, space, task


def test_the_same_dataset_as_by_rows(tmp_path: Path) -> None:
    slow = small_dataset(tmp_path / "slow")
    with slow:
        slow.finalize()
    records = [failure(n) if n == 5 else record(n) for n in range(6)]
    fast = write_dataset(
        tmp_path / "fast",
        [task(1)],
        [space(1)],
        map(program, range(6)),
        records,
        network_families={"net": "cnn"},
    )
    slow = Dataset.open(tmp_path / "slow")
    assert (fast.tasks, fast.spaces, fast.programs) == (slow.tasks, slow.spaces, slow.programs)
    assert_frame_equal(fast.records, slow.records)
    assert fast.network_families == {"net": "cnn"}
    with fast:  # and more can be added
        add_all(fast, 7)
        fast.add_record(record(7))
    assert len(Dataset.open(tmp_path / "fast").records) == 7


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (([task(1)], [space(1)], [program(1)], [record(2)]), DatasetError, "a record refers to program"),
        (([task(1)], [], [program(1)], []), DatasetError, "refers to space"),
        (([], [], [replace(program(1), space_hash=None)], []), DatasetError, "refers to task"),
        (([], [space(1)], [], []), DatasetError, "refers to task"),
        (
            ([task(1)], [space(1)], [program(1)], [replace(record(1), latency_s=-1.0)]),
            LabelError,
            "latency_s is -1",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, parts: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_dataset(tmp_path / "out", *parts)
    assert not (tmp_path / "out").exists()


def test_a_dataset_is_not_overwritten(tmp_path: Path) -> None:
    small_dataset(tmp_path / "a")
    with pytest.raises(DatasetError, match="is a dataset already"):
        write_dataset(tmp_path / "a", [], [], [], [])
