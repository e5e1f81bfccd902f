"""The four tables of a dataset folder, read when they are first asked for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import codec
from cdmpp.dataset.parquet import read_parquet
from cdmpp.dataset.record import Record
from cdmpp.dataset.rows import RowStore
from cdmpp.dataset.schema import ROWS_FILE, TABLES, arrow_schema
from cdmpp.dataset.view import unite_networks
from cdmpp.errors import DatasetError, LabelError
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd


class StoredTables:
    """What a folder holds: the parquet files, and on top of them the rows that were added since.

    Attributes
    ----------
    corrupt_lines
        Table -> damaged lines of journals, which a cdmpp of before wrote, that were skipped. Has a table once it was read.
    """

    def __init__(self, path: Path, rows: RowStore | None = None) -> None:
        self.path = path
        self.corrupt_lines: dict[str, int] = {}
        self._rows = rows
        self._tasks: dict[str, Task] | None = None
        self._spaces: dict[str, Space] | None = None
        self._programs: dict[str, Program] | None = None
        self._records: pd.DataFrame | None = None

    @property
    def tasks(self) -> dict[str, Task]:
        """Hash -> task. The caller may add to it what it adds to the rows; so for the other tables."""
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
        """Whether :attr:`records` was asked for; what is added later is not in it."""
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
        """What the parquet file holds (None without one), and the rows that it does not hold yet."""
        file = parquet_file(self.path, table)
        content = None
        note: dict[str, Any] = {}
        if file.exists():
            arrow, note = read_parquet(file, arrow_schema(table))
            content = from_arrow(arrow)
        self.corrupt_lines[table] = int(note.get("corrupt_lines", 0))
        # Notes tell what the file holds already, where the process ended before the rows were deleted.
        values = self._journal(table, note.get("ingested"))
        rows, opened = self._rows, None
        if rows is None and (self.path / ROWS_FILE).exists():
            rows = opened = RowStore(self.path / ROWS_FILE)
        if rows is not None:
            in_file, last = note.get("rows") or ("", 0)
            values += [value for _, value in rows.rows(table, last if in_file == rows.id else 0)]
        if opened is not None:
            opened.close()
        return content, values

    def _journal(self, table: str, ingested: list[int] | None) -> list[Any]:
        """The lines of the journal that a cdmpp of before wrote: ``<crc32 of the JSON> <JSON>``; damaged ones are counted."""
        path = journal_file(self.path, table)
        if not path.exists():
            return []
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DatasetError(f"cannot read {path}: {error.strerror}") from error
        if ingested and 0 < ingested[0] <= len(data) and zlib.crc32(data[: ingested[0]]) == ingested[1]:
            data = data[ingested[0] :]
        values = []
        for line in filter(None, data.split(b"\n")):
            if line[:9] == b"%08x " % zlib.crc32(line[9:]):
                values.append(json.loads(line[9:]))
            else:
                self.corrupt_lines[table] += 1
        return values

    def _decode(self, table: str, lines: list[Any], decode: Callable[[Any], Any]) -> list[Any]:
        """Decode rows; one of another shape counts as damaged."""
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
    """The journal of a table, as a cdmpp of before wrote it while the dataset in ``path`` grew."""
    return path / f"{table}.jsonl"


def stored_files(path: Path) -> list[Path]:
    """The files of tables that are in a folder."""
    files = [file(path, table) for table in TABLES for file in (parquet_file, journal_file)]
    return [file for file in (*files, path / ROWS_FILE) if file.exists()]


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
