"""Finding the degree of parallelism: how many programs can be measured at the same time without changing the labels that they
get when nothing else runs. DOPpler finds its degree by the same comparison."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.device import Device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer, sentinel_job
from cdmpp.profiler.engine import BuildJob, Engine, Executor, Outcome
from cdmpp.profiler.machine import core_groups, usable_cores

logger = logging.getLogger(__name__)

#: Latency in seconds by program, and labels per second.
Labels = tuple[dict[str, float], float]


@dataclass(frozen=True)
class DegreeResult:
    """How labels taken at one degree (together) compare with labels taken while nothing else runs (alone), over `n` programs
    that have both. Differences are |together / alone - 1|; ``bias`` is the median of together / alone - 1. None: too few."""

    degree: int
    labels_per_s: float
    n: int = 0
    median_difference: float | None = None
    mean_difference: float | None = None
    bias: float | None = None
    spearman: float | None = None
    accepted: bool = False

    def __str__(self) -> str:
        median, mean = (
            "-" if value is None else f"{100 * value:.1f} %" for value in (self.median_difference, self.mean_difference)
        )
        rank = "" if self.spearman is None else f", Spearman {self.spearman:.3f}"
        return (
            f"degree {self.degree}: labels differ from those taken alone by {median} in the median, {mean} in the "
            f"mean{rank}, {self.labels_per_s:.1f} labels/s: {'accepted' if self.accepted else 'refused'}"
        )


@dataclass(frozen=True)
class Calibration:
    """The chosen degree and the results it was chosen by; ``alone_again`` compares two runs alone, so it shows the noise."""

    degree: int
    tolerance: float
    alone_again: DegreeResult
    results: tuple[DegreeResult, ...]


def timed_labels(outcomes: Iterable[Outcome]) -> Labels:
    """The labels of an engine's run, and labels per second."""
    started = time.perf_counter()
    labels = {o.job.program.hash: o.latency_s for o in outcomes if o.latency_s is not None}
    return labels, len(labels) / max(time.perf_counter() - started, 1e-9)


def calibrate(
    measure: Callable[[int | None], Labels],
    degrees: Sequence[int],
    tolerance: float,
    accept: Callable[[DegreeResult, DegreeResult], bool],
) -> Calibration:
    """Measure the same programs twice alone, and together at falling degrees; the first accepted degree is chosen, else 1.
    `measure` takes the labels at a degree (None: alone). A degree is accepted if its median difference is at most `tolerance`,
    or at most that between the two runs alone, and if `accept` agrees, given the degree's result and that of the second run
    alone. ProfilerError if no program could be measured alone."""
    first, _ = measure(None)
    again, rate_alone = measure(None)
    if not first:
        raise ProfilerError("not one program of the calibration sample could be measured")
    # The faster of the two runs alone is the reference.
    alone = {program: min(value, again.get(program, value)) for program, value in first.items()}
    noise = compare(1, first, again, rate_alone)
    results: list[DegreeResult] = []
    chosen = 1
    for degree in degrees:
        result = compare(degree, alone, *measure(degree))
        within = result.median_difference is not None and (
            result.median_difference <= max(tolerance, noise.median_difference or 0.0)
        )
        results.append(replace(result, accepted=within and accept(result, noise)))
        if results[-1].accepted:
            chosen = degree
            break
    return Calibration(chosen, tolerance, noise, tuple(results))


def calibrate_cpu(
    jobs: Sequence[BuildJob], config: CpuConfig, device: Device, tolerance: float, notify: Callable[[str], None]
) -> Calibration:
    """The degree for a share of this machine, found with these programs. The mean difference, too, is limited: to twice the
    tolerance, or to that between labels taken alone."""
    cores, sentinel, threads = usable_cores(), sentinel_job(), int(device.share)
    notify(f"calibrating the degree of parallelism on {len(jobs)} programs")

    def measure(degree: int | None) -> Labels:
        groups, alone = core_groups(cores, threads, degree or 1), degree is None
        with Engine(CpuMeasurer(config, device.target, Executor(groups), sentinel, overlap=not alone)) as engine:
            return timed_labels(engine.run(iter(jobs)))

    def accept(result: DegreeResult, alone: DegreeResult) -> bool:
        # A few programs that are bound by memory bandwidth show only in the mean.
        limit = max(2 * tolerance, alone.mean_difference or 0.0)
        return result.mean_difference is not None and result.mean_difference <= limit

    calibration = calibrate(measure, halved(len(cores) // threads), tolerance, accept)
    for result in calibration.results:
        notify(str(result))
    if not calibration.results[-1].accepted:
        logger.warning("labels taken while other programs build differ from labels taken alone")
    return calibration


def halved(degree: int) -> list[int]:
    """Degrees to try: `degree`, half of it, and so on down to 1."""
    return [degree, *halved(degree // 2)] if degree > 1 else [1]


def compare(degree: int, alone: Mapping[str, float], other: Mapping[str, float], labels_per_s: float) -> DegreeResult:
    """How the labels `other`, taken at a degree, differ from those taken alone."""
    common = sorted(set(alone) & set(other))
    if not common:
        return DegreeResult(degree, labels_per_s)
    ratio = np.array([other[h] / alone[h] for h in common]) - 1
    difference = np.abs(ratio)
    median, mean, bias = float(np.median(difference)), float(difference.mean()), float(np.median(ratio))
    rank = spearman([alone[h] for h in common], [other[h] for h in common])
    return DegreeResult(degree, labels_per_s, len(common), median, mean, bias, rank)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than three values, or if all of one side are equal."""
    import pandas as pd

    ranks = [pd.Series(list(values)).rank() for values in (a, b)]
    if len(a) < 3 or any(np.ptp(rank.to_numpy()) == 0 for rank in ranks):
        return None
    return float(ranks[0].corr(ranks[1]))
