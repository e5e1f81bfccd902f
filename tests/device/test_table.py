"""Names, shares, restrictions, users' own devices, and what a predictor sees of a device."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.device.table import missing_fields, read_device_file, row_from_mapping
from cdmpp.errors import UnknownDeviceError
from cdmpp.files import read_yaml
from tests.samples.command import Command

from cdmpp.device import (  # isort: skip
    DEVICE_FEATURES, GENERAL_DEVICE_FEATURES, Device, DeviceTable, add_device_file, device_features, get_device, known_devices,
    load_table,
)  # fmt: skip

HERE = Device(
    "xeon-cascadelake-2.5ghz", "cpu", vendor="intel", model="Intel(R) Xeon(R) Processor @ 2.50GHz", mcpu="cascadelake",
    clock_mhz=2500, cores=2, simd_bits=512, fma=True, virtual=True, sources=("detected",),
)  # fmt: skip
SHIPPED = load_table(this_machine=False).rows
TABLE = DeviceTable(SHIPPED, HERE)

CASES: dict[str, Any] = read_yaml(Path(__file__).with_name("cases.yaml"))


@pytest.mark.parametrize(("name", "canonical"), CASES["names"].items())
def test_canonical_names(name: str, canonical: str) -> None:
    device = TABLE.get(name)
    assert device.name == canonical
    assert TABLE.get(canonical) == device


@pytest.mark.parametrize(("name", "message"), CASES["unknown"].items())
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(UnknownDeviceError, match=message):
        TABLE.get(name)


@pytest.mark.parametrize("row", [row for row in TABLE.rows if row.kind == "gpu"], ids=lambda row: row.name)
def test_every_gpu_is_found_as_its_makers_and_authors_write_it(row: Device) -> None:
    for name in (row.name, row.model, *row.aliases):
        if row.mem_gb is not None and "gb" not in name.lower():
            assert TABLE.find(f"{name} {row.mem_gb:g}GB") == TABLE.find(f"{name}-{row.mem_gb:g}g") == row, name
        for text in (name, f"{row.vendor}{name}", f"{row.vendor.upper()} {name}"):
            for old, new in (("", ""), (" ", "_"), (" ", ""), ("-", " "), ("-", ""), ("-", "_")):
                assert TABLE.find(text.replace(old, new)) == row, text.replace(old, new)


@pytest.mark.parametrize(("name", "found"), [
    ("V100-32GB", "v100-pcie-32gb"), ("H100-SXM5-80GB", "h100-sxm"), ("a100_pcie", "a100-pcie-40gb"), ("l40s_pcie", "l40s"),
    ("AMD Instinct MI300X OAM", "mi300x"), ("gfx90a:sramecc+:xnack-", "mi210"), ("7900XTX", "rx-7900-xtx"),
    ("v100_sxm", "v100-sxm2-16gb"), ("GB200 NVL72", "gb200"), ("gb300_nvl72", "gb300"), ("A100-SXM", "a100-sxm4-80gb"),
    ("a100_sxm4", "a100-sxm4-80gb"), ("NVIDIA A100-SXM4", "a100-sxm4-80gb"), ("a100_sxm_40gb", "a100-sxm4-40gb"),
    ("NVIDIA A100 Tensor Core GPU", "a100-pcie-40gb"), ("AMD Instinct MI300X VF", "mi300x"), ("H800 PCIe", None),
    ("T4 80GB", None), ("A100-SXM-16GB", None), ("A100-SXM4-32GB", None), ("6000", None), ("A800-SXM", "a800"),
])  # fmt: skip
def test_form_memory_and_line_may_be_left_out_but_not_wrong(name: str, found: str | None) -> None:
    row = TABLE.find(name)
    assert (None if row is None else row.name) == found


@given(st.text(max_size=30))
def test_any_text_resolves_or_is_refused_in_one_line(name: str) -> None:
    try:
        TABLE.get(name)
    except UnknownDeviceError as error:
        assert "\n" not in str(error)


def test_a_cpu_share_and_a_restriction_change_what_they_should() -> None:
    one, two, narrow = (TABLE.get(f"this-cpu{suffix}") for suffix in ("@1", "@2", ".x86-64-v2@1"))
    # 2.5 GHz x 16 lanes x 2 pipes x 2 (multiply and add)
    assert one.peak_gflops == pytest.approx({"float32": 172.8, "float64": 86.4})
    assert two.peak_gflops["float32"] == pytest.approx(345.6)
    # 128-bit, and no fused multiply-add below v3: 2.7 GHz x 4 lanes x 2 pipes
    assert narrow.peak_gflops["float32"] == pytest.approx(21.6)
    assert (narrow.simd_bits, narrow.fma, narrow.isa) == (128, False, "x86-64-v2")
    assert one.target == {"kind": "llvm", "mcpu": "cascadelake", "num-cores": 1}
    assert two.target["num-cores"] == 2
    assert narrow.target == {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    assert one.model == narrow.model == HERE.model and one.base == narrow.base
    assert (one.share_fraction, two.share_fraction) == (0.5, 1.0)
    # a larger machine with this CPU can be spoken of
    assert TABLE.get("xeon-cascadelake-2.5ghz@8").peak_gflops["float32"] == pytest.approx(1382.4)


def test_a_gpu_share_scales_compute_and_keeps_memory() -> None:
    whole, half = TABLE.get("h200"), TABLE.get("h200@0.5")
    assert (whole.cores, whole.cores_used, half.cores_used) == (132, 132, 66)
    assert half.peak_gflops["float32"] == whole.peak_gflops["float32"] / 2
    assert half.bandwidth_gb_s == whole.bandwidth_gb_s == 4800
    limits = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}
    assert whole.target == {"kind": "cuda", "arch": "sm_90", **limits}
    assert TABLE.get("mi210").target["kind"] == "rocm"
    assert TABLE.get("graviton2@1").target["mtriple"] == "aarch64-linux-gnu"


def test_shipped_rows_are_sourced_and_plausible() -> None:
    devices = known_devices(load_table(this_machine=False))
    assert len(devices) >= 80 and len({device.name for device in devices}) == len(devices)
    for device in devices:
        assert device.sources and all(device.sources), device.name
        assert device.model and device.vendor and device.arch and device.target, device.name
        assert device.cores and device.clock_mhz and 500 <= device.clock_mhz <= 6000 and device.lanes_per_core
        peak = device.peak_gflops["float32"]
        # stated peaks agree with lanes x clock; NVIDIA rounds, and quotes some at another clock
        computed = (2 if device.fma else 1) * device.cores * device.lanes_per_core * device.working_mhz / 1e3
        assert peak == pytest.approx(computed, rel=0.05), device.name
        for dtype in ("float16_matrix", "tfloat32_matrix", "float32_matrix"):
            assert device.peak_gflops.get(dtype, math.inf) >= peak, device.name
        if device.kind == "gpu":
            assert device.bandwidth_gb_s and 100 < device.bandwidth_gb_s < 10000, device.name
            assert device.mem_gb and device.max_threads_per_core != 0, device.name
            assert device.warp_size in (32, 64) or device.vendor == "intel", device.name
    assert {device.arch for device in devices} >= {
        "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna1", "cdna2",
        "cdna3", "rdna2", "rdna3", "xe-hpg", "xe-hpc", "cascadelake", "sapphirerapids",
    }  # fmt: skip


def test_known_answers_of_the_table() -> None:
    v100, a100, mi100 = get_device("v100"), get_device("a100"), get_device("mi100")
    assert (v100.cores, v100.bandwidth_gb_s, v100.l2_kb, v100.mem_gb) == (80, 900, 6144, 32)
    assert (a100.cores, a100.clock_mhz, a100.bandwidth_gb_s) == (108, 1410, 1555)
    assert a100.peak_gflops["tfloat32_matrix"] == 156000
    assert (mi100.cores, mi100.peak_gflops["float32_matrix"], mi100.warp_size) == (120, 46100, 64)


MY_GPU = "{name: my-gpu, kind: gpu, aliases: [My GPU 9000], cores: 10, lanes_per_core: 64, clock_mhz: 1000}"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has added no device."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CDMPP_DEVICES", raising=False)


@pytest.mark.usefixtures("own_config")
def test_a_user_adds_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "mine.yaml", f"- {MY_GPU}\n- {{name: h200, kind: gpu, launch_overhead_us: 3.5}}\n")
    with pytest.raises(UnknownDeviceError):
        get_device("my-gpu")
    monkeypatch.setenv("CDMPP_DEVICES", str(file))
    assert get_device("My GPU 9000@0.5").peak_gflops["float32"] == pytest.approx(640)
    # a row of a known name changes the fields that it gives
    assert get_device("h200").launch_overhead_us == 3.5 and get_device("h200").cores == 132
    monkeypatch.delenv("CDMPP_DEVICES")
    assert get_device("my-gpu", load_table([file])).cores == 10
    assert add_device_file(file) == ["my-gpu", "h200"]
    assert get_device("my-gpu").cores == 10 and get_device("NVIDIA H200").launch_overhead_us == 3.5
    add_device_file(write(tmp_path / "more.yaml", "{name: my-gpu, kind: gpu, cores: 12, mem_gb: 4}"))
    assert get_device("my-gpu").cores == 12 and get_device("my-gpu").clock_mhz == 1000
    assert "my-gpu" in [device.name for device in known_devices()]


def test_a_device_of_which_little_is_known_still_has_features() -> None:
    device = row_from_mapping({"name": "bare", "kind": "gpu"}).used()
    vector = features(device)
    assert vector["is_gpu"] == 1 and vector["share_fraction"] == 1
    assert math.isnan(vector["bandwidth_gb_s"]) and math.isnan(vector["peak_float32_gflops"])
    assert device.target == {}
    bare_cpu = row_from_mapping({"name": "bare-cpu", "kind": "cpu"})
    with pytest.raises(UnknownDeviceError, match="say how many, as bare-cpu@1"):
        bare_cpu.used()
    assert bare_cpu.used(4).share_fraction is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *CASES["wrong_rows"].items(),
        (f"{{name: x, kind: gpu, cores: {'1' * 400}}}", "x: cores is 111"),
        *((f"{{name: x, kind: {kind}, {field}: {value}}}", f"x: {field} is {re.escape(f'{value:g}')}, expected .*off by 1000")
          for kind, field, value in CASES["off_by_1000"]),
        *((f"{{kind: gpu, {text}}}", f"{message}.*off by 1000") for text, message in CASES["unbalanced"].items()),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "wrong.yaml", text)
    with pytest.raises(UnknownDeviceError, match=message) as caught:
        load_table([file])
    assert "\n" not in str(caught.value) and ("wrong.yaml" in str(caught.value) or "h200" in text)
    with pytest.raises(UnknownDeviceError, match=r"none\.yaml"):
        read_device_file(tmp_path / "none.yaml")


def features(device: Device) -> dict[str, float]:
    vector = device_features(device)
    assert vector.dtype == np.float32 and vector.shape == (len(DEVICE_FEATURES),)
    return dict(zip(DEVICE_FEATURES, vector.tolist(), strict=True))


def test_features_are_raw_and_distinguish_devices() -> None:
    names = ("this-cpu@1", "this-cpu@2", "this-cpu.x86-64-v2@1", "h200", "h200@0.5")
    found = {name: features(TABLE.get(name)) for name in names}
    assert 20 <= len(DEVICE_FEATURES) == len(set(DEVICE_FEATURES)) <= 30
    assert set(DEVICE_FEATURES) > GENERAL_DEVICE_FEATURES
    for name, values in found.items():
        assert values["is_cpu"] + values["is_gpu"] == 1
        assert values["clock_mhz"] == TABLE.get(name).working_mhz
        assert all(value >= 0 or math.isnan(value) for value in values.values())
    assert len({str(values) for values in found.values()}) == len(names)
    h200 = {"bytes_per_flop": 4800 / 66900, "peak_matrix_gflops": 1978900, "compute_capability": 9.0}
    assert {name: found["h200"][name] for name in h200} == pytest.approx(h200)


@pytest.mark.parametrize(("name", "expected"), CASES["makers"].items())
def test_features_of_who_made_a_gpu_and_of_what_generation(name: str, expected: list[float]) -> None:
    found = features(TABLE.get(name))
    names = ("is_nvidia", "is_amd", "compute_capability", "volta_or_later")
    assert [found[n] for n in names] == pytest.approx(expected, nan_ok=True)


def test_a_device_goes_through_json() -> None:
    for device in (TABLE.get("this-cpu@1"), TABLE.get("h200@0.5")):
        text = json.dumps(device.to_json(), allow_nan=False)
        assert Device.from_json(json.loads(text)) == device
        later: dict[str, Any] = {**json.loads(text), "a_field_of_a_later_version": 1}
        assert Device.from_json(later) == device


def test_a_row_says_what_it_lacks() -> None:
    lacking = {row.name: missing_fields(row) for row in SHIPPED if row.kind == "gpu" and missing_fields(row)}
    assert not {"a100-pcie-40gb", "rtx-5090", "b200"} & set(lacking)
    bare = row_from_mapping({"name": "bare", "kind": "gpu", "cores": 10})
    assert missing_fields(bare) == (
        "clock_mhz", "lanes_per_core", "l1_kb", "l2_kb", "shared_kb", "registers_per_core", "warp_size",
        "max_threads_per_core", "mem_gb", "bandwidth_gb_s", "peak_gflops.float32",
    )  # fmt: skip


@pytest.mark.usefixtures("own_config")
def test_the_command_line_shows_and_adds_devices(tmp_path: Path, command: Command) -> None:
    file = write(tmp_path / "mine.yaml", MY_GPU)
    found = command.json("devices", "--devices", file)
    assert "my-gpu: unknown: l1_kb, l2_kb" in command.out
    assert "my-gpu" in [device["name"] for device in found["devices"]]
    assert "bandwidth_gb_s" in found["missing"]["my-gpu"] and found["added"] == []
    with pytest.raises(UnknownDeviceError):
        get_device("my-gpu")
    assert "my-gpu added to" in command("devices", "--add", file) and get_device("my-gpu").cores == 10
    wrong = write(tmp_path / "wrong.yaml", "{name: my-gpu, kind: gpu, clock_mhz: 1}")
    assert "my-gpu: clock_mhz is 1" in command.error("devices", "--add", wrong)


def test_a_short_name_that_several_devices_have_leaves_them_open() -> None:
    table = load_table()
    assert table.variants("NVIDIA H100@0.5") == ["h100-pcie", "h100-sxm"] and len(table.variants("A100")) == 4
    assert not any(map(table.variants, ("A100-SXM4-80GB", "a100-80gb", "t4", "h200", "epyc-zen4-2.6ghz@1", "unheard")))


def test_programs_see_the_measured_clock_else_the_highest_else_the_nominal_one() -> None:
    nominal = replace(TABLE.get("xeon-cascadelake-2.5ghz"), measured={}, peak_gflops={})
    highest = replace(nominal, boost_mhz=3100.0)
    measured = replace(highest, measured={"clock_ghz": 2.9})
    clocks = (2500.0, 3100.0, 2900.0)
    assert tuple(device.working_mhz for device in (nominal, highest, measured)) == clocks
    assert [device.used(1).peak_gflops["float32"] for device in (nominal, highest, measured)] == [
        pytest.approx(0.064 * mhz) for mhz in clocks
    ]
