"""Several workers at one tuning: real processes that search, beside a made-up engine and beside the real one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import ProfilerError, TunerError
from cdmpp.predictor.training import TrainResult
from cdmpp.profiler.engine import BuildJob, Outcome, SamplingPlan
from cdmpp.profiler.machine import Worker, usable_cores
from cdmpp.program.types import Task
from cdmpp.tuner import workers
from cdmpp.tuner.measure import device_of_this_machine
from cdmpp.tuner.results import DATASET_FOLDER, TuneReport, json_database
from cdmpp.tuner.tuning import tune_tasks
from cdmpp.tuner.workers import partition, worker_cores
from tests.samples.programs import matmul_task
from tests.samples.tuning import FakeEngine, kept_untuned, tune_config, tuned

pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The processes of workers, in the order in which they were started; two shares fit on every machine."""
    if len(usable_cores()) < 2:
        core = usable_cores()[0]
        monkeypatch.setattr("cdmpp.profiler.machine.usable_cores", lambda: (core, core))
    found: list[Worker] = []
    start = workers._started
    monkeypatch.setattr(workers, "_started", lambda *of: found.append(start(*of)) or found[-1])
    return found


def sharded(
    engine: FakeEngine, out: Path, trials: int, *sizes: int, options: dict[str, Any] | None = None, **more: Any
) -> TuneReport:
    """Tune products of matrices with two workers."""
    return tuned(engine, out, trials, *(sizes or (32, 48)), options={"shards": 2, **(options or {})}, **more)


def records_of(out: Path) -> Any:
    return Dataset.open(out / DATASET_FOLDER).records


@pytest.mark.parametrize("cost_model", ["cdmpp", "xgb"])
def test_two_workers_measure_as_many_as_one(tmp_path: Path, started: list[Worker], cost_model: str) -> None:
    out, engine = tmp_path / "t", FakeEngine()
    report = sharded(engine, out, 26, 32, 40, 48, options={"cost_model": cost_model})
    assert report.stopped == "26 trials" and len(started) == 2
    costs = report.costs
    assert (costs.trials, costs.measurements, costs.failures, costs.dropped) == (26, 26, 0, 0)
    assert costs.build_s == pytest.approx(29 * 0.5), "three unscheduled tasks besides"
    assert costs.search_cpu_s > 0
    records = records_of(out)
    assert len(records) == 29 and records["program"].is_unique, "nothing twice"
    assert set(records["device"]) == {report.device} == {device_of_this_machine("this-cpu@1").name}
    assert sorted(engine.measured) == sorted(records["program"])
    assert len(json_database(out)) == 26 + kept_untuned(report)
    for task in report.tasks:
        of_task = records[(records["task"] == task.task) & (records["origin"] == "search")]
        assert task.measured == len(of_task) > 0, "all tasks had a turn"
        assert task.best_s == pytest.approx(of_task["latency_s"].min())
    latencies = [p.latency_s for p in report.curve]
    assert latencies[0] == report.untuned_s and latencies == sorted(latencies, reverse=True)
    if cost_model == "cdmpp":
        assert (report.learned["records"], report.learned["tasks"]) == (26, 3), "what both have learned"
        assert len(report.learned["workers"]) == 2
    assert not any(worker._process.is_alive() for worker in started)


def test_workers_take_a_predictor_and_drop_what_cannot_win(tmp_path: Path, started: list[Worker], trained: TrainResult) -> None:
    options = {"predictor": trained.predictor, "trim": 0.5, "validity": "online"}
    report = sharded(FakeEngine(), tmp_path / "t", 60, options=options)
    costs = report.costs
    assert 60 >= costs.trials == costs.measurements + costs.dropped and costs.dropped > 0
    assert report.learned["records"] == costs.measurements


class Killer:
    """Kills a worker after some rounds."""

    def __init__(self, started: list[Worker], every: bool = False) -> None:
        self._started, self._every = started, every
        self._killed: set[int] = set()

    def __call__(self, state: Any) -> None:
        if not state.costs.measurements:
            return
        for worker in self._started if self._every else self._started[:1]:
            if worker.pid not in self._killed:
                self._killed.add(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)


