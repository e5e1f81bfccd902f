"""What the fork server imports once, so that each worker starts in milliseconds with TVM at hand (where there is TVM)."""

import contextlib
import signal
import sys

# Ctrl-C is for the process that the user started, which ends its workers. The fork server ignores it once it serves; while it
# imports it would print a traceback.
signal.signal(signal.SIGINT, signal.SIG_IGN)

from cdmpp.errors import CdmppError
from cdmpp.program import import_tvm

# TVM imports torch first, for the sake of Windows: two thirds of the time this takes, for nothing that a worker uses.
sys.modules["torch"] = None  # type: ignore[assignment]
with contextlib.suppress(CdmppError):  # a machine with the GPU need not have TVM
    import_tvm()
del sys.modules["torch"]

import cdmpp.profiler.arguments
import cdmpp.profiler.cpu
import cdmpp.program.codegen.compile
import cdmpp.program.codegen.core
import cdmpp.program.codegen.counts  # noqa: F401
