"""Rows (one dimension of one access) of leaves whose indices are not affine in the loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.affine import OPAQUE, Form, IndexSpace, spans_by_depth, step
from cdmpp.program.ast_body import Body, evaluate
from cdmpp.program.ast_loops import THREAD_IDX, Leaf, RawProgram

Array = NDArray[Any]


class IrregularRows:
    """Collects such rows among all rows of a batch, which are counted along."""

    def __init__(self) -> None:
        self._rows = 0
        self._accesses = 0
        self._linear, self._delta, self._use, self._gather = _Cells(3), _Cells(3), _Cells(3), _Cells(2)
        self._opaque: list[int] = []
        self._flat: list[tuple[int, int]] = []  # first and last row of an access

    def skip(self, body: Body) -> None:
        """Count the rows of a leaf whose indices are affine."""
        self._rows += body.table.rows
        self._accesses += len(body.accesses)

    def add(self, raw: RawProgram, leaf: Leaf, order: list[int], place: list[int]) -> tuple[int, int, int]:
        """Add the rows of a leaf.

        Parameters
        ----------
        order
            Depths of the leaf's loops, innermost first.
        place
            Place of each loop of the chain in ``order``, or -1.

        Returns
        -------
        counts
            Divisions and remainders left in its indices, those that change in the innermost loop, and indices
            that cannot be analysed.
        """
        body, space, slots = leaf.body, leaf.space, leaf.slots
        known: dict[tuple[object, ...], _Pattern] = {}
        held: list[list[Form]] = []  # what is known by its id must stay
        atoms: set[int] = set()
        for access in body.accesses:
            info, buffer = body.buffers[access.buffer], leaf.buffers[access.buffer]
            forms = [evaluate(tree, slots, space) for tree in access.index]
            inside, share = raw.renewed[buffer], raw.threads_share[buffer]
            # A buffer that TVM will shrink has other strides then: its dimensions stay apart.
            shrinks = raw.shared_prefix[buffer] > 0
            # Accesses with the very same indices are frequent: element-wise computations have no others.
            key = (*map(id, forms), *info.shape, inside, share, shrinks)
            pattern = known.get(key)
            if pattern is None:
                fixed = order
                if inside:
                    kinds = [raw.loops[i].kind for i in leaf.chain]
                    fixed = [
                        -1 if d < inside and not (share and kinds[d] == THREAD_IDX) else d for d in order
                    ]
                pattern = known[key] = _pattern(space, forms, info.shape, fixed, place, shrinks)
                held.append(forms)
            first = self._rows
            self._linear.add(pattern.linear, first)
            if pattern.flat:
                self._flat.append((first, first + len(forms) - 1))
            elif pattern.atoms:
                self._delta.add(pattern.deltas, first)
                self._use.add(pattern.uses, first)
                self._gather.add(pattern.gathers, self._accesses)
                atoms.update(pattern.atoms)
                if pattern.opaque:
                    self._opaque.append(self._accesses)
            self._rows += max(1, len(forms))
            self._accesses += 1
        if not atoms:
            return 0, 0, 0
        splits = [a for a in atoms if space.atoms[-1 - a].op != OPAQUE]
        inner = order[0] if order else -1
        return len(splits), sum(inner in space.atom_loops[-1 - a] for a in splits), len(atoms) - len(splits)

    def linear(self) -> Array:
        """Row, loop and coefficient of the affine parts of the rows added, int64 (cells, 3)."""
        return self._linear.array()

    def delta(self) -> Array:
        """:attr:`cdmpp.program.ast_table.Collected.delta`."""
        return self._delta.array()

    def use(self) -> Array:
        """:attr:`cdmpp.program.ast_table.Collected.use`."""
        return self._use.array()

    def gather(self) -> Array:
        """:attr:`cdmpp.program.ast_table.Collected.gather`."""
        return self._gather.array()

    def opaque(self) -> Array:
        """:attr:`cdmpp.program.ast_table.Collected.opaque`."""
        return np.array(self._opaque, dtype=np.int64)

    def flat(self) -> Array:
        """:attr:`cdmpp.program.ast_table.Collected.flat`."""
        return np.array(self._flat, dtype=np.int64).reshape(-1, 2)


class _Cells:
    """Cells of a large array, collected in small groups whose rows are counted from the group's own first row."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._cells: list[int] = []
        self._first: list[int] = []
        self._count: list[int] = []

    def add(self, cells: list[int], first: int) -> None:
        """Add a group: row, column and, if three wide, value of each cell one after the other."""
        if cells:
            self._cells.extend(cells)
            self._first.append(first)
            self._count.append(len(cells) // self._width)

    def array(self) -> Array:
        """All cells, int64 (cells, width), with the rows of the large array."""
        out = np.array(self._cells, dtype=np.int64).reshape(-1, self._width)
        out[:, 0] += np.repeat(self._first, self._count).astype(np.int64)
        return out


class _Pattern(NamedTuple):
    """What the rows of one access look like; rows are counted within the access.

    Attributes
    ----------
    linear
        Row, loop, coefficient, row, ... of the affine parts.
    flat
        The flat address is affine: the last row has it and stands for all dimensions.
    deltas
        Row, loop, growth of the span by that loop, row, ... of the parts that are not affine.
    uses
        Row, loop, change of the index by the loop's first step, row, ... of these parts.
    gathers
        0, loop, 0, ... of the loops along which the flat address is not affine.
    atoms, opaque
        Atoms used, and whether one of them cannot be analysed.
    """

    linear: list[int]
    flat: bool
    deltas: list[int]
    uses: list[int]
    gathers: list[int]
    atoms: frozenset[int]
    opaque: bool


def _pattern(
    space: IndexSpace,
    forms: list[Form],
    shape: tuple[int, ...],
    fixed: list[int],
    place: list[int],
    shrinks: bool,
) -> _Pattern:
    """Analyse one access; ``fixed`` is the order of the loops with -1 for those that use the storage anew."""
    linear: list[int] = []
    atoms: list[tuple[int, int, int]] = []
    for row, form in enumerate(forms):
        if not isinstance(form, int):
            for key, coef in form.items():
                if key < 0:
                    atoms.append((row, key, coef))
                elif place[key] >= 0:
                    linear += (row, place[key], coef)
    if not atoms:
        return _Pattern(linear, False, [], [], [], frozenset(), False)
    flat: dict[int, int] = {}
    stride = 1
    for form, extent in zip(reversed(forms), reversed(shape), strict=True):
        if not isinstance(form, int):
            for key, coef in form.items():
                flat[key] = flat.get(key, 0) + coef * stride
        stride *= extent
    joined = space.joined(flat)
    flat = {} if isinstance(joined, int) else joined
    rest = [key for key in flat if key < 0]
    if not rest and not shrinks:
        last = len(forms) - 1
        linear = []
        for key, coef in flat.items():
            if place[key] >= 0:
                linear += (last, place[key], coef)
        return _Pattern(linear, True, [], [], [], frozenset(), False)
    cache: dict[int, list[int]] = {}
    deltas: list[int] = []
    uses: list[int] = []
    for row, key, coef in atoms:
        weight = abs(coef)
        before = 0
        for k, span in enumerate(spans_by_depth(space, key, fixed, cache)):
            if span != before:
                deltas += (row, k - 1, weight * (span - before))
                before = span
        for depth in space.atom_loops[-1 - key]:
            k = place[depth]
            if k >= 0 and fixed[k] >= 0:
                uses += (row, k, step(space, {key: coef}, depth))
    loops = frozenset().union(*[space.atom_loops[-1 - key] for key in rest])
    gathers: list[int] = []
    for depth in loops:
        if place[depth] >= 0:
            gathers += (0, place[depth])
    found = frozenset([key for _, key, _ in atoms])
    opaque = any(space.atoms[-1 - key].op == OPAQUE for key in found)
    return _Pattern(linear, False, deltas, uses, gathers, found, opaque)
