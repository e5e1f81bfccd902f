"""Names and meanings of the numbers in a leaf vector; no computation, no imports beyond the standard library.

The order of :data:`LEAF_FEATURES` is the order of the columns. Change the meaning of any number and
:data:`FEATURE_VERSION` must go up: predictors and stored ASTs refuse features of another set.
"""

from __future__ import annotations

import hashlib

#: Raised whenever the meaning of a feature changes while its name stays.
FEATURE_VERSION = 3

#: Operations that are counted per iteration ("f": floating point, "i": integer or boolean).
OP_KINDS: tuple[str, ...] = (
    "fadd", "fmul", "fma", "fdiv", "fminmax", "exp", "tanh", "erf", "transcendental", "sqrt", "cast", "compare",
    "select", "branch", "iadd", "imul", "idivmod", "call",
)  # fmt: skip
#: Those that are costly: calls of the C library, and roots.
SPECIAL: tuple[str, ...] = ("exp", "tanh", "erf", "transcendental", "sqrt")

#: Capacities in bytes at which the bytes moved are estimated: register files, then 8 KB to 32 MB.
CAPACITIES: tuple[int, ...] = (512, 2048, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
#: Widths of SIMD registers in bytes for which instructions are counted.
SIMD_BYTES: tuple[int, ...] = (16, 32, 64)
#: Innermost loops described one by one; products by kind cover all loops.
N_LOOPS = 8
#: Accesses described one by one: stores first, then loads by bytes moved.
N_SLOTS = 5
#: Entries of translation look-aside buffers for which the pages moved are estimated.
TLB_ENTRIES: tuple[int, ...] = (64, 1536)
#: Depths (number of inner loops) at which working sets and footprints are given.
WORKING_SET_DEPTHS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 8)
SLOT_DEPTHS: tuple[int, ...] = (1, 2, 3)
#: Numbers of cores for which the imbalance of the parallel loops is given.
CORES: tuple[int, ...] = (2, 4, 8, 16, 32)


def size_name(n: int) -> str:
    """A capacity in bytes as feature names give it: 512b, 32kb, 2mb."""
    return f"{n >> 20}mb" if n >= 1 << 20 else f"{n >> 10}kb" if n >= 1 << 10 else f"{n}b"


_CONTEXT = {
    "itemsize": "bytes of an element of the output",
    "is_float": "1 if the output is floating point",
    "stores": "stores per iteration",
    "is_init": "1 if it initialises a reduction",
    "is_reduction": "1 if it reduces over a loop",
    "guarded": "1 if its reduction is initialised under a condition inside the reduction loops",
    "predicated": "1 if it runs under a condition",
    "opaque": "indices that are read from memory or cannot be analysed",
    "divmod": "integer divisions and remainders left in its indices after simplification",
    "divmod_inner": "of these, those that change in the innermost loop",
    "branch_inner": "1 if a branch depends on the innermost loop",
    "leaf_index": "leaves of the program before it",
    "leaf_count": "leaves of the program",
    "nest_index": "top-level loop nests before its own",
    "nest_count": "top-level loop nests of the program",
    "nest_leaves": "leaves in its top-level loop nest",
    "shared_before": "iterations of the loops it has in common with the leaf before it",
    "shared_after": "the same, leaf after it",
}
_LOOPS_ALL = {
    "loops": "loops around it (of extent above 1)",
    "iterations": "product of their extents",
    "domain": "points of the block's iteration domain (0 outside blocks)",
    "overcompute": "iterations / domain: above 1 where tiles overlap or exceed the domain",
    "serial_spatial": "product of extents of serial loops that no reduction runs over",
    "serial_reduction": "product of extents of serial loops that its reduction runs over",
    "reduction": "product of extents of all loops that its reduction runs over",
    "invariant": "product of extents of loops that no access depends on: the same is computed again",
    "parallel": "product of extents of parallel loops",
    "parallel_inner": "iterations inside the innermost parallel loop (all if there is none)",
    "vectorized": "extent of the vectorised loop",
    "vector_divisor": "largest power of two that divides the extent of the vectorised loop",
    "vector_odd": "1 if that extent is no power of two: a compiler may take its registers apart",
    "scalarised": "extent of a vectorised loop that TVM turns back into a serial one, for a branch depends on it",
    "unrolled": "product of extents of the loops TVM will unroll",
    "block_idx": "product of extents bound to GPU blocks",
    "thread_idx": "product of extents bound to GPU threads",
    "vthread": "product of extents of virtual threads",
    "thread_iterations": "iterations that one GPU thread runs",
    "max_step": "pragma_auto_unroll_max_step that holds for it",
    "explicit_unroll": "1 if TVM unrolls itself, 0 if it asks the compiler to",
}
_CODE = {
    "tile_points": "iterations in one run of the straight-line code (loops vectorised, unrolled or GPU threads)",
    "tile_outputs": "distinct elements it stores in there: independent accumulators of a reduction",
    "tile_inputs": "distinct elements it loads in there",
    "tile_statements": "copies of the statement in there (vectorised loops count once)",
    "chain": "dependent updates one after the other: iterations / tile_outputs for a reduction, else 0",
    "hold": "iterations of the reduction loops directly around the tile: how long accumulators stay in registers",
    "next_extent": "extent of the loop directly around the tile",
    "next_reduction": "1 if its reduction runs over that loop",
    "simd_extent": "extent of the loop lanes run along: GPU threads, else the vectorised one, else the innermost",
    "simd_auto": "1 if it is not vectorised but a compiler can do it",
    "simd_contiguous": "accesses with stride 1 along it",
    "simd_broadcast": "accesses that do not change along it",
    "simd_strided": "accesses with another stride along it",
    "simd_gather": "accesses that are not affine along it",
    "run_stored": "elements stored side by side by the straight-line code: a compiler may pack their statements",
    "run_loaded": "the longest run of elements loaded side by side by it",
}
_SLOT = {
    "itemsize": "bytes of an element (0: no such access)",
    "stores": "stores per iteration",
    "loads": "loads per iteration",
    "shared": "1 if the buffer is in GPU shared memory",
    "local": "1 if the buffer is in GPU registers / local memory",
    "intermediate": "1 if the buffer is allocated in the program",
    "opaque": "1 if its index cannot be analysed",
    "simd_stride": "elements between successive iterations of the loop lanes run along",
    "stride_1": "elements between successive iterations of the innermost loop",
    "stride_2": "the same, second loop from inside",
    "stride_3": "the same, third loop from inside",
    "tile_run": "elements side by side that are touched in one run of the straight-line code",
    "tile_elements": "distinct elements touched in one run of the straight-line code",
    "register_elements": "element loads or stores left when registers hold what they can",
    **{f"bytes_{k}": f"bytes of distinct cache lines touched by the {k} innermost loops" for k in SLOT_DEPTHS},
    "bytes_all": "bytes of distinct cache lines touched by all loops",
    "unique": "bytes of distinct elements touched by all loops",
    "storage": "bytes of the buffer as it will be allocated",
    "reuse": "iterations / distinct data elements",
    "reuse_distance": "bytes touched by all accesses between two uses of an element (innermost loop of reuse)",
    "handover": "bytes touched in one iteration of the loops that all uses of an intermediate buffer share",
    "handovers": "number of such iterations",
    "moved_32kb": "bytes moved into a memory of 32 KB for it",
    "moved_512kb": "bytes moved into a memory of 512 KB for it",
}
#: Features of a slot, in order.
SLOT_FEATURES: tuple[str, ...] = tuple(_SLOT)
_LOOP = {
    "extent": "iterations (0: no such loop)",
    "reduction": "1 if its reduction runs over it",
    "vectorized": "1 if vectorised",
    "unrolled": "1 if TVM will unroll it",
    "parallel": "1 if parallel or bound to GPU blocks or threads",
}


