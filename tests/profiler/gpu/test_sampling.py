"""GPUs with a scripted clock: lanes, rounds and adaptive stopping inside the measuring process; and the engine with real
processes: faults, hangs, lost devices, compiling."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.device import get_device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.engine import Engine, Measured, Outcome, Running, SamplingPlan
from cdmpp.profiler.gpu.build import KernelJob, MeasureJob
from cdmpp.profiler.gpu.bundle import Bundle
from cdmpp.profiler.gpu.compile import find_nvcc
from cdmpp.profiler.gpu.sampling import GpuConfig, GpuMeasurer, Sampler, possible_degree
from tests.samples.gpu import QUICK, FakeGpu, jobs_of, no_reference, toy_bundle, toy_program

PLAN = SamplingPlan(min_sample_s=0.001, min_samples=4, max_samples=8, target_noise=0.01, max_measure_s=1.0)


# -- inside the process ------------------------------------------------------------------------------------------


class AtOnce(ThreadPoolExecutor):
    """Does what it is given at once."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        wait([future := super().submit(*args, **kwargs)])
        return future


def measured(gpu: FakeGpu, jobs: list[MeasureJob], overlap: bool = True, **more: Any) -> tuple[dict[str, Measured], list[Any]]:
    sent: list[Any] = []
    settings = GpuConfig(**{"plan": PLAN, **more})
    sampler = Sampler(gpu, settings, sent.append, AtOnce() if overlap else None, lambda: gpu.now)
    for job in jobs:
        sampler.add(job)
    while not sampler.idle:
        sampler.step()
    return {m.program: m for m in sent if isinstance(m, Measured)}, sent


def kernels_of(bundle: Bundle, degree: int = 1) -> list[MeasureJob]:
    return [MeasureJob(k, degree) for k in bundle.kernels]


@pytest.mark.parametrize(("cold", "repeats"), [(False, 100), (True, 1)])
def test_labels_come_with_repeats_degree_and_clocks(cold: bool, repeats: int) -> None:
    results, _ = measured(FakeGpu({"p000": {"run_s": 1e-5}}), kernels_of(toy_bundle(1, 1)), cold=cold)
    result = results["p000"]
    assert result.status == "ok"
    assert result.meta["repeats"] == repeats, "10 us fill 1 ms; a cold sample is one run"
    assert result.meta["degree"] == 1 and result.meta["cache"] == ("cold" if cold else "warm")
    assert result.meta["clock_mhz"] == 1980
    assert len(result.samples_s) == PLAN.min_samples, "sampling stops when the halves agree"
    assert all(s == pytest.approx(1e-5, rel=0.01) for s in result.samples_s)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_at_most_the_degree_run_side_by_side(degree: int) -> None:
    gpu = FakeGpu()
    results, _ = measured(gpu, kernels_of(toy_bundle(8, 2), degree))
    rounds = [len(who.split()) for what, who in gpu.log if what == "sample"]
    assert len(results) == 8
    assert max(rounds) == degree
    assert len(rounds) == 8 // degree * PLAN.min_samples


def test_a_lane_is_refilled_while_the_others_go_on() -> None:
    gpu = FakeGpu({"p000": {"run_s": 0.3}})  # one run takes a third of the time that a program may take
    measured(gpu, kernels_of(toy_bundle(4, 1), 2))
    company = {who.replace("p000", "").strip() for what, who in gpu.log if what == "sample" and "p000" in who}
    assert len(company - {""}) >= 1
    assert ("unload", "p000") in gpu.log


def test_programs_of_different_degree_are_not_mixed() -> None:
    jobs = [MeasureJob(k, 4 if i < 3 else 1) for i, k in enumerate(toy_bundle(6, 2).kernels)]
    gpu = FakeGpu()
    measured(gpu, jobs)
    rounds = [set(who.split()) for what, who in gpu.log if what == "sample"]
    assert all(len(who) == 1 for who in rounds if {"p003", "p004", "p005"} & who)


def test_a_first_run_is_alone_and_announced() -> None:
    _, sent = measured(FakeGpu(), kernels_of(toy_bundle(3, 1), 2))
    announced = [m.programs for m in sent if isinstance(m, Running)]
    assert {("p000",), ("p001",), ("p000", "p001")} <= set(announced)


def test_programs_are_loaded_while_others_are_measured() -> None:
    gpu, serial = FakeGpu(), FakeGpu()
    measured(gpu, kernels_of(toy_bundle(4, 1)))
    assert gpu.log.index(("load", "p003")) < gpu.log.index(("first", "p000"))
    measured(serial, kernels_of(toy_bundle(4, 1)), overlap=False)
    assert serial.log.index(("load", "p001")) > serial.log.index(("unload", "p000"))


def test_what_concerns_one_program_costs_one_record() -> None:
    script = {"p000": {"fault_load": True}, "p001": {"run_s": 5.0}}
    results, _ = measured(FakeGpu(script), kernels_of(toy_bundle(3, 1), 2))
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


# -- with processes ----------------------------------------------------------------------------------------------


