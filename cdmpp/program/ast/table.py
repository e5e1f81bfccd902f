"""Leaves of many programs as flat arrays, from which all features are computed at once.

Loops are numbered from the innermost here. Column ``k`` of an array over loops is the ``k``-th loop from inside; column ``k``
of an array over *depths* is the state in which the ``k`` innermost loops vary (0: one iteration). The threads of a GPU block
run together, so loops bound to threads count as innermost; only a vectorised loop is further inside.

A footprint is how much memory a leaf touches while its inner loops run. An analytical model derives cache and register use from
it. The model does not depend on the device: caches are a fixed series of capacities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class LoopKind(IntEnum):
    """Kinds of loops; the first four have the numbers that TVM gives them."""

    SERIAL, PARALLEL, VECTORIZED, UNROLLED, BLOCK_IDX, THREAD_IDX, VTHREAD = range(7)


class Scope(IntEnum):
    """Memory scope of a buffer; a buffer that is neither global nor shared is LOCAL: it belongs to one thread."""

    GLOBAL, SHARED, LOCAL = range(3)


#: Columns of :attr:`Collected.leaf`. ``hoisted`` is the number of iterations of the innermost loops on which no argument of an
#: exponential, a root or another special function depends: compilers compute such a function once outside of these loops.
LEAF_COLUMNS = (
    "program", "loops", "itemsize", "is_float", "stores", "is_init", "is_reduction", "guarded", "predicated",
    "position", "nest", "max_step", "explicit", "domain", "branch_inner", "divmod", "divmod_inner", "opaque",
    "index", "shared_before", "shared_after", "hoisted",
)  # fmt: skip
#: Columns of :attr:`Collected.access`.
ACCESS_COLUMNS = ("itemsize", "loads", "stores", "scope", "elements", "dims")


@dataclass(frozen=True)
class Collected:
    """Leaves of a batch of programs as the C++ extension returns them (``native/table.h``). *Cells* describe a large sparse
    array: each line names one nonzero element of it."""

    #: Column -> float64 (leaves,).
    leaf: Mapping[str, FloatArray]
    #: float64 (leaves, len(OP_KINDS)), operations per iteration.
    ops: FloatArray
    #: Column -> (accesses,), ordered by leaf.
    access: Mapping[str, FloatArray]
    #: int64 (accesses,): the leaf of each access, and the number of its buffer in the batch.
    access_leaf: IntArray
    access_buffer: IntArray
    #: int64 (rows, 3): the access, the dimension (counted from the last), and the extent of the buffer in this dimension.
    row: IntArray
    #: int64 (leaf-loop pairs, 5): leaf, place of the loop (counted from inside), number of the loop in the batch, depth of the
    #: loop in the program, and whether the leaf's reduction runs over the loop.
    place: IntArray
    #: int64 (loops of all programs, 4): extent, kind, unrolled, scalarised (vectorised, but TVM makes it serial again).
    node: IntArray
    #: int64 (buffers of all programs, 3): number of outer loops that all accesses to the buffer have in common, -1 for
    #: parameters; number of outer loops inside which it is allocated, so that each of their iterations reuses the same storage
    #: for new data; whether the thread loops among these share one allocation.
    buffer: IntArray
    #: int64 (programs, 3): number of leaves, of top-level loop nests, and of nodes of the AST.
    program: IntArray
    #: int64 (cells, 3): row, loop, and the loop's coefficient in the affine part of the index.
    linear: IntArray
    #: int64 (cells, 3): row, loop, and what the loop adds to the span of the row through the parts of the index not affine.
    delta: IntArray
    #: int64 (cells, 3): row, a loop on which such a part depends, and the change of that part in the loop's first iteration.
    use: IntArray
    #: int64 (cells, 2): access, and a loop along which its address is not affine.
    gather: IntArray
    #: int64 (cells,): accesses with an index that cannot be analysed.
    opaque: IntArray
    #: int64 (cells, 2): first and last row of an access whose flat address (in the last) is affine unlike its indices.
    flat: IntArray


@dataclass(frozen=True)
class LoopNest:
    """Loops of each leaf. Where a leaf has fewer loops than columns, the rest has extent 1 and kind -1."""

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
    #: (leaves, loops): the loop is vectorised, and TVM does not turn it back into a serial loop.
    vector: BoolArray
    #: (leaves,): the loop along which lanes run: GPU threads, else the vectorised loop, else the innermost loop.
    simd: IntArray
    #: (leaves,): the leaf has a vectorised loop.
    explicit_simd: BoolArray
    #: (leaves,): number of innermost loops that are vectorised, unrolled or GPU threads; they make straight-line code.
    tile: IntArray

    @property
    def iterations(self) -> FloatArray:
        """Iterations of all loops of each leaf, (leaves,)."""
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
    """The array with a column of ones before the others."""
    return np.concatenate([np.ones((len(array), 1)), array], axis=1)


@dataclass(frozen=True)
class LeafTable(Collected):
    """Everything from which the features of a batch of programs are computed. ``access`` has three more columns: ``prefix``
    (first column of :attr:`buffer`, 0 for parameters), ``allocated`` and ``irregular``."""

    nest: LoopNest
    #: float64 (rows,): extent of the buffer in the row's dimension; a row is one dimension of one access.
    shape: FloatArray
    #: int64 (rows,): the access of each row.
    row_access: IntArray
    #: float64 (rows, loops): by how much the index changes in one iteration of this loop alone.
    coef: FloatArray
    #: float64 (rows, depths): largest minus smallest index while the ``k`` innermost loops vary.
    span: FloatArray
    #: bool (rows, loops): the index depends on the loop.
    uses: BoolArray
    #: bool (accesses, loops): the address depends on the loop in a way that is not affine.
    gathers: BoolArray
    #: bool (accesses, loops): every iteration of the loop reuses the storage of the buffer for new data.
    renewed: BoolArray


def leaf_table(found: Collected) -> LeafTable:
    """The table of a collected batch of programs."""
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


#: Widths of SIMD registers in bytes for which instructions are counted.
SIMD_BYTES: tuple[int, ...] = (16, 32, 64)
LINE_BYTES = 64.0
PAGE_BYTES = 4096.0
#: Bytes after which addresses map to the same set again, in a cache of 64 sets (32 KB, 8 ways) and one of 1024 (1 MB, 16 ways).
SET_PERIODS = (4 << 10, 64 << 10)


@dataclass(frozen=True)
class Footprints:
    """Memory that the accesses touch."""

    #: (accesses,): :attr:`LeafTable.access_leaf`.
    leaf: IntArray
    #: (accesses, depths): distinct elements of storage touched by the ``k`` innermost loops.
    elements: FloatArray
    #: (accesses, depths): distinct elements of data; more than ``elements`` where storage is reused for new data.
    data: FloatArray
    #: (accesses, depths): bytes of the distinct cache lines touched.
    lines: FloatArray
    #: (accesses, depths): distinct pages of 4 KB touched.
    pages: FloatArray
    #: (accesses, depths): number of touched elements that lie side by side in storage.
    runs: FloatArray
    #: (accesses, loops): stride in elements between the addresses of successive iterations of one loop.
    stride: FloatArray
    #: (accesses, loops): the data accessed depend on the loop.
    uses: BoolArray
    #: (accesses,): bytes of the buffer as it will be allocated.
    storage: FloatArray
    #: (leaves, depths): bytes touched by all leaves inside the ``k``-th loop while it runs through once.
    working_set: FloatArray
    #: (programs,): bytes touched by the whole program.
    program_bytes: FloatArray

    def per_leaf(self, values: FloatArray) -> FloatArray:
        """Sums over the accesses of each leaf, (leaves,)."""
        return np.bincount(self.leaf, weights=values, minlength=len(self.working_set))

    @classmethod
    def of(cls, table: LeafTable, nest: LoopNest) -> Footprints:
        """The footprints of a batch."""
        leaf, buffer, itemsize = table.access_leaf, table.access_buffer, table.access["itemsize"]
        starts = np.searchsorted(table.row_access, np.arange(len(leaf)))
        row_leaf = leaf[table.row_access]
        shape = _storage_shape(table, buffer)
        caps = with_one(np.cumprod(np.where(table.uses, nest.extent[row_leaf], 1.0), axis=1))
        span = np.minimum(table.span, (shape - 1)[:, None])
        count = np.minimum(span + 1, caps)
        uses = _by_access(np.logical_or, starts, table.uses)
        points = with_one(np.cumprod(np.where(uses, nest.extent[leaf], 1.0), axis=1))
        elements = np.minimum(_by_access(np.multiply, starts, count), points)
        extents = _extents(starts, shape, span, count)
        lines = np.minimum(extents.blocks(LINE_BYTES / itemsize), elements) * LINE_BYTES
        working_set, program_bytes = _working_sets(table, nest, leaf, buffer, lines)
        return cls(
            leaf=leaf,
            elements=elements,
            data=elements * with_one(np.cumprod(np.where(table.renewed, nest.extent[leaf], 1.0), axis=1)),
            lines=lines,
            pages=np.minimum(extents.blocks(PAGE_BYTES / itemsize), elements),
            runs=np.minimum(np.minimum(extents.run, extents.run_count), elements),
            stride=_by_access(np.add, starts, table.coef * extents.strides[:, None]),
            uses=uses | table.renewed,
            storage=_by_access(np.multiply, starts, shape) * itemsize,
            working_set=working_set,
            program_bytes=program_bytes,
        )


def _by_access(function: np.ufunc, starts: IntArray, values: NDArray[Any]) -> NDArray[Any]:
    """``function`` (a sum, a maximum) reduced over the rows of each access; ``starts`` has the first row of each access."""
    return function.reduceat(values, starts, axis=0) if len(starts) else values


def by_leaf(function: np.ufunc, leaf: IntArray, values: NDArray[Any], n_leaves: int) -> NDArray[Any]:
    """``function`` (a sum, a maximum) reduced over the accesses or rows of each leaf, (leaves, ...); zero for leaves without
    any. ``leaf`` (accesses | rows,) is the leaf of each value and must not decrease."""
    out = np.zeros((n_leaves, *values.shape[1:]), dtype=values.dtype)
    first = np.flatnonzero(np.diff(leaf, prepend=-1))
    if len(first):
        out[leaf[first]] = function.reduceat(values, first, axis=0)
    return out


def _storage_shape(table: LeafTable, buffer: IntArray) -> FloatArray:
    """Extent of each row's dimension as allocated: inside the loops that all accesses to a buffer share, TVM shrinks the
    buffer to the part that is live."""
    shape = table.shape
    allocated = table.access["allocated"][table.row_access]
    if not allocated.any():
        return shape
    dimension = table.row[:, 1]
    dims = int(dimension.max()) + 1
    key = buffer[table.row_access] * dims + dimension
    live = np.zeros(len(table.buffer) * dims)
    np.maximum.at(live, key, table.span[:, -1] + 1)
    return np.where(allocated, np.minimum(shape, live[key]), shape)


@dataclass(frozen=True)
class _Extents:
    """Where in storage the elements of each access lie, (accesses, depths) each. ``run``: elements from the first to the last
    of a run, which has no gap between rows; ``run_count``: those of them that are touched; ``outer``: number of such runs;
    ``linear``: elements from the very first to the very last. ``strides`` is the element stride of each row, (rows,)."""

    run: FloatArray
    run_count: FloatArray
    outer: FloatArray
    linear: FloatArray
    strides: FloatArray

    def blocks(self, size: FloatArray) -> FloatArray:
        """Number of aligned blocks (lines, pages) of ``size`` elements (accesses,) that are touched, (accesses, depths)."""
        size = size[:, None]
        blocks = self.outer * np.minimum(np.ceil(self.run / size), self.run_count)
        return np.minimum(blocks, np.ceil((self.linear + 1) / size))


def _extents(starts: IntArray, shape: FloatArray, span: FloatArray, count: FloatArray) -> _Extents:
    n = len(starts)
    ends = np.append(starts[1:], len(shape))
    dims = ends - starts
    depths = span.shape[1]
    strides = np.ones(len(shape))
    size = np.ones(n)
    run = np.ones((n, depths))
    run_count = np.ones((n, depths))
    outer = np.ones((n, depths))
    whole = np.ones((n, depths), dtype=bool)
    linear = np.zeros((n, depths))
    for j in range(int(dims.max(initial=1))):
        have = np.flatnonzero(dims > j)
        row = ends[have] - 1 - j
        strides[row] = size[have]
        s, c = span[row], count[row]
        full = whole[have]
        linear[have] += s * size[have, None]
        run[have] = np.where(full, run[have] + s * size[have, None], run[have])
        run_count[have] *= np.where(full, c, 1.0)
        outer[have] *= np.where(full, 1.0, c)
        whole[have] = full & (s + 1 >= shape[row][:, None])
        size[have] *= shape[row]
    return _Extents(run, run_count, outer, linear, strides)


def _working_sets(
    table: LeafTable, nest: LoopNest, leaf: IntArray, buffer: IntArray, lines: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes touched inside each loop by all its leaves, (leaves, depths), and by each program, (programs,). A buffer that
    several leaves touch counts once, with the largest of their footprints."""
    n_leaves, loops = nest.extent.shape
    n_nodes, n_programs = len(table.node), len(table.program)
    node = nest.node[leaf]
    root = n_nodes + table.leaf["program"][leaf].astype(np.int64)
    have = node >= 0
    nodes = np.concatenate([node[have], root])
    buffers = np.concatenate([np.broadcast_to(buffer[:, None], node.shape)[have], buffer])
    values = np.concatenate([lines[:, 1:][have], lines[:, -1]])
    key = nodes * max(1, len(table.buffer)) + buffers
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    largest = np.maximum.reduceat(values[order], first) if len(key) else values
    total = np.bincount(nodes[order][first], weights=largest, minlength=n_nodes + n_programs)
    own = np.bincount(leaf, weights=lines[:, 0], minlength=n_leaves)
    working_set = np.empty((n_leaves, loops + 1))
    working_set[:, 0] = own
    working_set[:, 1:] = np.where(nest.node >= 0, total[nest.node], 0.0)
    np.maximum.accumulate(working_set, axis=1, out=working_set)
    return working_set, total[n_nodes:]


