"""Object code of programs: compiled for a target that may be elsewhere, kept between runs, counted without running it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program.codegen.counts import CODEGEN_FEATURES, codegen_features, require_decoder
from cdmpp.program.tvm_env import import_tvm

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)


def compile_to_shared_object(func: Any, target: dict[str, Any], path: Path) -> None:
    """Compile `func` for `target` (llvm) into the shared object `path`; its entry is ``main``.

    Linked by ``ld`` itself (5 ms; the compiler driver that TVM would start takes 30).
    """
    tvm = import_tvm()
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    executable = tvm.compile(mod, target=tvm.target.Target(target))
    linker = shutil.which("ld")
    if linker is None:
        executable.export_library(str(path))
        return
    obj = path.with_suffix(".o")
    try:
        executable.mod.write_to_file(str(obj), "o")
        subprocess.run(
            [linker, "-shared", "-o", str(path), str(obj)], check=True, capture_output=True, text=True
        )
    finally:
        obj.unlink(missing_ok=True)


def code_key(target: Mapping[str, Any]) -> str:
    """Identifies the code that a target dictionary makes.

    The number of cores is not part of it: it steers the design space, not the code that is generated.
    """
    key = json.dumps({k: v for k, v in target.items() if k != "num-cores"}, sort_keys=True)
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()


class ObjectCache:
    """Shared objects kept between runs, by program and :func:`code_key` of the target."""

    def __init__(self, folder: str | Path | None, target: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._suffix = code_key(target)

    def _path(self, program: str) -> Path | None:
        return None if self._folder is None else self._folder / program[:2] / f"{program}-{self._suffix}.so"

    def find(self, program: str) -> Path | None:
        """Where the object of a program is kept; None if it is not."""
        path = self._path(program)
        return path if path is not None and path.exists() else None

    def fetch(self, program: str, to: Path) -> bool:
        """Copy the object of a program; False if it is not there."""
        path = self.find(program)
        if path is None:
            return False
        shutil.copyfile(path, to)
        return True

    def keep(self, program: str, built: Path) -> None:
        """Keep a copy of an object."""
        path = self._path(program)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            shutil.copyfile(built, partial)
            partial.replace(path)


def compiled_features(
    func: Any, target: dict[str, Any], keep: Callable[[Path], None] | None = None
) -> NDArray[np.float32]:
    """Counts of a PrimFunc compiled for a target (llvm), float32 (len(CODEGEN_FEATURES),); errors as TVM's, and as of
    :func:`~cdmpp.program.codegen.counts.codegen_features`. ``keep`` is given the object before it is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.so"
        compile_to_shared_object(func, target, path)
        if keep is not None:
            keep(path)
        return codegen_features(path)


def instruction_counts(programs: Sequence[Any], device: Device) -> NDArray[np.float32]:
    """Counts of PrimFuncs and IRModules compiled for a device's target, float32 (n, len(CODEGEN_FEATURES)).

    A program that does not compile gets a row of NaN, and a warning says so.

    Raises
    ------
    ProgramError
        The device is no x86 CPU with a target; a program is none that can be compiled.
    CdmppError
        TVM or what decodes instructions is not installed.
    """
    target = dict(device.target)
    if target.get("kind") != "llvm" or device.vendor not in ("intel", "amd"):
        raise ProgramError(
            f"{device.name}: only programs compiled for x86 CPUs are counted; predict without compiled=True"
        )
    import_tvm()
    require_decoder()  # one error, not a warning for each program
    from cdmpp.program.ast import CompactAST
    from cdmpp.program.ast.reader import prim_func

    if any(isinstance(program, CompactAST) for program in programs):
        raise ProgramError("a CompactAST cannot be compiled: expected a PrimFunc or an IRModule")
    funcs = [prim_func(program) for program in programs]
    rows = np.full((len(programs), len(CODEGEN_FEATURES)), np.nan, dtype=np.float32)
    for number, func in enumerate(funcs):
        try:
            rows[number] = compiled_features(func, target)
        except (CdmppError, RuntimeError) as err:
            reason = str(err).strip().splitlines()[-1:] or [type(err).__name__]
            logger.warning("program %d of %d does not compile: %s", number + 1, len(programs), reason[0])
    return rows
