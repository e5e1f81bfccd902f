"""By how much the addresses of a function change with its loops, and how many cache lines its loops touch.

A loop nest fetches again what did not fit the cache: the data of the largest part of the nest that fits are fetched each time
that part starts again (Wolf and Lam, PLDI'91, and Bao et al., POPL'18, count in the same way).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cdmpp.program.codegen.blocks import INTEGER_REGISTERS, Address, Instruction, Location, Operand, location_of
from cdmpp.program.codegen.trips import TripCounts

_LINE = 64
#: An unknown address is assumed to touch a new line in this share of the iterations of each loop.
_UNKNOWN_SHARE = 0.25
#: Maximum number of passes over a loop's blocks.
_MOST_PASSES = 8


class Piece(NamedTuple):
    """Adjacent bytes that one iteration of an innermost loop touches."""

    bytes: float
    #: By how many bytes they move in an iteration of each loop of the nest, innermost first; None where it is not known.
    steps: tuple[int | None, ...]


def lines(piece: Piece, trips: Sequence[float]) -> float:
    """Number of cache lines that a piece touches while the ``len(trips)`` innermost loops of its nest run."""
    extent, apart = piece.bytes, 1.0
    moves = list(zip(piece.steps, trips, strict=False))
    for step, count in sorted((abs(step), count) for step, count in moves if step is not None):
        if step <= max(extent, _LINE):
            extent += step * (count - 1)
        else:
            apart *= count
    apart *= math.prod(max(1.0, _UNKNOWN_SHARE * count) for step, count in moves if step is None)
    return apart * max(1.0, extent / _LINE)


def lines_fetched(pieces: Sequence[Piece], trips: Sequence[float], runs: float, capacity: float) -> float:
    """Lines that a cache of ``capacity`` bytes fetches while an innermost loop runs ``runs`` iterations in all. ``trips`` are
    the trip counts of the loops of its nest, innermost first. 0 if everything fits."""
    for depth in range(len(trips) + 1):
        touched = sum(lines(piece, trips[:depth]) for piece in pieces)
        if touched * _LINE > capacity:
            return touched * runs / math.prod(trips[:depth])
    return 0.0


class Strides:
    """By how much addresses change between two iterations of each loop around them."""

    def __init__(self, trips: TripCounts) -> None:
        self._trips, self._graph = trips, trips.graph
        #: Loop -> instruction -> bytes by which its address changes in an iteration of the loop.
        self._found = [self._of_loop(number) for number in range(len(self._graph.loops))]

    def pieces(self, number: int) -> list[Piece]:
        """Pieces that an iteration of an innermost loop touches outside of the stack; a piece may have gaps of up to a line."""
        nest, groups = self._graph.nest(number), defaultdict(list)
        for block in self._graph.loops[number].body:
            for i in self._graph.code(block):
                if i.memory is None or not (i.loads or i.stores) or i.memory.is_slot or i.memory.base == "rip":
                    continue
                steps = tuple(self._found[loop].get(i.address) for loop in nest)
                same = i.memory._replace(displacement=0), steps
                groups[same].append((i.memory.displacement, max(1, i.memory_bits // 8)))
        found = []
        for (_, steps), places in groups.items():
            places.sort()
            begin, end = places[0][0], sum(places[0])
            for place, width in places[1:]:
                if place > end + _LINE:
                    found.append(Piece(end - begin, steps))
                    begin = place
                end = max(end, place + width)
            found.append(Piece(end - begin, steps))
        return found

    def _of_loop(self, number: int) -> dict[int, int | None]:
        """By how much the address of each of a loop's instructions changes in an iteration; a fixpoint over its blocks."""
        graph, header = self._graph, self._graph.loops[number].header
        blocks = [block for block in graph.order if block in self._graph.loops[number].body]
        written = {place for block in blocks for i in graph.code(block) for place in i.changes}
        start: State = {place: self._trips.step(number, place) for place in written}
        found: dict[int, int | None] = {}
        after: dict[int, State] = {}
        for _ in range(_MOST_PASSES):
            before = dict(after)
            for block in blocks:
                # predecessors not visited yet are assumed to agree
                states = [after[b] for b in graph.predecessors[block] if b in after]
                state = dict(start) if block == header else _common(states, written)
                for instruction in graph.code(block):
                    if instruction.memory is not None:
                        found[instruction.address] = _of_address(instruction.memory, state)
                    if instruction.changes:
                        _step(instruction, state)
                after[block] = state
            # what every iteration computes anew changes by as much at the start of the next iteration as at the end of this one
            ends = _common([after[latch] for latch in graph.loops[number].latches if latch in after], written)
            anew = {place: ends[place] for place in written if start[place] is None and ends[place] is not None}
            start.update(anew)
            if not anew and before == after:
                break
        return found


State = dict[Location, int | None]


def _common(states: Sequence[State], places: Iterable[Location]) -> State:
    """The changes on which all given states agree; None for a place on which they do not."""
    if len(states) == 1:
        return dict(states[0])
    return {p: states[0][p] if len({state[p] for state in states}) == 1 else None for p in places if states}


def _of_address(address: Address, state: State) -> int | None:
    index = address.index_register
    if index is not None and index not in INTEGER_REGISTERS:
        return None  # a vector of addresses
    base = 0 if address.base in (None, "rip") else state.get(address.base, 0)
    added = 0 if index is None else state.get(index, 0)
    return None if base is None or added is None else base + address.scale * added


def _of_operand(operand: Operand, state: State) -> int | None:
    if isinstance(operand, int):
        return 0
    place = location_of(operand)
    return None if place is None else state.get(place, 0)


def _step(instruction: Instruction, state: State) -> None:
    """Apply an instruction to ``state``, by how much registers and slots change."""
    name, operands = instruction.name, instruction.operands
    result: int | None = None
    if name in ("cmp", "test") or not operands:
        if name != "cdqe":
            return
        result = state.get("rax", 0)
    elif name in ("xor", "sub") and operands[0] == operands[-1]:
        result = 0
    elif name == "lea" and isinstance(operands[1], Address):
        result = _of_address(operands[1], state)
    else:
        values = [_of_operand(operand, state) for operand in operands]
        left, right = values[-2:] if len(values) > 1 else (values[0], 0)
        constant = operands[-1] if isinstance(operands[-1], int) else 1
        if name in ("mov", "movsxd", "movsx", "movzx"):
            result = right
        elif name in ("inc", "dec", "neg", "not"):
            result = left if name in ("inc", "dec") or left is None else -left
        elif left is not None and right is not None:
            if name in ("add", "sub"):
                result = left + right if name == "add" else left - right
            elif left == right == 0:
                result = 0  # whatever the operation, the result does not change with the loop
            elif isinstance(operands[-1], int) and name in ("imul", "shl"):
                result = left * constant if name == "imul" else left << (constant & 63)
            elif isinstance(operands[-1], int) and name in ("sar", "shr") and left % (1 << (constant & 63)) == 0:
                result = left >> (constant & 63)
            elif name == "or":
                result = left + right  # LLVM turns additions of numbers without common bits into ``or``
    written = location_of(operands[0]) if operands else "rax"
    for place in instruction.changes:
        state[place] = result if place == written else None
