"""Properties that compact ASTs have for any schedule."""

from __future__ import annotations

import ast
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.program.ast import CompactAST, compact_ast, compact_asts
from tests.samples.scripts import CHAIN, CONV, CUDA, GATHER, MATMUL, PREDICATED, parse

PROGRAMS = (MATMUL, CONV, CHAIN, PREDICATED, CUDA, GATHER)

#: C[12, 16] += A[12, 8] * B[8, 16], then D = max(C, 0): for free scheduling.
PLAIN = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((12, 8), "float32"), B: T.Buffer((8, 16), "float32"), D: T.Buffer((12, 16), "float32")):
    with T.sblock("root"):
        C = T.sblock_alloc_buffer((12, 16))
        for i, j, k in T.grid(12, 16, 8):
            with T.sblock("matmul"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                T.reads(A[vi, vk], B[vk, vj])
                T.writes(C[vi, vj])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
        for i, j in T.grid(12, 16):
            with T.sblock("relu"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(C[vi, vj])
                T.writes(D[vi, vj])
                D[vi, vj] = T.max(C[vi, vj], T.float32(0))
"""

#: The same with C[64, 64] and 32 steps of reduction.
LARGE = PLAIN.replace("12", "64").replace("16", "64").replace("8", "32")


def same(a: CompactAST, b: CompactAST) -> bool:
    """Equal in all that the model sees."""
    return (
        a.n_nodes == b.n_nodes
        and np.array_equal(a.positions, b.positions)
        and np.array_equal(a.leaves, b.leaves)
    )


def identifiers(text: str) -> list[str]:
    """Names of buffers, loops and block variables."""
    nodes = list(ast.walk(ast.parse(text)))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(bound)


@given(st.sampled_from(PROGRAMS), st.randoms(use_true_random=False))
def test_names_change_nothing(text: str, random: Any) -> None:
    old = identifiers(text)
    new = [f"x{i}_" for i in range(len(old))]
    random.shuffle(new)
    names = dict(zip(old, new, strict=True))
    renamed = re.sub(r"(?<![\w.\"])[A-Za-z]\w*(?![\w\"])", lambda m: names.get(m[0], m[0]), text)
    assert renamed != text
    assert same(compact_ast(parse(text)), compact_ast(parse(renamed)))


def schedule(data: st.DataObject) -> Any:
    """A random schedule of PLAIN by splits, orders, fusions and bindings that keep its domain."""
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": parse(PLAIN)}))
    for name in ("matmul", "relu"):
        block = sch.get_sblock(name)
        for loop in sch.get_loops(block):
            extent = int(sch.get(loop).extent)
            factor = data.draw(st.sampled_from([f for f in (1, 2, 3, 4, 8) if extent % f == 0]))
            if factor > 1:
                sch.split(loop, factors=[None, factor])
        loops = sch.get_loops(block)
        order = data.draw(st.permutations(range(len(loops))))
        sch.reorder(*[loops[i] for i in order])
        loops = sch.get_loops(block)
        if name == "relu":
            if data.draw(st.booleans()):
                sch.fuse(*loops[:2])
                loops = sch.get_loops(block)
            if data.draw(st.booleans()):
                sch.parallel(loops[0])
            if data.draw(st.booleans()) and len(loops) > 1:
                sch.vectorize(loops[-1])
    if data.draw(st.booleans()):
        sch.decompose_reduction(sch.get_sblock("matmul"), sch.get_loops(sch.get_sblock("matmul"))[0])
    return sch.mod


@given(st.data())
def test_the_loops_of_every_leaf_cover_its_domain(data: st.DataObject) -> None:
    tree = compact_ast(schedule(data))
    np.testing.assert_array_equal(tree.column("iterations"), tree.column("domain"))
    # ... and no schedule changes what is computed or which elements are touched in all.
    flops = tree.column("flops")
    assert flops.sum() == 2 * 12 * 16 * 8 + 12 * 16
    reads = tree.leaves[tree.column("is_reduction") == 1]
    assert len(reads) == 1
    update = CompactAST(reads, tree.positions[:1], tree.n_nodes)
    unique = sorted(float(update.column(f"slot{i}_unique")[0]) for i in (1, 2, 3))
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


@given(st.data())
def test_splitting_a_loop_changes_the_ast(data: st.DataObject) -> None:
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": parse(PLAIN)}))
    before = compact_ast(sch.mod)
    block = sch.get_sblock(data.draw(st.sampled_from(["matmul", "relu"])))
    loops = sch.get_loops(block)
    loop = data.draw(st.sampled_from(loops))
    factor = data.draw(st.sampled_from([2, 4]))
    sch.split(loop, factors=[None, factor])
    after = compact_ast(sch.mod)
    assert after.n_nodes == before.n_nodes + 1
    assert not same(before, after)
    # Splitting off a loop of one iteration changes nothing: it vanishes in lowering.
    sch = Schedule(tvm.IRModule({"main": parse(PLAIN)}))
    sch.split(sch.get_loops(sch.get_sblock("relu"))[0], factors=[None, 1])
    assert same(compact_ast(sch.mod), before)


def test_imperfect_splits_count_their_extra_iterations() -> None:
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": parse(PLAIN)}))
    sch.split(sch.get_loops(sch.get_sblock("relu"))[0], factors=[None, 5])
    tree = compact_ast(sch.mod)
    assert tree.column("iterations")[-1] == 3 * 5 * 16
    assert tree.column("domain")[-1] == 12 * 16
    assert tree.column("overcompute")[-1] == pytest.approx(15 / 12)
    assert tree.column("predicated").tolist() == [0, 0, 1]


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
    for inner in range(1, 4):
        loops = range(len(extents))[-inner:]
        touched = set()
        for point in itertools.product(*(range(extents[i]) for i in loops)):
            at = dict(zip(loops, point, strict=True))
            x, y = (sum(row[i] * at.get(i, 0) for i in range(len(extents))) for row in coefs)
            touched.add(x * shape[1] + y)
        lines = len({address * 4 // 64 for address in touched}) * 64
        estimate = float(tree.column(f"slot2_bytes_{inner}")[0])
        # Exact for boxes; sums of strides and the position of a row in its lines are estimated. Of a diagonal (a
        # loop in both indices) the box around it is counted.
        diagonal = any(coefs[0][i] and coefs[1][i] for i in loops)
        assert lines / 2.5 - 64 <= estimate <= lines * (6 if diagonal else 2.5) + 64
    unique = float(tree.column("slot2_unique")[0]) / 4
    assert len(touched_all(coefs, extents, shape)) <= unique * 1.0001
    if all(sum(c > 0 for c in row) <= 1 for row in coefs) and all(
        sum(c) <= max(c) for c in zip(*coefs, strict=True)
    ):
        assert unique == len(touched_all(coefs, extents, shape))  # a box


def touched_all(coefs: list[list[int]], extents: list[int], shape: list[int]) -> set[tuple[int, int]]:
    """All elements an affine access touches."""
    points = itertools.product(*(range(e) for e in extents))
    return {tuple(sum(c * p for c, p in zip(row, point, strict=True)) for row in coefs) for point in points}  # type: ignore[misc]


def test_metaschedule_programs() -> None:
    """A convolution for llvm, a matrix product for cuda."""
    from cdmpp.program.space import TaskSpaces
    from cdmpp.program.tasks import task_from_prim_func

    sampled = []
    for rule, text, count in (("llvm", CONV, 12), ("cuda", LARGE, 6)):
        spaces = TaskSpaces(task_from_prim_func(parse(text), name=rule), rule, num_cores=2)
        by_hash = {space.hash: space for space in spaces.spaces}
        sampled += [spaces.rebuild(p, by_hash[p.space_hash or ""]) for p in spaces.sample(count, seed=3)]
    asts = compact_asts(sampled)
    assert len(asts) > 12
    assert len({tree.leaves.tobytes() for tree in asts}) > 0.8 * len(asts)
    for tree in asts:
        assert np.isfinite(tree.leaves).all() and (tree.leaves >= 0).all()
        assert (np.diff(tree.positions) > 0).all()
        assert 0 < tree.positions[0] <= tree.positions[-1] < tree.n_nodes
        assert (tree.column("overcompute") >= 1 - 1e-6).all()
        # Whatever the schedule, the convolution or product has its multiply-adds once.
        update = tree.column("op_fma") == 1
        points, reduction = tree.column("domain")[update].tolist(), tree.column("reduction")[update].tolist()
        assert (points, reduction) in (([4 * 8 * 8 * 72], [72]), ([64 * 64 * 32], [32]))
