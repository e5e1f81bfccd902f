"""From networks to a dataset: resume, kill -9, re-measuring, other devices, bad input."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from cdmpp.cli import main
from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.device.table import machine_facts
from cdmpp.errors import DatasetError, ProfilerError, ProgramError
from cdmpp.profiler.engine import Outcome
from cdmpp.profiler.plan import TaskPlan, replay_plan
from cdmpp.profiler.session import Progress, profile, read_task_file
from cdmpp.program.types import Program
from tests.samples.programs import QUICK_PROFILE, matmul_task

pytestmark = pytest.mark.usefixtures("real_machine")


def test_records_name_device_origin_and_session(mlp: Path) -> None:
    dataset = Dataset.open(mlp)
    records = dataset.records
    assert set(records["status"]) == {"ok"}
    assert set(records["device"]) == {get_device("this-cpu@1").name}
    assert {"random", "search"} <= set(records["origin"])
    session = dataset.meta["sessions"][0]
    for fact in ("vendor_id", "model_name", "family", "model"):
        assert session["machine"][fact] == machine_facts()[fact]
    assert session["versions"]["apache-tvm"]
    assert session["cache"] == "warm"
    assert records["noise"].notna().all()


def test_resume_measures_nothing_twice(mlp: Path) -> None:
    before = Dataset.open(mlp).records
    with pytest.raises(DatasetError, match="--resume"):
        profile(["mlp"], out=mlp, config=QUICK_PROFILE)
    assert profile(["mlp"], out=mlp, config=QUICK_PROFILE, resume=True).new == 0
    after = Dataset.open(mlp).records
    assert len(after) == len(before) and not after.duplicated(["program", "device"]).any()


def test_tasks_as_they_are(mlp: Path, tmp_path: Path) -> None:
    config = replace(QUICK_PROFILE, unscheduled=True)
    report = profile(["mlp"], out=tmp_path / "d", config=config)
    dataset = Dataset.open(tmp_path / "d")
    assert report.ok == len(dataset.records) == len(dataset.tasks)
    assert set(dataset.records["origin"]) == {"unscheduled"}
    assert set(dataset.programs) == set(dataset.tasks) == set(Dataset.open(mlp).tasks)
    assert all(program.space_hash is None for program in dataset.programs.values())
    assert profile(["mlp"], out=tmp_path / "d", config=config, resume=True).new == 0
    # with other programs of the same device in the folder, they are not counted as part of this run
    shutil.copytree(mlp, tmp_path / "both")
    states: list[Progress] = []
    profile(["mlp"], out=tmp_path / "both", config=config, resume=True, progress=states.append)
    assert [state.done for state in states] == list(range(1, len(dataset.tasks) + 1))
    assert {state.total for state in states} == {len(dataset.tasks)}


def test_the_same_programs_on_another_device(mlp: Path, tmp_path: Path) -> None:
    config, out, device = replace(QUICK_PROFILE, limit=6), tmp_path / "v2", "this-cpu.x86-64-v2@1"
    report = profile(device=device, programs_of=mlp, out=out, config=config)
    records = Dataset.open(out).records
    assert report.ok == len(records) == 6
    assert set(records["program"]) <= set(Dataset.open(mlp).records["program"])
    assert ".x86-64-v2@1" in records["device"].iloc[0]
    # Measured once more into the same dataset: both records are kept.
    profile(device=device, programs_of=mlp, out=out, config=config, remeasure=True)
    assert len(Dataset.open(out).records) == 12
    with pytest.raises(ProfilerError, match=f"none of the tasks asked for is among those that {mlp} has"):
        profile(device=device, programs_of=mlp, tasks=["0" * 16], out=tmp_path / "none", config=config)


def wait_for_records(out: Path, process: subprocess.Popen[str] | None = None) -> None:
    """Until there are five."""
    deadline = time.monotonic() + 120
    while not ((out / "meta.json").exists() and len(Dataset.open(out).records) >= 5):
        alive = process is None or process.poll() is None
        assert alive and time.monotonic() < deadline, "profiling did not get going"
        time.sleep(0.05)


def test_kill_9_loses_at_most_what_was_in_flight(mlp: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cdmpp", "profile", "--programs-of", str(mlp), "--workers", "1"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.DEVNULL, text=True)
    wait_for_records(tmp_path, process)
    process.kill()
    process.wait()
    kept = set(Dataset.open(tmp_path).records["program"])
    assert len(kept) >= 5
    time.sleep(0.5)
    left = [p.info for p in psutil.process_iter(["ppid", "status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    assert process.pid not in [info["ppid"] for info in left], "workers outlived their parent"
    profile(programs_of=mlp, out=tmp_path, config=replace(QUICK_PROFILE, limit=12), resume=True)
    records = Dataset.open(tmp_path).records
    assert kept < set(records["program"])
    assert not records.duplicated(["program", "device"]).any(), "nothing is measured twice"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, number: signal.Signals) -> None:
    def interrupt() -> None:
        wait_for_records(tmp_path)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    options = ("--programs-per-task", "3", "--workers", "1", "--out", str(tmp_path))
    assert main(["profile", "mlp", *options]) == 130
    err = capsys.readouterr().err
    assert "interrupted" in err and "Traceback" not in err
    kept = set(Dataset.open(tmp_path).records["program"])
    assert len(kept) >= 5
    profile(["mlp"], out=tmp_path, config=replace(QUICK_PROFILE, programs_per_task=3), resume=True)
    records = Dataset.open(tmp_path).records
    assert kept < set(records["program"]) and records["program"].is_unique


def test_task_files_and_what_is_refused(mlp: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the first leaves no dataset to go on with
        with pytest.raises(ProfilerError, match="99 measuring processes"):
            profile(programs_of=mlp, out=tmp_path / "d", config=replace(QUICK_PROFILE, workers=99))
    with pytest.raises(ProfilerError, match="those of another"):
        profile(["mlp"], device="h200", out=tmp_path / "a", config=QUICK_PROFILE)
    for name in ("builders", "build_timeout_s", "run_timeout_s", "programs_per_task", "limit"):
        with pytest.raises(ProfilerError, match=r"is 0, expected a number above 0"):
            replace(QUICK_PROFILE, **{name: 0})
    (tmp_path / "a.json").write_text('{"tasks": ["0123456789abcdef"]}')
    (tmp_path / "b.txt").write_text("0123456789abcdef\nfedcba9876543210\n")
    (tmp_path / "c.json").write_text("{")
    assert read_task_file(tmp_path / "a.json") == ["0123456789abcdef"]
    assert len(read_task_file(tmp_path / "b.txt")) == 2
    for name in ("c.json", "missing"):
        with pytest.raises(ProfilerError, match="no task file"):
            read_task_file(tmp_path / name)


def fake_measure(plan: TaskPlan) -> list[Program]:
    """Run a plan with made-up latencies; outcomes come when it waits for them."""
    programs: list[Program] = []
    pending: list[Outcome] = []
    for job in plan.jobs():
        if job is None:
            assert pending, "the plan waits for nothing"
            for outcome in pending:
                plan.done(outcome)
            pending.clear()
            continue
        programs.append(job.program)
        pending.append(Outcome(job, "ok", 1e-3 * len(programs), (1e-3,), 0.0))
    return programs


def test_a_plan_draws_a_quarter_by_search_and_only_what_it_lacks(monkeypatch, caplog) -> None:
    task = matmul_task(64)
    whole = fake_measure(TaskPlan([task], 32))
    assert len({p.hash for p in whole}) == len(whole) == 32
    assert [p.origin for p in whole].count("search") == 8
    first, plan = fake_measure(TaskPlan([task], 16)), TaskPlan([task], 32)
    for program in first:
        plan.learn(program, 1e-3)
    second = fake_measure(plan)
    assert len(second) == 16 and {p.hash for p in first}.isdisjoint(p.hash for p in second)
    monkeypatch.setattr("cdmpp.profiler.plan.TaskSpaces", Mock(side_effect=ProgramError("it has no design space")))
    assert fake_measure(TaskPlan([task], 4)) == [] and "no design space" in caplog.text


def test_a_replay_is_even_over_the_tasks(mlp: Path) -> None:
    dataset = Dataset.open(mlp)
    plan = replay_plan(dataset, limit=8)
    jobs = list(plan.jobs())
    assert len({j.program.hash for j in jobs if j}) == 8
    per_task = [sum(j.task.hash == t.hash for j in jobs if j) for t in plan.tasks]
    assert len(plan.tasks) == len(dataset.tasks)
    assert min(per_task) >= 1
