"""What can be said of a program and a device together, as numbers for the network: how the one fills the other, from AST and
specification; for compiled programs also how long loops take on the core (:mod:`cdmpp.program.codegen.loops`). A network that
is to carry over to new devices should not have to learn from a handful of them how a product of matrices is cut into tiles for
their cores (NeuSight, Lee et al., ASPLOS'25, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.predictor.roofline import ProgramView, estimate_s, peak_flops, power_headroom, roofline_s
from cdmpp.program.ast import CompactAST
from cdmpp.program.codegen import CACHE_KB, CODEGEN_FEATURES, CYCLE_FEATURES, KINDS, LOOP_FEATURES, LOOPS

FloatArray = NDArray[np.float64]

#: Edges of the square tiles into which libraries cut products of matrices.
TILES = (32, 64, 128, 256)

#: Ratios are given in thousandths, times in nanoseconds: the encoder takes logarithms of 1 + x.
_PER_MILLE = 1e3
_NS = 1e9
#: Bytes of a cache line.
_LINE = 64.0
#: Bytes a nanosecond from memory to a CPU core, where it is not known.
_BANDWIDTH = 10.0
#: Powers of two beyond this divisor make no difference to alignment.
_MOST_ALIGNED = 256

#: Names of the columns of :func:`pair_rows`, which :func:`_pairs_of` explains.
PAIR_FEATURES: tuple[str, ...] = (
    "on_gpu", "by_library", "estimate_ns", "roofline_ns", "compute_ns", "power_ns", "memory_ns", "launch_ns", "intensity",
    "last_cache", "near_cache", "filled_lanes", "rows_per_core",
    *(f"{name}_{edge}" for name in ("waves", "idle", "padding") for edge in TILES),
    "blocks_per_core", "resident_blocks", "block_waves", "block_idle", "balance", "headroom",
    "columns_aligned", "rows_aligned", "depth_aligned", "columns", "rows", "batch", "depth",
)  # fmt: skip

#: What a network is given of a program on a GPU that it was never trained on: its shape, how it fills the GPU, and the
#: analytical times; not what tells GPUs apart by themselves (see :data:`cdmpp.device.GENERAL_DEVICE_FEATURES`).
GENERAL_PAIR_FEATURES = frozenset(PAIR_FEATURES) - {
    "compute_ns", "power_ns", "memory_ns", "launch_ns", "headroom", "last_cache", "near_cache",
}  # fmt: skip
#: 1 for features that a network is given of a program on a GPU that it was never trained on, 0 for others.
GENERAL_PAIRS = np.array([name in GENERAL_PAIR_FEATURES for name in PAIR_FEATURES], dtype=np.float32)


def _pairs_of(view: ProgramView, asts: Sequence[CompactAST], device: Device) -> FloatArray:
    n = len(asts)
    nan = np.full(n, np.nan)
    cores = max(1.0, device.cores_used or 1.0)
    bandwidth = device.bandwidth_gb_s
    compute = _NS * view.flops / peak_flops(view, device)
    headroom = power_headroom(device)
    memory = view.io_bytes / bandwidth if bandwidth else nan  # GB/s is bytes a nanosecond
    last = 1024 * max(device.l3_kb or 0.0, device.l2_kb or 0.0)
    near = 1024 * (device.l2_kb or 0.0) * (cores if device.kind == "cpu" else 1.0)
    gpu = np.full(n, float(device.kind == "gpu"))
    rounds = np.ceil(view.parallel / cores)
    resident = np.full(n, 32.0)  # GPU blocks that a core has at a time
    if device.max_threads_per_core:
        resident = np.minimum(resident, device.max_threads_per_core // np.maximum(view.threads, 1.0))
    if device.shared_kb:
        resident = np.minimum(resident, 1024 * device.shared_kb // np.maximum(view.shared_bytes, 1.0))
    resident = np.maximum(resident, 1.0)
    waves = view.blocks / (cores * resident)
    blocks = {
        "blocks_per_core": _PER_MILLE * view.blocks / cores,
        "resident_blocks": resident,
        "block_waves": _PER_MILLE * waves,
        "block_idle": _PER_MILLE * np.ceil(waves) / waves,
    }
    columns: dict[str, FloatArray] = {
        "on_gpu": gpu,
        "by_library": gpu * ~view.scheduled_for_gpu,
        "estimate_ns": _NS * estimate_s(asts, device),
        "roofline_ns": _NS * roofline_s(asts, device),
        "compute_ns": compute,
        # floating-point operations over what the power limit sustains of the peak
        "power_ns": compute / min(1.0, headroom) if headroom is not None else compute,
        "memory_ns": memory,
        "launch_ns": np.full(n, 1e3 * device.launch_overhead_us) if device.launch_overhead_us else nan,
        "intensity": _PER_MILLE * compute / np.maximum(memory, 1e-3),
        "last_cache": _PER_MILLE * view.io_bytes / last if last else nan,
        "near_cache": _PER_MILLE * view.io_bytes / near if near else nan,
        "filled_lanes": _PER_MILLE * view.outputs / (cores * (device.lanes_per_core or 1.0)),
        "rows_per_core": _PER_MILLE * view.outputs / view.columns / cores,
        # 0 where nothing is bound to blocks or threads
        **{name: np.where(view.scheduled_for_gpu, values, 0.0) for name, values in blocks.items()},
        # parallel iterations over what the cores take in rounds
        "balance": _PER_MILLE * view.parallel / (rounds * cores),
        "headroom": nan if headroom is None else np.full(n, _PER_MILLE * headroom),
        "columns_aligned": _power_of_two(view.columns),
        "rows_aligned": _power_of_two(view.rows),
        "depth_aligned": _power_of_two(view.depth),
        "columns": view.columns,
        "rows": view.rows,
        "batch": view.batch,
        "depth": view.depth,
    }
    for edge in TILES:
        tiles = view.tiles(edge)
        columns[f"waves_{edge}"] = _PER_MILLE * tiles / cores
        # waves rounded up over themselves: cores idle in the last one
        columns[f"idle_{edge}"] = _PER_MILLE * np.ceil(tiles / cores) / (tiles / cores)
        columns[f"padding_{edge}"] = _PER_MILLE * tiles * edge**2 / view.outputs
    return np.stack([columns[name] for name in PAIR_FEATURES], axis=1)


def _power_of_two(extent: FloatArray) -> FloatArray:
    """Largest power of two that divides each extent, :data:`_MOST_ALIGNED` at most."""
    whole = np.maximum(extent, 1).astype(np.int64)
    return np.minimum(whole & -whole, _MOST_ALIGNED).astype(np.float64)


def pair_rows(
    asts: Sequence[CompactAST], devices: Sequence[Device], program: NDArray[np.int64], device: NDArray[np.int64]
) -> FloatArray:
    """Raw features of pairs, float64 (n, len(PAIR_FEATURES)), >= 0, NaN where a device's specification does not say; of each
    pair ``program`` and ``device``, int (n,), are the numbers in ``asts`` and in ``devices``."""
    out = np.empty((len(program), len(PAIR_FEATURES)))
    if not len(program):
        return out
    view = ProgramView.of(asts)
    for number in np.unique(device):
        here = np.flatnonzero(device == number)
        used, back = np.unique(program[here], return_inverse=True)
        out[here] = _pairs_of(view.take(used), [asts[i] for i in used], devices[number])[back]
    return out


#: Nanoseconds that a compiled program takes on the device's core (:mod:`cdmpp.program.codegen.loops`): what bounds its loops,
#: and of that units, front end, dependent instructions and lines from the second cache level by themselves; and lines from
#: beyond the second and the last level, at the bandwidth of memory.
TIME_FEATURES: tuple[str, ...] = (
    "core_ns", "unit_ns", "front_ns", "chain_ns", "line_ns", "call_ns", "outside_ns", "beyond_l2_ns", "beyond_l3_ns",
)  # fmt: skip
#: Of a loop besides its own columns, a cycle: what its bounds are of the longest, what it works on, and its part of the
#: program's cycles; bytes it touches of a fetched line; and how often it is entered.
_LOOP_RATIOS = (
    "units", "front", "chain", "instructions", "loaded", "stored", "gathers", "arithmetic", "l1_lines", "lines_1024k",
)  # fmt: skip
LOOP_CODE_FEATURES: tuple[str, ...] = (
    *LOOP_FEATURES, *(f"{name}_per_cycle" for name in _LOOP_RATIOS), "part", "bytes_of_line", "entries",
)  # fmt: skip
_SHARES = tuple(kind for kind in KINDS if kind != "all")
#: Of a whole program: counts, the times they take on the device, each time's part of the core's, and each kind's part of the
#: instructions that run.
CODE_FEATURES: tuple[str, ...] = (
    *CODEGEN_FEATURES[: -LOOPS * len(LOOP_FEATURES)],
    *TIME_FEATURES,
    *(f"{name}_part" for name in TIME_FEATURES[1:]),
    *(f"{kind}_part" for kind in _SHARES),
)
#: Parts that a program's time is the sum of, each times a ratio that the network learns: its longest loops and the others, code
#: between loops, lines from beyond capacities (in cycles of one a line), loops entered, calls.
TIME_PARTS: tuple[str, ...] = (
    *(f"loop{number}" for number in range(LOOPS)), "other_loops", "outside", *(f"lines_{kb}k" for kb in CACHE_KB),
    "loop_entries", "calls",
)  # fmt: skip
#: Logarithm of a part that a program has not, over the estimate.
ABSENT = -30.0


class CodeRows(NamedTuple):
    """What a network is given of n compiled programs, float64, all NaN where nothing is known: numbers of the whole (n,
    len(CODE_FEATURES)) and of the longest loops (n, LOOPS, len(LOOP_CODE_FEATURES)), and the logarithms of the parts of the
    time over the analytical estimate of the program, (n, len(TIME_PARTS)), :data:`ABSENT` where there is nothing of a part."""

    program: FloatArray
    loops: FloatArray
    times: FloatArray


def code_rows(
    counts: NDArray[np.float32],
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
) -> CodeRows:
    """Of ``counts``, (n, len(CODEGEN_FEATURES)), rows of NaN where unknown; pairs as of :func:`pair_rows`."""
    shapes = ((len(CODE_FEATURES),), (LOOPS, len(LOOP_CODE_FEATURES)), (len(TIME_PARTS),))
    rows = CodeRows(*(np.full((len(program), *shape), np.nan) for shape in shapes))
    known = ~np.isnan(counts[:, 0])
    parallel = ProgramView.of(asts).parallel if known.any() else np.zeros(0)
    for number in np.unique(device[known]):
        here = np.flatnonzero(known & (device == number))
        used, back = np.unique(program[here], return_inverse=True)
        estimates = estimate_s([asts[i] for i in used], devices[number])[back]
        known_rows = _code_of(counts[here], parallel[program[here]], estimates, devices[number])
        for all_rows, values in zip(rows, known_rows, strict=True):
            all_rows[here] = values
    return rows


def _code_of(counts: NDArray[np.float32], parallel: FloatArray, estimates_s: FloatArray, device: Device) -> CodeRows:
    counts = np.asarray(counts, dtype=np.float64)
    program, loops = np.split(counts, [-LOOPS * len(LOOP_FEATURES)], axis=1)
    of = {
        name: counts[:, CODEGEN_FEATURES.index(name)] for name in (*CYCLE_FEATURES, *(f"run_{kind}" for kind in KINDS))
    }
    # counted is what one thread would run: several share it in rounds
    cores = max(1.0, device.cores_used or 1.0)
    share = np.ceil(parallel / cores) / np.maximum(parallel, 1.0)
    ns_per_cycle = share * 1e3 / (device.working_mhz or 2500.0)
    ns: dict[str, NDArray[np.floating]] = {
        name: of[name.replace("_ns", "_cycles")] * ns_per_cycle
        for name in TIME_FEATURES
        if not name.startswith("beyond")
    }
    for level, capacity in (("l2", device.l2_kb), ("l3", device.l3_kb)):
        kb = max((kb for kb in CACHE_KB if kb <= (capacity or 1024)), default=CACHE_KB[0])
        ns[f"beyond_{level}_ns"] = of[f"lines_{kb}k"] * _LINE / (device.bandwidth_gb_s or _BANDWIDTH)
    each = loops.reshape(len(counts), LOOPS, len(LOOP_FEATURES))
    loop = {name: each[:, :, number] for number, name in enumerate(LOOP_FEATURES)}
    cycles, longest = np.maximum(loop["cycles"], 1e-3), loop["runs"] * loop["cycles"]
    core = np.maximum(of["core_cycles"], 1e-3)[:, None]
    ratios = [loop[name] / cycles for name in _LOOP_RATIOS]
    touched = (loop["loaded"] + loop["stored"]) / np.maximum(_LINE * loop["l1_lines"], 0.01)
    ratios += [longest / core, np.where(loop["runs"] > 0, touched, 0), loop["runs"] / np.maximum(loop["trips"], 1.0)]
    every = np.concatenate([each, np.stack(ratios, axis=2)], axis=2)
    taken = np.stack([ns[name] for name in TIME_FEATURES], axis=1)
    of_core = _PER_MILLE * taken[:, 1:] / np.maximum(taken[:, :1], 1e-2)
    run = np.stack([of[f"run_{kind}"] for kind in _SHARES], axis=1) / np.maximum(of["run_all"], 1.0)[:, None]
    others = np.maximum(of["core_cycles"] - of["outside_cycles"] - longest.sum(axis=1), 0.0)
    rest = [
        others,
        of["outside_cycles"],
        *(of[f"lines_{kb}k"] for kb in CACHE_KB),
        of["loop_entries"],
        of["call_cycles"],
    ]
    parts = np.concatenate([longest, np.stack(rest, axis=1)], axis=1) * (ns_per_cycle / (_NS * estimates_s))[:, None]
    numbers = np.concatenate([program, taken, of_core, run], axis=1)
    return CodeRows(numbers, every, np.log(np.maximum(parts, np.exp(ABSENT))))
