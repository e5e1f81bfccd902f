"""The command line: contracts of its JSON, exit codes and one-line errors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from cdmpp.cli import main
from tests.samples.command import Command
from tests.samples.programs import matmul_task

pytestmark = pytest.mark.usefixtures("real_machine")
_METRICS = {
    "mape", "median_ape", "within_10pct", "within_20pct", "rmse_s", "pairwise_accuracy", "spearman",
    "top1_regret", "top5_regret", "n", "noise_floor_mape",
}  # fmt: skip


@pytest.fixture(scope="module")
def predictor(mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    args = ["train", "--config", "configs/smoke.yaml", "--data", str(mlp), "--out", str(out)]
    assert main([*args, "--split", "within_task:test=0.3"]) == 0
    return out


def test_devices_names_this_machine(command: Command) -> None:
    assert command.json("devices")["this_machine"]["kind"] == "cpu"
    assert "this machine" in command.out


def test_finetune_learns_or_says_what_to_profile(tmp_path: Path, mlp: Path, predictor: Path, command: Command) -> None:
    base = ("finetune", "--predictor", str(predictor), "--data", str(mlp))
    out = tmp_path / "tuned"
    result = command.json(*base, "--device", "this-cpu@1", "--tasks", "2", "--out", str(out))
    assert len(result["selection"]["tasks"]) == 2 and result["next_command"] is None
    assert set(result["overall"]) >= _METRICS
    command.json("evaluate", "--predictor", str(out), "--data", str(mlp))

    elsewhere = ("--device", "h200", "--out", str(tmp_path / "h200"))
    result = command.json(*base, *elsewhere, "--tasks", "3")
    assert "finetune again" in command.out and result["next_command"] in command.out
    assert f"--tasks {result['task_file']}" in result["next_command"]
    assert len(json.loads(Path(result["task_file"]).read_text())["tasks"]) == 3
    assert "no records of h200" in command.error(*base, *elsewhere)
    assert "at least 1, got 0" in command.error(*base, *elsewhere, "--tasks", "0")
    assert "no task file" in command.error(*base, *elsewhere, "--tasks", "nothing.json")


def test_predict_a_network_per_task(predictor: Path, command: Command) -> None:
    there = ("--predictor", str(predictor), "--device", "this-cpu@1")
    result = command.json("predict", *there, "mlp", "--programs-per-task", "4")
    assert len(result["tasks"]) >= 3
    for row in result["tasks"]:
        assert 0 < row["best_s"] <= row["median_s"] <= row["worst_s"] and row["compiled"] == 0
        assert 0 <= row["unfamiliar"] <= row["programs"]
        assert (row["best_low_s"] is None) == (row["best_high_s"] is None)
        assert row["best_low_s"] is None or row["best_low_s"] < row["best_s"] < row["best_high_s"]
    assert result["coverage"] == 0.9 and "from their instructions" not in command.out
    total = sum(r["weight"] * r["best_s"] for r in result["tasks"])
    assert result["total_best_s"] == pytest.approx(total)


def test_predictions_with_instruction_counts(tmp_path: Path, mlp: Path, predictor: Path, command: Command) -> None:
    program = tmp_path / "program.json"
    program.write_text(matmul_task(32).tir_json)
    there = ("--device", "this-cpu@1")
    error = command.error("predict", "--predictor", str(predictor), *there, str(program), "--compile", "1")
    assert "model.compiled" in error
    shutil.copytree(mlp, tmp_path / "data")
    command.json("codegen", str(tmp_path / "data"))
    config = tmp_path / "c.yaml"
    config.write_text("model: {dim: 16, heads: 2, layers: 1, compiled: true}\ntrain: {epochs: 1}\n")
    out = ("--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"))
    command.json("train", "--config", str(config), *out, "--split", "within_task:test=0.3")
    trained = ("--predictor", str(tmp_path / "run"))
    result = command.json("predict", *trained, *there, str(program))
    assert result["compiled"] and result["latency_s"] > 0
    assert not command.json("predict", *trained, *there, str(program), "--compile", "0")["compiled"]
    result = command.json("predict", *trained, *there, "mlp", "--programs-per-task", "4", "--compile", "2")
    assert {row["compiled"] for row in result["tasks"]} <= {1, 2} and result["total_best_s"] > 0
    scores = command.json("evaluate", *trained, "--data", str(tmp_path / "data"), "--compiled")
    assert scores["n_compiled"] == scores["overall"]["n"]
    assert "cdmpp codegen" in command.error("evaluate", *trained, "--data", str(mlp), "--compiled")


def test_predictions_with_what_was_measured_elsewhere(tmp_path, mlp: Path, predictor: Path, command) -> None:
    program = tmp_path / "program.json"
    program.write_text(matmul_task(32).tir_json)
    there = ("predict", "--predictor", str(predictor), "--device", "epyc-7763@1", str(program))
    plain = command.json(*there)["latency_s"]
    given = [command.json(*there, "--measured", f"this-cpu@1={t}ms") for t in (1, 100)]
    assert given[0]["measured"] == {"this-cpu@1": pytest.approx(1e-3)}
    assert len({plain, *(result["latency_s"] for result in given)}) == 3
    assert given[0]["latency_s"] < given[1]["latency_s"]
    assert "(PROGRAM.json)" in command.error(*there[:-1], "mlp", "--measured", "this-cpu@1=1ms")
    assert "rtx-3060=1.3ms" in command.error(*there, "--measured", "this-cpu@1")
    assert "too little of a cpu" in command.error(*there, "--measured", "h200=1ms")
    assert "not both" in command.error(*there, "--measured", "this-cpu@1=1ms", "--compile", "1")
    evaluate = ("evaluate", "--predictor", str(predictor), "--data", str(mlp), "--measured")
    assert "measured on another device" in command.error(*evaluate)


def test_report_is_one_file(tmp_path: Path, predictor: Path, command: Command) -> None:
    out = tmp_path / "report.html"
    assert set(command.json("report", str(predictor), "--out", str(out))["overall"]) >= _METRICS
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, predictor: Path, command: Command, monkeypatch) -> None:
    for name, content in (("not.onnx", "not a network"), ("not.json", "{}")):
        (tmp_path / name).write_text(content)
    predict, evaluate = f"predict --predictor {predictor} --device", f"evaluate --predictor {predictor}"
    for line, said in (
        (f"{predict} h201 mlp", "h200"),
        (f"{predict} this-cpu@1 resnet19", "resnet18"),
        (f"{predict} this-cpu@1 mlp --programs-per-task 0", "one program per task"),
        *((f"{predict} this-cpu@1 {tmp_path}/{name}", name) for name in ("not.onnx", "not.json")),
        (f"dataset {tmp_path}/missing", "missing"),
        (f"evaluate --predictor {tmp_path} --data {tmp_path}", "no predictor"),
        (f"{evaluate} --data {tmp_path} --by maker", "cannot group by"),  # before data are read, of which there are none
        *((f"{verb} --data {tmp_path} --split by_maker", "no split") for verb in (evaluate, f"train --out {tmp_path}/x")),
        (f"profile --out {tmp_path}/x", "not both"),
    ):
        assert said in command.error(*line.split())
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "needs the package onnx" in command.error("latency", tmp_path / "not.onnx", "--device", "this-cpu@1")
