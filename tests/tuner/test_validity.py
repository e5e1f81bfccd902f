"""Validity: what the model learns and says of devices it never saw, and what it does to a tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from cdmpp.dataset import Dataset, Record, Split
from cdmpp.device import get_device
from cdmpp.errors import DatasetError, PredictorError, ProfilerError, ProgramError
from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.program.ast import LEAF_FEATURES, CompactAST, compact_ast, compact_asts
from cdmpp.program.ast.store import save_asts
from cdmpp.program.space import Rebuilder
from cdmpp.program.types import Program, Task
from cdmpp.tuner import validity
from cdmpp.tuner.candidates import TaskTuner
from cdmpp.tuner.cost_model import GuardedModel
from cdmpp.tuner.results import DATASET_FOLDER
from tests.samples.programs import matmul_task
from tests.samples.tuning import SEARCH, FakeEngine, made_up_latency_s, outcome_of, tuned

from cdmpp.tuner.validity import (  # isort: skip
    LIMITS, VALIDITY_FEATURES, OnlineValidity, ValidityData, ValidityGuard, ValidityModel, initial_population,
    limits_of, make_guard, pooled, read_validity, train_validity, validity_features,
)  # fmt: skip

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("on_zen3")


def ast(rng: np.random.Generator, shared: float, threads: float) -> CompactAST:
    """Two leaves of a kernel with some shared memory and threads; all else is noise."""
    leaves = rng.integers(0, 64, (2, len(LEAF_FEATURES))).astype(np.float32)
    for name, value in {"program_shared": shared, "program_local": 64.0, "thread_idx": threads}.items():
        leaves[:, LEAF_FEATURES.index(name)] = value
    return CompactAST(leaves, np.array([1, 4], dtype=np.int32), 6)


def made_up(limit_kb: dict[str, float], n: int = 120, seed: int = 0) -> ValidityData:
    """Programs of four tasks that work where their shared memory is within a device's limit."""
    rng = np.random.default_rng(seed)
    asts, rows = {}, []
    for i in range(n):
        shared = float(rng.choice([4, 16, 40, 60, 90, 150])) * 1024
        asts[f"p{i}"] = ast(rng, shared, float(rng.choice([64, 128, 256])))
        rows += [(f"p{i}", f"t{i % 4}", device, shared <= kb * 1024) for device, kb in limit_kb.items()]
    return ValidityData(pd.DataFrame(rows, columns=["program", "task", "device", "valid"]), asts)


def probabilities(model: ValidityModel, data: ValidityData) -> np.ndarray:
    return expit(model.log_odds(data.features))


def brier(p: np.ndarray, valid: np.ndarray) -> float:
    return float(np.mean((p - valid) ** 2))


def test_features_are_pooled_leaves_and_what_is_asked_over_the_limits() -> None:
    programs = [ast(np.random.default_rng(i), 24576.0, 512.0) for i in range(3)]
    features = validity_features(programs, "sm_86")

    def values(name: str) -> np.ndarray:
        return features[:, VALIDITY_FEATURES.index(name)]

    iterations = [program.column("iterations").astype(np.float64) for program in programs]
    assert values("sum_iterations") == pytest.approx(np.log1p([own.sum() for own in iterations]), rel=1e-6)
    assert values("max_iterations") == pytest.approx(np.log1p([own.max() for own in iterations]), rel=1e-6)
    assert values("program_shared") == pytest.approx(np.full(3, np.log1p(24576.0)))
    assert values("demand_shared") == pytest.approx(np.full(3, np.log(0.5)))
    assert values("demand_threads") == pytest.approx(np.full(3, np.log(0.5)))
    assert values("demand_shared_optin")[0] == pytest.approx(np.log(24576 / (99 * 1024)), rel=1e-5)
    assert values("demand_local_registers")[0] == pytest.approx(np.log(16 / 255), rel=1e-5)
    assert values("demand_block_local_registers")[0] == pytest.approx(np.log(512 * 16 / 65536), rel=1e-5)
    assert np.isnan(values("estimate_s")).all(), "an architecture has no clock"
    assert not any(name.startswith("limit_") for name in VALIDITY_FEATURES[: pooled(features).shape[1]])


