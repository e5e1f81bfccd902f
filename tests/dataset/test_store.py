"""Datasets on disk: both forms, resuming, damage, a second writer, a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdmpp.dataset import SCHEMA_VERSION, Dataset, Record, load_datasets
from cdmpp.dataset import store as store_module
from cdmpp.dataset.rows import RowStore
from cdmpp.dataset.schema import MAX_ERROR_CHARS, RECORD_COLUMNS, SCHEMAS, write_parquet
from cdmpp.errors import DatasetError, LabelError, SchemaVersionError
from cdmpp.program.types import Program, Task
from tests.samples.datasets import (
    DEVICE,
    OTHER_DEVICE,
    add_all,
    failure,
    program,
    record,
    small_dataset,
    space,
    task,
)


def contents(dataset: Dataset) -> tuple[Any, ...]:
    records = sorted(dataset.iter_records(), key=lambda r: (r.program, r.measured_at))
    return dict(dataset.tasks), dict(dataset.spaces), dict(dataset.programs), records


def test_rows_and_parquet_hold_the_same(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "d")
    before = contents(dataset)
    files = {p.name for p in (tmp_path / "d").iterdir()} - {"rows.db-wal", "rows.db-shm"}  # SQLite's own
    assert files == {"meta.json", "rows.db", ".lock"}
    with dataset:
        dataset.finalize()
    tables = {f"{table}.parquet" for table in SCHEMAS}
    assert {p.name for p in (tmp_path / "d").iterdir()} == {"meta.json", ".lock", *tables}
    after = contents(Dataset.open(tmp_path / "d"))
    assert before[:3] == after[:3]
    for old, new in zip(before[3], after[3], strict=True):
        assert new.latency_s == old.latency_s and new.measured_at == old.measured_at
        assert (new.program, new.device, new.status, new.error) == (
            old.program,
            old.device,
            old.status,
            old.error,
        )
        assert new.samples_s == pytest.approx(old.samples_s, rel=1e-6)
        assert new.noise == pytest.approx(old.noise)
        assert dict(new.meta) == dict(old.meta)


def test_columns_and_types_of_the_records(tmp_path: Path) -> None:
    for finalized in (False, True):
        dataset = small_dataset(tmp_path / f"d{finalized}")
        if finalized:
            with dataset:
                dataset.finalize()
        frame = dataset.records
        assert tuple(frame.columns) == RECORD_COLUMNS
        assert list(frame["task"].unique()) == [task(1).hash]
        assert frame["latency_s"].dtype == np.float64
        assert frame["latency_s"].isna().sum() == 1 and list(frame["status"])[-1] == "build_error"
        assert frame["build_s"].iloc[0] == 0.5 and json.loads(frame["meta"].iloc[0]) == {"host": "h"}


def test_more_can_be_added_after_finalizing(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        dataset.finalize()
        add_all(dataset, 50, of_task=2)
        dataset.add_record(record(50, of_task=2))
        assert len(dataset.records) == 7
    again = Dataset.open(tmp_path / "d")
    assert len(again.records) == 7 and len(again.tasks) == 2
    with again:
        again.finalize()
    assert len(Dataset.open(tmp_path / "d").records) == 7


def test_tasks_spaces_and_programs_are_added_once(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        rows = RowStore(tmp_path / "d" / "rows.db")
        before = rows.last
        add_all(dataset, 0)
        assert rows.last == before
        dataset.add_program(Program(program(0).hash, task(1).hash, None, "", "search"))
        assert dataset.programs[program(0).hash].origin == "random"  # the first stays


def test_new_networks_of_a_known_task_are_added_without_writing_the_task_again(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        dataset.add_task(task(1, {"net": 5.0, "other": 3.0}))
        assert dict(dataset.tasks[task(1).hash].networks) == {"net": 1.0, "other": 3.0}
    rows = RowStore(tmp_path / "d" / "rows.db").rows("tasks")
    assert ["tir_json" in row for _, row in rows] == [True, False]
    again = Dataset.open(tmp_path / "d")
    assert dict(again.tasks[task(1).hash].networks) == {"net": 1.0, "other": 3.0}
    with again:
        again.finalize()
    assert dict(Dataset.open(tmp_path / "d").tasks[task(1).hash].networks) == {"net": 1.0, "other": 3.0}


def test_measured_is_what_resume_needs(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d", n=3) as dataset:
        assert dataset.measured(DEVICE) == {program(n).hash for n in range(3)}
        assert dataset.measured(OTHER_DEVICE) == set()
        dataset.add_program(program(9))
        dataset.add_record(failure(9, status="device_lost"))
        assert program(9).hash in dataset.measured(DEVICE)
        assert program(9).hash not in dataset.measured(DEVICE, retry=("device_lost",))
        dataset.add_record(record(9))
        assert program(9).hash in dataset.measured(DEVICE, retry=("device_lost",))


def test_rows_of_another_shape_are_counted_not_fatal(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d")
    wrong = [
        {"what": "no record"},
        3,
        {"program": program(0).hash, "device": DEVICE, "status": "ok", "latency_s": 0.0},
        {"program": program(0).hash, "device": DEVICE, "status": "sunny"},
    ]
    rows = RowStore(tmp_path / "d" / "rows.db", write=True)
    for value in wrong:
        rows.add("records", value)
    rows.close()
    dataset = Dataset.open(tmp_path / "d")
    assert len(dataset.records) == 6 and dataset.corrupt_lines == 4


def test_a_crash_between_parquet_and_deleting_rows_doubles_nothing(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "d")
    shutil.copy(tmp_path / "d" / "rows.db", tmp_path / "rows.db")
    with dataset:
        dataset.finalize()
    shutil.copy(tmp_path / "rows.db", tmp_path / "d" / "rows.db")
    again = Dataset.open(tmp_path / "d")
    assert len(again.records) == 6
    with again:
        add_all(again, 60)
        again.add_record(record(60))
        assert len(again.records) == 7
        again.finalize()
    with Dataset.open(tmp_path / "d") as third:  # another file of rows, whose numbers begin anew
        add_all(third, 61)
        third.add_record(record(61))
    assert len(Dataset.open(tmp_path / "d").records) == 8


def test_a_full_disk_while_finalizing_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        calls: list[str] = []

        def fails_at_last(path: Path, *args: Any, **kwargs: Any) -> None:
            calls.append(path.name)
            if len(calls) == 4:
                raise DatasetError("No space left on device")
            write_parquet(path, *args, **kwargs)

        monkeypatch.setattr(store_module, "write_parquet", fails_at_last)
        with pytest.raises(DatasetError, match="No space"):
            dataset.finalize()
        monkeypatch.undo()
        assert len(Dataset.open(tmp_path / "d").records) == 6
        dataset.finalize()
    assert len(Dataset.open(tmp_path / "d").records) == 6


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    """A file system with room for little."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; test_rows fills a disk by its page count")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_ends_profiling_with_one_line_and_keeps_what_was_measured(tiny_disk: Path) -> None:
    with Dataset.create(tiny_disk / "d") as dataset:
        written = 0
        with pytest.raises(DatasetError, match="disk is full"):
            for number in range(20000):
                add_all(dataset, number)
                dataset.add_record(record(number))
                written += 1
        assert 50 < written < 20000
        with pytest.raises(DatasetError, match=r"No space left|disk is full"):
            dataset.finalize()
        assert not list((tiny_disk / "d").glob("*.tmp"))
    again = Dataset.open(tiny_disk / "d")
    assert len(again.records) == written
    assert again.corrupt_lines == 0


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as first:
        add_all(first, 70)
        second = Dataset.open(tmp_path / "d")
        assert len(second.records) == 6  # reading is free
        with pytest.raises(DatasetError, match="written by another process"):
            second.add_task(task(9))
    second.add_task(task(9))
    assert program(70).hash in second.programs  # what the first wrote meanwhile
    second.close()


