"""Tasks, spaces, programs and records as rows of JSON and as Arrow tables, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
import pyarrow as pa

from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import MAX_ERROR_CHARS, META_COLUMNS, arrow_schema
from cdmpp.program.types import Program, Space, Task


def task_to_json(task: Task) -> dict[str, Any]:
    """A row of a task; that of a space is :func:`dataclasses.asdict`."""
    return {**asdict(task), "networks": dict(task.networks)}


def program_to_json(program: Program) -> dict[str, Any]:
    """A row of a program; fields at their default are left out."""
    defaults = {"space_hash": None, "origin": "random", "implementation": "scheduled"}
    return {k: v for k, v in asdict(program).items() if k not in defaults or v != defaults[k]}


def program_from_json(row: Mapping[str, Any]) -> Program:
    """Inverse of :func:`program_to_json` (TypeError for another row)."""
    return Program(**{"space_hash": None, **row})


def record_to_json(record: Record) -> dict[str, Any]:
    """A row of a record; empty fields are left out, samples keep seven digits (float32)."""
    row = {
        "program": record.program,
        "device": record.device,
        "status": record.status,
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


def tasks_to_arrow(tasks: Iterable[Task]) -> pa.Table:
    """Tasks in the order of their hashes; ``networks`` as JSON."""
    rows = [
        {**task_to_json(task), "networks": json.dumps(dict(task.networks), sort_keys=True)} for task in tasks
    ]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["hash"]), schema=arrow_schema("tasks"))


def tasks_from_arrow(table: pa.Table) -> list[Task]:
    """Inverse of :func:`tasks_to_arrow`."""
    return [Task(**{**row, "networks": json.loads(row["networks"])}) for row in table.to_pylist()]


def spaces_to_arrow(spaces: Iterable[Space]) -> pa.Table:
    """Spaces in the order of task and number, so that equal instructions lie side by side."""
    rows = sorted(map(asdict, spaces), key=lambda row: (row["task_hash"], row["index"], row["hash"]))
    return pa.Table.from_pylist(rows, schema=arrow_schema("spaces"))


def spaces_from_arrow(table: pa.Table) -> list[Space]:
    """Inverse of :func:`spaces_to_arrow`."""
    return [Space(**row) for row in table.to_pylist()]


def programs_to_arrow(programs: Iterable[Program]) -> pa.Table:
    """Programs in the order of task, space and decisions, so that decisions compress."""
    ordered = sorted(programs, key=lambda p: (p.task_hash, p.space_hash or "", p.decisions, p.hash))
    return pa.Table.from_pylist(list(map(asdict, ordered)), schema=arrow_schema("programs"))


def programs_from_arrow(table: pa.Table) -> list[Program]:
    """Inverse of :func:`programs_to_arrow`."""
    columns = [table.column(name).to_pylist() for name in arrow_schema("programs").names]
    return [Program(*values) for values in zip(*columns, strict=True)]


def records_to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as rows; ``task`` and ``origin`` are left to the dataset, which knows the programs."""
    rows = [
        (r.program, r.device, r.status, r.latency_s, tuple(r.samples_s), r.noise, shorten(r.error),
         float(r.measured_at), *_split_meta(r.meta))
        for r in records
    ]  # fmt: skip
    names = arrow_schema("records").names
    return _frame(zip(*rows, strict=True) if rows else [()] * len(names))


def records_to_arrow(frame: pd.DataFrame) -> pa.Table:
    """The frame of :func:`records_to_frame` as Arrow; NaN becomes null."""
    return pa.Table.from_pandas(
        frame, arrow_schema("records"), preserve_index=False
    ).replace_schema_metadata()


def records_from_arrow(table: pa.Table) -> pd.DataFrame:
    """Inverse of :func:`records_to_arrow`."""
    columns = {name: table.column(name) for name in arrow_schema("records").names}
    samples_s = columns["samples_s"].cast(pa.list_(pa.float64())).to_numpy()
    return _frame(
        [() if s is None else tuple(s.tolist()) for s in samples_s] if name == "samples_s" else column.to_pylist()
        for name, column in columns.items()
    )  # fmt: skip


def _frame(columns: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """Columns in the order of the schema; numbers as float64, None as NaN or ""."""
    series = {}
    for field, values in zip(arrow_schema("records"), columns, strict=True):
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type):
            series[field.name] = pd.Series(values, dtype="float64")
        else:
            series[field.name] = pd.Series(["" if v is None else v for v in values], dtype=object)
    return pd.DataFrame(series)


def _split_meta(meta: Mapping[str, Any]) -> list[Any]:
    """The values of :data:`META_COLUMNS` and the rest as JSON ("" if there is none)."""
    kinds: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "str": (str,)}
    rest = _plain_meta(meta)
    values: list[Any] = []
    for name, kind in META_COLUMNS.items():
        value = rest.get(name)
        fits = isinstance(value, kinds[kind]) and not isinstance(value, bool)
        values.append(rest.pop(name) if fits else None)
    return [*values, json.dumps(rest, separators=(",", ":"), sort_keys=True) if rest else ""]


def join_meta(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record's meta, of a row of ``Dataset.records``."""
    meta: dict[str, Any] = json.loads(row["meta"]) if row["meta"] else {}
    for name, kind in META_COLUMNS.items():
        value = row[name]
        if value == value and value != "":  # neither NaN nor empty
            meta[name] = {"float": float, "int": int, "str": str}[kind](value)
    return meta
