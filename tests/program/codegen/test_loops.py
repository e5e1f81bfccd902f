"""What compiled loops take on a core, against hand computations and measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.device import load_table
from cdmpp.program.codegen import LOOP_FEATURES
from cdmpp.program.codegen.blocks import FlowGraph
from cdmpp.program.codegen.core import _facts, _rows, core_name, core_of, counts_key
from cdmpp.program.codegen.loops import cycles_of_chain
from cdmpp.program.codegen.strides import Piece, Strides, lines, lines_fetched
from cdmpp.program.codegen.trips import TripCounts
from cdmpp.program.codegen.values import CodeValues
from tests.program.codegen.assembly import CASES, code, counts

ENDS = "inc %rax; cmp $0x40,%rax; jne 1b"


@pytest.mark.parametrize("case", CASES["chains"], ids=lambda case: case["code"])
def test_cycles_of_dependent_instructions(case: dict[str, Any]) -> None:
    body = code(f"1: {case['code']}")
    for core, cycles in case["cycles"].items():
        assert cycles_of_chain(body, core_of(core)) == pytest.approx(cycles, abs=0.2)


@pytest.mark.parametrize("case", CASES["units"], ids=lambda case: case["code"])
def test_cycles_of_the_busiest_units(case: dict[str, Any]) -> None:
    for core, cycles in case["cycles"].items():
        found = counts(f"xor %eax,%eax; 1: {case['code']}; {ENDS}; ret", core)
        assert found["unit_cycles"] == pytest.approx(64 * cycles, rel=0.02)
        assert found["missing"] == found["call_cycles"] == 0


def test_calls_take_their_time() -> None:
    call = counts("xor %ebx,%ebx; 1: call g; inc %rbx; cmp $0x40,%rbx; jne 1b; ret")
    assert call["call_cycles"] == pytest.approx(64 * 11.5) and call["loop0_calls"] == 1


def test_a_loop_takes_the_longest_of_what_bounds_it() -> None:
    listing = "xor %eax,%eax; 1: vaddss (%rdi,%rax,4),%xmm0,%xmm0; inc %rax; cmp $0x400,%rax; jne 1b; ret"
    found, zen5 = counts(listing), counts(listing, "znver5")  # the one has three cycles for an addition, the other two
    assert found["chain_cycles"] == pytest.approx(1024 * 3, rel=0.01) and found["loop_entries"] == 1
    assert zen5["chain_cycles"] == pytest.approx(1024 * 2, rel=0.01) and zen5["front_cycles"] == 1024 * 3 / 8
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
    assert steps_of(nest.replace("mov %rdi,%rdx", "mov (%rdi),%rdx"))[1] == {32: (32, None), 4: (0, 8)}


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
    assert {"znver4", "znver5"} <= {key.rpartition("-")[2] for key in keys}
    unknown = dataclasses.replace(cpus[0], arch="zen9", vendor="amd")
    assert core_name(unknown) == "znver5" and "no table of instructions for zen9" in caplog.text
    nearest = [_rows(str(core)) for vendor, core in _facts()["nearest"].items() if vendor != "arm"]
    assert all("vpaddd z z z" in rows for rows in nearest), "a CPU newer than the table has AVX-512"


@pytest.mark.parametrize(("core", "instruction", "uses"), [
    ("icelake-server", "vfmadd231ps z z z", [(1, 2)]), ("icelake-client", "vfmadd231ps z z z", [(1, 1)]),
    ("sapphirerapids", "vfmadd231ps z z m", [(1, 2), (1, 3)]), ("sapphirerapids", "vaddps z z z", [(1, 2)]),
    ("alderlake", "vdivps y y y", [(5, 1)]), ("lunarlake", "vmovups y m", [(1, 3)]),
])  # fmt: skip
def test_what_llvm_has_wrong_is_corrected(core: str, instruction: str, uses: list[tuple[int, int]]) -> None:
    assert [(cycles, len(units)) for cycles, units in _rows(core)[instruction].uses] == uses
