"""What this machine is, by ``/proc`` and ``/sys``; nothing is measured. The microarchitecture follows from family and model,
not from the flags: a Zen 4 whose AVX-512 a hypervisor hides is a Zen 4, whose code is restricted to what the flags allow."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdmpp.device.spec import Device
from cdmpp.files import shipped_table

_LOG = logging.getLogger(__name__)

#: Environment variable: a folder whose ``proc`` and ``sys`` say what this machine is, in place of the real ones (for tests,
#: and containers that hide them).
ROOT_VARIABLE = "CDMPP_SYSTEM_ROOT"

#: Levels of x86-64, from the least, and the flags that each has beyond those below it.
_LEVELS: dict[str, set[str]] = {
    "x86-64-v2": {"sse4_2", "ssse3", "popcnt", "cx16"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}

_BRANDS = (
    "xeon", "epyc", "ryzen", "threadripper", "core", "pentium", "celeron", "atom", "altra", "graviton",
)  # fmt: skip


def _core(arch: str) -> dict[str, Any]:
    """What is known of a core (``cpus.yaml``)."""
    return shipped_table("device/cpus.yaml").get(arch, {})


def _core_of(key: str, value: Any) -> str:
    """The microarchitecture that has this value, or this among others; "" if none has."""
    cores = shipped_table("device/cpus.yaml").items()
    return next((name for name, core in cores if value == core.get(key) or value in core.get(key, ())), "")


@dataclass(frozen=True)
class CpuFacts:
    """What Linux says about the CPU. None, 0 or "" for what it does not say."""

    machine: str
    vendor_id: str = ""
    model_name: str = ""
    family: int = 0
    model: int = 0
    stepping: int = 0
    arm_implementer: int = 0
    arm_part: int = 0
    flags: frozenset[str] = frozenset()
    base_mhz: float | None = None
    current_mhz: float | None = None
    max_mhz: float | None = None
    cores: int = 1
    l1_kb: float | None = None
    l2_kb: float | None = None
    l3_kb: float | None = None
    mem_gb: float | None = None


def read_cpu_facts(root: Path | None = None, machine: str = "") -> CpuFacts:
    """Read ``/proc`` and ``/sys`` below ``root`` (:data:`ROOT_VARIABLE`, else ``/``); what cannot be read stays unknown."""
    root = root or Path(os.environ.get(ROOT_VARIABLE) or "/")
    cpus = [_fields(block) for block in _text(root / "proc/cpuinfo").split("\n\n") if block.strip()]
    cpus = [cpu for cpu in cpus if "processor" in cpu] or [{}]
    first = cpus[0]
    allowed = {str(n) for n in os.sched_getaffinity(0)} if root == Path("/") else {c.get("processor", "") for c in cpus}
    here = [cpu for cpu in cpus if cpu.get("processor") in allowed] or cpus
    cores = {(cpu.get("physical id", "0"), cpu.get("core id", cpu.get("processor", "0"))) for cpu in here}
    caches = _caches(root / "sys/devices/system/cpu/cpu0/cache")
    mem_kb = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    base_khz = _number(_text(cpu0 / "cpufreq/base_frequency"))  # intel_pstate
    cppc_mhz = _number(_text(cpu0 / "acpi_cppc/nominal_freq"))
    max_khz = _number(_text(cpu0 / "cpufreq/cpuinfo_max_freq"))
    return CpuFacts(
        machine=machine or _text(root / "proc/sys/kernel/arch").strip() or platform.machine(),
        vendor_id=first.get("vendor_id", ""),
        model_name=first.get("model name", ""),
        family=_int(first.get("cpu family")),
        model=_int(first.get("model")),
        stepping=_int(first.get("stepping")),
        arm_implementer=_int(first.get("CPU implementer")),
        arm_part=_int(first.get("CPU part")),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        base_mhz=base_khz / 1000 if base_khz else cppc_mhz,
        current_mhz=_number(first.get("cpu MHz", "")),
        max_mhz=max_khz / 1000 if max_khz else None,
        cores=len(cores),
        l1_kb=caches.get("1"),
        l2_kb=caches.get("2"),
        l3_kb=caches.get("3"),
        mem_gb=round(int(mem_kb.group(1)) / 2**20, 1) if mem_kb else None,
    )


def machine_facts() -> dict[str, str | int | float | None]:
    """What the CPU of this machine says about itself, as JSON values: to be kept with what is measured on it."""
    facts = asdict(read_cpu_facts())
    virtual = "hypervisor" in facts.pop("flags")
    return {**{name: facts[name] for name in facts if name not in ("machine", "base_mhz")}, "virtual": virtual}


def detect_cpu(root: Path | None = None, machine: str = "") -> Device:
    """The CPU below ``root`` (:func:`read_cpu_facts`), whole: named after its brand, microarchitecture, nominal clock and,
    where a hypervisor hides some of its instructions, the level that is left."""
    facts = read_cpu_facts(root, machine)
    vendor, arch, wanted = _microarchitecture(facts)
    nominal_mhz = _nominal_mhz(facts)
    clock = f"-{nominal_mhz / 1000:.3g}ghz" if nominal_mhz else ""
    brand = _brand(facts.model_name)
    name = "-".join(part for part in (brand, arch) if part and part != vendor) or "cpu"
    x86 = facts.machine in ("x86_64", "AMD64")
    simd_bits, fma = _x86_simd(facts.flags) if x86 else _arm_simd(arch, facts.flags)
    mcpu = _usable_mcpu(arch, wanted, facts.flags) if x86 else wanted
    hidden = f"-{mcpu}" if wanted and mcpu != wanted else ""
    return Device(
        name=f"{name}{clock}{hidden}",
        kind="cpu",
        vendor=vendor,
        model=facts.model_name or arch,
        arch=arch,
        mcpu=mcpu,
        clock_mhz=nominal_mhz,
        boost_mhz=facts.max_mhz,
        cores=facts.cores,
        simd_bits=simd_bits,
        simd_pipes=1 if simd_bits and simd_bits == _core(arch).get("one_pipe") else None,
        fma=fma,
        l1_kb=facts.l1_kb,
        l2_kb=facts.l2_kb,
        l3_kb=facts.l3_kb,
        mem_gb=facts.mem_gb,
        virtual=("hypervisor" in facts.flags) if x86 else None,
        sources=("detected: /proc/cpuinfo, /sys; peak: two vector pipes a core unless it is known to have one",),
    )


def detect_gpu_names() -> list[str]:
    """Model names of the NVIDIA GPUs that ``nvidia-smi`` lists; empty without it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.debug("no NVIDIA GPU: %s", error)
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def _microarchitecture(facts: CpuFacts) -> tuple[str, str, str]:
    """Vendor, microarchitecture and LLVM's name ("" if unknown)."""
    if facts.arm_implementer:
        known = _core_of("arm", [facts.arm_implementer, facts.arm_part])
        return "arm", known or f"arm-{facts.arm_implementer:x}-{facts.arm_part:x}", known
    if facts.vendor_id == "GenuineIntel":
        arch = _core_of("intel", facts.model) if facts.family == 6 else ""
        if facts.family == 6 and facts.model == 0x55:
            late = "cooperlake" if facts.stepping >= 10 else "cascadelake"
            arch = late if facts.stepping >= 5 else "skylake-avx512"
        elif arch == "kabylake" and facts.stepping >= 10:
            arch = "coffeelake"
        return "intel", arch or f"intel-{facts.family:x}-{facts.model:x}", _llvm_name(arch)
    if facts.vendor_id in ("AuthenticAMD", "HygonGenuine"):
        arch = _zen(facts.family, facts.model)
        return "amd", arch or f"amd-{facts.family:x}-{facts.model:x}", _llvm_name(arch)
    return facts.vendor_id.lower() or "unknown", facts.machine, ""


