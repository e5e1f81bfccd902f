"""Compact ASTs: hand-written programs against numbers worked out by hand, and what holds for any schedule."""

from __future__ import annotations

import ast
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.program.ast import FEATURE_SET, LEAF_FEATURE_DOCS, LEAF_FEATURES, CompactAST, compact_ast, compact_asts
from tests.golden import golden
from tests.samples import scripts
from tests.samples.programs import te_task
from tests.samples.scripts import CHAIN, COLUMNS, CONV, CUDA, GATE, GATHER, MATMUL, PREDICATED, parse

PROGRAMS = (MATMUL, CONV, CHAIN, PREDICATED, CUDA, GATHER)


def test_features_are_named_documented_and_unique() -> None:
    assert 150 <= len(set(LEAF_FEATURES)) == len(LEAF_FEATURES) <= 300
    assert tuple(LEAF_FEATURE_DOCS) == LEAF_FEATURES and all(LEAF_FEATURE_DOCS.values())
    assert FEATURE_SET.startswith("ast")


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


HALF = replaced(CHAIN, ('"float32"', '"float16"'), ("T.float32", "T.float16"))
#: Two steps of the sum in four neighbouring columns.
UNROLLED = replaced(
    COLUMNS,
    ("for i in range(1024)", "for i0 in range(256)"),
    ("for j in range(64):",
     'for j0 in T.serial(32, annotations={"pragma_auto_unroll_max_step": 8, "pragma_unroll_explicit": 1}):\n'
     "              for i1, j1 in T.grid(4, 2):"),
    ("spatial(1024, i)", "spatial(1024, i0 * 4 + i1)"),
    ("reduce(64, j)", "reduce(64, j0 * 2 + j1)"),
)  # fmt: skip
ODD = replaced(
    MATMUL, ("j1 in T.vectorized(16)", "j1 in T.serial(16)"), ("j2 in T.vectorized(16)", "j2 in T.vectorized(12)"),
    ("in range(4)", "in range(5)"), ("j0 * 16 + j2", "j0 * 12 + j2"), ("64, j0 * 16 + j1", "64, j1 * 4 + j0 // 5"),
)  # fmt: skip
THREADS = replaced(
    GATE, ("T.parallel(8)", 'T.thread_binding(8, thread="blockIdx.x")'), ("T.vectorized(32)", "range(32)"),
    ("range(16)", 'T.thread_binding(16, thread="threadIdx.x")'),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "positions", "n_nodes"),
    [
        # root 0, i0 1, j0 2, i1 3, j1 4, init 5, k0 6, i2 7, k1 8, j2 9, update 10
        (MATMUL, [5, 10], 11),
        # root, c y x pad, f y x c ry rx, init, conv: the loop over one image vanishes.
        (CONV, [4, 11, 12], 13),
        (scripts.WITHOUT_BLOCKS, [2, 4], 5),
    ],
)
def test_shapes_and_pre_order_positions(text: str, positions: list[int], n_nodes: int) -> None:
    import tvm

    tree = compact_ast(parse(text))
    assert tree.leaves.shape == (len(positions), len(LEAF_FEATURES)) and np.isfinite(tree.leaves).all()
    assert (tree.leaves.dtype, tree.positions.dtype) == (np.float32, np.int32)
    assert (tree.positions.tolist(), tree.n_nodes, tree.n_leaves) == (positions, n_nodes, len(positions))
    assert (compact_ast(tvm.IRModule({"main": parse(text)})).leaves == tree.leaves).all()


def known(text: str, leaf: int, **features: float) -> tuple[str, int, dict[str, float]]:
    return text, leaf, features


