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
from cdmpp.program.affine import Form, IndexSpace, scale
from cdmpp.program.ast_body import GLOBAL, SHARED, Body, analyse_block, analyse_statement, evaluate
from cdmpp.program.ast_loops import (
    BLOCK_IDX, SERIAL, THREAD_BINDING, THREAD_IDX, VECTORIZED, VTHREAD, Leaf, Loop, RawProgram, interval, mark_unrolled,
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
        import tvm_ffi

        self.types = node_types()
        self.bodies: dict[int, Body | None] = {}
        self.hash: Callable[..., int] = tvm_ffi.structural_hash
        self.item: Callable[[Any, int], Any] = tvm_ffi.get_global_func("ffi.ArrayGetItem")

    def walk(self, func: Any) -> RawProgram:
        """Loops and leaves of a PrimFunc or of the only PrimFunc of an IRModule."""
        return _Walk(self).run(_prim_func(func, self.types))


def _prim_func(func: Any, t: NodeTypes) -> Any:
    if isinstance(func, t.IRModule):
        found = [f for f in func.functions.values() if isinstance(f, t.PrimFunc)]
        if len(found) != 1:
            raise ProgramError(f"expected a module with one PrimFunc, got one with {len(found)}")
        return found[0]
    if not isinstance(func, t.PrimFunc):
        raise ProgramError(f"expected a PrimFunc or an IRModule, got {type(func).__name__}")
    return func


class _Walk:
    """The walk of one program. Variables and buffers are told apart by their handles, which are stable while
    the program is alive: comparing TVM's variables with ``==`` would build expressions."""

    def __init__(self, walker: ProgramWalker) -> None:
        t = self.t = walker.types
        self.walker = walker
        self.item = walker.item
        self.loops: list[Loop] = []
        self.leaves: list[Leaf] = []
        self.chain: list[int] = []
        self.extents: list[int] = []
        #: handle of a variable -> depth of its loop, (constant,) or the expression it is bound to
        self.env: dict[int, Any] = {}
        #: thread axis -> depth of the loop bound to it
        self.axes: dict[str, int] = {}
        self.conditions: list[Any] = []
        self.buffers: dict[int, int] = {}
        self.allocated: set[int] = set()
        self.position = 0
        self.nest = -1
        self.max_step, self.explicit = 0, 1
        self.handlers: dict[Any, Callable[[Any], None]] = {
            t.For: self._for,
            t.SeqStmt: self._seq,
            t.SBlockRealize: self._realize,
            t.SBlock: self._block,
            t.BufferStore: self._plain,
            t.Evaluate: self._plain,
            t.IfThenElse: self._if,
            t.While: self._while,
            t.AttrStmt: self._attr,
            t.Bind: self._bind,
            t.AllocBuffer: self._alloc,
        }

    def run(self, func: Any) -> RawProgram:
        self.visit(func.body)
        if not self.leaves:
            raise ProgramError("the program has no computation: it stores nothing and calls nothing")
        mark_unrolled(self.loops, self.leaves)
        return RawProgram(self.loops, self.leaves, self.position + 1, len(self.buffers), *self._storage())

    def visit(self, stmt: Any) -> None:
        handler = self.handlers.get(type(stmt))
        if handler is not None:
            handler(stmt)

    # Statements

    def _seq(self, stmt: Any) -> None:
        seq = stmt.seq
        for i in range(len(seq)):
            self.visit(self.item(seq, i))

    def _for(self, stmt: Any) -> None:
        extent = stmt.extent
        n = extent.value if type(extent) is self.t.IntImm else self._bound(extent)
        saved = self.max_step, self.explicit
        annotations = stmt.annotations
        if len(annotations):
            self.max_step = int(annotations.get("pragma_auto_unroll_max_step", self.max_step))
            self.explicit = int(annotations.get("pragma_unroll_explicit", self.explicit))
        if n == 1:
            self.env[stmt.loop_var.__chandle__()] = (0,)
            self.visit(stmt.body)
        else:
            kind = int(stmt.kind)
            depth = len(self.chain)
            variable = stmt.loop_var.__chandle__()
            if kind != THREAD_BINDING:
                self.env[variable] = depth
                self._loop(n, kind, stmt.body)
            else:
                tag = str(stmt.thread_binding.thread_tag)
                kind = (
                    BLOCK_IDX if tag.startswith("block") else VTHREAD if tag.startswith("v") else THREAD_IDX
                )
                outer = self.axes.get(tag) if kind != VTHREAD else None
                self.env[variable] = depth if outer is None else outer
                if outer is not None:
                    # The same thread axis again: the same threads, no further loop.
                    self.visit(stmt.body)
                else:
                    self.axes[tag] = depth
                    self._loop(n, kind, stmt.body)
                    del self.axes[tag]
        self.max_step, self.explicit = saved

    def _loop(self, extent: int, kind: int, body: Any) -> None:
        number = len(self.loops)
        self.position += 1
        parent = -1
        if self.chain:
            parent = self.chain[-1]
            self.loops[parent].children.append(number)
        else:
            self.nest += 1
        self.loops.append(Loop(parent, extent, kind, self.max_step, self.explicit, self.nest, self.position))
        self.chain.append(number)
        self.extents.append(extent)
        self.visit(body)
        self.chain.pop()
        self.extents.pop()

    def _while(self, stmt: Any) -> None:
        self._loop(_WHILE_TRIPS, SERIAL, stmt.body)

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
        for buffer in block.alloc_buffers:
            self.allocated.add(self._number(buffer))
        if block.init is not None:
            self.visit(block.init)
        self.visit(block.body)

    def _realize(self, realize: Any) -> None:
        block = realize.block
        key = self.walker.hash(block, map_free_vars=True) if self.chain else 0
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
            space = IndexSpace(self.extents.copy())
            slots = [self._form(self.item(values, i), space) for i in range(len(body.domain))]
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
            [self._number(item(regions[b.where[0]], b.where[1]).source) for b in x.buffers] for x in bodies
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
            slots = slots + [self._form(var, space) for var in body.slot_vars[len(slots) :]]
        forms = [[evaluate(tree, slots, space) for tree in access.index] for access in body.accesses]
        outputs: set[int] = set()
        for access, form in zip(body.accesses, forms, strict=True):
            if access.stores:
                for f in form:
                    outputs |= space.loops_of(f)
        depth = len(self.chain)
        kept = list(range(depth))
        reduction: set[int] = set()
        if is_init:
            kept = sorted(outputs)
        elif body.reduces:
            reduction = set(kept) - outputs
        branch: set[int] = set()
        for slot in body.branch_slots:
            branch |= space.loops_of(slots[slot])
        for condition in self.conditions:
            branch |= space.loops_of(self._form(condition, space))
        for d in branch:
            loop = self.loops[self.chain[d]]
            if loop.kind == VECTORIZED:
                loop.scalarised = True
        self.position += 1
        if self.chain:
            self.loops[self.chain[-1]].children.append(-1 - len(self.leaves))
        else:
            self.nest += 1
        self.leaves.append(
            Leaf(
                body,
                tuple(self.chain),
                kept,
                space,
                forms,
                buffers,
                self.position,
                reduction,
                branch,
                bool(self.conditions),
                is_init,
                guarded,
                self.nest,
            )  # fmt: skip
        )

    def _number(self, buffer: Any) -> int:
        return self.buffers.setdefault(buffer.__chandle__(), len(self.buffers))

    # Expressions

    def _form(self, expr: Any, space: IndexSpace) -> Form:
        """An expression over loop variables as a form."""
        t = self.t
        kind = type(expr)
        if kind is t.Var:
            bound = self.env.get(expr.__chandle__())
            if isinstance(bound, int):
                return {bound: 1}
            if bound is None:
                return 0
            return bound[0] if isinstance(bound, tuple) else self._form(bound, space)
        if kind is t.IntImm:
            return int(expr.value)
        if kind is t.Add:
            return space.sum(self._form(expr.a, space), self._form(expr.b, space))
        if kind is t.Mul:
            return space.product(self._form(expr.a, space), self._form(expr.b, space))
        if kind is t.FloorDiv:
            return space.floordiv(self._form(expr.a, space), self._form(expr.b, space))
        if kind is t.FloorMod:
            return space.floormod(self._form(expr.a, space), self._form(expr.b, space))
        if kind is t.Sub:
            return space.sum(self._form(expr.a, space), scale(self._form(expr.b, space), -1))
        if kind is t.Cast:
            return self._form(expr.value, space)
        if kind is t.TensorLoad:
            return space.opaque([self._form(i, space) for i in expr.indices])
        return space.opaque([self._form(part, space) for part in t.children(expr)])

    def _bound(self, extent: Any) -> int:
        """Largest value of an extent that is not constant."""
        values = interval(self.t, extent, self.env, self.extents)
        if values is None:
            raise ProgramError(f"a loop has the symbolic extent {extent}: shapes must be fixed")
        return max(1, values[1])

    def _storage(self) -> tuple[list[int], list[frozenset[int]]]:
        """See :attr:`RawProgram.shared_prefix` and :attr:`RawProgram.renewed`."""
        chains: dict[int, tuple[int, ...]] = {}
        scope: dict[int, int] = {}
        for leaf in self.leaves:
            for number, info in zip(leaf.buffers, leaf.body.buffers, strict=True):
                if number not in self.allocated:
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
        prefix = [-1] * len(self.buffers)
        renewed: list[frozenset[int]] = [frozenset()] * len(self.buffers)
        for number, chain in chains.items():
            kinds = [self.loops[i].kind for i in chain]
            depths: list[int] = list(range(len(kinds)))
            if scope[number] == GLOBAL:
                depths = depths[: next((i for i, kind in enumerate(kinds) if kind >= BLOCK_IDX), len(kinds))]
            elif scope[number] == SHARED:
                depths = [i for i in depths if kinds[i] != THREAD_IDX]
            prefix[number] = len(kinds)
            renewed[number] = frozenset(depths)
        return prefix, renewed
