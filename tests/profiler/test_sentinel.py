"""Samples are taken, and programs measured again, according to who else uses the core."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.profiler import machine as module
from cdmpp.profiler.cpu import BatchDone, CpuConfig, CpuMeasurer, LoadedProgram, SharedObject, _Item
from cdmpp.profiler.engine import Executor, Measured, Outcome, SamplingPlan
from cdmpp.profiler.machine import Sentinel
from cdmpp.program import ast as reader


class Core:
    """A clock on which the sentinel's loop takes 10 us, or `slow` times as long while a neighbour is busy."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slow = 1.0
        self.busy_until = 0.0
        self.loop_s = 10e-6
        self._inside = False

    def perf_counter(self) -> float:
        # Every other reading ends a loop.
        if self._inside:
            self.now += self.loop_s * (self.slow if self.now < self.busy_until else 1.0)
        self._inside = not self._inside
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    clock = Core()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    return clock


def watch(core: Core) -> Sentinel:
    watcher = Sentinel(settle_s=0.0)
    watcher.clean_s = 10e-6
    core._inside = False
    return watcher


@pytest.mark.parametrize(("slow", "calm"), [(1.0, True), (1.15, True), (1.8, False)])
def test_a_busy_neighbour_is_seen_and_clock_changes_are_not(core: Core, slow: float, calm: bool) -> None:
    watcher = watch(core)
    core.busy_until, core.slow = float("inf"), slow
    assert watcher.calm() is calm


def test_a_faster_pass_corrects_what_undisturbed_means(core: Core) -> None:
    watcher = watch(core)
    watcher.clean_s = 30e-6
    watcher.calm()
    assert watcher.clean_s == pytest.approx(10e-6)


def test_waiting_is_given_up_where_a_neighbour_never_rests(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watch(core)
    monkeypatch.setattr(core, "loop_s", 0.0)  # the clock stands still but for pauses
    monkeypatch.setattr(watcher, "_pass_s", lambda: 2 * watcher.clean_s)
    waited = 0.0
    for _ in range(100):
        calm, seconds = watcher.wait(0.5)
        waited += seconds
        assert not calm
    assert module._PATIENCE_S <= waited < module._PATIENCE_S + 1.0
    assert not watcher.patient
    watcher.measured(0.25)
    assert watcher.patient


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on the machine of the tests disturbs no sample."""
    monkeypatch.setattr(module, "preemptions", lambda: 0)


class Script:
    """A sentinel that answers from a list; True at its end."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers = list(answers)

    def calm(self) -> bool:
        return self.answers.pop(0) if self.answers else True

    patient = True

    def measured(self, seconds: float) -> None:
        pass

    def wait(self, at_most_s: float) -> tuple[bool, float]:
        return (True, 0.0) if at_most_s > 0 else (False, 0.0)


def loaded(answers: list[bool], plan: SamplingPlan, best_s: float | None = None) -> Any:
    program = LoadedProgram.__new__(LoadedProgram)
    program.plan, program.sentinel = plan, Script(answers)  # type: ignore[assignment]
    program.calm, program.disturbed = [], []
    program.spent_s = program.waited_s = 0.0
    program.best_s, program._timer, program.repeats = best_s, None, 1
    program._values = iter(float(i) for i in range(1, 100))
    program._run_once = lambda: next(program._values)
    return program


@pytest.mark.parametrize(
    ("answers", "plan", "samples_s", "share"),
    [
        ([True, False, False, True, True, True], SamplingPlan(min_samples=4, max_samples=4), {1, 4, 5, 6}, 0.0),
        # Never left alone: twice max_samples, then it ends.
        ([False] * 7 + [True] + [False] * 50, SamplingPlan(min_samples=4, max_samples=4), set(range(1, 9)), 7 / 8),
        # At least two are taken whatever happens.
        ([False] * 50, SamplingPlan(min_samples=2, max_samples=4, max_wait_s=0.0), {1, 2}, 1.0),
    ],
)  # fmt: skip
def test_undisturbed_samples_count_or_the_share_of_others_is_told(
    answers: list[bool], plan: SamplingPlan, samples_s: set[int], share: float
) -> None:
    program = loaded(answers, plan)
    while program.wants_more:
        program.sample()
    found, disturbed = program.result()
    assert set(found) == samples_s and len(found) == len(samples_s) and disturbed == pytest.approx(share)


def test_a_sample_during_which_the_core_was_taken_away_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "preemptions", iter(range(9)).__next__)
    (program := loaded([], SamplingPlan())).sample()
    assert program.disturbed == [1.0] and not program.calm


