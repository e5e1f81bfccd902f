"""Compiles programs to object code, for a target that may be another machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from cdmpp.program import import_tvm


def compile_to_shared_object(func: Any, target: dict[str, Any], path: Path) -> None:
    """Compile `func` for `target` (llvm) into the shared object `path`; its entry is ``main``. If the target is of another
    architecture than this machine, `path` becomes an object file, which has to be linked on the target machine.

    ``ld`` is called directly: it takes 5 ms, the compiler driver that TVM would start takes 30."""
    tvm = import_tvm()
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    executable = tvm.compile(mod, target=tvm.target.Target(target))
    if str(target.get("mtriple", "")).partition("-")[0] not in ("", platform.machine()):
        executable.mod.write_to_file(str(path), "o")
        return
    linker = shutil.which("ld")
    if linker is None:
        executable.export_library(str(path))
        return
    obj = path.with_suffix(".o")
    try:
        executable.mod.write_to_file(str(obj), "o")
        subprocess.run([linker, "-shared", "-o", str(path), str(obj)], check=True, capture_output=True, text=True)
    finally:
        obj.unlink(missing_ok=True)