KNOWN = [
    # a tiled matrix product: its loops; both leaves share i0 (8) and j0 (4)
    known(MATMUL, 1, loops=6, iterations=64 * 64 * 32, domain=64 * 64 * 32, overcompute=1, is_reduction=1, is_init=0,
        guarded=0, predicated=0, leaf_index=1, leaf_count=2, parallel=8, parallel_inner=4 * 8 * 8 * 4 * 16, vectorized=16,
        reduction=32, serial_reduction=32, serial_spatial=4 * 8, block_idx=1, thread_idx=1, cores_2=1, cores_8=1,
        cores_16=2, shared_before=32, shared_after=1),
    *((MATMUL, 1, {f"loop{number}_{name}": value for name, value in zip(
        ("extent", "reduction", "vectorized", "unrolled", "parallel"), values, strict=True)})
      for number, values in enumerate([(16, 0, 1, 0, 0), (4, 1, 0, 1, 0), (8, 0, 0, 1, 0), (8, 1, 0, 0, 0),
                                       (4, 0, 0, 0, 0), (8, 0, 0, 0, 1), (0, 0, 0, 0, 0)], 1)),
    # its straight-line code. max_step 64: k1 (4) is unrolled, then i2 (8 * 4 = 32), not k0 (8 * 32 = 256). With j2 (16)
    # vectorised, one run is 512 points that update 8 x 16 accumulators from 8 x 4 of A and 4 x 16 of B
    known(MATMUL, 1, max_step=64, explicit_unroll=1, unrolled=32, vector_divisor=16, vector_odd=0, invariant=1,
        tile_points=512, tile_statements=32, tile_outputs=128, tile_inputs=128 + 32 + 64, hold=8, next_extent=8,
        next_reduction=1, chain=131072 / 128, op_fma=1, op_fadd=0, op_fmul=0, flops=2 * 131072, loads=3 * 131072,
        simd_extent=16, simd_contiguous=2, simd_broadcast=1, simd_strided=0, simd_gather=0,
        fp_instructions_16b=131072 / 4, fp_instructions_32b=131072 / 8, fp_instructions_64b=131072 / 16),
    # 16 of a row of C or B lie side by side, 4 of a row of A. C stays in registers over k0: 128 elements, 32 times. A: 32
    # elements 256 times. B: 64 elements 256 times. Loads and stores of 16 lanes: C twice, A one by one (broadcast), B
    known(MATMUL, 1, run_stored=16, run_loaded=16, slot1_tile_run=16, fp_instructions_packed=131072 / 8,
        slot1_register_elements=128 * 32, slot2_register_elements=32 * 256, slot3_register_elements=64 * 256,
        mem_instructions_64b=2 * 4096 / 16 + 8192 + 16384 / 16),
    # its memory. Slots: the store C first, then A and B, which move as much (8192 bytes), in order of occurrence
    known(MATMUL, 1, slot1_stores=1, slot1_loads=1, slot2_stores=0, slot2_loads=1, slot3_loads=1, slot4_itemsize=0,
        slot1_stride_1=1, slot1_stride_2=0, slot1_stride_3=64, slot1_simd_stride=1, slot2_stride_1=0, slot2_stride_2=1,
        slot2_stride_3=32, slot2_simd_stride=0, slot3_stride_1=1, slot3_stride_2=64, slot3_stride_3=0, slot3_simd_stride=1,
        slot1_unique=64 * 64 * 4, slot2_unique=64 * 32 * 4, slot3_unique=32 * 64 * 4, slot1_reuse=32, slot2_reuse=64,
        slot3_reuse=64),
    # one line each; k1: 4 of A in a line, 4 rows of B; i2: 8 rows of C, 8 lines of A
    known(MATMUL, 1, slot1_bytes_1=64, slot1_bytes_2=64, slot1_bytes_3=512, slot2_bytes_1=64, slot2_bytes_2=64,
        slot2_bytes_3=512, slot3_bytes_1=64, slot3_bytes_2=256, slot3_bytes_3=256),
    # k0: C 512, A 8 rows of 128, B 32 rows of 64; j0: C 8 x 256, A 1024, B 8192; i0: everything. 2 KB holds three loops:
    # the fourth's data are moved once per iteration of j0 and i0 (32), C in and out
    known(MATMUL, 1, working_set_1=192, working_set_2=384, working_set_3=1280, working_set_4=3584,
        working_set_5=2048 + 1024 + 8192, working_set_6=32768, moved_2kb=32 * (2 * 512 + 1024 + 2048),
        moved_8kb=8 * (2 * 2048 + 1024 + 8192), moved_32kb=2 * 16384 + 8192 + 8192, program_bytes=32768,
        program_flops=262144, share_flops=1),
    known(MATMUL, 0, iterations=4096, domain=4096, is_reduction=0, flops=0, loads=0, unrolled=8, tile_points=128,
        slot1_stores=1, slot1_loads=0, slot2_itemsize=0, mem_instructions_64b=4096 / 16),
    # a padded convolution. The halo makes one image of 10 x 10 out of 8 x 8
    known(CONV, 0, op_branch=1, op_compare=4, branch_inner=1, simd_auto=0, iterations=800, is_init=0,
        slot2_unique=8 * 8 * 8 * 4, slot1_unique=8 * 10 * 10 * 4, slot2_reuse=800 / 512),
    # the initialisation runs for the loops its output depends on
    known(CONV, 1, is_init=1, guarded=1, loops=3, iterations=4 * 8 * 8, domain=4 * 8 * 8, loop1_extent=8),
    # P: 3 of a row; 3 rows of 10 make 23 elements or 2 lines; 8 channels, 3 lines each; all of it. W is contiguous: 3, 9,
    # 72 elements. 512 bytes hold two loops (64 + 128 + 64), not three: c's data are moved once for each of 256 outputs
    known(CONV, 2, guarded=1, loops=6, iterations=4 * 8 * 8 * 8 * 3 * 3, reduction=72, hold=72, chain=18432,
        slot2_intermediate=1, slot2_bytes_1=64, slot2_bytes_2=128, slot2_bytes_3=24 * 64, slot2_unique=3200,
        slot3_bytes_1=64, slot3_bytes_2=64, slot3_bytes_3=5 * 64, slot3_reuse=64, slot3_intermediate=0,
        working_set_2=256, working_set_3=1920, moved_512b=256 * (2 * 64 + 1536 + 320)),
    # fused loops are contiguous again. E is allocated inside the parallel loop: TVM shrinks it to the 64 that live there
    known(CHAIN, 0, op_exp=1, special=2048, parallel=32, vectorized=64, simd_contiguous=2, simd_gather=0, slot2_stride_1=1,
        slot2_stride_2=64, slot2_bytes_1=256, slot2_bytes_all=8192, slot2_unique=8192, slot1_storage=256,
        slot1_unique=256, slot1_handovers=32, slot1_handover=512, program_allocated=256),
    # S is read in rows of 256 although the loop is fused: f takes 4 distinct columns of 64
    known(CHAIN, 1, slot2_unique=256 * 4, slot2_reuse=8, op_fdiv=1, op_fadd=1, simd_auto=1, simd_extent=64, vectorized=1,
        fp_instructions_64b=2 * 2048 / 16),
    known(HALF, 1, itemsize=2, is_float=1, slot2_unique=512, slot1_storage=4096, fp_instructions_64b=128),
    known(scripts.INTEGERS, 0, itemsize=8, is_float=0, op_imul=1, op_iadd=1, op_idivmod=1, flops=0),
    known(scripts.WITHOUT_BLOCKS, 1, iterations=32, domain=0, is_reduction=1, reduction=4, unrolled=4, tile_points=4, hold=1,
        tile_outputs=1, tile_inputs=5, slot2_unique=128),
    # predicates. TVM makes a vectorised loop serial if a branch depends on it
    known(PREDICATED, 0, is_init=1, iterations=4, domain=4),
    known(PREDICATED, 1, predicated=1, iterations=4 * 128, domain=400, overcompute=1.28, branch_inner=1, reduction=128),
    known(PREDICATED, 2, vectorized=1, scalarised=32, simd_auto=0, op_branch=1, loop1_vectorized=0,
        mem_instructions_64b=64),
    # a GPU: the threads that fill shared memory are those that compute. Shared: the 8 x 128 tile of one step; local: 4
    # floats a thread
    *(known(CUDA, leaf, block_idx=16, thread_idx=64, vthread=4, program_shared=8 * 128 * 4, program_local=16)
      for leaf in range(4)),
    known(CUDA, 1, iterations=16 * 4 * 64 * 16 * 2 * 8, vectorized=8, slot1_shared=1, slot2_shared=0, overcompute=64,
        simd_extent=64, slot2_simd_stride=8, slot2_bytes_1=64, slot2_bytes_2=64 * 8 * 4),
    # 64 threads read 32 groups of 4 columns: stride 4, of 2 rows of A each one element
    known(CUDA, 2, iterations=128**3, reduction=128, thread_iterations=4 * 128 * 4, slot1_local=1, slot2_shared=1,
        slot2_simd_stride=4, slot2_bytes_1=512, slot3_bytes_1=128, chain=128**3 / 64),
    known(CUDA, 3, slot1_bytes_1=2 * 512, slot1_bytes_2=2 * 512, slot1_local=0, slot2_local=1),
    # indices read from memory
    known(GATHER, 0, opaque=1, iterations=1024, slot2_opaque=1, slot2_unique=16 * 64 * 4, slot2_storage=256000,
        slot2_stride_1=1, slot3_itemsize=4, slot3_reuse=64, simd_contiguous=2),
    # columns: 64 lines of X, 4 KB apart, and a line of S are 4160 bytes, which fit 32 KB. All of X is then moved once (256
    # KB, S 4 KB is loaded and stored). But all 64 lines belong to one of 64 sets, as if they were 64 times as many: each
    # column is moved anew. In a cache of 1024 sets they are spread over 16, which is enough. 64 pages of X and one of S are
    # one more than 64 entries hold
    known(COLUMNS, 0, working_set_1=65 * 64, moved_32kb=262144 + 2 * 4096, conflict_32kb=1024 * (64 * 64 + 2 * 64),
        conflict_1mb=262144 + 2 * 4096, pages_64=1024 * 65, pages_1536=65),
    # statements that store side by side can be packed: the innermost loop cannot be run in lanes, the columns can
    known(UNROLLED, 0, unrolled=8, vectorized=1, run_stored=4, run_loaded=4, fp_instructions_packed=65536 / 4,
        fp_instructions_32b=65536),
    # vectors of odd length; every row of tiles does the same if nothing depends on it
    known(ODD, 0, vectorized=1, vector_divisor=1, vector_odd=0),
    known(ODD, 1, vectorized=12, vector_divisor=4, vector_odd=1),
    known(replaced(MATMUL, ("i0 * 8 + i2", "i2")), 1, invariant=8, parallel=8),
    # special functions count once for loops that they do not depend on; threads of a GPU compute each their own
    *(known(replaced(GATE, ("T.sigmoid(G[vc])", argument)), 0, special=special, iterations=8 * 16 * 32)
      for argument, special in (
        ("T.sigmoid(G[vc])", 8),  # once a channel: the parallel loop's body is a function of its own
        ("T.sqrt(R[vi])", 8 * 16), ("T.exp(G[vc] * R[vi])", 8 * 16), ("T.tanh(X[vc, vi, vj])", 8 * 16 * 32),
        ('T.sin(T.Cast("float32", vi))', 8 * 16), ("T.sqrt(T.float32(2))", 8), ("G[vc]", 0),
      )),
    known(THREADS, 0, special=8 * 16),
]  # fmt: skip


