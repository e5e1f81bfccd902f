"""What the integer registers and stack slots of compiled code hold, as far as it can be known without running it.

Value numbering over the blocks of a function (Aho, Lam, Sethi, Ullman: Compilers, sections 6.1 and 9.4): a value is a constant,
or something unknown plus a constant. What a loop changes is unknown anew in each of its rounds, so that the state at the end of
a round says by how much a counter changes. Branches whose condition is known are followed one way only.

The body of a TVM parallel loop is taken to be run by a single task, number 0 of 1: then its share is all of the loop. Buffers
are taken not to overlap: where LLVM asks whether each begins before the other ends, so as to run a loop without SIMD if they
do, the answer is no.

x86 only, in GNU objdump's AT&T syntax, as :mod:`cdmpp.profiler.codegen`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from cdmpp.profiler.control_flow import FlowGraph, Instruction, Loop

#: What is unknown (None: nothing), and a constant to add.
Value = tuple[Hashable, int]
#: Register by its 64-bit name, or slot of the stack as it is written -> value.
State = dict[str, Value]

#: Conditions of jumps, conditional moves and the like, and their opposites.
OPPOSITE = {
    "e": "ne", "ne": "e", "b": "ae", "ae": "b", "l": "ge", "ge": "l", "a": "be", "be": "a", "g": "le", "le": "g",
    "s": "ns", "ns": "s",
}  # fmt: skip
#: Those that ask on which side of another a number is, unsigned ones as signed ones; and whether equality meets them.
_BELOW, _ABOVE = ("b", "l", "be", "le"), ("a", "g", "ae", "ge")
_OR_EQUAL = ("be", "le", "ae", "ge")
_UNSIGNED, _ALL_BITS = ("b", "be", "a", "ae"), (1 << 64) - 1

_IMMEDIATE = re.compile(r"^\$(-?0x[0-9a-f]+)$")
_ADDRESS = re.compile(r"^(-?0x[0-9a-f]+)?\((?:%(\w+))?(?:,%(\w+),(\d))?\)$")
#: Times that a function is gone over at most with what loops are assumed to restore.
_MOST_PASSES = 12
#: What a call may change.
_CALLER_SAVED = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")
#: Operations that change neither integer registers nor flags.
_ELSEWHERE = (
    "v",
    "nop",
    "k",
    "push",
    "pop",
    "j",
    "prefetch",
    "data16",
    "cs",
    "endbr",
    "ud2",
    "hlt",
    "ret",
    "leave",
)
#: Whether one address that nobody knows is below another: of two buffers that do not overlap not both can be.
_SIDE = "side"
_SUFFIX_BITS = {"b": 8, "w": 16, "l": 32, "q": 64}
#: The number of the task, the pointer to its environment, and where that has the number of tasks (TVMParallelGroupEnv).
_TASK, _ENVIRONMENT, _TASKS_AT = "rdi", "rsi", "0x8"


def _registers() -> dict[str, tuple[str, int]]:
    """The 64-bit register and the bits of every name of an integer register."""
    found = {}
    for base in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp"):
        found.update({f"r{base}": (f"r{base}", 64), f"e{base}": (f"r{base}", 32), base: (f"r{base}", 16)})
    found.update({f"{letter}l": (f"r{letter}x", 8) for letter in "abcd"})
    found.update({f"{base}l": (f"r{base}", 8) for base in ("si", "di", "bp")})
    for number in range(8, 16):
        found.update(
            {f"r{number}{s}": (f"r{number}", b) for s, b in (("", 64), ("d", 32), ("w", 16), ("b", 8))}
        )
    return found


#: Name of an integer register -> its 64-bit register, bits.
REGISTERS = _registers()
_INTEGER_REGISTERS = frozenset(name for name, _ in REGISTERS.values())


@dataclass(frozen=True)
class Flags:
    """What set the flags: ``left`` compared with ``right`` (``cmp``), their common bits with 0 (``test``), or a result
    with 0, of which no more than that and its sign is known (``zero``)."""

    kind: str
    left: Value
    right: Value = (None, 0)

    def hold(self, condition: str) -> bool | None:
        """Whether a condition holds; None where that is not known."""
        if self.left[0] != self.right[0]:
            return None
        if self.kind == "test":
            if self.left[0] is not None:
                return None
            return compares(self.left[1] & self.right[1], condition)
        if self.kind == "zero" and condition not in ("e", "ne", "s", "ns"):
            return None
        left, right = self.left[1], self.right[1]
        if self.left[0] is None and condition in _UNSIGNED:
            left, right = left & _ALL_BITS, right & _ALL_BITS
        return compares(left - right, condition)


def compares(difference: int, condition: str) -> bool:
    """Whether a number is on the side of 0 that a condition asks for."""
    if condition in ("e", "ne"):
        return (difference == 0) == (condition == "e")
    if condition in ("s", "ns"):
        return (difference < 0) == (condition == "s")
    if difference == 0:
        return condition in _OR_EQUAL
    return condition in (_BELOW if difference < 0 else _ABOVE)


@dataclass
class CodeValues:
    """Values at the ends of the blocks of a function.

    Attributes
    ----------
    after
        Block that can be reached -> state at its end.
    flags
        The same for what set the flags.
    before_loop
        State in which each loop is entered; None for those that never are.
    taken
        Block that can be reached -> those that may follow it.
    """

    graph: FlowGraph
    after: dict[int, State] = field(default_factory=dict)
    flags: dict[int, Flags | None] = field(default_factory=dict)
    before_loop: list[State | None] = field(default_factory=list)
    taken: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        loop_at = {loop.header: number for number, loop in enumerate(graph.loops)}
        changed = [_written(graph, loop, copied=False) for loop in graph.loops]
        # what a loop only copies may come back before the round ends: that it does is assumed until it is found not to
        copied = [
            _written(graph, loop, copied=True) - places
            for loop, places in zip(graph.loops, changed, strict=True)
        ]
        for _ in range(_MOST_PASSES):
            self._follow(loop_at, changed)
            found = [self._differing(number, places) for number, places in enumerate(copied)]
            # nothing is assumed wrongly: what was changed but holds the same at the end of a round does not change either
            same = [
                set() if any(found) else {place for place in places if self.step(number, place) == 0}
                for number, places in enumerate(changed)
            ]
            if not any(found) and not any(same):
                return
            for number, (places, restored) in enumerate(zip(found, same, strict=True)):
                changed[number] = (changed[number] | places) - restored
                copied[number] -= places
        self._follow(loop_at, [places | rest for places, rest in zip(changed, copied, strict=True)])

    def _differing(self, number: int, places: set[str]) -> set[str]:
        """Those places that do not hold at the end of a round what they held before the loop."""
        state, latches = self.before_loop[number], self.graph.loops[number].latches
        if state is None:
            return set()
        ends = [self.after[latch] for latch in latches if latch in self.after]
        return {place for place in places if any(held(end, place) != held(state, place) for end in ends)}

    def _follow(self, loop_at: Mapping[int, int], written: Sequence[set[str]]) -> None:
        """Go over all blocks once, given what each loop may change in its rounds."""
        graph = self.graph
        self.after, self.flags, self.taken = {}, {}, {}
        self.before_loop = [None] * len(graph.loops)
        done: set[int] = set()
        for block in graph.order:
            loop = graph.loops[loop_at[block]] if block in loop_at else None
            body = loop.body if loop is not None else set()
            before = [b for b in graph.predecessors[block] if b not in body]
            done.add(block)
            coming = [b for b in before if block in self.taken.get(b, ())]
            late = any(b not in done for b in before)  # a cycle without a header: nothing is known
            if before and not coming and not late:
                continue  # never reached
            state, flags = self._merged(block, coming)
            if late:
                state = {place: (("merged", block, place), 0) for place in {*state, *_INTEGER_REGISTERS}}
                flags = None
            if loop is not None:
                number = loop_at[block]
                self.before_loop[number] = dict(state)
                for place in written[number]:
                    state[place] = (("round", block, place), 0)
                flags = None
            first, last = graph.blocks[block]
            if block in graph.successors[-1] and _is_parallel_body(graph.function[first : last + 1]):
                state[_TASK], state[_ENVIRONMENT] = (None, 0), ("environment", 0)
            for i in range(first, last + 1):
                flags = _step(graph.function[i], i, state, flags)
            self.after[block], self.flags[block] = state, flags
            self.taken[block] = self._taken(block, flags)

    def _merged(self, block: int, coming: Sequence[int]) -> tuple[State, Flags | None]:
        if not coming:
            return {}, None
        state, flags = dict(self.after[coming[0]]), self.flags[coming[0]]
        for other in coming[1:]:
            there = self.after[other]
            for place in state.keys() | there.keys():
                if held(state, place) != held(there, place):
                    state[place] = (("merged", block, place), 0)
            if self.flags[other] != flags:
                flags = None
        return state, flags

    def _taken(self, block: int, flags: Flags | None) -> list[int]:
        after = self.graph.successors[block]
        if len(after) != 2 or flags is None:
            return after
        condition = self.graph.function[self.graph.blocks[block][1]][1][1:]
        holds = flags.hold(condition) if condition in OPPOSITE else None
        return after if holds is None else [after[0 if holds else 1]]

    def step(self, number: int, place: str) -> int | None:
        """By how much a place changes in a round of a loop; None where that is not known or not always the same."""
        loop = self.graph.loops[number]
        start: Value = (("round", loop.header, place), 0)
        ends = {self.after[latch].get(place, start) for latch in loop.latches if latch in self.after}
        symbol, change = ends.pop() if len(ends) == 1 else (None, 0)
        return change if symbol == start[0] else None

    def is_fixed(self, value: Value, number: int) -> bool:
        """Whether a value is the same in all rounds of a loop."""
        loop = self.graph.loops[number]
        match value[0]:
            case ("round" | "merged", block, _):
                return block not in loop.body
            case ("result", int(at), _):
                spans = (self.graph.blocks[block] for block in loop.body)
                return not any(first <= at <= last for first, last in spans)
        return True


def held(state: State, place: str) -> Value:
    """What a place holds: where nothing has been written, what it held when the function was entered."""
    return state.get(place, (("entry", place), 0))


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


def _place(operand: str) -> str | None:
    """What holds an integer, by one name: a 64-bit register or a slot of the stack."""
    if operand.startswith("%"):
        return REGISTERS[operand[1:]][0] if operand[1:] in REGISTERS else None
    return operand if "(%rsp)" in operand or "(%rbp)" in operand else None


def _written(graph: FlowGraph, loop: Loop, *, copied: bool) -> set[str]:
    """Places that a loop may change: to what another place holds, or otherwise."""
    places: set[str] = set()
    for block in loop.body:
        first, last = graph.blocks[block]
        for _, operation, text in graph.function[first : last + 1]:
            is_copy = operation.startswith("mov") and _place(split_operands(text)[0]) is not None
            if is_copy == copied:
                places.update(_changed(operation, text))
    return places


def _changed(operation: str, text: str) -> list[str]:
    if operation.startswith("call"):
        return list(_CALLER_SAVED)
    if operation in ("cltd", "cqto"):
        return ["rdx"]
    if operation in ("cltq", "cwtl"):
        return ["rax"]
    operands = split_operands(text)
    if operation.startswith(("idiv", "div")) or (
        operation.startswith(("imul", "mul")) and len(operands) == 1
    ):
        return ["rax", "rdx"]
    if operation.startswith(("cmp", "test", "bt")) or (
        operation.startswith(_ELSEWHERE) and not _to_integer(operation)
    ):
        return []
    place = _place(operands[-1])
    return [place] if place is not None else []


def _to_integer(operation: str) -> bool:
    """Whether an operation on vectors or masks may write an integer register."""
    return operation.startswith(("vmov", "vpextr", "vcvt", "vpmovmsk", "kmov"))


def _is_parallel_body(block: Sequence[Instruction]) -> bool:
    """Whether a function's first block reads the number of tasks from its environment."""
    for _, operation, text in block:
        operands = split_operands(text)
        if operands[0] == f"{_TASKS_AT}(%{_ENVIRONMENT})":
            return _bits(operation, operands) == 32 or operation.startswith("movsl")
        if _ENVIRONMENT in _changed(operation, text):
            return False
    return False


