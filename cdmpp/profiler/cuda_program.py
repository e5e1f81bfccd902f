"""A scheduled program as CUDA C++ and the launches that run it: what a machine without TVM needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdmpp.profiler.gpu.limits import KernelShape

#: A buffer: shape and dtype.
BufferSpec = tuple[tuple[int, ...], str]

_BYTES = {"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "float64": 8, "int64": 8, "uint64": 8}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element: 1 for int8 and bool, 4 for what is named nowhere else."""
    if dtype in ("bool", "int8", "uint8"):
        return 1
    return _BYTES.get(dtype, 4)


def buffer_bytes(spec: BufferSpec) -> int:
    """Bytes of a buffer."""
    return math.prod(spec[0]) * dtype_bytes(spec[1])


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    kernel
        Name of the entry function.
    buffers
        Its pointer arguments, as indices into parameters followed by workspaces.
    shape
        Grid, block and the shared memory that the kernel declares.
    """

    kernel: str
    buffers: tuple[int, ...]
    shape: KernelShape

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kernel": self.kernel,
            "buffers": list(self.buffers),
            "grid": list(self.shape.grid),
            "block": list(self.shape.block),
            "shared_bytes": self.shape.shared_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Launch:
        """Inverse of :meth:`to_json`."""
        grid, block = (tuple(int(n) for n in value[name]) for name in ("grid", "block"))
        shape = KernelShape(grid, block, int(value["shared_bytes"]))  # type: ignore[arg-type]
        return cls(str(value["kernel"]), tuple(int(n) for n in value["buffers"]), shape)


@dataclass(frozen=True)
class CudaProgram:
    """CUDA C++ of a program and how to run it.

    Attributes
    ----------
    source
        Compiles by itself with nvcc and with NVRTC.
    params
        Parameters of the program, in order.
    outputs
        Which of them it writes.
    workspaces
        Further global buffers, from kernel to kernel.
    launches
        In order; one run of the program is all of them.
    async_copies
        Whether a kernel copies to shared memory asynchronously (``cp.async``, since sm_80).
    """

    source: str = field(repr=False)
    params: tuple[BufferSpec, ...]
    outputs: tuple[int, ...]
    workspaces: tuple[BufferSpec, ...]
    launches: tuple[Launch, ...]
    async_copies: bool = False

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Parameters and workspaces: what ``Launch.buffers`` counts."""
        return (*self.params, *self.workspaces)

    @property
    def shapes(self) -> list[KernelShape]:
        """Of the launches."""
        return [launch.shape for launch in self.launches]

    def to_json(self) -> dict[str, Any]:
        """All but the source as JSON values."""
        return {
            "params": [[list(shape), dtype] for shape, dtype in self.params],
            "outputs": list(self.outputs),
            "workspaces": [[list(shape), dtype] for shape, dtype in self.workspaces],
            "launches": [launch.to_json() for launch in self.launches],
            "async_copies": self.async_copies,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> CudaProgram:
        """Inverse of :meth:`to_json`."""

        def specs(name: str) -> tuple[BufferSpec, ...]:
            return tuple((tuple(int(n) for n in shape), str(dtype)) for shape, dtype in value[name])

        return cls(
            source,
            specs("params"),
            tuple(int(n) for n in value["outputs"]),
            specs("workspaces"),
            tuple(Launch.from_json(launch) for launch in value["launches"]),
            bool(value["async_copies"]),
        )