def test_limits_come_from_the_architecture() -> None:
    assert limits_of(get_device("rtx-2080-ti")) == limits_of("sm_75")
    assert limits_of("sm_75")["async_copies"] == 0 and limits_of("sm_86")["async_copies"] == 1
    for device, is_gpu in (("mi250x", 1), ("xeon-cascadelake-2.5ghz@1", 0)):
        known = list(limits_of(get_device(device)).values())
        assert known[0] == is_gpu and np.isnan(known[1:]).all() and len(known) == len(LIMITS)
    with pytest.raises(ProfilerError, match="unknown architecture"):
        limits_of("sm_1")


def test_it_learns_a_limit_of_tasks_it_has_not_seen() -> None:
    data = made_up({"sm_75": 48, "sm_86": 48}, n=240)
    split = Split.parse("by_task:test=0.25;valid=0;seed=1", data.table)
    model = ValidityModel().fit(data, split.train)
    p, valid = probabilities(model, data)[split.test], data.valid[split.test]
    assert p[valid].min() > p[~valid].max() and brier(p, valid) < 0.02
    again = ValidityModel().fit(data, split.train)
    assert np.array_equal(probabilities(again, data)[split.test], p), "the same rows give the same model"


def test_what_it_learned_of_two_devices_holds_on_a_third_with_other_limits() -> None:
    """Limits differ between devices: only what is asked relative to them tells."""
    model = ValidityModel().fit(made_up({"sm_70": 96.0, "sm_75": 64.0}, n=240))
    unseen = made_up({"sm_80": 163.0}, seed=1)
    assert unseen.valid.all()
    assert (probabilities(model, unseen) > 0.5).mean() > 0.8
    # a device learns from its own records and its architecture's, where there are some
    data = made_up({"sm_75": 48, "sm_86": 48, "rtx-2080-ti": 48}, n=10)
    assert set(data.of(get_device("rtx-2080-ti")).table["device"]) == {"sm_75", "rtx-2080-ti"}
    assert len(data.of(get_device("h200"))) == 30


def test_rows_that_are_all_alike_give_a_constant() -> None:
    data = made_up({"sm_75": 1000}, n=18)
    model = ValidityModel().fit(data)
    assert probabilities(model, data) == pytest.approx([19 / 20] * 18)
    with pytest.raises(PredictorError, match="needs rows"):
        model.fit(data, np.zeros(0, dtype=np.int64))


def dataset_of(path: Path, records: list[tuple[str, str, float | None]]) -> Path:
    """A dataset with ASTs and (program, status, latency) on one device."""
    rng = np.random.default_rng(0)
    with Dataset.create(path) as dataset:
        dataset.add_task(Task("t0", "toy", "{}", {"toy": 1.0}, 1.0, 1.0))
        for program, status, latency_s in records:
            origin = "unscheduled" if program == "t0" else "random"
            dataset.add_program(Program(program, "t0", None, "", origin))
            dataset.add_record(Record(program, "rtx-2080-ti", status, latency_s))
        dataset.finalize()
    save_asts(path / "asts.parquet", {program: ast(rng, 1.0, 1.0) for program, _, _ in records})
    return path


def test_records_become_rows(tmp_path: Path) -> None:
    records = [
        ("a", "ok", 1e-3), ("b", "build_error", None), ("c", "run_timeout", None), ("c", "ok", 1e-3),
        ("d", "device_lost", None), ("t0", "ok", 1e-3), ("b", "run_error", None),
    ]  # fmt: skip
    data = read_validity([dataset_of(tmp_path / "d", records)])
    assert dict(zip(data.table["program"], data.valid, strict=True)) == {"a": True, "b": False, "c": True}
    for lost in ([], [dataset_of(tmp_path / "lost", [("a", "device_lost", None)])]):
        with pytest.raises(DatasetError, match="to learn validity from"):
            read_validity(lost)


@pytest.mark.skipif(not (REPOSITORY / "data" / "validity-cuda").is_dir(), reason="no validity data")
def test_what_ships_was_judged_for_architectures(tmp_path: Path) -> None:
    data = read_validity([REPOSITORY / "data" / "validity-cuda"])
    assert len(data) > 50_000 and set(data.table["device"]) == {"sm_70", "sm_75", "sm_80", "sm_86", "sm_90"}
    assert 0.4 < data.valid.mean() < 0.6
    shipped = make_guard("default", get_device("h200"), 0).validity.model
    assert shipped is not None
    own = data.of(get_device("h200"))
    right = (shipped.log_odds(own.features) > 0) == own.valid
    assert right.mean() > 0.9, "the model that ships learned from them"
    (tmp_path / "validity.parquet").write_bytes(b"PAR1")
    (tmp_path / "programs").symlink_to(REPOSITORY / "data" / "validity-cuda" / "programs")
    with pytest.raises(DatasetError, match="is damaged"):
        read_validity([tmp_path])


