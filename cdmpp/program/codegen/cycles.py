"""How many cycles compiled loops take on a generic core: busy units, and instructions that wait for each other.

A loop takes as long as its busiest unit or as its chain of dependent instructions, whichever is longer (llvm-mca; OSACA:
Laukemann et al., PMBS'18): a sum in one register adds once in four cycles, however many units there are. The chain is found
by following when the result of each instruction is ready for some iterations, in a core that issues in order, looks a window of
instructions ahead, and forwards what was stored to the next load of the same address. Units and latencies are about those of
Skylake; cores differ from it by little, and :mod:`cdmpp.predictor.instruction_time` knows them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.codegen.instruction import Address, Instruction, Register
from cdmpp.program.codegen.trips import Runs

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
#: Iterations of a loop that are followed: this many instructions, within these bounds.
_FOLLOWED, _LEAST_ITERATIONS, _MOST_ITERATIONS = 800, 3, 8
#: Of a register with itself these give ones, whatever it holds (that others give zeros the decoder knows).
_ONES = ("kxnor", "vpcmpeq", "pcmpeq")
_NOTHING = ("nop", "push", "pop", "vzeroupper", "endbr64")


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


def loop_cycles(runs: Runs, units: NDArray[np.float64]) -> LoopCycles:
    """Cycles that a function takes, whose instructions keep each unit busy for so many cycles, (n, units)."""
    graph, times = runs.graph, runs.times
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
        iterations = float(times[graph.blocks[loop.header][0]])
        trips = runs.trips.guess(number)
        entries += iterations / trips
        if number not in inner or not iterations:
            continue
        blocks = sorted(loop.body)
        body = [instruction for block in blocks for instruction in graph.code(block)]
        # short loops are over before the core has looked through its window: the next entry's iterations overlap
        overlap = max(1.0, _WINDOW / (len(body) * trips))
        waits = iterations * cycles_of_iteration(body) / overlap
        chain += waits
        cycles += max(waits, float(sum(spent[block] for block in blocks).max()))
    return LoopCycles(cycles, chain, entries)


def cycles_of_iteration(body: Sequence[Instruction]) -> float:
    """Cycles between two iterations of a loop by its dependences, if there were units enough; its body in the order of the
    code."""
    steps = [_Step.of(instruction) for instruction in body if _works(instruction)]
    if not steps:
        return len(body) / ISSUE
    iterations = max(_LEAST_ITERATIONS, min(_MOST_ITERATIONS, _FOLLOWED // len(body)))
    # addresses made of a register that is written are others from then on
    stores = {step.stores for step in steps if step.stores is not None}
    moved = [
        [address for address in stores if step.writes in (address.base, address.index_register)]
        for step in steps
    ]
    ready: dict[str | None, float] = defaultdict(float)
    stored: dict[Address, float] = {}
    retired: list[float] = []
    ends: list[float] = []
    last = 0.0
    for _ in range(iterations):
        for step, addresses in zip(steps, moved, strict=True):
            number = len(retired)
            begin = number / ISSUE
            if number >= _WINDOW:
                begin = max(begin, retired[number - _WINDOW])
            at = loaded = begin
            for name in step.sources:
                at = max(at, ready[name])
            if step.loads is not None:
                for name in step.address:
                    loaded = max(loaded, ready[name])
                at = max(at, loaded + _LOAD, stored.get(step.loads, 0.0))
            at += step.latency
            if step.writes is not None:
                ready[step.writes] = at
                for address in addresses:
                    stored.pop(address, None)
            if step.stores is not None:
                stored[step.stores] = at + _FORWARD
            last = max(last, at)
            retired.append(last)
        ends.append(last)
    return max((ends[-1] - ends[0]) / (iterations - 1), len(body) / ISSUE)


def _works(instruction: Instruction) -> bool:
    return bool(instruction.operands) and (
        instruction.flow in ("next", "call") and instruction.name not in _NOTHING
    )


@dataclass(frozen=True)
class _Step:
    """What an instruction waits for and gives: registers and addresses."""

    sources: tuple[str, ...]
    address: tuple[str, ...]
    loads: Address | None
    writes: str | None
    stores: Address | None
    latency: float

    @classmethod
    def of(cls, instruction: Instruction) -> _Step:
        sources: list[str] = [] if instruction.mask is None else [instruction.mask]
        address: list[str] = []
        loads = writes = stores = None
        for operand, read, written in zip(
            instruction.operands, instruction.read, instruction.written, strict=True
        ):
            if isinstance(operand, Address):
                names = [name for name in (operand.base, operand.index_register) if name is not None]
                if instruction.name == "lea":
                    sources += names
                    continue
                address += names
                loads = operand if read else loads
                stores = operand if written else stores
            elif isinstance(operand, Register):
                if read or instruction.name.startswith("cmov"):  # what is perhaps not written stays as it was
                    sources.append(operand.name)
                if written:
                    writes = operand.name
        if instruction.name.startswith(_ONES) and len({*instruction.operands[-2:]}) == 1:
            sources = []
        return cls(tuple(sources), tuple(address), loads, writes, stores, _latency(instruction, stores))


def _latency(instruction: Instruction, stores: Address | None) -> float:
    name = instruction.name
    if name.startswith(("mov", "vmov")) and not name.startswith(("movz", "movs")):
        return 1.0 if stores is not None else 0.0
    if name in ("imul", "idiv", "div"):
        return _INTEGER_MULTIPLY if name == "imul" else _INTEGER_DIVIDE
    if instruction.flow == "call":
        return _CALL
    if name in ("cmp", "test"):
        return 1.0
    name = name.removeprefix("v")
    if name.startswith(_FLOATING) and name.endswith(_PACKED_OR_SCALAR):
        return _FLOATING_LATENCY
    return next((cycles for names, cycles in _LATENCIES if name.startswith(names)), 1.0)
