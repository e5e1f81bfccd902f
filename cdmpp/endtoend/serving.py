"""Latency of serving steps of language models, and of lists of operators, on devices that need not be at hand.

A step is the sum of its kernels, as they run one after the other from a recorded graph; host time is not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp.device import Device, get_device
from cdmpp.errors import NetworkError
from cdmpp.predictor.mechanism import without_unit
from cdmpp.predictor.operators import BEST, OperatorModel, kinds
from cdmpp.program.llm import Decoder, load_decoder
from cdmpp.program.operators import dtype_name, operator_table, read_operators

#: Number of draws of the operators' errors.
_DRAWS = 400
#: Fraction of the variance of an operator's error that all operators of a step share, because it is due to the device.
_SHARED = 0.5
#: Number of lengths at which the steps of a generation are predicted; those in between are interpolated.
_SAMPLED_STEPS = 9
#: Fraction of a device's memory that weights, keys and values may fill.
_USABLE = 0.9


@dataclass(frozen=True)
class ServingReport:
    """Predicted latency of operators on a device; ``by_op`` and ``by_phase`` are seconds, ``unknown`` counts those without. A
    sum of operators of which none is known is None."""

    network: str
    device: str
    dtype: str
    framework: str
    latency_s: float | None
    low_s: float | None
    high_s: float | None
    by_phase: Mapping[str, float | None]
    by_op: Mapping[str, float | None]
    steps: Sequence[Mapping[str, Any]]
    operators: Sequence[Mapping[str, Any]]
    unknown: Mapping[str, int]
    first_token_s: float | None = None
    per_token_s: float | None = None
    tokens_per_s: float | None = None
    price_per_million_tokens: float | None = None
    memory_gb: float | None = None
    memory_parts_gb: Mapping[str, float] | None = None
    notes: Sequence[str] = ()

    def by_name(self) -> list[dict[str, Any]]:
        """Operators grouped by phase and name, in their order: ``runs``, seconds ``together`` and their ``share`` of the
        latency; other fields are those of the last operator of the group."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self.operators:
            before = found.get((row["phase"], row["name"]), {"runs": 0.0, "together": 0.0})
            runs, together = before["runs"] + row["count"], before["together"] + row["count"] * row["latency_s"]
            share = together / self.latency_s if self.latency_s else 0.0
            found[row["phase"], row["name"]] = {**row, "runs": runs, "together": together, "share": share}
        return list(found.values())


@dataclass(frozen=True)
class Serving:
    """The workload of a decoder: one ``phase`` (``prefill`` or ``decode``) of ``batch`` sequences, or with ``generate`` a
    prefill of ``seq`` tokens and then ``generate`` decode steps."""

    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    phase: str = "prefill"
    batch: int = 1
    seq: int = 512
    past: int = 0
    generate: int = 0
    tp: int = 1


def predict_operators(
    path: str | Path,
    devices: Sequence[str | Device],
    model_of: Callable[[str], OperatorModel],
    *,
    dtype: str | None = None,
    framework: str = BEST,
) -> list[ServingReport]:
    """Predict the operators of a file (:func:`cdmpp.program.operators.read_operators`) on each device, with the model for its
    kind; ``dtype`` is of rows without one (None: bfloat16, on CPUs float32). Raises ProgramError, UnknownDeviceError or
    PredictorError if a row, a device or the framework is wrong."""
    known = [get_device(name) for name in devices]
    kinds = {device.kind for device in known}
    dtypes = {kind: dtype_name(dtype or ("float32" if kind == "cpu" else "bfloat16")) for kind in kinds}
    rows = {own: read_operators(path, own) for own in set(dtypes.values())}
    models = {kind: model_of(kind) for kind in kinds}
    return [_report(rows[dtypes[d.kind]], d, models[d.kind], Path(path).stem, dtypes[d.kind], framework) for d in known]


def predict_serving(
    spec: str | Path,
    devices: Sequence[str | Device],
    model: OperatorModel,
    serving: Serving,
    *,
    framework: str = BEST,
    prices: Mapping[str, float] | None = None,
) -> list[ServingReport]:
    """Predict a decoder (:func:`cdmpp.program.llm.load_decoder`) on each device, split over ``serving.tp`` of that device.
    Devices without enough memory are left out, with a note. Raises NetworkError if the decoder is unknown, cannot be split, or
    fits no device's memory; UnknownDeviceError or PredictorError if a device or the framework is wrong."""
    decoder = load_decoder(spec)
    _check(serving)
    dtype, kv_dtype = dtype_name(serving.dtype), dtype_name(serving.kv_dtype)
    rows = _steps(decoder, serving, dtype, kv_dtype)
    reports, small = [], list[NetworkError]()
    for name in devices:
        device = get_device(name)
        if device.kind != "gpu":
            instead = "give a GPU, such as h200, or a list of operators (.csv, .parquet)"
            raise NetworkError(f"language models are predicted for GPUs only, and {device.name} is a CPU: {instead}")
        try:
            memory = _check_memory(decoder, serving, device, dtype, kv_dtype)
        except NetworkError as err:
            small.append(err)
            continue
        report = _report(rows, device, model, decoder.name, dtype, framework)
        reports.append(_rated(report, serving, memory, (prices or {}).get(device.name)))
    if not reports:
        raise NetworkError("; ".join(map(str, small)))
    part = [f"the text part of {decoder.name} alone: what encodes images or sound is not included"] * decoder.text_part
    if decoder.published and "float" in dtype:
        part.append(f"the weights of {decoder.name} are published in {decoder.published}, here they are in {dtype} (--dtype)")
    part += [f"no price is given for {report.device}" for report in reports if prices and report.device not in prices]
    part += ["latent attention was never measured: its times are of attention to as many bytes"] * bool(decoder.latent)
    return [replace(report, notes=(*report.notes, *part, *map(str, small))) for report in reports]


