"""What benchmarks share: provenance, rows that a later run goes on with, spread, intervals, tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import common
from benchmarks.common import Results, bootstrap, changed, digest, figure, provenance, report
from cdmpp.predictor.metrics import evaluate_predictions

BENCHMARKS = sorted(
    path.stem
    for path in (common.REPOSITORY / "benchmarks").glob("*.py")
    if path.stem not in ("common", "core_table", "results", "sampled", "traces")  # not benchmarks
)


def made(**other: Any) -> dict[str, Any]:
    return {**provenance(common.__file__, seeds=[3]), **other}


def test_provenance_says_what_figures_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/common.py", "--seed", "3", "a b"])
    (tmp_path / "records.csv").write_text("1")
    found = provenance(common.__file__, [tmp_path], "default", [3])
    assert found["command"] == "python benchmarks/common.py --seed 3 'a b'"
    assert list(found["code"]) == ["cdmpp", "benchmarks/common.py"]
    assert list(found["weights"]) == ["cdmpp/predictor/weights/default"]
    ((name, of_data),) = found["data"].items()
    assert (common.REPOSITORY / name).resolve() == tmp_path and of_data.startswith("sha256:")
    assert found["seeds"] == [3] and found["date"].startswith("20")
    assert {"python", "torch", "tvm", "numpy", "xgboost"} <= set(found["versions"])
    assert found["versions"]["numpy"] == np.__version__
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gb"] > 0
    if common.git("rev-parse", "HEAD"):
        assert len(found["commit"]) == len(found["code"]["cdmpp"]) == 40 and isinstance(found["dirty"], bool)


def test_without_git_the_contents_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "git", lambda *arguments: None)
    found = provenance(common.__file__)
    assert found["commit"] is None and found["code"]["benchmarks/common.py"].startswith("sha256:")
    before = digest(tmp_path)
    (tmp_path / "a").write_text("1")
    assert digest(tmp_path) != before and digest(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("now", "stale"),
    [
        ({"cdmpp": "1", "data": "2", "w": "8"}, []),
        ({"cdmpp": "0", "data": "2", "w": "8"}, ["code"]),
        ({"data": "2", "w": "8"}, ["code"]),  # the benchmark is not there any more
        ({"cdmpp": "1", "data": "0", "w": "9"}, ["data", "weights"]),
        ({"cdmpp": "1"}, []),  # data and weights of elsewhere are not at hand
        ({"cdmpp": "sha256:1", "data": "2", "w": "8"}, []),  # without git there is nothing to compare with
    ],
)
def test_what_changed_is_stale(now: dict[str, str], stale: list[str]) -> None:
    then = made(code={"cdmpp": "1"}, data={"data": "2", "not recorded": None}, weights={"w": "8"})
    assert changed(then, now.get) == stale


@pytest.mark.parametrize("content", ["[]", "{}", '{"provenance": {"commit": "1"}}', "{"])
def test_results_without_provenance_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"a\.json (has no provenance \(.*\): measure it again|is not JSON)"):
        common.load_result(path)


def test_a_run_that_is_started_again_finds_what_was_done(tmp_path: Path) -> None:
    path, count = tmp_path / "results.json", lambda rows: [figure("rows", {"n": len(rows)})]
    kept = Results(path, made(), {"records": 5}, count)
    assert kept.find(model="a") is None
    kept.add({"model": "a", "seed": 0, "mape": np.float64(0.5)})
    kept.add({"model": "a", "seed": 1, "mape": 0.25, "interval": {"mape": (0.1, 0.3)}})
    content = json.loads(path.read_text())
    assert content["figures"][0]["values"] == {"n": 2} and content["provenance"]["seeds"] == [3]
    again = Results(path, made(), {"records": 5}, count)
    found = again.find(model="a", seed=1)
    assert found == {"model": "a", "seed": 1, "mape": 0.25, "interval": {"mape": [0.1, 0.3]}}
    found["final_s"] = 2.0
    again.write()
    assert Results(path, made(), {"records": 5}).find(final_s=2.0) is not None
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("other", "options", "what"),
    [
        ({}, {"records": 6}, "records"),
        ({"code": {"cdmpp": "other"}}, {"records": 5}, "code"),
        ({"data": {"data": "other"}}, {"records": 5}, "data"),
    ],
)
def test_rows_of_other_options_or_code_are_not_gone_on_with(
    tmp_path: Path, other: dict[str, Any], options: dict[str, Any], what: str
) -> None:
    Results(tmp_path / "r.json", made(), {"records": 5}).add({"model": "a"})
    with pytest.raises(SystemExit, match=rf"r\.json holds results of another {what}: choose another file"):
        Results(tmp_path / "r.json", made(**other), options)


def test_files_are_small_and_hold_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = figure("ours", {"mape": 1 / 3, "nothing": None}, 7, [1, 0])
    report(tmp_path / "r.json", made(), [shown], rows=[{"a": float("inf")}, {"a": np.int64(2)}])
    text = (tmp_path / "r.json").read_text()
    assert text.count("\n") < 30 and json.loads(text)["rows"] == [{"a": None}, {"a": 2}]
    assert json.loads(text)["figures"][0]["values"] == {"mape": 0.3333333}
    assert "33.3 %" in capsys.readouterr().out


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(10, 2, 4000)
    low, high = bootstrap(values, np.arange(4000))
    half = 1.96 * values.std() / np.sqrt(4000)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert bootstrap(values, np.arange(4000)) == (low, high), "seeded"


@pytest.mark.parametrize("median", [False, True])
def test_tasks_are_drawn_not_records(median: bool) -> None:
    values = np.random.default_rng(2).lognormal(size=60)
    once = bootstrap(values, np.arange(60), median=median)
    assert bootstrap(np.repeat(values, 9), np.repeat(np.arange(60), 9), median=median) == pytest.approx(once)
    by_record = bootstrap(np.repeat(values, 9), np.arange(540), median=median)
    assert once[1] - once[0] > 2 * (by_record[1] - by_record[0])
    assert bootstrap([3.0] * 8, list("aabbccdd"), median=median) == (3.0, 3.0)


def test_intervals_of_accuracy_hold_the_metrics() -> None:
    rng = np.random.default_rng(0)
    n, task = 600, np.repeat([f"t{i}" for i in range(40)], 15)
    table = pd.DataFrame({"task": task, "device": "d", "latency_s": rng.lognormal(size=n), "noise": np.nan})
    predicted_s = table["latency_s"].to_numpy() * rng.lognormal(0, 0.4, n)
    found = common.accuracy_intervals(table, predicted_s)
    scores = evaluate_predictions(table["latency_s"], predicted_s, task, ["d"] * n)
    for metric in ("mape", "median_ape", "within_20pct", "pairwise_accuracy", "spearman", "top1_regret"):
        low, high = found[metric]
        assert low < scores[metric] < high, metric
    assert "top1_regret_of_32" not in found, "no task has so many programs"
    doubled = pd.concat([table, table.assign(device="e")])
    twice = common.accuracy_intervals(doubled, np.tile(predicted_s, 2))
    assert twice["mape"] == pytest.approx(found["mape"]), "a task on two devices is one task"


def test_means_over_runs() -> None:
    rows = [
        {"mape": 0.1, "n": 10, "seed": 0, "interval": {"mape": [0.05, 0.2]}},
        {"mape": 0.3, "n": 12, "seed": 4, "interval": {"mape": [0.15, 0.4]}},
    ]
    found = common.mean_figure("a", rows, ["mape", "spearman"])
    assert found["values"] == {"mape": pytest.approx(0.2)} and (found["n"], found["seeds"]) == (11, [0, 4])
    assert found["spread"]["mape"]["sd"] == pytest.approx(np.sqrt(0.02))
    assert found["interval"]["mape"] == pytest.approx([0.1, 0.3])
    ((_, line),) = common.tables([found])
    assert line == ["a", "20.0 ± 14.1 [10.0, 30.0] %", "11", "0, 4"]


def test_ratios_are_of_rounds() -> None:
    found = common.ratio_figure("a", [2.0, 8.0, 4.0], [4.0, 4.0, 4.0], more_is_better=True)
    assert found["values"] == {"ours": 4.0, "theirs": 4.0, "ratio": 1.0}
    assert found["spread"]["ratio"] == {"sd": pytest.approx(0.7637626), "min": 0.5, "max": 2.0}
    assert common.ratio_figure("a", [2.0], [4.0], more_is_better=False)["values"]["ratio"] == 2.0
    assert common.spread_of([2.0])["sd"] is None


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_writes_its_results_to_json(name: str, monkeypatch, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--json FILE" in text
    assert "--out FILE" not in text, "results go to --json"
