"""Several workers at one tuning: threads with made-up engines, and real processes with the real one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import CdmppError, ProfilerError, TunerError
from cdmpp.profiler.build import BuildJob
from cdmpp.profiler.engine import Outcome
from cdmpp.profiler.machine import usable_cores
from cdmpp.profiler.statistics import SamplingPlan
from cdmpp.program.tvm_env import structural_hash
from cdmpp.program.types import Task
from cdmpp.tuner.prepare import device_of_this_machine
from cdmpp.tuner.results import TuneReport
from cdmpp.tuner.shard_messages import Failed, ShardConfig
from cdmpp.tuner.shard_worker import ShardWorker
from cdmpp.tuner.shards import ProcessShard, Shard, shard_cores
from cdmpp.tuner.store import DATASET_FOLDER, json_database
from cdmpp.tuner.tuning import TuneConfig, tune_tasks
from tests.profiler.programs import matmul_task
from tests.tuner.tuner_samples import FakeEngine, made_up_latency_s, tune_config

#: Nothing here depends on how fast the machine is; without an end a failure would hang.
PATIENCE_S = 120.0


def hang_up(connection: Connection) -> None:
    """End the line, as the end of a process does: to close it under a thread that reads is an error there."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


class ThreadShard:
    """A worker as a thread; with an engine that is made up, if there is one."""

    def __init__(self, config: ShardConfig, engine: FakeEngine | None = None) -> None:
        self.connection, self._theirs = multiprocessing.Pipe()
        self._config = config if engine is None else replace(config, engine=lambda _: engine)
        self._reason = "ended"
        self._thread = threading.Thread(target=self._serve, name=f"shard-{config.number}")
        self._thread.start()

    def _serve(self) -> None:
        try:
            ShardWorker(self._theirs, self._config).serve()
        except CdmppError as err:
            with contextlib.suppress(OSError):
                self._theirs.send(Failed(err))
        except RuntimeError as err:
            self._reason = str(err)
        finally:
            hang_up(self._theirs)

    def exit_reason(self) -> str:
        return self._reason

    def close(self) -> None:
        self.connection.close()
        self._thread.join()


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two shares fit on every machine that tests run on; threads are not pinned."""
    monkeypatch.setattr("cdmpp.profiler.machine.usable_cores", lambda: (0, 1, 2, 3))


def sharded(
    out: Path,
    trials: int,
    *sizes: int,
    engines: Callable[[int], FakeEngine] | None = None,
    shards: int = 2,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[TuneReport, list[FakeEngine]]:
    """Tune products of matrices; the engines of the workers that were started, in turn."""
    started: list[FakeEngine] = []

    def start(config: ShardConfig) -> Shard:
        started.append(FakeEngine() if engines is None else engines(len(started)))
        return ThreadShard(config, started[-1])

    tasks = [(matmul_task(n), 1.0) for n in sizes or (32, 48)]
    config = tune_config(trials, shards=shards, **(options or {}))
    return tune_tasks("toy", tasks, out=out, config=config, start_shard=start, **more), started


def records_of(out: Path) -> Any:
    return Dataset.open(out / DATASET_FOLDER).records


@pytest.mark.parametrize("cost_model", ["cdmpp", "xgb"])
def test_two_workers_measure_as_many_as_one(tmp_path: Path, cost_model: str) -> None:
    out = tmp_path / "t"
    report, engines = sharded(out, 26, 32, 40, 48, options={"cost_model": cost_model})
    assert report.stopped == "26 trials"
    costs = report.costs
    assert (costs.trials, costs.measurements, costs.failures, costs.dropped) == (26, 26, 0, 0)
    assert costs.build_s == pytest.approx(29 * 0.5), "three unscheduled tasks besides"
    records = records_of(out)
    assert len(records) == 29 and records["program"].is_unique, "nothing twice"
    assert sorted(h for engine in engines for h in engine.measured) == sorted(records["program"])
    assert all(engine.measured for engine in engines), "both had work"
    assert len(json_database(out)) == 26
    for task in report.tasks:
        of_task = records[(records["task"] == task.task) & (records["origin"] == "search")]
        assert task.measured == len(of_task) > 0
        assert task.best_s == pytest.approx(of_task["latency_s"].min())
    latencies = [p.latency_s for p in report.curve.points]
    assert latencies == sorted(latencies, reverse=True)
    if cost_model == "cdmpp":
        assert (report.learned["records"], report.learned["tasks"]) == (26, 3), "what both have learned"


class EvenAlone:
    """A validity guard that lets every other program pass."""

    def __init__(self) -> None:
        self.learned: list[bool] = []

    def scores(self, context: Any, measures: list[Any], scores: Any) -> Any:
        return scores

    def initial(self, tuner: Any, n: int, cost_model: Any) -> list[Any]:
        return tuner.sample(2, 0)

    def worth(self, context: Any, measures: list[Any]) -> list[bool]:
        return [int(structural_hash(m.sch.mod["main"]), 16) % 2 == 0 for m in measures]

    def learn(self, context: Any, measures: list[Any], worked: list[bool]) -> None:
        self.learned += worked


def test_what_is_not_likely_to_run_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = [EvenAlone() for _ in range(3)]
    free = iter(guards)
    monkeypatch.setattr("cdmpp.tuner.validity.make_guard", lambda *_: next(free))
    report, _ = sharded(tmp_path / "t", 24, options={"validity": "online"})
    costs, records = report.costs, records_of(tmp_path / "t")
    found = records[records["origin"] == "search"]["program"]
    assert costs.dropped > 0 and costs.measurements + costs.dropped == 24 and len(found) == costs.measurements
    assert all(int(digest, 16) % 2 == 0 for digest in found)
    assert any(guard.learned for guard in guards)


def test_what_is_measured_on_a_share_is_called_that(tmp_path: Path) -> None:
    out = tmp_path / "t"
    report, _ = sharded(out, 12)
    share = device_of_this_machine("this-cpu@1").name
    assert share.endswith("@1") and report.device == share
    records = records_of(out)
    assert set(records["device"]) == {share}
    where = {(meta["shard"], tuple(meta["cores"])) for meta in map(json.loads, records["meta"])}
    assert where == {(0, (3,)), (1, (2,))}


def test_one_task_is_shared_where_there_is_no_other(tmp_path: Path) -> None:
    report, engines = sharded(tmp_path / "t", 24, 32)
    assert report.costs.trials == 24 and records_of(tmp_path / "t")["program"].is_unique
    assert all(len(engine.measured) >= 6 for engine in engines)


def test_the_slowest_workers_programs_are_taken_over(tmp_path: Path) -> None:
    """One of two workers comes to a stop at its first program until the other has measured some of its."""
    engines: list[FakeEngine] = []
    taken_over = threading.Event()

    def make(number: int) -> FakeEngine:
        def latency_s(digest: str) -> float:
            # 12 trials are 6 for each: with its seventh the second worker has taken one over
            if number == 1 and len([h for h in engines[0].measured if h != matmul_task(32).hash]) >= 6:
                taken_over.set()
            if number == 0 and digest != matmul_task(32).hash:
                assert taken_over.wait(PATIENCE_S)
            return made_up_latency_s(digest)

        engines.insert(0, FakeEngine(latency_s))
        return engines[0]

    report, _ = sharded(tmp_path / "t", 12, 32, engines=make, options={"batch": 12})
    assert taken_over.is_set()
    assert report.costs.trials == 12 and len(json_database(tmp_path / "t")) == 12
    assert records_of(tmp_path / "t")["program"].is_unique


class DyingEngine(FakeEngine):
    """Takes its worker with it at a program."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        for number, outcome in enumerate(super().run(jobs), start=1):
            if number == self._at:
                self.measured.pop()
                raise RuntimeError("killed by signal 9")
            yield outcome


