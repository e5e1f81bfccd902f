"""How often the instructions of compiled code run, read off the code without running it.

The shapes of a tensor program are constants, and so are the trip counts of most of its loops: a compiler leaves them in
the comparisons that end the loops. Read are

* a counter that changes by a constant and is compared with one (``cmp $0x40,%rcx``), in a register or on the stack;
* a counter that its change takes to zero (``add $-8,%rcx; jne``);
* a flag that is cleared in the first round (``test $0x1,%al``): two rounds;
* the share of a parallel loop that a thread gets: its extent is the bound that a conditional move keeps it below. All of it
  is counted, as one thread would run it.

x86 only, in GNU objdump's AT&T syntax, as :mod:`cdmpp.profiler.codegen`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.profiler.control_flow import FlowGraph, Instruction, Loop

#: A loop whose trip count the code does not tell is taken to run so many times.
UNKNOWN_TRIPS = 4.0
#: Nothing runs more often in seconds; what was read as more is misread.
_MOST_RUNS = 1e12
#: Trip counts above this are misreadings.
_MOST_TRIPS = 1e7

_IMMEDIATE = re.compile(r"^\$(-?0x[0-9a-f]+)$")
_OFFSET_OF = re.compile(r"^(-?0x[0-9a-f]+)\(%(\w+)\)$")
#: Changes by one, and their sign; with an immediate operand the others change by it.
_BY_ONE = {"inc": 1, "dec": -1}
_BY_CONSTANT = {"add": 1, "sub": -1}
#: Instructions between a comparison and its jump that do not change the flags.
_KEEP_FLAGS = ("mov", "v", "lea", "nop", "cmov", "set")
#: Operations whose last operand they do not change, or that have no counters for one.
_KEEP_PLACES = ("cmp", "test", "j", "v", "push", "call", "nop", "bt")
#: What jumps test, and its opposite.
_OPPOSITE = {
    "e": "ne", "ne": "e", "b": "ae", "ae": "b", "l": "ge", "ge": "l", "a": "be", "be": "a", "g": "le", "le": "g",
    "s": "ns", "ns": "s",
}  # fmt: skip
_STRICT, _INCLUSIVE = ("b", "l", "a", "g"), ("be", "le", "ae", "ge")
#: How far before a loop the extent of a parallel loop is looked for, in instructions.
_LOOK_BACK = 120


def times_run(function: list[Instruction]) -> tuple[NDArray[np.float64], int]:
    """How often each instruction runs when a function is called, float64 (n,), and the number of loops whose trip count is
    not known.

    Of two ways inside a loop each is taken half the time, unless one skips a loop: then that loop runs. Outside of loops
    every way is taken, but for those that nothing leads to.
    """
    if not function:
        return np.zeros(0), 0
    graph = FlowGraph.of(function)
    trips, left_by = [], []
    for number in range(len(graph.loops)):
        found, exit_block = trip_count(graph, number)
        trips.append(found)
        left_by.append(exit_block)
    times = np.zeros(len(function))
    for block, runs in _block_runs(graph, trips, left_by).items():
        first, last = graph.blocks[block]
        times[first : last + 1] = runs
    return np.minimum(times, _MOST_RUNS), sum(found is None for found in trips)


def trip_count(graph: FlowGraph, number: int) -> tuple[float | None, int | None]:
    """How often a loop runs each time it is entered, at least 1, and the block that tells; None where the code does not.

    ``number`` is the loop's place in ``graph.loops``.
    """
    loop = graph.loops[number]
    exits = [
        block
        for block in sorted(loop.body, key=lambda b: (b not in loop.latches, b))
        if graph.loop_of[block] == number
        and len(graph.successors[block]) > 1
        and any(after not in loop.body for after in graph.successors[block])
    ]
    for block in exits:
        trips = _counted(graph, loop, number, block)
        if trips is not None and 0.5 < trips < _MOST_TRIPS:
            return float(max(1, round(trips))), block
    extent = _parallel_extent(graph, loop) if loop.parent is None else None
    return extent, None


@dataclass(frozen=True)
class _Test:
    """The instruction that sets the flags of a block's jump, and the condition under which the loop goes on."""

    at: int
    operation: str
    operands: list[str]
    goes_on: str


def _test_of(graph: FlowGraph, loop: Loop, block: int) -> _Test | None:
    function = graph.function
    first, last = graph.blocks[block]
    condition = function[last][1][1:]
    if condition not in _OPPOSITE:
        return None
    if graph.successors[block][0] not in loop.body:
        condition = _OPPOSITE[condition]
    at = last - 1
    while at >= first and function[at][1].startswith(_KEEP_FLAGS):
        at -= 1
    if at < first:
        return None
    return _Test(at, function[at][1], split_operands(function[at][2]), condition)


