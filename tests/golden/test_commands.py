"""The command is what others script against: options, JSON, scores (``python -m tests.golden.make`` freezes anew)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import commands, golden


def frozen(name: str) -> Any:
    return json.loads((golden.HERE / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return commands.quick(tmp_path_factory.mktemp("commands"))


def test_every_option_is_still_taken() -> None:
    before = frozen("options")
    assert len(before) > 15
    assert commands.missing_options(before, commands.options()) == []


def expect_shapes(name: str, results: dict[str, Any]) -> None:
    before = frozen(name)
    assert before.keys() == results.keys()
    found = {name: commands.misfits(before[name], commands.shape(results[name])) for name in before}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def expect_values(before: Any, now: Any, where: str = "") -> None:
    """Numbers within 1e-4: ranks of near equals may swap where CPUs round differently."""
    if isinstance(before, dict):
        for key, value in before.items():
            expect_values(value, now[key], f"{where}.{key}")
    elif isinstance(before, float):
        assert now == pytest.approx(before, rel=1e-4, abs=1e-9), where
    else:
        assert now == before, where


def test_json_keeps_its_shape_and_scores(results: dict[str, Any]) -> None:
    expect_shapes("shapes", results)
    expect_values(frozen("scores"), commands.scores(results))


def test_imported_tables_are_the_golden_programs(results: dict[str, Any]) -> None:
    folders = [results[f"import {source}"]["path"] for source in ("neusight", "benchmark-hub")]
    assert sorted(golden.load_datasets(folders).programs) == golden.programs("library")


@pytest.mark.check
@pytest.mark.usefixtures("real_machine")
def test_json_of_commands_that_measure_and_train_keeps_its_shape(tmp_path: Path) -> None:
    expect_shapes("shapes_slow", commands.slow(tmp_path))


@pytest.mark.check
def test_the_weights_that_ship_score_on_held_out_networks_as_they_did(tmp_path: Path) -> None:
    expect_values(frozen("model_card"), commands.model_card(tmp_path))


@pytest.mark.parametrize(
    ("before", "now", "wrong"),
    [
        ({"a": 1, "b": [1, 2.5]}, {"a": 2, "b": [3], "c": 0}, []), ({"a": None}, {"a": 1}, []),
        ({"a": {"b": 1}}, {"a": {}}, [".a.b is gone"]), ({"a": 1}, {"a": "1"}, [".a is string, was number"]),
        ({"a": 1}, {"a": None}, [".a is null, was number"]), ([{"a": 1}, {"a": None}], [{"a": 1}], []),
        ([{"a": 1}], [], [" is empty"]), ({"a": [1]}, {"a": {"b": 1}}, ['.a is {"b": "number"}, was ["number"]']),
        ({str(i): {"n": i} for i in range(9)}, {"x": {"n": 1}, "y": {"m": 1}}, [".y.n is gone"]),
    ],
)  # fmt: skip
def test_what_counts_as_another_shape(before: Any, now: Any, wrong: list[str]) -> None:
    assert commands.misfits(commands.shape(before), commands.shape(now)) == wrong


def test_what_counts_as_a_missing_option() -> None:
    option = {"nargs": None, "choices": ["a", "b"], "default": 1, "required": False}
    before = {"do": {"--x": option}}
    more = {**option, "choices": ["a", "b", "c"]}
    assert commands.missing_options(before, {"do": {"--x": more, "--y": option}}) == []
    for change in ({"nargs": 0}, {"choices": ["a"]}, {"default": 2}, {"required": True}):
        assert len(commands.missing_options(before, {"do": {"--x": {**option, **change}}})) == 1
    for now in ({"do": {}}, {}):
        assert commands.missing_options(before, now) == ["do --x is gone"]
