"""Which round counts, layers measured beside layers predicted, and what is kept between runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.end_to_end import Measured, layers_of, round_that_counts


def measurement(latency_s: float, disturbed: float) -> dict[str, Any]:
    return {"latency_s": latency_s, "disturbed": disturbed}


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
    assert round_that_counts([measurement(*found) for found in rounds])["latency_s"] == latency_s


def test_layers_side_by_side() -> None:
    calls = [
        {"name": name, "latency_s": latency_s, "disturbed": 0.0, "quiet_samples": 4}
        for name, latency_s in (("conv", 0.4), ("relu", 0.1), ("conv", 0.3), ("sort", 0.2))
    ]
    predicted: Any = [
        SimpleNamespace(name=name, latency_s=latency_s)
        for name, latency_s in (("conv", 0.3), ("relu", 0.1), ("conv#2", 0.4))
    ]
    rows, error = layers_of(calls, predicted)
    assert [(row["name"], row["predicted_s"]) for row in rows] == [
        ("conv", 0.3),
        ("relu", 0.1),
        ("conv#2", 0.4),
        ("sort", None),
    ]
    assert error == pytest.approx(0.2 / 0.8), (
        "the errors of the convolutions cancel in the total but not here"
    )
    assert layers_of([], predicted) == ([], None)


def test_what_was_measured_is_kept_and_an_earlier_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    Measured(path).add("mlp", measurement(1.0, 0.0))
    assert Measured(path).rounds("mlp") == [measurement(1.0, 0.0)]
    for earlier in ({"mlp": [{"latency_s": {"untuned": 1.0}}]}, {"format": 1, "rows": {}}):
        path.write_text(json.dumps(earlier), encoding="utf-8")
        with pytest.raises(SystemExit, match=r"measured\.json was measured in another way .* --out"):
            Measured(path)
