"""The building side of the CPU profiler: a process that turns programs into shared objects.

Objects are linked by ``ld`` itself (5 ms; the compiler driver that TVM would start takes 30) and land in a
memory-backed folder. The process compiles only; it never runs what it built.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.types import Program, Space, Task

#: A parameter of a program: shape and dtype.
ArgSpec = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class BuildJob:
    """One program to build."""

    program: Program
    task: Task
    space: Space | None


@dataclass(frozen=True)
class Built:
    """What became of a :class:`BuildJob`.

    ``status`` is ``ok`` (then ``path`` and ``args`` are set), ``build_error`` or ``invalid_config`` (the program
    cannot be rebuilt).
    """

    program: Program
    status: str
    path: str = ""
    args: tuple[ArgSpec, ...] = ()
    error: str = ""
    build_s: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)


def argument_specs(func: Any) -> tuple[ArgSpec, ...]:
    """Shapes and dtypes of a PrimFunc's parameters, in order.

    Raises
    ------
    ProgramError
        A parameter is not a buffer of fixed shape.
    """
    specs: list[ArgSpec] = []
    for param in func.params:
        extents = getattr(param, "shape", None)  # a buffer is a variable with a shape in this TVM
        if extents is None:
            raise ProgramError(f"parameter {param} is not a buffer")
        try:
            shape = tuple(int(extent) for extent in extents)
        except (TypeError, ValueError) as err:
            raise ProgramError(f"parameter {param} has the dynamic shape {extents}") from err
        specs.append((shape, str(param.dtype)))
    return tuple(specs)


def compile_to_shared_object(func: Any, target: dict[str, Any], path: Path) -> None:
    """Compile `func` for `target` (llvm) into the shared object `path`; its entry is ``main``."""
    from cdmpp.program.tvm_env import import_tvm

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


def build_worker(
    connection: Connection,
    target: dict[str, Any],
    folder: str,
    niceness: int,
    object_cache: str | None = None,
) -> None:
    """Serve :class:`BuildJob` after :class:`BuildJob` until the connection closes (runs in its own process)."""
    from cdmpp.profiler import machine
    from cdmpp.profiler.pool import requests
    from cdmpp.program.space import Rebuilder
    from cdmpp.program.tvm_env import import_tvm

    machine.die_with_parent()
    machine.stand_back(niceness)
    machine.redirect_stderr(Path(folder) / f"stderr-{os.getpid()}")
    import_tvm()
    cache = ObjectCache(object_cache, target)
    rebuild = Rebuilder()
    job: BuildJob
    for job in requests(connection):
        started = time.perf_counter()
        path = Path(folder) / f"{job.program.hash}-{time.monotonic_ns():x}.so"
        try:
            func = rebuild(job.program, job.task, job.space)
            args = argument_specs(func)
            if not cache.fetch(job.program.hash, path):
                compile_to_shared_object(func, target, path)
                cache.keep(job.program.hash, path)
            built = Built(job.program, "ok", str(path), args, "", time.perf_counter() - started)
        except ProgramError as err:
            built = Built(
                job.program, "invalid_config", error=str(err), build_s=time.perf_counter() - started
            )
        except subprocess.CalledProcessError as err:
            built = Built(job.program, "build_error", error=f"ld: {err.stderr[-400:]}")
        except Exception as err:  # TVM reports through its own error types
            text = (str(err).strip().splitlines() or [type(err).__name__])[-1]
            built = Built(
                job.program,
                "build_error",
                error=f"{type(err).__name__}: {text}"[:500],
                build_s=time.perf_counter() - started,
            )
        connection.send(built)