def test_a_worker_that_dies_costs_its_batch(tmp_path, started: list[Worker], caplog) -> None:
    out = tmp_path / "t"
    report = sharded(FakeEngine(delay_s=0.01), out, 40, 32, 40, 48, progress=Killer(started))
    assert len(started) == 3, "one in place of the dead"
    assert "worker 0 of the tuning died (killed by signal 9)" in caplog.text
    assert report.costs.trials == 40 and not any(task.finished for task in report.tasks)
    records = records_of(out)
    assert records["program"].is_unique and len(json_database(out)) == 40 + kept_untuned(report)
    assert len(records) == 43, "what was under way is measured again, and what was kept is not"


def test_where_no_worker_lives_what_was_measured_is_kept(tmp_path: Path, started: list[Worker]) -> None:
    out = tmp_path / "t"
    with pytest.raises(TunerError, match="no worker of the tuning stays alive, the last one killed by signal 9"):
        sharded(FakeEngine(delay_s=0.01), out, 400, progress=Killer(started, every=True))
    assert len(started) == 6, "each was started three times"
    before = set(records_of(out)["program"])
    assert before
    engine = FakeEngine()
    assert sharded(engine, out, len(before) + 10, resume=True).costs.trials == len(before) + 10
    assert not before & set(engine.measured)


class FullDisk(FakeEngine):
    """Cannot go on."""

    def outcome(self, job: BuildJob) -> Outcome:
        raise ProfilerError("no space left for shared objects")


def test_what_fails_in_a_worker_is_said_and_ends_all(tmp_path: Path, started: list[Worker]) -> None:
    with pytest.raises(ProfilerError, match="no space left"):
        sharded(FullDisk(), tmp_path / "t", 26)
    assert len(started) == 2 and not any(worker._process.is_alive() for worker in started)
    (tmp_path / "earlier").mkdir()
    with pytest.raises(Exception, match="no dataset"):
        sharded(FakeEngine(), tmp_path / "t", 12, warm_start=[tmp_path / "earlier"])


def test_tasks_are_parted_by_work_and_shares_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def weighing(*flops: float) -> list[tuple[Task, float]]:
        return [(replace(matmul_task(16), flops=each / 2, bytes=0.0), 2.0) for each in flops]

    assert partition(weighing(3, 10, 4, 6), 2) == [[1, 0], [3, 2]], "the heaviest first, to the worker with least work"
    assert partition(weighing(3, 10), 9) == [[1], [0]], "no worker without a task"
    assert sorted(map(len, partition(weighing(0, 0, 0, 0), 2))) == [2, 2]

    monkeypatch.setattr("cdmpp.profiler.machine.usable_cores", lambda: (0, 1, 2, 3))
    one, two = device_of_this_machine("this-cpu@1"), replace(device_of_this_machine("this-cpu@1"), share=2.0)
    assert worker_cores(one, "auto") == ((3,), (2,), (1,), (0,))
    assert worker_cores(two, "auto") == ((2, 3), (0, 1)) == worker_cores(two, 2)
    needs = r"3 shards of .* need 6 cores, this process may use 4"
    for device, number, said in ((two, 3, needs), (one, 0, "one worker at least")):
        with pytest.raises(TunerError, match=said):
            worker_cores(device, number)
    for given, said in (
        ({"shards": "many"}, "'auto', got 'many'"),
        ({"shards": 2, "workers": 2}, "shards or workers, not both"),
    ):
        with pytest.raises(TunerError, match=said):
            tune_config(1, **given)


def test_workers_beside_the_real_engine_keep_to_their_cores(tmp_path: Path, started: list[Worker]) -> None:
    seen: set[frozenset[int]] = set()

    def look(state: Any) -> None:
        alive = [worker.pid for worker in started if worker._process.is_alive()]
        seen.update(frozenset(psutil.Process(pid).cpu_affinity()) for pid in alive)

    config = tune_config(12, shards=2, batch=4, plan=SamplingPlan(min_sample_s=0.0005, min_samples=2, max_samples=4))
    tasks: list[tuple[Task, float]] = [(matmul_task(32), 1.0), (matmul_task(48), 1.0)]
    report = tune_tasks("toy", tasks, out=tmp_path / "t", config=config, progress=look)
    assert report.costs.trials == 12 and all(task.best_s is not None for task in report.tasks)
    assert seen <= {frozenset({core}) for core in usable_cores()} and seen
    assert len(seen) == 2 or len(usable_cores()) < 2
    assert records_of(tmp_path / "t")["program"].is_unique
