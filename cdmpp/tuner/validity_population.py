"""The first programs of a search: likely valid, promising where that is known, and unlike each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def initial_population(
    z: NDArray[np.floating],
    p_valid: FloatArray,
    n: int,
    *,
    log_s: FloatArray | None = None,
    least: float = 0.5,
    fastest: float = 0.25,
    diverse: bool = True,
    seed: int = 0,
) -> IntArray:
    """Choose `n` of many random programs, as rows, int64 (min(n, m),).

    Of those that are likely valid (all of them where fewer than `n` are: then the likeliest), the part with the lowest
    predicted latency, and of that the programs nearest to the centres of `n` clusters: they stand for the others, while
    the programs farthest from each other would be the space's odd ones.

    Parameters
    ----------
    z
        Where the m programs lie, (m, d): pooled features of their ASTs.
    p_valid
        P(valid), (m,).
    log_s
        Log of the predicted seconds, (m,); None where nothing is known of the device.
    least
        Likely valid is what has this probability at least.
    fastest
        Part of the likely valid programs to choose from by predicted latency, but at least `n`.
    diverse
        Whether to choose by clusters; else at random.
    """
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(p_valid >= least)
    if len(rows) < n:
        # A random order first, so that equal ones are not taken by their number.
        order = rng.permutation(len(p_valid))
        return order[np.argsort(-p_valid[order], kind="stable")][:n].astype(np.int64)
    if log_s is not None:
        rows = rows[np.argsort(log_s[rows], kind="stable")][: max(n, round(fastest * len(rows)))]
    if len(rows) > n:
        rows = _representatives(z, rows, n, seed) if diverse else rng.permutation(rows)[:n]
    return rows.astype(np.int64)


def _representatives(z: NDArray[np.floating], rows: IntArray, n: int, seed: int) -> IntArray:
    """The row nearest to each of `n` centres (k-means on standardised columns); others fill up where centres agree."""
    from sklearn.cluster import KMeans

    points = np.asarray(z[rows], dtype=np.float64)
    spread = points.std(0)
    points = (points - points.mean(0))[:, spread > 0] / spread[spread > 0]
    distinct = len(np.unique(points, axis=0)) if points.shape[1] else 1
    clusters = min(n, distinct)
    if clusters < 2:
        return np.random.default_rng(seed).permutation(rows)[:n]
    fitted = KMeans(clusters, n_init=1, max_iter=50, random_state=seed).fit(points)
    distance = fitted.transform(points)
    chosen = [int(np.argmin(np.where(fitted.labels_ == c, distance[:, c], np.inf))) for c in range(clusters)]
    rest = np.setdiff1d(np.arange(len(rows)), chosen)
    chosen += np.random.default_rng(seed).permutation(rest)[: n - len(chosen)].tolist()
    return rows[chosen]
