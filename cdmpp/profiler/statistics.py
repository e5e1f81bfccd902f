"""From latency samples to a label, its noise, and whether to go on sampling: pure functions of numbers, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingPlan:
    """How one program is sampled."""

    #: A sample is the mean of as many back-to-back runs as fill this time.
    min_sample_s: float = 0.002
    #: Samples taken before the first decision, and at most.
    min_samples: int = 8
    max_samples: int = 24
    #: Sampling stops when the split-half difference is at most this (0.01 is 1 %).
    target_noise: float = 0.01
    #: Time that one program's samples may take. Slow programs get fewer samples for it, at least two: a long sample
    #: averages its own noise.
    max_measure_s: float = 0.25
    #: Time that one program's samples may wait, in all, for the core to be undisturbed.
    max_wait_s: float = 0.6

    def repeats(self, run_s: float) -> int:
        """Runs that make one sample of a program that takes `run_s` seconds."""
        return max(1, int(np.ceil(self.min_sample_s / max(run_s, 1e-9))))

    def needs_more(self, samples_s: Sequence[float], spent_s: float) -> bool:
        """Whether another sample is wanted after `samples_s`, which took `spent_s` seconds in all."""
        n = len(samples_s)
        if n < 2:
            return True
        if n >= self.max_samples or spent_s >= self.max_measure_s:
            return False
        # Halves of equal size only, so that the decision is about what is reported.
        return n < self.min_samples or n % 2 == 1 or split_half_difference(samples_s) > self.target_noise


def label(samples_s: Sequence[float]) -> float:
    """The latency reported for `samples_s`: the mean of the lower half, in seconds. Disturbances only ever add time, so the
    upper half holds them; the minimum alone is an extreme value whose expectation falls with the number of samples."""
    ordered = np.sort(np.asarray(samples_s, dtype=np.float64))
    return float(ordered[: (len(ordered) + 1) // 2].mean())


def split_half_difference(samples_s: Sequence[float]) -> float:
    """Relative difference of the labels of the odd and the even samples (0.01 is 1 %); NaN for one sample."""
    if len(samples_s) < 2:
        return float("nan")
    odd, even = label(samples_s[0::2]), label(samples_s[1::2])
    return abs(odd - even) / ((odd + even) / 2)
