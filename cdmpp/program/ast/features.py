"""The numeric vectors of leaves, for many programs at once. :mod:`cdmpp.program.ast.schema` has the meanings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.ast.footprint import (
    SET_PERIODS,
    Footprints,
    auto_simd,
    by_leaf,
    conflict_traffic,
    neighbour_packs,
    page_traffic,
    register_elements,
    simd_packs,
    traffic,
)  # fmt: skip
from cdmpp.program.ast.schema import (
    CAPACITIES,
    CORES,
    LEAF_FEATURES,
    N_LOOPS,
    N_SLOTS,
    OP_KINDS,
    SIMD_BYTES,
    SLOT_DEPTHS,
    SLOT_FEATURES,
    SPECIAL,
    TLB_ENTRIES,
    WORKING_SET_DEPTHS,
)  # fmt: skip
from cdmpp.program.ast.table import FloatArray, IntArray, LeafTable, LoopKind, LoopNest, Scope

#: Floating-point operations that each kind of operation counts as.
_FLOPS = np.array([{"fadd": 1, "fmul": 1, "fma": 2, "fdiv": 1, "fminmax": 1}.get(k, 0) for k in OP_KINDS], float)
#: Floating-point instructions that each kind is, where it is one.
_FP = np.minimum(_FLOPS, 1)
_SPECIAL = np.array([k in SPECIAL for k in OP_KINDS], float)
_INTEGER = np.array([k in ("iadd", "imul", "idivmod", "compare") for k in OP_KINDS], float)


def leaf_vectors(table: LeafTable) -> NDArray[np.float32]:
    """Vectors of all leaves, float32 (leaves, len(LEAF_FEATURES))."""
    nest = table.nest
    feet = Footprints.of(table, nest)
    moved = np.stack([traffic(nest, feet, c) for c in CAPACITIES])
    registers = register_elements(nest, feet)
    conflicts = [
        conflict_traffic(table, nest, feet, capacity, period)
        for capacity, period in zip((32 << 10, 1 << 20), SET_PERIODS, strict=True)
    ]
    pages = page_traffic(nest, feet, TLB_ENTRIES)
    times = (table.access["loads"] > 0).astype(float) + (table.access["stores"] > 0)
    auto = auto_simd(table, nest, feet)
    flops = table.ops @ _FLOPS
    special = table.ops @ _SPECIAL / table.leaf["hoisted"]
    blocks = [
        _context(table),
        _loops(table, nest, feet),
        table.ops,
        np.stack([flops, special, table.ops @ _INTEGER, feet.per_leaf(table.access["loads"])], axis=1)
        * nest.iterations[:, None],
        _code(table, nest, feet, auto),
        _instructions(table, nest, feet, auto, registers, times),
        ((table.ops @ _FP) * nest.iterations * neighbour_packs(table, nest, feet, 32))[:, None],
        np.stack(
            [feet.per_leaf(row) for row in (*(moved * times), *(row * times for row in conflicts), *pages)], axis=1
        ),
        feet.working_set[:, [min(k, feet.working_set.shape[1] - 1) for k in WORKING_SET_DEPTHS]],
        _program(table, nest, feet, flops),
        _window(nest),
        _slots(table, nest, feet, moved, registers),
    ]
    vectors = np.concatenate(blocks, axis=1)
    assert vectors.shape[1] == len(LEAF_FEATURES)
    return vectors.astype(np.float32)


def _context(table: LeafTable) -> FloatArray:
    leaf = table.leaf
    program = leaf["program"].astype(np.int64)
    nest = leaf["nest"].astype(np.int64)
    leaves, nests, _ = table.program.T
    offsets = np.cumsum(nests) - nests
    nest_key = offsets[program] + nest
    names = (
        "itemsize", "is_float", "stores", "is_init", "is_reduction", "guarded", "predicated", "opaque", "divmod",
        "divmod_inner", "branch_inner", "index",
    )  # fmt: skip
    extra = [leaves[program], nest, nests[program], np.bincount(nest_key)[nest_key]]
    return np.stack([*(leaf[name] for name in names), *extra, leaf["shared_before"], leaf["shared_after"]], axis=1)


def _loops(table: LeafTable, nest: LoopNest, feet: Footprints) -> FloatArray:
    kind, extent = nest.kind, nest.extent
    row_leaf = table.access_leaf[table.row_access]
    used = by_leaf(np.logical_or, row_leaf, table.uses, len(extent))
    used |= by_leaf(np.logical_or, feet.leaf, table.gathers, len(extent))
    vector = np.where(nest.vector, extent, 1.0).prod(axis=1).astype(np.int64)
    divisor = vector & -vector

    def product(mask: NDArray[np.bool_]) -> FloatArray:
        return np.where(mask, extent, 1.0).prod(axis=1)

    serial = np.isin(kind, (LoopKind.SERIAL, LoopKind.UNROLLED)) | ((kind == LoopKind.VECTORIZED) & ~nest.vector)
    parallel = product(kind == LoopKind.PARALLEL)
    # The innermost parallel loop is the first from inside; without one everything is inside.
    has_parallel = (kind == LoopKind.PARALLEL).any(axis=1)
    inner = np.where(has_parallel, (kind == LoopKind.PARALLEL).argmax(axis=1), extent.shape[1])
    iterations = nest.iterations
    domain = table.leaf["domain"]
    of_gpu = (LoopKind.BLOCK_IDX, LoopKind.THREAD_IDX, LoopKind.VTHREAD)
    blocks, threads, vthreads = (product(kind == own) for own in of_gpu)
    columns = [
        nest.n,
        iterations,
        domain,
        iterations / np.maximum(domain, 1.0),
        product(serial & ~nest.reduction),
        product(serial & nest.reduction),
        product(nest.reduction),
        product(~used),
        parallel,
        nest.points[np.arange(len(inner)), inner],
        vector,
        divisor,
        vector != divisor,
        product((kind == LoopKind.VECTORIZED) & ~nest.vector),
        product(nest.unrolled),
        blocks,
        threads,
        vthreads,
        iterations / (blocks * threads),
        table.leaf["max_step"],
        table.leaf["explicit"],
        *[np.ceil(parallel / n) * n / parallel for n in CORES],
    ]
    return np.stack(columns, axis=1)


def _code(table: LeafTable, nest: LoopNest, feet: Footprints, auto: NDArray[np.bool_]) -> FloatArray:
    rows = np.arange(len(table.ops))
    at = np.arange(len(feet.leaf))
    tile = nest.tile
    in_tile = feet.data[at, tile[feet.leaf]]
    stores = table.access["stores"] > 0
    outputs = feet.per_leaf(in_tile * stores)
    loads = table.access["loads"] > 0
    inputs = feet.per_leaf(in_tile * loads)
    is_reduction = table.leaf["is_reduction"]
    loops = np.arange(nest.extent.shape[1])
    outside = loops >= tile[:, None]
    # Reduction loops directly around the tile, up to the first loop that is none.
    hold = np.logical_and.accumulate(nest.reduction | ~outside, axis=1) & outside
    has_next = tile < nest.n
    next_loop = np.minimum(tile, nest.extent.shape[1] - 1)
    simd_stride = np.abs(feet.stride[at, nest.simd[feet.leaf]])
    gather = table.gathers[at, nest.simd[feet.leaf]]
    classes = [(simd_stride == 1) & ~gather, (simd_stride == 0) & ~gather, (simd_stride > 1) & ~gather, gather]
    run = feet.runs[at, tile[feet.leaf]]
    runs = [by_leaf(np.maximum, feet.leaf, np.where(have, run, 0.0), len(rows)) for have in (stores, loads)]
    columns = [
        nest.points[rows, tile],
        outputs,
        inputs,
        np.where(nest.unrolled & ~outside, nest.extent, 1.0).prod(axis=1),
        is_reduction * nest.iterations / np.maximum(outputs, 1.0),
        np.where(hold, nest.extent, 1.0).prod(axis=1),
        np.where(has_next, nest.extent[rows, next_loop], 0.0),
        np.where(has_next, nest.reduction[rows, next_loop], 0.0),
        nest.extent[rows, nest.simd],
        auto,
        *[feet.per_leaf(c) for c in classes],
        *runs,
    ]
    return np.stack(columns, axis=1)


def _instructions(
    table: LeafTable,
    nest: LoopNest,
    feet: Footprints,
    auto: NDArray[np.bool_],
    registers: FloatArray,
    times: FloatArray,
) -> FloatArray:
    at = np.arange(len(feet.leaf))
    contiguous = (feet.stride[at, nest.simd[feet.leaf]] == 1) & ~table.gathers[at, nest.simd[feet.leaf]]
    operations = (table.ops @ _FP) * nest.iterations
    columns = []
    for width in SIMD_BYTES:
        packs = simd_packs(table, nest, auto, width)
        columns.append(operations * packs)
        accesses = registers * times * np.where(contiguous, packs[feet.leaf], 1.0)
        columns.append(feet.per_leaf(accesses))
    return np.stack(columns, axis=1)


def _program(table: LeafTable, nest: LoopNest, feet: Footprints, flops: FloatArray) -> FloatArray:
    program = table.leaf["program"].astype(np.int64)
    leaf_flops = flops * nest.iterations
    all_flops = np.bincount(program, weights=leaf_flops)[program]
    all_iterations = np.bincount(program, weights=nest.iterations)[program]
    columns = [
        all_flops,
        all_iterations,
        feet.program_bytes[program],
        *[allocated[program] for allocated in _allocations(table, feet)],
        nest.iterations / all_iterations,
        leaf_flops / np.maximum(all_flops, 1.0),
    ]
    return np.stack(columns, axis=1)


def _allocations(table: LeafTable, feet: Footprints) -> list[FloatArray]:
    """Bytes of the buffers each program allocates, by scope."""
    _, first = np.unique(table.access_buffer, return_index=True)
    program = table.leaf["program"][feet.leaf[first]].astype(np.int64)
    allocated = table.access["allocated"][first]
    scope = table.access["scope"][first]
    return [
        np.bincount(program, feet.storage[first] * (allocated & (scope == s)), len(table.program))
        for s in (Scope.GLOBAL, Scope.SHARED, Scope.LOCAL)
    ]


def _window(nest: LoopNest) -> FloatArray:
    parallel = np.isin(nest.kind, (LoopKind.PARALLEL, LoopKind.BLOCK_IDX, LoopKind.THREAD_IDX))
    facts = [nest.extent * (nest.kind >= 0), nest.reduction, nest.vector, nest.unrolled, parallel]
    known = np.stack(facts, axis=2)[:, :N_LOOPS]
    out = np.zeros((len(known), N_LOOPS, len(facts)))
    out[:, : known.shape[1]] = known
    return out.reshape(len(known), -1)


def _slots(table: LeafTable, nest: LoopNest, feet: Footprints, moved: FloatArray, registers: FloatArray) -> FloatArray:
    access, leaf = table.access, feet.leaf
    n, depths = feet.lines.shape
    at = np.arange(n)
    iterations = nest.iterations[leaf]
    stride = np.abs(feet.stride)
    # The innermost loop that comes back to the same elements, and what is touched in one iteration of it.
    again = ~feet.uses & (nest.kind[leaf] >= 0)
    carries = again.any(axis=1)
    first = again.argmax(axis=1)
    allocated = access["allocated"]
    below = np.clip(nest.n[leaf] - access["prefix"], 0, depths - 1)
    columns = [
        access["itemsize"],
        access["stores"],
        access["loads"],
        access["scope"] == 1,
        access["scope"] == 2,
        allocated,
        access["irregular"],
        stride[at, nest.simd[leaf]],
        *[stride[:, k] if k < depths - 1 else np.zeros(n) for k in range(3)],
        feet.runs[at, nest.tile[leaf]],
        feet.elements[at, nest.tile[leaf]],
        registers,
        *[feet.lines[:, min(k, depths - 1)] for k in SLOT_DEPTHS],
        feet.lines[:, -1],
        feet.elements[:, -1] * access["itemsize"],
        feet.storage,
        iterations / feet.data[:, -1],
        np.where(carries, feet.working_set[leaf, first], 0.0),
        np.where(allocated, feet.working_set[leaf, below], 0.0),
        np.where(allocated, iterations / nest.points[leaf, below], 0.0),
        moved[CAPACITIES.index(32 << 10)],
        moved[CAPACITIES.index(512 << 10)],
    ]
    values = np.stack(columns, axis=1)
    assert values.shape[1] == len(SLOT_FEATURES)
    order = np.lexsort((at, -feet.elements[:, -1], -moved[CAPACITIES.index(32 << 10)], -values[:, 1], leaf))
    rank: IntArray = np.empty(n, dtype=np.int64)
    rank[order] = at - np.searchsorted(leaf, leaf)
    keep = rank < N_SLOTS
    out = np.zeros((len(table.ops), N_SLOTS, len(SLOT_FEATURES)))
    out[leaf[keep], rank[keep]] = values[keep]
    return out.reshape(len(table.ops), -1)
