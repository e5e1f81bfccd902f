"""How an operator of a library fills a device: the time that each of its pipes is busy, and how evenly its tiles are dealt out.

Libraries cut a product of matrices into tiles and deal these out to the cores (SMs, CUs) in waves; the last wave leaves cores
idle, edges are padded, and each core is bounded by its matrix or vector pipe while memory and the last cache feed all of them
(NeuSight, Lee et al., ASPLOS'25, section 4; PipeWeave, arXiv 2601.14910, section 3). A convolution is the product that it
stands for, attention two of them with an exponential between. All of it follows from shapes and specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.operators import COLLECTIVES, ELEMENT_BYTES, SIZES, work

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.device import Device

FloatArray = NDArray[np.float64]

#: Rows and columns of the tiles that libraries have kernels of.
TILES = ((16, 64), (64, 64), (128, 64), (128, 128), (256, 128))
#: Parts that the reduction is cut into where there are too few tiles.
SPLITS = (1, 2, 4, 8, 16)
#: Those of TILES whose waves are features.
_SHOWN = (1, 3, 4)
#: Data types of arithmetic -> names of ``peak_gflops`` that serve it, the best first; the last is emulation.
PIPES: dict[str, tuple[str, ...]] = {
    "float64": ("float64_matrix", "float64", "float32"),
    "float32": ("float32",),
    "tfloat32": ("tfloat32_matrix", "float32"),
    "float16": ("float16_matrix", "float16", "float32"),
    "bfloat16": ("bfloat16_matrix", "bfloat16", "float32"),
    "int8": ("int8_matrix", "int8", "float16_matrix", "float32"),
    "fp8": ("float8_matrix", "bfloat16_matrix", "float16_matrix", "float32"),
    "nvfp4": ("float4_matrix", "float8_matrix", "bfloat16_matrix", "float16_matrix", "float32"),
}
_LIKE = {"fp8_block": "fp8", "fp8_static": "fp8", "sq": "int8", "int4_wo": "bfloat16", "int8_wo": "bfloat16"}
#: Exponentials and the like that a core starts a cycle: a quarter of a multiprocessor's 64 lanes (CUDA C++ programming guide,
#: arithmetic instructions; AMD's quarter rate).
_SPECIAL_PER_CYCLE = 16.0
#: Bytes a cycle from the second level to a core, as a part of the 64 that it could take: medians of what PipeWeave measured.
_L2_PART = {"hopper": 0.57, "ampere": 0.28, "ada": 0.25, "blackwell": 0.27}
_L2_BYTES = 64.0
#: Part of the last cache that keeps operands from one run to the next.
_KEPT = 0.6
#: No kernel takes less (public tables have none below 1.2 us); a second step over partial sums takes as long again.
_LEAST_S = {"gpu": 1.5e-6, "cpu": 2e-7}
_DEFAULT_CLOCK_MHZ, _DEFAULT_BANDWIDTH, _DEFAULT_PEAK = 1500.0, 300.0, 10_000.0

#: Names of the columns of :func:`mechanism`: logarithms, but for flags and parts.
MECHANISM_FEATURES: tuple[str, ...] = (
    "estimate", "matrix_part", "vector_part", "special_part", "memory_part", "cache_part", "kept", "operands_per_cache",
    "tile_time", "splits",
    *(f"{name}_{TILES[i][0]}" for name in ("waves", "idle", "padding") for i in _SHOWN),
    "rows", "columns", "depth", "products", "rows_aligned", "columns_aligned", "depth_aligned", "intensity",
    "sequences", "group", "head_dim", "seen", "queries", "keys",
    "window", "stride", "dilation", "groups", "depthwise", "backward_input", "backward_weights", "image",
    "inputs", "ranks", "clock", "is_cpu",
)  # fmt: skip


def pipe(device: Device, dtype: str) -> tuple[float, str]:
    """GFLOP/s of products in a data type, and the pipe that does them: the one of another type where there is none."""
    for name in PIPES[_LIKE.get(dtype, dtype)]:
        if device.peak_gflops.get(name):
            return device.peak_gflops[name], name
    return _DEFAULT_PEAK, ""


def without_unit(device: Device, dtype: str) -> str:
    """What is to be said where a device has no unit for a data type and another pipe stands in; "" where it has."""
    used = pipe(device, dtype)[1]
    wanted = PIPES[_LIKE.get(dtype, dtype)]
    own = wanted[: 1 if dtype in ("float32",) else 2]
    own = tuple(name for name in own if name.split("_")[0] == wanted[0].split("_")[0])
    return "" if used in own else f"{device.name} has no unit for {dtype}: {used or 'an assumed rate'} is used instead"


def products(table: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Products side by side, and rows, columns and depth of each, float64 (n,); 1 x 1 x 1 of what has none."""
    size = {name: np.nan_to_num(table[name].to_numpy(dtype=np.float64), nan=1.0) for name in SIZES}
    op, back = table["op"].to_numpy(dtype=str), np.nan_to_num(table["backward"].to_numpy(dtype=np.float64))
    one = np.ones(len(table))
    g = np.maximum(size["groups"], 1.0)
    window, points = size["kernel_h"] * size["kernel_w"], size["out_h"] * size["out_w"]
    ins, outs = size["in_channels"] / g, size["out_channels"] / g
    conv = [
        (g, size["batch"] * points, outs, ins * window),
        (g, size["batch"] * size["height"] * size["width"], ins, outs * window / np.maximum(size["stride"], 1)),
        (g, outs, ins * window, size["batch"] * points),
    ]
    queries = size["tokens"] / size["sequences"]
    seen = 2 * size["pairs"] / np.maximum(size["tokens"], 1)  # scores, and what they weigh
    packed = np.where(queries < 16, size["heads"] / size["kv_heads"], 1.0)  # heads that share keys go together
    kinds = [
        (op == "gemm", (size["batch"], size["m"], size["n"], size["k"])),
        (op == "grouped_gemm", (size["batch"], size["m"] / size["batch"], size["n"], size["k"])),
        *(((op == "conv") & (back == i), conv[i]) for i in range(3)),
        (op == "attention", (size["sequences"] * size["heads"] / packed, queries * packed, size["head_dim"], seen)),
    ]
    masks = [mask for mask, _ in kinds]
    found = [np.select(masks, [values[i] for _, values in kinds], one) for i in range(4)]
    return found[0], np.maximum(found[1], 1.0), np.maximum(found[2], 1.0), np.maximum(found[3], 1.0)


