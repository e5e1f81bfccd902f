"""Blocks, dominators and loops of object code."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.profiler.control_flow import FlowGraph, Instruction
from cdmpp.profiler.loop_trips import times_run


def _code(lines: list[str]) -> list[Instruction]:
    """Instructions at addresses 0x10, 0x20, ..."""
    split = [line.split(maxsplit=1) for line in lines]
    return [(16 * (i + 1), line[0], line[1] if len(line) > 1 else "") for i, line in enumerate(split)]


#: A loop whose second part the compiler put before its first: 0x20..0x30 go back to 0x50.
ROTATED = [
    "xor %ecx,%ecx",  # 10
    "jmp 50 <f>",  # 20
    "inc %rcx",  # 30: reached from 60
    "jmp 50 <f>",  # 40
    "cmp $0x8,%rcx",  # 50: the header
    "jne 30 <f>",  # 60
    "ret",  # 70
]


def test_a_loop_in_any_layout_is_found_and_counted() -> None:
    graph = FlowGraph.of(_code(ROTATED))
    (loop,) = graph.loops
    first = [graph.function[graph.blocks[block][0]][0] for block in sorted(loop.body)]
    assert graph.function[graph.blocks[loop.header][0]][0] == 0x50
    assert first == [0x30, 0x50]
    runs = times_run(graph.function)
    assert (
        runs.times.tolist() == [1, 1, 8, 8, 9, 9, 1] and runs.unknown == 0
    )  # the header runs once more than the rest


def test_functions_that_lost_their_symbol_are_entered_too() -> None:
    code = _code(
        [
            "push %rbx",
            "ret",
            "nopl 0x0(%rax)",
            "xor %eax,%eax",
            "inc %rax",
            "cmp $0x5,%rax",
            "jne 50 <f>",
            "ret",
        ]
    )
    runs = times_run(code)
    assert runs.times.tolist() == [1, 1, 1, 1, 5, 5, 5, 1] and runs.unknown == 0


def test_both_ways_through_a_round_share_it_and_a_way_around_a_loop_does_not() -> None:
    code = _code(
        [
            "xor %ecx,%ecx",  # 10
            "test %rdi,%rdi",  # 20: the outer loop's header
            "je 50 <f>",  # 30
            "vaddss %xmm1,%xmm0,%xmm0",  # 40: half of the rounds
            "test %rsi,%rsi",  # 50
            "je b0 <f>",  # 60: around the inner loop
            "xor %eax,%eax",  # 70
            "inc %rax",  # 80
            "cmp $0x3,%rax",  # 90
            "jne 80 <f>",  # a0
            "inc %rcx",  # b0
            "cmp $0x10,%rcx",  # c0
            "jne 20 <f>",  # d0
            "ret",  # e0
        ]
    )
    runs = times_run(code)
    by_address = {address: times for (address, _, _), times in zip(code, runs.times, strict=True)}
    assert by_address[0x20] == 16 and by_address[0x40] == 8 and by_address[0x50] == 16
    assert by_address[0x80] == 48 and by_address[0xB0] == 16 and by_address[0xE0] == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["nop", "jmp", "jne", "je", "inc", "ret"]), st.integers(0, 11)),
        min_size=1,
        max_size=12,
    )
)
def test_any_code_has_a_graph_whose_dominators_dominate(parts: list[tuple[str, int]]) -> None:
    code: list[Instruction] = []
    for i, (operation, target) in enumerate(parts):
        operands = {"inc": "%rax", "nop": "", "ret": ""}.get(operation, f"{16 * (target + 1):x} <f>")
        code.append((16 * (i + 1), operation, operands))
    runs = times_run(code)
    graph, times = runs.graph, runs.times
    assert times.shape == (len(code),) and np.isfinite(times).all() and (times >= 0).all()
    assert runs.unknown >= 0
    assert sorted(i for first, last in graph.blocks for i in range(first, last + 1)) == list(range(len(code)))
    root = len(graph.blocks) - 1
    for block in graph.order:
        over = graph.dominator[block]
        if block != root:  # without its dominator a block cannot be reached
            seen, todo = {over}, [] if over == root else [root]
            while todo:
                here = todo.pop()
                if here not in seen:
                    seen.add(here)
                    todo += graph.successors[here]
            assert block not in seen or over == root
    for loop in graph.loops:
        assert all(graph.dominates(loop.header, block) for block in loop.body)
