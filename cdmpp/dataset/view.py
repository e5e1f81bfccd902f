r"""Read access to a dataset, whether it is one folder or several; its labels, and how large their errors are.

Let a label be the true latency times :math:`1 + e`, with :math:`e` normal of standard deviation :math:`\sigma`. A predictor
that knows the true latency still has a MAPE, the noise floor, of :math:`E|e| = \sigma \sqrt{2 / \pi}`.

*Split halves.* A record's ``noise`` is the relative difference of the labels of the two halves of its samples. Half the samples
have :math:`\sigma_h = \sqrt 2 \sigma`, so :math:`E\,\mathrm{noise} = E|e_1 - e_2| = 2 \sigma_h / \sqrt\pi = 2 \sqrt{2 /
\pi}\,\sigma`: the floor is **half of the mean noise**. This is exact for means of independent samples, nearly for medians.

*Re-measurements.* Two records of one program and device, taken at different times, differ by :math:`E|e_1 - e_2| = 2 \sigma /
\sqrt\pi`: the floor is **their mean relative difference over** :math:`\sqrt 2`. This includes effects that split halves miss
(another process, another placement in memory, another hour). So if a device has re-measurements, its split-half floors are
scaled to agree with them. This also corrects adaptive sampling: it stops when halves agree, so their difference is too small.

The floor of a label of n records is divided by :math:`\sqrt n`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset.record import unite_networks
from cdmpp.device import Device, load_table
from cdmpp.errors import FAILURE_KINDS, DatasetError, UnknownDeviceError
from cdmpp.program.types import Program, Space, Task

_LOG = logging.getLogger(__name__)

LABEL_COLUMNS: tuple[str, ...] = (
    "program", "task", "device", "latency_s", "noise", "origin", "n_records", "error_floor", "disturbed",
)  # fmt: skip

#: A record without ``disturbed`` (the profiler did not watch the core itself) counts as disturbed if the reference program was
#: slower by more than this, or the halves of its samples differ by more.
_DISTURBED_DRIFT = 0.05
_DISTURBED_NOISE = 0.05
#: A label is disturbed above this share of disturbed samples. Re-measurements of such programs differ at least twice as much.
_MOSTLY = 0.5

#: Minimum number of re-measured programs for which they correct a device's split-half floors.
MIN_REMEASURED = 20

_PAIR = ["program", "device"]


def label_table(records: pd.DataFrame, devices: Sequence[str] | None = None) -> pd.DataFrame:
    """One label per (program, device): the median of its ok records, of the least disturbed if several (:func:`disturbance`).
    Records with an unusable latency or an unknown program are left out, and logged.

    Returns the columns :data:`LABEL_COLUMNS`, sorted by task, program and device, with index 0..n-1. ``noise`` is the median of
    the records' relative split-half differences (NaN if unknown), ``n_records`` the number of records behind the label,
    ``error_floor`` as from :func:`error_floor`, ``disturbed`` whether more than half of the samples were disturbed."""
    chosen = records if devices is None else records[records["device"].isin(list(devices))]
    ok = chosen[chosen["status"] == "ok"]
    latency_s = ok["latency_s"].to_numpy(dtype=np.float64)
    valid = np.isfinite(latency_s) & (latency_s > 0) & (ok["task"] != "").to_numpy()
    if not valid.all():
        _LOG.warning("%d ok records have no usable latency or program and are left out", int((~valid).sum()))
    ok = _calmest(ok[valid]).sort_values(["task", "program", "device", "measured_at"], kind="stable")
    ok = ok.assign(spread=spread(ok), disturbance=disturbance(ok))
    groups = ok.groupby(["task", "program", "device"], sort=True, observed=True)
    table = groups.agg(
        latency_s=("latency_s", "median"),
        noise=("noise", "median"),
        origin=("origin", "first"),
        n_records=("latency_s", "size"),
        spread=("spread", "median"),
        disturbance=("disturbance", "median"),
    ).reset_index()
    table["error_floor"], table["disturbed"] = error_floor(table, ok), table["disturbance"] > _MOSTLY
    return table[list(LABEL_COLUMNS)]


def spread(records: pd.DataFrame) -> NDArray[np.float64]:
    """Spread of each record as float64 (n,), NaN without samples: how far the median sample exceeds the shortest (relative),
    combined with how slow the reference program was (``drift``). It predicts how much re-measurements differ better than the
    halves of the samples do: a neighbour on the core slows both halves alike."""
    samples = [np.asarray(values, dtype=np.float64) for values in records["samples_s"]]
    counts = np.array([len(values) for values in samples], dtype=np.int64)
    found = np.full(len(records), np.nan)
    some = counts > 1
    if some.any():
        flat, first = np.concatenate(samples), (np.cumsum(counts) - counts)[some]
        flat = flat[np.lexsort((flat, np.repeat(np.arange(len(counts)), counts)))]
        found[some] = flat[first + counts[some] // 2] / flat[first] - 1
    return np.hypot(found, np.nan_to_num(records["drift"].to_numpy(dtype=np.float64)))


def label_fingerprint(labels: pd.DataFrame) -> str:
    """16 hexadecimal digits that identify the (program, device) pairs in their order, and so what row numbers refer to."""
    digest = hashlib.sha256()
    for column in ("program", "device"):
        digest.update("\n".join(labels[column]).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def disturbance(records: pd.DataFrame) -> NDArray[np.float64]:
    """Share of disturbed samples of each record as float64 (n,), 0 if unknown. If the profiler did not check every sample, the
    share is 1 if the reference program was slow or the halves of the samples disagree, else 0."""
    share = (records["noise"].to_numpy(dtype=np.float64) > _DISTURBED_NOISE).astype(np.float64)
    if "drift" in records:
        share[records["drift"].to_numpy(dtype=np.float64) > _DISTURBED_DRIFT] = 1.0
    for i, text in enumerate(records.get("meta", ())):
        known = json.loads(text).get("disturbed") if '"disturbed"' in str(text) else None
        if known is not None:
            share[i] = float(known)
    return share


def _calmest(ok: pd.DataFrame) -> pd.DataFrame:
    """The ok records, reduced to the least disturbed ones where a program has several on one device."""
    repeated = ok.duplicated(_PAIR, keep=False).to_numpy()
    if not repeated.any():
        return ok
    several = ok[repeated]
    share = several[_PAIR].assign(share=disturbance(several))
    least = share.groupby(_PAIR, observed=True)["share"].transform("min")
    keep = ~repeated
    keep[repeated] = (share["share"] <= least).to_numpy()
    return ok[keep]


def noise_floor_mape(labels: pd.DataFrame) -> float | None:
    """Expected MAPE of a perfect predictor on these labels; None if nothing is known about their noise."""
    floors = labels["error_floor"].dropna()
    return float(floors.mean()) if len(floors) else None


def remeasured_difference(ok_records: pd.DataFrame) -> pd.Series:
    """For each (program, device) with several ok records: mean of |a - b| / mean(a, b) over all pairs of them."""
    repeated = ok_records[ok_records.duplicated(_PAIR, keep=False)]
    values, index = [], []
    for key, latencies in repeated.groupby(_PAIR, sort=True, observed=True)["latency_s"]:
        x = latencies.to_numpy(dtype=np.float64)
        i, j = np.triu_indices(len(x), k=1)
        values.append(float(np.mean(2 * np.abs(x[i] - x[j]) / (x[i] + x[j]))))
        index.append(key)
    return pd.Series(values, index=pd.MultiIndex.from_tuples(index, names=_PAIR), dtype="float64")


def error_floor(labels: pd.DataFrame, ok_records: pd.DataFrame) -> NDArray[np.float64]:
    """Expected absolute relative error of a perfect predictor on each label, as float64 (n,); NaN if unknown. Split halves and
    re-measurements determine how large the errors on a device are, :func:`spread` how they differ between labels."""
    floors = labels["noise"].to_numpy(dtype=np.float64) / 2
    spreads = labels["spread"].to_numpy(dtype=np.float64)
    between = remeasured_difference(ok_records) / math.sqrt(2)
    label_device = labels["device"].to_numpy()
    pairs = list(zip(labels["program"], labels["device"], strict=True))
    remeasured = between.reindex(pairs).to_numpy() if len(between) else np.full(len(labels), np.nan)
    for device in set(label_device):
        here = label_device == device
        told = here & np.isfinite(floors) & np.isfinite(spreads)
        if told.any() and spreads[told].any():
            floors[told] = spreads[told] * (floors[told].mean() / spreads[told].mean())
        both = here & np.isfinite(remeasured)
        if both.sum() >= MIN_REMEASURED:
            within = floors[both & np.isfinite(floors)]
            observed = float(remeasured[both].mean())
            if len(within) and within.mean() > 0:
                floors[here] *= max(1.0, observed / float(within.mean()))
            floors[here & np.isnan(floors)] = observed
        unknown = here & np.isnan(floors)
        if unknown.any() and not unknown[here].all():
            floors[unknown] = np.nanmean(floors[here])
    return floors / np.sqrt(labels["n_records"].to_numpy(dtype=np.float64))


class DatasetView:
    """One dataset, or several that :func:`cdmpp.dataset.load_datasets` reads as one: tasks, spaces, programs and records. The
    first dataset that has a task, space or program defines it; a task has the networks of all. Records are kept in order."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    @property
    def parts(self) -> Sequence[Any]:
        """The datasets that this one consists of: only itself, or several."""
        return self._parts

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """Hash -> task."""
        tasks: dict[str, Task] = {}
        for part in self.parts:
            for task in part.tasks.values():
                tasks[task.hash] = unite_networks(tasks.get(task.hash, task), task)
        return tasks

    @cached_property
    def spaces(self) -> Mapping[str, Space]:
        """Hash -> design space."""
        return {key: space for part in reversed(self.parts) for key, space in part.spaces.items()}

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        """Hash -> program."""
        return {key: program for part in reversed(self.parts) for key, program in part.programs.items()}

    @cached_property
    def records(self) -> pd.DataFrame:
        """All records, one per row, with columns :data:`cdmpp.dataset.record.RECORD_COLUMNS`. ``latency_s`` and ``noise`` are
        NaN if missing, ``task`` and ``origin`` are "" if the program is unknown."""
        return pd.concat([part.records for part in self.parts], ignore_index=True)

    @property
    def network_families(self) -> Mapping[str, str]:
        """Network -> family, for the networks in ``meta.json``; the first dataset that lists a network defines it."""
        found: dict[str, str] = {}
        for part in reversed(self.parts):
            families = part.meta.get("network_families")
            found.update(families if isinstance(families, dict) else {})
        return found

    @property
    def devices(self) -> Mapping[str, Device]:
        """Device name -> its specification when the records were measured. DatasetError if a device has none or several."""
        return unite_devices({str(part.path): _stored_devices(part) for part in self.parts})

    def task_of(self, program: Program) -> Task:
        """The task that a program of this dataset schedules (KeyError if there is none). It is taken from a dataset that has
        the program: tasks with the same hash may name their blocks differently, and a program's trace uses these names."""
        view = next((part for part in self.parts if program.hash in part.programs), self)
        task: Task = view.tasks[program.task_hash]
        return task

    @property
    def network_names(self) -> list[str]:
        """The networks whose tasks are in the dataset, sorted."""
        return sorted({name for task in self.tasks.values() for name in task.networks})

    @property
    def device_names(self) -> list[str]:
        """The devices with records, sorted."""
        return sorted(set(self.records["device"]))

    def labels(self, devices: Sequence[str] | None = None) -> pd.DataFrame:
        """One label per (program, device): see :func:`cdmpp.dataset.view.label_table`."""
        return label_table(self.records, devices=devices)

    def summary(self) -> dict[str, Any]:
        """``{"total": {...}, "datasets": [{...}, ...]}``, which ``cdmpp dataset --json`` writes.

        ``total`` and each dataset hold the counts ``records``, ``ok``, ``failures`` ({kind: n}, every kind), ``programs``,
        ``tasks``, ``networks`` and ``devices``, and ``noise_floor_mape`` (fraction or None). Tasks and programs that are in
        several datasets count once in ``total``.

        Each dataset also holds ``path``, ``network_names``, ``device_names``, ``by_device`` ({device: records, ok, failures,
        tasks, programs, split_half_median, split_half_mean, noise_floor_mape}), ``origins`` ({origin: ok records}),
        ``invalid_records`` (ok records without a usable latency or program), ``corrupt_lines`` (damaged rows that were
        skipped), ``remeasured`` (programs with several ok records on a device), ``remeasured_difference``, ``remeasured_mean``
        and ``remeasured_p90`` (median, mean and 90th percentile of their relative differences; None without any),
        ``remeasured_disturbed`` (the mean for programs with a disturbed record), ``disturbed`` (number of such labels)."""
        return {"total": _totals(self), "datasets": [_details(part) for part in self.parts]}


