"""Detection: from /proc and /sys of many machines to a device, and what the machine at hand may not change."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdmpp.device import Device, DeviceTable, get_device, load_table
from cdmpp.device.table import ROOT_VARIABLE, detect_cpu, machine_facts
from tests.machines import MACHINES, write_machine

SHIPPED = load_table(this_machine=False)


def row_of(root: Path, name: str, **changes: Any) -> Device:
    """The CPU of a machine of ``machines.yaml``, some facts changed."""
    return detect_cpu(write_machine(root, {**MACHINES[name], **changes}))


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_machine_is_taken_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    facts = MACHINES[name]
    monkeypatch.setenv(ROOT_VARIABLE, str(write_machine(tmp_path, facts)))
    table = load_table()
    device = table.get("this-cpu@1")
    assert (device.base, device.target.get("mcpu", "")) == (facts["device"], facts["mcpu"])
    assert table.get("this-cpu").cores_used == machine_facts()["cores"] == facts["cores"]
    assert table.get(device.name) == device and get_device("this-cpu").base == device.base
    known = {row.name: row for row in SHIPPED.rows}
    if device.base in known:  # the row as it ships, and nothing of this machine in it
        assert device == known[device.base].used(1)
    here = {row.name: row for row in table.rows}  # no machine changes what ships
    assert {name: here[name] for name in known} == known and len(here) - len(known) <= 1


def test_machines_are_distinguished_by_what_they_are(tmp_path: Path) -> None:
    """Two machines have one name only where code, caches and clock are the same."""
    by_name: dict[str, Any] = {}
    for name in MACHINES:
        device = DeviceTable(SHIPPED.rows, row_of(tmp_path / name, name)).get("this-cpu@1")
        assert not by_name.setdefault(device.name, device).differences(device), name
    assert len(by_name) < len(MACHINES)  # the Zen 3 and the Zen 4 of two clouds


@pytest.mark.parametrize(("stepping", "arch"), [(4, "skylake-avx512"), (7, "cascadelake"), (11, "cooperlake")])
def test_the_stepping_decides_what_a_model_85_is(tmp_path: Path, stepping: int, arch: str) -> None:
    flags = ["v4", "avx512_vnni", "avx512_bf16"]
    row = row_of(tmp_path, "cascadelake-vm", stepping=stepping, flags=flags)
    assert row.arch == row.mcpu == arch


@pytest.mark.parametrize(("level", "bits"), [("v4", 512), ("v3", 256), ("v2", 128), ("sse2", 128)])
def test_what_a_hypervisor_hides_is_not_used(tmp_path: Path, level: str, bits: int) -> None:
    row = row_of(tmp_path, "cascadelake-vm", flags=[level])
    mcpu = "x86-64" + (f"-{level}" if level != "sse2" else "")
    assert (row.arch, row.mcpu, row.simd_bits) == ("cascadelake", mcpu, bits)
    assert row.name == f"xeon-cascadelake-2.5ghz-{mcpu}"
    assert row.fma == (bits > 128)


def test_facts_of_a_row(tmp_path: Path) -> None:
    row = row_of(tmp_path, "cascadelake-bare")
    assert row.clock_mhz == 2500  # by its name; the clock of the moment is 1000
    assert (row.cores, row.l1_kb, row.l2_kb, row.l3_kb, row.mem_gb) == (20, 32, 1024, 28160, 16)
    assert row.virtual is False and row.sources[0].startswith("detected")


@pytest.mark.parametrize(
    ("name", "lanes"),
    # Zen 4: 512-bit instructions on 256-bit data paths, one a cycle, or 256-bit ones, two; Zen 1: 256-bit ones on 128
    [("zen5-vm", 32), ("zen5-mobile", 16), ("zen6-masked", 16), ("zen4-vm", 16), ("zen4-masked", 16), ("hygon", 8),
     ("zen3-vm", 16), ("cascadelake-vm", 32)],
)  # fmt: skip
def test_peak_of_cores_with_narrow_data_paths(tmp_path: Path, name: str, lanes: int) -> None:
    row = row_of(tmp_path, name)
    device = row.used(1)
    assert device.lanes_per_core == lanes
    assert device.peak_gflops["float32"] == pytest.approx((row.clock_mhz or 0) / 1e3 * lanes * 2)
    # narrower instructions do not waste the half of the path that a wide one needs twice
    assert row.used(1, "x86-64-v2").lanes_per_core == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu fam",  # cut
        "processor\t: 0\nvendor_id\t: NoSuchVendor\ncpu family\t: 1\nmodel\t\t: 1\n",
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n",  # no model
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: x\nmodel\t\t: ?\ncpu MHz\t\t: fast\n",
        "\x00\xff not a cpuinfo : at all\n\n\n",
    ],
)
def test_a_cpuinfo_that_says_little_is_a_device_without_a_clock(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text, encoding="latin-1")
    row = detect_cpu(tmp_path, "x86_64")
    assert row.kind == "cpu" and row.cores == 1 and row.clock_mhz is None and row.l1_kb is None
    device = DeviceTable(SHIPPED.rows, row).get("this-cpu@1")
    assert device.base not in {known.name for known in SHIPPED.rows}
    assert device.target["mcpu"] == "x86-64"


def test_this_machine() -> None:
    device = get_device("this-cpu")
    assert device.kind == "cpu" and device.cores and device.cores_used
    assert device.name == f"{device.base}@{device.cores_used:.0f}"
    assert device.target["kind"] == "llvm" and device.target["num-cores"] == device.cores_used
    assert get_device(device.name) == device
    assert get_device(f"{device.base}@1").to_json() == get_device("this-cpu@1").to_json()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with LLVM's names of x86 CPUs")
def test_this_machine_is_what_llvm_takes_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host, TVM's LLVM and the flags must allow the code that we compile for it."""
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    code = (
        "from cdmpp.program import import_tvm; tvm = import_tvm(); "
        "f = tvm.get_global_func('target.llvm_get_system_cpu'); print(f())"
    )
    host = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert detect_cpu().mcpu == host.stdout.strip() or detect_cpu().mcpu.startswith("x86-64")
