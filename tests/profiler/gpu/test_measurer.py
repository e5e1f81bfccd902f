"""The engine with real processes and a GPU that is not there: faults, hangs, lost devices, compiling."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.device import get_device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.engine import Engine, Outcome
from cdmpp.profiler.gpu.build import KernelJob
from cdmpp.profiler.gpu.bundle import Bundle
from cdmpp.profiler.gpu.compile import find_nvcc
from cdmpp.profiler.gpu.measurer import GpuMeasurer, gpu_engine
from cdmpp.profiler.gpu.sampling import GpuConfig
from tests.samples.gpu import QUICK, jobs_of, toy_bundle


def config_of(script: Mapping[str, Any] | None = None, **arguments: Any) -> GpuConfig:
    arguments["script"] = script or {}
    return GpuConfig(**QUICK, degree="auto", hang_s=2.0, window=8, gpu_arguments=arguments)


def engine_of(config: GpuConfig) -> Engine:
    return gpu_engine(config, get_device("h200"), builds=False)


def run(config: GpuConfig, bundle: Bundle, degree: int = 1) -> tuple[dict[str, Outcome], GpuMeasurer]:
    with engine_of(config) as engine:
        outcomes = list(engine.run(iter(jobs_of(bundle, degree))))
    found = {o.job.program.hash: o for o in outcomes}
    assert len(found) == len(outcomes), "a program has two outcomes"
    assert isinstance(engine.measurer, GpuMeasurer)
    return found, engine.measurer


def statuses(found: Mapping[str, Outcome]) -> Counter[str]:
    return Counter(o.status for o in found.values())


def test_every_program_gets_a_label() -> None:
    found, measurer = run(config_of(), toy_bundle(20), degree=4)
    assert statuses(found) == {"ok": 20}
    assert all(o.latency_s == pytest.approx(1e-4, rel=0.01) for o in found.values())
    assert all(o.noise is not None and o.noise < 0.01 for o in found.values())
    assert found["p000"].meta["build_s"] == 0.25
    assert measurer.restarts == 0
    assert measurer.facts.sms == 132


def test_programs_that_were_not_built_need_no_gpu() -> None:
    found, _ = run(config_of(), toy_bundle(4, statuses={1: "invalid_config", 2: "build_error"}))
    assert statuses(found) == {"ok": 2, "invalid_config": 1, "build_error": 1}
    assert found["p001"].error == "invalid_config: for a reason"


def test_a_fault_costs_one_record_and_one_restart() -> None:
    found, measurer = run(config_of({"p003": {"fault": "first"}}), toy_bundle(12), degree=2)
    assert statuses(found) == {"ok": 11, "run_error": 1}
    assert "illegal memory access" in found["p003"].error
    assert measurer.restarts == 1


def test_a_hang_costs_one_record_and_one_restart() -> None:
    found, measurer = run(config_of({"p002": {"hang": "first"}}), toy_bundle(8), degree=2)
    assert statuses(found) == {"ok": 7, "run_timeout": 1}
    assert found["p002"].status == "run_timeout"
    assert measurer.restarts == 1


def test_a_fault_among_several_is_found_by_measuring_each_alone() -> None:
    found, measurer = run(config_of({"p001": {"fault": "sample"}}), toy_bundle(6), degree=4)
    assert statuses(found) == {"ok": 5, "run_error": 1}
    assert found["p001"].status == "run_error"
    assert measurer.restarts == 2


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
    bundle = toy_bundle(5)

    def jobs() -> Iterator[KernelJob]:
        for job in jobs_of(bundle):
            assert len(taken) == len(ended), "the next was taken before the last had ended"
            taken.append(job.program.hash)
            yield job

    with engine_of(replace(config_of(), overlap=False)) as engine:
        for outcome in engine.run(jobs()):
            ended.append(outcome.job.program.hash)
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
    assert found["p000"].meta["build_s"] != 0.25
    assert found["p000"].meta["resources"]["main_kernel"]["registers"] > 0
