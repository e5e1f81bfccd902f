"""Datasets of library operators: ``operators.parquet``, with the columns of :data:`cdmpp.program.operators.COLUMNS` and
:data:`LABELS`, and ``meta.json``, which names the source of the measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from cdmpp.dataset.record import META_FILE
from cdmpp.errors import DatasetError, raised_as
from cdmpp.files import replacing, write_text
from cdmpp.program.operators import COLUMNS, SIZES, operator_table

OPERATOR_FILE = "operators.parquet"
#: Values of ``framework`` for PyTorch's kernels: on a CPU with the weights in its caches, and with weights in no cache; and on
#: a GPU, called one by one from the host, with latencies that include the time of the call.
TORCH, TORCH_COLD, TORCH_CALLS = "torch", "torch-cold", "torch-calls"

#: Label column -> its meaning.
LABELS: dict[str, str] = {
    "device": "canonical name",
    "framework": "whose kernels: vllm, sglang, trtllm, torch, miopen, ...",
    "version": "of the framework, where the source tells",
    "kernel": "the kernel, solver or backend, where the source tells; of several of one operator each is a row",
    "seconds": "latency",
    "noise": "relative, of the label; NaN where unknown",
}


def write_operators(folder: str | Path, table: pd.DataFrame, *, replace: bool = False, **meta: Any) -> None:
    """Write a table of operators with the columns of :data:`LABELS` as a new dataset, or ``replace`` one; ``meta`` goes into
    ``meta.json``. DatasetError if there is a dataset already, or the files cannot be written."""
    folder = Path(folder)
    if (folder / META_FILE).exists() and not replace:
        raise DatasetError(f"{folder} is a dataset already: choose a new folder")
    table = table.reindex(columns=[*COLUMNS, *LABELS])
    texts = [name for name in table if name not in (*SIZES, "seconds", "noise")]
    table = table.astype({**dict.fromkeys(texts, "category"), **dict.fromkeys((*SIZES, "noise"), "float32")})
    table = table.sort_values(["device", "op", "dtype", *SIZES], kind="stable").dropna(axis=1, how="all")
    with raised_as(DatasetError, f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / OPERATOR_FILE) as draft:
            table.to_parquet(draft, compression="zstd", index=False)
        write_text(folder / META_FILE, json.dumps({"operators": len(table), **meta}, indent=1) + "\n")


def load_operators(folders: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """The operators of dataset folders, or of folders with such folders, in one table. DatasetError: none can be read."""
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    files = [folder / OPERATOR_FILE for folder in operator_folders(given)]
    if not files:
        raise DatasetError(f"{', '.join(map(str, given))}: no {OPERATOR_FILE} in it")
    tables = []
    for file in files:
        with raised_as(DatasetError, f"cannot read {file}", NotImplementedError):
            table = pd.read_parquet(file)
        if missing := [name for name in ("op", "dtype", "device", "seconds") if name not in table]:
            raise DatasetError(f"{file} has no column {', '.join(missing)}")
        categories = table.select_dtypes("category").columns
        tables.append(table.astype(dict.fromkeys(categories, object)))
    united = pd.concat(tables, ignore_index=True)
    if "framework" not in united:
        united["framework"] = ""
    sentence = f"{', '.join(map(str, files))}: a column is of another type"
    with raised_as(DatasetError, sentence, TypeError, AttributeError, OverflowError):
        return operator_table(united.assign(framework=united["framework"].fillna("")))


def operator_folders(paths: Iterable[str | Path]) -> list[Path]:
    """The datasets of operators that folders are or directly contain. DatasetError: others are there, too."""
    found, others = list[Path](), list[Path]()
    for folder in map(Path, paths):
        below = sorted(file.parent for file in folder.glob(f"*/{OPERATOR_FILE}"))
        own = [folder] if (folder / OPERATOR_FILE).is_file() else below
        others += [meta.parent for meta in folder.glob(f"*/{META_FILE}") if meta.parent not in own] if own else [folder]
        found += own
    if found and others:
        raise DatasetError(f"{found[0]} holds operators, {others[0]} does not: expected datasets of one kind")
    return list(dict.fromkeys(found))
