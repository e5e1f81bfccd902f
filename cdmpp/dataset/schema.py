"""What a dataset looks like on disk.

A dataset is a folder::

    meta.json          {"schema_version": 1, "created_at": unix seconds, ...}: free for notes;
                       ``network_families`` ({network: family}) is read by the splits
    rows.db            while profiling: what was added, in SQLite (see :mod:`cdmpp.dataset.rows`)
    tasks.parquet      after ``finalize()``; rows added later are read on top
    spaces.parquet
    programs.parquet
    records.parquet

The columns of the parquet files are the fields of :class:`~cdmpp.program.types.Task`,
:class:`~cdmpp.program.types.Space`, :class:`~cdmpp.program.types.Program` and
:class:`~cdmpp.dataset.record.Record`. Of a record's ``meta``, the keys of :data:`META_COLUMNS` are columns of
their own; the rest is one JSON string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

#: Version of everything described above. Another version is refused, never guessed at.
SCHEMA_VERSION = 1

META_FILE = "meta.json"
ROWS_FILE = "rows.db"

#: The four tables, in the order in which they are made durable: what is referred to comes first.
TABLES: tuple[str, ...] = ("tasks", "spaces", "programs", "records")

#: Keys of ``Record.meta`` that have a column: name -> kind. Values of another kind stay in the JSON.
META_COLUMNS: dict[str, str] = {
    "build_s": "float",
    "run_s": "float",
    "attempts": "int",
    "workers": "int",
    "threads": "int",
    "drift": "float",
    "steal_pct": "float",
    "session": "str",
}

#: An error message longer than this loses its middle.
MAX_ERROR_CHARS = 1000

#: Columns of ``Dataset.records``; ``meta`` is the JSON string of what has no column.
RECORD_COLUMNS: tuple[str, ...] = (
    "program",
    "task",
    "device",
    "status",
    "latency_s",
    "samples_s",
    "noise",
    "error",
    "measured_at",
    "origin",
    *META_COLUMNS,
    "meta",
)


def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of one of :data:`TABLES`."""
    import pyarrow as pa

    text, real, short = pa.string(), pa.float64(), pa.float32()
    few = pa.dictionary(pa.int32(), text)
    if table == "tasks":
        fields = [
            ("hash", text), ("name", text), ("tir_json", text), ("networks", text),
            ("flops", real), ("bytes", real), ("dtype", text),
        ]  # fmt: skip
    elif table == "spaces":
        fields = [
            ("hash", text), ("task_hash", text), ("rule", text), ("num_cores", pa.int32()),
            ("index", pa.int32()), ("insts_json", text),
        ]  # fmt: skip
    elif table == "programs":
        fields = [
            ("hash", text), ("task_hash", few), ("space_hash", few), ("decisions", text), ("origin", few),
            ("implementation", few),
        ]  # fmt: skip
    elif table == "records":
        kinds = {"float": short, "int": pa.int32(), "str": few}
        fields = [
            ("program", text), ("device", few), ("status", few), ("latency_s", real),
            ("samples_s", pa.list_(short)), ("noise", short), ("error", few), ("measured_at", real),
            *((name, kinds[kind]) for name, kind in META_COLUMNS.items()), ("meta", few),
        ]  # fmt: skip
    else:
        raise ValueError(f"no table {table!r}; the tables are {', '.join(TABLES)}")
    return pa.schema(fields)
