"""Whole networks beside strangers: a core that is disturbed at known times, on a clock that only moves when told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cdmpp.profiler.statistics import SamplingPlan
from cdmpp.tuner import network_runner
from cdmpp.tuner.network_runner import Looks, Runnable, Sampled, sample_in_turn

#: Enough quiet samples are four (half of min_samples).
PLAN = SamplingPlan(min_sample_s=0.002, min_samples=8, max_samples=16, max_measure_s=15.0, max_wait_s=15.0)


class Core:
    """A core where work takes `slow` times as long while `busy(now)`; also the sentinel that sees it."""

    def __init__(self, busy: Callable[[float], bool], slow: float = 2.0) -> None:
        self.now, self.cpu_s = 0.0, 0.0
        self.busy, self.slow = busy, slow
        self.looks: Looks | None = None
        self._next_look = float("inf")

    def work(self, seconds: float) -> None:
        """Run for so long as it takes undisturbed, in steps of a tenth of a millisecond; with looks meanwhile."""
        left = seconds
        while left > 1e-9:
            step = min(left, 1e-4)
            left -= step
            took = step * (self.slow if self.busy(self.now) else 1.0)
            self.now += took
            self.cpu_s += took
            if self.looks is not None and self.now >= self._next_look:
                self._next_look = self.now + 0.004
                self.looks.look()

    def watched_by(self, looks: Looks) -> None:
        self.looks, self._next_look = looks, self.now

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
    """Functions with the times they take undisturbed; the VM's own take 1 us each, and looking at any call 2 us."""

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
                self.core.cpu_s += 2e-6
                after(called)


def sampled(core: Core, network: Runnable, plan: SamplingPlan = PLAN) -> Sampled:
    looks = Looks(core, clock=lambda: core.now, cpu_clock=lambda: core.cpu_s)  # type: ignore[arg-type]
    core.watched_by(looks)
    return Sampled(network, looks, plan)


def phases(period_s: float, quiet_s: float) -> Callable[[float], bool]:
    """Disturbed but for the first `quiet_s` of every period."""
    return lambda now: now % period_s >= quiet_s


def test_an_undisturbed_network_is_labelled_by_its_runs_and_the_calls_add_up() -> None:
    core = Core(lambda now: False)
    found = sampled(core, FakeNetwork(core, [("first", 0.003), ("second", 0.005)]))
    sample_in_turn([found])
    result = found.result()
    assert (
        result.method == "runs" and result.disturbed == 0.0 and result.noise == pytest.approx(0.0, abs=1e-6)
    )
    assert result.latency_s == pytest.approx(0.008)
    assert result.plain_s == pytest.approx(0.008)
    assert result.calls_s == pytest.approx(0.008), "the cost of looking (2 us a call) is taken off"
    assert [call.name for call in result.calls] == ["first", "second"]
    assert [call.latency_s for call in result.calls] == pytest.approx([0.003, 0.005])
    assert result.quiet_runs == result.runs == 8, "no more than it takes"


def test_a_short_run_is_measured_in_the_gaps() -> None:
    core = Core(phases(0.3, 0.06))
    found = sampled(core, FakeNetwork(core, [("first", 0.003), ("second", 0.005)]))
    sample_in_turn([found])
    result = found.result()
    assert result.method == "runs" and result.disturbed == 0.0
    assert result.latency_s == pytest.approx(0.008)
    assert result.quiet_runs >= 4
    assert all(run == pytest.approx(0.008) for run, disturbed in found.runs if not disturbed)


def test_a_run_longer_than_the_gaps_is_the_sum_of_its_calls() -> None:
    core = Core(phases(0.3, 0.06))
    functions = [(f"f{i}", 0.002 * (i + 1)) for i in range(12)]  # 156 ms in all, 24 ms at most
    found = sampled(core, FakeNetwork(core, functions))
    sample_in_turn([found])
    result = found.result()
    assert result.method == "calls" and result.quiet_runs == 0 and result.disturbed == 0.0
    assert result.latency_s == result.calls_s == pytest.approx(0.156, rel=1e-3)
    assert [call.latency_s for call in result.calls] == pytest.approx([s for _, s in functions], rel=1e-3)
    assert all(call.quiet_samples >= 4 for call in result.calls)
    assert result.plain_s > 1.5 * 0.156, "the plain figure has the disturbance in it"


