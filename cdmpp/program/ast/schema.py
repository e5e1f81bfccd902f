"""Names and meanings of the numbers in a leaf vector, of ``leaf_features.yaml``; no computation.

The order of :data:`LEAF_FEATURES` is the order of the columns. Change the meaning of any number and
:data:`FEATURE_VERSION` must go up: predictors and stored ASTs refuse features of another set.
"""

from __future__ import annotations

import hashlib

from cdmpp.files import shipped_table

#: Raised whenever the meaning of a feature changes while its name stays.
FEATURE_VERSION = 3

#: Operations that are counted per iteration ("f": floating point, "i": integer or boolean).
OP_KINDS: tuple[str, ...] = (
    "fadd", "fmul", "fma", "fdiv", "fminmax", "exp", "tanh", "erf", "transcendental", "sqrt", "cast", "compare",
    "select", "branch", "iadd", "imul", "idivmod", "call",
)  # fmt: skip
#: Those that are costly: calls of the C library, and roots.
SPECIAL: tuple[str, ...] = ("exp", "tanh", "erf", "transcendental", "sqrt")

#: Capacities in bytes at which the bytes moved are estimated: register files, then 8 KB to 32 MB.
CAPACITIES: tuple[int, ...] = (512, 2048, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
#: Widths of SIMD registers in bytes for which instructions are counted.
SIMD_BYTES: tuple[int, ...] = (16, 32, 64)
#: Innermost loops described one by one; products by kind cover all loops.
N_LOOPS = 8
#: Accesses described one by one: stores first, then loads by bytes moved.
N_SLOTS = 5
#: Entries of translation look-aside buffers for which the pages moved are estimated.
TLB_ENTRIES: tuple[int, ...] = (64, 1536)
#: Depths (number of inner loops) at which working sets and footprints are given.
WORKING_SET_DEPTHS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 8)
SLOT_DEPTHS: tuple[int, ...] = (1, 2, 3)
#: Numbers of cores for which the imbalance of the parallel loops is given.
CORES: tuple[int, ...] = (2, 4, 8, 16, 32)


def size_name(n: int) -> str:
    """A capacity in bytes as feature names give it: 512b, 32kb, 2mb."""
    return f"{n >> 20}mb" if n >= 1 << 20 else f"{n >> 10}kb" if n >= 1 << 10 else f"{n}b"


def _described() -> dict[str, str]:
    """The rows of ``leaf_features.yaml``, those of one operation, loop or access once for each."""
    each = {"op": OP_KINDS, "loop": range(1, N_LOOPS + 1), "slot": range(1, N_SLOTS + 1)}
    return {
        name.format(**{group: one}): meaning.format(**{group: one})
        for group, rows in shipped_table("program/ast/leaf_features.yaml").items()
        for one in each.get(group, ("",))
        for name, meaning in rows.items()
    }


#: Name -> meaning of every feature, in column order.
LEAF_FEATURE_DOCS: dict[str, str] = _described()
#: Names of the columns of :attr:`cdmpp.program.ast.CompactAST.leaves`.
LEAF_FEATURES: tuple[str, ...] = tuple(LEAF_FEATURE_DOCS)
#: Features of a slot, in order.
SLOT_FEATURES: tuple[str, ...] = tuple(n.removeprefix("slot1_") for n in LEAF_FEATURES if n.startswith("slot1_"))
#: What identifies this feature set in stored ASTs and predictors.
FEATURE_SET: str = "ast{}-{}".format(
    FEATURE_VERSION, hashlib.blake2b("\n".join(LEAF_FEATURES).encode(), digest_size=4).hexdigest()
)
