"""RESULTS.md and the README's tables: written from the result files, and nothing else."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import common, results
from benchmarks.common import figure

README = common.REPOSITORY / "README.md"
#: A number with a unit that something was measured in.
FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|per cent|times|x\b|ms\b|us\b|µs\b|ns\b|s\b|seconds|minutes|points)")


def content(**other: Any) -> dict[str, Any]:
    made = {
        "command": "python benchmarks/a.py --json a.json", "commit": "0123456789", "dirty": False,
        "date": "2026-01-01T00:00:00+00:00", "code": {"cdmpp": "1"}, "data": {}, "weights": {},
        "machine": {"name": "a CPU", "cores": 2}, "seeds": [0], **other,
    }  # fmt: skip
    return {"provenance": made, "figures": [figure("ours", {"mape": 0.125}, 40, [0])]}


def unmarked(text: str) -> str:
    """What is written by hand: without generated tables, the demo's output and code."""
    text = re.sub(r"<!-- (?:table|result): .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- demo output -->.*?<!-- end demo output -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_every_result_says_what_it_depends_on() -> None:
    found = results.load_results()
    assert len(found) > 20
    for name, result in found.items():
        assert result["figures"], name
        assert result["provenance"]["commit"] and result["provenance"]["code"]["cdmpp"], name


def test_age_and_staleness_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 1, 11, tzinfo=timezone.utc)
    stale = {"a.json": content(), "b.json": content(data={"data": "1"}, dirty=True, reconstructed=True)}
    now_there = {"cdmpp": "2", "data": "1"}
    monkeypatch.setattr(results, "changed", lambda made: common.changed(made, now_there.get))
    head, _, first, second = results.overview(stale, now).splitlines()
    assert head.startswith("| result | date | age in days |")
    assert first == "| [a.json](#ajson) | 2026-01-01 | 10 | 0123456 | a CPU, 2 cores | code |"
    assert "0123456, and changes not committed (reconstructed)" in second
    now_there["cdmpp"] = "1"
    assert results.overview(stale, now).splitlines()[2].endswith("| - |")


def test_the_sections_of_results_md_are_those_of_the_files() -> None:
    text = results.OUT.read_text(encoding="utf-8")
    for name, result in results.load_results().items():
        assert results.section(name, result) in text, f"{name}: run python benchmarks/results.py"


@pytest.mark.parametrize("path", [README, *sorted((common.REPOSITORY / "docs").glob("*.md"))], ids=str)
def test_generated_tables_are_those_of_the_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert results.fill(text, results.load_results()) == text, "run python benchmarks/results.py"


def test_the_readme_quotes_no_figure_that_no_result_holds() -> None:
    assert not FIGURE.findall(unmarked(README.read_text(encoding="utf-8")))
    assert FIGURE.findall(unmarked("It is 12.5 % off, in 3 ms.")) == ["12.5 %", "3 ms"]


def test_the_readme_is_short_and_its_tables_too() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    tables = re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    known = list(yaml.safe_load(results.TABLES.read_text(encoding="utf-8")))
    assert [name for name, _ in tables] == ["accuracy", "speed", "devices"] == known[:3]
    assert all(len(table.strip().splitlines()) <= 2 + 8 for _, table in tables)
    assert "<!-- demo output -->" in text and "<!-- end demo output -->" in text


def test_links_lead_somewhere_and_the_number_of_devices_is_the_tables() -> None:
    count = len(yaml.safe_load((common.REPOSITORY / "cdmpp/device/table.yaml").read_text(encoding="utf-8")))
    for path in (README, common.REPOSITORY / "docs/devices.md"):
        said = re.findall(r"`devices` \(\d+ of them|lists \d+ devices", path.read_text(encoding="utf-8"))
        assert len(said) == 1 and int(re.sub(r"\D", "", said[0])) == count, path
    for path in (README, *(common.REPOSITORY / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert "://" in link or (path.parent / link).exists(), f"{path}: {link}"


def test_a_figure_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"there is no benchmarks/results/none\.json"):
        results.fill("<!-- result: none.json -->\n<!-- end -->", {"a.json": content()})
    with pytest.raises(SystemExit, match=r"table accuracy: accuracy\.json has no mape of 'by_network: ours'"):
        results.fill("<!-- table: accuracy -->\n<!-- end -->", {"a.json": content()})


def test_blocks_are_filled_again_and_again() -> None:
    text = "before\n<!-- result: a.json -->\n<!-- end -->\nafter\n"
    once = results.fill(text, {"a.json": content()})
    assert "| ours | 12.5 % | 40 | 0 |" in once and "2026-01-01, commit 0123456" in once
    assert results.fill(once, {"a.json": content()}) == once and once.endswith("<!-- end -->\nafter\n")
