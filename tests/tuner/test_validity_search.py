"""Validity in the tuning loop: what is measured first, what is not measured at all, and what a session learns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.cli import main
from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.errors import PredictorError, ProgramError, TunerError
from cdmpp.profiler.build import BuildJob
from cdmpp.profiler.engine import Outcome
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.space import Rebuilder
from cdmpp.tuner import validity_search
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.results import TuneReport
from cdmpp.tuner.store import DATASET_FOLDER
from cdmpp.tuner.task_tuner import TaskTuner
from cdmpp.tuner.tuning import tune_tasks
from cdmpp.tuner.validity_online import OnlineValidity
from cdmpp.tuner.validity_population import initial_population
from cdmpp.tuner.validity_search import GuardedModel, ValidityGuard, make_guard
from tests.samples.programs import matmul_task
from tests.samples.tuning import SEARCH, FakeEngine, made_up_latency_s, outcome_of, tune_config

pytestmark = pytest.mark.usefixtures("on_zen3")

# -- choosing first programs -----------------------------------------------------------------------------------------


def grid() -> np.ndarray:
    """Four clouds of 25 points."""
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]])
    return np.concatenate([c + rng.normal(0, 0.3, (25, 2)) for c in centres])


def test_first_programs_are_valid_and_of_all_clusters() -> None:
    z, p = grid(), np.full(100, 0.9)
    p[:25] = 0.1
    rows = initial_population(z, p, 3)
    assert sorted(rows // 25) == [1, 2, 3]
    assert rows.dtype == np.int64 and np.array_equal(rows, initial_population(z, p, 3))
    assert sorted(initial_population(z, np.ones(100), 4) // 25) == [0, 1, 2, 3]


def test_first_programs_are_of_the_fastest_where_latencies_are_foreseen() -> None:
    z, log_s = grid(), np.arange(100.0)
    rows = initial_population(z, np.ones(100), 4, log_s=log_s, fastest=0.25)
    assert (rows < 25).all()
    assert set(initial_population(z, np.ones(100), 30, log_s=log_s, fastest=0.25)) == set(range(30))


def test_few_likely_ones_are_filled_up_by_the_likeliest() -> None:
    p = np.linspace(0.01, 0.4, 100)
    assert set(initial_population(grid(), p, 5)) == {95, 96, 97, 98, 99}
    p[0] = 0.9
    assert 0 in initial_population(grid(), p, 5)


def test_fewer_programs_than_asked_and_programs_that_are_all_alike() -> None:
    assert sorted(initial_population(grid()[:3], np.ones(3), 8)) == [0, 1, 2]
    rows = initial_population(np.ones((20, 3)), np.ones(20), 5)
    assert len(set(rows)) == 5
    some = initial_population(np.repeat(grid()[[0, 30]], 10, axis=0), np.ones(20), 6)
    assert len(set(some)) == 6 and set(some // 10) == {0, 1}
    assert len(set(initial_population(grid(), np.ones(100), 5, diverse=False))) == 5


# -- a guard that knows, and an engine that fails as it says --------------------------------------------------------


def score(ast: CompactAST) -> float:
    """A made-up property of a program: how much its innermost reduction is unrolled or vectorised."""
    return float(ast.column("tile_points").max())


class Oracle(OnlineValidity):
    """Knows what works."""

    def __init__(self, works: Callable[[float], bool]) -> None:
        super().__init__(None, get_device("this-cpu@1"))
        self._works = works

    def features(self, asts: Sequence[CompactAST]) -> Any:
        return np.array([[score(ast), 1.0] for ast in asts], dtype=np.float32)

    def predict(self, features: Any) -> Any:
        return np.where([self._works(float(row[0])) for row in features], 0.95, 0.05)


class FailingEngine(FakeEngine):
    """Programs fail by :func:`score`."""

    def __init__(self, works: Callable[[float], bool], status: str = "run_error") -> None:
        super().__init__()
        self._works, self._status, self._rebuild = works, status, Rebuilder()

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        from cdmpp.program.ast import compact_ast

        for job in jobs:
            if job is None:
                time.sleep(0.001)
                continue
            self.measured.append(job.program.hash)
            works = job.space is None or self._works(
                score(compact_ast(self._rebuild(job.program, job.task, job.space)))
            )
            latency_s = made_up_latency_s(job.program.hash) if works else None
            yield outcome_of(job, latency_s, self._status)


def small(tile_points: float) -> bool:
    return tile_points <= 64


def tuned(
    engine: FakeEngine, out: Path, trials: int, *sizes: int, guard: Any = "online", **more: Any
) -> TuneReport:
    options = more.pop("options", {})
    with Measurer(engine) as measurer:
        config = tune_config(trials, validity=guard, **options)
        tasks = [(matmul_task(n), 1.0) for n in sizes or (32,)]
        return tune_tasks("toy", tasks, out=out, config=config, measurer=measurer, **more)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Tunings have a guard that knows that large tiles fail."""
    validity = Oracle(small)
    monkeypatch.setattr(validity_search, "make_guard", lambda *_: ValidityGuard(validity, sampled=48))
    return validity


