"""Figures of the benchmark of unseen devices, from results made up."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cross_device import figures
from cdmpp.device import load_table


def errors(ours: float, theirs: float, n: int) -> dict[str, Any]:
    of = {"cdmpp": ours, "neusight": theirs}
    sources = {
        name: {"ape_mean": ape, "n_own": n, "ape_mean_own": ape, "ours_ape_mean_own": ours} for name, ape in of.items()
    }  # fmt: skip
    return {"n": n, "n_common": n, "sources": sources}


def row(device: str, ours: float, theirs: float, n: int = 2, **other: Any) -> dict[str, Any]:
    rows = [{"predicted_s": {"cdmpp": 1 + ours}, "measured_s": 1.0}] * n
    return {
        "device": device, "k": 0, "seed": 0, "vendor": "nvidia", "in_training": False,
        "operators": {"mape": ours, "n": 10, "interval": [ours / 2, 2 * ours]},
        "end_to_end": {**errors(ours, theirs, n), "rows": rows},
        "nodes": {"forward": {"families": {"BMM": errors(ours, theirs, n)}}}, **other,
    }  # fmt: skip


def taught(device: str, k: int, mape: float, seed: int = 0) -> dict[str, Any]:
    found = {"device": device, "k": k, "seed": seed, "vendor": "nvidia"}
    return {**found, "operators": {"mape": mape, "n": 9}}


def test_figures_of_devices_seen_and_not_seen() -> None:
    rows = [
        row("v100", 0.02, 0.06, 3), row("t4", 0.08, 0.18, 1), row("mi100", 0.9, 0.1, vendor="amd"),
        row("a100", 0.7, 0.1, in_training=True), taught("t4", 20, 0.08), taught("v100", 20, 0.1),
        taught("t4", 20, 0.06, seed=1), taught("v100", 20, 0.12, seed=1),
    ]  # fmt: skip
    found = {shown["name"]: shown for shown in figures(rows)}
    assert found["v100, unseen"]["values"] == {
        "mape": 0.02, "end to end": 0.02, "NeuSight end to end": 0.06, "networks": 3,
    }  # fmt: skip
    assert found["v100, unseen"]["interval"] == {"mape": [0.01, 0.04]}
    assert found["a100, in training"]["values"]["mape"] == 0.7
    assert found["t4, 20 measured"]["values"] == {"mape": pytest.approx(0.07)}
    assert found["t4, 20 measured"]["seeds"] == [0, 1]
    mean = found["mean, unseen"]["values"]
    assert mean["mape"] == pytest.approx((0.02 + 0.08 + 0.9) / 3), "what was trained on does not count"
    assert mean["end to end"] == pytest.approx((3 * 0.02 + 0.08) / 4) and mean["networks"] == 4
    assert found["mean, 20 measured"]["values"]["mape"] == pytest.approx(0.09)
    nodes = found["nodes, forward, BMM, unseen (NVIDIA's)"]
    assert nodes["values"] == {"APE": pytest.approx(0.035), "NeuSight's APE": pytest.approx(0.09)}
    assert nodes["n"] == 4


def test_devices_seen_in_training_have_no_mean() -> None:
    (shown,) = figures([row("a100", 0.1, 0.2, in_training=True)])
    assert shown["name"] == "a100, in training"
    assert figures([]) == []


def test_every_device_of_the_authors_is_known_as_they_write_it() -> None:
    path = Path(__file__).parents[2] / ".." / "shared" / "data" / "neusight_devices.csv"
    if not path.exists():
        pytest.skip("NeuSight's table of devices is not there")
    with path.open(encoding="utf-8") as file:
        names = [row["Device"] for row in csv.DictReader(file)]
    table = load_table()
    for name in names:
        device = table.get(name)
        assert table.get(name.replace(" ", "_")) == device
        assert device.kind == "gpu" and device.bandwidth_gb_s and device.peak_gflops.get("float32"), name
