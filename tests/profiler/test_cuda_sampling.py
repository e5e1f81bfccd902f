"""Inside the measuring process, on a GPU with a scripted clock: lanes, rounds, overlap, adaptive stopping."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import pytest

from cdmpp.profiler.bundle import Bundle
from cdmpp.profiler.cuda_gpu import GpuFault
from cdmpp.profiler.cuda_sampling import GpuMeasured, GpuWorkerConfig, MeasureJob, Measurer, Running
from cdmpp.profiler.statistics import SamplingPlan
from tests.samples.gpu import FakeGpu, no_reference, toy_bundle

PLAN = SamplingPlan(min_sample_s=0.001, min_samples=4, max_samples=8, target_noise=0.01, max_measure_s=1.0)


class AtOnce(Executor):
    """Does what it is given at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except ValueError as err:
            future.set_exception(err)
        return future


def measured(
    gpu: FakeGpu, jobs: list[MeasureJob], overlap: bool = True, **config: Any
) -> tuple[dict[str, GpuMeasured], list[Any]]:
    sent: list[Any] = []
    worker = GpuWorkerConfig("", {}, **{"plan": PLAN, **config})
    measurer = Measurer(gpu, worker, sent.append, AtOnce() if overlap else None, lambda: gpu.now)
    for job in jobs:
        measurer.add(job)
    while not measurer.idle:
        measurer.step()
    return {m.program: m for m in sent if isinstance(m, GpuMeasured)}, sent


def jobs_of(bundle: Bundle, degree: int) -> list[MeasureJob]:
    return [MeasureJob(k, degree) for k in bundle.kernels]


def test_labels_come_with_repeats_degree_and_clocks() -> None:
    results, _ = measured(FakeGpu({"p000": {"run_s": 1e-5}}), jobs_of(toy_bundle(1, 1), 1))
    result = results["p000"]
    assert result.status == "ok"
    assert result.meta["repeats"] == 100  # 10 us fill 1 ms
    assert result.meta["degree"] == 1 and result.meta["cache"] == "warm"
    assert result.meta["clock_mhz"] == 1980
    assert all(s == pytest.approx(1e-5, rel=0.01) for s in result.samples_s)


def test_sampling_stops_when_the_halves_agree() -> None:
    results, _ = measured(FakeGpu(), jobs_of(toy_bundle(1, 1), 1))
    assert len(results["p000"].samples_s) == PLAN.min_samples


def test_a_cold_sample_is_one_run() -> None:
    results, _ = measured(FakeGpu({"p000": {"run_s": 1e-5}}), jobs_of(toy_bundle(1, 1), 1), cold=True)
    assert results["p000"].meta["repeats"] == 1
    assert results["p000"].meta["cache"] == "cold"


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_at_most_the_degree_run_side_by_side(degree: int) -> None:
    gpu = FakeGpu()
    results, _ = measured(gpu, jobs_of(toy_bundle(8, 2), degree))
    rounds = [len(who.split()) for what, who in gpu.log if what == "sample"]
    assert len(results) == 8
    assert max(rounds) == degree
    assert len(rounds) == 8 // degree * PLAN.min_samples


def test_a_lane_is_refilled_while_the_others_go_on() -> None:
    gpu = FakeGpu({"p000": {"run_s": 0.3}})  # one run takes a third of the time that a program may take
    measured(gpu, jobs_of(toy_bundle(4, 1), 2))
    company = {who.replace("p000", "").strip() for what, who in gpu.log if what == "sample" and "p000" in who}
    assert len(company - {""}) >= 1
    assert ("unload", "p000") in gpu.log


def test_programs_of_different_degree_are_not_mixed() -> None:
    bundle = toy_bundle(6, 2)
    jobs = [MeasureJob(k, 4 if i < 3 else 1) for i, k in enumerate(bundle.kernels)]
    gpu = FakeGpu()
    measured(gpu, jobs)
    for what, who in gpu.log:
        if what == "sample" and {"p003", "p004", "p005"} & set(who.split()):
            assert len(who.split()) == 1


def test_a_first_run_is_alone_and_announced() -> None:
    _, sent = measured(FakeGpu(), jobs_of(toy_bundle(3, 1), 2))
    announced = [m.programs for m in sent if isinstance(m, Running)]
    assert ("p000",) in announced and ("p001",) in announced
    assert ("p000", "p001") in announced


def test_programs_are_loaded_while_others_are_measured() -> None:
    gpu = FakeGpu()
    measured(gpu, jobs_of(toy_bundle(4, 1), 1))
    assert gpu.log.index(("load", "p003")) < gpu.log.index(("first", "p000"))
    serial = FakeGpu()
    measured(serial, jobs_of(toy_bundle(4, 1), 1), overlap=False)
    assert serial.log.index(("load", "p001")) > serial.log.index(("unload", "p000"))


def test_what_concerns_one_program_costs_one_record() -> None:
    script = {"p000": {"fault_load": True}, "p001": {"run_s": 5.0}}
    results, _ = measured(FakeGpu(script), jobs_of(toy_bundle(3, 1), 2))
    assert results["p000"].status == "run_error" and "kernel image" in results["p000"].error
    assert results["p001"].status == "run_timeout"
    assert results["p002"].status == "ok"


def test_outputs_are_compared_with_the_reference() -> None:
    bundle = toy_bundle(3, 1)
    reference = bundle.references["0" * 16]
    jobs = [MeasureJob(k, 1, reference) for k in bundle.kernels[:2]]
    jobs.append(MeasureJob(bundle.kernels[2], 1, no_reference("0" * 16)))
    results, _ = measured(FakeGpu({"p001": {"wrong": True}}), jobs)
    assert results["p000"].meta["checked"] and results["p000"].meta["output_error"] < 1e-6
    assert results["p001"].status == "run_error" and "wrong output" in results["p001"].error
    assert results["p002"].status == "run_error"


def test_a_broken_context_ends_the_process() -> None:
    with pytest.raises(GpuFault):
        measured(FakeGpu({"p000": {"fault": "sample"}}), jobs_of(toy_bundle(1, 1), 1))
