"""What can be said of a program and a device together, as numbers for the network: how the one fills the other.

Leaf vectors know nothing of the device and device vectors nothing of the program. A network that is to carry over to a
device it has not seen should not have to learn from a handful of devices how a product of matrices is cut into tiles for
their cores (NeuSight, Lee et al., ASPLOS'25, section 4, predicts utilisation from such numbers). Everything here comes from
the compact AST and the device's specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.predictor.roofline import ProgramView, estimate_s, peak_flops, power_headroom, roofline_s

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

#: Edges of the square tiles into which libraries cut products of matrices.
TILES = (32, 64, 128, 256)

#: Ratios are given in thousandths, times in nanoseconds: the encoder takes logarithms of 1 + x.
_PER_MILLE = 1e3
_NS = 1e9
#: Powers of two beyond this divisor make no difference to alignment.
_MOST_ALIGNED = 256

_DOCS: dict[str, str] = {
    "on_gpu": "1 on a GPU",
    "by_library": "1 if a library runs it there, as it is not scheduled",
    "estimate_ns": "analytical estimate",
    "roofline_ns": "lower bound",
    "compute_ns": "floating-point operations over the peak",
    "power_ns": "floating-point operations over what the power limit sustains of it",
    "memory_ns": "bytes of inputs and outputs over the memory's bandwidth",
    "launch_ns": "cost of a launch",
    "intensity": "compute_ns over memory_ns, in thousandths",
    "last_cache": "bytes of inputs and outputs over the last-level cache, in thousandths",
    "near_cache": "bytes of inputs and outputs over the second-level caches of all cores, in thousandths",
    "filled_lanes": "outputs of the main leaf over the lanes of the cores used, in thousandths",
    "rows_per_core": "outputs of the main leaf but for its innermost loop over the cores used, in thousandths",
    **{f"waves_{t}": f"output tiles of {t} x {t} over the cores used, in thousandths" for t in TILES},
    **{
        f"idle_{t}": "the same rounded up over itself, in thousandths: cores idle in the last wave"
        for t in TILES
    },
    **{f"padding_{t}": "points of these tiles over outputs, in thousandths" for t in TILES},
    "blocks_per_core": "GPU blocks over the cores used, in thousandths; 0 where nothing is bound to blocks",
    "resident_blocks": "GPU blocks that a core holds at a time, by its threads and shared memory; 0 as above",
    "block_waves": "GPU blocks over all blocks that run at a time, in thousandths; 0 as above",
    "block_idle": "the same rounded up over itself, in thousandths; 0 as above",
    "balance": "parallel iterations over what the cores used take in rounds, in thousandths",
    "headroom": "power limit over the power of all lanes, relative, in thousandths; missing where unknown",
    "columns_aligned": "largest power of two that divides the innermost output loop",
    "rows_aligned": "the same, the output loop around it",
    "depth_aligned": "the same, the reduction",
    "columns": "extent of the innermost output loop",
    "rows": "extent of the output loop around it",
    "batch": "product of the other output loops",
    "depth": "product of the reduction loops",
}
#: Names of the columns of :func:`pair_features`.
PAIR_FEATURES: tuple[str, ...] = tuple(_DOCS)

#: What a network is told of a program on a GPU that it was never trained on: the program's own shape, how it fills the GPU, and
#: the analytical times; not what tells GPUs apart by themselves (see :data:`cdmpp.device.GENERAL_DEVICE_FEATURES`).
GENERAL_PAIR_FEATURES = frozenset(PAIR_FEATURES) - {
    "compute_ns",
    "power_ns",
    "memory_ns",
    "launch_ns",
    "headroom",
    "last_cache",
    "near_cache",
}


def pair_features(asts: Sequence[CompactAST], device: Device) -> FloatArray:
    """Raw features of programs on one device, float64 (n, len(PAIR_FEATURES)), >= 0; NaN where the device's
    specification does not say."""
    if not len(asts):
        return np.zeros((0, len(PAIR_FEATURES)))
    return features_of(ProgramView.of(asts), asts, device)


def features_of(view: ProgramView, asts: Sequence[CompactAST], device: Device) -> FloatArray:
    """:func:`pair_features` of programs of which the view is known: it is the same for all devices."""
    n = len(asts)
    nan = np.full(n, np.nan)
    cores = max(1.0, device.cores_used or 1.0)
    bandwidth = device.bandwidth_gb_s
    compute = _NS * view.flops / peak_flops(view, device)
    headroom = power_headroom(device)
    memory = view.io_bytes / bandwidth if bandwidth else nan  # GB/s is bytes a nanosecond
    last = 1024 * max(device.l3_kb or 0.0, device.l2_kb or 0.0)
    near = 1024 * (device.l2_kb or 0.0) * (cores if device.kind == "cpu" else 1.0)
    gpu = np.full(n, float(device.kind == "gpu"))
    columns: dict[str, FloatArray] = {
        "on_gpu": gpu,
        "by_library": gpu * ~view.scheduled_for_gpu,
        "estimate_ns": _NS * estimate_s(asts, device),
        "roofline_ns": _NS * roofline_s(asts, device),
        "compute_ns": compute,
        "power_ns": compute / min(1.0, headroom) if headroom is not None else compute,
        "memory_ns": memory,
        "launch_ns": np.full(n, 1e3 * device.launch_overhead_us) if device.launch_overhead_us else nan,
        "intensity": _PER_MILLE * compute / np.maximum(memory, 1e-3),
        "last_cache": _PER_MILLE * view.io_bytes / last if last else nan,
        "near_cache": _PER_MILLE * view.io_bytes / near if near else nan,
        "filled_lanes": _PER_MILLE * view.outputs / (cores * (device.lanes_per_core or 1.0)),
        "rows_per_core": _PER_MILLE * view.outputs / view.columns / cores,
        "headroom": nan if headroom is None else np.full(n, _PER_MILLE * headroom),
        "columns_aligned": _power_of_two(view.columns),
        "rows_aligned": _power_of_two(view.rows),
        "depth_aligned": _power_of_two(view.depth),
        "columns": view.columns,
        "rows": view.rows,
        "batch": view.batch,
        "depth": view.depth,
    }
    for tile in TILES:
        tiles = view.tiles(tile)
        columns[f"waves_{tile}"] = _PER_MILLE * tiles / cores
        columns[f"idle_{tile}"] = _PER_MILLE * np.ceil(tiles / cores) / (tiles / cores)
        columns[f"padding_{tile}"] = _PER_MILLE * tiles * tile**2 / view.outputs
    columns.update(_blocks(view, device, cores))
    rounds = np.ceil(view.parallel / cores)
    columns["balance"] = _PER_MILLE * view.parallel / (rounds * cores)
    return np.stack([columns[name] for name in PAIR_FEATURES], axis=1)


def _blocks(view: ProgramView, device: Device, cores: float) -> dict[str, FloatArray]:
    """How scheduled GPU programs fill the cores; zeros for others."""
    bound = view.scheduled_for_gpu
    resident = np.full(len(view.flops), 32.0)
    if device.max_threads_per_core:
        resident = np.minimum(resident, device.max_threads_per_core // np.maximum(view.threads, 1.0))
    if device.shared_kb:
        resident = np.minimum(resident, 1024 * device.shared_kb // np.maximum(view.shared_bytes, 1.0))
    resident = np.maximum(resident, 1.0)
    waves = view.blocks / (cores * resident)
    found = {
        "blocks_per_core": _PER_MILLE * view.blocks / cores,
        "resident_blocks": resident,
        "block_waves": _PER_MILLE * waves,
        "block_idle": _PER_MILLE * np.ceil(waves) / waves,
    }
    return {name: np.where(bound, values, 0.0) for name, values in found.items()}


def _power_of_two(extent: FloatArray) -> FloatArray:
    """Largest power of two that divides each extent, :data:`_MOST_ALIGNED` at most."""
    whole = np.maximum(extent, 1).astype(np.int64)
    return np.minimum(whole & -whole, _MOST_ALIGNED).astype(np.float64)


def pair_rows(
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
) -> FloatArray:
    """Raw features of many pairs, float64 (n, len(PAIR_FEATURES)).

    Parameters
    ----------
    program, device
        int (n,): number in ``asts`` and in ``devices`` of each pair.
    """
    out = np.empty((len(program), len(PAIR_FEATURES)))
    if not len(program):
        return out
    view = ProgramView.of(asts)
    for number in np.unique(device):
        here = np.flatnonzero(device == number)
        used, back = np.unique(program[here], return_inverse=True)
        rows = features_of(view.take(used), [asts[i] for i in used], devices[number])
        out[here] = rows[back]
    return out
