"""A worker of a sharded tuning: searches, builds and measures on its own share of the device, and nowhere else.

On a GPU it only searches: :mod:`cdmpp.tuner.shard_service` builds and measures for all workers, on a share for each.
:mod:`cdmpp.tuner.sharding` is the side that hands out the work. A worker is a process because one process cannot search for two
tasks at once; it keeps to its cores with everything it starts, since builders and the measuring process inherit them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from cdmpp.errors import CdmppError, ProgramError
from cdmpp.tuner.shard_messages import (
    Ended,
    Failed,
    Found,
    GiveBack,
    GivenBack,
    Measure,
    MeasureJobs,
    Ready,
    Search,
    ShardConfig,
    Taken,
)
from cdmpp.tuner.surplus import Surplus
from cdmpp.tuner.trimmer import Trimmer, worth_measuring

if TYPE_CHECKING:
    from cdmpp.profiler.engine import Outcome
    from cdmpp.program.types import Program, Space
    from cdmpp.tuner.online import Row
    from cdmpp.tuner.task_tuner import Candidate, TaskTuner

logger = logging.getLogger(__name__)

#: Between looks at what was measured while there is nothing to search.
_POLL_S = 0.05
#: What a connection raises whose other end is closed.
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


@dataclass
class _Round:
    """Programs on their way through measuring; ``tuner`` is None where they are of no search here."""

    order: int
    tuner: TaskTuner | None
    candidates: list[Candidate]
    proposed: list[Any]
    futures: list[Future[Outcome]] = field(default_factory=list)
    heard: int = 0


class ShardWorker:
    """Serves a connection until it is closed.

    Parameters
    ----------
    connection
        To the session.
    config
        See there.

    Raises
    ------
    CdmppError
        The predictor does not load, or does not fit the device.
    """

    def __init__(self, connection: Connection, config: ShardConfig) -> None:
        from tvm.s_tir import meta_schedule as ms

        from cdmpp.tuner.prepare import make_cost_model
        from cdmpp.tuner.validity import make_guard

        self._connection, self._config = connection, config
        self._sending = threading.Lock()
        self._hearing = threading.Lock()
        #: Searches to do; last, why there are no more.
        self._messages: queue.SimpleQueue[Search | Exception] = queue.SimpleQueue()
        # Workers that search one task together draw different programs.
        tune = replace(config.tune, seed=config.tune.seed + 1009 * config.number)
        self._tune = tune
        self._guard = make_guard(tune.validity, config.device, tune.seed)
        self._model = make_cost_model(config.tune, config.device)
        if config.cost_model:
            self._model.load(config.cost_model)
        self._trimmer = Trimmer(self._model, tune.trim) if tune.cost_model == "cdmpp" and tune.trim else None
        self._surplus = Surplus(self._trimmer, tune.batch)
        self._database = ms.database.MemoryDatabase()
        self._tuners: dict[int, TaskTuner] = {}
        self._searches: dict[int, tuple[TaskTuner, list[Candidate], list[Any]]] = {}
        self._rounds: list[_Round] = []
        self._cpu = time.process_time()

    def serve(self) -> None:
        """Work until there is no more.

        Raises
        ------
        ProfilerError
            Measuring cannot go on.
        """
        from cdmpp.tuner.measure import Measurer
        from cdmpp.tuner.prepare import engine_config

        config = self._config
        engine = replace(engine_config(config.tune, config.device, (config.cores,)), work_dir=config.work_dir)
        try:
            with Measurer(config.engine(engine)) as self._measurer:
                threading.Thread(target=self._read, name="reader", daemon=True).start()
                self._send(Ready())
                while True:
                    self._end_rounds()
                    try:
                        message = self._messages.get(timeout=_POLL_S)
                    except queue.Empty:
                        continue
                    if isinstance(message, Exception):
                        raise message
                    self._search(message)
        except _GONE:
            logger.debug("the session has gone")

    def _read(self) -> None:
        """Read all the time, so that the session never waits for a search to end.

        Everything but searching is done here and at once, in the order of the messages: what the session counts as handed
        over can be given back.
        """
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, GiveBack):
                    # nothing is said of their order in between
                    with self._sending:
                        self._connection.send(GivenBack(self._measurer.give_back(message.most)))
                elif isinstance(message, Search):
                    self._messages.put(message)
                else:
                    self._measure(message)
        except OSError:
            self._messages.put(EOFError())
        except (EOFError, CdmppError) as err:
            self._messages.put(err)

    def _send(self, message: Any) -> None:
        # outcomes are sent by the measurer's thread, while this one may be searching
        with self._sending:
            self._connection.send(message)

    # -- searching ---------------------------------------------------------------------------------------------

    def _search(self, asked: Search) -> None:
        new = asked.index not in self._tuners
        tuner = self._tuner(asked.index)
        self._learn(tuner, asked.earlier, asked.learned)
        proposed: list[Any] = []
        candidates = [tuner.replay(p, s) for p, s in asked.first]
        if not candidates and new and not asked.earlier and self._guard is not None:
            candidates = self._guard.initial(tuner, self._tune.batch, self._model)
        if not candidates:
            candidates = self._surplus.take(asked.index, tuner.context, asked.best_s)
        if not candidates:
            found = tuner.propose() or []
            proposed = [c.measure for c in found]
            candidates = self._surplus.share(asked.index, tuner.context, found, asked.best_s)
        if not candidates:
            self._send(Found(asked.order, None))
            self._send(Ended(asked.order, (), self._cpu_s))
            return
        measures = [c.measure for c in candidates]
        worth = worth_measuring(self._guard, self._trimmer, tuner.context, measures, asked.best_s)
        self._searches[asked.order] = (tuner, candidates, proposed)
        self._send(Found(asked.order, tuple(c.hash for c in candidates), tuple(worth.tolist())))

    def _tuner(self, index: int) -> TaskTuner:
        from cdmpp.tuner.cost_model import GuardedModel
        from cdmpp.tuner.prepare import make_tuner

        if index not in self._tuners:
            config = self._config
            tuner = self._tuners[index] = make_tuner(config.tasks[index], config.device, self._tune)
            model = self._model if self._guard is None else GuardedModel(self._model, self._guard)
            tuner.start(self._database, model, self._surplus.wanted)
        return self._tuners[index]

    def _learn(
        self,
        tuner: TaskTuner,
        earlier: Sequence[tuple[Program, Space, float | None]],
        learned: Sequence[Row],
    ) -> None:
        """Take up what others measured: as parents for the search, and in the cost model."""
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        if learned:
            self._model.model.add_rows(learned)
            self._model.model.fit()
        measures, results = [], []
        for program, space, latency_s in earlier:
            try:
                candidate = tuner.replay(program, space)
            except ProgramError as err:
                logger.debug("%s", err)
                continue
            if latency_s is not None:
                self._database.commit_tuning_record(self._record(tuner, candidate, latency_s))
            measures.append(candidate.measure)
            results.append(
                RunnerResult(None, "failed before") if latency_s is None else RunnerResult([latency_s], None)
            )
        if measures:
            self._model.update(tuner.context, measures, results)
            self._learn_validity(tuner, measures, [result.error_msg is None for result in results])

    def _learn_validity(self, tuner: TaskTuner, measures: list[Any], worked: list[bool]) -> None:
        if self._guard is not None and measures:
            self._guard.learn(tuner.context, measures, worked)

    def _record(self, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> Any:
        from tvm.s_tir import meta_schedule as ms

        measure = candidate.measure
        workload = self._database.commit_workload(tuner.mod)
        target = tuner.context.target
        return ms.database.TuningRecord(measure.sch.trace, workload, [latency_s], target, measure.args_info)

    # -- measuring ---------------------------------------------------------------------------------------------

    def _measure(self, asked: Measure | MeasureJobs) -> None:
        if isinstance(asked, Measure):
            tuner, candidates, proposed = self._searches.pop(asked.order)
            by_hash = {c.hash: c for c in candidates}
            chosen = [by_hash[digest] for digest in asked.hashes]
            begun, jobs = _Round(asked.order, tuner, chosen, proposed), [c.job for c in chosen]
        else:
            begun, jobs = _Round(asked.order, None, [], []), list(asked.jobs)
        begun.futures = self._measurer.submit(jobs)
        of_hash = {c.hash: c for c in begun.candidates}
        for job, future in zip(jobs, begun.futures, strict=True):
            future.add_done_callback(self._reporter(begun, of_hash.get(job.program.hash)))
        # last: the other thread ends it as soon as all was heard of
        self._rounds.append(begun)

    def _reporter(self, begun: _Round, candidate: Candidate | None) -> Callable[[Future[Outcome]], None]:
        """Reports an outcome at once, also while a search goes on: what is reported is not lost."""

        def report(future: Future[Outcome]) -> None:
            try:
                if future.cancelled() or future.exception() is not None:
                    return
                outcome, record = future.result(), None
                if begun.tuner is not None and candidate is not None and outcome.latency_s is not None:
                    record = self._record(begun.tuner, candidate, outcome.latency_s).as_json()
                self._send(Taken(begun.order, outcome, record))
            except _GONE:
                logger.debug("the session has gone")
            finally:
                with self._hearing:
                    begun.heard += 1

        return report

    def _end_rounds(self) -> None:
        for begun in [r for r in self._rounds if r.heard == len(r.futures)]:
            self._rounds.remove(begun)
            self._end_round(begun)

    def _end_round(self, begun: _Round) -> None:
        """Learn from a round that is over."""
        from cdmpp.tuner.metaschedule import runner_result
        from cdmpp.tuner.session import no_results

        learned: Sequence[Row] = ()
        outcomes = [None if future.cancelled() else future.result() for future in begun.futures]
        if begun.tuner is not None:
            done = [(c, o) for c, o in zip(begun.candidates, outcomes, strict=True) if o is not None]
            for candidate, outcome in done:
                if outcome.latency_s is not None:
                    record = self._record(begun.tuner, candidate, outcome.latency_s)
                    self._database.commit_tuning_record(record)
            if done:
                measures = [c.measure for c, _ in done]
                self._model.update(begun.tuner.context, measures, [runner_result(o) for _, o in done])
                there = [(c.measure, o.latency_s is not None) for c, o in done if o.status != "device_lost"]
                self._learn_validity(begun.tuner, [m for m, _ in there], [worked for _, worked in there])
                if hasattr(self._model, "model"):
                    learned = self._model.model.rows({c.hash for c, _ in done})
            if begun.proposed:
                begun.tuner.tell(begun.proposed, no_results(begun.proposed))
        self._send(Ended(begun.order, learned, self._cpu_s))

    @property
    def _cpu_s(self) -> float:
        return time.process_time() - self._cpu


def serve_shard(connection: Connection, config: ShardConfig) -> None:
    """A worker as a process on its own cores."""
    from cdmpp.profiler import machine

    machine.die_with_parent()
    # Before anything starts threads or processes: they inherit the cores.
    machine.pin(config.cores)
    os.environ["OMP_NUM_THREADS"] = str(len(config.cores))
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    try:
        ShardWorker(connection, config).serve()
    except CdmppError as err:
        # the session may have gone meanwhile
        with contextlib.suppress(OSError):
            connection.send(Failed(err))
