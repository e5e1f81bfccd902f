"""Datasets in folders. While profiling, rows are appended to an SQLite file, where they survive any end of the process; the
finished dataset is compact parquet."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import psutil
import pyarrow as pa

from cdmpp.dataset import record as layout
from cdmpp.dataset.view import DatasetView, check_same
from cdmpp.device import Device
from cdmpp.errors import DatasetError, LabelError, raised_as
from cdmpp.files import parse_json, read_json, write_json
from cdmpp.program.types import Program, Space, Task

_LOG = logging.getLogger(__name__)

#: Seconds after which added rows are also made to survive a power cut.
_SYNC_INTERVAL_S = 1.0

#: Lock file beside the SQLite file. It is never removed: that could let two writers in.
LOCK_FILE = ".lock"

#: Network file systems. SQLite's write-ahead log needs memory that is shared by all its users, which separate machines lack.
_SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "beegfs", "fuse.sshfs", "ceph")


class RowStore:
    """Tables of JSON rows, in the order in which they were added; one writer, any number of readers.

    A row survives a killed process as soon as :meth:`add` returns, and a power cut a second later (:meth:`sync`). ``write``
    creates the file if it is missing, and keeps other writers out until :meth:`close` or the end of the process. ``id``
    identifies this file; a file that replaces it has another id. DatasetError if another process (or another object of this
    process) is writing the file, it cannot be opened, or it is no file of rows."""

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        self._owner = os.getpid()
        self._lock: sqlite3.Connection | None = None
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        with self._errors("open"):
            if write:
                self._lock = self._locked()
            elif not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-shm").exists():
                path = self._copied()  # SQLite must write next to a log to read it, unless another process has it open
            # Readers need write access too: SQLite rolls back what a killed writer left half-written.
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
        """A connection whose open transaction keeps other writers out; the system ends it when the process ends in any way."""
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
        """A writable copy of the file and its journal, which SQLite can open although the original is on a read-only medium."""
        self._copy = tempfile.TemporaryDirectory(prefix="cdmpp-rows-")
        for name in (self.path.name, f"{self.path.name}-wal", f"{self.path.name}-journal"):
            if self.path.with_name(name).exists():
                shutil.copy(self.path.with_name(name), self._copy.name)
        return Path(self._copy.name) / self.path.name

    def add(self, kind: str, value: Any, key: str | None = None) -> None:
        """Add a JSON row to a table, unless the table has a row with that key. DatasetError if the file cannot be written (all
        earlier rows stay), the value cannot be stored as JSON, or a parent process opened the file and forked this one."""
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
        """Number and value of the rows of a table that come after row ``after`` (DatasetError if the file is damaged)."""
        query = "SELECT number, value FROM rows WHERE kind = ? AND number > ? ORDER BY number"
        with self._errors("read"):
            return [(int(n), parse_json(text)) for n, text in self._db.execute(query, (kind, after))]

    @property
    def last(self) -> int:
        """The highest row number; 0 if there are no rows."""
        with self._errors("read"):
            return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM rows").fetchone()[0])

    def sync(self) -> None:
        """Make all rows survive a power cut (DatasetError if the disk refuses)."""
        with self._errors("write"):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._synced_at = time.monotonic()

    def close(self, delete: bool = False) -> None:
        """Sync, and let others write; ``delete`` also removes the file. May be called twice."""
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
    """The type of the file system that holds a folder; "" if unknown."""
    folder = folder.resolve()
    mounted = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounted[parent] for parent in (folder, *folder.parents) if parent in mounted), "")


class Dataset(DatasetView):
    """A dataset in the folder ``path`` (see :mod:`cdmpp.dataset.record` for its files); ``meta`` is its ``meta.json``. Reading
    is lazy. The first ``add_...`` keeps other writers out until :meth:`close` (or the end of a ``with``). Not thread-safe."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._rows: RowStore | None = None
        self._owner = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """Drop what was read; it is read again on next use."""
        for name in ("tasks", "spaces", "programs", "records"):
            self.__dict__.pop(name, None)
        self._corrupt: dict[str, int] = {}  # damaged rows of each table that was read

    # -- opening ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, **meta: Any) -> Dataset:
        """Make a new dataset and lock it for writing; ``meta`` are JSON values, such as ``network_families={network: family}``.
        DatasetError if there is a dataset already, the folder has files with the names of a dataset's, or cannot be written."""
        path = Path(path)
        if (path / layout.META_FILE).exists():
            raise DatasetError(f"{path} is a dataset already; open it to add to it")
        with raised_as(DatasetError, f"cannot make {path}"):
            path.mkdir(parents=True, exist_ok=True)
        for name in (layout.ROWS_FILE, *(f"{table}.{form}" for table in layout.SCHEMAS for form in ("parquet", "jsonl"))):
            if (path / name).exists():
                raise DatasetError(f"{path / name} is there without a {layout.META_FILE}; choose an empty folder")
        dataset = cls(path, {**meta, "schema_version": layout.SCHEMA_VERSION, "created_at": time.time()})
        dataset._rows = RowStore(path / layout.ROWS_FILE, write=True)
        try:
            dataset._write_meta()
        except DatasetError:
            dataset.close()
            raise
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a dataset to read it or add to it. DatasetError if there is none, SchemaVersionError if its version differs."""
        return cls(Path(path), _read_meta(Path(path)))

    @classmethod
    def open_or_create(cls, path: str | Path, **meta: Any) -> Dataset:
        """Open the dataset if there is one (its meta is kept), else create it."""
        return cls.open(path) if (Path(path) / layout.META_FILE).exists() else cls.create(path, **meta)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[Dataset]:
        return [self]

    @cached_property
    def tasks(self) -> dict[str, Task]:
        known, rows = self._read("tasks")
        for task in self._decoded("tasks", rows, lambda row: layout.task_from_json(row, known)):
            known[task.hash] = task
        return known

    @cached_property
    def spaces(self) -> dict[str, Space]:
        return self._first_of_each_hash("spaces", lambda row: Space(**row))

    @cached_property
    def programs(self) -> dict[str, Program]:
        return self._first_of_each_hash("programs", lambda row: Program(**{"space_hash": None, **row}))

    def _first_of_each_hash(self, table: str, decode: Callable[[Any], Any]) -> dict[str, Any]:
        known, rows = self._read(table)
        for item in self._decoded(table, rows, decode):
            known.setdefault(item.hash, item)
        return known

    @cached_property
    def records(self) -> pd.DataFrame:
        stored, rows = self._read("records")
        added = layout.records_to_frame(self._decoded("records", rows, layout.record_from_json))
        # an empty one does not change the other's types
        frames = [frame for frame in (stored, added) if len(frame)] or [stored]
        frame = pd.concat(frames, ignore_index=True)
        known = [self.programs.get(program) for program in frame["program"]]
        return frame.assign(
            task=[program.task_hash if program else "" for program in known],
            origin=[program.origin if program else "" for program in known],
        )[list(layout.RECORD_COLUMNS)]

    @property
    def corrupt_lines(self) -> int:
        """Damaged rows that were skipped, over the whole life of the dataset."""
        _ = self.tasks, self.spaces, self.programs, self.records
        return sum(self._corrupt.values())

    def measured(self, device: str, retry: Collection[str] = ()) -> set[str]:
        """Hashes of the programs that have a record on a device with a status that is not in ``retry``."""
        records = self.records
        return set(records["program"][(records["device"] == device) & ~records["status"].isin(list(retry))])

    def _read(self, table: str) -> tuple[Any, list[Any]]:
        """The contents of a table's parquet file, and the rows that were added since."""
        file = self.path / f"{table}.parquet"
        arrow, note = layout.SCHEMAS[table].empty_table(), dict[str, Any]()
        if file.exists():
            arrow, note = layout.read_parquet(file, layout.SCHEMAS[table])
        with raised_as(DatasetError, f"{file} is damaged", TypeError, AttributeError):
            stored = layout.records_from_arrow(arrow) if table == "records" else layout.from_arrow(table, arrow)
        # If finalize() was cut off before it deleted the rows, the note says which rows the file already holds.
        values, damaged = read_journal(self.path / f"{table}.jsonl", note.get("ingested"))
        self._corrupt[table] = int(note.get("corrupt_lines", 0)) + damaged
        rows = self._rows
        if rows is None and (self.path / layout.ROWS_FILE).exists():
            rows = RowStore(self.path / layout.ROWS_FILE)
        if rows is not None:
            in_file, last = note.get("rows") or ("", 0)
            values += [value for _, value in rows.rows(table, last if in_file == rows.id else 0)]
            if rows is not self._rows:
                rows.close()
        return stored, values

    def _decoded(self, table: str, rows: list[Any], decode: Callable[[Any], Any]) -> Iterator[Any]:
        """Rows decoded to objects; a row that cannot be decoded counts as damaged."""
        for row in rows:
            try:
                item = layout.checked(decode(row))
            except (TypeError, KeyError, ValueError, AttributeError, LabelError, DatasetError):
                self._corrupt[table] += 1
            else:
                yield item

    # -- writing ------------------------------------------------------------------------------------------

    def add_task(self, task: Task) -> None:
        """Add a task. If it is there already, only its new networks are added."""
        rows = self._writable()
        old = self.tasks.get(task.hash)
        united = task if old is None else layout.unite_networks(old, task)
        if old is None:
            rows.add("tasks", asdict(task), task.hash)
        elif united is not old:
            rows.add("tasks", {"hash": task.hash, "networks": dict(united.networks)})
        self.tasks[task.hash] = united

    def add_space(self, space: Space) -> None:
        """Add a design space unless it is there (DatasetError if its task was not added)."""
        rows = self._writable()
        if space.hash not in self.spaces:
            _require(f"{self.path}: space {space.hash}", task=(space.task_hash, self.tasks))
            rows.add("spaces", asdict(space), space.hash)
            self.spaces[space.hash] = space

    def add_program(self, program: Program) -> None:
        """Add a program unless it is there (DatasetError if its task or space was not added)."""
        rows = self._writable()
        if program.hash not in self.programs:
            task, space = (program.task_hash, self.tasks), (program.space_hash, self.spaces)
            _require(f"{self.path}: program {program.hash}", task=task, space=space)
            rows.add("programs", asdict(program), program.hash)
            self.programs[program.hash] = program

    def add_record(self, record: layout.Record) -> None:
        """Append a record. A second record of the same program and device is kept too. Raises the errors of
        :meth:`Record.validate`; also DatasetError if the program is unknown or the disk full (earlier rows stay readable)."""
        record.validate()
        rows = self._writable()
        _require(f"{self.path}: a record", program=(record.program, self.programs))
        rows.add("records", layout.record_to_json(record))
        self.__dict__.pop("records", None)  # read again on demand: a run of days has too many to keep in memory

    def update_meta(self, **meta: Any) -> None:
        """Change entries of ``meta.json``."""
        self._writable()
        self.meta = {**self.meta, **meta, "schema_version": layout.SCHEMA_VERSION}
        self._write_meta()

    def set_device(self, device: Device) -> None:
        """Store the specification of the dataset's only device (DatasetError if the dataset has another device)."""
        self._writable()
        names = {*self.meta.get("devices", {}), *self.device_names} - {device.name}
        if names:
            raise DatasetError(
                f"{self.path} holds labels of {', '.join(sorted(names))}: choose another folder for those of {device.name}"
            )
        if "devices" in self.meta:
            check_same(device, Device.from_json(self.meta["devices"][device.name]), "use", str(self.path))
        self.update_meta(devices={device.name: device.to_json()})

    def finalize(self) -> None:
        """Turn the rows into parquet files, and delete the rows once the files were read back. A crash in between neither loses
        nor duplicates rows. More can be added afterwards. A DatasetError, as of a full disk, loses nothing."""
        rows = self._writable()
        self._forget()
        tables = _tables(self.tasks, self.spaces, self.programs, self.records)
        for table, content in tables.items():
            note: dict[str, Any] = {"rows": [rows.id, rows.last], "corrupt_lines": self._corrupt[table]}
            journal = self.path / f"{table}.jsonl"
            if journal.exists():
                data = journal.read_bytes()
                note["ingested"] = [len(data), zlib.crc32(data)]
            layout.write_parquet(self.path / f"{table}.parquet", content, **note)
        for table in layout.SCHEMAS:
            (self.path / f"{table}.jsonl").unlink(missing_ok=True)
        if self.corrupt_lines:
            _LOG.warning("%s: %d damaged rows were skipped", self.path, self.corrupt_lines)
        self.close(delete_rows=True)

    def close(self, delete_rows: bool = False) -> None:
        """Sync, and let others write. The dataset stays readable; writing to it again locks it again."""
        if self._rows is not None and os.getpid() == self._owner:
            self._rows.close(delete_rows)
            self._rows = None
            self._forget()

    def _writable(self) -> RowStore:
        if os.getpid() != self._owner:
            raise DatasetError(f"{self.path}: a forked process may not write the dataset of its parent")
        if self._rows is None:
            self._rows = RowStore(self.path / layout.ROWS_FILE, write=True)
            self.meta = _read_meta(self.path)
            self._forget()  # another writer may have added something since it was read
        return self._rows

    def _write_meta(self) -> None:
        try:
            write_json(self.path / layout.META_FILE, self.meta)
        except (OSError, ValueError) as error:
            raise DatasetError(f"cannot write {self.path / layout.META_FILE}: {error}") from error


