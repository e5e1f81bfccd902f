"""The measurer with the real engine and with made-up ones that fail."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from cdmpp.device import get_device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.tuner.config import Objective, TuneConfig
from cdmpp.tuner.measure import ChoosingMeasurer, Measurer, in_time
from tests.samples.programs import as_it_is, matmul_task, quick_engine, sampled, slow_build_task
from tests.samples.tuning import FakeEngine, made_up_latency_s

#: Nothing here depends on how fast the machine is; without an end a failure would hang.
PATIENCE_S = 600.0


def test_outcomes_come_to_whom_they_belong_and_nothing_is_measured_twice() -> None:
    jobs, engine = sampled(matmul_task(), 5), FakeEngine(delay_s=0.05)
    with Measurer(engine) as measurer:
        futures, again = measurer.submit(jobs), measurer.submit(jobs[:2])
    assert all(first is second for first, second in zip(futures, again, strict=False))
    assert len(engine.measured) == 5, "leaving waits for what was submitted"
    for job, future in zip(jobs, futures, strict=True):
        outcome = future.result(timeout=PATIENCE_S)
        assert outcome.job.program.hash == job.program.hash
        assert outcome.latency_s == made_up_latency_s(job.program.hash)


def test_what_compiles_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdmpp.tuner.measure._COMPILE_S", 1.0)
    config = TuneConfig(Objective(8), object_cache=tmp_path)
    jobs = [as_it_is(slow_build_task(10000)), *sampled(matmul_task(), 3)]
    with ChoosingMeasurer(config, get_device("this-cpu@1"), 1, None, 2) as measurer:
        chosen, build_s = measurer.worth(jobs, [True] * 4, None)
        assert not chosen[0] and sum(chosen) == 2 and build_s > 0
        assert measurer.worth(jobs[:2], [True, False], None) == ([True, False], 0.0), "there is nothing to choose"


def test_giving_up_does_not_wait_for_what_is_being_compiled() -> None:
    engine = quick_engine()
    with Measurer(engine) as measurer:
        measurer.submit(sampled(matmul_task(), 1))[0].result(timeout=PATIENCE_S)
        for builder in engine._builders:
            os.kill(builder.pid, signal.SIGSTOP)  # a compilation without an end
        outcomes = list(in_time(measurer, measurer.submit(sampled(matmul_task(48), 12)), 0.5))
    assert outcomes == [None] * 12


class BrokenEngine(FakeEngine):
    """Fails at the second program."""

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        for number, outcome in enumerate(super().run(jobs)):
            if number == 1:
                raise ProfilerError("no space left for shared objects")
            yield outcome


def test_an_engine_that_fails_is_heard_of() -> None:
    jobs = sampled(matmul_task(), 3)
    with pytest.raises(ProfilerError, match="no space left"), Measurer(BrokenEngine()) as measurer:
        futures = measurer.submit(jobs)
        assert futures[0].result(timeout=PATIENCE_S).status == "ok"
        futures[2].result(timeout=PATIENCE_S)
    with Measurer(BrokenEngine()) as measurer:
        with pytest.raises(ProfilerError):
            measurer.submit(jobs)[2].result(timeout=PATIENCE_S)
        with pytest.raises(ProfilerError, match="no space left"):
            measurer.submit(sampled(matmul_task(16), 1))[0].result(timeout=PATIENCE_S)


@pytest.mark.parametrize("by", ["abort", "Ctrl-C"])
def test_giving_up_does_not_wait(by: str) -> None:
    def latency_s(digest: str) -> float:  # the first program takes until the measurer gives up
        engine.cancelled.wait()
        return made_up_latency_s(digest)

    engine = FakeEngine(latency_s)
    measurer = Measurer(engine)
    with pytest.raises(KeyboardInterrupt), measurer:
        futures = measurer.submit(sampled(matmul_task(), 8))
        if by == "abort":
            measurer.abort()
            with pytest.raises(CancelledError):
                futures[-1].result(timeout=PATIENCE_S)
        raise KeyboardInterrupt
    assert all(future.cancelled() for future in futures[1:]) and len(engine.measured) <= 1
    assert not any(t.name == "measurer" for t in threading.enumerate())
