"""What the fork server imports once, so that each worker starts in milliseconds with TVM at hand."""

from cdmpp.program.tvm_env import import_tvm

import_tvm()


import cdmpp.profiler.build
import cdmpp.profiler.cpu_runner
import cdmpp.program.space  # noqa: F401