def _bits(operation: str, operands: Sequence[str]) -> int:
    """Width of an operation on integers."""
    last = operands[-1].lstrip("%")
    if last in REGISTERS:
        return REGISTERS[last][1]
    return _SUFFIX_BITS.get(operation[-1], 64)


def _result(at: int, place: str = "") -> Value:
    """What an instruction makes and nobody knows."""
    return ("result", at, place), 0


def _signed(number: int, bits: int) -> int:
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _read(operand: str, state: State, at: int, bits: int = 64) -> Value:
    immediate = _IMMEDIATE.match(operand)
    if immediate is not None:
        return None, _signed(int(immediate[1], 16), bits)
    if operand == f"{_TASKS_AT}(%{_ENVIRONMENT})" and state.get(_ENVIRONMENT) == ("environment", 0):
        return None, 1
    place = _place(operand)
    if place is None:
        return _result(at)
    symbol, offset = held(state, place)
    return (None, _signed(offset, bits)) if symbol is None else (symbol, offset)


def _address(operand: str, state: State, at: int) -> Value:
    """What ``lea`` gives."""
    found = _ADDRESS.match(operand)
    unknown = _result(at)
    if found is None or (found[2] or found[3]) in (None, "rip"):
        return unknown
    base = _read(f"%{found[2]}", state, at) if found[2] else (None, 0)
    index = _read(f"%{found[3]}", state, at) if found[3] else (None, 0)
    scale = int(found[4] or 1)
    shift = int(found[1] or "0", 16)
    if index[0] is None:
        return base[0], base[1] + scale * index[1] + shift
    if base[0] is None and scale == 1:
        return index[0], base[1] + index[1] + shift
    return unknown


