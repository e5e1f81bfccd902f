"""Records: measurements of programs, or the reasons why there are none; and the files that store records and programs.

A dataset is a folder::

    meta.json          {"schema_version": 1, "created_at": unix seconds, ...}: other entries are free;
                       splits read ``network_families`` ({network: family})
    rows.db            while profiling: rows added so far, in SQLite (see :mod:`cdmpp.dataset.store`)
    tasks.parquet      after ``finalize()``; rows added later are read from ``rows.db``
    spaces.parquet
    programs.parquet
    records.parquet

The columns of the parquet files are the fields of :class:`~cdmpp.program.types.Task`, :class:`~cdmpp.program.types.Space`,
:class:`~cdmpp.program.types.Program` and :class:`~cdmpp.dataset.record.Record`. The keys :data:`META_COLUMNS` of a record's
``meta`` are separate columns; the rest is one JSON string.

In ``rows.db``, a row of a task, space or program is the JSON of its :func:`dataclasses.asdict`; fields with their default value
may be missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cdmpp.errors import STATUSES, DatasetError, LabelError, SchemaVersionError, raised_as
from cdmpp.files import parse_json, replacing
from cdmpp.program.types import Program, Space, Task


@dataclass(frozen=True)
class Record:
    """A measurement of one program on one device: latency samples in seconds, or a typed failure.

    ``device`` is a canonical name, ``status`` "ok" or one of :data:`cdmpp.errors.FAILURE_KINDS`. ``latency_s`` is the label
    (None for a failure), computed from ``samples_s`` (in the order in which they were taken, stored as float32). ``noise`` is
    the relative difference between the labels of the two halves of the samples, |a - b| / mean(a, b) (None if unknown).
    ``error`` is a message for people, ``measured_at`` Unix time in seconds, ``meta`` everything else worth keeping (JSON
    values), such as build_s, attempts, session."""

    program: str
    device: str
    status: str
    latency_s: float | None = None
    samples_s: tuple[float, ...] = field(default=(), repr=False)
    noise: float | None = None
    error: str = ""
    measured_at: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise an error that names the record if it cannot be a measurement. DatasetError: an unknown status, no program, or
        no device. LabelError: :func:`is_label` refuses the latency or a sample, noise below 0, or a failure with a latency."""
        if not self.program or not self.device:
            raise DatasetError(f"a record needs a program and a device, got {self.program!r} and {self.device!r}")
        if self.status not in STATUSES:
            raise DatasetError(f"{self._name()}: status {self.status!r} is none of {', '.join(STATUSES)}")
        if self.status != "ok":
            if self.latency_s is not None:
                raise LabelError(f"{self._name()}: a record of status {self.status} cannot have a latency")
            return
        if not is_label(self.latency_s):
            raise LabelError(f"{self._name()}: latency_s is {self.latency_s}, expected finite seconds above 0")
        for sample_s in self.samples_s:
            if not is_label(sample_s):
                raise LabelError(f"{self._name()}: a sample is {sample_s}, expected finite seconds above 0")
        if self.noise is not None and not (math.isfinite(self.noise) and self.noise >= 0):
            raise LabelError(f"{self._name()}: noise is {self.noise}, expected a finite number of at least 0")

    def _name(self) -> str:
        return f"record of program {self.program} on {self.device}"


def is_label(latency_s: float | None) -> bool:
    """Whether a number can be a latency: finite and above 0."""
    return latency_s is not None and math.isfinite(latency_s) and latency_s > 0


#: Version of everything described above. Other versions are refused.
SCHEMA_VERSION = 1

META_FILE = "meta.json"
ROWS_FILE = "rows.db"
_META_KEY = b"cdmpp"

#: Keys of ``Record.meta`` that have a column, and its type. Values of another type stay in the JSON string.
META_COLUMNS: dict[str, type] = {
    "build_s": float, "run_s": float, "attempts": int, "workers": int, "threads": int, "drift": float, "steal_pct": float,
    "session": str,
}  # fmt: skip

#: Longer error messages lose their middle.
MAX_ERROR_CHARS = 1000

#: Columns of ``Dataset.records``; ``meta`` is the JSON string of the keys that have no column.
RECORD_COLUMNS: tuple[str, ...] = (
    "program", "task", "device", "status", "latency_s", "samples_s", "noise", "error", "measured_at", "origin",
    *META_COLUMNS, "meta",
)  # fmt: skip

_TEXT, _REAL, _SHORT, _WHOLE = pa.string(), pa.float64(), pa.float32(), pa.int32()
#: Text with few distinct values.
_FEW = pa.dictionary(pa.int32(), pa.string())
_TYPES: dict[type, pa.DataType] = {float: _SHORT, int: _WHOLE, str: _FEW}

