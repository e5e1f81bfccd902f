"""Decoded instructions of x86-64, and their basic blocks, dominators and natural loops.

Compilers lay blocks out in any order, so loops are found as compilers find them: an edge to a block that dominates the edge's
source closes a loop. The loop's body is every block that reaches this edge without passing the dominating block (Aho, Lam,
Sethi, Ullman: Compilers, section 9.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import networkx as nx


class Register(NamedTuple):
    """A register: the name of the widest register that it is part of (eax: rax, xmm0: zmm0), and how many of its bits."""

    name: str
    bits: int


class Address(NamedTuple):
    """A memory operand at base + scale * index + displacement; the index of a gather is a vector."""

    base: str | None
    index_register: str | None = None
    scale: int = 1
    displacement: int = 0
    index_bits: int = 0

    @property
    def is_slot(self) -> bool:
        """Whether it is a stack slot."""
        return self.base in ("rsp", "rbp") and self.index_register is None


Operand: TypeAlias = Register | Address | int
#: A place that holds an integer: a 64-bit register or a stack slot.
Location: TypeAlias = str | Address

INTEGER_REGISTERS = frozenset(
    ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{number}" for number in range(8, 16)))
)


class Instruction(NamedTuple):
    """A decoded instruction."""

    address: int
    #: Intel's mnemonic, in lower case.
    name: str
    #: In Intel's order: the operand that is written comes first. A branch has its target address.
    operands: tuple[Operand, ...]
    #: The memory operand, and its width in bits.
    memory: Address | None
    memory_bits: int
    #: Whether the memory operand is read, and whether it is written; ``lea`` does neither.
    loads: bool
    stores: bool
    #: Names of the registers read (with those of the address) and written; a register that is written in part is also read.
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    #: Integer registers and stack slots that are written.
    changes: tuple[Location, ...]
    #: What runs next: "next" (the next instruction), "branch" (the next or the jump's target), "jump", "call" or "end".
    flow: str
    #: Condition of a jump, conditional move and the like, such as "ne"; None for conditions on parity and overflow.
    condition: str | None
    #: Whether it changes the flags that conditions test.
    sets_flags: bool

    @property
    def target(self) -> int | None:
        """Target address of a jump; None for other instructions, and where a register or memory holds the target."""
        to = self.operands[0] if self.flow in ("branch", "jump") else None
        return to if isinstance(to, int) else None

    def width(self, operand: Operand) -> int:
        """Bits of an operand; for a constant, the bits of the operand that is written."""
        if isinstance(operand, int):
            operand = self.operands[0]
        return operand.bits if isinstance(operand, Register) else self.memory_bits


def location_of(operand: Operand) -> Location | None:
    """The operand as a location; None for constants, vectors and memory outside of the stack."""
    if isinstance(operand, Register):
        return operand.name if operand.name in INTEGER_REGISTERS else None
    return operand if isinstance(operand, Address) and operand.is_slot else None


def signed(number: int, bits: int) -> int:
    """The low ``bits`` of a number as a signed number."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


@dataclass
class Loop:
    """A natural loop."""

    #: The block with which every iteration begins.
    header: int
    #: Its blocks, with the header.
    body: set[int]
    #: Blocks that jump back to the header.
    latches: list[int]
    #: Number of the innermost loop around it; None if there is none.
    parent: int | None = None


@dataclass
class FlowGraph:
    """Control flow of the code under one symbol: a function, and the functions after it that have no symbol of their own."""

    #: The instructions, at least one.
    function: Sequence[Instruction]
    #: (first, last) instruction of each block. The last block is empty: it precedes the blocks to which nothing else leads.
    blocks: list[tuple[int, int]] = field(init=False)
    #: Blocks that may follow each block; after a conditional jump its target, then the next block.
    successors: list[list[int]] = field(init=False)
    predecessors: list[list[int]] = field(init=False)
    #: Blocks in reverse postorder, without those that only pad the space between others.
    order: list[int] = field(init=False)
    #: Immediate dominator of each block; the empty block is its own.
    dominator: dict[int, int] = field(init=False)
    #: Loops, outer ones before those inside them.
    loops: list[Loop] = field(init=False)
    #: Header -> number of its loop.
    loop_at: dict[int, int] = field(init=False)
    #: Number of the innermost loop of a block; None outside of loops.
    loop_of: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self._find_blocks()
        root = len(self.blocks)
        graph = nx.DiGraph((block, after) for block, ways in enumerate(self.successors) for after in ways)
        graph.add_nodes_from(range(root + 1))
        entries: list[int] = []
        seen: set[int] = set()
        for block in range(root):
            if block not in seen and not all(instruction.name == "nop" for instruction in self.code(block)):
                entries.append(block)
                seen |= {block, *nx.descendants(graph, block)}
        graph.add_edges_from((root, entry) for entry in entries)
        self.blocks.append((0, -1))
        self.successors.append(entries)
        self.order = list(nx.dfs_postorder_nodes(graph, root))[::-1]
        self.dominator = {**nx.immediate_dominators(graph, root), root: root}
        self.predecessors = [[] for _ in self.blocks]
        for block in self.order:
            for after in self.successors[block]:
                self.predecessors[after].append(block)
        self.loops = self._find_loops()
        self.loop_at = {loop.header: number for number, loop in enumerate(self.loops)}
        self.loop_of = [None] * len(self.blocks)
        for number, loop in enumerate(self.loops):  # inner loops come later
            loop.parent = self.loop_of[loop.header]
            for block in loop.body:
                self.loop_of[block] = number

    def _find_blocks(self) -> None:
        at = {instruction.address: i for i, instruction in enumerate(self.function)}
        starts = {0, len(self.function)}
        for i, instruction in enumerate(self.function):
            if instruction.target in at:
                starts.add(at[instruction.target])
            if instruction.flow in ("branch", "jump", "end"):
                starts.add(i + 1)
        firsts = sorted(starts)
        number = {first: block for block, first in enumerate(firsts)}
        self.blocks = [(first, after - 1) for first, after in pairwise(firsts)]
        self.successors = []
        for block, (_, last) in enumerate(self.blocks):
            target, flow = self.function[last].target, self.function[last].flow
            ways = [number[at[target]]] if target in at else []
            if block + 1 < len(self.blocks) and flow not in ("jump", "end"):
                ways.append(block + 1)
            self.successors.append(ways)

    def code(self, block: int) -> Sequence[Instruction]:
        """The instructions of a block."""
        first, last = self.blocks[block]
        return self.function[first : last + 1]

    def condition(self, block: int) -> str | None:
        """Condition of the jump at the end of a block; None if there is none or it is not known."""
        return self.function[self.blocks[block][1]].condition

    def nest(self, number: int | None) -> list[int]:
        """A loop and the loops around it, the innermost first; an empty list for None."""
        found = []
        while number is not None:
            found.append(number)
            number = self.loops[number].parent
        return found

    def dominates(self, over: int, block: int) -> bool:
        """Whether every path to ``block`` passes ``over``."""
        while block != over:
            above = self.dominator[block]
            if above == block:
                return False
            block = above
        return True

    def _find_loops(self) -> list[Loop]:
        found: dict[int, Loop] = {}
        for block in self.order:
            for header in self.successors[block]:
                if self.dominates(header, block):
                    loop = found.setdefault(header, Loop(header, {header}, []))
                    loop.latches.append(block)
                    todo = [block]
                    while todo:
                        inside = todo.pop()
                        if inside not in loop.body:
                            loop.body.add(inside)
                            todo += self.predecessors[inside]
        return sorted(found.values(), key=lambda loop: -len(loop.body))
