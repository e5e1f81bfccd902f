"""Instruction counts of PrimFuncs for a device's target: compiled for it, refused where it is no x86 CPU."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.counts import instruction_counts
from cdmpp.program.tvm_env import import_tvm
from tests.samples.programs import te_task


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


def test_what_does_not_compile_is_logged_and_predicted_without(
    doubled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Mock(side_effect=RuntimeError("LLVM: cannot select"))
    monkeypatch.setattr("cdmpp.program.codegen.counts.compile_to_shared_object", failing)
    rows = instruction_counts([doubled], get_device("xeon-cascadelake-2.5ghz@1"))
    assert np.isnan(rows).all() and "cannot select" in caplog.text
