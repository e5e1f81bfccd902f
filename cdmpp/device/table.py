"""The table of known devices: the shipped rows, the rows that users add, and this machine's CPU.

This machine's CPU is read from ``/proc`` and ``/sys``; nothing is measured. The microarchitecture follows from family and
model, not from the flags: a Zen 4 whose AVX-512 a hypervisor hides is a Zen 4, with code restricted to what the flags allow.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cdmpp.device.spec import ASSUMED_SIMD_PIPES, ISAS, Device
from cdmpp.errors import UnknownDeviceError, raised_as
from cdmpp.files import read_yaml, shipped_table, write_text

#: Environment variable: a folder whose ``proc`` and ``sys`` describe this machine in place of the real ones (for tests, and for
#: containers that hide the real ones).
ROOT_VARIABLE = "CDMPP_SYSTEM_ROOT"

#: x86-64 levels, lowest first, and the flags that each adds to those of the levels below it.
_LEVELS: dict[str, set[str]] = {
    "x86-64-v2": {"sse4_2", "ssse3", "popcnt", "cx16"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}

_BRANDS = ("xeon", "epyc", "ryzen", "threadripper", "core", "pentium", "celeron", "atom", "altra", "graviton")


def _core(arch: str) -> dict[str, Any]:
    """The entry of a microarchitecture in ``cpus.yaml``; empty if there is none."""
    return shipped_table("device/cpus.yaml").get(arch, {})


def _core_of(key: str, value: Any) -> str:
    """The microarchitecture whose ``key`` in ``cpus.yaml`` is this value or a list with it; "" if there is none."""
    cores = shipped_table("device/cpus.yaml").items()
    return next((name for name, core in cores if value == core.get(key) or value in core.get(key, ())), "")


@dataclass(frozen=True)
class CpuFacts:
    """What Linux reports about the CPU. None, 0 or "" for what it does not report."""

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
    """Read ``/proc`` and ``/sys`` below ``root`` (or :data:`ROOT_VARIABLE`, else ``/``); what cannot be read stays unknown."""
    root = root or Path(os.environ.get(ROOT_VARIABLE) or "/")
    blocks = [[line.partition(":") for line in b.split("\n")] for b in _text(root / "proc/cpuinfo").split("\n\n")]
    cpus = [{key.strip(): value.strip() for key, _, value in block} for block in blocks]
    cpus = [cpu for cpu in cpus if "processor" in cpu] or [{}]
    allowed = {str(n) for n in os.sched_getaffinity(0)} if root == Path("/") else {c.get("processor", "") for c in cpus}
    here = [cpu for cpu in cpus if cpu.get("processor") in allowed] or cpus
    first = here[0]  # where cores differ, those that this process may use count
    cores = {(cpu.get("physical id", "0"), cpu.get("core id", cpu.get("processor", "0"))) for cpu in here}
    mem_kb = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    folder = root / f"sys/devices/system/cpu/cpu{first.get('processor', 0)}"
    caches = _caches(folder / "cache")
    base_khz = _number(_text(folder / "cpufreq/base_frequency"))  # intel_pstate
    max_khz = _number(_text(folder / "cpufreq/cpuinfo_max_freq"))
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
        base_mhz=base_khz / 1000 if base_khz else _number(_text(folder / "acpi_cppc/nominal_freq")),
        current_mhz=_number(first.get("cpu MHz", "")),
        max_mhz=max_khz / 1000 if max_khz else None,
        cores=len(cores),
        l1_kb=caches.get("1"),
        l2_kb=caches.get("2"),
        l3_kb=caches.get("3"),
        mem_gb=round(int(mem_kb.group(1)) / 2**20, 1) if mem_kb else None,
    )


def machine_facts() -> dict[str, str | int | float | None]:
    """What this machine's CPU reports about itself, as JSON values, to be stored with measurements made on it."""
    facts = asdict(read_cpu_facts())
    virtual = "hypervisor" in facts.pop("flags")
    return {**{name: facts[name] for name in facts if name not in ("machine", "base_mhz")}, "virtual": virtual}


