"""A dataset in a folder: appended to while profiling, compact parquet when done."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import codec
from cdmpp.dataset.devices import check_same, stored_devices
from cdmpp.dataset.journal import JournalSet
from cdmpp.dataset.lock import WriterLock
from cdmpp.dataset.parquet import check_schema_version, write_json, write_parquet
from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import LOCK_FILE, META_FILE, RECORD_COLUMNS, SCHEMA_VERSION, TABLES
from cdmpp.dataset.tables import StoredTables, journal_file, parquet_file, stack
from cdmpp.dataset.view import DatasetView, unite_networks
from cdmpp.device import Device
from cdmpp.errors import DatasetError
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)


class Dataset(DatasetView):
    """One dataset folder (see :mod:`cdmpp.dataset.schema` for what is in it).

    Reading is lazy. The first ``add_...`` takes the writer's lock; it is given back by :meth:`close` (or
    use the dataset as a context manager). Not for several threads at once.

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
        self._lock: WriterLock | None = None
        self._journals: JournalSet | None = None
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
        for table in TABLES:
            for file in (parquet_file(path, table), journal_file(path, table)):
                if file.exists():
                    raise DatasetError(f"{file} is there without a {META_FILE}; choose an empty folder")
        dataset = cls(path, {**meta, "schema_version": SCHEMA_VERSION, "created_at": time.time()})
        dataset._lock = WriterLock(path / LOCK_FILE)
        try:
            write_json(path / META_FILE, dataset.meta)
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
        """Journal lines that were damaged and skipped, over the whole life of the dataset."""
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
            self._append("tasks", codec.task_to_json(task))
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
            self._append("spaces", codec.space_to_json(space))
            stored.spaces[space.hash] = space

    def add_program(self, program: Program) -> None:
        """Add a program unless it is there (DatasetError if its task or space is not)."""
        stored = self._writable()
        if program.hash not in stored.programs:
            self._require("task", program.task_hash, stored.tasks, f"program {program.hash}")
            if program.space_hash is not None:
                self._require("space", program.space_hash, stored.spaces, f"program {program.hash}")
            self._append("programs", codec.program_to_json(program))
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
        write_json(self.path / META_FILE, self.meta)

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
        if self._journals is not None:
            self._journals.sync()

    def finalize(self) -> None:
        """Turn the journals into parquet files. Journals go only after the parquet files were read back.

        A crash in between loses nothing and doubles nothing. More can be added afterwards.

        Raises
        ------
        DatasetError
            The disk is full; journals and the former parquet files stay as they were.
        """
        self._writable()
        self._close_journals()
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
            note: dict[str, Any] = {
                "ingested": stored.journal_end[name],
                "corrupt_lines": stored.corrupt_lines[name],
            }
            write_parquet(parquet_file(self.path, name), table, **note)
        for name in TABLES:
            journal_file(self.path, name).unlink(missing_ok=True)
        corrupt = sum(stored.corrupt_lines.values())
        if corrupt:
            _LOG.warning("%s: %d damaged journal lines were skipped", self.path, corrupt)
        self._forget()

    def close(self) -> None:
        """Sync, and give the writer's lock back. The dataset stays readable; writing locks it again."""
        try:
            self._close_journals()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # -- inside -------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop what was read, to read it anew when asked."""
        self._stored = StoredTables(self.path)
        self._old = None
        self._fresh = []
        self._frame = None
        self._measured = None

    def _writable(self) -> StoredTables:
        if os.getpid() != self._owner:
            raise DatasetError(f"{self.path}: a forked process may not write the dataset of its parent")
        if self._lock is None:
            self._lock = WriterLock(self.path / LOCK_FILE)
            self.meta = _read_meta(self.path)
            self._forget()  # another writer may have added something since it was read
        return self._stored

    def _append(self, table: str, line: dict[str, Any]) -> None:
        if self._journals is None:
            self._journals = JournalSet({name: journal_file(self.path, name) for name in TABLES})
        try:
            self._journals.append(table, line)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{self.path}: {table[:-1]} cannot be stored as JSON: {error}") from error

    def _close_journals(self) -> None:
        if self._journals is not None:
            journals, self._journals = self._journals, None
            journals.close()

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
