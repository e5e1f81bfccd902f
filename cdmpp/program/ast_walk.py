"""From a PrimFunc to its loops and leaves, as plain Python data.

The walk looks at statements only (loops, sequences, blocks); expressions are looked at where a block binds its
iteration variables to loops, and block bodies once per distinct body (see :mod:`cdmpp.program.ast_body`).

What counts as a node of the AST, in pre-order: the root (position 0), every loop that runs more than once, and
every computation (leaf). Loops of extent 1 vanish when a program is lowered and are no nodes; sequences and
block boundaries carry nothing and are none either. A reduction block whose initialisation has not been
decomposed has two leaves, the initialisation first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.affine import Form, IndexSpace
from cdmpp.program.ast_analysis import analyse_block, analyse_statement
from cdmpp.program.ast_body import GLOBAL, SHARED, Body
from cdmpp.program.ast_forms import Environment, form_reader, interval
from cdmpp.program.ast_loops import (
    BLOCK_IDX,
    SERIAL,
    THREAD_BINDING,
    THREAD_IDX,
    VECTORIZED,
    VTHREAD,
    Leaf,
    Loop,
    RawProgram,
    mark_unrolled,
)  # fmt: skip
from cdmpp.program.ast_nodes import NodeTypes, node_types

#: Trip count assumed for a ``while`` loop, which the program does not tell.
_WHILE_TRIPS = 8


class ProgramWalker:
    """Walks PrimFuncs; keeps the analyses of block bodies between programs.

    Raises
    ------
    ProgramError
        From :meth:`walk`: no computation, symbolic shapes, not a PrimFunc.
    """

    def __init__(self) -> None:
        self.types = node_types()
        self.bodies: dict[int, Body | None] = {}
        # Made once and shared by all walks, so that a walk leaves no reference cycles behind: they would pile up
        # until the collector runs.
        self.env: Environment = {}
        self.form_of = form_reader(self.types, self.env)
        self.handlers = _handlers(self.types)

    def walk(self, func: Any) -> RawProgram:
        """Loops and leaves of a PrimFunc or of the only PrimFunc of an IRModule."""
        self.env.clear()
        return _Walk(self).run(prim_func(func))


def prim_func(func: Any) -> Any:
    """A PrimFunc itself, or the only PrimFunc of an IRModule.

    Raises
    ------
    ProgramError
        It is neither.
    """
    t = node_types()
    if isinstance(func, t.IRModule):
        found = [f for f in func.functions.values() if isinstance(f, t.PrimFunc)]
        if len(found) != 1:
            raise ProgramError(f"expected a module with one PrimFunc, got one with {len(found)}")
        return found[0]
    if not isinstance(func, t.PrimFunc):
        raise ProgramError(f"expected a PrimFunc or an IRModule, got {type(func).__name__}")
    return func


def _thread_kind(stmt: Any) -> tuple[int, str]:
    """Kind of a loop bound to a thread axis, and the axis."""
    tag = str(stmt.thread_binding.thread_tag)
    return BLOCK_IDX if tag.startswith("block") else VTHREAD if tag.startswith("v") else THREAD_IDX, tag


class _Walk:
    """The walk of one program."""

    def __init__(self, walker: ProgramWalker) -> None:
        t = self.t = walker.types
        self.walker = walker
        self.item = t.item
        self.loops: list[Loop] = []
        self.leaves: list[Leaf] = []
        self.chain: list[int] = []
        self.extents: list[int] = []
        self.env = walker.env
        self.form_of = walker.form_of
        #: thread axis -> depth of the loop bound to it
        self.axes: dict[str, int] = {}
        self.axes_seen = False
        self.conditions: list[Any] = []
        self.buffers: dict[int, int] = {}
        self.allocated: set[int] = set()
        self.position = 0
        self.nest = -1
        self.max_step, self.explicit = 0, 1
        self.handlers = walker.handlers

    def run(self, func: Any) -> RawProgram:
        self.visit(func.body)
        if not self.leaves:
            raise ProgramError("the program has no computation: it stores nothing and calls nothing")
        mark_unrolled(self.loops, self.leaves)
        return RawProgram(self.loops, self.leaves, self.position + 1, len(self.buffers), *self._storage())

    def visit(self, stmt: Any) -> None:
        handler = self.handlers.get(type(stmt))
        if handler is not None:
            handler(self, stmt)

    # Statements

    def _seq(self, stmt: Any) -> None:
        for part in self.t.items(stmt.seq):
            self.visit(part)

    def _for(self, stmt: Any) -> None:
        t, chain, env = self.t, self.chain, self.env
        int_imm, map_size = t.IntImm, t.map_size
        saved = self.max_step, self.explicit
        opened = 0
        axes: list[str] = []
        while True:
            extent = stmt.extent
            n = extent.value if type(extent) is int_imm else self._bound(extent)
            annotations = stmt.annotations
            if map_size(annotations):
                self.max_step = int(annotations.get("pragma_auto_unroll_max_step", self.max_step))
                self.explicit = int(annotations.get("pragma_unroll_explicit", self.explicit))
            variable = stmt.loop_var.__chandle__()
            if n == 1:
                env[variable] = (0,)
            else:
                kind = stmt.kind
                depth = len(chain)
                if kind == THREAD_BINDING:
                    kind, tag = _thread_kind(stmt)
                    # The same thread axis again: the same threads, no further loop.
                    depth = self.axes.get(tag, depth)
                    if depth == len(chain) and kind != VTHREAD:
                        self.axes[tag] = depth
                        axes.append(tag)
                    self.axes_seen = True
                env[variable] = depth
                if depth == len(chain):
                    self._open(n, kind)
                    opened += 1
            stmt = stmt.body
            if type(stmt) is not t.For:
                break
        self.visit(stmt)
        if opened:
            del chain[-opened:], self.extents[-opened:]
        for tag in axes:
            del self.axes[tag]
        self.max_step, self.explicit = saved

    def _open(self, extent: int, kind: int) -> None:
        loops, chain = self.loops, self.chain
        self.position += 1
        if not chain:
            self.nest += 1
        parent = chain[-1] if chain else -1
        chain.append(len(loops))
        loops.append(Loop(parent, extent, kind, self.max_step, self.explicit))
        self.extents.append(extent)

    def _while(self, stmt: Any) -> None:
        self._open(_WHILE_TRIPS, SERIAL)
        self.visit(stmt.body)
        self.chain.pop()
        self.extents.pop()

    def _if(self, stmt: Any) -> None:
        self.conditions.append(stmt.condition)
        self.visit(stmt.then_case)
        if stmt.else_case is not None:
            self.visit(stmt.else_case)
        self.conditions.pop()

    def _attr(self, stmt: Any) -> None:
        saved = self.max_step, self.explicit
        key = str(stmt.attr_key)
        if key == "pragma_auto_unroll_max_step":
            self.max_step = int(stmt.value)
        elif key == "pragma_unroll_explicit":
            self.explicit = int(stmt.value)
        self.visit(stmt.body)
        self.max_step, self.explicit = saved

    def _bind(self, stmt: Any) -> None:
        self.env[stmt.var.__chandle__()] = stmt.value

    def _alloc(self, stmt: Any) -> None:
        self.allocated.add(self._number(stmt.buffer))

    def _block(self, block: Any) -> None:
        for buffer in self.t.items(block.alloc_buffers):
            self.allocated.add(self._number(buffer))
        if block.init is not None:
            self.visit(block.init)
        self.visit(block.body)

    def _realize(self, realize: Any) -> None:
        block = realize.block
        key = self.t.hash(block, True, False) if self.chain else 0
        numbers: list[list[int]] | None = None
        if key in self.walker.bodies:
            body = self.walker.bodies[key]
        else:
            body, numbers, reusable = analyse_block(self.t, block, self._number)
            if reusable and self.chain:
                self.walker.bodies[key] = body
        predicate = realize.predicate
        conditional = type(predicate) is not self.t.IntImm
        if conditional:
            self.conditions.append(predicate)
        if body is None:
            for iter_var, value in zip(block.iter_vars, realize.iter_values, strict=True):
                self.env[iter_var.var.__chandle__()] = value
            self._block(block)
        else:
            if numbers is None:
                numbers = self._find_buffers(block, body)
            values = realize.iter_values
            item, form_of = self.item, self.form_of
            space = IndexSpace(self.extents.copy())
            slots = [form_of(item(values, i), space) for i in range(len(body.domain))]
            self._leaf(body, slots, space, numbers)
        if conditional:
            self.conditions.pop()

    def _plain(self, stmt: Any) -> None:
        if type(stmt) is self.t.Evaluate and type(stmt.value) is not self.t.Call:
            return
        body, numbers = analyse_statement(self.t, stmt, self._number)
        self._leaf(body, [], IndexSpace(self.extents.copy()), numbers)

    # Leaves

    def _find_buffers(self, block: Any, body: Body) -> list[list[int]]:
        """Numbers of the buffers of a body that is known from an equal block."""
        regions = (block.writes, block.reads)
        item = self.item
        bodies = [body] if body.init is None else [body, body.init]
        return [
            [self._number(item(regions[b.where[0]], b.where[1]).source) for b in x.buffers]  # type: ignore[index]
            for x in bodies
        ]

    def _leaf(self, body: Body, slots: list[Form], space: IndexSpace, numbers: list[list[int]]) -> None:
        if body.init is not None:
            self._add(body.init, slots, space, numbers[1], is_init=True, guarded=True)
        self._add(body, slots, space, numbers[0], is_init=False, guarded=body.init is not None)

    def _add(
        self,
        body: Body,
        slots: list[Form],
        space: IndexSpace,
        buffers: list[int],
        is_init: bool,
        guarded: bool,
    ) -> None:
        if len(body.slot_vars) > len(slots):
            slots = slots + [self.form_of(var, space) for var in body.slot_vars[len(slots) :]]
        kept = list(range(len(self.chain)))
        reduction: set[int] = set()
        if is_init or body.reduces:
            outputs: set[int] = set()
            for slot in body.store_slots:
                outputs |= space.loops_of(slots[slot])
            if is_init:
                kept = sorted(outputs)
            else:
                reduction = set(kept) - outputs
        branch: set[int] = set()
        for slot in body.branch_slots:
            branch |= space.loops_of(slots[slot])
        for condition in self.conditions:
            branch |= space.loops_of(self.form_of(condition, space))
        special: set[int] = set()
        for slot in body.special_slots:
            special |= space.loops_of(slots[slot])
        for d in branch:
            loop = self.loops[self.chain[d]]
            if loop.kind == VECTORIZED:
                loop.scalarised = True
        self.position += 1
        if not self.chain:
            self.nest += 1
        self.leaves.append(
            Leaf(
                body,
                tuple(self.chain),
                kept,
                space,
                slots,
                buffers,
                self.position,
                reduction,
                branch,
                special,
                bool(self.conditions),
                is_init,
                guarded,
                self.nest,
            )
        )

    def _number(self, buffer: Any) -> int:
        return self.buffers.setdefault(buffer.__chandle__(), len(self.buffers))

    def _bound(self, extent: Any) -> int:
        """Largest value of an extent that is not constant."""
        values = interval(self.t, extent, self.env, self.extents)
        if values is None:
            raise ProgramError(f"a loop has the symbolic extent {extent}: shapes must be fixed")
        return max(1, values[1])

    def _storage(self) -> tuple[list[int], list[int], list[bool]]:
        """:attr:`RawProgram.shared_prefix`, ``renewed`` and ``threads_share``."""
        n = len(self.buffers)
        prefix, renewed, share = [-1] * n, [0] * n, [False] * n
        chains: dict[int, tuple[int, ...]] = {}
        scope: dict[int, int] = {}
        allocated = self.allocated
        for leaf in self.leaves if allocated else ():
            for number, info in zip(leaf.buffers, leaf.body.buffers, strict=True):
                if number not in allocated:
                    continue
                known = chains.get(number)
                if known is None:
                    chains[number], scope[number] = leaf.chain, info.scope
                elif known != leaf.chain[: len(known)]:
                    same = 0
                    for a, b in zip(known, leaf.chain, strict=False):
                        if a != b:
                            break
                        same += 1
                    chains[number] = known[:same]
        for number, chain in chains.items():
            prefix[number] = renewed[number] = len(chain)
            if scope[number] == GLOBAL and self.axes_seen:
                # What is in global memory belongs to all threads of a kernel.
                kinds = [self.loops[i].kind for i in chain]
                renewed[number] = next((i for i, kind in enumerate(kinds) if kind >= BLOCK_IDX), len(kinds))
            share[number] = scope[number] == SHARED
        return prefix, renewed, share


def _handlers(t: NodeTypes) -> dict[Any, Callable[[_Walk, Any], None]]:
    """What to do with each kind of statement; others hold nothing that counts."""
    return {
        t.For: _Walk._for,
        t.SeqStmt: _Walk._seq,
        t.SBlockRealize: _Walk._realize,
        t.SBlock: _Walk._block,
        t.BufferStore: _Walk._plain,
        t.Evaluate: _Walk._plain,
        t.IfThenElse: _Walk._if,
        t.While: _Walk._while,
        t.AttrStmt: _Walk._attr,
        t.Bind: _Walk._bind,
        t.AllocBuffer: _Walk._alloc,
    }
