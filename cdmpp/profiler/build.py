"""The building side of the CPU profiler: a process that turns programs into shared objects.

Objects land in a memory-backed folder. The process compiles only; it never runs what it built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.codegen.compile import ObjectCache, compile_to_shared_object
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


def build_worker(
    connection: Connection,
    target: dict[str, Any],
    folder: str,
    niceness: int,
    object_cache: str | None = None,
) -> None:
    """Serve :class:`BuildJob` after :class:`BuildJob` until the connection closes (runs in its own process)."""
    from cdmpp.profiler import machine
    from cdmpp.profiler.workers import requests
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
            kept = cache.find(job.program.hash)
            if kept is not None:
                shutil.copyfile(kept, path)
            else:
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
