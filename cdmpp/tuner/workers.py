"""A network's tasks tuned by several workers at once, after Dhakal et al., who share a GPU's multiprocessors in space.

One process cannot search for two tasks at once. So each worker is a process with an ordinary session
(:class:`~cdmpp.tuner.session.TuningSession`) for its part of the tasks, on cores of its own. This side has what there is
one of: the queue of programs to measure, the store with its database, and the progress, which grants trials as they are
asked for, but reserves some for each worker. What was measured is kept at once: a worker that dies costs what it was
searching for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import CdmppError, TunerError
from cdmpp.profiler.machine import Worker
from cdmpp.tuner.candidates import Candidate, TaskTuner, is_untuned
from cdmpp.tuner.objective import Costs, Curve, Point
from cdmpp.tuner.progress import Progress
from cdmpp.tuner.session import Models, TuningSession, make_tuners, work
from cdmpp.tuner.store import DATASET_FOLDER, labels_of, tuning_record

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.profiler.engine import BuildJob, Outcome
    from cdmpp.program.types import Task
    from cdmpp.tuner.config import TuneConfig
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.scheduler import TaskState
    from cdmpp.tuner.store import TuningStore

logger = logging.getLogger(__name__)

#: Of sums of shares that are written in decimals.
_ROUNDING = 1e-6
#: A worker is started so often.
_LIVES = 3


def worker_cores(device: Device, shards: int | str, elsewhere: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Cores of each of several workers that each get a whole share; of as many as fit for ``"auto"``.

    For a GPU, and where shares are `elsewhere` (how many), they are those that the workers search on. TunerError where so many
    do not fit on the GPU, on the cores that this process may use, or elsewhere.
    """
    from cdmpp.profiler.machine import core_groups, usable_cores

    cores, gpu = usable_cores(), device.kind == "gpu"
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
        too_many = (
            f"are {asked:g} times what there is" if gpu else f"need {asked:g} cores, this process may use {len(cores)}"
        )
        fits = int(1000 / number) / 1000 if gpu else len(cores) // number
        smaller = f", or tune for a smaller share: {device.base}@{fits:g}" if fits else ""
        raise TunerError(f"{number} shards of {device.name} {too_many}: take fewer shards{smaller}")
    if gpu:
        return tuple(cores[i::number] or cores for i in range(number))
    return core_groups(cores, int(device.share), number)


def partition(tasks: Sequence[tuple[Task, float]], parts: int) -> list[list[int]]:
    """Numbers of tasks for each of several workers, none without one: the heaviest first, to the worker with least work."""
    found: list[list[int]] = [[] for _ in range(min(parts, len(tasks)))]
    loads = [0.0] * len(found)
    for number in sorted(range(len(tasks)), key=lambda i: -work(*tasks[i])):
        # a task without operations is work too
        least = min(range(len(found)), key=lambda i: (loads[i], len(found[i])))
        found[least].append(number)
        loads[least] += work(*tasks[number])
    return found


# -- in a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker starts with; ``folder`` is the tuning's, ``began`` when the tuning would have begun without a pause."""

    number: int
    cores: tuple[int, ...]
    device: Device
    tune: TuneConfig
    tasks: tuple[tuple[Task, float], ...]
    folder: Path
    earlier: tuple[str | Path, ...]
    began: float


class _Parent:
    """The process that has the queue, the store and the progress, as a worker's session sees it: also its measurer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._futures: dict[str, Future[Outcome]] = {}
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def send(self, kind: str, *content: Any) -> None:
        with self._sending:
            self._connection.send((kind, content))

    def ask(self, kind: str, *content: Any) -> Any:
        self.send(kind, *content)
        return self._answers.get()

    def submit(self, jobs: Sequence[BuildJob]) -> list[Future[Outcome]]:
        """As :meth:`cdmpp.tuner.measure.Measurer.submit`."""
        futures = [self._futures.setdefault(job.program.hash, Future()) for job in jobs]
        self.send("measure", list(jobs))
        return futures

    def abort(self) -> None:
        """As :meth:`cdmpp.tuner.measure.Measurer.abort`."""
        for future in list(self._futures.values()):
            future.cancel()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, content = self._connection.recv()
                if kind == "answer":
                    self._answers.put(content)
                    continue
                future = self._futures.pop(content.job.program.hash, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(content)


class _WorkerStore:
    """What stands for a :class:`~cdmpp.tuner.store.TuningStore` in a worker: reads the folder, lets the parent write."""

    def __init__(self, parent: _Parent, config: WorkerConfig) -> None:
        from tvm.s_tir import meta_schedule as ms

        from cdmpp.dataset import Dataset

        self._parent, self._device, self._began = parent, config.device, config.began
        self.dataset = Dataset.open(config.folder / DATASET_FOLDER)
        self.database = ms.database.MemoryDatabase()

    def curve(self) -> tuple[Curve, Costs]:
        """Nothing but the time that has gone."""
        return Curve(), Costs(wall_s=time.monotonic() - self._began)

    def outcomes(self) -> dict[str, float | None]:
        """Labels of what was measured before the worker was started."""
        return labels_of(self.dataset, self._device)

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        self._parent.send("enter", outcome)

    def commit(self, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> None:
        """Into the worker's own database, for its search, and into the parent's."""
        record = tuning_record(self.database, tuner, candidate, latency_s)
        self.database.commit_tuning_record(record)
        self._parent.send("commit", tuner.task.hash, record.as_json())

    def add_point(self, point: Point, costs: Costs) -> None:
        """The curve is the parent's."""


