"""The degree of parallelism is the highest at which labels stay what they are alone."""

from __future__ import annotations

import pytest

from cdmpp.errors import ProfilerError
from cdmpp.profiler.calibration import Labels, calibrate, compare, halved, spearman


def measure_with(slowdown: dict[int, float]) -> object:
    """Labels of 20 programs; those of a degree take longer by a factor. Alone the second run is 1 % faster."""
    alone = iter((1.01, 1.0))

    def measure(degree: int | None) -> Labels:
        factor = next(alone) if degree is None else slowdown.get(degree, 1.0)
        return {f"p{i}": factor * (1 + i) * 1e-3 for i in range(20)}, float(degree or 1)

    return measure


def test_the_first_degree_within_the_tolerance_wins() -> None:
    found = calibrate(measure_with({8: 1.3, 4: 1.01}), halved(8), 0.02, lambda *_: True)  # type: ignore[arg-type]
    assert [(r.degree, r.accepted) for r in found.results] == [(8, False), (4, True)]
    assert found.degree == 4
    assert found.results[1].median_difference == pytest.approx(0.01), "compared with the better of two runs alone"
    assert found.alone_again.median_difference == pytest.approx(1 - 1 / 1.01)
    alike = calibrate(measure_with({4: 1.008, 2: 1.02}), [4, 2], 0.001, lambda *_: True)  # type: ignore[arg-type]
    assert alike.degree == 4, "two runs alone differ by as much"
    assert "degree 8: labels differ from those taken alone by 30.0 %" in str(found.results[0])


def test_what_is_not_accepted_leaves_one_and_without_labels_there_is_nothing_to_compare() -> None:
    found = calibrate(measure_with({}), [4, 2], 0.02, lambda r, alone: r.labels_per_s > 4 * alone.labels_per_s)  # type: ignore[arg-type]
    assert found.degree == 1 and not any(r.accepted for r in found.results)
    with pytest.raises(ProfilerError, match="not one program"):
        calibrate(lambda degree: ({}, 0.0), [2], 0.02, lambda *_: True)
    nothing = compare(2, {"a": 1.0}, {"b": 1.0}, 1.0)
    assert nothing.n == 0 and nothing.median_difference is None and "by - in the median" in str(nothing)


def test_rank_correlation_by_a_known_answer() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert spearman([1, 2], [2, 1]) is None and spearman([1, 1, 1], [1, 2, 3]) is None
