"""Records -> one label per (program, device)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdmpp.errors import DatasetError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_LOG = logging.getLogger(__name__)

#: Columns of the label table.
LABEL_COLUMNS: tuple[str, ...] = (
    "program",
    "task",
    "device",
    "latency_s",
    "noise",
    "origin",
    "n_records",
    "error_floor",
)

#: How the ok records of one program and device become one label.
AGGREGATES: tuple[str, ...] = ("median", "mean", "min", "first", "last")


#: A reference program slower by more than this, or halves that differ by more, speak of a disturbed record
#: where the profiler did not watch the core itself (records without ``disturbed``).
_DISTURBED_DRIFT = 0.05
_DISTURBED_NOISE = 0.05


def disturbance(records: pd.DataFrame) -> np.ndarray:
    """Share of disturbed samples behind each record, float64 (n,), as far as it is known (0 if not).

    Records of a profiler that did not look at every sample are 1 where the reference program was slow or the
    halves of the samples disagree, else 0.

    Parameters
    ----------
    records
        Rows of ``Dataset.records``; columns that are missing say nothing.
    """
    import numpy as np

    drift = (
        records["drift"].to_numpy(dtype=np.float64) if "drift" in records else np.full(len(records), np.nan)
    )
    noise = records["noise"].to_numpy(dtype=np.float64)
    guess = ((drift > _DISTURBED_DRIFT) | (noise > _DISTURBED_NOISE)).astype(np.float64)
    if "meta" not in records:
        return guess
    known = [
        json.loads(text).get("disturbed") if isinstance(text, str) and '"disturbed"' in text else None
        for text in records["meta"]
    ]
    return np.array(
        [g if k is None else float(k) for g, k in zip(guess, known, strict=True)], dtype=np.float64
    )


def _calmest(ok: pd.DataFrame) -> pd.DataFrame:
    """Of several records of one program and device, those with the least disturbance."""
    keys = ["program", "device"]
    repeated = ok.duplicated(keys, keep=False).to_numpy()
    if not repeated.any():
        return ok
    several = ok[repeated]
    share = several[keys].assign(share=disturbance(several))
    least = share.groupby(keys, observed=True)["share"].transform("min")
    keep = ~repeated
    keep[repeated] = (share["share"] <= least).to_numpy()
    return ok[keep]


def label_table(
    records: pd.DataFrame, devices: Sequence[str] | None = None, aggregate: str = "median"
) -> pd.DataFrame:
    """One label per (program, device), from its ok records.

    Where a program was measured several times on a device, records that were taken while somebody else used the core
    (:func:`disturbance`) count only if there are no others.

    Failures, NaN, infinite, zero and negative latencies and records of unknown programs never get in (the
    latter are logged).

    Parameters
    ----------
    records
        As ``Dataset.records`` gives them.
    devices
        Keep these only; None for all.
    aggregate
        One of :data:`AGGREGATES`; ``first`` and ``last`` by time.

    Returns
    -------
    Sorted by task, program and device, index 0..n-1:

    ``program``, ``task``, ``device``, ``origin``
        Text.
    ``latency_s``
        The label, float64 seconds.
    ``noise``
        Median of the records' relative split-half difference; NaN if unknown.
    ``n_records``
        Number of ok records behind the label.
    ``error_floor``
        Expected absolute relative error of a perfect predictor on this label, by
        :func:`cdmpp.dataset.noise.error_floor`; NaN if unknown.

    Raises
    ------
    DatasetError
        Unknown ``aggregate``.
    """
    import numpy as np

    from cdmpp.dataset.noise import error_floor

    if aggregate not in AGGREGATES:
        raise DatasetError(f"no aggregate {aggregate!r}; there are {', '.join(AGGREGATES)}")
    chosen = records if devices is None else records[records["device"].isin(list(devices))]
    ok = chosen[chosen["status"] == "ok"]
    latency_s = ok["latency_s"].to_numpy(dtype=np.float64)
    valid = np.isfinite(latency_s) & (latency_s > 0) & (ok["task"] != "").to_numpy()
    if not valid.all():
        _LOG.warning("%d ok records have no usable latency or program and are left out", int((~valid).sum()))
    ok = _calmest(ok[valid]).sort_values(["task", "program", "device", "measured_at"], kind="stable")
    groups = ok.groupby(["task", "program", "device"], sort=True, observed=True)
    table = groups.agg(
        latency_s=("latency_s", aggregate),
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
