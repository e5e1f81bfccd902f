"""Append-only JSON lines that know when they are damaged.

Of the dataset nothing uses this: it goes with `profiler/bundle_make.py` and `profiler/validity_run.py`, which do.

A line is ``<crc32 of the JSON, 8 hex digits> <JSON>\\n``. Each line is handed to the kernel in one write,
so a killed process loses nothing it had appended; ``fsync`` at most once a second bounds what a power cut
can take. A line whose checksum does not match (a cut tail, a flipped bit, a foreign line) is skipped and
counted, never fatal.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.errors import DatasetError


def encode_line(value: Any) -> bytes:
    """One journal line of a JSON value (ValueError for NaN or infinity)."""
    payload = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def decode_line(line: bytes) -> Any:
    """The value of one line, without its newline; ValueError if the line is damaged."""
    if len(line) < 10 or line[8:9] != b" ":
        raise ValueError("not a journal line")
    payload = line[9:]
    if line[:8] != b"%08x" % zlib.crc32(payload):
        raise ValueError("checksum mismatch")
    return json.loads(payload)


@dataclass(frozen=True)
class JournalContent:
    """What could be read of a journal.

    Attributes
    ----------
    values
        The decoded lines, in order.
    corrupt_lines
        Lines that were skipped.
    n_bytes, crc32
        Of the whole file as read. ``finalize`` notes them so that a journal that is already in the parquet
        file is not read again.
    """

    values: list[Any]
    corrupt_lines: int
    n_bytes: int
    crc32: int


def read_journal(path: Path, ingested: tuple[int, int] | None = None) -> JournalContent:
    """Read a journal; a missing file is an empty one.

    Parameters
    ----------
    ingested
        (n_bytes, crc32) of the journal that a parquet file already contains. If the file starts with
        exactly those bytes they are skipped (a crash between writing the parquet file and deleting the
        journal).

    Raises
    ------
    DatasetError
        The file exists and cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalContent([], 0, 0, 0)
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from error
    body = data
    if ingested and 0 < ingested[0] <= len(data) and zlib.crc32(data[: ingested[0]]) == ingested[1]:
        body = data[ingested[0] :]
    values, corrupt = [], 0
    for line in body.split(b"\n"):
        if not line:
            continue
        try:
            values.append(decode_line(line))
        except ValueError:
            corrupt += 1
    return JournalContent(values, corrupt, len(data), zlib.crc32(data))


class JournalWriter:
    """Appends lines to one journal. One writer at a time.

    A tail that was cut before is closed with a newline, so that it spoils no line but its own. When the
    disk is full the half-written line is taken back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dirty = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise DatasetError(f"cannot write {path}: {error.strerror}") from error
        self._close_tail = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"

    def append(self, value: Any) -> None:
        """Write one line.

        Raises
        ------
        DatasetError
            The disk is full, or the file cannot be written; all lines before stay readable.
        """
        line = encode_line(value)
        if self._close_tail:
            line = b"\n" + line
        self._write(line)
        self._close_tail = False

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._take_back()
            raise DatasetError(
                f"cannot write {self.path}: {error.strerror}; what was added before is kept"
            ) from error
        self._size += len(line)
        self._dirty = True

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:  # the checksum of the half line will give it away
            self._close_tail = True

    def sync(self) -> None:
        """Make everything appended so far survive a power cut (DatasetError if the disk refuses)."""
        if not self._dirty:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise DatasetError(f"cannot write {self.path}: {error.strerror}") from error
        self._dirty = False

    def close(self) -> None:
        """Sync and close; closing twice is fine."""
        if self._fd < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._fd)
            self._fd = -1
