"""What ``accuracy.py`` takes from searches for the baselines; rounds, layers and medians of ``end_to_end.py``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks.accuracy import baseline_options, elsewhere_s, without_its_like
from benchmarks.end_to_end import figures, layer_error, round_that_counts
from cdmpp.device import get_device
from cdmpp.predictor import TrainingData
from cdmpp.predictor.baselines import make_model


def test_baselines_get_what_searches_found(tmp_path: Path) -> None:
    trees, network = tmp_path / "trees.yaml", tmp_path / "lstm.yaml"
    trees.write_text("name: xgboost-ast\nseed: 5\nthreads: 3\nparams: {max_depth: 11}\n")
    network.write_text("name: lstm\nseed: 5\nhidden: 64\ntrain: {epochs: 2, learning_rate: 0.004}\n")
    options = baseline_options([trees, network], epochs=7, network_seconds=90)
    assert make_model("xgboost-ast", 1, **options["xgboost-ast"]).params["max_depth"] == 11
    assert "seed" not in options["xgboost-ast"], "the seed is that of the run"
    lstm = make_model("lstm", 1, **options["lstm"])
    assert (lstm.train.epochs, lstm.train.learning_rate, lstm.train.seed) == (7, 0.004, 1)
    assert lstm.max_seconds == make_model("released", 1, **options["released"]).max_seconds == 90
    assert "xgboost-perstore" not in options
    assert not any(baseline_options([], epochs=7, network_seconds=None).values())


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text("model: {dim: 64}\n")
    with pytest.raises(SystemExit, match=r"cpu.yaml is not a best.yaml of a baseline"):
        baseline_options([tmp_path / "cpu.yaml"], epochs=1, network_seconds=None)


def test_a_device_is_held_out_with_its_microarchitecture() -> None:
    devices = {name: get_device(name) for name in ("epyc-7763@1", "epyc-7763@2", "epyc-zen4-2.6ghz@1")}
    labels = pd.DataFrame({"device": [*devices] * 2, "program": "p"})
    data = TrainingData(labels, {"p": None}, devices, {}, {})  # type: ignore[dict-item]
    assert sorted(without_its_like(data, "epyc-7763@1").devices) == ["epyc-7763@1", "epyc-zen4-2.6ghz@1"]


def test_latencies_elsewhere_take_one_constant_a_device() -> None:
    known = {"a": {"d1": 1.0, "d2": 4.0, "new": 2.0}, "b": {"d1": 3.0, "d2": 12.0}, "c": {"d1": 5.0}}
    rows = [(name, device, latency_s) for name, own in known.items() for device, latency_s in own.items()]
    rows += [(name, "new", 1e9) for name in "bcd"]
    labels = pd.DataFrame(rows, columns=["program", "device", "latency_s"])
    data = TrainingData(labels, {}, {}, {}, {})
    found = elsewhere_s(data, "new", np.array([2]), np.array([6, 7, 8]))
    assert found[:2] == pytest.approx([6.0, 10.0]) and np.isnan(found[2]), "twice d1, half of d2; labels are not looked at"


@pytest.mark.parametrize(
    ("rounds", "latency_s"),
    [
        ([(3.0, 0.0), (1.0, 0.0), (2.0, 0.05)], 2.0),  # the middle one of the quiet
        ([(3.0, 0.0), (1.0, 0.0)], 1.0),  # of two the faster
        ([(1.0, 0.9), (3.0, 0.0), (2.0, 0.5)], 3.0),  # a quiet one counts, though it is slower
        ([(1.0, 0.9), (3.0, 0.2), (2.0, 0.5)], 3.0),  # none is quiet: the least disturbed
        ([(3.0, 1.0), (2.0, 1.0)], 2.0),
    ],
)
def test_the_round_that_counts(rounds: list[tuple[float, float]], latency_s: float) -> None:
    found = [dict(zip(("latency_s", "disturbed"), each, strict=True)) for each in rounds]
    assert round_that_counts(found)["latency_s"] == latency_s


def test_errors_of_layers_do_not_cancel() -> None:
    measured = [("conv", 0.4), ("relu", 0.1), ("conv", 0.3), ("sort", 0.2)]
    calls = [{"name": name, "latency_s": latency_s} for name, latency_s in measured]
    layers = {"conv": 0.3, "relu": 0.1, "conv#2": 0.4}.items()
    predicted: Any = [SimpleNamespace(name=name, latency_s=latency_s) for name, latency_s in layers]
    # the errors of the convolutions cancel in the total but not here
    assert layer_error(calls, predicted) == pytest.approx(0.2 / 0.8)
    assert layer_error([], predicted) is None


def test_medians_over_networks() -> None:
    def row(name: str, ape: float, seen: bool) -> dict[str, Any]:
        return {
            "network": name, "seen": seen, "ape": ape, "plain_ape": 2 * ape, "inside": ape < 0.2,
            "measured_s": 1.0, "predicted_s": 1 + ape, "spread": 0.01, "rounds": 2,
        }  # fmt: skip

    found = figures([row("a", 0.1, True), row("b", 0.3, True), row("c", 0.2, False)])
    everything, unseen, first = found[:3]
    assert everything["values"] == {"median_ape": 0.2, "against all runs": 0.4, "inside the interval": 1}
    assert (unseen["values"]["median_ape"], unseen["n"]) == (0.2, 1)
    assert first["name"] == "a, untuned" and first["values"]["predicted ms"] == pytest.approx(1100)
