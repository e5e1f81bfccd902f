"""Tasks, spaces, programs and records as journal lines and as Arrow tables, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import MAX_ERROR_CHARS, META_COLUMNS, RECORD_COLUMNS, arrow_schema
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def task_to_json(task: Task) -> dict[str, Any]:
    """A journal line of a task."""
    return {**asdict(task), "networks": dict(task.networks)}


def space_to_json(space: Space) -> dict[str, Any]:
    """A journal line of a space."""
    return asdict(space)


def program_to_json(program: Program) -> dict[str, Any]:
    """A journal line of a program; fields at their default are left out."""
    line = {"hash": program.hash, "task_hash": program.task_hash, "decisions": program.decisions}
    if program.space_hash is not None:
        line["space_hash"] = program.space_hash
    if program.origin != "random":
        line["origin"] = program.origin
    if program.implementation != "scheduled":
        line["implementation"] = program.implementation
    return line


def program_from_json(line: Mapping[str, Any]) -> Program:
    """The program of a journal line (TypeError or KeyError for a foreign line)."""
    return Program(**{"space_hash": None, **line})


def record_to_json(record: Record) -> dict[str, Any]:
    """A journal line of a record; empty fields are left out, samples keep seven digits (float32)."""
    line: dict[str, Any] = {"program": record.program, "device": record.device, "status": record.status}
    if record.latency_s is not None:
        line["latency_s"] = float(record.latency_s)
    if record.samples_s:
        line["samples_s"] = [float(f"{sample_s:.7g}") for sample_s in record.samples_s]
    if record.noise is not None:
        line["noise"] = float(f"{record.noise:.7g}")
    if record.error:
        line["error"] = shorten(record.error)
    if record.measured_at:
        line["measured_at"] = float(record.measured_at)
    if record.meta:
        line["meta"] = plain_meta(record.meta)
    return line


def plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Meta as JSON can hold it: numpy scalars as Python numbers; None, NaN and infinity are left out."""
    plain = {}
    for name, value in meta.items():
        value = value.item() if hasattr(value, "item") else value
        if value is not None and not (isinstance(value, float) and not math.isfinite(value)):
            plain[name] = value
    return plain


def record_from_json(line: Mapping[str, Any]) -> Record:
    """The record of a journal line (TypeError for a foreign line)."""
    return Record(**{**line, "samples_s": tuple(line.get("samples_s", ()))})


