"""Predicting one program from a file: what ``cdmpp predict PROGRAM.json`` does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdmpp.device import Device, get_device
from cdmpp.errors import PredictorError, ProgramError
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import Predictor
from cdmpp.predictor.uncertainty import ALL_DEVICES
from cdmpp.program.ast import compact_asts
from cdmpp.program.tvm_env import import_tvm

#: Coverage of the intervals given with predictions.
COVERAGE = 0.9

_MEASURED = re.compile(r"([^=]+)=(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(s|ms|us|ns)")
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def measured_latencies(texts: Sequence[str]) -> dict[str, float] | None:
    """Device -> seconds of ``D=LATENCY`` texts, the latency in s, ms, us or ns (``rtx-3060=1.3ms``); None of none.

    Raises
    ------
    PredictorError
        A text that is none, or a device twice.
    """
    found: dict[str, float] = {}
    for text in texts:
        match = _MEASURED.fullmatch(text)
        if match is None:
            raise PredictorError(f"'{text}': expected DEVICE=LATENCY with its unit, such as rtx-3060=1.3ms")
        device, value, unit = match.groups()
        if device in found:
            raise PredictorError(f"{device} is named twice: expected one latency of a device")
        found[device] = float(value) * _UNITS_S[unit]
    return found or None


def predict_program_file(
    predictor: Predictor,
    path: str | Path,
    device: str | Device,
    *,
    compiled: bool = False,
    measured: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Predicted latency of one program: a PrimFunc or IRModule as TVM's JSON (``tvm.ir.save_json``).

    ``compiled`` and ``measured`` as :meth:`~cdmpp.predictor.Predictor.predict` takes them.

    Returns
    -------
    dict
        ``program``, ``device``, ``latency_s``, ``compiled``, ``measured`` (device -> seconds, as given), ``low_s`` and
        ``high_s`` (its interval, None where the predictor has none), ``coverage`` of the interval, ``unfamiliar`` (whether
        it is far from the training data, None where the predictor cannot tell), and ``note`` where the prediction needs
        one.

    Raises
    ------
    ProgramError
        The file is missing or is not such JSON.
    """
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
    ast = compact_asts([program])[0]
    evidence = predictor.evidence([program], resolved, compiled=compiled, measured=measured)
    latency_s = float(predictor.predict_asts([ast], resolved, evidence)[0])
    low_s, high_s = seconds_interval(predictor, latency_s, resolved, evidence)
    return {
        "program": str(path),
        "device": resolved.name,
        "latency_s": latency_s,
        "compiled": compiled,
        "measured": dict(measured or {}),
        "low_s": low_s,
        "high_s": high_s,
        "coverage": COVERAGE,
        "unfamiliar": None if predictor.familiarity is None else predictor.unfamiliar(ast, resolved),
        "note": prediction_note(predictor, resolved),
    }


def seconds_interval(
    predictor: Predictor, latency_s: float, device: Device, evidence: Evidence
) -> tuple[float, float] | tuple[None, None]:
    """Lowest and highest seconds, None where the predictor cannot say (:func:`prediction_note` says why)."""
    calibration = predictor.calibration_of(evidence)
    if calibration is None or not calibration.supports(COVERAGE):
        return None, None
    factor = math.exp(calibration.half_width(predictor.device_name(device), COVERAGE))
    return latency_s / factor, latency_s * factor


def prediction_note(predictor: Predictor, device: Device) -> str:
    """What to keep in mind about predictions on a device."""
    notes = []
    seen = device.name in predictor.devices
    if not seen:
        known = ", ".join(predictor.devices)
        notes.append(
            f"{device.name} is not among the devices of training ({known}): these are extrapolations"
        )
    if predictor.calibration is None:
        notes.append("the predictor was not calibrated, so there are no intervals")
    elif not predictor.calibration.supports(COVERAGE):
        units = f"{predictor.calibration.pooled.units} {predictor.calibration.unit}s"
        notes.append(f"calibrated on {units}, too few for intervals of {100 * COVERAGE:g} %")
    elif predictor.calibration.basis(device.name, COVERAGE) == ALL_DEVICES:
        why = " because it has too few calibration records of its own" if seen else ""
        notes.append(f"intervals are those of all devices of training pooled{why}")
    return "; ".join(notes)
