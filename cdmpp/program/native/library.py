"""Compiling, keeping and loading the C++ reader."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cdmpp.errors import CdmppError
from cdmpp.program.ast_table import LEAF_COLUMNS
from cdmpp.program.leaf_schema import OP_KINDS

_FOLDER = Path(__file__).parent
_SOURCES = ("reader.cc", "table.h", "walk.h", "body.h", "affine.h", "nodes.h")
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 600

logger = logging.getLogger(__name__)


class NativeError(CdmppError):
    """The C++ reader cannot be compiled or loaded; programs can still be read in Python."""


class Library:
    """The functions of the compiled reader.

    Parameters
    ----------
    path
        Of the shared library.

    Raises
    ------
    NativeError
        It cannot be loaded, or TVM's nodes are not as it expects.
    """

    def __init__(self, path: Path) -> None:
        from cdmpp.program.ast_analysis import CALLS
        from cdmpp.program.tvm_env import import_tvm

        import_tvm()  # the library's functions of tvm_ffi are those of the process
        try:
            functions = ctypes.CDLL(str(path))
            self.new = _function(functions, "cdmpp_reader_new", ctypes.c_void_p)
            self.free = _function(functions, "cdmpp_reader_free", None, ctypes.c_void_p)
            pointer = ctypes.c_void_p
            self.read = _function(
                functions,
                "cdmpp_reader_read",
                ctypes.c_int,
                pointer,
                pointer,
                ctypes.c_int64,
                pointer,
                pointer,
            )
            self.copy = _function(functions, "cdmpp_reader_copy", None, pointer, pointer, pointer)
            start = _function(
                functions,
                "cdmpp_start",
                ctypes.c_int,
                pointer,
                pointer,
                ctypes.c_int32,
                pointer,
                ctypes.c_size_t,
            )
            operations = _function(functions, "cdmpp_operations", ctypes.c_char_p)()
            columns = _function(functions, "cdmpp_leaf_columns", ctypes.c_char_p)()
        except (OSError, AttributeError) as err:
            raise NativeError(f"{path} cannot be loaded: {err}") from err
        if operations.decode().split() != list(OP_KINDS) or columns.decode().split() != list(LEAF_COLUMNS):
            raise NativeError(f"{path} has other features than this version of cdmpp")
        names = (ctypes.c_char_p * len(CALLS))(*[name.encode() for name in CALLS])
        kinds = (ctypes.c_int32 * len(CALLS))(*[OP_KINDS.index(kind) for kind in CALLS.values()])
        message = ctypes.create_string_buffer(256)
        if start(names, kinds, len(CALLS), message, len(message)):
            raise NativeError(message.value.decode())


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype = result
    function.argtypes = arguments
    return function


def library_path() -> Path:
    """Where the library is, or will be, for this source, TVM, architecture and these flags.

    Raises
    ------
    NativeError
        TVM is not installed, or there is no home folder.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as err:
        raise NativeError(f"there is no folder for the C++ reader: {err}") from err
    return cache / "cdmpp" / "native" / f"reader-{_digest()}.so"


@lru_cache(maxsize=1)
def _digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (*_FLAGS, sys.platform, platform.machine(), *map(_version, ("apache-tvm", "apache-tvm-ffi"))):
        digest.update(part.encode() + b"\0")
    for name in _SOURCES:
        digest.update((_FOLDER / name).read_bytes() + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as err:
        raise NativeError(f"{package} is not installed") from err


def compile_library(path: Path) -> None:
    """Compile the library if it is not there; of several processes that ask at once, one does it.

    Parameters
    ----------
    path
        From :func:`library_path`.

    Raises
    ------
    NativeError
        There is no compiler, it fails, or the folder cannot be written.
    """
    from tvm_ffi.utils import FileLock

    if path.exists():
        return
    compiler = _compiler()
    started = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(path.with_suffix(".lock"))):
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    draft = Path(folder) / path.name
                    _compile(compiler, draft)
                    draft.replace(path)
                logger.info("%s: compiled in %.0f s", path, time.monotonic() - started)
    except OSError as err:
        raise NativeError(f"{path} cannot be written: {err}") from err


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NativeError(f"there is no C++ compiler ({wanted or ', '.join(_COMPILERS)})")


def _compile(compiler: str, path: Path) -> None:
    from tvm_ffi import libinfo

    include = [f"-I{folder}" for folder in libinfo.include_paths()]
    command = [
        compiler,
        *_FLAGS,
        *include,
        str(_FOLDER / _SOURCES[0]),
        libinfo.find_libtvm_ffi(),
        "-o",
        str(path),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise NativeError(f"the C++ reader of programs was not compiled: {err}") from err
    if done.returncode:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]
        )
        raise NativeError(f"the C++ reader of programs does not compile with {compiler}: {first}")
