"""Labels of PyTorch's own kernels: real ones of a small network, and what is kept when a run dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdmpp.dataset.operators import load_operators
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler import library
from cdmpp.profiler.library import profile_library
from cdmpp.profiler.machine import usable_cores
from cdmpp.profiler.statistics import SamplingPlan
from cdmpp.program.network import Network

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SamplingPlan(min_sample_s=1e-4, min_samples=2, max_samples=2, max_wait_s=0.0)
    monkeypatch.setattr(library, "_PLAN", plan)


def network(width: int = 96) -> Network:
    module = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    return Network.from_torch(module, [torch.randn(4, 64)])


def test_operators_are_measured_warm_and_cold_and_a_run_goes_on(tmp_path: Path) -> None:
    before = usable_cores()
    report = profile_library([network(), network()], out=tmp_path / "l")
    assert (report.new, report.labels, report.failures) == (3, 5, {}) and usable_cores() == before
    table = load_operators(tmp_path / "l")
    assert sorted(table["framework"]) == ["torch"] * 3 + ["torch-cold"] * 2
    assert set(table["device"]) == {report.device} and (table["seconds"].between(1e-8, 0.1)).all()
    assert set(table["kernel"]) == {"linear", "relu"}
    with pytest.raises(DatasetError, match="go on with --resume"):
        profile_library([network()], out=tmp_path / "l")
    partial = tmp_path / "l" / "measured.jsonl"
    partial.write_text(partial.read_text() + '{"key": "half a li')
    again = profile_library([network(), network(80)], out=tmp_path / "l", resume=True)
    assert (again.new, again.labels) == (3, 10), "what was measured is not measured again"


def test_what_a_kernel_refuses_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: object, *rest: object) -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(library, "_measured", refuse)
    with pytest.raises(ProfilerError, match="no operator of these networks could be measured"):
        profile_library([network()], out=tmp_path / "l")


def test_other_devices_are_refused(tmp_path: Path) -> None:
    for device in ("h200", "graviton3@1"):
        with pytest.raises(ProfilerError, match="is not this machine's CPU"):
            profile_library([network()], device, tmp_path / "l")
