"""Cycles of compiled loops, against hand computations."""

from __future__ import annotations

import pytest

from cdmpp.program.codegen.cycles import cycles_of_iteration
from tests.program.codegen.assembly import code, counts

ENDS = "inc %rax; cmp $0x40,%rax; jne 1b"
ONE_SUM = f"vaddss (%rdi,%rax,4),%xmm0,%xmm0; {ENDS}"


@pytest.mark.parametrize(
    ("listing", "cycles"),
    [
        # an addition waits for the one before, two of them overlap
        (ONE_SUM, 4.0),
        (f"vaddss (%rdi,%rax,4),%xmm0,%xmm0; vaddss (%rsi,%rax,4),%xmm1,%xmm1; {ENDS}", 4.0),
        # stored (1), forwarded (5), added (4)
        (f"vmovss (%rdi),%xmm0; vaddss (%rsi,%rax,4),%xmm0,%xmm0; vmovss %xmm0,(%rdi); {ENDS}", 10.0),
        # six instructions, four a cycle: addresses differ in each iteration
        (f"vmovups (%rdi,%rax,4),%zmm0; vaddps %zmm1,%zmm0,%zmm0; vmovups %zmm0,(%rdi,%rax,4); {ENDS}", 6 / 4),
        # a register that is cleared waits for nothing
        (f"vxorps %xmm0,%xmm0,%xmm0; vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; {ENDS}", 5 / 4),
        # its target is an operand
        (f"addss (%rdi,%rax,4),%xmm0; {ENDS}", 4.0),
        (f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; {ENDS}", 4.0),
        (f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; vmovups (%rsi,%rax,4),%zmm0; {ENDS}", 5 / 4),
        # each gather keeps what it does not load; it is at other addresses than the scatter before
        ("vgatherdps (%rdi,%zmm1,4),%zmm0{%k1}; vscatterdps %zmm0,(%rdi,%zmm1,4){%k2}; vpaddd %zmm2,%zmm1,%zmm1; "
         f"{ENDS}", 20.0),
        # each writes one of four elements and keeps the others
        (f"insertps $0x10,%xmm1,%xmm0; insertps $0x20,%xmm2,%xmm0; insertps $0x30,%xmm3,%xmm0; {ENDS}", 3.0),
        (f"kmovw %k1,%k2; kortestw %k2,%k2; {ENDS}", 5 / 4),
        # what a conditional move does not write stays
        (f"cmovl %rcx,%rdx; add %rdx,%rdx; {ENDS}", 2.0),
    ],
)  # fmt: skip
def test_cycles_between_two_iterations(listing: str, cycles: float) -> None:
    assert cycles_of_iteration(code(f"1: {listing}")) == pytest.approx(cycles, abs=0.1)


def test_a_loop_takes_what_its_chain_or_its_busiest_unit_takes() -> None:
    begin = "xor %eax,%eax; 1: "
    outside = 2 / 4  # xor and ret
    found = counts(f"{begin}{ONE_SUM}; ret")
    assert found["loop_chain"] == pytest.approx(64 * 4, rel=0.01) and found["loop_entries"] == 1
    assert found["loop_cycles"] == pytest.approx(found["loop_chain"] + outside)
    stores = "; ".join(f"vmovups %zmm1,{64 * i:#x}(%rdi,%rax,4)" for i in range(6))
    found = counts(f"{begin}{stores}; {ENDS}; ret")
    assert found["loop_cycles"] == pytest.approx(64 * 6 + outside)  # one store a cycle
    assert found["loop_chain"] == pytest.approx(64 * 9 / 4, rel=0.1)


def test_short_loops_overlap_with_the_next_that_is_entered() -> None:
    found = counts(
        "xor %ecx,%ecx; 1: xor %eax,%eax; vxorps %xmm0,%xmm0,%xmm0; 2: vaddss (%rdi,%rax,4),%xmm0,%xmm0; inc %rax; "
        "cmp $0x4,%rax; jne 2b; inc %rcx; cmp $0x100,%rcx; jne 1b; ret"
    )
    assert found["loop_entries"] == 1 + 256
    # 16 of 224 instructions each
    assert found["loop_chain"] == pytest.approx(256 * 4 * 4 / (224 / 16), rel=0.1)
