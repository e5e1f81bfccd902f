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
from cdmpp.program.ast_collect import TableBuilder
from cdmpp.program.ast_table import LEAF_COLUMNS, Collected, leaf_table
from cdmpp.program.ast_walk import ProgramWalker, prim_func
from cdmpp.program.leaf_features import leaf_vectors
from cdmpp.program.leaf_schema import FEATURE_SET, LEAF_FEATURE_DOCS, LEAF_FEATURES
from cdmpp.program.native import Reader, native_reader

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
    """Makes compact ASTs.

    Programs are read in C++ where the reader has been compiled (:mod:`cdmpp.program.native`), else in Python. The
    Python walk keeps the analyses of block bodies, which programs of one task share: use one builder for many
    programs of the same tasks (a tuner keeps one per task). It is not safe to use one builder in several threads at
    once.

    Parameters
    ----------
    native
        False reads in Python in any case.
    """

    def __init__(self, *, native: bool = True) -> None:
        self._native = native
        self._walker: ProgramWalker | None = None
        self._reader: Reader | None = None
        self._built = 0

    def build(self, funcs: Sequence[Any]) -> list[CompactAST]:
        """ASTs of PrimFuncs or IRModules with one PrimFunc each.

        Raises
        ------
        ProgramError
            A program has no computation or symbolic shapes; the message says which.
        """
        asts: list[CompactAST] = []
        self._built += len(funcs)
        if self._native and self._reader is None:
            self._reader = native_reader(self._built)
        for start in range(0, len(funcs), _CHUNK):
            with _no_collection():
                asts.extend(self._chunk(funcs, range(start, min(start + _CHUNK, len(funcs)))))
        return asts

    def _chunk(self, funcs: Sequence[Any], numbers: Sequence[int]) -> list[CompactAST]:
        """ASTs of some of the programs."""
        if self._reader is None:
            return self._walked(funcs, numbers)
        n_nodes, found = self._reader.read([_prim_func_or_none(funcs[i]) for i in numbers])
        if n_nodes.all():
            return _asts(found, n_nodes.tolist())
        # Python takes what the reader leaves to it, and says what is wrong with those that are no programs.
        read = iter(_asts(found, n_nodes[n_nodes > 0].tolist()) if n_nodes.any() else ())
        walked = iter(self._walked(funcs, [i for i, n in zip(numbers, n_nodes, strict=True) if not n]))
        return [next(read if n else walked) for n in n_nodes]

    def _walked(self, funcs: Sequence[Any], numbers: Sequence[int]) -> list[CompactAST]:
        """The same without the C++ reader."""
        if self._walker is None:
            self._walker = ProgramWalker()
        table = TableBuilder()
        n_nodes: list[int] = []
        for i in numbers:
            try:
                raw = self._walker.walk(funcs[i])
            except ProgramError as err:
                if len(funcs) == 1:
                    raise
                raise ProgramError(f"program {i}: {err}") from err
            table.add(raw)
            n_nodes.append(raw.n_nodes)
        return _asts(table.finish(), n_nodes)


def _prim_func_or_none(func: Any) -> Any:
    try:
        return prim_func(func)
    except ProgramError:
        return None


def _asts(found: Collected, n_nodes: Sequence[int]) -> list[CompactAST]:
    """The ASTs of the programs that were collected."""
    vectors = leaf_vectors(leaf_table(found))
    positions = found.leaf[:, LEAF_COLUMNS.index("position")].astype(np.int32)
    counts = found.program[:, 0]
    ends = np.cumsum(counts)
    return [
        CompactAST(vectors[end - count : end], positions[end - count : end], n)
        for end, count, n in zip(ends, counts, n_nodes, strict=True)
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
