"""Leaves of many programs as flat arrays, on which all features are computed at once.

Loops are numbered from the innermost here: column ``k`` of an array over loops is the ``k``-th loop from inside,
column ``k`` of an array over *depths* is the state in which the ``k`` innermost loops vary (0: one iteration).
The threads of a GPU block run together: loops bound to threads count as innermost, but for a vectorised loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: Kinds of loops; the first four are TVM's own numbers.
SERIAL, PARALLEL, VECTORIZED, UNROLLED, BLOCK_IDX, THREAD_IDX, VTHREAD = range(7)
#: Where a buffer lives; everything that is neither global nor shared belongs to one thread.
GLOBAL, SHARED, LOCAL = range(3)

#: Columns of :attr:`LeafTable.leaf`; ``hoisted`` are the iterations of the innermost loops that no argument of an
#: exponential, a root or the like depends on: compilers compute it once outside of them.
LEAF_COLUMNS = (
    "program", "loops", "itemsize", "is_float", "stores", "is_init", "is_reduction", "guarded", "predicated",
    "position", "nest", "max_step", "explicit", "domain", "branch_inner", "divmod", "divmod_inner", "opaque",
    "index", "shared_before", "shared_after", "hoisted",
)  # fmt: skip
#: Columns of :attr:`LeafTable.access`; the first six are those of :attr:`Collected.access`.
ACCESS_COLUMNS = (
    "itemsize",
    "loads",
    "stores",
    "scope",
    "elements",
    "dims",
    "prefix",
    "allocated",
    "irregular",
)


@dataclass(frozen=True)
class LeafTable:
    """Everything the features of a batch of programs are computed from."""

    #: float64 (leaves, len(LEAF_COLUMNS)).
    leaf: FloatArray
    #: float64 (leaves, len(OP_KINDS)), operations per iteration.
    ops: FloatArray
    #: int64 (leaf-loop pairs, 8): leaf, place of the loop counted from inside, extent, kind, whether the reduction
    #: of the leaf runs over it, whether TVM will unroll it, whether TVM turns it from vectorised into serial, and
    #: its number in the batch.
    loop: IntArray
    #: float64 (accesses, len(ACCESS_COLUMNS)), ordered by leaf.
    access: FloatArray
    #: int64 (accesses,): its leaf, and its buffer's number in the batch.
    access_leaf: IntArray
    access_buffer: IntArray
    #: float64 (rows,): a row is one dimension of one access; extent of the buffer in it.
    shape: FloatArray
    #: int64 (rows,): the access, and the dimension counted from the last.
    row_access: IntArray
    row_dim: IntArray
    #: float64 (rows, loops): change of the index by one iteration of the loop alone.
    coef: FloatArray
    #: float64 (rows, depths): largest minus smallest index while the ``k`` innermost loops vary.
    span: FloatArray
    #: bool (rows, loops): the index depends on the loop.
    uses: BoolArray
    #: bool (accesses, loops): the address depends on the loop in a way that is not affine.
    gathers: BoolArray
    #: bool (accesses, loops): every iteration of the loop uses the storage of the buffer anew.
    renewed: BoolArray
    #: Number of buffers of all programs.
    n_buffers: int
    #: int64 (loops of all programs,): the program of each loop.
    node_program: IntArray
    #: int64 (programs,): number of leaves and of top-level loop nests.
    program_leaves: IntArray
    program_nests: IntArray


@dataclass(frozen=True)
class Collected:
    """Leaves of a batch of programs as they are read (``native/table.h``).

    *Cells* name elements of a large array of which most are zero, one in each line.
    """

    #: float64 (leaves, len(LEAF_COLUMNS)).
    leaf: FloatArray
    #: float64 (leaves, len(OP_KINDS)), operations per iteration.
    ops: FloatArray
    #: float64 (accesses, 6): the first six of :data:`ACCESS_COLUMNS`.
    access: FloatArray
    #: int64 (accesses,): its leaf, and its buffer's number in the batch.
    access_leaf: IntArray
    access_buffer: IntArray
    #: int64 (rows, 3): the access, the dimension counted from the last, and the extent of the buffer in it.
    row: IntArray
    #: int64 (leaf-loop pairs, 5): leaf, place of the loop counted from inside, the loop's number in the batch, its
    #: depth in the program, and whether the reduction of the leaf runs over it.
    place: IntArray
    #: int64 (loops of all programs, 4): extent, kind, unrolled, scalarised.
    node: IntArray
    #: int64 (loops of all programs,): the program of each loop.
    node_program: IntArray
    #: int64 (buffers of all programs, 3): how many outer loops all its accesses have in common, -1 for parameters;
    #: how many outer loops have it allocated inside, so that every iteration of them uses the same storage anew;
    #: whether the threads among these loops share one allocation.
    buffer: IntArray
    #: int64 (programs, 3): number of leaves, of top-level loop nests, and of nodes of the AST.
    program: IntArray
    #: int64 (cells, 3): row, loop, and its coefficient in the affine part of the index.
    linear: IntArray
    #: int64 (cells, 3): row, loop, and what it adds to the span of the row through parts that are not affine.
    delta: IntArray
    #: int64 (cells, 3): row, loop that such a part depends on, and its change in the first iteration.
    use: IntArray
    #: int64 (cells, 2): access, and a loop along which its address is not affine.
    gather: IntArray
    #: int64 (cells,): accesses with an index that cannot be analysed.
    opaque: IntArray
    #: int64 (cells, 2): first and last row of accesses whose address is affine although its dimensions are not; the
    #: last row has the address.
    flat: IntArray


def leaf_table(found: Collected) -> LeafTable:
    """The table of the programs that were collected."""
    n_leaves = len(found.leaf)
    width = max(1, int(found.leaf[:, LEAF_COLUMNS.index("loops")].max(initial=1)))
    leaf, k, node, _, reduction = found.place.T
    extent, kind, unrolled, scalarised = found.node[node].T
    row_access, row_dim, row_extent = found.row.T
    row_leaf = found.access_leaf[row_access]
    renewed = _renewed_loops(found, kind, width)
    linear = np.zeros((len(found.row), width))
    linear[found.linear[:, 0], found.linear[:, 1]] = found.linear[:, 2]
    linear[renewed[row_access]] = 0
    extent_less_1 = np.zeros((n_leaves, width))
    extent_less_1[leaf, k] = extent - 1
    delta = np.abs(linear) * extent_less_1[row_leaf]
    np.add.at(delta, (found.delta[:, 0], found.delta[:, 1]), found.delta[:, 2])
    span = np.zeros((len(linear), width + 1))
    np.cumsum(delta, axis=1, out=span[:, 1:])
    uses = linear != 0
    np.add.at(linear, (found.use[:, 0], found.use[:, 1]), found.use[:, 2])
    uses[found.use[:, 0], found.use[:, 1]] = True
    shape = row_extent.astype(np.float64)
    for first, last in found.flat:
        shape[last] = shape[first : last + 1].prod()
        shape[first:last] = 1.0
    access = np.empty((len(found.access), len(ACCESS_COLUMNS)))
    access[:, :6] = found.access
    prefix = found.buffer[found.access_buffer, 0]
    access[:, 6] = np.maximum(prefix, 0)
    access[:, 7] = prefix >= 0
    access[:, 8] = 0
    access[found.opaque, 8] = 1
    gathers = np.zeros((len(access), width), dtype=bool)
    gathers[found.gather[:, 0], found.gather[:, 1]] = True
    return LeafTable(
        leaf=found.leaf,
        ops=found.ops,
        loop=np.stack([leaf, k, extent, kind, reduction, unrolled, scalarised, node], axis=1),
        access=access,
        access_leaf=found.access_leaf,
        access_buffer=found.access_buffer,
        shape=shape,
        row_access=row_access,
        row_dim=row_dim,
        coef=linear,
        span=span,
        uses=uses,
        gathers=gathers,
        renewed=renewed,
        n_buffers=len(found.buffer),
        node_program=found.node_program,
        program_leaves=found.program[:, 0],
        program_nests=found.program[:, 1],
    )


def _renewed_loops(found: Collected, kind: IntArray, width: int) -> BoolArray:
    """:attr:`LeafTable.renewed` of ``width`` loops; ``kind`` has the kinds of the loops of the leaf-loop pairs."""
    leaf, k, _, pair_depth, _ = found.place.T
    depth = np.full((len(found.leaf), width), np.iinfo(np.int64).max)
    depth[leaf, k] = pair_depth
    thread = np.zeros(depth.shape, dtype=bool)
    thread[leaf, k] = kind == THREAD_IDX
    _, inside, share = found.buffer[found.access_buffer].T
    out: BoolArray = (depth[found.access_leaf] < inside[:, None]) & ~(
        thread[found.access_leaf] & (share[:, None] != 0)
    )
    return out
