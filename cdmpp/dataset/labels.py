r"""Records -> one label per (program, device), and how wrong the labels themselves are.

Let a label be the true latency times :math:`1 + e`, with :math:`e` normal of standard deviation :math:`\sigma`. A predictor
that knows the true latency still shows a mean absolute relative error of :math:`E|e| = \sigma \sqrt{2 / \pi}`: the noise floor
of a MAPE.

*Split halves.* A record's ``noise`` is the relative difference of the labels of the two halves of its samples. Half the samples
have :math:`\sigma_h = \sqrt 2 \sigma`, so :math:`E\,\mathrm{noise} = E|e_1 - e_2| = 2 \sigma_h / \sqrt\pi = 2 \sqrt{2 /
\pi}\,\sigma`: the floor is **half of the mean noise**. This is exact for means of independent samples, and a good approximation
for medians.

*Re-measurements.* Two records of one program and device, taken at different times, differ by :math:`E|e_1 - e_2| = 2 \sigma /
\sqrt\pi`: the floor is **their mean relative difference over** :math:`\sqrt 2`. This sees what split halves cannot (another
process, another placement in memory, another hour), so where a device has re-measurements its split-half floors are scaled to
agree with them. That also mends adaptive sampling: who stops when the halves agree reports a difference that is too small.

A label of n records has its floor divided by :math:`\sqrt n`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)

LABEL_COLUMNS: tuple[str, ...] = (
    "program", "task", "device", "latency_s", "noise", "origin", "n_records", "error_floor",
)  # fmt: skip

#: A reference program slower by more than this, or halves that differ by more, speak of a disturbed record
#: where the profiler did not watch the core itself (records without ``disturbed``).
_DISTURBED_DRIFT = 0.05
_DISTURBED_NOISE = 0.05

#: A device needs so many re-measured programs before they correct its split-half floors.
MIN_REMEASURED = 20

_PAIR = ["program", "device"]


def label_table(records: pd.DataFrame, devices: Sequence[str] | None = None) -> pd.DataFrame:
    """One label per (program, device): the median of its ok records, of several the least disturbed ones (:func:`disturbance`).
    Unusable latencies and records of unknown programs never get in (and are logged).

    Gives columns :data:`LABEL_COLUMNS`, sorted by task, program and device, index 0..n-1: ``noise`` is the median of the
    records' relative split-half difference (NaN if unknown), ``n_records`` how many are behind the label, ``error_floor`` that
    of :func:`error_floor`.
    """
    chosen = records if devices is None else records[records["device"].isin(list(devices))]
    ok = chosen[chosen["status"] == "ok"]
    latency_s = ok["latency_s"].to_numpy(dtype=np.float64)
    valid = np.isfinite(latency_s) & (latency_s > 0) & (ok["task"] != "").to_numpy()
    if not valid.all():
        _LOG.warning("%d ok records have no usable latency or program and are left out", int((~valid).sum()))
    ok = _calmest(ok[valid]).sort_values(["task", "program", "device", "measured_at"], kind="stable")
    groups = ok.groupby(["task", "program", "device"], sort=True, observed=True)
    table = groups.agg(
        latency_s=("latency_s", "median"),
        noise=("noise", "median"),
        origin=("origin", "first"),
        n_records=("latency_s", "size"),
    ).reset_index()
    table["error_floor"] = error_floor(table, ok)
    return table[list(LABEL_COLUMNS)]


def label_fingerprint(labels: pd.DataFrame) -> str:
    """16 hexadecimal digits of the (program, device) pairs in their order: row numbers mean these rows."""
    digest = hashlib.sha256()
    for column in ("program", "device"):
        digest.update("\n".join(labels[column]).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def disturbance(records: pd.DataFrame) -> NDArray[np.float64]:
    """Share of disturbed samples behind each record, float64 (n,), 0 if unknown. Records of a profiler that did not look at
    every sample are 1 where the reference program was slow or the halves of the samples disagree, else 0."""
    share = (records["noise"].to_numpy(dtype=np.float64) > _DISTURBED_NOISE).astype(np.float64)
    if "drift" in records:
        share[records["drift"].to_numpy(dtype=np.float64) > _DISTURBED_DRIFT] = 1.0
    for i, text in enumerate(records.get("meta", ())):
        known = json.loads(text).get("disturbed") if '"disturbed"' in str(text) else None
        if known is not None:
            share[i] = float(known)
    return share


def _calmest(ok: pd.DataFrame) -> pd.DataFrame:
    """Of several records of one program and device, those with the least disturbance."""
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
    """Expected MAPE of a perfect predictor on these labels; None if nothing is known of their noise."""
    floors = labels["error_floor"].dropna()
    return float(floors.mean()) if len(floors) else None


def remeasured_difference(ok_records: pd.DataFrame) -> pd.Series:
    """Mean relative difference |a - b| / mean(a, b) over the pairs of ok records of each (program, device) that has several."""
    repeated = ok_records[ok_records.duplicated(_PAIR, keep=False)]
    values, index = [], []
    for key, latencies in repeated.groupby(_PAIR, sort=True, observed=True)["latency_s"]:
        x = latencies.to_numpy(dtype=np.float64)
        i, j = np.triu_indices(len(x), k=1)
        values.append(float(np.mean(2 * np.abs(x[i] - x[j]) / (x[i] + x[j]))))
        index.append(key)
    return pd.Series(values, index=pd.MultiIndex.from_tuples(index, names=_PAIR), dtype="float64")


def error_floor(labels: pd.DataFrame, ok_records: pd.DataFrame) -> NDArray[np.float64]:
    """Expected absolute relative error of a perfect predictor on each label, float64 (n,); NaN if unknown."""
    floors = labels["noise"].to_numpy(dtype=np.float64) / 2
    between = remeasured_difference(ok_records) / math.sqrt(2)
    label_device = labels["device"].to_numpy()
    pairs = list(zip(labels["program"], labels["device"], strict=True))
    remeasured = between.reindex(pairs).to_numpy() if len(between) else np.full(len(labels), np.nan)
    for device in set(label_device):
        here = label_device == device
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
