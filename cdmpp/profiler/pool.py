"""Worker processes with deadlines: started in milliseconds, killed for certain, replaced when they die."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cdmpp.profiler._preload"])
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
        late = time.monotonic() > self._deadline
        return self.load is not None and (
            late or (self._cpu_deadline < float("inf") and self._cpu_time() > self._cpu_deadline)
        )

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
        except OSError:
            pass
        self.kill()


def ready(workers: list[Worker], timeout_s: float) -> list[Worker]:
    """The busy workers that have sent something (or are dead), waiting at most `timeout_s`."""
    busy = {w.connection: w for w in workers if w.load is not None}
    return [busy[c] for c in wait(list(busy), timeout_s)] if busy else []  # type: ignore[index]


def requests(connection: Connection) -> Iterator[Any]:
    """The requests to a process, until the last (None) or until the other end is closed."""
    try:
        yield from iter(connection.recv, None)
    except EOFError:
        return
