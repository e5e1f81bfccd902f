"""Compact ASTs of hand-written programs, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cdmpp.program.ast import (
    FEATURE_SET,
    LEAF_FEATURE_DOCS,
    LEAF_FEATURES,
    CompactAST,
    compact_ast,
    compact_asts,
)
from tests.samples.scripts import CHAIN, COLUMNS, CONV, CUDA, GATE, GATHER, MATMUL, PREDICATED, parse


def leaf(ast: CompactAST, number: int) -> dict[str, float]:
    """Features of one leaf by name."""
    return dict(zip(LEAF_FEATURES, ast.leaves[number].tolist(), strict=True))


def expect(found: dict[str, float], **wanted: float) -> None:
    """Compare the named features."""
    assert {name: found[name] for name in wanted} == {name: pytest.approx(v) for name, v in wanted.items()}


def test_features_are_named_documented_and_unique() -> None:
    assert 150 <= len(set(LEAF_FEATURES)) == len(LEAF_FEATURES) <= 300
    assert tuple(LEAF_FEATURE_DOCS) == LEAF_FEATURES and all(LEAF_FEATURE_DOCS.values())
    assert FEATURE_SET.startswith("ast")


def test_shapes_and_pre_order_positions() -> None:
    # root 0, i0 1, j0 2, i1 3, j1 4, init 5, k0 6, i2 7, k1 8, j2 9, update 10
    ast = compact_ast(parse(MATMUL))
    assert ast.leaves.shape == (2, len(LEAF_FEATURES)) and np.isfinite(ast.leaves).all()
    assert (ast.leaves.dtype, ast.positions.dtype) == (np.float32, np.int32)
    assert (ast.positions.tolist(), ast.n_nodes, ast.n_leaves) == ([5, 10], 11, 2)


def test_loops_of_a_tiled_matmul() -> None:
    update = leaf(compact_ast(parse(MATMUL)), 1)
    expect(update, loops=6, iterations=64 * 64 * 32, domain=64 * 64 * 32, overcompute=1)
    expect(update, is_reduction=1, is_init=0, guarded=0, predicated=0, leaf_index=1, leaf_count=2)
    expect(update, parallel=8, parallel_inner=4 * 8 * 8 * 4 * 16, vectorized=16, reduction=32)
    expect(update, serial_reduction=32)
    expect(update, serial_spatial=4 * 8, block_idx=1, thread_idx=1, cores_2=1, cores_8=1, cores_16=2)
    # Both leaves share i0 (8) and j0 (4).
    expect(update, shared_before=32, shared_after=1)
    names = ("extent", "reduction", "vectorized", "unrolled", "parallel")
    window = [
        (16, 0, 1, 0, 0), (4, 1, 0, 1, 0), (8, 0, 0, 1, 0), (8, 1, 0, 0, 0), (4, 0, 0, 0, 0), (8, 0, 0, 0, 1),
    ]  # fmt: skip
    for i, values in enumerate(window, 1):
        expect(update, **{f"loop{i}_{name}": value for name, value in zip(names, values, strict=True)})
    expect(update, loop7_extent=0)


def test_straight_line_code_of_a_tiled_matmul() -> None:
    # max_step 64: k1 (4) is unrolled, then i2 (8 * 4 = 32), not k0 (8 * 32 = 256). With j2 (16) vectorised, one run
    # of straight-line code is 512 points that update 8 x 16 accumulators from 8 x 4 of A and 4 x 16 of B.
    update = leaf(compact_ast(parse(MATMUL)), 1)
    expect(update, max_step=64, explicit_unroll=1, unrolled=32)
    expect(update, vectorized=16, vector_divisor=16, vector_odd=0, invariant=1)
    expect(update, tile_points=512, tile_statements=32, tile_outputs=128, tile_inputs=128 + 32 + 64)
    expect(update, hold=8, next_extent=8, next_reduction=1, chain=131072 / 128)
    expect(update, op_fma=1, op_fadd=0, op_fmul=0, flops=2 * 131072, loads=3 * 131072)
    expect(update, simd_extent=16, simd_contiguous=2, simd_broadcast=1, simd_strided=0, simd_gather=0)
    expect(update, fp_instructions_16b=131072 / 4, fp_instructions_32b=131072 / 8)
    expect(update, fp_instructions_64b=131072 / 16)
    # 16 of a row of C or B lie side by side, 4 of a row of A.
    expect(update, run_stored=16, run_loaded=16, slot1_tile_run=16, fp_instructions_packed=131072 / 8)
    # C stays in registers over k0: 128 elements, 32 times. A: 32 elements 256 times. B: 64 elements 256 times.
    expect(update, slot1_register_elements=128 * 32, slot2_register_elements=32 * 256)
    expect(update, slot3_register_elements=64 * 256)
    # Loads and stores of 16 lanes: C twice, A one by one (broadcast), B.
    expect(update, mem_instructions_64b=2 * 4096 / 16 + 8192 + 16384 / 16)


def test_memory_of_a_tiled_matmul() -> None:
    update = leaf(compact_ast(parse(MATMUL)), 1)
    # Slots: the store C first, then A and B, which move as much (8192 bytes), in order of occurrence.
    expect(update, slot1_stores=1, slot1_loads=1, slot2_stores=0, slot2_loads=1, slot3_loads=1)
    expect(update, slot4_itemsize=0)
    expect(update, slot1_stride_1=1, slot1_stride_2=0, slot1_stride_3=64, slot1_simd_stride=1)
    expect(update, slot2_stride_1=0, slot2_stride_2=1, slot2_stride_3=32, slot2_simd_stride=0)
    expect(update, slot3_stride_1=1, slot3_stride_2=64, slot3_stride_3=0, slot3_simd_stride=1)
    expect(update, slot1_unique=64 * 64 * 4, slot2_unique=64 * 32 * 4, slot3_unique=32 * 64 * 4)
    expect(update, slot1_reuse=32, slot2_reuse=64, slot3_reuse=64)
    # One line each; k1: 4 of A in a line, 4 rows of B; i2: 8 rows of C, 8 lines of A.
    expect(update, slot1_bytes_1=64, slot1_bytes_2=64, slot1_bytes_3=512)
    expect(update, slot2_bytes_1=64, slot2_bytes_2=64, slot2_bytes_3=512)
    expect(update, slot3_bytes_1=64, slot3_bytes_2=256, slot3_bytes_3=256)
    # k0: C 512, A 8 rows of 128, B 32 rows of 64; j0: C 8 x 256, A 1024, B 8192; i0: everything.
    expect(update, working_set_1=192, working_set_2=384, working_set_3=1280, working_set_4=3584)
    expect(update, working_set_5=2048 + 1024 + 8192, working_set_6=32768)
    # 2 KB holds three loops: the fourth's data are moved once per iteration of j0 and i0 (32), C in and out.
    expect(update, moved_2kb=32 * (2 * 512 + 1024 + 2048))
    expect(update, moved_8kb=8 * (2 * 2048 + 1024 + 8192))
    expect(update, moved_32kb=2 * 16384 + 8192 + 8192)
    expect(update, program_bytes=32768, program_flops=262144, share_flops=1)


def test_init_of_a_tiled_matmul() -> None:
    init = leaf(compact_ast(parse(MATMUL)), 0)
    expect(init, iterations=4096, domain=4096, is_reduction=0, flops=0, loads=0, unrolled=8, tile_points=128)
    expect(init, slot1_stores=1, slot1_loads=0, slot2_itemsize=0, mem_instructions_64b=4096 / 16)


def test_convolution_with_initialisation_in_its_block() -> None:
    # root, c y x pad, f y x c ry rx, init, conv: the loop over one image vanishes.
    ast = compact_ast(parse(CONV))
    assert ast.positions.tolist() == [4, 11, 12]
    assert ast.n_nodes == 13
    pad, init, conv = (leaf(ast, i) for i in range(3))
    expect(pad, op_branch=1, op_compare=4, branch_inner=1, simd_auto=0, iterations=800, is_init=0)
    # The initialisation runs for the loops its output depends on.
    expect(init, is_init=1, guarded=1, loops=3, iterations=4 * 8 * 8, domain=4 * 8 * 8, loop1_extent=8)
    expect(conv, guarded=1, loops=6, iterations=4 * 8 * 8 * 8 * 3 * 3, reduction=72, hold=72, chain=18432)
    # P: 3 of a row; 3 rows of 10 make 23 elements or 2 lines; 8 channels, 3 lines each; all of it.
    expect(conv, slot2_intermediate=1, slot2_bytes_1=64, slot2_bytes_2=128, slot2_bytes_3=24 * 64)
    expect(conv, slot2_unique=3200)
    # W is contiguous: 3, 9, 72 elements.
    expect(conv, slot3_bytes_1=64, slot3_bytes_2=64, slot3_bytes_3=5 * 64, slot3_reuse=64)
    expect(conv, slot3_intermediate=0)
    # 512 bytes hold two loops (64 + 128 + 64), not three: c's data are moved once for each of 256 outputs.
    expect(conv, working_set_2=256, working_set_3=1920, moved_512b=256 * (2 * 64 + 1536 + 320))
    # The halo makes one image of 10 x 10 out of 8 x 8.
    expect(pad, slot2_unique=8 * 8 * 8 * 4, slot1_unique=8 * 10 * 10 * 4, slot2_reuse=800 / 512)


def test_fused_loops_are_contiguous_again() -> None:
    exp, scale = (leaf(compact_ast(parse(CHAIN)), i) for i in range(2))
    expect(exp, op_exp=1, special=2048, parallel=32, vectorized=64, simd_contiguous=2, simd_gather=0)
    expect(exp, slot2_stride_1=1, slot2_stride_2=64, slot2_bytes_1=256, slot2_bytes_all=8192)
    expect(exp, slot2_unique=8192)
    # E is allocated inside the parallel loop: TVM shrinks it to the 64 elements that live there.
    expect(exp, slot1_storage=256, slot1_unique=256, slot1_handovers=32, slot1_handover=512)
    expect(exp, program_allocated=256)
    # S is read in rows of 256 although the loop is fused: f takes 4 distinct columns of 64.
    expect(scale, slot2_unique=256 * 4, slot2_reuse=8, op_fdiv=1, op_fadd=1, simd_auto=1)
    expect(scale, simd_extent=64, vectorized=1, fp_instructions_64b=2 * 2048 / 16)


@pytest.mark.parametrize(
    ("argument", "special"),
    [
        ("T.sigmoid(G[vc])", 8),  # once a channel: the parallel loop's body is a function of its own
        ("T.sqrt(R[vi])", 8 * 16),
        ("T.exp(G[vc] * R[vi])", 8 * 16),
        ("T.tanh(X[vc, vi, vj])", 8 * 16 * 32),
        ('T.sin(T.Cast("float32", vi))', 8 * 16),
        ("T.sqrt(T.float32(2))", 8),
        ("G[vc]", 0),
    ],
)
def test_special_functions_count_once_for_loops_they_do_not_depend_on(argument: str, special: int) -> None:
    gate = leaf(compact_ast(parse(GATE.replace("T.sigmoid(G[vc])", argument))), 0)
    expect(gate, special=special, iterations=8 * 16 * 32)


def test_threads_of_a_gpu_compute_each_their_own() -> None:
    on_gpu = (
        GATE.replace("T.parallel(8)", 'T.thread_binding(8, thread="blockIdx.x")')
        .replace("range(16)", 'T.thread_binding(16, thread="threadIdx.x")')
        .replace("T.vectorized(32)", "range(32)")
    )
    expect(leaf(compact_ast(parse(on_gpu)), 0), special=8 * 16)


def test_predicates_and_scalarised_loops() -> None:
    ast = compact_ast(parse(PREDICATED))
    init, total, pad = (leaf(ast, i) for i in range(3))
    expect(total, predicated=1, iterations=4 * 128, domain=400, overcompute=1.28, branch_inner=1)
    expect(total, reduction=128)
    expect(init, is_init=1, iterations=4, domain=4)
    # TVM makes a vectorised loop serial if a branch depends on it.
    expect(pad, vectorized=1, scalarised=32, simd_auto=0, op_branch=1, loop1_vectorized=0)
    expect(pad, mem_instructions_64b=64)


def test_gpu_threads_shared_memory_and_virtual_threads() -> None:
    ast = compact_ast(parse(CUDA))
    init, stage, update, write = (leaf(ast, i) for i in range(4))
    for found in (init, stage, update, write):
        # The threads that fill shared memory are those that compute.
        expect(found, block_idx=16, thread_idx=64, vthread=4)
        # Shared: the 8 x 128 tile of one step; local: 4 floats a thread.
        expect(found, program_shared=8 * 128 * 4, program_local=16)
    expect(stage, iterations=16 * 4 * 64 * 16 * 2 * 8, vectorized=8, slot1_shared=1, slot2_shared=0)
    expect(stage, overcompute=64)
    expect(stage, simd_extent=64, slot2_simd_stride=8, slot2_bytes_1=64, slot2_bytes_2=64 * 8 * 4)
    expect(update, iterations=128**3, reduction=128, thread_iterations=4 * 128 * 4, slot1_local=1)
    expect(update, slot2_shared=1)
    # 64 threads read 32 groups of 4 columns: stride 4, of 2 rows of A each one element.
    expect(update, slot2_simd_stride=4, slot2_bytes_1=512, slot3_bytes_1=128, chain=128**3 / 64)
    expect(write, slot1_bytes_1=2 * 512, slot1_bytes_2=2 * 512, slot1_local=0, slot2_local=1)


def test_indices_read_from_memory() -> None:
    take = leaf(compact_ast(parse(GATHER)), 0)
    expect(take, opaque=1, iterations=1024, slot2_opaque=1, slot2_unique=16 * 64 * 4, slot2_storage=256000)
    expect(take, slot2_stride_1=1, slot3_itemsize=4, slot3_reuse=64, simd_contiguous=2)


def test_dtype_and_integer_operations() -> None:
    half = compact_ast(parse(CHAIN.replace('"float32"', '"float16"').replace("T.float32", "T.float16")))
    expect(leaf(half, 1), itemsize=2, is_float=1, slot2_unique=512, slot1_storage=4096)
    expect(leaf(half, 1), fp_instructions_64b=128)
    text = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((8,), "int64"), Y: T.Buffer((8,), "int64")):
    with T.sblock("root"):
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                T.reads(X[v])
                T.writes(Y[v])
                Y[v] = X[v] * T.int64(3) + X[v] // T.int64(5)
"""
    expect(leaf(compact_ast(parse(text)), 0), itemsize=8, is_float=0, op_imul=1, op_iadd=1, op_idivmod=1)
    expect(leaf(compact_ast(parse(text)), 0), flops=0)


