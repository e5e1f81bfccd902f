"""The measuring side of the CPU profiler: a process that owns its cores and takes latency samples.

State that a label depends on, and how it is fixed here:

* **Cores**: the process is pinned to its cores, TVM's thread pool has one thread per core, and the process runs under
  the real-time scheduler where the system allows it, so that builders on the same core wait.
* **First touch**: arguments are allocated and filled with random numbers by this process, on its cores, before
  the first run.
* **Caches**: warm. Each sample starts with one untimed run of the same program (unless one run takes over 20 ms),
  then as many timed runs back to back as fill ``SamplingPlan.min_sample_s``.
* **Interleaving**: the samples of a batch of programs are taken in turn (A B C A B C ...), so that a slow
  disturbance hits all of them and is seen by the split-half difference.
* **Disturbance**: a sample is taken when a :class:`~cdmpp.profiler.sentinel.Sentinel` says that the core is
  undisturbed, and counts only if it still says so afterwards and the thread was not preempted; waiting costs nothing,
  builders use the core meanwhile. A program that gets too few such samples in its time is reported with the
  others, and with their share. A reference program is timed before and after each batch, and its drift and the
  hypervisor's steal time come with the results.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from cdmpp.profiler.arguments import index_bound, integer_range
from cdmpp.profiler.build import ArgSpec, Built
from cdmpp.profiler.pool import requests
from cdmpp.profiler.sentinel import Sentinel
from cdmpp.profiler.statistics import SamplingPlan

#: Bytes of arguments kept between batches for programs of equal signature.
_ARGUMENT_CACHE_BYTES = 2 << 30
#: Samples in all, disturbed ones included, relative to ``SamplingPlan.max_samples``.
_MAX_TAKEN = 2
#: Undisturbed samples of the reference program, of three times as many attempts.
_REFERENCE_SAMPLES = 3
#: From here on a run is timed from Python (2 us of overhead) without an untimed run before it: refilling the
#: caches is a vanishing part of it, and the untimed run would double the cost.
_LONG_RUN_S = 0.02


@dataclass(frozen=True)
class RunnerConfig:
    """What a measuring process needs to know.

    ``cores`` are the ones it owns; one thread each. A program whose first run takes longer than `run_timeout_s` is
    not sampled.
    """

    cores: tuple[int, ...]
    plan: SamplingPlan = field(default_factory=SamplingPlan)
    run_timeout_s: float = 2.0
    reference: Built | None = None
    realtime: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Starting:
    """Sent before a program's first run, and with an empty hash when the sampling of the batch begins."""

    program: str


@dataclass(frozen=True)
class Measured:
    """Samples of one program, or why there are none."""

    program: str
    status: str
    samples_s: tuple[float, ...] = ()
    error: str = ""
    run_s: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchDone:
    """Sent after a batch: what the machine did meanwhile."""

    reference_before_s: float
    reference_after_s: float
    steal_pct: float
    scheduler: str


def _fill(shape: tuple[int, ...], dtype: str, bound: int, rng: np.random.Generator) -> np.ndarray:
    """Random contents: positive floats away from zero and denormals; integers as :mod:`cdmpp.profiler.arguments` says."""
    kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        return rng.integers(*integer_range(dtype, bound), shape).astype(dtype)
    values = rng.random(shape, dtype=np.float32)
    values *= 0.9
    values += 0.1
    return values.astype(dtype, copy=False)


