"""Latency, micro-ops and ports of instructions on each core that LLVM models, from llvm-mca: the package's ``cores.parquet``.

    apt-get install llvm-22
    python benchmarks/core_table.py benchmarks/core_forms.txt cdmpp/program/codegen/cores.parquet

Needs an llvm-mca with ``-instruction-tables=full``. The numbers are those of LLVM's scheduling models (Apache-2.0 with LLVM
exceptions); ``cores.yaml`` corrects those that are wrong. A form is a line of assembly, in AT&T's operand order for x86.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

#: One CPU for each distinct scheduling model.
X86 = (
    "haswell", "broadwell", "skylake", "skylake-avx512", "icelake-server", "alderlake", "lunarlake", "sapphirerapids",
    "znver1", "znver2", "znver3", "znver4", "silvermont", "goldmont", "tremont", "sandybridge",
)  # fmt: skip
ARM = (
    "cortex-a53", "cortex-a55", "cortex-a57", "cortex-a510", "neoverse-n1", "neoverse-n2", "neoverse-n3", "neoverse-v1",
    "neoverse-v2", "neoverse-v3", "a64fx", "ampere1", "ampere1b", "apple-m1", "kryo", "thunderx2t99", "tsv110", "oryon-1",
    "exynos-m5",
)  # fmt: skip
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+|-)([ *U]*?)\s+(\d+)\s+(?:(\S+)\s+)?([A-Z]\w*)\s+([a-z{].*?)\s*$")
#: AT&T mnemonic -> iced's name, where they differ by more than a suffix.
_NAMES = {
    "movslq": "movsxd", "movsbl": "movsx", "movswl": "movsx", "movsbq": "movsx", "movzbl": "movzx", "movzwl": "movzx",
    "movabsq": "mov", "movabs": "mov", "cltq": "cdqe", "cqto": "cqo", "cltd": "cdq", "cwtl": "cwde",
}  # fmt: skip
_SUFFIXED = re.compile(
    r"(add|sub|inc|dec|lea|imul|mul|idiv|div|sh[lr]x?|sa[rl]x?|rol|ror|and|andn|or|xor|not|neg|cmp|test|mov|push|pop|adc|sbb"
    r"|cmov\w+?|bt|bts|btr|bsf|bsr|tzcnt|lzcnt|popcnt|vcvts[sdi]2s?[sdi]|vcvtts[sd]2si|blsr|blsi|bextr|cmpxchg|xadd|movbe)[bwlq]"
)
_COMPARED = re.compile(r"(v?)(p?)cmp(?:eq|lt|le|unord|neq|nlt|nle|ord|ge|gt|true|false)(_\w+)?(u?[bwdq]|[ps][sd])$")


def name_of(mnemonic: str) -> str:
    """iced's name for an AT&T mnemonic: without the size suffix, and comparisons without their predicate."""
    if mnemonic in _NAMES:
        return _NAMES[mnemonic]
    found = _COMPARED.fullmatch(mnemonic)
    if found and not mnemonic.startswith(("vpcmpeq", "vpcmpgt", "pcmp")):
        return f"{found[1]}{found[2]}cmp{found[4]}"
    found = _SUFFIXED.fullmatch(mnemonic)
    return found[1] if found else mnemonic


def kind_of(operand: str) -> str:
    """Kind of an operand. z, y, x: a vector; k: a mask; m: memory; r: another register; empty for a constant."""
    operand = re.sub(r"\{[^}]*\}", "", operand).strip().lstrip("*")
    if "(" in operand:
        return "m"
    vector = re.match(r"%([xyz])mm|%(k)\d", operand)
    if vector:
        return vector[1] or vector[2]
    return "r" if operand.startswith("%") else ""


def signature(form: str) -> str:
    """Name and operand kinds of a form, in Intel's order, such as ``vaddps z z m``."""
    mnemonic, _, rest = form.removeprefix("{evex} ").partition(" ")
    operands = re.split(r",(?![^(]*\))", rest)
    return " ".join([name_of(mnemonic), *filter(None, map(kind_of, operands[::-1]))])


def ports(used: list[tuple[str, int]], members: dict[str, set[str]]) -> str:
    """Units used, as terms ``cycles*unit|unit``; LLVM repeats a use in every group of units that contains it, this does not."""
    sets: dict[frozenset[str], int] = {}
    for name, cycles in used:
        key = frozenset(members[name])
        sets[key] = max(sets.get(key, 0), cycles)
    own: dict[frozenset[str], int] = {}
    for key in sorted(sets, key=len):
        rest = sets[key] - sum(cycles for inside, cycles in own.items() if inside < key)
        if rest > 0:
            own[key] = rest
    return " ".join(f"{cycles}*{'|'.join(sorted(key))}" for key, cycles in own.items())


def table(mca: str, triple: str, cpu: str, forms: list[str]) -> Iterator[tuple[object, ...]]:
    command = [mca, f"-mtriple={triple}", f"-mcpu={cpu}", "-instruction-tables=full"]
    command.append("-skip-unsupported-instructions=any")
    done = subprocess.run(command, input="\n".join(forms) + "\n", capture_output=True, text=True)
    text = done.stdout.replace("\0", "")
    units = re.findall(r"^\[\d+\]\s+- (\S+?):(\d+)[ \t]*(.*)$", text, re.M)
    # `Load:3` is three identical units
    label = {name: name if count == "1" else f"{name}:{count}" for name, count, rest in units if not rest}
    members = {name: {label[m] for m in (rest.split(", ") if rest else [name]) if m in label} for name, _, rest in units}
    seen = set()
    for line in text.splitlines():
        found = _ROW.match(line)
        if not found:
            continue
        micro_ops, latency, _, _, _, used, _, form = found.groups()
        form = re.sub(r"\s+", " ", form)
        key = signature(form) if triple == "x86_64" else form
        # zero idioms have no dependencies: `is_idiom` finds them by their operands
        registers = re.findall(r"%\w+", form)
        if key in seen or (len(registers) == 3 and len(set(registers)) == 1):
            continue
        seen.add(key)
        uses = [
            (name, int(end or 1) - int(start or 0))
            for name, start, end in re.findall(r"([^\[\],]+)(?:\[(?:(\d+),)?(\d+)\])?,?", used or "")
        ]
        yield cpu, key, int(latency), int(micro_ops), ports(uses, members)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("forms", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llvm-mca", default="llvm-mca-22", metavar="PROGRAM")
    args = parser.parse_args()
    x86, _, arm = args.forms.read_text().partition("\n# Arm\n")
    jobs = [("x86_64", cpu, x86.splitlines()) for cpu in X86]
    jobs += [("aarch64", cpu, arm.splitlines()) for cpu in ARM]
    rows = [row for job in jobs for row in table(args.llvm_mca, *job)]
    frame = pd.DataFrame(rows, columns=["core", "instruction", "latency", "micro_ops", "ports"])
    frame = frame.astype({"core": "category", "instruction": "category", "latency": "int16", "micro_ops": "int16"})
    frame["ports"] = frame["ports"].astype("category")
    frame.to_parquet(args.out, compression="zstd", index=False)
    print(f"{len(frame)} rows of {frame['core'].nunique()} cores, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
