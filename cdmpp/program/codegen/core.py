"""What an instruction costs on a core: its latency, its micro-ops, and the execution units that it keeps busy.

The costs come from LLVM's scheduling models (``cores.parquet``); ``cores.yaml`` corrects them and adds what they leave out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.files import shipped_table
from cdmpp.program.codegen import CODEGEN_FEATURES, LOOP_FEATURES, LOOPS, code_key
from cdmpp.program.codegen.blocks import Address, Instruction

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
#: Imaginary unit that only calls, and gathers whose units are not known, keep busy.
_ALONE = ("alone",)
#: Instructions that, applied to a register and itself, set it to a constant, whatever it holds.
_IDIOMS = ("xor", "pxor", "pcmpeq", "kxnor", "kxor", "psub", "sub")
_MOVES = ("mov", "vmov", "vbroadcast", "vpbroadcast")
#: Share of the window that waits for operands while a chain ends; it fits the labels of a Zen 3, 4 and 5 and a Cascade Lake.
_WAITING = 0.7
_NOTHING = ("nop", "vzeroupper", "endbr64", "prefetch", "ret")


class Cost(NamedTuple):
    """Cost of one instruction, in cycles; ``uses`` are (cycles, units any of which may do it), ``unit:2`` is two alike."""

    latency: float
    micro_ops: float
    uses: tuple[tuple[float, tuple[str, ...]], ...]

    def and_then(self, other: Cost) -> Cost:
        """Cost of both instructions, one after the other, as one fused micro-op."""
        return Cost(self.latency + other.latency, max(self.micro_ops, other.micro_ops), self.uses + other.uses)


@cache
def _facts() -> Mapping[str, Any]:
    facts = shipped_table("program/codegen/cores.yaml")
    return {**facts, "core_of": {name: core for core, names in facts["same"].items() for name in names}}


@cache
def _table() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Rows of the table, keyed by core; an empty list for a core that uses the rows of another core (``rows_of``)."""
    import pyarrow.parquet as pq

    found: dict[str, Any] = {name: [] for name, facts in _facts()["cores"].items() if "rows_of" in facts}
    # ``read_table`` would import pandas, which costs every builder half a second
    for row in pq.ParquetFile(_FOLDER / "cores.parquet").read().to_pylist():
        found.setdefault(row["core"], []).append(row)
    return found


@cache
def _rows(core: str) -> dict[str, Cost]:
    facts = _facts()["cores"].get(core, {})
    found = {}
    if "rows_of" in facts:
        found = _rows(facts["rows_of"])
    else:
        for row in _table()[core]:
            uses = tuple(_use(term) for term in row["ports"].split())
            found[row["instruction"]] = Cost(float(row["latency"]), float(row["micro_ops"]), uses)
    return _rows_unlike(found, facts) if "units" in facts else found


def _use(term: str) -> tuple[float, tuple[str, ...]]:
    """Parse a use: ``2*a|b`` is two cycles of one of the units a and b."""
    cycles, _, units = term.partition("*")
    return float(cycles), tuple(units.split("|"))


def _rows_unlike(rows: Mapping[str, Cost], facts: Mapping[str, Any]) -> dict[str, Cost]:
    """Rows with the differences that a core's facts list."""
    found = {}
    for name, cost in rows.items():
        if facts.get("full_width"):
            cost = rows.get(name.replace(" z", " y"), cost)
        latencies = facts.get("latency", {}).items()
        cycles = next((c for pattern, c in latencies if re.fullmatch(pattern, name.split()[0])), None)
        units = {k: v for pattern, own in facts["units"].items() if re.fullmatch(pattern, name) for k, v in own.items()}
        used = ((c, units.get("|".join(u), "|".join(u))) for c, u in cost.uses)
        uses = tuple(_use(names if "*" in names else f"{c}*{names}") for c, names in used if names)
        memory = " m" in name
        found[name] = Cost(cost.latency if cycles is None or memory else cycles, cost.micro_ops, uses)
    return found


def core_name(device: Device) -> str:
    """The core in the table that runs code like the device; if there is none, the vendor's nearest core, with a warning."""
    name: str = _facts()["core_of"].get(device.arch, device.arch)
    if name in _table():
        return name
    nearest: str = _facts()["nearest"].get(device.vendor, "haswell")
    _warn(f"no table of instructions for {device.arch or device.name}: that of {nearest} is used")
    return nearest


_warn = cache(logger.warning)


def counts_key(device: Device) -> str:
    """A key for the code that is generated for a device's target and, for a CPU, the core that runs it."""
    code = code_key(device.target)
    return f"{code}-{core_name(device)}" if device.kind == "cpu" else code


