"""Finds out what a computation does from the body of its block: the analyses of :mod:`cdmpp.program.ast_body`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.affine import add, scale
from cdmpp.program.ast_body import (
    GLOBAL,
    LOCAL,
    SHARED,
    Access,
    Body,
    BodyTable,
    BufferInfo,
    Tree,
    tree_slots,
)
from cdmpp.program.ast_nodes import NodeTypes
from cdmpp.program.leaf_schema import OP_KINDS, SPECIAL

_OP = {name: i for i, name in enumerate(OP_KINDS)}

#: What calls count as, by the last part of their name; others as "call".
CALLS = {
    "exp": "exp", "exp2": "exp", "exp10": "exp", "sigmoid": "exp",
    "tanh": "tanh", "erf": "erf",
    "sqrt": "sqrt", "rsqrt": "sqrt",
    "log": "transcendental", "log2": "transcendental", "log10": "transcendental", "log1p": "transcendental",
    "pow": "transcendental", "sin": "transcendental", "cos": "transcendental", "tan": "transcendental",
    "atan": "transcendental", "sinh": "transcendental", "cosh": "transcendental",
    "fma": "fma", "if_then_else": "branch",
    "floor": "fminmax", "ceil": "fminmax", "round": "fminmax", "trunc": "fminmax", "nearbyint": "fminmax",
    "fabs": "fminmax", "abs": "fminmax", "clz": "iadd", "popcount": "iadd",
    "shift_left": "iadd", "shift_right": "iadd", "bitwise_and": "iadd", "bitwise_or": "iadd",
    "bitwise_xor": "iadd", "bitwise_not": "iadd",
}  # fmt: skip


class BodyAnalyser:
    """Analyses one straight-line statement.

    Parameters
    ----------
    types
        TVM's node classes.
    slot_vars
        Variables that are the first slots, in order; others get slots as they occur.
    find
        Tells where a buffer is in the regions of the block.
    """

    def __init__(
        self, types: NodeTypes, slot_vars: list[Any], find: Callable[[Any], tuple[int, int] | None]
    ) -> None:
        self.types = types
        self.slot_vars = slot_vars
        self.slot_of = {var.__chandle__(): i for i, var in enumerate(slot_vars)}
        self.lets: dict[int, Any] = {}
        self.find = find
        self.binary = _binary_operations(types)
        self.elements: dict[int, tuple[float, bool]] = {}
        self.ops = [0.0] * len(OP_KINDS)
        self.buffers: dict[int, int] = {}
        self.infos: list[BufferInfo] = []
        self.objects: list[Any] = []
        self.loads: dict[tuple[int, Any], int] = {}
        self.stores: dict[tuple[int, Any], int] = {}
        self.trees: dict[tuple[int, Any], tuple[Tree, ...]] = {}
        self.branch: frozenset[int] = frozenset()
        self.special: frozenset[int] = frozenset()
        self.special_depth = 0
        self.itemsize, self.is_float = 0.0, True

    def body(self, domain: tuple[int, ...], init: Body | None, is_init: bool = False) -> Body:
        """What has been analysed so far."""
        keys = list(self.stores) + [k for k in self.loads if k not in self.stores]
        slots: set[int] = set()
        for tree in (tree for key in self.stores for tree in self.trees[key]):
            slots |= tree_slots(tree)
        points = prod(extent for slot, extent in enumerate(domain) if slot in slots or not is_init)
        accesses = tuple(
            Access(k[0], self.trees[k], self.loads.get(k, 0), self.stores.get(k, 0)) for k in keys
        )
        return Body(
            ops=tuple(self.ops),
            accesses=accesses,
            buffers=tuple(self.infos),
            branch_slots=self.branch,
            special_slots=self.special,
            stores=sum(self.stores.values()),
            itemsize=self.itemsize,
            is_float=self.is_float,
            slot_vars=tuple(self.slot_vars),
            domain=domain,
            points=points,
            store_slots=frozenset(slots),
            reduces=any(k in self.loads for k in self.stores),
            init=init,
            table=BodyTable.of(accesses, tuple(self.infos)),
        )

    def store(self, stmt: Any) -> None:
        """Add a ``BufferStore``."""
        self._touch(stmt.buffer, stmt.indices, self.stores)
        if not self.itemsize:
            self.itemsize, self.is_float = self._element(stmt.buffer.ty.dtype)
        self.value(stmt.value)

    def value(self, expr: Any) -> None:
        """Count the operations and accesses of a value."""
        t = self.types
        kind = type(expr)
        if kind is t.TensorLoad:
            self._touch(expr.source, expr.indices, self.loads)
        elif kind in self.binary:
            a, b = expr.a, expr.b
            operation, on_floats = self.binary[kind]
            if on_floats is not None and self._element(expr.ty)[1]:
                operation = on_floats
                if operation == _OP["fadd"] and (type(a) is t.Mul or type(b) is t.Mul):
                    operation = _OP["fma"]
                    self.ops[_OP["fmul"]] -= 1
            self.ops[operation] += 1
            self.value(a)
            self.value(b)
        elif kind is t.Var:
            if expr.__chandle__() in self.lets:
                self.value(self.lets.pop(expr.__chandle__()))
            elif self.special_depth:
                self.special |= tree_slots(self.tree(expr))
        elif kind in t.constants:
            pass
        elif kind is t.Call:
            self._call(expr)
        elif kind is t.Cast:
            self.ops[_OP["cast"]] += 1
            self.value(expr.value)
        elif kind is t.Select:
            self.ops[_OP["select"]] += 1
            for part in (expr.condition, expr.true_value, expr.false_value):
                self.value(part)
        elif kind is t.Not:
            self.ops[_OP["iadd"]] += 1
            self.value(expr.a)
        elif kind is t.Let:
            self.lets[expr.var.__chandle__()] = expr.value
            self.value(expr.body)
        else:
            for part in t.children(expr):
                self.value(part)

    def call(self, expr: Any) -> None:
        """Add an evaluated call for its effect."""
        self.ops[_OP["call"]] += 1
        for arg in expr.args:
            self.value(arg)

    def condition(self, expr: Any) -> None:
        """Add a condition under which the computation runs."""
        self.branch |= tree_slots(self.tree(expr))
        self.value(expr)

    def _call(self, expr: Any) -> None:
        name = str(getattr(expr.op, "name", expr.op)).rpartition(".")[2]
        kind = CALLS.get(name, "call")
        self.ops[_OP[kind]] += 1
        args = self.types.items(expr.args)
        if name == "sigmoid":
            self.ops[_OP["fdiv"]] += 1
            self.ops[_OP["fadd"]] += 1
        elif name == "if_then_else":
            self.branch |= tree_slots(self.tree(args[0]))
        is_special = kind in SPECIAL
        self.special_depth += is_special
        for arg in args:
            self.value(arg)
        self.special_depth -= is_special

    def _touch(self, buffer: Any, indices: Any, into: dict[tuple[int, Any], int]) -> None:
        handle = buffer.__chandle__()
        number = self.buffers.get(handle)
        if number is None:
            number = self.buffers[handle] = len(self.infos)
            self.infos.append(self._info(buffer))
            self.objects.append(buffer)
        trees = tuple([self.tree(i) for i in self.types.items(indices)])
        if self.special_depth:
            self.special = self.special.union(*map(tree_slots, trees))
        key = (number, _freeze(trees))
        self.trees[key] = trees
        into[key] = into.get(key, 0) + 1

    def _info(self, buffer: Any) -> BufferInfo:
        ty = buffer.ty
        shape = []
        for extent in self.types.items(ty.shape):
            if type(extent) is not self.types.IntImm:
                raise ProgramError(
                    f"buffer {buffer.name} has the symbolic extent {extent}: shapes must be fixed"
                )
            shape.append(int(extent.value))
        scope = str(ty.storage_scope)
        code = SHARED if scope.startswith("shared") else GLOBAL if scope in ("", "global") else LOCAL
        return BufferInfo(tuple(shape), self._element(ty.dtype)[0], code, self.find(buffer))

    def _element(self, prim_type: Any) -> tuple[float, bool]:
        """Bytes of a ``PrimType``, and whether it is a floating-point type."""
        known = self.elements.get(prim_type.__chandle__())  # few objects, which the statement keeps alive
        if known is None:
            dtype = prim_type.dtype
            is_float = int(dtype.type_code) not in (0, 1, 6)  # int, uint, bool
            known = self.elements[prim_type.__chandle__()] = dtype.bits * dtype.lanes / 8, is_float
        return known

    def tree(self, expr: Any) -> Tree:
        """An index expression over slots."""
        t = self.types
        kind = type(expr)
        if kind is t.IntImm:
            return int(expr.value)
        if kind is t.Var:
            handle = expr.__chandle__()
            if handle in self.lets:
                return self.tree(self.lets[handle])
            slot = self.slot_of.get(handle)
            if slot is None:
                slot = self.slot_of[handle] = len(self.slot_vars)
                self.slot_vars.append(expr)
            return {slot: 1}
        if kind in t.binary:
            return _binary(t, kind, self.tree(expr.a), self.tree(expr.b))
        if kind is t.Cast:
            return self.tree(expr.value)
        if kind is t.TensorLoad:
            self._touch(expr.source, expr.indices, self.loads)
            return ("?", tuple(self.tree(i) for i in expr.indices))
        if kind is t.Call:
            return ("?", tuple(self.tree(a) for a in expr.args))
        return ("?", tuple(self.tree(p) for p in t.children(expr)))


@lru_cache(maxsize=1)
def _binary_operations(t: NodeTypes) -> dict[type, tuple[int, int | None]]:
    """Kind of a binary operation -> what it counts as on integers, and on floating-point numbers if different."""
    kinds: dict[type, tuple[str, str | None]] = dict.fromkeys(t.binary, ("iadd", None))
    kinds |= dict.fromkeys(t.division, ("idivmod", None))
    kinds |= dict.fromkeys(t.compare, ("compare", None))
    kinds |= {
        t.Add: ("iadd", "fadd"), t.Sub: ("iadd", "fadd"), t.Mul: ("imul", "fmul"), t.Div: ("idivmod", "fdiv"),
        t.Max: ("iadd", "fminmax"), t.Min: ("iadd", "fminmax"),
    }  # fmt: skip
    return {kind: (_OP[a], _OP[b] if b else None) for kind, (a, b) in kinds.items()}


def _binary(t: NodeTypes, kind: type, a: Tree, b: Tree) -> Tree:
    if (isinstance(a, tuple) and a[0] == "?") or (isinstance(b, tuple) and b[0] == "?"):
        return ("?", (a, b))
    if kind is t.Add or kind is t.Sub:
        if kind is t.Sub:
            b = -b if isinstance(b, int) else scale(b, -1) if isinstance(b, dict) else ("*", (b, -1))
        if not isinstance(a, tuple) and not isinstance(b, tuple):
            return add(a, b)
        return ("+", (a, b))
    if kind is t.Mul:
        if isinstance(b, int) and not isinstance(a, tuple):
            return scale(a, b)
        if isinstance(a, int) and not isinstance(b, tuple):
            return scale(b, a)
        return ("*", (a, b))
    if kind in t.division:
        if isinstance(a, int) and isinstance(b, int) and b:
            return a % b if kind is t.FloorMod else a // b
        return ("%" if kind in (t.FloorMod, t.Mod) else "/", (a, b))
    if (kind is t.Max or kind is t.Min) and (isinstance(a, int) or isinstance(b, int)):
        return b if isinstance(a, int) else a  # clamping
    return ("?", (a, b))


def _freeze(tree: Any) -> Any:
    if isinstance(tree, dict):
        return frozenset(tree.items())
    if isinstance(tree, tuple):
        return tuple([_freeze(t) for t in tree])
    return tree


def _straight(t: NodeTypes, stmt: Any, analyser: BodyAnalyser | None) -> bool:
    """Whether a statement has no loops and no blocks in it; gives its parts to the analyser, if there is one."""
    kind = type(stmt)
    if kind is t.BufferStore:
        if analyser is not None:
            analyser.store(stmt)
        return True
    if kind is t.SeqStmt:
        return all(_straight(t, part, analyser) for part in stmt.seq)
    if kind is t.IfThenElse:
        if analyser is not None:
            analyser.condition(stmt.condition)
        branches = [stmt.then_case] if stmt.else_case is None else [stmt.then_case, stmt.else_case]
        return all(_straight(t, branch, analyser) for branch in branches)
    if kind is t.Evaluate:
        if analyser is not None and type(stmt.value) is t.Call:
            analyser.call(stmt.value)
        return True
    if kind is t.Bind:
        if analyser is not None:
            analyser.lets[stmt.var.__chandle__()] = stmt.value
        return True
    return False


def analyse_block(
    t: NodeTypes, block: Any, number: Callable[[Any], int]
) -> tuple[Body | None, list[list[int]], bool]:
    """The computation of an ``SBlock``.

    Returns
    -------
    body
        None if the block has loops or blocks inside, or nothing at all.
    numbers
        Of the buffers of the body and of its initialisation, as ``number`` gives them.
    reusable
        The analysis holds for every block of the same structural hash.
    """
    if not _straight(t, block.body, None) or (block.init is not None and not _straight(t, block.init, None)):
        return None, [], True
    iter_vars = t.items(block.iter_vars)
    variables = [v.var for v in iter_vars]
    domain = []
    for iter_var in iter_vars:
        extent = iter_var.dom.extent
        if type(extent) is not t.IntImm:
            raise ProgramError(
                f"block {block.name_hint} has the symbolic extent {extent}: shapes must be fixed"
            )
        domain.append(int(extent.value))
    where = {
        region.source.__chandle__(): (side, i)
        for side, regions in ((1, block.reads), (0, block.writes))
        for i, region in enumerate(t.items(regions))
    }

    def analyse(stmt: Any, init: Body | None, is_init: bool = False) -> tuple[Body, list[int]]:
        analyser = BodyAnalyser(t, list(variables), lambda buffer: where.get(buffer.__chandle__()))
        _straight(t, stmt, analyser)
        return analyser.body(tuple(domain), init, is_init), [number(b) for b in analyser.objects]

    init, init_numbers = analyse(block.init, None, is_init=True) if block.init is not None else (None, [])
    body, numbers = analyse(block.body, init)
    if not body.stores and not any(body.ops):
        return None, [], True
    bodies = [body] if init is None else [body, init]
    reusable = all(b.where is not None for x in bodies for b in x.buffers)
    reusable = reusable and all(len(x.slot_vars) == len(domain) for x in bodies)
    return body, [numbers, init_numbers], reusable


def analyse_statement(t: NodeTypes, stmt: Any, number: Callable[[Any], int]) -> tuple[Body, list[list[int]]]:
    """The computation of a statement outside blocks, and the numbers of its buffers."""
    analyser = BodyAnalyser(t, [], lambda _: None)
    _straight(t, stmt, analyser)
    return analyser.body((), None), [[number(b) for b in analyser.objects]]
