"""Datasets of today open, and are split, as they were (``python -m tests.golden.make`` freezes the splits anew)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden import golden
from tests.samples.datasets import records_of


def test_a_finished_dataset_opens() -> None:
    data = golden.Dataset.open(golden.FOLDER)
    assert (len(data.programs), len(data.records), data.corrupt_lines) == (290, 595, 0)
    target = {"kind": "llvm", "num-cores": 1, "mcpu": "znver4"}
    assert data.meta["devices"][golden.CPUS[0]]["target"] == target
    records = records_of(data)
    assert {record.status for record in records} == {"ok", "build_error", "build_timeout", "run_timeout"}
    assert all(record.latency_s and record.samples_s for record in records if record.status == "ok")
    assert {program.implementation for program in data.programs.values()} == {"scheduled", "library"}


def test_journals_of_a_writer_that_was_killed_are_read_and_added_to(tmp_path: Path) -> None:
    folder = shutil.copytree(golden.JOURNALS, tmp_path / "data")
    data = golden.Dataset.open(folder)
    assert data.corrupt_lines == 1
    programs, records = len(data.programs), len(data.records)

    def key(record: Any) -> tuple[str, str, str]:
        return record.program, record.device, record.measured_at

    known = {key(record) for record in records_of(data)}
    in_whole = [record for record in records_of(golden.dataset()) if record.program in data.programs]
    (lost,) = [record for record in in_whole if key(record) not in known]
    assert records == len(in_whole) - 1, "all but the one that was cut"
    assert set(data.records["latency_s"].dropna()) < {record.latency_s for record in in_whole}
    with data:
        data.add_record(lost)
        data.finalize()
    again = golden.Dataset.open(folder)
    assert (len(again.programs), len(again.records), again.corrupt_lines) == (programs, records + 1, 1)
    asts, stored = golden.fresh_asts(sorted(again.programs), again), golden.stored_asts()
    assert all(np.array_equal(ast.leaves, stored[program].leaves) for program, ast in asts.items())


def test_instruction_counts_are_read_and_splits_hold_what_they_held() -> None:
    for device in golden.CPUS:
        assert (~np.isnan(golden.counts_on(device, golden.programs("cpu"))[:, 0])).sum() > 90
    assert golden.splits(golden.dataset()) == json.loads((golden.HERE / "splits.json").read_text())


@pytest.mark.check
def test_the_split_of_the_weights_that_ship_holds_what_it_held() -> None:
    """Of all data: 8,831 labels of four networks are tested."""
    spec = golden.SPLITS[-1]
    assert golden.predictor().training["split"] == spec
    before = json.loads((golden.HERE / "split_of_data.json").read_text())
    assert golden.splits(golden.load_datasets(golden.DATA), [spec]) == before
