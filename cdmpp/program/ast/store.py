"""Compact ASTs of many programs in one parquet file.

One row is one leaf: the hash of its program, its position, the number of nodes of the AST, and its feature vector. A vector is
stored whole, not split into columns: a number often occurs several times in a vector and again in the similar vectors around it
(programs are ordered so that those of one task are neighbours). zstd compresses this to about 80 bytes per leaf; separate
columns take a third more. The metadata of the file has the feature set and the feature names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cdmpp.errors import DatasetError, FeatureMismatchError, raised_as, reason
from cdmpp.files import replacing
from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURES, CompactAST

_META_KEY = b"cdmpp_ast"
#: Writing takes about 0.2 ms per leaf. Level 9 would be six times faster, but the file a tenth larger.
_COMPRESSION_LEVEL = 15
#: The codec compresses one page at a time, so pages are as large as row groups.
_PAGE_BYTES = 1 << 26
_GROUP_ROWS = 1 << 15
#: Features by which the programs in the file are sorted: similar programs agree in them.
_ORDER = ("leaf_count", "program_bytes", "program_flops")


def save_asts(path: str | Path, asts: Mapping[str, CompactAST]) -> None:
    """Write ASTs, keyed by program hash. The file is written whole or not at all, and replaces an existing one. Raises
    FeatureMismatchError if an AST's vectors do not match :data:`LEAF_FEATURES` in length, DatasetError if writing fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    for program, ast in asts.items():
        if ast.leaves.ndim != 2 or ast.leaves.shape[1] != len(LEAF_FEATURES):
            raise FeatureMismatchError(
                f"program {program} has leaves of shape {ast.leaves.shape}, expected (n, {len(LEAF_FEATURES)})"
            )
    programs = sorted(asts, key=lambda p: (*(float(asts[p].column(name)[0]) for name in _ORDER), p))
    counts = [asts[p].n_leaves for p in programs]
    width = len(LEAF_FEATURES)
    leaves = np.concatenate([np.zeros((0, width), np.float32), *(asts[p].leaves for p in programs)])
    positions = np.concatenate([np.zeros(0, np.int32), *(asts[p].positions for p in programs)])
    columns = {
        "program": pa.array(np.repeat(np.array(programs, dtype=object), counts), pa.string()),
        "position": pa.array(positions, pa.int32()),
        "n_nodes": pa.array(np.repeat(np.array([asts[p].n_nodes for p in programs], dtype=np.int32), counts)),
    }
    columns["leaf"] = pa.FixedSizeListArray.from_arrays(pa.array(leaves.ravel()), width)
    note = json.dumps({"feature_set": FEATURE_SET, "features": LEAF_FEATURES}).encode()
    table = pa.table(columns).replace_schema_metadata({_META_KEY: note})
    with raised_as(DatasetError, f"cannot write {path}", pa.ArrowException), replacing(path) as draft:
        pq.write_table(
            table,
            draft,
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=["program"],
            write_statistics=False,
            data_page_size=_PAGE_BYTES,
            row_group_size=_GROUP_ROWS,
            write_page_checksum=True,
        )


def load_asts(path: str | Path) -> dict[str, CompactAST]:
    """Read ASTs, keyed by program hash, in the order of the file. Raises FeatureMismatchError if the file has another feature
    set, DatasetError if it is missing, is damaged or holds no ASTs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        found = json.loads(file.schema_arrow.metadata[_META_KEY])["feature_set"]
        if found != FEATURE_SET:
            raise FeatureMismatchError(f"{path} has the features {found}, this version has {FEATURE_SET}: make it anew")
        table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {reason(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path} holds no compact ASTs") from error
    if table.num_rows == 0:
        return {}
    leaves = table.column("leaf").combine_chunks().flatten().to_numpy().reshape(-1, len(LEAF_FEATURES))
    positions = table.column("position").to_numpy().astype(np.int32)
    n_nodes = table.column("n_nodes").to_numpy()
    program = table.column("program").combine_chunks().dictionary_encode()
    codes = program.indices.to_numpy()
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    names = program.dictionary.take(pa.array(codes[starts])).to_pylist()
    ends = np.append(starts[1:], len(codes))
    return {
        str(name): CompactAST(leaves[a:b], positions[a:b], int(n_nodes[a]))
        for name, a, b in zip(names, starts, ends, strict=True)
    }
