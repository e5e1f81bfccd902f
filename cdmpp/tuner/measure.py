"""The profiler as MetaSchedule's builder and runner, and as a service that measures while a search goes on.

A thread feeds the engine's builders and measuring processes and hears what they say; whoever submits programs gets
futures. So the search of one task's next programs overlaps with the building and measuring of another's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cdmpp.errors import TunerError

if TYPE_CHECKING:
    from cdmpp.profiler.cpu import CpuConfig
    from cdmpp.profiler.engine import BuildJob, Outcome

#: How to measure on CPUs, what to compile for, and the cores of each measuring process.
CpuSpec: TypeAlias = "tuple[CpuConfig, Mapping[str, Any], Sequence[tuple[int, ...]]]"

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What measures: :class:`~cdmpp.profiler.engine.Engine`, or a stand-in for it."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        """Outcomes of jobs, as they become final; None among the jobs says "ask again"."""


class _Aborted(Exception):
    """Ends the engine's loop without waiting for what is under way."""


class Measurer:
    """Measures programs in the background; use as a context manager.

    Leaving it after an error or Ctrl-C ends builders and measuring processes at once; otherwise what was submitted
    is finished first.

    Parameters
    ----------
    engine
        What measures, not started yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Programs that nothing was done for yet, first come first served, and futures of those and of all under way.
        self._waiting: dict[str, BuildJob] = {}
        self._futures: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._abort, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="measurer", daemon=True)
        self._broken: BaseException | None = None

    def __enter__(self) -> Measurer:
        self._engine.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abort.set()
        self._closing.set()
        self._thread.join()
        aborted = self._abort.is_set() and kind is None
        self._engine.__exit__(_Aborted if aborted else kind, value, trace)

    def submit(self, jobs: Sequence[BuildJob]) -> list[Future[Outcome]]:
        """Have programs measured; a future each. A program that is under way already is not measured twice.

        Raises
        ------
        TunerError
            The engine has failed.
        """
        futures = []
        for job in jobs:
            with self._lock:
                if self._broken is not None:
                    raise TunerError(f"measuring has stopped: {self._broken}") from self._broken
                known = self._futures.get(job.program.hash)
                if known is None:
                    self._waiting[job.program.hash] = job
                future = known or Future()
                self._futures[job.program.hash] = future
            futures.append(future)
        return futures

    def give_back(self, most: int) -> list[BuildJob]:
        """Take back programs that nothing was done for yet, the last ones, for others to measure.

        Their futures are cancelled.
        """
        with self._lock:
            given = [self._waiting.popitem()[1] for _ in range(min(most, len(self._waiting)))]
            futures = [self._futures.pop(job.program.hash) for job in given]
        for future in futures:
            future.cancel()
        return given

    def abort(self) -> None:
        """Give up what is under way; its futures are cancelled."""
        self._abort.set()
        self._thread.join()

    def _jobs(self) -> Iterator[BuildJob | None]:
        while True:
            if self._abort.is_set():
                raise _Aborted
            closing = self._closing.is_set()
            with self._lock:
                job = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            if job is None and closing:
                return
            yield job

    def _serve(self) -> None:
        try:
            for outcome in self._engine.run(self._jobs()):
                with self._lock:
                    future = self._futures.pop(outcome.job.program.hash, None)
                if future is not None:
                    future.set_result(outcome)
                if self._abort.is_set():
                    raise _Aborted
        except _Aborted:
            self._end(None)
        except BaseException as err:  # whoever waits for a future must hear of it
            self._end(err)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._broken = error or TunerError("given up")
            futures, self._futures, self._waiting = list(self._futures.values()), {}, {}
        for future in futures:
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)


def cpu_engine(spec: CpuSpec, *, overlap: bool = True) -> Engine:
    """The profiler on cores of this machine."""
    from cdmpp.profiler import cpu

    return cpu.cpu_engine(*spec, cpu.sentinel_job(), overlap=overlap)


def cpu_measurer(spec: CpuSpec) -> Measurer:
    """A measurer of programs on this machine's CPU."""
    return Measurer(cpu_engine(spec))


def job_of_module(mod: Any) -> BuildJob:
    """A scheduled IRModule with one function ``main`` as a job."""
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.program.tvm_env import import_tvm, structural_hash
    from cdmpp.program.types import Program, Task

    tvm = import_tvm()
    func = mod["main"]
    digest = structural_hash(func)
    # The scheduled function stands for the task, so that the builder takes it as it is.
    task = Task(digest, "candidate", tvm.ir.save_json(func), {}, 0.0, 0.0)
    return BuildJob(Program(digest, digest, None, "", "search"), task, None)
