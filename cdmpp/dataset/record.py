"""One measurement, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import STATUSES, DatasetError, LabelError


@dataclass(frozen=True)
class Record:
    """One program on one device: latency samples in seconds, or a typed failure.

    ``device`` is a canonical name, ``status`` "ok" or one of :data:`cdmpp.errors.FAILURE_KINDS`. ``latency_s`` is the label
    (None for a failure), made of ``samples_s`` in the order in which they were taken (stored as float32); ``noise`` is the
    relative difference of the labels of their two halves, |a - b| / mean(a, b) (None if unknown). ``error`` is what went wrong,
    for people; ``measured_at`` Unix time in seconds; ``meta`` everything else worth keeping (JSON values), such as build_s,
    attempts, session.
    """

    program: str
    device: str
    status: str
    latency_s: float | None = None
    samples_s: tuple[float, ...] = field(default=(), repr=False)
    noise: float | None = None
    error: str = ""
    measured_at: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Refuse what cannot be a measurement; the message names the record. DatasetError: an unknown status, no program or no
        device. LabelError: a latency or sample that is no :func:`is_label`, a noise below 0; a failure that has a latency."""
        if not self.program or not self.device:
            raise DatasetError(f"a record needs a program and a device, got {self.program!r} and {self.device!r}")
        if self.status not in STATUSES:
            raise DatasetError(f"{self._name()}: status {self.status!r} is none of {', '.join(STATUSES)}")
        if self.status != "ok":
            if self.latency_s is not None:
                raise LabelError(f"{self._name()}: a record of status {self.status} cannot have a latency")
            return
        if not is_label(self.latency_s):
            raise LabelError(f"{self._name()}: latency_s is {self.latency_s}, expected finite seconds above 0")
        for sample_s in self.samples_s:
            if not is_label(sample_s):
                raise LabelError(f"{self._name()}: a sample is {sample_s}, expected finite seconds above 0")
        if self.noise is not None and not (math.isfinite(self.noise) and self.noise >= 0):
            raise LabelError(f"{self._name()}: noise is {self.noise}, expected a finite number of at least 0")

    def _name(self) -> str:
        return f"record of program {self.program} on {self.device}"


def is_label(latency_s: float | None) -> bool:
    """Whether a number can be a latency: finite and above 0."""
    return latency_s is not None and math.isfinite(latency_s) and latency_s > 0
