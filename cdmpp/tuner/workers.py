"""Tunes a network's tasks with several workers at once, after Dhakal et al., who share a GPU's multiprocessors in space. A
worker is a process that searches (:class:`~cdmpp.tuner.session.Searches`) for its part of the tasks, on its own cores. The main
process has a session for each worker, in a thread; all share one queue of programs to measure, one store and one progress.
Measurements are stored at once: if a worker dies, only its current search is lost."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset
from cdmpp.device import Device
from cdmpp.errors import CdmppError, TunerError
from cdmpp.profiler import machine
from cdmpp.profiler.machine import Worker, WorkerDied, requests
from cdmpp.program import import_tvm
from cdmpp.program.types import Task
from cdmpp.tuner.candidates import Candidate, TaskTuner
from cdmpp.tuner.config import TuneConfig
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.progress import Progress
from cdmpp.tuner.results import DATASET_FOLDER, TuningStore, labels_of, tuning_record
from cdmpp.tuner.session import Searches, TuningSession, make_models, make_tuners, measure_untuned, work

logger = logging.getLogger(__name__)

#: Tolerance for sums of shares that are written in decimals.
_ROUNDING = 1e-6
#: Number of times that a worker is started, at most.
_LIVES = 3


def worker_cores(device: Device, shards: int | str, elsewhere: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Cores of each of several workers that each get a whole share of the device; ``"auto"`` is as many workers as fit. For a
    GPU, and if the shares are `elsewhere` (their number), these are the cores that the workers search on. Raises TunerError if
    so many do not fit on the GPU, on the cores that this process may use, or elsewhere."""
    cores, gpu = machine.usable_cores(), device.kind == "gpu"
    if elsewhere is not None:
        if shards != "auto" and not 1 <= int(shards) <= elsewhere:
            raise TunerError(f"{shards} shards of {device.name}: the cluster has {elsewhere}")
        number = elsewhere if shards == "auto" else int(shards)
        return tuple(cores[i::number] or cores[i % len(cores) :][:1] for i in range(number))
    there = 1.0 if gpu else float(len(cores))
    number = max(1, int(there / device.share + _ROUNDING)) if shards == "auto" else int(shards)
    if number < 1:
        raise TunerError(f"one worker at least, got {number} shards")
    asked = number * device.share
    if asked > there + _ROUNDING:
        too_many = f"are {asked:g} times what there is" if gpu else f"need {asked:g} cores, this process may use {len(cores)}"
        fits = int(1000 / number) / 1000 if gpu else len(cores) // number
        smaller = f", or tune for a smaller share: {device.base}@{fits:g}" if fits else ""
        raise TunerError(f"{number} shards of {device.name} {too_many}: take fewer shards{smaller}")
    if gpu:
        return tuple(cores[i::number] or cores for i in range(number))
    return machine.core_groups(cores, int(device.share), number)


def partition(tasks: Sequence[tuple[Task, float]], parts: int) -> list[list[int]]:
    """Indices of the tasks of each worker, at least one each: the heaviest task first, each to the worker with least work."""
    found: list[list[int]] = [[] for _ in range(min(parts, len(tasks)))]
    loads = [0.0] * len(found)
    for number in sorted(range(len(tasks)), key=lambda i: -work(*tasks[i])):
        # on equal loads the number of tasks decides: a task without operations is work too
        least = min(range(len(found)), key=lambda i: (loads[i], len(found[i])))
        found[least].append(number)
        loads[least] += work(*tasks[number])
    return found