@pytest.mark.parametrize(("text", "leaf", "wanted"), KNOWN)
def test_known_features(text: str, leaf: int, wanted: dict[str, float]) -> None:
    found = dict(zip(LEAF_FEATURES, compact_ast(parse(text)).leaves[leaf].tolist(), strict=True))
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_programs_do_not_influence_each_other() -> None:
    # Those with like blocks of other shapes must not be mixed up.
    wide = replaced(
        CHAIN, ("256", "512"), ("range(64)", "range(128)"), ("vectorized(64)", "vectorized(128)"), ("f * 64", "f * 128")
    )  # fmt: skip
    double = replaced(MATMUL, ('"float32"', '"float64"'), ("T.float32", "T.float64"))
    texts = [*PROGRAMS, wide, double, CUDA.replace('"shared"', '"global"')]
    alone = {text: compact_ast(parse(text)) for text in texts}
    for order in (texts, texts[::-1]):
        together = compact_asts([parse(text) for text in order])
        assert all(same(tree, alone[text]) for text, tree in zip(order, together, strict=True))


def same(a: CompactAST, b: CompactAST) -> bool:
    """Equal in all that the model sees."""
    shapes = (a.n_nodes, a.positions.tolist()) == (b.n_nodes, b.positions.tolist())
    return shapes and np.array_equal(a.leaves, b.leaves)


