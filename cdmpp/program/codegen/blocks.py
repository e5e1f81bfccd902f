"""Blocks, dominators and natural loops of a compiled function.

Compilers lay blocks out in any order, so loops are found as compilers find them: an edge to a block that dominates its
source closes a loop, whose body is what reaches that edge without passing the block (Aho, Lam, Sethi, Ullman: Compilers,
section 9.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cdmpp.program.codegen.instruction import Instruction


@dataclass
class Loop:
    """A natural loop.

    Attributes
    ----------
    header
        The block that every iteration begins with.
    body
        Its blocks, the header among them.
    latches
        Blocks that go back to the header.
    parent
        Number of the innermost loop around it; None outside of all.
    """

    header: int
    body: set[int]
    latches: list[int]
    parent: int | None = None


@dataclass
class FlowGraph:
    """Control flow of what stands under one symbol: a function, and those that have no symbol of their own.

    Attributes
    ----------
    blocks
        (first, last) instruction of each block. The last block is empty: it precedes all that nothing else leads to.
    successors
        Blocks that may follow each: of a conditional jump its target, then the next.
    order
        Blocks in reverse postorder; without those that only fill up the space between others.
    dominator
        Immediate dominator of each block; that of the empty one is itself.
    loops
        Outer loops before those inside them.
    loop_of
        Number of the innermost loop of a block; None outside of loops.
    """

    function: Sequence[Instruction]
    blocks: list[tuple[int, int]]
    successors: list[list[int]]
    predecessors: list[list[int]] = field(init=False)
    order: list[int] = field(init=False)
    dominator: dict[int, int] = field(init=False)
    loops: list[Loop] = field(init=False)
    loop_of: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.order = _reverse_postorder(self.successors, len(self.blocks) - 1)
        self.predecessors = [[] for _ in self.blocks]
        for block in self.order:
            for after in self.successors[block]:
                self.predecessors[after].append(block)
        self.dominator = _dominators(self.order, self.predecessors)
        self.loops = self._find_loops()
        self.loop_of = [None] * len(self.blocks)
        for number, loop in enumerate(self.loops):  # inner loops come later
            loop.parent = self.loop_of[loop.header]
            for block in loop.body:
                self.loop_of[block] = number

    @classmethod
    def of(cls, function: Sequence[Instruction]) -> FlowGraph:
        """The graph of a function's instructions, of which there is at least one."""
        at = {instruction.address: i for i, instruction in enumerate(function)}
        starts = {0}
        for i, instruction in enumerate(function):
            if instruction.target in at:
                starts.add(at[instruction.target])
            if instruction.flow in ("branch", "jump", "end") and i + 1 < len(function):
                starts.add(i + 1)
        firsts = sorted(starts)
        blocks = list(zip(firsts, [first - 1 for first in firsts[1:]] + [len(function) - 1], strict=True))
        number = {first: block for block, (first, _) in enumerate(blocks)}
        successors: list[list[int]] = []
        for block, (_, last) in enumerate(blocks):
            target, flow = function[last].target, function[last].flow
            after = [number[at[target]]] if target in at else []
            if block + 1 < len(blocks) and flow not in ("jump", "end"):
                after.append(block + 1)
            successors.append(after)
        padding = [all(i.name == "nop" for i in function[first : last + 1]) for first, last in blocks]
        return cls(function, [*blocks, (0, -1)], [*successors, _roots(successors, padding)])

    def code(self, block: int) -> Sequence[Instruction]:
        """The instructions of a block."""
        first, last = self.blocks[block]
        return self.function[first : last + 1]

    def condition(self, block: int) -> str | None:
        """Condition of the jump at the end of a block; None where there is none that is known."""
        return self.function[self.blocks[block][1]].condition

    def dominates(self, over: int, block: int) -> bool:
        """Whether every way to a block passes another."""
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


def _roots(successors: list[list[int]], padding: list[bool]) -> list[int]:
    """Blocks, in order, to which none before them leads, but for those that only fill up."""
    roots, seen = [], set[int]()
    for root in range(len(successors)):
        if root in seen or padding[root]:
            continue
        roots.append(root)
        todo = [root]
        while todo:
            block = todo.pop()
            if block not in seen:
                seen.add(block)
                todo += successors[block]
    return roots


def _reverse_postorder(successors: list[list[int]], root: int) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(successors[root]))]
    while stack:
        block, rest = stack[-1]
        after = next((b for b in rest if b not in seen), None)
        if after is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(successors[after])))
    return order[::-1]


def _dominators(order: list[int], predecessors: list[list[int]]) -> dict[int, int]:
    """Cooper, Harvey, Kennedy: A simple, fast dominance algorithm (2001)."""
    place = {block: i for i, block in enumerate(order)}
    found = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [before for before in predecessors[block] if before in found]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    while place[new] > place[other]:
                        new = found[new]
                    while place[other] > place[new]:
                        other = found[other]
            if found.get(block) != new:
                found[block] = new
                changed = True
    return found
