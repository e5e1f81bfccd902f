"""Rates of one core of this machine: clock, instructions per nanosecond by kind, latency and bandwidth of caches and memory.

Loops of single instructions are assembled here, so that no compiler decides what is measured (as in uops.info: Abel and
Reineke, ASPLOS'19). A chain of additions, one per cycle on every x86 core, gives the clock; mixed with vector arithmetic, it
gives the clock to which such code lowers the core. Only for x86-64 with AVX2.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.device import Device, get_device
from cdmpp.errors import CdmppError

logger = logging.getLogger(__name__)

#: Seconds of a run, rounds over all loops, and by how much the best rates of the two halves of the rounds may differ.
_RUN_S, _ROUNDS, _TOLERANCE = 4e-3, 6, 0.03
#: How often loops whose halves differ by more are run again.
_REPEATS = 3
#: Instructions in a row, each of which writes to another register.
_UNROLLED = 12
#: Bytes of a buffer larger than every last-level cache, and of a cache line.
_MEMORY_BYTES, _LINE = 256 << 20, 64
_KB = 1024


@dataclass(frozen=True)
class _Kernel:
    """A loop that does ``per_run`` of the counted operations or bytes in each iteration, on ``buffer`` if there is one."""

    name: str
    code: Callable[..., float]
    per_run: float
    buffer: np.ndarray | None = None
    argument: int = 0


def core_rates(device: Device) -> tuple[dict[str, float], list[str]]:
    """Rates of one core, and the reasons why some are missing; takes about ten seconds. They are ``clock_ghz``,
    ``clock_256_ghz`` and ``clock_512_ghz`` (mixed with vector arithmetic); instructions per nanosecond (``fma_256_per_ns``:
    multiply-adds, loads, stores, shuffles and divides by vector bits; gathered elements; calls of ``expf``); and the latency
    (``l2_ns``) and load bandwidth (``l2_gb_s``) of each cache level and of memory. CdmppError: no x86-64 with AVX2, no
    iced-x86, or another program uses the core, so that two measurements of the clock differ."""
    asm = _assembler(device)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        return _measure(list(_kernels(asm, device)))
    finally:
        os.sched_setaffinity(0, before)


def with_clock(device: Device) -> Device:
    """This machine's CPU, `device`, with its clock measured now; unchanged if the clock cannot be measured or is not steady."""
    try:
        asm = _assembler(device)
        rates, _ = _measure([_Kernel("clock_ghz", asm.loop(asm.chain(40)), 40)])
    except CdmppError as error:
        logger.warning("the clock of %s is not measured: %s", device.name, error)
        return device
    return replace(device, measured={**device.measured, **rates})


def with_known_clock(device: str | Device) -> Device:
    """A device; for this machine's CPU, :func:`with_clock` if neither the table nor its maker states its clock."""
    found = get_device(device)
    known = found.kind != "cpu" or "clock_ghz" in found.measured or found.boost_mhz
    return found if known or found.base != get_device("this-cpu").base else with_clock(found)


def _assembler(device: Device) -> Any:
    if platform.machine() != "x86_64" or (device.simd_bits or 0) < 256:
        raise CdmppError(f"{device.name}: rates of a core are measured on x86-64 with AVX2 alone")
    try:
        from cdmpp.profiler import assembly
    except ImportError as error:
        raise CdmppError(f"assembling loops needs iced-x86: install cdmpp[tvm] ({error})") from error
    return assembly