@cache
def core_of(name: str) -> Core:
    """The core with a name from :func:`core_name`; it is read once and cached."""
    return Core(name)


class Core:
    """A core of the table."""

    def __init__(self, name: str) -> None:
        facts = {**_facts()["defaults"], **_facts()["cores"].get(name, {})}
        self.name = name
        self.width, self.window = float(facts["width"]), int(facts["window"])
        #: Scheduler entries for general and for vector instructions; the second is 0 where one scheduler is for both.
        self.queues = (int(facts["queue"]), int(facts.get("vector_queue", 0)))
        self.forward: Mapping[str, float] = facts["forward"]
        self.l1_kb = int(facts["l1_kb"])
        #: Cycles for a cache line from the second level.
        self.line = float(facts["line"])
        self._facts, self._rows = facts, _rows(name)
        self._known: dict[tuple[Any, ...], Cost] = {}
        #: Instructions seen so far that have no row, written like ``vaddps z z m``.
        self.missing: set[str] = set()

    def cost(self, instruction: Instruction) -> Cost:
        """Cost of an instruction, with its loads from the first cache level."""
        key = instruction.name, kinds_of_operands(instruction), instruction.loads, instruction.stores
        if key not in self._known:
            self._known[key] = self._cost(instruction, key[1])
        return self._known[key]

    def latencies(self, instruction: Instruction) -> tuple[float, float]:
        """Cycles of an instruction's load, and cycles from all of its operands to its result, 0 for moves from or to memory."""
        kinds = kinds_of_operands(instruction)
        wide = next((kind for kind in kinds if kind in "zyx"), "r")
        latency, memory = self.cost(instruction).latency, "m" in kinds and instruction.flow != "call"
        if memory and (instruction.loads or instruction.stores):
            if instruction.name.startswith(_MOVES):
                latency = 0.0
            else:  # of the same instruction with a register: models differ in how long the load takes
                row = self._find(instruction.name, tuple(wide if kind == "m" else kind for kind in kinds))
                latency = latency if row is None else row.latency
        loading = self.load(wide).latency if memory and instruction.loads else 0.0
        return loading, latency

    def is_missing(self, instruction: Instruction) -> bool:
        """Whether an instruction has no row in the table; its cost is then taken to be that of an addition."""
        self.cost(instruction)
        return bool(self.missing) and " ".join((instruction.name, *kinds_of_operands(instruction))) in self.missing

    def load(self, kind: str) -> Cost:
        """Cost of a load into a register of the given kind."""
        return self._rows["mov r m" if kind == "r" else f"vmovups {kind} m"]

    def busiest(self, uses: Mapping[tuple[str, ...], float]) -> float:
        """Least number of cycles for the given uses of units, set by the most loaded set of units.

        For a set of units, the work that only they can do is divided by their number. The maximum over all sets is what a
        perfect schedule takes (Abel and Reineke, uops.info, ASPLOS'19; Ritter and Hack, PMEvo, PLDI'20, section 3)."""
        sets: set[frozenset[str]] = set()
        for units in uses:
            own = frozenset(units)
            sets |= {own, *(own | other for other in sets if len(sets) < 512)}
        return max((sum(c for u, c in uses.items() if units.issuperset(u)) / _number(units) for units in sets), default=0.0)

    def _cost(self, instruction: Instruction, kinds: tuple[str, ...]) -> Cost:
        name = instruction.name
        if name.startswith(_NOTHING):
            return Cost(0.0, 1.0, ())
        if instruction.flow == "call":
            return Cost(self._facts["latency_of_call"], 4.0, ((self._facts["call"], _ALONE),))
        if ("gather" in name or "scatter" in name) and "gather" in self._facts:
            return self._gather(instruction)
        found = self._find(name, kinds)
        if found is None:
            self.missing.add(" ".join((name, *kinds)))
            logger.info("%s has no row for %s: it counts as an addition", self.name, " ".join((name, *kinds)))
            wide = next((kind for kind in kinds if kind in "zyx"), None)
            found = self._rows["add r r" if wide is None else f"vpaddd {wide} {wide} {wide}"]
        if "m" in kinds and found.micro_ops > 1 and self._facts["fuses"]:
            found = found._replace(micro_ops=found.micro_ops - 1)
        wide_uses = self._facts.get("wide_store" if instruction.stores else "wide_load", {})
        if "z" in kinds and "m" in kinds and wide_uses:
            found = found._replace(uses=tuple((wide_uses.get(units[0], cycles), units) for cycles, units in found.uses))
        return found

    def _gather(self, instruction: Instruction) -> Cost:
        bits = max(o.bits for o in instruction.operands if not isinstance(o, Address | int) and o.name.startswith("zmm"))
        elements = bits // (64 if instruction.name.endswith(("pd", "dq", "qq")) else 32)
        cycles = float(self._facts["gather"].get(elements, 2.0 * elements))
        return Cost(20.0, cycles * self.width, ((cycles, _ALONE), *((elements * c, u) for c, u in self.load("x").uses)))

    def _find(self, name: str, kinds: tuple[str, ...]) -> Cost | None:
        for other in _names(name):
            for operands in (kinds, (kinds[0], *kinds) if len(kinds) == 2 else kinds):
                row = self._rows.get(" ".join((other, *operands)))
                if row is not None:
                    return row
        if "m" not in kinds:
            return None
        wide = next((kind for kind in kinds if kind in "zyx"), "r")
        row = self._find(name, tuple(wide if kind == "m" else kind for kind in kinds))
        if row is None:
            return None
        if kinds[0] != "m":
            return self.load(wide).and_then(row)
        stored = row.and_then(self._rows["mov m r" if wide == "r" else f"vmovups m {wide}"])
        return stored if name.startswith(("mov", "vmov", "set")) else self.load(wide).and_then(stored)


