"""Datasets on disk: both forms, resuming, damage, a second writer, a full disk."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pandas.testing import assert_frame_equal

from cdmpp.dataset import SCHEMA_VERSION, Dataset, Record, load_datasets
from cdmpp.dataset import store as store_module
from cdmpp.dataset.record import MAX_ERROR_CHARS, RECORD_COLUMNS, SCHEMAS, write_parquet
from cdmpp.dataset.store import RowStore, write_dataset
from cdmpp.errors import DatasetError, LabelError, SchemaVersionError
from cdmpp.program.types import Program, Task

from tests.samples.datasets import (  # isort: skip
    DEVICE, OTHER_DEVICE, add_all, add_measured, failure, program, record, records_of, small_dataset, space, task,
)  # fmt: skip


def n_records(path: Path) -> int:
    return len(Dataset.open(path).records)


def test_all_forms_hold_the_same(tmp_path: Path) -> None:
    """Rows, the parquet files made of them, and parquet files written at once."""
    path = tmp_path / "d"
    rows = small_dataset(path)
    own = {"rows.db-wal", "rows.db-shm"}  # SQLite's
    assert {p.name for p in path.iterdir()} - own == {"meta.json", "rows.db", ".lock"}
    frame, records = rows.records, records_of(rows)
    with rows:
        rows.finalize()
    assert {p.name for p in path.iterdir()} == {"meta.json", ".lock", *(f"{t}.parquet" for t in SCHEMAS)}
    rows, parquet = small_dataset(tmp_path / "again"), Dataset.open(path)
    parts = ([task(1)], [space(1)], map(program, range(6)), records)
    once = write_dataset(tmp_path / "once", *parts, network_families={"net": "cnn"})
    for dataset in (parquet, once):
        assert (dataset.tasks, dataset.spaces, dataset.programs) == (rows.tasks, rows.spaces, rows.programs)
        assert dataset.network_families == {"net": "cnn"}
        exact = [name for name in frame if name not in ("samples_s", "noise")]
        assert_frame_equal(dataset.records[exact], frame[exact])
        for old, new in zip(records, records_of(dataset), strict=True):
            assert new.samples_s == pytest.approx(old.samples_s, rel=1e-6)
            assert new.noise == pytest.approx(old.noise) and dict(new.meta) == dict(old.meta)
    assert tuple(frame.columns) == RECORD_COLUMNS and set(frame["task"]) == {task(1).hash}
    assert frame["latency_s"].dtype == np.float64 and list(frame["latency_s"].isna()) == [False] * 5 + [True]
    assert frame["build_s"].iloc[0] == 0.5 and json.loads(frame["meta"].iloc[0]) == {"host": "h"}


def test_tasks_spaces_and_programs_are_added_once(tmp_path: Path) -> None:
    """Of a known task only new networks are written, not the task again."""
    networks = {"net": 1.0, "other": 3.0}
    with small_dataset(tmp_path / "d") as dataset:
        before = RowStore(tmp_path / "d" / "rows.db").last
        add_all(dataset, 0)
        dataset.add_program(Program(program(0).hash, task(1).hash, None, "", "search"))
        assert dataset.programs[program(0).hash].origin == "random"  # the first stays
        assert RowStore(tmp_path / "d" / "rows.db").last == before
        dataset.add_task(task(1, {"net": 5.0, "other": 3.0}))
        assert dict(dataset.tasks[task(1).hash].networks) == networks
    assert ["tir_json" in row for _, row in RowStore(tmp_path / "d" / "rows.db").rows("tasks")] == [True, False]
    with Dataset.open(tmp_path / "d") as again:
        assert dict(again.tasks[task(1).hash].networks) == networks
        again.finalize()
    assert dict(Dataset.open(tmp_path / "d").tasks[task(1).hash].networks) == networks


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
    rows = RowStore(tmp_path / "d" / "rows.db", write=True)
    known = {"program": program(0).hash, "device": DEVICE, "latency_s": 0.0}
    for value in ({"no": "record"}, 3, {**known, "status": "ok"}, {**known, "status": "sunny"}):
        rows.add("records", value)
    rows.close()
    dataset = Dataset.open(tmp_path / "d")
    assert len(dataset.records) == 6 and dataset.corrupt_lines == 4


def test_a_half_written_journal_of_a_former_cdmpp_is_read_and_taken_in_once(tmp_path: Path) -> None:
    path = tmp_path / "d"
    small_dataset(path, finalize=True)

    def line(value: dict[str, Any]) -> bytes:
        text = json.dumps(value).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    hashes = {"hash": program(7).hash, "task_hash": task(1).hash, "space_hash": space(1).hash}
    measured = line({"program": program(7).hash, "device": DEVICE, "status": "ok", "latency_s": 1.0})
    flipped, cut = measured.replace(b"1.0", b"2.0"), measured[:20]
    (path / "programs.jsonl").write_bytes(line({**hashes, "decisions": "[]"}))
    (path / "records.jsonl").write_bytes(measured + flipped + b"foreign\n" + cut)
    journal = shutil.copy(path / "records.jsonl", tmp_path)
    with Dataset.open(path) as dataset:
        assert (len(dataset.records), len(dataset.programs), dataset.corrupt_lines) == (7, 7, 3)
        dataset.finalize()
    assert not list(path.glob("*.jsonl"))
    shutil.copy(journal, path)  # as if the process had ended before it was deleted
    again = Dataset.open(path)
    assert (len(again.records), again.corrupt_lines) == (7, 3)


def test_a_crash_between_parquet_and_deleting_rows_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "d"
    dataset = small_dataset(path)
    rows = shutil.copy(path / "rows.db", tmp_path)
    with dataset:
        dataset.finalize()
    shutil.copy(rows, path)
    assert n_records(path) == 6
    with Dataset.open(path) as again:
        add_measured(again, 60, of_task=2)
        assert len(again.records) == 7
        again.finalize()
    with Dataset.open(path) as third:  # another file of rows, whose numbers begin anew
        add_measured(third, 61)
    assert n_records(path) == 8 and len(Dataset.open(path).tasks) == 2


def test_a_full_disk_while_finalizing_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    def fails_at_last(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.stem == "records":
            raise DatasetError("No space left on device")
        write_parquet(path, *args, **kwargs)

    with small_dataset(tmp_path / "d") as dataset:
        with monkeypatch.context() as patch, pytest.raises(DatasetError, match="No space"):
            patch.setattr(store_module.layout, "write_parquet", fails_at_last)
            dataset.finalize()
        assert n_records(tmp_path / "d") == 6
        dataset.finalize()
    assert n_records(tmp_path / "d") == 6


def test_a_disk_that_fills_ends_profiling_with_one_line_and_keeps_what_was_measured(medium: Callable[[str], Path]) -> None:
    path = medium("size=8m") / "d"
    with Dataset.create(path) as dataset:
        written = 0
        with pytest.raises(DatasetError, match="disk is full"):
            for written in range(20000):
                add_measured(dataset, written)
        with pytest.raises(DatasetError, match=r"No space left|disk is full"):
            dataset.finalize()
        assert not list(path.glob("*.tmp"))
    again = Dataset.open(path)
    assert written > 50 and (len(again.records), again.corrupt_lines) == (written, 0)


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
        add_measured(dataset, 1)
        assert len(dataset.records) == 7


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(({"latency_s": bad}, LabelError, program(0).hash) for bad in (None, float("nan"), float("inf"), 0.0, -1.0)),
        ({"samples_s": (1e-3, float("nan"))}, LabelError, "a sample is nan"),
        ({"samples_s": (1e-3, 0.0)}, LabelError, "a sample is 0.0"),
        ({"noise": float("nan")}, LabelError, "noise is nan"),
        ({"status": "sunny"}, DatasetError, "'sunny' is none of ok"),
        ({"status": "run_error"}, LabelError, "cannot have a latency"),
        ({"device": ""}, DatasetError, "needs a program and a device"),
        ({"program": "unknown"}, DatasetError, "refers to program unknown"),
        ({"meta": {"thing": object()}}, DatasetError, "cannot be stored"),
    ],
)  # fmt: skip
def test_records_that_are_none(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    fields = {"program": program(0).hash, "device": DEVICE, "status": "ok", "latency_s": 1e-3, **changes}
    with small_dataset(tmp_path / "d") as dataset, pytest.raises(error, match=message):
        dataset.add_record(Record(**fields))
    assert n_records(tmp_path / "d") == 6


def test_what_json_and_tables_have_no_place_for_is_left_out_of_a_record(tmp_path: Path) -> None:
    numbers = {"drift": np.float64(0.5), "attempts": np.int64(2)}
    meta = {**numbers, "steal_pct": float("nan"), "workers": "auto", "x": None}
    odd = replace(failure(0, status="run_error"), error="a" * 5000 + "the end", meta=meta)
    with small_dataset(tmp_path / "d") as dataset:
        dataset.add_record(odd)
        for _ in range(2):
            last = records_of(dataset)[-1]
            assert last.meta == {**numbers, "workers": "auto"}
            assert len(last.error) <= MAX_ERROR_CHARS and last.error.endswith("the end")
            dataset.finalize()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (([task(1)], [space(1)], [program(1)], [record(2)]), DatasetError, "a record refers to program"),
        (([task(1)], [], [program(1)], []), DatasetError, "refers to space"),
        (([], [], [replace(program(1), space_hash=None)], []), DatasetError, "refers to task"),
        (([], [space(1)], [], []), DatasetError, "refers to task"),
        (([task(1)], [space(1)], [program(1)], [replace(record(1), latency_s=-1.0)]), LabelError, "latency_s is -1"),
    ],
)  # fmt: skip
def test_references_to_nothing_fail(tmp_path: Path, parts: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_dataset(tmp_path / "once", *parts)
    assert not (tmp_path / "once").exists()
    with Dataset.create(tmp_path / "rows") as dataset, pytest.raises(error, match=message):
        for add, items in zip(("add_task", "add_space", "add_program", "add_record"), parts, strict=True):
            for item in items:
                getattr(dataset, add)(item)


def test_a_library_program_has_no_space(tmp_path: Path) -> None:
    library = Program("1234", task(1).hash, None, "", "unscheduled", "library")
    with Dataset.create(tmp_path / "d") as dataset:
        dataset.add_task(task(1))
        dataset.add_program(library)
        assert Dataset.open(tmp_path / "d").programs["1234"] == library
        dataset.finalize()
    assert Dataset.open(tmp_path / "d").programs["1234"] == library


def test_another_schema_version_and_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d", finalize=True)
    meta_file, records = tmp_path / "d" / "meta.json", tmp_path / "d" / "records.parquet"
    meta = json.loads(meta_file.read_text())
    meta_file.write_text(json.dumps({**meta, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(SchemaVersionError, match=f"version {SCHEMA_VERSION + 1}; .* {SCHEMA_VERSION}"):
        Dataset.open(tmp_path / "d")
    meta_file.write_text(json.dumps(meta))
    table = pq.read_table(records)
    pq.write_table(table.replace_schema_metadata({b"cdmpp": b'{"schema_version": 99}'}), records)
    with pytest.raises(SchemaVersionError, match=r"records\.parquet .* 99"):
        _ = Dataset.open(tmp_path / "d").records
    data = records.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"PAR1" + bytes(100)):
        records.write_bytes(broken)
        with pytest.raises(DatasetError, match=r"records\.parquet is damaged"):
            _ = Dataset.open(tmp_path / "d").records
    pq.write_table(pq.read_table(tmp_path / "d" / "tasks.parquet").replace_schema_metadata(None), records)
    with pytest.raises(DatasetError, match=r"records\.parquet is not a dataset file"):
        _ = Dataset.open(tmp_path / "d").records


def test_no_dataset_at_all(tmp_path: Path) -> None:
    meta = tmp_path / "meta.json"
    for call, path, message in (
        (Dataset.open, tmp_path, r"no dataset: it has no meta\.json"),
        (load_datasets, tmp_path / "gone", "does not exist"),
        (load_datasets, tmp_path, "contains none"),
    ):
        with pytest.raises(DatasetError, match=message):
            call(path)
    for text in ("[]", "{half"):
        meta.write_text(text)
        with pytest.raises(DatasetError, match=r"meta\.json is damaged"):
            Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match="is not a folder"):
        load_datasets(meta)


def test_creating_over_something_is_refused(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d")
    for create in (Dataset.create, lambda path: write_dataset(path, [], [], [], [])):
        with pytest.raises(DatasetError, match="is a dataset already"):
            create(tmp_path / "d")
    assert len(Dataset.open_or_create(tmp_path / "d").records) == 6
    (tmp_path / "d" / "meta.json").unlink()
    with pytest.raises(DatasetError, match="choose an empty folder"):
        Dataset.create(tmp_path / "d")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot make"):
        Dataset.create(tmp_path / "file" / "d")


def test_meta_is_kept_and_changed_also_without_records(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d", note="first", network_families={"a": "cnn"}) as dataset:
        dataset.update_meta(note="second", schema_version=12)
        dataset.finalize()
    again = Dataset.open_or_create(tmp_path / "d", note="ignored")
    assert again.meta["note"] == "second" and again.meta["schema_version"] == SCHEMA_VERSION
    assert again.network_families == {"a": "cnn"}
    assert len(again.records) == len(again.labels()) == 0
    total = again.summary()["total"]
    assert total["records"] == 0 and total["noise_floor_mape"] is None


def test_several_datasets_read_as_one(tmp_path: Path) -> None:
    small_dataset(tmp_path / "all" / "a", n=4)
    with Dataset.create(tmp_path / "all" / "b", network_families={"other": "rnn"}) as other:
        # tasks of one hash may name their blocks differently, and traces refer to the names
        other.add_task(replace(task(1, {"other": 2.0}), tir_json="named by b"))
        add_all(other, 9)
        other.add_record(record(9, device=OTHER_DEVICE))
    view = load_datasets(tmp_path / "all")
    assert len(view.parts) == 2 and len(view.records) == 5
    assert dict(view.tasks[task(1).hash].networks) == {"net": 1.0, "other": 2.0}
    assert view.device_names == [DEVICE, OTHER_DEVICE]
    assert dict(view.network_families) == {"net": "cnn", "other": "rnn"}
    # a program goes with the task of its own dataset, one that is in none with the first
    tirs = [view.task_of(program(number)).tir_json for number in (0, 9, 7)]
    assert tirs == [task(1).tir_json, "named by b", task(1).tir_json]
    with pytest.raises(KeyError):
        view.task_of(program(0, of_task=9))
    same = load_datasets([tmp_path / "all", tmp_path / "all" / "a"])
    assert len(same.parts) == 2  # named twice, read once
    assert len(load_datasets(str(tmp_path / "all" / "a")).records) == 4


def test_thirty_thousand_programs_are_a_few_megabytes(tmp_path: Path) -> None:
    """A tenth of it: 3,000 programs of 60 tasks with 20 samples each stay below 350 kB in all."""
    rng = np.random.default_rng(0)
    tasks = [Task(f"{n:016x}", "t", f'{{"tir":{n}}}' + "x" * 20_000, {"net": 1}, 1.0, 1.0) for n in range(60)]
    programs, records = [], []
    for number in range(3000):
        decisions = json.dumps([[k, rng.choice([1, 2, 4, 8, 16], 4).tolist()] for k in range(8)])
        key, of_task = f"{rng.integers(2**62):016x}", number % 60
        programs.append(Program(key, tasks[of_task].hash, space(of_task).hash, decisions))
        samples_s = tuple((1e-3 * rng.lognormal(sigma=0.01, size=20)).tolist())
        meta = {"build_s": rng.random(), "run_s": rng.random(), "session": "s"}
        records.append(Record(key, DEVICE, "ok", samples_s[0], samples_s, 0.01, "", 1.7e9, meta))
    with write_dataset(tmp_path / "d", tasks, map(space, range(60)), programs, records) as dataset:
        dataset.finalize()
    assert sum(file.stat().st_size for file in (tmp_path / "d").iterdir()) < 350_000
