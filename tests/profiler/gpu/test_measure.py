"""From a bundle to a dataset, on a GPU that is not there: records, resume, shares, degrees, what is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler.calibration import timed_labels
from cdmpp.profiler.gpu import measure as module
from cdmpp.profiler.gpu.bundle import write_bundle
from cdmpp.profiler.gpu.measure import BUNDLE_FILE, MeasureConfig, check_gpu, device_of, measure, profile_gpu
from tests.samples.command import Command
from tests.samples.gpu import QUICK, toy_bundle


def config_of(script: dict[str, Any] | None = None, **changes: Any) -> MeasureConfig:
    arguments = {"script": script or {}, **changes.pop("gpu_arguments", {})}
    return MeasureConfig(**{**QUICK, "degree": 1, "gpu_arguments": arguments, **changes})


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
    bundle, out = toy_bundle(30, tasks=5), tmp_path / "d"
    assert measure(bundle, out=out, config=config_of(limit=10)).new == 10
    assert set(Dataset.open(out).records["task"].value_counts()) == {2}, "a limit is even over the tasks"
    with pytest.raises(DatasetError, match="--resume"):
        measure(bundle, out=out, config=config_of())
    assert measure(bundle, out=out, config=config_of(max_seconds=0.0), resume=True).new == 1
    assert [measure(bundle, out=out, config=config_of(), resume=True).new for _ in range(2)] == [19, 0]
    records = Dataset.open(out).records
    assert len(records) == 30 and not records.duplicated(["program", "device"]).any()


def test_shares_are_devices_of_their_own(tmp_path: Path) -> None:
    bundle = toy_bundle(4)
    measure(bundle, out=tmp_path / "d", config=config_of())
    with pytest.raises(DatasetError, match="choose another folder"):
        measure(bundle, out=tmp_path / "d", device="h200@0.5", config=config_of())
    report = measure(bundle, out=tmp_path / "half", device="h200@0.5", config=config_of())
    assert report.device == "h200@0.5" and report.facts.share_sms == 64
    half = Dataset.open(tmp_path / "half")
    assert half.meta["devices"]["h200@0.5"]["cores_used"] == 64
    assert half.records["device"].value_counts().to_dict() == {"h200@0.5": 4}


@pytest.mark.parametrize("name", ["a100", "h200@0", "h200@2", "h200@half", None, "h200@1.0"])
def test_the_device_is_the_bundles_or_a_share_of_it(name: str | None) -> None:
    if name in (None, "h200@1.0"):
        device = device_of(toy_bundle(), name)
        assert (device.name, device.share) == ("h200", 1.0)
        return
    with pytest.raises(ProfilerError, match="the bundle is for h200"):
        device_of(toy_bundle(), name)


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="A100"):
        measure(toy_bundle(), out=tmp_path, config=config_of(gpu_arguments={"name": "NVIDIA A100-SXM4-40GB"}))


def test_the_calibration_finds_the_degree_of_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The labels are scripted, the rates are not: those of a busy machine must not decide.
    rates = iter(range(1, 100))
    monkeypatch.setattr(module, "timed_labels", lambda outcomes: (timed_labels(outcomes)[0], next(rates)))
    bundle = toy_bundle(48, tasks=4, blocks=(16, 30, 66, 512))  # up to 8, 4, 2, 1 side by side
    # Neighbours do nothing to the first group, 1 % each to the second, 10 % to the third.
    crowds = [(0.0, 0.01, 0.1, 0.0)[i % 4] for i in range(48)]
    script = {f"p{i:03d}": {"run_s": 1e-4 * (1 + i), "crowd": crowd} for i, crowd in enumerate(crowds)}
    config = config_of(script, degree="auto", calibration_programs=12, tolerance=0.02)
    report = measure(bundle, out=tmp_path / "d", config=config)
    assert report.degrees == {8: 8, 4: 2, 2: 1, 1: 1}, "of the second, labels at 4 side by side are off by 3 %"
    refused = [r for r in report.calibration if not r["accepted"]]
    assert {(r["group"], r["degree"]) for r in refused} == {(4, 4), (2, 2)}
    assert all(r["alone_again"] < 0.005 for r in report.calibration)


def test_the_best_of_each_task_are_measured_again_alone(tmp_path: Path) -> None:
    bundle = toy_bundle(16, tasks=2, blocks=(16,))
    script = {f"p{i:03d}": {"run_s": 1e-4 * (1 + i), "crowd": 0.01} for i in range(16)}
    measure(bundle, out=tmp_path / "d", config=config_of(script, degree=8))
    records = Dataset.open(tmp_path / "d").records
    assert len(records) == 18
    alone = records[["alone" in (m or "") for m in records["meta"]]]
    assert set(alone["program"]) == {"p000", "p001"}
    assert alone["latency_s"].min() == pytest.approx(1e-4, rel=0.005)


def test_measuring_imports_neither_tvm_nor_torch_nor_the_device_table(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle", toy_bundle(3))
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "tvm tvm_ffi torch pydantic yaml sklearn scipy safetensors cupy cuda".split():
            raise ImportError(name + " is not for the measuring machine")
sys.meta_path.insert(0, Refuse())
import cdmpp.cli.measure
from cdmpp.profiler.gpu.measure import measure
from tests.profiler.gpu.test_measure import config_of
if __name__ == "__main__":
    print(measure({str(tmp_path / "x.bundle")!r}, out={str(tmp_path / "d")!r}, config=config_of()).ok)
    from cdmpp.cli import main
    print(main(["measure", {str(tmp_path / "x.bundle")!r}, "--out", {str(tmp_path / "e")!r}]))
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    root = Path(__file__).parents[3]
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["3", "2"]
    assert "needs cupy" in done.stderr


def test_compiling_and_measuring_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_toys(networks: list[str], *, device: str, out: Path, **_: Any) -> None:
        asked.append((networks, device))
        write_bundle(out, toy_bundle(6))

    monkeypatch.setattr(module, "make_bundle", compile_toys)
    report = profile_gpu(["mlp"], device="h200", out=tmp_path / "d", measure_config=config_of())
    assert asked == [(["mlp"], "h200")]
    assert report.ok == 6 and (tmp_path / "d" / BUNDLE_FILE).exists()
    again = profile_gpu(["mlp"], device="h200", out=tmp_path / "d", measure_config=config_of(), resume=True)
    assert again.new == 0 and len(asked) == 1
    assert len(Dataset.open(tmp_path / "d").records) == 6


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    (tasks := tmp_path / "tasks.txt").write_text("0123456789abcdef")
    refused, no_gpu = (("--remeasure",), "--remeasure is for CPUs"), r"needs cupy.*cdmpp bundle.*cdmpp measure"
    for options, message in (((), no_gpu), (("--tasks", tasks), no_gpu), refused):
        command("profile", "mlp", "--device", "h200", *options, "--out", tmp_path / "d", code=2)
        assert re.search(message, command.err.replace("\n", " "))
    assert not (tmp_path / "d").exists()


def test_cupy_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(CUDARuntimeError=OSError, getDeviceCount=lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(ProfilerError, match="has no CUDA device"):
        check_gpu()
