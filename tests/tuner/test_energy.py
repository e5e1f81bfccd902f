"""Energy: counters that are made up, and what a tuning says of them."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cdmpp.device import get_device
from cdmpp.errors import TunerError
from cdmpp.tuner.measure import energy_meter
from cdmpp.tuner.results import TuneReport, summary_lines
from tests.samples.tuning import FakeEngine, tuned

pytestmark = pytest.mark.usefixtures("on_zen3")


def domain(powercap: Path, folder: str, name: str, energy_uj: int, range_uj: int = 1_000_000) -> Path:
    path = powercap / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path


def test_packages_add_up_and_wrap_around(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    part = domain(tmp_path, "intel-rapl:0:0", "core", 0)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 100)
    machine = domain(tmp_path, "intel-rapl:2", "psys", 0)
    counter = energy_meter(get_device("this-cpu@1"), tmp_path)
    assert counter is not None and counter.joules() == 0
    for path in (part, machine):
        (path / "energy_uj").write_text("999999")
    (first / "energy_uj").write_text("950000")
    assert counter.joules() == pytest.approx(0.05), "what packages are in, and their parts, are not added"
    (first / "energy_uj").write_text("20000")
    (second / "energy_uj").write_text("300100")
    assert counter.joules() == pytest.approx(0.05 + (1.0 - 0.95 + 0.02) + 0.3)


def test_a_processor_that_does_not_tell(tmp_path: Path) -> None:
    device = get_device("this-cpu@1")
    assert energy_meter(device, tmp_path / "nothing") is None
    path = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()  # which nobody may read, whoever runs this
    assert energy_meter(device, tmp_path) is None


def test_an_energy_budget_that_nobody_can_count_is_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("cdmpp.tuner.measure.energy_meter", lambda device: None)
    with pytest.raises(TunerError, match="nothing here counts the energy of"):
        tuned(FakeEngine(), tmp_path / "t", 4, options={"energy_budget_j": 5.0})
    assert not (tmp_path / "t").exists(), "so that the same folder serves without it"


class NvmlError(Exception):
    """NVML's."""


@pytest.mark.parametrize("tells", [True, False])
def test_a_gpu_counts_or_does_not_tell(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    readings = iter([5_000, 5_000, 12_500] if tells else [])

    def energy_mj(handle: int) -> int:
        for value in readings:
            return value
        raise NvmlError("Not Supported")

    module: Any = types.ModuleType("pynvml")
    module.NVMLError = NvmlError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetTotalEnergyConsumption = energy_mj
    monkeypatch.setitem(sys.modules, "pynvml", module)
    counter = energy_meter(get_device("h200@0.5"))
    assert (counter is not None) is tells
    if counter is not None:
        assert (counter.joules(), counter.joules()) == (0.0, 7.5)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_meter(get_device("h200")) is None, "nvidia-ml-py is not installed"


def steps(until: int = 1_000) -> Any:
    """Two joules more each time; breaks after some."""
    asked = iter(range(1, until + 1))

    def joules() -> float:
        for number in asked:
            return 2.0 * number
        raise OSError("gone")

    return types.SimpleNamespace(joules=joules)


def counted(out: Path, trials: int, meter: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> TuneReport:
    monkeypatch.setattr("cdmpp.tuner.measure.energy_meter", lambda device: meter)
    return tuned(FakeEngine(), out, trials, options={"cost_model": "random"}, **more)


def test_a_tuning_counts_what_all_its_runs_took_or_does_not_tell(tmp_path: Path, monkeypatch, caplog) -> None:
    report = counted(tmp_path / "t", 6, steps(), monkeypatch)
    first_j = report.costs.energy_j
    assert first_j is not None and f"Energy: {first_j:.0f} J" in "".join(summary_lines(report))
    assert report.to_json()["costs"]["energy_j"] == first_j
    second = steps()
    both_j = counted(tmp_path / "t", 12, second, monkeypatch, resume=True).costs.energy_j
    assert both_j is not None and both_j > second.joules() - 2.0, "with what the first run's curve had"

    report = counted(tmp_path / "v", 6, None, monkeypatch)
    assert report.costs.energy_j is None and "Energy: the device does not tell." in summary_lines(report)
    assert counted(tmp_path / "v", 12, steps(), monkeypatch, resume=True).costs.energy_j is None
    assert counted(tmp_path / "u", 12, steps(2), monkeypatch).costs.energy_j is None
    assert caplog.text.count("not counted any more: gone") == 1
