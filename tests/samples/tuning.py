"""Tuning without measuring: an engine whose latencies are a function of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.tuner.config import Objective, TuneConfig
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.results import TuneReport
from cdmpp.tuner.tuning import tune_tasks
from tests.samples.programs import matmul_task

#: A search that takes a third of a second a round.
SEARCH = {"population": 24, "generations": 1}


def tune_config(trials: int, **options: Any) -> TuneConfig:
    """A small search beside the analytical estimate."""
    limits = {key: options.pop(key) for key in ("max_measurements", "budget_s", "energy_budget_j") if key in options}
    settings = {"predictor": None, "trim": None, "batch": 6, **SEARCH, **options}
    return TuneConfig(Objective(trials, **limits), **settings)


def tuned(
    engine: FakeEngine, out: Path, trials: int, *sizes: int, options: Mapping[str, Any] | None = None, **more: Any
) -> TuneReport:
    """Tune products of matrices (one of 32 x 32 if no size is given) with a made-up engine.

    `options` are those of :func:`tune_config`, `more` those of :func:`~cdmpp.tuner.tuning.tune_tasks`."""
    tasks = [(matmul_task(n), 1.0) for n in sizes or (32,)]
    config = tune_config(trials, **(options or {}))
    with Measurer(engine) as measurer:
        return tune_tasks("toy", tasks, out=out, config=config, measurer=measurer, **more)


def kept_untuned(report: TuneReport) -> int:
    """Tasks that no program was faster than: the database has what they run as untuned besides."""
    return sum(task.used == "untuned" for task in report.tasks)


def made_up_latency_s(digest: str) -> float:
    """Between 1 and 100 us, by the program's hash; no two programs are as fast as each other."""
    return 1e-6 * (1 + int(digest[:4], 16) % 100 + int(digest[4:], 16) / 16 ** len(digest[4:]))


def outcome_of(job: BuildJob, latency_s: float | None, status: str = "run_error") -> Outcome:
    """An outcome as the engine gives it; `status` where there is no latency."""
    meta = {"build_s": 0.9, "build_cpu_s": 0.5, "run_s": 0.1}
    if latency_s is None:
        return Outcome(job, status, error="made up", meta=meta)
    return Outcome(job, "ok", latency_s, (latency_s,) * 4, 0.0, meta=meta)


def interrupt_after(rounds: int) -> Callable[[Any], None]:
    """A tuning's progress that is Ctrl-C after some rounds."""
    left = iter(range(rounds - 1))

    def progress(_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


class FakeEngine:
    """Answers in `delay_s` a program; `latency_s` gives the seconds of a program's hash, None for a failure."""

    def __init__(self, latency_s: Callable[[str], float | None] = made_up_latency_s, delay_s: float = 0.0) -> None:
        self._latency_s, self._delay_s = latency_s, delay_s
        self.measured: list[str] = []
        self.cancelled = threading.Event()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled.set()

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        for job in jobs:
            if self.cancelled.is_set():
                return
            if job is None:
                time.sleep(0.001)
                continue
            time.sleep(self._delay_s)
            self.measured.append(job.program.hash)
            yield self.outcome(job)

    def outcome(self, job: BuildJob) -> Outcome:
        return outcome_of(job, self._latency_s(job.program.hash))

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each program was measured."""
        return {digest: self.measured.count(digest) for digest in self.measured}
