"""One command where TVM and the GPU are on one machine, and what it says where they are not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.cli import main
from cdmpp.dataset import Dataset
from cdmpp.errors import ProfilerError
from cdmpp.profiler import profile_gpu as module
from cdmpp.profiler.bundle import write_bundle
from cdmpp.profiler.cuda_measure import MeasureConfig
from cdmpp.profiler.profile_gpu import BUNDLE_FILE, check_gpu, profile_gpu
from cdmpp.profiler.statistics import SamplingPlan
from tests.samples.gpu import FAKE_GPU, toy_bundle

CONFIG = MeasureConfig(
    degree=1,
    plan=SamplingPlan(min_sample_s=0.001, min_samples=2, max_samples=4, max_measure_s=0.2),
    compilers=1,
    gpu=FAKE_GPU,
    gpu_arguments={"script": {}},
)


def test_it_compiles_once_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_toys(networks: list[str], *, device: str, out: Path, **_: Any) -> str:
        asked.append((networks, device))
        write_bundle(out, toy_bundle(6))
        return "made"

    monkeypatch.setattr(module, "make_bundle", compile_toys)
    report = profile_gpu(["mlp"], device="h200", out=tmp_path / "d", measure_config=CONFIG)
    assert asked == [(["mlp"], "h200")] and report.bundle == "made"
    assert report.measured.ok == 6 and (tmp_path / "d" / BUNDLE_FILE).exists()
    again = profile_gpu(["mlp"], device="h200", out=tmp_path / "d", measure_config=CONFIG, resume=True)
    assert again.bundle is None and again.measured.new == 0 and len(asked) == 1
    assert len(Dataset.open(tmp_path / "d").records) == 6


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ProfilerError, match=r"needs cupy.*cdmpp bundle"):
        profile_gpu(["mlp"], device="h200", out=tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_cupy_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(CUDARuntimeError=OSError, getDeviceCount=lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(ProfilerError, match="has no CUDA device"):
        check_gpu()


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["profile", "mlp", "--device", "h200", "--out", str(tmp_path / "d")]) == 2
    assert "cdmpp measure" in capsys.readouterr().err.replace("\n", " ")
    assert main(["profile", "mlp", "--device", "h200", "--remeasure", "--out", str(tmp_path / "d")]) == 2
    assert "--remeasure is for CPUs" in capsys.readouterr().err.replace("\n", " ")
