"""A GPU with a scripted clock, and bundles of programs that it runs; neither needs TVM nor CUDA."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.device import get_device
from cdmpp.errors import ProfilerError
from cdmpp.profiler.arguments import Reference, reference_inputs, summarise_outputs
from cdmpp.profiler.engine import SamplingPlan
from cdmpp.profiler.gpu.build import KernelJob
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, CudaProgram, Launch
from cdmpp.profiler.gpu.measure import job_of
from cdmpp.profiler.gpu.sampling import GpuFacts, GpuFault
from cdmpp.program.types import Program, Space, Task

#: The names of the GPUs below, to be put into a configuration.
FAKE_GPU = "tests.samples.gpu:FakeGpu"
TUNING_GPU = "tests.samples.gpu:TuningGpu"
SMS = 132
#: What makes a measuring quick, and this GPU be used.
QUICK: dict[str, Any] = {
    "builders": 1,
    "plan": SamplingPlan(min_sample_s=0.001, min_samples=2, max_samples=4, max_measure_s=0.2),
    "run_timeout_s": 0.2,
    "gpu": FAKE_GPU,
}


class FakeGpu:
    """Runs programs by a script: program -> what it does.

    Keys of a program's script: ``run_s``; ``crowd`` (relative slow-down for each neighbour); ``fault`` and ``hang``
    (``"first"`` run or ``"sample"``); ``fault_load``; ``wrong`` (its output is not the task's)."""

    def __init__(
        self,
        script: Mapping[str, Mapping[str, Any]] | None = None,
        share: float = 1.0,
        lanes: int = 8,
        seed: int = 0,
        name: str = "NVIDIA H200",
        lives: str = "",
        log: list[tuple[str, str]] | None = None,
    ) -> None:
        if lives:  # a file with the number of times that a context can be made
            left = int(Path(lives).read_text()) - 1
            if left < 0:
                os._exit(3)
            Path(lives).write_text(str(left))
        if share <= 0:
            raise ProfilerError("no CUDA device answers")
        self.script = dict(script or {})
        self.log = [] if log is None else log
        self.now = 0.0
        share_sms = SMS if share == 1 else int(SMS * share) // 8 * 8
        self.facts = GpuFacts(
            name=name,
            arch="sm_90",
            sms=SMS,
            share_sms=share_sms,
            partition="whole" if share == 1 else "green context",
            lanes=lanes if share == 1 else SMS // share_sms,
            l2_bytes=60 << 20,
            memory_bytes=1 << 30,
            driver="0",
        )
        self.rng = np.random.default_rng(seed)

    def _of(self, program: str) -> Mapping[str, Any]:
        return self.script.get(program, {})

    def load(self, kernel: BundledProgram) -> BundledProgram:
        self.log.append(("load", kernel.program))
        if self._of(kernel.program).get("fault_load"):
            raise ValueError("no kernel image is available")
        return kernel

    def first_run(self, loaded: BundledProgram, lane: int) -> float:
        self.log.append(("first", loaded.program))
        self._misbehave(loaded.program, "first")
        return float(self._of(loaded.program).get("run_s", 1e-4))

    def prepare(self, loaded: BundledProgram, lane: int, repeats: int) -> tuple[str, int]:
        return loaded.program, repeats

    def sample(self, prepared: Sequence[tuple[str, int]], cold: bool) -> list[float]:
        self.log.append(("sample", " ".join(p for p, _ in prepared)))
        values = []
        for program, _ in prepared:
            self._misbehave(program, "sample")
            own = self._of(program)
            slower = 1 + own.get("crowd", 0.0) * (len(prepared) - 1)
            noise = 1 + 0.001 * float(self.rng.random())
            values.append(own.get("run_s", 1e-4) * slower * noise)
        self.now += max(v * r for v, (_, r) in zip(values, prepared, strict=True))
        return values

    def outputs(self, loaded: BundledProgram, inputs: Sequence[Any]) -> dict[int, Any]:
        wrong = 1.5 if self._of(loaded.program).get("wrong") else 1.0
        return {1: inputs[0] * 2 * wrong}

    def unload(self, loaded: BundledProgram) -> None:
        self.log.append(("unload", loaded.program))

    def state(self) -> dict[str, Any]:
        return {"clock_mhz": 1980.0, "temperature_c": 40.0, "throttle": ""}

    def _misbehave(self, program: str, when: str) -> None:
        own = self._of(program)
        if own.get("fault") == when:
            raise GpuFault("an illegal memory access was encountered")
        if own.get("hang") == when:
            time.sleep(3600)


def toy_program(blocks: int = 512) -> CudaProgram:
    """Doubles a vector."""
    source = (
        'extern "C" __global__ void __launch_bounds__(64) main_kernel(float* a, float* b) {\n'
        "  b[blockIdx.x * 64 + threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x] * 2.0f;\n}\n"
    )
    spec = ((blocks * 64,), "float32")
    launch = Launch((blocks, 1, 1), (64, 1, 1), kernel="main_kernel", buffers=(0, 1))
    return CudaProgram(source, (spec, spec), (1,), (), (launch,))


def toy_bundle(
    programs: int = 12,
    tasks: int = 3,
    blocks: Sequence[int] = (512,),
    cubins: bool = True,
    statuses: Mapping[int, str] | None = None,
) -> Bundle:
    """A bundle of `programs` programs ``p000``... of `tasks` tasks; the grids take turns."""
    task_of, space_of, program_of, kernels, references = {}, {}, {}, [], {}
    for t in range(tasks):
        digest = f"{t:016x}"
        task_of[digest] = Task(digest, f"double{t}", "{}", {"toy": 1.0}, 1e3, 1e3)
        space_of[f"s{t}"] = Space(f"s{t}", digest, "cuda", 0, 0, "[]")
    for i in range(programs):
        task, digest = f"{i % tasks:016x}", f"p{i:03d}"
        program_of[digest] = Program(digest, task, f"s{i % tasks}", json.dumps([i]))
        if status := (statuses or {}).get(i):
            kernels.append(BundledProgram(digest, status=status, error=f"{status}: for a reason", build_s=0.25))
            continue
        cuda, resources = (toy_program(blocks[i % len(blocks)]), {"main_kernel": {"registers": 10, "spill_store_bytes": 0}})
        kernels.append(BundledProgram(digest, cuda, b"cubin" if cubins else b"", resources, build_s=0.25))
        if task not in references:
            inputs = reference_inputs(cuda.params, 7)
            references[task] = summarise_outputs(task, 7, {1: inputs[0] * 2})
    devices = {name: get_device(name).to_json() for name in ("h200", "h200@0.5")}
    note = {"device": "h200", "arch": "sm_90", "compiler": "none", "devices": devices, "versions": {}}
    note["network_families"] = {"toy": "mlp"}
    return Bundle(note, task_of, space_of, program_of, kernels, references)


def jobs_of(bundle: Bundle, degree: int = 1) -> list[KernelJob]:
    """A job a program."""
    return [job_of(bundle, kernel, degree=degree) for kernel in bundle.kernels]


def no_reference(task: str) -> Reference:
    """A reference that nothing equals."""
    return summarise_outputs(task, 7, {1: np.full(64, -1.0)})


def gpu_latency_s(digest: str) -> float:
    """Between 10 and 1000 us."""
    return 1e-5 * (1 + int(digest[:4], 16) % 100)


def fails(digest: str) -> bool:
    """Every other program cannot be loaded."""
    return int(digest[5], 16) % 2 == 0


class TuningGpu(FakeGpu):
    """For tunings, whose programs are not known before: latency by hash. With ``failing`` every other program cannot be
    loaded, with ``breaks`` all break the context."""

    def __init__(self, failing: bool = False, breaks: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._failing, self._breaks = failing, breaks

    def _of(self, program: str) -> Mapping[str, Any]:
        return {
            "run_s": gpu_latency_s(program),
            "fault_load": self._failing and fails(program),
            "fault": "first" if self._breaks else "",
            **self.script.get(program, {}),
        }
