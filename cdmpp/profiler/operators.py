"""Latencies of a list of operators on the device at hand, by PyTorch alone: a table of operators in, a dataset of them out.

On a GPU runs are captured into a CUDA graph, so that a label is of kernels as a recorded graph runs them, without the host.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from cdmpp.dataset.operators import TORCH, write_operators
from cdmpp.device import Device, get_device
from cdmpp.errors import CdmppError, DatasetError, ProfilerError, reason
from cdmpp.profiler.library import LibraryReport, sampled
from cdmpp.program.operators import DTYPES_OF_TORCH, operator_table

#: Runs that one graph holds.
_IN_GRAPH = 20
#: Times so many runs of a function: seconds of all.
Clock = Callable[[Callable[[], Any]], Callable[[int], float]]


def measure_operators(
    path: str | Path,
    out: str | Path,
    device: str | None = None,
    *,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LibraryReport:
    """Measure the operators of a ``.csv`` file (:data:`cdmpp.program.operators.COLUMNS`) on this machine's GPU, or on
    its CPU where ``device`` says so; what cannot be run is counted. ``clock`` replaces the device's own.

    Raises
    ------
    ProfilerError
        There is no GPU that PyTorch can use, it is another one than ``device``, or no operator could be measured.
    ProgramError, DatasetError
        The list is wrong; there is a dataset in ``out`` already.
    """
    import torch

    try:
        table = operator_table(pd.read_csv(path))
    except (OSError, ValueError) as err:
        raise DatasetError(f"cannot read operators from {path}: {reason(err)}") from err
    here, place = _here(device, clock)
    clock = clock or (_graphs if place == "cuda" else _wall_clock)
    rows, failures, began = [], Counter[str](), time.monotonic()
    with torch.inference_mode():
        for done, row in enumerate(table.to_dict("records")):
            progress(done, len(table))
            try:
                seconds, noise = sampled(clock(function_of(row, place)))
            except (RuntimeError, ValueError, CdmppError) as err:  # of torch: no kernel for it, or no memory
                failures[f"{row['op']}: {reason(err)[:80]}"] += 1
                continue
            rows.append({**row, "device": here.name, "framework": TORCH, "seconds": seconds, "noise": noise})
    if not rows:
        raise ProfilerError(f"no operator of {path} could be measured: {', '.join(failures)}")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    write_operators(
        out, pd.DataFrame(rows), devices={here.name: here.to_json()}, versions=versions, failures=dict(failures)
    )
    return LibraryReport(Path(out), here.name, len(rows), len(rows), dict(failures), time.monotonic() - began)


def _here(device: str | None, clock: Clock | None) -> tuple[Device, str]:
    """The device at hand, and PyTorch's name of it."""
    import torch

    asked = None if device is None else get_device(device)
    if asked is not None and (clock is not None or (asked.kind == "cpu" and asked.base == get_device("this-cpu").base)):
        return asked, "cpu"
    if not torch.cuda.is_available():
        raise ProfilerError(
            "no GPU here that PyTorch can use: copy the list to the machine that has one (--device this-cpu@1 is this CPU)"
        )
    here = get_device(torch.cuda.get_device_name())
    if asked is not None and asked.name != here.name:
        raise ProfilerError(f"the GPU here is {here.name}, not {asked.name}")
    return here, "cuda"


def _wall_clock(function: Callable[[], Any]) -> Callable[[int], float]:
    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            function()
        return time.perf_counter() - began

    return run


def _graphs(function: Callable[[], Any]) -> Callable[[int], float]:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose kernels and allocate before anything is captured
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_GRAPH):
            function()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(times: int) -> float:
        replays = math.ceil(times / _IN_GRAPH)
        begun.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 * times / (replays * _IN_GRAPH)

    return run


