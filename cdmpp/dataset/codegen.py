"""Instruction counts of a dataset's programs, in a file beside its records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdmpp.dataset.record import read_parquet, write_parquet
from cdmpp.errors import DatasetError
from cdmpp.program.codegen import CODEGEN_FEATURES, COUNTING_VERSION

CODEGEN_FILE = "codegen.parquet"

#: (program hash, :func:`~cdmpp.program.codegen.core.counts_key` of the device) -> counts, float32 (len(CODEGEN_FEATURES),).
Counts = dict[tuple[str, str], NDArray[np.float32]]

_SCHEMA = pa.schema([("program", pa.string()), ("code", pa.string()), *((name, pa.float32()) for name in CODEGEN_FEATURES)])


def save_codegen(path: Path, counts: Mapping[tuple[str, str], NDArray[np.float32]]) -> None:
    """Write counts. If that fails, raises DatasetError and keeps the old file."""
    keys = sorted(counts)
    rows = np.array([counts[key] for key in keys], dtype=np.float32).reshape(-1, len(CODEGEN_FEATURES))
    names = [program for program, _ in keys], [code for _, code in keys]
    write_parquet(path, pa.table([*names, *rows.T], schema=_SCHEMA), counting_version=COUNTING_VERSION)


def load_codegen(path: Path) -> Counts:
    """Read counts; DatasetError if the file is missing, damaged, has other columns or was counted by another version."""
    try:
        table, note = read_parquet(path, _SCHEMA)
        version = note.get("counting_version", 1)
        if version != COUNTING_VERSION:
            raise DatasetError(f"{path} was counted by version {version}, this cdmpp counts by {COUNTING_VERSION}")
    except DatasetError as error:
        raise DatasetError(f"{error}; delete it, and cdmpp codegen {path.parent} counts anew") from error
    rows = np.stack([table.column(name).to_numpy() for name in CODEGEN_FEATURES], axis=1).astype(np.float32)
    keys = zip(table.column("program").to_pylist(), table.column("code").to_pylist(), strict=True)
    return dict(zip(keys, rows, strict=True))
