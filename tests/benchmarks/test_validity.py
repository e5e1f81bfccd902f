"""The benchmark of validity: its searches on a small space, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import validity as bench
from cdmpp.program.ast import LEAF_FEATURES, CompactAST

REPOSITORY = Path(__file__).resolve().parents[2]
HUB = REPOSITORY.parent / "shared" / "data" / "benchmark_hub.parquet"


def small_space() -> bench.Space:
    """Two parameters of 12 values: shared memory is their product, and half of the space has too much of it."""
    first, second = (part.ravel() for part in np.meshgrid(np.arange(12), np.arange(12), indexing="ij"))
    values = np.stack([2.0 ** (first / 2), 2.0 ** (second / 2)], axis=1)
    shared = 1024.0 * values.prod(1)
    latency_s = np.where(shared <= 49152, 1e-3 * (1 + (first - 6.2) ** 2 + (second - 3.7) ** 2), np.inf)
    asts = []
    for row, amount in zip(values, shared, strict=True):
        leaf = np.ones((1, len(LEAF_FEATURES)), dtype=np.float32)
        for name, value in {"program_shared": amount, "iterations": row[0], "flops": row[1]}.items():
            leaf[:, LEAF_FEATURES.index(name)] = value
        asts.append(CompactAST(leaf, np.array([1], dtype=np.int32), 3))
    return bench.Space("rtx-2080-ti", np.stack([first, second], axis=1), latency_s, asts)


def test_searches_end_and_depend_on_their_seed() -> None:
    space = small_space()
    model = bench.failures_of(space)
    for way in bench.SEARCHES:
        runs = {arm: bench.search(space, way, arm, 3, 144, model) for arm in bench.ARMS}
        assert runs["full"] == bench.search(space, way, "full", 3, 144, model)
        assert all(run["reached"] for run in runs.values())
        failed = {arm: run["failed"] for arm, run in runs.items()}
        assert failed["full"] <= 2 < failed["plain"] and failed["full"] <= failed["skip"], way
    capped = bench.search(space, "tuner", "plain", 0, 1, model)
    assert (capped["measurements"], capped["reached"]) == (1, False)


def test_ratios_are_of_geometric_means() -> None:
    def rows(device: str, arm: str, *counts: int) -> list[dict[str, Any]]:
        run = {"device": device, "search": "tuner", "arm": arm, "failed": 2, "reached": True}
        return [{**run, "seed": seed, "measurements": count} for seed, count in enumerate(counts)]

    full, plain = rows("a", "full", 10, 40) + rows("b", "full", 5, 5), rows("a", "plain", 20, 80)
    ratio, first, *_ = bench.figures(plain + full + rows("b", "plain", 10, 40))
    assert ratio["values"]["ratio"] == pytest.approx(np.sqrt(0.5 * np.sqrt(0.5 * 0.125)))
    assert (ratio["spread"]["ratio"]["min"], ratio["spread"]["ratio"]["max"]) == pytest.approx((0.25, 0.5))
    low, high = ratio["interval"]["ratio"]
    assert low <= ratio["values"]["ratio"] <= high
    assert ratio["name"] == "tuner: full over plain" and first["name"] == "tuner: plain, a"
    assert first["values"] == {
        "measurements (median)": 50, "geometric mean": pytest.approx(40), "failed (mean)": 2, "never": 0,
    }  # fmt: skip


@pytest.mark.skipif(not HUB.exists(), reason="no public data beside the repository")
def test_the_hub_has_two_gpus_with_a_fifth_of_failures() -> None:
    """What the benchmark's text says of its data."""
    import pandas as pd

    frame = pd.read_parquet(HUB, columns=["kernel", "gpu", "status"])
    frame = frame[frame["kernel"] == "convolution"]
    assert frame["gpu"].value_counts().to_dict() == {"RTX_2080_Ti": 6768, "RTX_3060_laptop": 6768}
    assert (frame["status"] != "ok").groupby(frame["gpu"]).mean().between(0.22, 0.23).all()
