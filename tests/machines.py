"""The facts of other machines, written as the /proc and /sys that Linux shows there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

V2 = ["sse4_2", "ssse3", "popcnt", "cx16"]
V3 = [*V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"]
V4 = [*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
_LEVELS = {"v2": V2, "v3": V3, "v4": V4}

MACHINES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "device" / "machines.yaml").read_text())

#: Machines that the host-sensitive tests run as.
FIVE = ("zen3-vm", "zen4-vm", "cascadelake-vm", "plain-v2-vm", "neoverse-n1")


def write_machine(root: Path, facts: dict[str, Any]) -> Path:
    """``root`` with the ``proc`` and ``sys`` of a machine of ``machines.yaml``."""
    flags = " ".join(flag for name in facts["flags"] for flag in _LEVELS.get(name, [name]))
    blocks = []
    threads = facts.get("threads", 1)
    for cpu in range(facts["cores"] * threads):
        if "implementer" in facts:
            own = {"Features": flags, "CPU implementer": hex(facts["implementer"]), "CPU part": hex(facts["part"])}
        else:
            own = {
                "vendor_id": facts["vendor"], "cpu family": facts["family"], "model": facts["model"],
                "model name": facts["name"], "stepping": facts["stepping"], "cpu MHz": facts["mhz"], "physical id": 0,
                "core id": cpu // threads, "flags": flags,
            }  # fmt: skip
        blocks.append("".join(f"{name}\t: {value}\n" for name, value in {"processor": cpu, **own}.items()))
    files = {
        "proc/cpuinfo": "\n".join(blocks),
        "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
        "proc/sys/kernel/arch": "aarch64\n" if "implementer" in facts else "x86_64\n",
    }
    cpu0 = "sys/devices/system/cpu/cpu0"
    caches = [("1", "Instruction", "32K"), *zip("123", ("Data", "Unified", "Unified"), facts["caches"], strict=False)]
    for index, (level, kind, size) in enumerate(caches):
        names = {"level": level, "type": kind, "size": size}
        files.update({f"{cpu0}/cache/index{index}/{name}": f"{text}\n" for name, text in names.items()})
    if "nominal_mhz" in facts:
        files[f"{cpu0}/acpi_cppc/nominal_freq"] = f"{facts['nominal_mhz']}\n"
    if "max_mhz" in facts:
        files[f"{cpu0}/cpufreq/cpuinfo_max_freq"] = f"{facts['max_mhz'] * 1000}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