@pytest.mark.parametrize(
    ("best_s", "step_s", "taken"), [(None, 1, 9), (1.6, 1, 9), (1.59, 1, 3), (1.82, 0.01, 9), (1.81, 0.01, 3)]
)
def test_what_is_clearly_slower_than_the_best_is_not_sampled_to_the_end(best_s: Any, step_s: float, taken: int) -> None:
    """The first sample, of 1 s, is disturbed; the others take 2 s and more. Without noise a tenth is enough."""
    program = loaded([False], SamplingPlan(min_samples=8, max_samples=8), best_s)
    program._values = iter([1.0, *(2.0 + step_s * i for i in range(9))])
    while program.wants_more:
        program.sample()
    found, disturbed = program.result()
    assert min(found) == 2.0 and len(found) == taken - 1 and disturbed == 0.0


def item_of(program: str) -> _Item:
    job = SimpleNamespace(program=program, task=SimpleNamespace(hash="t"))
    return _Item(job, SharedObject(program, path="/nonexistent"))  # type: ignore[arg-type]


def outcomes(attempts: list[tuple[float, float]]) -> tuple[list[Outcome], int]:
    """Feed one program's attempts (latency, disturbed share) to a measurer that has no processes."""
    measurer = CpuMeasurer(CpuConfig(), {}, Executor(), None)
    item = item_of("p")
    for n, (latency_s, share) in enumerate(attempts, 1):
        status = "ok" if latency_s else "run_timeout"
        item.measured = Measured("p", status, (latency_s,) * 4, meta={"disturbed": share}, run_s=1.0)
        measurer._batch_done([item], BatchDone(1e-3, 1e-3, 0.0, "fifo"))
        if measurer.outcomes:
            return list(measurer.outcomes), n
        assert measurer._later.popleft()[1] is item
    return [], len(attempts)


@pytest.mark.parametrize(
    ("attempts", "latency_s", "taken"),
    [
        ([(1.0, 0.0)], 1.0, 1),
        ([(2.0, 0.9), (1.5, 0.0)], 1.5, 2),
        ([(2.0, 0.9), (0.0, 0.0), (1.9, 0.0)], 1.9, 3),  # the second failed
        ([(2.0, 0.9), (1.8, 0.9), (1.9, 0.5)], 1.8, 3),  # never left alone: the fastest
        ([(1.0, 0.9), (1.2, 0.0)], 1.2, 2),  # undisturbed counts, though it is slower
    ],
)
def test_disturbed_programs_are_measured_again_later(attempts: list[tuple[float, float]], latency_s: float, taken: int) -> None:
    found, n = outcomes(attempts)
    assert [o.latency_s for o in found] == [latency_s]
    assert n == taken == found[0].meta["attempts"]
    assert found[0].meta["run_s"] == sum(bool(latency_s) for latency_s, _ in attempts), "what all of them took"


def test_what_waits_for_another_measurement_when_the_time_is_up_keeps_its_label() -> None:
    measurer, item = CpuMeasurer(CpuConfig(), {}, Executor(), None), item_of("p")
    item.measured = Measured("p", "ok", (2.0,) * 4, meta={"disturbed": 0.9})
    measurer._batch_done([item], BatchDone(1e-3, 1e-3, 0.0, "fifo"))
    assert not measurer.outcomes and [o.latency_s for o in measurer.labelled()] == [2.0]


def test_measuring_again_is_given_up_where_it_does_not_help() -> None:
    measurer = CpuMeasurer(CpuConfig(), {}, Executor(), None)
    attempts = []
    for number in range(40):
        item = item_of(f"p{number}")
        while not measurer.outcomes:
            item.measured = Measured(item.built.program, "ok", (1.0,) * 4, meta={"disturbed": 1.0})
            measurer._batch_done([item], BatchDone(1e-3, 1e-3, 0.0, "fifo"))
            measurer._later.clear()
        attempts.append(measurer.outcomes.popleft().meta["attempts"])
    assert attempts[:5] == [3] * 5
    assert attempts[-5:] == [1] * 5


def test_a_sample_is_the_mean_over_two_stacks_that_differ_by_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> float:
        ctypes.CDLL(None).getcontext(context := ctypes.create_string_buffer(2048))
        pointers.append(int.from_bytes(context.raw[160:168], "little"))  # where x86-64's ucontext_t has it
        return float(pointers[-1])

    pointers, program = list[int](), loaded([True] * 9, SamplingPlan())
    program._timer, program.repeats = run, 2
    program.sample()
    assert pointers[0] == pointers[1] + 16 and program.calm == [pointers[1] + 8]
    program.repeats = 1  # timed from Python, after an untimed run
    program.sample()
    assert next(program._values) == 2 and pointers[2] == pointers[3] + 16
    reader.extension.cache_clear()
    monkeypatch.setattr(reader, "find_spec", lambda name: None)  # as without a compiler
    program.sample()
    assert pointers[4] == pointers[5]
