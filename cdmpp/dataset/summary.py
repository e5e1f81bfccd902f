"""What a dataset holds, in numbers: the content of ``cdmpp dataset --json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.dataset.labels import label_table
from cdmpp.dataset.noise import noise_floor_mape, remeasured_difference
from cdmpp.errors import FAILURE_KINDS

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.dataset.view import DatasetView


def summarise(view: DatasetView) -> dict[str, Any]:
    """``{"total": {...}, "datasets": [{...}, ...]}``.

    ``total`` and each dataset hold ``records``, ``ok``, ``failures`` ({kind: n}, every kind), ``programs``,
    ``tasks``, ``networks`` and ``devices`` (numbers), ``noise_floor_mape`` (fraction or None). Tasks and
    programs of several datasets count once in ``total``.

    A dataset holds besides: ``path``, ``network_names``, ``device_names``, ``by_device``
    ({device: records, ok, failures, tasks, programs, split_half_median, split_half_mean, noise_floor_mape}),
    ``origins`` ({origin: ok records}), ``invalid_records`` (ok records without a usable latency or program),
    ``corrupt_lines`` (journal lines that were skipped), ``remeasured`` (programs with several ok records on a
    device), ``remeasured_difference``, ``remeasured_mean`` and ``remeasured_p90`` (median, mean and 90th percentile of
    the relative difference of those; None without any).
    """
    return {"total": _total(view), "datasets": [_part(part) for part in view.parts]}


def _total(view: DatasetView) -> dict[str, Any]:
    records = view.records
    # A profiler stores all tasks of its networks at once: those without a record do not count.
    measured = set(records["task"]) & set(view.tasks)
    return {
        **_counts(records),
        "programs": len(view.programs),
        "tasks": len(measured),
        "networks": len({network for task in measured for network in view.tasks[task].networks}),
        "devices": len(view.device_names),
        "noise_floor_mape": noise_floor_mape(label_table(records)),
    }


def _counts(records: pd.DataFrame) -> dict[str, Any]:
    kinds = records["status"].value_counts()
    return {
        "records": len(records),
        "ok": int(kinds.get("ok", 0)),
        "failures": {kind: int(kinds.get(kind, 0)) for kind in FAILURE_KINDS},
    }


def _part(part: Any) -> dict[str, Any]:
    records = part.records
    ok = records[records["status"] == "ok"]
    usable = (ok["latency_s"] > 0) & (ok["latency_s"] != float("inf")) & (ok["task"] != "")
    labels = label_table(records)
    difference = remeasured_difference(ok[usable])
    return {
        "path": str(part.path),
        **_total(part),
        "network_names": part.network_names,
        "device_names": part.device_names,
        "by_device": {
            device: _device(records[records["device"] == device], labels[labels["device"] == device])
            for device in part.device_names
        },
        "origins": {str(k): int(n) for k, n in ok["origin"].value_counts().sort_index().items()},
        "invalid_records": int((~usable).sum()),
        "corrupt_lines": part.corrupt_lines,
        "remeasured": len(difference),
        "remeasured_difference": float(difference.median()) if len(difference) else None,
        "remeasured_mean": float(difference.mean()) if len(difference) else None,
        "remeasured_p90": float(difference.quantile(0.9)) if len(difference) else None,
    }


def _device(records: pd.DataFrame, labels: pd.DataFrame) -> dict[str, Any]:
    noise = labels["noise"].dropna()
    return {
        **_counts(records),
        "tasks": int(records["task"].nunique()),
        "programs": int(records["program"].nunique()),
        "split_half_median": float(noise.median()) if len(noise) else None,
        "split_half_mean": float(noise.mean()) if len(noise) else None,
        "noise_floor_mape": noise_floor_mape(labels),
    }