def shorten(message: str) -> str:
    """The message without its middle if it is longer than :data:`MAX_ERROR_CHARS`."""
    if len(message) <= MAX_ERROR_CHARS:
        return message
    half = (MAX_ERROR_CHARS - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"


def tasks_to_arrow(tasks: Iterable[Task]) -> pa.Table:
    """Tasks in the order of their hashes; ``networks`` as JSON."""
    rows = [
        {**task_to_json(task), "networks": json.dumps(dict(task.networks), sort_keys=True)} for task in tasks
    ]
    return _table("tasks", sorted(rows, key=lambda row: row["hash"]))


def tasks_from_arrow(table: pa.Table) -> list[Task]:
    """Inverse of :func:`tasks_to_arrow`."""
    return [Task(**{**row, "networks": json.loads(row["networks"])}) for row in table.to_pylist()]


def spaces_to_arrow(spaces: Iterable[Space]) -> pa.Table:
    """Spaces in the order of task and number, so that equal instructions lie side by side."""
    rows = sorted(
        (asdict(space) for space in spaces), key=lambda row: (row["task_hash"], row["index"], row["hash"])
    )
    return _table("spaces", rows)


def spaces_from_arrow(table: pa.Table) -> list[Space]:
    """Inverse of :func:`spaces_to_arrow`."""
    return [Space(**row) for row in table.to_pylist()]


def programs_to_arrow(programs: Iterable[Program]) -> pa.Table:
    """Programs in the order of task, space and decisions, so that decisions compress."""
    ordered = sorted(programs, key=lambda p: (p.task_hash, p.space_hash or "", p.decisions, p.hash))
    return _table("programs", [asdict(program) for program in ordered])


def programs_from_arrow(table: pa.Table) -> list[Program]:
    """Inverse of :func:`programs_to_arrow`."""
    columns = [table.column(name).to_pylist() for name in arrow_schema("programs").names]
    return [Program(*values) for values in zip(*columns, strict=True)]


def records_to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as rows; ``task`` and ``origin`` are left to the dataset, which knows the programs."""
    rows = []
    for record in records:
        columns, rest = split_meta(record.meta)
        latency_s = float("nan") if record.latency_s is None else record.latency_s
        noise = float("nan") if record.noise is None else record.noise
        rows.append(
            (record.program, record.device, record.status, latency_s, tuple(record.samples_s), noise,
             shorten(record.error), float(record.measured_at), *columns, rest)
        )  # fmt: skip
    return _frame(rows)


def records_to_arrow(frame: pd.DataFrame) -> pa.Table:
    """The frame of :func:`records_to_frame` as Arrow; NaN becomes null."""
    import numpy as np
    import pyarrow as pa

    schema = arrow_schema("records")
    arrays = []
    for column in schema:
        values = frame[column.name].to_numpy()
        if column.name == "samples_s":
            lengths = np.fromiter((len(sample) for sample in values), dtype=np.int64, count=len(values))
            flat = np.fromiter(
                (s for sample in values for s in sample), dtype=np.float32, count=int(lengths.sum())
            )
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)))
        else:
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            array = pa.array(list(values), type=kind, from_pandas=True)
            arrays.append(array.dictionary_encode() if pa.types.is_dictionary(column.type) else array)
    return pa.Table.from_arrays(arrays, schema=schema)


def records_from_arrow(table: pa.Table) -> pd.DataFrame:
    """Inverse of :func:`records_to_arrow`."""
    import numpy as np

    columns: dict[str, Any] = {}
    for name in arrow_schema("records").names:
        column = table.column(name).combine_chunks()
        if name == "samples_s":
            flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
            ends = np.cumsum(np.asarray(column.value_lengths().fill_null(0)))
            starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
            columns[name] = [tuple(flat[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
        else:
            columns[name] = column.to_pylist()
    return _frame(list(zip(*columns.values(), strict=True)))


def split_meta(meta: Mapping[str, Any]) -> tuple[list[Any], str]:
    """The values of :data:`META_COLUMNS` and the rest as JSON ("" if there is none)."""
    kinds: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "str": (str,)}
    rest = plain_meta(meta)
    columns = []
    for name, kind in META_COLUMNS.items():
        value = rest.get(name)
        fits = isinstance(value, kinds[kind]) and not isinstance(value, bool)
        columns.append(rest.pop(name) if fits else None)
    return columns, json.dumps(rest, separators=(",", ":"), sort_keys=True) if rest else ""


def join_meta(row: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`split_meta`, of a row of ``Dataset.records``."""
    import pandas as pd

    meta: dict[str, Any] = json.loads(row["meta"]) if row["meta"] else {}
    for name, kind in META_COLUMNS.items():
        value = row[name]
        if value != "" and not pd.isna(value):
            meta[name] = {"float": float, "int": int, "str": str}[kind](value)
    return meta


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=arrow_schema(name))


def _frame(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    import pandas as pd

    names = [name for name in RECORD_COLUMNS if name not in ("task", "origin")]
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in names]
    series: dict[str, Any] = {}
    for name, values in zip(names, columns, strict=True):
        if name in ("latency_s", "noise", "measured_at") or META_COLUMNS.get(name) in ("float", "int"):
            series[name] = pd.Series(values, dtype="float64")
        else:
            series[name] = pd.Series(["" if value is None else value for value in values], dtype=object)
    return pd.DataFrame(series)
