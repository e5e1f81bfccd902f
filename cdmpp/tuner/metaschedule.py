"""The profiler as MetaSchedule's builder and runner, for ``ms.tune_tir`` and the like.

What the builder returns as the path of a built file stands for a program that has been handed to the profiler; the
runner waits for its outcome. Building and measuring overlap, and a failure of either comes back from the runner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from cdmpp.program.tvm_env import import_tvm
from cdmpp.tuner.measure import Measurer, job_of_module

import_tvm()

from tvm.ir.utils import derived_object  # noqa: E402
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder  # noqa: E402
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult  # noqa: E402

if TYPE_CHECKING:
    from cdmpp.profiler.engine import Outcome

#: Programs handed over, by the path that stands for a built file.
Tickets = dict[str, "Future[Outcome]"]


def runner_result(outcome: Outcome) -> Any:
    """An outcome as MetaSchedule takes it: the label in seconds, or the reason why there is none."""
    if outcome.latency_s is None:
        return RunnerResult(None, f"{outcome.status}: {outcome.error}")
    return RunnerResult([outcome.latency_s], None)


def builder_and_runner(measurer: Measurer) -> tuple[Any, Any]:
    """A MetaSchedule Builder and Runner that measure with a running :class:`~cdmpp.tuner.measure.Measurer`.

    What is measured is compiled for the measurer's target, whatever target the tuning names.
    """
    tickets: Tickets = {}
    return EngineBuilder(measurer, tickets), EngineRunner(tickets)


@derived_object
class EngineBuilder(PyBuilder):
    """Hands modules over to be built and measured."""

    def __init__(self, measurer: Measurer, tickets: Tickets) -> None:
        super().__init__()
        self._measurer, self._tickets = measurer, tickets

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        """One result an input, at once."""
        jobs = [job_of_module(item.mod) for item in build_inputs]
        results = []
        for future in self._measurer.submit(jobs):
            # A folder of its own: MetaSchedule removes the folder of what it takes for a built file.
            path = tempfile.mkdtemp(prefix="cdmpp-ticket-") + "/program"
            self._tickets[path] = future
            results.append(BuilderResult(path, None))
        return results


@derived_object
class EngineRunner(PyRunner):
    """Waits for the outcomes of what :class:`EngineBuilder` handed over."""

    def __init__(self, tickets: Tickets) -> None:
        super().__init__()
        self._tickets = tickets

    def run(self, runner_inputs: Sequence[Any]) -> list[Any]:
        """One future an input."""
        return [EngineRunnerFuture(self._tickets.pop(str(item.artifact_path))) for item in runner_inputs]


@derived_object
class EngineRunnerFuture(PyRunnerFuture):
    """The outcome of one program."""

    def __init__(self, future: Future[Outcome]) -> None:
        super().__init__()
        self._future = future

    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the outcome."""
        return runner_result(self._future.result())
