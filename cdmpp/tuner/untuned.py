"""What a task runs as where nothing was tuned: the start of a tuning, and what it falls back to.

On a CPU that is the task as it is, whose loops LLVM compiles. A GPU cannot run that: there it is the schedule that TVM Relax
gives by default (``tvm.s_tir.dlight``, by the rules of ``relax.backend.cuda``). A default schedule is a program like any
other, a trace without a choice in it, and is told by its origin.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cdmpp.program.tvm_env import quiet

if TYPE_CHECKING:
    from cdmpp.program.types import Program

logger = logging.getLogger(__name__)

#: ``Program.origin`` of default schedules.
DEFAULT = "default"


def is_untuned(program: Program) -> bool:
    """Whether a program is what runs untuned: it is no trial, and no parent for the search, which cannot change it."""
    return program.space_hash is None or program.origin == DEFAULT


def default_schedule(func: Any, target: Any) -> Any | None:
    """The schedule that TVM Relax gives a PrimFunc on a GPU by default; None where no rule does."""
    from tvm.s_tir import dlight

    gpu = dlight.gpu
    for rule in (gpu.Matmul, gpu.GEMV, gpu.Reduction, gpu.GeneralReduction, gpu.Fallback):
        try:
            with quiet(), target:
                found = rule().apply(func, target, False)
        except Exception as err:  # a rule that takes on what it cannot do; TVM raises its own error types
            logger.debug("%s: %s", rule.__name__, err)
            continue
        if found is not None:
            return found[0] if isinstance(found, list) else found
    return None