def _totals(view: DatasetView) -> dict[str, Any]:
    records = view.records
    # A profiler stores all tasks of its networks at once; tasks without a record do not count.
    measured = set(records["task"]) & set(view.tasks)
    return {
        **_counts(records),
        "programs": len(view.programs),
        "tasks": len(measured),
        "networks": len({network for task in measured for network in view.tasks[task].networks}),
        "devices": len(view.device_names),
        "noise_floor_mape": noise_floor_mape(view.labels()),
    }


def _counts(records: pd.DataFrame) -> dict[str, Any]:
    kinds = records["status"].value_counts()
    return {
        "records": len(records),
        "ok": int(kinds.get("ok", 0)),
        "failures": {kind: int(kinds.get(kind, 0)) for kind in FAILURE_KINDS},
    }


def _details(part: Any) -> dict[str, Any]:
    records, labels = part.records, part.labels()
    ok = records[records["status"] == "ok"]
    usable = (ok["latency_s"] > 0) & (ok["latency_s"] != float("inf")) & (ok["task"] != "")
    difference = remeasured_difference(ok[usable])
    disturbed = ok.assign(share=disturbance(ok)).groupby(_PAIR, observed=True)["share"].max() > _MOSTLY
    return {
        "path": str(part.path),
        **_totals(part),
        "network_names": part.network_names,
        "device_names": part.device_names,
        "by_device": {
            device: _of_device(records[records["device"] == device], labels[labels["device"] == device])
            for device in part.device_names
        },
        "origins": {str(k): int(n) for k, n in ok["origin"].value_counts().sort_index().items()},
        "invalid_records": int((~usable).sum()),
        "corrupt_lines": part.corrupt_lines,
        "remeasured": len(difference),
        "remeasured_difference": _number(difference.median()),
        "remeasured_mean": _number(difference.mean()),
        "remeasured_p90": _number(difference.quantile(0.9)),
        "remeasured_disturbed": _number(difference[disturbed.reindex(difference.index).to_numpy(dtype=bool)].mean()),
        "disturbed": int(labels["disturbed"].sum()),
    }


