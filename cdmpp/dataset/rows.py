"""Rows that are added one by one and survive whatever ends the process: SQLite, while a dataset grows."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from cdmpp.errors import DatasetError
from cdmpp.files import parse_json

#: Seconds after which what was added is made to survive a power cut, too.
_SYNC_INTERVAL_S = 1.0

#: Beside the file, and always there: taking it away could let two writers in.
LOCK_FILE = ".lock"

#: File systems that other machines write to: SQLite's write-ahead log needs shared memory, which they do not have.
_SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "beegfs", "fuse.sshfs", "ceph")


class RowStore:
    """Rows of JSON in tables, in the order in which they were added; one writer, any number of readers.

    A row is safe from a killed process when :meth:`add` returns, and from a power cut a second later (:meth:`sync`). ``write``
    makes the file if it is missing, and keeps other writers out until :meth:`close` or the end of the process. ``id`` is that
    of this file: another one that takes its place has another. DatasetError: another process (or another object of this one)
    writes it; it cannot be opened; it is no such file.
    """

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        self._owner = os.getpid()
        self._lock: sqlite3.Connection | None = None
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        with self._errors("open"):
            if write:
                self._lock = self._locked()
            elif not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-shm").exists():
                path = self._copied()  # to read a log that nobody has open, SQLite has to write beside it
            # A reader, too, rolls back what a killed writer left half-written, for which SQLite has to write.
            mode = "rwc" if write else "rw"
            where = f"{path.absolute().as_uri()}?mode={mode}"
            # threads may take turns
            self._db = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA query_only = {int(not write)}")
            if write:
                local = _file_system(path.parent) not in _SHARED_FILE_SYSTEMS
                self._db.execute(f"PRAGMA journal_mode={'WAL' if local else 'DELETE'}")
                self._db.execute(f"PRAGMA synchronous={'NORMAL' if local else 'FULL'}")
                self._db.execute("CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, "
                    "key TEXT, value TEXT NOT NULL, UNIQUE (kind, key))"
                )
                self._db.execute("INSERT OR IGNORE INTO notes VALUES ('id', ?)", (uuid4().hex,))
            self.id = str(self._db.execute("SELECT value FROM notes WHERE name = 'id'").fetchone()[0])
        self._synced_at = time.monotonic()

    def _locked(self) -> sqlite3.Connection:
        """A connection whose transaction keeps other writers out; the system ends it with the process, however that ends."""
        lock = sqlite3.connect(self.path.with_name(LOCK_FILE), timeout=0, isolation_level=None)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            lock.close()
            if "locked" in str(error):
                raise DatasetError(f"{self.path.parent} is being written by another process") from error
            raise
        return lock

    def _copied(self) -> Path:
        """The file and its journal where they can be opened: what a writer left on a medium that is now read-only."""
        self._copy = tempfile.TemporaryDirectory(prefix="cdmpp-rows-")
        for name in (self.path.name, f"{self.path.name}-wal", f"{self.path.name}-journal"):
            if self.path.with_name(name).exists():
                shutil.copy(self.path.with_name(name), self._copy.name)
        return Path(self._copy.name) / self.path.name

    def add(self, kind: str, value: Any, key: str | None = None) -> None:
        """Add a row of JSON to a table, unless the table has one of that key. DatasetError: the file cannot be written (all
        rows before stay); the value cannot be JSON; the process was forked from the one that opened the file."""
        if os.getpid() != self._owner:
            raise DatasetError(f"{self.path}: a forked process may not write what its parent opened")
        try:
            text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{self.path}: {kind} cannot be stored as JSON: {error}") from error
        with self._errors("write"):
            self._db.execute("INSERT OR IGNORE INTO rows (kind, key, value) VALUES (?, ?, ?)", (kind, key, text))
        if time.monotonic() - self._synced_at >= _SYNC_INTERVAL_S:
            self.sync()

    def rows(self, kind: str, after: int = 0) -> list[tuple[int, Any]]:
        """Number and value of the rows of a table with numbers above ``after`` (DatasetError if the file is damaged)."""
        query = "SELECT number, value FROM rows WHERE kind = ? AND number > ? ORDER BY number"
        with self._errors("read"):
            return [(int(n), parse_json(text)) for n, text in self._db.execute(query, (kind, after))]

    @property
    def last(self) -> int:
        """The highest number of a row; 0 without rows."""
        with self._errors("read"):
            return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM rows").fetchone()[0])

    def sync(self) -> None:
        """Make all rows survive a power cut (DatasetError if the disk refuses)."""
        with self._errors("write"):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._synced_at = time.monotonic()

    def close(self, delete: bool = False) -> None:
        """Sync, let others write; ``delete`` removes the file. Closing twice is fine."""
        self._db.close()
        if delete:
            for suffix in ("", "-wal", "-shm", "-journal"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._copy is not None:
            self._copy.cleanup()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            kept = "; what was added before is kept" if what == "write" else ""
            raise DatasetError(f"cannot {what} {self.path}: {error}{kept}") from error


def _file_system(folder: Path) -> str:
    """Kind of the file system that a folder is on; "" where the system does not tell."""
    folder = folder.resolve()
    mounted = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounted[parent] for parent in (folder, *folder.parents) if parent in mounted), "")
