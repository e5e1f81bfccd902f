"""What one computation does, apart from the loops around it: operations and buffer accesses.

The body of a block is analysed in terms of its own iteration variables, *slots*, so that the analysis is the
same for all programs in which the block occurs, whatever the schedule: it is kept by structural hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from cdmpp.program.affine import Form, IndexSpace, scale

#: An index expression over slots: constant, linear form, or (operator, operands...) where it is not affine.
Tree = int | dict[int, int] | tuple[Any, ...]

#: Where a buffer lives; everything that is neither global nor shared belongs to one thread.
GLOBAL, SHARED, LOCAL = range(3)


class BufferInfo(NamedTuple):
    """A buffer as a computation sees it.

    Attributes
    ----------
    shape
        Extents in elements.
    itemsize
        Bytes of an element.
    scope
        ``GLOBAL``, ``SHARED`` or ``LOCAL``.
    where
        ``(0, i)``: region ``i`` of the block's writes, ``(1, i)``: of its reads; how to find it again in an
        equal block. None if it is in neither.
    """

    shape: tuple[int, ...]
    itemsize: float
    scope: int
    where: tuple[int, int] | None


@dataclass(slots=True, eq=False)
class Access:
    """All accesses of a computation to one buffer at the same index.

    Attributes
    ----------
    buffer
        Index into :attr:`Body.buffers`.
    index
        One expression over slots per dimension.
    loads, stores
        Number of each per iteration.
    """

    buffer: int
    index: tuple[Tree, ...]
    loads: int
    stores: int


class BodyTable(NamedTuple):
    """The accesses of a body as tables, line after line; a *row* is one dimension of one access (one row if it
    has none).

    Attributes
    ----------
    access
        Of each access: bytes of an element, loads, stores, scope, elements of the buffer, dimensions, and its
        index into :attr:`Body.buffers`.
    row
        Of each row: the access, the dimension counted from the last, extent of the buffer.
    term
        Of each term: row, slot and coefficient; every index is the sum of its terms if ``linear``.
    rows
        Number of rows.
    linear
        All indices are linear in the slots.
    """

    access: list[float]
    row: list[int]
    term: list[int]
    rows: int
    linear: bool

    @classmethod
    def of(cls, accesses: tuple[Access, ...], buffers: tuple[BufferInfo, ...]) -> BodyTable:
        """The tables of a body's accesses."""
        columns: list[float] = []
        rows: list[int] = []
        terms: list[int] = []
        n = 0
        linear = True
        for number, access in enumerate(accesses):
            info = buffers[access.buffer]
            dims = max(1, len(access.index))
            size = prod(info.shape)
            columns += (info.itemsize, access.loads, access.stores, info.scope, size, dims, access.buffer)
            for i in range(dims):
                tree = access.index[i] if access.index else 0
                if isinstance(tree, dict):
                    for slot, coef in tree.items():
                        terms += (n, slot, coef)
                elif isinstance(tree, tuple):
                    linear = False
                rows += (number, dims - 1 - i, info.shape[i] if i < len(info.shape) else 1)
                n += 1
        return cls(columns, rows, terms, n, linear)


@dataclass(slots=True, eq=False)
class Body:
    """One computation.

    Attributes
    ----------
    ops
        Operations per iteration, as :data:`OP_KINDS`.
    accesses
        In order of occurrence, stores first.
    branch_slots
        Slots that conditions of ``if_then_else`` depend on.
    special_slots
        Slots that the arguments of exponentials, roots and the like depend on.
    stores
        Number of stores per iteration.
    itemsize, is_float
        Of the element stored.
    slot_vars
        The variable of each slot; for the iteration variables of a block they come first.
    domain
        Extent of each iteration variable of the block (empty outside blocks).
    points
        Points of the domain that it runs for: for an initialisation, of the variables it depends on.
    store_slots
        Slots its stores depend on.
    reduces
        It updates what it stores.
    init
        The initialisation of a reduction that has not been decomposed.
    """

    ops: tuple[float, ...]
    accesses: tuple[Access, ...]
    buffers: tuple[BufferInfo, ...]
    branch_slots: frozenset[int]
    special_slots: frozenset[int]
    stores: int
    itemsize: float
    is_float: bool
    slot_vars: tuple[Any, ...] = field(repr=False)
    domain: tuple[int, ...]
    points: int
    store_slots: frozenset[int]
    reduces: bool
    init: Body | None
    table: BodyTable = field(repr=False)


def evaluate(tree: Tree, slots: list[Form], space: IndexSpace) -> Form:
    """An index expression over slots as a form over loops."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict):
        if len(tree) == 1:
            ((slot, coef),) = tree.items()
            return slots[slot] if coef == 1 else scale(slots[slot], coef)
        total: Form = 0
        for slot, coef in tree.items():
            total = space.sum(total, scale(slots[slot], coef))
        return total
    op = tree[0]
    parts = [evaluate(t, slots, space) for t in tree[1]]
    if op == "+":
        return space.sum(parts[0], parts[1])
    if op == "*":
        return space.product(parts[0], parts[1])
    if op == "/":
        return space.floordiv(parts[0], parts[1])
    if op == "%":
        return space.floormod(parts[0], parts[1])
    return space.opaque(parts)


def tree_slots(tree: Tree) -> frozenset[int]:
    """Slots an index expression depends on."""
    if isinstance(tree, int):
        return frozenset()
    if isinstance(tree, dict):
        return frozenset(tree)
    return frozenset().union(*(tree_slots(t) for t in tree[1])) if tree[1] else frozenset()
