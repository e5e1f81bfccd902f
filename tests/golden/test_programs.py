"""ASTs, encodings and predictions are what they were (``python -m tests.golden.make`` freezes them anew)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden import golden

#: CPUs round float32 sums differently.
RTOL = 1e-5


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
    for key, values in before.items():
        np.testing.assert_allclose(
            now[key], values, rtol=RTOL, atol=1e-5 * (name == "encodings"), err_msg=key
        )