def test_a_worker_that_dies_costs_its_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "t"
    report, engines = sharded(
        out, 26, 32, 40, 48, engines=lambda number: DyingEngine(5) if number == 1 else FakeEngine()
    )
    assert len(engines) == 3, "one in place of the dead"
    assert "died (killed by signal 9)" in caplog.text
    assert report.costs.trials == 26 and not any(task.finished for task in report.tasks)
    records = records_of(out)
    assert records["program"].is_unique and len(records) == 29
    assert set(engines[1].measured) <= set(records["program"]), "what it had reported is kept"
    assert len(json_database(out)) == 26


def test_where_no_worker_lives_what_was_measured_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "t"
    with pytest.raises(
        TunerError, match="no worker of the tuning stays alive, the last one killed by signal 9"
    ):
        sharded(out, 26, engines=lambda _: DyingEngine(2))
    before = len(records_of(out))
    assert before > 0
    report, engines = sharded(out, 26, resume=True)
    assert report.costs.trials == 26
    assert sum(len(engine.measured) for engine in engines) == 28 - before


class FullDisk(FakeEngine):
    """Cannot go on."""

    def run(self, jobs: Iterator[BuildJob | None]) -> Iterator[Outcome]:
        for job in jobs:
            if job is not None:
                raise ProfilerError("no space left for shared objects")
        yield from ()


def test_what_no_other_worker_could_mend_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="no space left"):
        sharded(tmp_path / "t", 26, engines=lambda _: FullDisk())


