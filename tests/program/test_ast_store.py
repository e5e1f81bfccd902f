"""Stored compact ASTs: round trip, refusal of other features, damage."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import DatasetError, FeatureMismatchError
from cdmpp.program.ast import LEAF_FEATURES, CompactAST, store
from cdmpp.program.ast.store import load_asts, save_asts


def make(leaves: int, seed: int) -> CompactAST:
    """An AST of random numbers."""
    rng = np.random.default_rng(seed)
    values = rng.lognormal(3, 5, (leaves, len(LEAF_FEATURES))).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = 0
    positions = np.sort(rng.choice(np.arange(1, 10 * leaves + 1), leaves, replace=False)).astype(np.int32)
    return CompactAST(values, positions, int(positions[-1]) + 1)


def assert_same(a: dict[str, CompactAST], b: dict[str, CompactAST]) -> None:
    assert a.keys() == b.keys()
    for program, tree in a.items():
        np.testing.assert_array_equal(tree.leaves, b[program].leaves)
        np.testing.assert_array_equal(tree.positions, b[program].positions)
        assert tree.n_nodes == b[program].n_nodes
        assert (b[program].leaves.dtype, b[program].positions.dtype) == (np.float32, np.int32)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 1000))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    asts = {f"{i * 7919 + seed:016x}": make(n, seed + i) for i, n in enumerate(sizes)}
    path = tmp_path_factory.mktemp("asts") / "asts.parquet"
    save_asts(path, asts)
    assert_same(asts, load_asts(path))


def test_like_programs_take_little_room(tmp_path: Path) -> None:
    asts = {f"{i:016x}": make(4, 0) for i in range(200)}
    for i, tree in enumerate(asts.values()):
        tree.leaves[:, i % 40] *= 2.0 ** (i % 7)
    save_asts(tmp_path / "asts.parquet", asts)
    assert (tmp_path / "asts.parquet").stat().st_size < 40 * 4 * 200


def test_other_features_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "asts.parquet"
    wrong = CompactAST(np.zeros((1, 3), np.float32), np.ones(1, np.int32), 2)
    with pytest.raises(FeatureMismatchError, match="a1"):
        save_asts(path, {"a1": wrong})
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(store, "FEATURE_SET", "ast0-deadbeef")
        save_asts(path, {"a": make(2, 0)})
    with pytest.raises(FeatureMismatchError, match="ast0-deadbeef"):
        load_asts(path)


def test_missing_foreign_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "asts.parquet"
    with pytest.raises(DatasetError, match=r"asts\.parquet"):
        load_asts(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DatasetError, match="holds no compact ASTs"):
        load_asts(path)
    save_asts(path, {f"{i}": make(3, i) for i in range(50)})
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    for damaged in (content[: len(content) // 2], flipped):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"asts\.parquet"):
            load_asts(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "asts.parquet", {"a": make(2, 1)}
    save_asts(path, old)
    with monkeypatch.context() as patch, pytest.raises(DatasetError, match="No space left"):
        patch.setattr(pq, "write_table", Mock(side_effect=OSError(28, "No space left on device")))
        save_asts(path, {"b": make(2, 2)})
    assert_same(old, load_asts(path))
    assert [p.name for p in tmp_path.iterdir()] == ["asts.parquet"]
