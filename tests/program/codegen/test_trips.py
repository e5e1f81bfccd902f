"""Flow graphs of object code, what registers and stack slots hold, and from both the trip counts of loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.codegen import CODEGEN_FEATURES, KINDS
from cdmpp.program.codegen.blocks import Address, FlowGraph, Instruction
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import core_of
from cdmpp.program.codegen.counts import codegen_features
from cdmpp.program.codegen.trips import TripCounts, times_run
from cdmpp.program.codegen.values import CodeValues, Flags, meets, value_at
from tests.program.codegen.assembly import CASES, code, counts
from tests.samples.programs import matmul_task


def values(listing: str) -> CodeValues:
    return CodeValues(FlowGraph(code(listing)))


@pytest.mark.parametrize("case", CASES["times"], ids=lambda case: case["what"])
def test_how_often_instructions_run(case: dict[str, Any]) -> None:
    trips = TripCounts(values(case["code"]))
    assert times_run(trips).tolist() == case["times"] and trips.unknown == 0


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


@pytest.mark.parametrize("case", CASES["values"], ids=lambda case: case["code"])
def test_known_answers(case: dict[str, Any]) -> None:
    place = Address("rsp", displacement=8) if case["place"] == "slot" else case["place"]
    symbol, number = value_at(values(case["code"]).after[0], place)
    value = case["value"]
    assert (symbol, number) == (None, value) if value is not None else symbol is not None


def test_what_is_unknown_keeps_its_distance() -> None:
    after = values("lea 0x8(%rdi),%rcx\nadd $0x10,%rcx\nmov %rcx,%rdx\ndec %rdx").after[0]
    assert value_at(after, "rdx") == (("entry", "rdi"), 23)


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_conditions_are_those_of_the_numbers(left: int, right: int) -> None:
    flags = Flags("cmp", (None, left), (None, right))
    assert flags.satisfies("e") == (left == right) and flags.satisfies("ne") == (left != right)
    assert flags.satisfies("l") == (left < right) and flags.satisfies("ge") == (left >= right)
    assert flags.satisfies("g") == (left > right) and flags.satisfies("le") == (left <= right)
    assert Flags("cmp", ("x", left), (None, right)).satisfies("e") is None
    assert meets(left - right, "s") == (left < right)


@pytest.mark.parametrize("case", CASES["trips"], ids=lambda case: case["what"])
def test_known_trip_counts(case: dict[str, Any]) -> None:
    found = TripCounts(values(f"{case['code']}; end: ret"))
    assert [found.of(number) for number in range(len(found.graph.loops))] == case["trips"]


@pytest.mark.parametrize("case", CASES["counted"], ids=lambda case: case["what"])
def test_what_is_counted(case: dict[str, Any]) -> None:
    found = counts(f"{case['code']}; end: ret")
    assert {name: found[name] for name in case["counts"]} == pytest.approx(case["counts"])


def test_what_is_misread_stays_finite() -> None:
    nest = "; ".join(f"l{k}: xor %ecx,%ecx" for k in range(12))
    ends = "; ".join(f"inc %rcx; cmp $0xfffff,%rcx; jne l{k}" for k in reversed(range(12)))
    assert np.isfinite([*counts(f"{nest}; {ends}; end: ret").values()]).all()


@pytest.mark.parametrize("n", [24, 64])
def test_the_arithmetic_of_a_compiled_matmul_is_counted_exactly(n: int, tmp_path: Path) -> None:
    func, target = matmul_task(n).prim_func(), {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
    compile_to_shared_object(func, target, tmp_path / "p.so")
    found = dict(zip(CODEGEN_FEATURES, codegen_features(tmp_path / "p.so", core_of("haswell")), strict=True))
    lanes = {"z": 16, "y": 8, "x": 4, "s": 1}
    assert all(f"run_{kind}" in found for kind in KINDS)
    flops = sum(width * (2 * found[f"run_fma_{w}"] + found[f"run_fp_{w}"]) for w, width in lanes.items())
    assert flops == 2 * n**3 and found["unknown_loops"] == 0
    assert found["program_fp_z"] == found["program_load_z"] == 0, "the target has no 512-bit registers"


PADDED = (
    "xor %eax,%eax; 1: vmovups (%rsi),%zmm1; cmp $0x2,%rax; jCONDITION 2f; "
    "vfmadd231ps (%rsi),%zmm1,%zmm0; 2: inc %rax; cmp $0xa,%rax; jne 1b"
)


@pytest.mark.parametrize(
    ("condition", "kept"), [("e", 9), ("ne", 1), ("b", 8), ("ae", 2), ("be", 7), ("a", 3), ("l", 8), ("g", 3)]
)
def test_a_branch_on_a_counter_is_taken_in_the_iterations_that_say_so(condition: str, kept: int) -> None:
    assert counts(PADDED.replace("CONDITION", condition) + "; end: ret")["run_fma_z"] == pytest.approx(kept)