def test_a_call_longer_than_the_gaps_is_said_to_be_disturbed() -> None:
    core = Core(phases(0.3, 0.06))
    found = sampled(core, FakeNetwork(core, [("short", 0.02), ("long", 0.2)]))
    sample_in_turn([found])
    short, long = found.result().calls
    assert short.quiet_samples and not long.quiet_samples
    assert short.latency_s == pytest.approx(0.02, rel=1e-3)
    fastest, disturbed = min(found.calls[1][1])
    assert long.latency_s == pytest.approx(fastest, rel=1e-3) and long.disturbed == disturbed
    # begun in a gap: 80 ms without neighbours, 240 ms at half the speed
    assert fastest == pytest.approx(0.32, rel=0.02)
    assert disturbed == pytest.approx(240 / 320, rel=0.05)
    whole = short.latency_s + long.latency_s
    assert found.result().disturbed == pytest.approx(disturbed * long.latency_s / whole)


def test_a_disturbance_between_two_looks_at_the_ends_is_seen() -> None:
    core = Core(lambda now: 1.010 < now < 1.030)
    found = sampled(core, FakeNetwork(core, [("long", 0.1)]))
    core.now = 1.0
    found.sample_run()
    found.sample_run()
    (first, disturbed), second = found.runs
    assert first == pytest.approx(0.11, rel=1e-2), "half of 20 ms are lost"
    assert disturbed == pytest.approx(20 / 110, rel=0.3)
    assert second == (pytest.approx(0.1), 0.0), "looks meanwhile are taken off"


def test_another_process_on_the_core_is_seen() -> None:
    core = Core(lambda now: False)

    class Shared(FakeNetwork):
        def run(self) -> None:
            super().run()
            self.core.now += 0.003  # without time on the core

    network = Shared(core, [("first", 0.01)])
    found = sampled(core, network)
    found.sample_run()
    assert found.runs == [(pytest.approx(0.013), pytest.approx(3 / 13))]
    looks = Looks(core, alone=False, clock=lambda: core.now, cpu_clock=lambda: core.cpu_s)  # type: ignore[arg-type]
    several_threads = Sampled(network, looks, PLAN)
    several_threads.sample_run()
    assert several_threads.runs[0][1] == 0, "with several threads the calling one may rest"


def test_where_neighbours_never_rest_time_is_bounded_and_it_is_said() -> None:
    core = Core(lambda now: True)
    found = sampled(core, FakeNetwork(core, [("first", 0.2), ("second", 0.4)]))
    sample_in_turn([found])
    result = found.result()
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


def test_variants_are_sampled_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    core, order = Core(lambda now: False), []

    class Named(FakeNetwork):
        def run(self) -> None:
            order.append(self.functions[0][0])
            super().run()

    variants = [sampled(core, Named(core, [(name, 0.01)])) for name in ("a", "b")]
    order.clear()
    sample_in_turn(variants)
    assert order == ["a", "b"] * 8


def test_calls_within_calls_count_once() -> None:
    core = Core(lambda now: False)

    class Nested(FakeNetwork):
        def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
            before("outer")
            super().run_instrumented(before, after)
            after("outer")

    found = sampled(core, Nested(core, [("inner", 0.01)]))
    sample_in_turn([found])
    assert [call.name for call in found.result().calls] == ["outer"]
    assert found.result().calls_s == pytest.approx(0.01, rel=1e-2)


def test_calls_that_differ_from_run_to_run_are_not_added_up() -> None:
    core = Core(lambda now: True)

    class Changing(FakeNetwork):
        def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
            self.functions = [(f"f{self.instrumented}", 0.05)]
            super().run_instrumented(before, after)

    found = sampled(core, Changing(core, [("f", 0.05)]))
    sample_in_turn([found])
    result = found.result()
    assert result.method == "runs" and result.calls == () and result.calls_s is None
    assert result.disturbed == 1.0 and result.latency_s == result.plain_s


def test_a_network_without_functions_of_its_own() -> None:
    core = Core(lambda now: False)
    found = sampled(core, FakeNetwork(core, []))
    found._repeats = 1
    core.now += 1.0
    found.runs = [(1e-6, 0.0)] * 8
    while found.wants_calls:
        found.sample_calls()
    assert found.result().method == "runs" and found.result().calls == ()


def test_the_thread_that_looks_starts_and_ends() -> None:
    class Calm:
        count = 0

        def calm(self) -> bool:
            self.count += 1
            return self.count != 2

    sentinel = Calm()
    looks = Looks(sentinel)  # type: ignore[arg-type]
    prepared: list[bool] = []
    looks.watch(lambda: prepared.append(True))
    while sentinel.count < 3:
        network_runner.time.sleep(0.001)
    looks.close()
    assert prepared == [True] and looks._disturbed == 1
    looks.close()
