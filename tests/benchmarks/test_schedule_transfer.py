"""Parts of the benchmark of schedules on unseen GPUs: known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.schedule_transfer import figures, latencies, measurements_online
from cdmpp.dataset import Dataset
from cdmpp.tuner.learning import Encoded, OnlineModel
from tests.samples.datasets import DEVICE, OTHER_DEVICE, add_measured, failure, program, record


class Flat:
    """A prior for which all programs are alike: only measurements tell them apart."""

    fingerprint = "flat"
    common = 1.0

    def encode(self, asts: object) -> Encoded:
        raise NotImplementedError

    def half_width(self, coverage: float) -> float | None:
        return None


def test_measuring_online_finds_what_the_order_alone_would_not() -> None:
    # every second program is of a kind that is fast, and the best of these is the last of the predicted order
    fast = np.arange(40) % 2 == 1
    z = np.where(fast, 5.0, 0.0)[:, None] + np.linspace(0, 0.1, 40)[:, None]
    latency_s = np.where(fast, 1.2, 10.0)
    latency_s[-1] = 1.0
    programs = Encoded(np.linspace(0, 0.01, 40), z)
    alone = measurements_online(OnlineModel(Flat()), programs, latency_s, 8, 0)
    online = measurements_online(OnlineModel(Flat()), programs, latency_s, 8, 40)
    assert alone == 40
    assert online <= 24, "the first batch shows which kind is fast: 4 slow programs are measured and no more"


def test_latencies_by_kernel_and_device(tmp_path: Path) -> None:
    with Dataset.create(tmp_path / "data") as made:
        add_measured(made, *range(4))
        made.add_record(record(1, device=OTHER_DEVICE, latency_s=3.0))
        made.add_record(failure(2, device=OTHER_DEVICE))
    view = Dataset.open(tmp_path / "data")
    (by_device,) = latencies(view, None, 0).values()
    assert len(by_device[DEVICE]) == 4
    assert by_device[OTHER_DEVICE] == {program(1).hash: 3.0, program(2).hash: math.inf}
    some = latencies(view, 2, 0)["fused_1"]
    assert len(some[DEVICE]) == 2 and set(some.get(OTHER_DEVICE, {})) <= set(some[DEVICE])


def test_figures_over_kernels_and_gpus() -> None:
    def case(gpu: str, ours: float, chance: float, correlation: float | None) -> dict[str, Any]:
        measurements = {"cdmpp": ours, "random_expected": chance}
        quality = {"top1_regret": {"cdmpp": 0.1}, "spearman": {"cdmpp": correlation}}
        return {"kernel": "gemm", "gpu": gpu, "n": 300, "measurements": measurements, **quality}

    ours, chance, *cases = figures([case("a", 2, 50, 0.5), case("b", 8, 200, None)])
    assert (ours["name"], ours["n"]) == ("cdmpp", 2)
    assert ours["values"] == {
        "measurements (geometric mean)": pytest.approx(4), "median": 5, "top1_regret": 0.1, "spearman": 0.5,
    }  # fmt: skip
    assert chance["values"]["measurements (geometric mean)"] == pytest.approx(100)
    assert [shown["name"] for shown in cases] == ["gemm on a", "gemm on b"]
    assert figures([]) == []
