"""A network's tasks tuned by several workers at once, each on its own share of the device (after Dhakal et al., who share a
GPU's multiprocessors among tuning processes in space).

This side keeps the account, the database and the budget, and hands out work; workers search, build and measure
(:mod:`cdmpp.tuner.shard_worker`). Who has nothing to do takes the task that promises most and that nobody works on, next the
task of another worker, and where neither is left a part of what the slowest worker has not begun. What a worker has
measured is kept at once: one that dies costs what it had under way, and its task goes back to the others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError, TunerError
from cdmpp.profiler.engine import BuildJob
from cdmpp.tuner.ledger import Ledger, Progress
from cdmpp.tuner.scheduler import TaskState, next_task, promise
from cdmpp.tuner.shard_learning import SharedLearning
from cdmpp.tuner.shard_members import LIVES, Member, Order
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
from cdmpp.tuner.shards import Shard, start_process
from cdmpp.tuner.untuned import is_untuned

if TYPE_CHECKING:
    from cdmpp.profiler.engine import Outcome
    from cdmpp.program.types import Program, Space
    from cdmpp.tuner.energy import EnergyCounter
    from cdmpp.tuner.objective import Costs, Objective
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.task_tuner import Candidate, TaskTuner

logger = logging.getLogger(__name__)

#: Orders of a worker: it searches for the next round while the last one is measured.
_DEPTH = 2
#: Another worker's task is taken where it promises so many times as much as a worker's own: what is known of it has to be
#: replayed there.
_WORTH_MOVING = 2.0
#: A task whose search ended so many workers is given up.
_DEADLY = 2


class ShardedSession(Ledger):
    """Tunes tasks with several workers.

    Parameters
    ----------
    tuners, weights, store, objective, progress, clock, energy
        See :class:`~cdmpp.tuner.ledger.Ledger`.
    cost_model
        Takes what all workers learned when they are done; they start from what their configurations say.
    shards
        A configuration for each worker.
    batch
        Candidates of a round.
    first
        Programs to measure before any search, by task number.
    start
        Starts a worker.
    """

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        weights: Sequence[float],
        cost_model: Any,
        store: TuningStore,
        shards: Sequence[ShardConfig],
        objective: Objective,
        *,
        batch: int = 16,
        first: Mapping[int, Sequence[Candidate]] | None = None,
        progress: Callable[[Progress], None] | None = None,
        start: Callable[[ShardConfig], Shard] = start_process,
        clock: Callable[[], float] = time.monotonic,
        energy: EnergyCounter | None = None,
    ) -> None:
        super().__init__(tuners, weights, store, objective, progress=progress, clock=clock, energy=energy)
        if not shards or batch < 1:
            raise TunerError(f"got {len(shards)} workers and rounds of {batch}: one at least of both")
        self._model, self._configs, self._start, self._batch = cost_model, shards, start, batch
        self._first = {i: list(candidates) for i, candidates in (first or {}).items()}
        self._members: list[Member] = []
        self._number_of = {tuner.task.hash: i for i, tuner in enumerate(tuners)}
        self._orders = 0
        #: Programs that any worker may measure.
        self._loose: list[BuildJob] = []
        #: Scheduled programs measured so far, by task, and which worker holds a task's search.
        self._measured: dict[int, list[str]] = {i: [] for i in range(len(tuners))}
        self._holder: dict[int, int] = {}
        self._deaths: Counter[int] = Counter()
        self._learning = SharedLearning()

    def run(self) -> str:
        """Tune until the objective is reached, or until there is nothing more to try; says which.

        Raises
        ------
        TunerError
            No worker stays alive.
        ProfilerError, PredictorError
            A worker says that it cannot go on.
        """
        self._begin()
        self._recall_states(self._batch)
        for digest in self._known:
            program = self._store.dataset.programs[digest]
            if program.task_hash in self._number_of and not is_untuned(program):
                self._measured[self._number_of[program.task_hash]].append(digest)
        untuned = [tuner.untuned() for tuner in self._tuners]
        self._loose = [job for job in untuned if job is not None and job.program.hash not in self._known]
        reason = self._objective.reached(self.costs, self.curve)
        if reason is not None and not self._loose:
            return reason
        try:
            for config in self._configs:
                self._members.append(Member(config, self._start(config)))
            reason = self._work()
        finally:
            for member in self._members:
                member.shard.close()
        self._learning.teach(self._model, self._tuners)
        self._tick()
        return reason

    def _work(self) -> str:
        while True:
            self._tick()
            reason = self._objective.reached(self._planned(), self.curve)
            if self._time_left_s == 0:
                return reason or "the budget"
            self._hand_out()
            if not self._loose and not any(member.orders for member in self._members):
                if reason is not None:
                    return reason
                if any(member.ready for member in self._members):
                    return "nothing more to try"
            by_connection = {member.shard.connection: member for member in self._members}
            left_s = self._time_left_s
            for connection in wait(list(by_connection), 1.0 if left_s is None else min(1.0, left_s)):
                assert isinstance(connection, Connection)
                member = by_connection[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    self._died(member)
                    continue
                self._hear(member, message)

    def _planned(self) -> Costs:
        """Costs with what is under way."""
        orders = [order for member in self._members for order in member.orders.values()]
        under_way = sum(order.room if order.searching else self._trials(order) for order in orders)
        loose = sum(not is_untuned(job.program) for job in self._loose)
        return self._with(under_way + loose, 0)

    @staticmethod
    def _trials(order: Order) -> int:
        """Programs that wait, without untuned tasks: they are no trials."""
        return sum(h not in order.jobs or not is_untuned(order.jobs[h].program) for h in order.waiting)

    # -- handing out ------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        for member in sorted(self._members, key=lambda m: len(m.orders)):
            if not member.ready:
                continue
            if self._loose and not member.orders:
                # in equal parts for all who have nothing, also for those that are just starting
                idle = sum(not m.orders for m in self._members)
                self._measure_loose(member, -(-len(self._loose) // idle))
            if not member.searching and len(member.orders) < _DEPTH:
                self._search(member)
        if not self._loose and any(m.ready and not m.orders for m in self._members):
            self._steal()

    def _measure_loose(self, member: Member, most: int) -> None:
        jobs = {job.program.hash: job for job in self._loose[:most]}
        del self._loose[:most]
        order = self._order(member, None, jobs=jobs, waiting=set(jobs))
        self._tell(member, MeasureJobs(order.number, list(jobs.values())))

    def _search(self, member: Member) -> None:
        planned = self._planned()
        if self._objective.reached(planned, self.curve) is not None:
            return
        index = self._choose(member)
        if index is None:
            return
        left = self._objective.trials - planned.trials
        # the last trials in equal parts, so that all workers end together
        free = sum(m.ready and not m.searching for m in self._members)
        room = min(self._batch, -(-left // free))
        order = self._order(member, index, room=room, searching=True)
        self._holder[index] = member.config.number
        first = [
            (c.job.program, c.job.space) for c in self._first.pop(index, ()) if c.hash not in self._known
        ]
        rows = self._learning.news(member)
        best_s = self.states[index].latency_s
        earlier = self._unseen(member, index)
        self._tell(
            member,
            Search(order.number, index, best_s, earlier, [(p, s) for p, s in first if s is not None], rows),
        )

    def _choose(self, member: Member) -> int | None:
        """The task that a worker is to search next.

        That is one of its own or a new one, unless another worker's that waits promises much more, or is all there is. Where
        all open tasks are under way, a worker without work helps with the one that promises most.
        """
        orders = [order for m in self._members for order in m.orders.values()]
        busy = [order.index for order in orders if order.index is not None]
        best = next_task(self.states, busy)
        if best is None:
            return None if member.orders else next_task(self.states)
        others = [i for i, holder in self._holder.items() if holder != member.config.number]
        own = next_task(self.states, [*busy, *others])
        if own is None or promise(self.states[best]) > _WORTH_MOVING * promise(self.states[own]):
            return best
        return own

    def _unseen(self, member: Member, index: int) -> list[tuple[Program, Space, float | None]]:
        """Programs of a task that were measured elsewhere."""
        dataset, seen = self._store.dataset, member.seen.setdefault(index, set())
        digests = [digest for digest in self._measured[index] if digest not in seen]
        seen.update(digests)
        programs = [dataset.programs[digest] for digest in digests]
        return [(p, dataset.spaces[str(p.space_hash)], self._known[p.hash]) for p in programs]

    def _steal(self) -> None:
        """Ask the worker that has most before it for half of that; it gives what nothing was done for yet."""
        slowest = max(self._members, key=lambda m: m.waiting)
        if slowest.waiting < 2 or any(m.asked for m in self._members) or slowest.dry:
            return
        slowest.asked = True
        self._tell(slowest, GiveBack(slowest.waiting // 2))

    def _order(self, member: Member, index: int | None, **details: Any) -> Order:
        self._orders += 1
        order = member.orders[self._orders] = Order(self._orders, index, **details)
        member.dry = False
        return order

    @staticmethod
    def _tell(member: Member, message: Any) -> None:
        try:
            member.shard.connection.send(message)
        except OSError as err:
            # that it is dead is seen where its messages are waited for
            logger.debug("worker %d: %s", member.config.number, err)

    # -- hearing ----------------------------------------------------------------------------------------------

    def _hear(self, member: Member, message: Any) -> None:
        if isinstance(message, Ready):
            member.ready = True
        elif isinstance(message, Found):
            self._found(member, message)
        elif isinstance(message, Taken):
            self._taken(member, message)
        elif isinstance(message, GivenBack):
            member.asked, member.dry = False, not message.jobs
            for job in message.jobs:
                for order in member.orders.values():
                    order.waiting.discard(job.program.hash)
            self._loose.extend(message.jobs)
        elif isinstance(message, Ended):
            self._ended(member, message)
        elif isinstance(message, Failed):
            raise message.error

    def _found(self, member: Member, found: Found) -> None:
        """Choose among candidates what is to be measured."""
        order = member.orders[found.order]
        assert order.index is not None
        state = self.states[order.index]
        if found.hashes is None:
            self._give_up(state, "its space gives no more valid programs")
            return
        worth = {h: w for h, w in zip(found.hashes, found.worth, strict=True) if h not in self._known}
        candidates = list(worth)[: order.room]
        kept = [h for h in candidates if worth[h]]
        order.dropped = len(candidates) - len(kept)
        order.room, order.searching = 0, False
        self.costs.trials += order.dropped
        self.costs.dropped += order.dropped
        self.costs.saved_s += order.dropped * state.spent_s / max(1, state.measured)
        state.dropped += order.dropped
        kept = kept[: self._objective.room(self._planned(), len(kept))]
        self._known.update((h, None) for h in kept)
        order.waiting, member.dry = set(kept), False
        self._tell(member, Measure(order.number, tuple(kept)))

    def _taken(self, member: Member, taken: Taken) -> None:
        """Keep an outcome."""
        order = member.orders[taken.order]
        where: dict[str, Any] = {"shard": member.config.number}
        if member.config.device.kind == "cpu":
            where["cores"] = list(member.config.cores)
        outcome = replace(taken.outcome, meta={**taken.outcome.meta, **where})
        program = outcome.job.program
        index = self._number_of[program.task_hash]
        self._take(self.states[index], outcome)
        order.waiting.discard(program.hash)
        order.done += 1
        if is_untuned(program):
            if self.untuned_s is not None and not self.curve.points:
                self._note(self.states[index], task="")
            return
        self.costs.trials += 1
        self.costs.measurements += 1
        self._measured[index].append(program.hash)
        if order.index is not None:
            member.seen[index].add(program.hash)
        if outcome.latency_s is not None:
            order.worked += 1
            self._commit(index, outcome, taken.record)
        elif not order.error:
            order.error = f"{outcome.status}: {outcome.error}"

    def _commit(self, index: int, outcome: Outcome, record: Any) -> None:
        tuner, job, latency_s = self._tuners[index], outcome.job, outcome.latency_s
        assert latency_s is not None
        self._learning.measured(index, job, latency_s)
        if record is not None:
            self._store.commit_record(tuner, record)
        elif job.space is not None:
            try:
                self._store.commit(tuner, tuner.replay(job.program, job.space), latency_s)
            except ProgramError as err:
                logger.warning("not in the database: %s", err)

    def _ended(self, member: Member, ended: Ended) -> None:
        order = member.orders.pop(ended.order)
        member.lives, member.cpu_s = LIVES, ended.cpu_s
        self._elsewhere_s = self._buried_s + sum(m.cpu_s for m in self._members)
        self._learning.learned(member, ended.learned)
        if order.index is not None:
            state = self.states[order.index]
            # A resumed search proposes what was measured before once more: such a round says nothing.
            if not state.finished and (order.done or order.dropped):
                state.end_round(order.worked)
                self._say_if_lost(state, order.error)
            self._note(state)

    def _died(self, member: Member) -> None:
        """Start a worker anew; what it had under way goes back to all."""
        reason = member.shard.exit_reason()
        number = member.config.number
        logger.warning("worker %d of the tuning died (%s): its work goes back", number, reason)
        member.shard.close()
        for order in member.orders.values():
            self._loose.extend(order.jobs[h] for h in order.waiting if h in order.jobs)
            for digest in order.waiting - set(order.jobs):
                # as if it had never been proposed
                self._known.pop(digest, None)
            if order.searching and order.index is not None:
                self._deaths[order.index] += 1
                if self._deaths[order.index] >= _DEADLY:
                    why = f"its search ended {_DEADLY} workers, last {reason}"
                    self._give_up(self.states[order.index], why)
        self._holder = {i: holder for i, holder in self._holder.items() if holder != number}
        self._learning.died(member)
        self._buried_s += member.cpu_s
        self._members.remove(member)
        if member.lives > 1:
            again = Member(member.config, self._start(member.config), lives=member.lives - 1)
            self._members.append(again)
        elif not self._members:
            raise TunerError(
                f"no worker of the tuning stays alive, the last one {reason}; what was measured is kept: "
                "go on with --resume"
            )

    def _give_up(self, state: TaskState, why: str) -> None:
        """End a task, once."""
        if not state.finished:
            state.finished = why
            self._say_if_lost(state)
