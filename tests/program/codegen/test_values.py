"""What registers and stack slots hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.codegen.blocks import Address, FlowGraph, Location
from cdmpp.program.codegen.values import CodeValues, Flags, Value, meets, value_at
from tests.program.codegen.assembly import code


def _values(listing: str) -> CodeValues:
    return CodeValues(FlowGraph(code(listing)))


def _after(listing: str, place: Location) -> Value:
    return value_at(_values(listing).after[0], place)


@pytest.mark.parametrize(
    ("listing", "place", "value"),
    [
        ("mov $0x10,%eax\nlea 0x4(%rax,%rax,2),%rcx", "rcx", 0x34),
        ("mov $0x7,%ecx\nimul $0x3,%rcx,%rdx\nshl $0x2,%edx\nsub $0x4,%rdx", "rdx", 80),
        ("mov $0xffffffff,%eax\nmovslq %eax,%rdx\nneg %rdx", "rdx", 1),
        ("mov $0x1d,%ecx\nand $0xfffffffffffffff8,%rcx\nmov %rcx,0x10(%rsp)\nmov 0x10(%rsp),%r9", "r9", 0x18),
        ("mov $0x65,%eax\nmov $0x7,%ecx\ncltd\nidiv %ecx", "rax", 14),
        ("mov $0x65,%eax\nmov $0x7,%ecx\ncltd\nidiv %ecx", "rdx", 3),
        ("mov $0x5,%eax\nmov $0x9,%ecx\ncmp %ecx,%eax\ncmovl %eax,%ecx", "rcx", 5),
        ("mov $0x5,%eax\ncmp $0x5,%eax\nsete %cl", "rcx", 1),
        ("mov $0x3,%eax\nnot %eax\nsar $0x1,%eax", "rax", -2),
        ("xor %eax,%eax\nvmovups %zmm0,(%rdi)\ninc %rax", "rax", 1),
        ("mov $0x1ff,%eax\nmovzbl %al,%ecx", "rcx", 0xFF),
        ("movb $0xff,0x8(%rsp)\nmovzbl 0x8(%rsp),%ecx", "rcx", 0xFF),
        ("mov $0x5,%eax\nshlx %rax,%rax,%rcx", "rcx", 5 << 5),
    ],
)
def test_known_answers(listing: str, place: str, value: int) -> None:
    assert _after(listing, place) == (None, value)


def test_what_is_unknown_keeps_its_distance() -> None:
    symbol, offset = _after("lea 0x8(%rdi),%rcx\nadd $0x10,%rcx\nmov %rcx,%rdx\ndec %rdx", "rdx")
    assert (symbol, offset) == (("entry", "rdi"), 23)
    assert _after("lea 0x8(%rdi),%rcx\nsub %rdi,%rcx", "rcx") == (None, 8)


def test_loads_calls_and_moved_stacks_are_not_known() -> None:
    assert _after("mov $0x1,%eax\nmov (%rdi),%eax", "rax")[0] is not None
    assert _after("mov $0x1,%eax\ncall g", "rax")[0] is not None
    assert _after("mov $0x1,%ebx\ncall g", "rbx") == (None, 1)
    slot = Address("rsp", displacement=8)
    assert _after("movl $0x1,0x8(%rsp)", slot) == (None, 1)
    assert _after("movl $0x1,0x8(%rsp)\nsub $0x20,%rsp", slot)[0] is not None
    assert _after("movl $0x1,0x8(%rsp)\npush %rax", slot)[0] is not None
    assert _after("movl $0x1,0x8(%rsp)\nvextractf128 $0x1,%ymm0,0x8(%rsp)", slot)[0] is not None


def test_a_branch_that_is_known_is_followed_one_way() -> None:
    values = _values("mov $0x4,%eax\ncmp $0x4,%eax\njne 1f\nmov $0x1,%ecx\nret\n1: mov $0x2,%ecx\nret")
    (last,) = [block for block, after in values.taken.items() if values.graph.blocks[block][1] == 2]
    assert values.taken[last] == [last + 1] and len(values.after) == 3  # with the one that precedes all


def test_flags_are_those_of_the_last_instruction_that_sets_them() -> None:
    compared = "mov $0x4,%eax\ncmp $0x4,%eax\n"
    assert _values(f"{compared}vaddps %zmm0,%zmm1,%zmm2\nlea 0x1(%rax),%ecx").flags[0] == Flags(
        "cmp", (None, 4), (None, 4)
    )
    assert _values(f"{compared}kortestw %k0,%k0").flags[0] is None
    assert _values(f"{compared}call g").flags[0] is None


def test_what_a_loop_saves_and_restores_does_not_change_in_it() -> None:
    values = _values(
        "mov $0x5,%edx; xor %eax,%eax; 1: mov %rdx,0x8(%rsp); mov (%rdi),%rdx; add $0x3,%rdx; "
        "mov 0x8(%rsp),%rdx; inc %rax; cmp $0x9,%rax; jne 1b; ret"
    )
    (loop,) = values.graph.loops
    assert values.step(0, "rax") == 1
    assert values.after[loop.latches[0]]["rdx"] == (None, 5)


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_conditions_are_those_of_the_numbers(left: int, right: int) -> None:
    flags = Flags("cmp", (None, left), (None, right))
    assert flags.satisfies("e") == (left == right) and flags.satisfies("ne") == (left != right)
    assert flags.satisfies("l") == (left < right) and flags.satisfies("ge") == (left >= right)
    assert flags.satisfies("g") == (left > right) and flags.satisfies("le") == (left <= right)
    assert Flags("cmp", ("x", left), (None, right)).satisfies("e") is None
    assert meets(left - right, "s") == (left < right)