def _sum(left: Value, right: Value, sign: int, at: int) -> Value:
    if right[0] is None:
        return left[0], left[1] + sign * right[1]
    if sign > 0 and left[0] is None:
        return right[0], left[1] + right[1]
    if sign < 0 and left[0] == right[0]:
        return None, left[1] - right[1]
    return _result(at)


def _compares_addresses(flags: Flags, condition: str) -> bool:
    return flags.kind == "cmp" and condition in _UNSIGNED and None not in (flags.left[0], flags.right[0])


def _computed(operation: str, values: Sequence[Value], bits: int, at: int) -> Value:
    """Result of an operation whose operands, the one that it writes last, have these values."""
    unknown = _result(at)
    if operation.startswith(("add", "sub")) and len(values) == 2:
        return _sum(values[1], values[0], 1 if operation.startswith("add") else -1, at)
    if operation.startswith("inc"):
        return values[-1][0], values[-1][1] + 1
    if operation.startswith("dec"):
        return values[-1][0], values[-1][1] - 1
    symbols = [symbol for symbol, _ in values]
    if operation in ("and", "andb") and all(isinstance(s, tuple) and s[0] == _SIDE for s in symbols):
        return None, 0
    if any(symbol is not None for symbol in symbols):
        return unknown
    numbers = [offset for _, offset in values]
    first, last = numbers[0], numbers[-1]
    if operation.startswith("imul") and len(numbers) == 2:
        return None, first * last
    if operation.startswith("and") and not operation.startswith("andn") and len(numbers) == 2:
        return None, first & last
    if operation.startswith("or") and len(numbers) == 2:
        return None, first | last
    if operation.startswith("xor") and len(numbers) == 2:
        return None, first ^ last
    if operation.startswith("not"):
        return None, ~last
    if operation.startswith("neg"):
        return None, -last
    if operation.startswith(("shl", "sal", "sar", "shr")):
        by = 1 if len(numbers) == 1 else first
        if not 0 <= by < bits:
            return unknown
        if operation.startswith(("shl", "sal")):
            return None, last << by
        return None, (last if operation.startswith("sar") else last & ((1 << bits) - 1)) >> by
    return unknown


