"""From PrimFuncs to arrays, through the C++ reader."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.program.ast_table import LEAF_COLUMNS, Collected, IntArray
from cdmpp.program.leaf_schema import OP_KINDS
from cdmpp.program.native.library import Library

#: Fields of :class:`Collected` and the numbers in a line of each, in the order of IntColumn and RealColumn in ``table.h``.
_INTS = {
    "access_leaf": 1, "access_buffer": 1, "row": 3, "place": 5, "node": 4, "node_program": 1, "buffer": 3, "program": 2,
    "linear": 3, "delta": 3, "use": 3, "gather": 2, "opaque": 1, "flat": 2,
}  # fmt: skip
_REALS = {"leaf": len(LEAF_COLUMNS), "ops": len(OP_KINDS), "access": 6}


class Reader:
    """Reads PrimFuncs. Not safe in several threads at once."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._handle = library.new()
        if not self._handle:
            raise MemoryError("no memory for a reader of programs")
        weakref.finalize(self, library.free, self._handle)

    def read(self, funcs: Sequence[Any]) -> tuple[IntArray, Collected]:
        """Read programs.

        Parameters
        ----------
        funcs
            PrimFuncs; None for what is none.

        Returns
        -------
        n_nodes
            int64 (programs,): nodes of each AST, 0 for a program that has to be read in Python.
        collected
            The other programs.
        """
        handles = (ctypes.c_void_p * len(funcs))(
            *[None if func is None else func.__chandle__() for func in funcs]
        )
        n_nodes = np.empty(len(funcs), dtype=np.int64)
        sizes = np.empty(len(_INTS) + len(_REALS), dtype=np.int64)
        if self._library.read(self._handle, handles, len(funcs), n_nodes.ctypes.data, sizes.ctypes.data):
            raise MemoryError("no memory for the arrays of programs")
        ints = np.empty(sizes[: len(_INTS)].sum(), dtype=np.int64)
        reals = np.empty(sizes[len(_INTS) :].sum())
        self._library.copy(self._handle, ints.ctypes.data, reals.ctypes.data)
        arrays: dict[str, Any] = {}
        ends = sizes.tolist()
        for data, widths in ((ints, _INTS), (reals, _REALS)):
            end = 0
            for name, width in widths.items():
                start, end = end, end + ends.pop(0)
                arrays[name] = data[start:end].reshape(-1, width) if width > 1 else data[start:end]
        cells = arrays["linear"]
        loops = arrays["leaf"][:, LEAF_COLUMNS.index("loops")]
        linear = np.zeros((len(arrays["row"]), max(1, int(loops.max(initial=0)))))
        linear[cells[:, 0], cells[:, 1]] = cells[:, 2]
        arrays["linear"] = linear
        return n_nodes, Collected(**arrays)