def _check(serving: Serving) -> None:
    for name, least in {"batch": 1, "seq": 1, "tp": 1, "past": 0, "generate": 0}.items():
        if getattr(serving, name) < least:
            raise NetworkError(f"--{name} is {getattr(serving, name)}, expected {least} or more")
    if serving.phase not in ("prefill", "decode"):
        raise NetworkError(f"--phase is {serving.phase!r}, expected prefill or decode")
    if serving.generate and serving.phase == "decode":
        raise NetworkError("--generate N predicts a prefill and N decode steps: leave out --phase decode")


def _steps(decoder: Decoder, serving: Serving, dtype: str, kv_dtype: str) -> pd.DataFrame:
    """The operators of all predicted steps; ``weight`` is the number of steps of a generation that each one stands for."""
    plan = [("prefill", 0, serving.seq, serving.past, 1.0)]
    if serving.phase == "decode":
        plan = [("decode", 0, 1, serving.past or serving.seq, 1.0)]
    if serving.generate:
        start = serving.past + serving.seq
        at = np.unique(np.linspace(0, serving.generate - 1, min(_SAMPLED_STEPS, serving.generate)).astype(int))
        # linear interpolation between the predicted lengths
        weights = [np.interp(np.arange(serving.generate), at, own).sum() for own in np.eye(len(at))]
        plan += [("decode", int(s) + 1, 1, start + int(s), float(w)) for s, w in zip(at, weights, strict=True)]
    rows: list[dict[str, Any]] = []
    for phase, step, new, past, weight in plan:
        for row in decoder.step(serving.batch, new, past, dtype, kv_dtype, serving.tp):
            more = {"phase": phase, "step": step, "known": True, "weight": weight}
            rows.append({**row, **more, "count": row["count"] * weight})
    return operator_table(rows)


def _check_memory(decoder: Decoder, serving: Serving, device: Device, dtype: str, kv_dtype: str) -> dict[str, float]:
    """GB needed on one rank, by what for. Raises NetworkError if the device has less, with options that would fit."""
    past, new = (serving.past or serving.seq, 1) if serving.phase == "decode" else (serving.past, serving.seq)
    room = (device.mem_gb or math.inf) * _USABLE

    def needed(batch: int, tp: int, dtype: str = dtype, kv_dtype: str = kv_dtype) -> dict[str, float]:
        found = decoder.memory_bytes(dtype, kv_dtype, batch, past + new + serving.generate, batch * new, tp)
        return {part: size / 1e9 for part, size in found.items()}

    def fits(*asked: Any) -> bool:
        return sum(needed(*asked).values()) <= room

    own = needed(serving.batch, serving.tp)
    if fits(serving.batch, serving.tp):
        return own
    batch = next((b for b in range(serving.batch - 1, 0, -1) if fits(b, serving.tp)), 0)
    splits = [2**i for i in range(8) if 2**i > serving.tp and decoder.splits(2**i)]
    tp = next((ranks for ranks in splits if fits(serving.batch, ranks)), 0)
    options = [f"--batch {batch}"] * (batch > 0) + [f"--tp {tp}"] * (tp > 0)
    both = (f"--tp {ranks} --batch {b}" for ranks in splits for b in range(serving.batch - 1, 0, -1) if fits(b, ranks))
    nothing = "nothing, as the weights alone do not," if own["weights"] > room else "nothing but shorter sequences"
    otherwise = next(both, nothing)
    if fits(serving.batch, serving.tp, "fp8", "fp8"):
        otherwise = "--dtype fp8 --kv-dtype fp8"
    split = ", ".join(f"{size:.1f} {part}" for part, size in own.items())
    raise NetworkError(
        f"{decoder.name} needs {sum(own.values()):.0f} GB ({split}) on each of {serving.tp} {device.name}, which have "
        f"{device.mem_gb:g} GB, of which {_USABLE:.0%} can be used: {' or '.join(options) or otherwise} would fit"
    )