def _step(instruction: Instruction, at: int, state: State, flags: Flags | None) -> Flags | None:
    """Change the state as an instruction does; what has set the flags then."""
    _, operation, text = instruction
    if operation.startswith("call"):
        for register in _CALLER_SAVED:
            state[register] = _result(at, register)
        return None
    if operation in ("cltd", "cqto"):
        symbol, offset = held(state, "rax")
        state["rdx"] = (None, -1 if offset < 0 else 0) if symbol is None else _result(at)
        return flags
    if operation in ("cltq", "cwtl"):
        return flags
    if "comis" in operation:
        return None
    if operation.startswith(_ELSEWHERE) and not _to_integer(operation):
        return flags
    operands = split_operands(text)
    if operation.startswith("xchg"):
        for operand in operands if operands[0] != operands[-1] else ():
            if (exchanged := _place(operand)) is not None:
                state[exchanged] = _result(at, exchanged)
        return flags
    bits = _bits(operation, operands)
    if operation.startswith(("idiv", "div", "imul", "mul")) and len(operands) == 1:
        if "div" in operation:
            _divide(operands[0], bits, at, state)
        else:
            state["rax"], state["rdx"] = _result(at, "rax"), _result(at, "rdx")
        return None
    if operation.startswith(("cmp", "test")) and len(operands) == 2:
        right, left = (_read(operand, state, at, _compared_bits(operation, operands)) for operand in operands)
        if operation.startswith("cmp"):
            return Flags("cmp", left, right)
        return Flags("zero", left) if operands[0] == operands[1] else Flags("test", left, right)
    if operation.startswith("bt"):
        return None
    place = _place(operands[-1])
    if operation.startswith(("mov", "lea", "cmov", "set")) or "%xmm" in text or _to_integer(operation):
        if place is not None:
            _write(place, _moved(operation, operands, bits, at, state, flags), bits, state)
        return flags
    # of three operands the last is only written
    values = [_read(operand, state, at, bits) for operand in operands[:2]]
    same = operation.startswith(("xor", "sub")) and len(operands) == 2 and operands[0] == operands[1]
    result: Value = (None, 0) if same else _computed(operation, values, bits, at)
    before = values[-1]
    if place is not None:
        _write(place, result, bits, state)
    if operation.startswith("not") or operation.endswith("x"):
        return flags
    if operation.startswith("sub") and len(values) == 2:
        return Flags("cmp", before, values[0])
    if operation.startswith(("and", "or", "xor")):
        return Flags("cmp", result)
    return Flags("zero", result)


