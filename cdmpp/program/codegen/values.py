"""What the integer registers and stack slots of compiled code hold, as far as it can be known without running the code.

This is value numbering over the blocks of a function (Aho, Lam, Sethi, Ullman: Compilers, sections 6.1 and 9.4): a value is a
constant, or something unknown plus a constant. What a loop changes is a new unknown in each iteration, so the state at the end
of an iteration tells by how much a counter changes. A branch with a known condition is followed in one direction only.

The body of a TVM parallel loop is assumed to be run by a single task, number 0 of 1, whose share is the whole loop. Buffers are
assumed not to overlap. Where LLVM checks whether each buffer begins before the other ends, to run a loop without SIMD if they
do, the answer is no.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from cdmpp.program.codegen import blocks

#: A symbol for what is unknown (None: nothing is), and a constant to add to it.
Value = tuple[Hashable, int]
State = dict[blocks.Location, Value]

OPPOSITE = {
    "e": "ne", "ne": "e", "b": "ae", "ae": "b", "l": "ge", "ge": "l", "a": "be", "be": "a", "g": "le", "le": "g",
    "s": "ns", "ns": "s",
}  # fmt: skip
#: Conditions that ask whether a number is below or above another, both unsigned and signed; those that equality also meets.
_BELOW, _ABOVE = ("b", "l", "be", "le"), ("a", "g", "ae", "ge")
_OR_EQUAL = ("be", "le", "ae", "ge")
_UNSIGNED, _ALL_BITS = ("b", "be", "a", "ae"), (1 << 64) - 1
#: Maximum number of passes over a function that assume that loops restore some locations.
_MOST_PASSES = 12
_MOVES = ("mov", "movsx", "movsxd", "movzx")
#: Operations on two constants, or on one constant (then 1 is the second); the shifts are also those of BMI2 (shlx).
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "imul": operator.mul, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shl": operator.lshift, "sar": operator.rshift, "shr": operator.rshift,
    "not": lambda a, _: ~a, "neg": lambda a, _: -a,
}  # fmt: skip
#: Symbol of a comparison of two unknown addresses. If buffers do not overlap, only one of two can begin before the other ends.
_BEGINS_BEFORE = "begins before"
#: Where the body of a parallel loop gets the number of its task and the pointer to its environment, and where the environment
#: has the number of tasks, 32 bits (TVMParallelGroupEnv).
_TASK, _ENVIRONMENT = "rdi", "rsi"
_TASKS = blocks.Address(_ENVIRONMENT, displacement=8)


@dataclass(frozen=True)
class Flags:
    """The comparison that set the flags. ``cmp``: ``left`` with ``right``; ``test``: their common bits with 0; ``zero``: the
    result ``left`` with 0, where only equality and the sign are known."""

    kind: str
    left: Value
    right: Value = (None, 0)

    def satisfies(self, condition: str | None) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        if condition is None or self.left[0] != self.right[0]:
            return None
        if self.kind == "test":
            if self.left[0] is not None:
                return None
            return meets(self.left[1] & self.right[1], condition)
        if self.kind == "zero" and condition not in ("e", "ne", "s", "ns"):
            return None
        left, right = self.left[1], self.right[1]
        if self.left[0] is None and condition in _UNSIGNED:
            left, right = left & _ALL_BITS, right & _ALL_BITS
        return meets(left - right, condition)

    def compares_addresses(self, condition: str | None) -> bool:
        """Whether a condition compares two unknown addresses."""
        return self.kind == "cmp" and condition in _UNSIGNED and None not in (self.left[0], self.right[0])


def meets(difference: int, condition: str) -> bool:
    """Whether the difference of two compared numbers meets a condition, that is, has the sign that the condition asks for."""
    if condition in ("e", "ne"):
        return (difference == 0) == (condition == "e")
    if condition in ("s", "ns"):
        return (difference < 0) == (condition == "s")
    if difference == 0:
        return condition in _OR_EQUAL
    return condition in (_BELOW if difference < 0 else _ABOVE)


def value_at(state: State, location: blocks.Location) -> Value:
    """The value of a location; if nothing has been written to it, its value when the function was entered."""
    return state.get(location, (("entry", location), 0))


@dataclass
class CodeValues:
    """Values at the ends of the blocks of a function."""

    graph: blocks.FlowGraph
    #: Reachable block -> state at its end, and the comparison that has set the flags there.
    after: dict[int, State] = field(default_factory=dict)
    flags: dict[int, Flags | None] = field(default_factory=dict)
    #: State in which each loop is entered; None for loops that never are entered.
    entry_state: list[State | None] = field(default_factory=list)
    #: Reachable block -> the blocks that may follow it.
    taken: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loops = self.graph.loops
        changed = [_changes(self.graph, loop, by_copies=False) for loop in loops]
        # locations that a loop changes only by copies may be restored before the iteration ends: assumed until found wrong
        copied = [
            _changes(self.graph, loop, by_copies=True) - locations for loop, locations in zip(loops, changed, strict=True)
        ]
        for _ in range(_MOST_PASSES):
            self._follow(changed)
            wrong = [self._differing(number, locations) for number, locations in enumerate(copied)]
            # if no assumption was wrong: what was changed but has the same value at the end does not change either
            restored = [
                set() if any(wrong) else {location for location in locations if self.step(number, location) == 0}
                for number, locations in enumerate(changed)
            ]
            if not any(wrong) and not any(restored):
                return
            for number in range(len(loops)):
                changed[number] = (changed[number] | wrong[number]) - restored[number]
                copied[number] -= wrong[number]
        self._follow([locations | rest for locations, rest in zip(changed, copied, strict=True)])

    def _differing(self, number: int, locations: set[blocks.Location]) -> set[blocks.Location]:
        """The given locations whose value at the end of an iteration differs from their value before the loop."""
        state, latches = self.entry_state[number], self.graph.loops[number].latches
        if state is None:
            return set()
        ends = [self.after[latch] for latch in latches if latch in self.after]
        return {location for location in locations if any(value_at(end, location) != value_at(state, location) for end in ends)}

    def _follow(self, changed: Sequence[set[blocks.Location]]) -> None:
        """Pass over all blocks once, given the locations that each loop may change in its iterations."""
        graph = self.graph
        self.after, self.flags, self.taken = {}, {}, {}
        self.entry_state = [None] * len(graph.loops)
        done: set[int] = set()
        for block in graph.order:
            number = graph.loop_at.get(block)
            body = graph.loops[number].body if number is not None else ()
            before = [b for b in graph.predecessors[block] if b not in body]
            done.add(block)
            reachable = [b for b in before if block in self.taken.get(b, ())]
            late = any(b not in done for b in before)  # a cycle without a header: nothing is known
            if before and not reachable and not late:
                continue  # never reached
            state, flags = self._merged(block, reachable)
            if late:
                state = {location: (("merged", block, location), 0) for location in {*state, *blocks.INTEGER_REGISTERS}}
                flags = None
            if number is not None:
                self.entry_state[number] = dict(state)
                state.update({location: (("iteration", block, location), 0) for location in changed[number]})
                flags = None
            if block in graph.successors[-1] and _is_parallel_body(graph.code(block)):
                state[_TASK], state[_ENVIRONMENT] = (None, 0), ("environment", 0)
            for instruction in graph.code(block):
                flags = execute(instruction, state, flags)
            self.after[block], self.flags[block] = state, flags
            self.taken[block] = self._taken(block, flags)

    def _merged(self, block: int, reachable: Sequence[int]) -> tuple[State, Flags | None]:
        if not reachable:
            return {}, None
        state, flags = dict(self.after[reachable[0]]), self.flags[reachable[0]]
        for other in reachable[1:]:
            there = self.after[other]
            for location in state.keys() | there.keys():
                if value_at(state, location) != value_at(there, location):
                    state[location] = (("merged", block, location), 0)
            if self.flags[other] != flags:
                flags = None
        return state, flags

    def _taken(self, block: int, flags: Flags | None) -> list[int]:
        after = self.graph.successors[block]
        if len(after) != 2 or flags is None:
            return after
        holds = flags.satisfies(self.graph.condition(block))
        return after if holds is None else [after[0 if holds else 1]]

    def counter(self, value: Value) -> tuple[int, blocks.Location] | None:
        """The loop with which a value changes, and the location that holds it, up to a constant, when an iteration begins."""
        match value[0]:
            case ("iteration", int(block), str() | blocks.Address() as location):
                return self.graph.loop_at[block], location
        return None

    def initial_value(self, number: int, location: blocks.Location) -> Value:
        """The value of a location where a loop is entered."""
        return value_at(self.entry_state[number] or {}, location)

    def step(self, number: int, location: blocks.Location) -> int | None:
        """By how much a location changes in an iteration of a loop; None if that is not known or not always the same."""
        loop = self.graph.loops[number]
        start: Value = (("iteration", loop.header, location), 0)
        ends = {self.after[latch].get(location, start) for latch in loop.latches if latch in self.after}
        symbol, change = ends.pop() if len(ends) == 1 else (None, 0)
        return change if symbol == start[0] else None

    def is_fixed(self, value: Value, number: int) -> bool:
        """Whether a value is the same in all iterations of a loop."""
        body = self.graph.loops[number].body
        match value[0]:
            case ("iteration" | "merged", block, _):
                return block not in body
            case ("result", int(address), _):
                return not any(code[0].address <= address <= code[-1].address for code in map(self.graph.code, body))
        return True


def _changes(graph: blocks.FlowGraph, loop: blocks.Loop, *, by_copies: bool) -> set[blocks.Location]:
    """Locations that a loop changes by copies of other locations (``by_copies``), or in other ways (not ``by_copies``)."""
    return {
        location
        for block in loop.body
        for instruction in graph.code(block)
        for location in instruction.changes
        if (instruction.name in _MOVES and blocks.location_of(instruction.operands[1]) is not None) == by_copies
    }


def _is_parallel_body(block: Sequence[blocks.Instruction]) -> bool:
    """Whether a function's first block reads the number of tasks from its environment."""
    for instruction in block:
        if _TASKS in instruction.operands[-1:]:
            registers = [operand for operand in instruction.operands if isinstance(operand, blocks.Register)]
            return instruction.memory_bits == 32 and all(register.bits <= 64 for register in registers)
        if _ENVIRONMENT in instruction.changes:
            return False
    return False


