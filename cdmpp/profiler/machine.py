"""What the operating system lets a measuring process do, and what it says about disturbances (Linux)."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from cdmpp.errors import ProfilerError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_FOLDER_PREFIX = "cdmpp-"


def die_with_parent() -> None:
    """Leave Ctrl-C to the parent, and ask the kernel to kill this process when the one that started it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def redirect_stderr(path: Path) -> None:
    """Let this process, and the C++ code in it, write its complaints to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def pin(cores: tuple[int, ...]) -> None:
    """Keep this process on `cores`."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def usable_cores() -> tuple[int, ...]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_groups(cores: Sequence[int], threads: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint groups of `threads` cores, one for each of `degree` measuring processes (ProfilerError if too few)."""
    if degree < 1 or degree * threads > len(cores):
        raise ProfilerError(
            f"{degree} measuring processes of {threads} cores need {max(1, degree) * threads}, "
            f"this process may use {len(cores)}"
        )
    # From the top: the operating system prefers the first core for its own work.
    chosen = list(cores)[::-1]
    return tuple(tuple(sorted(chosen[i * threads : (i + 1) * threads])) for i in range(degree))


def own_the_core(priority: int = 10) -> str:
    """Run before everything else on this process's cores, if the system allows it: ``"fifo"`` under the real-time scheduler,
    ``"nice"`` with a raised normal priority, else ``"normal"``."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        return "fifo"
    except (OSError, AttributeError) as err:
        logger.debug("no real-time priority: %s", err)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        return "nice"
    except OSError:
        return "normal"


def stand_back(niceness: int = 10) -> None:
    """Give way to measuring processes."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except OSError as err:
        logger.debug("cannot lower the priority: %s", err)


def preemptions() -> int:
    """Times this thread was taken off its core against its will."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def steal_ticks(cores: tuple[int, ...]) -> int:
    """Hundredths of a second that the hypervisor took from `cores` since boot; 0 where it does not say."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    except OSError:
        return 0
    wanted = {f"cpu{c}" for c in cores}
    return sum(int(fields[8]) for fields in lines if fields and fields[0] in wanted and len(fields) > 8)


def make_work_folder(parent: Path) -> Path:
    """A fresh folder that names this process (OSError if it cannot be made); those of processes that were killed go."""
    for stale in parent.glob(f"{_FOLDER_PREFIX}*"):
        owner = stale.name.removeprefix(_FOLDER_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=parent))
