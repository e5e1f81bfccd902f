"""One writer per dataset."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from cdmpp.errors import DatasetError


class WriterLock:
    """An exclusive lock file, held until :meth:`release` or the end of the process, however it ends.

    Forked children give up their copy, so a stuck worker does not keep the lock of a killed profiler.

    Raises
    ------
    DatasetError
        Another process (or another ``Dataset`` object of this one) writes the dataset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._acquire()
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this))

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise DatasetError(f"cannot write {self.path.parent}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise DatasetError(
                    f"{self.path.parent} is being written by another process ({holder})"
                ) from error
            if self._is_current(fd):
                break
            os.close(fd)  # the last holder removed the file between our open and our lock
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()}".encode(), 0)
        except OSError:  # a full disk: the pid is a courtesy, the lock holds without it
            pass
        return fd

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back and remove its file; twice is fine."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _forget(lock: weakref.ref[WriterLock]) -> None:
    held = lock()
    if held is not None:
        held._forget()
