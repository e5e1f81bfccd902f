"""What benchmarks keep between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kept_rows import KeptGroups, KeptRows


@pytest.mark.parametrize("notes", [None, {"seed": 3}])
def test_a_run_that_is_started_again_finds_what_was_done(
    tmp_path: Path, notes: dict[str, int] | None
) -> None:
    path = tmp_path / "results.json"
    kept = KeptRows(path, notes)
    assert kept.find(model="a") is None
    kept.add({"model": "a", "seed": 0, "mape": 0.5})
    kept.add({"model": "a", "seed": 1, "mape": 0.25})
    content = json.loads(path.read_text())
    assert content == (kept.rows if notes is None else {"notes": notes, "rows": kept.rows})
    again = KeptRows(path, notes)
    found = again.find(model="a", seed=1)
    assert found == {"model": "a", "seed": 1, "mape": 0.25}
    found["final_s"] = 2.0
    again.write()
    assert KeptRows(path, notes).find(final_s=2.0) is not None
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = KeptRows(None, {})
    kept.add({"model": "a"})
    assert kept.find(model="a") == {"model": "a"} and not list(tmp_path.iterdir())


def test_groups_go_on_where_they_were_and_other_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    notes = {"options": {"seed": 3}}
    summary = ("total", lambda groups: sum(group["n"] for group in groups.values()))
    kept = KeptGroups(path, notes, "devices", summary)
    kept.of("a")["n"] = 2
    kept.write()
    again = KeptGroups(path, notes, "devices", summary)
    again.of("b")["n"] = 3
    again.write()
    expected = {"notes": notes, "devices": {"a": {"n": 2}, "b": {"n": 3}}, "total": 5}
    assert json.loads(path.read_text()) == expected
    with pytest.raises(SystemExit, match="another seed"):
        KeptGroups(path, {"options": {"seed": 4}}, "devices", summary)
    nowhere = KeptGroups(None, notes, "devices", summary)
    nowhere.write()
    assert nowhere.content["total"] == 0
