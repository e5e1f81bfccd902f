"""Leaves of many programs, as the Python walk finds them, as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.ast_body import Body
from cdmpp.program.ast_irregular import IrregularRows
from cdmpp.program.ast_loops import SEQUENTIAL, THREAD_IDX, VECTORIZED, Leaf, Loop, RawProgram
from cdmpp.program.ast_table import LEAF_COLUMNS, Collected, FloatArray, IntArray

_GPU_ORDER = {VECTORIZED: 0, THREAD_IDX: 1}


class TableBuilder:
    """Collects programs; :meth:`finish` makes the arrays.

    What is the same for all leaves with one body is in the body's own table and taken from there in bulk. Only
    indices that are not affine are worked out one by one.
    """

    def __init__(self) -> None:
        self._bodies: list[Body] = []
        self._body_number: dict[int, int] = {}
        self._leaf: list[tuple[float, ...]] = []
        self._leaf_body: list[int] = []
        # Of each leaf's loops, innermost first: the loop, and whether the reduction runs over it.
        self._node: list[int] = []
        self._depth: list[int] = []
        self._reduction: list[bool] = []
        # Of the loops around each leaf by depth: its place among the leaf's own loops, or -1.
        self._place: list[int] = []
        self._chain_length: list[int] = []
        # Slots of the leaves whose indices are affine, as terms (loop by depth, coefficient).
        self._slot_count: list[int] = []
        self._slot_terms: list[int] = []
        self._slot_depth: list[int] = []
        self._slot_coef: list[int] = []
        self._buffer: list[int] = []
        self._buffer_count: list[int] = []
        self._loops: list[tuple[int, int, bool, bool]] = []
        self._loop_program: list[int] = []
        self._prefix: list[int] = []
        self._renewed: list[int] = []
        self._threads_share: list[bool] = []
        self._program_leaves: list[int] = []
        self._program_nests: list[int] = []
        self._irregular = IrregularRows()

    def add(self, raw: RawProgram) -> None:
        """Add one program."""
        program = len(self._program_leaves)
        first_node, first_buffer = len(self._loops), len(self._prefix)
        self._loops.extend([(loop.extent, loop.kind, loop.unrolled, loop.scalarised) for loop in raw.loops])
        self._loop_program.extend([program] * len(raw.loops))
        leaves = raw.leaves
        shared = [1, *[_shared(a, b, raw.loops) for a, b in pairwise(leaves)], 1]
        on_gpu = raw.on_gpu
        for i, leaf in enumerate(leaves):
            self._add_leaf(raw, leaf, (program, i, shared[i], shared[i + 1]), first_node, on_gpu)
            self._buffer.extend([first_buffer + b for b in leaf.buffers])
            self._buffer_count.append(len(leaf.buffers))
        self._prefix.extend(raw.shared_prefix)
        self._renewed.extend(raw.renewed)
        self._threads_share.extend(raw.threads_share)
        self._program_leaves.append(len(leaves))
        self._program_nests.append(leaves[-1].nest + 1)

    def _add_leaf(
        self, raw: RawProgram, leaf: Leaf, where: tuple[int, int, int, int], first_node: int, on_gpu: bool
    ) -> None:
        around, kept, body, space = leaf.chain, leaf.kept, leaf.body, leaf.space
        n = len(kept)
        order = kept[::-1]
        if on_gpu:
            # A stable sort: vectorised, threads, then the rest from inside.
            order.sort(key=lambda depth: _GPU_ORDER.get(raw.loops[around[depth]].kind, 2))
        if n == len(around) and not on_gpu:
            place = order  # of n loops, the one at depth d is the (n - 1 - d)-th from inside
        else:
            place = [-1] * len(around)
            for k, depth in enumerate(order):
                place[depth] = k
        self._node.extend([first_node + around[depth] for depth in order])
        self._depth.extend(order)
        reduction = leaf.reduction
        self._reduction.extend([depth in reduction for depth in order])
        self._place.extend(place)
        self._chain_length.append(len(around))
        body_number = self._body_number.get(id(body))
        if body_number is None:
            body_number = self._body_number[id(body)] = len(self._bodies)
            self._bodies.append(body)
        self._leaf_body.append(body_number)
        splits = (0, 0, 0)
        if space.atoms or not body.table.linear:
            self._slot_count.append(0)
            splits = self._irregular.add(raw, leaf, order, place)
        else:
            self._irregular.skip(body)
            self._slot_count.append(len(leaf.slots))
            for form in leaf.slots:
                if isinstance(form, int):
                    self._slot_terms.append(0)
                else:
                    self._slot_terms.append(len(form))
                    self._slot_depth.extend(form)
                    self._slot_coef.extend(form.values())
        last = raw.loops[around[-1]] if around else None
        max_step = last.max_step if last else 0
        program, index, before, after = where
        hoisted = 1
        for depth in reversed(kept):
            loop = raw.loops[around[depth]]
            if depth in leaf.special or loop.kind not in SEQUENTIAL:
                break
            hoisted *= loop.extent
        self._leaf.append((
            program, n, body.itemsize, body.is_float, body.stores, leaf.is_init, len(reduction) > 0, leaf.guarded,
            leaf.predicated, leaf.position, leaf.nest, max_step, last.explicit if last and max_step else 0,
            body.points if body.domain else 0, n > 0 and order[0] in leaf.branch, *splits, index, before, after, hoisted,
        ))  # fmt: skip

    def finish(self) -> Collected:
        """All programs added."""
        leaf = np.array(self._leaf, dtype=np.float64).reshape(-1, len(LEAF_COLUMNS))
        n_loops = leaf[:, 1].astype(np.int64)
        width = max(1, int(n_loops.max(initial=0)))
        tables = [body.table for body in self._bodies]
        of_body = np.array(self._leaf_body, dtype=np.int64)
        # Accesses and rows of all leaves, body after body.
        accesses = _Ragged([t.access for t in tables], 7, of_body)
        rows = _Ragged([t.row for t in tables], 3, of_body)
        terms = _Ragged([t.term for t in tables], 3, of_body)
        access = accesses.table(np.float64)
        row = rows.table(np.int64)
        row[:, 0] += accesses.start[rows.owner]
        buffer = np.array(self._buffer, dtype=np.int64)
        number = access[:, 6].astype(np.int64) + _starts(self._buffer_count)[accesses.owner]
        # Affine indices: terms over slots times terms of slots over loops.
        slots = self._slot_matrix(width)
        affine = np.array(self._slot_count, dtype=np.int64)[terms.owner] > 0
        term, owner = terms.table(np.int64)[affine], terms.owner[affine]
        linear = np.zeros((len(row), width))
        at = term[:, 0] + rows.start[owner]
        slot = term[:, 1] + _starts(self._slot_count)[owner]
        if len(at):
            # Terms come row after row, so that sums over runs are sums over rows.
            run = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
            linear[at[run]] = np.add.reduceat(slots[slot] * term[:, 2:], run, axis=0)
        cells = self._irregular.linear()
        linear[cells[:, 0], cells[:, 1]] += cells[:, 2]
        k = np.arange(len(self._node)) - np.repeat(np.cumsum(n_loops) - n_loops, n_loops)
        place = [np.repeat(np.arange(len(leaf)), n_loops), k, self._node, self._depth, self._reduction]
        return Collected(
            leaf=leaf,
            ops=np.array([body.ops for body in self._bodies])[of_body],
            access=access[:, :6],
            access_leaf=accesses.owner,
            access_buffer=buffer[number] if len(access) else number,
            row=row,
            place=np.stack([np.asarray(column, dtype=np.int64) for column in place], axis=1),
            node=np.array(self._loops, dtype=np.int64).reshape(-1, 4),
            node_program=np.array(self._loop_program, dtype=np.int64),
            buffer=np.array([self._prefix, self._renewed, self._threads_share], dtype=np.int64).T,
            program=np.array([self._program_leaves, self._program_nests], dtype=np.int64).T,
            linear=linear,
            delta=self._irregular.delta(),
            use=self._irregular.use(),
            gather=self._irregular.gather(),
            opaque=self._irregular.opaque(),
            flat=self._irregular.flat(),
        )

    def _slot_matrix(self, width: int) -> FloatArray:
        """Coefficients of all slots of affine leaves, (slots, loops)."""
        counts = np.array(self._slot_terms, dtype=np.int64)
        slot_leaf = np.repeat(np.arange(len(self._slot_count)), self._slot_count)
        row = np.repeat(np.arange(len(counts)), counts)
        at = np.array(self._slot_depth, dtype=np.int64) + _starts(self._chain_length)[slot_leaf[row]]
        k = np.array(self._place, dtype=np.int64)[at] if len(at) else at
        out = np.zeros((len(counts), width))
        have = k >= 0
        out[row[have], k[have]] = np.array(self._slot_coef, dtype=np.float64)[have]
        return out


class _Ragged:
    """Rows of every leaf, where each leaf has the rows of its body.

    Attributes
    ----------
    owner
        (rows,): the leaf.
    start
        (leaves,): first row of each leaf.
    """

    def __init__(self, of_bodies: list[list[Any]], columns: int, of_body: IntArray) -> None:
        counts = np.array([len(cells) // columns for cells in of_bodies], dtype=np.int64)
        first = np.cumsum(counts) - counts
        per_leaf = counts[of_body]
        self.start = np.cumsum(per_leaf) - per_leaf
        self.owner = np.repeat(np.arange(len(of_body)), per_leaf)
        self._source = np.arange(int(per_leaf.sum())) + (first[of_body] - self.start)[self.owner]
        self._of_bodies, self._columns = of_bodies, columns

    def table(self, dtype: Any) -> NDArray[Any]:
        """All rows, (rows, columns)."""
        cells = list(chain.from_iterable(self._of_bodies))
        return np.array(cells, dtype=dtype).reshape(-1, self._columns)[self._source]


def _starts(counts: list[int]) -> IntArray:
    array = np.array(counts, dtype=np.int64)
    return np.cumsum(array) - array


def _shared(a: Leaf, b: Leaf, loops: Sequence[Loop]) -> int:
    """Iterations of the loops that two leaves have in common."""
    total = 1
    for x, y in zip(a.chain, b.chain, strict=False):
        if x != y:
            break
        total *= loops[x].extent
    return total
