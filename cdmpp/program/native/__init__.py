"""The C++ reader of TIR: what :mod:`cdmpp.program.ast_walk` finds in a PrimFunc, several times faster.

``reader.cc`` and its headers ship as source. They need no header of TVM but the C interface of tvm_ffi, and ask TVM
where the fields of its nodes lie, so that one source serves all builds of TVM that have the same nodes. Compiling
takes some ten seconds of one core, once per source, version of TVM, compiler flags and architecture; the library is
kept in ``$XDG_CACHE_HOME/cdmpp/native`` (``~/.cache`` by default). It is compiled

* by ``python -m cdmpp.program.native``, which ``make install`` runs, and
* when one :class:`~cdmpp.program.ast.AstBuilder` is asked for so many programs that reading them in Python takes as
  long as compiling (:data:`WORTH_COMPILING`): whoever predicts a few programs never waits for a compiler.

A library that is there is used whatever the number of programs. Without a compiler, with another TVM, or with
``CDMPP_NATIVE=0`` in the environment programs are read in Python, with the same results; a program with something
that the reader does not know is read in Python too. Importing this package imports neither TVM nor a library.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

from cdmpp.program.native.library import Library, NativeError, compile_library, library_path
from cdmpp.program.native.reader import Reader

__all__ = [
    "WORTH_COMPILING",
    "Library",
    "NativeError",
    "Reader",
    "compile_library",
    "library_path",
    "native_reader",
]

#: Programs of one builder from which on the reader is compiled if it has not been.
WORTH_COMPILING = 8192
#: Set to 0 it turns the reader off.
NATIVE_VARIABLE = "CDMPP_NATIVE"

logger = logging.getLogger(__name__)


def native_reader(programs: int) -> Reader | None:
    """A reader, or None where programs are to be read in Python.

    Parameters
    ----------
    programs
        For how many programs it is asked for, those before included.
    """
    if os.environ.get(NATIVE_VARIABLE, "1") == "0":
        return None
    try:
        path = library_path()
    except NativeError as err:
        logger.debug("programs are read in Python: %s", err)
        return None
    if programs < WORTH_COMPILING and not path.exists():
        return None
    library = _library(path)
    return None if library is None else Reader(library)


@lru_cache(maxsize=8)
def _library(path: Path) -> Library | None:
    """The library of this path, compiled if it has to be; tried once a process."""
    try:
        compile_library(path)
        return Library(path)
    except NativeError as err:
        logger.warning("programs are read in Python, which is slower: %s", err)
        return None
