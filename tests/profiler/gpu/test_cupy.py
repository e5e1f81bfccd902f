"""On a real GPU: timing, lanes, shares, faults and hangs. Skipped where there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.device import Device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.arguments import reference_inputs
from cdmpp.profiler.engine import Engine, SamplingPlan
from cdmpp.profiler.gpu.build import KernelJob, MeasureJob
from cdmpp.profiler.gpu.bundle import BundledProgram, CudaProgram
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.measure import check_gpu
from cdmpp.profiler.gpu.sampling import Gpu, GpuConfig, GpuMeasurer, make_gpu
from cdmpp.program.types import Program, Task
from tests.samples.gpu import toy_program

pytestmark = pytest.mark.cuda
CUPY = "cdmpp.profiler.gpu.cupy:CupyGpu"
PLAN = SamplingPlan(min_sample_s=0.001, min_samples=4, max_samples=8)

SPIN = """
__device__ unsigned long long now() {
  unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
}
extern "C" __global__ void __launch_bounds__(64) main_kernel(float* a, float* b) {
  unsigned long long end = now() + NANOSECONDS; while (now() < end) { }
  if (threadIdx.x == 0) b[blockIdx.x] = a[0];
}
"""
FAULT = """
extern "C" __global__ void __launch_bounds__(64) main_kernel(float* a, float* b) {
  *(volatile float*)(0x10ULL + (size_t)threadIdx.x * 4) = a[0];
}
"""


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    try:
        check_gpu()
    except ProfilerError as err:
        pytest.skip(str(err))
    return make_gpu(CUPY, {"lanes": 4})


def built(name: str, cuda: CudaProgram, arch: str) -> BundledProgram:
    return BundledProgram(name, cuda, find_compiler(arch).compile(cuda.source, arch)[0])


def spin(ns: int, arch: str, blocks: int = 1, name: str = "spin") -> BundledProgram:
    toy = toy_program(blocks)
    launch = replace(toy.launches[0], grid=(blocks, 1, 1))
    source = SPIN.replace("NANOSECONDS", f"{ns}ULL")
    return built(name, replace(toy, source=source, launches=(launch,)), arch)


def labels(gpu: Gpu, kernels: list[BundledProgram], repeats: int, cold: bool = False) -> list[float]:
    loaded = [gpu.load(k) for k in kernels]
    for lane, item in enumerate(loaded):
        gpu.first_run(item, lane)
    prepared = [gpu.prepare(item, lane, repeats) for lane, item in enumerate(loaded)]
    return list(np.median([gpu.sample(prepared, cold) for _ in range(7)], axis=0))


def test_a_kernel_of_known_length_is_timed_right_without_launch_gaps(gpu: Gpu) -> None:
    kernel = spin(200_000, gpu.facts.arch)
    assert labels(gpu, [kernel], 1)[0] == pytest.approx(200e-6, rel=0.05)
    assert labels(gpu, [kernel], 20)[0] == pytest.approx(200e-6, rel=0.03)
    assert labels(gpu, [kernel], 1, cold=True)[0] == pytest.approx(200e-6, rel=0.05)
    # Queued from Python, 100 launches of 5 us would take over 10 us each.
    assert labels(gpu, [spin(5_000, gpu.facts.arch)], 100)[0] < 9e-6


def test_small_programs_run_side_by_side(gpu: Gpu) -> None:
    kernels = [spin(300_000, gpu.facts.arch, blocks=4, name=f"s{i}") for i in range(4)]
    alone = labels(gpu, kernels[:1], 3)[0]
    for together in labels(gpu, kernels, 3):
        assert together == pytest.approx(alone, rel=0.03)


def test_outputs_are_computed_and_clocks_told(gpu: Gpu) -> None:
    cuda = toy_program(32)
    loaded = gpu.load(built("double", cuda, gpu.facts.arch))
    inputs = reference_inputs(cuda.params, 3)
    np.testing.assert_allclose(gpu.outputs(loaded, inputs)[1], inputs[0] * 2, rtol=1e-6)
    assert gpu.state().get("clock_mhz", 1000) > 100


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_runs_on_its_multiprocessors_alone(gpu: Gpu, share: float) -> None:
    part = make_gpu(CUPY, {"share": share, "lanes": 4})
    assert part.facts.partition == "green context"
    assert part.facts.share_sms <= part.facts.sms * share + 1
    assert part.facts.share_sms >= part.facts.sms * share * 0.8
    # 32 blocks at a time on each multiprocessor: 8 waves on all of them.
    kernel = spin(300_000, part.facts.arch, blocks=8 * 32 * part.facts.sms)
    waves = math.ceil(8 * part.facts.sms / part.facts.share_sms)
    assert labels(gpu, [kernel], 1)[0] == pytest.approx(8 * 300e-6, rel=0.1)
    assert labels(part, [kernel], 1)[0] == pytest.approx(waves * 300e-6, rel=0.1)


def test_faults_and_hangs_cost_one_record_each(gpu: Gpu) -> None:
    arch = gpu.facts.arch
    good = [built(f"good{i}", toy_program(64), arch) for i in range(6)]
    broken = built("broken", replace(toy_program(64), source=FAULT), arch)
    hanging = spin(10**13, arch, name="hanging")
    config = GpuConfig(builders=1, degree=4, plan=PLAN, run_timeout_s=0.5, hang_s=2.0)
    device = Device(name="here", kind="gpu", model=gpu.facts.name, share=1.0, target={"arch": arch})
    task = Task("t", "toy", "{}", {}, 1.0, 1.0)
    order = [*good[:3], broken, good[3], hanging, *good[4:]]
    jobs = [KernelJob(Program(k.program, "t", None, ""), task, None, MeasureJob(k, 2)) for k in order]
    measurer = GpuMeasurer(config, device, builds=False)
    with Engine(measurer) as engine:
        found = {o.job.program.hash: o for o in engine.run(iter(jobs))}
    assert {p: o.status for p, o in found.items() if o.status != "ok"} == {"broken": "run_error", "hanging": "run_timeout"}
    assert len(found) == 8 and measurer.restarts == 2
