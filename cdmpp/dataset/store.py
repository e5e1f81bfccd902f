"""A dataset in a folder: appended to while profiling, compact parquet when done."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import codec
from cdmpp.dataset.devices import check_same, stored_devices
from cdmpp.dataset.parquet import check_schema_version, write_parquet
from cdmpp.dataset.record import Record
from cdmpp.dataset.rows import RowStore
from cdmpp.dataset.schema import META_FILE, RECORD_COLUMNS, ROWS_FILE, SCHEMA_VERSION, TABLES
from cdmpp.dataset.tables import StoredTables, journal_file, parquet_file, stack, stored_files
from cdmpp.dataset.view import DatasetView, unite_networks
from cdmpp.device import Device
from cdmpp.errors import DatasetError
from cdmpp.files import write_json
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)


class Dataset(DatasetView):
    """One dataset folder (see :mod:`cdmpp.dataset.schema` for what is in it).

    Reading is lazy. The first ``add_...`` keeps other writers out until :meth:`close` (or use the dataset as a context
    manager). Not for several threads at once.

    Attributes
    ----------
    path
        The folder.
    meta
        Contents of ``meta.json``.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._rows: RowStore | None = None
        self._owner = os.getpid()
        self._stored = StoredTables(path)
        self._old: pd.DataFrame | None = None
        self._fresh: list[Record] = []
        self._frame: pd.DataFrame | None = None
        self._measured: set[tuple[str, str, str]] | None = None

    # -- opening ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, **meta: Any) -> Dataset:
        """Make a new dataset and lock it for writing.

        Parameters
        ----------
        meta
            JSON values for ``meta.json``, such as ``network_families={network: family}``.

        Raises
        ------
        DatasetError
            There is a dataset already, the folder holds other files of these names, or it cannot be written.
        """
        path = Path(path)
        if (path / META_FILE).exists():
            raise DatasetError(f"{path} is a dataset already; open it to add to it")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatasetError(f"cannot make {path}: {error.strerror}") from error
        for file in stored_files(path):
            raise DatasetError(f"{file} is there without a {META_FILE}; choose an empty folder")
        dataset = cls(path, {**meta, "schema_version": SCHEMA_VERSION, "created_at": time.time()})
        dataset._rows = RowStore(path / ROWS_FILE, write=True)
        try:
            dataset._write_meta()
        except DatasetError:
            dataset.close()
            raise
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a dataset, to read or to add to.

        Raises
        ------
        DatasetError
            No dataset there, or a file of it is damaged beyond skipping.
        SchemaVersionError
            It was written with another schema version.
        """
        path = Path(path)
        return cls(path, _read_meta(path))

    @classmethod
    def open_or_create(cls, path: str | Path, **meta: Any) -> Dataset:
        """Open the dataset if there is one (its meta is kept), else create it."""
        if (Path(path) / META_FILE).exists():
            return cls.open(path)
        return cls.create(path, **meta)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, Task]:
        return self._stored.tasks

    @property
    def spaces(self) -> Mapping[str, Space]:
        return self._stored.spaces

    @property
    def programs(self) -> Mapping[str, Program]:
        return self._stored.programs

    @property
    def network_families(self) -> Mapping[str, str]:
        families = self.meta.get("network_families", {})
        return families if isinstance(families, dict) else {}

    @property
    def devices(self) -> Mapping[str, Device]:
        return stored_devices(self.meta, self.device_names, str(self.path))

    @property
    def records(self) -> pd.DataFrame:
        if self._frame is None:
            stored = self._stored.records if self._old is None else self._old
            self._old = stack(stored, codec.records_to_frame(self._fresh))
            self._fresh = []
            self._frame = self._with_programs(self._old)
        return self._frame

    @property
    def corrupt_lines(self) -> int:
        """Lines of journals (a cdmpp of before) that were damaged and skipped, over the whole life of the dataset."""
        self._stored.read_all()
        return sum(self._stored.corrupt_lines.values())

    def measured(self, device: str, retry: Collection[str] = ()) -> set[str]:
        """Hashes of the programs that have a record on a device.

        Parameters
        ----------
        retry
            Statuses that do not count, such as ``("device_lost",)``: programs with nothing else are left out.
        """
        if self._measured is None:
            frame = self.records
            self._measured = set(zip(frame["device"], frame["program"], frame["status"], strict=True))
        return {program for dev, program, status in self._measured if dev == device and status not in retry}

    # -- writing ------------------------------------------------------------------------------------------

    def add_task(self, task: Task) -> None:
        """Add a task; of one that is there already only the new networks are added."""
        known = self._writable().tasks
        old = known.get(task.hash)
        if old is None:
            self._append("tasks", codec.task_to_json(task), task.hash)
            known[task.hash] = task
            return
        united = unite_networks(old, task)
        if united is not old:
            self._append("tasks", {"hash": task.hash, "networks": dict(united.networks)})
            known[task.hash] = united

    def add_space(self, space: Space) -> None:
        """Add a design space unless it is there (DatasetError if its task is not)."""
        stored = self._writable()
        if space.hash not in stored.spaces:
            self._require("task", space.task_hash, stored.tasks, f"space {space.hash}")
            self._append("spaces", codec.space_to_json(space), space.hash)
            stored.spaces[space.hash] = space

    def add_program(self, program: Program) -> None:
        """Add a program unless it is there (DatasetError if its task or space is not)."""
        stored = self._writable()
        if program.hash not in stored.programs:
            self._require("task", program.task_hash, stored.tasks, f"program {program.hash}")
            if program.space_hash is not None:
                self._require("space", program.space_hash, stored.spaces, f"program {program.hash}")
            self._append("programs", codec.program_to_json(program), program.hash)
            stored.programs[program.hash] = program

    def add_record(self, record: Record) -> None:
        """Append a record. A second record of the same program and device is kept beside the first.

        Raises
        ------
        LabelError
            An ok record whose latency is missing, NaN, infinite, zero or negative.
        DatasetError
            Unknown status or program; the disk is full (what was added before stays readable).
        """
        record.validate()
        stored = self._writable()
        self._require("program", record.program, stored.programs, "a record")
        self._append("records", codec.record_to_json(record))
        if stored.records_are_read:
            self._fresh.append(record)
        self._frame = None
        if self._measured is not None:
            self._measured.add((record.device, record.program, record.status))

    def update_meta(self, **meta: Any) -> None:
        """Change entries of ``meta.json``."""
        self._writable()
        self.meta = {**self.meta, **meta, "schema_version": SCHEMA_VERSION}
        self._write_meta()

    def set_device(self, device: Device) -> None:
        """Store the specification of the one device that this dataset is of.

        Raises
        ------
        DatasetError
            It is of another device: labels of two devices are kept in two folders.
        """
        self._writable()
        names = {*self.meta.get("devices", {}), *self.device_names} - {device.name}
        if names:
            raise DatasetError(
                f"{self.path} holds labels of {', '.join(sorted(names))}: choose another folder for those of {device.name}"
            )
        if "devices" in self.meta:
            stored = Device.from_json(self.meta["devices"][device.name])
            check_same(device, stored, "use", str(self.path))
        self.update_meta(devices={device.name: device.to_json()})

    def flush(self) -> None:
        """Make everything added so far survive a power cut (this happens every second by itself)."""
        if self._rows is not None:
            self._rows.sync()

    def finalize(self) -> None:
        """Turn the rows into parquet files. The rows go only after the parquet files were read back.

        A crash in between loses nothing and doubles nothing. More can be added afterwards.

        Raises
        ------
        DatasetError
            The disk is full; rows and the former parquet files stay as they were.
        """
        self._writable()
        rows = self._rows
        assert rows is not None, "writing opened it"
        self._forget()
        stored = self._stored
        stored.read_all()
        tables = {
            "tasks": codec.tasks_to_arrow(stored.tasks.values()),
            "spaces": codec.spaces_to_arrow(stored.spaces.values()),
            "programs": codec.programs_to_arrow(stored.programs.values()),
            "records": codec.records_to_arrow(stored.records),
        }
        for name, table in tables.items():
            note: dict[str, Any] = {"rows": [rows.id, rows.last], "corrupt_lines": stored.corrupt_lines[name]}
            journal = journal_file(self.path, name)
            if journal.exists():
                data = journal.read_bytes()
                note["ingested"] = [len(data), zlib.crc32(data)]
            write_parquet(parquet_file(self.path, name), table, **note)
        for name in TABLES:
            journal_file(self.path, name).unlink(missing_ok=True)
        self.close(delete_rows=True)
        corrupt = sum(stored.corrupt_lines.values())
        if corrupt:
            _LOG.warning("%s: %d damaged journal lines were skipped", self.path, corrupt)

    def close(self, delete_rows: bool = False) -> None:
        """Sync, and let others write. The dataset stays readable; writing keeps others out again."""
        if self._rows is not None and os.getpid() == self._owner:
            self._rows.close(delete_rows)
            self._rows = None
            self._forget()

    # -- inside -------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop what was read, to read it anew when asked."""
        self._stored = StoredTables(self.path, self._rows)
        self._old = None
        self._fresh = []
        self._frame = None
        self._measured = None

    def _writable(self) -> StoredTables:
        if os.getpid() != self._owner:
            raise DatasetError(f"{self.path}: a forked process may not write the dataset of its parent")
        if self._rows is None:
            self._rows = RowStore(self.path / ROWS_FILE, write=True)
            self.meta = _read_meta(self.path)
            self._forget()  # another writer may have added something since it was read
        return self._stored

    def _append(self, table: str, line: dict[str, Any], key: str | None = None) -> None:
        assert self._rows is not None, "writing opened it"
        self._rows.add(table, line, key)

    def _write_meta(self) -> None:
        try:
            write_json(self.path / META_FILE, self.meta)
        except (OSError, ValueError) as error:
            raise DatasetError(f"cannot write {self.path / META_FILE}: {error}") from error

    def _require(self, kind: str, key: str, known: Mapping[str, Any], who: str) -> None:
        if key not in known:
            raise DatasetError(f"{self.path}: {who} refers to {kind} {key}, which was not added")

    def _with_programs(self, frame: pd.DataFrame) -> pd.DataFrame:
        programs = self._stored.programs
        known = [programs.get(program) for program in frame["program"]]
        frame = frame.assign(
            task=[program.task_hash if program else "" for program in known],
            origin=[program.origin if program else "" for program in known],
        )
        return frame[list(RECORD_COLUMNS)]