def read_journal(path: Path, ingested: Sequence[int] | None = None) -> tuple[list[Any], int]:
    """Rows of a journal, the format before SQLite, and the number of damaged lines, which are skipped. A line is
    ``<crc32 of the JSON, 8 hex digits> <JSON>``. ``ingested`` is the length and crc32 of the first part of the journal, which a
    parquet file already holds. DatasetError if the file cannot be read."""
    if not path.exists():
        return [], 0
    with raised_as(DatasetError, f"cannot read {path}"):
        data = path.read_bytes()
    if ingested and 0 < ingested[0] <= len(data) and zlib.crc32(data[: ingested[0]]) == ingested[1]:
        data = data[ingested[0] :]
    lines = [line for line in data.split(b"\n") if line]
    whole = [line[9:] for line in lines if line[:9] == b"%08x " % zlib.crc32(line[9:])]
    values = []
    for text in whole:
        with contextlib.suppress(ValueError):
            values.append(parse_json(text))
    return values, len(lines) - len(values)


#: zstd level for imports. Users import again rather than ship the result, so time matters more than size.
_LEVEL = 9


def write_dataset(
    path: str | Path,
    tasks: Iterable[Task],
    spaces: Iterable[Space],
    programs: Iterable[Program],
    records: Iterable[layout.Record],
    **meta: Any,
) -> Dataset:
    """Write a new dataset as parquet files, several times faster than adding records one by one. Items with the same hash are
    stored once. Raises the errors of :meth:`Dataset.create` and the ``add_...`` methods."""
    known_tasks = {task.hash: task for task in tasks}
    known_spaces = {space.hash: space for space in spaces}
    known = {program.hash: program for program in programs}
    measured = list(records)
    for space in known_spaces.values():
        _require(f"space {space.hash}", task=(space.task_hash, known_tasks))
    for program in known.values():
        of_task, of_space = (program.task_hash, known_tasks), (program.space_hash, known_spaces)
        _require(f"program {program.hash}", task=of_task, space=of_space)
    for record in measured:
        record.validate()
        _require("a record", program=(record.program, known))
    tables = _tables(known_tasks, known_spaces, known, layout.records_to_frame(measured))
    with Dataset.create(path, **meta) as dataset:
        for table, content in tables.items():
            layout.write_parquet(dataset.path / f"{table}.parquet", content, compression_level=_LEVEL)
        dataset.close(delete_rows=True)
    return Dataset.open(path)


