"""A device as numbers for the predictor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdmpp.device.spec import Device


def _per_flop(device: Device) -> float | None:
    peak = device.peak_gflops.get("float32")
    return device.bandwidth_gb_s / peak if peak and device.bandwidth_gb_s else None


def _compute_capability(device: Device) -> float | None:
    """``sm_86`` -> 8.6; None for devices that have none."""
    arch = str(device.target.get("arch", ""))
    digits = arch.removeprefix("sm_").rstrip("af")
    if device.vendor != "nvidia" or not arch.startswith("sm_") or not digits.isdigit():
        return None
    return int(digits) / 10


def _volta_or_later(device: Device) -> bool:
    """NVIDIA's libraries have other kernels from Volta on (NVIDIA, Volta tuning guide: one L1 and shared memory, threads
    that are scheduled by themselves): products of matrices that share no tile size or stride limit with Pascal's."""
    return (_compute_capability(device) or 0.0) >= 7.0


def _matrix_peak(device: Device) -> float | None:
    # not of 4 bits, which the weights that ship were not trained with
    peaks = [p for name, p in device.peak_gflops.items() if name.endswith("_matrix") and "float4" not in name]
    return max(peaks, default=None)


#: Features that are no fields of a device.
_COMPUTED: dict[str, Callable[[Device], float | None]] = {
    "is_cpu": lambda d: d.kind == "cpu",
    "is_gpu": lambda d: d.kind == "gpu",
    "clock_mhz": lambda d: d.working_mhz,
    "peak_float32_gflops": lambda d: d.peak_gflops.get("float32"),
    "peak_float64_gflops": lambda d: d.peak_gflops.get("float64"),
    "peak_float16_gflops": lambda d: d.peak_gflops.get("float16"),
    "peak_matrix_gflops": _matrix_peak,
    "bytes_per_flop": _per_flop,
    "is_nvidia": lambda d: d.vendor == "nvidia",
    "is_amd": lambda d: d.vendor == "amd",
    "compute_capability": _compute_capability,
    "volta_or_later": _volta_or_later,
}

#: Names of the device features, in the order of the vector. Raw and positive, so that a logarithm suits all but the flags;
#: units as in the name.
DEVICE_FEATURES: tuple[str, ...] = (
    "is_cpu", "is_gpu", "share_fraction", "cores", "cores_used", "clock_mhz", "simd_bits", "fma", "lanes_per_core",
    "warp_size", "max_threads_per_core", "registers_per_core", "l1_kb", "l2_kb", "l3_kb", "shared_kb", "mem_gb",
    "bandwidth_gb_s", "peak_float32_gflops", "peak_float64_gflops", "peak_float16_gflops", "peak_matrix_gflops",
    "bytes_per_flop", "tdp_w", "process_nm", "launch_overhead_us", "is_nvidia", "is_amd", "compute_capability",
    "volta_or_later",
)  # fmt: skip

#: What a network is given of a GPU that it was never trained on: what many GPUs share. The other features set the few GPUs of a
#: training apart as a name would, and where a new one lies between them says little.
GENERAL_DEVICE_FEATURES = frozenset(
    {"is_cpu", "is_gpu", "share_fraction", "is_nvidia", "is_amd", "compute_capability", "volta_or_later"}
)


def device_features(device: Device) -> np.ndarray:
    """Raw features of a device, float32, shape ``(len(DEVICE_FEATURES),)``; NaN where unknown."""
    values = [_COMPUTED[name](device) if name in _COMPUTED else getattr(device, name) for name in DEVICE_FEATURES]
    return np.array(values, dtype=np.float32)  # of None it makes NaN
