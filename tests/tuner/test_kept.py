"""Tunings that are kept, close pairs, tasks left alone: with TVM's real search and a made-up engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cdmpp.dataset import Dataset
from cdmpp.profiler.engine import BuildJob, Outcome
from cdmpp.tuner.measure import Measurer, device_of_this_machine
from cdmpp.tuner.progress import LEFT_ALONE, leave_alone
from cdmpp.tuner.results import COLUMNS, DATASET_FOLDER, json_database, summary_lines, task_rows
from cdmpp.tuner.warm_start import kept_programs
from tests.samples.programs import matmul_task
from tests.samples.tuning import FakeEngine, made_up_latency_s, tuned

pytestmark = pytest.mark.usefixtures("on_zen3")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cdmpp" / "tunings" / matmul_task(32).hash


def test_a_tuning_is_kept_and_begins_the_next_one(tmp_path: Path, cache: Path, monkeypatch) -> None:
    assert list(kept_programs({}, device_of_this_machine("this-cpu@1"), print)) == []
    tuned(FakeEngine(), tmp_path / "a", 12)
    (path,) = cache.iterdir()
    kept = json.loads(path.read_text())["programs"]
    assert len(kept) == 12
    # what the compiled code says chooses among new candidates alone
    monkeypatch.setattr(Measurer, "worth", lambda _, jobs, *rest: ([job is jobs[-1] for job in jobs], 0.0))
    engine, said = FakeEngine(), list[str]()
    tuned(engine, tmp_path / "b", 6, warm_start=["auto"], notify=said.append)
    assert engine.measured[1:5] == [entry["program"]["hash"] for entry in kept[:4]]
    assert any("learned from 12, 4 programs" in line for line in said)
    assert len(json.loads(path.read_text())["programs"]) > 12, "beside those of earlier tunings"


def test_without_the_device_the_nearest_ones_schedules_are_first(tmp_path: Path, cache: Path) -> None:
    tuned(FakeEngine(), tmp_path / "a", 6)
    (path,) = cache.iterdir()
    content, device = json.loads(path.read_text()), device_of_this_machine("this-cpu@1")
    for name, part, first in (("near@1", 0.9, 0), ("far@1", 0.1, 1)):
        caches = {size: part * float(getattr(device, size) or 1.0) for size in ("l1_kb", "l2_kb", "l3_kb")}
        other = replace(device, name=name, **caches)
        programs = content["programs"][first:]
        stored = {**content, "device": other.to_json(), "programs": programs}
        path.with_name(f"{name}.json").write_text(json.dumps(stored))
    path.unlink()
    engine, said = FakeEngine(), list[str]()
    tuned(engine, tmp_path / "b", 6, warm_start=["auto"], notify=said.append)
    assert engine.measured[1] == content["programs"][0]["program"]["hash"], "of the near one"
    assert any("learned from 0, 4 programs" in line for line in said), "its labels do not hold here"


def test_what_another_tvm_kept_is_passed_over_with_one_line(tmp_path: Path, cache: Path) -> None:
    tuned(FakeEngine(), tmp_path / "a", 6)
    (path,) = cache.iterdir()
    content = json.loads(path.read_text())
    for bad in ({**content, "tvm": "0.1"}, {**content, "programs": [{}]}):
        path.write_text(json.dumps(bad))
        said: list[str] = []
        report = tuned(FakeEngine(), tmp_path / f"b{len(str(bad))}", 6, warm_start=["auto"], notify=said.append)
        assert report.costs.trials == 6
        assert [line for line in said if "passed over" in line] == [
            "kept tunings: 1 files of another TVM (or damaged) and 0 programs that do not replay passed over"
        ]
    assert json.loads(path.read_text())["tvm"] != "0.1", "and replaced by the new tuning"


class Lucky(FakeEngine):
    """Programs look fast the first time: all are within a thousandth; the second time they are as they are."""

    def outcome(self, job: BuildJob) -> Outcome:
        outcome, again = super().outcome(job), self.measured.count(job.program.hash) > 1
        assert outcome.latency_s is not None
        return outcome if again else replace(outcome, latency_s=1e-6 * (1 + 1e-3 * outcome.latency_s))


def test_close_programs_are_measured_again_before_the_best_is_named(tmp_path: Path) -> None:
    engine, said = Lucky(), list[str]()
    report = tuned(engine, tmp_path / "t", 6, notify=said.append)
    share, text = report.costs.search_cpu_s / report.costs.wall_s, " ".join(summary_lines(report))
    assert f"CPU seconds of search ({share:.0%} of the time)" in text and " programs replayed, " in text
    again = engine.measured[7:]
    assert len(again) == 6 and again[:3] == again[3:], "the best three, in turn"
    assert any("3 programs of 1 tasks were close" in line for line in said)
    records = Dataset.open(tmp_path / "t" / DATASET_FOLDER).records
    labels = {r.program: r.latency_s for r in records.itertuples()}
    (task,) = report.tasks
    assert task.best_s == min(labels.values()) and report.costs.trials == 6
    best = min(float(r.run_secs[0]) for r in json_database(tmp_path / "t").get_all_tuning_records())
    assert best == pytest.approx(task.best_s), "TVM takes the same one"
    assert report.costs.build_s == pytest.approx(0.5 * len(engine.measured))


def test_the_table_says_what_is_used(tmp_path: Path) -> None:
    plain = matmul_task(48).hash
    engine = FakeEngine(lambda digest: 1e-7 if digest == plain else made_up_latency_s(digest))
    report = tuned(engine, tmp_path / "t", 24, 32, 48)
    by_hash = {task.task: task for task in report.tasks}
    kept, schedule = by_hash[plain], by_hash[matmul_task(32).hash]
    assert kept.used == "untuned" and kept.best_s == kept.untuned_s
    if kept.measured:
        assert kept.scheduled_s is not None and kept.scheduled_s > kept.best_s
    assert schedule.used.startswith("search ") and schedule.best_s == schedule.scheduled_s
    assert sum(task.share_after or 0.0 for task in report.tasks) == pytest.approx(1.0)
    for row in task_rows(report.tasks):
        assert len(row) == len(COLUMNS)
    assert report.tuned_s == pytest.approx(sum(task.best_s or 0.0 for task in report.tasks))


def test_a_task_that_can_bring_less_than_a_trial_does_is_left_alone(tmp_path: Path) -> None:
    # it will take 2 s, a hundredth of which is a trial's worth
    assert set(leave_alone({0: 10.0, 1: 0.019, 2: 1.0}, 13.019, 100)) == {1}
    assert leave_alone({0: 3.0}, 4.0, 8) == {} and leave_alone({}, 0.0, 8) == {}
    small = matmul_task(32).hash
    engine = FakeEngine(lambda digest: 1e-7 if digest == small else 1e-3 * made_up_latency_s(digest) / 1e-6)
    report = tuned(engine, tmp_path / "t", 24, 32, 64)
    left = next(task for task in report.tasks if task.task == small)
    assert left.finished.startswith(LEFT_ALONE) and left.measured == 0 and left.used == "untuned"
    assert report.costs.measurements == 24, "the others get its trials"
    assert "Left alone: matmul32." in summary_lines(report)
