"""Imports public measurements of library operators: aiconfigurator's (LLM serving), PipeWeave's, MIOpen's and NeuSight's.

All become datasets of operators (:mod:`cdmpp.dataset.operators`). The columns of a file show what kind of file it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset.importers.common import CONV_GAIN, SHORTEST_S, Import, ImportReport, Paths, Progress, evenly, require_columns
from cdmpp.dataset.operators import LABELS, TORCH_CALLS, write_operators
from cdmpp.device import Device, DeviceTable
from cdmpp.errors import DatasetError, ProgramError, raised_as
from cdmpp.program.operators import operator_table, refuse, seen_pairs, work

#: No operator takes less than this fraction of the time at its dtype's peak; boost clocks and rounded sizes explain up to this.
_LOWEST = 0.6
_PEAK = {"float32": ("float32", "float32_matrix", "tfloat32_matrix"), "float16": ("float16_matrix", "float16"),
         "bfloat16": ("bfloat16_matrix", "float16_matrix", "bfloat16"), "fp8": ("float8_matrix",),
         "int8": ("int8_matrix", "int8"), "nvfp4": ("float4_matrix",)}  # fmt: skip
_PEAK |= {"fp8_block": _PEAK["fp8"], "fp8_static": _PEAK["fp8"], "sq": _PEAK["int8"], "int4_wo": _PEAK["bfloat16"]}
#: PipeWeave's device names -> ours, according to its hardware/*.json.
_PIPEWEAVE_NAMES = {"A100": "a100-sxm4-80gb", "H100": "h100-sxm", "H800": "h800"}
#: This card ran at half its clock: compute-bound kernels take 2.2 to 2.5 times as long as on a Vega 64, and matrix products
#: reach half the peak. It is therefore treated as half a device.
_MIOPEN_NAMES = {"Vega 56": "vega-56@0.5"}
_DIRECTION = {"forward": 0, "backward_data": 1, "backward_weights": 2}
_DIRECTION |= {"F": 0, "B": 1, "W": 2, "backward_input": 1, "backward_weight": 2}


def import_operators(
    source: str,
    paths: Paths,
    out: str | Path,
    *,
    table: DeviceTable | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import files of one of :data:`SOURCES` into a new dataset of operators. Groups of rows that the source marks as
    impossible (``suspect_group``) are left out and counted. DatasetError if a file cannot be read or lacks a column, ``out`` is
    a dataset, or a row is faster than the device can be. UnknownDeviceError if a device is not in the table."""
    found = Import(paths, out, table, progress)
    parts: list[pd.DataFrame] = []
    for number, (path, frame) in enumerate(found.frames):
        found.progress(path.name, number, len(found.frames))
        reader = _reader(source, frame, path)
        frame = evenly(_without_suspects(frame.reset_index(drop=True), found), limit)
        names = _text(frame, "system" if "system" in frame else "device")
        names = names.replace({"pipeweave": _PIPEWEAVE_NAMES, "miopen": _MIOPEN_NAMES}.get(source, {}))
        devices = found.resolve(names, path)
        with raised_as(DatasetError, str(path), ProgramError):
            part = operator_table(reader(frame)).set_axis(frame.index)
            part["device"] = [devices[str(name)].name for name in names]
            _refuse_impossible(part, {device.name: device for device in devices.values()})
        found.devices |= set(part["device"])
        parts.append(part)
    united = pd.concat(parts, ignore_index=True)
    files = [path.name for path, _ in found.frames]
    write_operators(out, united, source=source, files=files, left_out=dict(found.unknown))
    operators = united.drop(columns=list(LABELS), errors="ignore")
    return found.report({"ok": len(united)}, tasks=len(operators.drop_duplicates()), programs=0)


def _reader(source: str, frame: pd.DataFrame, path: Path) -> _Reader:
    for reader, columns in _FILES[source].items():
        if columns[0] in frame:
            require_columns(frame, columns, path)
            return reader
    firsts = [columns[0] for columns in _FILES[source].values()]
    raise DatasetError(f"{path} is no file of {source}: it has no column {' or '.join(firsts)}")


def _without_suspects(frame: pd.DataFrame, found: Import) -> pd.DataFrame:
    marks = [name for name in ("suspect", "suspect_group") if name in frame]
    wrong = frame[marks].fillna(False).astype(bool).any(axis=1)
    if wrong.any():
        found.unknown["suspect"] += int(wrong.sum())
        found.notes.append(f"{int(wrong.sum())} rows of groups with impossible times are left out")
    return frame[~wrong]


def _text(frame: pd.DataFrame, name: str, default: str = "") -> pd.Series:
    values = frame[name].astype(object) if name in frame else pd.Series(default, index=frame.index)
    return values.where(values.notna(), default).astype(str)


