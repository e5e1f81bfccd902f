"""Worker processes with deadlines: started in milliseconds, killed for certain, replaced when they die."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

logger = logging.getLogger(__name__)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cdmpp.profiler._preload"])
    return context


class Worker:
    """One process that serves requests over a pipe, one at a time: it runs `target` with its end of the pipe and `args`."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self.name = name
        self._target, self._args = target, args
        self._process: Any = None
        self.connection: Connection
        #: What it is working on; None when idle.
        self.load: Any = None
        self._deadline = float("inf")
        self._cpu_deadline = float("inf")
        self._start()

    def _start(self) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(theirs, *self._args), name=self.name)
        self._process.daemon = True
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def submit(self, request: Any, load: Any, timeout_s: float, *, of_cpu_time: bool = False) -> bool:
        """Send a request; False if the process was found dead (it is then replaced and idle)."""
        try:
            self.connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self.replace()
            return False
        self.load = load
        self.extend(timeout_s, of_cpu_time=of_cpu_time)
        return True

    def extend(self, timeout_s: float, *, of_cpu_time: bool = False) -> None:
        """Set the deadline `timeout_s` from now; with `of_cpu_time` the process may wait for a core meanwhile
        (up to five times as long)."""
        now = time.monotonic()
        if of_cpu_time:
            self._cpu_deadline = self._cpu_time() + timeout_s
            self._deadline = now + 5 * timeout_s
        else:
            self._deadline = now + timeout_s

    def _cpu_time(self) -> float:
        try:
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0

    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        if self.load is None:
            return False
        if time.monotonic() > self._deadline:
            return True
        return self._cpu_deadline < float("inf") and self._cpu_time() > self._cpu_deadline

    def finished(self) -> None:
        """Mark the process idle."""
        self.load = None
        self._deadline = self._cpu_deadline = float("inf")

    def exit_reason(self) -> str:
        """How a dead process ended, in words."""
        self._process.join(timeout=2)
        code = self._process.exitcode
        if code is None:
            return "still running"
        return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def replace(self) -> None:
        """Kill the process for certain and start a fresh one."""
        self.kill()
        self._start()
        self.finished()

    def kill(self) -> None:
        """End the process with SIGKILL: nothing that LLVM or a foreign program does can stop that."""
        self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join(timeout=10)

    def close(self) -> None:
        """Ask the process to end, then make it."""
        try:
            self.connection.send(None)
            self._process.join(timeout=1)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass
        self.kill()


def ready(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """The busy workers that have sent something (or are dead), waiting at most `timeout_s`."""
    busy = {w.connection: w for w in workers if w.load is not None}
    if not busy:
        return []
    return [busy[c] for c in wait(list(busy), timeout_s)]  # type: ignore[index]


def requests(connection: Connection) -> Iterator[Any]:
    """The requests to a process, until the last (None) or until the other end is closed."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        yield request


class BuildQueue:
    """Jobs that wait for a building process, which may take `timeout_s` CPU seconds for one; its load is the job and how many
    processes died over it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[Any, int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        return (job for job, _ in self._waiting)

    def add(self, job: Any) -> None:
        """Let a job wait."""
        self._waiting.append((job, 0))

    def start(self, workers: list[Worker]) -> None:
        """Give jobs to those that are idle."""
        for worker in workers:
            if worker.load is None and self._waiting:
                job, deaths = self._waiting.popleft()
                if not worker.submit(job, (job, deaths), self._timeout_s, of_cpu_time=True):
                    self._waiting.appendleft((job, deaths))

    def receive(self, worker: Worker) -> tuple[Any, Any, str]:
        """The job that a process has built, its answer and "".

        Of a process that died the answer is None. What it was building waits again the first time; the second time the
        last is how it died.
        """
        job, deaths = worker.load
        try:
            answer = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            reason = worker.exit_reason()
            worker.replace()
            if deaths == 0:
                # Killed from outside, or by this program? The second death tells.
                self._waiting.append((job, 1))
                return job, None, ""
            return job, None, f"the compiler died twice, last {reason}"
        worker.finished()
        return job, answer, ""
