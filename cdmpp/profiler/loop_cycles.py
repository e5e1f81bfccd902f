"""How many cycles compiled loops take on a generic core: busy units, and instructions that wait for each other.

A loop takes as long as its busiest unit or as its chain of dependent instructions, whichever is longer (llvm-mca; OSACA:
Laukemann et al., PMBS'18): a sum in one register adds once in four cycles, however many units there are. The chain is found
by following when the result of each instruction is ready for some rounds, in a core that issues in order, looks a window of
instructions ahead, and forwards what was stored to the next load of the same address. Units and latencies are about those of
Skylake; cores differ from it by little, and :mod:`cdmpp.predictor.instruction_time` knows them.

x86 only, in GNU objdump's AT&T syntax, as :mod:`cdmpp.profiler.codegen`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.profiler.code_values import REGISTERS, split_operands
from cdmpp.profiler.control_flow import FlowGraph, Instruction
from cdmpp.profiler.loop_trips import UNKNOWN_TRIPS

#: Instructions a core issues in a cycle, and looks ahead.
ISSUE, _WINDOW = 4.0, 224
#: Cycles until a load gives what the first cache level has, and until a store is forwarded to a load.
_LOAD, _FORWARD = 5.0, 5.0
#: Latencies of operations, by how their names begin without the v of AVX (Fog, instruction tables: Skylake-X).
_LATENCIES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("div", "sqrt"), 12.0),
    (("pgather", "gather", "scatter"), 20.0),
    (("perm", "extract", "insertf", "inserti", "broadcast", "pbroadcast", "cvt", "cmp", "pcmp", "align", "compress"), 3.0),
    (("pmull",), 10.0),
)  # fmt: skip
_FLOATING, _FLOATING_LATENCY = ("fma", "fms", "fnm", "add", "sub", "mul", "max", "min"), 4.0
_PACKED_OR_SCALAR = ("ps", "ss", "pd", "sd")
_INTEGER_MULTIPLY, _INTEGER_DIVIDE, _CALL = 3.0, 26.0, 40.0
#: Rounds of a loop that are followed: this many instructions, within these bounds.
_FOLLOWED, _LEAST_ROUNDS, _MOST_ROUNDS = 800, 3, 8

_REGISTER = re.compile(r"%([a-z]+[0-9]*[a-z]*)")
_MASK = re.compile(r"\{.*?\}")
_NOTHING = ("j", "ret", "nop", "push", "pop", "vzero", "endbr", "data16", "cs", "ud2")
_COMPARES = ("cmp", "test", "vucomi", "vcomi", "ucomi", "comi", "bt")
_STORES = ("mov", "vmov", "vextract", "set", "vpextr", "vcvtps2ph")
#: Operations of two operands that only write the second.
_OVERWRITE = (
    "mov", "lea", "cvt", "set", "popcnt", "lzcnt", "tzcnt", "pabs", "pmovz", "pmovs", "sqrt", "rsqrt", "rcp", "round", "pshuf",
)  # fmt: skip
_ZEROED_BY_ITSELF = ("xor", "vxor", "pxor", "vpxor", "sub", "vpcmpeq", "kxnor", "kxor", "vpternlog")


@dataclass(frozen=True)
class LoopCycles:
    """What the loops of a function take together, and the code around them.

    Attributes
    ----------
    cycles
        Of innermost loops the longer of busiest unit and chain, of other blocks the busiest unit.
    chain
        Cycles of innermost loops' chains alone.
    entries
        How often a loop is entered, which costs a mispredicted branch when it is left.
    """

    cycles: float = 0.0
    chain: float = 0.0
    entries: float = 0.0

    def __add__(self, other: LoopCycles) -> LoopCycles:
        return LoopCycles(self.cycles + other.cycles, self.chain + other.chain, self.entries + other.entries)


def loop_cycles(
    graph: FlowGraph,
    trips: Sequence[float | None],
    times: NDArray[np.float64],
    units: NDArray[np.float64],
) -> LoopCycles:
    """Cycles that a function takes.

    Parameters
    ----------
    trips
        Trip count of each loop, as :func:`~cdmpp.profiler.loop_trips.times_run` finds them.
    times
        How often each instruction runs, (n,).
    units
        Cycles for which each instruction keeps each unit busy, (n, units).
    """
    outer = {loop.parent for loop in graph.loops}
    inner = [number for number in range(len(graph.loops)) if number not in outer]
    total = np.concatenate([np.zeros((1, units.shape[1])), np.cumsum(units * times[:, None], axis=0)])
    spent = {
        block: total[last + 1] - total[first]
        for block, (first, last) in enumerate(graph.blocks)
        if last >= first
    }
    cycles = sum(float(busy.max()) for block, busy in spent.items() if graph.loop_of[block] not in inner)
    chain = entries = 0.0
    for number, loop in enumerate(graph.loops):
        runs = float(times[graph.blocks[loop.header][0]])
        found = trips[number] or UNKNOWN_TRIPS
        entries += runs / found
        if number not in inner or not runs:
            continue
        blocks = sorted(loop.body)
        body = [graph.function[i] for b in blocks for i in range(graph.blocks[b][0], graph.blocks[b][1] + 1)]
        # rounds of short loops are over before the core has looked through its window: the next entry's overlap
        overlap = max(1.0, _WINDOW / (len(body) * found))
        waits = runs * cycles_of_round(body) / overlap
        chain += waits
        cycles += max(waits, float(sum(spent[block] for block in blocks).max()))
    return LoopCycles(cycles, chain, entries)


def cycles_of_round(body: Sequence[Instruction]) -> float:
    """Cycles between two rounds of a loop by its dependences, if there were units enough; its body in the order of the
    code."""
    steps = [step for _, operation, text in body if (step := _Step.of(operation, text)) is not None]
    if not steps:
        return len(body) / ISSUE
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, _FOLLOWED // len(body)))
    ready: dict[str, float] = {}
    stored: dict[str, float] = {}
    retired: list[float] = []
    ends: list[float] = []
    last = 0.0
    for _ in range(rounds):
        for step in steps:
            number = len(retired)
            begin = number / ISSUE
            if number >= _WINDOW:
                begin = max(begin, retired[number - _WINDOW])
            at = max([begin, *(ready.get(name, 0.0) for name in step.sources)])
            if step.loads is not None:
                loaded = max([begin, *(ready.get(name, 0.0) for name in step.address)]) + _LOAD
                at = max(at, loaded, stored.get(step.loads, 0.0))
            elif step.stores is None:
                at = max([at, *(ready.get(name, 0.0) for name in step.address)])
            at += step.latency
            if step.writes is not None:
                ready[step.writes] = at
                if step.writes in REGISTERS:  # addresses made of it are others from now on
                    for address in [address for address in stored if f"%{step.writes}" in address]:
                        del stored[address]
            if step.stores is not None:
                stored[step.stores] = at + _FORWARD
            last = max(last, at)
            retired.append(last)
        ends.append(last)
    return max((ends[-1] - ends[0]) / (rounds - 1), len(body) / ISSUE)


@dataclass(frozen=True)
class _Step:
    """What an instruction reads and writes: registers, and memory as it is written in the code."""

    sources: tuple[str, ...]
    address: tuple[str, ...]
    loads: str | None
    writes: str | None
    stores: str | None
    latency: float

    @classmethod
    def of(cls, operation: str, text: str) -> _Step | None:
        operands = split_operands(text)
        if operation.startswith(_NOTHING) or not operands[0]:
            return None
        compares = operation.startswith(_COMPARES)
        sources: list[str] = []
        address: list[str] = []
        loads = writes = stores = None
        for i, operand in enumerate(operands):
            names = _names(operand)
            is_target = i == len(operands) - 1 and not compares
            if "(" in operand:
                if operation.startswith("lea"):
                    sources += names
                    continue
                sources += [name for name in names if name[0] == "k"]
                address += [name for name in names if name[0] != "k"]
                place = _MASK.sub("", operand)
                if is_target:
                    stores = place
                if not is_target or not operation.startswith(_STORES):
                    loads = place
            elif not is_target:
                sources += names
            elif names:
                writes = names[0]
                sources += names[1:]
                if _reads_target(operation, operand, len(operands)):
                    sources.append(writes)
        if operation.startswith(_ZEROED_BY_ITSELF) and len(set(operands[:2])) == 1 and len(operands) > 1:
            sources = []
        return cls(tuple(sources), tuple(address), loads, writes, stores, _latency(operation, loads, stores))


def _names(operand: str) -> list[str]:
    """Registers of an operand, those that share bits by one name."""
    found = []
    for name in _REGISTER.findall(operand):
        if name in REGISTERS:
            found.append(REGISTERS[name][0])
        elif name[:3] in ("xmm", "ymm", "zmm"):
            found.append(f"v{name[3:]}")
        elif name[0] == "k" and name[1:].isdigit():
            found.append(name)
    return found


def _reads_target(operation: str, operand: str, operands: int) -> bool:
    """Whether the register that an instruction writes is one of its operands too."""
    if "{%k" in operand and "{z}" not in operand:
        return True
    if operation.startswith("v"):
        return operation.startswith(("vfma", "vfms", "vfnm", "vpdp", "vpternlog", "vpgather", "vgather"))
    if operation.startswith("cmov") or operands == 1:
        return not operation.startswith("set")
    return operands == 2 and not operation.startswith(_OVERWRITE)


def _latency(operation: str, loads: str | None, stores: str | None) -> float:
    if operation.startswith(("mov", "vmov")) and not operation.startswith(("movz", "movs")):
        return 1.0 if stores is not None else 0.0
    name = operation[1:] if operation.startswith("v") else operation
    if name.startswith(_FLOATING) and name.endswith(_PACKED_OR_SCALAR):
        return _FLOATING_LATENCY
    if operation.startswith("imul"):
        return _INTEGER_MULTIPLY
    if operation.startswith("idiv") or operation in ("div", "divl", "divq"):
        return _INTEGER_DIVIDE
    if operation.startswith("call"):
        return _CALL
    if operation.startswith(("cmp", "test")):
        return 1.0
    return next((cycles for names, cycles in _LATENCIES if name.startswith(names)), 1.0)
