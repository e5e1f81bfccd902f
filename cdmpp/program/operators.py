"""Operators as libraries run them, one row each: the operation, its data type, and the sizes that its time depends on.

A table is a DataFrame with the columns of :data:`COLUMNS`; sizes that an operator does not have are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.errors import ProgramError, raised_as

FloatArray = NDArray[np.float64]

#: Data type -> bytes of an element, block scales included: nvfp4 has a byte for 16 elements, fp8_block four for 128.
ELEMENT_BYTES: dict[str, float] = {
    "float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_block": 1 + 4 / 128,
    "fp8_static": 1, "nvfp4": 0.5 + 1 / 16, "int8": 1, "int4_wo": 0.5, "int8_wo": 1, "sq": 1,
}  # fmt: skip
#: Other names of data types that files use.
DTYPE_NAMES = {
    "fp64": "float64", "fp32": "float32", "f32": "float32", "float": "float32", "tf32": "tfloat32", "fp16": "float16",
    "f16": "float16", "half": "float16", "bf16": "bfloat16", "float8": "fp8", "float8_e4m3fn": "fp8", "fp4": "nvfp4",
}  # fmt: skip
#: Data types of weights only: inputs, outputs and arithmetic are bfloat16. Outputs of other types are no smaller than that.
WEIGHTS_ONLY = ("int4_wo", "int8_wo")

#: Column -> what it is; the first three are text, the others float64.
COLUMNS: dict[str, str] = {
    "op": "one of OPERATORS",
    "dtype": "of the arithmetic, one of ELEMENT_BYTES",
    "kv_dtype": "of the keys and values that attention reads; empty: as dtype",
    "batch": "products of matrices side by side; images of a convolution; layers and directions of a recurrent network",
    "m": "rows of the output; rows of softmax and norms",
    "n": "columns of the output; what softmax and norms reduce over",
    "k": "what a product reduces over",
    "inputs": "tensors that an element-wise operator reads",
    "heads": "heads of the queries",
    "kv_heads": "heads of keys and values",
    "head_dim": "elements of a head",
    "sequences": "sequences of a batch",
    "tokens": "queries of all sequences",
    "kv_tokens": "keys of all sequences",
    "pairs": "of a query and a key that it sees, of all sequences and one head",
    "longest": "keys of the longest sequence",
    "in_channels": "of one image",
    "out_channels": "of one image",
    "height": "of the input",
    "width": "of the input",
    "kernel_h": "of a window",
    "kernel_w": "of a window",
    "out_h": "of the output",
    "out_w": "of the output",
    "stride": "of a window, product of both directions",
    "dilation": "of a window, product of both directions",
    "groups": "of a convolution",
    "backward": "0 forward, 1 by the input, 2 by the weights",
    "bytes": "of each rank in a collective",
    "num_workers": "ranks of a collective",
}
SIZES = tuple(COLUMNS)[3:]

#: Operator -> the sizes that it needs.
OPERATORS: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "grouped_gemm": ("batch", "m", "n", "k"),
    "attention": ("heads", "kv_heads", "head_dim", "sequences", "tokens", "kv_tokens", "pairs", "longest"),
    "conv": ("batch", "in_channels", "out_channels", "height", "width", "kernel_h", "kernel_w", "out_h", "out_w"),
    "rmsnorm": ("m", "n"),
    "layernorm": ("m", "n"),
    "softmax": ("m", "n"),
    "silu_mul": ("m", "n"),
    "elementwise": ("m", "n"),
    "quantize": ("m", "n"),
    "embedding": ("m", "n"),
    "all_reduce": ("bytes", "num_workers"),
    "send_recv": ("bytes", "num_workers"),
    "activation": ("m", "n"),
    "batchnorm": ("m", "n"),
    "copy": ("m", "n"),
    "reduce": ("m", "n"),
    "pool": ("batch", "in_channels", "height", "width", "kernel_h", "kernel_w", "out_h", "out_w"),
    "lstm": ("m", "n", "k", "tokens"),
    "gru": ("m", "n", "k", "tokens"),
}  # fmt: skip
COLLECTIVES = ("all_reduce", "send_recv")
#: Data type -> operators that PyTorch itself runs as one kernel.
_OF_TORCH = {
    **dict.fromkeys(
        ("float64", "float32", "float16", "bfloat16"),
        ("gemm", "attention", "conv", "rmsnorm", "layernorm", "softmax", "elementwise", "activation", "batchnorm", "copy",
         "reduce", "pool", "embedding", "lstm", "gru"),
    ),
    "tfloat32": ("gemm", "conv"),
    "fp8": ("gemm", "quantize"),
}  # fmt: skip
#: Defaults of sizes that a row may lack: 1, or 0 for ``backward``.
_DEFAULTS = {"batch": 1.0, "inputs": 1.0, "stride": 1.0, "dilation": 1.0, "groups": 1.0, "backward": 0.0}
#: The largest size that an operator may have.
_LARGEST = 1e15
#: Vector instructions per element: read, mean, scale and the like. The exact number hardly matters: memory bounds them.
_VECTOR = {"rmsnorm": 4, "layernorm": 7, "softmax": 4, "silu_mul": 3, "elementwise": 1, "quantize": 3, "embedding": 0,
           "activation": 4, "batchnorm": 2, "copy": 0, "reduce": 1}  # fmt: skip
#: Exponentials and other special functions per element.
_SPECIAL = {"softmax": 1, "silu_mul": 2, "activation": 1}
#: Number of matrix products in a cell of a recurrent network, by operator.
GATES = {"lstm": 4, "gru": 3}


def dtype_name(text: str) -> str:
    """The name of a data type in :data:`ELEMENT_BYTES`. Raises ProgramError if there is none."""
    name = text.strip().lower().removeprefix("torch.")
    name = DTYPE_NAMES.get(name, name)
    if name not in ELEMENT_BYTES:
        raise ProgramError(f"unknown data type {text!r}; there are {', '.join(ELEMENT_BYTES)}")
    return name


def operator_table(rows: Iterable[Mapping[str, Any]] | pd.DataFrame) -> pd.DataFrame:
    """Make a table of rows (:data:`COLUMNS`; other columns are kept); missing sizes become their default or NaN. Raises
    ProgramError, naming the row, if an operator is unknown or a size that it needs is missing, negative or not a number."""
    table = pd.DataFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    places = table.index if table.index.dtype.kind == "i" else pd.RangeIndex(len(table))
    table = table.set_axis(places)
    for name in ("op", "dtype"):
        if name not in table:
            raise ProgramError(f"operators without {name}: expected the columns op, dtype and sizes")
    for name in table.columns.intersection(SIZES):
        given = table[name]
        numbers = pd.to_numeric(given, errors="coerce").astype(np.float64)
        wrong = given.notna() & (given.astype(str).str.strip() != "") & ~numbers.between(0, _LARGEST)
        refuse(table, name, wrong, f"a number from 0 to {_LARGEST:g}")
        table[name] = numbers.fillna(_DEFAULTS.get(name, np.nan))
    table = table.assign(**{name: _DEFAULTS.get(name, np.nan) for name in SIZES if name not in table})
    refuse(table, "op", ~table["op"].isin(OPERATORS), f"one of {', '.join(OPERATORS)}")
    for op in table["op"].unique():
        for name in OPERATORS[op]:
            if len(lacking := table.index[(table["op"] == op) & ~(table[name] > 0)]):
                raise ProgramError(f"row {lacking[0] + 1}: {op} needs {name}, a number above 0")
    table["dtype"] = table["dtype"].astype(str)
    kv = table["kv_dtype"] if "kv_dtype" in table else pd.Series(None, index=table.index)
    table["kv_dtype"] = kv.astype(str).where(kv.notna() & (kv.astype(str) != ""), table["dtype"])
    for name in ("dtype", "kv_dtype"):
        names: dict[Any, str] = {}
        for text, rows in table.groupby(name).indices.items():
            with raised_as(ProgramError, f"row {table.index[rows[0]] + 1}, {name}", ProgramError):
                names[text] = dtype_name(str(text))
        table[name] = table[name].map(names)
    return table.reset_index(drop=True)


def refuse(table: pd.DataFrame, name: str, wrong: Any, expected: str) -> None:
    """Raise ProgramError, which names the first of the wrong rows by its index (from 1) and what its column holds, if any."""
    if len(at := np.flatnonzero(wrong)):
        raise ProgramError(f"row {table.index[at[0]] + 1}: {name} is {table[name].iloc[at[0]]}, expected {expected}")


def attention(
    heads: int, kv_heads: int, head_dim: int, q_lengths: Sequence[int], kv_lengths: Sequence[int], causal: bool = True,
    window: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Sizes of attention over sequences of ``q_lengths`` new queries and ``kv_lengths`` keys, which include the new ones.

    A query sees the keys up to its own, or only the last ``window`` of these if that is not 0; without ``causal`` it sees all.
    Raises ProgramError if the lengths do not match, or the query heads are not a multiple of the key heads."""
    q, kv = np.asarray(q_lengths, dtype=np.float64), np.asarray(kv_lengths, dtype=np.float64)
    if q.shape != kv.shape or not len(q):
        raise ProgramError(f"attention of {len(q)} query lengths and {len(kv)} key lengths: expected as many")
    if (q < 1).any() or (kv < q).any():
        at = int(np.flatnonzero((q < 1) | (kv < q))[0])
        raise ProgramError(f"sequence {at + 1} has {kv[at]:g} keys for {q[at]:g} queries: fewer than its own")
    if kv_heads < 1 or heads % kv_heads:
        raise ProgramError(f"{heads} heads of queries are not a multiple of {kv_heads} heads of keys")
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "sequences": float(len(q)),
        "tokens": float(q.sum()),
        "kv_tokens": float(np.minimum(kv, q + window - 1).sum() if window else kv.sum()),
        "pairs": float(seen_pairs(q, kv, causal, window).sum()),
        "longest": float(kv.max()),
    }