def test_interrupted_and_resumed_it_measures_nothing_twice(tmp_path: Path) -> None:
    out, left = tmp_path / "t", [3]

    def interrupt(_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sharded(out, 36, progress=interrupt)
    before = set(records_of(out)["program"])
    assert 0 < len(before) < 38
    assert not any(thread.name.startswith("shard-") for thread in threading.enumerate())
    report, engines = sharded(out, 36, resume=True, shards=3)
    assert report.costs.trials == 36
    again = {h for engine in engines for h in engine.measured}
    assert not again & before and len(again | before) == 38
    assert len(json_database(out)) == 36
    walls = [p.wall_s for p in report.curve.points]
    assert walls == sorted(walls), "time goes on where it stopped"


def test_a_budget_shorter_than_one_measurement(tmp_path: Path) -> None:
    over = threading.Event()
    report, _ = sharded(
        tmp_path / "t",
        50,
        engines=lambda _: FakeEngine(lambda digest: over.wait(0.5) or made_up_latency_s(digest)),
        options={"budget_s": 0.1},
    )
    assert "budget" in report.stopped
    assert report.costs.measurements == 0 and report.tasks[0].best_s is None


def test_a_task_whose_programs_all_fail_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report, _ = sharded(tmp_path / "t", 400, 32, engines=lambda _: FakeEngine(lambda digest: None))
    assert report.stopped == "nothing more to try"
    assert "no program worked" in report.tasks[0].finished and report.tuned_s is None
    assert caplog.text.count("is given up") == 1 and "(run_error: made up)" in caplog.text


def test_the_last_tasks_search_ends_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdmpp.tuner.task_tuner import TaskTuner

    deadly, propose = matmul_task(48).hash, TaskTuner.propose

    def end(self: TaskTuner) -> Any:
        if self.task.hash == deadly:
            raise RuntimeError("killed by signal 11")
        return propose(self)

    monkeypatch.setattr(TaskTuner, "propose", end)
    report, engines = sharded(tmp_path / "t", 12, 32, 48)
    by_hash = {task.task: task for task in report.tasks}
    assert by_hash[deadly].finished == "its search ended 2 workers, last killed by signal 11"
    assert by_hash[matmul_task(32).hash].measured == 12 and len(engines) == 4


def test_earlier_records_are_measured_first_and_learned_from(tmp_path: Path) -> None:
    sharded(tmp_path / "a", 18, 32)
    report, engines = sharded(tmp_path / "b", 12, 32, warm_start=[tmp_path / "a"])
    earlier = records_of(tmp_path / "a")
    best = earlier[earlier["origin"] == "search"].sort_values("latency_s")["program"].tolist()[:4]
    assert set(best) <= {h for engine in engines for h in engine.measured}
    assert report.tasks[0].best_s is not None
    assert report.tasks[0].best_s <= made_up_latency_s(best[0])


def test_what_one_model_learned_another_takes() -> None:
    from cdmpp.device import get_device
    from cdmpp.tuner.online import OnlineModel
    from cdmpp.tuner.prior import AnalyticalPrior, Encoded

    prior = AnalyticalPrior(get_device("this-cpu@1"))
    rng = np.random.default_rng(0)
    programs = Encoded(rng.normal(-8, 1, 30), rng.normal(size=(30, 6)))
    hashes = [f"p{i}" for i in range(30)]
    teacher, pupil = OnlineModel(prior), OnlineModel(prior)
    teacher.learn("task", hashes, programs, np.exp(programs.log_s + programs.z[:, 0]))
    pupil.add_rows(teacher.rows(set(hashes[:20])))
    assert len(pupil) == 20
    pupil.add_rows(teacher.rows())
    teacher.fit()
    pupil.fit()
    assert pupil.predict("task", programs) == pytest.approx(teacher.predict("task", programs))


def test_shares_that_do_not_fit_are_refused() -> None:
    one, two = device_of_this_machine("this-cpu@1"), replace(device_of_this_machine("this-cpu@1"), share=2.0)
    assert shard_cores(one, "auto") == ((3,), (2,), (1,), (0,))
    assert shard_cores(two, "auto") == ((2, 3), (0, 1)) == shard_cores(two, 2)
    with pytest.raises(TunerError, match=r"3 shards of .* need 6 cores, this process may use 4"):
        shard_cores(two, 3)
    with pytest.raises(TunerError, match="one worker at least"):
        shard_cores(one, 0)
    with pytest.raises(TunerError, match="'auto', got 'many'"):
        tune_config(1, shards="many")
    with pytest.raises(TunerError, match="shards or workers, not both"):
        tune_config(1, shards=2, workers=2)


def test_a_process_keeps_to_its_share_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engine; the worker is killed after its first round."""
    monkeypatch.undo()
    processes: list[ProcessShard] = []
    elsewhere: list[Any] = []

    def start(config: ShardConfig) -> Shard:
        processes.append(ProcessShard(config))
        return processes[-1]

    def kill(state: Any) -> None:
        if state.costs.measurements and len(processes) == 1:
            family = psutil.Process(processes[0].pid).children(recursive=True)
            own = {usable_cores()[-1]}
            elsewhere.extend(p for p in family if p.is_running() and set(p.cpu_affinity()) != own)
            assert len(family) >= 3, "the fork server, a builder, a measuring process"
            os.kill(processes[0].pid, signal.SIGKILL)

    plan = SamplingPlan(min_sample_s=0.0005, min_samples=2, max_samples=4)
    config: TuneConfig = tune_config(8, shards=1, batch=4, plan=plan, builders=1)
    tasks: list[tuple[Task, float]] = [(matmul_task(32), 1.0)]
    report = tune_tasks("toy", tasks, out=tmp_path / "t", config=config, start_shard=start, progress=kill)
    assert report.costs.trials == 8 and len(processes) == 2
    assert not elsewhere
    assert not psutil.pid_exists(processes[1].pid)
    assert records_of(tmp_path / "t")["program"].is_unique
