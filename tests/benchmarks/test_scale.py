"""Many machines: a simulated cluster whose answer is known, and a short soak: profiling goes on through what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scale import Times, simulate
from benchmarks.soak import FATES, fate, programs_of, soak


def constant(build_s: float = 1.0, run_s: float = 0.1, driver_s: float = 0.0, transfer_s: float = 0.0) -> Times:
    return Times(np.full(200, build_s), np.full(200, run_s), np.zeros(200), driver_s, transfer_s)


@pytest.mark.parametrize(
    ("times", "builders", "devices", "labels_per_s", "part"),
    [
        (constant(), 4, 1, 4.0, "builders"),
        (constant(), 64, 4, 40.0, "devices"),
        (constant(driver_s=0.05), 64, 4, 20.0, "driver"),
        (constant(transfer_s=0.2), 64, 1, 5.0, "network"),
        # what does not build is no label
        (Times(np.full(200, 1.0), np.array([0.1, 0.0] * 100), np.zeros(200), 0.0, 0.0), 1, 1, 0.5, "builders"),
    ],
)
def test_the_slowest_part_decides(times: Times, builders: int, devices: int, labels_per_s: float, part: str) -> None:
    found = simulate(times, range(200), builders, devices)
    assert found["labels_per_s"] == pytest.approx(labels_per_s, rel=0.25), "but for the beginning and the end"
    assert found["bound_by"] == part and max(found["used"].values()) <= 1 + 1e-9


def test_a_builder_rests_while_its_core_measures() -> None:
    """Two builders on two cores, one of which measures half of the time: one and a half builders."""
    apart, together = (simulate(constant(run_s=0.3), range(200), 2, 1, cores=n)["labels_per_s"] for n in (None, 2))
    # labels/s L: one core builds 1/s, the other what 0.3 L leave of it
    assert (apart, together) == (pytest.approx(2.0, rel=0.05), pytest.approx(2 / 1.3, rel=0.05))


def test_every_program_is_labelled_or_fails_once(tmp_path) -> None:
    count = 60
    assert {fate(program.hash) for program in programs_of(count, 0.035, 1)} == set(FATES), "all that can go wrong does"
    found = soak(count, 0.035, 1, tmp_path, full_s=0.1)
    assert found["once"] == sum(found["statuses"].values()) == count
    assert not found["other status than expected"] and not found["damaged rows"]
    assert len(found["interruptions"]) == 2 and all("full" in text for text in found["interruptions"])
    assert found["memory grew by MB"] < 64
