"""Which device a label is of: stored with the dataset, the same on every machine, never two under one name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cdmpp.dataset import Dataset, load_datasets
from cdmpp.device import Device, load_table
from cdmpp.device.table import ROOT_VARIABLE
from cdmpp.errors import DatasetError
from tests.machines import FIVE, MACHINES, write_machine
from tests.samples.datasets import DEVICE, OTHER_DEVICE, add_all, record

TABLE = load_table(this_machine=False)
ZEN4 = TABLE.get("epyc-zen4-2.6ghz@1")
#: A machine that is in no table.
OWN = replace(ZEN4, name="my-cpu@1", base="my-cpu")


def folder(path: Path, *devices: Device, stored: bool = True) -> Path:
    """A dataset with a record of each device; without their specifications unless `stored`."""
    with Dataset.create(path) as dataset:
        add_all(dataset, 0)
        for device in devices:
            dataset.add_record(record(0, device=device.name))
        if stored:
            dataset.update_meta(devices={device.name: device.to_json() for device in devices})
        dataset.finalize()
    return path


@pytest.mark.parametrize("machine", FIVE)
def test_the_stored_specification_is_used_on_any_machine(tmp_path, monkeypatch, machine: str) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(write_machine(tmp_path / "root", MACHINES[machine])))
    assert load_datasets(folder(tmp_path / "d", ZEN4, OWN)).devices == {ZEN4.name: ZEN4, OWN.name: OWN}


def test_a_device_without_a_stored_specification_is_that_of_the_table(tmp_path: Path) -> None:
    assert Dataset.open(folder(tmp_path / "d", ZEN4, stored=False)).devices == {ZEN4.name: ZEN4}


@pytest.mark.parametrize(("devices", "stored", "message"), [
    ([OWN], False, r"a/meta\.json does not describe my-cpu@1"),
    # what a cdmpp of before stored: a Zen 3 under the name of the table's Zen 4
    ([replace(ZEN4, arch="zen3", simd_bits=256, l2_kb=512.0)], True,
     r"/a and in the device table: arch zen3 / zen4, simd_bits 256 / 512"),
    # both datasets and the facts
    ([OWN, replace(OWN, clock_mhz=3000.0, l3_kb=1.0)], True, r"my-cpu@1 .*/a and in .*/b: clock_mhz 2600.0 / 3000.0$"),
])  # fmt: skip
def test_devices_unknown_or_different_are_refused(tmp_path: Path, devices: list[Device], stored: bool, message: str) -> None:
    paths = [folder(tmp_path / name, device, stored=stored) for name, device in zip("ab", devices, strict=False)]
    with pytest.raises(DatasetError, match=message):
        _ = load_datasets(paths).devices


def test_what_hypervisors_vary_is_no_difference(tmp_path: Path) -> None:
    other = replace(OWN, clock_mhz=2595.1, l3_kb=16384.0, cores=8, mem_gb=4.0, model="Another name")
    devices = load_datasets([folder(tmp_path / "a", OWN), folder(tmp_path / "b", other)]).devices
    assert devices == {OWN.name: OWN}


def test_a_dataset_is_of_one_device(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d") as dataset:
        dataset.set_device(OWN)
        dataset.set_device(replace(OWN, l3_kb=1.0))  # the same machine on another day
        with pytest.raises(DatasetError, match="holds labels of my-cpu@1: choose another folder for those of epyc"):
            dataset.set_device(ZEN4)
        with pytest.raises(DatasetError, match=r"my-cpu@1 is not the same device .*: arch zen5 / zen4"):
            dataset.set_device(replace(OWN, arch="zen5"))
        assert dataset.devices[OWN.name].l3_kb == 1.0
    old = Dataset.open(folder(tmp_path / "old", TABLE.get(DEVICE), stored=False))
    with old, pytest.raises(DatasetError, match=f"holds labels of {DEVICE}"):
        old.set_device(TABLE.get(OTHER_DEVICE))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"devices": ["my-cpu@1"]}, "expected a specification for each name"),
        ({"devices": {"my-cpu@1": {"arch": "zen4"}}}, "device my-cpu@1 is incomplete"),
        ({"devices": {"my-cpu@1": {"kind": "cpu", "clock_mhz": [2]}}}, r"wrong: its clock_mhz is \[2\]"),
        ({"devices": {}}, "does not describe my-cpu@1"),
    ],
)
def test_a_damaged_description_is_named(tmp_path: Path, meta: dict[str, object], message: str) -> None:
    path = folder(tmp_path / "d", OWN)
    stored = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**stored, **meta}))
    with pytest.raises(DatasetError, match=message) as caught:
        _ = Dataset.open(path).devices
    assert "\n" not in str(caught.value)
