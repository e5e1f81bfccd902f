"""A dataset in a folder: appended to while profiling (SQLite: rows that survive whatever ends the process),
compact parquet when done."""

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
    writes it; it cannot be opened; it is no such file."""

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


class Dataset(DatasetView):
    """One dataset folder (see :mod:`cdmpp.dataset.record` for what is in it), ``path``, and its ``meta.json``, ``meta``.
    Reading is lazy. The first ``add_...`` keeps other writers out until :meth:`close` (or use the dataset as a context
    manager). Not for several threads at once."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._rows: RowStore | None = None
        self._owner = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """Drop what was read, to read it anew when asked."""
        for name in ("tasks", "spaces", "programs", "records"):
            self.__dict__.pop(name, None)
        self._corrupt: dict[str, int] = {}  # of the tables that were read

    # -- opening ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, **meta: Any) -> Dataset:
        """Make a new dataset and lock it for writing; ``meta`` are JSON values, such as ``network_families={network: family}``.
        DatasetError: there is a dataset already, the folder holds other files of these names, or it cannot be written."""
        path = Path(path)
        if (path / layout.META_FILE).exists():
            raise DatasetError(f"{path} is a dataset already; open it to add to it")
        with raised_as(DatasetError, f"cannot make {path}"):
            path.mkdir(parents=True, exist_ok=True)
        for name in (
            layout.ROWS_FILE,
            *(f"{table}.{form}" for table in layout.SCHEMAS for form in ("parquet", "jsonl")),
        ):
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
        """Open a dataset, to read or to add to (DatasetError for none; SchemaVersionError for one of another version)."""
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
        """Hashes of the programs that have a record on a device, of another status than those to ``retry``."""
        records = self.records
        return set(records["program"][(records["device"] == device) & ~records["status"].isin(list(retry))])

    def _read(self, table: str) -> tuple[Any, list[Any]]:
        """What the parquet file of a table contains, and the rows that it does not contain yet."""
        file = self.path / f"{table}.parquet"
        arrow, note = layout.SCHEMAS[table].empty_table(), dict[str, Any]()
        if file.exists():
            arrow, note = layout.read_parquet(file, layout.SCHEMAS[table])
        with raised_as(DatasetError, f"{file} is damaged", TypeError, AttributeError):
            stored = layout.records_from_arrow(arrow) if table == "records" else layout.from_arrow(table, arrow)
        # Notes tell what the file holds already, where the process ended before the rows were deleted.
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
        """Rows as objects; one of another shape counts as damaged."""
        for row in rows:
            try:
                item = layout.checked(decode(row))
            except (TypeError, KeyError, ValueError, AttributeError, LabelError, DatasetError):
                self._corrupt[table] += 1
            else:
                yield item

    # -- writing ------------------------------------------------------------------------------------------

    def add_task(self, task: Task) -> None:
        """Add a task; of one that is there already only the new networks are added."""
        rows = self._writable()
        old = self.tasks.get(task.hash)
        united = task if old is None else layout.unite_networks(old, task)
        if old is None:
            rows.add("tasks", asdict(task), task.hash)
        elif united is not old:
            rows.add("tasks", {"hash": task.hash, "networks": dict(united.networks)})
        self.tasks[task.hash] = united

    def add_space(self, space: Space) -> None:
        """Add a design space unless it is there (DatasetError if its task is not)."""
        rows = self._writable()
        if space.hash not in self.spaces:
            _require(f"{self.path}: space {space.hash}", task=(space.task_hash, self.tasks))
            rows.add("spaces", asdict(space), space.hash)
            self.spaces[space.hash] = space

    def add_program(self, program: Program) -> None:
        """Add a program unless it is there (DatasetError if its task or space is not)."""
        rows = self._writable()
        if program.hash not in self.programs:
            task, space = (program.task_hash, self.tasks), (program.space_hash, self.spaces)
            _require(f"{self.path}: program {program.hash}", task=task, space=space)
            rows.add("programs", asdict(program), program.hash)
            self.programs[program.hash] = program

    def add_record(self, record: layout.Record) -> None:
        """Append a record; a second one of a program and device is kept beside the first. Errors as of :meth:`Record.validate`;
        DatasetError also for an unknown program and a full disk, where what was added before stays readable."""
        record.validate()
        rows = self._writable()
        _require(f"{self.path}: a record", program=(record.program, self.programs))
        rows.add("records", layout.record_to_json(record))
        self.__dict__.pop("records", None)  # read again where they are asked for: a run of days has no room for all

    def update_meta(self, **meta: Any) -> None:
        """Change entries of ``meta.json``."""
        self._writable()
        self.meta = {**self.meta, **meta, "schema_version": layout.SCHEMA_VERSION}
        self._write_meta()

    def set_device(self, device: Device) -> None:
        """Store the specification of the one device that this dataset is of (DatasetError if it is of another one)."""
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
        """Turn the rows into parquet files, and delete them once these were read back: a crash in between loses nothing and
        doubles nothing. More can be added afterwards. DatasetError, such as for a full disk: rows and former parquet files
        stay."""
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
        """Sync, and let others write. The dataset stays readable; writing keeps others out again."""
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
    """Rows of a journal as cdmpp wrote them before they were in SQLite, ``<crc32 of the JSON, 8 hex digits> <JSON>`` a line,
    and how many damaged lines were skipped. ``ingested`` is the length and crc32 of a beginning that a parquet file holds
    already. DatasetError if the file cannot be read."""
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


#: Of zstd: what is imported is made again rather than shipped, so that time counts more than size.
_LEVEL = 9


def write_dataset(
    path: str | Path,
    tasks: Iterable[Task],
    spaces: Iterable[Space],
    programs: Iterable[Program],
    records: Iterable[layout.Record],
    **meta: Any,
) -> Dataset:
    """Write a new dataset as parquet files, several times faster than adding records one by one. Each hash is there once.
    Errors as of :meth:`Dataset.create` and the ``add_...`` methods."""
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

    DatasetError: a path does not exist or holds no dataset. SchemaVersionError: one was written with another version."""
    found: dict[Path, Path] = {}  # each once
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.is_dir():
            raise DatasetError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
        folders = (
            [path]
            if (path / layout.META_FILE).exists()
            else sorted(f.parent for f in path.glob(f"*/{layout.META_FILE}"))
        )
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
    return {**tables, "records": layout.records_to_arrow(records)}


def _require(who: str, **parts: tuple[str | None, Collection[str]]) -> None:
    """Refuse who refers to something that is not among the known ones (DatasetError); None refers to nothing."""
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
