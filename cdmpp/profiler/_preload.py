"""What the fork server imports once, so that each worker starts in milliseconds with TVM loaded (if TVM is installed)."""

import contextlib
import signal
import sys

# Ctrl-C is for the process that the user started, which ends its workers. The fork server ignores it once it serves, but while
# it imports, it would print a traceback.
signal.signal(signal.SIGINT, signal.SIG_IGN)

from cdmpp.errors import CdmppError
from cdmpp.program import import_tvm

# TVM imports torch first, for the sake of Windows. That is two thirds of the import time, and workers do not use torch.
sys.modules["torch"] = None  # type: ignore[assignment]
with contextlib.suppress(CdmppError):  # a machine that measures on its GPU need not have TVM
    import_tvm()
del sys.modules["torch"]

import cdmpp.profiler.arguments
import cdmpp.profiler.cpu
import cdmpp.program.codegen.compile
import cdmpp.program.codegen.core
import cdmpp.program.codegen.counts  # noqa: F401