def _counted(graph: FlowGraph, loop: Loop, number: int, block: int) -> float | None:
    """Trips of a loop that ends by the jump of a block."""
    test = _test_of(graph, loop, block)
    if test is None:
        return None
    if test.operation.startswith("test") and test.operands[0] == "$0x1" and test.goes_on == "ne":
        return 2.0
    place = _place(test.operands[-1])
    if place is None:
        return None
    if test.operation.startswith("cmp") and len(test.operands) == 2:
        bound = _constant(graph, loop, number, test.operands[0])
    elif test.operation.startswith((*_BY_CONSTANT, *_BY_ONE)) or test.operands == test.operands[:1] * 2:
        bound = 0  # `test %rax,%rax` asks for it too
    else:
        return None
    change = _change_of(graph, loop, number, test.at, block, place)
    if bound is None or change is None:
        return None
    step, at, origin = change
    start = _start(graph, loop, origin)
    if start is None:
        if not test.operation.startswith("cmp"):
            return None
        start = 0  # as TVM's loops start
    rounds = (bound - start) / step
    if test.goes_on in _STRICT:
        rounds = math.ceil(rounds)
    elif test.goes_on in _INCLUSIVE or test.goes_on in ("s", "ns"):
        rounds = math.floor(rounds) + 1
    elif test.goes_on == "e":
        return None
    changed_before = (
        at <= test.at
        if graph.blocks[block][0] <= at <= graph.blocks[block][1]
        else _is_above(graph, at, block)
    )
    return rounds if changed_before else rounds + 1


def _constant(graph: FlowGraph, loop: Loop, number: int, operand: str) -> int | None:
    """An immediate, or the constant in a place that a loop leaves alone."""
    place = _place(operand)
    if place is None or _writers(graph, number, place):
        return _immediate(operand)
    return _start(graph, loop, place)


def _is_above(graph: FlowGraph, at: int, block: int) -> bool:
    """Whether an instruction runs before a block in every round."""
    home = next(b for b, (first, last) in enumerate(graph.blocks) if first <= at <= last)
    return graph.dominates(home, block)


def _change_of(
    graph: FlowGraph, loop: Loop, number: int, test: int, block: int, place: str
) -> tuple[int, int, str] | None:
    """The constant by which a place changes in every round of a loop, the instruction that changes it, and the place whose
    start counts; None if it changes otherwise."""
    near = _written_before(graph, loop, number, block, test, place)
    others = _writers(graph, number, place)
    for at in [near] if near is not None else others if len(others) == 1 else []:
        _, operation, text = graph.function[at]
        operands = split_operands(text)
        step = _step(operation, operands, place)
        if step:
            return step, at, place
        # the next value is made in a place of its own: lea 0x1(%rcx),%rdx ... mov %rdx,%rcx
        if operation.startswith("mov") and len(operands) == 2 and (source := _place(operands[0])):
            for made in _writers(graph, number, source):
                _, adds, text = graph.function[made]
                if step := _added(adds, split_operands(text), place):
                    return step, at, place
        elif (
            operation == "lea"
            and (offset := _OFFSET_OF.match(operands[0]))
            and (origin := _FULL.get(offset[2]))
        ):
            for copied in _writers(graph, number, origin):
                _, back, text = graph.function[copied]
                if back.startswith("mov") and _place(split_operands(text)[0]) == place:
                    return int(offset[1], 16), at, origin
    return None


def _written_before(
    graph: FlowGraph, loop: Loop, number: int, block: int, test: int, place: str
) -> int | None:
    """The last instruction that changes a place on every way through a loop to a test in one of its blocks."""
    last = test
    while True:
        if graph.loop_of[block] == number:
            for i in range(last, graph.blocks[block][0] - 1, -1):
                if _writes(graph.function[i], place):
                    return i
        if block == loop.header:
            return None
        block = graph.dominator[block]
        last = graph.blocks[block][1]


def _writers(graph: FlowGraph, number: int, place: str) -> list[int]:
    """Instructions of a loop that change a place."""
    spans = [graph.blocks[block] for block in graph.loops[number].body]
    return [i for first, last in spans for i in range(first, last + 1) if _writes(graph.function[i], place)]


def _writes(instruction: Instruction, place: str) -> bool:
    _, operation, text = instruction
    return not operation.startswith(_KEEP_PLACES) and _place(split_operands(text)[-1]) == place


def _step(operation: str, operands: list[str], place: str) -> int | None:
    """The constant by which an instruction changes a place that it writes."""
    for name, sign in _BY_ONE.items():
        if operation.startswith(name):
            return sign
    for name, sign in _BY_CONSTANT.items():
        if operation.startswith(name) and (by := _immediate(operands[0])) is not None:
            return sign * by
    return _added(operation, operands, place)


def _added(operation: str, operands: list[str], place: str) -> int | None:
    """The constant that ``lea`` adds to a place."""
    offset = _OFFSET_OF.match(operands[0]) if operation == "lea" else None
    return int(offset[1], 16) if offset is not None and _FULL.get(offset[2]) == place else None


