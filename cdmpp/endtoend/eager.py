"""Latency of a network that PyTorch runs eagerly: the sum of its ATen operators, each predicted on its own.

This assumes float32, ``inference_mode`` and contiguous tensors. On a CPU oneDNN is on, with one thread per core of the share. A
run touches all weights: if they and the largest result do not fit the last-level cache together, no operator finds its weights
there. On a GPU convolutions are in tfloat32 if it has units for that, which is PyTorch's default. Python calls operators while
others run there: the longer of both times counts.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.dataset.operators import TORCH_COLD
from cdmpp.device import Device
from cdmpp.endtoend.report import INDEPENDENT, INTERVAL, LatencyReport, LayerLatency
from cdmpp.errors import NetworkError, raised_as
from cdmpp.predictor.operators import BEST, OperatorModel, load_operator_model
from cdmpp.predictor.predictor import COVERAGE
from cdmpp.program.aten import calls_of, table_of
from cdmpp.program.network import Network, load_network
from cdmpp.program.operators import work

if TYPE_CHECKING:
    import pandas as pd

#: Host seconds of Python and PyTorch per GPU operator, and how much hosts differ (standard deviation of logarithms): 14 to 25
#: us for the networks written in ``benchmarks/eager.py`` on two machines.
_CALL_S, _HOSTS = 19e-6, 0.2
#: Overhead cycles of an operator whose code is in no cache (9.5 us: 27 training networks on a Zen 4), and of one if the network
#: fits in the L2 cache. A result passes memory once, unlike that of a repeated operator: at the rate of a Zen 4 core (GB/s).
_CALL_CYCLES, _NEAR_CYCLES, _RESULT_GB_S = 35_000.0, 5_500.0, 27.0
#: Factor on the high end of an operator that is priced by the bytes it moves: a decomposition takes a hundred times as long, an
#: element-wise function about as long.
_UNKNOWN = 30.0
#: Fraction of the last-level cache that holds what the last run used.
_KEPT = 0.8
#: Number of draws of the operators' errors; standard deviation of the logarithmic error that the operators of a network share,
#: on devices with measured kernels and on others: depending on machine (a Zen 4, a Zen 5) and day, 0.06 to 0.23 would have
#: covered nine of ten networks of ``benchmarks/eager.py``.
_DRAWS, _COMMON, _COMMON_ELSEWHERE = 400, 0.15, 0.3


def eager_latency(
    network: Network | str | Path,
    device: Device,
    model: OperatorModel | str | Path = "default",
    price_per_hour: float | None = None,
    coverage: float = COVERAGE,
    launch_overhead_us: float | None = None,
) -> LatencyReport:
    """Predict one run of a network on a GPU or cores of a CPU; ``launch_overhead_us`` is the host's time per call (None: the
    usual time). Raises NetworkError if the network cannot be found or exported, or is not a PyTorch network; PredictorError if
    the model was trained on another kind of device."""
    on_cpu = device.kind == "cpu"
    model = load_operator_model(model, device.kind) if isinstance(model, str | Path) else model
    loaded = load_network(network)
    with raised_as(NetworkError, f"{loaded.name} cannot be priced", RuntimeError, LookupError, TypeError):
        calls = calls_of(loaded.export() if loaded.operators is None else loaded.operators())
    if not calls:
        raise NetworkError(f"network {loaded.name} has no operator: there is nothing to predict")
    table = table_of(calls)
    if not on_cpu and "tfloat32_matrix" in device.peak_gflops:
        table["dtype"] = table["dtype"].mask(table["op"] == "conv", "tfloat32")
    known = (table["known"].astype(bool) | table["kernel"].isin(model.inputs[-1])).to_numpy()
    weights = {node: bytes_ for call in calls for node, bytes_ in call.weight_sizes.items()}
    todo = work(table)
    results = todo["read"] + todo["written"] - table["weight_bytes"].to_numpy(dtype=np.float64)
    together = sum(weights.values()) + float(results.max())
    kept = _KEPT * 1024 * (device.l3_kb or device.l2_kb or 0.0)
    cold = (table["weight_bytes"] > 0).to_numpy() & (together > kept) & on_cpu
    priced = np.zeros((3, len(table)))
    for framework, at in ((BEST, ~cold), (TORCH_COLD, cold)):
        if at.any():
            priced[:, at] = model.interval(table[at], device, framework)
    priced[2, ~known] *= _UNKNOWN
    seconds, low, high = priced + on_cpu * todo["written"] / (1e9 * _RESULT_GB_S)
    spread = np.log(high / low) / (2 * NormalDist().inv_cdf(0.95))
    wider = NormalDist().inv_cdf((1 + coverage) / 2) / NormalDist().inv_cdf(0.95)
    low, high = (seconds * (end / seconds) ** wider for end in (low, high))
    cycles = _NEAR_CYCLES if together < 1024 * (device.l2_kb or 0.0) else _CALL_CYCLES
    call_s = cycles / (1e6 * (device.working_mhz or 2500.0)) if on_cpu else _CALL_S
    call_s = call_s if launch_overhead_us is None else 1e-6 * launch_overhead_us
    calls_s = call_s * len(calls)

    def together_s(kernels: Any, of_host: Any = 0.0) -> Any:
        return kernels + calls_s if on_cpu else np.maximum(kernels, calls_s * np.exp(_HOSTS * of_host))

    total = float(together_s(seconds.sum()))
    layers, start = [], 0.0
    own = (total - float(seconds.sum())) / len(calls)
    for call, familiar, took, least, most in zip(calls, known, seconds, low, high, strict=True):
        layers.append(
            LayerLatency(
                *(call.node.name, call.name, "kernel", "", 1.0, (call.name,)),
                latency_s=float(took),
                low_s=float(least),
                high_s=float(most),
                gap_s=own,
                fraction=float(took + own) / total,
                start_s=start,
                stream=0,
                origin="library",
                unfamiliar=not familiar,
                measured_s=None,
            )
        )
        start += float(took) + own
    notes = _notes(table[~known], (seconds + own)[~known].sum() / total, device, model)
    if not on_cpu and calls_s > seconds.sum():
        notes.append(f"Python's calls bound it: the kernels alone take {1e3 * seconds.sum():.3g} ms (--launch-us 0)")
    rng = np.random.default_rng(0)
    common = _COMMON if model.measured_on(device) else _COMMON_ELSEWHERE
    drawn = rng.normal(0, 1, (_DRAWS, len(seconds))) * spread + rng.normal(0, common, (_DRAWS, 1))
    sums = together_s((seconds * np.exp(drawn)).sum(1), rng.normal(0, 1, _DRAWS))
    chance_low, chance_high = (float(q) for q in np.quantile(sums, [(1 - coverage) / 2, (1 + coverage) / 2]))
    return LatencyReport(
        network=loaded.name,
        device=device.name,
        schedule="torch",
        latency_s=total,
        low_s=min(float(together_s(low.sum(), -2.0)), chance_low),
        high_s=max(float(together_s(high.sum(), 2.0)), chance_high),
        independent_low_s=min(chance_low, total),
        independent_high_s=max(chance_high, total),
        coverage=coverage,
        kernel_s=float(seconds.sum()),
        gap_s=own * len(calls),
        launches=float(len(calls)),
        launch_overhead_us=1e6 * call_s,
        streams=1,
        serial_s=total,
        layers=tuple(layers),
        price_per_hour=price_per_hour,
        cost_per_million=None if price_per_hour is None else 1e6 * total / 3600 * price_per_hour,
        measured_s=None,
        assumptions=(
            "PyTorch runs it eagerly: float32, inference_mode, warm",
            f"weights {'do not fit' if cold.any() else 'stay in'} the last cache from one run to the next"
            if on_cpu
            else "convolutions in tfloat32 where the device has it; Python calls operators while others run",
            INTERVAL,
            INDEPENDENT,
        ),
        notes=tuple(notes),
    )


def _notes(unknown: pd.DataFrame, part: float, device: Device, model: OperatorModel) -> list[str]:
    notes = []
    if not model.measured_on(device):
        others = f"{n} others" if (n := len(model.devices)) > 5 else ", ".join(sorted(model.devices))
        notes.append(f"no library operator was measured on {device.name}: predicted from {others}")
    if len(unknown):
        names = ", ".join(dict.fromkeys(unknown["kernel"]))
        notes.append(f"priced by the bytes that they move, {100 * part:.1f} % of the time: {names}")
    return notes
