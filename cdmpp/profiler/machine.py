"""What Linux offers for measuring: cores, priorities, worker processes with deadlines; and how disturbances are detected."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from cdmpp.errors import ProfilerError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_FOLDER_PREFIX = "cdmpp-"

# Of the sentinel:
#: Iterations of the loop: it takes long compared with the clock's resolution, and is short compared with a sample.
_ITERATIONS = 800
#: The loop is timed this often in a row: the first pass warms the interpreter's code, and an interrupt spoils only one.
_PASSES = 3
#: Slowdown that counts as a disturbance. A neighbour causes 1.7 and more; clock changes after wide vector code up to 1.2.
_TOLERANCE = 1.3
#: Seconds for which the finding that the core is undisturbed stays valid.
_FRESH_S = 0.0005
#: Seconds by which all waiting may exceed all measuring: where a neighbour never rests, waiting does not help.
_PATIENCE_S = 2.0
#: Seconds between two checks while waiting; the core is free for other processes meanwhile.
_PAUSE_S = 0.004


def die_with_parent() -> None:
    """Leave Ctrl-C to the parent, and ask the kernel to kill this process when the one that started it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pin(cores: tuple[int, ...]) -> None:
    """Keep this process on `cores`."""
    os.sched_setaffinity(0, cores)


def usable_cores() -> tuple[int, ...]:
    """Cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_groups(cores: Sequence[int], threads: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint groups of `threads` cores, one for each of `degree` measuring processes (ProfilerError: too few cores)."""
    if degree < 1 or degree * threads > len(cores):
        raise ProfilerError(
            f"{degree} measuring processes of {threads} cores need {max(1, degree) * threads}, "
            f"this process may use {len(cores)}"
        )
    # From the top: the operating system prefers the first core for its own work.
    chosen = list(cores)[::-1]
    return tuple(tuple(sorted(chosen[i * threads : (i + 1) * threads])) for i in range(degree))


def own_the_core() -> str:
    """Run before everything else on this process's cores, if the system allows it: ``"fifo"`` under the real-time scheduler,
    ``"nice"`` with a raised normal priority, else ``"normal"``."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        return "fifo"
    except OSError as err:
        logger.debug("no real-time priority: %s", err)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        return "nice"
    except OSError:
        return "normal"


def preemptions() -> int:
    """Number of times that this thread was preempted."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def steal_ticks(cores: tuple[int, ...]) -> int:
    """Hundredths of a second that the hypervisor took from `cores` since boot; 0 if it does not report this."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    wanted = {f"cpu{c}" for c in cores}
    return sum(int(fields[8]) for fields in lines if fields and fields[0] in wanted and len(fields) > 8)


def installed(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def make_work_folder(parent: Path) -> Path:
    """Make a folder with this process's id in its name (OSError: impossible); remove folders of ended processes."""
    for stale in parent.glob(f"{_FOLDER_PREFIX}*"):
        owner = stale.name.removeprefix(_FOLDER_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=parent))


# -- worker processes: started in milliseconds, killed for certain, replaced when they die --------------------------


class WorkerDied(Exception):
    """A worker process ended; the message says how."""


class WorkerLost(WorkerDied):
    """A worker was lost with its machine or its device; no other one takes its place."""


class Worker:
    """One process that serves requests over a pipe, one at a time: it runs `target` with its end of the pipe and `args`.
    Deadlines are in CPU time (`of_cpu_time`) where the process may wait for a core, up to five times as long."""

    #: The node of a cluster that it runs on; "" for this machine.
    node = ""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str, *, of_cpu_time: bool = False) -> None:
        self.name, self._of_cpu_time = name, of_cpu_time
        self._target, self._args = target, args
        self._process: Any = None
        self.connection: Connection
        #: What it is working on; None when idle.
        self.load: Any = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cdmpp.profiler._preload"])
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(theirs, *self._args), name=self.name)
        self._process.daemon = True
        # It runs only cdmpp's code. So hide the main script: importing it there could take seconds, and it would need a guard.
        main = vars(sys.modules["__main__"])
        script: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main.update(dict.fromkeys(script))
        try:
            self._process.start()
        finally:
            main.update(script)
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def submit(self, request: Any, load: Any, timeout_s: float) -> bool:
        """Send a request; False if the process was found dead (it is then replaced and idle)."""
        try:
            self.connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self.replace()
            return False
        self.load = load
        self.extend(timeout_s)
        return True

    def extend(self, timeout_s: float) -> None:
        """Set the deadline `timeout_s` from now."""
        self._deadline = time.monotonic() + timeout_s * (5 if self._of_cpu_time else 1)
        self._cpu_deadline = self._cpu_time() + timeout_s if self._of_cpu_time else float("inf")

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
        return time.monotonic() > self._deadline or (self._of_cpu_time and self._cpu_time() > self._cpu_deadline)

    def finished(self) -> None:
        """Mark the process idle."""
        self.load = None

    def receive(self) -> Any:
        """The next message that it sent. An exception that it sent is raised; WorkerDied if it is dead."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError) as err:
            raise WorkerDied(self.exit_reason()) from err
        except Exception as err:  # a program may overwrite its process's memory: then pickle raises anything
            raise WorkerDied(f"it sent what cannot be read: {err}") from err
        if isinstance(message, Exception):
            raise message
        return message

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
        """Ask the process to end, then kill it."""
        try:
            self.connection.send(None)
            self._process.join(timeout=1)
        except OSError:
            pass
        self.kill()


def requests(connection: Connection) -> Iterator[Any]:
    """The requests sent to a process, until None is sent or the other end is closed."""
    try:
        yield from iter(connection.recv, None)
    except (EOFError, ConnectionResetError):
        return


# -- who else uses the core --------------------------------------------------------------------------------------


class Sentinel:
    """Tells whether somebody else is using the core that the calling thread runs on (of several cores: only this one).

    On a rented machine the other hardware thread of a core may belong to a stranger: while it is busy every program here runs
    up to twice as long, in phases of ten milliseconds to minutes, and steal time stays zero. A loop of fixed work, timed right
    before and after a sample, sees it: it took 12.8 us alone and 22 to 28 us beside a neighbour. A new sentinel
    spends ``settle_s`` on measuring how fast the undisturbed loop is; faster passes later correct that."""

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
        """Record seconds of measuring: as many more may be spent waiting."""
        self._patience_s = min(self._patience_s + seconds, 10 * _PATIENCE_S)

    def wait(self, at_most_s: float) -> tuple[bool, float]:
        """Wait until the core is undisturbed or patience ends; returns whether it is undisturbed, and seconds waited."""
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
