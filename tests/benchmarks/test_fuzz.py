"""Damaged and hostile files: a short form of the fuzzing, and a pickle in every place that is loaded."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.fuzz import KINDS, make_input, read
from cdmpp.errors import BundleError, UnknownDeviceError
from cdmpp.files import read_text
from cdmpp.profiler.gpu.bundle import read_bundle
from cdmpp.profiler.machine import make_work_folder
from tests.samples.pickles import pickle_that_touches

#: Of those that are not read in a millisecond.
INPUTS = {"predictor": 6, "operator list (CSV)": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_and_pickles_are_accepted_or_refused_in_one_line_and_run_nothing(kind: str, tmp_path) -> None:
    """Each file of the kind in turn; parquet also with the metadata by which old versions of Arrow unpickled a type."""
    canary, bomb = tmp_path / "canary", pickle_that_touches(tmp_path / "canary")
    (tmp_path / "sample").mkdir()
    sample = KINDS[kind][0](tmp_path / "sample")
    assert read(kind, sample, canary) == "accepted"
    for number in range(INPUTS.get(kind, 15)):
        path = make_input(sample, tmp_path / "input", random.Random(f"test {number}"), canary)
        assert read(kind, path, canary) in ("accepted", "refused"), f"input {number}"
    for file in [sample] if sample.is_file() else sorted(p for p in sample.rglob("*") if p.is_file()):
        kept = file.read_bytes()
        file.write_bytes(bomb)
        assert read(kind, sample, canary) in ("accepted", "refused"), file.name
        if file.suffix == ".parquet":
            metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": bomb}
            table = pq.read_table(pa.BufferReader(kept))
            own = [field.with_metadata(metadata) for field in table.schema]
            pq.write_table(table.cast(pa.schema(own, table.schema.metadata)), file)
            assert read(kind, sample, canary) in ("accepted", "refused"), file.name
        file.write_bytes(kept)
    assert not canary.exists()


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "devices.yaml").open("wb") as file:
        file.truncate(1 << 30)  # takes no space
    with pytest.raises(ValueError, match="1073741824 bytes, expected 268435456 at most"):
        read_text(tmp_path / "devices.yaml")
    with pytest.raises(UnknownDeviceError, match="bytes, expected"):
        KINDS["device YAML"][1](tmp_path / "devices.yaml")
    sample = KINDS["bundle"][0](tmp_path)
    with zipfile.ZipFile(sample) as archive, zipfile.ZipFile(tmp_path / "b", "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in archive.namelist():
            deflated.writestr(name, archive.read(name))
    with pytest.raises(BundleError, match="its parts are compressed"):
        read_bundle(tmp_path / "b")


def test_shared_objects_lie_where_only_their_owner_can_enter(tmp_path: Path) -> None:
    assert make_work_folder(tmp_path).stat().st_mode & 0o077 == 0
