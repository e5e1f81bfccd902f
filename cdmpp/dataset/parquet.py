"""Parquet files that are written whole or not at all, and know their schema version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.schema import SCHEMA_VERSION
from cdmpp.errors import DatasetError, SchemaVersionError
from cdmpp.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

_META_KEY = b"cdmpp"


def write_parquet(path: Path, table: pa.Table, compression_level: int = 19, **meta: Any) -> None:
    """Write, read back and compare, then move into place.

    Parameters
    ----------
    compression_level
        Of zstd: 19 is the smallest file, 9 a tenth larger and many times faster to write.
    meta
        JSON values kept in the file's metadata, beside the schema version.

    Raises
    ------
    DatasetError
        The disk is full, or what was read back differs; the file that was there before is untouched.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    note = json.dumps({"schema_version": SCHEMA_VERSION, **meta}).encode()
    table = table.replace_schema_metadata({_META_KEY: note})
    try:
        with replacing(path) as draft:
            pq.write_table(
                table, draft, write_page_checksum=True, **_compression(table.schema, compression_level)
            )
            if not pq.read_table(draft, schema=table.schema).equals(table):
                raise DatasetError(f"{path}: what was written does not read back; nothing is replaced")
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot write {path}: {error}") from error


def _compression(schema: pa.Schema, level: int) -> dict[str, Any]:
    """zstd; numbers with their bytes in separate streams, which saves a third; the rest by dictionary."""
    import pyarrow as pa

    numbers: list[str] = []
    others: list[str] = []
    for column in schema:
        if pa.types.is_list(column.type):
            numbers.append(f"{column.name}.list.element")
        else:
            (numbers if pa.types.is_floating(column.type) else others).append(column.name)
    return {
        "compression": "zstd",
        "compression_level": level,
        "use_byte_stream_split": numbers,
        "use_dictionary": others,
    }


def read_parquet(path: Path, schema: pa.Schema) -> tuple[pa.Table, dict[str, Any]]:
    """The table, with the columns of ``schema``, and the metadata of :func:`write_parquet`.

    Raises
    ------
    DatasetError
        The file is damaged, not one of ours, or lacks columns.
    SchemaVersionError
        It was written with another schema version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        note = json.loads((file.schema_arrow.metadata or {}).get(_META_KEY, b"null"))
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DatasetError(f"{path} is damaged: {_one_line(error)}") from error
    if not isinstance(note, dict):
        raise DatasetError(f"{path} is not a dataset file of cdmpp")
    check_schema_version(note, path)
    missing = [name for name in schema.names if name not in file.schema_arrow.names]
    if missing:
        raise DatasetError(
            f"{path} lacks {len(missing)} columns that this cdmpp expects, {missing[0]} first: another version made it"
        )
    try:
        return file.read(columns=schema.names).cast(schema), note
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DatasetError(f"{path} is damaged: {_one_line(error)}") from error


def check_schema_version(meta: Mapping[str, Any], path: Path) -> None:
    """Refuse any schema version but ours (SchemaVersionError says both)."""
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has dataset schema version {version!r}; this cdmpp reads version {SCHEMA_VERSION}"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
