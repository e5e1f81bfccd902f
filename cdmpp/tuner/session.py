"""The tuning of a network's tasks: propose, drop, measure, learn, until an objective is reached."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdmpp.errors import TunerError
from cdmpp.tuner.ledger import Ledger, Progress
from cdmpp.tuner.objective import Costs, Objective
from cdmpp.tuner.scheduler import next_task
from cdmpp.tuner.surplus import Surplus
from cdmpp.tuner.trimmer import Trimmer, worth_measuring

if TYPE_CHECKING:
    from cdmpp.profiler.engine import Outcome
    from cdmpp.program.types import Task
    from cdmpp.tuner.energy import EnergyCounter
    from cdmpp.tuner.measure import Measurer
    from cdmpp.tuner.store import TuningStore
    from cdmpp.tuner.task_tuner import Candidate, TaskTuner
    from cdmpp.tuner.validity import ValidityGuard

logger = logging.getLogger(__name__)

#: Rounds of different tasks under way at a time: one is searched for while another is measured.
_DEPTH = 2


@dataclass
class _Round:
    """Candidates of one task on their way through measuring.

    ``candidates`` are those that are measured, ``dropped`` how many are not; ``proposed`` are MetaSchedule's own objects,
    none where the candidates are not of its search.
    """

    index: int
    candidates: list[Candidate]
    futures: list[Future[Outcome]]
    dropped: int
    proposed: list[Any]


class TuningSession(Ledger):
    """Tunes tasks with one cost model.

    Parameters
    ----------
    tuners
        One a task.
    weights
        How often the network runs each.
    cost_model
        A MetaSchedule cost model.
    store
        Where everything measured goes; what it holds already is not measured again.
    measurer
        What measures; running.
    objective
        When to stop.
    trimmer
        Drops candidates before they are built; None drops none.
    guard
        Chooses first candidates and drops what will not run; None does neither.
    batch
        Candidates of a round.
    first
        Programs of earlier tunings to measure before any search, by task number, best first.
    progress
        Called after every round.
    clock
        Gives seconds.
    energy
        Counts the device's energy; None where nothing does.
    """

    def __init__(
        self,
        tuners: Sequence[TaskTuner],
        weights: Sequence[float],
        cost_model: Any,
        store: TuningStore,
        measurer: Measurer,
        objective: Objective,
        *,
        trimmer: Trimmer | None = None,
        guard: ValidityGuard | None = None,
        batch: int = 16,
        first: Mapping[int, Sequence[Candidate]] | None = None,
        progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        energy: EnergyCounter | None = None,
    ) -> None:
        super().__init__(tuners, weights, store, objective, progress=progress, clock=clock, energy=energy)
        if batch < 1:
            raise TunerError(f"a round needs one candidate at least, got {batch}")
        self._model, self._measurer, self._trimmer, self._batch = cost_model, measurer, trimmer, batch
        self._guard, self._surplus = guard, Surplus(trimmer, batch)
        self._first = {i: list(candidates) for i, candidates in (first or {}).items()}
        self._started: set[int] = set()

    def run(self) -> str:
        """Tune until the objective is reached, or until there is nothing more to try; says which."""
        self._begin()
        self._recall()
        self._measure_untuned()
        under_way: deque[_Round] = deque()
        reason = None
        while reason is None:
            self._tick()
            planned = self._planned(under_way)
            reason = self._objective.reached(planned, self.curve)
            if reason is not None:
                break
            index = next_task(self.states, [r.index for r in under_way])
            if index is None and not under_way:
                reason = "nothing more to try"
                break
            if index is not None:
                begun = self._begin_round(index, planned)
                if begun is not None:
                    under_way.append(begun)
            if under_way and (index is None or len(under_way) >= _DEPTH):
                self._end_round(under_way.popleft())
        for begun in under_way:
            self._end_round(begun)
        self._tick()
        return reason

    # -- rounds ----------------------------------------------------------------------------------------------

    def _planned(self, under_way: Sequence[_Round]) -> Costs:
        """Costs with what is under way."""
        return self._with(sum(len(r.candidates) for r in under_way), sum(r.dropped for r in under_way))

    def _begin_round(self, index: int, planned: Costs) -> _Round | None:
        """Search, drop, and hand the rest over; None where nothing is left to measure."""
        candidates = self._first.pop(index, None) or self._initial(index)
        proposed: list[Any] = []
        if candidates is None:
            candidates, proposed = self._search(index)
            if not candidates:
                self.states[index].finished = "its space gives no more valid programs"
                self._say_if_lost(self.states[index])
                return None
        candidates = [c for c in candidates if c.hash not in self._known]
        candidates = candidates[: max(0, self._objective.trials - planned.trials)]
        kept = self._worth(index, candidates)
        dropped = len(candidates) - len(kept)
        kept = kept[: self._objective.room(planned, len(kept))]
        self._known.update((c.hash, None) for c in kept)
        begun = _Round(index, kept, self._measurer.submit([c.job for c in kept]), dropped, proposed)
        if kept:
            return begun
        self._end_round(begun)
        return None

    def _initial(self, index: int) -> list[Candidate] | None:
        """A task's first candidates by the guard; None where it has none to give, or the task was begun."""
        if self._guard is None or index in self._started or self.states[index].measured:
            return None
        self._start(index)
        return self._guard.initial(self._tuners[index], self._batch, self._model) or None

    def _start(self, index: int) -> None:
        from cdmpp.tuner.cost_model import GuardedModel

        model = self._model if self._guard is None else GuardedModel(self._model, self._guard)
        self._tuners[index].start(self._store.database, model, self._surplus.wanted)
        self._started.add(index)

    def _search(self, index: int) -> tuple[list[Candidate], list[Any]]:
        """A round's candidates, none where the space gives none, and what MetaSchedule proposed for it."""
        if index not in self._started:
            self._start(index)
        tuner, best_s = self._tuners[index], self.states[index].latency_s
        left = self._surplus.take(index, tuner.context, best_s)
        if left:
            return left, []
        found = tuner.propose() or []
        return self._surplus.share(index, tuner.context, found, best_s), [c.measure for c in found]

    def _worth(self, index: int, candidates: list[Candidate]) -> list[Candidate]:
        """Without the candidates that will not run or cannot win."""
        measures, best_s = [c.measure for c in candidates], self.states[index].latency_s
        context = self._tuners[index].context
        worth = worth_measuring(self._guard, self._trimmer, context, measures, best_s)
        return [c for c, good in zip(candidates, worth, strict=True) if good]

    def _end_round(self, begun: _Round) -> None:
        """Wait for the outcomes, as long as the budget allows, and learn from them."""
        from cdmpp.tuner.metaschedule import runner_result

        state, tuner = self.states[begun.index], self._tuners[begun.index]
        self.costs.saved_s += begun.dropped * state.spent_s / max(1, state.measured)
        done: list[tuple[Candidate, Outcome]] = []
        for candidate, outcome in zip(begun.candidates, self._outcomes(begun.futures), strict=True):
            if outcome is None:
                continue
            self._take(state, outcome)
            if outcome.latency_s is not None:
                self._store.commit(tuner, candidate, outcome.latency_s)
            done.append((candidate, outcome))
        self.costs.trials += len(done) + begun.dropped
        self.costs.measurements += len(done)
        self.costs.dropped += begun.dropped
        state.dropped += begun.dropped
        if done:
            results = [runner_result(outcome) for _, outcome in done]
            self._model.update(tuner.context, [c.measure for c, _ in done], results)
            self._learn_validity(tuner, [(c, o.latency_s) for c, o in done if o.status != "device_lost"])
        if begun.proposed:
            tuner.tell(begun.proposed, no_results(begun.proposed))
        # A resumed search proposes what was measured before once more: such a round says nothing.
        if done or begun.dropped:
            state.end_round(sum(outcome.latency_s is not None for _, outcome in done))
            self._say_if_lost(state, next((f"{o.status}: {o.error}" for _, o in done if o.error), ""))
        self._note(state)

    def _learn_validity(self, tuner: TaskTuner, pairs: Sequence[tuple[Candidate, float | None]]) -> None:
        if self._guard is not None and pairs:
            worked = [latency_s is not None for _, latency_s in pairs]
            self._guard.learn(tuner.context, [c.measure for c, _ in pairs], worked)

    def _outcomes(self, futures: Sequence[Future[Outcome]]) -> Iterator[Outcome | None]:
        """Outcomes as they come in order; None for what the budget leaves no time for."""
        if self._objective.budget_s is not None:
            wait(futures, timeout=self._time_left_s)
            if not all(future.done() for future in futures):
                self._measurer.abort()
        for future in futures:
            try:
                yield future.result()
            except CancelledError:
                yield None

    # -- before the first round --------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Take up what earlier runs into this store measured: the state of every task, and what the model learned."""
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        from cdmpp.tuner.store import replayed

        self._recall_states(self._batch)
        dataset = self._store.dataset
        by_task = {tuner.task.hash: i for i, tuner in enumerate(self._tuners)}
        seen: dict[int, list[tuple[Candidate, float | None]]] = {}
        tuners = {tuner.task.hash: tuner for tuner in self._tuners}
        for tuner, candidate in replayed(dataset, list(self._known), tuners):
            seen.setdefault(by_task[tuner.task.hash], []).append((candidate, self._known[candidate.hash]))
        for index, pairs in seen.items():
            results = [
                RunnerResult(None, "failed before") if latency_s is None else RunnerResult([latency_s], None)
                for _, latency_s in pairs
            ]
            self._model.update(self._tuners[index].context, [c.measure for c, _ in pairs], results)
            self._learn_validity(self._tuners[index], pairs)

    def _measure_untuned(self) -> None:
        """Measure the untuned tasks: what tuning starts from. They are no trials."""
        untuned = [(state, tuner.untuned()) for state, tuner in zip(self.states, self._tuners, strict=True)]
        jobs = [(s, job) for s, job in untuned if job is not None and job.program.hash not in self._known]
        futures = self._measurer.submit([job for _, job in jobs])
        for (state, _), outcome in zip(jobs, self._outcomes(futures), strict=True):
            if outcome is not None:
                self._take(state, outcome)
        if jobs and self.untuned_s is not None and not self.curve.points:
            self._note(self.states[0], task="")


def no_results(measures: Sequence[Any]) -> list[Any]:
    """MetaSchedule's search counts results and reads none: its parents are the database's."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return [RunnerResult(None, "not looked at") for _ in measures]


def order_by_work(tasks: Sequence[tuple[Task, float]]) -> list[tuple[Task, float]]:
    """Tasks with their weights, those first that the network spends most operations and bytes on."""
    return sorted(tasks, key=lambda pair: -pair[1] * (pair[0].flops + pair[0].bytes))
