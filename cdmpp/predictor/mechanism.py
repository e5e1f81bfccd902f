"""How a library operator uses a device: how long it keeps each pipe busy, and how evenly its tiles are spread over the cores.

Libraries cut a matrix product into tiles, which the cores (SMs, CUs) compute in waves. The last wave leaves cores idle, edges
are padded, and each core is bounded by its matrix or vector pipe while memory and the last-level cache feed all of them
(NeuSight, Lee et al., ASPLOS'25, section 4; PipeWeave, arXiv 2601.14910, section 3). A convolution counts as its equivalent
matrix product, attention as two products with an exponential between. All of it follows from shapes and specification.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.program.operators import COLLECTIVES, ELEMENT_BYTES, GATES, SIZES, used_weights, work

FloatArray = NDArray[np.float64]

#: Rows and columns of libraries' tiles -> the fraction of a core's peak that they reach: small ones load more an operation.
TILES = {(16, 64): 0.25, (32, 64): 0.4, (64, 64): 0.55, (128, 64): 0.75, (64, 128): 0.75, (128, 128): 0.9, (128, 256): 1.0,
         (256, 128): 1.0}  # fmt: skip
#: Operations per byte from the last-level cache at which a core reaches these fractions: an A100's in 16 bits.
_HUNGRY = 97.0
#: Numbers of parts that the reduction can be split into where there are too few tiles.
SPLITS = (1, 2, 4, 8, 16)
#: Tiles whose waves, idle cores and padding are features.
_SHOWN = ((64, 64), (128, 128), (256, 128))
#: Data type of the arithmetic -> names in ``peak_gflops`` of pipes that can do it, the best first; the last is emulation.
PIPES: dict[str, tuple[str, ...]] = {
    "float64": ("float64_matrix", "float64", "float32"),
    "float32": ("float32_matrix", "float32"),  # of matrix cores in full precision, which AMD has
    "tfloat32": ("tfloat32_matrix", "float32"),
    "float16": ("float16_matrix", "float16", "float32"),
    "bfloat16": ("bfloat16_matrix", "bfloat16", "float32"),
    "int8": ("int8_matrix", "int8", "float16_matrix", "float32"),
    "fp8": ("float8_matrix", "bfloat16_matrix", "float16_matrix", "float32"),
    "nvfp4": ("float4_matrix", "float8_matrix", "bfloat16_matrix", "float16_matrix", "float32"),
}
_LIKE = {"fp8_block": "fp8", "fp8_static": "fp8", "sq": "int8", "int4_wo": "bfloat16", "int8_wo": "bfloat16"}
#: GPUs whose vector units accumulate float16 products in float32, as libraries do, at the rate of float16 (v_dot2_f32_f16,
#: AMD's instruction sets). Packed arithmetic elsewhere accumulates in float16, so only the rate of float32 is left.
_DOT = ("gfx906", "gfx1011", "gfx1012", "gfx103", "gfx11", "gfx12")
#: Fraction of float32's rate that bfloat16 products reach without a unit for them (MIOpen's on gfx900 and gfx906).
_EMULATED = 0.6
#: Exponentials and other special functions that a core starts per cycle: a quarter of a multiprocessor's 64 lanes (CUDA C++
#: programming guide, arithmetic instructions; AMD's quarter rate). On sm_100, kernels compute part of the exponentials by
#: polynomials on the FMA units (FlashAttention-4); on sm_103, the units are doubled.
_SPECIAL_PER_CYCLE = {"sm_100": 24.0, "sm_103": 32.0}
_SPECIAL_OF_OTHERS = 16.0
#: Bytes per cycle from the L2 cache to a core. For sm_80 to sm_90 and sm_120 it is the median of PipeWeave's measurements, for
#: sm_100 what the products of a B200 imply.
_L2_BYTES = {"sm_80": 21.1, "sm_86": 16.6, "sm_89": 16, "sm_90": 36.5, "sm_100": 64, "sm_103": 64, "sm_120": 16.6}
_L2_BYTES_OF_OTHERS = 19.2
#: Watts per GFLOP/s of the matrix units, bit of their operands and nm of their process, above which a GPU's clock drops less
#: than that of others (from NeuSight's, AIConfigurator's and PipeWeave's GPUs left out); the gain's exponent and maximum.
_MATRIX_W, _COOL, _COOLEST = 1.9e-5, 0.3, 1.3
#: Number of weights that benchmarks of engines' products take in turn, so that a cache keeps none or all of them: an L40S with
#: 96 MB of cache, three times as fast as its memory, keeps weights of up to 16 or 19 MB.
_IN_TURN = 5.0
#: GPUs whose last-level cache is two halves, each for the cores next to it (NVIDIA's A100 whitepaper): of what an operator
#: without products touched, its next run finds what one half holds (errors on GPUs left out; products show no difference).
_HALVES = ("sm_80", "sm_90", "sm_100", "sm_103")
#: Attention of one query: the fewest keys of a split (FlashInfer's), elements of the keys of a step, blocks per core that
#: splitting aims at, the cost of adding up the splits in launches (FlashInfer on an L40S: 5.1 us without, 7.1 with), and rows
#: that matrix units are padded to.
_SPLIT_KEYS, _STEP, _DECODE_BLOCKS, _COMBINE, _PADDED = 128.0, 128.0 * 128, 2.0, 0.5, 16.0
#: GPUs with only FlashAttention-2 for one query, and how many times as long as others' its launch takes, and its blocks: an
#: L40S, which has both, takes 7.7 instead of 5.1 us, and 13,000 cycles with one block per core instead of 3,600 with two.
_FLASH, _FLASH_LAUNCH, _FLASH_BLOCK = ("sm_80",), 1.5, 2.0
#: GPUs with TRT-LLM's newest kernels, which read fp8 keys unconverted, but process several queries of each head separately.
#: Elsewhere fp8 keys are converted, with which FlashInfer takes this many times as long (L40S: 1.5 to 1.8, B200: 1.7 to 2.3).
_NEWEST, _CONVERTED = ("sm_100", "sm_103"), 1.8
#: Attention of many queries, by what predicted left-out GPUs well: how much longer scores take where a mask hides half; the
#: softmax of one in columns of a head; how blocks' start grows with queries; the part of the longest that runs alone.
_MANY = {"gpu": (1.8, 64.0, 0.2, 0.75), "cpu": (2.0, 0.0, 0.0, 1.0)}
#: What heads are padded to; how much longer products take if this part of shared memory has no room for 128 queries and keys.
_PADDED_HEAD, _ROOM, _CRAMPED = (32.0, 64.0), 0.9, 1.4
#: Elements of the longest row that one warp of PyTorch's softmax holds, and threads of a block of its layer norm (ATen,
#: PersistentSoftmax.cuh and layer_norm_kernel.cu); the part of a core's shared memory that keeps rows (best of 0.3 to 0.5).
_WARP_ROW, _NORM_THREADS, _ROWS_KEPT = 1024, 128, 0.4
#: Speedup of 3 x 3 convolutions by Winograd's F(2 x 2, 3 x 3), which needs 2.25 times fewer operations (Lavin and Gray, CVPR
#: 2016), transforms included: the best of 1, 1.6 and 2.25 on MIOpen's and NeuSight's left-out GPUs.
_WINOGRAD = 1.6
#: Seconds for adding up the parts of a split reduction.
_SPLIT_S = 1e-6
#: GB/s: PCIe 4.0 with 16 lanes has 64 in both directions together; without peer access each copy crosses it twice. PCIe 5.0's
#: 128 is the fastest that is not NVLink. Switches of NVLink add up what ranks send if their GPUs are of these architectures.
_DEFAULT_LINK, _PCIE_LINK, _SWITCH_ADDS = 32.0, 128.0, ("sm_90", "sm_100", "sm_103")
_MOST_ROUNDS = 6
_DEFAULT_CLOCK_MHZ, _DEFAULT_BANDWIDTH, _DEFAULT_PEAK = 1500.0, 300.0, 10_000.0
#: GB/s that each core of a CPU is taken to have; one alone has that of two, as it was assumed of the CPUs in training.
_OF_CORE = 15.0

#: Names of the feature columns of :func:`mechanism`: logarithms, except for flags and fractions.
MECHANISM_FEATURES: tuple[str, ...] = (
    "longest", "matrix_part", "vector_part", "special_part", "memory_part", "cache_part", "operands_per_cache",
    "tile_time", "splits",
    *(f"{name}_{r}x{c}" for name in ("waves", "idle", "padding") for r, c in _SHOWN),
    "rows", "columns", "depth", "products", "rows_aligned", "columns_aligned", "depth_aligned", "intensity",
    "sequences", "group", "head_dim", "seen", "queries", "keys",
    "window", "stride", "dilation", "groups", "depthwise", "backward_input", "backward_weights", "image",
    "inputs", "ranks", "is_cpu", "m", "n", "matrix_unit",
)  # fmt: skip


def pipe(device: Device, dtype: str) -> tuple[float, str]:
    """GFLOP/s of products in a data type, and the pipe that computes them: that of another type if there is none for this."""
    like = _LIKE.get(dtype, dtype)
    for name in PIPES[like]:
        if name == "float16" and device.kind == "gpu" and not device.mcpu.startswith(_DOT):
            continue
        if device.peak_gflops.get(name):
            emulated = like == "bfloat16" and name == "float32"
            return device.peak_gflops[name] * (_EMULATED if emulated else 1.0), name
    return _DEFAULT_PEAK, ""


def without_unit(device: Device, dtype: str) -> str:
    """A note that a device has no unit for a data type and which pipe stands in for it; "" if it has one."""
    used = pipe(device, dtype)[1]
    wanted = PIPES[_LIKE.get(dtype, dtype)]
    own = [name for name in wanted if name.split("_")[0] == wanted[0].split("_")[0]]
    return "" if used in own else f"{device.name} has no unit for {dtype}: {used or 'an assumed rate'} is used instead"


def _cool(device: Device, rate: float, used: str) -> float:
    """How many times as much of their peak as usual the matrix units of a GPU with ample power for them sustain, 1 or more."""
    if device.kind != "gpu" or not used.endswith("_matrix"):
        return 1.0
    power = device.power_for(rate * int("".join(filter(str.isdigit, used))))
    return 1.0 if power is None else float(np.clip((power / _MATRIX_W) ** _COOL, 1.0, _COOLEST))


def products(table: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """The number of independent products, and rows, columns and depth of each, float64 (n,); 1 x 1 x 1 if there are none."""
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
    seen = 2 * size["pairs"] / np.maximum(size["tokens"], 1)  # for the scores, and for the values that they weight
    packed = np.where(queries < 16, size["heads"] / size["kv_heads"], 1.0)  # heads that share keys are packed together
    used = used_weights(size["batch"], size["m"])
    kinds = [
        (op == "gemm", (size["batch"], size["m"], size["n"], size["k"])),
        (op == "grouped_gemm", (used, size["m"] / used, size["n"], size["k"])),
        *(((op == "conv") & (back == i), conv[i]) for i in range(3)),
        (op == "attention", (size["sequences"] * size["heads"] / packed, queries * packed, size["head_dim"], seen)),
        *((op == name, (one, size["m"], size["n"], one)) for name in ("activation", "batchnorm", "copy", "reduce")),
        (op == "pool", (one, size["batch"] * points, size["in_channels"], window)),
    ]
    steps = size["batch"] * size["tokens"]  # one after the other
    for name, gates in GATES.items():
        kinds.append((op == name, (steps, size["m"], gates * size["n"], size["n"] + size["k"])))
    masks = [mask for mask, _ in kinds]
    found = [np.select(masks, [values[i] for _, values in kinds], one) for i in range(4)]
    return found[0], np.maximum(found[1], 1.0), np.maximum(found[2], 1.0), np.maximum(found[3], 1.0)


@dataclass(frozen=True)
class Constants:
    """What libraries reach, the same on all devices: the fractions reached of the peak, of memory bandwidth and of last-level
    cache bandwidth; the fraction of this cache that keeps operands from one run to the next, and how sharp this limit is; the
    norm by which times overlap (1: none do; less: they wait for each other, as the parts of an all-reduce do); and overhead
    cycles of a kernel, and of each of its blocks on a core.

    The defaults are fitted to products in bfloat16 on an A100, L40S and B200 together."""

    peak: float = 0.76
    memory: float = 0.81
    cache: float = 0.32
    kept: float = 0.45
    kept_power: float = 2.4
    norm: float = 2.3
    cycles: float = 4300.0
    block_cycles: float = 500.0

    def vector(self) -> FloatArray:
        """Logarithms, float64 (8,)."""
        return np.log(list(asdict(self).values()))

    @classmethod
    def of(cls, logs: FloatArray) -> Constants:
        """Rebuild from :meth:`vector`."""
        return cls(*map(float, np.exp(logs)))


@dataclass(frozen=True)
class Mechanism:
    """How n operators load one device, in seconds at its peak: ``matrix_s`` in whole waves of the best tiles, ``vector_s``,
    ``special_s``, ``memory_s`` if all data comes from memory, ``cache_s`` if all comes from the last-level cache, and
    ``again_s`` for what that cache delivers in any case. ``turn`` is the bytes touched between two runs over the cache's size,
    ``blocks`` a count per core, ``launches`` a multiple of the usual launch, ``clock`` in Hz, and ``features`` are float64
    (n, len(MECHANISM_FEATURES)) and do not depend on constants."""

    matrix_s: FloatArray
    vector_s: FloatArray
    special_s: FloatArray
    memory_s: FloatArray
    cache_s: FloatArray
    again_s: FloatArray
    turn: FloatArray
    blocks: FloatArray
    launches: FloatArray
    clock: float
    features: FloatArray

    def take(self, rows: NDArray[np.bool_]) -> Mechanism:
        """The selected operators."""
        arrays = {name: value[rows] for name, value in vars(self).items() if name != "clock"}
        return Mechanism(clock=self.clock, **arrays)

    def parts(self, constants: Constants) -> dict[str, FloatArray]:
        """Seconds that each part of the device is busy, each float64 (n,); "launch" overlaps with none of the others."""
        c = constants
        with np.errstate(over="ignore"):
            kept = 1 / (1 + (self.turn / c.kept) ** c.kept_power)
        return {
            "matrix or FMA units": self.matrix_s / c.peak,
            "vector units": self.vector_s / c.peak,
            "special functions": self.special_s / c.peak,
            "memory and caches": self.memory_s * (1 - kept) / c.memory + (self.cache_s * kept + self.again_s) / c.cache,
            "start of blocks": self.blocks * c.block_cycles / self.clock,
            "launch": self.launches * c.cycles / self.clock,
        }

    def estimate(self, constants: Constants) -> FloatArray:
        """Seconds, float64 (n,)."""
        *busy, launch = self.parts(constants).values()
        together: FloatArray = np.sum([part**constants.norm for part in busy], axis=0) ** (1 / constants.norm)
        return together + launch


def mechanism(table: pd.DataFrame, device: Device) -> Mechanism:
    """Compute how operators (:func:`cdmpp.program.operators.operator_table`) use one device."""
    size = {name: np.nan_to_num(table[name].to_numpy(dtype=np.float64)) for name in SIZES}
    op, todo = table["op"].to_numpy(dtype=str), work(table)
    element = table["dtype"].map(ELEMENT_BYTES).to_numpy(dtype=np.float64)
    cores = max(1.0, device.cores_used or device.cores or 1.0)
    clock = 1e6 * (device.working_mhz or _DEFAULT_CLOCK_MHZ)
    lanes = device.lanes_per_core or 64.0
    # attention in fp8 is no faster than in 16 bits: with heads of 128 a B200 reaches 0.59 and 0.58 of the peak in 16 bits
    arithmetic = table["dtype"].mask((op == "attention") & (element < 2), "bfloat16")
    pipes = {dtype: pipe(device, dtype) for dtype in arithmetic.unique()}
    peaks = {dtype: 1e9 * own[0] * _cool(device, *own) for dtype, own in pipes.items()}
    peak = arithmetic.map(peaks).to_numpy(np.float64)
    has_unit = arithmetic.map({dtype: "_matrix" in used for dtype, (_, used) in pipes.items()}).to_numpy(np.float64)
    bandwidth = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH)
    if device.kind == "cpu":  # a few cores cannot use the bandwidth of the whole
        bandwidth = 1e9 * min(device.bandwidth_gb_s or np.inf, _OF_CORE * max(cores, 2.0))
    special_rate = _SPECIAL_PER_CYCLE.get(device.mcpu, _SPECIAL_OF_OTHERS) if device.kind == "gpu" else lanes / 8
    collective = np.isin(op, COLLECTIVES)
    moved = todo["read"] + todo["written"]
    cache = _cache_bytes(device) or 1e6
    l2_bytes = _L2_BYTES.get(device.mcpu, _L2_BYTES_OF_OTHERS)
    of_share = device.share if device.kind == "gpu" else 1.0
    cache_rate = 1e9 * of_share * (device.l2_bandwidth_gb_s or 0.0) or cores * clock * l2_bytes
    if of_share < 1:  # data from memory passes the last-level cache: a few cores cannot use the whole bandwidth
        bandwidth = min(bandwidth, cache_rate)
    b, rows, columns, depth = products(table)
    tiles = {tile: b * np.ceil(rows / tile[0]) * np.ceil(columns / tile[1]) for tile in TILES}
    compute, splits = _compute(tiles, depth, peak / cores, cores, cache_rate / cores)
    compute = np.where(op == "conv", compute / _conv_speedup(table, size, device), compute)
    attends = (op == "attention") & (size["tokens"] > size["sequences"])
    flops, scores_of_core, blocks_of_core = _attention(size, cores, device)
    compute = np.where(attends, flops * cores / peak, compute)
    again, rows_at_once = _again(op, size, todo["read"], element, device)
    far = rows_at_once * cores > cache
    special = np.where(attends, scores_of_core, todo["special"] / cores)
    in_turn = (op == "gemm") & (element <= 2) & (device.kind == "gpu")
    others = (_IN_TURN - 1) * in_turn * size["batch"] * size["n"] * size["k"] * element
    kept = cache * np.where((todo["matrix"] == 0) & (device.mcpu in _HALVES), 0.5, 1.0)
    decodes = (op == "attention") & ~attends & (device.kind == "gpu")
    one_by_one, scores, launches = _decode(size, cores, np.where(has_unit > 0, _PADDED, 1.0))
    compute = np.where(decodes, 4 * one_by_one * scores * size["head_dim"] * cores / peak, compute)
    converts = (table["dtype"] != table["kv_dtype"]).to_numpy() & (device.mcpu not in _NEWEST)
    longer, flash = np.where(converts, _CONVERTED, 1.0), device.mcpu in _FLASH
    launches = np.where(decodes, launches * longer * (_FLASH_LAUNCH if flash else 1.0), 1.0)
    if device.kind == "gpu":  # a kernel for each step of a recurrent network
        launches = np.where(np.isin(op, tuple(GATES)), size["batch"] * size["tokens"], launches)
    seconds = {
        "matrix": np.where(todo["matrix"] > 0, compute, 0.0),
        "vector": todo["vector"] / (cores * lanes * clock),
        "special": special / (special_rate * clock),
        "memory": (moved + again * far) / bandwidth,
        "cache": moved / cache_rate,
    }
    # a ring sends and receives each part twice (Thakur et al. 2005), one transfer sends it once; a switch that adds returns a
    # sum for each part (Klenk et al., ISCA 2020; NCCL's NVLS, for more than two ranks)
    ranks, reduces = np.maximum(size["num_workers"], 2.0), op == "all_reduce"
    adds = (device.link_gb_s or 0.0) > _PCIE_LINK and device.mcpu in _SWITCH_ADDS
    rounds = np.select([~reduces, adds & (ranks > 2)], [1.0, 1 + 1 / ranks], 2 * (ranks - 1) / ranks)
    sent = size["bytes"] * rounds / (1e9 * (device.link_gb_s or _DEFAULT_LINK) / 2)
    seconds["memory"] = np.where(collective, sent, seconds["memory"])
    seconds["cache"] = np.where(collective, sent, seconds["cache"])
    whole = np.maximum.reduce(list(seconds.values())) + 1e-7
    log = np.log
    columns_of: dict[str, FloatArray] = {
        "longest": log(whole),
        **{f"{name}_part": log(np.maximum(value / whole, 1e-3)) for name, value in seconds.items()},
        "operands_per_cache": log(np.maximum(moved, 1.0) / cache),
        "tile_time": log(2 * 128 * 128 * depth / (peak / cores) + 1e-8),
        "splits": log(splits),
        "products": log(b),
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
        "ranks": _log1(size["num_workers"]) * collective,
        "is_cpu": np.full(len(table), float(device.kind == "cpu")),
        "m": _log1(size["m"]),
        "n": _log1(size["n"]),
        "matrix_unit": has_unit,
    }
    for name, extent in {"rows": rows, "columns": columns, "depth": depth}.items():
        columns_of[name], columns_of[f"{name}_aligned"] = log(extent), _power_of_two(extent)
    for tile in _SHOWN:
        name, waves = "{}x{}".format(*tile), tiles[tile] / cores
        columns_of[f"waves_{name}"] = log(waves)
        columns_of[f"idle_{name}"] = log(np.ceil(waves) / waves)
        columns_of[f"padding_{name}"] = log(tiles[tile] * tile[0] * tile[1] / (b * rows * columns))
    blocks = np.where(todo["matrix"] > 0, b * np.ceil(rows / 128) * np.ceil(columns / 128), moved / 65536)
    blocks = np.where(attends, cores * blocks_of_core, blocks)
    blocks = np.where(decodes, cores * one_by_one * longer * (_FLASH_BLOCK if flash else 1.0), blocks)
    blocks = np.where((device.kind == "gpu") & np.isin(op, ("layernorm", "softmax")), size["m"], blocks)
    # ranks wait for each other in every round of a ring, up to the number where a tree takes fewer rounds
    blocks = np.where(collective, cores * np.minimum(2 * (ranks - 1), _MOST_ROUNDS), blocks)
    return Mechanism(
        **{f"{name}_s": value for name, value in seconds.items()},
        again_s=again * ~far / cache_rate,
        turn=np.where(reduces, np.inf, (moved + others) / kept),  # no cache holds what others send
        blocks=blocks / cores,
        launches=launches,
        clock=clock,
        features=np.stack([columns_of[name] for name in MECHANISM_FEATURES], axis=1),
    )


def _cache_bytes(device: Device) -> float:
    """Size of the last-level cache, 0 if it is not known."""
    return 1024.0 * max(device.l2_kb or 0.0, device.l3_kb or 0.0)


def least_s(table: pd.DataFrame, device: Device) -> FloatArray:
    """Seconds that a GPU's memory needs for what its caches cannot hold, each byte once, at the specified bandwidth, float64
    (n,): no operator is faster. 0 where bandwidth or caches are not known, and for CPUs."""
    cache = _cache_bytes(device)
    if device.kind != "gpu" or not device.bandwidth_gb_s or not cache:
        return np.zeros(len(table))
    todo = work(table)
    return np.maximum(todo["read"] + todo["written"] - cache, 0.0) / (1e9 * device.bandwidth_gb_s)


def _attention(size: dict[str, FloatArray], cores: float, device: Device) -> tuple[FloatArray, FloatArray, FloatArray]:
    """FLOP of the busiest core for many queries, softmax included, scores that it computes, and blocks by what they start in.

    A block holds up to 128 queries of a head (64 of a long one) and goes over the keys that they see, 64 at a time, and over
    some that a mask hides (FlashAttention-2, Dao 2023, section 3.3). The few queries of heads that share keys share a block,
    except in the newest kernels. Blocks of later queries see more keys: the longest ends last."""
    masks, softmax, by_rows, last = _MANY[device.kind]
    sequences, heads = np.maximum(size["sequences"], 1), np.maximum(size["heads"], 1)
    queries, keys = np.maximum(size["tokens"] / sequences, 1), np.maximum(size["kv_tokens"] / sequences, 1)
    together = np.where((device.mcpu not in _NEWEST) & (queries < 128), heads / np.maximum(size["kv_heads"], 1), 1.0)
    at_once = queries * together
    rows = np.select([(at_once > 64) & (size["head_dim"] <= 128), at_once > 16], [128.0, 64.0], 16.0)
    seen = np.maximum(size["pairs"] / np.maximum(size["tokens"], 1), 1)
    masked = seen < 0.999 * keys
    reach = np.where(masked, np.minimum(keys, seen + (masks - 0.5) * np.minimum(queries, rows / together)), keys)
    growing = masked & (seen > 0.95 * (keys - queries / 2))  # otherwise a window, as wide for all
    steps, most = np.ceil(reach / 64), np.ceil(np.where(growing, keys, reach) / 64)
    blocks = sequences * heads / together * np.ceil(at_once / rows)
    waves = np.where((blocks <= cores) & (last < 1), most / steps, blocks / cores + last * most / steps)
    scores, padded = waves * (rows * steps * 64), _PADDED_HEAD[device.mcpu in _NEWEST]
    cramped = 2 * (128 + 128) * size["head_dim"] > _ROOM * 1024 * (device.shared_kb or np.inf)
    columns = (np.ceil(size["head_dim"] / padded) * padded + softmax) * np.where(cramped, _CRAMPED, 1.0)
    return 4 * scores * columns, scores, waves * (rows / 128) ** by_rows


def _decode(size: dict[str, FloatArray], cores: float, padded: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For attention of one query a sequence: blocks that the busiest core processes in turn, scores of each, and launches.

    A block takes the queries of up to 64 heads that share keys, rounded up to ``padded``, and one split of the keys. Splits
    fill the cores and are added up afterwards (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005, section 3.3)."""
    sequences, kv_heads = np.maximum(size["sequences"], 1), np.maximum(size["kv_heads"], 1)
    group, keys = size["heads"] / kv_heads, np.maximum(size["kv_tokens"] / sequences, 1)
    blocks = sequences * kv_heads * np.ceil(np.maximum(group, 1) / 64)
    splits = np.clip(np.floor(_DECODE_BLOCKS * cores / blocks), 1, np.ceil(keys / _SPLIT_KEYS))
    step = _STEP / np.maximum(size["head_dim"], 1)
    scores = padded * np.ceil(np.minimum(group, 64) / padded) * step * np.ceil(keys / splits / step)
    return np.ceil(blocks * splits / cores), scores, np.where(splits > 1, 1 + _COMBINE, 1.0)


