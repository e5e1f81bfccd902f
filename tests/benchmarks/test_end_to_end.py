"""Which round counts, layers measured beside layers predicted, and medians over networks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.end_to_end import figures, layer_error, round_that_counts


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
