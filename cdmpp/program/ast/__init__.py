"""Compact ASTs: what the model sees of a program.

A :class:`CompactAST` has the computations (leaves) of a PrimFunc in pre-order, a vector of named numbers for each
(:data:`~cdmpp.program.ast.schema.LEAF_FEATURES`), and their positions in the pre-order of the AST. It is made from the blocks
of scheduled TIR, without lowering it, by a C++ extension (``native/``; ``walk.h`` says what counts as a node), which is built
when cdmpp is installed. Without it everything else works, stored ASTs included. Importing this module imports neither it nor
TVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program.ast.features import leaf_vectors
from cdmpp.program.ast.schema import FEATURE_SET, LEAF_FEATURE_DOCS, LEAF_FEATURES, OP_KINDS
from cdmpp.program.ast.table import ACCESS_COLUMNS, LEAF_COLUMNS, Collected, leaf_table
from cdmpp.program.tvm_env import import_tvm

__all__ = [
    "FEATURE_SET", "LEAF_FEATURES", "LEAF_FEATURE_DOCS", "CompactAST", "compact_ast", "compact_asts", "prim_func",
]  # fmt: skip

#: Programs whose features are computed together: enough to hide numpy's overhead, little enough for the caches.
_CHUNK = 128
#: The extension, see ``setup.py``.
_EXTENSION = "cdmpp.program.ast._reader"


@dataclass(frozen=True, eq=False)
class CompactAST:
    """A program as its leaves."""

    #: float32 (n_leaves, len(LEAF_FEATURES)), raw values in pre-order of the leaves.
    leaves: NDArray[np.float32]
    #: int32 (n_leaves,), increasing positions in the pre-order of the AST; the root has position 0.
    positions: NDArray[np.int32]
    #: Nodes of the AST: root, loops and leaves.
    n_nodes: int

    @property
    def n_leaves(self) -> int:
        """Number of computations."""
        return len(self.positions)

    def column(self, name: str) -> NDArray[np.float32]:
        """One feature of all leaves by its name, (n_leaves,)."""
        return self.leaves[:, LEAF_FEATURES.index(name)]


def compact_asts(funcs: Iterable[Any]) -> list[CompactAST]:
    """Compact ASTs of PrimFuncs or IRModules with one PrimFunc each, in order. ProgramError: a program has no computation or
    symbolic shapes; the message says which. CdmppError: TVM or the C++ extension is missing."""
    funcs = list(funcs)
    asts: list[CompactAST] = []
    for start in range(0, len(funcs), _CHUNK):
        asts += _chunk(funcs[start : start + _CHUNK], start if len(funcs) > 1 else -1)
    return asts


def compact_ast(func: Any) -> CompactAST:
    """The compact AST of one program; for many :func:`compact_asts`, with the same errors, is several times faster."""
    return compact_asts([func])[0]


def prim_func(func: Any) -> Any:
    """A PrimFunc itself, or the only PrimFunc of an IRModule (ProgramError: it is neither)."""
    tvm = import_tvm()
    if isinstance(func, tvm.IRModule):
        found = [f for f in func.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
        if len(found) != 1:
            raise ProgramError(f"expected a module with one PrimFunc, got one with {len(found)}")
        return found[0]
    if not isinstance(func, tvm.tirx.PrimFunc):
        raise ProgramError(f"expected a PrimFunc or an IRModule, got {type(func).__name__}")
    return func


def _chunk(funcs: Sequence[Any], first: int) -> list[CompactAST]:
    """ASTs of some of the programs; ``first`` is the number of the first for messages, -1 for none."""
    reader = _reader()
    prim_funcs = []
    for number, func in enumerate(funcs, first):
        try:
            prim_funcs.append(prim_func(func))
        except ProgramError as err:
            if first < 0:
                raise
            raise ProgramError(f"program {number}: {err}") from err
    try:
        columns = reader.read(prim_funcs, first)
    except ValueError as err:
        raise ProgramError(str(err)) from err
    arrays: dict[str, Any] = {str(name): np.from_dlpack(column) for name, column in columns.items()}
    for name, names in (("leaf", LEAF_COLUMNS), ("access", ACCESS_COLUMNS)):
        arrays[name] = dict(zip(names, arrays[name].T, strict=True))
    found = Collected(**arrays)
    vectors = leaf_vectors(leaf_table(found))
    positions = found.leaf["position"].astype(np.int32)
    counts, _, n_nodes = found.program.T
    ends = np.cumsum(counts)
    return [
        CompactAST(vectors[end - count : end], positions[end - count : end], int(n))
        for end, count, n in zip(ends, counts, n_nodes, strict=True)
    ]


@lru_cache(maxsize=1)
def _reader() -> Any:
    """The functions of the extension (``native/reader.cc``)."""
    import_tvm()  # the extension asks TVM for its nodes
    import tvm_ffi

    spec = find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        raise CdmppError(
            "this needs cdmpp's C++ extension, which was not built: "
            "install a C++ compiler (such as g++), then cdmpp again with pip install --force-reinstall --no-deps"
        )
    try:
        reader = tvm_ffi.load_module(spec.origin)
        names = reader.operations(), reader.leaf_columns()
    except (OSError, RuntimeError, AttributeError) as err:
        raise CdmppError(f"{spec.origin} cannot be loaded, install cdmpp again: {err}") from err
    if names != (" ".join(OP_KINDS), " ".join(LEAF_COLUMNS)):
        raise CdmppError(f"{spec.origin} was built for another version of cdmpp: install cdmpp again")
    return reader