def detect_cpu(root: Path | None = None, machine: str = "") -> Device:
    """The whole CPU that :func:`read_cpu_facts` finds below ``root``. Its name has the brand, the microarchitecture, the
    nominal clock and, if a hypervisor hides some of its instructions, the x86-64 level that remains."""
    facts = read_cpu_facts(root, machine)
    vendor, arch, wanted = _microarchitecture(facts)
    nominal_mhz = _nominal_mhz(facts)
    clock = f"-{nominal_mhz / 1000:.3g}ghz" if nominal_mhz else ""
    model = facts.model_name.lower().replace("(r)", " ").replace("(tm)", " ")
    brand = next((brand for brand in _BRANDS if re.search(rf"(?<!-)\b{brand}\b", model)), "")
    name = "-".join(part for part in (brand, arch) if part and part != vendor) or "cpu"
    x86 = facts.machine in ("x86_64", "AMD64")
    mcpu = _usable_mcpu(arch, wanted, facts.flags) if x86 else wanted
    bits = 512 if "avx512f" in facts.flags else 256 if "avx" in facts.flags else 128
    # code for a level uses no wider vectors, even if the flags have some
    simd_bits, fma = ISAS.get(mcpu, (bits, "fma" in facts.flags)) if x86 else _arm_simd(arch, facts.flags)
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
        return "zen4" if 0x10 <= model <= 0x1F or model >= 0x60 else "zen3"
    if family != 0x1A or 0x50 <= model <= 0x5F or model >= 0x80:  # from Zen 6 on
        return ""
    return "zen5-mobile" if 0x20 <= model <= 0x2F or 0x60 <= model <= 0x6F else "zen5"


def _llvm_name(arch: str) -> str:
    return str(_core(arch).get("llvm", arch))


def _usable_mcpu(arch: str, wanted: str, flags: frozenset[str]) -> str:
    """``wanted``, an LLVM CPU name, if the flags have all its instructions, else the best x86-64 level that they have."""
    needs = _core(arch).get("needs") or _core(wanted).get("needs", ())
    if wanted and set().union(*(_LEVELS.get(name, {name}) for name in needs)) <= flags:
        return wanted
    best = "x86-64"
    for level, own in _LEVELS.items():
        if not own <= flags:
            break
        best = level
    return best


def _arm_simd(arch: str, flags: frozenset[str]) -> tuple[int | None, bool | None]:
    if "sve" in flags:
        return _core(arch).get("sve_bits"), True
    return (128, True) if "asimd" in flags else (None, None)


def _nominal_mhz(facts: CpuFacts) -> float | None:
    """Nominal clock by the model's name, the driver or the hypervisor; the current clock only if nothing else is known."""
    named = re.search(r"@\s*([\d.]+)\s*GHz", facts.model_name)
    if named:
        return float(named.group(1)) * 1000
    virtual_mhz = facts.current_mhz if "hypervisor" in facts.flags else None
    mhz = facts.base_mhz or virtual_mhz or facts.max_mhz or facts.current_mhz
    return round(mhz, -1) if mhz else None


