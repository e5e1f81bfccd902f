"""Detection: from /proc and /sys of several machines to a row of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdmpp.device import detect, get_device
from cdmpp.device.build import build_device
from cdmpp.device.detect import cpu_row, read_cpu_facts

V2 = "sse4_2 ssse3 popcnt cx16"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def machine(
    root: Path,
    vendor: str,
    name: str,
    family: int,
    model: int,
    stepping: int,
    flags: str,
    cpus: int = 4,
    threads: int = 2,
    mhz: float = 2100.0,
) -> Path:
    """A /proc and /sys of an x86 machine."""
    blocks = []
    for cpu in range(cpus):
        blocks.append(
            f"processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
            f"model name\t: {name}\nstepping\t: {stepping}\ncpu MHz\t\t: {mhz}\nphysical id\t: 0\n"
            f"core id\t\t: {cpu // threads}\nflags\t\t: {flags}\n"
        )
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text("\n".join(blocks))
    (root / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1M"), (3, "Unified", "36608K")]
    ):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(f"{level}\n")
        (folder / "type").write_text(f"{kind}\n")
        (folder / "size").write_text(f"{size}\n")
    return root


XEON = "Intel(R) Xeon(R) Processor @ 2.50GHz"


@pytest.mark.parametrize(
    ("stepping", "flags", "arch", "mcpu", "simd_bits"),
    [
        (4, V4, "skylake-avx512", "skylake-avx512", 512),
        (7, f"{V4} avx512_vnni hypervisor", "cascadelake", "cascadelake", 512),
        (11, f"{V4} avx512_vnni avx512_bf16", "cooperlake", "cooperlake", 512),
        # what a hypervisor hides must not be used, whatever the model number promises
        (7, V4, "cascadelake", "x86-64-v4", 512),
        (7, V3, "cascadelake", "x86-64-v3", 256),
        (7, V2, "cascadelake", "x86-64-v2", 128),
        (7, "sse2", "cascadelake", "x86-64", 128),
    ],
)
def test_a_xeon_of_model_85(
    tmp_path: Path, stepping: int, flags: str, arch: str, mcpu: str, simd_bits: int
) -> None:
    root = machine(tmp_path, "GenuineIntel", XEON, 6, 85, stepping, flags)
    row = cpu_row(read_cpu_facts(root, "x86_64"))
    assert row.name == f"xeon-{arch}-2.5ghz"
    assert (row.arch, row.mcpu, row.simd_bits) == (arch, mcpu, simd_bits)
    assert row.fma == ("fma" in flags.split())
    assert row.clock_mhz == 2500  # by its name; the current clock is 2100
    assert (row.cores, row.l1_kb, row.l2_kb, row.l3_kb, row.mem_gb) == (2, 32, 1024, 36608, 16)
    assert row.virtual == ("hypervisor" in flags)
    assert row.source.startswith("detected")


@pytest.mark.parametrize(
    ("vendor", "name", "family", "model", "flags", "expected", "mcpu"),
    [
        ("AuthenticAMD", "AMD EPYC 7B13", 0x19, 1, V3, "epyc-zen3-2.1ghz", "znver3"),
        ("AuthenticAMD", "AMD EPYC 7B12", 0x17, 0x31, V3, "epyc-zen2-2.1ghz", "znver2"),
        ("AuthenticAMD", "AMD EPYC 9R14", 0x19, 0x11, V3, "epyc-zen4-2.1ghz", "x86-64-v3"),
        (
            "GenuineIntel",
            "Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz",
            6,
            0x9E,
            V3,
            "core-kabylake-3.6ghz",
            "skylake",
        ),
        (
            "GenuineIntel",
            "Intel(R) Xeon(R) Platinum 8488C",
            6,
            0x8F,
            V4,
            "xeon-sapphirerapids-2.1ghz",
            "x86-64-v4",
        ),
        ("GenuineIntel", "Brand New", 6, 0xFE, V3, "intel-6-fe-2.1ghz", "x86-64-v3"),
        ("NoSuchVendor", "Mystery", 1, 1, V2, "x86_64-2.1ghz", "x86-64-v2"),
    ],
)
def test_other_x86_machines(
    tmp_path: Path, vendor: str, name: str, family: int, model: int, flags: str, expected: str, mcpu: str
) -> None:
    row = cpu_row(read_cpu_facts(machine(tmp_path, vendor, name, family, model, 0, flags), "x86_64"))
    assert (row.name, row.mcpu, row.model) == (expected, mcpu, name)


@pytest.mark.parametrize(
    ("name", "family", "model", "flags", "lanes"),
    [
        (
            "AMD EPYC 9R14",
            0x19,
            0x11,
            V4,
            16,
        ),  # Zen 4: 512-bit instructions on 256-bit data paths, one a cycle
        ("AMD EPYC 9R14", 0x19, 0x11, V3, 16),  # its 256-bit ones two a cycle
        ("AMD EPYC 7551", 0x17, 1, V3, 8),  # Zen 1: 256-bit instructions on 128-bit data paths
        ("AMD EPYC 7B13", 0x19, 1, V3, 16),
    ],
)
def test_peak_of_cores_with_narrow_data_paths(
    tmp_path: Path, name: str, family: int, model: int, flags: str, lanes: int
) -> None:
    row = cpu_row(read_cpu_facts(machine(tmp_path, "AuthenticAMD", name, family, model, 0, flags), "x86_64"))
    device = build_device(row, 1)
    assert device.lanes_per_core == lanes
    assert device.peak_gflops["float32"] == pytest.approx(row.clock_mhz / 1e3 * lanes * 2)
    # narrower instructions do not waste the half of the path that a wide one needs twice
    assert build_device(row, 1, "x86-64-v2").lanes_per_core == 8


def test_an_arm_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    block = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    (tmp_path / "proc/cpuinfo").write_text("\n".join(block.format(i) for i in range(4)))
    row = cpu_row(read_cpu_facts(tmp_path, "aarch64"))
    assert (row.name, row.arch, row.mcpu, row.vendor) == ("neoverse-n1", "neoverse-n1", "neoverse-n1", "arm")
    assert (row.cores, row.simd_bits, row.fma, row.clock_mhz) == (4, 128, True, None)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    row = cpu_row(read_cpu_facts(tmp_path, "riscv64"))
    assert row.kind == "cpu" and row.cores == 1 and row.clock_mhz is None and row.l1_kb is None


def test_this_machine() -> None:
    device = detect()
    assert device.kind == "cpu" and device.model and device.cores and device.cores_used == device.cores
    assert device.name == f"{device.base}@{device.cores}"
    assert device.target["kind"] == "llvm" and device.target["num-cores"] == device.cores
    assert get_device(device.name) == device
    assert get_device(f"{device.base}@1").to_json() == get_device("this-cpu@1").to_json()