def _number(units: frozenset[str]) -> int:
    return sum(int(unit.partition(":")[2] or 1) for unit in units)


def kinds_of_operands(instruction: Instruction) -> tuple[str, ...]:
    """A letter for each operand: z, y, x: vectors; k: a mask; m: memory; r: another register. Constants have none."""
    kinds = []
    for operand in instruction.operands:
        if isinstance(operand, Address):
            kinds.append("m")
        elif not isinstance(operand, int):
            vector = {512: "z", 256: "y"}.get(operand.bits, "x") if operand.name.startswith("zmm") else ""
            kinds.append(vector or ("k" if operand.name.startswith("k") else "r"))
    return tuple(kinds)


def with_overlap(counts: NDArray[np.floating], core: Core) -> NDArray[np.float64]:
    """Counts (n, len(CODEGEN_FEATURES)), corrected for overlap: in the longest loops, one entry overlaps with the next.

    While a chain of dependent instructions ends, the core already looks at the next entry of its loop, as far as its window
    reaches. Of a chain over n instructions n / (n + w) is left, where w is the part of the window that waits for operands."""
    found = np.array(counts, dtype=np.float64)
    loops = found[:, -LOOPS * len(LOOP_FEATURES) :].reshape(len(found), LOOPS, len(LOOP_FEATURES))
    of = {name: loops[:, :, number] for number, name in enumerate(LOOP_FEATURES)}
    span = np.maximum(of["instructions"] * np.maximum(of["trips"], 1.0), 1.0)
    # the counts assume that only loops shorter than the window overlap: undo this first
    chain = of["chain"] * np.maximum(1.0, core.window / span) * span / (span + _WAITING * core.window)
    cycles = np.maximum.reduce([of["units"], of["front"], chain, core.line * of["l1_lines"]])
    for name, total, values in (("chain", "chain_cycles", chain), ("cycles", "core_cycles", cycles)):
        found[:, CODEGEN_FEATURES.index(total)] += (of["runs"] * (values - of[name])).sum(axis=1)
        of[name][:] = values
    found[:, -LOOPS * len(LOOP_FEATURES) :] = loops.reshape(len(found), -1)
    return found


@cache
def _names(name: str) -> tuple[str, ...]:
    """Names to look up for an instruction: its own, and those of instructions that cost as much."""
    found = [name]
    if name.startswith("j"):
        return ("jmp",) if name == "jmp" else ("jne", "jmp")
    for prefix, other in (("cmov", "cmovl"), ("set", "setl")):
        if name.startswith(prefix):
            return name, other
    fused = re.fullmatch(r"vfn?m(?:add|sub|addsub|subadd)\d{3}([ps][sd])", name)
    if fused:
        found += [f"vfmadd231{fused[1]}"]
    if not name.startswith("v"):
        found += [f"v{other}" for other in found]
    # a scalar instruction costs as much as the vector one: LLVM has some scalar ones wrong
    scalars = [f"{other[:-2]}p{other[-1]}" for other in found if other.endswith(("ss", "sd"))]
    if not name.startswith(("vmov", "mov", "vucom", "vcom", "vcvt")):
        return (*scalars, *found)
    return tuple(found)


def is_idiom(instruction: Instruction) -> bool:
    """Whether an instruction sets its first operand to a constant without waiting for any operand."""
    registers = instruction.operands[-2:]
    return instruction.name.removeprefix("v").startswith(_IDIOMS) and len(registers) == 2 and registers[0] == registers[1]
