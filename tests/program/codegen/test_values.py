"""What registers and stack slots hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.codegen.blocks import Address, FlowGraph, Location
from cdmpp.program.codegen.values import CodeValues, Flags, meets, value_at
from tests.program.codegen.assembly import code

SLOT = Address("rsp", displacement=8)


def values(listing: str) -> CodeValues:
    return CodeValues(FlowGraph(code(listing)))


@pytest.mark.parametrize(
    ("listing", "place", "value"),  # None: not known
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
        ("lea 0x8(%rdi),%rcx\nsub %rdi,%rcx", "rcx", 8),
        ("mov $0x1,%eax\nmov (%rdi),%eax", "rax", None),
        ("mov $0x1,%eax\ncall g", "rax", None),
        ("mov $0x1,%ebx\ncall g", "rbx", 1),
        ("movl $0x1,0x8(%rsp)", SLOT, 1),
        ("movl $0x1,0x8(%rsp)\nsub $0x20,%rsp", SLOT, None),
        ("movl $0x1,0x8(%rsp)\npush %rax", SLOT, None),
        ("movl $0x1,0x8(%rsp)\nvextractf128 $0x1,%ymm0,0x8(%rsp)", SLOT, None),
    ],
)
def test_known_answers(listing: str, place: Location, value: int | None) -> None:
    symbol, number = value_at(values(listing).after[0], place)
    assert (symbol, number) == (None, value) if value is not None else symbol is not None


def test_what_is_unknown_keeps_its_distance() -> None:
    after = values("lea 0x8(%rdi),%rcx\nadd $0x10,%rcx\nmov %rcx,%rdx\ndec %rdx").after[0]
    assert value_at(after, "rdx") == (("entry", "rdi"), 23)


def test_a_branch_that_is_known_is_followed_one_way() -> None:
    found = values("mov $0x4,%eax\ncmp $0x4,%eax\njne 1f\nmov $0x1,%ecx\nret\n1: mov $0x2,%ecx\nret")
    (last,) = [block for block, after in found.taken.items() if found.graph.blocks[block][1] == 2]
    assert found.taken[last] == [last + 1] and len(found.after) == 3  # with the one that precedes all


@pytest.mark.parametrize(
    ("then", "flags"),
    [
        ("vaddps %zmm0,%zmm1,%zmm2\nlea 0x1(%rax),%ecx", Flags("cmp", (None, 4), (None, 4))),
        ("kortestw %k0,%k0", None),
        ("call g", None),
    ],
)
def test_flags_are_those_of_the_last_instruction_that_sets_them(then: str, flags: Flags | None) -> None:
    assert values(f"mov $0x4,%eax\ncmp $0x4,%eax\n{then}").flags[0] == flags


def test_what_a_loop_saves_and_restores_does_not_change_in_it() -> None:
    found = values(
        "mov $0x5,%edx; xor %eax,%eax; 1: mov %rdx,0x8(%rsp); mov (%rdi),%rdx; add $0x3,%rdx; "
        "mov 0x8(%rsp),%rdx; inc %rax; cmp $0x9,%rax; jne 1b; ret"
    )
    (loop,) = found.graph.loops
    assert found.step(0, "rax") == 1 and found.after[loop.latches[0]]["rdx"] == (None, 5)


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_conditions_are_those_of_the_numbers(left: int, right: int) -> None:
    flags = Flags("cmp", (None, left), (None, right))
    assert flags.satisfies("e") == (left == right) and flags.satisfies("ne") == (left != right)
    assert flags.satisfies("l") == (left < right) and flags.satisfies("ge") == (left >= right)
    assert flags.satisfies("g") == (left > right) and flags.satisfies("le") == (left <= right)
    assert Flags("cmp", ("x", left), (None, right)).satisfies("e") is None
    assert meets(left - right, "s") == (left < right)