@given(st.sampled_from(PROGRAMS), st.randoms(use_true_random=False))
def test_names_change_nothing(text: str, random: Any) -> None:
    nodes = list(ast.walk(ast.parse(text)))
    old = {node.arg for node in nodes if isinstance(node, ast.arg)}  # buffers, loops and block variables
    old |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    new = [f"x{i}_" for i in range(len(old))]
    random.shuffle(new)
    names = dict(zip(sorted(old), new, strict=True))
    renamed = re.sub(r"(?<![\w.\"])[A-Za-z]\w*(?![\w\"])", lambda m: names.get(m[0], m[0]), text)
    assert renamed != text
    assert same(compact_ast(parse(text)), compact_ast(parse(renamed)))


def matmul_relu(te: Any) -> list[Any]:
    """D = max(A[12, 8] * B[8, 16], 0): for free scheduling."""
    import tvm

    a, b = te.placeholder((12, 8), name="A"), te.placeholder((8, 16), name="B")
    k = te.reduce_axis((0, 8), name="k")
    c = te.compute((12, 16), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="matmul")
    return [a, b, te.compute((12, 16), lambda i, j: tvm.tirx.max(c[i, j], tvm.tirx.const(0.0)), name="relu")]


def schedule(data: st.DataObject) -> Any:
    """A random schedule of it by splits, orders, fusions and bindings that keep its domain."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": te_task("matmul_relu", matmul_relu).prim_func()}))
    for name in ("matmul", "relu"):
        block = sch.get_sblock(name)
        for loop in sch.get_loops(block):
            extent = int(sch.get(loop).extent)
            factor = data.draw(st.sampled_from([f for f in (1, 2, 3, 4, 8) if extent % f == 0]))
            if factor > 1:
                sch.split(loop, factors=[None, factor])
        sch.reorder(*data.draw(st.permutations(sch.get_loops(block))))
    if data.draw(st.booleans()):
        sch.fuse(*sch.get_loops(block)[:2])
    if data.draw(st.booleans()):
        sch.parallel(sch.get_loops(block)[0])
    if data.draw(st.booleans()) and len(sch.get_loops(block)) > 1:
        sch.vectorize(sch.get_loops(block)[-1])
    if data.draw(st.booleans()):
        sch.decompose_reduction(sch.get_sblock("matmul"), sch.get_loops(sch.get_sblock("matmul"))[0])
    return sch.mod


@given(st.data())
def test_the_loops_of_every_leaf_cover_its_domain(data: st.DataObject) -> None:
    tree = compact_ast(schedule(data))
    np.testing.assert_array_equal(tree.column("iterations"), tree.column("domain"))
    # ... and no schedule changes what is computed or which elements are touched in all.
    assert tree.column("flops").sum() == 2 * 12 * 16 * 8 + 12 * 16
    (update,) = np.flatnonzero(tree.column("is_reduction"))
    unique = sorted(tree.column(f"slot{i}_unique")[update] for i in (1, 2, 3))
    assert unique == [12 * 8 * 4, 8 * 16 * 4, 12 * 16 * 4]
    for kind in ("serial_spatial", "parallel", "vectorized", "reduction"):
        assert (tree.column(kind) <= tree.column("iterations")).all()
    # Working sets and footprints grow outwards, traffic falls with the capacity.
    sets = np.stack([tree.column(f"working_set_{k}") for k in (0, 1, 2, 3, 4, 5, 6, 8)])
    assert (np.diff(sets, axis=0) >= 0).all()
    sizes = ("512b", "2kb", "8kb", "32kb", "128kb", "512kb", "2mb", "8mb", "32mb")
    moved = np.stack([tree.column(f"moved_{size}") for size in sizes])
    assert (np.diff(moved, axis=0) <= 0).all()
    assert (tree.column("mem_instructions_64b") <= tree.column("mem_instructions_16b") + 1e-3).all()


@settings(derandomize=True)
@given(st.data())
def test_footprints_equal_a_count_of_the_elements(data: st.DataObject) -> None:
    """Distinct elements and cache lines of an affine access, counted one by one."""
    extents = data.draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    names = [f"i{n}" for n in range(len(extents))]
    coefs = [[data.draw(st.sampled_from([0, 0, 1, 1, 2, 4])) for _ in names] for _ in range(2)]
    spans = [sum(c * (e - 1) for c, e in zip(row, extents, strict=True)) + 1 for row in coefs]
    shape = [spans[0], spans[1] + data.draw(st.integers(0, 9))]
    index = ", ".join(" + ".join(f"{n} * {c}" for n, c in zip(names, row, strict=True)) for row in coefs)
    out = ", ".join(names)
    text = f"""