def execute(instruction: blocks.Instruction, state: State, flags: Flags | None) -> Flags | None:
    """Apply an instruction to ``state`` in place; returns the comparison that has set the flags after it."""
    if not instruction.changes and not instruction.sets_flags:
        return flags
    results, set_by = _results(instruction, state, flags)
    for location in instruction.changes:
        value = results.get(location, _unknown(instruction, location))
        if location in ("rsp", "rbp"):  # slots have other names from now on
            for slot in [slot for slot in state if isinstance(slot, blocks.Address) and slot.base == location]:
                state[slot] = ("moved", slot, value), 0
        state[location] = value
    return set_by if instruction.sets_flags else flags


def _results(
    instruction: blocks.Instruction, state: State, flags: Flags | None
) -> tuple[dict[blocks.Location | None, Value], Flags | None]:
    """The known values of the locations that an instruction changes, and the comparison in the flags if it sets them."""
    name, operands = instruction.name, instruction.operands
    if name in ("cdqe", "cwde", "cdq", "cqo"):
        symbol, offset = value_at(state, "rax")
        if name in ("cdqe", "cwde"):
            return {"rax": (symbol, offset)}, None
        return {} if symbol is not None else {"rdx": (None, -1 if offset < 0 else 0)}, None
    if not operands or instruction.flow == "call":
        return {}, None
    values = [_read(operand, instruction, state) for operand in operands]
    if name in ("div", "idiv"):
        return _divided(value_at(state, "rax"), values[0]), None
    if name in ("cmp", "test"):
        same = name == "test" and operands[0] == operands[1]
        if name == "test" and _computed("and", values[0], values[1], 64) == (None, 0):
            return {}, Flags("zero", (None, 0))
        return {}, Flags("zero", values[0]) if same else Flags(name, *values)
    result: Value | None = None
    set_by = None
    holds = None if flags is None else flags.satisfies(instruction.condition)
    if name.startswith("cmov"):
        result = None if holds is None else values[holds]
    elif name.startswith("set"):
        if holds is not None:
            result = None, int(holds)
        elif flags is not None and flags.compares_addresses(instruction.condition):
            result = (_BEGINS_BEFORE, instruction.address), 0
    elif name in _MOVES:
        result = values[1]
        if name == "movzx" and result[0] is None:
            result = None, result[1] & ((1 << instruction.width(operands[1])) - 1)
    elif name == "lea":
        result = _address(instruction.operands[1], state)
    else:
        # the first of three operands is only written
        left, right = values[-2:] if len(values) > 1 else (values[0], (None, 1))
        if name in ("xor", "sub") and operands[0] == operands[1]:
            result = None, 0
        else:
            result = _computed(name, left, right, instruction.width(operands[0]))
        if name == "sub":
            set_by = Flags("cmp", left, right)
        elif result is not None and name != "imul":
            set_by = Flags("cmp" if name in ("and", "or", "xor") else "zero", result)
    if result is not None and result[0] is None:
        result = None, blocks.signed(result[1], instruction.width(operands[0]))
    return {} if result is None else {blocks.location_of(operands[0]): result}, set_by


