"""Labels, their noise floor, and the summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cdmpp.dataset import Dataset, load_datasets, noise_floor_mape

from cdmpp.dataset.view import (  # isort: skip
    LABEL_COLUMNS, MIN_REMEASURED, disturbance, label_fingerprint, label_table, remeasured_difference,
)  # fmt: skip
from cdmpp.errors import FAILURE_KINDS

from tests.samples.datasets import (  # isort: skip
    DEVICE, OTHER_DEVICE, add_all, add_measured, failure, program, record, small_dataset, task,
)  # fmt: skip


def records(rows: list[dict[str, Any]]) -> pd.DataFrame:
    base = {
        "program": "p", "task": "t", "device": "d", "status": "ok", "latency_s": 1.0, "noise": 0.02, "origin": "random",
        "measured_at": 0.0, "samples_s": (), "drift": math.nan,
    }  # fmt: skip
    return pd.DataFrame([{**base, **row} for row in rows])


def test_undisturbed_records_count_where_there_are_any() -> None:
    rows = [
        {"latency_s": 2.0, "meta": '{"disturbed": 0.9}'},
        {"latency_s": 1.0, "meta": '{"disturbed": 0.0}', "measured_at": 1.0},
        {"latency_s": 5.0, "program": "q", "meta": '{"disturbed": 0.9}'},
        # Before samples were watched: a slow reference program or halves that disagree say the same.
        {"latency_s": 3.0, "program": "r", "meta": "{}", "drift": 0.3},
        {"latency_s": 4.0, "program": "r", "meta": "{}", "noise": 0.3},
        {"latency_s": 2.5, "program": "r", "meta": "{}", "drift": 0.01},
    ]
    assert list(disturbance(records(rows))) == [0.9, 0.0, 0.9, 1.0, 1.0, 0.0]
    labels = label_table(records(rows)).set_index("program")
    assert dict(labels["latency_s"]) == {"p": 1.0, "q": 5.0, "r": 2.5}
    assert dict(labels["n_records"]) == {"p": 1, "q": 1, "r": 1}
    assert dict(labels["disturbed"]) == {"p": False, "q": True, "r": False}


def test_one_label_per_program_and_device(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "d") as dataset:
        add_measured(dataset, 2, 1, 0)
        add_all(dataset, 3)
        for each in (
            record(0, device=OTHER_DEVICE), record(1, latency_s=9e-3), record(1, latency_s=5e-3), failure(2), failure(3),
        ):  # fmt: skip
            dataset.add_record(each)
        labels = dataset.labels()
    assert tuple(labels.columns) == LABEL_COLUMNS and list(labels.index) == [0, 1, 2, 3]
    assert list(labels["program"]) == [program(n).hash for n in (0, 0, 1, 2)]
    assert list(labels["device"]) == [DEVICE, OTHER_DEVICE, DEVICE, DEVICE]
    assert list(labels["latency_s"]) == pytest.approx([1e-3, 1e-3, 5e-3, 3e-3])  # the median of 2, 9 and 5
    assert list(labels["n_records"]) == [1, 1, 3, 1]
    assert set(labels["task"]) == {task(1).hash}
    assert len(dataset.labels([OTHER_DEVICE])) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_no_label_without_a_usable_latency(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    frame = records([{"latency_s": bad}, {"program": "q"}, {"program": "r", "task": ""}])
    assert list(label_table(frame)["program"]) == ["q"]
    assert "2 ok records have no usable latency or program" in caplog.text


def test_latencies_of_another_writer_that_are_no_labels_are_counted(tmp_path: Path) -> None:
    small_dataset(tmp_path / "d", finalize=True)
    file = tmp_path / "d" / "records.parquet"
    table = pq.read_table(file)
    zeros = pc.multiply(table.column("latency_s"), 0.0)
    column = table.schema.get_field_index("latency_s")
    pq.write_table(table.set_column(column, table.schema.field(column), zeros), file)
    again = Dataset.open(tmp_path / "d")
    assert len(again.labels()) == 0
    assert again.summary()["datasets"][0]["invalid_records"] == 5


def test_fingerprints_distinguish_tables() -> None:
    table, again, other = (label_table(records([{"program": "a"}, {"program": p}])) for p in "bbc")
    assert label_fingerprint(table) == label_fingerprint(again) != label_fingerprint(other)


def simulated(sigma: float, session_sigma: float, repeats: int, n: int = 4000) -> pd.DataFrame:
    """Records of programs of true latency 1 s: ten noisy samples each, and an error of each record."""
    rng = np.random.default_rng(0)
    samples = 1 + sigma * rng.standard_normal((n * repeats, 10))
    samples *= 1 + session_sigma * rng.standard_normal((n * repeats, 1))
    a, b = samples[:, 0::2].mean(1), samples[:, 1::2].mean(1)
    frame = pd.DataFrame({"latency_s": samples.mean(1), "noise": 2 * abs(a - b) / (a + b)})
    frame["program"] = [str(number) for number in range(n) for _ in range(repeats)]
    return records(frame.to_dict("records"))  # type: ignore[arg-type]


def true_error(labels: pd.DataFrame) -> float:
    """Mean relative error of who predicts the true 1 s."""
    return float(np.mean(np.abs(1 - labels["latency_s"]) / labels["latency_s"]))


def test_split_halves_estimate_the_error_of_a_perfect_predictor() -> None:
    labels = label_table(simulated(sigma=0.05, session_sigma=0.0, repeats=1))
    floor = noise_floor_mape(labels)
    assert floor == pytest.approx(true_error(labels), rel=0.05)
    assert floor == pytest.approx(0.05 / math.sqrt(10) * math.sqrt(2 / math.pi), rel=0.05)


def test_remeasurements_see_the_error_that_split_halves_do_not() -> None:
    frame = simulated(sigma=0.02, session_sigma=0.03, repeats=2)
    twice = label_table(frame)  # more records make a better label
    assert noise_floor_mape(twice) == pytest.approx(true_error(twice), rel=0.1)
    single = frame.drop_duplicates("program")
    blind = noise_floor_mape(label_table(single))
    # a tenth of the programs is measured a second time
    some = label_table(frame[(frame["program"].astype(int) % 10 == 0) | ~frame.duplicated("program")])
    once = some[some["n_records"] == 1]
    assert blind is not None and blind < 0.3 * true_error(once)
    assert noise_floor_mape(once) == pytest.approx(true_error(once), rel=0.1)


def test_floors_are_as_high_as_halves_say_and_differ_as_samples_and_the_reference_do() -> None:
    samples = {"calm": (1.0, 1.01, 1.02), "slowed": (1.0, 1.3, 1.6), "slow reference": (1.0, 1.01, 1.02)}
    rows = [{"program": name, "samples_s": values, "drift": 0.0} for name, values in samples.items()]
    rows[2]["drift"] = 0.2
    labels = label_table(records([*rows, {"program": "unknown"}])).set_index("program")
    floors = labels["error_floor"]
    assert floors["slowed"] / floors["calm"] == pytest.approx(0.3 / 0.01)
    assert floors["slow reference"] / floors["calm"] == pytest.approx(math.hypot(0.01, 0.2) / 0.01)
    assert floors.drop("unknown").mean() == pytest.approx(0.01) == floors["unknown"]


def test_difference_of_remeasurements_is_of_pairs() -> None:
    frame = records([{"latency_s": 1.0}, {"latency_s": 3.0}, {"program": "q"}])
    assert dict(remeasured_difference(frame)) == {("p", "d"): 1.0}  # |3 - 1| / 2


def test_few_remeasurements_change_nothing_and_unknown_noise_takes_the_mean() -> None:
    rows = [{"program": str(n), "noise": 0.02} for n in range(MIN_REMEASURED - 1)]
    again = [{**row, "latency_s": 2.0} for row in rows]
    table = label_table(records([*rows, *again, {"program": "x", "noise": math.nan}]))
    floors = table.set_index("program")["error_floor"]
    assert floors["0"] == pytest.approx(0.01 / math.sqrt(2))
    assert floors["x"] == pytest.approx(0.01)


def test_a_device_without_any_noise_figure_has_no_floor() -> None:
    labels = label_table(records([{"noise": math.nan}]))
    assert labels["error_floor"].isna().all() and noise_floor_mape(labels) is None


def test_summary_is_the_contract(tmp_path: Path) -> None:
    small_dataset(tmp_path / "all" / "a")
    with Dataset.create(tmp_path / "all" / "b") as dataset:
        add_all(dataset, 0, networks={"net": 1.0, "two": 1.0})
        dataset.add_record(record(0, device=OTHER_DEVICE))
        dataset.add_record(failure(0, status="run_timeout"))
        dataset.add_record(record(0, device=OTHER_DEVICE, latency_s=1.1e-3))
        dataset.finalize()
    with (tmp_path / "all" / "a" / "records.jsonl").open("a") as file:
        file.write("half a li")
    summary = load_datasets(tmp_path / "all").summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    total = summary["total"]
    failures = {**dict.fromkeys(FAILURE_KINDS, 0), "build_error": 1, "run_timeout": 1}
    assert 0 < total.pop("noise_floor_mape") < 0.02
    assert total == {
        "records": 9, "ok": 7, "failures": failures, "programs": 6, "tasks": 1, "networks": 2, "devices": 2,
    }  # fmt: skip
    first, second = summary["datasets"]
    assert first["path"].endswith("a") and first["corrupt_lines"] == 1 and second["corrupt_lines"] == 0
    assert first["network_names"] == ["net"] and second["device_names"] == [DEVICE, OTHER_DEVICE]
    assert first["origins"] == {"random": 5}
    assert second["by_device"][DEVICE]["failures"]["run_timeout"] == 1
    assert second["by_device"][OTHER_DEVICE]["ok"] == 2
    assert second["remeasured"] == 1 and second["remeasured_disturbed"] is None and second["disturbed"] == 0
    for name in ("difference", "mean", "p90"):
        assert second[f"remeasured_{name}"] == pytest.approx(0.1 / 1.05)