def test_a_session_teaches_what_fails_here() -> None:
    """Without a model nine of ten work; then all with more than 48 KB fail, and others that were not seen are told apart."""
    device = get_device("rtx-2080-ti")
    seen, unseen = (made_up({"sm_75": 48}, n=60, seed=s) for s in (0, 1))
    online = OnlineValidity(None, device)
    features = [online.features([d.asts[p] for p in d.table["program"]]) for d in (seen, unseen)]
    assert online.predict(features[1]) == pytest.approx(np.full(60, 0.9))
    online.learn(list(seen.table["program"]), features[0], seen.valid)
    p = online.predict(features[1])
    assert p[unseen.valid].mean() > 0.8 > 0.4 > p[~unseen.valid].mean()
    assert len(online) == 60


def test_a_session_corrects_a_model_that_is_wrong_and_no_other() -> None:
    data = made_up({"sm_75": 48}, n=200)
    wrong = ValidityData(data.table.assign(valid=~data.valid), data.asts)
    online = OnlineValidity(ValidityModel().fit(wrong), get_device("rtx-2080-ti"))
    features = online.features(list(data.asts.values()))
    before, works = online.predict(features), np.flatnonzero(data.valid)[:20]
    online.learn([f"p{i}" for i in works], features[works], [True] * 20)
    assert np.array_equal(online.predict(features), before), "without failures it stays as it is"
    online.learn([f"p{i}" for i in range(100)], features[:100], data.valid[:100])
    assert brier(online.predict(features[100:]), data.valid[100:]) < 0.5 * brier(before[100:], data.valid[100:])


def grid() -> np.ndarray:
    """Four clouds of 25 points."""
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]])
    return np.concatenate([c + rng.normal(0, 0.3, (25, 2)) for c in centres])