#: Of zstd: what is imported is made again rather than shipped, so that time counts more than size.
_LEVEL = 9


def write_dataset(
    path: str | Path,
    tasks: Iterable[Task],
    spaces: Iterable[Space],
    programs: Iterable[Program],
    records: Iterable[Record],
    **meta: Any,
) -> Dataset:
    """Write a new dataset as parquet files; several times faster than adding records one by one.

    Parameters
    ----------
    tasks, spaces, programs
        Each hash once.
    meta
        As :meth:`Dataset.create` takes it.

    Raises
    ------
    LabelError, DatasetError
        A record is not valid, or refers to a program that is not there (so for spaces and tasks); there is a dataset
        already; the files cannot be written.
    """
    known = {task.hash: task for task in tasks}
    designs = {space.hash: space for space in spaces}
    found = {program.hash: program for program in programs}
    measured = list(records)
    for space in designs.values():
        _require("task", space.task_hash, known, f"space {space.hash}")
    for program in found.values():
        _require("task", program.task_hash, known, f"program {program.hash}")
        if program.space_hash is not None:
            _require("space", program.space_hash, designs, f"program {program.hash}")
    for record in measured:
        record.validate()
        _require("program", record.program, found, "a record")
    tables = {
        "tasks": codec.tasks_to_arrow(known.values()),
        "spaces": codec.spaces_to_arrow(designs.values()),
        "programs": codec.programs_to_arrow(found.values()),
        "records": codec.records_to_arrow(codec.records_to_frame(measured)),
    }
    with Dataset.create(path, **meta) as dataset:
        for name, table in tables.items():
            write_parquet(parquet_file(dataset.path, name), table, compression_level=_LEVEL)
        dataset.close(delete_rows=True)
    return Dataset.open(path)


def _require(kind: str, key: str, known: Any, who: str) -> None:
    if key not in known:
        raise DatasetError(f"{who} refers to {kind} {key}, which is not there")


def find_datasets(paths: Sequence[str | Path]) -> list[Path]:
    """The dataset folders that paths stand for, each once.

    Raises
    ------
    DatasetError
        A path does not exist, or is no dataset and has none right below it.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise DatasetError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
        folders = (
            [path] if (path / META_FILE).exists() else sorted(f.parent for f in path.glob(f"*/{META_FILE}"))
        )
        if not folders:
            raise DatasetError(f"{path} is no dataset (no {META_FILE}) and contains none")
        found.update((folder.resolve(), folder) for folder in folders)
    if not found:
        raise DatasetError("no dataset given")
    return list(found.values())


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META_FILE
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is no dataset: it has no {META_FILE}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} is damaged: {error}") from error
    if not isinstance(meta, dict):
        raise DatasetError(f"{file} is damaged: expected a JSON object")
    check_schema_version(meta, file)
    return meta
