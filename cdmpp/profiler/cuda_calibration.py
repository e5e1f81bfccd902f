"""How many programs may share the GPU at a time: as many as leave the labels as they are.

Programs are grouped by the degree that could suit them: of a program with 20 blocks six fit side by side on 132
multiprocessors. A sample of each group is measured alone (twice) and side by side at falling degrees.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cdmpp.errors import ProfilerError
from cdmpp.profiler.cuda_engine import CudaEngine
from cdmpp.profiler.cuda_program import CudaProgram
from cdmpp.profiler.gpu.device import GpuFacts
from cdmpp.profiler.gpu.sampling import MeasureJob

#: Least rank correlation with labels taken alone.
MIN_SPEARMAN = 0.99


@dataclass(frozen=True)
class GroupResult:
    """How labels of a group taken at one degree compare with labels taken alone.

    ``median_difference`` is of |together / alone - 1|, ``alone_again`` the same of two runs alone (noise), ``bias`` the
    median of together / alone - 1.
    """

    group: int
    degree: int
    n: int
    median_difference: float
    bias: float
    spearman: float
    alone_again: float
    labels_per_s: float
    labels_per_s_alone: float
    accepted: bool

    def to_json(self) -> dict[str, Any]:
        """As JSON values; None for what cannot be computed of so few programs."""
        return {
            k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in asdict(self).items()
        }


def possible_degree(cuda: CudaProgram, facts: GpuFacts) -> int:
    """Programs like this one that fit side by side: a power of two up to the number of lanes.

    Where lanes are partitions every program has its own, so all lanes may work.
    """
    if facts.partition != "whole":
        return facts.lanes
    blocks = max(shape.blocks for shape in cuda.shapes)
    degree = 1
    while 2 * degree <= facts.lanes and 2 * degree * blocks <= facts.sms:
        degree *= 2
    return degree


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN for fewer than three values."""
    import pandas as pd

    if len(a) < 3:
        return float("nan")
    ranks = [pd.Series(list(values)).rank().to_numpy() for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def calibrate_groups(
    engine: CudaEngine, groups: Mapping[int, Sequence[MeasureJob]], tolerance: float
) -> tuple[dict[int, int], list[GroupResult]]:
    """Degree by group, and what it was chosen by.

    Parameters
    ----------
    groups
        Possible degree -> a sample of the programs of that degree.
    tolerance
        Largest accepted median difference.

    Raises
    ------
    ProfilerError
        Not one program of a group could be measured alone.
    """
    degrees: dict[int, int] = {}
    results: list[GroupResult] = []
    for group, jobs in groups.items():
        degrees[group] = 1
        if group == 1 or not jobs:
            continue
        first, rate_alone = _labels(engine, jobs, 1)
        again, _ = _labels(engine, jobs, 1)
        common = sorted(set(first) & set(again))
        if not common:
            raise ProfilerError("not one program of the calibration sample could be measured")
        noise = float(np.median([abs(again[h] / first[h] - 1) for h in common]))
        # The better of two runs alone is what to compare with.
        alone = {h: min(first[h], again[h]) for h in common}
        degree = group
        while degree > 1:
            together, rate = _labels(engine, jobs, degree)
            result = _compare(group, degree, alone, together, noise, rate, rate_alone, tolerance)
            results.append(result)
            if result.accepted:
                degrees[group] = degree
                break
            degree //= 2
    return degrees, results


def _labels(engine: CudaEngine, jobs: Sequence[MeasureJob], degree: int) -> tuple[dict[str, float], float]:
    started = time.perf_counter()
    labels = {
        o.job.kernel.program: o.latency_s
        for o in engine.run(iter([replace(job, degree=degree) for job in jobs]))
        if o.latency_s is not None
    }
    return labels, len(labels) / max(time.perf_counter() - started, 1e-9)


def _compare(
    group: int,
    degree: int,
    alone: Mapping[str, float],
    together: Mapping[str, float],
    noise: float,
    rate: float,
    rate_alone: float,
    tolerance: float,
) -> GroupResult:
    common = sorted(set(alone) & set(together))
    ratio = np.array([together[h] / alone[h] for h in common]) - 1
    median = float(np.median(np.abs(ratio))) if common else float("nan")
    rank = spearman([alone[h] for h in common], [together[h] for h in common])
    accepted = bool(median <= tolerance and not rank < MIN_SPEARMAN and rate > rate_alone)
    bias = float(np.median(ratio)) if common else float("nan")
    return GroupResult(group, degree, len(common), median, bias, rank, noise, rate, rate_alone, accepted)
