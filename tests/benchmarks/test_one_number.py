"""What ``benchmarks/one_number.py`` fits, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.one_number import fitted, from_specification, order


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
    assert order(pd.Series({"a": 0.0, "b": 1.0}), pd.Series({"a": 2.0, "b": 1.0}), cores) == 0.0