def _compared_bits(operation: str, operands: Sequence[str]) -> int:
    """Width of a comparison, whose registers may be either operand."""
    for operand in operands:
        if operand.lstrip("%") in REGISTERS:
            return REGISTERS[operand[1:]][1]
    return _SUFFIX_BITS.get(operation[-1], 64)


def _divide(divisor: str, bits: int, at: int, state: State) -> None:
    by, over = _read(divisor, state, at, bits), held(state, "rax")
    if by[0] is None and over[0] is None and by[1]:
        quotient = abs(over[1]) // abs(by[1]) * (1 if over[1] * by[1] >= 0 else -1)
        state["rax"], state["rdx"] = (None, quotient), (None, over[1] - quotient * by[1])
    elif by == (None, 1):
        state["rax"], state["rdx"] = over, (None, 0)
    else:
        state["rax"], state["rdx"] = _result(at, "rax"), _result(at, "rdx")


def _moved(
    operation: str, operands: Sequence[str], bits: int, at: int, state: State, flags: Flags | None
) -> Value:
    unknown = _result(at)
    if operation.startswith("lea"):
        return _address(operands[0], state, at)
    if operation.startswith("cmov"):
        holds = flags.hold(operation[4:]) if flags is not None and operation[4:] in OPPOSITE else None
        if holds is None:
            return unknown
        return _read(operands[0] if holds else operands[-1], state, at, bits)
    if operation.startswith("set"):
        holds = flags.hold(operation[3:]) if flags is not None and operation[3:] in OPPOSITE else None
        if holds is None and flags is not None and _compares_addresses(flags, operation[3:]):
            return (_SIDE, at), 0
        return unknown if holds is None else (None, int(holds))
    if operation.startswith("mov") and len(operands) == 2 and "mm" not in operands[0]:
        source = operands[0].lstrip("%")
        width = REGISTERS[source][1] if source in REGISTERS else bits
        symbol, offset = _read(operands[0], state, at, width)
        if operation.startswith("movz") and symbol is None:
            offset &= (1 << width) - 1
        return symbol, offset
    return unknown


def _write(place: str, value: Value, bits: int, state: State) -> None:
    symbol, offset = value
    if place in ("rsp", "rbp"):  # slots have other names from now on
        for slot in [slot for slot in state if f"(%{place})" in slot]:
            state[slot] = ("moved", slot, value), 0
    state[place] = (None, _signed(offset, bits)) if symbol is None else (symbol, offset)