class _Arguments:
    """Allocated arguments by signature, least recently used given up first."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._cache: OrderedDict[tuple[ArgSpec, ...], tuple[int, list[Any]]] = OrderedDict()

    def get(self, specs: tuple[ArgSpec, ...]) -> list[Any]:
        import tvm

        if specs in self._cache:
            self._cache.move_to_end(specs)
            return self._cache[specs][1]
        bound = index_bound(specs)
        size = sum(int(np.prod(shape)) * 8 for shape, _ in specs)
        while self._cache and sum(s for s, _ in self._cache.values()) + size > _ARGUMENT_CACHE_BYTES:
            self._cache.popitem(last=False)
        arrays = [tvm.runtime.tensor(_fill(shape, dtype, bound, self._rng)) for shape, dtype in specs]
        self._cache[specs] = (size, arrays)
        return arrays


class _Loaded:
    """A program ready to run, with its samples so far."""

    def __init__(self, built: Built, arguments: _Arguments, plan: SamplingPlan, sentinel: Sentinel) -> None:
        import tvm

        self.hash = built.program.hash
        self.plan = plan
        self.sentinel = sentinel
        self.args = arguments.get(built.args)
        self.module = tvm.runtime.load_module(built.path)
        self.entry = self.module["main"]
        self.calm: list[float] = []
        self.disturbed: list[float] = []
        self.spent_s = 0.0
        self.waited_s = 0.0
        self.repeats = 1
        self.first_s = 0.0
        self._timer: Any = None

    def start(self) -> None:
        """First run (page faults, lazy binding), then the length of a sample."""
        import tvm

        run_s = self.first_s = self._run_once()
        if run_s < _LONG_RUN_S:
            run_s = self._run_once()  # warm: the first may have been ten times longer
        if self.plan.repeats(run_s) > 20:
            # Calls from Python cost some 2 us; short programs are gauged inside the runtime.
            run_s = self.module.time_evaluator("main", tvm.cpu(0), number=10)(*self.args).mean
        self.repeats = self.plan.repeats(run_s)
        if run_s < _LONG_RUN_S:
            self._timer = self.module.time_evaluator("main", tvm.cpu(0), number=self.repeats)

    def _run_once(self) -> float:
        started = time.perf_counter()
        self.entry(*self.args)
        return time.perf_counter() - started

    def sample(self) -> None:
        """One sample: an untimed run, then the mean of `repeats` runs."""
        from cdmpp.profiler.machine import preemptions

        calm, waited_s = self.sentinel.wait(max(0.0, self.plan.max_wait_s - self.waited_s))
        self.waited_s += waited_s
        started, before = time.perf_counter(), preemptions()
        # time_evaluator makes one untimed call before it starts its clock.
        value = self._run_once() if self._timer is None else self._timer(*self.args).mean
        calm = calm and preemptions() == before and self.sentinel.calm()
        (self.calm if calm else self.disturbed).append(value)
        elapsed_s = time.perf_counter() - started
        self.spent_s += elapsed_s
        self.sentinel.measured(elapsed_s)

    @property
    def wants_more(self) -> bool:
        taken = len(self.calm) + len(self.disturbed)
        if taken >= 2 and self.spent_s >= self.plan.max_measure_s:
            return False
        patient = self.waited_s < self.plan.max_wait_s and self.sentinel.patient
        if taken >= max(2, self.plan.min_samples // 2) and self.disturbed and not patient:
            # More of the same would only keep builders from the core; it is measured again later.
            return False
        return taken < _MAX_TAKEN * self.plan.max_samples and self.plan.needs_more(self.calm, 0.0)

    def result(self) -> tuple[tuple[float, ...], float]:
        """The samples that the label is made of, and the share of disturbed ones among them."""
        if len(self.calm) >= max(2, self.plan.min_samples // 2) or not self.disturbed:
            return tuple(self.calm), 0.0
        taken = self.calm + self.disturbed
        return tuple(taken), len(self.disturbed) / len(taken)


def _measure_batch(
    batch: list[Built], config: RunnerConfig, arguments: _Arguments, sentinel: Sentinel
) -> Iterator[Starting | Measured]:
    """Measure `batch` interleaved; yields what the parent should know, results as soon as they are final."""
    loaded: list[_Loaded] = []
    for built in batch:
        yield Starting(built.program.hash)
        try:
            program = _Loaded(built, arguments, config.plan, sentinel)
            program.start()
        except Exception as err:  # whatever a foreign shared object or the runtime raises
            yield Measured(built.program.hash, "run_error", error=f"{type(err).__name__}: {err}"[:500])
            continue
        if program.first_s > config.run_timeout_s:
            error = f"one run took {program.first_s:.3g} s, over {config.run_timeout_s:g} s"
            yield Measured(program.hash, "run_timeout", error=error, run_s=program.first_s)
            continue
        loaded.append(program)
    yield Starting("")
    while loaded:
        for program in loaded:
            program.sample()
        for program in [p for p in loaded if not p.wants_more]:
            loaded.remove(program)
            samples_s, disturbed = program.result()
            yield Measured(
                program.hash,
                "ok",
                samples_s,
                run_s=program.spent_s + program.first_s,
                meta={
                    "repeats": program.repeats,
                    "retakes": len(program.disturbed),
                    "waited_s": round(program.waited_s, 3),
                    "disturbed": round(disturbed, 3),
                },
            )


def measure_worker(connection: Connection, config: RunnerConfig) -> None:
    """Serve lists of :class:`Built` until the connection closes (runs in its own process)."""
    from cdmpp.profiler import machine

    machine.die_with_parent()
    machine.pin(config.cores)
    # Read when the thread pool starts, which is at the first parallel program. Binding is left to the pinning
    # above: the runtime would bind its threads to the machine's first cores, whoever owns them.
    os.environ["TVM_NUM_THREADS"] = str(len(config.cores))
    os.environ["TVM_BIND_THREADS"] = "0"
    scheduler = machine.own_the_core() if config.realtime else "normal"
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    arguments, sentinel = _Arguments(config.seed), Sentinel()
    reference: _Loaded | None = None
    if config.reference is not None:
        reference = _Loaded(config.reference, arguments, config.plan, sentinel)
        reference.start()

    def time_reference() -> float:
        if reference is None:
            return float("nan")
        reference.calm.clear()
        reference.disturbed.clear()
        reference.waited_s = 0.0
        for _ in range(_REFERENCE_SAMPLES * 3):
            reference.sample()
            if len(reference.calm) == _REFERENCE_SAMPLES:
                break
        return float(np.median(reference.calm or reference.disturbed))

    batch: list[Built]
    for batch in requests(connection):
        started, stolen = time.perf_counter(), machine.steal_ticks(config.cores)
        before_s = time_reference()
        for message in _measure_batch(batch, config, arguments, sentinel):
            connection.send(message)
        after_s = time_reference()
        elapsed = time.perf_counter() - started
        steal = (
            (machine.steal_ticks(config.cores) - stolen) / 100 / len(config.cores) / max(elapsed, 0.01) * 100
        )
        connection.send(BatchDone(before_s, after_s, min(steal, 100.0), scheduler))