def _conv_speedup(table: pd.DataFrame, size: dict[str, FloatArray], device: Device) -> FloatArray:
    """How many times as fast as :func:`pipe` says the products of a convolution on a GPU are, 1 or more, float64 (n,).

    Vector units use Winograd for 3 x 3 windows with stride 1, forward and backward by the input. Where bfloat16 is emulated,
    MIOpen's backward kernels by the weights are as fast as those of float32."""
    plain = size["stride"] * size["dilation"] * size["groups"] == 1
    lean = plain & (size["kernel_h"] == 3) & (size["kernel_w"] == 3) & (size["backward"] < 2)
    found = np.ones(len(table))
    for dtype in set(table["dtype"]) if device.kind == "gpu" else ():
        rate, used = pipe(device, dtype)
        vector = device.peak_gflops.get(dtype, 0.0) if used.startswith(dtype) else 0.0
        by_weights = 1 / _EMULATED if (dtype, used) == ("bfloat16", "float32") else 1.0
        faster = np.where(lean, max(_WINOGRAD * vector / rate, 1.0), np.where(size["backward"] == 2, by_weights, 1.0))
        found = np.where(table["dtype"] == dtype, faster, found)
    return found


def _again(
    op: NDArray[np.str_], size: dict[str, FloatArray], read: FloatArray, element: FloatArray, device: Device
) -> tuple[FloatArray, FloatArray]:
    """Bytes that are read again because a core has no room for them, and bytes that each core works on at once: the weights at
    every step of a recurrent network; the rows of PyTorch's layer norm and softmax on a GPU.

    A block goes over its row once for each sum or maximum, and once more to write; a warp holds a short row of softmax in
    registers. A core runs as many blocks as its threads allow; a block of softmax has a thread for every four elements."""
    softmax = op == "softmax"
    passes = np.select([op == "layernorm", softmax & (size["n"] > _WARP_ROW)], [1.0, 2.0], 0.0)
    threads = np.where(softmax, np.clip(size["n"] / 4, 32, 1024), _NORM_THREADS)
    rows = read / np.maximum(size["m"], 1) * (device.max_threads_per_core or 2048) / threads
    room = _ROWS_KEPT * 1024 * (device.shared_kb or 64)
    again, at_once = passes * read * ((rows > room) & (device.kind == "gpu")), rows
    for name, gates in GATES.items():
        weights = gates * size["n"] * (size["n"] + size["k"]) * element
        again = np.where(op == name, np.maximum(size["tokens"] - 1, 0) * size["batch"] * weights, again)
        at_once = np.where(op == name, weights / max(1.0, device.cores_used or device.cores or 1.0), at_once)
    return again, at_once


def _compute(
    tiles: dict[tuple[int, int], FloatArray], depth: FloatArray, core_peak: FloatArray, cores: float, core_feed: float
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the products in whole waves of the best tiles, and into how many parts the reduction is split.

    Small tiles cost less on a core that computes slowly compared with its load bandwidth."""
    best, parts = np.full(len(depth), np.inf), np.ones(len(depth))
    hunger = np.clip(np.sqrt(core_peak / core_feed / _HUNGRY), 0.4, 1.0)
    for (r, c), number in tiles.items():
        for split in SPLITS:
            wave = 2 * r * c * np.ceil(depth / split) / core_peak / TILES[r, c] ** hunger
            took = np.ceil(number * split / cores) * wave + (_SPLIT_S if split > 1 else 0.0)
            better = took < best
            best, parts = np.where(better, took, best), np.where(better, float(split), parts)
    return best, parts


def _log1(values: FloatArray) -> FloatArray:
    return np.log1p(np.maximum(values, 0.0))


def _power_of_two(extent: FloatArray) -> FloatArray:
    whole = np.maximum(extent, 1).astype(np.int64)
    return np.log2(np.minimum(whole & -whole, 64).astype(np.float64))