def _report(rows: pd.DataFrame, device: Device, model: OperatorModel, name: str, dtype: str, framework: str) -> ServingReport:
    known = rows["known"].to_numpy(dtype=bool)
    table = operator_table(rows[known])
    each, low, high = model.interval(table, device, framework)
    counts = table["count"].to_numpy(dtype=np.float64)
    seconds = pd.Series(np.nan, index=rows.index)
    seconds[known] = each * counts
    logs = (np.log(np.maximum(end, 1e-12) / np.maximum(each, 1e-12)) for end in (low, high))
    low_s, high_s = _interval(each * counts, *logs)
    weight = pd.Series(rows.get("weight", 1.0), index=rows.index)
    own_s = seconds / weight  # of one step, not of all steps that it stands for
    steps = [
        {"step": _plain(step), "phase": phase, "stands_for": weight[of[0]], "latency_s": _sum(own_s[of])}
        for (step, phase), of in rows.groupby(["step", "phase"], sort=False).groups.items()
    ]
    why = model.explain(table, device) if len(table) else pd.DataFrame()
    columns = table[["name", "op", "phase", "step", "count"]]
    listed = columns.assign(row=np.flatnonzero(known) + 1, latency_s=each).join(why)
    operators = [{name: _plain(value) for name, value in row.items()} for row in listed.to_dict("records")]
    unknown = rows.loc[~known, "op"].value_counts().to_dict()
    lacking = {used: without_unit(device, used) for used in sorted(set(table["dtype"]))}
    instead = "; it has one for --dtype fp16" * (not without_unit(device, "float16"))
    notes = [note + instead * (used == "bfloat16") for used, note in lacking.items() if note]
    if device.kind == "cpu" and (unsure := ", ".join(used for used, note in lacking.items() if note)):
        notes = [f"on CPUs only float32 was measured: {unsure} can be far faster, and without instructions 100 times slower"]
    if unknown:
        share = 1 - counts.sum() / max(rows["count"].sum(), 1e-9)
        notes.append(f"no time is known of {', '.join(unknown)}: {share:.0%} of the runs are missing from the sum")
        if lost := [f"step {step['step']} {step['phase']}" for step in steps if step["latency_s"] is None]:
            notes.append(f"{len(lost)} of {len(steps)} steps are unknown, as are all their operators: {lost[0]}")
    if device.name in model.corrections:
        notes.append(f"{device.name}: corrected by operators that were measured on it")
    elif unmeasured := sorted(set(kinds(table)) - model.measured_on(device)):
        notes.append(f"on {device.name} these were never measured, with intervals of devices left out: {', '.join(unmeasured)}")
    return ServingReport(
        network=name, device=device.name, dtype=dtype, framework=framework, latency_s=_sum(seconds),
        low_s=low_s if known.any() else None, high_s=high_s if known.any() else None,
        by_phase={phase: _sum(own) for phase, own in seconds.groupby(rows["phase"])},
        by_op={op: _sum(own) for op, own in seconds.groupby(rows["op"])},
        steps=steps, operators=operators, unknown=unknown, notes=tuple(notes),
    )  # fmt: skip


def _interval(seconds: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    """Low and high ends of the sum that hold nine of ten draws of the operators' errors, which are partly the device's."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((_DRAWS, 1)) * math.sqrt(_SHARED)
    draws = shared + rng.standard_normal((_DRAWS, len(seconds))) * math.sqrt(1 - _SHARED)
    logs = np.where(draws < 0, -low, high) * draws / 1.645
    low_s, high_s = np.quantile((seconds * np.exp(logs)).sum(axis=1), [0.05, 0.95])
    total = float(seconds.sum())
    return min(float(low_s), total), max(float(high_s), total)


def _rated(report: ServingReport, serving: Serving, memory: dict[str, float], price: float | None) -> ServingReport:
    """Add what a user of the service sees: time to first token, time per token, tokens per second, and their price."""
    tokens = serving.batch * (serving.generate or (serving.seq if serving.phase == "prefill" else 1))
    assert report.latency_s is not None  # every operator of a decoder is known
    rate = tokens / report.latency_s
    decode_s = report.by_phase.get("decode")
    return replace(
        report,
        memory_gb=sum(memory.values()),
        memory_parts_gb=memory,
        tokens_per_s=rate,
        first_token_s=report.by_phase.get("prefill"),
        per_token_s=None if decode_s is None else decode_s / (serving.generate or 1),
        price_per_million_tokens=None if price is None else 1e6 * serving.tp * price / 3600 / rate,
        notes=(*report.notes, "kernels alone, as recorded graphs run them: the host's time is not included"),
    )


def _sum(seconds: pd.Series) -> float | None:
    """The sum of what is known; None if nothing is, as that is not no time."""
    return _plain(seconds.sum(min_count=1))


def _plain(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    return None if plain != plain else plain
