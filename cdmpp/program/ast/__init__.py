"""Compact ASTs: what the model sees of a program.

A :class:`CompactAST` has the computations (leaves) of a PrimFunc in pre-order. Each leaf has a vector of named features
(:data:`~cdmpp.program.ast.LEAF_FEATURES`) and a position in the pre-order of the AST. A C++ extension (``native/``) makes it
from the blocks of scheduled TIR, without lowering; ``walk.h`` says what counts as a node. The extension is built when cdmpp is
installed. Everything else works without it, stored ASTs included. Importing this module loads neither the extension nor TVM.

``leaf_features.yaml`` has the names and meanings of the features; the order of :data:`LEAF_FEATURES` is that of the columns.
When the meaning of a feature changes, raise :data:`FEATURE_VERSION`: predictors and stored ASTs refuse another feature set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import CdmppError, ProgramError
from cdmpp.files import shipped_table
from cdmpp.program import import_tvm
from cdmpp.program.ast.table import (
    ACCESS_COLUMNS,
    LEAF_COLUMNS,
    SET_PERIODS,
    SIMD_BYTES,
    Collected,
    FloatArray,
    Footprints,
    IntArray,
    LeafTable,
    LoopKind,
    LoopNest,
    Scope,
    auto_simd,
    by_leaf,
    conflict_traffic,
    leaf_table,
    neighbour_packs,
    page_traffic,
    register_elements,
    simd_packs,
    traffic,
)  # fmt: skip

__all__ = [
    "FEATURE_SET", "LEAF_FEATURES", "LEAF_FEATURE_DOCS", "CompactAST", "compact_ast", "compact_asts", "prim_func",
]  # fmt: skip

#: Raised whenever the meaning of a feature changes while its name stays.
FEATURE_VERSION = 3

#: Kinds of operations that are counted per iteration ("f": floating point, "i": integer or boolean).
OP_KINDS: tuple[str, ...] = (
    "fadd", "fmul", "fma", "fdiv", "fminmax", "exp", "tanh", "erf", "transcendental", "sqrt", "cast", "compare",
    "select", "branch", "iadd", "imul", "idivmod", "call",
)  # fmt: skip
#: Costly operations: calls of the C library, and roots.
SPECIAL: tuple[str, ...] = ("exp", "tanh", "erf", "transcendental", "sqrt")

#: Memory capacities in bytes for which the bytes moved are estimated: register files, then 8 KB to 32 MB.
CAPACITIES: tuple[int, ...] = (512, 2048, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
#: Number of innermost loops that have features of their own; products of extents by kind of loop cover all loops.
N_LOOPS = 8
#: Number of accesses that have features of their own (slots): stores first, then loads by bytes moved.
N_SLOTS = 5
#: Numbers of entries of a translation look-aside buffer for which the pages moved are estimated.
TLB_ENTRIES: tuple[int, ...] = (64, 1536)
#: Depths (numbers of inner loops) at which the features give working sets, and footprints of slots.
WORKING_SET_DEPTHS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 8)
SLOT_DEPTHS: tuple[int, ...] = (1, 2, 3)
#: Numbers of cores for which the features give the imbalance of the parallel loops.
CORES: tuple[int, ...] = (2, 4, 8, 16, 32)


def size_name(n: int) -> str:
    """A capacity in bytes as written in feature names: 512b, 32kb, 2mb."""
    return f"{n >> 20}mb" if n >= 1 << 20 else f"{n >> 10}kb" if n >= 1 << 10 else f"{n}b"


def _described() -> dict[str, str]:
    """The rows of ``leaf_features.yaml``; rows about an operation, loop or access are repeated for each of them."""
    each = {"op": OP_KINDS, "loop": range(1, N_LOOPS + 1), "slot": range(1, N_SLOTS + 1)}
    return {
        name.format(**{group: one}): meaning.format(**{group: one})
        for group, rows in shipped_table("program/ast/leaf_features.yaml").items()
        for one in each.get(group, ("",))
        for name, meaning in rows.items()
    }


#: Feature name -> meaning, in column order.
LEAF_FEATURE_DOCS: dict[str, str] = _described()
#: Names of the columns of :attr:`cdmpp.program.ast.CompactAST.leaves`.
LEAF_FEATURES: tuple[str, ...] = tuple(LEAF_FEATURE_DOCS)
#: Features of one slot, without their prefix, in column order.
SLOT_FEATURES: tuple[str, ...] = tuple(n.removeprefix("slot1_") for n in LEAF_FEATURES if n.startswith("slot1_"))
_NAMES_HASH = hashlib.blake2b("\n".join(LEAF_FEATURES).encode(), digest_size=4).hexdigest()
#: Identifies this feature set in stored ASTs and predictors.
FEATURE_SET: str = f"ast{FEATURE_VERSION}-{_NAMES_HASH}"


#: Number of floating-point operations that each kind of operation counts as.
_FLOPS = np.array([{"fadd": 1, "fmul": 1, "fma": 2, "fdiv": 1, "fminmax": 1}.get(k, 0) for k in OP_KINDS], float)
#: 1 for each kind of operation that is a floating-point instruction, else 0.
_FP = np.minimum(_FLOPS, 1)
_SPECIAL = np.array([k in SPECIAL for k in OP_KINDS], float)
_INTEGER = np.array([k in ("iadd", "imul", "idivmod", "compare") for k in OP_KINDS], float)


def leaf_vectors(table: LeafTable) -> NDArray[np.float32]:
    """Feature vectors of all leaves, float32 (leaves, len(LEAF_FEATURES))."""
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
        np.stack([feet.per_leaf(row) for row in (*(moved * times), *(row * times for row in conflicts), *pages)], axis=1),
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
    # Loops are in order from the innermost, so the innermost parallel loop is the first. Without one all loops are inside.
    has_parallel = (kind == LoopKind.PARALLEL).any(axis=1)
    inner = np.where(has_parallel, (kind == LoopKind.PARALLEL).argmax(axis=1), extent.shape[1])
    iterations = nest.iterations
    domain = table.leaf["domain"]
    of_gpu = (LoopKind.BLOCK_IDX, LoopKind.THREAD_IDX, LoopKind.VTHREAD)
    blocks, threads, vthreads = (product(kind == own) for own in of_gpu)
    columns = [
        nest.n, iterations, domain, iterations / np.maximum(domain, 1.0), product(serial & ~nest.reduction),
        product(serial & nest.reduction), product(nest.reduction), product(~used), parallel,
        nest.points[np.arange(len(inner)), inner], vector, divisor, vector != divisor,
        product((kind == LoopKind.VECTORIZED) & ~nest.vector), product(nest.unrolled), blocks, threads, vthreads,
        iterations / (blocks * threads), table.leaf["max_step"], table.leaf["explicit"],
        *[np.ceil(parallel / n) * n / parallel for n in CORES],
    ]  # fmt: skip
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
    # The reduction loops directly around the tile, up to the first loop that is no reduction loop.
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
    table: LeafTable, nest: LoopNest, feet: Footprints, auto: NDArray[np.bool_], registers: FloatArray, times: FloatArray
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
    """Bytes of the buffers that each program allocates, one array (programs,) per scope."""
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
    # The innermost loop whose iterations reuse the same elements; the reuse distance is what one iteration of it touches.
    again = ~feet.uses & (nest.kind[leaf] >= 0)
    carries = again.any(axis=1)
    first = again.argmax(axis=1)
    allocated = access["allocated"]
    below = np.clip(nest.n[leaf] - access["prefix"], 0, depths - 1)
    columns = [
        access["itemsize"], access["stores"], access["loads"], access["scope"] == 1, access["scope"] == 2, allocated,
        access["irregular"], stride[at, nest.simd[leaf]],
        *[stride[:, k] if k < depths - 1 else np.zeros(n) for k in range(3)], feet.runs[at, nest.tile[leaf]],
        feet.elements[at, nest.tile[leaf]], registers, *[feet.lines[:, min(k, depths - 1)] for k in SLOT_DEPTHS],
        feet.lines[:, -1], feet.elements[:, -1] * access["itemsize"], feet.storage, iterations / feet.data[:, -1],
        np.where(carries, feet.working_set[leaf, first], 0.0), np.where(allocated, feet.working_set[leaf, below], 0.0),
        np.where(allocated, iterations / nest.points[leaf, below], 0.0), moved[CAPACITIES.index(32 << 10)],
        moved[CAPACITIES.index(512 << 10)],
    ]  # fmt: skip
    values = np.stack(columns, axis=1)
    assert values.shape[1] == len(SLOT_FEATURES)
    order = np.lexsort((at, -feet.elements[:, -1], -moved[CAPACITIES.index(32 << 10)], -values[:, 1], leaf))
    rank: IntArray = np.empty(n, dtype=np.int64)
    rank[order] = at - np.searchsorted(leaf, leaf)
    keep = rank < N_SLOTS
    out = np.zeros((len(table.ops), N_SLOTS, len(SLOT_FEATURES)))
    out[leaf[keep], rank[keep]] = values[keep]
    return out.reshape(len(table.ops), -1)


#: Number of programs whose features are computed together: enough to hide numpy's overhead, few enough for the caches.
_CHUNK = 128
#: Module name of the C++ extension, see ``setup.py``.
_EXTENSION = "cdmpp.program.ast._reader"


@dataclass(frozen=True, eq=False)
class CompactAST:
    """A program, represented by its leaves."""

    #: float32 (n_leaves, len(LEAF_FEATURES)), raw values in pre-order of the leaves.
    leaves: NDArray[np.float32]
    #: int32 (n_leaves,), positions in the pre-order of the AST, increasing; the root has position 0.
    positions: NDArray[np.int32]
    #: Number of nodes of the AST: root, loops and leaves.
    n_nodes: int

    @property
    def n_leaves(self) -> int:
        """Number of computations."""
        return len(self.positions)

    def column(self, name: str) -> NDArray[np.float32]:
        """One feature of all leaves, given its name, (n_leaves,)."""
        return self.leaves[:, LEAF_FEATURES.index(name)]


def compact_asts(funcs: Iterable[Any]) -> list[CompactAST]:
    """Compact ASTs of PrimFuncs, or of IRModules with one PrimFunc each, in order. Raises ProgramError if a program has no
    computation or has symbolic shapes (the message says which program), CdmppError if TVM or the C++ extension is missing."""
    funcs = list(funcs)
    asts: list[CompactAST] = []
    for start in range(0, len(funcs), _CHUNK):
        asts += _chunk(funcs[start : start + _CHUNK], start if len(funcs) > 1 else -1)
    return asts


def compact_ast(func: Any) -> CompactAST:
    """The compact AST of one program. For many, :func:`compact_asts` is several times faster; it raises the same errors."""
    return compact_asts([func])[0]


def prim_func(func: Any) -> Any:
    """The given PrimFunc, or the only PrimFunc of the given IRModule. Raises ProgramError for anything else."""
    tvm = import_tvm()
    if isinstance(func, tvm.IRModule):
        found = [f for f in func.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
        if len(found) != 1:
            raise ProgramError(f"expected a module with one PrimFunc, got one with {len(found)}")
        return found[0]
    if not isinstance(func, tvm.tirx.PrimFunc):
        raise ProgramError(f"expected a PrimFunc or an IRModule, got {type(func).__name__}")
    return func


def _chunk(funcs: Sequence[Any], first: int) -> list[CompactAST]:
    """ASTs of a part of the programs; ``first`` is the number of the first one in error messages, -1 to give no numbers."""
    reader = extension()
    prim_funcs = []
    for number, func in enumerate(funcs, first):
        try:
            prim_funcs.append(prim_func(func))
        except ProgramError as err:
            if first < 0:
                raise
            raise ProgramError(f"program {number}: {err}") from err
    try:
        columns = reader.read(prim_funcs, first)
    except ValueError as err:
        raise ProgramError(str(err)) from err
    arrays: dict[str, Any] = {str(name): np.from_dlpack(column) for name, column in columns.items()}
    for name, names in (("leaf", LEAF_COLUMNS), ("access", ACCESS_COLUMNS)):
        arrays[name] = dict(zip(names, arrays[name].T, strict=True))
    found = Collected(**arrays)
    vectors = leaf_vectors(leaf_table(found))
    positions = found.leaf["position"].astype(np.int32)
    counts, _, n_nodes = found.program.T
    ends = np.cumsum(counts)
    return [
        CompactAST(vectors[end - count : end], positions[end - count : end], int(n))
        for end, count, n in zip(ends, counts, n_nodes, strict=True)
    ]


@lru_cache(maxsize=1)
def extension() -> Any:
    """The C++ extension (``native/reader.cc``). Raises CdmppError if it was not built, or for another version of cdmpp."""
    import_tvm()  # the extension reads TVM's IR nodes
    import tvm_ffi

    spec = find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        raise CdmppError(
            "this needs cdmpp's C++ extension, which was not built: "
            "install a C++ compiler (such as g++), then cdmpp again with pip install --force-reinstall --no-deps"
        )
    try:
        reader = tvm_ffi.load_module(spec.origin)
        found = reader.operations(), reader.leaf_columns(), reader.on_lower_stack
    except (OSError, RuntimeError, AttributeError) as err:
        raise CdmppError(f"{spec.origin} cannot be loaded, install cdmpp again: {err}") from err
    if found[:2] != (" ".join(OP_KINDS), " ".join(LEAF_COLUMNS)):
        raise CdmppError(f"{spec.origin} was built for another version of cdmpp: install cdmpp again")
    return reader
