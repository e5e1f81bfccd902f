"""Takes programs and gives outcomes, keeping builders busy while others measure. The idea is DOPpler's: work that does not
affect the timing (rebuilding, compiling, loading) overlaps with measuring, which is parallel as far as a calibration allows.
The :class:`Measurer` of a device says how its programs are built and measured.

The label of samples, its noise, and the decision to go on sampling, are functions of numbers alone: they read no clock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import ProfilerError, check_above_0
from cdmpp.profiler import machine
from cdmpp.profiler.machine import Worker, WorkerDied, requests
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    from cdmpp.dataset import Dataset


@dataclass(frozen=True)
class SamplingPlan:
    """How one program is sampled."""

    #: A sample is the mean of as many back-to-back runs as fill this time (seconds).
    min_sample_s: float = 0.002
    #: Samples taken before the first decision to stop, and the most that are taken.
    min_samples: int = 8
    max_samples: int = 24
    #: Sampling stops when the split-half difference is at most this (0.01 is 1 %).
    target_noise: float = 0.01
    #: Seconds that one program's samples may take. So slow programs get fewer (long) samples, but at least two.
    max_measure_s: float = 0.25
    #: Seconds that one program's samples may wait, in all, for the core to be undisturbed.
    max_wait_s: float = 0.6

    def repeats(self, run_s: float) -> int:
        """Number of runs in one sample of a program that takes `run_s` seconds."""
        return max(1, int(np.ceil(self.min_sample_s / max(run_s, 1e-9))))

    def needs_more(self, samples_s: Sequence[float], spent_s: float) -> bool:
        """Whether another sample is wanted after `samples_s`, which took `spent_s` seconds in all."""
        n = len(samples_s)
        if n < 2:
            return True
        if n >= self.max_samples or spent_s >= self.max_measure_s:
            return False
        # Only halves of equal size, so that the decision is made on the noise that is reported.
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


#: Settings of building and measuring that must be above 0 where they are numbers.
_ABOVE_0 = ("builders", "build_timeout_s", "run_timeout_s", "workers", "degree", "programs_per_task", "task_seconds", "limit")
#: Seconds within which a fresh builder has to build a small program.
_FIRST_BUILD_S = 120.0
#: Seconds between two requests for a job while there is nothing to do.
_IDLE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How programs are built: number of processes (None: one per core), and the most CPU seconds for a program."""

    builders: int | None = None
    build_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        check_above_0(ProfilerError, {name: getattr(self, name, None) for name in _ABOVE_0})
        if not 0 <= (part := getattr(self, "search_fraction", 0)) <= 1:
            raise ProfilerError(f"search_fraction is {part:g}, expected 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Built:
    """The result of building a job; base class. ``status`` is ``ok``, ``build_error``, ``build_timeout`` or
    ``invalid_config`` (the program cannot run on any device of this sort, or cannot be rebuilt); ``error`` says why."""

    status: str = "ok"
    error: str = ""
    build_s: float = 0.0
    #: CPU seconds; ``build_s`` are wall seconds. Bundles do not have it.
    build_cpu_s: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        """The seconds, for the ``meta`` of an outcome."""
        return {"build_s": round(self.build_s, 4), "build_cpu_s": round(self.build_cpu_s, 4)}


@dataclass(frozen=True)
class Running:
    """Sent by a measuring process when it starts to run other programs (hashes), with the seconds that they may take."""

    programs: tuple[str, ...] = ()
    timeout_s: float = float("inf")


@dataclass(frozen=True)
class Measured:
    """Samples of one program (its hash), or why there are none; ``run_s``: seconds for loading it and taking them."""

    program: str
    status: str
    samples_s: tuple[float, ...] = ()
    error: str = ""
    run_s: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildJob:
    """One program to build and measure."""

    program: Program
    task: Task
    space: Space | None
    #: A program that is clearly slower than this on a CPU is not sampled to the end.
    best_s: float | None = field(default=None, kw_only=True)

    @property
    def built(self) -> Built | None:
        """The result of building it, if there is one already; None if it is still to be built."""
        return None


@dataclass(frozen=True)
class Outcome:
    """One measured (or failed) program. ``noise`` is the relative split-half difference of ``latency_s``; both are None unless
    ``status`` is ``ok``. ``built`` is set if there was nothing to measure."""

    job: Any
    status: str
    latency_s: float | None = None
    samples_s: tuple[float, ...] = ()
    noise: float | None = None
    error: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    built: Any = field(default=None, repr=False)


def add_program(dataset: Dataset, job: BuildJob) -> None:
    """Put a job's program into a dataset, with its task and space."""
    dataset.add_task(job.task)
    if job.space is not None:
        dataset.add_space(job.space)
    dataset.add_program(job.program)


def add_outcome(dataset: Dataset, device: str, outcome: Outcome, meta: Mapping[str, Any]) -> None:
    """Put the record of an outcome into a dataset, with its program, task and space; `meta` is added to the outcome's own."""
    from cdmpp.dataset import Record  # here, as it imports pandas, which processes that build or measure do not need

    job = outcome.job
    add_program(dataset, job)
    values = {name: getattr(outcome, name) for name in ("status", "latency_s", "samples_s", "noise", "error")}
    record = Record(job.program.hash, device, **values, measured_at=time.time(), meta={**meta, **outcome.meta})
    dataset.add_record(record)


def last_line(err: Exception) -> str:
    """The last line of an error: TVM writes its message below its own call stack."""
    return (str(err).strip().splitlines() or [type(err).__name__])[-1]


#: A class, the arguments with which each building process makes an object of it, and the niceness of that process. The object
#: is called with a job and returns the result of building it; a ProfilerError ends the run.
Builder = tuple[Callable[..., Callable[[Any], Built]], tuple[Any, ...], int]


def _cpu_s() -> float:
    """CPU seconds so far of this process and of the linkers and compilers that it ran."""
    return time.process_time() + sum(os.times()[2:4])


def build_worker(connection: Connection, builder: Builder) -> None:
    """Build job after job until the connection closes (runs in its own process, which never runs what it built)."""
    make, args, niceness = builder
    machine.die_with_parent()
    os.nice(niceness)  # measuring processes go first
    build = make(*args)
    for job in requests(connection):
        started, before_s = time.perf_counter(), _cpu_s()
        try:
            connection.send(replace(build(job), build_s=time.perf_counter() - started, build_cpu_s=_cpu_s() - before_s))
        except ProfilerError as err:
            connection.send(err)


class Executor:
    """Starts builders, and a measuring process on each of `core_groups`, here; in a cluster :mod:`cdmpp.profiler.ray`."""

    #: Whether all these processes see this machine's files.
    local = True

    def __init__(self, core_groups: Sequence[tuple[int, ...]] = ()) -> None:
        self._core_groups, self.degree = core_groups, len(core_groups)

    def facts(self) -> dict[str, Any]:
        """Where the processes run, as JSON values."""
        return {"core_groups": self._core_groups}

    def builder_count(self, asked: int | None) -> int:
        """Number of builders to start: `asked`, or one for each usable core if it is None."""
        return max(1, asked or len(machine.usable_cores()))

    def builders(self, builder: Builder, count: int) -> list[Any]:
        """Start builders (:func:`build_worker`)."""
        return [Worker(build_worker, (builder,), f"builder-{i}", of_cpu_time=True) for i in range(count)]

    def measurers(self, serve: Callable[..., None], config: BuildConfig, sentinel: Any) -> list[Any]:
        """Start measuring processes: each runs `serve` with a connection, `config`, its own cores and the sentinel program."""
        if not self._core_groups or not all(self._core_groups):
            raise ProfilerError("no cores to measure on")
        return [Worker(serve, (config, cores, sentinel), f"runner-{cores[0]}") for cores in self._core_groups]

    def ready(self, workers: list[Any], timeout_s: float) -> list[Any]:
        """The busy ones of `workers` that have a message or are dead; waits at most `timeout_s` for one."""
        busy = {w.connection: w for w in workers if w.load is not None}
        return [busy[c] for c in wait(list(busy), timeout_s)] if busy else []


class Measurer:
    """How programs of one sort of device are built and measured: the base class of what an :class:`Engine` uses."""

    #: Set by :meth:`open` at the latest.
    builder: Builder

    def __init__(self, config: BuildConfig, executor: Executor | None = None) -> None:
        self.config, self.executor = config, executor or Executor()
        #: The measuring processes.
        self.workers: list[Worker] = []
        #: Final outcomes that the engine has not passed on yet.
        self.outcomes: deque[Outcome] = deque()

    def open(self, build_now: Callable[[BuildJob], Any]) -> None:
        """Start the measuring processes; `build_now` builds one program while nothing else runs."""

    def close(self, *, kill: bool) -> None:
        """End the measuring processes."""
        for worker in self.workers:
            (worker.kill if kill else worker.close)()

    def accepts(self, building: int) -> bool:
        """Whether another job should be drawn while `building` jobs are being built."""
        return True

    @property
    def waiting(self) -> bool:
        """Whether there are programs that were built and are not yet in a measuring process."""
        return False

    def add(self, job: BuildJob, built: Any) -> None:
        """Take a program that was built."""
        raise NotImplementedError

    def feed(self, coming: Sequence[BuildJob]) -> None:
        """Give work to measuring processes that are idle; `coming` are the jobs that are still being built."""

    def receive(self, worker: Worker) -> None:
        """Read one message from a measuring process (or find that it died)."""

    def overdue(self, worker: Worker) -> None:
        """Deal with a measuring process that missed its deadline."""

    def fail(self, job: Any, status: str, error: str, **meta: Any) -> None:
        """Make a failure the job's outcome."""
        self.outcomes.append(Outcome(job, status, error=error, meta=meta))

    def finish(self, job: BuildJob, built: Built, measured: Measured, **meta: Any) -> None:
        """Make the label of the samples, or the reason why there are none, the job's outcome."""
        meta = {**built.times, "run_s": round(measured.run_s, 4), **meta, **measured.meta}
        if measured.status != "ok":
            self.fail(job, measured.status, measured.error, **meta)
        elif measured.samples_s and all(0 < sample_s < float("inf") for sample_s in measured.samples_s):
            value, noise = label(measured.samples_s), split_half_difference(measured.samples_s)
            self.outcomes.append(Outcome(job, "ok", value, measured.samples_s, noise, meta=meta))
        else:
            self.fail(job, "run_error", f"the clock gave {min(measured.samples_s, default=0.0)} s", **meta)


class BuildOnly(Measurer):
    """Measures nothing: the outcome of a job holds the result of building it."""

    def __init__(self, config: BuildConfig, builder: Builder, executor: Executor | None = None) -> None:
        super().__init__(config, executor)
        self.builder = builder

    def add(self, job: Any, built: Any) -> None:
        self.outcomes.append(Outcome(job, "ok", meta=built.times, built=built))


class Engine:
    """Building processes and a measurer; a context manager (ProfilerError on entering if there is nothing to measure on)."""

    def __init__(self, measurer: Measurer) -> None:
        self.config, self.measurer = measurer.config, measurer
        self._executor = measurer.executor
        self._count = self._executor.builder_count(self.config.builders)
        self._builders: list[Worker] = []
        self._cancelled = False
        #: Each job with the number of builders that died over it; the load of a builder is such a pair, too.
        self._to_build: deque[tuple[Any, int]] = deque()

    def __enter__(self) -> Engine:
        try:
            self.measurer.open(self._build_now)
        except BaseException:
            self._close(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(kill=kind is not None)

    def cancel(self) -> None:
        """Make :meth:`run` end without waiting for programs being built or measured; may be called from any thread."""
        self._cancelled = True

    def _close(self, *, kill: bool) -> None:
        for worker in self._builders:
            worker.kill()
        self.measurer.close(kill=kill)

    def start_builders(self) -> None:
        """Start the building processes before there is a job for them."""
        if not self._builders:
            self._builders = self._executor.builders(self.measurer.builder, self._count)

    def _build_now(self, job: BuildJob) -> Any:
        self.start_builders()
        worker, what = self._builders[0], f"program {job.task.name}"
        worker.submit(job, (job, 0), _FIRST_BUILD_S)
        if not self._executor.ready([worker], _FIRST_BUILD_S):
            raise ProfilerError(f"{what} does not build: is the compiler working?")
        try:
            built = worker.receive()
        except WorkerDied as err:
            raise ProfilerError(f"a worker process ended before it had built {what} ({err})") from err
        worker.finished()
        if built.status != "ok":
            raise ProfilerError(f"{what} does not build: {built.error}")
        return built

    def run(self, jobs: Iterator[Any]) -> Iterator[Outcome]:
        """Measure `jobs`, yielding outcomes as they become final, in any order. The iterator is asked for a job when a builder
        is about to be idle; None means "nothing yet", as what comes next depends on outcomes. ProfilerError if there is no
        space left for programs, or the device is lost; all final outcomes are yielded before it is raised."""
        measurer, exhausted = self.measurer, False
        while not self._cancelled:
            if not exhausted:
                exhausted = not self._draw(jobs)
            self._build()
            try:
                building = [w.load for w in self._builders if w.load is not None]
                measurer.feed([job for job, _ in (*self._to_build, *building)])
                while measurer.outcomes:
                    yield measurer.outcomes.popleft()
                busy = [w for w in (*self._builders, *measurer.workers) if w.load is not None]
                if not busy and not self._to_build and not measurer.waiting:
                    if exhausted:
                        return
                    time.sleep(_IDLE_S)
                    continue
                for worker in self._executor.ready(busy, 0.2):
                    (self._receive if worker in self._builders else measurer.receive)(worker)
                for worker in busy:
                    if worker.overdue():
                        (self._overdue if worker in self._builders else measurer.overdue)(worker)
            except ProfilerError:
                while measurer.outcomes:
                    yield measurer.outcomes.popleft()
                raise

    def _draw(self, jobs: Iterator[Any]) -> bool:
        """Keep a few jobs in the queue; False if the iterator has no more."""
        building = sum(w.load is not None for w in self._builders)
        while len(self._to_build) < 2 * self._count and self.measurer.accepts(len(self._to_build) + building):
            try:
                job = next(jobs)
            except StopIteration:
                return False
            if job is None:
                break
            if job.built is None:
                self._to_build.append((job, 0))
            else:
                self._take(job, job.built)
        return True

    def _build(self) -> None:
        """Give jobs to idle builders."""
        if self._to_build:
            self.start_builders()
        for worker in self._builders:
            if worker.load is None and self._to_build:
                load = self._to_build.popleft()
                if not worker.submit(load[0], load, self.config.build_timeout_s):
                    self._to_build.appendleft(load)

    def _take(self, job: Any, built: Built) -> None:
        if built.status == "ok":
            self.measurer.add(job, built)
        else:
            self.measurer.outcomes.append(Outcome(job, built.status, error=built.error, meta=built.times, built=built))

    def _receive(self, worker: Worker) -> None:
        job, deaths = worker.load
        try:
            built = worker.receive()
        except WorkerDied as reason:
            worker.replace()
            if deaths == 0:
                # Was it killed from outside, or by this program? A second death shows that it was the program.
                self._to_build.append((job, 1))
            else:
                self.measurer.fail(job, "build_error", f"the compiler died twice, last {reason}")
            return
        worker.finished()
        self._take(job, built)

    def _overdue(self, worker: Worker) -> None:
        job, _ = worker.load
        worker.replace()
        limit_s = self.config.build_timeout_s
        self.measurer.fail(job, "build_timeout", f"over {limit_s:g} s", build_s=limit_s, build_cpu_s=limit_s)
