"""What a compiler makes of a program: instructions by kind, counted in the object code.

The compact AST says what a program asks for; whether the compiler vectorises, gathers, packs or spills decides much
of its latency and is not in the AST. Counting it needs a compilation, which a cost model has no time for, but
*training* has: a network that also has to predict these counts learns from the AST what its compiler will do
(:attr:`cdmpp.predictor.config.LossConfig.codegen_weight`), and one may be given them where a program is compiled for its
prediction.

Here are the names of what is counted, for those who only read counts. To count: ``disassemble`` what ``compile`` or a file
gives, find ``blocks`` and loops, ``values`` in registers, ``trips``, ``counts`` by kind, and ``cycles``, the model of a core.
"""

from __future__ import annotations

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
#: Columns: these, then every instruction as often as it runs, the loops of which that is not known, and
#: what :func:`~cdmpp.program.codegen.cycles.loop_cycles` finds.
CODEGEN_FEATURES: tuple[str, ...] = (
    *STATIC_FEATURES,
    *(f"run_{kind}" for kind in KINDS),
    "unknown_loops",
    "loop_cycles",
    "loop_chain",
    "loop_entries",
)
#: Of the reading: what columns of one name mean differs between versions. 2: branches that a counter decides, overlap checks.
COUNTING_VERSION = 2
