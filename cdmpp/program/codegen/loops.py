"""How long compiled loops take on a core: its units, its front end, dependent instructions, and lines from caches.

A loop takes as long as its busiest set of units, as renaming its micro-ops, or as its chain of dependent instructions,
whichever is longest (llvm-mca; OSACA: Laukemann et al., PMBS'18; Facile: Abel et al., IISWC'23). The chain is found by following
when the result of each instruction is ready for some iterations, in a core with as many units as are asked for, but with the
reorder buffer and the schedulers of the real one, which forwards what was stored to the next load of the same address.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.codegen.blocks import Address, Instruction
from cdmpp.program.codegen.core import Core, is_idiom, kinds_of_operands
from cdmpp.program.codegen.strides import Strides, lines_fetched
from cdmpp.program.codegen.trips import TripCounts

#: Bytes of caches for which the lines that are fetched are counted, after the first level of the core itself.
CAPACITIES = tuple(float(kb << 10) for kb in (256, 1024, 4096, 16384))
#: Of a function or program, in cycles but for the last ones: the longest of units, front end and chain, summed over loops and
#: the code between them; each of these by itself; loops entered, lines fetched, and instructions run that the table lacks.
CYCLE_FEATURES: tuple[str, ...] = (
    "core_cycles", "unit_cycles", "front_cycles", "chain_cycles", "call_cycles", "outside_cycles", "loop_entries",
    "unknown_loops", "l1_lines", *(f"lines_{int(size) >> 10}k" for size in CAPACITIES), "unknown_addresses", "missing",
)  # fmt: skip
#: Of one innermost loop: how often it runs, iterations each time it is entered, and what an iteration takes and touches.
LOOP_FEATURES: tuple[str, ...] = (
    "runs", "trips", "instructions", "cycles", "units", "front", "chain", "loaded", "stored", "gathers", "calls", "arithmetic",
    "l1_lines", "lines_1024k", "unknown",
)  # fmt: skip
#: Innermost loops that are told of, those that take longest.
LOOPS = 6
#: Iterations that are followed: this many instructions, within these bounds.
_FOLLOWED, _LEAST, _MOST = 2000, 4, 16
#: Comparisons and additions that are one micro-op with the jump behind them.
_FUSED = ("cmp", "test", "add", "sub", "inc", "dec", "and")

FloatArray = NDArray[np.float64]


def function_cycles(trips: TripCounts, times: FloatArray, core: Core) -> tuple[FloatArray, list[FloatArray]]:
    """What a function takes whose instructions run ``times`` (n,): (len(CYCLE_FEATURES),), and its innermost loops, each
    (len(LOOP_FEATURES),)."""
    graph, strides = trips.graph, Strides(trips)
    outer = {loop.parent for loop in graph.loops}
    total = dict.fromkeys(CYCLE_FEATURES, 0.0)
    total["unknown_loops"] = float(trips.unknown)
    between: dict[int | None, list[tuple[Sequence[Instruction], float]]] = defaultdict(list)
    loops = []
    for block, (first, last) in enumerate(graph.blocks):
        number = graph.loop_of[block]
        if last >= first and times[first] and (number is None or number in outer):
            between[number].append((graph.code(block), float(times[first])))
    for code in between.values():
        units, front, call = _throughput(code, core)
        total["outside_cycles"] += max(units, front)
        total["call_cycles"] += call
    for number, loop in enumerate(graph.loops):
        runs = float(times[graph.blocks[loop.header][0]])
        total["loop_entries"] += runs / trips.guess(number)
        if number in outer or not runs:
            continue
        blocks = [b for b in sorted(loop.body) if graph.blocks[b][1] >= graph.blocks[b][0]]
        parts = [(graph.code(b), float(times[graph.blocks[b][0]]) / runs) for b in blocks]
        units, front, call = _throughput(parts, core)
        body = [instruction for b in blocks for instruction in graph.code(b)]
        # short loops are over before the core has looked through its window: the next entry's iterations overlap
        overlap = max(1.0, core.window / (len(body) * trips.guess(number)))
        chain = cycles_of_chain(body, core) / overlap
        nest = [max(1.0, trips.guess(n)) for n in strides.nest(number)]
        pieces = strides.pieces(number)
        fetched = [lines_fetched(pieces, nest, runs, size) for size in (core.l1_bytes, *CAPACITIES)]
        unknown = sum(None in piece.steps for piece in pieces) / max(1, len(pieces))
        cycles = max(units, front, chain)
        loops.append(
            np.array(
                [
                    runs,
                    nest[0],
                    len(body),
                    cycles,
                    units,
                    front,
                    chain,
                    *_work(parts),
                    fetched[0] / runs,
                    fetched[2] / runs,
                ]
                + [unknown]
            )
        )
        for name, value in (
            ("core", cycles),
            ("unit", units),
            ("front", front),
            ("chain", chain),
            ("call", call),
        ):
            total[f"{name}_cycles"] += value * runs
        for name, count in zip(CYCLE_FEATURES[8 : 9 + len(CAPACITIES)], fetched, strict=True):
            total[name] += count
        total["unknown_addresses"] += unknown * runs
    total["core_cycles"] += total["outside_cycles"]
    total["missing"] = float(sum(
        count for code, count in ((graph.code(b), float(times[f])) for b, (f, last) in enumerate(graph.blocks) if last >= f)
        for i in code if " ".join((i.name, *kinds_of_operands(i))) in core.missing
    ))  # fmt: skip
    return np.array([total[name] for name in CYCLE_FEATURES]), loops


def _work(parts: Sequence[tuple[Sequence[Instruction], float]]) -> list[float]:
    """Bytes loaded and stored, gathers, calls and elements of arithmetic of an iteration."""
    found = np.zeros(5)
    for code, times in parts:
        for i in code:
            size, name = i.memory_bits / 8, i.name.removeprefix("v")
            lanes = (
                1
                if name.endswith(("ss", "sd"))
                else max((o.bits for o in i.operands if hasattr(o, "bits")), default=0) / 32
            )
            arithmetic = name.startswith(("fm", "fnm", "add", "sub", "mul", "div", "max", "min")) and name[
                -2:
            ] in ("ps", "ss")
            found += times * np.array(
                [size * i.loads, size * i.stores, "gather" in name, i.flow == "call", lanes * arithmetic]
            )
    return found.tolist()


def _throughput(
    parts: Sequence[tuple[Sequence[Instruction], float]], core: Core
) -> tuple[float, float, float]:
    """Cycles of the busiest units, of renaming, and of calls alone, of code that runs so often."""
    uses: dict[tuple[str, ...], float] = defaultdict(float)
    micro_ops = calls = 0.0
    for code, times in parts:
        before = ""
        for instruction in code:
            cost = core.cost(instruction)
            if instruction.flow != "branch" or before not in _FUSED:
                micro_ops += times * cost.micro_ops
            for cycles, units in cost.uses:
                uses[units] += times * cycles
                calls += times * cycles * (instruction.flow == "call")
            before = instruction.name
    return core.busiest(uses), micro_ops / core.width, calls


def cycles_of_chain(body: Sequence[Instruction], core: Core) -> float:
    """Cycles between two iterations of a loop by its dependences, if there were units enough; its body in the order of the
    code."""
    iterations = max(_LEAST, min(_MOST, _FOLLOWED // len(body)))
    stores = {i.memory for i in body if i.stores and i.memory is not None}
    plan = []
    for i in body:
        kind = next((kind for kind in kinds_of_operands(i) if kind in "zyx"), "r")
        cost, memory = core.cost(i), i.memory if i.loads or i.stores else None
        loading = core.load(kind).latency if i.loads and memory is not None else 0.0
        latency = max(0.0, cost.latency - loading)
        if i.stores and i.name.startswith(("mov", "vmov")):
            latency = 0.0
        sources = [r for r in i.reads if memory is None or r not in (memory.base, memory.index_register)]
        # addresses made of a register that is written are others from then on
        moved = [a for a in stores if a.base in i.writes or a.index_register in i.writes]
        plan.append((i, [] if is_idiom(i) else sources, latency, loading, moved, cost.micro_ops, kind))
    ready: dict[str | None, float] = defaultdict(float)
    stored: dict[Address | None, float] = {}
    retired: list[float] = []
    ends: list[float] = []
    waiting: dict[bool, list[float]] = {False: [], True: []}
    renamed = last = 0.0
    for _ in range(iterations):
        for i, sources, latency, loading, moved, micro_ops, kind in plan:
            begin = renamed / core.width
            renamed += micro_ops
            if len(retired) >= core.window:
                begin = max(begin, retired[-core.window])
            vector = kind != "r" and core.queues[1] > 0
            if len(waiting[vector]) >= core.queues[vector]:
                begin = max(begin, heapq.heappop(waiting[vector]))
            at = begin
            for register in sources:
                at = max(at, ready[register])
            if loading:
                address = i.memory
                at = max(at, max(begin, ready[address.base], ready[address.index_register]) + loading)  # type: ignore[union-attr]
                if address in stored:
                    at = max(at, stored[address] + core.forward[kind])
            heapq.heappush(waiting[vector], at)
            at += latency
            for register in i.writes:
                ready[register] = at
            for address in moved:
                stored.pop(address, None)
            if i.stores:
                stored[i.memory] = at
            last = max(last, at)
            retired.append(last)
        ends.append(last)
    return (ends[-1] - ends[0]) / (iterations - 1)