def _describe() -> dict[str, str]:
    out = dict(_CONTEXT)
    out |= _LOOPS_ALL
    out |= {
        f"cores_{n}": f"largest share of {n} cores in the parallel iterations, times {n}: 1 is balanced" for n in CORES
    }
    out |= {f"op_{name}": f"{name} operations per iteration" for name in OP_KINDS}
    out |= {
        "flops": "floating-point operations of all iterations (a fused multiply-add is two)",
        "special": "exp, tanh, erf, square roots and other functions, once for innermost loops that they do not depend on",
        "index_ops": "integer operations of all iterations",
        "loads": "loads of all iterations",
    }
    out |= _CODE
    for width in SIMD_BYTES:
        out[f"fp_instructions_{width}b"] = f"floating-point instructions with SIMD registers of {width} bytes"
        out[f"mem_instructions_{width}b"] = (
            f"loads and stores with SIMD registers of {width} bytes, after register reuse"
        )
    out["fp_instructions_packed"] = (
        "floating-point instructions with SIMD registers of 32 bytes if statements that store side by side are packed"
    )
    out |= {f"moved_{size_name(c)}": f"bytes moved into a memory of {c} bytes, by the loop order" for c in CAPACITIES}
    out["conflict_32kb"] = "bytes moved into a cache of 32 KB with 64 sets, which strides may use unevenly"
    out["conflict_1mb"] = "bytes moved into a cache of 1 MB with 1024 sets, which strides may use unevenly"
    out |= {f"pages_{n}": f"pages of 4 KB moved into a table of {n} entries" for n in TLB_ENTRIES}
    out |= {
        f"working_set_{k}": f"bytes touched by the {k} innermost loops (with other leaves in them)"
        for k in WORKING_SET_DEPTHS
    }
    out |= {
        "program_flops": "floating-point operations of the whole program",
        "program_iterations": "iterations of all leaves of the program",
        "program_bytes": "bytes touched by the whole program",
        "program_allocated": "bytes of the buffers it allocates in global memory",
        "program_shared": "bytes of GPU shared memory it allocates",
        "program_local": "bytes it allocates for each GPU thread",
        "share_iterations": "its share of program_iterations",
        "share_flops": "its share of program_flops",
    }
    for i in range(1, N_LOOPS + 1):
        out |= {f"loop{i}_{name}": f"loop {i} from inside: {doc}" for name, doc in _LOOP.items()}
    for i in range(1, N_SLOTS + 1):
        out |= {f"slot{i}_{name}": f"access {i}: {doc}" for name, doc in _SLOT.items()}
    return out


#: Name -> meaning of every feature, in column order.
LEAF_FEATURE_DOCS: dict[str, str] = _describe()
#: Names of the columns of :attr:`cdmpp.program.ast.CompactAST.leaves`.
LEAF_FEATURES: tuple[str, ...] = tuple(LEAF_FEATURE_DOCS)
#: What identifies this feature set in stored ASTs and predictors.
FEATURE_SET: str = "ast{}-{}".format(
    FEATURE_VERSION, hashlib.blake2b("\n".join(LEAF_FEATURES).encode(), digest_size=4).hexdigest()
)
