"""What compiled loops take on a core, against hand computations and measurements."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.device import load_table
from cdmpp.program.codegen import LOOP_FEATURES
from cdmpp.program.codegen.blocks import FlowGraph
from cdmpp.program.codegen.core import core_name, core_of, counts_key
from cdmpp.program.codegen.loops import cycles_of_chain
from cdmpp.program.codegen.strides import Piece, Strides, lines, lines_fetched
from cdmpp.program.codegen.trips import TripCounts
from cdmpp.program.codegen.values import CodeValues
from tests.program.codegen.assembly import code, counts

ENDS = "inc %rax; cmp $0x40,%rax; jne 1b"
ONE_SUM = f"vaddss (%rdi,%rax,4),%xmm0,%xmm0; {ENDS}"


@pytest.mark.parametrize(
    ("listing", "zen4", "skylake"),
    [
        # an addition waits for the one before; two of them overlap
        (ONE_SUM, 3, 4),
        (f"vaddss (%rdi,%rax,4),%xmm0,%xmm0; vaddss (%rsi,%rax,4),%xmm1,%xmm1; {ENDS}", 3, 4),
        # stored, forwarded, added
        (f"vmovss (%rdi),%xmm0; vaddss (%rsi,%rax,4),%xmm0,%xmm0; vmovss %xmm0,(%rdi); {ENDS}", 9 + 3, 5 + 4),
        # a general register goes through memory in no time (Zen 2 and later: memory renaming)
        (f"mov (%rdi),%rcx; add $0x3,%rcx; mov %rcx,(%rdi); {ENDS}", 1, 4 + 1),
        # a register that is cleared waits for nothing
        (f"vxorps %xmm0,%xmm0,%xmm0; vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; {ENDS}", 1, 5 / 4),
        # its target is an operand
        (f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; {ENDS}", 4, 4),
        (f"vfmadd231ps (%rdi,%rax,4),%zmm1,%zmm0; vmovups (%rsi,%rax,4),%zmm0; {ENDS}", 1, 5 / 4),
        # each writes one of four elements and keeps the others
        (f"insertps $0x10,%xmm1,%xmm0; insertps $0x20,%xmm2,%xmm0; insertps $0x30,%xmm3,%xmm0; {ENDS}", 3, 3),
        # what a conditional move does not write stays
        (f"cmovl %rcx,%rdx; add %rdx,%rdx; {ENDS}", 2, 2),
    ],
)
def test_cycles_of_dependent_instructions(listing: str, zen4: float, skylake: float) -> None:
    body = code(f"1: {listing}")
    assert cycles_of_chain(body, core_of("znver4")) == pytest.approx(zen4, abs=0.2)
    assert cycles_of_chain(body, core_of("skylake-avx512")) == pytest.approx(skylake, abs=0.2)


@pytest.mark.parametrize(
    ("listing", "zen4", "skylake"),
    [
        # a Zen 4 loads half of 64 bytes at a time and stores them in two cycles
        ("vmovups 0x40(%rdi),%zmm0; vmovups 0x80(%rdi),%zmm1; vmovups 0xc0(%rdi),%zmm2; vmovups 0x100(%rdi),%zmm3", 4, 2),
        ("vmovups %zmm0,0x40(%rdi); vmovups %zmm0,0x80(%rdi); vmovups %zmm0,0xc0(%rdi)", 6, 3),
        ("vmovups %ymm0,0x40(%rdi); vmovups %ymm0,0x80(%rdi); vmovups %ymm0,0xc0(%rdi)", 3, 3),
        # two units of 256 bits, or one and a half pair of 512
        ("vmulps %zmm1,%zmm2,%zmm0; vmulps %zmm1,%zmm2,%zmm3; vmulps %zmm1,%zmm2,%zmm4; vmulps %zmm1,%zmm2,%zmm5", 4, 2),
        ("vmulps %ymm1,%ymm2,%ymm0; vmulps %ymm1,%ymm2,%ymm3; vmulps %ymm1,%ymm2,%ymm4; vmulps %ymm1,%ymm2,%ymm5", 2, 2),
        ("vgatherdps (%rdi,%zmm1,4),%zmm0{%k1}", 17.2, 25),
    ],
)  # fmt: skip
def test_cycles_of_the_busiest_units(listing: str, zen4: float, skylake: float) -> None:
    for core, cycles in (("znver4", zen4), ("skylake-avx512", skylake)):
        found = counts(f"xor %eax,%eax; 1: {listing}; {ENDS}; ret", core)
        assert found["unit_cycles"] == pytest.approx(64 * cycles, rel=0.02)
        assert found["missing"] == found["call_cycles"] == 0
    call = counts("xor %ebx,%ebx; 1: call g; inc %rbx; cmp $0x40,%rbx; jne 1b; ret")
    assert call["call_cycles"] == pytest.approx(64 * 11.5) and call["loop0_calls"] == 1


def test_a_loop_takes_the_longest_of_what_bounds_it() -> None:
    found = counts(f"xor %eax,%eax; 1: {ONE_SUM}; ret".replace("0x40", "0x400"))
    assert found["chain_cycles"] == pytest.approx(1024 * 3, rel=0.01) and found["loop_entries"] == 1
    assert found["core_cycles"] == pytest.approx(found["chain_cycles"] + found["outside_cycles"])
    assert found["front_cycles"] == pytest.approx(1024 * 3 / 6)  # the jump is one micro-op with the comparison
    loop = {name: found[f"loop0_{name}"] for name in LOOP_FEATURES}
    assert (loop["runs"], loop["trips"], loop["instructions"], loop["loaded"]) == (1024, 1024, 4, 4)
    assert loop["cycles"] == loop["chain"] and loop["arithmetic"] == 1 and found["loop1_runs"] == 0


def test_short_loops_overlap_with_the_next_that_is_entered() -> None:
    found = counts(
        "xor %ecx,%ecx; 1: xor %eax,%eax; vxorps %xmm0,%xmm0,%xmm0; 2: vaddss (%rdi,%rax,4),%xmm0,%xmm0; inc %rax; "
        "cmp $0x4,%rax; jne 2b; inc %rcx; cmp $0x100,%rcx; jne 1b; ret"
    )
    assert found["loop_entries"] == 1 + 256
    # 16 of 320 instructions each
    assert found["chain_cycles"] == pytest.approx(256 * 4 * 3 / (320 / 16), rel=0.1)


def steps_of(listing: str) -> dict[int, dict[int, int | None]]:
    """Loop -> address of an instruction -> by how much what it reads or writes moves in an iteration."""
    strides = Strides(TripCounts(CodeValues(FlowGraph(code(listing)))))
    return {n: {p.bytes: p.steps for p in strides.pieces(n)} for n in range(2) if strides.pieces(n)}  # type: ignore[misc]


def test_addresses_move_with_the_loops_around_them() -> None:
    nest = (
        "xor %ecx,%ecx; 1: xor %eax,%eax; mov %rdi,%rdx; 2: vmovups (%rdx,%rax,4),%ymm0; vmovss 0x40(%rsi,%rcx,8),%xmm1; "
        "add $0x8,%rax; cmp $0x80,%rax; jne 2b; add $0x200,%rdi; inc %rcx; cmp $0x100,%rcx; jne 1b; ret"
    )
    found = counts(nest)
    # 16 lines of the one in each of 256 iterations, and 8 bytes of the other: more than 32 kB and less than 256
    assert found["l1_lines"] == pytest.approx(256 * 8 + 256 / 8, rel=0.01)
    assert found["lines_256k"] == found["unknown_addresses"] == 0
    assert steps_of(nest)[1] == {32: (32, 512), 4: (0, 8)}
    # a copy of the counter moves as the counter does, and what is computed from what is loaded is not known
    copied = nest.replace("mov %rdi,%rdx", "mov %rdi,%rdx; mov %rcx,%r8").replace("%rsi,%rcx,8", "%rsi,%r8,8")
    assert steps_of(copied)[1] == {32: (32, 512), 4: (0, 8)}
    loaded = nest.replace("mov %rdi,%rdx", "mov (%rdi),%rdx")
    assert steps_of(loaded)[1] == {32: (32, None), 4: (0, 8)}


def test_lines_that_a_nest_fetches() -> None:
    row = Piece(64, (64, 4096, 0))
    assert [lines(row, trips) for trips in ([], [8], [8, 10], [8, 10, 5])] == [1, 8, 80, 80]
    assert lines(Piece(4, (4,)), [64]) == 4 and lines(Piece(4, (256,)), [64]) == 64
    # 80 lines for the two inner loops: once each time the outer one runs, unless they stay
    assert lines_fetched([row], [8, 10, 5], 400, 64 * 79) == 400 and lines_fetched([row], [8, 10, 5], 400, 64 * 80) == 0


UNITS = st.sets(st.sampled_from("abcd"), min_size=1).map(lambda s: tuple(sorted(s)))


@given(st.dictionaries(UNITS, st.floats(0, 10), max_size=5))
def test_the_busiest_units_take_what_the_best_schedule_takes(uses: dict[tuple[str, ...], float]) -> None:
    from scipy.optimize import linprog

    found = core_of("znver4").busiest(uses)
    keys = [(units, unit) for units in uses for unit in units]
    if not keys:
        assert found == 0
        return
    # shares of each use on its units, and the time of the busiest unit, which is least
    limits = [[float(unit == u) for _, unit in keys] + [-1.0] for u in "abcd"]
    whole = [[float(units == of) for of, _ in keys] + [0.0] for units in uses]
    best = linprog([0.0] * len(keys) + [1.0], limits, [0.0] * 4, whole, list(uses.values()))
    assert found == pytest.approx(best.fun, abs=1e-6)


def test_every_cpu_of_the_table_has_a_core(caplog: pytest.LogCaptureFixture) -> None:
    cpus = [device for device in load_table(this_machine=False).rows if device.kind == "cpu"]
    cores = {device.name: core_name(device) for device in cpus}
    assert not caplog.records and {"znver4", "skylake-avx512", "neoverse-n1"} < set(cores.values())
    keys = {counts_key(device) for device in cpus}
    assert any(key.endswith("-znver4") for key in keys)
    unknown = dataclasses.replace(cpus[0], arch="zen9", vendor="amd")
    assert core_name(unknown) == "znver3" and "no table of instructions for zen9" in caplog.text
