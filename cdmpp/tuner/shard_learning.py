"""What the workers of a sharded tuning learn, on its way to the others and to the session's own cost model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdmpp.errors import ProgramError

if TYPE_CHECKING:
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.tuner.online import Row
    from cdmpp.tuner.shard_members import Member
    from cdmpp.tuner.task_tuner import TaskTuner

logger = logging.getLogger(__name__)

#: In place of a worker's number where the worker that learned it has died.
_NOBODY = -1


class SharedLearning:
    """Rows of what workers' cost models learned, with who learned them, and what was measured in this run."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, Row]] = []
        #: What works, by program: its task's number, itself, its seconds.
        self._measured: dict[str, tuple[int, BuildJob, float]] = {}

    def measured(self, index: int, job: BuildJob, latency_s: float) -> None:
        """Take note of a program of a task that works."""
        self._measured[job.program.hash] = (index, job, latency_s)

    def learned(self, member: Member, rows: Sequence[Row]) -> None:
        """Take what a worker's model learned."""
        self._rows.extend((member.config.number, row) for row in rows)

    def news(self, member: Member) -> list[Row]:
        """What others learned since the worker was last told."""
        rows = [row for number, row in self._rows[member.told :] if number != member.config.number]
        member.told = len(self._rows)
        return rows

    def died(self, member: Member) -> None:
        """Who takes the place of a worker has to be told what that one had learned."""
        dead = member.config.number
        self._rows = [(_NOBODY if number == dead else number, row) for number, row in self._rows]

    def teach(self, cost_model: Any, tuners: Sequence[TaskTuner]) -> None:
        """Let the session's cost model know what the workers' learned, and what none of them did.

        That is what changed hands after the last search of its task. TVM's models learn nothing here.
        """
        if not hasattr(cost_model, "model"):
            return
        cost_model.model.add_rows([row for _, row in self._rows])
        known = {digest for _, (_, digest, *_) in self._rows}
        for digest, (index, job, latency_s) in self._measured.items():
            if digest in known or job.space is None:
                continue
            tuner = tuners[index]
            try:
                func = tuner.replay(job.program, job.space).measure.sch.mod["main"]
            except ProgramError as err:
                logger.warning("not learned: %s", err)
                continue
            cost_model.learn(tuner.task.hash, [digest], [func], [latency_s], fit=False)
        cost_model.model.fit()
