"""A network from a torch module to its tuned latency, with the real engine, in Python and on the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli.tune import devices_with_shares
from cdmpp.device import Device
from cdmpp.errors import TunerError
from cdmpp.profiler.calibration import Calibration, DegreeResult
from cdmpp.program import import_tvm
from cdmpp.program.network import Network
from cdmpp.tuner.config import TuneConfig
from cdmpp.tuner.deployment import apply_database, import_network, measure_network
from cdmpp.tuner.measure import Measurer, calibrated_degree, device_of_this_machine
from cdmpp.tuner.results import TuneReport, json_database
from cdmpp.tuner.tuning import tune, tune_tasks
from tests.samples.command import Command
from tests.samples.programs import QUICK_PLAN, matmul_task
from tests.samples.tuning import FakeEngine, tune_config

pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(scope="module")
def network() -> Network:
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 64))
    return Network.from_torch(module, (torch.randn(8, 64),), "two_layers")


def test_a_network_is_tuned_and_runs_as_before(tmp_path: Path, network: Network, monkeypatch) -> None:
    config = tune_config(6, batch=3, plan=QUICK_PLAN)
    out = tmp_path / "t"
    report = tune(network, device="this-cpu@1", out=out, config=config)
    assert report.costs.measurements == 6 and report.costs.build_s > 0 and report.costs.search_cpu_s > 0
    assert report.network is not None
    assert set(report.network.latency_s) == {"untuned", "tuned"}
    assert all(0 < s < 0.1 for s in report.network.latency_s.values())
    assert report.network.output_difference < 1e-4, "the tuned network computes the same"
    assert report.speedup is not None and report.speedup > 0.5
    written = json.loads((out / "report.json").read_text())
    assert written["costs"]["measurements"] == 6 and len(written["tasks"]) == 2
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert "two_layers" in page and "times as fast" in page

    target = import_tvm().target.Target({"kind": "llvm", "num-cores": 1})
    fused = import_network(network)
    _, tuned = apply_database(fused.module, json_database(out), target)
    assert sorted(tuned) == sorted(set(fused.calls)), "every task that the network runs has a record"

    from tvm.relax.transform import MetaScheduleApplyDatabase

    with target:
        plain = MetaScheduleApplyDatabase(str(out))(fused.module)
    scheduled = [name for name in set(fused.calls) if plain[name].attrs["tirx.is_scheduled"]]
    assert sorted(scheduled) == sorted(set(fused.calls)), "TVM's own pass takes them from the folder"

    monkeypatch.setattr("cdmpp.tuner.deployment._TIMEOUT_S", 0.0)
    said = list[str]()
    assert tune(network, device="this-cpu@1", out=out, config=config, resume=True, notify=said.append).network is None
    assert said[-1].endswith("the whole network was not measured: running two_layers took over 0 s")
    assert json.loads((out / "report.json").read_text())["network"] is None


def test_a_network_that_does_not_compile(network: Network) -> None:
    fused = import_network(network)
    broken = fused.module.clone()
    del broken[fused.calls[0]]
    with pytest.raises(TunerError, match="does not compile"):
        measure_network(fused, network, device_of_this_machine("this-cpu@1"), {"a": broken}, (0,), plan=QUICK_PLAN)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"batch": 0}, "batch is 0, expected a number above 0"), ({"workers": 0}, "workers is 0"),
        ({"workers": "many"}, "workers are a number or 'auto', got 'many'"),
        ({"search": "blind"}, "no search 'blind'; there are cdmpp, metaschedule"), ({"compile": 0}, "compile is 0"),
        ({"builders": 0}, "builders is 0"), ({"build_timeout_s": 0.0}, "build_timeout_s is 0"),
        ({"run_timeout_s": float("nan")}, "run_timeout_s is nan, expected a number above 0"),
        ({"population": 1}, "a population of 2 and a generation at least, got 1 and 1"),
        ({"trim": 2.0}, "between 0 and 1, got 2"), ({"cost_model": "mlp"}, "no cost model 'mlp'"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(TunerError, match=message):
        tune_config(1, **bad)


def test_command_line(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "t"
    small = ("--batch", 2, "--population", 8, "--generations", 1, "--predictor", "none")
    args = ("tune", "mlp", "--device", "this-cpu@1", "--out", out, *small)
    result = command.json(*args, "--trials", 4)
    assert "times as fast" in command.out and "4 trials: 4 measured" in command.out
    assert "importing mlp" in command.err
    assert {"speedup", "network", "costs", "curve", "tasks", "gain_next_minute"} <= set(result)
    assert result["tuned_s"] == pytest.approx(sum(task["weight"] * task["best_s"] for task in result["tasks"]))
    command("report", out, "--out", tmp_path / "page.html")
    assert "<h2>Tasks</h2>" in (tmp_path / "page.html").read_text()
    for more, said in (
        (("--trials", 8), "--resume"),
        (("--trials", 9, "--shards", 99), "99 shards of"),
        (("--trials", 9, "--share", 2), "give the share once"),
        (("--trials", 9, "--cost-model", "random", "--resume"), "cost_model cdmpp, not random"),
    ):
        command(*args, *more, code=2)
        assert said in command.err.splitlines()[-1]


@pytest.mark.parametrize(("cores", "share", "chosen"), [(1, 1, 1), (5, 1, 1), (6, 1, 6), (13, 8, 1)])
def test_the_degree_is_calibrated_where_enough_cores_build(monkeypatch, cores: int, share: int, chosen: int) -> None:
    said: list[str] = []
    monkeypatch.setattr("cdmpp.profiler.machine.usable_cores", lambda: tuple(range(cores)))
    monkeypatch.setattr("cdmpp.profiler.calibration.usable_cores", lambda: tuple(range(cores)))

    def calibrate(measure: Any, degrees: list[int], *_: Any) -> Any:
        return Calibration(degrees[0], 0.02, DegreeResult(1, 1.0), (DegreeResult(degrees[0], 1.5, accepted=True),))

    monkeypatch.setattr("cdmpp.profiler.calibration.calibrate", calibrate)
    config, device = tune_config(8, workers="auto"), device_of_this_machine("this-cpu@1", "auto")
    assert calibrated_degree(config, replace(device, share=share), [], said.append) == chosen
    assert len(said) == (0 if chosen == 1 else 2), "it says what it does and what it found"
    with pytest.raises(TunerError, match="--workers auto is for CPUs"):
        device_of_this_machine("h200", "auto")


def test_what_is_wrong_is_said_before_the_network_is_imported(tmp_path, command, monkeypatch) -> None:
    def importing(*_: Any) -> Any:
        raise AssertionError("it began to import the network")

    monkeypatch.setattr("cdmpp.program.network.load_network", importing)
    out, no = tmp_path / "t", tmp_path / "no"
    (tmp_path / "file").write_text("")
    args = ("tune", "mlp", "--device", "this-cpu@1", "--trials", 8, "--out")
    assert "no predictor here" in command.error(*args, out, "--predictor", no)
    assert "does not exist" in command.error(*args, out, "--validity", no)
    assert "no folder of earlier records" in command.error(*args, out, "--warm-start", no)
    assert "is a file" in command.error(*args, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tvm", None)
    assert "this needs TVM" in command.error(*args, out)
    assert not out.exists()


def test_several_shares_are_tuned_on_the_command_line(tmp_path, command, monkeypatch) -> None:
    assert devices_with_shares("this-cpu@1", None) == devices_with_shares("this-cpu@1", "1") == ["this-cpu@1"]
    assert devices_with_shares("this-cpu", "2") == ["this-cpu@2"]
    assert devices_with_shares("this-cpu", "1, 2") == ["this-cpu@1", "this-cpu@2"]
    with pytest.raises(TunerError, match="give the share once"):
        devices_with_shares("this-cpu@1", "2")
    here = device_of_this_machine("this-cpu@1")

    def device_of(device: str, *_: object) -> Device:
        share = device.partition("@")[2]
        return replace(here, name=f"{here.base}@{share}", share=float(share))

    def tune_toy(network: str, *, device: str, out: Path, config: TuneConfig, **_: object) -> TuneReport:
        tasks = [(matmul_task(32), 1.0)]
        with Measurer(FakeEngine()) as measurer:
            return tune_tasks(network, tasks, device=device, out=out, config=config, measurer=measurer)

    monkeypatch.setattr("cdmpp.tuner.measure.device_of_this_machine", device_of)
    monkeypatch.setattr("cdmpp.tuner.tune", tune_toy)
    out, small = tmp_path / "t", ("--batch", 6, "--population", 24, "--generations", 1, "--cost-model", "random")
    args = ("tune", "toy", "--device", "this-cpu", "--share", "1,2", "--trials", 6, "--out", out, *small)
    assert set(command.json(*args)["tunings"]) == {"this-cpu@1", "this-cpu@2"}
    assert sorted(folder.name for folder in out.iterdir()) == ["share-1", "share-2"]
    (out / "share-1").rename(tmp_path / "elsewhere")
    assert "share-2 holds a tuning already" in command.error(*args)
    assert not (out / "share-1").exists(), "said before the first is tuned"
