"""Finding the degree of parallelism: as many measuring processes as leave the labels as they are.

The yardstick is the same sample of programs measured with nothing else running. DOPpler finds its degree by
the same comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cdmpp.errors import ProfilerError
from cdmpp.profiler.build import BuildJob
from cdmpp.profiler.engine import CpuEngine, EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DegreeResult:
    """How labels taken at one degree compare with labels taken alone.

    ``median_difference`` and ``mean_difference`` are of |together / alone - 1|, ``bias`` is the median of
    together / alone - 1; ``labels_per_s`` is the rate at that degree, building included.
    """

    degree: int
    n: int
    median_difference: float
    mean_difference: float
    bias: float
    labels_per_s: float
    accepted: bool


@dataclass(frozen=True)
class Calibration:
    """The chosen degree and what it was chosen by.

    ``alone_again`` compares two runs alone: the part of every difference that is noise.
    """

    degree: int
    tolerance: float
    alone_again: DegreeResult
    results: tuple[DegreeResult, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def core_groups(cores: Sequence[int], threads: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint groups of `threads` cores, one for each of `degree` measuring processes.

    Raises
    ------
    ProfilerError
        There are not enough cores.
    """
    if degree < 1 or degree * threads > len(cores):
        raise ProfilerError(
            f"{degree} measuring processes of {threads} cores need {max(1, degree) * threads}, "
            f"this process may use {len(cores)}"
        )
    # From the top: the operating system prefers the first core for its own work.
    chosen = list(cores)[::-1]
    return tuple(tuple(sorted(chosen[i * threads : (i + 1) * threads])) for i in range(degree))


def _labels(
    config: EngineConfig, reference: BuildJob, jobs: Sequence[BuildJob]
) -> tuple[dict[str, float], float]:
    import time

    with CpuEngine(config, reference) as engine:
        started = time.perf_counter()
        labels = {
            o.job.program.hash: o.latency_s
            for o in engine.run(iter(jobs))
            if o.status == "ok" and o.latency_s
        }
        return labels, len(labels) / (time.perf_counter() - started)


def _compare(
    degree: int, alone: dict[str, float], other: dict[str, float], rate: float, tolerance: float
) -> DegreeResult:
    common = sorted(set(alone) & set(other))
    if not common:
        return DegreeResult(degree, 0, float("nan"), float("nan"), float("nan"), rate, False)
    ratio = np.array([other[h] / alone[h] for h in common]) - 1
    difference = np.abs(ratio)
    median, mean = float(np.median(difference)), float(difference.mean())
    # The mean is allowed twice the tolerance: a few programs that live on memory bandwidth show in it.
    accepted = median <= tolerance and mean <= 2 * tolerance
    return DegreeResult(degree, len(common), median, mean, float(np.median(ratio)), rate, accepted)


def calibrate(
    config: EngineConfig,
    jobs: Sequence[BuildJob],
    reference: BuildJob,
    *,
    cores: Sequence[int],
    threads: int,
    tolerance: float = 0.02,
) -> Calibration:
    """Measure `jobs` alone (twice) and together at falling degrees; the highest accepted degree wins.

    Degree 1 is taken where none is accepted, with a warning.

    Raises
    ------
    ProfilerError
        Not one of the jobs could be measured alone.
    """
    single = replace(config, core_groups=core_groups(cores, threads, 1), overlap=False)
    alone, rate = _labels(single, reference, jobs)
    if not alone:
        raise ProfilerError("not one program of the calibration sample could be measured")
    again, rate = _labels(single, reference, jobs)
    alone_again = _compare(1, alone, again, rate, tolerance)
    # The better of two runs alone is the truth to compare with.
    alone = {h: min(v, again.get(h, v)) for h, v in alone.items()}
    results: list[DegreeResult] = []
    degree = max(1, len(cores) // threads)
    while True:
        together = replace(config, core_groups=core_groups(cores, threads, degree))
        labels, rate = _labels(together, reference, jobs)
        results.append(_compare(degree, alone, labels, rate, tolerance))
        if results[-1].accepted or degree == 1:
            break
        degree = degree // 2
    if not results[-1].accepted:
        logger.warning(
            "labels taken while other programs build differ by %.1f %% in the median from labels taken alone",
            100 * results[-1].median_difference,
        )
    return Calibration(degree, tolerance, alone_again, tuple(results))
