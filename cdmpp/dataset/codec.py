"""Tasks, spaces, programs and records as rows of JSON and as Arrow tables, and back.

A row of a task, space or program is its :func:`dataclasses.asdict`; fields at their default may be missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import pandas as pd
import pyarrow as pa

from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import MAX_ERROR_CHARS, META_COLUMNS, SCHEMAS
from cdmpp.files import parse_json
from cdmpp.program.types import Program, Space, Task


def task_from_json(row: Mapping[str, Any], known: Mapping[str, Task]) -> Task:
    """A task, united with a known one; a row may also give a known task further networks."""
    task = Task(**row) if "tir_json" in row else replace(known[row["hash"]], networks=row["networks"])
    return unite_networks(known.get(task.hash, task), task)


def unite_networks(task: Task, other: Task) -> Task:
    """The task with the networks of both; on a network of both, the first weight stays."""
    if set(other.networks) <= set(task.networks):
        return task
    return replace(task, networks={**other.networks, **task.networks})


def record_to_json(record: Record) -> dict[str, Any]:
    """A row of a record; empty fields are left out, samples keep seven digits (float32)."""
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
    """Inverse of :func:`record_to_json`, validated (TypeError, DatasetError, LabelError for another row)."""
    record = Record(**{**row, "samples_s": tuple(row.get("samples_s", ()))})
    record.validate()
    return record


def _plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Meta as JSON can hold it: numpy scalars as Python numbers; None, NaN and infinity are left out."""
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


_TYPES: dict[str, type] = {"tasks": Task, "spaces": Space, "programs": Program}
#: So that equal instructions lie side by side, and decisions compress.
_ORDER = {
    "tasks": ("hash",),
    "spaces": ("task_hash", "index", "hash"),
    "programs": ("task_hash", "space_hash", "decisions", "hash"),
}


def to_arrow(table: str, items: Iterable[Any]) -> pa.Table:
    """Tasks, spaces or programs as one of :data:`~cdmpp.dataset.schema.SCHEMAS`; ``networks`` as JSON."""

    def place(row: Mapping[str, Any]) -> list[Any]:
        return ["" if row[name] is None else row[name] for name in _ORDER[table]]

    rows = sorted(map(asdict, items), key=place)
    for row in rows if table == "tasks" else ():
        row["networks"] = json.dumps(row["networks"], sort_keys=True)
    return pa.Table.from_pylist(rows, schema=SCHEMAS[table])


def from_arrow(table: str, stored: pa.Table) -> dict[str, Any]:
    """Inverse of :func:`to_arrow`, by hash."""
    columns = {name: stored.column(name).to_pylist() for name in SCHEMAS[table].names}
    if table == "tasks":
        columns["networks"] = list(map(parse_json, columns["networks"]))
    items = (checked(_TYPES[table](*values)) for values in zip(*columns.values(), strict=True))
    return {item.hash: item for item in items}


#: Type of a field as it is written -> what its value may be.
_VALUES: dict[str, Any] = {
    "str": str, "str | None": (str, type(None)), "int": int, "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip


def checked(item: Any) -> Any:
    """A task, space, program or record, if its fields have their types (TypeError)."""
    for field in fields(item):
        value = getattr(item, field.name)
        kind = _VALUES.get(str(field.type), Mapping if str(field.type).startswith("Mapping") else object)
        known = isinstance(value, kind) and not isinstance(value, bool)
        if not known or (isinstance(value, tuple) and not all(isinstance(each, int | float) for each in value)):
            raise TypeError(f"{field.name} is {value!r:.60}, expected {field.type}")
    return item


def records_to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as rows; ``task`` and ``origin`` are left to the dataset, which knows the programs."""
    rows = [
        (r.program, r.device, r.status, r.latency_s, tuple(r.samples_s), r.noise, shorten(r.error),
         float(r.measured_at), *_split_meta(r.meta))
        for r in records
    ]  # fmt: skip
    names = SCHEMAS["records"].names
    return _frame(zip(*rows, strict=True) if rows else [()] * len(names))


def records_to_arrow(frame: pd.DataFrame) -> pa.Table:
    """The frame of :func:`records_to_frame` as Arrow; NaN becomes null."""
    table = pa.Table.from_pandas(frame, SCHEMAS["records"], preserve_index=False)
    return table.replace_schema_metadata()


def records_from_arrow(table: pa.Table) -> pd.DataFrame:
    """Inverse of :func:`records_to_arrow`."""
    columns = {name: table.column(name) for name in SCHEMAS["records"].names}
    samples_s = columns["samples_s"].cast(pa.list_(pa.float64())).to_numpy()
    return _frame(
        [() if s is None else tuple(s.tolist()) for s in samples_s] if name == "samples_s" else column.to_pylist()
        for name, column in columns.items()
    )  # fmt: skip


def _frame(columns: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """Columns in the order of the schema; numbers as float64, None as NaN or ""."""
    series = {}
    for field, values in zip(SCHEMAS["records"], columns, strict=True):
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type):
            series[field.name] = pd.Series(values, dtype="float64")
        else:
            series[field.name] = pd.Series(["" if v is None else v for v in values], dtype=object)
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
    """A record's meta, of a row of ``Dataset.records``."""
    meta: dict[str, Any] = json.loads(row["meta"]) if row["meta"] else {}
    for name, kind in META_COLUMNS.items():
        value = row[name]
        if value == value and value != "":  # neither NaN nor empty
            meta[name] = kind(value)
    return meta
