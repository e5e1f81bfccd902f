r"""How wrong the labels themselves are.

Let a label be the true latency times :math:`1 + e`, with :math:`e` normal of standard deviation
:math:`\sigma`. A predictor that knows the true latency still shows an absolute relative error of
:math:`E|e| = \sigma \sqrt{2 / \pi}` on average: the noise floor of a MAPE.

*Split halves.* A record's ``noise`` is the relative difference of the labels of the two halves of its
samples. Half the samples have :math:`\sigma_h = \sqrt 2 \sigma`, so :math:`E\,\mathrm{noise} = E|e_1 - e_2|
= 2 \sigma_h / \sqrt\pi = 2 \sqrt{2 / \pi}\,\sigma`: the floor is **half of the mean noise**. This is exact
for labels that are means of independent samples, and a good approximation for medians.

*Re-measurements.* Two records of one program and device, taken at different times, differ by :math:`E|e_1 -
e_2| = 2 \sigma / \sqrt\pi`: the floor is **their mean relative difference over** :math:`\sqrt 2`. This sees
what split halves cannot (another process, another placement in memory, another hour), so where a device has
re-measurements its split-half floors are scaled to agree with them. The scaling also mends what adaptive
sampling does to split halves: who stops when the halves agree reports a difference that is too small.

A label of n records has its floor divided by :math:`\sqrt n`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

#: A device needs so many re-measured programs before they correct its split-half floors.
MIN_REMEASURED = 20


def noise_floor_mape(labels: pd.DataFrame) -> float | None:
    """Expected MAPE of a perfect predictor on these labels; None if nothing is known of their noise."""
    floors = labels["error_floor"].dropna()
    return float(floors.mean()) if len(floors) else None


def remeasured_difference(ok_records: pd.DataFrame) -> pd.Series:
    """Mean relative difference |a - b| / mean(a, b) over the pairs of records of each (program, device).

    Parameters
    ----------
    ok_records
        Rows of ``Dataset.records`` with status ok.

    Returns
    -------
    Indexed by (program, device), without those that have one record only.
    """
    import numpy as np
    import pandas as pd

    keys = ["program", "device"]
    repeated = ok_records[ok_records.duplicated(keys, keep=False)]
    values, index = [], []
    for key, latencies in repeated.groupby(keys, sort=True, observed=True)["latency_s"]:
        x = latencies.to_numpy(dtype=np.float64)
        i, j = np.triu_indices(len(x), k=1)
        values.append(float(np.mean(2 * np.abs(x[i] - x[j]) / (x[i] + x[j]))))
        index.append(key)
    return pd.Series(values, index=pd.MultiIndex.from_tuples(index, names=keys), dtype="float64")


def error_floor(labels: pd.DataFrame, ok_records: pd.DataFrame) -> np.ndarray:
    """Expected absolute relative error of a perfect predictor on each label, float64 (n,); NaN if unknown.

    Parameters
    ----------
    labels
        Columns program, device, noise, n_records.
    ok_records
        The records behind them: columns program, device, latency_s.
    """
    import numpy as np

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
