"""The compact AST: what the model sees of a program.

A :class:`CompactAST` has the computations (leaves) of a PrimFunc in pre-order, a vector of named numbers for
each (:data:`LEAF_FEATURES`), and their positions in the pre-order of the AST. It is made from the blocks of
scheduled TIR, without lowering it. :mod:`cdmpp.program.ast_walk` says what counts as a node.

Importing this module does not import TVM; :func:`compact_ast` does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError
from cdmpp.program.ast_table import LEAF_COLUMNS, TableBuilder
from cdmpp.program.ast_walk import ProgramWalker
from cdmpp.program.leaf_features import leaf_vectors
from cdmpp.program.leaf_schema import FEATURE_SET, LEAF_FEATURE_DOCS, LEAF_FEATURES

__all__ = [
    "FEATURE_SET", "LEAF_FEATURES", "LEAF_FEATURE_DOCS", "AstBuilder", "CompactAST", "compact_ast", "compact_asts",
]  # fmt: skip

#: Programs whose features are computed together: enough to hide numpy's overhead, little enough for the caches.
_CHUNK = 128


@dataclass(frozen=True, eq=False)
class CompactAST:
    """A program as its leaves.

    Attributes
    ----------
    leaves
        float32 (n_leaves, len(LEAF_FEATURES)), raw values in pre-order of the leaves.
    positions
        int32 (n_leaves,), increasing positions in the pre-order of the AST; the root has position 0.
    n_nodes
        Nodes of the AST: root, loops and leaves.
    """

    leaves: NDArray[np.float32]
    positions: NDArray[np.int32]
    n_nodes: int

    @property
    def n_leaves(self) -> int:
        """Number of computations."""
        return len(self.positions)

    def column(self, name: str) -> NDArray[np.float32]:
        """One feature of all leaves by its name, (n_leaves,)."""
        return self.leaves[:, LEAF_FEATURES.index(name)]


class AstBuilder:
    """Makes compact ASTs; keeps the analyses of block bodies, which programs of one task share.

    Use one for many programs of the same tasks (a tuner keeps one per task). It is not safe to use one builder
    in several threads at once.
    """

    def __init__(self) -> None:
        self._walker = ProgramWalker()

    def build(self, funcs: Sequence[Any]) -> list[CompactAST]:
        """ASTs of PrimFuncs or IRModules with one PrimFunc each.

        Raises
        ------
        ProgramError
            A program has no computation or symbolic shapes; the message says which.
        """
        asts: list[CompactAST] = []
        for start in range(0, len(funcs), _CHUNK):
            with _no_collection():
                asts.extend(self._chunk(funcs[start : start + _CHUNK], start))
        return asts

    def _chunk(self, funcs: Sequence[Any], start: int) -> list[CompactAST]:
        table = TableBuilder()
        nodes: list[int] = []
        counts: list[int] = []
        for i, func in enumerate(funcs):
            try:
                raw = self._walker.walk(func)
            except ProgramError as err:
                if len(funcs) == 1 and not start:
                    raise
                raise ProgramError(f"program {start + i}: {err}") from err
            table.add(raw)
            nodes.append(raw.n_nodes)
            counts.append(len(raw.leaves))
        arrays = table.finish()
        vectors = leaf_vectors(arrays)
        positions = arrays.leaf[:, LEAF_COLUMNS.index("position")].astype(np.int32)
        ends = np.cumsum(counts)
        return [
            CompactAST(vectors[end - count : end], positions[end - count : end], n)
            for end, count, n in zip(ends, counts, nodes, strict=True)
        ]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold back the cyclic garbage collector: a chunk makes thousands of small objects and no cycles, and with a
    large heap around (TVM, torch) collections would take longer than the work."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compact_ast(func: Any) -> CompactAST:
    """The compact AST of one PrimFunc or of an IRModule with one PrimFunc.

    For many programs :func:`compact_asts` or an :class:`AstBuilder` is several times faster.

    Raises
    ------
    ProgramError
        The program has no computation or symbolic shapes.
    """
    return AstBuilder().build([func])[0]


def compact_asts(funcs: Iterable[Any]) -> list[CompactAST]:
    """Compact ASTs of many PrimFuncs or IRModules, in order (see :meth:`AstBuilder.build`)."""
    return AstBuilder().build(list(funcs))
