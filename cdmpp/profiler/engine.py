"""The parallel CPU profiler: builders and measuring processes kept busy at the same time.

The idea is DOPpler's: what does not touch the timing (rebuilding, compiling, linking, allocating) of many candidates
overlaps with the measuring of others, and measuring itself is parallel as far as a calibration allows. Builders
run at low priority on all cores; measuring processes own their cores while they measure.

The engine deals in :class:`BuildJob` and :class:`Outcome`; it knows nothing of datasets or networks.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cdmpp.errors import ProfilerError
from cdmpp.profiler.build import BuildJob, Built, build_worker
from cdmpp.profiler.cpu import BatchDone, Measured, RunnerConfig, Starting, measure_worker
from cdmpp.profiler.machine import make_work_folder
from cdmpp.profiler.pool import BuildQueue, Worker, ready
from cdmpp.profiler.statistics import SamplingPlan, label, split_half_difference

logger = logging.getLogger(__name__)

#: Drift is relative to this quantile of the reference times so far: disturbances only add time.
_BASELINE_QUANTILE = 0.1
#: A program whose samples were mostly disturbed is measured again after this time, in which a neighbour may
#: have finished.
_LATER_S = 20.0
#: That is given up where it helps fewer than this share of the programs, judged after so many.
_LATER_HELPS, _LATER_TRIALS = 0.3, 16
#: Programs that may wait for that: their shared objects lie in memory.
_MAX_LATER = 256


@dataclass(frozen=True)
class EngineConfig:
    """How the engine works; none of it may change a label beyond its noise.

    Attributes
    ----------
    target
        What programs are compiled for, as a TVM target dictionary.
    core_groups
        Cores of each measuring process; as many processes as groups (the degree of parallelism).
    builders
        Building processes.
    batch_size
        Programs of a task that are sampled in turn.
    build_timeout_s
        CPU seconds that one build may take.
    run_timeout_s
        Seconds that one run may take.
    loading_s
        Seconds allowed for loading a program and filling its arguments before its first run.
    plan
        The sampling.
    max_steal_pct, max_drift
        A batch during which the hypervisor took more than this share of the cores, or the reference program's
        time changed by more than this fraction, is measured once more.
    max_disturbed
        A program of which more than this share of the samples was disturbed is measured again a while later.
    max_attempts
        Times that a program is measured at most for these reasons; the fastest label counts.
    realtime
        Ask for the real-time scheduler.
    overlap
        Measure while building. Without it everything is built first, then measured with nothing else running:
        the calibration's yardstick.
    object_cache
        Folder in which shared objects are kept between runs; None keeps none.
    work_dir
        Where shared objects are kept meanwhile; default a fresh folder in memory.
    """

    target: dict[str, Any]
    core_groups: tuple[tuple[int, ...], ...]
    builders: int = 2
    batch_size: int = 8
    build_timeout_s: float = 20.0
    run_timeout_s: float = 2.0
    loading_s: float = 10.0
    plan: SamplingPlan = field(default_factory=SamplingPlan)
    max_steal_pct: float = 2.0
    max_drift: float = 0.05
    max_disturbed: float = 0.25
    max_attempts: int = 3
    realtime: bool = True
    overlap: bool = True
    object_cache: str | None = None
    work_dir: str | None = None


@dataclass(frozen=True)
class Outcome:
    """One measured (or failed) program.

    ``noise`` is the relative split-half difference of ``latency_s``; both are None unless ``status`` is ``ok``.
    """

    job: BuildJob
    status: str
    latency_s: float | None = None
    samples_s: tuple[float, ...] = ()
    noise: float | None = None
    error: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Item:
    """A built program on its way through measuring."""

    job: BuildJob
    built: Built
    deaths: int = 0
    attempts: int = 0
    measured: Measured | None = None
    best: Measured | None = None

    def settle(self) -> None:
        """Let the best attempt so far be the result: undisturbed before disturbed, then fast before slow."""
        tries = [m for m in (self.best, self.measured) if m is not None and m.status == "ok"]
        if tries:
            self.measured = min(tries, key=lambda m: (m.meta.get("disturbed", 0.0) > 0, label(m.samples_s)))


class CpuEngine:
    """Builders and measuring processes on this machine; use as a context manager.

    Parameters
    ----------
    config
        See :class:`EngineConfig`.
    reference
        A job whose program is timed around every batch to see drift; built at the start.
    """

    def __init__(self, config: EngineConfig, reference: BuildJob | None = None) -> None:
        if not config.core_groups or not all(config.core_groups):
            raise ProfilerError("no cores to measure on")
        self.config = config
        self._reference_job = reference
        self._builders: list[Worker] = []
        self._runners: list[Worker] = []
        self._folder: Path | None = None
        self._to_build = BuildQueue(config.build_timeout_s)
        self._waiting: dict[str, list[_Item]] = {}
        self._batches: deque[list[_Item]] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._later: deque[tuple[float, _Item]] = deque()
        self._retried = self._recovered = 0
        self._reference_times_s: list[float] = []

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> CpuEngine:
        shm = Path("/dev/shm")
        parent = Path(self.config.work_dir or (shm if shm.is_dir() else tempfile.gettempdir()))
        try:
            self._folder = make_work_folder(parent)
        except OSError as err:
            raise ProfilerError(f"cannot make a folder for shared objects in {parent}: {err}") from err
        # Measuring processes preempt builders by themselves where they run under the real-time scheduler.
        niceness = 0 if self.config.realtime else 10
        build_args = (self.config.target, str(self._folder), niceness, self.config.object_cache)
        self._builders = [
            Worker(build_worker, build_args, f"builder-{i}") for i in range(max(1, self.config.builders))
        ]
        reference = self._build_reference()
        for group in self.config.core_groups:
            runner = RunnerConfig(
                group, self.config.plan, self.config.run_timeout_s, reference, self.config.realtime
            )
            self._runners.append(Worker(measure_worker, (runner,), f"runner-{'-'.join(map(str, group))}"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in [*self._builders, *self._runners]:
            if kind is None:
                worker.close()
            else:
                worker.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _build_reference(self) -> Built | None:
        if self._reference_job is None:
            return None
        worker = self._builders[0]
        worker.submit(self._reference_job, self._reference_job, 120.0)
        if not worker.connection.poll(120.0):
            raise ProfilerError("the reference program does not build: is the compiler working?")
        try:
            built: Built = worker.connection.recv()
        except (EOFError, ConnectionResetError) as err:
            raise ProfilerError(
                f"a worker process ended before it had built the reference program ({worker.exit_reason()}). Workers "
                'import the script that starts them: it must call cdmpp under `if __name__ == "__main__":`'
            ) from err
        worker.finished()
        if built.status != "ok":
            raise ProfilerError(f"the reference program does not build: {built.error}")
        return built

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        """Measure `jobs`, yielding outcomes as they become final (not in the order of the jobs).

        The iterator is asked for a job when a builder is about to be idle; it may yield None to say "nothing yet",
        when what comes next depends on outcomes, and is asked again later.

        Raises
        ------
        ProfilerError
            The folder for shared objects is full.
        """
        exhausted = False
        while True:
            if not exhausted:
                exhausted = not self._draw(jobs)
            self._to_build.start(self._builders)
            # Batches that wait for company go as they are when nothing more can join them.
            idle = not self._to_build and not any(w.load is not None for w in self._builders)
            self._form_batches(flush=idle)
            self._start_measuring()
            while self._outcomes:
                yield self._outcomes.popleft()
            busy = [w for w in [*self._builders, *self._runners] if w.load is not None]
            if not busy and not self._to_build and not self._batches and not self._waiting:
                if exhausted and not self._later:
                    return
                time.sleep(0.02)
                continue
            for worker in ready(busy, 0.2):
                if worker in self._builders:
                    self._hear_builder(worker)
                else:
                    self._hear_runner(worker)
            for worker in busy:
                if worker.overdue():
                    self._overdue(worker)

    def _draw(self, jobs: Iterator[BuildJob | None]) -> bool:
        """Keep a few jobs in the queue; False when there are no more."""
        built = sum(len(items) for items in self._waiting.values()) + sum(len(b) for b in self._batches)
        limit = 4 * self.config.batch_size * len(self._runners) if self.config.overlap else float("inf")
        while len(self._to_build) < 2 * len(self._builders) and built < limit:
            try:
                job = next(jobs)
            except StopIteration:
                return False
            if job is None:
                break
            self._to_build.add(job)
        return True

    # -- building --------------------------------------------------------------------------------------------

    def _hear_builder(self, worker: Worker) -> None:
        job, built, error = self._to_build.hear(worker)
        if built is None:
            if error:
                self._fail(job, "build_error", error)
            return
        if built.status == "ok":
            self._waiting.setdefault(job.task.hash, []).append(_Item(job, built))
            return
        if "No space left" in built.error or self._disk_full():
            raise ProfilerError(
                f"no space left in {self._folder} for shared objects; what was measured is kept, "
                "free some space and go on with --resume"
            )
        self._fail(job, built.status, built.error, build_s=built.build_s)

    def _disk_full(self) -> bool:
        return self._folder is not None and shutil.disk_usage(self._folder).free < 1 << 20

    def _fail(self, job: BuildJob, status: str, error: str, **meta: Any) -> None:
        self._outcomes.append(Outcome(job, status, error=error, meta=meta))

    # -- measuring -------------------------------------------------------------------------------------------

    def _form_batches(self, *, flush: bool) -> None:
        size = self.config.batch_size
        coming = {job.task.hash for job in self._to_build}
        coming |= {w.load[0].task.hash for w in self._builders if w.load is not None}
        for task_hash in list(self._waiting):
            items = self._waiting[task_hash]
            while len(items) >= size:
                self._batches.append(items[:size])
                del items[:size]
            hungry = not self._batches and any(w.load is None for w in self._runners)
            if items and (flush or (hungry and task_hash not in coming)):
                self._batches.append(items[:])
                items.clear()
            if not items:
                del self._waiting[task_hash]

    def _start_measuring(self) -> None:
        if not self.config.overlap and (self._to_build or any(w.load is not None for w in self._builders)):
            return
        idle = not self._batches and all(w.load is None for w in [*self._builders, *self._runners])
        while self._later and (
            idle or self._later[0][0] <= time.monotonic() or len(self._later) > _MAX_LATER
        ):
            idle = False
            due = [self._later.popleft()[1] for _ in range(min(self.config.batch_size, len(self._later)))]
            self._batches.append(due)
        for worker in self._runners:
            if worker.load is None and self._batches:
                batch = self._batches.popleft()
                if worker.submit([item.built for item in batch], (batch, None), self._first_run_s):
                    continue
                self._batches.appendleft(batch)

    @property
    def _first_run_s(self) -> float:
        return self.config.run_timeout_s + self.config.loading_s

    def _hear_runner(self, worker: Worker) -> None:
        batch, _ = worker.load
        try:
            message: Starting | Measured | BatchDone = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._runner_died(worker)
            return
        if isinstance(message, Starting):
            worker.load = (batch, message.program)
            worker.extend(self._first_run_s if message.program else self._sampling_s(batch))
        elif isinstance(message, Measured):
            item = next(i for i in batch if i.built.program.hash == message.program)
            item.measured = message
        else:
            self._batch_done(batch, message)
            worker.finished()

    def _sampling_s(self, batch: list[_Item]) -> float:
        # Each program may overrun its time by a few samples and their retakes.
        plan = self.config.plan
        each = plan.max_wait_s + 2 * plan.max_measure_s + 8 * self.config.run_timeout_s
        return 10.0 + len(batch) * each

    def _batch_done(self, batch: list[_Item], done: BatchDone) -> None:
        if done.reference_before_s > 0:
            bisect.insort(self._reference_times_s, done.reference_before_s)
        within = abs(done.reference_after_s / done.reference_before_s - 1)
        disturbed = done.steal_pct > self.config.max_steal_pct or within > self.config.max_drift
        again: list[_Item] = []
        for item in batch:
            measured = item.measured
            item.attempts += 1
            if measured is None or measured.status != "ok":
                self._finish(item, done)
                continue
            item.settle()
            item.best = item.measured
            share = item.measured.meta.get("disturbed", 0.0) if item.measured is not None else 0.0
            if item.attempts > 1:
                self._retried += 1
                self._recovered += share <= self.config.max_disturbed
            hopeful = self._retried < _LATER_TRIALS or self._recovered > _LATER_HELPS * self._retried
            if share > self.config.max_disturbed and item.attempts < self.config.max_attempts and hopeful:
                item.measured = None
                self._later.append((time.monotonic() + _LATER_S, item))
            elif disturbed and item.attempts < 2:
                item.measured = None
                again.append(item)
            else:
                self._finish(item, done)
        if again:
            self._batches.append(again)

    def _finish(self, item: _Item, done: BatchDone | None) -> None:
        measured = item.measured
        if measured is None:
            self._batches.append([item])
            return
        with contextlib.suppress(OSError):
            Path(item.built.path).unlink(missing_ok=True)
        meta: dict[str, Any] = {
            "build_s": round(item.built.build_s, 4),
            "run_s": round(measured.run_s, 4),
            "attempts": item.attempts,
            **measured.meta,
        }
        if done is not None and done.reference_before_s > 0:
            times_s = self._reference_times_s
            baseline_s = times_s[int(_BASELINE_QUANTILE * len(times_s))]
            meta["reference_s"] = done.reference_before_s
            meta["drift"] = round(done.reference_before_s / baseline_s - 1, 4)
            meta["drift_within"] = round(done.reference_after_s / done.reference_before_s - 1, 4)
            meta["steal_pct"] = round(done.steal_pct, 2)
            meta["scheduler"] = done.scheduler
        if measured.status != "ok":
            self._outcomes.append(Outcome(item.job, measured.status, error=measured.error, meta=meta))
            return
        value = label(measured.samples_s)
        if not 0 < value < float("inf"):
            self._outcomes.append(
                Outcome(item.job, "run_error", error=f"the clock gave {value} s", meta=meta)
            )
            return
        noise = split_half_difference(measured.samples_s)
        self._outcomes.append(Outcome(item.job, "ok", value, measured.samples_s, noise, meta=meta))

    def _runner_died(self, worker: Worker, why: str | None = None) -> None:
        """Find out which program of the batch did it: the rest is measured again, each alone."""
        batch, _ = worker.load
        reason = why or worker.exit_reason()
        worker.replace()
        for item in batch:
            if item.measured is not None:
                self._finish(item, None)
                continue
            item.deaths += 1
            if item.best is not None:
                item.measured = item.best
                self._finish(item, None)
            elif item.deaths >= 2:
                self._fail(item.job, "run_error", f"the measuring process died with it twice, last {reason}")
                Path(item.built.path).unlink(missing_ok=True)
            else:
                self._batches.append([item])

    def _overdue(self, worker: Worker) -> None:
        if worker in self._builders:
            job, _ = worker.load
            worker.replace()
            self._fail(
                job,
                "build_timeout",
                f"over {self.config.build_timeout_s:g} s",
                build_s=self.config.build_timeout_s,
            )
            return
        batch, starting = worker.load
        slow = next((i for i in batch if i.built.program.hash == starting and i.measured is None), None)
        if slow is None:
            self._runner_died(worker, "sampling took too long")
            return
        worker.replace()
        batch.remove(slow)
        if slow.best is not None:
            slow.measured = slow.best
            self._finish(slow, None)
        else:
            Path(slow.built.path).unlink(missing_ok=True)
            self._fail(slow.job, "run_timeout", f"one run took over {self.config.run_timeout_s:g} s")
        for item in batch:
            if item.measured is not None:
                self._finish(item, None)
        rest = [item for item in batch if item.measured is None]
        if rest:
            self._batches.append(rest)
