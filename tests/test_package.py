"""Importing the package is cheap, and its core needs no TVM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cdmpp

_CORE = (
    "cdmpp", "cdmpp.cli", "cdmpp.dataset", "cdmpp.dataset.split", "cdmpp.device", "cdmpp.predictor",
    "cdmpp.predictor.training", "cdmpp.predictor.trainer", "cdmpp.program.ast", "cdmpp.program.ast.store",
    "cdmpp.program.types", "cdmpp.predictor.metrics",
)  # fmt: skip


def _modules_after(code: str) -> set[str]:
    code += "\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_loads_nothing_heavy_and_the_core_no_tvm() -> None:
    loaded = _modules_after("import cdmpp")
    assert not loaded & {"torch", "tvm", "tvm_ffi", "pandas", "sklearn", "numpy", "rich", "xgboost"}
    code = "import sys; sys.modules['tvm'] = sys.modules['tvm_ffi'] = None\n"
    loaded = _modules_after(code + "\n".join(f"import {name}" for name in _CORE))
    assert "cdmpp.predictor.training" in loaded
    assert not [name for name in loaded if name.startswith("tvm.")]


def test_every_public_name_resolves() -> None:
    for name in cdmpp.__all__:
        assert getattr(cdmpp, name) is not None
    assert not hasattr(cdmpp, "no_such_name") and {"endtoend", "predictor", "tuner"} < {*cdmpp.__all__}


def test_an_error_names_a_file_once(tmp_path: Path) -> None:
    from cdmpp.errors import ProgramError
    from cdmpp.predictor.predictor import predict_program_file

    with pytest.raises(ProgramError) as error:
        predict_program_file(cdmpp.Predictor.default(), tmp_path / "none.json", "t4")
    assert str(error.value) == f"cannot read {tmp_path / 'none.json'}: No such file or directory"