def _measure(kernels: Sequence[_Kernel]) -> tuple[dict[str, float], list[str]]:
    best = {kernel.name: [0.0, 0.0] for kernel in kernels}
    todo = list(kernels)
    for _ in range(1 + _REPEATS):
        for turn in range(_ROUNDS):
            for kernel in todo:
                half = best[kernel.name]
                half[turn % 2] = max(half[turn % 2], _rate(kernel))
        todo = [kernel for kernel in todo if _spread(best[kernel.name]) > _TOLERANCE]
        if not todo:
            break
    unsteady = {k.name: f"{k.name} differs by {100 * _spread(best[k.name]):.0f} % between rounds" for k in todo}
    for name, reason in unsteady.items():
        if name.startswith("clock"):
            raise CdmppError(f"other work on this machine: {reason}; measure again when it is idle")
    found = {name: max(halves) for name, halves in best.items() if name not in unsteady}
    # the rates of latency loops are steps per nanosecond: the latency is the inverse
    latencies = {name for name in found if name.endswith("_ns") and "_per_" not in name}
    return {n: 1 / rate if n in latencies else rate for n, rate in found.items()}, list(unsteady.values())


def _spread(halves: Sequence[float]) -> float:
    return max(halves) / min(halves) - 1


def _rate(kernel: _Kernel) -> float:
    """The loop's rate per nanosecond; the number of iterations is at least doubled until a run is long enough."""
    runs, address = 64, 0 if kernel.buffer is None else kernel.buffer.ctypes.data
    while True:
        began = time.thread_time_ns()  # CPU time of this thread only: others may take the core in between
        kernel.code(runs, address, kernel.argument)
        took = time.thread_time_ns() - began
        if took > 1e9 * _RUN_S:
            return kernel.per_run * runs / took
        runs = int(runs * max(2.0, min(64.0, 1.2e9 * _RUN_S / max(took, 1))))


def _kernels(asm: Any, device: Device) -> Iterable[_Kernel]:
    here = _pages(4 * _KB)
    widths = [bits for bits in (128, 256, 512) if bits <= (device.simd_bits or 256)]
    yield _Kernel("clock_ghz", asm.loop(asm.chain(40)), 40)
    for bits in widths[1:]:
        yield _Kernel(f"clock_{bits}_ghz", asm.loop([*asm.chain(16), *asm.alike("fma", bits, 6)] * 2), 32)
    for bits in widths:
        for name in ("fma", "load", "store", "shuffle", "divide"):
            yield _Kernel(f"{name}_{bits}_per_ns", asm.loop(asm.alike(name, bits, _UNROLLED)), _UNROLLED, here)
    for bits in widths[1:]:
        yield _Kernel(f"gather_{bits}_per_ns", asm.loop(asm.gather(bits, 4)), 4 * bits / 32, here)
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    function = ctypes.cast(library.expf, ctypes.c_void_p).value or 0
    yield _Kernel("exp_per_ns", asm.loop(asm.call(4)), 4, here, function)
    levels = {"l1": device.l1_kb, "l2": device.l2_kb, "l3": device.l3_kb}
    below = 0.0
    for level, kb in (*levels.items(), ("memory", _MEMORY_BYTES / _KB)):
        if not kb:
            continue
        # half of a level; for L3, which other cores use too, a quarter at most, but at least twice the level before it
        size = int(_KB * (kb / 2 if level != "l3" else max(2 * below, min(kb / 4, 4 * below))))
        below = kb
        # cache lines, each of which begins with the offset of the next one in a random cycle through all of them
        chain, order = _pages(size // _LINE * _LINE), np.random.default_rng(0).permutation(size // _LINE)
        chain[order * (_LINE // 8)] = np.roll(order, -1) * _LINE
        yield _Kernel(f"{level}_ns", asm.loop(asm.chase(16)), 16, chain)
        turns = size // (8 * _LINE)
        yield _Kernel(f"{level}_gb_s", asm.stream(widths[-1], 8), turns * 8 * _LINE, chain, turns)


def _pages(bytes_: int) -> np.ndarray:
    """Zeros (int64) that begin at a page boundary."""
    buffer = np.zeros(bytes_ // 8 + 512, dtype=np.int64)
    start = -buffer.ctypes.data % 4096 // 8
    return buffer[start : start + bytes_ // 8]
