"""ASTs, encodings, predictions and instruction counts are what they were (``python -m tests.golden.make`` freezes anew)."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.golden import golden

#: CPUs round float32 sums differently.
RTOL = 1e-5
#: Programs that `make test` compiles: those of the least code.
FEW = 8


@cache
def frozen(name: str) -> golden.Arrays:
    with np.load(golden.HERE / f"{name}.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "library"])
def test_asts(kind: str) -> None:
    """Of CPU and CUDA programs, library operators and kernels: to the bit, column by column."""
    stored, hashes = golden.stored_asts(), golden.programs(kind)
    assert len(hashes) > 40
    differing: dict[str, list[str]] = {}
    for program, ast in golden.fresh_asts(hashes).items():
        before = stored[program]
        assert (ast.n_nodes, ast.positions.tolist()) == (before.n_nodes, before.positions.tolist()), program
        for column in np.flatnonzero((ast.leaves != before.leaves).any(axis=0)):
            differing.setdefault(golden.LEAF_FEATURES[column], []).append(program)
    assert not differing


@pytest.mark.parametrize("name", ["encodings", "predictions"])
def test_what_the_weights_that_ship_make_of_them(name: str) -> None:
    before = frozen(name)
    now = golden.predictions() if name == "predictions" else golden.encodings()
    assert now.keys() == before.keys()
    atol = RTOL * (name == "encodings")
    for key, values in before.items():
        np.testing.assert_allclose(now[key], values, rtol=RTOL, atol=atol, err_msg=key)


def expect_counts(now: golden.Arrays, before: golden.Arrays) -> None:
    """To the last digit; names the columns that differ in each row."""
    columns = frozen("counts")["columns"]
    assert tuple(columns) == golden.CODEGEN_FEATURES and now.keys() == before.keys()
    differing = {key: columns[now[key] != before[key]].tolist() for key in before}
    assert {key: names for key, names in differing.items() if names} == {}


def test_counts_of_stored_objects() -> None:
    row = {program: number for number, program in enumerate(frozen("counts")["programs"])}
    now = golden.count_objects()
    assert len(now) > 25
    parts = {name: name.removesuffix(".so").split("-", 1) for name in now}
    expect_counts(now, {name: frozen("counts")[mcpu][row[program]] for name, (program, mcpu) in parts.items()})


@pytest.mark.parametrize("mcpu", golden.TARGETS)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.check)])
def test_counts_of_programs_compiled_here(few: bool, mcpu: str) -> None:
    before = frozen("counts")
    size = before["znver3"][:, golden.CODEGEN_FEATURES.index("program_all")]
    rows = np.sort(np.argsort(size, kind="stable")[: FEW if few else None])
    hashes = before["programs"][rows].tolist()
    now = golden.compile_and_count(hashes, mcpu)
    expect_counts(dict(zip(hashes, now, strict=True)), dict(zip(hashes, before[mcpu][rows], strict=True)))
