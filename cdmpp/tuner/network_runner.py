"""The measuring side of whole networks: compiled networks run in turn, as a whole and call by call.

On a rented machine strangers disturb a core for most of the time and leave gaps of ten to a hundred
milliseconds (:mod:`cdmpp.profiler.sentinel`). A run of a few milliseconds fits into a gap; a run of a second
never does, but each of the functions it calls may. Two figures are therefore taken of every network:

* **runs**: whole runs as they are served, samples of one run each (of several where one takes under
  ``SamplingPlan.min_sample_s``). A run is *quiet* if the core was undisturbed right before it, right after
  it, at every look that a thread took meanwhile (every 4 ms; its time is taken off), and no other process had
  the core. The figure is the mean of the faster half of the quiet ones.
* **calls**: the Relax VM's instrument tells when a function begins and ends. Each function's time is the mean
  of the faster half of its quiet samples, by the same rule, in the network as it runs: nothing is called
  twice in a row or left out. A function that never had a quiet moment counts with its fastest sample. The
  shortest call of the VM's own functions, which is the cost of looking, is taken off each. What the VM does
  between the calls, about a microsecond a function, is not counted; the caches may be colder after a wait.

The label is that of the runs where enough of them were quiet, else the sum of the calls; the label of all
runs, disturbed or not, is kept beside it. How much of the label's time somebody else used the core is told as
*disturbed*, by the part of the looks that saw it: beside a neighbour that doubles every time, the label is too
long by at most half of that part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cdmpp.profiler.sentinel import Sentinel
from cdmpp.profiler.statistics import SamplingPlan, label, split_half_difference
from cdmpp.program.fusion import PREPARE_WEIGHTS

#: Between looks while something runs.
_LOOK_EVERY_S = 0.004
#: Time off the core that other processes may take of a quiet sample: absolute and relative.
_OFF_CORE_S, _OFF_CORE = 50e-6, 0.02
#: Runs up to here are sampled for half of the time, longer ones, which seldom are quiet, for a quarter.
_SHORT_RUN_S = 0.03
#: Waiting before one sample: for a run or a call that lacks quiet samples.
_WAIT_S = 0.4
#: Functions without enough quiet samples may make so much of the sum.
_OPEN = 0.01
#: How the VM's own functions are called; all others are the network's.
_OWN = "vm.builtin."


@dataclass(frozen=True)
class CallLatency:
    """One call of a function by a network.

    Attributes
    ----------
    name
        Of the function, as in the fused module.
    latency_s
        Mean of the faster half of its quiet samples; its fastest sample where none was quiet.
    disturbed
        Part of that time during which somebody else used the core, 0 to 1.
    samples, quiet_samples
        Taken, and quiet.
    """

    name: str
    latency_s: float
    disturbed: float
    samples: int
    quiet_samples: int


@dataclass(frozen=True)
class VariantLatency:
    """What was measured of one compiled network.

    Attributes
    ----------
    latency_s
        The label, seconds, from what `method` says.
    method
        ``runs`` (the quiet whole runs) or ``calls`` (the sum of `calls`).
    noise
        Relative split-half difference of the label; None where there are too few samples.
    disturbed
        Part of the label's time during which somebody else used the core, 0 to 1.
    plain_s
        Label of all whole runs, disturbed or not.
    calls_s
        Sum of `calls`; None where the calls could not be told apart.
    runs, quiet_runs
        Samples of whole runs, and quiet ones.
    calls
        In the order of execution.
    """

    latency_s: float
    method: str
    noise: float | None
    disturbed: float
    plain_s: float
    calls_s: float | None
    runs: int
    quiet_runs: int
    calls: tuple[CallLatency, ...]


class Runnable(Protocol):
    """A compiled network."""

    def run(self) -> None:
        """One run."""

    def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        """One run that tells of every call."""


@dataclass(frozen=True)
class _Mark:
    """The state of the looks when something was started."""

    at: float
    cpu_s: float
    calm: bool
    looks: int
    disturbed: int
    spent_s: float


class Looks:
    """Looks at the core before, while and after something runs.

    Parameters
    ----------
    sentinel
        Of the core.
    alone
        Whether the calling thread does all the work, so that time off the core is somebody else's.
    clock, cpu_clock
        Seconds, and those of the calling thread on the core.
    """

    def __init__(
        self,
        sentinel: Sentinel,
        *,
        alone: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._sentinel, self._alone, self.clock, self._cpu_clock = sentinel, alone, clock, cpu_clock
        self._looks, self._disturbed, self._spent_s = 0, 0, 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, prepare: Callable[[], object] = lambda: None) -> None:
        """Look every few milliseconds from now on, in a thread that calls `prepare` first."""

        def loop() -> None:
            prepare()
            while not self._stop.wait(_LOOK_EVERY_S):
                self.look()

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """One look while something runs."""
        started = self.clock()
        self._disturbed += not self._sentinel.calm()
        self._looks += 1
        self._spent_s += self.clock() - started

    def close(self) -> None:
        """No more looks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, wait_s: float) -> tuple[_Mark, float]:
        """Wait at most `wait_s` for an undisturbed core; the mark to end with, and the seconds waited."""
        self._sentinel.measured(wait_s)  # how long it pays to wait is the plan's to say
        calm, waited_s = self._sentinel.wait(wait_s)
        looks, disturbed, spent_s, cpu_s = self._looks, self._disturbed, self._spent_s, self._cpu_clock()
        return _Mark(self.clock(), cpu_s, calm, looks, disturbed, spent_s), waited_s

    def end(self, mark: _Mark) -> tuple[float, float]:
        """Seconds since the mark without those of looks, and for which part of them it was disturbed (0: quiet)."""
        seconds, cpu_s = self.clock() - mark.at, self._cpu_clock() - mark.cpu_s
        seconds -= self._spent_s - mark.spent_s
        disturbed = self._disturbed - mark.disturbed + (not mark.calm) + (not self._sentinel.calm())
        part = disturbed / (self._looks - mark.looks + 2)
        off_core_s = seconds - cpu_s if self._alone else 0.0
        if off_core_s > max(_OFF_CORE_S, _OFF_CORE * seconds):
            part = max(part, off_core_s / seconds)
        return seconds, part


