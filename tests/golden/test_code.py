"""Instructions of compiled programs are counted as they were (``python -m tests.golden.make counts`` freezes anew)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden import golden

#: Programs that `make test` compiles: those of the least code.
FEW = 8


@pytest.fixture(scope="module")
def frozen() -> golden.Arrays:
    with np.load(golden.HERE / "counts.npz") as stored:
        return dict(stored)


def expect_equal(now: golden.Arrays, before: golden.Arrays, columns: np.ndarray) -> None:
    """To the last digit; names the columns that differ in each row."""
    assert tuple(columns) == golden.CODEGEN_FEATURES
    assert now.keys() == before.keys()
    differing = {key: columns[now[key] != before[key]].tolist() for key in before}
    assert {key: names for key, names in differing.items() if names} == {}


def test_counts_of_stored_objects(frozen: golden.Arrays) -> None:
    row = {program: number for number, program in enumerate(frozen["programs"])}
    now = golden.count_objects()
    assert len(now) > 25
    parts = {name: name.removesuffix(".so").split("-", 1) for name in now}
    expect_equal(now, {name: frozen[mcpu][row[p]] for name, (p, mcpu) in parts.items()}, frozen["columns"])


def expect_compiled(frozen: golden.Arrays, mcpu: str, rows: np.ndarray) -> None:
    hashes = frozen["programs"][rows].tolist()
    now = golden.compile_and_count(hashes, mcpu)
    expect_equal(
        dict(zip(hashes, now, strict=True)),
        dict(zip(hashes, frozen[mcpu][rows], strict=True)),
        frozen["columns"],
    )


@pytest.mark.parametrize("mcpu", golden.TARGETS)
def test_counts_of_small_programs_compiled_here(frozen: golden.Arrays, mcpu: str) -> None:
    size = frozen[golden.TARGETS[0]][:, golden.CODEGEN_FEATURES.index("program_all")]
    expect_compiled(frozen, mcpu, np.sort(np.argsort(size, kind="stable")[:FEW]))


@pytest.mark.check
@pytest.mark.parametrize("mcpu", golden.TARGETS)
def test_counts_of_all_programs_compiled_here(frozen: golden.Arrays, mcpu: str) -> None:
    expect_compiled(frozen, mcpu, np.arange(len(frozen["programs"])))
