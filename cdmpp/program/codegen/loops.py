"""Estimates the cycles that compiled loops take on a core: units, front end, dependent instructions, and lines from caches.

The time of a loop is the longest of four: its busiest set of units, the renaming of its micro-ops, its chain of dependent
instructions, and the lines that come from the second cache level (llvm-mca; OSACA: Laukemann et al., PMBS'18; Facile: Abel et
al., IISWC'23). The chain is found by following when the result of each instruction is ready, for some iterations. The core
assumed for this has unlimited units, but the reorder buffer and the schedulers of the real one, and forwards what was stored to
the next load of the same address.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.codegen import CACHE_KB, CYCLE_FEATURES, LOOP_FEATURES
from cdmpp.program.codegen.blocks import Address, Instruction
from cdmpp.program.codegen.core import Core, is_idiom, kinds_of_operands
from cdmpp.program.codegen.strides import Strides, lines_fetched
from cdmpp.program.codegen.trips import TripCounts

#: Iterations followed to find a chain: as many as have 2000 instructions, but at least 4 and at most 16.
_FOLLOWED, _LEAST, _MOST = 2000, 4, 16
#: Comparisons and arithmetic that fuse into one micro-op with a jump directly after them.
_FUSED = ("cmp", "test", "add", "sub", "inc", "dec", "and")
_ARITHMETIC = ("fm", "fnm", "add", "sub", "mul", "div", "max", "min")

FloatArray = NDArray[np.float64]
#: Instructions that run one after the other, and how often they run.
_Code = tuple[Sequence[Instruction], float]


def function_cycles(trips: TripCounts, times: FloatArray, core: Core) -> tuple[FloatArray, list[FloatArray]]:
    """Cycles of a function whose instructions run ``times`` (n,).

    Returns float64 (len(CYCLE_FEATURES),), and one float64 (len(LOOP_FEATURES),) for each innermost loop that runs."""
    graph, strides = trips.graph, Strides(trips)
    outer = {loop.parent for loop in graph.loops}
    code = {
        block: (graph.code(block), float(times[first]))
        for block, (first, last) in enumerate(graph.blocks)
        if last >= first and times[first]
    }
    total = dict.fromkeys(CYCLE_FEATURES, 0.0)
    between: dict[int | None, list[_Code]] = defaultdict(list)
    for block, part in code.items():
        total["missing"] += sum(part[1] for instruction in part[0] if core.is_missing(instruction))
        if graph.loop_of[block] is None or graph.loop_of[block] in outer:
            between[graph.loop_of[block]].append(part)
    for parts in between.values():
        units, front, calls = throughput(parts, core)
        total["outside_cycles"] += max(units, front)
        total["call_cycles"] += calls
    loops = []
    for number, loop in enumerate(graph.loops):
        runs = float(times[graph.blocks[loop.header][0]])
        total["loop_entries"] += runs / trips.guess(number)
        if number in outer or not runs:
            continue
        body = [instruction for block in sorted(loop.body) for instruction in graph.code(block)]
        parts = [(code[b][0], code[b][1] / runs) for b in sorted(loop.body) if b in code]
        units, front, calls = throughput(parts, core)
        # short loops end before they fill the core's window: the next entry's iterations overlap with theirs
        chain = cycles_of_chain(body, core) / max(1.0, core.window / (len(body) * trips.guess(number)))
        nest = [trips.guess(around) for around in graph.nest(number)]
        pieces = strides.pieces(number)
        lines = {kb: lines_fetched(pieces, nest, runs, 1024.0 * kb) / runs for kb in (core.l1_kb, *CACHE_KB)}
        fetching, unknown = core.line * lines[core.l1_kb], sum(None in piece.steps for piece in pieces)
        found = {
            "runs": runs, "trips": nest[0], "instructions": len(body),
            "cycles": max(units, front, chain, fetching), "units": units, "front": front, "chain": chain,
            **_work(parts), "l1_lines": lines[core.l1_kb], "lines_1024k": lines[1024],
            "unknown": unknown / max(1, len(pieces)),
        }  # fmt: skip
        loops.append(np.array([found[name] for name in LOOP_FEATURES]))
        each = {
            "core_cycles": found["cycles"], "unit_cycles": units, "front_cycles": front, "chain_cycles": chain,
            "line_cycles": fetching, "call_cycles": calls, "l1_lines": lines[core.l1_kb],
            "unknown_addresses": found["unknown"], **{f"lines_{kb}k": lines[kb] for kb in CACHE_KB},
        }  # fmt: skip
        for name, value in each.items():
            total[name] += value * runs
    total["core_cycles"] += total["outside_cycles"]
    return np.array([total[name] for name in CYCLE_FEATURES]), loops


def _work(parts: Sequence[_Code]) -> dict[str, float]:
    """Bytes loaded and stored, gathers, calls and arithmetic operations on elements, of one iteration."""
    found: dict[str, float] = defaultdict(float)
    for code, times in parts:
        for i in code:
            name, size = i.name.removeprefix("v"), times * i.memory_bits / 8
            found["loaded"] += size * i.loads
            found["stored"] += size * i.stores
            found["gathers"] += times * ("gather" in name)
            found["calls"] += times * (i.flow == "call")
            if name.startswith(_ARITHMETIC) and name.endswith(("ps", "ss")):
                lanes = 1 if name.endswith("ss") else {"z": 16, "y": 8}.get(kinds_of_operands(i)[0], 4)
                found["arithmetic"] += times * lanes
    return {name: found[name] for name in ("loaded", "stored", "gathers", "calls", "arithmetic")}


def throughput(parts: Sequence[_Code], core: Core) -> tuple[float, float, float]:
    """Cycles of the busiest units, of renaming, and of calls alone, for code and how often it runs."""
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
    """Cycles from one iteration of a loop (``body``) to the next by its dependences alone, with unlimited units."""
    iterations = max(_LEAST, min(_MOST, _FOLLOWED // len(body)))
    stores = {i.memory for i in body if i.stores and i.memory is not None}
    plan = []
    for i in body:
        kind = next((kind for kind in kinds_of_operands(i) if kind in "zyx"), "r")
        loading, latency = core.latencies(i)
        memory = i.memory if i.loads or i.stores else None
        sources = [r for r in i.reads if memory is None or r not in (memory.base, memory.index_register)]
        # an address that uses a register written here means another place from now on
        moved = [a for a in stores if a.base in i.writes or a.index_register in i.writes]
        plan.append((i, [] if is_idiom(i) else sources, latency, loading, moved, core.cost(i).micro_ops, kind))
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
            if loading and i.memory is not None:
                at = max(at, max(begin, ready[i.memory.base], ready[i.memory.index_register]) + loading)
                if i.memory in stored:
                    at = max(at, stored[i.memory] + core.forward[kind])
            heapq.heappush(waiting[vector], at)
            at += latency
            for name in i.writes:
                ready[name] = at
            for address in moved:
                stored.pop(address, None)
            if i.stores:
                stored[i.memory] = at
            last = max(last, at)
            retired.append(last)
        ends.append(last)
    return (ends[-1] - ends[0]) / (iterations - 1)
