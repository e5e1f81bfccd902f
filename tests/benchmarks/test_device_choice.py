"""How ``benchmarks/device_choice.py`` scores a choice between two devices."""

from __future__ import annotations

import pytest

from benchmarks.device_choice import choices, figures


def test_the_one_that_is_named_counts_and_confidence_grows_with_the_distance() -> None:
    measured = {"a": 1.0, "b": 2.0, "c": 2.1}
    says = {"ours": {"a": 1.0, "b": 3.0, "c": 2.9}, "peak": {"a": 1.0, "b": 1.0}}
    rows = {row["devices"]: row for row in choices(measured, says, dict.fromkeys("abc", 0.5))}
    assert rows["a, b"]["right"] == {"ours": 1.0, "peak": 0.5}, "a tie is half a choice"
    assert rows["b, c"]["right"] == {"ours": 0.0} and rows["b, c"]["ratio"] == pytest.approx(1.05)
    assert rows["a, b"]["stated"] == pytest.approx(0.9399, abs=1e-3), "log 3 over 0.5 times the root of 2"
    assert 0.5 < rows["b, c"]["stated"] < 0.55


def test_pairs_are_counted_by_how_far_apart_they_are() -> None:
    says = {"ours": {"a": 1.0, "b": 1.2}}
    rows = [{"group": "t", **row} for row in choices({"a": 1.0, "b": 1.2}, says, dict.fromkeys("ab", 0.1))]
    (found,) = figures("programs", rows)
    assert found["name"] == "programs, 1.1 to 1.5 times: ours" and found["values"]["right"] == 1.0 and found["n"] == 1
