"""Stopping rules, costs, the forecast, which task comes next, and what is dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import TunerError
from cdmpp.program.types import Program
from cdmpp.tuner.config import Costs, Objective, Point, curve_gain
from cdmpp.tuner.progress import TaskState, next_task, worth_measuring


def curve(latency_s: Any, times: Sequence[float]) -> list[Point]:
    return [Point(t, 2 * i, i, latency_s(t)) for i, t in enumerate(times)]


def test_forecast_of_known_answer_from_the_later_part_if_there_are_some_points() -> None:
    straight = curve(lambda t: t**-0.3, [10, 20, 40, 60, 80, 100])
    assert curve_gain(straight, 60) == pytest.approx(1 - 1.6**-0.3)
    assert curve_gain(straight, 0) == 0
    assert curve_gain(curve(lambda t: 3.0, [10, 20, 40, 60, 80, 100])) == 0
    assert curve_gain(curve(lambda t: t, [10, 20, 40, 60, 80, 100])) == 0, "a gain is never negative"
    assert curve_gain(curve(lambda t: 100 / t if t < 25 else 4.0, [1, 5, 10, 25, 50, 75, 100])) == 0
    assert curve_gain(curve(lambda t: 1.0, [10, 20, 30])) is None
    assert curve_gain([]) is None
    assert curve_gain(curve(lambda t: 1.0, [10.0] * 6)) is None, "no time has passed"


@pytest.mark.parametrize(
    ("limits", "costs", "reason"),
    [
        ({}, Costs(trials=9), None), ({}, Costs(trials=10), "10 trials"),
        ({"max_measurements": 5}, Costs(trials=7, measurements=5), "5 measurements"),
        ({"budget_s": 60.0}, Costs(wall_s=59), None), ({"budget_s": 60.0}, Costs(wall_s=61), "budget of 60 s"),
        ({"cpu_budget_s": 60.0}, Costs(wall_s=61, build_s=40, device_s=15), None),
        ({"cpu_budget_s": 60.0}, Costs(search_cpu_s=10, build_s=40, device_s=15), "budget of 60 CPU seconds"),
        ({"energy_budget_j": 500.0}, Costs(energy_j=499.0), None),
        ({"energy_budget_j": 500.0}, Costs(energy_j=501.0), "budget of 500 J"),
        ({"energy_budget_j": 500.0}, Costs(), None),
        ({"energy_budget_j": 500.0}, Costs(wall_s=3), "energy is not counted"),
    ],
)  # fmt: skip
def test_limits(limits: dict[str, Any], costs: Costs, reason: str | None) -> None:
    reached = Objective(10, **limits).reached(costs, [])
    assert reached is None if reason is None else reason in str(reached)


def test_stopping_when_little_more_is_expected() -> None:
    objective = Objective(100, least_gain_per_minute=0.01)
    assert objective.reached(Costs(), curve(lambda t: 10 - math.log(t), [10, 20, 40, 60, 80, 100])) is None
    assert "another minute" in str(objective.reached(Costs(), curve(lambda t: 3.0, [10, 20, 40, 60, 80, 100])))
    assert objective.reached(Costs(), []) is None, "nothing tells yet"


@pytest.mark.parametrize("bad", [{"trials": 0}, {"trials": 5, "budget_s": 0.0}, {"trials": 5, "max_measurements": -1}])
def test_limits_that_are_none_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(TunerError, match=r"^(trials|budget_s|max_measurements) is (0|-1), expected a number above 0"):
        Objective(**bad)


def state(weight: float, history: list[float], finished: str = "") -> TaskState:
    best = history[-1] if history and math.isfinite(history[-1]) else None
    return TaskState("t", weight, best_s=best, history=history, finished=finished)


def test_every_task_gets_a_round_first_then_the_most_promising_that_is_neither_finished_nor_busy() -> None:
    assert next_task([state(1, [1.0]), state(1, [])]) == 1
    assert next_task([state(1, [1.0]), state(3, [1.0])]) == 1, "the network runs it more often"
    assert next_task([state(1, [1.0]), state(1, [1.0, 1.0])]) == 0, "the other had its turn"
    assert next_task([state(1, [1.0] * 4), state(1, [4.0, 3.0, 2.0, 1.0])]) == 1, "it is getting better"
    assert next_task([state(1, [1.0]), state(1, [math.inf])]) == 1, "nothing works yet"
    states = [state(1, [1.0], "done"), state(1, [1.0]), state(9, [1.0])]
    assert next_task(states, busy=[2]) == 1
    assert next_task(states, busy=[1, 2]) is None


def test_a_task_is_given_up_when_nothing_works_or_nothing_is_worth_it() -> None:
    hopeless, exhausted = TaskState("a", 1.0), TaskState("b", 1.0, best_s=1.0)
    for _ in range(2):
        hopeless.end_round(0)
    assert not hopeless.finished
    hopeless.end_round(0)
    assert "no program worked" in hopeless.finished
    for worked in (0, 0, 1, 0, 0):
        exhausted.end_round(worked)
    assert not exhausted.finished, "in a row"
    exhausted.end_round(0)
    assert "nothing worth measuring" in exhausted.finished


def test_a_task_whose_programs_are_not_expected_to_win_and_do_not_is_given_up() -> None:
    def tuned(latencies: list[float], hopeless: bool = True) -> TaskState:
        state = TaskState("t", 1.0)
        for latency_s in latencies:
            for _ in range(4):
                state.count(latency_s, Program("p", "t", "s", "", "search"))
            state.end_round(4, hopeless)
        return state

    assert "nothing worth measuring" in tuned([1.0, 1.0, 1.0, 1.0]).finished
    assert not tuned([1.0, 0.9, 0.8, 0.7]).finished, "against expectation they won"
    assert not tuned([1.0, 1.0, 0.9, 1.0, 1.0]).finished, "in a row"
    assert not tuned([1.0, 1.0, 1.0, 1.0], hopeless=False).finished, "some were expected to win"


class Intervals:
    """Candidates are their own latencies; intervals are half and twice that."""

    def interval_s(self, context: Any, candidates: Sequence[Any], coverage: float) -> tuple[np.ndarray, np.ndarray]:
        return np.array(candidates) / 2, np.array(candidates) * 2


def worth(candidates: list[float], best_s: float | None, guard: Any = None, coverage: float | None = 0.9) -> list[bool]:
    return [bool(good) for good in worth_measuring(guard, coverage, Intervals(), None, candidates, best_s)]


class Even:
    """Even numbers run."""

    def worth(self, measures: Sequence[Any]) -> list[bool]:
        return [m % 2 == 0 for m in measures]


def test_candidates_that_cannot_win_are_dropped_and_before_that_what_will_not_run() -> None:
    assert worth([1.0, 3.0, 2.1, 1.9], 1.0) == [True, False, False, True]
    assert all(worth([1.0, 3.0], None)), "there is nothing to beat yet"
    assert worth([], 1.0) == []
    nothing_wins = worth([9.0, 5.0, 8.0, 7.0, 6.0], 1.0)
    assert nothing_wins == [False, True, False, False, True], "a quarter is measured in any case"
    assert not any(worth([float("inf"), float("inf")], 1.0)), "but not what failed before"
    candidates = [2.0, 3.0, 4.0, 1.0]
    assert all(worth(candidates, 1.5, coverage=None))
    assert worth(candidates, 1.5, Even(), coverage=None) == [True, False, True, False]
    assert worth(candidates, 1.6) == [True, True, False, True]
    assert worth(candidates, 1.6, Even()) == [True, False, False, False]
    assert worth([], 1.6, Even()) == []
