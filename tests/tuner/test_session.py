"""The tuning loop with MetaSchedule's real search and a made-up engine: nothing twice, nothing lost, nothing endless."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError, TunerError
from cdmpp.profiler.machine import usable_cores
from cdmpp.program import import_tvm, structural_hash
from cdmpp.tuner.candidates import TaskTuner, signals_held_back
from cdmpp.tuner.cost_model import CostModel
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.results import CURVE_FILE, DATASET_FOLDER, RECORD_FILE, TUNING_FILE, WORKLOAD_FILE, json_database
from cdmpp.tuner.session import TuningSession
from tests.samples.programs import matmul_task
from tests.samples.tuning import FakeEngine, interrupt_after, made_up_latency_s, tuned

pytestmark = pytest.mark.usefixtures("on_zen3", "none_close")


@pytest.fixture
def none_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two programs are alike within the noise, which would be measured again on purpose."""
    monkeypatch.setattr("cdmpp.tuner.session.close_programs", lambda *_: [])


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shares fit everywhere."""
    core = usable_cores()[0]
    monkeypatch.setattr("cdmpp.profiler.machine.usable_cores", lambda: (core, core))


@pytest.mark.parametrize("cost_model", ["cdmpp", "xgb", "random"])
def test_it_measures_as_many_as_asked_and_keeps_the_best(tmp_path: Path, cost_model: str) -> None:
    engine = FakeEngine()
    # of both limits the lower one is kept to the program
    options = {"cost_model": cost_model, "max_measurements": 18}
    report = tuned(engine, tmp_path / "t", 18 if cost_model == "xgb" else 50, 32, 48, options=options)
    assert report.stopped == ("18 trials" if cost_model == "xgb" else "18 measurements")
    costs = report.costs
    assert (costs.trials, costs.measurements, costs.failures, costs.dropped) == (18, 18, 0, 0)
    assert costs.build_s == pytest.approx(20 * 0.5), "two unscheduled tasks besides"
    assert costs.device_s == pytest.approx(20 * 0.1)
    assert max(engine.counts.values()) == 1
    dataset = Dataset.open(tmp_path / "t" / DATASET_FOLDER)
    assert len(dataset.records) == 20
    for task in report.tasks:
        of_task = dataset.records[dataset.records["task"] == task.task]
        scheduled = of_task[of_task["origin"] == "search"]["latency_s"]
        assert task.best_s == pytest.approx(scheduled.min())
    latencies = [p.latency_s for p in report.curve]
    assert latencies[0] == report.untuned_s and latencies == sorted(latencies, reverse=True)


def test_where_no_schedule_is_faster_the_database_says_so(tmp_path: Path) -> None:
    plain = matmul_task().hash
    engine = FakeEngine(lambda digest: 1e-7 if digest == plain else 1e-5)
    assert tuned(engine, tmp_path / "t", 6).tuned_s == pytest.approx(1e-7)
    tvm = import_tvm()
    database = json_database(tmp_path / "t")
    workload = tvm.IRModule({"main": matmul_task().prim_func()})
    found = database.query_ir_module(workload, tvm.target.Target({"kind": "llvm"}), "main")
    assert structural_hash(found["main"]) == plain


def test_what_the_compiled_code_leaves_out_gives_no_task_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worth(self: Measurer, jobs: list[Any], good: list[bool], left_s: float | None) -> tuple[list[bool], float]:
        return [number == len(jobs) - 1 for number in range(len(jobs))], 0.0

    monkeypatch.setattr(Measurer, "worth", worth)
    report = tuned(FakeEngine(lambda digest: 1e-6), tmp_path / "t", 34)
    assert report.stopped == "34 trials" and report.costs.measurements == 7, "no round gained, the last one was cut"


@pytest.mark.parametrize(("cost_model", "order"), [("cdmpp", "bbebebee"), ("xgb", "bebebe")])
def test_one_task_is_searched_while_it_is_measured(tmp_path, monkeypatch, cost_model: str, order: str) -> None:
    steps = list[str]()
    for name in ("_begin_round", "_end_round"):
        done = getattr(TuningSession, name)
        step = lambda *args, done=done, letter=name[1]: (steps.append(letter), done(*args))  # noqa: E731
        monkeypatch.setattr(TuningSession, name, step)
    tuned(FakeEngine(), tmp_path / "t", 18, options={"cost_model": cost_model})
    assert "".join(steps) == order


@pytest.mark.parametrize("shards", [None, 2])
def test_a_task_whose_whole_space_is_invalid_is_given_up(tmp_path, caplog, two_cores, shards: int | None) -> None:
    bad = matmul_task(32)
    report = tuned(FakeEngine(lambda digest: None), tmp_path / "t", 200, 32, options={"shards": shards})
    assert caplog.text.count("is given up") == 1 and "(run_error: made up)" in caplog.text
    assert report.stopped == "nothing more to try"
    assert report.tasks[0].best_s is None and report.tasks[0].failed == report.tasks[0].measured < 40
    assert "no program worked" in report.tasks[0].finished
    assert report.tuned_s is None and report.speedup is None
    assert report.costs.failures == report.costs.measurements
    json.dumps(report.to_json(), allow_nan=False)
    assert report.tasks[0].task == bad.hash


def test_a_space_without_valid_programs_ends_the_task(tmp_path, monkeypatch, caplog) -> None:
    bad = matmul_task(48).hash
    replayed = TaskTuner.measure_of
    monkeypatch.setattr(TaskTuner, "measure_of", lambda its, *of: None if its.task.hash == bad else replayed(its, *of))
    report = tuned(FakeEngine(), tmp_path / "t", 12, 32, 48)
    by_hash = {t.task: t for t in report.tasks}
    assert "no more valid programs" in by_hash[bad].finished
    assert caplog.text.count("its space gives no more valid programs") == 1, "one line, and the others go on"
    assert by_hash[matmul_task(32).hash].measured == 12


def test_a_budget_shorter_than_one_measurement_or_search(tmp_path: Path, monkeypatch) -> None:
    replayed, replay = list[Any](), TaskTuner.measure_of
    monkeypatch.setattr(TaskTuner, "measure_of", lambda *of: time.sleep(0.02) or replayed.append(of) or replay(*of))
    report = tuned(FakeEngine(delay_s=0.4), tmp_path / "t", 50, options={"budget_s": 0.1})
    assert len(replayed) < 7 and not report.tasks[0].finished
    assert "budget" in report.stopped
    assert report.costs.measurements == 0 and report.costs.trials == 0
    assert report.tasks[0].scheduled_s is None and report.tasks[0].used in ("untuned", "")


@pytest.mark.parametrize(("cost_model", "shards"), [("cdmpp", None), ("xgb", None), ("cdmpp", 2)])
def test_interrupted_and_resumed_it_measures_nothing_twice(tmp_path: Path, two_cores, cost_model, shards) -> None:
    """Also where one search goes on with what two workers had begun."""
    out, engine, options = tmp_path / "t", FakeEngine(), {"cost_model": cost_model}
    with pytest.raises(KeyboardInterrupt):
        tuned(engine, out, 24, 32, 48, options={**options, "shards": shards}, progress=interrupt_after(3))
    assert not multiprocessing.active_children()
    before = len(Dataset.open(out / DATASET_FOLDER).records)
    assert 0 < before < 26
    with pytest.raises(TunerError, match="--resume"):
        tuned(engine, out, 24, 32, 48, options=options)
    again = FakeEngine()
    report = tuned(again, out, 24, 32, 48, options=options, resume=True)
    recorded = Dataset.open(out / DATASET_FOLDER).records
    assert recorded["program"].is_unique, "nothing twice"
    assert len(again.measured) == len(recorded) - before
    assert len(json_database(out)) == (recorded["origin"] == "search").sum()
    assert len(recorded) == 26, "what was under way when it was interrupted is not counted"
    assert report.costs.trials == 24
    walls = [p.wall_s for p in report.curve]
    assert walls == sorted(walls), "time goes on where it stopped"


def test_a_crash_in_the_middle_of_writing_is_mended(tmp_path, caplog) -> None:
    out = tmp_path / "t"
    tuned(FakeEngine(), out, 12)
    records, curve = out / RECORD_FILE, out / CURVE_FILE
    records.write_bytes(records.read_bytes()[:-300])
    curve.write_bytes(curve.read_bytes()[:-10])
    engine = FakeEngine()
    report = tuned(engine, out, 18, resume=True)
    assert "made anew" in caplog.text and "damaged line" in caplog.text
    assert len(json_database(out)) == 18
    assert report.tasks[0].measured == 18 and max(engine.counts.values()) == 1


def test_resuming_something_else_is_refused_but_what_measured_nothing_is_no_tuning(tmp_path: Path) -> None:
    out = tmp_path / "t"
    tuned(FakeEngine(), out, 6)
    with pytest.raises(TunerError, match="cost_model cdmpp, not random"):
        tuned(FakeEngine(), out, 12, options={"cost_model": "random"}, resume=True)
    settings = json.loads((out / TUNING_FILE).read_text())
    (out / TUNING_FILE).write_text(json.dumps({**settings, "tvm": "0.20.0"}))
    with pytest.raises(TunerError, match=r"tvm 0\.20\.0, not 0\.27"):
        tuned(FakeEngine(), out, 12, resume=True)
    (out / TUNING_FILE).write_text("{")
    with pytest.raises(TunerError, match="damaged"):
        tuned(FakeEngine(), out, 12, resume=True)
    out, bad = tmp_path / "u", tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(DatasetError, match="no dataset"):
        tuned(FakeEngine(), out, 6, warm_start=[bad])
    assert (out / TUNING_FILE).exists()
    report = tuned(FakeEngine(), out, 6, options={"cost_model": "random"})
    assert report.costs.measurements == 6, "begun anew without --resume, and with another cost model"
    with pytest.raises(TunerError, match="--resume"):
        tuned(FakeEngine(), out, 6, options={"cost_model": "random"})
    (tmp_path / "file").write_text("")
    with pytest.raises(TunerError, match="is a file"):
        tuned(FakeEngine(), tmp_path / "file", 6)


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, kept = tmp_path / "t", "what was measured before is kept: go on with --resume"
    with monkeypatch.context() as patch:
        # root may write everywhere, but not into a folder that is not there
        patch.setattr("cdmpp.tuner.results.CURVE_FILE", "nowhere/curve.jsonl")
        with pytest.raises(TunerError, match=rf"cannot write .*curve\.jsonl: No such file.*; {kept}"):
            tuned(FakeEngine(), out, 12)
    measured = len(Dataset.open(out / DATASET_FOLDER).records)
    assert measured > 0
    draft = out / f"tuning.json.{os.getpid()}.tmp"
    draft.mkdir()
    with pytest.raises(TunerError, match=rf"cannot write .*tuning\.json: .*; {kept}"):
        tuned(FakeEngine(), out, 12, resume=True)
    draft.rmdir()
    engine = FakeEngine()
    assert tuned(engine, out, 12, resume=True).costs.measurements == 12
    assert len(engine.measured) == 13 - measured, "nothing twice"


def test_earlier_records_are_measured_first_and_learned_from(tmp_path: Path) -> None:
    first = tuned(FakeEngine(), tmp_path / "a", 18, 32, 48)
    earlier = Dataset.open(tmp_path / "a" / DATASET_FOLDER).records
    engine = FakeEngine()
    said: list[str] = []
    report = tuned(engine, tmp_path / "b", 12, 32, warm_start=[tmp_path / "a"], notify=said.append)
    best = earlier[(earlier["task"] == matmul_task(32).hash) & (earlier["origin"] == "search")]
    assert f"learned from {len(best)}, 4 programs come first where" in next(s for s in said if "earlier" in s)
    best = best.sort_values("latency_s")["program"].tolist()[:4]
    assert engine.measured[1:5] == best, "after the unscheduled task"
    of_task = next(t for t in first.tasks if t.task == matmul_task(32).hash)
    assert report.tasks[0].best_s is not None and of_task.best_s is not None
    assert report.tasks[0].best_s <= of_task.best_s


def test_a_database_of_tvm_is_a_warm_start_too_if_it_is_of_this_version(tmp_path: Path) -> None:
    tuned(FakeEngine(), tmp_path / "a", 12)
    only = tmp_path / "database"
    only.mkdir()
    for name in (RECORD_FILE, WORKLOAD_FILE):
        (only / name).write_bytes((tmp_path / "a" / name).read_bytes())
    engine = FakeEngine()
    said: list[str] = []
    tuned(engine, tmp_path / "b", 6, warm_start=[only], notify=said.append)
    assert "learned from 12, 4 programs" in next(s for s in said if "earlier" in s)
    assert made_up_latency_s(engine.measured[1]) == min(made_up_latency_s(h) for h in engine.measured[1:])

    other = tmp_path / "other"
    other.mkdir()
    (other / WORKLOAD_FILE).write_text((tmp_path / "a" / WORKLOAD_FILE).read_text())
    lines = (tmp_path / "a" / RECORD_FILE).read_text()
    # an instruction that this TVM does not have
    (other / RECORD_FILE).write_text(lines.replace('"SampleCategorical"', '"SampleFromAnotherVersion"'))
    with pytest.raises(TunerError, match="another TVM"):
        tuned(FakeEngine(), tmp_path / "c", 6, warm_start=[other])


def test_the_trimmer_saves_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals that are exact: everything that is not an improvement is dropped."""

    def interval_s(self: Any, context: Any, candidates: Any, coverage: float) -> Any:
        low = np.array([made_up_latency_s(structural_hash(c.sch.mod["main"])) for c in candidates])
        return low, low

    monkeypatch.setattr(CostModel._cls, "interval_s", interval_s)
    engine = FakeEngine()
    costs = tuned(engine, tmp_path / "t", 36, options={"trim": 0.9}).costs
    assert costs.dropped > 0 and costs.measurements + costs.dropped == costs.trials
    assert 0 < costs.saved_s <= costs.dropped * 0.6 + 1e-9
    assert len(engine.measured) < 25


def test_ctrl_c_in_the_middle_of_a_search_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hears of Ctrl-C while TVM's search calls the cost model."""
    asked: list[int] = []
    predict = CostModel._cls.predict

    def interrupted(self: Any, context: Any, candidates: Any) -> Any:
        asked.append(len(candidates))
        if len(asked) == 4:
            signal.raise_signal(signal.SIGINT)
        return predict(self, context, candidates)

    monkeypatch.setattr(CostModel._cls, "predict", interrupted)
    engine = FakeEngine()
    with pytest.raises(KeyboardInterrupt):
        tuned(engine, tmp_path / "t", 60, options={"search": "metaschedule"})
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tuned(FakeEngine(), tmp_path / "t", 18, resume=True).costs.trials == 18


@pytest.mark.parametrize("times", [1, 2])
def test_the_first_ctrl_c_waits_for_the_end_and_a_second_one_does_not(capsys, times: int) -> None:
    reached, before = [], signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), signals_held_back():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "what ends the process goes on doing so"
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            reached.append("the end")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert reached == ["the end"][: 2 - times] and capsys.readouterr().err.count("Ctrl-C again") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
