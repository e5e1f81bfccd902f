"""The journal loses nothing but the line that is damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.dataset.journal import JournalSet, JournalWriter, decode_line, encode_line, read_journal
from cdmpp.errors import DatasetError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def write(path: Path, values: list[Any]) -> None:
    writer = JournalWriter(path)
    for value in values:
        writer.append(value)
    writer.close()


@given(JSON)
def test_a_line_is_one_line_and_reads_back(value: Any) -> None:
    line = encode_line(value)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode_line(line[:-1]) == value


def test_a_file_cut_anywhere_keeps_every_line_before_the_cut(tmp_path: Path) -> None:
    values = [{"n": n, "text": "é\n" * n} for n in range(5)]
    path = tmp_path / "a.jsonl"
    write(path, values)
    data = path.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        content = read_journal(path)
        whole = sum(end <= cut for end in ends)  # a line without its newline is whole too
        assert content.values == values[:whole]
        starts = {0, *(end + 1 for end in ends)}
        assert content.corrupt_lines == (cut not in starts and cut not in ends)


def test_appending_after_a_cut_tail_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-3])
    write(path, [3])
    content = read_journal(path)
    assert content.values == [1, 3]
    assert content.corrupt_lines == 1


def test_a_tail_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    write(path, [3])
    assert read_journal(path).values == [1, 2, 3]
    assert read_journal(path).corrupt_lines == 0


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_at_most_two_lines(tmp_path_factory: Any, position: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("j") / "a.jsonl"
    write(path, list(range(20)))
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))
    content = read_journal(path)
    assert len(content.values) >= 18
    assert set(content.values) <= set(range(20))
    assert content.corrupt_lines >= 1


def test_foreign_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [1])
    with path.open("ab") as file:
        file.write(b'{"plain": "json"}\n\xff\xfe\x00\n')
    assert read_journal(path).values == [1]
    assert read_journal(path).corrupt_lines == 2


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none.jsonl").values == []


def test_what_was_ingested_is_skipped_and_what_came_later_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, [1, 2])
    before = read_journal(path)
    write(path, [3])
    assert read_journal(path, (before.n_bytes, before.crc32)).values == [3]
    assert read_journal(path, (before.n_bytes, before.crc32 ^ 1)).values == [1, 2, 3]


def test_a_disk_that_fills_takes_the_half_written_line_back(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.jsonl"
    writer = JournalWriter(path)
    writer.append("kept")
    real_write = os.write
    calls: list[int] = []

    def full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(data)[:4])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DatasetError, match="No space left"):
        writer.append("lost")
    monkeypatch.setattr(os, "write", real_write)
    assert path.read_bytes() == encode_line("kept")
    writer.append("later")
    writer.close()
    assert read_journal(path).values == ["kept", "later"]
    assert read_journal(path).corrupt_lines == 0


def test_journals_are_synced_once_a_second_and_referred_ones_first(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[str] = []
    monkeypatch.setattr(JournalWriter, "sync", lambda self: synced.append(self.path.name))
    now = [0.0]
    paths = {name: tmp_path / name for name in ("programs", "records")}
    journals = JournalSet(paths, clock=lambda: now[0])
    journals.append("records", 1)
    journals.append("programs", 1)
    assert synced == []
    now[0] = 1.0
    journals.append("records", 2)
    assert synced == ["programs", "records"]
    journals.append("records", 3)
    assert len(synced) == 2


def test_an_unwritable_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"gone/a\.jsonl"):
        JournalWriter(tmp_path / "gone" / "a.jsonl")
