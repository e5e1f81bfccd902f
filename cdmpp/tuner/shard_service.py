"""One profiler for all workers of a sharded tuning.

Workers on a CPU each build and measure on cores of their own. Kernels that several processes send to a GPU would take turns on
all of it: there one process measures for all workers, their programs side by side, each on a partition of the
multiprocessors. Workers search; what they want measured they send here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cdmpp.errors import CdmppError, ProfilerError
from cdmpp.tuner.measure import CpuSpec, Engine, Measurer

if TYPE_CHECKING:
    from cdmpp.profiler.engine import BuildJob, Outcome

logger = logging.getLogger(__name__)

#: Programs of one worker under way at a time; the others can still be given back.
_WINDOW = 8
#: Seconds between looks at what else there is to do.
_POLL_S = 0.05


class RemoteEngine:
    """Has programs measured by the service at an address; what a worker's :class:`~cdmpp.tuner.measure.Measurer` runs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Any = None

    def __enter__(self) -> RemoteEngine:
        try:
            self._connection = Client(self._address, family="AF_UNIX")
        except OSError as err:
            raise ProfilerError(f"the profiler of the tuning does not answer: {err}") from err
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        """Outcomes of jobs, as they become final; None among the jobs says "ask again".

        Raises
        ------
        ProfilerError
            Measuring cannot go on, for no worker.
        """
        under_way, exhausted = 0, False
        while True:
            while not exhausted and under_way < _WINDOW:
                try:
                    job = next(jobs)
                except StopIteration:
                    exhausted = True
                    break
                if job is None:
                    break
                self._send(job)
                under_way += 1
            if exhausted and not under_way:
                return
            said = self._heard()
            if isinstance(said, CdmppError):
                raise said
            if said is not None:
                under_way -= 1
                yield said

    def _send(self, job: BuildJob) -> None:
        try:
            self._connection.send(job)
        except OSError as err:
            raise ProfilerError(f"the profiler of the tuning has ended: {err}") from err

    def _heard(self) -> Any:
        try:
            return self._connection.recv() if self._connection.poll(_POLL_S) else None
        except (EOFError, OSError) as err:
            raise ProfilerError("the profiler of the tuning has ended") from err


class EngineService:
    """Measures for whoever connects; use as a context manager.

    Parameters
    ----------
    measurer
        What measures; running.
    address
        Path of the socket.
    """

    def __init__(self, measurer: Measurer, address: str) -> None:
        self._measurer, self.address = measurer, address
        self._server = socket.socket(socket.AF_UNIX)
        self._workers: list[Connection] = []
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="engine service", daemon=True)

    def __enter__(self) -> EngineService:
        self._server.bind(self.address)
        self._server.listen()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._server.close()
        with self._sending:
            for worker in self._workers:
                worker.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            for ready in wait([self._server, *self._workers], _POLL_S):
                if ready is self._server:
                    self._workers.append(Connection(self._server.accept()[0].detach()))
                elif isinstance(ready, Connection):
                    self._hear(ready)

    def _hear(self, worker: Connection) -> None:
        try:
            job: BuildJob = worker.recv()
        except (EOFError, OSError):
            # It has ended; what it wanted measured is of no use to anyone.
            self._workers.remove(worker)
            with self._sending:
                worker.close()
            return
        try:
            (future,) = self._measurer.submit([job])
        except CdmppError as err:
            self._answer(worker, err)
        else:
            future.add_done_callback(functools.partial(self._done, worker))

    def _done(self, worker: Connection, future: Future[Outcome]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._answer(worker, future.result())
        else:
            self._answer(worker, error if isinstance(error, CdmppError) else ProfilerError(str(error)))

    def _answer(self, worker: Connection, answer: Outcome | CdmppError) -> None:
        with self._sending, contextlib.suppress(OSError):
            worker.send(answer)


def _remote(address: str, spec: CpuSpec) -> Engine:
    return RemoteEngine(address)


@contextlib.contextmanager
def engine_service(engine: Engine) -> Iterator[Callable[[CpuSpec], Engine]]:
    """Run an engine for workers in other processes; gives what a worker starts with as its ``engine``.

    Raises
    ------
    ProfilerError
        The engine does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="cdmpp-"))
    try:
        with Measurer(engine) as measurer:
            try:
                with EngineService(measurer, str(folder / "engine")) as service:
                    yield functools.partial(_remote, service.address)
            finally:
                # Whoever wanted what is still under way has ended.
                measurer.abort()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