@pytest.mark.parametrize("cost_model", ["cdmpp", "xgb", "random"])
def test_what_will_not_run_is_not_measured(tmp_path: Path, oracle: Oracle, cost_model: str) -> None:
    report = tuned(FailingEngine(small), tmp_path / "t", 24, options={"cost_model": cost_model})
    assert report.costs.failures == 0 and report.costs.measurements > 12
    assert report.costs.trials == 24


def test_without_a_guard_much_of_it_fails(tmp_path: Path) -> None:
    """What the test before is worth."""
    report = tuned(FailingEngine(small), tmp_path / "t", 24, guard=None)
    assert report.costs.failures >= 4


def test_the_first_round_is_the_guards_choice(tmp_path: Path, oracle: Oracle) -> None:
    engine = FailingEngine(small)
    tuned(engine, tmp_path / "t", 6)
    guard = ValidityGuard(oracle, sampled=48)
    tuner = TaskTuner(matmul_task(32), get_device("this-cpu@1"), SEARCH, 1)
    chosen = [c.hash for c in guard.initial(tuner, 6)]
    assert engine.measured[1:] == chosen, "after the unscheduled task"
    assert len(set(chosen)) == 6


def test_a_whole_space_that_fails_is_one_line_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {c.hash for c in TaskTuner(matmul_task(48), get_device("this-cpu@1"), SEARCH, 1).sample(1, 0)}
    assert bad
    of_bad = matmul_task(48).hash

    class Engine(FakeEngine):
        def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
            for job in jobs:
                if job is None:
                    time.sleep(0.001)
                else:
                    self.measured.append(job.program.hash)
                    fails = job.task.hash == of_bad and job.space is not None
                    yield outcome_of(job, None if fails else made_up_latency_s(job.program.hash))

    with caplog.at_level(logging.WARNING):
        report = tuned(Engine(), tmp_path / "t", 60, 32, 48)
    lines = [r.message for r in caplog.records if "given up" in r.message]
    assert len(lines) == 1
    assert "no program worked in 3 rounds (run_error: made up)" in lines[0]
    by_hash = {t.task: t for t in report.tasks}
    assert by_hash[of_bad].best_s is None and by_hash[of_bad].measured < 18, (
        "the guard learns that nothing works"
    )
    assert by_hash[matmul_task(32).hash].best_s is not None
    assert by_hash[matmul_task(32).hash].measured > 12


def test_a_space_that_gives_nothing_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TaskTuner, "propose", lambda self: None)
    monkeypatch.setattr(TaskTuner, "sample", lambda self, n, seed: [])
    with caplog.at_level(logging.WARNING):
        report = tuned(FakeEngine(), tmp_path / "t", 12)
    assert report.stopped == "nothing more to try"
    assert sum("its space gives no more valid programs" in r.message for r in caplog.records) == 1


def test_what_failed_before_is_known_after_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[ValidityGuard] = []
    made = make_guard

    def kept(*args: Any) -> Any:
        guards.append(made(*args))  # type: ignore[arg-type]
        return guards[-1]

    monkeypatch.setattr(validity_search, "make_guard", kept)
    tuned(FailingEngine(small), tmp_path / "t", 12)
    tuned(FailingEngine(small), tmp_path / "t", 12, resume=True)
    measured = Dataset.open(tmp_path / "t" / DATASET_FOLDER).records
    assert len(guards[0].validity) == len(guards[1].validity) == (measured["origin"] == "search").sum()