def mechanism(table: pd.DataFrame, device: Device) -> tuple[FloatArray, FloatArray]:
    """Features of operators on one device, float64 (n, len(MECHANISM_FEATURES)), and an estimate in seconds, (n,)."""
    size = {name: np.nan_to_num(table[name].to_numpy(dtype=np.float64)) for name in SIZES}
    op, todo = table["op"].to_numpy(dtype=str), work(table)
    cores = max(1.0, device.cores_used or 1.0)
    clock = 1e6 * (device.clock_mhz or _DEFAULT_CLOCK_MHZ)
    lanes = device.lanes_per_core or 64.0
    of_type = {dtype: 1e9 * pipe(device, dtype)[0] for dtype in set(table["dtype"])}
    peak = table["dtype"].map(of_type).to_numpy(dtype=np.float64)
    bandwidth = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH)
    special_rate = _SPECIAL_PER_CYCLE if device.kind == "gpu" else lanes / 8
    moved = todo["read"] + todo["written"]
    cache = 1024.0 * max(device.l2_kb or 0.0, device.l3_kb or 0.0) or 1e6
    cache_rate = 1e9 * (device.l2_bandwidth_gb_s or 0.0) or (
        cores * clock * _L2_BYTES * _L2_PART.get(device.arch, 0.3)
    )
    cache_rate = max(cache_rate, 1.5 * bandwidth)
    kept = np.clip(1.5 - moved / (_KEPT * cache) / 2, 0.0, 1.0)  # all below the part, none from three times it on
    seconds = {
        "vector": todo["vector"] / (cores * lanes * clock),
        "special": todo["special"] / (cores * special_rate * clock),
        "memory": moved * (1 - kept) / bandwidth,
        "cache": moved / cache_rate,
    }
    b, rows, columns, depth = products(table)
    tiles = [b * np.ceil(rows / r) * np.ceil(columns / c) for r, c in TILES]
    compute, splits = _compute(tiles, depth, todo["matrix"] > 0, peak / cores, cores, cache_rate, b * rows * columns)
    seconds["matrix"] = compute
    collective = np.isin(op, COLLECTIVES)
    least = _LEAST_S[device.kind]
    estimate = np.maximum.reduce(list(seconds.values())) + least
    estimate = np.where(collective, least + size["bytes"] / bandwidth * 4, estimate)
    log = np.log
    columns_of: dict[str, FloatArray] = {
        "estimate": log(estimate),
        **{f"{name}_part": log(np.maximum(value / estimate, 1e-4)) for name, value in seconds.items()},
        "kept": kept,
        "operands_per_cache": log(np.maximum(moved, 1.0) / cache),
        "tile_time": log(2 * 128 * 128 * depth / (peak / cores) + 1e-9),
        "splits": log(splits),
        "rows": log(rows),
        "columns": log(columns),
        "depth": log(depth),
        "products": log(b),
        "rows_aligned": _power_of_two(rows),
        "columns_aligned": _power_of_two(columns),
        "depth_aligned": _power_of_two(depth),
        "intensity": log((todo["matrix"] + todo["vector"] + 1) / np.maximum(moved, 1.0)),
        "sequences": _log1(size["sequences"]),
        "group": _log1(size["heads"] / np.maximum(size["kv_heads"], 1)),
        "head_dim": _log1(size["head_dim"]),
        "seen": size["pairs"] * size["sequences"] / np.maximum(size["tokens"] * size["kv_tokens"], 1.0),
        "queries": _log1(size["tokens"] / np.maximum(size["sequences"], 1)),
        "keys": _log1(size["longest"]),
        "window": _log1(size["kernel_h"] * size["kernel_w"]),
        "stride": _log1(size["stride"] - 1),
        "dilation": _log1(size["dilation"] - 1),
        "groups": _log1(size["groups"] - 1),
        "depthwise": ((size["groups"] > 1) & (size["groups"] == size["in_channels"])).astype(np.float64),
        "backward_input": (size["backward"] == 1).astype(np.float64),
        "backward_weights": (size["backward"] == 2).astype(np.float64),
        "image": _log1(size["height"] * size["width"]),
        "inputs": size["inputs"],
        "ranks": _log1(size["num_workers"]),
        "clock": np.full(len(table), log(clock / 1e9)),
        "is_cpu": np.full(len(table), float(device.kind == "cpu")),
    }
    for i in _SHOWN:
        waves = tiles[i] / cores
        columns_of[f"waves_{TILES[i][0]}"] = log(waves)
        columns_of[f"idle_{TILES[i][0]}"] = log(np.ceil(waves) / waves)
        columns_of[f"padding_{TILES[i][0]}"] = log(tiles[i] * TILES[i][0] * TILES[i][1] / (b * rows * columns))
    return np.stack([columns_of[name] for name in MECHANISM_FEATURES], axis=1), estimate