class _WorkerProgress(Progress):
    """Of a worker's tasks: the parent grants trials, says when to stop, and counts what was done."""

    def __init__(self, parent: _Parent, tasks: Sequence[tuple[Task, float]], *args: Any) -> None:
        super().__init__(tasks, *args)
        self._parent, self._hashes = parent, [task.hash for task, _ in tasks]

    def tick(self) -> None:
        before = self.costs.search_cpu_s
        super().tick()
        self._parent.send("searched", self.costs.search_cpu_s - before)

    def reached(self, reserved: int = 0) -> str | None:
        answer: str | None = self._parent.ask("reached")
        return answer

    def claim(self, task: int, worth: Sequence[bool], reserved: int = 0) -> int:
        number: int = self._parent.ask("claim", self._hashes[task], list(worth))
        self._count_claim(task, worth[:number])
        return number

    def end_round(self, task: int, worked: int, error: str = "") -> None:
        super().end_round(task, worked, error)
        self._parent.send("end_round", self._hashes[task], worked, error)

    def give_up(self, task: int, why: str) -> None:
        super().give_up(task, why)
        self._parent.send("give_up", self._hashes[task], why)

    @staticmethod
    def _say_if_lost(state: TaskState, error: str = "") -> None:
        """The parent says it."""


def run_worker(connection: Connection, config: WorkerConfig) -> None:
    """One session for a part of the tasks (runs in its own process)."""
    from cdmpp.profiler import machine

    machine.die_with_parent()
    machine.pin(config.cores)
    os.environ["OMP_NUM_THREADS"] = str(len(config.cores))
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    parent = _Parent(connection)

    def say(line: str) -> None:
        parent.send("say", f"worker {config.number}: {line}")

    try:
        models = Models.of(config.tune, config.device)
        tuners, tasks = make_tuners(config.tasks, config.device, config.tune, say)
        store = _WorkerStore(parent, config)
        progress = _WorkerProgress(parent, tasks, store, config.tune.objective)
        session = TuningSession(tuners, models, store, parent, progress, config.tune)
        session.warm_start(config.earlier, config.device, say).run()
        parent.send("ended", session.learned)
    except CdmppError as err:
        parent.send("failed", err)


# -- where the workers are started ---------------------------------------------------------------------------------


@dataclass
class _Member:
    """A worker; ``least`` are trials that it has for certain, ``claimed`` those that it has begun, and ``under_way`` those of
    them that are not measured yet."""

    config: WorkerConfig
    process: Worker
    least: int
    lives: int = _LIVES
    ready: bool = False
    claimed: int = 0
    under_way: int = 0


