"""Telling whether somebody else is using the core at this moment.

On a rented machine the other hardware thread of a core may belong to a stranger. While it is busy every program here runs up
to twice as long, in phases of ten milliseconds to minutes, and nothing says so: the hypervisor's steal time stays
zero, and a reference program timed every few seconds misses what comes and goes between. A loop of fixed work of
some ten microseconds, timed right before and after a sample, sees it: on the machine this was written on it
takes 12.8 us alone and 22 to 28 us beside a neighbour.
"""

from __future__ import annotations

import time

#: Iterations of the loop: long against the clock's resolution, short against a sample.
_ITERATIONS = 800
#: Timed so often in a row; the first pass warms the interpreter's code and an interrupt spoils only one.
_PASSES = 3
#: A neighbour shows as 1.7 and more; clock changes after wide vector code as up to 1.2.
_TOLERANCE = 1.3
#: An answer is taken for valid so long.
_FRESH_S = 0.0005
#: Waiting may take so much longer than measuring has taken in all: where a neighbour never rests, patience is no use.
_PATIENCE_S = 2.0
#: Between looks while waiting; the core is free for other processes meanwhile.
_PAUSE_S = 0.004


class Sentinel:
    """Watches the core that the calling thread runs on (of several cores: only this one).

    `settle_s` is spent on finding how fast the undisturbed loop is; later faster passes correct it.
    """

    def __init__(self, settle_s: float = 0.3) -> None:
        self.clean_s = float("inf")
        self._patience_s = _PATIENCE_S
        self._seen_at = float("-inf")
        end = time.perf_counter() + settle_s
        while time.perf_counter() < end:
            self._pass_s()
            time.sleep(0.002)

    def _pass_s(self) -> float:
        best = float("inf")
        for _ in range(_PASSES):
            started = time.perf_counter()
            for _ in range(_ITERATIONS):
                pass
            best = min(best, time.perf_counter() - started)
        self.clean_s = min(self.clean_s, best)
        return best

    def calm(self) -> bool:
        """Whether the core is undisturbed now."""
        if self._pass_s() > _TOLERANCE * self.clean_s:
            self._seen_at = float("-inf")
            return False
        self._seen_at = time.perf_counter()
        return True

    @property
    def patient(self) -> bool:
        """Whether waiting is still worth it."""
        return self._patience_s > 0

    def measured(self, seconds: float) -> None:
        """So long was measured: as long may be waited."""
        self._patience_s = min(self._patience_s + seconds, 10 * _PATIENCE_S)

    def wait(self, at_most_s: float) -> tuple[bool, float]:
        """Wait until the core is undisturbed, but in all no longer than was measured: whether it is, and seconds waited."""
        if time.perf_counter() - self._seen_at < _FRESH_S:
            return True, 0.0
        started = time.perf_counter()
        at_most_s = min(at_most_s, self._patience_s)
        while not (calm := self.calm()):
            if time.perf_counter() - started >= at_most_s:
                break
            time.sleep(_PAUSE_S)
        waited = time.perf_counter() - started
        self._patience_s -= waited
        return calm, waited
