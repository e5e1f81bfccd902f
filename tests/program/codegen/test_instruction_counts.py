"""Instruction counts of PrimFuncs for a device's target: compiled for it, refused where it is no x86 CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.counts import instruction_counts


@pytest.mark.parametrize("name", ["graviton3@1", "h200"])
def test_other_devices_are_refused(name: str):
    with pytest.raises(ProgramError, match="x86"):
        instruction_counts([], get_device(name))


def test_programs_are_compiled_for_the_device_not_for_this_machine():
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    from tvm import te

    a = te.placeholder((256,), name="a")
    func = te.create_prim_func([a, te.compute((256,), lambda i: a[i] * 2.0, name="b")])
    at = {name: i for i, name in enumerate(CODEGEN_FEATURES)}
    wide = instruction_counts([func, tvm.IRModule({"main": func})], get_device("epyc-7763@1"))
    narrow = instruction_counts([func], get_device("xeon-cascadelake-2.5ghz.x86-64-v2@1"))
    assert np.array_equal(wide[0], wide[1])
    assert wide[0, at["program_load_y"]] + wide[0, at["program_fp_y"]] > 0
    assert narrow[0, at["program_fp_x"]] > 0 and narrow[0, at["program_load_y"]] == 0


def test_without_a_disassembler_there_is_one_error(monkeypatch):
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    from tvm import te

    monkeypatch.delitem(sys.modules, "cdmpp.program.codegen.disassemble", raising=False)
    monkeypatch.setitem(sys.modules, "iced_x86", None)
    a = te.placeholder((8,), name="a")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] * 2.0, name="b")])
    with pytest.raises(CdmppError, match="iced-x86"):
        instruction_counts([func, func], get_device("epyc-7763@1"))


def test_what_does_not_compile_is_told_and_predicted_without(monkeypatch, caplog):
    import cdmpp.program.codegen.counts as counting
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    from tvm import te

    def fail(*_):
        raise RuntimeError("LLVM: cannot select")

    monkeypatch.setattr(counting, "compile_to_shared_object", fail)
    a = te.placeholder((8,), name="a")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] * 2.0, name="b")])
    rows = instruction_counts([func], get_device("xeon-cascadelake-2.5ghz@1"))
    assert np.isnan(rows).all() and "cannot select" in caplog.text
