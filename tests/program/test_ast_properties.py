"""Properties that compact ASTs have for any schedule."""

from __future__ import annotations

import ast
import itertools
import re
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.program.ast import CompactAST, compact_ast
from tests.golden import golden
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


def same(a: CompactAST, b: CompactAST) -> bool:
    """Equal in all that the model sees."""
    shapes = (a.n_nodes, a.positions.tolist()) == (b.n_nodes, b.positions.tolist())
    return shapes and np.array_equal(a.leaves, b.leaves)


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
        at = (
            [sum(row[i] * p for i, p in zip(loops, point, strict=True)) for row in coefs] for point in points
        )
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