class Sampled:
    """A compiled network with its samples so far."""

    def __init__(self, network: Runnable, looks: Looks, plan: SamplingPlan) -> None:
        self._network, self._looks, self._plan = network, looks, plan
        #: Seconds of samples, and for which part of each the core was disturbed.
        self.runs: list[tuple[float, float]] = []
        self.calls: list[tuple[str, list[tuple[float, float]]]] = []
        self.own_s = float("inf")
        self.steady = True
        self.passes = 0
        self._spent_s = self._waited_s = 0.0
        started = looks.clock()
        network.run()
        self._run_s = looks.clock() - started
        self._repeats = plan.repeats(self._run_s)

    def _begin(self, wait_s: float) -> _Mark:
        mark, waited_s = self._looks.begin(min(wait_s, max(0.0, self._plan.max_wait_s - self._waited_s)))
        self._waited_s += waited_s
        return mark

    def sample_run(self) -> None:
        """One sample of whole runs."""
        started = self._looks.clock()
        mark = self._begin(_WAIT_S)
        for _ in range(self._repeats):
            self._network.run()
        seconds, disturbed = self._looks.end(mark)
        self.runs.append((seconds / self._repeats, disturbed))
        self._spent_s += self._looks.clock() - started

    def sample_calls(self) -> None:
        """One run, call by call."""
        looks, position, depth = self._looks, 0, 0
        mark: _Mark | None = None
        own_since = 0.0

        def before(name: str) -> None:
            nonlocal depth, mark, own_since
            depth += 1
            if depth > 1:
                return
            if name.startswith(_OWN):
                own_since = looks.clock()
                return
            if position == len(self.calls):
                self.calls.append((name, []))
            mark = self._begin(0.0 if self._settled(position) else _WAIT_S)

        def after(name: str) -> None:
            nonlocal depth, position
            depth -= 1
            if depth:
                return
            if mark is None or name.startswith(_OWN):
                self.own_s = min(self.own_s, looks.clock() - own_since)
                return
            known, samples = self.calls[position]
            self.steady &= known == name
            samples.append(looks.end(mark))
            position += 1

        started = looks.clock()
        self._network.run_instrumented(before, after)
        self.steady &= position == len(self.calls)
        self.passes += 1
        self._spent_s += looks.clock() - started

    @property
    def _enough(self) -> int:
        """Quiet samples that make a label."""
        return max(2, self._plan.min_samples // 2)

    def _settled(self, position: int) -> bool:
        return len(_quiet(self.calls[position][1])) >= self._enough

    @property
    def _budget_s(self) -> float:
        return self._plan.max_measure_s + self._plan.max_wait_s

    @property
    def wants_runs(self) -> bool:
        """Whether another sample of whole runs is wanted: two in any case."""
        if len(self.runs) < 2:
            return True
        part = 0.5 if self._run_s <= _SHORT_RUN_S else 0.25
        if self._spent_s >= part * self._budget_s:
            return False
        return self._plan.needs_more(_quiet(self.runs), 0.0)

    @property
    def wants_calls(self) -> bool:
        """Whether another run call by call is wanted: two in any case."""
        if self.passes < 2:
            return True
        if not self.calls or not self.steady or self.passes >= 2 * self._plan.max_samples:
            return False
        if self._spent_s + self._spent_s / (len(self.runs) + self.passes) > self._budget_s:
            return False
        times = [call.latency_s for call in self._call_latencies()]
        open_s = sum(s for position, s in enumerate(times) if not self._settled(position))
        noise = self._calls_noise()
        return open_s > _OPEN * sum(times) or noise is None or noise > self._plan.target_noise

    def _call_latencies(self) -> tuple[CallLatency, ...]:
        cost_s = self.own_s if self.own_s < float("inf") else 0.0
        found = []
        for name, samples in self.calls:
            quiet = _quiet(samples)
            seconds, disturbed = (label(quiet), 0.0) if quiet else min(samples)
            found.append(CallLatency(name, max(0.0, seconds - cost_s), disturbed, len(samples), len(quiet)))
        return tuple(found)

    def _calls_noise(self) -> float | None:
        """Relative difference of the sums of the odd and of the even samples; None without two of any."""
        quiet = [_quiet(samples) for _, samples in self.calls]
        pairs = [(label(values[0::2]), label(values[1::2])) for values in quiet if len(values) > 1]
        odd, even = (sum(pair[i] for pair in pairs) for i in (0, 1))
        return abs(odd - even) / ((odd + even) / 2) if pairs else None

    def result(self) -> VariantLatency:
        """The label and what it is made of."""
        calls = self._call_latencies() if self.steady else ()
        calls_s = sum(call.latency_s for call in calls) if calls else None
        runs, quiet_runs = [seconds for seconds, _ in self.runs], _quiet(self.runs)
        enough = len(quiet_runs) >= self._enough
        noise: float | None
        if enough or not calls_s:
            latency_s = label(quiet_runs if enough else runs)
            noise = split_half_difference(quiet_runs if enough else runs)
            disturbed = 0.0 if enough else float(np.mean([part for _, part in self.runs]))
        else:
            latency_s, noise = calls_s, self._calls_noise()
            disturbed = sum(call.latency_s * call.disturbed for call in calls) / calls_s
        return VariantLatency(
            latency_s,
            "runs" if enough or not calls_s else "calls",
            noise,
            disturbed,
            label(runs),
            calls_s,
            len(runs),
            len(quiet_runs),
            calls,
        )


def _quiet(samples: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds of the samples that nothing disturbed."""
    return [seconds for seconds, disturbed in samples if disturbed == 0]


def sample_in_turn(variants: Sequence[Sampled]) -> None:
    """Sample all variants, in turn (A B A B ...), so that a slow disturbance hits all of them."""
    while todo := [variant for variant in variants if variant.wants_runs]:
        for variant in todo:
            variant.sample_run()
    while todo := [variant for variant in variants if variant.wants_calls]:
        for variant in todo:
            variant.sample_calls()


class Loaded:
    """A compiled network with its inputs and prepared weights."""

    def __init__(self, path: str, data: str) -> None:
        import tvm
        from tvm import relax

        vm = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
        with np.load(data) as stored:
            number = len(stored.files) - 1
            tensors = [tvm.runtime.tensor(stored[f"arr_{i}"]) for i in range(number)]
            inputs = int(stored["inputs"])
        weights = tensors[inputs:]
        prepared = list(vm[PREPARE_WEIGHTS](tuple(weights))) if weights else []
        self._vm, self._main = vm, vm["main"]
        self._args = [*tensors[:inputs], *prepared]
        self._main(*self._args)

    def run(self) -> None:
        """One run."""
        self._main(*self._args)

    def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        """One run that tells of every call, also of the VM's own functions."""
        from tvm.relax import VMInstrumentReturnKind

        def hook(_function: Any, name: str, is_before: bool, *_: Any) -> int:
            (before if is_before else after)(name)
            return int(VMInstrumentReturnKind.NO_OP)

        self._vm.set_instrument(hook)
        try:
            self._main(*self._args)
        finally:
            self._vm.set_instrument(None)

    def outputs(self) -> list[np.ndarray]:
        """All output tensors."""
        result = self._main(*self._args)
        flat = [result] if hasattr(result, "numpy") else list(result)
        return [item.numpy() for item in flat if hasattr(item, "numpy")]


def largest_difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Largest difference of floating-point outputs, relative to the largest finite value."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if np.asarray(a).dtype.kind != "f":
            continue
        x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        scale = float(np.abs(x[both]).max(initial=0.0))
        if scale > 0:
            worst = max(worst, float(np.abs(x[both] - y[both]).max()) / scale)
        if (np.isfinite(x) != np.isfinite(y)).any():
            worst = float("inf")
    return worst
