"""Counts the instructions of compiled functions by kind: each once, and each as often as it runs.

x86 only: the kinds are those of SSE and AVX code.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program import import_tvm
from cdmpp.program.codegen import CODEGEN_FEATURES, CYCLE_FEATURES, KINDS, LOOP_FEATURES, LOOPS, is_counted
from cdmpp.program.codegen.blocks import Address, FlowGraph, Instruction
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import Core, core_name, core_of
from cdmpp.program.codegen.loops import function_cycles
from cdmpp.program.codegen.trips import TripCounts, times_run
from cdmpp.program.codegen.values import CodeValues

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)

_AT = {kind: i for i, kind in enumerate(KINDS)}
_RUNS, _CYCLES = LOOP_FEATURES.index("runs"), LOOP_FEATURES.index("cycles")
_SHUFFLES = (
    "vperm", "vinsert", "vextract", "vunpck", "vshuf", "vblend", "vpblend", "vpack", "vpunpck", "valign", "vpinsr",
    "vpextr", "vmovhl", "vmovlh", "vpshuf", "vcompress", "vexpand",
)  # fmt: skip
#: Number of elements that one arithmetic instruction works on, by the suffix of its kind.
_LANES = {"z": 16, "y": 8, "x": 4, "s": 1}
#: A loop inside another is assumed to run this many times as often.
_DEPTH_WEIGHT = 8.0

FloatArray = NDArray[np.float64]


def codegen_features(path: str | Path, core: Core) -> NDArray[np.float32]:
    """Counts of an object file or shared object, and the cycles it takes on a core, float32 (len(CODEGEN_FEATURES),).

    ProgramError: it is no object file for x86-64, or has no function of a program. CdmppError: there is no decoder."""
    require_decoder()
    from cdmpp.program.codegen.disassemble import read_functions

    return count(read_functions(path), core)


def require_decoder() -> None:
    """Raise CdmppError if the instruction decoder (iced-x86, pyelftools) is not installed."""
    try:
        import cdmpp.program.codegen.disassemble  # noqa: F401
    except ImportError as err:
        raise CdmppError(f"counting instructions needs iced-x86 and pyelftools: install cdmpp[tvm] ({err})") from err


def instruction_counts(
    programs: Sequence[Any], device: Device, progress: Callable[[int, int], None] = lambda done, total: None
) -> NDArray[np.float32]:
    """Counts of PrimFuncs and IRModules compiled for a device's target, float32 (n, len(CODEGEN_FEATURES)).

    A program that fails to compile gets a row of NaN, and a warning is logged.

    Raises ProgramError if the device is not an x86 CPU with a target or a program is not of a kind that can be compiled,
    CdmppError if TVM or the instruction decoder is not installed."""
    if not is_counted(device):
        raise ProgramError(f"{device.name}: only programs compiled for x86 CPUs are counted; predict without compiled=True")
    import_tvm()
    require_decoder()  # one error, not a warning for each program
    from cdmpp.program.ast import CompactAST, prim_func

    if any(isinstance(program, CompactAST) for program in programs):
        raise ProgramError("a CompactAST cannot be compiled: expected a PrimFunc or an IRModule")
    funcs = [prim_func(program) for program in programs]
    rows = np.full((len(programs), len(CODEGEN_FEATURES)), np.nan, dtype=np.float32)
    target, core = dict(device.target), core_of(core_name(device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.so"
        for number, func in enumerate(funcs):
            progress(number, len(funcs))
            try:
                compile_to_shared_object(func, target, path)
                rows[number] = codegen_features(path, core)
            except (CdmppError, RuntimeError) as err:
                reason = str(err).strip().splitlines()[-1:] or [type(err).__name__]
                logger.warning("program %d of %d does not compile: %s", number + 1, len(programs), reason[0])
    return rows


def count(functions: Sequence[Sequence[Instruction]], core: Core) -> NDArray[np.float32]:
    """Counts of the functions of a program, and the cycles they take on a core, float32 (len(CODEGEN_FEATURES),)."""
    total, run = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    unknown, cycles = 0, np.zeros(len(CYCLE_FEATURES))
    longest: list[FloatArray] = [np.zeros(len(LOOP_FEATURES))] * LOOPS
    loops: list[tuple[int, FloatArray]] = []
    for function in functions:
        each = np.zeros((len(function), len(KINDS)))
        kinds = [(i, _AT[kind]) for i, instruction in enumerate(function) for kind in kinds_of(instruction)]
        each[tuple(np.transpose(kinds))] = 1
        total += each.sum(axis=0)
        trips = TripCounts(CodeValues(FlowGraph(function)))
        times = times_run(trips)
        run += times @ each
        unknown += trips.unknown
        taken, inner = function_cycles(trips, times, core)
        cycles += taken
        longest += inner
        jumps = _backward_jumps(function)
        for begin, end in jumps:
            others = [jump for jump in jumps if jump != (begin, end)]
            if not any(b >= begin and e <= end for b, e in others):
                depth = sum(b <= begin and e >= end for b, e in others)
                loops.append((depth, each[begin : end + 1].sum(axis=0)))
    lanes = np.zeros(len(KINDS))  # of arithmetic
    lanes[[_AT[f"{kind}_{w}"] for kind in ("fma", "fp") for w in _LANES]] = [*_LANES.values()] * 2
    depth, hottest = max(loops, key=lambda loop: loop[1] @ lanes * _DEPTH_WEIGHT ** loop[0], default=(0, 0 * lanes))
    longest.sort(key=lambda loop: -loop[_RUNS] * loop[_CYCLES])
    found = [total, np.array([len(loops), depth]), hottest, run, np.array([unknown]), cycles, *longest[:LOOPS]]
    return np.concatenate(found).astype(np.float32)


def kinds_of(instruction: Instruction) -> list[str]:
    """The kinds as which one instruction counts; every instruction counts as ``all``."""
    name, operands, kinds = instruction.name, instruction.operands, ["all"]
    memory, stores = instruction.memory, operands[:1] == (instruction.memory,)
    # mask and integer registers have at most 64 bits
    bits = max([o.index_bits if isinstance(o, Address) else o.bits for o in operands if not isinstance(o, int)], default=0)
    if bits > 64 and not name.startswith("v"):
        name = f"v{name}"  # SSE names are those of AVX without the v
    if name.startswith("v"):
        scalar = name.endswith(("ss", "sd"))
        lanes = "s" if scalar else {512: "z", 256: "y"}.get(bits, "x")
        if "fma" in name or name.startswith(("vfms", "vfnm")):
            kinds.append(f"fma_{lanes}")
        elif name.startswith(("vadd", "vsub", "vmul", "vmax", "vmin")) and name.endswith(("ps", "ss", "pd", "sd")):
            kinds.append(f"fp_{lanes}")
        elif name.startswith(("vdiv", "vsqrt", "vrsqrt", "vrcp")):
            kinds.append("div")
        elif "gather" in name or "scatter" in name:
            kinds.append("gather")
        elif "broadcast" in name:
            kinds.append("broadcast")
        elif name.startswith(_SHUFFLES):
            kinds.append("shuffle")
        elif name.startswith("vcvt"):
            kinds.append("convert")
        elif name.startswith(("vcmp", "vpcmp")):
            kinds.append("mask")
        if memory is not None:
            stores = stores and name.startswith("vmov")
            kinds.append(("store_" if stores else "load_") + lanes)
            if memory.base in ("rsp", "rbp"):
                kinds.append("stack_store" if stores else "stack_load")
    elif name.startswith("k"):
        kinds.append("mask")
    elif instruction.flow in ("branch", "jump"):
        kinds.append("branch")
    elif instruction.flow == "call":
        kinds.append("call")
    elif name == "imul":
        kinds.append("imul")
    elif name in ("div", "idiv"):
        kinds.append("idiv")
    else:
        kinds.append("integer")
        if memory is not None and memory.base == "rsp" and name.startswith("mov"):
            kinds.append("stack_store" if stores else "stack_load")
    return kinds


def _backward_jumps(function: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Loops as (first, last) instruction, from backward jumps: those to themselves or to an earlier instruction."""
    at = {instruction.address: i for i, instruction in enumerate(function)}
    jumps = [(at[i.target], at[i.address]) for i in function if i.target in at]
    return [(begin, end) for begin, end in jumps if begin <= end]