def run_worker(
    connection: Connection,
    cores: tuple[int, ...],
    tasks: Sequence[tuple[Task, float]],
    device: Device,
    config: TuneConfig,
    earlier: Sequence[str | Path],
    folder: Path,
    until: float,
) -> None:
    """Answer method calls on :class:`~cdmpp.tuner.session.Searches` (runs in its own process). An answer is the result or an
    error, CPU seconds, records for the database as (task, ``TuningRecord.as_json``), and messages to show."""
    machine.die_with_parent()
    machine.pin(cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    import_tvm()
    from tvm.s_tir import meta_schedule as ms

    records, said = list[tuple[str, Any]](), list[str]()
    database, since = ms.database.MemoryDatabase(), time.process_time()

    def commit(tuner: TaskTuner, candidate: Candidate, latency_s: float) -> None:
        record = tuning_record(database, tuner, candidate, latency_s)
        database.commit_tuning_record(record)
        records.append((tuner.task.hash, record.as_json()))

    def answer(found: Any) -> None:
        nonlocal since
        connection.send((found, time.process_time() - since, records, said))
        since = time.process_time()
        records.clear()
        said.clear()

    try:
        models = make_models(config, device)
        tuners, _ = make_tuners(tasks, device, config, said.append)
        searches = Searches(tuners, models, config, database, commit, until)
        dataset = Dataset.open(folder / DATASET_FOLDER)
        searches.begin(dataset, labels_of(dataset, device), earlier, device, said.append)
        answer(None)
        for method, arguments in requests(connection):
            answer(getattr(searches, method)(*arguments))
    except CdmppError as err:
        answer(err)


class _Remote:
    """Proxy for the searches in a worker (`start`: :func:`run_worker`'s arguments); restarts it when it dies, a few times."""

    def __init__(
        self,
        number: int,
        start: tuple[Any, ...],
        tuners: Sequence[TaskTuner],
        store: TuningStore,
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self._number, self._start, self._tuners = number, start, {tuner.task.hash: tuner for tuner in tuners}
        self._store, self._progress, self._say = store, progress, say
        self._process, self._lives, self._begun = _started(number, start), _LIVES, False
        self._reason = "killed"

    def begin(self) -> bool:
        """Wait, within the time budget, until the worker has learned from the existing records; returns whether it has."""
        if not self._process.connection.poll(self._progress.time_left_s):
            return False
        with contextlib.suppress(WorkerDied):  # the next call raises it again
            self._call("")
        return True

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self._call, method)

    def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            try:
                if not self._begun:
                    self._receive()
                    self._begun = True
                if not method:
                    return None
                self._process.connection.send((method, arguments))
                return self._receive()
            except (WorkerDied, OSError) as err:
                if self._lives:
                    self._reason = self._process.exit_reason()
                    logger.warning("worker %d of the tuning died (%s)", self._number, self._reason)
                    self.kill(self._lives - 1)
                if not self._lives:
                    raise WorkerDied(self._reason) from err
                self._process, self._begun = _started(self._number, self._start), False

    def _receive(self) -> Any:
        found, searched_s, records, said = self._process.receive()
        with self._progress.lock:
            self._progress.elsewhere_s += searched_s
            for task, record in records:
                self._store.commit_record(self._tuners[task], record)
            for line in said:
                self._say(f"worker {self._number}: {line}")
        if isinstance(found, CdmppError):
            raise found
        return found

    def kill(self, lives: int = 0) -> None:
        """End the process; it can be restarted `lives` times."""
        self._lives = lives
        self._process.kill()


def tune_with_workers(
    tuners: Sequence[TaskTuner],
    tasks: Sequence[tuple[Task, float]],
    store: TuningStore,
    measurer: Measurer,
    progress: Progress,
    config: TuneConfig,
    device: Device,
    cores: Sequence[tuple[int, ...]],
    earlier: Sequence[str | Path],
    say: Callable[[str], None],
) -> tuple[str, list[dict[str, Any]]]:
    """Tune until the objective is reached or nothing is left to try; returns the reason, and what each cost model learned.
    Raises TunerError if no worker stays alive, and the errors with which measuring or a worker cannot go on."""
    parts, learned = partition(tasks, len(cores)), list[dict[str, Any]]()
    say(f"{len(parts)} workers at the same time, each on a {device.name} of its own")
    limits = (config.objective.trials, config.objective.max_measurements or config.objective.trials)
    share = (min(limits) - progress.costs.trials) // len(parts)
    sessions: list[TuningSession] = []
    deaths: list[WorkerDied] = []
    ended = threading.Event()

    def run(session: TuningSession) -> None:
        try:
            session.run()
            learned.append(session.searches.describe())
        except WorkerDied as err:
            if not ended.is_set():
                deaths.append(err)
                session.abandon(f"its worker died, last {err}")
        finally:
            session.reserved = 0

    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            for number, part in enumerate(parts):
                start = (cores[number], [tasks[i] for i in part], device, config, earlier, store.folder, progress.until)
                searches = _Remote(number, start, tuners, store, progress, say)
                session = TuningSession({i: tuners[i] for i in part}, searches, measurer, progress, config)
                # enough for a round of each of its tasks, so that a worker that begins slowly gets them too
                session.reserved = max(0, min(share, max(share // 2, config.batch * len(part))))
                sessions.append(session)
            for session in sessions:
                session.others = [other for other in sessions if other is not session]
            in_time = all(session.searches.begin() for session in sessions)
            if in_time:
                measure_untuned(tuners, measurer, progress)
            running = [pool.submit(run, session) for session in sessions if in_time]
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            ended.set()
            for session in sessions:
                session.searches.kill()
            # nothing waits any more for the programs still being measured
            measurer.abort()
    if deaths and not learned:
        raise TunerError(
            f"no worker of the tuning stays alive, the last one {deaths[-1]}; what was measured is kept: go on with --resume"
        )
    return progress.reached() or "nothing more to try", learned


def _started(number: int, start: tuple[Any, ...]) -> Worker:
    return Worker(run_worker, start, f"tuner-{number}")
