"""How often the instructions of compiled code run, found from the code without running it.

The shapes of a tensor program are constants, and so are the trip counts of most of its loops. The operands that a loop's
condition compares change by a constant in every iteration, from a value that is known where the loop is entered
(:mod:`cdmpp.program.codegen.values`). All iterations of a parallel loop are counted, as if one thread ran them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.codegen.blocks import FlowGraph, Location
from cdmpp.program.codegen.values import OPPOSITE, CodeValues, Flags, Value, meets, value_at

#: Trip count assumed for a loop whose trip count is unknown.
UNKNOWN_TRIPS = 4.0
#: Upper limit of the runs of an instruction: nothing runs more often within seconds, so a higher number is a misreading.
_MOST_RUNS = 1e12
#: Trip counts above this are misreadings.
_MOST_TRIPS = 1e7
#: Largest trip count for which each iteration is checked for whether it takes a branch.
_MOST_LOOKED_AT = 4096


@dataclass
class TripCounts:
    """Trip counts of the loops of a function; a loop's may depend on that of a loop that runs before it."""

    values: CodeValues
    _found: dict[int, tuple[int | None, frozenset[int]]] = field(default_factory=dict)
    _parts: dict[int, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(len(self.values.graph.loops)):
            self._trips_and_exits(number)

    @property
    def graph(self) -> FlowGraph:
        """The control flow of the function."""
        return self.values.graph

    def of(self, number: int) -> int | None:
        """Iterations of a loop each time it is entered, 0 if it never is entered; None if they are not known."""
        return self._trips_and_exits(number)[0]

    def guess(self, number: int) -> float:
        """Like :meth:`of`, but always above 0: a guess where the trip count is 0 or not known."""
        return self.of(number) or UNKNOWN_TRIPS

    @property
    def unknown(self) -> int:
        """Number of loops whose trip count is not known."""
        return sum(trips is None for trips, _ in self._found.values())

    def step(self, number: int, location: Location) -> int | None:
        """By how much a location changes in an iteration of a loop, with the loops inside it; None if unknown or varying."""
        loop, after = self.graph.loops[number], self.values.after
        start: Value = (("iteration", loop.header, location), 0)
        ends = {value_at(after[latch], location) for latch in loop.latches if latch in after}
        symbol, change = self._final_value(ends.pop(), number) if len(ends) == 1 else (None, 0)
        return change if symbol == start[0] else None

    def exits(self, number: int) -> frozenset[int]:
        """Blocks from which a loop exits, if its trip count is known: one block, or copies of it."""
        return self._trips_and_exits(number)[1]

    def _trips_and_exits(self, number: int) -> tuple[int | None, frozenset[int]]:
        if number not in self._found:
            self._found[number] = None, frozenset()  # guards against loops whose trip counts depend on each other
            self._found[number] = self._count(number)
        return self._found[number]

    def _count(self, number: int) -> tuple[int | None, frozenset[int]]:
        graph = self.graph
        loop = graph.loops[number]
        if self.values.entry_state[number] is None:
            return 0, frozenset()
        found: dict[int, int] = {}
        for block in sorted(loop.body, key=lambda b: (b not in loop.latches, b)):
            if (
                graph.loop_of[block] == number
                and block in self.values.taken
                and len(graph.successors[block]) > 1
                and any(after not in loop.body for after in graph.successors[block])
            ):
                trips = self._until(number, block)
                if trips is not None and trips < _MOST_TRIPS:
                    found[block] = trips
        first = next(iter(found.values()), None)
        return first, frozenset(block for block, trips in found.items() if trips == first)

    def _until(self, number: int, block: int) -> int | None:
        """Iterations of a loop until the jump at the end of a block leaves it; None if they are not known."""
        graph, flags = self.graph, self.values.flags[block]
        condition = graph.condition(block)
        if flags is None or condition is None:
            return None
        if graph.successors[block][0] not in graph.loops[number].body:
            condition = OPPOSITE[condition]
        if flags.kind == "test":
            return self._of_toggled_bits(number, flags, condition)
        if flags.kind == "zero" and condition not in ("e", "ne", "s", "ns"):
            return None
        left, right = (self._induction(number, value) for value in (flags.left, flags.right))
        if left is None or right is None:
            return None
        (start, step), (end, end_step) = left, right
        if start[0] != end[0]:
            # a counter with unknown start that is compared with a constant is assumed to start at 0, as TVM's loops do
            if flags.kind != "cmp" or None not in (start[0], end[0]) or step == end_step:
                return None
            start, end = (
                value if value[0] is None else (None, at[1]) for value, at in ((start, flags.left), (end, flags.right))
            )
        return _iterations(start[1] - end[1], step - end_step, condition)

    def part_taken(self, block: int) -> float | None:
        """Share of a block's runs in which the jump at its end is taken, if the counter of a loop around it decides."""
        if block not in self._parts:  # needed for both successors of the block
            self._parts[block] = self._part_taken(block)
        return self._parts[block]

    def _part_taken(self, block: int) -> float | None:
        graph, flags = self.graph, self.values.flags[block]
        condition = graph.condition(block)
        if flags is None or condition is None:
            return None
        for number in graph.nest(graph.loop_of[block]):
            trips = self.of(number)
            left, right = (self._induction(number, value) for value in (flags.left, flags.right))
            if trips and trips <= _MOST_LOOKED_AT and left is not None and right is not None:
                ((symbol, a), step), ((other, b), other_step) = left, right
                if symbol is None and other is None and step != other_step:
                    pairs = ((a + step * i, b + other_step * i) for i in range(trips))
                    taken = [Flags(flags.kind, (None, x), (None, y)).satisfies(condition) for x, y in pairs]
                    return sum(map(bool, taken)) / trips
        return None

    def _induction(self, number: int, value: Value) -> tuple[Value, int] | None:
        """A value in a loop's first iteration, and by how much it grows in each further one; None if it changes otherwise."""
        loop, location = self.values.counter(value) or (None, "")
        if loop != number:
            return (self._final_value(value, number), 0) if self.values.is_fixed(value, number) else None
        step, (symbol, offset) = (self.values.step(number, location), self.values.initial_value(number, location))
        return None if step is None else (self._final_value((symbol, offset + value[1]), number), step)

    def _final_value(self, value: Value, number: int) -> Value:
        """A value in which counters of other loops are replaced by their last values, if those loops end before this one."""
        seen: set[int] = set()
        while (counter := self.values.counter(value)) is not None:
            other, location = counter
            trips, step = None, self.values.step(other, location)
            if other not in seen and self.graph.loops[number].header not in self.graph.loops[other].body:
                trips = self.of(other)
            if not trips or step is None:
                break
            seen.add(other)
            symbol, offset = self.values.initial_value(other, location)
            value = symbol, offset + step * (trips - 1) + value[1]
        return value

    def _of_toggled_bits(self, number: int, flags: Flags, condition: str) -> int | None:
        """Iterations of a loop that tests bits of a location: one constant at entry, another one after the first iteration."""
        mask, tested = (flags.right, flags.left) if flags.right[0] is None else (flags.left, flags.right)
        loop, location = self.values.counter(tested) or (None, "")
        if loop != number or mask[0] is not None:
            return None
        after = self.values.after
        ends = {after[latch].get(location) for latch in self.graph.loops[number].latches if latch in after}
        first, later = self.values.initial_value(number, location), ends.pop() if len(ends) == 1 else None
        if later is None or first[0] is not None or later[0] is not None:
            return None
        goes = [meets((value[1] + tested[1]) & mask[1], condition) for value in (first, later)]
        return 1 if not goes[0] else None if goes[1] else 2


def _iterations(difference: int, step: int, condition: str) -> int | None:
    """Iterations of a loop that continues while ``difference + step * iteration`` meets a condition; None if it never ends."""
    if not meets(difference, condition):
        return 1
    if condition == "ne":
        return None if not step or difference % step or difference * step > 0 else 1 - difference // step
    if condition == "e":
        return 2 if step else None
    away = difference > 0 if difference else step > 0  # on which side of 0 it starts
    if not step or (away == (step > 0) and difference):
        return None
    last = math.ceil(abs(difference) / abs(step))
    return last + 1 + meets(difference + last * step, condition)


def times_run(trips: TripCounts) -> NDArray[np.float64]:
    """How often each instruction of a function runs in one call, (n,).

    Of two branch directions inside a loop, each is taken half the time. There are two exceptions: the comparison of a counter
    with a constant may decide; and if one direction skips a loop, the loop is assumed to run. Outside of loops every direction
    is taken, except those known not to be taken and those that are unreachable."""
    graph, taken = trips.graph, trips.values.taken
    runs: dict[int, float] = {}
    entries: dict[int, float] = {graph.order[0]: 1.0}
    for block in graph.order:
        if block not in taken:
            continue
        entered = entries.get(block, 0.0)
        if block in graph.loop_at:
            number = graph.loop_at[block]
            found = trips.of(number)
            outer = 1.0 if graph.loops[number].parent is None else entered
            runs[block] = outer * (UNKNOWN_TRIPS if found is None else found)
        elif graph.loop_of[block] is None:
            runs[block] = 1.0
        else:
            runs[block] = min(entered, runs[graph.dominator[block]])
        for after in taken[block]:
            if after not in runs:  # else it is a jump back to a header
                entries[after] = entries.get(after, 0.0) + _part_to(trips, block, after) * runs[block]
    times = np.zeros(len(graph.function))
    for block, (first, last) in enumerate(graph.blocks):
        times[first : last + 1] = runs.get(block, 0.0)
    return np.minimum(times, _MOST_RUNS)


def _part_to(trips: TripCounts, block: int, after: int) -> float:
    """Share of the runs of a block after which the block ``after`` runs."""
    graph = trips.graph
    number = graph.loop_of[block]
    if number is None:
        return 1.0
    body, exits = graph.loops[number].body, trips.exits(number)
    if after not in body:
        # a loop ends only by its exits, if they are known; otherwise by any way out
        if exits and block not in exits:
            return 0.0
        share = 1.0
        for left in itertools.takewhile(lambda n: after not in graph.loops[n].body, graph.nest(number)):
            share /= trips.guess(left)
        return share
    others = [b for b in trips.values.taken[block] if b != after and b in body]
    if not others:
        return 1.0 - 1.0 / trips.guess(number) if block in exits else 1.0
    part = trips.part_taken(block)
    if part is not None:
        return part if after == graph.successors[block][0] else 1.0 - part
    leads_to_loop = [_leads_to_loop(graph, b, number) for b in (after, others[0])]
    if leads_to_loop == [True, False]:
        return 1.0
    return 0.0 if leads_to_loop == [False, True] else 0.5


def _leads_to_loop(graph: FlowGraph, block: int, number: int) -> bool:
    """Whether the code from a block on leads straight to another loop inside the given one."""
    for _ in range(3):
        if graph.loop_of[block] != number:
            return True
        if len(graph.successors[block]) != 1:
            return False
        block = graph.successors[block][0]
    return False