def _unknown(instruction: blocks.Instruction, location: blocks.Location | None = None) -> Value:
    return ("result", instruction.address, location), 0


def _read(operand: blocks.Operand, instruction: blocks.Instruction, state: State) -> Value:
    width = instruction.width(operand)
    if not width:  # lea names memory and reads none
        return _unknown(instruction)
    if isinstance(operand, int):
        return None, blocks.signed(operand, width)
    if operand == _TASKS and state.get(_ENVIRONMENT) == ("environment", 0):
        return None, 1
    location = blocks.location_of(operand)
    if location is None:
        return _unknown(instruction)
    symbol, offset = value_at(state, location)
    return (None, blocks.signed(offset, width)) if symbol is None else (symbol, offset)


def _address(operand: blocks.Operand, state: State) -> Value | None:
    """The address that ``lea`` computes; None if it is not known."""
    if not isinstance(operand, blocks.Address) or operand.base == "rip":
        return None
    base, index = ((None, 0) if name is None else value_at(state, name) for name in (operand.base, operand.index_register))
    if index[0] is None:
        return base[0], base[1] + operand.scale * index[1] + operand.displacement
    if base[0] is None and operand.scale == 1:
        return index[0], base[1] + index[1] + operand.displacement
    return None


def _divided(number: Value, divisor: Value) -> dict[blocks.Location | None, Value]:
    if divisor == (None, 1):
        return {"rax": number, "rdx": (None, 0)}
    if number[0] is not None or divisor[0] is not None or not divisor[1]:
        return {}
    quotient = abs(number[1]) // abs(divisor[1]) * (1 if number[1] * divisor[1] >= 0 else -1)
    return {"rax": (None, quotient), "rdx": (None, number[1] - quotient * divisor[1])}


def _computed(name: str, left: Value, right: Value, bits: int) -> Value | None:
    """Result of an arithmetic instruction; one with a single operand has 1 on the right. None if it is not known."""
    (symbol, a), (other, b) = left, right
    if name in ("add", "inc") and None in (symbol, other):
        return other if symbol is None else symbol, a + b
    if name in ("sub", "dec") and other in (None, symbol):
        return symbol if other is None else None, a - b
    if name == "and" and all(isinstance(s, tuple) and s[0] == _BEGINS_BEFORE for s in (symbol, other)):
        return None, 0
    operation = _OPERATIONS.get(name.removesuffix("x"))
    if operation is None or symbol is not None or other is not None or (name.startswith("s") and not 0 <= b < bits):
        return None
    return None, operation(a & ((1 << bits) - 1) if name.startswith("shr") else a, b)
