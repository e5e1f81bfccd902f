"""What finding a fast program costs: measurements until one is nearly the best, in a given order or by chance.

A candidate that fails costs its measurement too; its latency is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.errors import PredictorError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Within this of the best counts as found.
WITHIN = 0.05


def nearly_best(latency_s: FloatArray, within: float = WITHIN) -> NDArray[np.bool_]:
    """Which candidates are at most `within` slower than the best, (n,); latencies are (n,), infinite for a failure."""
    if not np.isfinite(latency_s).any():
        raise PredictorError("no candidate has a latency: there is nothing to search for")
    return np.asarray(latency_s <= (1 + within) * np.min(latency_s), dtype=bool)


def measurements_in_order(latency_s: FloatArray, order: IntArray, within: float = WITHIN) -> int:
    """Measurements until one is nearly the best, taking the candidates (n,) in an order (n,) of all of them."""
    return int(np.argmax(nearly_best(latency_s, within)[order])) + 1


def regret_in_order(latency_s: FloatArray, order: IntArray) -> float:
    """How much slower the first candidate of an order is than the best, of those that work: 0.1 is 10 %."""
    ranked = latency_s[order]
    return float(ranked[np.isfinite(ranked)][0] / np.min(latency_s) - 1)


def measurements_by_chance(latency_s: FloatArray, within: float = WITHIN) -> tuple[float, int]:
    """Expected and median number of measurements of candidates drawn blindly, none twice.

    With `good` of `n` candidates nearly the best, the first of them is expected at ``(n + 1) / (good + 1)``; the median is the
    least number of draws that hit one with a probability of one half (hypergeometric)."""
    good, n = int(nearly_best(latency_s, within).sum()), len(latency_s)
    miss, draws = 1.0, 0
    while miss > 0.5:
        miss *= (n - good - draws) / (n - draws)
        draws += 1
    return (n + 1) / (good + 1), draws


def order_of_others(others_s: Sequence[FloatArray], seed: int = 0) -> IntArray:
    """Candidates in the order in which other devices measured them, the fastest first, (n,).

    Latencies are (n,) each: infinite for a failure, NaN where it was not measured. Of several devices the mean over those that
    measured a candidate of the log of its slowdown against the device's best counts; failures anywhere come after all that
    never failed, in an order drawn by the seed, with what nobody measured."""
    slowdowns = []
    for latency_s in others_s:
        works = np.isfinite(latency_s)
        slowdowns.append(latency_s / (np.min(latency_s[works]) if works.any() else 1.0))
    mean = pd.DataFrame(np.log(slowdowns)).mean().fillna(math.inf).to_numpy()
    chance = np.random.default_rng(seed).permutation(len(mean))
    return np.lexsort((chance, mean))
