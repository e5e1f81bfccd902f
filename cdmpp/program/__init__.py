"""Tensor programs: networks, their tasks, the spaces of their schedules, compact ASTs, and the code they compile to.

The public names are listed in :mod:`cdmpp` and imported from the modules here; importing this package loads none of them. This
file has what they all need: TVM, imported once and cheaply. The first ``TuneContext`` of a process imports
``tvm.s_tir.tensor_intrin``, which parses TVMScript for 30 to 50 seconds. The ``llvm`` and ``cuda`` rule sets use none of it, so
an empty module takes its place, unless the real one was imported before.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cdmpp.errors import CdmppError

logger = logging.getLogger(__name__)

_STUB = "tvm.s_tir.tensor_intrin"


def import_tvm() -> Any:
    """Import TVM and return the module (CdmppError: it is not installed)."""
    if _STUB not in sys.modules:
        sys.modules[_STUB] = ModuleType(_STUB, "Placeholder, see cdmpp.program")
    try:
        tvm = importlib.import_module("tvm")
        s_tir = importlib.import_module("tvm.s_tir")
    except ImportError as err:
        raise CdmppError(f"this needs TVM: pip install apache-tvm==0.27.0.post1 ({err})") from err
    if not hasattr(s_tir, "tensor_intrin"):
        vars(s_tir)["tensor_intrin"] = sys.modules.get(_STUB)
    return tvm


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what TVM's C++ code writes to stderr (hundreds of warnings per network) to the debug log. This redirects all of file
    descriptor 2, so Python code inside should log rather than print."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # there is no stderr to redirect
        yield
        return
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            if logger.isEnabledFor(logging.DEBUG):
                sink.seek(0)
                for line in sink.read().decode(errors="replace").splitlines():
                    logger.debug("TVM: %s", line)


def structural_hash(func: Any) -> str:
    """16 hexadecimal digits of TVM's structural hash of a PrimFunc: names of variables and buffers do not matter."""
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(func) & (2**64 - 1):016x}"


def normalise(func: Any) -> Any:
    """The PrimFunc renamed to ``main``, without the attributes that only fusion used."""
    if "op_pattern" in func.attrs:
        func = func.without_attr("op_pattern")
    return func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