def _of_device(records: pd.DataFrame, labels: pd.DataFrame) -> dict[str, Any]:
    return {
        **_counts(records),
        "tasks": int(records["task"].nunique()),
        "programs": int(records["program"].nunique()),
        "split_half_median": _number(labels["noise"].median()),
        "split_half_mean": _number(labels["noise"].mean()),
        "noise_floor_mape": noise_floor_mape(labels),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _stored_devices(part: Any) -> dict[str, Device]:
    """The specifications of a dataset's devices, by name: from ``meta.json`` or else (imported measurements) the device table,
    never from this machine. DatasetError if a device is in neither, or ``meta.json`` and the table contradict each other."""
    table, where = load_table(this_machine=False), f"{part.path}"
    described = part.meta.get("devices", {})
    if not isinstance(described, dict) or not all(isinstance(spec, dict) for spec in described.values()):
        raise DatasetError(f"{where}/meta.json: expected a specification for each name under 'devices'")
    found = {}
    for name in sorted({*part.device_names, *described}):
        known = None
        with contextlib.suppress(UnknownDeviceError):
            known = table.get(name)
        if name in described:
            try:
                found[name] = Device.from_json({**described[name], "name": name})
            except TypeError as error:
                raise DatasetError(f"{where}/meta.json: device {name} is incomplete or wrong: {error}") from error
            if known is not None:
                check_same(found[name], known, where, "the device table")
        elif known is not None:
            found[name] = known
        else:
            raise DatasetError(
                f"{where}/meta.json does not describe {name}, of which there are records, and it is in no device table"
            )
    return found


def check_same(one: Device, other: Device, where: str, other_where: str) -> None:
    """Raise DatasetError, which names both places and what differs, unless two specifications of one name are equivalent."""
    differences = one.differences(other)
    if differences:
        raise DatasetError(f"{one.name} is not the same device in {where} and in {other_where}: {', '.join(differences)}")


def unite_devices(parts: Mapping[str, Mapping[str, Device]]) -> dict[str, Device]:
    """The devices of several datasets (path -> name -> device); raises DatasetError as :func:`check_same` does."""
    first: dict[str, tuple[Device, str]] = {}
    for where, devices in parts.items():
        for name, device in devices.items():
            known, other = first.setdefault(name, (device, where))
            check_same(known, device, other, where)
    return {name: device for name, (device, _) in first.items()}