_HOLD = """
import sys, time
from cdmpp.dataset import Dataset
from tests.samples.datasets import add_all, record
dataset = Dataset.open(sys.argv[1])
add_all(dataset, 80)
dataset.add_record(record(80))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_writer_loses_nothing_and_gives_the_lock_back(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d")
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        dataset = Dataset.open(tmp_path / "d")
        with pytest.raises(DatasetError, match="written by another process"):
            dataset.add_task(task(9))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    with dataset:
        dataset.add_task(task(9))
        assert len(dataset.records) == 7 and dataset.corrupt_lines == 0


def _write_from_child(dataset: Dataset, queue: Any) -> None:
    try:
        dataset.add_task(task(9))
        queue.put("written")
    except DatasetError as error:
        queue.put(str(error))


def test_a_forked_worker_neither_writes_nor_holds_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with small_dataset(tmp_path / "d") as dataset:
        add_all(dataset, 1)
        child = context.Process(target=_write_from_child, args=(dataset, queue))
        child.start()
        assert "forked process" in queue.get(timeout=20)
        child.join()
        dataset.add_record(record(1))
        assert len(dataset.records) == 7


@pytest.mark.parametrize("latency_s", [None, float("nan"), float("inf"), 0.0, -1e-3])
def test_an_ok_record_needs_a_latency(tmp_path: Path, latency_s: float | None) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        with pytest.raises(LabelError, match=program(0).hash):
            dataset.add_record(Record(program(0).hash, DEVICE, "ok", latency_s))
        assert len(dataset.records) == 6
    assert len(Dataset.open(tmp_path / "d").records) == 6


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"samples_s": (1e-3, float("nan"))}, LabelError, "a sample is nan"),
        ({"samples_s": (1e-3, 0.0)}, LabelError, "a sample is 0.0"),
        ({"noise": float("nan")}, LabelError, "noise is nan"),
        ({"status": "sunny"}, DatasetError, "'sunny' is none of ok"),
        ({"status": "run_error"}, LabelError, "cannot have a latency"),
        ({"device": ""}, DatasetError, "needs a program and a device"),
        ({"program": "unknown"}, DatasetError, "refers to program unknown"),
        ({"meta": {"thing": object()}}, DatasetError, "cannot be stored"),
    ],
)
def test_records_that_are_none(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    fields = {"program": program(0).hash, "device": DEVICE, "status": "ok", "latency_s": 1e-3, **changes}
    with small_dataset(tmp_path / "d") as dataset, pytest.raises(error, match=message):
        dataset.add_record(Record(**fields))
    assert len(Dataset.open(tmp_path / "d").records) == 6


def test_meta_takes_numpy_numbers_and_drops_what_json_has_no_word_for(tmp_path: Path) -> None:
    meta = {
        "drift": np.float64(0.5),
        "attempts": np.int64(2),
        "steal_pct": float("nan"),
        "workers": "auto",
        "x": None,
    }
    with small_dataset(tmp_path / "d") as dataset:
        dataset.add_record(Record(program(0).hash, DEVICE, "ok", 1e-3, meta=meta))
        assert list(dataset.iter_records())[-1].meta == {"drift": 0.5, "attempts": 2, "workers": "auto"}
        dataset.finalize()
        assert list(dataset.iter_records())[-1].meta == {"drift": 0.5, "attempts": 2, "workers": "auto"}


def test_a_long_error_message_loses_its_middle(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        dataset.add_record(Record(program(0).hash, DEVICE, "run_error", error="a" * 5000 + "the end"))
        assert len(list(dataset.records["error"])[-1]) <= MAX_ERROR_CHARS
    error = list(Dataset.open(tmp_path / "d").records["error"])[-1]
    assert len(error) <= MAX_ERROR_CHARS and error.endswith("the end")


def test_nothing_is_referred_to_that_is_not_there(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d") as dataset:
        with pytest.raises(DatasetError, match="refers to task"):
            dataset.add_space(space(1))
        with pytest.raises(DatasetError, match="refers to task"):
            dataset.add_program(program(1))
        dataset.add_task(task(1))
        with pytest.raises(DatasetError, match="refers to space"):
            dataset.add_program(program(1))


def test_a_library_program_has_no_space(tmp_path: Path) -> None:
    library = Program("1234", task(1).hash, None, "", "unscheduled", "library")
    with Dataset.create(tmp_path / "d") as dataset:
        dataset.add_task(task(1))
        dataset.add_program(library)
        dataset.add_record(Record("1234", "h200", "ok", 1e-5))
        dataset.finalize()
    assert Dataset.open(tmp_path / "d").programs["1234"] == library


def test_another_schema_version_is_refused_by_name(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        dataset.finalize()
    meta_file = tmp_path / "d" / "meta.json"
    meta = json.loads(meta_file.read_text())
    meta_file.write_text(json.dumps({**meta, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(SchemaVersionError, match=f"version {SCHEMA_VERSION + 1}; .* {SCHEMA_VERSION}"):
        Dataset.open(tmp_path / "d")
    meta_file.write_text(json.dumps(meta))
    records = tmp_path / "d" / "records.parquet"
    table = pq.read_table(records)
    pq.write_table(table.replace_schema_metadata({b"cdmpp": b'{"schema_version": 99}'}), records)
    with pytest.raises(SchemaVersionError, match=r"records\.parquet .* 99"):
        _ = Dataset.open(tmp_path / "d").records


def test_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    with small_dataset(tmp_path / "d") as dataset:
        dataset.finalize()
    file = tmp_path / "d" / "records.parquet"
    data = file.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"PAR1" + bytes(100)):
        file.write_bytes(broken)
        with pytest.raises(DatasetError, match=r"records\.parquet is damaged"):
            _ = Dataset.open(tmp_path / "d").records
    pq.write_table(pq.read_table(tmp_path / "d" / "tasks.parquet").replace_schema_metadata(None), file)
    with pytest.raises(DatasetError, match=r"records\.parquet is not a dataset file"):
        _ = Dataset.open(tmp_path / "d").records


def test_no_dataset_at_all(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no dataset: it has no meta\.json"):
        Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match="does not exist"):
        load_datasets(tmp_path / "gone")
    with pytest.raises(DatasetError, match="contains none"):
        load_datasets(tmp_path)
    (tmp_path / "meta.json").write_text("[]")
    with pytest.raises(DatasetError, match=r"meta\.json is damaged"):
        Dataset.open(tmp_path)
    (tmp_path / "meta.json").write_text("{half")
    with pytest.raises(DatasetError, match=r"meta\.json is damaged"):
        Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match="is not a folder"):
        load_datasets(tmp_path / "meta.json")


def test_creating_over_something_is_refused(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d")
    with pytest.raises(DatasetError, match="is a dataset already"):
        Dataset.create(tmp_path / "d")
    assert len(Dataset.open_or_create(tmp_path / "d").records) == 6
    (tmp_path / "d" / "meta.json").unlink()
    with pytest.raises(DatasetError, match="choose an empty folder"):
        Dataset.create(tmp_path / "d")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot make"):
        Dataset.create(tmp_path / "file" / "d")


def test_meta_is_kept_and_changed(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d", note="first", network_families={"a": "cnn"}) as dataset:
        dataset.update_meta(note="second", schema_version=12)
    again = Dataset.open_or_create(tmp_path / "d", note="ignored")
    assert again.meta["note"] == "second" and again.meta["schema_version"] == SCHEMA_VERSION
    assert again.network_families == {"a": "cnn"}


def test_an_empty_dataset_is_one_too(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d") as dataset:
        dataset.finalize()
    again = Dataset.open(tmp_path / "d")
    assert len(again.records) == 0 and len(again.labels()) == 0
    total = again.summary()["total"]
    assert total["records"] == 0 and total["noise_floor_mape"] is None


def test_several_datasets_read_as_one(tmp_path: Path) -> None:
    small_dataset(tmp_path / "all" / "a", n=4)
    with Dataset.create(tmp_path / "all" / "b", network_families={"other": "rnn"}) as other:
        add_all(other, 1, networks={"other": 2.0})
        other.add_record(record(1, device=OTHER_DEVICE))
    view = load_datasets(tmp_path / "all")
    assert len(view.parts) == 2 and len(view.records) == 5
    assert dict(view.tasks[task(1).hash].networks) == {"net": 1.0, "other": 2.0}
    assert view.device_names == [DEVICE, OTHER_DEVICE]
    assert dict(view.network_families) == {"net": "cnn", "other": "rnn"}
    same = load_datasets([tmp_path / "all", tmp_path / "all" / "a"])
    assert len(same.parts) == 2  # named twice, read once
    assert len(load_datasets(str(tmp_path / "all" / "a")).records) == 4


def test_a_program_goes_with_the_task_of_its_own_dataset(tmp_path: Path) -> None:
    """Tasks of one hash may name their blocks differently, and traces refer to the names."""
    for number, folder in enumerate(("a", "b")):
        with Dataset.create(tmp_path / "all" / folder) as dataset:
            dataset.add_task(replace(task(1), tir_json=f"named by {folder}"))
            dataset.add_space(space(1))
            dataset.add_program(program(number))
    view = load_datasets(tmp_path / "all")
    assert [view.task_of(program(number)).tir_json for number in (0, 1)] == ["named by a", "named by b"]
    assert view.task_of(program(7)).tir_json == view.tasks[task(1).hash].tir_json  # one that is not in it yet
    with pytest.raises(KeyError):
        view.task_of(program(0, of_task=9))


def test_thirty_thousand_programs_are_a_few_megabytes(tmp_path: Path) -> None:
    """A tenth of it: 3,000 programs of 60 tasks with 20 samples each stay below 350 kB in all."""
    rng = np.random.default_rng(0)
    with Dataset.create(tmp_path / "d") as dataset:
        for number in range(3000):
            of_task = number % 60
            decisions = json.dumps([[k, rng.choice([1, 2, 4, 8, 16], 4).tolist()] for k in range(8)])
            dataset.add_task(
                Task(f"{of_task:016x}", "t", f'{{"tir":{of_task}}}' + "x" * 20_000, {"net": 1}, 1.0, 1.0)
            )
            dataset.add_space(space(of_task))
            key = f"{rng.integers(2**62):016x}"
            dataset.add_program(Program(key, f"{of_task:016x}", f"space{of_task:011x}", decisions))
            samples_s = tuple((1e-3 * rng.lognormal(sigma=0.01, size=20)).tolist())
            meta = {"build_s": rng.random(), "run_s": rng.random(), "session": "s"}
            dataset.add_record(Record(key, DEVICE, "ok", samples_s[0], samples_s, 0.01, "", 1.7e9, meta))
        dataset.finalize()
    assert sum(file.stat().st_size for file in (tmp_path / "d").iterdir()) < 350_000
