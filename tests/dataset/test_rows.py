"""Rows that are added one by one: nothing that was added is lost, whatever ends the process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.dataset import rows as rows_module
from cdmpp.dataset.rows import RowStore
from cdmpp.errors import DatasetError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(values=st.lists(JSON, max_size=8))
def test_what_is_added_reads_back_in_order(tmp_path_factory: Any, values: list[Any]) -> None:
    store = RowStore(tmp_path_factory.mktemp("rows") / "rows.db", write=True)
    for value in values:
        store.add("a", value)
        store.add("b", [value])
    assert [value for _, value in store.rows("a")] == values
    assert [value for _, value in store.rows("b")] == [[value] for value in values]
    store.close()


def test_a_key_is_added_once_and_rows_after_a_number_are_the_later_ones(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows.db", write=True)
    for number, key in enumerate(["x", "y", "x", None, None]):
        store.add("a", number, key)
    assert [value for _, value in store.rows("a")] == [0, 1, 3, 4]
    (_, _), (second, _), *_ = store.rows("a")
    assert [value for _, value in store.rows("a", after=second)] == [3, 4]
    assert store.last == store.rows("a")[-1][0]
    store.close()


def test_one_writes_and_others_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    first = RowStore(path, write=True)
    first.add("a", 1)
    with pytest.raises(DatasetError, match=f"{tmp_path} is being written by another process"):
        RowStore(path, write=True)
    reader = RowStore(path)
    first.add("a", 2)
    assert [value for _, value in reader.rows("a")] == [1, 2]
    with pytest.raises(DatasetError, match="readonly"):
        reader.add("a", 3)
    reader.close()
    first.close()
    RowStore(path, write=True).close()


_ADD = """
import sys, time
from pathlib import Path
from cdmpp.dataset.rows import RowStore
store = RowStore(Path(sys.argv[1]), write=True)
for number in range(10**6):
    store.add("a", number)
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_and_lets_others_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with subprocess.Popen(
        [sys.executable, "-c", _ADD, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
    assert [value for _, value in RowStore(path).rows("a")][: len(told)] == told
    store = RowStore(path, write=True)
    store.add("a", "after")
    assert store.rows("a")[-1][1] == "after"
    store.close()


def test_a_forked_process_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore(tmp_path / "rows.db", write=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(DatasetError, match="forked process"):
        store.add("a", 1)
    monkeypatch.undo()
    store.add("a", 2)
    assert [value for _, value in store.rows("a")] == [2]
    store.close()


def test_a_full_disk_is_one_line_and_keeps_what_was_added(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows.db", write=True)
    store.add("a", 1)
    store._db.execute("PRAGMA max_page_count = 8")  # SQLite's own way of a disk that ends
    with pytest.raises(
        DatasetError, match="database or disk is full; what was added before is kept"
    ) as caught:
        for number in range(1000):
            store.add("a", "x" * 500 + str(number))
    assert "\n" not in str(caught.value)
    kept = len(store.rows("a"))
    store.close()
    assert kept >= 1 and len(RowStore(tmp_path / "rows.db").rows("a")) == kept


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b""])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.db"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"cannot open .*rows\.db") as caught:
        RowStore(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DatasetError, match="cannot open"):
        RowStore(tmp_path / "rows.db", write=True)


def test_a_read_only_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore(tmp_path / "rows.db", write=True)
    store._db.execute("PRAGMA query_only = 1")
    with pytest.raises(DatasetError, match="readonly database"):
        store.add("a", 1)
    store.close()


def test_what_json_has_no_word_for_is_refused(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows.db", write=True)
    for value in (float("nan"), object()):
        with pytest.raises(DatasetError, match="a cannot be stored as JSON"):
            store.add("a", value)
    assert store.rows("a") == []
    store.close()


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete")])
def test_a_disk_that_other_machines_write_to_has_a_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    monkeypatch.setattr(rows_module, "_file_system", lambda folder: kind)
    RowStore(tmp_path / "rows.db", write=True).close()
    assert sqlite3.connect(tmp_path / "rows.db").execute("PRAGMA journal_mode").fetchone() == (mode,)


def test_the_file_system_of_a_folder_is_found(tmp_path: Path) -> None:
    assert rows_module._file_system(tmp_path)
    assert rows_module._file_system(Path("/proc/self")) == "proc"
