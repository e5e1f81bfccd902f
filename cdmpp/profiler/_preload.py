"""What the fork server imports once, so that each worker starts in milliseconds with TVM at hand (where there is TVM)."""

import contextlib

from cdmpp.errors import CdmppError
from cdmpp.program.tvm_env import import_tvm

with contextlib.suppress(CdmppError):  # a machine with the GPU need not have TVM
    import_tvm()


import cdmpp.profiler.build
import cdmpp.profiler.cpu_runner
import cdmpp.program.space  # noqa: F401