def traffic(nest: LoopNest, feet: Footprints, capacity: float) -> FloatArray:
    """Bytes that each access moves into a memory of the given capacity, (accesses,).

    Let ``k`` be the largest number of inner loops whose working set fits. Loop ``k + 1`` then finds again what its previous
    iteration left, so each new datum is moved once; every iteration of the loops around it moves all of that again."""
    return _moved(nest, feet, feet.lines, feet.working_set[:, 1:] <= capacity)


def conflict_traffic(table: LeafTable, nest: LoopNest, feet: Footprints, capacity: float, period: int) -> FloatArray:
    """As :func:`traffic`, for a cache in which addresses ``period`` bytes apart map to the same set, (accesses,).

    An access whose stride is a multiple of a large power of two uses few of the sets. Its lines then fill the cache faster, by
    the ratio of the sets that they could use to those that they do use."""
    sets = period / LINE_BYTES
    itemsize = table.access["itemsize"][:, None]
    extent = np.where(feet.uses, nest.extent[feet.leaf], 1.0)
    step = np.abs(feet.stride) * itemsize
    whole = np.where(table.gathers | (step == 0), 1, step).astype(np.int64)
    aligned = whole | period  # its lowest bit is gcd(step, period), because the period is a power of two
    positions = np.minimum(extent, period // (aligned & -aligned))
    used = np.maximum(1.0, positions * np.minimum(1.0, step / LINE_BYTES))
    used = np.where(table.gathers, extent, used)
    used = np.minimum(with_one(np.cumprod(used, axis=1)), sets)
    crowding = np.maximum(1.0, np.minimum(feet.lines / LINE_BYTES, sets) / used)
    extra = by_leaf(np.add, feet.leaf, feet.lines * (crowding - 1), len(nest.n))
    return _moved(nest, feet, feet.lines, (feet.working_set + extra)[:, 1:] <= capacity)


def page_traffic(nest: LoopNest, feet: Footprints, entries: Sequence[int]) -> list[FloatArray]:
    """Pages that each access moves into TLBs with the given numbers of entries, (accesses,) each; as :func:`traffic`."""
    touched = by_leaf(np.add, feet.leaf, feet.pages, len(nest.n))[:, 1:]
    return [_moved(nest, feet, feet.pages, touched <= n) for n in entries]


def _moved(nest: LoopNest, feet: Footprints, touched: FloatArray, fits: BoolArray) -> FloatArray:
    k = np.minimum((np.logical_and.accumulate(fits, axis=1) & (nest.node >= 0)).sum(axis=1) + 1, nest.n)
    rows = np.arange(len(k))
    outer = nest.iterations / nest.points[rows, k]
    return touched[np.arange(len(feet.leaf)), k[feet.leaf]] * outer[feet.leaf]


def register_elements(nest: LoopNest, feet: Footprints) -> FloatArray:
    """Element loads (or stores) of each access if straight-line code loads each element once, (accesses,). If the loop around
    that code does not change what an access touches, its elements stay in registers during this loop."""
    k = nest.tile[feet.leaf]
    rows = np.arange(len(k))
    still = (k < nest.n[feet.leaf]) & ~feet.uses[rows, np.minimum(k, feet.uses.shape[1] - 1)]
    k = k + still
    return feet.data[rows, k] * (nest.iterations[feet.leaf] / nest.points[feet.leaf, k])


def auto_simd(table: LeafTable, nest: LoopNest, feet: Footprints) -> BoolArray:
    """Whether a compiler can vectorise the innermost loop although the schedule does not, (leaves,)."""
    kind = nest.kind[:, 0]
    simple = np.isin(kind, (LoopKind.SERIAL, LoopKind.UNROLLED)) & ~nest.reduction[:, 0] & ~nest.explicit_simd
    for name in ("branch_inner", "opaque", "guarded"):
        simple &= table.leaf[name] == 0
    bad = (np.abs(feet.stride[:, 0]) > 1) | table.gathers[:, 0]
    return simple & (feet.per_leaf(bad) == 0)


def simd_packs(table: LeafTable, nest: LoopNest, auto: BoolArray, simd_bytes: int) -> FloatArray:
    """Instructions per iteration of a leaf with SIMD registers of ``simd_bytes``, (leaves,): 1 for scalar code.

    A vectorised loop is one vector, split into registers of which the last may be only partly used. A compiler that vectorises
    by itself uses the widest registers that suit the number of iterations, and runs the remaining iterations one by one."""
    itemsize = np.maximum(table.leaf["itemsize"], 1.0)
    extent = nest.extent[np.arange(len(itemsize)), nest.simd]
    explicit = np.ceil(extent / np.maximum(1.0, simd_bytes / itemsize)) / extent
    automatic = np.ones(len(itemsize))
    for width in SIMD_BYTES:
        if width <= simd_bytes:
            lanes = np.maximum(1.0, width / itemsize)
            automatic = np.minimum(automatic, (np.floor(extent / lanes) + extent % lanes) / extent)
    return np.where(nest.explicit_simd, explicit, np.where(auto, automatic, 1.0))


def neighbour_packs(table: LeafTable, nest: LoopNest, feet: Footprints, simd_bytes: int) -> FloatArray:
    """Instructions per iteration, (leaves,), if a compiler packs straight-line code into SIMD registers where copies of a
    statement store to neighbouring elements (superword-level parallelism)."""
    at = np.arange(len(feet.leaf))
    stores = table.access["stores"] > 0
    run = np.where(stores, feet.runs[at, nest.tile[feet.leaf]], 0.0)
    beside = by_leaf(np.maximum, feet.leaf, run, len(table.ops))
    lanes = np.maximum(1.0, simd_bytes / np.maximum(table.leaf["itemsize"], 1.0))
    used = np.exp2(np.floor(np.log2(np.clip(beside, 1.0, lanes))))
    return 1.0 / used
