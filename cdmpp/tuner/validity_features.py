"""What the validity model sees of a program on a device: its pooled leaves, the device's limits, and what meets them.

Nothing here names a device: a model that learned from some GPUs is asked about others by their limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProfilerError
from cdmpp.program.ast.schema import LEAF_FEATURES

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float32]

_NAN = float("nan")
_COLUMN = {name: i for i, name in enumerate(LEAF_FEATURES)}
#: Programs whose leaves are in memory in double precision at a time.
_CHUNK = 2048
#: Leaf features that are of the whole program: all leaves repeat them.
_OF_PROGRAM = tuple(name for name in LEAF_FEATURES if name.startswith("program_"))


@dataclass(frozen=True)
class Limits:
    """What a block, thread or multiprocessor may take; NaN for what is unknown or does not exist, as on a CPU.

    Attributes
    ----------
    is_gpu
        1 or 0.
    warp_size, threads_per_block, threads_per_sm
        Threads.
    shared_static_bytes, shared_optin_bytes, shared_per_sm_bytes
        Shared memory: that a kernel may declare, that a block may opt in to, and of a multiprocessor.
    registers_per_thread, registers_per_block, registers_per_sm
        32-bit registers.
    async_copies
        1 or 0.
    """

    is_gpu: float = 0.0
    warp_size: float = _NAN
    threads_per_block: float = _NAN
    threads_per_sm: float = _NAN
    shared_static_bytes: float = _NAN
    shared_optin_bytes: float = _NAN
    shared_per_sm_bytes: float = _NAN
    registers_per_thread: float = _NAN
    registers_per_block: float = _NAN
    registers_per_sm: float = _NAN
    async_copies: float = _NAN

    def vector(self) -> NDArray[np.float64]:
        """All of them, in order."""
        return np.array([getattr(self, name) for name in LIMIT_FEATURES])


#: Names of the limits, in order.
LIMIT_FEATURES: tuple[str, ...] = tuple(field.name for field in fields(Limits))

#: What a program asks for -> the limit that it meets.
_DEMANDS: dict[str, str] = {
    "threads": "threads_per_block",
    "shared": "shared_static_bytes",
    "shared_optin": "shared_optin_bytes",
    "local_registers": "registers_per_thread",
    "tile_registers": "registers_per_thread",
    "block_local_registers": "registers_per_block",
    "block_tile_registers": "registers_per_block",
}

#: Names of the columns of :func:`validity_features`.
VALIDITY_FEATURES: tuple[str, ...] = (
    *(f"sum_{name}" for name in LEAF_FEATURES if name not in _OF_PROGRAM),
    *(f"max_{name}" for name in LEAF_FEATURES if name not in _OF_PROGRAM),
    *_OF_PROGRAM,
    *(f"limit_{name}" for name in LIMIT_FEATURES),
    *(f"demand_{name}" for name in _DEMANDS),
    "estimate_s",
)
_N_POOLED = len(VALIDITY_FEATURES) - len(LIMIT_FEATURES) - len(_DEMANDS) - 1


def limits_of(device: Device) -> Limits:
    """The limits of a device: its architecture's where :mod:`cdmpp.profiler.gpu.limits` has it, else of its table row."""
    if device.kind != "gpu":
        return Limits()
    target = device.target
    try:
        return limits_of_arch(str(target.get("arch", "")))
    except ProfilerError:
        return Limits(
            is_gpu=1.0,
            warp_size=_known(device.warp_size),
            threads_per_block=_known(target.get("max_threads_per_block")),
            threads_per_sm=_known(device.max_threads_per_core),
            shared_static_bytes=_known(target.get("max_shared_memory_per_block")),
            shared_per_sm_bytes=1024 * _known(device.shared_kb),
            registers_per_sm=_known(device.registers_per_core),
        )


