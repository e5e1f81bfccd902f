"""Micro-benchmarks: the row they make, the command line. Speeds themselves are not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli import main
from cdmpp.device import Device, DeviceTable, get_device, load_table
from cdmpp.device.table import read_device_file, write_device_file
from cdmpp.errors import CdmppError
from cdmpp.profiler import rates
from cdmpp.profiler.rates import as_row, best_s


def test_the_best_run_counts_and_the_first_does_not() -> None:
    times = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.4, 3.0, 3.4, 4.0, 4.5, 5.0, 5.5])
    calls: list[int] = []
    assert best_s(lambda: calls.append(1), lambda: next(times)) == pytest.approx(0.1)
    assert len(calls) == 6


KNOWN = Device(name="g1", kind="gpu", model="Gadget One", clock_mhz=1000, l2_kb=2048, sources=("datasheet",))


def test_a_measured_row_fills_in_what_the_table_leaves_open(tmp_path: Path) -> None:
    results = {"copy_gb_s": 123.456, "l2_kb": 1024.0, "launch_us": 2.5, "cores": 20.0, "float32_gflops": 900.0}
    found = as_row(DeviceTable([KNOWN]), "Gadget One", "gpu", results)
    assert found.known == KNOWN and found.row.name == "g1"
    assert (found.row.bandwidth_gb_s, found.row.launch_overhead_us, found.row.cores) == (123.5, 2.5, 20)
    assert found.row.l2_kb is None and not found.row.peak_gflops, "the table says"
    assert found.row.measured == {**results, "copy_gb_s": 123.5}
    write_device_file([found.row], tmp_path / "mine.yaml")
    device = DeviceTable([KNOWN, *read_device_file(tmp_path / "mine.yaml")]).get("gadget one")
    assert (device.bandwidth_gb_s, device.l2_kb, device.measured["l2_kb"]) == (123.5, 2048, 1024)
    assert device.sources == ("datasheet; measured: cdmpp devices --measure",)
    new = as_row(DeviceTable([]), "Gadget Two", "gpu", results, mcpu="sm_99").row
    assert (new.name, new.model, new.mcpu) == ("gadget-two", "Gadget Two", "sm_99")
    assert new.peak_gflops == {"float32": 900.0}


@pytest.mark.usefixtures("real_machine")
def test_the_command_line_measures_this_machine(tmp_path, monkeypatch, capsys) -> None:
    streams = {"copy_gb_s": 10.0, "float32_gflops": 100.0, "cores": 2.0}
    monkeypatch.setattr(rates, "_streams", lambda cores: (streams, 1.0))
    out, report = tmp_path / "here.yaml", tmp_path / "here.json"
    assert main(["devices", "--measure", "--out", str(out), "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "copy_gb_s" in shown and "measured" in shown and str(out) in shown.replace("\n", "")
    here = json.loads(report.read_text())[0]
    assert here["name"] == get_device("this-cpu").base
    assert all(value > 0 for value in here["measured"].values())
    assert {"copy_gb_s", "float32_gflops", "launch_us"} <= set(here["measured"])
    device = get_device("this-cpu", load_table([out]))
    assert device.measured["float32_gflops"] == pytest.approx(here["measured"]["float32_gflops"], rel=1e-3)


def test_torch_tells_bandwidth_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "_BUDGET_S", 0.001)
    found, given = rates._streams(1)
    assert given > 0
    assert found.pop("cores") == 1 and set(found) == {"copy_gb_s", "float32_gflops"}
    assert all(value > 0 for value in found.values())


def test_what_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise CdmppError("this needs TVM")

    monkeypatch.setattr(rates, "_launch_s", absent)
    monkeypatch.setattr(rates, "_streams", lambda cores: ({"copy_gb_s": 0.1}, 0.25))
    monkeypatch.setattr(rates, "core_rates", lambda device: ({"clock_ghz": 3.0}, ["l3_ns differs by 9 %"]))
    found = rates.measure_cpu(load_table())
    busy = "bandwidth and peak: other work on this machine left 25 % of the cores"
    assert found.skipped == (busy, "l3_ns differs by 9 %", "call overhead: this needs TVM")
    assert found.results == {"clock_ghz": 3.0}


def test_out_needs_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--out", str(tmp_path / "x.yaml")]) == 2
    assert "give both" in capsys.readouterr().err


def test_a_gpu_is_measured_beside_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    product, bytes_ = 2 * 32**3, 1 << 12
    monkeypatch.setattr(rates, "_GPU_SIDE", 32)
    monkeypatch.setattr(rates, "_GPU_STREAM_BYTES", bytes_)
    times = iter([2 * bytes_ / 1e12, product / 2e13, product / 2e14, product / 4e14, 2000 * 3e-6])

    def seconds(run: Callable[[], Any]) -> float:
        run()
        return next(times)

    found = {"cores": 132.0, "l2_kb": 51200.0, **rates._gpu_rates("cpu", seconds)}
    gpu = as_row(load_table(), "NVIDIA H200", "gpu", found)
    assert gpu.row.name == "h200"
    assert gpu.results["copy_gb_s"] == pytest.approx(1000) and gpu.results["launch_us"] == pytest.approx(3)
    assert gpu.results["float32_gflops"] == pytest.approx(2e4)
    assert gpu.results["tfloat32_matrix_gflops"] == pytest.approx(2e5)
    assert gpu.row.launch_overhead_us == 3.0  # the table leaves it open; the rest it says
    assert (gpu.row.bandwidth_gb_s, gpu.row.cores, gpu.row.l2_kb) == (None, None, None)