@T.prim_func
def main(X: T.Buffer({tuple(shape)}, "float32"), Y: T.Buffer({tuple(extents)}, "float32")):
    for {out} in T.grid({", ".join(map(str, extents))}):
        Y[{out}] = X[{index}]
"""
    tree = compact_ast(parse(text))

    def touched(loops: range) -> set[int]:
        """Elements that these loops touch, the others at 0."""
        points = itertools.product(*(range(extents[i]) for i in loops))
        at = ([sum(row[i] * p for i, p in zip(loops, point, strict=True)) for row in coefs] for point in points)
        return {x * shape[1] + y for x, y in at}

    for inner in range(1, 4):
        loops = range(len(extents))[-inner:]
        lines = len({address * 4 // 64 for address in touched(loops)}) * 64
        estimate = float(tree.column(f"slot2_bytes_{inner}")[0])
        # Exact for boxes; sums of strides and the position of a row in its lines are estimated. Of a diagonal (a
        # loop in both indices) the box around it is counted.
        diagonal = any(coefs[0][i] and coefs[1][i] for i in loops)
        assert lines / 2.5 - 64 <= estimate <= lines * (6 if diagonal else 2.5) + 64
    unique = float(tree.column("slot2_unique")[0]) / 4
    in_all = len(touched(range(len(extents))))
    assert in_all <= unique * 1.0001
    if all(sum(c > 0 for c in row) <= 1 for row in (*coefs, *zip(*coefs, strict=True))):
        assert unique == in_all  # a box


def test_programs_of_all_kinds() -> None:
    """What holds for sampled CPU and CUDA programs, library operators and kernels of others."""
    for program, tree in golden.stored_asts().items():
        assert np.isfinite(tree.leaves).all() and (tree.leaves >= 0).all(), program
        assert (np.diff(tree.positions) > 0).all() and (tree.column("overcompute") >= 1 - 1e-6).all(), program
        assert 0 < tree.positions[0] <= tree.positions[-1] < tree.n_nodes, program
