"""Bundles: what is written is what is read, and what is no bundle is refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.errors import BundleError
from cdmpp.profiler.arguments import summarise_outputs
from cdmpp.profiler.gpu.bundle import read_bundle, write_bundle
from tests.samples.gpu import toy_bundle


def test_a_bundle_reads_back_as_written(tmp_path: Path) -> None:
    bundle = toy_bundle(programs=7, tasks=2, blocks=(1, 300), statuses={3: "invalid_config", 5: "build_timeout"})
    write_bundle(tmp_path / "x.bundle", bundle)
    back = read_bundle(tmp_path / "x.bundle")
    assert (back.device, back.arch) == ("h200", "sm_90")
    assert replace(back, note={}, references={}) == replace(bundle, note={}, references={})
    assert back.kernels[0].cuda is not None
    assert back.kernels[0].cuda.launches[0].grid == (1, 1, 1)
    for task, reference in bundle.references.items():
        assert back.references[task].seed == reference.seed
        assert back.references[task].means == reference.means
        np.testing.assert_array_equal(back.references[task].outputs[1], reference.outputs[1])


def test_references_may_hold_nan_and_infinity(tmp_path: Path) -> None:
    bundle = toy_bundle(programs=1, tasks=1)
    odd = summarise_outputs("0" * 16, 1, {1: np.array([np.nan, np.inf, 1.0])})
    write_bundle(tmp_path / "x.bundle", replace(bundle, references={odd.task: odd}))
    back = read_bundle(tmp_path / "x.bundle").references[odd.task]
    np.testing.assert_array_equal(back.outputs[1], odd.outputs[1])
    assert np.isnan(back.means[1])


def test_programs_that_share_most_of_their_code_take_little_room(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle", toy_bundle(programs=2000, tasks=4))
    assert (tmp_path / "x.bundle").stat().st_size < 2000 * 60


def zipped(path: Path, members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path.read_bytes()


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    with pytest.raises(BundleError, match="does not exist"):
        read_bundle(path)
    write_bundle(path, toy_bundle(programs=50))
    flipped = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    flipped[len(flipped) // 2] ^= 0xFF
    note = json.dumps({**json.loads(members["bundle.json"]), "bundle_version": 99}).encode()
    for content, message in (
        (b"something else", "no bundle"),
        (zipped(path, {"other.txt": b""}), "no bundle"),
        (bytes(flipped), "damaged"),
        (zipped(path, {**members, "bundle.json": note}), "99"),
    ):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=message):
            read_bundle(path)


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot write"):
        write_bundle(tmp_path / "file" / "x.bundle", toy_bundle())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
