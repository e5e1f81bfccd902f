"""The simulation of a cluster: where the answer is known, and what binds it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scale import Times, simulate


def constant(
    n: int = 400, build_s: float = 1.0, run_s: float = 0.1, driver_s: float = 0.0, transfer_s: float = 0.0
) -> Times:
    return Times(np.full(n, build_s), np.full(n, run_s), driver_s, transfer_s)


@pytest.mark.parametrize(
    ("times", "builders", "devices", "labels_per_s", "part"),
    [
        (constant(), 1, 1, 1.0, "builders"),
        (constant(), 4, 1, 4.0, "builders"),
        (constant(), 64, 1, 10.0, "devices"),
        (constant(), 64, 4, 40.0, "devices"),
        (constant(driver_s=0.05), 64, 4, 20.0, "driver"),
        (constant(transfer_s=0.2), 64, 1, 5.0, "network"),
    ],
)
def test_the_slowest_part_decides(times: Times, builders: int, devices: int, labels_per_s: float, part: str) -> None:
    found = simulate(times, range(400), builders, devices)
    assert found["labels_per_s"] == pytest.approx(labels_per_s, rel=0.2), "but for the beginning and the end"
    assert found["bound_by"] == part and max(found["used"].values()) <= 1 + 1e-9


def test_a_builder_rests_while_its_core_measures() -> None:
    """Two builders on two cores, one of which measures half of the time: one and a half builders."""
    apart = simulate(constant(run_s=0.3), range(400), 2, 1)["labels_per_s"]
    together = simulate(constant(run_s=0.3), range(400), 2, 1, cores=2)["labels_per_s"]
    assert apart == pytest.approx(2.0, rel=0.05)
    # labels/s L: one core builds 1/s, the other what 0.3 L leave of it
    assert together == pytest.approx(2 / 1.3, rel=0.05)


def test_what_does_not_build_is_no_label() -> None:
    times = Times(np.array([1.0, 1.0]), np.array([0.1, 0.0]), 0.0, 0.0)
    assert simulate(times, [0, 1] * 100, 1, 1)["labels_per_s"] == pytest.approx(0.5, rel=0.05)