#: The tables, in the order in which they are written: a table comes after those that it refers to.
SCHEMAS: dict[str, pa.Schema] = {
    "tasks": pa.schema([
        ("hash", _TEXT), ("name", _TEXT), ("tir_json", _TEXT), ("networks", _TEXT),
        ("flops", _REAL), ("bytes", _REAL), ("dtype", _TEXT),
    ]),
    "spaces": pa.schema([
        ("hash", _TEXT), ("task_hash", _TEXT), ("rule", _TEXT), ("num_cores", _WHOLE), ("index", _WHOLE),
        ("insts_json", _TEXT),
    ]),
    "programs": pa.schema([
        ("hash", _TEXT), ("task_hash", _FEW), ("space_hash", _FEW), ("decisions", _TEXT), ("origin", _FEW),
        ("implementation", _FEW),
    ]),
    "records": pa.schema([
        ("program", _TEXT), ("device", _FEW), ("status", _FEW), ("latency_s", _REAL),
        ("samples_s", pa.list_(_SHORT)), ("noise", _SHORT), ("error", _FEW), ("measured_at", _REAL),
        *((name, _TYPES[kind]) for name, kind in META_COLUMNS.items()), ("meta", _FEW),
    ]),
}  # fmt: skip


def write_parquet(path: Path, table: pa.Table, compression_level: int = 19, **note: Any) -> None:
    """Write a table, read it back and compare, then move the file into place; ``note`` are JSON values for its metadata.
    zstd level 19 gives the smallest files; with level 9 they are a tenth larger and written many times faster. DatasetError if
    the disk is full, or the table read back differs; then the old file is untouched."""
    metadata = json.dumps({"schema_version": SCHEMA_VERSION, **note}).encode()
    table = table.replace_schema_metadata({_META_KEY: metadata})
    # Numbers are stored as byte streams (byte_stream_split), which saves a third; the rest is dictionary-encoded.
    lists = [f"{column.name}.list.element" for column in table.schema if pa.types.is_list(column.type)]
    numbers = [column.name for column in table.schema if pa.types.is_floating(column.type)]
    others = [c.name for c in table.schema if not pa.types.is_list(c.type) and c.name not in numbers]
    with raised_as(DatasetError, f"cannot write {path}", pa.ArrowException), replacing(path) as draft:
        pq.write_table(
            table,
            draft,
            compression="zstd",
            compression_level=compression_level,
            use_byte_stream_split=lists + numbers,
            use_dictionary=others,
            write_page_checksum=True,
        )
        if not pq.read_table(draft, schema=table.schema).equals(table):
            raise DatasetError(f"{path}: what was written does not read back; nothing is replaced")


def read_parquet(path: Path, schema: pa.Schema) -> tuple[pa.Table, dict[str, Any]]:
    """The columns of ``schema`` in a file, and the ``note`` given to :func:`write_parquet`. DatasetError if the file is
    damaged, not written by cdmpp, or lacks columns. SchemaVersionError if it has another schema version."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        note = json.loads((file.schema_arrow.metadata or {}).get(_META_KEY, b"null"))
        if not isinstance(note, dict):
            raise DatasetError(f"{path} is not a dataset file of cdmpp")
        check_schema_version(note, path)
        missing = [name for name in schema.names if name not in file.schema_arrow.names]
        if missing:
            raise DatasetError(
                f"{path} lacks {len(missing)} columns that this cdmpp expects, {missing[0]} first: another version made it"
            )
        return file.read(columns=schema.names).cast(schema), note
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise DatasetError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error


def check_schema_version(meta: Mapping[str, Any], path: Path) -> None:
    """Raise SchemaVersionError, which names both versions, unless the schema version is ours."""
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(f"{path} has dataset schema version {version!r}; this cdmpp reads {SCHEMA_VERSION}")


def task_from_json(row: Mapping[str, Any], known: Mapping[str, Task]) -> Task:
    """The task of a row, with the networks of the known task of its hash. A row may also only add networks to a known task."""
    task = Task(**row) if "tir_json" in row else replace(known[row["hash"]], networks=row["networks"])
    return unite_networks(known.get(task.hash, task), task)


def unite_networks(task: Task, other: Task) -> Task:
    """The task with the networks of both. If both have a network, the weight of the first counts."""
    if set(other.networks) <= set(task.networks):
        return task
    return replace(task, networks={**other.networks, **task.networks})


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as a JSON row. Empty fields are left out, samples keep seven digits (float32)."""
    row = {
        **vars(record),
        "latency_s": None if record.latency_s is None else float(record.latency_s),
        "samples_s": [float(f"{sample_s:.7g}") for sample_s in record.samples_s],
        "noise": None if record.noise is None else float(f"{record.noise:.7g}"),
        "error": shorten(record.error),
        "measured_at": float(record.measured_at),
        "meta": _plain_meta(record.meta),
    }
    return {name: value for name, value in row.items() if value or (name == "noise" and value is not None)}


def record_from_json(row: Mapping[str, Any]) -> Record:
    """Inverse of :func:`record_to_json`, validated (TypeError, DatasetError or LabelError if the row is no valid record)."""
    record = Record(**{**row, "samples_s": tuple(row.get("samples_s", ()))})
    record.validate()
    return record


