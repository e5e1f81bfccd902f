"""Tuning for a GPU: real spaces, lowering and compiler, on a GPU with a scripted clock."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.dataset import Dataset
from cdmpp.dataset.record import join_meta
from cdmpp.device import get_device
from cdmpp.errors import ProfilerError, TunerError
from cdmpp.profiler.engine import BuildJob, Engine, SamplingPlan
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.measure import profile_gpu
from cdmpp.profiler.gpu.sampling import GpuConfig, GpuMeasurer
from cdmpp.program import structural_hash
from cdmpp.program.space import TaskSpaces
from cdmpp.tuner.candidates import DEFAULT, TaskTuner, default_schedule
from cdmpp.tuner.config import Objective, TuneConfig
from cdmpp.tuner.measure import device_of_this_machine, make_engine
from cdmpp.tuner.results import DATASET_FOLDER, TuneReport, json_database
from cdmpp.tuner.tuning import tune_tasks
from cdmpp.tuner.workers import worker_cores
from tests.samples.command import Command
from tests.samples.gpu import TUNING_GPU, fails, gpu_latency_s
from tests.samples.programs import matmul_task
from tests.samples.tuning import kept_untuned

PLAN = SamplingPlan(min_sample_s=0.001, min_samples=2, max_samples=4, max_measure_s=0.2)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        find_compiler("sm_90")
    except ProfilerError as err:
        pytest.skip(str(err))


#: A search that takes a moment.
SMALL: dict[str, Any] = {"cost_model": "random", "builders": 2, "batch": 4, "population": 12, "generations": 1}


def tuned(out: Path, tries: int, *sizes: int, device: str = "h200", resume: bool = False, **options: Any) -> TuneReport:
    tasks = [(matmul_task(size), 1.0) for size in sizes or (32,)]
    config = TuneConfig(Objective(tries), **{"gpu": TUNING_GPU, "plan": PLAN, **SMALL, **options})
    return tune_tasks("toy", tasks, device=device, out=out, config=config, resume=resume)


def test_what_the_limits_exclude_is_not_built() -> None:
    task = matmul_task(512)
    spaces = TaskSpaces(task, "cuda", verify=False)
    jobs = [BuildJob(p, task, spaces.space_of(p)) for p in spaces.sample(8, 1)]
    with Engine(GpuMeasurer(GpuConfig(gpu=TUNING_GPU, plan=PLAN, builders=2), get_device("h200"))) as engine:
        outcomes = {outcome.job.program.hash: outcome for outcome in engine.run(iter([None, *jobs]))}
    assert set(outcomes) == {job.program.hash for job in jobs}
    statuses = Counter(outcome.status for outcome in outcomes.values())
    assert {"ok", "invalid_config"} <= set(statuses) <= {"ok", "invalid_config", "build_error"}, statuses
    for digest, outcome in outcomes.items():
        if outcome.status == "ok":
            assert outcome.latency_s == pytest.approx(gpu_latency_s(digest), rel=0.01)
            assert outcome.meta["sms"] == 132 and outcome.meta["resources"]["main_kernel"]["registers"] > 0
        elif outcome.status == "invalid_config":
            assert outcome.error.startswith(("threads: ", "shared: ")), outcome.error
            assert "resources" not in outcome.meta, "no compiler was asked"


def test_a_task_is_tuned_for_a_share_and_resumed(tmp_path: Path) -> None:
    out, options = tmp_path / "t", {"device": "h200@0.5", "gpu_arguments": {"failing": True}}
    tuned(out, 4, **options)
    report = tuned(out, 8, resume=True, **options)
    costs = report.costs
    assert report.device == "h200@0.5" and report.network is None
    assert (costs.trials, costs.measurements, costs.dropped) == (8, 8, 0)
    dataset = Dataset.open(out / DATASET_FOLDER)
    # what is as fast as the best is measured again at the end of each tuning
    records = dataset.records.drop_duplicates("program", keep="last")
    assert len(records) == 9, "the default schedule besides"
    assert set(records["device"]) == {"h200@0.5"}
    assert dataset.meta["devices"]["h200@0.5"]["cores_used"] == 64, "partitions come in units of 8"
    metas = [join_meta(row) for row in records[records["status"] == "ok"].to_dict("records")]
    known = {"build_s", "run_s", "workers", "sms", "resources", "repeats", "clock_mhz"}
    assert all(known <= set(meta) and "threads" not in meta for meta in metas)
    found = records[records["origin"] == "search"]
    assert dict(found["status"].value_counts()) == dict(Counter("run_error" if fails(h) else "ok" for h in found["program"])), (
        "failures are records"
    )
    assert costs.failures == (found["status"] != "ok").sum() > 0
    ok = found[found["status"] == "ok"]
    assert report.tasks[0].best_s == pytest.approx(min(map(gpu_latency_s, ok["program"])), rel=0.01)
    (default,) = records.loc[records["origin"] == DEFAULT, "program"]
    assert dataset.programs[default].implementation == "scheduled"
    if not fails(default):
        assert report.untuned_s == pytest.approx(gpu_latency_s(default), rel=0.01)
    entries = json_database(out).get_all_tuning_records()
    assert len(entries) == len(ok)
    assert {structural_hash_of(entry) for entry in entries} == set(ok["program"])
    assert {(str(e.target.kind.name), str(e.target.attrs["arch"])) for e in entries} == {("cuda", "sm_90")}


def structural_hash_of(entry: Any) -> str:
    return structural_hash(entry.as_measure_candidate().sch.mod["main"])


def test_a_task_without_a_default_schedule_is_tuned_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("cdmpp.tuner.candidates.default_schedule", lambda func, target: None)
    sample = TaskTuner.sample
    monkeypatch.setattr(TaskTuner, "sample", lambda self, n, seed: sample(self, min(n, 12), seed))
    report = tuned(tmp_path / "t", 4, cost_model="cdmpp", predictor=None, validity="online")
    assert report.untuned_s is None and report.tuned_s is not None and report.speedup is None
    assert report.learned["records"] == 4


def test_the_default_schedule_is_what_stays_where_nothing_is_faster(tmp_path: Path) -> None:
    tuner = TaskTuner(matmul_task(32), get_device("h200"), 1)
    job = tuner.untuned()
    assert job is not None and job.space is not None
    script = {job.program.hash: {"run_s": 1e-7}}
    out = tmp_path / "t"
    report = tuned(out, 2, batch=2, gpu_arguments={"script": script})
    assert report.untuned_s == pytest.approx(1e-7, rel=0.01) and report.tuned_s == report.untuned_s
    best = min(json_database(out).get_all_tuning_records(), key=lambda entry: float(entry.run_secs[0]))
    assert structural_hash_of(best) == job.program.hash
    assert default_schedule(tuner.mod["main"], tuner.context.target) is not None


def test_workers_search_and_one_process_measures(tmp_path: Path) -> None:
    out = tmp_path / "t"
    report = tuned(out, 6, 32, 48, device="h200@0.5", shards="auto")
    assert report.device == "h200@0.5" and report.untuned_s is not None
    assert (report.costs.trials, report.costs.measurements) == (6, 6)
    records = Dataset.open(out / DATASET_FOLDER).records
    assert len(records) == 8 and records["program"].is_unique
    metas = [join_meta(row) for row in records.to_dict("records")]
    assert {(meta["workers"], meta["sms"]) for meta in metas} == {(2, 64)}, "side by side, each on its half"
    assert len(json_database(out)) == 6 + kept_untuned(report)


def test_a_gpu_that_is_lost_ends_all_workers(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_text("1")
    options = {"shards": 2, "gpu_arguments": {"lives": str(lives), "breaks": True}}
    with pytest.raises(ProfilerError, match="the GPU does not answer"):
        tuned(tmp_path / "t", 4, device="h200@0.5", **options)


def test_shares_that_do_not_fit() -> None:
    with pytest.raises(TunerError, match=r"2 shards of h200 are 2 times what there is: .* smaller share: h200@0.5$"):
        worker_cores(get_device("h200"), 2)
    with pytest.raises(TunerError, match="one worker at least"):
        worker_cores(get_device("h200"), 0)
    assert len(worker_cores(get_device("h200@0.3"), "auto")) == 3
    assert len(worker_cores(get_device("h200@0.142"), 7)) == 7


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TunerError, match=r"h200@0.5 is a gpu: .*needs cupy.*on one machine"):
        device_of_this_machine("h200@0.5")
    with pytest.raises(TunerError, match="mi210 is a gpu: mi210 is no CUDA device"):
        device_of_this_machine("mi210")
    command("tune", "mlp", "--device", "h200", "--trials", 8, "--out", tmp_path / "t", code=2)
    assert "needs cupy" in command.err.replace("\n", " ") and "Traceback" not in command.err
    assert not (tmp_path / "t").exists()
    runtime = SimpleNamespace(
        CUDARuntimeError=OSError, getDeviceCount=lambda: 1, getDeviceProperties=lambda number: {"name": b"Tesla T4"}
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(TunerError, match="h200 is a gpu that is not here: this machine has a Tesla T4"):
        device_of_this_machine("h200")
    t4 = make_engine(TuneConfig(Objective(1)), device_of_this_machine("t4"), 1, overlap=False)
    assert isinstance(t4.measurer, GpuMeasurer), "final latencies are of programs alone"
    assert t4.measurer.config.degree == 1 and t4.measurer._device.name == "t4"
    with pytest.raises(ProfilerError, match="h200 is not here, this machine has a Tesla T4: compile with"):
        profile_gpu(["mlp"], device="h200", out=tmp_path / "d")