def _caches(folder: Path) -> dict[str, float]:
    """Level -> KiB of the data or unified cache that a core sees."""
    sizes: dict[str, float] = {}
    for index in sorted(folder.glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", _text(index / "size").strip())
        if size and _text(index / "type").strip() != "Instruction":
            unit = {"": 1 / 1024, "K": 1, "M": 1024}[size.group(2)]
            sizes[_text(index / "level").strip()] = int(size.group(1)) * unit
    return sizes


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


#: Environment variable: YAML files of devices, separated by ``:``.
DEVICES_VARIABLE = "CDMPP_DEVICES"

#: The name that stands for this machine's CPU.
THIS_CPU = "this-cpu"

_SHIPPED = Path(__file__).with_name("table.yaml")


class DeviceTable:
    """Whole devices by name and alias. A later row of the same name and kind overrides the fields that it gives. ``this_cpu``
    is this machine's CPU as detected, found as ``this-cpu``. If a row describes it, it takes that row's name and facts."""

    def __init__(self, rows: Iterable[Device], this_cpu: Device | None = None) -> None:
        self._rows: dict[str, Device] = {}
        self._keys: dict[str, str] = {}
        self._joined: dict[str, str] = {}
        #: Short name -> form (``sxm``, ``pcie``, ``oam`` or "") -> names of devices.
        self._forms = defaultdict[str, defaultdict[str, set[str]]](lambda: defaultdict(set))
        for row in rows:
            known = self._rows.get(row.name)
            row = row if known is None or known.kind != row.kind else overlay(known, row)
            self._rows[row.name] = row
            for name in (row.model, *row.aliases, row.name):
                if name:
                    self._keys[normalise(name)] = row.name
                    known_as = self._joined.setdefault(_joined(name), row.name)
                    if known_as != row.name:
                        self._joined[_joined(name)] = ""  # several devices have this name
                    short, form, _ = _short(name)
                    self._forms[short][form].add(row.name)
        self.this_cpu: Device | None = None
        self._cores_here: int | None = None
        if this_cpu is not None:
            self.this_cpu = self._recognised(this_cpu) or self._named(this_cpu)
            self._cores_here = this_cpu.cores
            self._rows[self.this_cpu.name] = self.this_cpu
            for name in (THIS_CPU, self.this_cpu.name):
                self._keys[normalise(name)] = self.this_cpu.name

    def _recognised(self, here: Device) -> Device | None:
        """The row that describes this machine's CPU: of the same product or kind (``epyc-zen4-...``), and equal in all
        identifying facts. The model string alone decides nothing: hypervisors call both a Zen 3 and a Zen 4 "AMD EPYC"."""
        product = self._rows.get(self._keys.get(normalise(here.model), ""))
        of_kind = [row for row in self._rows.values() if _kind_of_cpu(row.name) == _kind_of_cpu(here.name)]
        candidates = [row for row in (product, *of_kind) if row is not None and row.kind == "cpu"]
        found = next((row for row in candidates if not row.differences(here)), None)
        # A user's row may hold nothing but measurements of this machine.
        return overlay(here, found) if found is not None and not found.arch else found

    def _named(self, here: Device) -> Device:
        """The detected CPU, renamed if another CPU of the table has its name."""
        known = self._rows.get(here.name)
        if known is None:
            return here
        differing = [text.split()[0] for text in known.differences(here)]
        suffixes = [f"{name.partition('_')[0]}-{getattr(here, name)}" for name in differing]
        return replace(here, name=normalise("-".join((here.name, *suffixes))).replace(".0", ""))

    @property
    def rows(self) -> list[Device]:
        """All rows, in the order of their names."""
        return [self._rows[name] for name in sorted(self._rows)]

    def find(self, name: str) -> Device | None:
        """The whole device of a name, model string or alias; None if unknown or ambiguous. Case and separators (spaces, ``_``,
        ``-``, nothing) do not matter. Maker, product line, form and memory may be left out if one device remains."""
        exact = self._keys.get(normalise(name)) or self._joined.get(_joined(name))
        return self._rows.get(exact or self._nearly(name))

    def _nearly(self, name: str) -> str:
        """Name of the device with this short name, this memory and (if known) this form; "" if none or several fit."""
        short, form, gb = _short(name)
        named: Mapping[str, set[str]] = self._forms.get(short, {})
        known = {row for rows in named.values() for row in rows}
        fits = {row for row in known if gb is None or abs(gb / (self._rows[row].mem_gb or gb) - 1) < _SAME_MEMORY}
        found = fits & named.get(form, set()) if form and {*named} != {""} else fits  # no form is known of some devices
        usual = self._joined.get(short, "")
        return found.pop() if len(found) == 1 else usual if usual in found else ""

    def variants(self, name: str) -> list[str]:
        """Names of the two or more devices that a short name such as ``A100`` may mean; none if it gives form or memory."""
        short, form, gb = _short(name.partition("@")[0])
        known = {row for rows in self._forms.get(short, {}).values() for row in rows}
        return sorted(known) if not form and gb is None and len(known) > 1 else []

    def get(self, name: str) -> Device:
        """The device of a name ``base[.isa][@share]``: ``base`` as in :meth:`find`, ``isa`` one of
        :data:`cdmpp.device.spec.ISAS`, ``share`` as in :meth:`Device.used`. UnknownDeviceError: there is no such device (the
        message suggests similar names)."""
        base, at, share_text = name.partition("@")
        share = None
        if at:
            try:
                share = float(share_text)
            except ValueError:
                raise UnknownDeviceError(f"{name!r}: after @ comes a share, such as @1 or @0.5") from None
        key, isa = normalise(base), ""
        row = self.find(key)
        if row is None:
            isa = next((isa for isa in ISAS if key.endswith(f".{isa}")), "")
            row = self.find(key[: -len(isa) - 1]) if isa else None
        if row is None:
            raise UnknownDeviceError(f"unknown device {name!r}{self._suggest(key)}; `cdmpp devices` lists all")
        return row.used(share, isa, self._cores_here if key.startswith(THIS_CPU) else None)

    def _suggest(self, key: str) -> str:
        whole = [known for known in self._keys if len(key) > 2 and _joined(key) and _joined(key) in _joined(known)]
        near = whole[:6] + difflib.get_close_matches(key, list(self._keys), n=6, cutoff=0.5)
        names = list(dict.fromkeys(THIS_CPU if k == THIS_CPU else self._keys[k] for k in near))[:3]
        return f"; did you mean {' or '.join(names)}?" if names else ""


def _kind_of_cpu(name: str) -> str:
    """``epyc-zen4-2.6ghz`` -> ``epyc-zen4``: brand and microarchitecture, without the clock and what follows it."""
    return re.split(r"-[\d.]+ghz", name)[0]


@functools.cache
def normalise(name: str) -> str:
    """A name in lower case, without marks, ``-`` between words: ``AMD_Instinct MI100`` -> ``amd-instinct-mi100``."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    return re.sub(r"[\s_/-]+", "-", plain).strip("-")


#: Parts of names: makers and product lines, which may be left out; other words without meaning; forms; memory sizes in GB.
#: Sizes that differ by less than ``_SAME_MEMORY`` are the same (10**9 or 2**30 bytes, and what ECC takes).
_MAKERS = re.compile("nvidia|amd|intel|geforce|tesla|instinct|radeon")
_LINES = re.compile(r"^(rtx|gtx|rx|arc)(?=[a-z]?\d)")
_NOTHING, _FORM = re.compile(r"hbm\de?|generation|tensorcore|gpu|vf$|:.*"), re.compile(r"(pcie|oam|sxm)([2-6](?!\d?gb))?")
_MEMORY = re.compile("(8|12|16|24|32|40|48|64|80|94|96|128|141|144|180|192|256|279|288|480)gb")
_SAME_MEMORY = 0.12


@functools.cache
def _joined(name: str) -> str:
    """A name without separators and makers: ``NVIDIA GeForce RTX 4090`` -> ``rtx4090``."""
    return re.sub("(?<=[0-9])g$", "gb", _MAKERS.sub("", normalise(name).replace("-", "")))


@functools.cache
def _short(name: str) -> tuple[str, str, float | None]:
    """A name without optional parts, its form and its memory in GB: ``A100-SXM4-80GB`` -> ``a100``, ``sxm``, 80."""
    plain = normalise(name)
    apart = re.search(r"-(\d+)gb?(?=-|$)", plain)
    joined = _NOTHING.sub("", _joined(plain.replace(apart.group(), "") if apart else plain))
    form, memory = _FORM.search(joined), apart or _MEMORY.search(joined)
    short = _LINES.sub("", _MEMORY.sub("", _FORM.sub("", joined)))
    return short, form.group(1) if form else "", float(memory.group(1)) if memory else None


#: Plausible GFLOP/s per GB/s. Existing devices have 7 (A64FX) to 105 (A40, L40S).
_BALANCE = (0.7, 1500.0)
#: Stated float32 peak over twice lanes times clock: 0.5 if a multiply-add counts once, 1 if twice, or by other clocks.
_PEAK_RATIO = (0.05, 20.0)


@functools.cache
def row_fields() -> tuple[str, ...]:
    """Names of the fields that a row of a device file may have."""
    own = shipped_table("device/fields.yaml")
    return "name", "kind", "aliases", *own["texts"], *own["flags"], *own["numbers"], "peak_gflops", "measured"


def read_device_file(path: str | Path) -> list[Device]:
    """The rows of a YAML file, which holds one mapping or a list of mappings with the fields of :func:`row_fields`.
    UnknownDeviceError: it cannot be read, or a field is wrong or implausible; the message names the row and the field."""
    with raised_as(UnknownDeviceError, f"cannot read devices from {path}"):
        content = read_yaml(path)
    items = [content] if isinstance(content, dict) else content
    if not isinstance(items, list) or not items:
        raise UnknownDeviceError(f"{path} holds no device")
    return [row_from_mapping(item, str(path), number) for number, item in enumerate(items, start=1)]


def row_from_mapping(item: Any, where: str = "", number: int = 1) -> Device:
    """A whole device from one mapping of a device file; UnknownDeviceError as in :func:`read_device_file`."""
    who = str(item.get("name", f"row {number}") if isinstance(item, Mapping) else f"row {number}")
    who = f"{where}: {who}" if where else who
    if not isinstance(item, Mapping):
        raise UnknownDeviceError(f"{who}: expected fields and values, got {item!r}")
    for name in item:
        if name not in row_fields():
            near = difflib.get_close_matches(str(name), row_fields(), n=1, cutoff=0.6)
            raise UnknownDeviceError(f"{who}: there is no field {name}" + (f"; did you mean {near[0]}?" if near else ""))
    for name in ("name", "kind"):
        if name not in item:
            raise UnknownDeviceError(f"{who}: {name} is missing")
    if item["kind"] not in ("cpu", "gpu"):
        raise UnknownDeviceError(f"{who}: kind is {item['kind']!r}, expected 'cpu' or 'gpu'")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._+-]*", str(item["name"])):
        raise UnknownDeviceError(f"{who}: name is {item['name']!r}, expected small letters, digits and ._+-")
    values = {name: _value(who, name, value, item["kind"]) for name, value in item.items()}
    source = values.pop("source", "")
    row = Device(**values, sources=(source,) if source else ())
    _check_balance(row, who)
    return row


def _value(who: str, name: str, value: Any, kind: str) -> Any:
    """The value of a field, checked."""
    if name == "aliases":
        return tuple(str(alias) for alias in value or ())
    if name in ("peak_gflops", "measured"):
        return _rates(who, name, value)
    own = shipped_table("device/fields.yaml")
    number = own["numbers"].get(name)
    if number is None:
        expected, text = (bool, "true or false") if name in own["flags"] else (str, "text")
        if not isinstance(value, expected) and name != "name":  # a name may look like a number
            raise UnknownDeviceError(f"{who}: {name} is {value!r}, expected {text}")
        return str(value) if name == "name" else value
    (low, high), unit, whole = number[kind], number["unit"], number.get("whole", False)
    if not is_number(value):
        raise UnknownDeviceError(f"{who}: {name} is {value!r}, expected {low:g} to {high:g} {unit}")
    if not low <= value <= high:
        raise UnknownDeviceError(f"{who}: {name} is {value:g}, expected {low:g} to {high:g} {unit}: is the unit off by 1000?")
    if whole and value != int(value):
        raise UnknownDeviceError(f"{who}: {name} is {value:g}, expected a whole number")
    return int(value) if whole else float(value)


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; files may also have NaN, infinity and longer integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _rates(who: str, name: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise UnknownDeviceError(f"{who}: {name} is {values!r}, expected names and numbers")
    peaks = shipped_table("device/fields.yaml")["peaks"]
    for key, value in values.items():
        if name == "peak_gflops" and key not in peaks:
            raise UnknownDeviceError(f"{who}: {name}.{key} is no data type; there are {', '.join(peaks)}")
        if not is_number(value) or value <= 0:
            raise UnknownDeviceError(f"{who}: {name}.{key} is {value!r}, expected a number above 0")
    return {str(key): float(value) for key, value in values.items()}


def _check_balance(row: Device, who: str) -> None:
    """Refuse what the ranges of single fields cannot catch: peak against lanes and clock, and peak against memory bandwidth."""
    peak, lanes = row.peak_gflops.get("float32"), row.lanes_per_core
    if lanes is None and row.simd_bits is not None:
        lanes = row.simd_bits // 32 * (row.simd_pipes or ASSUMED_SIMD_PIPES)
    computed = 2 * row.cores * lanes * row.clock_mhz / 1e3 if row.cores and lanes and row.clock_mhz else None
    if peak and computed and not _PEAK_RATIO[0] <= peak / computed <= _PEAK_RATIO[1]:
        raise UnknownDeviceError(
            f"{who}: peak_gflops.float32 is {peak:g}, but cores, lanes and clock make {computed:.3g} GFLOP/s: is a unit off "
            "by 1000?"
        )
    peak = peak or computed
    if peak and row.bandwidth_gb_s and not _BALANCE[0] <= peak / row.bandwidth_gb_s <= _BALANCE[1]:
        raise UnknownDeviceError(
            f"{who}: a float32 peak of {peak:g} GFLOP/s with a bandwidth_gb_s of {row.bandwidth_gb_s:g} fits no device: is a "
            "unit off by 1000?"
        )


def missing_fields(row: Device) -> tuple[str, ...]:
    """Fields that predictions would use but the row does not give, in the order of the row."""
    wanted = {"clock_mhz", "cores", "l1_kb", "l2_kb", "mem_gb", "bandwidth_gb_s"}
    if row.kind == "gpu":
        wanted |= {"lanes_per_core", "shared_kb", "registers_per_core", "warp_size", "max_threads_per_core"}
    else:
        wanted |= {"simd_bits", "fma", "l3_kb"}
    missing = [f.name for f in fields(row) if f.name in wanted and getattr(row, f.name) is None]
    computed_from = {"clock_mhz", "cores", "lanes_per_core", "simd_bits"}
    if row.peak_gflops.get("float32") is None and computed_from & set(missing):
        missing.append("peak_gflops.float32")
    return tuple(missing)


def overlay(known: Device, row: Device) -> Device:
    """The known row, updated with the fields and aliases that the other one gives. UnknownDeviceError: they are implausible, or
    it has rates that were measured on another device."""
    if row.measured and (others := known.differences(row)):
        raise UnknownDeviceError(f"{row.name}: its rates were measured on another device: {', '.join(others)}")
    given = {f.name: value for f in fields(row) if (value := getattr(row, f.name)) not in (None, "", (), {})}
    united = replace(known, **{**given, "aliases": tuple(dict.fromkeys((*known.aliases, *row.aliases)))})
    _check_balance(united, united.name)
    return united


_shipped_rows = functools.cache(lambda: tuple(read_device_file(_SHIPPED)))
_this_cpu = functools.cache(detect_cpu)
_shipped_table = functools.cache(lambda root: DeviceTable(_shipped_rows(), root and _this_cpu(root)))


def load_table(extra: Sequence[str | Path] = (), this_machine: bool = True) -> DeviceTable:
    """The shipped rows, this machine's CPU, and the user's files: :func:`user_file`, those of the environment variable
    ``CDMPP_DEVICES``, and ``extra``; later ones win. UnknownDeviceError: a file cannot be read or has a wrong field."""
    configured = [Path(p) for p in os.environ.get(DEVICES_VARIABLE, "").split(os.pathsep) if p]
    home = [user_file()] if user_file().exists() else []
    own = [row for path in (*home, *configured, *map(Path, extra)) for row in read_device_file(path)]
    root = Path(os.environ.get(ROOT_VARIABLE) or "/") if this_machine else None
    return DeviceTable([*_shipped_rows(), *own], _this_cpu(root) if root else None) if own else _shipped_table(root)


def user_file() -> Path:
    """The file that keeps a user's own devices: ``~/.config/cdmpp/devices.yaml``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cdmpp" / "devices.yaml"


def add_device_file(path: str | Path) -> list[str]:
    """Add the devices of a YAML file to :func:`user_file`, so that they stay known, and return their names. UnknownDeviceError:
    the file cannot be read or has a wrong field, or the user's file cannot be written."""
    target = user_file()
    known = {row.name: row for row in read_device_file(target)} if target.exists() else {}
    added = read_device_file(path)
    for row in added:
        known[row.name] = overlay(known[row.name], row) if row.name in known else row
    target.parent.mkdir(parents=True, exist_ok=True)
    write_device_file(list(known.values()), target)
    return [row.name for row in added]


def write_device_file(rows: Sequence[Device], path: str | Path) -> None:
    """Write rows to a file that :func:`read_device_file` reads (UnknownDeviceError if the file cannot be written)."""
    import yaml

    path = Path(path)
    content = []
    for row in rows:
        values = {**asdict(row), "source": "; ".join(row.sources), "aliases": list(row.aliases)}
        given = {name: values[name] for name in row_fields()}
        content.append({name: value for name, value in given.items() if value not in (None, "", [], {})})
    with raised_as(UnknownDeviceError, f"cannot write {path}"):
        write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def get_device(name: str | Device, table: DeviceTable | None = None) -> Device:
    """The device of a name such as ``this-cpu.x86-64-v2@1`` or ``h200@0.5``, by :meth:`DeviceTable.get` of ``table``, or of
    :func:`load_table` if that is None. A :class:`Device` is returned unchanged."""
    return name if isinstance(name, Device) else (table or load_table()).get(name)


def known_devices(table: DeviceTable | None = None) -> list[Device]:
    """Every device of the table with all its cores: GPUs first, then CPUs, each sorted by name."""
    rows = (table or load_table()).rows
    return [row.used() for row in sorted(rows, key=lambda row: (row.kind != "gpu", row.name))]