def _number(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    given = frame[name] if name in frame else pd.Series(np.nan, index=frame.index)
    numbers = pd.to_numeric(given, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    refuse(frame, name, given.notna() & np.isnan(numbers), "a number")
    return numbers


def _labels(frame: pd.DataFrame, framework: str, kernel: str = "kernel") -> pd.DataFrame:
    texts = {"framework": _text(frame, "framework", framework), "version": _text(frame, "version")}
    return pd.DataFrame({**texts, "kernel": _text(frame, kernel), "seconds": _number(frame, "seconds")})


def _aiconfigurator(frame: pd.DataFrame) -> pd.DataFrame:
    op, out = _text(frame, "op"), _labels(frame, "aiconfigurator")
    known = {"gemm": "gemm", "quantize_scale_matrix": "quantize"}
    attends = op.str.startswith("attention_").to_numpy()
    out["op"] = np.where(attends, "attention", op.map(known).fillna(op))
    out["dtype"], out["kv_dtype"] = _text(frame, "dtype"), _text(frame, "kv_dtype")
    m, n, k, batch, seq, past, window, heads, kv_heads = (
        _number(frame, name) for name in ("m", "n", "k", "batch", "seq", "past", "window", "heads", "kv_heads")
    )
    out["m"], out["n"], out["k"] = m, np.where(op == "quantize_scale_matrix", k, n), k
    q, keys = seq, seq + np.where(op == "attention_context", 0, np.nan_to_num(past))
    window, causal = np.nan_to_num(window), (op != "attention_encoder").to_numpy()
    sizes = {
        "heads": heads,
        "kv_heads": np.where(kv_heads > 0, kv_heads, heads),
        "head_dim": _number(frame, "head_dim"),
        "sequences": batch,
        "tokens": batch * q,
        "kv_tokens": batch * np.where(window > 0, np.minimum(keys, q + window - 1), keys),
        "pairs": batch * seen_pairs(q, keys, causal, window),
        "longest": keys,
    }
    return out.assign(**{name: np.where(attends, values, np.nan) for name, values in sizes.items()})


def _pipeweave_gemm(frame: pd.DataFrame) -> pd.DataFrame:
    sizes = {name: _number(frame, name) for name in ("m", "n", "k")}
    return _labels(frame, "pipeweave").assign(op="gemm", dtype=_text(frame, "dtype", "bfloat16"), **sizes)


def _pipeweave_moe(frame: pd.DataFrame) -> pd.DataFrame:
    first = (_text(frame, "weight_type") == "w13").to_numpy()
    experts, hidden, inner = (_number(frame, name) for name in ("experts", "hidden", "intermediate"))
    return _labels(frame, "triton").assign(
        op="grouped_gemm",
        dtype=_text(frame, "dtype", "bfloat16"),
        batch=experts,
        m=_number(frame, "m") * _number(frame, "top_k"),
        n=np.where(first, 2 * inner, hidden),
        k=np.where(first, hidden, inner),
    )


def _pipeweave_collective(frame: pd.DataFrame) -> pd.DataFrame:
    refuse(frame, "num_workers", ~(_number(frame, "num_workers") >= 2), "2 or more ranks")
    return _labels(frame, "nccl").assign(
        op=_text(frame, "collective"),
        dtype="bfloat16",
        bytes=_number(frame, "bytes_per_rank"),
        num_workers=_number(frame, "num_workers"),
    )


def _miopen(frame: pd.DataFrame) -> pd.DataFrame:
    same = {"batch": "n", "in_channels": "c", "out_channels": "k", "height": "h", "width": "w", "kernel_h": "kh",
            "kernel_w": "kw", "out_h": "oh", "out_w": "ow", "groups": "groups"}  # fmt: skip
    sizes = {name: _number(frame, column) for name, column in same.items()}
    labels = _labels(frame, "miopen", "solver")
    layout = _text(frame, "layout", "NCHW")
    refuse(frame, "direction", ~_text(frame, "direction").isin(_DIRECTION), f"one of {', '.join(_DIRECTION)}")
    for d in "hw":
        of = {name: _number(frame, name + d) for name in ("", "k", "o", "pad_", "stride_", "dilation_")}
        made = (of[""] + 2 * of["pad_"] - of["dilation_"] * (of["k"] - 1) - 1) // np.maximum(of["stride_"], 1) + 1
        rule = f"({d} + 2 pad_{d} - dilation_{d} (k{d} - 1) - 1) // stride_{d} + 1"
        refuse(frame, f"o{d}", np.abs(made - of["o"]) > 0, rule)
    return labels.assign(
        kernel=labels["kernel"].where(layout == "NCHW", labels["kernel"] + " " + layout),
        op="conv",
        dtype=_text(frame, "dtype"),
        stride=_number(frame, "stride_h") * _number(frame, "stride_w"),
        dilation=_number(frame, "dilation_h") * _number(frame, "dilation_w"),
        backward=_text(frame, "direction").map(_DIRECTION),
        **sizes,
    )


def _neusight(frame: pd.DataFrame) -> pd.DataFrame:
    op = _text(frame, "op")
    b, m, n, k, h = (_number(frame, name) for name in ("B", "M", "N", "K", "H"))
    product, rows = op.isin(["linear", "bmm"]).to_numpy(), op.isin(["softmax", "ln"]).to_numpy()
    conv = (op == "conv").to_numpy()
    kinds = {"linear": "gemm", "bmm": "gemm", "ln": "layernorm", "softmax": "softmax", "conv": "conv"}
    side, window, stride, padding, ins, outs = (
        _number(frame, f"conv_{name}") for name in ("input_hw", "kernel", "stride", "padding", "in_channels", "out_channels")
    )
    out_side = (side + 2 * padding - window) // stride + 1
    sizes = {
        "batch": np.where(op == "linear", 1.0, np.where(product | conv, b, np.nan)),
        "m": np.where(product, m, np.where(conv, np.nan, b)),
        "n": np.where(product, k, np.where(conv, np.nan, h)),
        "k": np.where(product, n, np.nan),
        "inputs": np.where(op.isin(["add", "mul", "div", "pow"]), 2.0, np.where(product | rows | conv, np.nan, 1.0)),
        **{name: np.where(conv, side, np.nan) for name in ("height", "width")},
        **{name: np.where(conv, out_side, np.nan) for name in ("out_h", "out_w")},
        **{name: np.where(conv, window, np.nan) for name in ("kernel_h", "kernel_w")},
        "stride": np.where(conv, stride**2, np.nan),
        "in_channels": ins,
        "out_channels": outs,
    }
    labels = _labels(frame.assign(seconds=_number(frame, "latency_ms") / 1e3), TORCH_CALLS, "none")
    return labels.assign(op=op.map(kinds).fillna("elementwise"), dtype=_text(frame, "dtype", "float32"), **sizes)


_Reader = Callable[[pd.DataFrame], pd.DataFrame]
#: Source -> its kinds of files: how each is read, and the columns that it needs, of which the first identifies it.
_FILES: dict[str, dict[_Reader, tuple[str, ...]]] = {
    "aiconfigurator": {_aiconfigurator: ("op", "system", "dtype", "seconds")},
    "pipeweave": {
        _pipeweave_collective: ("bytes_per_rank", "device", "collective", "num_workers", "seconds"),
        _pipeweave_moe: ("weight_type", "device", "m", "experts", "top_k", "hidden", "intermediate", "seconds"),
        _pipeweave_gemm: ("op", "device", "m", "n", "k", "seconds"),
    },
    "neusight-operators": {_neusight: ("op", "device", "latency_ms", "B", "M", "N", "K", "H")},
    "miopen": {_miopen: ("solver", "device", "dtype", "direction", "n", "c", "h", "w", "k", "kh", "kw", "oh", "ow", "seconds")},
}
#: Sources that :func:`import_operators` reads.
SOURCES: tuple[str, ...] = tuple(_FILES)


def _refuse_impossible(table: pd.DataFrame, devices: dict[str, Device]) -> None:
    """Refuse times that are missing, or shorter than it takes to launch a kernel, to do the operations at the device's peak, to
    read from memory what does not fit into the device's caches, or to send a collective's bytes over the link. The index has
    each row's place in the file."""
    seconds = table["seconds"].to_numpy(dtype=np.float64)
    refuse(table, "seconds", ~(np.isfinite(seconds) & (seconds > 0)), "a number above 0")
    least, done = np.full(len(table), SHORTEST_S), work(table)
    sent = np.nan_to_num(table["bytes"])
    flop = done["matrix"] / np.where(table["op"] == "conv", CONV_GAIN, 1.0)
    for (name, dtype), rows in table.groupby(["device", "dtype"]).indices.items():
        device = devices[name]
        peak = max((device.peak_gflops.get(unit, 0.0) for unit in _PEAK.get(dtype, ())), default=0.0)
        link = (device.link_gb_s or 0.0) / 2  # of one direction
        held = 1024 * sum(size or 0.0 for size in (device.l2_kb, device.l3_kb))
        for amount, rate in ((flop, peak), (done["read"] - held, device.bandwidth_gb_s), (sent, link)):
            if rate:
                least[rows] = np.maximum(least[rows], amount[rows] / (1e9 * rate))
    ratio = seconds / (_LOWEST * least)
    if (ratio < 1).any():
        at = int(np.argmin(ratio))
        op, device_name = table[["op", "device"]].iloc[at]
        raise ProgramError(
            f"row {table.index[at] + 1}: {op} in {seconds[at]:.3g} s on {device_name} is faster than it can be, "
            f"{least[at]:.3g} s ({int((ratio < 1).sum())} such rows): is the unit, a shape or the device wrong?"
        )