def limits_of_arch(arch: str) -> Limits:
    """The limits of an NVIDIA architecture such as ``sm_86`` (ProfilerError for one that is not in the table)."""
    from cdmpp.profiler.gpu.limits import arch_limits

    known = arch_limits(arch)
    return Limits(
        is_gpu=1.0,
        warp_size=32.0,
        async_copies=float(known.async_copies),
        **{
            name: float(getattr(known, name))
            for name in LIMIT_FEATURES
            if name not in ("is_gpu", "warp_size", "async_copies")
        },
    )


def _known(value: object) -> float:
    return float(value) if isinstance(value, int | float) else _NAN


def pool(asts: Sequence[CompactAST]) -> FloatArray:
    """Signed logarithms of the sums and maxima of all leaf features, float32 (n, columns), n >= 1; what leaves say of
    their whole program is there once."""
    from cdmpp.predictor.encoding import signed_log1p

    leaves = np.concatenate([ast.leaves for ast in asts]).astype(np.float64)
    starts = np.cumsum([0, *(ast.n_leaves for ast in asts[:-1])])
    own = np.array([name not in _OF_PROGRAM for name in LEAF_FEATURES])
    sums = np.add.reduceat(leaves[:, own], starts)
    largest = np.maximum.reduceat(leaves[:, own], starts)
    return signed_log1p(np.concatenate([sums, largest, leaves[starts][:, ~own]], axis=1)).astype(np.float32)


def demands(asts: Sequence[CompactAST], limits: Limits) -> FloatArray:
    """How much of a device's limits programs take, logarithms, float32 (n, demands), NaN where there is no limit.

    Registers are guessed twice: from the arrays that a thread allocates, and with what the straight-line code touches.
    """
    threads, shared, local, tile = np.array(
        [
            (
                ast.leaves[:, _COLUMN["thread_idx"]].max(),
                ast.leaves[0, _COLUMN["program_shared"]],
                ast.leaves[0, _COLUMN["program_local"]] / 4,
                _tile_registers(ast),
            )
            for ast in asts
        ],
        dtype=np.float64,
    ).T
    asked = {
        "threads": threads,
        "shared": shared,
        "shared_optin": shared,
        "local_registers": local,
        "tile_registers": tile,
        "block_local_registers": threads * local,
        "block_tile_registers": threads * tile,
    }
    ratios = [
        np.log(np.maximum(asked[name], 1.0) / getattr(limits, limit)) for name, limit in _DEMANDS.items()
    ]
    return np.stack(ratios, axis=1).astype(np.float32)


def _tile_registers(ast: CompactAST) -> float:
    """Elements that one thread's straight-line code touches, of the leaf that touches most."""
    leaves = ast.leaves
    touched = leaves[:, _COLUMN["tile_outputs"]] + leaves[:, _COLUMN["tile_inputs"]]
    return float((touched / np.maximum(leaves[:, _COLUMN["thread_idx"]], 1.0)).max())


def validity_features(asts: Sequence[CompactAST], limits: Limits, device: Device | None = None) -> FloatArray:
    """Programs on one device, float32 (n, len(VALIDITY_FEATURES)), NaN for what is unknown.

    Parameters
    ----------
    asts
        n >= 1 programs.
    limits
        Of the device.
    device
        Tells the analytical estimate of the latency, by which programs run into a timeout; None leaves it out.
    """
    from cdmpp.predictor.roofline import estimate_s

    out = np.empty((len(asts), len(VALIDITY_FEATURES)), dtype=np.float32)
    fixed = limits.vector()
    for start in range(0, len(asts), _CHUNK):
        some = asts[start : start + _CHUNK]
        rows = out[start : start + _CHUNK]
        rows[:, :_N_POOLED] = pool(some)
        rows[:, _N_POOLED : _N_POOLED + len(fixed)] = fixed
        rows[:, _N_POOLED + len(fixed) : -1] = demands(some, limits)
        rows[:, -1] = _NAN if device is None else np.log(estimate_s(some, device))
    return out


def pooled(features: FloatArray) -> FloatArray:
    """The columns of :func:`validity_features` that are the program's alone: what programs differ in."""
    return features[:, :_N_POOLED]
