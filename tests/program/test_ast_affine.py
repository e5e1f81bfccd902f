"""Index expressions as forms: checked against brute force over all points of the loops."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.affine import DIV, Form, IndexSpace, add, scale, spans_by_depth, step

Tree = Any  # ("loop", i) | ("const", c) | (op, left, right)


def trees(n_loops: int) -> st.SearchStrategy[Tree]:
    leaf = st.one_of(
        st.tuples(st.just("loop"), st.integers(0, n_loops - 1)),
        st.tuples(st.just("const"), st.integers(0, 5)),
    )

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        factor = st.integers(1, 12)
        return st.one_of(
            st.tuples(st.just("+"), inner, inner),
            st.tuples(st.just("*"), inner, factor),
            st.tuples(st.just("//"), inner, factor),
            st.tuples(st.just("%"), inner, factor),
        )

    return st.recursive(leaf, grow, max_leaves=8)


def build(tree: Tree, space: IndexSpace) -> tuple[Form, bool]:
    """The form, and whether a constant was dropped below a division (then only spans are meaningful)."""
    op = tree[0]
    if op == "loop":
        return ({tree[1]: 1} if space.extents[tree[1]] > 1 else 0), True
    if op == "const":
        return tree[1], True
    left, exact = build(tree[1], space)
    if op == "+":
        right, also = build(tree[2], space)
        mixed = (
            isinstance(left, int) != isinstance(right, int)
            and (left if isinstance(left, int) else right) != 0
        )
        return space.sum(left, right), exact and also and not mixed
    if op == "*":
        return space.product(left, tree[2]), exact
    return (space.floordiv if op == "//" else space.floormod)(left, tree[2]), exact


def value(tree: Tree, point: tuple[int, ...]) -> int:
    op = tree[0]
    if op == "loop":
        return point[tree[1]]
    if op == "const":
        return tree[1]
    left = value(tree[1], point)
    if op == "+":
        return left + value(tree[2], point)
    return left * tree[2] if op == "*" else left // tree[2] if op == "//" else left % tree[2]


def evaluate(form: Form, space: IndexSpace, point: tuple[int, ...]) -> int:
    if isinstance(form, int):
        return form
    total = 0
    for key, coef in form.items():
        if key >= 0:
            total += coef * point[key]
        else:
            atom = space.atoms[-1 - key]
            inner = evaluate(atom.source, space, point)
            total += coef * (inner // atom.factor if atom.op == DIV else inner % atom.factor)
    return total


def points(extents: list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(e) for e in extents)))


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_forms_equal_their_expressions_everywhere(data: st.DataObject, extents: list[int]) -> None:
    tree = data.draw(trees(len(extents)))
    space = IndexSpace(extents)
    form, exact = build(tree, space)
    if exact:
        for point in points(extents):
            assert evaluate(form, space, point) == value(tree, point)


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_spans_bound_what_varies(data: st.DataObject, extents: list[int]) -> None:
    tree = data.draw(trees(len(extents)))
    space = IndexSpace(extents)
    form, exact = build(tree, space)
    if exact:
        values = [evaluate(form, space, p) for p in points(extents)]
        assert space.span(form) >= max(values) - min(values)


def test_split_of_a_fused_loop_cancels() -> None:
    # f = 64 * o + v with v < 64, taken apart into rows of 256: row = o // 4, column = 64 * (o % 4) + v.
    space = IndexSpace([32, 64])
    fused = space.sum(space.product({0: 1}, 64), {1: 1})
    row, column = space.floordiv(fused, 256), space.floormod(fused, 256)
    assert isinstance(row, dict) and isinstance(column, dict)
    (atom,) = row
    assert (space.atoms[-1 - atom].op, space.atoms[-1 - atom].source, space.atoms[-1 - atom].factor) == (
        DIV,
        {0: 1},
        4,
    )
    assert column[1] == 1  # the vector loop stays affine and contiguous
    # ... and joining both again gives the fused loop back, without atoms.
    assert space.sum(space.product(row, 256), column) == {0: 64, 1: 1}


def test_aligned_splits_need_no_atoms() -> None:
    space = IndexSpace([4, 8])
    fused: Form = {0: 8, 1: 1}
    assert space.floordiv(fused, 8) == {0: 1}
    assert space.floormod(fused, 8) == {1: 1}
    assert space.floordiv({0: 16, 1: 1}, 8) == {0: 2}
    assert not space.atoms


def test_nested_splits() -> None:
    space = IndexSpace([300])
    inner = space.floordiv(space.floormod({0: 1}, 36), 9)  # (f % 36) // 9
    for f in range(300):
        assert evaluate(inner, space, (f,)) == (f % 36) // 9
    twice = space.floordiv(space.floordiv({0: 1}, 10), 3)
    (number,) = twice  # type: ignore[misc]
    assert space.atoms[-1 - number].factor == 30  # (f // 10) // 3 = f // 30


def test_spans_by_depth_and_steps() -> None:
    # index = (o * 10 + i) // 4, o < 3, i < 10
    space = IndexSpace([3, 10])
    form = space.floordiv({0: 10, 1: 1}, 4)
    assert isinstance(form, dict)
    (number,) = form
    # nothing varies; i: 0 ... 9 -> 0 ... 2; o and i: 0 ... 29 -> 0 ... 7
    assert spans_by_depth(space, number, [1, 0], {}) == [0, 2, 7]
    assert spans_by_depth(space, number, [-1, 0], {}) == [0, 0, 5]  # o alone: 0, 10, 20
    assert step(space, form, 1) == 0  # 0 // 4 -> 1 // 4
    assert step(space, form, 0) == 2  # 0 // 4 -> 10 // 4
    assert step(space, {number: 3}, 0) == 6


def test_products_of_loops_are_opaque_but_keep_their_loops() -> None:
    space = IndexSpace([3, 5, 7])
    form = space.product({0: 1}, {2: 2})
    assert space.loops_of(form) == {0, 2}
    assert space.span(form) == 3 * 7 - 1


def test_forms_are_linear() -> None:
    assert add({0: 2, 1: 1}, {0: -2, 2: 1}) == {1: 1, 2: 1}
    assert add({0: 1}, {0: -1}) == 0
    assert scale({0: 2}, 0) == 0
    assert add(3, 4) == 7
    assert scale(2, 3) == 6


def test_address_of_a_fused_loop_over_three_dimensions_is_affine_again() -> None:
    # f over 6 x 30 x 10 elements: indices f // 300, f % 300 // 10 and f % 10 of a buffer with these extents.
    space = IndexSpace([1800])
    f: Form = {0: 1}
    outer, middle, inner = (
        space.floordiv(f, 300),
        space.floordiv(space.floormod(f, 300), 10),
        space.floormod(f, 10),
    )
    address = space.sum(space.sum(scale(outer, 300), scale(middle, 10)), inner)
    assert address == {0: 1}