def _start(graph: FlowGraph, loop: Loop, place: str) -> int | None:
    """The constant that a place holds when a loop is entered."""
    before = [block for block in graph.predecessors[loop.header] if block not in loop.body]
    if not before:
        return None
    block = before[0] if len(before) == 1 else graph.dominator[loop.header]
    while True:
        first, last = graph.blocks[block]
        for i in range(last, first - 1, -1):
            _, operation, text = graph.function[i]
            operands = split_operands(text)
            if not _writes(graph.function[i], place):
                continue
            if operation.startswith("xor") and len(operands) == 2 and operands[0] == operands[1]:
                return 0
            return _immediate(operands[0]) if operation.startswith("mov") and len(operands) == 2 else None
        above = graph.dominator[block]
        if above == block:
            return None
        block = above


def _parallel_extent(graph: FlowGraph, loop: Loop) -> float | None:
    """The bound below which a conditional move before a loop keeps the end of a thread's share."""
    begin = graph.blocks[loop.header][0]
    for i in range(begin - 1, max(-1, begin - _LOOK_BACK), -1):
        if graph.function[i][1].startswith(("cmovl", "cmovg")):
            for _, operation, text in reversed(graph.function[max(0, i - 5) : i]):
                bound = _immediate(split_operands(text)[0]) if operation == "cmp" else None
                if bound is not None and bound > 0:
                    return float(bound)
    return None


def _block_runs(graph: FlowGraph, trips: list[float | None], left_by: list[int | None]) -> dict[int, float]:
    """How often each block that can be reached runs."""
    headers = {loop.header: number for number, loop in enumerate(graph.loops)}
    runs: dict[int, float] = {}
    coming: dict[int, float] = {graph.order[0]: 1.0}
    for block in graph.order:
        number = graph.loop_of[block]
        entered = coming.get(block, 0.0)
        if block in headers:
            number = headers[block]
            found = trips[number]
            outer = 1.0 if graph.loops[number].parent is None else entered
            runs[block] = outer * (UNKNOWN_TRIPS if found is None else found)
        elif number is None:
            runs[block] = 1.0
        else:
            runs[block] = min(entered, runs[graph.dominator[block]])
        for after in graph.successors[block]:
            if after in runs:  # back to a header
                continue
            coming[after] = coming.get(after, 0.0) + _flow(graph, trips, left_by, block, after) * runs[block]
    return runs


def _flow(
    graph: FlowGraph, trips: list[float | None], left_by: list[int | None], block: int, after: int
) -> float:
    """Part of the runs of a block after which another follows."""
    number = graph.loop_of[block]
    if number is None:
        return 1.0
    loop = graph.loops[number]
    if after not in loop.body:
        # all rounds end by one way, which is found or taken to be any of them
        if left_by[number] not in (None, block):
            return 0.0
        share = 1.0
        while number is not None and after not in graph.loops[number].body:
            share /= trips[number] or UNKNOWN_TRIPS
            number = graph.loops[number].parent
        return share
    others = [b for b in graph.successors[block] if b != after and b in loop.body]
    if not others:
        return 1.0 - 1.0 / (trips[number] or UNKNOWN_TRIPS) if left_by[number] == block else 1.0
    holds_loop = [_leads_to_loop(graph, b, number) for b in (after, others[0])]
    if holds_loop == [True, False]:
        return 1.0
    return 0.0 if holds_loop == [False, True] else 0.5


def _leads_to_loop(graph: FlowGraph, block: int, number: int) -> bool:
    """Whether nothing but a loop inside another one comes next."""
    for _ in range(3):
        if graph.loop_of[block] != number:
            return True
        if len(graph.successors[block]) != 1:
            return False
        block = graph.successors[block][0]
    return False


def split_operands(operands: str) -> list[str]:
    """The operands of an instruction, without comments and symbols."""
    parts, depth, current = [], 0, ""
    for letter in operands.split("#")[0].split("<")[0].strip():
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()]


def _registers() -> dict[str, str]:
    """The 64-bit register of every name of an integer register."""
    full = {}
    for base in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp"):
        full.update(dict.fromkeys((f"r{base}", f"e{base}", base), f"r{base}"))
    full.update({f"{letter}l": f"r{letter}x" for letter in "abcd"})
    full.update({f"{base}l": f"r{base}" for base in ("si", "di", "bp")})
    for number in range(8, 16):
        full.update({f"r{number}{suffix}": f"r{number}" for suffix in ("", "d", "w", "b")})
    return full


_FULL = _registers()


def _place(operand: str) -> str | None:
    """What holds a counter, by one name: a 64-bit register or a slot of the stack."""
    if operand.startswith("%"):
        return _FULL.get(operand[1:])
    return operand if "(%rsp)" in operand or "(%rbp)" in operand else None


def _immediate(operand: str) -> int | None:
    found = _IMMEDIATE.match(operand)
    if found is None:
        return None
    value = int(found[1], 16)
    if value >= 1 << 63:
        return value - (1 << 64)
    return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value
