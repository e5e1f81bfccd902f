"""Labels of PyTorch's own kernels on the CPU at hand: every operator of networks, run eagerly on the cores of a share.

Two labels an operator: with operands that the last run left in the caches (framework ``torch``), and with weights that were not
used for so long that no cache holds them (``torch-cold``), as in a network whose weights are larger than the caches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from cdmpp.dataset.operators import TORCH, TORCH_COLD, load_operators, write_operators
from cdmpp.device import Device, get_device
from cdmpp.errors import DatasetError, ProfilerError, reason
from cdmpp.files import write_text
from cdmpp.profiler import machine
from cdmpp.profiler.core_rates import with_clock
from cdmpp.profiler.statistics import SamplingPlan, label, split_half_difference
from cdmpp.program.aten import Call, arguments_of, calls_of, table_of
from cdmpp.program.network import load_network
from cdmpp.program.operators import SIZES

if TYPE_CHECKING:
    from cdmpp.program.network import Network

_PARTIAL = "measured.jsonl"
#: Weights take turns over so many times the last cache; smaller ones than this many bytes are not worth it.
_TURNS, _LEAST_WEIGHTS, _MOST_COPIES = 2.0, 16_384, 1000
#: A run of more is not measured.
_LONGEST_S = 2.0
_PLAN = SamplingPlan(min_sample_s=0.001, min_samples=6, max_samples=16, target_noise=0.02, max_measure_s=0.2)


@dataclass(frozen=True)
class LibraryReport:
    """What a run measured: labels in all and new ones, operators that failed and why, and seconds."""

    path: Path
    device: str
    labels: int
    new: int
    failures: dict[str, int]
    elapsed_s: float


def profile_library(
    networks: Iterable[str | Network],
    device: str | Device = "this-cpu@1",
    out: str | Path = "runs/library",
    *,
    resume: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LibraryReport:
    """Measure every distinct operator of networks with PyTorch on cores of this machine.

    Labels are written as they come: a run that was killed goes on with ``resume``.

    Raises
    ------
    ProfilerError
        The device is not this machine's CPU, or has more cores than this process may use.
    DatasetError
        There is a dataset already and `resume` was not asked for, or it is of another device.
    NetworkError
        A network cannot be found or exported.
    """
    import torch

    device = get_device(device) if isinstance(device, str) else device
    if device.base != getattr(get_device("this-cpu"), "base", None):
        raise ProfilerError(f"{device.name} is not this machine's CPU, whose kernels alone can be timed here")
    folder, began = Path(out), time.monotonic()
    known = _known(folder, device, resume)
    calls = _distinct(networks)
    todo = {key: found for key, found in calls.items() if key not in known}
    cores = machine.core_groups(machine.usable_cores(), int(device.share), 1)[0]
    threads, before = torch.get_num_threads(), machine.usable_cores()
    failures: dict[str, int] = {}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        machine.pin(cores)
        device = with_clock(device)
        torch.set_num_threads(len(cores))
        sentinel = machine.Sentinel()
        with (folder / _PARTIAL).open("a", encoding="utf-8") as file, torch.inference_mode():
            for done, (key, (call, row)) in enumerate(todo.items()):
                progress(done, len(todo))
                try:
                    labels = _measured(call, device, sentinel)
                except (RuntimeError, IndexError, ValueError) as err:  # what a kernel refuses
                    failures[reason(err)] = failures.get(reason(err), 0) + 1
                    continue
                for framework, (seconds, noise) in labels.items():
                    found = {"key": key, **row, "framework": framework, "seconds": seconds, "noise": noise}
                    file.write(json.dumps({k: v for k, v in found.items() if v == v}) + "\n")
                file.flush()
    finally:
        machine.pin(before)
        torch.set_num_threads(threads)
    table = _finish(folder, device, torch.__version__)
    return LibraryReport(
        folder, device.name, len(table), len(todo) - sum(failures.values()), failures, time.monotonic() - began
    )


def _known(folder: Path, device: Device, resume: bool) -> set[str]:
    """Keys of what was measured before."""
    if not (folder / _PARTIAL).exists():
        return set()
    if not resume:
        raise DatasetError(f"{folder} holds labels already: go on with --resume, or choose another folder")
    try:
        of = load_operators(folder)["device"].unique().tolist()
    except DatasetError:  # it was killed before the first one was finished
        of = [device.name]
    if of != [device.name]:
        raise DatasetError(f"{folder} holds labels of {', '.join(of)}, not of {device.name}")
    lines = (folder / _PARTIAL).read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # the last one may be torn
    write_text(folder / _PARTIAL, "".join(whole))
    return {json.loads(line)["key"] for line in whole}


def _distinct(networks: Iterable[str | Network]) -> dict[str, tuple[Call, dict[str, Any]]]:
    """The operators of networks by their sizes, and their rows."""
    found: dict[str, tuple[Call, dict[str, Any]]] = {}
    for network in networks:
        loaded = load_network(network) if isinstance(network, str) else network
        calls, _ = calls_of(loaded.export())
        for call, row in zip(calls, table_of(calls).to_dict("records"), strict=True):
            sizes = " ".join(f"{name}={row[name]:g}" for name in SIZES if row[name] == row[name])
            found.setdefault(f"{call.name} {sizes}", (call, row))
    return found


def _measured(call: Call, device: Device, sentinel: machine.Sentinel) -> dict[str, tuple[float, float]]:
    """Seconds and noise of a call, warm and, if it has weights, cold."""
    caches = 1024 * (device.l3_kb or device.l2_kb or 1024)
    found = {TORCH: _timed(call.node.target, arguments_of(call), sentinel)}
    if call.weight_bytes >= _LEAST_WEIGHTS and call.name != "batch_norm":
        copies = int(np.clip(np.ceil(_TURNS * caches / call.weight_bytes), 2, _MOST_COPIES))
        found[TORCH_COLD] = _timed(call.node.target, arguments_of(call, copies), sentinel)
    return found


def _timed(function: Any, arguments: Sequence[Any], sentinel: machine.Sentinel) -> tuple[float, float]:
    """As :func:`sampled`; the arguments take turns."""
    turn = 0

    def run(times: int) -> float:
        nonlocal turn
        chosen = [arguments[(turn + i) % len(arguments)] for i in range(times)]
        turn += times
        began = time.perf_counter()
        for args, kwargs in chosen:
            function(*args, **kwargs)
        return time.perf_counter() - began

    return sampled(run, sentinel)


def sampled(run: Callable[[int], float], sentinel: machine.Sentinel | None = None) -> tuple[float, float]:
    """Seconds of a run and their noise, by what runs it so many times and says how long that took; samples wait for an
    undisturbed core where a sentinel is given. RuntimeError: a run takes too long."""
    run(1)
    once = run(1)
    if once > _LONGEST_S:
        raise RuntimeError(f"a run takes more than {_LONGEST_S:g} s")
    repeats = _PLAN.repeats(min(once, run(3) / 3))
    samples: list[float] = []
    spent = 0.0
    while _PLAN.needs_more(samples, spent):
        if sentinel is not None:
            sentinel.wait(_PLAN.max_wait_s)
        took = run(repeats)
        spent += took
        if sentinel is not None:
            sentinel.measured(took)
        samples.append(took / repeats)
    return label(samples), split_half_difference(samples)


def _finish(folder: Path, device: Device, version: str) -> pd.DataFrame:
    """The dataset of all labels that were written."""
    rows = [json.loads(line) for line in (folder / _PARTIAL).read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise ProfilerError("no operator of these networks could be measured")
    table = pd.DataFrame(rows).drop_duplicates(["key", "framework"])
    table = table.assign(device=device.name)
    meta = {"devices": {device.name: device.to_json()}, "versions": {"torch": version}}
    write_operators(folder, table, replace=True, **meta)
    return table
