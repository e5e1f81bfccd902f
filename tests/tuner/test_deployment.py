"""Whole networks on a core that is disturbed at known times, on a clock that only moves while something runs or waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cdmpp.profiler.engine import SamplingPlan
from cdmpp.tuner.deployment import Sampled, VariantLatency, largest_difference, sample_in_turn

#: Enough quiet samples are four (half of min_samples).
PLAN = SamplingPlan(min_sample_s=0.002, min_samples=8, max_samples=16, max_measure_s=15.0, max_wait_s=15.0)


class Core:
    """A core where work takes twice as long while `busy(now)`; also the sentinel that sees it."""

    def __init__(self, busy: Callable[[float], bool]) -> None:
        self.now, self.busy, self.preempted = 0.0, busy, 0

    def work(self, seconds: float) -> None:
        """Run for so long as it takes undisturbed, in steps of a tenth of a millisecond."""
        left = seconds
        while left > 1e-9:
            step = min(left, 1e-4)
            left -= step
            self.now += step * (2.0 if self.busy(self.now) else 1.0)

    def calm(self) -> bool:
        self.now += 40e-6  # what a look takes
        return not self.busy(self.now)

    def measured(self, seconds: float) -> None:
        pass

    def wait(self, at_most_s: float) -> tuple[bool, float]:
        started = self.now
        while not (calm := self.calm()) and self.now - started < at_most_s:
            self.now += 0.004
        return calm, self.now - started


class FakeNetwork:
    """Functions with the times they take undisturbed; the VM's own take none, and looking at any call 2 us."""

    def __init__(self, core: Core, functions: Sequence[tuple[str, float]]) -> None:
        self.core, self.functions = core, functions
        self.instrumented = 0

    def run(self) -> None:
        for _, seconds in self.functions:
            self.core.work(seconds)

    def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        self.instrumented += 1
        for name, seconds in self.functions:
            for called, takes in (("vm.builtin.alloc_tensor", 0.0), (name, seconds)):
                before(called)
                self.core.work(takes)
                self.core.now += 2e-6
                after(called)


def sampled(core: Core, network: FakeNetwork) -> Sampled:
    return Sampled(network, core, PLAN, clock=lambda: core.now, preemptions=lambda: core.preempted)  # type: ignore[arg-type]


def measured(core: Core, network: FakeNetwork) -> VariantLatency:
    """The result of a network that is sampled alone."""
    found = sampled(core, network)
    sample_in_turn([found])
    return found.result()


def phases(period_s: float, quiet_s: float) -> Callable[[float], bool]:
    """Disturbed but for the first `quiet_s` of every period."""
    return lambda now: now % period_s >= quiet_s


def test_a_short_network_is_labelled_by_its_runs_and_the_calls_add_up() -> None:
    functions = [("first", 0.003), ("second", 0.005)]
    core = Core(lambda now: False)
    result = measured(core, FakeNetwork(core, functions))
    assert (result.method, result.disturbed) == ("runs", 0.0) and result.noise == pytest.approx(0, abs=1e-6)
    assert result.latency_s == result.plain_s == pytest.approx(0.008)
    assert result.calls_s == pytest.approx(0.008), "the cost of looking (2 us a call) is taken off"
    assert [(call.name, call.latency_s) for call in result.calls] == [(n, pytest.approx(s)) for n, s in functions]
    assert result.quiet_runs == result.runs == 8, "no more than it takes"
    core = Core(phases(0.3, 0.06))
    result = measured(core, FakeNetwork(core, functions))
    assert (result.method, result.disturbed) == ("runs", 0.0)
    assert result.latency_s == pytest.approx(0.008) and result.quiet_runs >= 4, "in the gaps"


def test_a_run_longer_than_the_gaps_is_the_sum_of_its_calls() -> None:
    core = Core(phases(0.3, 0.06))
    functions = [(f"f{i}", 0.002 * (i + 1)) for i in range(12)]  # 156 ms in all, 24 ms at most
    result = measured(core, FakeNetwork(core, functions))
    assert (result.method, result.quiet_runs, result.disturbed) == ("calls", 0, 0.0)
    assert result.latency_s == result.calls_s == pytest.approx(0.156, rel=1e-3)
    assert [call.latency_s for call in result.calls] == pytest.approx([s for _, s in functions], rel=1e-3)
    assert all(call.quiet_samples >= 4 for call in result.calls)
    assert result.plain_s > 1.5 * 0.156, "the plain figure has the disturbance in it"