def function_of(row: Mapping[str, Any], place: str) -> Callable[[], Any]:
    """What runs an operator, a row of :func:`cdmpp.program.operators.operator_table`, once on random tensors (ProfilerError:
    PyTorch has no kernel that does just this)."""
    import torch
    from torch.nn import functional

    op, narrow = row["op"], row["dtype"] == "fp8"
    size = {name: int(value) for name, value in row.items() if isinstance(value, float) and value == value}
    if row["dtype"] not in DTYPES_OF_TORCH or row["kv_dtype"] != row["dtype"]:
        raise ProfilerError(f"PyTorch has no kernel of {row['dtype']}, {row['kv_dtype']}")
    dtype = torch.bfloat16 if narrow else getattr(torch, row["dtype"])

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=place)

    m, n = size.get("m", 1), size.get("n", 1)
    if op == "gemm" and narrow:
        a, b = (tensor(rows, size["k"]).to(torch.float8_e4m3fn) for rows in (m, n))
        scale = torch.ones((), device=place)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    if op == "gemm":
        batch = [size["batch"]] if size["batch"] > 1 else []
        a, b = tensor(*batch, m, size["k"]), tensor(*batch, n, size["k"]).transpose(-1, -2)
        return lambda: torch.matmul(a, b)
    if op == "quantize" and narrow:
        x = tensor(m, n)
        return lambda: x.to(torch.float8_e4m3fn)
    if narrow:
        raise ProfilerError(f"PyTorch has no {op} of fp8")
    if op == "attention":
        return _attention(size, tensor)
    if op == "conv":
        return _convolution(size, tensor)
    x, y, w = tensor(m, n), tensor(m, n) if row["inputs"] > 1 else 2.0, tensor(n)
    of_rows: dict[str, Callable[[], Any]] = {
        "rmsnorm": lambda: functional.rms_norm(x, (n,), w),
        "layernorm": lambda: functional.layer_norm(x, (n,), w, w),
        "softmax": lambda: torch.softmax(x, -1),
        "elementwise": lambda: torch.mul(x, y),
        "activation": lambda: functional.gelu(x),
        "copy": lambda: x.clone(),
        "reduce": lambda: x.sum(-1),
    }
    if op == "embedding":
        weights, index = tensor(32_000, n), torch.randint(32_000, (m,), device=place)
        return lambda: functional.embedding(index, weights)
    if op not in of_rows:
        raise ProfilerError(f"PyTorch has no one kernel of {op}")
    return of_rows[op]


def _attention(size: Mapping[str, int], tensor: Callable[..., Any]) -> Callable[[], Any]:
    from torch.nn import functional

    sequences, queries, keys = size["sequences"], *(size[name] // size["sequences"] for name in ("tokens", "kv_tokens"))
    pairs, causal = size["pairs"] / sequences, queries == keys > 1
    if pairs != (queries * (queries + 1) / 2 if causal else queries * keys):
        raise ProfilerError("attention with a window, or of more new tokens after others")
    q = tensor(sequences, size["heads"], queries, size["head_dim"])
    k, v = (tensor(sequences, size["kv_heads"], keys, size["head_dim"]) for _ in "kv")
    shared = size["heads"] != size["kv_heads"]
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)


def _convolution(size: Mapping[str, int], tensor: Callable[..., Any]) -> Callable[[], Any]:
    import torch

    stride, dilation = math.isqrt(size["stride"]), math.isqrt(size["dilation"])
    padding = []
    for length, window, out in (("height", "kernel_h", "out_h"), ("width", "kernel_w", "out_w")):
        reach = (size[out] - 1) * stride + dilation * (size[window] - 1) + 1
        padding.append(max(0, math.ceil((reach - size[length]) / 2)))
        if (size[length] + 2 * padding[-1] - dilation * (size[window] - 1) - 1) // stride + 1 != size[out]:
            raise ProfilerError("convolution whose padding or stride differ by side")
    x = tensor(size["batch"], size["in_channels"], size["height"], size["width"])
    groups = size["groups"]
    w = tensor(size["out_channels"], size["in_channels"] // groups, size["kernel_h"], size["kernel_w"])
    how = [stride] * 2, padding, [dilation] * 2, False, [0, 0], groups
    if not size["backward"]:
        return lambda: torch.ops.aten.convolution(x, w, None, *how)
    y, wanted = tensor(size["batch"], size["out_channels"], size["out_h"], size["out_w"]), size["backward"] == 1
    return lambda: torch.ops.aten.convolution_backward(y, x, w, None, *how, [wanted, not wanted, False])
