"""How often the instructions of compiled code run, read off the code without running it.

The shapes of a tensor program are constants, and so are the trip counts of most of its loops: what a loop's condition compares
changes by a constant in every round, from a value that is known where the loop is entered
(:mod:`cdmpp.profiler.code_values`). All of a parallel loop is counted, as one thread would run it.

x86 only, in GNU objdump's AT&T syntax, as :mod:`cdmpp.profiler.codegen`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cdmpp.profiler.code_values import OPPOSITE, CodeValues, Flags, Value, compares, held
from cdmpp.profiler.control_flow import FlowGraph, Instruction

#: A loop whose trip count the code does not tell is taken to run so many times.
UNKNOWN_TRIPS = 4.0
#: Nothing runs more often in seconds; what was read as more is misread.
_MOST_RUNS = 1e12
#: Trip counts above this are misreadings.
_MOST_TRIPS = 1e7
#: Rounds of a loop up to which each is asked whether it takes a branch.
_MOST_LOOKED_AT = 4096


@dataclass(frozen=True)
class Runs:
    """How often a function's code runs when it is called.

    Attributes
    ----------
    graph
        Its blocks and loops.
    trips
        Trip count of each loop; None where it is not known.
    times
        How often each instruction runs, float64 (n,).
    """

    graph: FlowGraph
    trips: list[float | None]
    times: NDArray[np.float64]

    @property
    def unknown(self) -> int:
        """Loops whose trip count is not known."""
        return sum(found is None for found in self.trips)


def times_run(function: list[Instruction]) -> Runs:
    """How often each of a function's instructions, of which there is at least one, runs.

    Of two ways inside a loop each is taken half the time, unless a counter's comparison with a constant decides, or one skips a
    loop: then that loop runs.
    Outside of loops every way is taken, but for those that are known not to be and those that nothing leads to.
    """
    graph = FlowGraph.of(function)
    values = CodeValues(graph)
    counter = _Counter(values)
    counted = [counter.count(number) for number in range(len(graph.loops))]
    trips = [None if rounds is None else float(rounds) for rounds, _ in counted]
    times = np.zeros(len(function))
    for block, runs in _block_runs(counter, trips, [exit_block for _, exit_block in counted]).items():
        first, last = graph.blocks[block]
        times[first : last + 1] = runs
    return Runs(graph, trips, np.minimum(times, _MOST_RUNS))


@dataclass
class _Counter:
    """Counts the rounds of loops; those of one may depend on those of another that runs before."""

    values: CodeValues
    found: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    parts: dict[int, float | None] = field(default_factory=dict)

    def count(self, number: int) -> tuple[int | None, int | None]:
        """How often a loop runs each time it is entered, 0 if it never is, and the block that tells; None where the code does
        not."""
        if number not in self.found:
            self.found[number] = None, None  # for a loop that would need to know it
            self.found[number] = self._count(number)
        return self.found[number]

    def _count(self, number: int) -> tuple[int | None, int | None]:
        graph = self.values.graph
        loop = graph.loops[number]
        if self.values.before_loop[number] is None:
            return 0, None
        exits = [
            block
            for block in sorted(loop.body, key=lambda b: (b not in loop.latches, b))
            if graph.loop_of[block] == number
            and block in self.values.taken
            and len(graph.successors[block]) > 1
            and any(after not in loop.body for after in graph.successors[block])
        ]
        for block in exits:
            rounds = self._until(number, block)
            if rounds is not None and rounds < _MOST_TRIPS:
                return rounds, block
        return None, None

    def _until(self, number: int, block: int) -> int | None:
        """Rounds of a loop until the jump of a block leaves it."""
        graph, flags = self.values.graph, self.values.flags[block]
        condition = graph.function[graph.blocks[block][1]][1][1:]
        if flags is None or condition not in OPPOSITE:
            return None
        if graph.successors[block][0] not in graph.loops[number].body:
            condition = OPPOSITE[condition]
        if flags.kind == "test":
            return self._of_flag(number, flags, condition)
        if flags.kind == "zero" and condition not in ("e", "ne", "s", "ns"):
            return None
        left, right = (self._course(number, value) for value in (flags.left, flags.right))
        if left is None or right is None:
            return None
        (start, step), (end, recedes) = left, right
        if start[0] != end[0]:
            # a counter whose start is not known and that is compared with a constant starts at 0, as TVM's loops do
            if flags.kind != "cmp" or None not in (start[0], end[0]) or not step - recedes:
                return None
            start, end = (
                value if value[0] is None else (None, at[1])
                for value, at in ((start, flags.left), (end, flags.right))
            )
        return _rounds(start[1] - end[1], step - recedes, condition)

    def part_taken(self, block: int) -> float | None:
        """Part of the times that the jump at the end of a block is taken, where the counter of a loop around it decides; None
        where that is not known."""
        if block not in self.parts:  # asked for both ways that the jump leads
            self.parts[block] = self._part_taken(block)
        return self.parts[block]

    def _part_taken(self, block: int) -> float | None:
        graph, flags = self.values.graph, self.values.flags[block]
        condition = graph.function[graph.blocks[block][1]][1][1:]
        number = graph.loop_of[block]
        if flags is None or condition not in OPPOSITE:
            return None
        while number is not None:
            rounds = self.count(number)[0]
            courses = [self._course(number, value) for value in (flags.left, flags.right)]
            if rounds and rounds <= _MOST_LOOKED_AT and None not in courses:
                (left, by), (right, also_by) = [course for course in courses if course is not None]
                if left[0] is None and right[0] is None and by != also_by:
                    pairs = ((left[1] + by * r, right[1] + also_by * r) for r in range(rounds))
                    taken = [Flags(flags.kind, (None, a), (None, b)).hold(condition) for a, b in pairs]
                    return sum(map(bool, taken)) / rounds
            number = graph.loops[number].parent
        return None

    def _course(self, number: int, value: Value) -> tuple[Value, int] | None:
        """What a value is in the first round of a loop, and how much more in each that follows; None where it changes
        otherwise."""
        header = self.values.graph.loops[number].header
        match value[0]:
            case ("round", block, str(place)) if block == header:
                step, (symbol, offset) = self.values.step(number, place), self._entering(number, place)
                return None if step is None else (self._ended((symbol, offset + value[1]), number), step)
        return (self._ended(value, number), 0) if self.values.is_fixed(value, number) else None

    def _entering(self, number: int, place: str) -> Value:
        return held(self.values.before_loop[number] or {}, place)

    def _ended(self, value: Value, number: int) -> Value:
        """A value with what the counters of other loops were in their last rounds, where these are over before this loop."""
        graph, seen = self.values.graph, set[int]()
        at = {loop.header: other for other, loop in enumerate(graph.loops)}
        while True:
            match value[0]:
                case ("round", int(block), str(place)) if block in at and at[block] not in seen:
                    other = at[block]
                case _:
                    return value
            seen.add(other)
            if graph.loops[number].header in graph.loops[other].body:
                return value
            rounds, step = self.count(other)[0], self.values.step(other, place)
            if not rounds or step is None:
                return value
            symbol, offset = self._entering(other, place)
            value = symbol, offset + step * (rounds - 1) + value[1]

    def _of_flag(self, number: int, flags: Flags, goes_on: str) -> int | None:
        """Rounds of a loop that tests bits of what is a constant where it is entered and another after the first round."""
        loop = self.values.graph.loops[number]
        mask = flags.right if flags.right[0] is None else flags.left
        tested = flags.left if mask is flags.right else flags.right
        match tested[0]:
            case ("round", block, str(place)) if block == loop.header and mask[0] is None:
                after = self.values.after
                ends = {after[latch].get(place) for latch in loop.latches if latch in after}
                later, first = ends.pop() if len(ends) == 1 else None, self._entering(number, place)
                if later is None or first[0] is not None or later[0] is not None:
                    return None
                goes = [compares((value[1] + tested[1]) & mask[1], goes_on) for value in (first, later)]
                return 1 if not goes[0] else None if goes[1] else 2
        return None


def _rounds(difference: int, step: int, goes_on: str) -> int | None:
    """Rounds of a loop that goes on while ``difference + step * round`` is on that side of 0; None if that is for ever."""
    if not compares(difference, goes_on):
        return 1
    if goes_on == "ne":
        return None if not step or difference % step or difference * step > 0 else 1 - difference // step
    if goes_on == "e":
        return 2 if step else None
    away = difference > 0 if difference else step > 0  # on which side of 0 it begins
    if not step or (away == (step > 0) and difference):
        return None
    last = math.ceil(abs(difference) / abs(step))
    return last + 1 + compares(difference + last * step, goes_on)


def _block_runs(counter: _Counter, trips: list[float | None], left_by: list[int | None]) -> dict[int, float]:
    """How often each block that can be reached runs."""
    values = counter.values
    graph = values.graph
    headers = {loop.header: number for number, loop in enumerate(graph.loops)}
    runs: dict[int, float] = {}
    coming: dict[int, float] = {graph.order[0]: 1.0}
    for block in graph.order:
        if block not in values.taken:
            continue
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
        for after in values.taken[block]:
            if after in runs:  # back to a header
                continue
            coming[after] = (
                coming.get(after, 0.0) + _flow(counter, trips, left_by, block, after) * runs[block]
            )
    return runs


def _flow(
    counter: _Counter, trips: list[float | None], left_by: list[int | None], block: int, after: int
) -> float:
    """Part of the runs of a block after which another follows."""
    values = counter.values
    graph = values.graph
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
    others = [b for b in values.taken[block] if b != after and b in loop.body]
    if not others:
        return 1.0 - 1.0 / (trips[number] or UNKNOWN_TRIPS) if left_by[number] == block else 1.0
    part = counter.part_taken(block)
    if part is not None:
        return part if after == graph.successors[block][0] else 1.0 - part
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
