"""Cycles of compiled loops, against hand computations."""

from __future__ import annotations

import pytest

from cdmpp.program.codegen.counts import CODEGEN_FEATURES, count
from cdmpp.program.codegen.cycles import cycles_of_iteration
from tests.program.codegen.assembly import code

ENDS = "inc %rax\ncmp $0x40,%rax\njne 1b"
ONE_SUM = f"vaddss (%rdi,%rax,4),%xmm0,%xmm0\n{ENDS}"
TWO_SUMS = f"vaddss (%rdi,%rax,4),%xmm0,%xmm0\nvaddss (%rsi,%rax,4),%xmm1,%xmm1\n{ENDS}"
IN_MEMORY = f"vmovss (%rdi),%xmm0\nvaddss (%rsi,%rax,4),%xmm0,%xmm0\nvmovss %xmm0,(%rdi)\n{ENDS}"
ELEMENTWISE = f"vmovups (%rdi,%rax,4),%zmm0\nvaddps %zmm1,%zmm0,%zmm0\nvmovups %zmm0,(%rdi,%rax,4)\n{ENDS}"
OF_ZERO = f"vxorps %xmm0,%xmm0,%xmm0\nvfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0\n{ENDS}"
OF_SSE = f"addss (%rdi,%rax,4),%xmm0\n{ENDS}"
FUSED = f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0\n{ENDS}"
SCATTERED = f"vgatherdps (%rdi,%zmm1,4),%zmm0{{%k1}}\nvscatterdps %zmm0,(%rdi,%zmm1,4){{%k2}}\nvpaddd %zmm2,%zmm1,%zmm1\n{ENDS}"
INSERTED = f"insertps $0x10,%xmm1,%xmm0\ninsertps $0x20,%xmm2,%xmm0\ninsertps $0x30,%xmm3,%xmm0\n{ENDS}"
OF_A_MASK = f"kmovw %k1,%k2\nkortestw %k2,%k2\n{ENDS}"
KEPT = f"cmovl %rcx,%rdx\nadd %rdx,%rdx\n{ENDS}"
WRITES_ONLY = f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0\nvmovups (%rsi,%rax,4),%zmm0\n{ENDS}"


@pytest.mark.parametrize(
    ("listing", "cycles"),
    [
        (ONE_SUM, 4.0),  # an addition waits for the one before
        (TWO_SUMS, 4.0),  # two of them overlap
        (IN_MEMORY, 10.0),  # stored (1), forwarded (5), added (4)
        (ELEMENTWISE, 6 / 4),  # six instructions, four a cycle: addresses differ in each round
        (OF_ZERO, 5 / 4),  # a register that is cleared waits for nothing
        (OF_SSE, 4.0),  # its target is an operand
        (FUSED, 4.0),
        (WRITES_ONLY, 5 / 4),
        (
            SCATTERED,
            20.0,
        ),  # each gather keeps what it does not load; it is at other addresses than the scatter before
        (INSERTED, 3.0),  # each writes one of four elements and keeps the others
        (OF_A_MASK, 5 / 4),
        (KEPT, 2.0),  # what a conditional move does not write stays
    ],
)
def test_cycles_between_two_iterations(listing: str, cycles: float) -> None:
    assert cycles_of_iteration(code(f"1: {listing}")) == pytest.approx(cycles, abs=0.1)


def test_a_loop_takes_what_its_chain_or_its_busiest_unit_takes() -> None:
    begin = "xor %eax,%eax\n1: "
    names = ("loop_cycles", "loop_chain", "loop_entries")

    def found(listing: str) -> list[float]:
        counts = dict(zip(CODEGEN_FEATURES, count([code(begin + listing + "\nret")]), strict=True))
        return [float(counts[name]) for name in names]

    outside = 2 / 4  # xor and ret
    cycles, chain, entries = found(ONE_SUM)
    assert (
        chain == pytest.approx(64 * 4, rel=0.01) and cycles == pytest.approx(chain + outside) and entries == 1
    )
    stores = "\n".join(f"vmovups %zmm1,{64 * i:#x}(%rdi,%rax,4)" for i in range(6))
    cycles, chain, entries = found(f"{stores}\n{ENDS}")
    assert cycles == pytest.approx(64 * 6 + outside)  # one store a cycle
    assert chain == pytest.approx(64 * 9 / 4, rel=0.1)


def test_short_loops_overlap_with_the_next_that_is_entered() -> None:
    nest = (
        "xor %ecx,%ecx; 1: xor %eax,%eax; vxorps %xmm0,%xmm0,%xmm0; 2: vaddss (%rdi,%rax,4),%xmm0,%xmm0; "
        "inc %rax; cmp $0x4,%rax; jne 2b; inc %rcx; cmp $0x100,%rcx; jne 1b; ret"
    )
    counts = dict(zip(CODEGEN_FEATURES, count([code(nest)]), strict=True))
    assert counts["loop_entries"] == 1 + 256
    assert counts["loop_chain"] == pytest.approx(
        256 * 4 * 4 / (224 / 16), rel=0.1
    )  # 16 of 224 instructions each
