"""From a bundle to a dataset, on a GPU that is not there: records, resume, shares, degrees, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler import cuda_calibration
from cdmpp.profiler.bundle import write_bundle
from cdmpp.profiler.cuda_calibration import possible_degree
from cdmpp.profiler.cuda_measure import MeasureConfig, measure, share_of
from cdmpp.profiler.statistics import SamplingPlan
from tests.samples.gpu import FAKE_GPU, FakeGpu, toy_bundle, toy_program

PLAN = SamplingPlan(min_sample_s=0.001, min_samples=2, max_samples=4, max_measure_s=0.2)


def config_of(script: dict[str, Any] | None = None, **changes: Any) -> MeasureConfig:
    arguments = {"script": script or {}, **changes.pop("gpu_arguments", {})}
    config = MeasureConfig(
        degree=1,
        plan=PLAN,
        run_timeout_s=0.2,
        hang_s=5.0,
        compilers=1,
        gpu=FAKE_GPU,
        gpu_arguments=arguments,
    )
    return replace(config, **changes)


def test_records_carry_what_the_label_depends_on(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle", toy_bundle(9, statuses={4: "invalid_config"}))
    report = measure(tmp_path / "x.bundle", out=tmp_path / "d", config=config_of())
    assert (report.new, report.ok, report.failures) == (9, 8, {"invalid_config": 1})
    assert report.device == "h200"
    assert report.checked > 0
    dataset = Dataset.open(tmp_path / "d")
    assert set(dataset.records["device"]) == {"h200"}
    assert len(dataset.tasks) == 3 and len(dataset.programs) == 9
    ok = dataset.records[dataset.records["status"] == "ok"].iloc[0]
    meta = json.loads(ok["meta"])
    assert meta["sms"] == 132
    assert meta["cache"] == "warm" and meta["degree"] == 1 and meta["clock_mhz"] == 1980
    assert meta["resources"]["main_kernel"]["registers"] == 10
    session = dataset.meta["sessions"][0]
    assert session["gpu"]["share_sms"] == 132 and session["session"] == ok["session"]
    assert dataset.meta["devices"]["h200"]["model"] == "NVIDIA H200"


def test_resume_measures_nothing_twice(tmp_path: Path) -> None:
    bundle = toy_bundle(10)
    first = measure(bundle, out=tmp_path / "d", config=config_of(limit=4))
    assert first.new == 4
    with pytest.raises(DatasetError, match="--resume"):
        measure(bundle, out=tmp_path / "d", config=config_of())
    second = measure(bundle, out=tmp_path / "d", config=config_of(), resume=True)
    assert second.new == 6
    third = measure(bundle, out=tmp_path / "d", config=config_of(), resume=True)
    assert third.new == 0
    records = Dataset.open(tmp_path / "d").records
    assert len(records) == 10 and not records.duplicated(["program", "device"]).any()


def test_a_limit_is_even_over_the_tasks(tmp_path: Path) -> None:
    measure(toy_bundle(30, tasks=5), out=tmp_path / "d", config=config_of(limit=10))
    assert set(Dataset.open(tmp_path / "d").records["task"].value_counts()) == {2}


def test_shares_are_devices_of_their_own(tmp_path: Path) -> None:
    bundle = toy_bundle(4)
    measure(bundle, out=tmp_path / "whole", config=config_of())
    report = measure(bundle, out=tmp_path / "half", device="h200@0.5", config=config_of())
    assert report.device == "h200@0.5" and report.facts.share_sms == 64
    dataset = Dataset.open(tmp_path / "half")
    assert dataset.meta["devices"]["h200@0.5"]["cores_used"] == 64
    assert dataset.records["device"].value_counts().to_dict() == {"h200@0.5": 4}
    with pytest.raises(DatasetError, match=r"choose another folder for those of h200@0\.5"):
        measure(bundle, out=tmp_path / "whole", device="h200@0.5", config=config_of())


@pytest.mark.parametrize("device", ["a100", "h200@0", "h200@2", "h200@half"])
def test_another_device_is_refused(device: str) -> None:
    with pytest.raises(ProfilerError, match="the bundle is for h200"):
        share_of(toy_bundle(), device)


def test_the_whole_has_the_name_of_the_base() -> None:
    assert share_of(toy_bundle(), None) == ("h200", 1.0)
    assert share_of(toy_bundle(), "h200@1.0") == ("h200", 1.0)


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    config = config_of(gpu_arguments={"name": "NVIDIA A100-SXM4-40GB"})
    with pytest.raises(ProfilerError, match="A100"):
        measure(toy_bundle(), out=tmp_path / "d", config=config)


def test_a_wrong_output_is_a_failure(tmp_path: Path) -> None:
    script = {f"p{i:03d}": {"wrong": True} for i in range(6)}
    report = measure(toy_bundle(6, tasks=1), out=tmp_path / "d", config=config_of(script, check_per_task=2))
    assert report.failures == {"run_error": 2} and report.ok == 4


def test_the_degree_that_fits_follows_from_the_grid() -> None:
    gpu = FakeGpu()
    assert [possible_degree(toy_program(b), gpu.facts) for b in (1, 16, 17, 66, 67, 132)] == [
        8,
        8,
        4,
        2,
        1,
        1,
    ]
    assert possible_degree(toy_program(1000), FakeGpu(share=0.25).facts) == 4


def test_the_calibration_finds_the_degree_of_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The labels are scripted, the rates are not: those of a busy machine must not decide.
    labels = cuda_calibration._labels
    monkeypatch.setattr(
        cuda_calibration,
        "_labels",
        lambda engine, jobs, degree: (labels(engine, jobs, degree)[0], float(degree)),
    )
    bundle = toy_bundle(48, tasks=4, blocks=(16, 30, 66, 512))  # up to 8, 4, 2, 1 side by side
    script = {}
    for i in range(48):
        # Neighbours do nothing to the first group, 1 % each to the second, 10 % to the third.
        crowd = (0.0, 0.01, 0.1, 0.0)[i % 4]
        script[f"p{i:03d}"] = {"run_s": 1e-4 * (1 + i), "crowd": crowd}
    config = config_of(script, degree="auto", calibration_programs=12, tolerance=0.02)
    report = measure(bundle, out=tmp_path / "d", config=config)
    assert report.degrees[8] == 8
    assert report.degrees[4] == 2, "at 4 side by side labels are off by 3 %"
    assert report.degrees[2] == 1
    assert report.degrees[1] == 1
    refused = [r for r in report.calibration if not r.accepted]
    assert {(r.group, r.degree) for r in refused} == {(4, 4), (2, 2)}
    assert all(r.alone_again < 0.005 for r in report.calibration)


def test_the_best_of_each_task_are_measured_again_alone(tmp_path: Path) -> None:
    bundle = toy_bundle(16, tasks=2, blocks=(16,))
    script = {f"p{i:03d}": {"run_s": 1e-4 * (1 + i), "crowd": 0.01} for i in range(16)}
    measure(bundle, out=tmp_path / "d", config=config_of(script, degree=8))
    records = Dataset.open(tmp_path / "d").records
    assert len(records) == 18
    alone = records[["alone" in (m or "") for m in records["meta"]]]
    assert set(alone["program"]) == {"p000", "p001"}
    assert alone["latency_s"].min() == pytest.approx(1e-4, rel=0.005)


def test_a_run_that_is_stopped_goes_on_later(tmp_path: Path) -> None:
    bundle = toy_bundle(40)
    first = measure(bundle, out=tmp_path / "d", config=config_of(max_seconds=0.0))
    assert first.new == 1
    second = measure(bundle, out=tmp_path / "d", config=config_of(), resume=True)
    assert second.new == 39


def test_measuring_imports_neither_tvm_nor_torch_nor_the_device_table(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle", toy_bundle(3))
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi", "torch", "pydantic", "yaml", "sklearn", "cupy", "cuda"):
            raise ImportError(name + " is not for the measuring machine")
sys.meta_path.insert(0, Refuse())
import cdmpp.cli.measure
from cdmpp.profiler.cuda_measure import measure
from tests.profiler.test_cuda_measure import config_of
if __name__ == "__main__":
    print(measure({str(tmp_path / "x.bundle")!r}, out={str(tmp_path / "d")!r}, config=config_of()).ok)
    from cdmpp.cli import main
    print(main(["measure", {str(tmp_path / "x.bundle")!r}, "--out", {str(tmp_path / "e")!r}]))
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["3", "2"]
    assert "needs cupy" in done.stderr