class Workers:
    """Workers that tune the parts of a network's tasks; `tuners` and `tasks` are all of them, the measurer is running."""

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        tasks: Sequence[tuple[Task, float]],
        store: TuningStore,
        measurer: Measurer,
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self._tuners, self._tasks = tuners, tasks
        self._store, self._measurer, self._progress, self._say = store, measurer, progress, say
        self._number_of = {task.hash: i for i, (task, _) in enumerate(tasks)}
        #: What each cost model learned, as JSON values.
        self.learned: list[dict[str, Any]] = []
        self._members: list[_Member] = []
        #: Workers that asked whether to go on, and have no answer yet.
        self._asking: list[_Member] = []
        self._sending = threading.Lock()
        self._failure: BaseException | None = None

    def run(
        self, config: TuneConfig, device: Device, cores: Sequence[tuple[int, ...]], earlier: Sequence[str | Path]
    ) -> str:
        """Tune until the objective is reached, or until there is nothing more to try; says which.

        TunerError where no worker stays alive; other errors as measuring or a worker says that it cannot go on.
        """
        progress, folder = self._progress, self._store.folder
        progress.start(config.batch)
        began = time.monotonic() - progress.costs.wall_s
        parts = partition(self._tasks, len(cores))
        limits = (config.objective.trials, config.objective.max_measurements or config.objective.trials)
        share = (min(limits) - progress.costs.trials) // len(parts)
        self._say(f"{len(parts)} workers at the same time, each on a {device.name} of its own")
        try:
            for number, part in enumerate(parts):
                own = tuple(self._tasks[i] for i in part)
                start = WorkerConfig(number, cores[number], device, config, own, folder, tuple(earlier), began)
                # a round for each of its tasks, however slowly it begins
                least = min(share, max(share // 2, config.batch * len(part)))
                self._members.append(_Member(start, _started(start), least))
            self._serve()
        finally:
            for member in self._members:
                member.process.kill()
            # nobody is left who waits for what is still being measured
            self._measurer.abort()
        return progress.reached() or "nothing more to try"

    def _serve(self) -> None:
        while self._members:
            left_s = self._progress.time_left_s
            if left_s == 0:
                return
            by_connection = {member.process.connection: member for member in self._members}
            for connection in wait(list(by_connection), 1.0 if left_s is None else min(1.0, left_s)):
                assert isinstance(connection, Connection)
                member = by_connection[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    self._died(member)
                else:
                    self._handle(member, kind, content)
                self._answer()
            if self._failure is not None:
                raise self._failure

    def _handle(self, member: _Member, kind: str, content: tuple[Any, ...]) -> None:
        progress, number_of = self._progress, self._number_of
        match kind, content:
            case "reached", ():
                member.ready = True
                self._asking.append(member)
            case "claim", (task, worth):
                number = progress.claim(number_of[task], worth, self._reserved(member))
                member.claimed += number
                member.under_way += sum(worth[:number])
                self._send(member, "answer", number)
            case "measure", (jobs,):
                for future in self._measurer.submit(jobs):
                    future.add_done_callback(functools.partial(self._measured, member))
            case "enter", (outcome,):
                member.under_way -= not is_untuned(outcome.job.program)
                progress.enter(number_of[outcome.job.task.hash], outcome)
            case "commit", (task, record):
                self._store.commit_record(self._tuners[number_of[task]], record)
            case "end_round", (task, worked, error):
                progress.end_round(number_of[task], worked, error)
            case "give_up", (task, why):
                progress.give_up(number_of[task], why)
            case "searched", (seconds,):
                progress.elsewhere_s += seconds
            case "say", (line,):
                self._say(line)
            case "ended", (learned,):
                self.learned.append(learned)
                self._members.remove(member)
                with self._sending:
                    member.process.kill()
            case "failed", (error,):
                raise error

    def _reserved(self, member: _Member) -> int:
        """Trials that other workers still have for certain."""
        others = (other for other in self._members if other is not member)
        return sum(max(0, other.least - other.claimed) for other in others)

    def _answer(self) -> None:
        """Say whether to go on; nobody begins before all others have started and measured what their tasks run as untuned."""
        if all(member.ready for member in self._members):
            for member in self._asking:
                self._send(member, "answer", self._progress.reached(self._reserved(member)))
            self._asking.clear()

    def _measured(self, member: _Member, future: Future[Outcome]) -> None:
        """Hand an outcome to the worker that wanted it (runs in the measurer's thread)."""
        if not future.cancelled():
            self._failure = self._failure or future.exception()
            if self._failure is None:
                self._send(member, "outcome", future.result())

    def _send(self, member: _Member, kind: str, content: Any) -> None:
        # that a worker is dead is seen where its messages are waited for
        with self._sending, contextlib.suppress(OSError):
            member.process.connection.send((kind, content))

    def _died(self, member: _Member) -> None:
        """Start a worker anew, as often as it has lives: it takes up what it had measured."""
        reason = member.process.exit_reason()
        logger.warning("worker %d of the tuning died (%s)", member.config.number, reason)
        with self._sending:  # closing a pipe frees its number: what is being sent would go to the next worker
            member.process.kill()
        self._members.remove(member)
        self._progress.release(member.under_way)
        if member.lives > 1:
            left = member.least - member.claimed + member.under_way
            self._members.append(_Member(member.config, _started(member.config), left, member.lives - 1))
            return
        for task, _ in member.config.tasks:
            self._progress.give_up(self._number_of[task.hash], f"its worker died, last {reason}")
        if not self._members and not self.learned:
            raise TunerError(
                f"no worker of the tuning stays alive, the last one {reason}; what was measured is kept: "
                "go on with --resume"
            )


def _started(config: WorkerConfig) -> Worker:
    return Worker(run_worker, (config,), f"tuner-{config.number}")