def seen_pairs(q: FloatArray, kv: FloatArray, causal: bool | NDArray[np.bool_], window: Any = 0) -> FloatArray:
    """Number of pairs of a query and a key that it sees, by sequence: query i of q sees the keys up to ``kv - q + i``."""
    full = q * kv
    below = full - q * (q - 1) / 2
    # with a window w, query i (from 1) sees min(w, kv - q + i) keys: queries before the window is full see fewer
    w = np.where(np.asarray(window) > 0, window, np.inf)
    filling = np.clip(np.where(np.isinf(w), q, w - (kv - q)), 0, q)
    first = filling * (kv - q) + filling * (filling + 1) / 2
    rest = np.where(filling < q, (q - filling) * np.where(np.isinf(w), 0.0, w), 0.0)
    return np.where(causal, np.where(np.isinf(w), below, first + rest), full)


def work(table: pd.DataFrame) -> dict[str, FloatArray]:
    """The work of each operator, float64 (n,): ``matrix`` (FLOP of matrix products, two for a multiply-add), ``vector`` and
    ``special`` (instructions, counted per element), ``read`` and ``written`` (bytes, each tensor counted once)."""
    size = {name: np.nan_to_num(table[name].to_numpy(dtype=np.float64)) for name in SIZES}
    op = table["op"].to_numpy(dtype=str)
    element = table["dtype"].map(ELEMENT_BYTES).to_numpy(dtype=np.float64)
    weights_only = table["dtype"].isin(WEIGHTS_ONLY).to_numpy()
    inner, outer = np.where(weights_only, 2.0, element), np.maximum(np.where(weights_only, 2.0, element), 2.0)
    kv_bytes = table["kv_dtype"].map(ELEMENT_BYTES).to_numpy(dtype=np.float64)
    out = {name: np.zeros(len(table)) for name in ("matrix", "vector", "special", "read", "written")}

    def put(rows: NDArray[np.bool_], **values: Any) -> None:
        for name, value in values.items():
            out[name][rows] = np.broadcast_to(value, len(table))[rows]

    b, m, n, k = (size[name] for name in ("batch", "m", "n", "k"))
    put(op == "gemm", matrix=2 * b * m * n * k, read=b * (m * k * inner + k * n * element), written=b * m * n * outer)
    dealt = m * k * inner + used_weights(b, m) * k * n * element
    put(op == "grouped_gemm", matrix=2 * m * n * k, read=dealt, written=m * n * outer)
    heads, dim, pairs, attends = size["heads"], size["head_dim"], size["pairs"], op == "attention"
    queries, keys = heads * dim * size["tokens"] * outer, 2 * size["kv_heads"] * dim * size["kv_tokens"] * kv_bytes
    put(attends, matrix=4 * heads * dim * pairs, special=heads * pairs, vector=4 * heads * pairs)
    put(attends, read=queries + keys, written=queries)
    image = b * size["in_channels"] * size["height"] * size["width"] * element
    result = b * size["out_channels"] * size["out_h"] * size["out_w"] * element
    window = size["kernel_h"] * size["kernel_w"]
    weights = size["in_channels"] * size["out_channels"] * window / np.maximum(size["groups"], 1) * element
    back = size["backward"]
    takes = np.select([back == 1, back == 2], [result + weights, image + result], image + weights)
    gives = np.select([back == 1, back == 2], [image, weights], result)
    put(op == "conv", matrix=2 * weights / element * b * size["out_h"] * size["out_w"], read=takes, written=gives)
    points = m * n
    results = b * size["in_channels"] * size["out_h"] * size["out_w"]
    put(op == "pool", vector=results * window, read=image, written=results * element)
    for name, gates in GATES.items():
        cell, steps = gates * n * (n + k), b * size["tokens"]
        put(op == name, matrix=2 * m * cell * steps, special=gates * m * n * steps, written=m * n * element * steps)
        put(op == name, read=(b * cell + m * (n + k) * steps) * element)
    for name, instructions in _VECTOR.items():
        inputs = {"silu_mul": 2.0}.get(name, size["inputs"] if name in ("elementwise", "activation", "copy") else 1.0)
        written = {"quantize": points * element, "reduce": m * outer}.get(name, points * outer)
        put(op == name, vector=instructions * points, special=_SPECIAL.get(name, 0) * points)
        put(op == name, read=inputs * points * outer, written=written)
    put(np.isin(op, COLLECTIVES), read=size["bytes"], written=size["bytes"])
    return out


