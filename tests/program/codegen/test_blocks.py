"""Blocks, dominators and loops of object code."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.codegen.blocks import FlowGraph, Instruction
from cdmpp.program.codegen.trips import TripCounts, times_run
from cdmpp.program.codegen.values import CodeValues
from tests.program.codegen.assembly import code

#: A loop whose second part the compiler put before its first.
ROTATED = "xor %ecx,%ecx; jmp header; second: inc %rcx; jmp header; header: cmp $0x8,%rcx; jne second; ret"


def test_a_loop_in_any_layout_is_found_and_counted() -> None:
    graph = FlowGraph(code(ROTATED))
    (loop,) = graph.loops
    assert graph.code(loop.header)[0].name == "cmp"
    assert [graph.code(block)[0].name for block in sorted(loop.body)] == ["inc", "cmp"]
    trips = TripCounts(CodeValues(graph))
    assert times_run(trips).tolist() == [1, 1, 8, 8, 9, 9, 1]  # the header runs once more than the rest
    assert trips.unknown == 0


def test_functions_that_lost_their_symbol_are_entered_too() -> None:
    listing = "push %rbx; ret; nopl 0x0(%rax); xor %eax,%eax; 1: inc %rax; cmp $0x5,%rax; jne 1b; ret"
    trips = TripCounts(CodeValues(FlowGraph(code(listing))))
    assert times_run(trips).tolist() == [1, 1, 1, 1, 5, 5, 5, 1] and trips.unknown == 0


def test_both_ways_through_an_iteration_share_it_and_a_way_around_a_loop_does_not() -> None:
    listing = (
        "xor %ecx,%ecx; outer: test %rdi,%rdi; je 1f; vaddss %xmm1,%xmm0,%xmm0; 1: test %rsi,%rsi; "
        "je around; xor %eax,%eax; 2: inc %rax; cmp $0x3,%rax; jne 2b; around: inc %rcx; cmp $0x10,%rcx; "
        "jne outer; ret"
    )
    times = times_run(TripCounts(CodeValues(FlowGraph(code(listing))))).tolist()
    assert times[1] == 16 and times[3] == 8 and times[4] == 16  # half of the iterations add
    assert times[7] == 48 and times[10] == 16 and times[13] == 1


_FLOWS = {"jmp": "jump", "jne": "branch", "je": "branch", "ret": "end"}


_NAMES = st.sampled_from(["nop", "jmp", "jne", "je", "inc", "ret"])


@given(st.lists(st.tuples(_NAMES, st.integers(0, 11)), min_size=1, max_size=12))
def test_any_code_has_a_graph_whose_dominators_dominate(parts: list[tuple[str, int]]) -> None:
    function = []
    for i, (name, target) in enumerate(parts):
        operands = (target,) if name.startswith("j") else ()
        condition = name[1:] if name in ("jne", "je") else None
        changed = ("rax",) if name == "inc" else ()
        what = (_FLOWS.get(name, "next"), condition, name == "inc")
        function.append(Instruction(i, name, operands, None, 0, False, False, *[changed] * 3, *what))
    trips = TripCounts(CodeValues(FlowGraph(function)))
    graph, times = trips.graph, times_run(trips)
    assert times.shape == (len(function),) and np.isfinite(times).all() and (times >= 0).all()
    assert 0 <= trips.unknown <= len(graph.loops)
    covered = sorted(i for first, last in graph.blocks for i in range(first, last + 1))
    assert covered == list(range(len(function)))
    root = len(graph.blocks) - 1
    for block in graph.order:
        over = graph.dominator[block]
        if over != root:  # without its dominator a block cannot be reached
            seen, todo = {over}, [root]
            while todo:
                here = todo.pop()
                todo += [] if here in seen else graph.successors[here]
                seen.add(here)
            assert block == root or block not in seen
    for loop in graph.loops:
        assert all(graph.dominates(loop.header, block) for block in loop.body)
