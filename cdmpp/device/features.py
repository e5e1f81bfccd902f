"""A device as numbers for the predictor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cdmpp.device.spec import Device

if TYPE_CHECKING:
    import numpy as np

_NAN = math.nan


def _float(value: float | None) -> float:
    return _NAN if value is None else float(value)


def _per_flop(device: Device) -> float:
    peak = device.peak_gflops.get("float32")
    return _NAN if not peak or not device.bandwidth_gb_s else device.bandwidth_gb_s / peak


def _matrix_peak(device: Device) -> float:
    peaks = [peak for name, peak in device.peak_gflops.items() if name.endswith("_matrix")]
    return max(peaks, default=_NAN)


#: Feature -> its value; raw and positive, so that a logarithm suits all but the flags. Units as in the name.
_FEATURES: dict[str, Callable[[Device], float]] = {
    "is_cpu": lambda d: float(d.kind == "cpu"),
    "is_gpu": lambda d: float(d.kind == "gpu"),
    "share_fraction": lambda d: _float(d.share_fraction),
    "cores": lambda d: _float(d.cores),
    "cores_used": lambda d: _float(d.cores_used),
    "clock_mhz": lambda d: _float(d.clock_mhz),
    "simd_bits": lambda d: _float(d.simd_bits),
    "fma": lambda d: _float(d.fma),
    "lanes_per_core": lambda d: _float(d.lanes_per_core),
    "warp_size": lambda d: _float(d.warp_size),
    "max_threads_per_core": lambda d: _float(d.max_threads_per_core),
    "registers_per_core": lambda d: _float(d.registers_per_core),
    "l1_kb": lambda d: _float(d.l1_kb),
    "l2_kb": lambda d: _float(d.l2_kb),
    "l3_kb": lambda d: _float(d.l3_kb),
    "shared_kb": lambda d: _float(d.shared_kb),
    "mem_gb": lambda d: _float(d.mem_gb),
    "bandwidth_gb_s": lambda d: _float(d.bandwidth_gb_s),
    "peak_float32_gflops": lambda d: _float(d.peak_gflops.get("float32")),
    "peak_float64_gflops": lambda d: _float(d.peak_gflops.get("float64")),
    "peak_float16_gflops": lambda d: _float(d.peak_gflops.get("float16")),
    "peak_matrix_gflops": _matrix_peak,
    "bytes_per_flop": _per_flop,
    "tdp_w": lambda d: _float(d.tdp_w),
    "process_nm": lambda d: _float(d.process_nm),
    "launch_overhead_us": lambda d: _float(d.launch_overhead_us),
}

#: Names of the device features, in the order of the vector.
DEVICE_FEATURES: tuple[str, ...] = tuple(_FEATURES)


def device_features(device: Device) -> np.ndarray:
    """Raw features of a device, float32, shape ``(len(DEVICE_FEATURES),)``; NaN where unknown."""
    import numpy as np

    return np.array([value(device) for value in _FEATURES.values()], dtype=np.float32)
