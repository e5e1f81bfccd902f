"""Leaves of many programs as flat arrays, on which all features are computed at once.

Loops are numbered from the innermost here: column ``k`` of an array over loops is the ``k``-th loop from inside,
column ``k`` of an array over *depths* is the state in which the ``k`` innermost loops vary (0: one iteration).
The threads of a GPU block run together: loops bound to threads count as innermost, but for a vectorised loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.affine import DIV, MOD, Form, IndexSpace, scale, spans_by_depth, step
from cdmpp.program.ast_loops import THREAD_IDX, VECTORIZED, Leaf, Loop, RawProgram

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_GPU_ORDER = {VECTORIZED: 0, THREAD_IDX: 1}

#: Columns of :attr:`LeafTable.leaf`.
LEAF_COLUMNS = (
    "program", "loops", "itemsize", "is_float", "stores", "is_init", "is_reduction", "guarded", "predicated",
    "position", "nest", "max_step", "explicit", "domain", "branch_inner", "divmod", "divmod_inner", "opaque",
    "index", "shared_before", "shared_after",
)  # fmt: skip
#: Columns of :attr:`LeafTable.access`.
ACCESS_COLUMNS = (
    "leaf", "buffer", "itemsize", "loads", "stores", "scope", "prefix", "allocated", "elements", "dims", "irregular",
)  # fmt: skip
#: Columns of :attr:`LeafTable.loop`.
LOOP_COLUMNS = ("leaf", "k", "extent", "kind", "reduction", "unrolled", "scalarised", "node")


@dataclass(frozen=True)
class LeafTable:
    """Everything the features of a batch of programs are computed from.

    Attributes
    ----------
    leaf
        float64 (leaves, len(LEAF_COLUMNS)).
    ops
        float64 (leaves, len(OP_KINDS)), operations per iteration.
    loop
        int64 (leaf-loop pairs, len(LOOP_COLUMNS)); ``node`` is the loop's number in the batch.
    renewed
        bool (accesses, loops): every iteration of the loop uses the storage of the buffer anew.
    access
        float64 (accesses, len(ACCESS_COLUMNS)), ordered by leaf.
    shape
        float64 (rows,): a row is one dimension of one access; extent of the buffer in it.
    row_access, row_dim
        int64 (rows,): the access, and the dimension counted from the last.
    coef
        float64 (rows, loops): change of the index by one iteration of the loop alone.
    span
        float64 (rows, depths): largest minus smallest index while the ``k`` innermost loops vary.
    uses
        bool (rows, loops): the index depends on the loop.
    gathers
        bool (accesses, loops): the address depends on the loop in a way that is not affine.
    n_buffers
        Number of buffers of all programs.
    node_program
        int64 (loops of all programs,): the program of each loop.
    program_leaves, program_nests
        int64 (programs,): number of leaves and of top-level loop nests.
    """

    leaf: FloatArray
    ops: FloatArray
    loop: IntArray
    access: FloatArray
    shape: FloatArray
    row_access: IntArray
    row_dim: IntArray
    coef: FloatArray
    span: FloatArray
    uses: BoolArray
    gathers: BoolArray
    renewed: BoolArray
    n_buffers: int
    node_program: IntArray
    program_leaves: IntArray
    program_nests: IntArray


class TableBuilder:
    """Collects programs; :meth:`finish` makes the arrays."""

    def __init__(self) -> None:
        self._leaf: list[tuple[float, ...]] = []
        self._ops: list[tuple[float, ...]] = []
        self._loop: list[tuple[int, ...]] = []
        self._access: list[tuple[float, ...]] = []
        self._shape: list[int] = []
        self._row_access: list[int] = []
        self._row_dim: list[int] = []
        self._linear: list[tuple[int, int, int]] = []  # row, loop, coefficient
        self._steps: list[tuple[int, int, int]] = []  # the same through atoms
        self._atom_uses: list[tuple[int, int]] = []
        self._atom_spans: list[tuple[int, list[int]]] = []
        self._gathers: list[tuple[int, int]] = []
        self._renewed: list[tuple[int, int]] = []
        self._nodes: list[int] = []
        self._buffers = 0
        self._program_leaves: list[int] = []
        self._program_nests: list[int] = []
        self.max_loops = 1

    def add(self, raw: RawProgram) -> None:
        """Add one program."""
        program = len(self._program_leaves)
        first_node = len(self._nodes)
        self._nodes.extend([program] * len(raw.loops))
        count = len(raw.leaves)
        shared = [_shared(raw.leaves[i], raw.leaves[i + 1], raw.loops) for i in range(count - 1)]
        for i, leaf in enumerate(raw.leaves):
            around = (shared[i - 1] if i else 1, shared[i] if i + 1 < count else 1)
            self._add_leaf(raw, leaf, program, first_node, i, around)
        self._buffers += raw.n_buffers
        self._program_leaves.append(count)
        self._program_nests.append(max(leaf.nest for leaf in raw.leaves) + 1)

    def _add_leaf(
        self, raw: RawProgram, leaf: Leaf, program: int, first_node: int, index: int, around: tuple[int, int]
    ) -> None:
        number = len(self._leaf)
        chain, kept, body, space = leaf.chain, leaf.kept, leaf.body, leaf.space
        n = len(kept)
        self.max_loops = max(self.max_loops, n)
        place = [-1] * len(chain)
        order = kept[::-1]
        if raw.on_gpu:
            # A stable sort: vectorised, threads, then the rest from inside.
            order.sort(key=lambda depth: _GPU_ORDER.get(raw.loops[chain[depth]].kind, 2))
        for k, depth in enumerate(order):
            place[depth] = k
            loop = raw.loops[chain[depth]]
            self._loop.append((
                number, k, loop.extent, loop.kind, depth in leaf.reduction, loop.unrolled, loop.scalarised,
                first_node + chain[depth],
            ))  # fmt: skip
        caches: dict[frozenset[int], tuple[list[int], dict[int, list[int]]]] = {}
        atoms: set[int] = set()
        for access, forms in zip(body.accesses, leaf.forms, strict=True):
            info = body.buffers[access.buffer]
            buffer = leaf.buffers[access.buffer]
            number_of_access = len(self._access)
            renewed = raw.renewed[buffer]
            for depth in renewed:
                if depth < len(chain) and place[depth] >= 0:
                    self._renewed.append((number_of_access, place[depth]))
            irregular = 0
            dims = len(forms)
            for i in range(dims or 1):
                row = len(self._shape)
                self._row_access.append(number_of_access)
                self._row_dim.append(max(dims, 1) - 1 - i)
                self._shape.append(info.shape[i] if i < len(info.shape) else 1)
                form = forms[i] if dims else 0
                if isinstance(form, int):
                    continue
                for key, coef in form.items():
                    if key >= 0:
                        if place[key] >= 0 and key not in renewed:
                            self._linear.append((row, place[key], coef))
                        continue
                    atoms.add(key)
                    irregular |= space.atoms[-1 - key].op not in (DIV, MOD)
                    if renewed not in caches:
                        caches[renewed] = [-1 if d in renewed else d for d in order], {}
                    spans = spans_by_depth(space, key, *caches[renewed])
                    weight = abs(coef)
                    self._atom_spans.append((row, [weight * span for span in spans]))
                    for depth in space.loops_of({key: 1}):
                        if depth not in renewed and place[depth] >= 0:
                            self._atom_uses.append((row, place[depth]))
                            move = step(space, {key: coef}, depth)
                            if move:
                                self._steps.append((row, place[depth], move))
            if dims and any(isinstance(f, dict) and min(f) < 0 for f in forms):
                for depth in _irregular_loops(space, forms, info.shape):
                    if place[depth] >= 0:
                        self._gathers.append((number_of_access, place[depth]))
            elements = 1
            for extent in info.shape:
                elements *= extent
            self._access.append((
                number, self._buffers + buffer, info.itemsize, access.loads, access.stores, info.scope,
                max(raw.shared_prefix[buffer], 0), raw.shared_prefix[buffer] >= 0, elements, max(dims, 1), irregular,
            ))  # fmt: skip
        inner = kept[-1] if kept else -1
        splits = [a for a in atoms if space.atoms[-1 - a].op in (DIV, MOD)]
        last_loop = raw.loops[chain[-1]] if chain else None
        self._leaf.append((
            program, n, body.itemsize, body.is_float, body.stores, leaf.is_init, bool(leaf.reduction), leaf.guarded,
            leaf.predicated, leaf.position, leaf.nest, last_loop.max_step if last_loop else 0,
            last_loop.explicit if last_loop and last_loop.max_step else 0, body.points if body.domain else 0, inner in leaf.branch, len(splits),
            sum(inner in space.loops_of({a: 1}) for a in splits), len(atoms) - len(splits), index, *around,
        ))  # fmt: skip
        self._ops.append(body.ops)

    def finish(self) -> LeafTable:
        """The arrays of all programs added."""
        loops = self.max_loops
        rows = len(self._shape)
        linear = _dense(self._linear, rows, loops)
        loop = np.array(self._loop, dtype=np.int64).reshape(-1, len(LOOP_COLUMNS))
        access = np.array(self._access, dtype=np.float64).reshape(-1, len(ACCESS_COLUMNS))
        row_access = np.array(self._row_access, dtype=np.int64)
        extent_less_1 = np.zeros((len(self._leaf), loops))
        extent_less_1[loop[:, 0], loop[:, 1]] = loop[:, 2] - 1
        row_leaf = access[row_access, 0].astype(np.int64) if rows else row_access
        span = np.zeros((rows, loops + 1))
        np.cumsum(np.abs(linear) * extent_less_1[row_leaf], axis=1, out=span[:, 1:])
        for row, values in self._atom_spans:
            span[row, : len(values)] += values
            span[row, len(values) :] += values[-1]
        return LeafTable(
            leaf=np.array(self._leaf, dtype=np.float64).reshape(-1, len(LEAF_COLUMNS)),
            ops=np.array(self._ops, dtype=np.float64),
            loop=loop,
            access=access,
            shape=np.array(self._shape, dtype=np.float64),
            row_access=row_access,
            row_dim=np.array(self._row_dim, dtype=np.int64),
            coef=linear + _dense(self._steps, rows, loops),
            span=span,
            uses=(linear != 0) | _marks(self._atom_uses, rows, loops),
            gathers=_marks(self._gathers, len(access), loops),
            renewed=_marks(self._renewed, len(access), loops),
            n_buffers=self._buffers,
            node_program=np.array(self._nodes, dtype=np.int64),
            program_leaves=np.array(self._program_leaves, dtype=np.int64),
            program_nests=np.array(self._program_nests, dtype=np.int64),
        )


def _irregular_loops(space: IndexSpace, forms: list[Form], shape: tuple[int, ...]) -> set[int]:
    """Loops that the flat address depends on in a way that is not affine."""
    flat: Form = 0
    stride = 1
    for form, extent in zip(reversed(forms), reversed(shape), strict=True):
        flat = space.sum(flat, scale(form, stride))
        stride *= extent
    if isinstance(flat, int):
        return set()
    return space.loops_of({key: coef for key, coef in flat.items() if key < 0})


def _dense(triplets: list[tuple[int, int, int]], rows: int, columns: int) -> FloatArray:
    out = np.zeros((rows, columns))
    if triplets:
        array = np.array(triplets, dtype=np.int64)
        np.add.at(out, (array[:, 0], array[:, 1]), array[:, 2])
    return out


def _marks(pairs: list[tuple[int, int]], rows: int, columns: int) -> BoolArray:
    out = np.zeros((rows, columns), dtype=bool)
    if pairs:
        at = np.array(pairs, dtype=np.int64)
        out[at[:, 0], at[:, 1]] = True
    return out


def _shared(a: Leaf, b: Leaf, loops: Sequence[Loop]) -> int:
    """Iterations of the loops that two leaves have in common."""
    total = 1
    for x, y in zip(a.chain, b.chain, strict=False):
        if x != y:
            break
        total *= loops[x].extent
    return total
