"""Counting the instructions of compiled programs, and of PrimFuncs for a device's target."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program import import_tvm
from cdmpp.program.codegen import CODEGEN_FEATURES, code_key
from cdmpp.program.codegen.counts import instruction_counts, kinds_of
from tests.program.codegen.assembly import CASES, code, counts
from tests.samples.programs import te_task

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


@pytest.mark.parametrize(("listing", "kinds"), CASES["kinds"].items())
def test_kinds(listing: str, kinds: str) -> None:
    (instruction,) = code(listing)
    assert kinds_of(instruction) == ["all", *kinds.split()]


def test_the_number_of_cores_does_not_change_the_code() -> None:
    target = {"kind": "llvm", "mcpu": "cascadelake"}
    assert code_key({**target, "num-cores": 1}) == code_key({**target, "num-cores": 2})
    assert code_key({**target, "mcpu": "x86-64-v2"}) != code_key(target)


@pytest.fixture(scope="module")
def doubled() -> Any:
    """Every element of 256 times two."""

    def make(te: Any) -> list[Any]:
        a = te.placeholder((256,), name="a")
        return [a, te.compute((256,), lambda i: a[i] * 2.0, name="b")]

    return te_task("doubled", make).prim_func()


@pytest.mark.parametrize("name", ["graviton3@1", "h200"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ProgramError, match="x86"):
        instruction_counts([], get_device(name))


def test_programs_are_compiled_for_the_device_not_for_this_machine(doubled: Any) -> None:
    at = {name: i for i, name in enumerate(CODEGEN_FEATURES)}
    module = import_tvm().IRModule({"main": doubled})
    wide = instruction_counts([doubled, module], get_device("epyc-7763@1"))
    narrow = instruction_counts([doubled], get_device("xeon-cascadelake-2.5ghz.x86-64-v2@1"))
    assert np.array_equal(wide[0], wide[1])
    assert wide[0, at["program_load_y"]] + wide[0, at["program_fp_y"]] > 0
    assert narrow[0, at["program_fp_x"]] > 0 and narrow[0, at["program_load_y"]] == 0


def test_without_a_disassembler_there_is_one_error(doubled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cdmpp.program.codegen.disassemble", raising=False)
    monkeypatch.setitem(sys.modules, "iced_x86", None)
    with pytest.raises(CdmppError, match="iced-x86"):
        instruction_counts([doubled, doubled], get_device("epyc-7763@1"))


def test_what_does_not_compile_is_logged_and_predicted_without(doubled: Any, monkeypatch, caplog) -> None:
    failing = Mock(side_effect=RuntimeError("LLVM: cannot select"))
    monkeypatch.setattr("cdmpp.program.codegen.counts.compile_to_shared_object", failing)
    rows = instruction_counts([doubled], get_device("xeon-cascadelake-2.5ghz@1"))
    assert np.isnan(rows).all() and "cannot select" in caplog.text