def test_loops_without_blocks() -> None:
    text = """
@T.prim_func
def main(X: T.Buffer((8, 4), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        Y[i] = T.float32(0)
        for k in T.unroll(4):
            Y[i] = Y[i] + X[i, k]
"""
    ast = compact_ast(parse(text))
    assert ast.positions.tolist() == [2, 4]
    expect(leaf(ast, 1), iterations=32, domain=0, is_reduction=1, reduction=4, unrolled=4, tile_points=4)
    expect(leaf(ast, 1), hold=1)
    expect(leaf(ast, 1), tile_outputs=1, tile_inputs=5, slot2_unique=128)


def test_modules_are_taken_too() -> None:
    import tvm

    func = parse(CONV)
    assert (compact_ast(tvm.IRModule({"main": func})).leaves == compact_ast(func).leaves).all()


def test_programs_do_not_influence_each_other() -> None:
    # Those with like blocks of other shapes must not be mixed up.
    texts = [MATMUL, CONV, CHAIN, PREDICATED, CUDA, GATHER]
    texts += [CHAIN.replace("256", "512").replace("range(64)", "range(128)").replace("vectorized(64)", "vectorized(128)")
              .replace("f * 64", "f * 128")]  # fmt: skip
    texts += [
        CUDA.replace('"shared"', '"global"'),
        MATMUL.replace('"float32"', '"float64"').replace("T.float32", "T.float64"),
    ]
    alone = [compact_ast(parse(text)) for text in texts]
    for order in (texts, texts[::-1]):
        together = compact_asts([parse(text) for text in order])
        for text, ast in zip(order, together, strict=True):
            expected = alone[texts.index(text)]
            np.testing.assert_array_equal(ast.leaves, expected.leaves)
            np.testing.assert_array_equal(ast.positions, expected.positions)
            assert ast.n_nodes == expected.n_nodes


