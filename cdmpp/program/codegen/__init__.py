"""What a compiler makes of a program: instructions by kind, counted in the object code.

The compact AST says what a program asks for; whether the compiler vectorises, gathers, packs or spills decides much
of its latency and is not in the AST. Counting it needs a compilation, which a cost model has no time for, but
*training* has: a network that also has to predict these counts learns from the AST what its compiler will do
(:attr:`cdmpp.predictor.config.LossConfig.codegen_weight`), and one may be given them where a program is compiled for its
prediction.

Here are the names of what is counted, for those who only read counts, and objects kept between runs. To count: ``disassemble``
what ``compile`` or a file gives, find ``blocks``, ``values`` in registers, ``trips``, ``strides``, ``counts`` by kind, and what
``loops`` take on a ``core``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.files import replacing

if TYPE_CHECKING:
    from cdmpp.device import Device

#: Kinds of instructions. z, y, x: registers of 64, 32, 16 bytes; s: one element.
KINDS: tuple[str, ...] = (
    "fma_z", "fma_y", "fma_x", "fma_s", "fp_z", "fp_y", "fp_x", "fp_s", "div",
    "load_z", "load_y", "load_x", "load_s", "store_z", "store_y", "store_x", "store_s", "stack_load", "stack_store",
    "broadcast", "shuffle", "gather", "mask", "integer", "imul", "idiv", "branch", "call", "convert", "all",
)  # fmt: skip
#: The whole program, its innermost loops, and the innermost loop with most arithmetic, each instruction once.
STATIC_FEATURES: tuple[str, ...] = (
    *(f"program_{kind}" for kind in KINDS),
    "innermost_loops",
    "loop_depth",
    *(f"loop_{kind}" for kind in KINDS),
)
#: Capacities of caches for which the fetched lines are counted, after the core's own first level.
CACHE_KB: tuple[int, ...] = (256, 1024, 4096, 16384)
#: Of a program on a core, in cycles but for the last ones: the longest of units, front end, chain and lines from the second
#: cache level, summed over loops and the code between them; each by itself; loops entered, lines fetched, iterations of loops
#: with addresses that are not known, and instructions that the core's table lacks.
CYCLE_FEATURES: tuple[str, ...] = (
    "core_cycles", "unit_cycles", "front_cycles", "chain_cycles", "line_cycles", "call_cycles", "outside_cycles",
    "loop_entries", "l1_lines", *(f"lines_{kb}k" for kb in CACHE_KB), "unknown_addresses", "missing",
)  # fmt: skip
#: Of one innermost loop: how often it runs, iterations each time it is entered, and what an iteration takes and touches.
LOOP_FEATURES: tuple[str, ...] = (
    "runs", "trips", "instructions", "cycles", "units", "front", "chain", "loaded", "stored", "gathers", "calls", "arithmetic",
    "l1_lines", "lines_1024k", "unknown",
)  # fmt: skip
#: Innermost loops that are described, those that take longest.
LOOPS = 6
#: Columns: these, then every instruction as often as it runs, the loops of which that is not known, what
#: :func:`~cdmpp.program.codegen.loops.function_cycles` finds, and the longest loops, zeros where there are fewer.
CODEGEN_FEATURES: tuple[str, ...] = (
    *STATIC_FEATURES,
    *(f"run_{kind}" for kind in KINDS),
    "unknown_loops",
    *CYCLE_FEATURES,
    *(f"loop{number}_{name}" for number in range(LOOPS) for name in LOOP_FEATURES),
)
#: Of the reading: what columns of one name mean differs between versions. 2: branches that a counter decides, overlap checks;
#: 3: a model of each core, loops with copies of their exit.
COUNTING_VERSION = 3


def is_counted(device: Device) -> bool:
    """Whether the instructions of programs compiled for a device can be counted: those of x86 CPUs."""
    return device.target.get("kind") == "llvm" and device.vendor in ("intel", "amd")


def code_key(target: Mapping[str, Any]) -> str:
    """Identifies the code that a target dictionary makes.

    The number of cores is not part of it: it steers the design space, not the code that is generated."""
    key = json.dumps({k: v for k, v in target.items() if k != "num-cores"}, sort_keys=True)
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()


class ObjectCache:
    """Shared objects kept between runs, by program and :func:`code_key` of the target."""

    def __init__(self, folder: str | Path | None, target: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._suffix = code_key(target)

    def _path(self, program: str) -> Path | None:
        return None if self._folder is None else self._folder / program[:2] / f"{program}-{self._suffix}.so"

    def find(self, program: str) -> Path | None:
        """Where the object of a program is kept; None if it is not."""
        path = self._path(program)
        return path if path is not None and path.exists() else None

    def keep(self, program: str, built: Path) -> None:
        """Keep a copy of an object."""
        path = self._path(program)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft:
                shutil.copyfile(built, draft)
