"""Object code of programs: compiled for a target that may be another machine's, and kept between runs."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdmpp.files import replacing
from cdmpp.program import import_tvm


def compile_to_shared_object(func: Any, target: dict[str, Any], path: Path) -> None:
    """Compile `func` for `target` (llvm) into the shared object `path`; its entry is ``main``. For a machine of another kind
    than this one `path` is an object that it has to link.

    Linked by ``ld`` itself (5 ms; the compiler driver that TVM would start takes 30).
    """
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

    def keep(self, program: str, built: Path) -> None:
        """Keep a copy of an object."""
        path = self._path(program)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft:
                shutil.copyfile(built, draft)
