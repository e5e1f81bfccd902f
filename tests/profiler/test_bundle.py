"""Bundles: what is written is what is read, and what is no bundle is refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.errors import BundleError
from cdmpp.profiler.bundle import read_bundle, write_bundle
from cdmpp.profiler.cuda_check import summarise_outputs
from tests.samples.gpu import toy_bundle


def test_a_bundle_reads_back_as_written(tmp_path: Path) -> None:
    bundle = toy_bundle(
        programs=7, tasks=2, blocks=(1, 300), statuses={3: "invalid_config", 5: "build_timeout"}
    )
    write_bundle(tmp_path / "x.bundle", bundle)
    back = read_bundle(tmp_path / "x.bundle")
    assert (back.device, back.arch) == ("h200", "sm_90")
    assert dict(back.tasks) == dict(bundle.tasks)
    assert dict(back.spaces) == dict(bundle.spaces)
    assert dict(back.programs) == dict(bundle.programs)
    assert list(back.kernels) == list(bundle.kernels)
    assert back.kernels[0].cuda is not None
    assert back.kernels[0].cuda.launches[0].shape.grid == (1, 1, 1)
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


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    with pytest.raises(BundleError, match="does not exist"):
        read_bundle(path)
    path.write_bytes(b"something else")
    with pytest.raises(BundleError, match="no bundle"):
        read_bundle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(BundleError, match="no bundle"):
        read_bundle(path)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path, toy_bundle(programs=50))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        read_bundle(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path, toy_bundle())
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    note = json.loads(members["bundle.json"])
    members["bundle.json"] = json.dumps({**note, "bundle_version": 99}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(BundleError, match="99"):
        read_bundle(path)


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot write"):
        write_bundle(tmp_path / "file" / "x.bundle", toy_bundle())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
