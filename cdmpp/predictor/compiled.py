"""What a compiler makes of a program that is to be predicted: instructions counted without running it.

The target is the device's, not this machine's: LLVM compiles for CPUs that are elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import CdmppError, PredictorError
from cdmpp.profiler.codegen import CODEGEN_FEATURES, disassembler

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)


def instruction_counts(programs: Sequence[Any], device: Device) -> NDArray[np.float32]:
    """Counts of PrimFuncs and IRModules compiled for a device, float32 (n, len(CODEGEN_FEATURES)).

    A program that does not compile gets a row of NaN, and a warning says so.

    Raises
    ------
    PredictorError
        The device is no x86 CPU with a target; a program is none that can be compiled.
    ProfilerError
        There is no disassembler (objdump).
    """
    from cdmpp.profiler.codegen_store import compiled_features
    from cdmpp.program.tvm_env import import_tvm

    target = dict(device.target)
    if target.get("kind") != "llvm" or device.vendor not in ("intel", "amd"):
        raise PredictorError(
            f"{device.name}: only programs compiled for x86 CPUs are counted; predict without compiled=True"
        )
    import_tvm()
    from cdmpp.program.ast import CompactAST
    from cdmpp.program.ast.reader import prim_func

    if any(isinstance(program, CompactAST) for program in programs):
        raise PredictorError("a CompactAST cannot be compiled: expected a PrimFunc or an IRModule")
    disassembler()  # one error, not a warning for each program
    funcs = [prim_func(program) for program in programs]
    rows = np.full((len(programs), len(CODEGEN_FEATURES)), np.nan, dtype=np.float32)
    for number, func in enumerate(funcs):
        try:
            rows[number] = compiled_features(func, target)
        except (CdmppError, RuntimeError) as err:
            reason = str(err).strip().splitlines()[-1:] or [type(err).__name__]
            logger.warning("program %d of %d does not compile: %s", number + 1, len(programs), reason[0])
    return rows
