"""What a compiler made of a program: instructions by kind, counted in the object code.

The compact AST says what a program asks for; whether the compiler vectorises, gathers, packs or spills decides much
of its latency and is not in the AST. Counting it needs a compilation, which a cost model has no time for, but
*training* has: a network that also has to predict these counts learns from the AST what its compiler will do
(:attr:`cdmpp.predictor.config.LossConfig.codegen_weight`), and one may be told them where a program is compiled for its
prediction (:mod:`cdmpp.predictor.compiled`).

x86 only: the kinds are those of SSE and AVX code in GNU objdump's AT&T syntax.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProfilerError
from cdmpp.profiler.control_flow import Instruction
from cdmpp.profiler.loop_cycles import ISSUE, LoopCycles, loop_cycles
from cdmpp.profiler.loop_trips import times_run

#: Kinds of instructions. z, y, x: registers of 64, 32, 16 bytes; s: one element.
KINDS: tuple[str, ...] = (
    "fma_z", "fma_y", "fma_x", "fma_s", "fp_z", "fp_y", "fp_x", "fp_s", "div",
    "load_z", "load_y", "load_x", "load_s", "store_z", "store_y", "store_x", "store_s", "stack_load", "stack_store",
    "broadcast", "shuffle", "gather", "mask", "integer", "imul", "idiv", "branch", "call", "convert", "all",
)  # fmt: skip
_AT = {kind: i for i, kind in enumerate(KINDS)}
#: The whole program, its innermost loops, and the innermost loop with most arithmetic, each instruction once.
STATIC_FEATURES: tuple[str, ...] = (
    *(f"program_{kind}" for kind in KINDS),
    "innermost_loops",
    "loop_depth",
    *(f"loop_{kind}" for kind in KINDS),
)
#: Columns: these, then every instruction as often as it runs, the loops of which that is not known, and what
#: :class:`~cdmpp.profiler.loop_cycles.LoopCycles` has.
CODEGEN_FEATURES: tuple[str, ...] = (
    *STATIC_FEATURES,
    *(f"run_{kind}" for kind in KINDS),
    "unknown_loops",
    "loop_cycles",
    "loop_chain",
    "loop_entries",
)
#: Of the reading: what columns of one name mean differs between versions. 2: branches that a counter decides, overlap checks.
COUNTING_VERSION = 2
#: Cycles for which an instruction of a kind keeps a unit of a generic core busy: arithmetic, loads, stores, shuffles.
_UNITS: tuple[dict[str, float], ...] = (
    {f"{kind}_{width}": 0.5 for kind in ("fma", "fp") for width in "zyxs"},
    {f"load_{width}": 0.5 for width in "zyxs"},
    {f"store_{width}": 1.0 for width in "zyxs"},
    {"shuffle": 1.0},
    {"all": 1.0 / ISSUE},
)
#: And those that keep all of it busy.
_BLOCKING = {"gather": 20.0, "div": 8.0, "idiv": 10.0, "call": 50.0}

#: Wrappers, error paths and helpers that are the same in all objects.
_NOT_THE_PROGRAM = re.compile(r"__tvm_ffi_main|__tvm_set_raised|truncsf|extendhf|@plt|_init|_fini")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")
_SHUFFLES = (
    "vperm", "vinsert", "vextract", "vunpck", "vshuf", "vblend", "vpblend", "vpack", "vpunpck", "valign", "vpinsr",
    "vpextr", "vmovhl", "vmovlh", "vpshuf", "vcompress", "vexpand",
)  # fmt: skip
#: Elements that a kind of arithmetic works on.
_LANES = {"z": 16, "y": 8, "x": 4, "s": 1}
#: A loop inside another is taken to run so many times more often.
_DEPTH_WEIGHT = 8.0

FloatArray = NDArray[np.float64]

_BUSY: FloatArray = np.array(
    [[unit.get(kind, _BLOCKING.get(kind, 0.0)) for unit in _UNITS] for kind in KINDS]
)


def codegen_features(path: str | Path) -> NDArray[np.float32]:
    """Counts of an object file or shared object, float32 (len(CODEGEN_FEATURES),).

    Raises
    ------
    ProfilerError
        objdump is missing or cannot read the file, or there is no code in it.
    """
    done = subprocess.run(
        [disassembler(), "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ProfilerError(f"{path}: objdump cannot read it: {done.stderr.strip()}")
    functions = parse_disassembly(done.stdout.splitlines())
    if not functions:
        raise ProfilerError(f"{path}: no function of a program in it")
    return count(functions)


def disassembler() -> str:
    """Path of GNU objdump; ProfilerError where it is not installed."""
    tool = shutil.which("objdump")
    if tool is None:
        raise ProfilerError("counting instructions needs objdump (binutils), which is not installed")
    return tool


def parse_disassembly(lines: Iterable[str]) -> list[list[Instruction]]:
    """Functions of a program as lists of (address, operation, operands), from objdump's output."""
    functions: list[list[Instruction]] = []
    inside = False
    for line in lines:
        header = _FUNCTION.match(line)
        if header:
            inside = not _NOT_THE_PROGRAM.search(header[1])
            if inside:
                functions.append([])
            continue
        found = _INSTRUCTION.match(line) if inside else None
        if found:
            functions[-1].append((int(found[1], 16), found[2], found[3]))
    return functions


