"""The code that a compiler generates for a program: its instructions, counted by kind in the object code.

The compact AST describes the program, but not whether the compiler vectorises, gathers, packs or spills, which decides much of
the latency. Counting this needs a compilation. A cost model has no time for one, but *training* has: a network that must also
predict these counts learns from the AST what the compiler will do
(:attr:`cdmpp.predictor.config.LossConfig.codegen_weight`). A network may also get the counts as input, where a program is
compiled for its prediction.

This module has the names of the counts, for code that only reads them, and a cache of objects kept between runs. The counting
is in the submodules: ``disassemble`` decodes the object from ``compile`` or a file, then come its ``blocks``, the ``values`` in
registers, ``trips`` and ``strides`` of loops, ``counts`` by kind, and the cycles that ``loops`` take on a ``core``.
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

#: Kinds of instructions. Suffixes z, y, x: registers of 64, 32, 16 bytes; s: one element (scalar).
KINDS: tuple[str, ...] = (
    "fma_z", "fma_y", "fma_x", "fma_s", "fp_z", "fp_y", "fp_x", "fp_s", "div",
    "load_z", "load_y", "load_x", "load_s", "store_z", "store_y", "store_x", "store_s", "stack_load", "stack_store",
    "broadcast", "shuffle", "gather", "mask", "integer", "imul", "idiv", "branch", "call", "convert", "all",
)  # fmt: skip
#: Counts of the whole program, of its innermost loops, and of the innermost loop with most arithmetic; each instruction once.
STATIC_FEATURES: tuple[str, ...] = (
    *(f"program_{kind}" for kind in KINDS),
    "innermost_loops",
    "loop_depth",
    *(f"loop_{kind}" for kind in KINDS),
)
#: Cache capacities in KB for which the fetched lines are counted, besides the core's own first level.
CACHE_KB: tuple[int, ...] = (256, 1024, 4096, 16384)
#: Features of a program on a core. In cycles: the longest of units, front end, dependency chain and lines from the second cache
#: level, summed over loops and the code between them; then each by itself. As numbers: loops entered, lines fetched, loop
#: iterations with addresses that are not known, and instructions that the core's table lacks.
CYCLE_FEATURES: tuple[str, ...] = (
    "core_cycles", "unit_cycles", "front_cycles", "chain_cycles", "line_cycles", "call_cycles", "outside_cycles",
    "loop_entries", "l1_lines", *(f"lines_{kb}k" for kb in CACHE_KB), "unknown_addresses", "missing",
)  # fmt: skip
#: Features of one innermost loop: iterations in all and each time it is entered, and what one iteration takes and touches.
LOOP_FEATURES: tuple[str, ...] = (
    "runs", "trips", "instructions", "cycles", "units", "front", "chain", "loaded", "stored", "gathers", "calls", "arithmetic",
    "l1_lines", "lines_1024k", "unknown",
)  # fmt: skip
#: Number of innermost loops that have features of their own: those that take longest.
LOOPS = 6
#: Columns of the counts: :data:`STATIC_FEATURES`; every instruction as often as it runs; loops of unknown trip count; what
#: :func:`~cdmpp.program.codegen.loops.function_cycles` finds; and the loops that take longest, zeros where there are fewer.
CODEGEN_FEATURES: tuple[str, ...] = (
    *STATIC_FEATURES,
    *(f"run_{kind}" for kind in KINDS),
    "unknown_loops",
    *CYCLE_FEATURES,
    *(f"loop{number}_{name}" for number in range(LOOPS) for name in LOOP_FEATURES),
)
#: Version of the counting: a column of the same name means something else in another version. 2: branches that a counter
#: decides, overlap checks; 3: a model of each core, loops with copies of their exit.
COUNTING_VERSION = 3


def is_counted(device: Device) -> bool:
    """Whether the instructions of programs compiled for a device can be counted: only for x86 CPUs."""
    return device.target.get("kind") == "llvm" and device.vendor in ("intel", "amd")


def code_key(target: Mapping[str, Any]) -> str:
    """A key for the code that is generated for a target dictionary.

    It leaves out the number of cores, which steers the design space but not the generated code."""
    key = json.dumps({k: v for k, v in target.items() if k != "num-cores"}, sort_keys=True)
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()


class ObjectCache:
    """Shared objects kept between runs, keyed by program and :func:`code_key` of the target."""

    def __init__(self, folder: str | Path | None, target: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._suffix = code_key(target)

    def _path(self, program: str) -> Path | None:
        return None if self._folder is None else self._folder / program[:2] / f"{program}-{self._suffix}.so"

    def find(self, program: str) -> Path | None:
        """Path of the kept object of a program; None if there is none."""
        path = self._path(program)
        return path if path is not None and path.exists() else None

    def keep(self, program: str, built: Path) -> None:
        """Keep a copy of a built object."""
        path = self._path(program)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft:
                shutil.copyfile(built, draft)