def _plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Meta that JSON can hold: NumPy scalars become Python numbers; None, NaN and infinity are left out."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in meta.items()}
    return {
        name: value
        for name, value in plain.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def shorten(message: str) -> str:
    """The message without its middle if it is longer than :data:`MAX_ERROR_CHARS`."""
    half = (MAX_ERROR_CHARS - 5) // 2
    return message if len(message) <= MAX_ERROR_CHARS else f"{message[:half]} ... {message[-half:]}"


_ITEMS: dict[str, type] = {"tasks": Task, "spaces": Space, "programs": Program}
#: Sort order of the rows: equal instructions become neighbours, and decisions compress well.
_ORDER = {
    "tasks": ("hash",),
    "spaces": ("task_hash", "index", "hash"),
    "programs": ("task_hash", "space_hash", "decisions", "hash"),
}


def to_arrow(table: str, items: Iterable[Any]) -> pa.Table:
    """Tasks, spaces or programs as a table with the schema of that name in :data:`SCHEMAS`; ``networks`` as JSON."""

    def place(row: Mapping[str, Any]) -> list[Any]:
        return ["" if row[name] is None else row[name] for name in _ORDER[table]]

    rows = sorted(map(asdict, items), key=place)
    for row in rows if table == "tasks" else ():
        row["networks"] = json.dumps(row["networks"], sort_keys=True)
    return pa.Table.from_pylist(rows, schema=SCHEMAS[table])


def from_arrow(table: str, stored: pa.Table) -> dict[str, Any]:
    """Inverse of :func:`to_arrow`: a dictionary by hash."""
    columns = {name: stored.column(name).to_pylist() for name in SCHEMAS[table].names}
    if table == "tasks":
        columns["networks"] = list(map(parse_json, columns["networks"]))
    items = (checked(_ITEMS[table](*values)) for values in zip(*columns.values(), strict=True))
    return {item.hash: item for item in items}


#: Annotation of a field, as text -> types that its value may have.
_VALUES: dict[str, Any] = {
    "str": str, "str | None": (str, type(None)), "int": int, "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip


def checked(item: Any) -> Any:
    """The given task, space, program or record; TypeError if a field is not of its annotated type."""
    for each in fields(item):
        value = getattr(item, each.name)
        kind = _VALUES.get(str(each.type), Mapping if str(each.type).startswith("Mapping") else object)
        known = isinstance(value, kind) and not isinstance(value, bool)
        if not known or (isinstance(value, tuple) and not all(isinstance(v, int | float) for v in value)):
            raise TypeError(f"{each.name} is {value!r:.60}, expected {each.type}")
    return item


def records_to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as rows of a frame. The dataset, which knows the programs, adds ``task`` and ``origin``."""
    rows = [
        (r.program, r.device, r.status, r.latency_s, tuple(r.samples_s), r.noise, shorten(r.error),
         float(r.measured_at), *_split_meta(r.meta))
        for r in records
    ]  # fmt: skip
    return _frame(zip(*rows, strict=True) if rows else [()] * len(SCHEMAS["records"].names))


def records_from_arrow(table: pa.Table) -> pd.DataFrame:
    """The frame of :func:`records_to_frame` from a table; null becomes NaN."""
    columns = {name: table.column(name) for name in SCHEMAS["records"].names}
    samples_s = columns["samples_s"].cast(pa.list_(pa.float64())).to_numpy()
    return _frame(
        [() if s is None else tuple(s.tolist()) for s in samples_s] if name == "samples_s" else column.to_pylist()
        for name, column in columns.items()
    )  # fmt: skip


def _frame(columns: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """A frame of columns given in schema order; numbers become float64, None becomes NaN or ""."""
    series = {}
    for column, values in zip(SCHEMAS["records"], columns, strict=True):
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            series[column.name] = pd.Series(values, dtype="float64")
        else:
            series[column.name] = pd.Series(["" if v is None else v for v in values], dtype=object)
    return pd.DataFrame(series)


def _split_meta(meta: Mapping[str, Any]) -> list[Any]:
    """The values of :data:`META_COLUMNS` and the rest as JSON ("" if there is none)."""
    rest = _plain_meta(meta)
    values: list[Any] = []
    for name, kind in META_COLUMNS.items():
        value = rest.get(name)
        fits = isinstance(value, (kind, int) if kind is float else kind) and not isinstance(value, bool)
        values.append(rest.pop(name) if fits else None)
    return [*values, json.dumps(rest, separators=(",", ":"), sort_keys=True) if rest else ""]


def join_meta(row: Mapping[Any, Any]) -> dict[str, Any]:
    """The meta of a record, from a row of ``Dataset.records``."""
    meta: dict[str, Any] = json.loads(row["meta"]) if row["meta"] else {}
    for name, kind in META_COLUMNS.items():
        value = row[name]
        if value == value and value != "":  # neither NaN nor empty
            meta[name] = kind(value)
    return meta
