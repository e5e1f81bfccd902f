"""Rows that are added one by one: nothing that was added is lost, whatever ends the process."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.dataset import store as rows_module
from cdmpp.dataset.store import RowStore
from cdmpp.errors import DatasetError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)

#: File systems, and how SQLite makes each batch durable there.
DISKS = {"ext4": "wal", "nfs4": "delete"}


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local disk, and one that other machines write to."""
    monkeypatch.setattr(rows_module, "_file_system", lambda folder: request.param)
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path, disk: str) -> Iterator[RowStore]:
    with closing(RowStore(tmp_path / "rows.db", write=True)) as store:
        yield store


def values(store: Path | RowStore, after: int = 0) -> list[Any]:
    """Of a store that is open, or of one that is read anew."""
    if isinstance(store, RowStore):
        return [value for _, value in store.rows("a", after)]
    with closing(RowStore(store)) as reader:
        return values(reader)


@given(added=st.lists(JSON, max_size=8))
def test_what_is_added_reads_back_in_order(tmp_path_factory: Any, added: list[Any]) -> None:
    with closing(RowStore(tmp_path_factory.mktemp("rows") / "rows.db", write=True)) as store:
        for value in added:
            store.add("a", value)
            store.add("b", [value])
        assert values(store) == added
        assert [value for _, value in store.rows("b")] == [[value] for value in added]


def test_a_key_is_added_once_and_rows_after_a_number_are_the_later_ones(store: RowStore) -> None:
    for number, key in enumerate(["x", "y", "x", None, None]):
        store.add("a", number, key)
    assert values(store) == [0, 1, 3, 4]
    assert values(store, after=store.rows("a")[1][0]) == [3, 4]
    assert store.last == store.rows("a")[-1][0]


def test_one_writes_and_others_read(store: RowStore, disk: str) -> None:
    store.add("a", 1)
    assert sqlite3.connect(store.path).execute("PRAGMA journal_mode").fetchone() == (DISKS[disk],)
    with pytest.raises(DatasetError, match=f"{store.path.parent} is being written by another process"):
        RowStore(store.path, write=True)
    reader = RowStore(store.path)
    store.add("a", 2)
    assert values(reader) == [1, 2]
    with pytest.raises(DatasetError, match="readonly"):
        reader.add("a", 3)
    reader.close()
    store.close()
    RowStore(store.path, write=True).close()


_ADD = """
import sys
from pathlib import Path
from cdmpp.dataset import store as rows
rows._file_system = lambda folder: sys.argv[2]
store = rows.RowStore(Path(sys.argv[1]), write=True)
for number in range(10**6):
    store.add("a", number)
    print(number, flush=True)
"""


def killed(path: Path, disk: str) -> list[int]:
    """Rows of which a writer said that they were added, before it was killed."""
    command = [sys.executable, "-c", _ADD, str(path), disk]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        added = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        return added + [int(line) for line in writer.stdout if line.endswith("\n")]


def test_a_killed_writer_loses_nothing_and_lets_others_write(tmp_path: Path, disk: str) -> None:
    path = tmp_path / "rows.db"
    added = killed(path, disk)
    assert values(path)[: len(added)] == added
    with closing(RowStore(path, write=True)) as store:
        store.add("a", "after")
    assert values(path)[-1] == "after"


@pytest.mark.parametrize("writable", [True, False])
def test_a_transaction_that_was_cut_is_rolled_back_by_who_reads(tmp_path, monkeypatch, writable: bool) -> None:
    monkeypatch.setattr(rows_module, "_file_system", lambda folder: "nfs4")
    store = RowStore(tmp_path / "rows.db", write=True)
    store.add("a", 1)
    store._db.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
    store._db.execute("BEGIN")
    for number in range(100):
        store.add("a", f"{number}" * 1000)
    (tmp_path / "killed").mkdir()
    for name in ("rows.db", "rows.db-journal"):
        shutil.copy(tmp_path / name, tmp_path / "killed")
    monkeypatch.setattr(os, "access", lambda *_: writable)
    assert values(tmp_path / "killed" / "rows.db") == [1]
    store._db.execute("ROLLBACK")
    store.close()


def test_a_forked_process_writes_nothing(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(DatasetError, match="forked process"):
            store.add("a", 1)
    store.add("a", 2)
    assert values(store) == [2]


def one_line(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_and_keeps_what_was_added(store: RowStore) -> None:
    store.add("a", 1)
    store._db.execute("PRAGMA max_page_count = 8")  # SQLite's own way of a disk that ends
    added = [1]

    def fill() -> None:
        for number in range(1000):
            store.add("a", "x" * 500 + str(number))
            added.append(number)

    one_line("database or disk is full; what was added before is kept", fill)
    store.close()
    assert len(values(store.path)) == len(added) > 1


def test_a_locked_file_is_one_line(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program than cdmpp, such as a backup, has it for itself."""
    store.add("a", 1)
    reader = RowStore(store.path)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for each in (store, reader):
        each._db.execute("PRAGMA busy_timeout = 10")
    message = r"cannot write .*rows\.db: database is locked; what was added before is kept"
    one_line(message, lambda: store.add("a", 2))
    other.execute("ROLLBACK")
    store.add("a", 3)
    assert values(reader) == [1, 3]


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b""])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.db").write_bytes(content)
    one_line(r"cannot open .*rows\.db", lambda: RowStore(tmp_path / "rows.db"))


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_read_only_medium_is_read_and_not_written(disk: str, end: str, medium: Callable[[str], Path]) -> None:
    path, added = medium("size=8m") / "rows.db", [0]
    if end == "killed":
        added = killed(path, disk)
    else:
        with closing(RowStore(path, write=True)) as store:
            store.add("a", 0)
    medium("remount,ro")
    assert values(path)[: len(added)] == added
    one_line("cannot open", lambda: RowStore(path, write=True))


def test_what_is_not_writable_is_copied_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where nothing can be mounted: files that a killed writer left, and a folder said to be read-only."""
    killed(tmp_path / "rows.db", "ext4")
    (tmp_path / "rows.db-shm").unlink()
    added = values(Path(shutil.copytree(tmp_path, tmp_path / "copy")) / "rows.db")
    monkeypatch.setattr(os, "access", lambda *_: False)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert values(tmp_path / "rows.db") == added
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_json_has_no_word_for_is_refused(store: RowStore) -> None:
    for value in (float("nan"), object()):
        one_line("a cannot be stored as JSON", lambda value=value: store.add("a", value))  # type: ignore[misc]
    assert store.rows("a") == []


def test_the_file_system_of_a_folder_is_found(tmp_path: Path) -> None:
    assert rows_module._file_system(tmp_path)
    assert rows_module._file_system(Path("/proc/self")) == "proc"
