"""How many cycles compiled loops take on a generic core: busy units, and instructions that wait for each other.

A loop takes as long as its busiest unit or as its chain of dependent instructions, whichever is longer (llvm-mca; OSACA:
Laukemann et al., PMBS'18): a sum in one register adds once in four cycles, however many units there are. The chain is found
by following when the result of each instruction is ready for some iterations, in a core that issues in order, looks a window of
instructions ahead, and forwards what was stored to the next load of the same address. Units and latencies are about those of
Skylake; cores differ from it by little, and :mod:`cdmpp.predictor.pair_features` knows them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.codegen import KINDS
from cdmpp.program.codegen.blocks import Address, Instruction
from cdmpp.program.codegen.trips import TripCounts

#: Instructions a core issues in a cycle, and looks ahead.
_ISSUE, _WINDOW = 4.0, 224
#: Cycles for which an instruction of a kind keeps a unit of a generic core busy: arithmetic, loads, stores, shuffles.
_UNITS: tuple[dict[str, float], ...] = (
    {f"{kind}_{width}": 0.5 for kind in ("fma", "fp") for width in "zyxs"},
    {f"load_{width}": 0.5 for width in "zyxs"},
    {f"store_{width}": 1.0 for width in "zyxs"},
    {"shuffle": 1.0},
    {"all": 1.0 / _ISSUE},
)
#: And those that keep all of it busy.
_BLOCKING = {"gather": 20.0, "div": 8.0, "idiv": 10.0, "call": 50.0}
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

FloatArray = NDArray[np.float64]

#: (kinds, units)
_BUSY: FloatArray = np.array(
    [[unit.get(kind, _BLOCKING.get(kind, 0.0)) for unit in _UNITS] for kind in KINDS]
)


def loop_cycles(trips: TripCounts, times: FloatArray, kinds: FloatArray) -> FloatArray:
    """What a function takes whose instructions run ``times`` (n,) and are of ``kinds`` (n, kinds).

    Gives three numbers: cycles, of innermost loops the longer of busiest unit and chain, of other blocks the busiest unit;
    cycles of innermost loops' chains alone; how often a loop is entered, which costs a mispredicted branch when it is left.
    """
    graph = trips.graph
    outer = {loop.parent for loop in graph.loops}
    inner = [number for number in range(len(graph.loops)) if number not in outer]
    units = kinds @ _BUSY
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
        entries += iterations / trips.guess(number)
        if number not in inner or not iterations:
            continue
        blocks = sorted(loop.body)
        body = [instruction for block in blocks for instruction in graph.code(block)]
        # short loops are over before the core has looked through its window: the next entry's iterations overlap
        overlap = max(1.0, _WINDOW / (len(body) * trips.guess(number)))
        waits = iterations * cycles_of_iteration(body) / overlap
        chain += waits
        cycles += max(waits, float(sum(spent[block] for block in blocks).max()))
    return np.array([cycles, chain, entries])


def cycles_of_iteration(body: Sequence[Instruction]) -> float:
    """Cycles between two iterations of a loop by its dependences, if there were units enough; its body in the order of the
    code."""
    steps = [i for i in body if i.flow in ("next", "call") and i.name not in _NOTHING]
    if not steps:
        return len(body) / _ISSUE
    iterations = max(_LEAST_ITERATIONS, min(_MOST_ITERATIONS, _FOLLOWED // len(body)))
    stores = {i.memory for i in steps if i.stores and i.memory is not None}
    # addresses made of a register that is written are others from then on
    moved = [[a for a in stores if a.base in i.writes or a.index_register in i.writes] for i in steps]
    plan = list(zip(steps, map(_sources, steps), map(_latency, steps), moved, strict=True))
    ready: dict[str | None, float] = defaultdict(float)
    stored: dict[Address | None, float] = {}
    retired: list[float] = []
    ends: list[float] = []
    last = 0.0
    for _ in range(iterations):
        for instruction, sources, latency, others in plan:
            number, memory = len(retired), instruction.memory
            begin = number / _ISSUE
            if number >= _WINDOW:
                begin = max(begin, retired[number - _WINDOW])
            at = begin
            for name in sources:
                at = max(at, ready[name])
            if instruction.loads and memory is not None:
                loaded = max(begin, ready[memory.base], ready[memory.index_register]) + _LOAD
                at = max(at, loaded, stored.get(memory, 0.0))
            at += latency
            ready.update(dict.fromkeys(instruction.writes, at))
            for address in others:
                stored.pop(address, None)
            if instruction.stores:
                stored[memory] = at + _FORWARD
            last = max(last, at)
            retired.append(last)
        ends.append(last)
    return max((ends[-1] - ends[0]) / (iterations - 1), len(body) / _ISSUE)


def _sources(instruction: Instruction) -> list[str]:
    """Registers that an instruction waits for, without those of an address that it loads from or stores to."""
    if instruction.name.startswith(_ONES) and len({*instruction.operands[-2:]}) == 1:
        return []
    memory = instruction.memory if instruction.loads or instruction.stores else None
    return [r for r in instruction.reads if memory is None or r not in (memory.base, memory.index_register)]


def _latency(instruction: Instruction) -> float:
    name = instruction.name
    if name.startswith(("mov", "vmov")) and not name.startswith(("movz", "movs")):
        return 1.0 if instruction.stores else 0.0
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
