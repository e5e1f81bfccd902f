"""Counting the instructions of compiled programs."""

from __future__ import annotations

import pytest

from cdmpp.program.codegen.compile import code_key
from cdmpp.program.codegen.counts import kinds_of
from tests.program.codegen.assembly import code, counts

LISTING = (
    "vxorps %xmm0,%xmm0,%xmm0; 1: vbroadcastss (%rdi),%zmm1; 2: vfmadd231ps (%rsi),%zmm1,%zmm0; "
    "vmovups %zmm0,0x40(%rsp); add $0x40,%rsi; jne 2b; vaddss (%rdx),%xmm0,%xmm0; vmovss %xmm0,(%rdx); "
    "jne 1b; vgatherdps (%rsi,%xmm1,4),%xmm2{%k1}; ret"
)


def test_known_answer_of_a_program_and_its_hottest_loop() -> None:
    found = counts(LISTING)
    expected = {
        "program_all": 11, "program_fma_z": 1, "program_load_z": 1, "program_fp_s": 1, "program_store_s": 1,
        "program_load_s": 2,  # a broadcast loads one element
        "program_store_z": 1, "program_stack_store": 1, "program_broadcast": 1, "program_gather": 1, "program_branch": 2,
        "innermost_loops": 1, "loop_depth": 1,  # one loop around it
        "loop_all": 4, "loop_fma_z": 1, "loop_broadcast": 0, "loop_branch": 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("listing", "kinds"),
    [
        ("vfmadd213ss %xmm1,%xmm2,%xmm3", "fma_s"),
        ("mulps %xmm1,%xmm2", "fp_x"),  # as CPUs without AVX have it
        ("addss (%rax),%xmm2", "fp_s load_s"),
        ("divps %xmm1,%xmm2", "div"),
        ("shufps $0x0,%xmm1,%xmm2", "shuffle"),
        ("movups (%rax),%xmm0", "load_x"),
        ("movaps %xmm0,0x10(%rsp)", "store_x stack_store"),
        ("cvtsi2ss %eax,%xmm0", "convert"),
        ("vmulps %ymm1,%ymm2,%ymm3", "fp_y"),
        ("vdivps %xmm1,%xmm2,%xmm3", "div"),
        ("vunpcklps %xmm1,%xmm2,%xmm3", "shuffle"),
        ("vmovups (%rax),%ymm0", "load_y"),
        ("vmovups %xmm0,(%rax)", "store_x"),
        ("vmovups %zmm0,(%rax){%k1}", "store_z"),
        ("vgatherqps (%rax,%zmm1,4),%ymm0{%k1}", "gather load_z"),  # by the addresses
        ("{evex} vpsllq $0xa,(%r15),%ymm1", "load_y"),
        ("mov 0x8(%rsp),%rax", "integer stack_load"),
        ("kxnorw %k0,%k0,%k1", "mask"),
        ("idiv %ecx", "idiv"),
        ("imul %rax,%rcx", "imul"),
        ("call expf@plt", "call"),
        ("nopw 0x0(%rax,%rax,1)", "integer"),
    ],
)
def test_kinds(listing: str, kinds: str) -> None:
    (instruction,) = code(listing)
    assert kinds_of(instruction) == ["all", *kinds.split()]


def test_the_number_of_cores_does_not_change_the_code() -> None:
    target = {"kind": "llvm", "mcpu": "cascadelake"}
    assert code_key({**target, "num-cores": 1}) == code_key({**target, "num-cores": 2})
    assert code_key({**target, "mcpu": "x86-64-v2"}) != code_key(target)
