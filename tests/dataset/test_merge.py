"""Merging keeps everything, and says where datasets disagree."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from cdmpp.dataset import Dataset, Record, merge
from cdmpp.errors import DatasetError
from cdmpp.program.types import Task
from tests.samples.datasets import (
    DEVICE,
    add_all,
    failure,
    program,
    record,
    small_dataset,
    space,
    task,
)


def test_conflicting_duplicates_are_kept_and_reported(tmp_path: Path) -> None:
    small_dataset(tmp_path / "a")  # programs 0..5, the last one failed
    with Dataset.create(tmp_path / "b", network_families={"rnn": "recurrent"}) as other:
        add_all(other, 0, networks={"rnn": 2.0})
        other.add_record(record(0))  # identical to one of a
        add_all(other, 1)
        other.add_record(replace(record(1), latency_s=4e-3, measured_at=9.0))  # twice as slow as in a
        add_all(other, 5)
        other.add_record(record(5))  # failed in a
        add_all(other, 9, of_task=2)
        other.add_record(failure(9, of_task=2))
        other.finalize()
    report = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (report.records, report.identical, report.redefined) == (9, 1, ())
    conflicts = {conflict.program: conflict for conflict in report.conflicts}
    assert set(conflicts) == {program(1).hash, program(5).hash}
    slow = conflicts[program(1).hash]
    assert slow.relative_difference == pytest.approx(1.0)
    assert [(status, latency_s) for _, status, latency_s in slow.records] == [("ok", 2e-3), ("ok", 4e-3)]
    assert conflicts[program(5).hash].relative_difference is None
    assert json.loads(json.dumps(report.to_json()))["identical"] == 1

    merged = Dataset.open(tmp_path / "out")
    assert len(merged.records) == 9 and len(merged.tasks) == 2 and len(merged.programs) == 7
    assert set(merged.tasks[task(1).hash].networks) == {"net", "rnn"}
    assert dict(merged.network_families) == {"net": "cnn", "rnn": "recurrent"}
    labels = merged.labels().set_index("program")
    assert labels.loc[program(1).hash, "latency_s"] == pytest.approx(3e-3)
    assert labels.loc[program(1).hash, "n_records"] == 2
    assert merged.meta["merge"]["conflicts"] == 2
    assert len(Dataset.open(tmp_path / "a").records) == 6  # the sources stay


def test_two_measurements_within_one_dataset_are_no_conflict(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "a") as dataset:
        dataset.add_record(record(0, latency_s=7e-3))
    small_dataset(tmp_path / "b", n=1)
    report = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert {conflict.program for conflict in report.conflicts} == {program(0).hash}
    assert merge([tmp_path / "a"], tmp_path / "alone").conflicts == ()


def test_what_is_defined_twice_is_reported(tmp_path: Path) -> None:
    small_dataset(tmp_path / "a")
    with Dataset.create(tmp_path / "b") as other:
        other.add_task(Task(task(1).hash, "same hash", '{"tir": "other"}', {"net": 1.0}, 1.0, 1.0))
        other.add_space(replace(space(1), insts_json="[]"))
        other.add_program(program(0))
        other.add_record(Record(program(0).hash, DEVICE, "ok", 1e-3))
    report = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert report.redefined == (f"task {task(1).hash}", f"space {space(1).hash}")
    assert Dataset.open(tmp_path / "out").tasks[task(1).hash].tir_json == task(1).tir_json


def test_meta_that_all_share_is_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Dataset.create(tmp_path / name, tvm="0.27", note=name) as dataset:
            add_all(dataset, 0)
    merge([tmp_path], tmp_path / "out")
    meta = Dataset.open(tmp_path / "out").meta
    assert meta["tvm"] == "0.27" and "note" not in meta and len(meta["merged_from"]) == 2


def test_merging_over_something_is_refused(tmp_path: Path) -> None:
    small_dataset(tmp_path / "a")
    with pytest.raises(DatasetError, match="cannot be merged into itself"):
        merge([tmp_path / "a"], tmp_path / "a")
    small_dataset(tmp_path / "b")
    with pytest.raises(DatasetError, match="is a dataset already"):
        merge([tmp_path / "a"], tmp_path / "b")
    with pytest.raises(DatasetError, match="does not exist"):
        merge([tmp_path / "none"], tmp_path / "c")


def test_a_record_whose_program_was_damaged_away_is_left_out(tmp_path: Path) -> None:
    small_dataset(tmp_path / "a")
    with sqlite3.connect(tmp_path / "a" / "rows.db") as rows:
        rows.execute(
            "DELETE FROM rows WHERE kind = 'programs' AND number = (SELECT MAX(number) FROM rows WHERE kind = 'programs')"
        )
    assert len(Dataset.open(tmp_path / "a").records) == 6
    report = merge([tmp_path / "a"], tmp_path / "out")
    assert report.records == 5 and Dataset.open(tmp_path / "out").corrupt_lines == 0