def runs_in_torch(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Which operators PyTorch itself can run as one kernel (recurrent ones: one per step). Not attention with a window or with
    several new queries after earlier tokens, nor fp8 products that are not whole 16 x 16 blocks."""
    names = ("n", "k", "sequences", "tokens", "kv_tokens", "pairs")
    size = {name: table[name].to_numpy(dtype=np.float64) for name in names}
    known = [op in _OF_TORCH.get(dtype, ()) for op, dtype in zip(table["op"], table["dtype"], strict=True)]
    same, op = (table["kv_dtype"] == table["dtype"]).to_numpy(), table["op"].to_numpy(dtype=str)
    queries, keys, pairs = (size[name] / size["sequences"] for name in ("tokens", "kv_tokens", "pairs"))
    plain = (pairs == queries * keys) | ((queries == keys) & (pairs == queries * (queries + 1) / 2))
    whole = (size["n"] % 16 + size["k"] % 16 == 0) | (table["dtype"] != "fp8").to_numpy()
    return np.array(known, dtype=bool) & same & (plain | (op != "attention")) & (whole | (op != "gemm"))


def used_weights(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """How many of the weights (of experts) get any of the rows, on average, if each is equally likely; 1 or more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        used = -weights * np.expm1(rows * np.log1p(-1 / weights))
    return np.where(weights > 1, np.maximum(used, 1.0), 1.0)


#: Operators that engines run in fewer than 16 bits where a network's data type is narrow; attention only where its row says so.
_NARROW = ("gemm", "grouped_gemm", "conv", "quantize")


def read_csv(path: str | Path, **options: Any) -> pd.DataFrame:
    """The table of a CSV file; blanks around the names of columns and a comma at the end of rows do not count (OSError;
    ValueError: a row has more fields than the header, or is malformed)."""
    table = pd.read_csv(path, **options).rename(columns=str.strip)
    if not isinstance(table.index, pd.RangeIndex):  # rows are longer than the header: the first fields became an index
        cells, columns = table.reset_index(), table.columns
        more = cells.iloc[:, len(columns) :].notna().any(axis=1).to_numpy()
        if more.any():
            raise ValueError(f"row {more.argmax() + 1} has more fields than the {len(columns)} of the header")
        table = cells.iloc[:, : len(columns)].set_axis(columns, axis=1)
    return table


def read_operators(path: str | Path, dtype: str) -> pd.DataFrame:
    """Read the operators of a ``.parquet`` or ``.csv`` file, one per row. Rows without a data type get ``dtype``, but those
    that no engine runs in fewer than 16 bits get bfloat16.

    Columns are ``op``, ``count`` (1 if missing), those that the operator needs of ``m``, ``n``, ``k``, ``heads``, ``kv_heads``,
    ``head_dim``, ``q_lengths``, ``kv_lengths`` (one entry per sequence; in CSV separated by spaces), ``bytes``,
    ``num_workers``, and optionally ``step`` and ``phase``. Operators that are not in :data:`OPERATORS` stay, with ``known``
    false. Raises ProgramError if the file cannot be read, has no ``op`` or no row, or a row (it names it) has invalid sizes."""
    path = Path(path)
    with raised_as(ProgramError, f"cannot read operators from {path}", ImportError, NotImplementedError):
        table = read_csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
        listed = table.to_dict("records")
    if "op" not in table:
        raise ProgramError(f"{path} has no column op: expected one row an operator")
    if table.empty:
        raise ProgramError(f"{path} lists no operator: expected one row an operator")
    rows = []
    for number, row in enumerate(listed, start=1):
        with raised_as(ProgramError, f"{path}, row {number}", ProgramError, TypeError, OverflowError):
            rows.append(_listed(row, dtype))
    table = pd.DataFrame(rows)
    known = table["known"].to_numpy(dtype=bool)
    with raised_as(ProgramError, str(path), ProgramError):
        whole = operator_table(table[known])
    return pd.concat([whole.set_axis(table.index[known]), table[~known]]).sort_index()


def _listed(row: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """One row of an operator list as a row of a table."""
    given = {k: v for k, v in row.items() if (len(v) if np.ndim(v) else not (pd.isna(v) or v == ""))}
    op = str(given.get("op", "")).strip().lower()
    if op not in _NARROW and ELEMENT_BYTES[dtype] < 2:
        dtype = "bfloat16"
    if re.fullmatch(r"[-+.\d]*(e[-+]?\d+)?", op):  # a number, or nothing
        raise ProgramError(f"op is {op!r}, expected the name of an operator")
    for name in given.keys() & set(SIZES) - {"bytes"}:
        if isinstance(given[name], float) and given[name] % 1 > 0:
            raise ProgramError(f"{name} is {given[name]}, expected a whole number")
    count = given.get("count", 1)
    if isinstance(count, str) or not np.isfinite(count) or count < 0:
        raise ProgramError(f"count is {count}, expected a number, 0 or more")
    place = {"step": given.get("step", 0), "phase": str(given.get("phase", ""))}
    kept = {"name": op, "count": float(count), **place, "known": op in OPERATORS}
    if op not in OPERATORS:
        return {**kept, "op": op, "dtype": dtype_name(str(given.get("dtype", dtype)))}
    sizes = {name: given[name] for name in (*SIZES, "dtype", "kv_dtype") if name in given}
    if op == "attention":
        queries, keys = (_lengths(given.get(name), name) for name in ("q_lengths", "kv_lengths"))
        whole = [_whole(given, name) for name in ("heads", "kv_heads", "head_dim")]
        sizes |= attention(whole[0], whole[1], whole[2], queries, keys)
    elif op in ("rmsnorm", "silu_mul", "elementwise", "layernorm", "softmax", "quantize", "embedding"):
        sizes.setdefault("n", given.get("k"))
        if "m" not in sizes and "bytes" in given:  # only the size of the tensor is given
            sizes |= {"m": 1, "n": float(given["bytes"]) / ELEMENT_BYTES[dtype_name(str(sizes.get("dtype", dtype)))]}
    return {**kept, "dtype": dtype, **sizes, "op": op}


def operator_text(row: Mapping[str, Any]) -> str:
    """An operator as readable text: ``gemm 4096 x 4096 x 8192 bfloat16``."""
    size = {name: f"{row[name]:.0f}" for name in SIZES if row.get(name) == row.get(name) and name in row}
    if row["op"] == "conv":
        text = "{batch} x {in_channels} x {height} x {width}, {out_channels} of {kernel_h} x {kernel_w}".format(**size)
    elif row["op"] == "attention":
        text = "{tokens} queries, {kv_tokens} keys of {sequences}, {heads} heads of {head_dim}".format(**size)
    else:
        text = " x ".join(size[name] for name in OPERATORS[row["op"]])
    return f"{row['op']} {text} {row['dtype']}"


def _lengths(value: Any, name: str) -> list[int]:
    if value is None:
        raise ProgramError(f"attention needs {name}, one entry a sequence")
    parts = re.findall(r"[^][(),;\s]+", value) if isinstance(value, str) else np.atleast_1d(value)
    with raised_as(ProgramError, f"{name} is {value!r}, expected whole numbers"):
        if not all(float(part).is_integer() for part in parts):
            raise ValueError("not all are whole")
        return [int(float(part)) for part in parts]


def _whole(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    if value is None or isinstance(value, str) or value != int(value) or value < 1:
        raise ProgramError(f"attention needs {name}, a whole number above 0, not {value}")
    return int(value)
