"""What a dataset looks like on disk.

A dataset is a folder::

    meta.json          {"schema_version": 1, "created_at": unix seconds, ...}: free for notes;
                       ``network_families`` ({network: family}) is read by the splits
    rows.db            while profiling: what was added, in SQLite (see :mod:`cdmpp.dataset.rows`)
    tasks.parquet      after ``finalize()``; rows added later are read on top
    spaces.parquet
    programs.parquet
    records.parquet

The columns of the parquet files are the fields of :class:`~cdmpp.program.types.Task`, :class:`~cdmpp.program.types.Space`,
:class:`~cdmpp.program.types.Program` and :class:`~cdmpp.dataset.record.Record`. Of a record's ``meta``, the keys of
:data:`META_COLUMNS` are columns of their own; the rest is one JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cdmpp.errors import DatasetError, SchemaVersionError, raised_as
from cdmpp.files import replacing

#: Version of everything described above. Another version is refused, never guessed at.
SCHEMA_VERSION = 1

META_FILE = "meta.json"
ROWS_FILE = "rows.db"
_META_KEY = b"cdmpp"

#: Keys of ``Record.meta`` that have a column. Values of another type stay in the JSON.
META_COLUMNS: dict[str, type] = {
    "build_s": float, "run_s": float, "attempts": int, "workers": int, "threads": int, "drift": float, "steal_pct": float,
    "session": str,
}  # fmt: skip

#: An error message longer than this loses its middle.
MAX_ERROR_CHARS = 1000

#: Columns of ``Dataset.records``; ``meta`` is the JSON string of what has no column.
RECORD_COLUMNS: tuple[str, ...] = (
    "program", "task", "device", "status", "latency_s", "samples_s", "noise", "error", "measured_at", "origin",
    *META_COLUMNS, "meta",
)  # fmt: skip

_TEXT, _REAL, _SHORT, _WHOLE = pa.string(), pa.float64(), pa.float32(), pa.int32()
#: Text of which there are few different ones.
_FEW = pa.dictionary(pa.int32(), pa.string())
_TYPES: dict[type, pa.DataType] = {float: _SHORT, int: _WHOLE, str: _FEW}

#: The tables, in the order in which they are written: what is referred to comes first.
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
    """Write, read back and compare, then move into place; ``note`` are JSON values for the file's metadata. Of zstd, level 19
    makes the smallest file, 9 one that is a tenth larger and many times faster to write. DatasetError: the disk is full, or
    what was read back differs; the file that was there before is untouched."""
    metadata = json.dumps({"schema_version": SCHEMA_VERSION, **note}).encode()
    table = table.replace_schema_metadata({_META_KEY: metadata})
    # Numbers with their bytes in separate streams, which saves a third; the rest by dictionary.
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
    """The columns of ``schema``, and the note of :func:`write_parquet`. DatasetError: the file is damaged, not one of ours, or
    lacks columns. SchemaVersionError: another version wrote it."""
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
    """Refuse any schema version but ours (SchemaVersionError says both)."""
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has dataset schema version {version!r}; this cdmpp reads version {SCHEMA_VERSION}"
        )
