"""How long the instructions of a compiled program keep a core busy: an analytical model of its units.

An out-of-order core runs a tensor program about as fast as its busiest unit allows: arithmetic, loads, stores, shuffles, or
the front end that issues them all (llvm-mca, OSACA: Laukemann et al., PMBS'18, model one loop body so). Here the counts of
:mod:`cdmpp.program.codegen`, each instruction as often as it runs, are divided by what the units do in a cycle. Waiting for
caches and memory is left to :func:`cdmpp.predictor.roofline.estimate_s` and to what a network learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.predictor.roofline import SLOW_GATHER, ProgramView, estimate_s
from cdmpp.program.codegen import CODEGEN_FEATURES, KINDS

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

#: Nanoseconds that each kind of unit is busy, what the loops take one by one and their dependent instructions alone
#: (:mod:`cdmpp.program.codegen.cycles`), and what the core takes.
TIME_FEATURES: tuple[str, ...] = (
    "arithmetic_ns", "load_ns", "store_ns", "shuffle_ns", "issue_ns", "slow_ns", "loops_ns", "chain_ns", "instruction_ns",
)  # fmt: skip
#: What a network is told of a compiled program: its counts, and the times they take on the device.
CODE_FEATURES: tuple[str, ...] = (*CODEGEN_FEATURES, *TIME_FEATURES)

_RUN = {kind: CODEGEN_FEATURES.index(f"run_{kind}") for kind in KINDS}
_LOOPS, _CHAIN = CODEGEN_FEATURES.index("loop_cycles"), CODEGEN_FEATURES.index("loop_chain")
#: Logarithms of the two estimates' ratio are cut here: beyond, the counts are misread.
_MOST_EXCESS = 4.0
_NS = 1e9


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


def code_features(
    counts: NDArray[np.float32], asts: Sequence[CompactAST], device: Device
) -> tuple[FloatArray, FloatArray]:
    """What a network is told of programs compiled for one device.

    Parameters
    ----------
    counts
        (n, len(CODEGEN_FEATURES)); rows of NaN where they are not known.

    Returns
    -------
    float64 (n, len(CODE_FEATURES)), and the logarithm of ``instruction_ns`` over the analytical estimate of the program, (n,).
    Both are NaN where the counts are.
    """
    return _features_of(counts, ProgramView.of(asts).parallel, estimate_s(asts, device), device)


def code_rows(
    counts: NDArray[np.float32],
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
) -> tuple[FloatArray, FloatArray]:
    """:func:`code_features` of many pairs: ``program`` and ``device``, int (n,), are numbers in ``asts`` and in ``devices``."""
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
