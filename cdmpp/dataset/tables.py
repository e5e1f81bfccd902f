"""The four tables of a dataset folder, read when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import codec
from cdmpp.dataset.journal import read_journal
from cdmpp.dataset.parquet import read_parquet
from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import arrow_schema
from cdmpp.dataset.view import unite_networks
from cdmpp.errors import DatasetError, LabelError
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd


class StoredTables:
    """What a folder holds: the parquet files, and on top of them the journals.

    Attributes
    ----------
    corrupt_lines
        Table -> damaged journal lines that were skipped, those of journals that became parquet included.
        Has a table once it was read.
    journal_end
        Table -> (bytes, crc32) of the journal as it was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.corrupt_lines: dict[str, int] = {}
        self.journal_end: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, Task] | None = None
        self._spaces: dict[str, Space] | None = None
        self._programs: dict[str, Program] | None = None
        self._records: pd.DataFrame | None = None

    @property
    def tasks(self) -> dict[str, Task]:
        """Hash -> task. The caller may add to it what it appends to the journal; so for the other tables."""
        if self._tasks is None:
            content, lines = self._read("tasks", codec.tasks_from_arrow)
            tasks = {task.hash: task for task in content or ()}
            self._decode("tasks", lines, lambda line: _apply_task_line(tasks, line))
            self._tasks = tasks
        return self._tasks

    @property
    def spaces(self) -> dict[str, Space]:
        """Hash -> design space."""
        if self._spaces is None:
            content, lines = self._read("spaces", codec.spaces_from_arrow)
            fresh = self._decode("spaces", lines, lambda line: Space(**line))
            self._spaces = {space.hash: space for space in (*fresh[::-1], *(content or ()))}
        return self._spaces

    @property
    def programs(self) -> dict[str, Program]:
        """Hash -> program."""
        if self._programs is None:
            content, lines = self._read("programs", codec.programs_from_arrow)
            fresh = self._decode("programs", lines, codec.program_from_json)
            self._programs = {program.hash: program for program in (*fresh[::-1], *(content or ()))}
        return self._programs

    @property
    def records_are_read(self) -> bool:
        """Whether :attr:`records` was asked for; what is appended later is not in it."""
        return self._records is not None

    @property
    def records(self) -> pd.DataFrame:
        """The records that were on disk when this was first asked for; without ``task`` and ``origin``."""
        if self._records is None:
            content, lines = self._read("records", codec.records_from_arrow)
            fresh = codec.records_to_frame(self._decode("records", lines, _valid_record))
            self._records = stack(
                fresh if content is None else content, fresh if content is not None else None
            )
        return self._records

    def read_all(self) -> None:
        """Read what was not read yet."""
        _ = self.tasks, self.spaces, self.programs, self.records

    def _read(self, table: str, from_arrow: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        """What the parquet file holds (None without one), and the values of the journal lines after it."""
        file = parquet_file(self.path, table)
        content, ingested, corrupt = None, None, 0
        if file.exists():
            arrow, note = read_parquet(file, arrow_schema(table))
            content = from_arrow(arrow)
            ingested = (int(note["ingested"][0]), int(note["ingested"][1])) if "ingested" in note else None
            corrupt = int(note.get("corrupt_lines", 0))
        journal = read_journal(journal_file(self.path, table), ingested)
        self.journal_end[table] = (journal.n_bytes, journal.crc32)
        self.corrupt_lines[table] = corrupt + journal.corrupt_lines
        return content, journal.values

    def _decode(self, table: str, lines: list[Any], decode: Callable[[Any], Any]) -> list[Any]:
        """Decode journal lines; a line of another shape counts as damaged."""
        good = []
        for line in lines:
            try:
                good.append(decode(line))
            except (TypeError, KeyError, ValueError, LabelError, DatasetError):
                self.corrupt_lines[table] += 1
        return good


def stack(frame: pd.DataFrame, more: pd.DataFrame | None) -> pd.DataFrame:
    """Two frames of the same columns one after the other; an empty one does not change the other's types."""
    import pandas as pd

    if more is None or not len(more):
        return frame
    return pd.concat([frame, more], ignore_index=True) if len(frame) else more


def parquet_file(path: Path, table: str) -> Path:
    """The parquet file of a table of the dataset in ``path``."""
    return path / f"{table}.parquet"


def journal_file(path: Path, table: str) -> Path:
    """The journal of a table of the dataset in ``path``."""
    return path / f"{table}.jsonl"


def _apply_task_line(tasks: dict[str, Task], line: Mapping[str, Any]) -> None:
    if "tir_json" not in line:  # further networks of a task that came before
        task = tasks[line["hash"]]
        tasks[task.hash] = replace(task, networks={**task.networks, **line["networks"]})
        return
    task = Task(**line)
    tasks[task.hash] = unite_networks(tasks[task.hash], task) if task.hash in tasks else task


def _valid_record(line: Mapping[str, Any]) -> Record:
    record = codec.record_from_json(line)
    record.validate()
    return record