def load_datasets(paths: str | Path | Sequence[str | Path]) -> DatasetView:
    """Read dataset folders as one dataset; a folder without ``meta.json`` stands for the datasets right below it.

    DatasetError if a path does not exist or holds no dataset. SchemaVersionError if a dataset has another version."""
    found: dict[Path, Path] = {}  # by resolved path, so that each folder is read once
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.is_dir():
            raise DatasetError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
        folders = [path] if (path / layout.META_FILE).exists() else sorted(f.parent for f in path.glob(f"*/{layout.META_FILE}"))
        if not folders:
            raise DatasetError(f"{path} is no dataset (no {layout.META_FILE}) and contains none")
        found.update((folder.resolve(), folder) for folder in folders)
    if not found:
        raise DatasetError("no dataset given")
    parts = [Dataset.open(folder) for folder in found.values()]
    return parts[0] if len(parts) == 1 else DatasetView(parts)


def _tables(
    tasks: Mapping[str, Task], spaces: Mapping[str, Space], programs: Mapping[str, Program], records: pd.DataFrame
) -> dict[str, pa.Table]:
    objects = {"tasks": tasks, "spaces": spaces, "programs": programs}
    tables = {name: layout.to_arrow(name, known.values()) for name, known in objects.items()}
    stored = pa.Table.from_pandas(records, layout.SCHEMAS["records"], preserve_index=False)  # NaN becomes null
    return {**tables, "records": stored.replace_schema_metadata()}


def _require(who: str, **parts: tuple[str | None, Collection[str]]) -> None:
    """Raise DatasetError if `who` refers to a key that is not in its known collection; a key of None refers to nothing."""
    for kind, (key, known) in parts.items():
        if key is not None and key not in known:
            raise DatasetError(f"{who} refers to {kind} {key}, which was not added")


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / layout.META_FILE
    try:
        meta = read_json(file)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is no dataset: it has no {layout.META_FILE}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} is damaged: {error}") from error
    if not isinstance(meta, dict):
        raise DatasetError(f"{file} is damaged: expected a JSON object")
    layout.check_schema_version(meta, file)
    return meta