def _compute(
    tiles: list[FloatArray],
    depth: FloatArray,
    multiplies: NDArray[np.bool_],
    core_peak: FloatArray,
    cores: float,
    cache_rate: float,
    outputs: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the products in whole waves of the best tiles, and into how many parts these cut the reduction."""
    best, parts = np.full(len(depth), np.inf), np.ones(len(depth))
    for (r, c), number in zip(TILES, tiles, strict=True):
        for split in SPLITS:
            waves = np.ceil(number * split / cores)
            steps = np.ceil(depth / split)
            arithmetic = 2 * r * c * steps / core_peak
            loads = 2 * (r + c) * steps / (cache_rate / cores)
            # partial sums are written and read again, in float32
            again = 8 * outputs * split / cache_rate + _LEAST_S["gpu"] / 2 if split > 1 else 0.0
            took = waves * np.maximum(arithmetic, loads) + again
            better = took < best
            best, parts = np.where(better, took, best), np.where(better, float(split), parts)
    return np.where(multiplies, best, 0.0), parts


def _log1(values: FloatArray) -> FloatArray:
    return np.log1p(np.maximum(values, 0.0))


def _power_of_two(extent: FloatArray) -> FloatArray:
    whole = np.maximum(extent, 1).astype(np.int64)
    return np.log2(np.minimum(whole & -whole, 64).astype(np.float64))