def _zen(family: int, model: int) -> str:
    if family in (0x17, 0x18):
        return "zen1" if model < 0x30 else "zen2"
    if family == 0x19:
        late = 0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or 0xA0 <= model <= 0xAF
        return "zen4" if late else "zen3"
    return "zen5" if family == 0x1A else ""


def _llvm_name(arch: str) -> str:
    return str(_core(arch).get("llvm", arch))


def _usable_mcpu(arch: str, wanted: str, flags: frozenset[str]) -> str:
    """``wanted``, LLVM's name of a microarchitecture, if all its instructions are there, else the best x86-64 level that is."""
    needs = _core(arch).get("needs") or _core(wanted).get("needs", ())
    if wanted and set().union(*(_LEVELS.get(name, {name}) for name in needs)) <= flags:
        return wanted
    best = "x86-64"
    for level, own in _LEVELS.items():
        if not own <= flags:
            break
        best = level
    return best


def _x86_simd(flags: frozenset[str]) -> tuple[int, bool]:
    bits = 512 if "avx512f" in flags else 256 if "avx" in flags else 128
    return bits, "fma" in flags


def _arm_simd(arch: str, flags: frozenset[str]) -> tuple[int | None, bool | None]:
    if "sve" in flags:
        return _core(arch).get("sve_bits"), True
    if "asimd" in flags:
        return 128, True
    return None, None


def _nominal_mhz(facts: CpuFacts) -> float | None:
    """By the model's name, the driver, or what a hypervisor reports; the current clock only where nothing else is known."""
    named = re.search(r"@\s*([\d.]+)\s*GHz", facts.model_name)
    if named:
        return float(named.group(1)) * 1000
    virtual_mhz = facts.current_mhz if "hypervisor" in facts.flags else None
    mhz = facts.base_mhz or virtual_mhz or facts.max_mhz or facts.current_mhz
    return round(mhz, -1) if mhz else None


def _brand(model_name: str) -> str:
    name = model_name.lower().replace("(r)", " ").replace("(tm)", " ")
    return next((brand for brand in _BRANDS if re.search(rf"(?<!-)\b{brand}\b", name)), "")


def _caches(folder: Path) -> dict[str, float]:
    """Level -> KiB of the data or unified cache that core 0 sees."""
    sizes: dict[str, float] = {}
    for index in sorted(folder.glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", _text(index / "size").strip())
        if size and _text(index / "type").strip() != "Instruction":
            unit = {"": 1 / 1024, "K": 1, "M": 1024}[size.group(2)]
            sizes[_text(index / "level").strip()] = int(size.group(1)) * unit
    return sizes


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _number(text: str) -> float | None:
    """A positive number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _int(value: str | None) -> int:
    try:
        return int(value or "0", 0)
    except ValueError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
