"""How ``device_choice.py`` scores a choice between two devices; what ``one_number.py`` fits, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.device_choice import choices, figures
from benchmarks.one_number import fitted, from_specification, order


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


def test_numbers_of_cpus_and_networks_are_found_where_some_labels_are_missing() -> None:
    logs = pd.DataFrame(np.add.outer([0.0, 1.0, 3.0], [0.5, -0.5]), list("abc"), ["x", "y"])
    logs.loc["a", "y"] = np.nan
    cpus, networks = fitted(logs)
    assert cpus["c"] - cpus["a"] == pytest.approx(3.0) and networks["x"] - networks["y"] == pytest.approx(1.0)


def test_cpus_of_one_core_do_not_teach_each_other() -> None:
    facts = pd.DataFrame({"clock": [0.0, 1.0, 2.0, 2.0]}, list("abcd"))
    cores = pd.Series(["one", "two", "three", "three"], list("abcd"))
    number = pd.Series([0.0, -1.0, 70.0, 80.0], list("abcd"))
    found = from_specification(facts, number, cores)
    assert found["c"] == found["d"] == pytest.approx(-2.0), "as the clocks of the others ask for"
    assert order(pd.Series([0.0, 1, 9], list("abc")), pd.Series([2.0, 1, 3], list("abc")), cores, 1.1, 3.0) == 0.0