def test_a_lost_device_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[Any] = []
    monkeypatch.setattr(ValidityGuard, "learn", lambda self, *args: learned.append(args))
    tuned(FailingEngine(lambda _: False, "device_lost"), tmp_path / "t", 6)
    assert learned == []


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuner(on_zen3: None) -> TaskTuner:
    return TaskTuner(matmul_task(32), get_device("this-cpu@1"), SEARCH, 1)


def test_samples_are_distinct_and_hang_on_the_seed(tuner: TaskTuner) -> None:
    hashes = [[c.hash for c in tuner.sample(10, seed)] for seed in (0, 0, 1)]
    assert len(set(hashes[0])) == 10
    assert hashes[0] == hashes[1] != hashes[2]
    for candidate in tuner.sample(2, 3):
        job = candidate.job
        assert job.space is not None and tuner.replay(job.program, job.space).hash == candidate.hash


def test_a_space_of_few_programs_is_sampled_to_its_end() -> None:
    few = TaskTuner(matmul_task(1), get_device("this-cpu@1"), SEARCH, 1)
    found = few.sample(500, 0)
    assert 0 < len(found) < 500


def test_the_likeliest_are_measured_where_nothing_is_likely(tuner: TaskTuner) -> None:
    guard = ValidityGuard(Oracle(lambda _: False), probes=2)
    measures = [c.measure for c in tuner.sample(6, 0)]
    assert guard.worth(tuner.context, measures).sum() == 2
    assert guard.worth(tuner.context, measures[:1]).all()
    assert len(guard.worth(tuner.context, [])) == 0


def test_scores_of_the_unlikely_are_0_and_never_negative(tuner: TaskTuner) -> None:
    guard = ValidityGuard(Oracle(small))
    candidates = tuner.sample(24, 0)
    measures = [c.measure for c in candidates]
    p = guard.probability(tuner.context, measures)
    assert set(np.round(p, 2)) == {0.05, 0.95}
    scores = guard.scores(tuner.context, measures, np.full(24, -0.1))
    assert (scores == 0).all()

    class Ones:
        def predict(self, context: Any, candidates: Any) -> Any:
            return np.ones(len(candidates))

    found = GuardedModel(Ones(), guard).predict(tuner.context, measures)
    assert np.allclose(found, np.where(p > 0.5, 0.95, 0.0))


def test_what_cannot_be_read_counts_as_valid(tuner: TaskTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = ValidityGuard(Oracle(lambda _: False))
    measures = [c.measure for c in tuner.sample(4, 0)]
    bad = measures[1].sch.mod["main"]

    def refusing(funcs: Sequence[Any]) -> list[CompactAST]:
        if any(func.same_as(bad) for func in funcs):
            raise ProgramError("made up")
        return compact_asts(funcs)

    monkeypatch.setattr("cdmpp.tuner.validity_search.compact_asts", refusing)
    assert guard.probability(tuner.context, measures) == pytest.approx([0.05, 1.0, 0.05, 0.05])
    guard.learn(tuner.context, measures, [False] * 4)
    assert len(guard.validity) == 3


def test_settings_it_refuses(tmp_path: Path) -> None:
    validity = Oracle(small)
    with pytest.raises(TunerError, match=r"got 1\.5"):
        ValidityGuard(validity, skip_below=1.5)
    with pytest.raises(TunerError, match="one probe"):
        ValidityGuard(validity, probes=0)
    with pytest.raises(PredictorError, match="holds no validity model"):
        make_guard(tmp_path, get_device("this-cpu@1"), 0)
    assert make_guard(None, get_device("this-cpu@1"), 0) is None
    assert make_guard("online", get_device("this-cpu@1"), 0) is not None


def test_a_folder_without_a_model_is_said_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "mlp", "--device", "this-cpu@1", "--trials", "4", "--out", str(tmp_path / "t")]
    assert main([*command, "--validity", str(tmp_path)]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and "holds no validity model" in err[0]
    assert not (tmp_path / "t").exists()
