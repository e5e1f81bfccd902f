"""What can be said of a program and a device together, as numbers for the network: how the one fills the other.

Leaf vectors know nothing of the device and device vectors nothing of the program. A network that is to carry over to a
device it has not seen should not have to learn from a handful of devices how a product of matrices is cut into tiles for
their cores (NeuSight, Lee et al., ASPLOS'25, section 4, predicts utilisation from such numbers). Everything here comes from
the compact AST and the device's specification.

Where the program was compiled, how long its instructions keep a core busy comes besides (:func:`code_rows`). An
out-of-order core runs a tensor program about as fast as its busiest unit allows: arithmetic, loads, stores, shuffles, or
the front end that issues them all (llvm-mca, OSACA: Laukemann et al., PMBS'18, model one loop body so). The counts of
:mod:`cdmpp.program.codegen`, each instruction as often as it runs, are divided by what the units do in a cycle. Waiting for
caches and memory is left to :func:`cdmpp.predictor.roofline.estimate_s` and to what a network learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.predictor.roofline import (
    SLOW_GATHER,
    ProgramView,
    estimate_s,
    peak_flops,
    power_headroom,
    roofline_s,
)
from cdmpp.program.codegen import CODEGEN_FEATURES, KINDS

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

#: Edges of the square tiles into which libraries cut products of matrices.
TILES = (32, 64, 128, 256)

#: Ratios are given in thousandths, times in nanoseconds: the encoder takes logarithms of 1 + x.
_PER_MILLE = 1e3
_NS = 1e9
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
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
) -> FloatArray:
    """Raw features of pairs, float64 (n, len(PAIR_FEATURES)), >= 0, NaN where a device's specification does not say.

    ``program`` and ``device``, int (n,), are the numbers in ``asts`` and in ``devices`` of each pair.
    """
    out = np.empty((len(program), len(PAIR_FEATURES)))
    if not len(program):
        return out
    view = ProgramView.of(asts)
    for number in np.unique(device):
        here = np.flatnonzero(device == number)
        used, back = np.unique(program[here], return_inverse=True)
        out[here] = _pairs_of(view.take(used), [asts[i] for i in used], devices[number])[back]
    return out


#: Nanoseconds that each kind of unit is busy, what the loops take one by one and their dependent instructions alone
#: (:mod:`cdmpp.program.codegen.cycles`), and what the core takes.
TIME_FEATURES: tuple[str, ...] = (
    "arithmetic_ns", "load_ns", "store_ns", "shuffle_ns", "issue_ns", "slow_ns", "loops_ns", "chain_ns", "instruction_ns",
)  # fmt: skip
#: What a network is given of a compiled program: its counts, and the times they take on the device.
CODE_FEATURES: tuple[str, ...] = (*CODEGEN_FEATURES, *TIME_FEATURES)

_RUN = {kind: CODEGEN_FEATURES.index(f"run_{kind}") for kind in KINDS}
_LOOPS, _CHAIN = CODEGEN_FEATURES.index("loop_cycles"), CODEGEN_FEATURES.index("loop_chain")
#: Logarithms of the two estimates' ratio are cut here: beyond, the counts are misread.
_MOST_EXCESS = 4.0


@dataclass(frozen=True)
class _Core:
    """Instructions a cycle: issued; loads and stores of 64 bytes and of less; shuffles."""

    issue: float = 4.0
    load_wide: float = 2.0
    load: float = 2.0
    store_wide: float = 1.0
    store: float = 1.0
    shuffle: float = 1.0


#: Microarchitectures that differ from Skylake's core (Fog: The microarchitecture of Intel, AMD and VIA CPUs; uops.info).
_CORES: dict[str, _Core] = {
    "icelake-server": _Core(issue=5, store=2, shuffle=2),
    **dict.fromkeys(
        ("sapphirerapids", "emeraldrapids", "graniterapids"), _Core(issue=6, load=3, store=2, shuffle=2)
    ),
    **dict.fromkeys(("zen1", "zen2"), _Core(issue=5, shuffle=2)),
    "zen3": _Core(issue=6, load=3, store=2, shuffle=2),
    "zen4": _Core(issue=6, load_wide=1, store_wide=0.5, shuffle=2),
    "zen5": _Core(issue=8, load_wide=2, store_wide=1, store=2, shuffle=2),
}
#: Cycles that occupy a core alone: a gather (where microcode slows it down, and elsewhere), a division or root of a vector
#: and of integers, a call of a function of the C library.
_SLOW_GATHER_CYCLES, _GATHER, _DIVISION, _INTEGER_DIVISION, _CALL = 25.0, 20.0, 8.0, 10.0, 50.0


def code_rows(
    counts: NDArray[np.float32],
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
) -> tuple[FloatArray, FloatArray]:
    """What a network is given of compiled programs: ``counts``, (n, len(CODEGEN_FEATURES)), rows of NaN where unknown, and
    how long they take; pairs as of :func:`pair_rows`.

    Returns
    -------
    float64 (n, len(CODE_FEATURES)), and the logarithm of ``instruction_ns`` over the analytical estimate of the program, (n,).
    Both are NaN where the counts are.
    """
    features, excess = np.full((len(program), len(CODE_FEATURES)), np.nan), np.full(len(program), np.nan)
    known = ~np.isnan(counts[:, 0])
    parallel = ProgramView.of(asts).parallel if known.any() else np.zeros(0)
    for number in np.unique(device[known]):
        here = np.flatnonzero(known & (device == number))
        used, back = np.unique(program[here], return_inverse=True)
        estimates = estimate_s([asts[i] for i in used], devices[number])[back]
        features[here], excess[here] = _features_of(
            counts[here], parallel[program[here]], estimates, devices[number]
        )
    return features, excess


def _features_of(
    counts: NDArray[np.float32], parallel: FloatArray, estimates_s: FloatArray, device: Device
) -> tuple[FloatArray, FloatArray]:
    counts = np.asarray(counts, dtype=np.float64)
    run = {kind: counts[:, column] for kind, column in _RUN.items()}
    core = _CORES.get(device.arch, _Core())
    pipes = max(0.5, (device.lanes_per_core or 16.0) / ((device.simd_bits or 256) / 32))
    narrow = max(2.0, pipes)
    wide = pipes if device.simd_bits == 512 else narrow
    gather = _SLOW_GATHER_CYCLES if device.arch in SLOW_GATHER else _GATHER
    cycles = {
        "arithmetic_ns": (run["fma_z"] + run["fp_z"]) / wide
        + sum(run[f"fma_{width}"] + run[f"fp_{width}"] for width in "yxs") / narrow,
        "load_ns": run["load_z"] / core.load_wide
        + (run["load_y"] + run["load_x"] + run["load_s"]) / core.load,
        "store_ns": run["store_z"] / core.store_wide
        + (run["store_y"] + run["store_x"] + run["store_s"]) / core.store,
        "shuffle_ns": run["shuffle"] / core.shuffle,
        "issue_ns": run["all"] / core.issue,
        "slow_ns": gather * run["gather"]
        + _DIVISION * run["div"]
        + _INTEGER_DIVISION * run["idiv"]
        + _CALL * run["call"],
    }
    units = [name for name in cycles if name != "slow_ns"]
    busiest = np.max([cycles[name] for name in units], axis=0) + cycles["slow_ns"]
    cycles["loops_ns"], cycles["chain_ns"] = counts[:, _LOOPS], counts[:, _CHAIN]
    cycles["instruction_ns"] = np.maximum(busiest, cycles["loops_ns"])
    # counted is what one thread would run: several share it in rounds
    cores = max(1.0, device.cores_used or 1.0)
    share = np.ceil(parallel / cores) / np.maximum(parallel, 1.0)
    ns = {name: values * share * 1e3 / (device.clock_mhz or 2500.0) for name, values in cycles.items()}
    ratio = np.log(np.maximum(ns["instruction_ns"], 1e-3)) - np.log(_NS * estimates_s)
    features = np.concatenate([counts, np.stack([ns[name] for name in TIME_FEATURES], axis=1)], axis=1)
    return features, np.clip(ratio, -_MOST_EXCESS, _MOST_EXCESS)
