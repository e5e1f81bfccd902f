"""Predicting the tasks of a network, or one program from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import ProgramError

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.program.network import Network


def predict_network(
    predictor: Predictor,
    network: Network | str,
    device: str | Device,
    *,
    programs_per_task: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """Predicted latency of every task of a network.

    A task has no latency by itself, its programs have: of each task, `programs_per_task` random programs are drawn
    from MetaSchedule's design space for the device and predicted. ``best_s`` is what a cost-model-guided choice among
    them would promise, ``median_s`` what a blind choice would get.

    Returns
    -------
    dict
        ``network``, ``device``, ``tasks`` (a list of ``task``, ``name``, ``weight``, ``flops``, ``programs``,
        ``best_s``, ``median_s``, ``worst_s``; seconds), ``total_best_s`` and ``total_median_s`` (sums over the
        tasks, weighted), and ``note`` where the prediction needs one.

    Raises
    ------
    NetworkError, UnknownDeviceError, PredictorError
    """
    from cdmpp.device import get_device
    from cdmpp.program.network import load_network
    from cdmpp.program.space import Rebuilder, TaskSpaces, unscheduled
    from cdmpp.program.tasks import extract_tasks

    resolved = get_device(device) if isinstance(device, str) else device
    loaded = load_network(network) if isinstance(network, str) else network
    rule = "llvm" if resolved.kind == "cpu" else "cuda"
    rebuild = Rebuilder()
    rows: list[dict[str, Any]] = []
    for task in extract_tasks([loaded]):
        try:
            spaces = TaskSpaces(task, rule, int(resolved.share) if rule == "llvm" else 0)
            programs = spaces.sample(programs_per_task, seed)
            by_hash = {s.hash: s for s in spaces.spaces}
        except ProgramError:
            programs, by_hash = [], {}
        funcs = [rebuild(p, task, by_hash[str(p.space_hash)]) for p in programs] or [
            rebuild(unscheduled(task), task, None)
        ]
        latencies = np.asarray(predictor.predict(funcs, resolved))
        rows.append(
            {
                "task": task.hash,
                "name": task.name,
                "weight": task.networks[loaded.name],
                "flops": task.flops,
                "programs": len(funcs),
                "best_s": float(latencies.min()),
                "median_s": float(np.median(latencies)),
                "worst_s": float(latencies.max()),
            }
        )
    note = ""
    if resolved.name not in predictor.devices:
        note = (
            f"{resolved.name} is not among the devices of training ({', '.join(predictor.devices)}): "
            "these are extrapolations"
        )
    return {
        "network": loaded.name,
        "device": resolved.name,
        "tasks": rows,
        "total_best_s": sum(r["weight"] * r["best_s"] for r in rows),
        "total_median_s": sum(r["weight"] * r["median_s"] for r in rows),
        "note": note,
    }


def predict_program_file(predictor: Predictor, path: str | Path, device: str | Device) -> dict[str, Any]:
    """Predicted latency of one program: a PrimFunc or IRModule as TVM's JSON (``tvm.ir.save_json``).

    Raises
    ------
    ProgramError
        The file is missing or is not such JSON.
    """
    from cdmpp.device import get_device
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    resolved = get_device(device) if isinstance(device, str) else device
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ProgramError(f"cannot read {path}: {err}") from err
    try:
        program = tvm.ir.load_json(text)
    except Exception as err:  # TVM raises its own error types for anything that is not its JSON
        raise ProgramError(f"{path} is no TIR: expected what tvm.ir.save_json(prim_func) writes") from err
    if not isinstance(program, tvm.tirx.PrimFunc | tvm.IRModule):
        raise ProgramError(f"{path} holds a {type(program).__name__}: expected a PrimFunc or an IRModule")
    return {
        "program": str(path),
        "device": resolved.name,
        "latency_s": float(predictor.predict(program, resolved)),
    }
