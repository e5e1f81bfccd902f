"""Goals and tables of the benchmark of unseen devices, from results made up."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cross_device_report import goals, tables
from cdmpp.device import load_table


def errors(ours: float, theirs: float, n: int) -> dict[str, Any]:
    return {
        "n": n,
        "n_common": n,
        "sources": {
            "cdmpp": {"ape_mean": ours, "n_own": n, "ape_mean_own": ours, "ours_ape_mean_own": ours},
            "neusight": {"ape_mean": theirs, "n_own": n, "ape_mean_own": theirs, "ours_ape_mean_own": ours},
        },
    }


def device(
    ours: float, theirs: float, n: int = 2, vendor: str = "nvidia", seen: bool = False
) -> dict[str, Any]:
    rows = [{"predicted_s": {"cdmpp": 1 + ours}, "measured_s": 1.0}] * n
    nodes = {"forward": {"families": {"BMM": errors(ours, theirs, n)}}}
    return {
        "vendor": vendor,
        "in_training": seen,
        "nearest_training_device": "p4",
        "zero_shot": {"end_to_end": {**errors(ours, theirs, n), "rows": rows}, "nodes": nodes},
    }


def test_goals_of_devices_that_were_not_seen() -> None:
    devices = {
        "v100": device(0.02, 0.06, 3),
        "t4": device(0.08, 0.18, 1),
        "mi100": device(0.9, 0.1, vendor="amd"),
        "a100": device(0.9, 0.1, seen=True),
    }
    devices["t4"]["few_shot"] = {
        "kmeans": {"20": {"0": {"operator_mape": 0.08}, "1": {"operator_mape": 0.1}}}
    }
    found = goals(devices)
    assert found["end_to_end_at_most_neusight"]["met"] is True
    assert set(found["end_to_end_at_most_neusight"]["devices"]) == {"v100", "t4"}
    mean = found["end_to_end_mean"]
    assert (mean["cdmpp"], mean["of_devices"], mean["met"]) == (
        pytest.approx((3 * 0.02 + 0.08) / 4),
        pytest.approx(0.05),
        True,
    )
    bmm = found["forward_nodes_at_most_half_of_neusight"]["families"]["BMM"]
    assert bmm["cdmpp"] == pytest.approx(0.035) and bmm["neusight"] == pytest.approx(0.09)
    assert bmm["limit"] == pytest.approx(0.045) and bmm["met"]
    assert found["mape_with_20_measurements"]["cdmpp"] == pytest.approx(0.09)
    assert found["mape_with_20_measurements"]["met"] is True


def test_goals_that_are_not_met() -> None:
    found = goals({"v100": device(0.2, 0.1), "t4": device(0.01, 0.1)})
    assert [goal["met"] for goal in found.values()] == [False, False, False, None]
    assert found["end_to_end_at_most_neusight"]["devices"]["t4"]["met"] is True


def test_nothing_to_tell() -> None:
    assert {goal["met"] for goal in goals({}).values()} == {None}
    assert {goal["met"] for goal in goals({"a100": device(0.1, 0.2, seen=True)}).values()} == {None}


def test_the_tables_mark_what_was_seen_in_training() -> None:
    devices = {"v100": device(0.021, 0.06), "a100": device(0.1, 0.2, seen=True)}
    lines = tables({"devices": devices, "goals": goals(devices)}).splitlines()
    (seen,) = [line for line in lines if "SEEN IN TRAINING" in line]
    assert seen.startswith("a100")
    assert any(line.startswith("v100") and "2.1" in line and line.endswith("p4") for line in lines)
    assert any(line.startswith("end_to_end_mean: met") for line in lines)


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
