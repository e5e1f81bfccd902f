"""Leaves of many programs as flat arrays, on which all features are computed at once.

Loops are numbered from the innermost here: column ``k`` of an array over loops is the ``k``-th loop from inside, column ``k``
of an array over *depths* is the state in which the ``k`` innermost loops vary (0: one iteration). The threads of a GPU block
run together: loops bound to threads count as innermost, but for a vectorised loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class LoopKind(IntEnum):
    """Kinds of loops; the first four are TVM's own numbers."""

    SERIAL, PARALLEL, VECTORIZED, UNROLLED, BLOCK_IDX, THREAD_IDX, VTHREAD = range(7)


class Scope(IntEnum):
    """Where a buffer lives; everything that is neither global nor shared belongs to one thread."""

    GLOBAL, SHARED, LOCAL = range(3)


#: Columns of :attr:`Collected.leaf`; ``hoisted`` are the iterations of the innermost loops that no argument of an
#: exponential, a root or the like depends on: compilers compute it once outside of them.
LEAF_COLUMNS = (
    "program", "loops", "itemsize", "is_float", "stores", "is_init", "is_reduction", "guarded", "predicated",
    "position", "nest", "max_step", "explicit", "domain", "branch_inner", "divmod", "divmod_inner", "opaque",
    "index", "shared_before", "shared_after", "hoisted",
)  # fmt: skip
#: Columns of :attr:`Collected.access`.
ACCESS_COLUMNS = ("itemsize", "loads", "stores", "scope", "elements", "dims")


@dataclass(frozen=True)
class Collected:
    """Leaves of a batch of programs as they are read (``native/table.h``). *Cells* name elements of a large array of which most
    are zero, one in each line."""

    #: Column -> float64 (leaves,).
    leaf: Mapping[str, FloatArray]
    #: float64 (leaves, len(OP_KINDS)), operations per iteration.
    ops: FloatArray
    #: Column -> (accesses,), ordered by leaf.
    access: Mapping[str, FloatArray]
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


@dataclass(frozen=True)
class LoopNest:
    """Loops of each leaf; loops that a leaf does not have are of extent 1 and kind -1."""

    #: (leaves, loops), innermost first.
    extent: FloatArray
    kind: IntArray
    reduction: BoolArray
    unrolled: BoolArray
    node: IntArray
    #: (leaves, depths): iterations of the ``k`` innermost loops.
    points: FloatArray
    #: (leaves,): number of loops.
    n: IntArray
    #: (leaves, loops): vectorised, and not turned back into a serial loop.
    vector: BoolArray
    #: (leaves,): the loop lanes run along: GPU threads, else the vectorised one, else the innermost.
    simd: IntArray
    #: (leaves,): there is a vectorised one.
    explicit_simd: BoolArray
    #: (leaves,): number of inner loops that are vectorised, unrolled or GPU threads: their iterations are straight-line code.
    tile: IntArray

    @property
    def iterations(self) -> FloatArray:
        """Iterations of all loops, (leaves,)."""
        return self.points[:, -1]

    @classmethod
    def of(cls, found: Collected) -> LoopNest:
        """The loops of a batch."""
        n = found.leaf["loops"].astype(np.int64)
        leaf, k, node, _, reduction = found.place.T

        def spread(values: IntArray, absent: int) -> IntArray:
            out = np.full((len(n), max(1, n.max(initial=1))), absent)
            out[leaf, k] = values
            return out

        extent, kind, unrolled, scalarised = (
            spread(values, absent) for values, absent in zip(found.node[node].T, (1, -1, 0, 0), strict=True)
        )
        vector = (kind == LoopKind.VECTORIZED) & (scalarised == 0)
        threads = kind == LoopKind.THREAD_IDX
        lanes = np.where(threads.any(axis=1)[:, None], threads, vector)
        straight = np.logical_and.accumulate(vector | (unrolled != 0) | threads, axis=1)
        return cls(
            extent=extent.astype(np.float64),
            kind=kind,
            reduction=spread(reduction, 0) != 0,
            unrolled=unrolled != 0,
            node=spread(node, -1),
            points=with_one(np.cumprod(extent.astype(np.float64), axis=1)),
            n=n,
            vector=vector,
            simd=lanes.argmax(axis=1),
            explicit_simd=vector.any(axis=1),
            tile=straight.sum(axis=1),
        )


def with_one(array: FloatArray) -> FloatArray:
    """A column of ones before the others."""
    return np.concatenate([np.ones((len(array), 1)), array], axis=1)


@dataclass(frozen=True)
class LeafTable(Collected):
    """Everything the features of a batch of programs are computed from; ``access`` has the columns ``prefix`` (of
    :attr:`buffer`, 0 for parameters), ``allocated`` and ``irregular`` besides."""

    nest: LoopNest
    #: float64 (rows,): a row is one dimension of one access; extent of the buffer in it.
    shape: FloatArray
    #: int64 (rows,): the access.
    row_access: IntArray
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


def leaf_table(found: Collected) -> LeafTable:
    """The table of the programs that were collected."""
    nest = LoopNest.of(found)
    row_access, _, row_extent = found.row.T
    leaf, k, _, pair_depth, _ = found.place.T
    depth = np.full(nest.kind.shape, np.iinfo(np.int64).max)
    depth[leaf, k] = pair_depth
    prefix, inside, share = found.buffer[found.access_buffer].T
    shared = (nest.kind == LoopKind.THREAD_IDX)[found.access_leaf] & (share[:, None] != 0)
    renewed = (depth[found.access_leaf] < inside[:, None]) & ~shared
    linear = np.zeros((len(found.row), nest.kind.shape[1]))
    linear[found.linear[:, 0], found.linear[:, 1]] = found.linear[:, 2]
    linear[renewed[row_access]] = 0
    delta = np.abs(linear) * (nest.extent - 1)[found.access_leaf[row_access]]
    np.add.at(delta, (found.delta[:, 0], found.delta[:, 1]), found.delta[:, 2])
    span = np.cumsum(np.concatenate([np.zeros((len(delta), 1)), delta], axis=1), axis=1)
    uses = linear != 0
    np.add.at(linear, (found.use[:, 0], found.use[:, 1]), found.use[:, 2])
    uses[found.use[:, 0], found.use[:, 1]] = True
    shape = row_extent.astype(np.float64)
    for first, last in found.flat:
        shape[last] = shape[first : last + 1].prod()
        shape[first:last] = 1.0
    irregular = np.zeros(len(prefix), dtype=bool)
    irregular[found.opaque] = True
    gathers = np.zeros((len(prefix), nest.kind.shape[1]), dtype=bool)
    gathers[found.gather[:, 0], found.gather[:, 1]] = True
    more = {"prefix": np.maximum(prefix, 0), "allocated": prefix >= 0, "irregular": irregular}
    return LeafTable(
        **{**vars(found), "access": {**found.access, **more}},
        nest=nest,
        shape=shape,
        row_access=row_access,
        coef=linear,
        span=span,
        uses=uses,
        gathers=gathers,
        renewed=renewed,
    )
