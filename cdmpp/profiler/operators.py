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
from cdmpp.device import get_device
from cdmpp.errors import DatasetError, ProfilerError, reason
from cdmpp.profiler.library import LibraryReport, sampled
from cdmpp.program.operators import operator_table, runs_in_torch

#: Runs that one graph holds.
_IN_GRAPH = 20


def measure_operators(
    path: str | Path,
    out: str | Path,
    device: str | None = None,
    *,
    clock: Callable[[Callable[[], Any]], Callable[[int], float]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LibraryReport:
    """Measure the operators of a ``.csv`` file (:data:`cdmpp.program.operators.COLUMNS`) on this machine's GPU, or on its CPU
    where ``device`` says so; what cannot be run is counted. ``clock`` makes of a function what times so many runs of it.

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
    here = None if device is None else get_device(device)
    on_cpu = here is not None and (clock is not None or here.base == get_device("this-cpu").base)
    if here is None or not on_cpu:
        if not torch.cuda.is_available():
            raise ProfilerError("no GPU here that PyTorch can use: copy the list to a machine that has it")
        found = get_device(torch.cuda.get_device_name())
        if here is not None and here.name != found.name:
            raise ProfilerError(f"the GPU here is {found.name}, not {here.name}")
        here = found
    clock = clock or (_wall_clock if on_cpu else _graphs)
    runs = runs_in_torch(table)
    failures = Counter(f"{op}: PyTorch has no one kernel of it" for op in table["op"][~runs])
    rows, began = [], time.monotonic()
    with torch.inference_mode(), torch.device("cpu" if on_cpu else "cuda"):
        for done, row in enumerate(table[runs].to_dict("records")):
            progress(done, int(runs.sum()))
            try:
                seconds, noise = sampled(clock(function_of(row)))
            except (RuntimeError, ValueError, ProfilerError) as err:  # of torch: no kernel for it, or no memory
                failures[f"{row['op']}: {reason(err)[:80]}"] += 1
                continue
            rows.append({**row, "device": here.name, "framework": TORCH, "seconds": seconds, "noise": noise})
    if not rows:
        raise ProfilerError(f"no operator of {path} could be measured: {', '.join(failures)}")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    devices = {here.name: here.to_json()}
    write_operators(out, pd.DataFrame(rows), devices=devices, versions=versions, failures=dict(failures))
    return LibraryReport(Path(out), here.name, len(rows), len(rows), dict(failures), time.monotonic() - began)


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


def function_of(row: Mapping[str, Any]) -> Callable[[], Any]:
    """What runs an operator, a row of a table that :func:`cdmpp.program.operators.runs_in_torch`, once on random tensors of
    torch's default device (ProfilerError: a convolution whose padding or stride differ by side)."""
    import torch
    from torch.nn import functional

    size = {name: int(value) for name, value in row.items() if isinstance(value, float) and value == value}
    op, m, n, batch = row["op"], *(size.get(name, 1) for name in ("m", "n", "batch"))
    narrow = row["dtype"] == "fp8"
    dtype = torch.bfloat16 if narrow else getattr(torch, row["dtype"])

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    if op == "gemm":
        sides = [() if batch == 1 else (batch,)] * 2
        a, b = (tensor(*side, rows, size["k"]) for side, rows in zip(sides, (m, n), strict=True))
        if not narrow:
            return lambda: torch.matmul(a, b.transpose(-1, -2))
        a, b, scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones(())
        return lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    if op == "attention":
        sequences, heads, dim = (size[name] for name in ("sequences", "heads", "head_dim"))
        queries, keys = (size[name] // sequences for name in ("tokens", "kv_tokens"))
        causal = size["pairs"] < sequences * queries * keys
        q, k, v = (tensor(sequences, h, t, dim) for h, t in ((heads, queries), *[(size["kv_heads"], keys)] * 2))
        shared = heads != size["kv_heads"]
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
    if op == "conv":
        stride, dilation = math.isqrt(size["stride"]), math.isqrt(size["dilation"])
        windows = [dilation * (size[name] - 1) + 1 for name in ("kernel_h", "kernel_w")]
        ends = [(stride * (size[out] - 1), size[side]) for out, side in (("out_h", "height"), ("out_w", "width"))]
        padding = [max(0, -(-(e + w - s) // 2)) for (e, s), w in zip(ends, windows, strict=True)]
        x, y = tensor(batch, size["in_channels"], ends[0][1], ends[1][1]), None
        w = tensor(size["out_channels"], size["in_channels"] // size["groups"], size["kernel_h"], size["kernel_w"])
        how = [stride] * 2, padding, [dilation] * 2, False, [0, 0], size["groups"]
        y = torch.ops.aten.convolution(x, w, None, *how)
        if y.shape[2:] != (size["out_h"], size["out_w"]):
            raise ProfilerError("convolution whose padding or stride differ by side")
        if not size["backward"]:
            return lambda: torch.ops.aten.convolution(x, w, None, *how)
        wanted = [size["backward"] == 1, size["backward"] == 2, False]
        return lambda: torch.ops.aten.convolution_backward(y, x, w, None, *how, wanted)
    x, y, w = tensor(m, n), tensor(m, n) if size["inputs"] > 1 else 2.0, tensor(n)
    of_rows: dict[str, Callable[[], Any]] = {
        "quantize": lambda: x.to(torch.float8_e4m3fn),
        "rmsnorm": lambda: functional.rms_norm(x, (n,), w),
        "layernorm": lambda: functional.layer_norm(x, (n,), w, w),
        "softmax": lambda: torch.softmax(x, -1),
        "elementwise": lambda: torch.mul(x, y),
    }
    return of_rows[op]
