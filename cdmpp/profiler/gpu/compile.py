"""Compiles CUDA C++ to cubins and reports the resources that their kernels use; needs no GPU. NVRTC runs in this process (by
``cuda-bindings``) and takes about 0.1 s per program; ``nvcc`` takes 0.7 s or more. Both get the options of TVM's own build
(``tvm/support/nvcc.py``): fast math, and register usage level 10 for ptxas."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cdmpp.errors import ProfilerError

_OPTIONS = ("--use_fast_math", "-w", "--ptxas-options=-v", "--ptxas-options=--register-usage-level=10")

#: Definitions that TVM's sources use and nvcc provides, but NVRTC does not.
_NVRTC_PREAMBLE = """
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long uint64_t;
#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#ifndef NAN
#define NAN (__int_as_float(0x7fffffff))
#endif
"""


#: Kernel -> resources that it uses. Per thread: 32-bit ``registers``, ``stack_bytes`` (local arrays and spills),
#: ``spill_store_bytes`` and ``spill_load_bytes`` (registers that did not fit). Per block: ``shared_bytes`` (static).
Resources = Mapping[str, Mapping[str, int]]

#: A kernel's resources in the output of ``ptxas -v``. NVRTC 13 repeats ``ptxas`` at the start of each line.
_KERNEL = re.compile(
    r"Function properties for '?(?P<kernel>[\w$]+)'?\s+(?:ptxas\s+\.\s+)?(?P<stack_bytes>\d+) bytes stack frame, "
    r"(?P<spill_store_bytes>\d+) bytes spill stores, (?P<spill_load_bytes>\d+) bytes spill loads\s+ptxas info\s*: "
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared_bytes>\d+)(?:\+\d+)? bytes smem)?"
)


def parse_ptxas(log: str) -> Resources:
    """The resources of each kernel from the output of ``ptxas -v`` (ProfilerError if it lists none)."""
    found = {}
    for match in _KERNEL.finditer(log):
        taken = match.groupdict(default="0")
        kernel = taken.pop("kernel")
        found[kernel] = {name: int(number) for name, number in taken.items()}
    if not found:
        raise ProfilerError(f"ptxas does not say what kernels take: {log[:200]!r}")
    return found


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return ((errors or lines or ["no message"])[0])[:500]


class NvccCompiler:
    """``nvcc``, one process per program. Raises TimeoutError if a compilation takes longer than `timeout_s`."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        path = find_nvcc()
        if path is None:
            raise ProfilerError("there is no nvcc")
        self._path, self._timeout_s = path, timeout_s
        release = re.search(r"release ([\d.]+)", self._run("--version").stdout)
        self.name = f"nvcc {release[1] if release else '?'}"
        self.archs = set(self._run("--list-gpu-code").stdout.split())

    def _run(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command, timeout_s = [self._path, *options], self._timeout_s
        try:
            return subprocess.run(command, capture_output=True, text=True, check=check, timeout=timeout_s)
        except subprocess.TimeoutExpired as err:
            raise TimeoutError(f"nvcc took over {timeout_s:g} s") from err

    def compile(self, source: str, arch: str) -> tuple[bytes, Resources]:
        with tempfile.TemporaryDirectory() as folder:
            code, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
            code.write_text(source, encoding="utf-8")
            options = "-cubin", "-O3", f"--gpu-architecture={arch}", *_OPTIONS
            done = self._run(*options, "-o", str(cubin), str(code), check=False)
            if done.returncode != 0:
                raise ProfilerError(_first_error(done.stderr + done.stdout))
            return cubin.read_bytes(), parse_ptxas(done.stderr + done.stdout)


class NvrtcCompiler:
    """NVRTC in this process. Only killing the process interrupts a compilation. ProfilerError if NVRTC is not installed."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc

            major, minor = self._call(nvrtc.nvrtcVersion())
            # A cubin from its cache comes without the output of ptxas, and its build time is not that of a compilation.
            self._options = (*_OPTIONS, *(("--no-cache",) if (major, minor) >= (12, 9) else ()))
            self.archs = {f"sm_{number}" for number in self._call(nvrtc.nvrtcGetSupportedArchs())[0]}
        except (ImportError, RuntimeError) as err:  # no cuda-bindings, or no library that they can load
            raise ProfilerError(f"NVRTC needs cuda-bindings and nvidia-cuda-nvrtc: {err}") from err
        self._nvrtc = nvrtc
        self.name = f"nvrtc {major}.{minor}"
        # CUDA's headers, from a toolkit or from pip packages
        folders = [Path(home) / "include" for home in _toolkits()]
        folders += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"))
        self._include = [folder for folder in folders if (folder / "cuda_fp16.h").exists()]

    def _call(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]) != 0:
            raise ProfilerError(f"NVRTC: {result[0].name}")
        return result[1:]

    def compile(self, source: str, arch: str) -> tuple[bytes, Resources]:
        nvrtc = self._nvrtc
        lines = [line for line in source.splitlines() if line.strip() != "#include <cuda.h>"]
        text = _NVRTC_PREAMBLE + "\n".join(lines)
        (program,) = self._call(nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], []))
        options = [f"--gpu-architecture={arch}", "-default-device", *self._options]
        options += [f"--include-path={folder}" for folder in self._include]
        try:
            status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
            (size,) = self._call(nvrtc.nvrtcGetProgramLogSize(program))
            said = b" " * size
            self._call(nvrtc.nvrtcGetProgramLog(program, said))
            log = said.rstrip(b"\0 ").decode(errors="replace")
            if int(status) != 0:
                raise ProfilerError(_first_error(log) if log else f"NVRTC: {status.name}")
            (size,) = self._call(nvrtc.nvrtcGetCUBINSize(program))
            cubin = b" " * size
            self._call(nvrtc.nvrtcGetCUBIN(program, cubin))
            return cubin, parse_ptxas(log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _toolkits() -> list[str]:
    homes = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    return [home for home in homes if home]


def find_nvcc() -> str | None:
    """The path of ``nvcc``, searched for on PATH, below ``CUDA_HOME`` and ``CUDA_PATH``, and in ``/usr/local/cuda``."""
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in _toolkits())]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


CudaCompiler = NvrtcCompiler | NvccCompiler


@cache
def find_compiler(arch: str) -> CudaCompiler:
    """A compiler for an architecture: NVRTC if it supports it, else nvcc (ProfilerError if none that is installed does)."""
    reasons: list[str] = []
    for kind in (NvrtcCompiler, NvccCompiler):
        try:
            compiler: CudaCompiler = kind()
        except ProfilerError as err:
            reasons.append(str(err))
            continue
        if arch in compiler.archs:
            return compiler
        reasons.append(f"{compiler.name} does not know it")
    raise ProfilerError(f"no CUDA compiler for {arch}: {'; '.join(reasons)}")