def test_a_call_longer_than_the_gaps_is_said_to_be_disturbed() -> None:
    core = Core(phases(0.3, 0.06))
    result = measured(core, FakeNetwork(core, [("short", 0.02), ("long", 0.1)]))
    short, long = result.calls
    assert short.quiet_samples and short.disturbed == 0.0 and short.latency_s == pytest.approx(0.02, rel=1e-3)
    assert not long.quiet_samples and long.disturbed == 1.0
    # begun in a gap: 60 ms without neighbours, 40 ms at half the speed; shorter by what of the gap was missed
    assert 0.139 < long.latency_s < 0.2
    whole = short.latency_s + long.latency_s
    assert result.disturbed == pytest.approx(long.latency_s / whole)


def test_another_process_on_the_core_is_seen() -> None:
    core = Core(lambda now: False)
    network = FakeNetwork(core, [("first", 0.005)])
    found = Sampled(network, core, PLAN, clock=lambda: core.now, preemptions=iter(range(9)).__next__)  # type: ignore[arg-type]
    found.sample_run()
    assert found.runs == [(pytest.approx(0.005), False)]


def test_where_neighbours_never_rest_time_is_bounded_and_it_is_said() -> None:
    core = Core(lambda now: True)
    result = measured(core, FakeNetwork(core, [("first", 0.2), ("second", 0.4)]))
    assert result.disturbed == 1.0 and result.quiet_runs == 0 and result.noise is None
    assert result.latency_s == pytest.approx(1.2, rel=1e-3) and result.plain_s == pytest.approx(1.2, rel=1e-3)
    assert core.now < PLAN.max_measure_s + PLAN.max_wait_s + 2, "the plan's time and one run"


def test_a_network_that_takes_longer_than_the_time_there_is_runs_four_times() -> None:
    core = Core(phases(0.3, 0.06))
    network = FakeNetwork(core, [("first", 20.0), ("second", 0.01)])
    found = sampled(core, network)
    sample_in_turn([found])
    assert len(found.runs) == 2 and network.instrumented == 2
    assert found.result().method == "calls"


def test_variants_are_sampled_in_turn() -> None:
    core = Core(lambda now: False)
    variants = [sampled(core, FakeNetwork(core, [(name, 0.01)])) for name in ("a", "b")]
    order: list[int] = []
    for number, variant in enumerate(variants):
        take = variant.sample_run
        variant.sample_run = lambda number=number, take=take: (order.append(number), take())  # type: ignore[method-assign]
    sample_in_turn(variants)
    assert order == [0, 1] * 8


def test_calls_within_calls_count_once() -> None:
    core = Core(lambda now: False)

    class Nested(FakeNetwork):
        def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
            before("outer")
            super().run_instrumented(before, after)
            after("outer")

    result = measured(core, Nested(core, [("inner", 0.01)]))
    assert [call.name for call in result.calls] == ["outer"]
    assert result.calls_s == pytest.approx(0.01, rel=1e-2)


def test_calls_that_differ_from_run_to_run_are_not_added_up() -> None:
    core = Core(lambda now: True)

    class Changing(FakeNetwork):
        def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
            self.functions = [(f"f{self.instrumented}", 0.05)]
            super().run_instrumented(before, after)

    result = measured(core, Changing(core, [("f", 0.05)]))
    assert (result.method, result.calls, result.calls_s) == ("runs", (), None)
    assert result.disturbed == 1.0 and result.latency_s == result.plain_s


def test_differences_of_outputs_are_relative_to_the_largest_value() -> None:
    first = [np.array([1.0, -4.0, np.inf]), np.array([1, 2])]
    assert largest_difference(first, first) == 0.0
    assert largest_difference(first, [np.array([1.5, -4.0, np.inf]), np.array([9, 9])]) == 0.125
    assert largest_difference(first, [np.array([1.0, np.nan, np.inf]), np.array([1, 2])]) == float("inf")