def config_of(script: Mapping[str, Any] | None = None, **arguments: Any) -> GpuConfig:
    arguments["script"] = script or {}
    return GpuConfig(**QUICK, degree="auto", hang_s=2.0, window=8, gpu_arguments=arguments)


def engine_of(config: GpuConfig) -> Engine:
    return Engine(GpuMeasurer(config, get_device("h200"), builds=False))


def run(config: GpuConfig, bundle: Bundle, degree: int = 1) -> tuple[dict[str, Outcome], GpuMeasurer]:
    with engine_of(config) as engine:
        outcomes = list(engine.run(iter(jobs_of(bundle, degree))))
    found = {o.job.program.hash: o for o in outcomes}
    assert len(found) == len(outcomes), "a program has two outcomes"
    assert isinstance(engine.measurer, GpuMeasurer)
    return found, engine.measurer


def statuses(found: Mapping[str, Outcome]) -> Counter[str]:
    return Counter(o.status for o in found.values())


def test_every_program_that_was_built_gets_a_label() -> None:
    bundle = toy_bundle(20, statuses={1: "invalid_config", 2: "build_error"})
    found, measurer = run(config_of(), bundle, degree=4)
    assert statuses(found) == {"ok": 18, "invalid_config": 1, "build_error": 1}
    assert found["p001"].error == "invalid_config: for a reason"
    ok = [o for o in found.values() if o.status == "ok"]
    assert all(o.latency_s == pytest.approx(1e-4, rel=0.01) for o in ok)
    assert all(o.noise is not None and o.noise < 0.01 for o in ok)
    assert found["p000"].meta["build_s"] == 0.25
    assert (measurer.restarts, measurer.facts.sms) == (0, 132)


@pytest.mark.parametrize(
    ("does", "degree", "status", "restarts"),
    [
        ({"fault": "first"}, 2, "run_error", 1),
        ({"hang": "first"}, 2, "run_timeout", 1),
        ({"fault": "sample"}, 4, "run_error", 2),  # found by measuring each of several alone
    ],
)
def test_a_fault_or_hang_costs_one_record(does: dict[str, str], degree: int, status: str, restarts: int) -> None:
    found, measurer = run(config_of({"p001": does}), toy_bundle(8), degree=degree)
    assert statuses(found) == {"ok": 7, status: 1}
    assert found["p001"].status == status and measurer.restarts == restarts
    assert "illegal memory access" in found["p001"].error or "hang" in does


def test_a_lost_device_is_said_and_ends_the_run(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_text("1")
    outcomes: list[Outcome] = []
    config = config_of({"p001": {"fault": "first"}}, lives=str(lives))
    with pytest.raises(ProfilerError, match="lost"), engine_of(config) as engine:
        for outcome in engine.run(iter(jobs_of(toy_bundle(4)))):
            outcomes.append(outcome)
    assert [o.status for o in outcomes if o.job.program.hash == "p001"] == ["device_lost"]


def test_a_measuring_process_that_dies_idle_is_replaced() -> None:
    with engine_of(config_of()) as engine:
        for restarts in (0, 1):
            outcomes = list(engine.run(iter(jobs_of(toy_bundle(4)))))
            assert [o.status for o in outcomes] == ["ok"] * 4
            assert engine.measurer.restarts == restarts
            os.kill(engine.measurer.workers[0].pid, signal.SIGKILL)
            engine.measurer.workers[0].exit_reason()


def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(ProfilerError, match="no CUDA device"), engine_of(config_of(share=0.0)):
        pass


def test_without_overlap_one_program_is_under_way_at_a_time() -> None:
    taken: list[str] = []
    ended: list[str] = []

    def jobs() -> Iterator[KernelJob]:
        for job in jobs_of(toy_bundle(5)):
            assert len(taken) == len(ended), "the next was taken before the last had ended"
            taken.append(job.program.hash)
            yield job

    with engine_of(replace(config_of(), overlap=False)) as engine:
        for outcome in engine.run(jobs()):
            ended.append(outcome.job.program.hash)
    assert ended == taken


def test_the_degree_that_fits_follows_from_the_grid() -> None:
    grids = {1: 8, 16: 8, 17: 4, 66: 2, 67: 1, 132: 1}
    assert {b: possible_degree(toy_program(b), FakeGpu().facts) for b in grids} == grids
    assert possible_degree(toy_program(1000), FakeGpu(share=0.25).facts) == 4


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_sources_are_compiled_while_others_are_measured() -> None:
    bundle = toy_bundle(3, cubins=False)
    kernels = list(bundle.kernels)
    assert kernels[1].cuda is not None
    kernels[1] = replace(kernels[1], cuda=replace(kernels[1].cuda, source="nonsense"))
    found, _ = run(config_of(), replace(bundle, kernels=kernels))
    assert statuses(found) == {"ok": 2, "build_error": 1}
    assert found["p000"].meta["build_s"] != 0.25
    assert found["p000"].meta["resources"]["main_kernel"]["registers"] > 0
