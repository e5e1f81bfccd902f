"""Predicting the tasks of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.predictor.predictor import COVERAGE, prediction_note, seconds_interval

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
    compile_best: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Predicted latency of every task of a network.

    A task has no latency by itself, its programs have: of each task, `programs_per_task` random programs are drawn
    from MetaSchedule's design space for the device and predicted. ``best_s`` is what a cost-model-guided choice among
    them would promise, ``median_s`` what a blind choice would get. The interval is the one of the best program's own
    prediction: the best of many predictions is more often too low than one of them picked blindly. With `compile_best`
    so many of the best predicted programs of each task are compiled (not run) and predicted again, told their
    instructions; ``best_s`` is then the best of these.

    Returns
    -------
    dict
        ``network``, ``device``, ``tasks`` (a list of ``task``, ``name``, ``weight``, ``flops``, ``programs``,
        ``compiled``, ``best_s``, ``median_s``, ``worst_s``; seconds; ``best_low_s`` and ``best_high_s``, the interval
        of the best, None where the predictor has none; ``unfamiliar``, how many of the programs are far from the training data,
        None where the predictor cannot tell), ``coverage`` of the intervals, ``total_best_s`` and
        ``total_median_s`` (sums over the tasks, weighted), and ``note`` where the prediction needs one.

    Raises
    ------
    NetworkError, UnknownDeviceError, PredictorError
    """
    from cdmpp.device import get_device
    from cdmpp.endtoend.schedules import random_programs
    from cdmpp.errors import PredictorError
    from cdmpp.predictor.evidence import NO_EVIDENCE
    from cdmpp.program.ast import compact_asts
    from cdmpp.program.network import load_network
    from cdmpp.program.tasks import extract_tasks

    if compile_best < 0:
        raise PredictorError(f"compile_best must be 0 or more, got {compile_best}")
    resolved = get_device(device) if isinstance(device, str) else device
    loaded = load_network(network) if isinstance(network, str) else network
    rows: list[dict[str, Any]] = []
    for task in extract_tasks([loaded]):
        funcs = random_programs(task, resolved, programs_per_task, seed) or [task.prim_func()]
        asts = compact_asts(funcs)
        latencies = np.asarray(predictor.predict(asts, resolved))
        chosen = np.argsort(latencies, kind="stable")[:compile_best]
        evidence, best_s = NO_EVIDENCE, float(latencies.min())
        if len(chosen):
            evidence = predictor.evidence([funcs[i] for i in chosen], resolved, compiled=True)
            best_s = float(predictor.predict_asts([asts[i] for i in chosen], resolved, evidence).min())
        low_s, high_s = seconds_interval(predictor, best_s, resolved, evidence)
        flags = None if predictor.familiarity is None else predictor.unfamiliar(asts, resolved)
        rows.append(
            {
                "task": task.hash,
                "name": task.name,
                "weight": task.networks[loaded.name],
                "flops": task.flops,
                "programs": len(funcs),
                "compiled": len(chosen),
                "best_s": best_s,
                "median_s": float(np.median(latencies)),
                "worst_s": float(latencies.max()),
                "best_low_s": low_s,
                "best_high_s": high_s,
                "unfamiliar": None if flags is None else int(flags.sum()),
            }
        )
    return {
        "network": loaded.name,
        "device": resolved.name,
        "tasks": rows,
        "coverage": COVERAGE,
        "total_best_s": sum(r["weight"] * r["best_s"] for r in rows),
        "total_median_s": sum(r["weight"] * r["median_s"] for r in rows),
        "note": prediction_note(predictor, resolved),
    }