def count(functions: list[list[Instruction]]) -> NDArray[np.float32]:
    """Counts of the functions of a program, float32 (len(CODEGEN_FEATURES),)."""
    total, runs = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    unknown, cycles = 0, LoopCycles()
    loops: list[tuple[int, FloatArray]] = []
    for function in filter(None, functions):
        before = np.zeros((len(function) + 1, len(KINDS)))
        for i, (_, operation, operands) in enumerate(function):
            before[i + 1] = before[i]
            for kind in kinds_of(operation, operands):
                before[i + 1, _AT[kind]] += 1
        total += before[-1]
        jumps = _backward_jumps(function)
        found = times_run(function)
        each = np.diff(before, axis=0)
        runs += found.times @ each
        unknown += found.unknown
        cycles += loop_cycles(found.graph, found.trips, found.times, each @ _BUSY)
        for begin, end in jumps:
            others = [jump for jump in jumps if jump != (begin, end)]
            if not any(b >= begin and e <= end for b, e in others):
                depth = sum(b <= begin and e >= end for b, e in others)
                loops.append((depth, before[end + 1] - before[begin]))
    depth, hottest = max(
        loops,
        key=lambda loop: _arithmetic(loop[1]) * _DEPTH_WEIGHT ** loop[0],
        default=(0, np.zeros(len(KINDS))),
    )
    looped = [unknown, cycles.cycles, cycles.chain, cycles.entries]
    return np.concatenate([total, [len(loops), depth], hottest, runs, looped]).astype(np.float32)


def kinds_of(operation: str, operands: str) -> list[str]:
    """The kinds one instruction counts as; every instruction counts as ``all``."""
    kinds = ["all"]
    memory = "(" in operands
    if "%xmm" in operands and not operation.startswith("v"):
        operation = f"v{operation}"  # SSE names an instruction as AVX does, without the v
    if operation.startswith("v"):
        width = "z" if "zmm" in operands else "y" if "ymm" in operands else "x"
        scalar = operation.endswith(("ss", "sd"))
        lanes = "s" if scalar else width
        if "fma" in operation or operation.startswith(("vfms", "vfnm")):
            kinds.append(f"fma_{lanes}")
        elif operation.startswith(("vadd", "vsub", "vmul", "vmax", "vmin")) and operation.endswith(
            ("ps", "ss", "pd", "sd")
        ):
            kinds.append(f"fp_{lanes}")
        elif operation.startswith(("vdiv", "vsqrt", "vrsqrt", "vrcp")):
            kinds.append("div")
        elif "gather" in operation or "scatter" in operation:
            kinds.append("gather")
        elif "broadcast" in operation:
            kinds.append("broadcast")
        elif operation.startswith(_SHUFFLES):
            kinds.append("shuffle")
        elif operation.startswith("vcvt"):
            kinds.append("convert")
        elif operation.startswith(("vcmp", "vpcmp")):
            kinds.append("mask")
        if memory:
            stores = operation.startswith("vmov") and (operands.rstrip().endswith(")") or "){%k" in operands)
            kinds.append(("store_" if stores else "load_") + lanes)
            if "(%rsp" in operands or "(%rbp" in operands:
                kinds.append("stack_store" if stores else "stack_load")
    elif operation.startswith("k"):
        kinds.append("mask")
    elif operation.startswith("j"):
        kinds.append("branch")
    elif operation.startswith("call"):
        kinds.append("call")
    elif operation.startswith("imul"):
        kinds.append("imul")
    elif operation.startswith(("idiv", "div")):
        kinds.append("idiv")
    else:
        kinds.append("integer")
        if "(%rsp" in operands and operation.startswith("mov"):
            kinds.append("stack_store" if operands.rstrip().endswith(")") else "stack_load")
    return kinds


def _backward_jumps(function: list[Instruction]) -> list[tuple[int, int]]:
    """Loops as (first, last) instruction: jumps to an instruction at or before them."""
    at = {address: i for i, (address, _, _) in enumerate(function)}
    jumps: list[tuple[int, int]] = []
    for i, (_, operation, operands) in enumerate(function):
        if operation.startswith("j"):
            target = operands.split(maxsplit=1)[0] if operands else ""
            begin = at.get(int(target, 16)) if re.fullmatch(r"[0-9a-f]+", target) else None
            if begin is not None and begin <= i:
                jumps.append((begin, i))
    return jumps


def _arithmetic(counts: FloatArray) -> float:
    return float(
        sum(lanes * (counts[_AT[f"fma_{w}"]] + counts[_AT[f"fp_{w}"]]) for w, lanes in _LANES.items())
    )