def test_columns_use_few_sets_of_a_cache_and_many_pages() -> None:
    # One column: 64 lines of X, 4 KB apart, and a line of S: 4160 bytes, which fit 32 KB. All of X is then moved once
    # (256 KB, S 4 KB is loaded and stored).
    add = leaf(compact_ast(parse(COLUMNS)), 0)
    expect(add, working_set_1=65 * 64, moved_32kb=262144 + 2 * 4096)
    # But all 64 lines belong to one of 64 sets, as if they were 64 times as many: each column is moved anew.
    expect(add, conflict_32kb=1024 * (64 * 64 + 2 * 64))
    # In a cache of 1024 sets they are spread over 16, which is enough.
    expect(add, conflict_1mb=262144 + 2 * 4096)
    # 64 pages of X and one of S are one more than 64 entries hold.
    expect(add, pages_64=1024 * 65, pages_1536=65)


def test_unrolled_statements_that_store_side_by_side_can_be_packed() -> None:
    # Two steps of the sum in four neighbouring columns: the innermost loop cannot be run in lanes, the columns can.
    text = COLUMNS.replace("for i in range(1024)", "for i0 in range(256)")
    text = text.replace(
        "for j in range(64):",
        'for j0 in T.serial(32, annotations={"pragma_auto_unroll_max_step": 8, "pragma_unroll_explicit": 1}):\n'
        "              for i1, j1 in T.grid(4, 2):",
    )
    text = text.replace("spatial(1024, i)", "spatial(1024, i0 * 4 + i1)").replace(
        "reduce(64, j)", "reduce(64, j0 * 2 + j1)"
    )
    add = leaf(compact_ast(parse(text)), 0)
    expect(add, unrolled=8, vectorized=1, run_stored=4, run_loaded=4)
    expect(add, fp_instructions_packed=65536 / 4, fp_instructions_32b=65536)


def test_vectors_of_odd_length_and_what_is_computed_again() -> None:
    text = MATMUL.replace("j1 in T.vectorized(16)", "j1 in T.serial(16)")
    text = text.replace("j2 in T.vectorized(16)", "j2 in T.vectorized(12)").replace(
        "in range(4)", "in range(5)"
    )
    text = text.replace("j0 * 16 + j2", "j0 * 12 + j2").replace("64, j0 * 16 + j1", "64, j1 * 4 + j0 // 5")
    init, update = (leaf(compact_ast(parse(text)), i) for i in range(2))
    expect(init, vectorized=1, vector_divisor=1, vector_odd=0)
    expect(update, vectorized=12, vector_divisor=4, vector_odd=1)
    # Every row of tiles does the same if nothing depends on it.
    again = leaf(compact_ast(parse(MATMUL.replace("i0 * 8 + i2", "i2"))), 1)
    expect(again, invariant=8, parallel=8)
