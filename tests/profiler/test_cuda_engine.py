"""The engine with real processes and a GPU that is not there: faults, hangs, lost devices, compiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import ProfilerError
from cdmpp.profiler.bundle import Bundle
from cdmpp.profiler.cuda_compile import find_nvcc
from cdmpp.profiler.cuda_engine import CudaEngine, GpuEngineConfig, GpuOutcome
from cdmpp.profiler.cuda_sampling import GpuWorkerConfig, MeasureJob
from cdmpp.profiler.statistics import SamplingPlan
from tests.samples.gpu import FAKE_GPU, toy_bundle

PLAN = SamplingPlan(min_sample_s=0.001, min_samples=2, max_samples=4, max_measure_s=0.2)


def config_of(script: Mapping[str, Any] | None = None, **arguments: Any) -> GpuEngineConfig:
    worker = GpuWorkerConfig(FAKE_GPU, {"script": script or {}, **arguments}, PLAN, run_timeout_s=0.1)
    return GpuEngineConfig(worker, "sm_90", compilers=1, hang_s=2.0, window=8)


def run(config: GpuEngineConfig, bundle: Bundle, degree: int = 1) -> tuple[dict[str, GpuOutcome], CudaEngine]:
    with CudaEngine(config) as engine:
        outcomes = list(engine.run(iter([MeasureJob(k, degree) for k in bundle.kernels])))
    found = {o.job.kernel.program: o for o in outcomes}
    assert len(found) == len(outcomes), "a program has two outcomes"
    return found, engine


def statuses(found: Mapping[str, GpuOutcome]) -> Counter[str]:
    return Counter(o.status for o in found.values())


def test_every_program_gets_a_label() -> None:
    found, engine = run(config_of(), toy_bundle(20), degree=4)
    assert statuses(found) == {"ok": 20}
    assert all(o.latency_s == pytest.approx(1e-4, rel=0.01) for o in found.values())
    assert all(o.noise is not None and o.noise < 0.01 for o in found.values())
    assert found["p000"].meta["build_s"] == 0.25
    assert engine.restarts == 0
    assert engine.facts.sms == 132


def test_programs_that_were_not_built_need_no_gpu() -> None:
    found, _ = run(config_of(), toy_bundle(4, statuses={1: "invalid_config", 2: "build_error"}))
    assert statuses(found) == {"ok": 2, "invalid_config": 1, "build_error": 1}
    assert found["p001"].error == "invalid_config: for a reason"


def test_a_fault_costs_one_record_and_one_restart() -> None:
    found, engine = run(config_of({"p003": {"fault": "first"}}), toy_bundle(12), degree=2)
    assert statuses(found) == {"ok": 11, "run_error": 1}
    assert "illegal memory access" in found["p003"].error
    assert engine.restarts == 1


def test_a_hang_costs_one_record_and_one_restart() -> None:
    found, engine = run(config_of({"p002": {"hang": "first"}}), toy_bundle(8), degree=2)
    assert statuses(found) == {"ok": 7, "run_timeout": 1}
    assert found["p002"].status == "run_timeout"
    assert engine.restarts == 1


def test_a_fault_among_several_is_found_by_measuring_each_alone() -> None:
    found, engine = run(config_of({"p001": {"fault": "sample"}}), toy_bundle(6), degree=4)
    assert statuses(found) == {"ok": 5, "run_error": 1}
    assert found["p001"].status == "run_error"
    assert engine.restarts == 2


def test_a_lost_device_is_said_and_ends_the_run(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_text("1")
    outcomes: list[GpuOutcome] = []
    config = config_of({"p001": {"fault": "first"}}, lives=str(lives))
    with pytest.raises(ProfilerError, match="lost"), CudaEngine(config) as engine:
        for outcome in engine.run(iter([MeasureJob(k) for k in toy_bundle(4).kernels])):
            outcomes.append(outcome)
    assert [o.status for o in outcomes if o.job.kernel.program == "p001"] == ["device_lost"]


def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(ProfilerError, match="no CUDA device"), CudaEngine(config_of(share=0.0)):
        pass


def test_without_overlap_one_program_is_under_way_at_a_time() -> None:
    taken: list[str] = []
    ended: list[str] = []
    bundle = toy_bundle(5)

    def jobs() -> Iterator[MeasureJob]:
        for kernel in bundle.kernels:
            assert len(taken) == len(ended), "the next was taken before the last had ended"
            taken.append(kernel.program)
            yield MeasureJob(kernel)

    with CudaEngine(replace(config_of(), overlap=False)) as engine:
        for outcome in engine.run(jobs()):
            ended.append(outcome.job.kernel.program)
    assert ended == taken


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_sources_are_compiled_while_others_are_measured() -> None:
    bundle = toy_bundle(3, cubins=False)
    broken = bundle.kernels[1]
    assert broken.cuda is not None
    kernels = [
        bundle.kernels[0],
        replace(broken, cuda=replace(broken.cuda, source="nonsense")),
        bundle.kernels[2],
    ]
    found, _ = run(config_of(), replace(bundle, kernels=kernels))
    assert statuses(found) == {"ok": 2, "build_error": 1}
    assert found["p000"].job.kernel.cubin[:4] == b"\x7fELF"
    assert found["p000"].meta["build_s"] != 0.25