def test_first_programs_are_likely_fast_and_of_all_clusters() -> None:
    z, p, log_s = grid(), np.full(100, 0.9), np.arange(100.0)
    p[:25] = 0.1
    rows = initial_population(z, p, 3)
    assert sorted(rows // 25) == [1, 2, 3]
    assert rows.dtype == np.int64 and np.array_equal(rows, initial_population(z, p, 3))
    assert (initial_population(z, np.ones(100), 4, log_s=log_s) < 25).all()
    assert set(initial_population(z, np.ones(100), 30, log_s=log_s)) == set(range(30))
    # where little is likely or different, they are filled up
    p = np.linspace(0.01, 0.4, 100)
    assert set(initial_population(grid(), p, 5)) == {95, 96, 97, 98, 99}
    p[0] = 0.9
    assert 0 in initial_population(grid(), p, 5)
    assert sorted(initial_population(grid()[:3], np.ones(3), 8)) == [0, 1, 2]
    assert len(set(initial_population(np.ones((20, 3)), np.ones(20), 5))) == 5
    some = initial_population(np.repeat(grid()[[0, 30]], 10, axis=0), np.ones(20), 6)
    assert len(set(some)) == 6 and set(some // 10) == {0, 1}


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
    """Programs fail by :func:`score`, but for what runs untuned."""

    def __init__(self, works: Callable[[float], bool], status: str = "run_error") -> None:
        super().__init__()
        self._works, self._status, self._rebuild = works, status, Rebuilder()

    def outcome(self, job: BuildJob) -> Outcome:
        works = job.space is None or self._works(score(compact_ast(self._rebuild(job.program, job.task, job.space))))
        return outcome_of(job, made_up_latency_s(job.program.hash) if works else None, self._status)


def small(tile_points: float) -> bool:
    return tile_points <= 64


GUARDED = {"validity": "online"}


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Tunings have a guard that knows that large tiles fail."""
    knowing = Oracle(small)
    monkeypatch.setattr(validity, "SAMPLED", 48)
    monkeypatch.setattr(validity, "make_guard", lambda *_: ValidityGuard(knowing))
    return knowing


@pytest.mark.parametrize("cost_model", ["cdmpp", "xgb", "random"])
def test_what_will_not_run_is_not_measured(tmp_path: Path, oracle: Oracle, cost_model: str) -> None:
    options = {"cost_model": cost_model}
    report = tuned(FailingEngine(small), tmp_path / "t", 24, options=GUARDED | options)
    assert report.costs.failures == 0 and report.costs.measurements > 12
    assert report.costs.trials == 24
    if cost_model == "random":
        assert tuned(FailingEngine(small), tmp_path / "without", 24, options=options).costs.failures >= 4


def test_the_first_round_is_the_guards_choice(tmp_path: Path, oracle: Oracle, tuner: TaskTuner) -> None:
    engine = FailingEngine(small)
    tuned(engine, tmp_path / "t", 6, options=GUARDED)
    chosen = [c.hash for c in ValidityGuard(oracle).initial(tuner, 6)]
    assert engine.measured[1:] == chosen, "after the unscheduled task"
    assert len(set(chosen)) == 6


def test_what_failed_before_is_known_after_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device("this-cpu@1")
    guards = [make_guard("online", device, 0) for _ in range(2)]
    given = iter(guards)
    monkeypatch.setattr(validity, "make_guard", lambda *_: next(given))
    tuned(FailingEngine(small), tmp_path / "t", 12, options=GUARDED)
    tuned(FailingEngine(small), tmp_path / "t", 12, options=GUARDED, resume=True)
    measured = Dataset.open(tmp_path / "t" / DATASET_FOLDER).records
    assert len(guards[0].validity) == len(guards[1].validity) == (measured["origin"] == "search").sum()


def test_a_lost_device_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[Any] = []
    monkeypatch.setattr(ValidityGuard, "learn", lambda self, *args: learned.append(args))
    tuned(FailingEngine(lambda _: False, "device_lost"), tmp_path / "t", 6, options=GUARDED)
    assert learned == []


@pytest.fixture(scope="module")
def tuner(on_zen3: None) -> TaskTuner:
    return TaskTuner(matmul_task(32), get_device("this-cpu@1"), 1, **SEARCH)


def test_the_likeliest_are_measured_where_nothing_is_likely(tuner: TaskTuner) -> None:
    guard = ValidityGuard(Oracle(lambda _: False))
    measures = [c.measure for c in tuner.sample(6, 0)]
    assert guard.worth(measures).sum() == 2
    assert guard.worth(measures[:1]).all()
    assert len(guard.worth([])) == 0


def test_scores_of_the_unlikely_are_0_and_never_negative(tuner: TaskTuner) -> None:
    guard = ValidityGuard(Oracle(small))
    candidates = tuner.sample(24, 0)
    measures = [c.measure for c in candidates]
    p = guard.probability(measures)
    assert set(np.round(p, 2)) == {0.05, 0.95}
    assert (guard.scores(measures, np.full(24, -0.1)) == 0).all()

    class Ones:
        def predict(self, context: Any, candidates: Any) -> Any:
            return np.ones(len(candidates))

    assert np.allclose(GuardedModel(Ones(), guard).predict(tuner.context, measures), np.where(p > 0.5, 0.95, 0.0))


def test_what_cannot_be_read_counts_as_valid(tuner: TaskTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = ValidityGuard(Oracle(lambda _: False))
    measures = [c.measure for c in tuner.sample(4, 0)]
    bad = measures[1].sch.mod["main"]

    def refusing(funcs: Sequence[Any]) -> list[CompactAST]:
        if any(func.same_as(bad) for func in funcs):
            raise ProgramError("made up")
        return compact_asts(funcs)

    monkeypatch.setattr("cdmpp.tuner.candidates.compact_asts", refusing)
    assert guard.probability(measures) == pytest.approx([0.05, 1.0, 0.05, 0.05])
    guard.learn(measures, [False] * 4)
    assert len(guard.validity) == 3


def test_what_a_guard_is_made_from(tmp_path: Path) -> None:
    device = get_device("rtx-2080-ti")
    assert make_guard("online", device, 0).validity.model is None
    records = [(f"p{i}", "ok" if i % 3 else "build_error", 1e-3 if i % 3 else None) for i in range(30)]
    folder = dataset_of(tmp_path / "d", records)
    for source in (folder, train_validity([folder], device)):
        model = make_guard(source, device, 0).validity.model
        assert model is not None and model.constant_ == pytest.approx(np.log(21 / 11)), "of 30 rows 20 are valid"
    with pytest.raises(DatasetError, match="does not exist"):
        make_guard(tmp_path / "nothing", device, 0)
