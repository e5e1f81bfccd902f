"""Small real programs: quick ones, and ones that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer
from cdmpp.profiler.engine import BuildJob, Engine, Executor, SamplingPlan
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.profiler.session import ProfileConfig
from cdmpp.program import import_tvm, structural_hash
from cdmpp.program.space import TaskSpaces
from cdmpp.program.types import Program, Task

#: Code that every x86 machine runs.
TARGET = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}

#: Labels of milliseconds, for tests that need labels but not good ones.
QUICK_PLAN = SamplingPlan(min_sample_s=0.0005, min_samples=2, max_samples=4)
QUICK_PROFILE = ProfileConfig(programs_per_task=8, workers=1, builders=1, plan=QUICK_PLAN)
QUICK_CPU = CpuConfig(builders=1, batch_size=4, plan=QUICK_PLAN, run_timeout_s=1.0, loading_s=2.0)


def quick_engine(config: CpuConfig = QUICK_CPU, target: dict[str, Any] = TARGET, sentinel: BuildJob | None = None) -> Engine:
    """An engine that measures on one core."""
    return Engine(CpuMeasurer(config, target, Executor(core_groups(usable_cores(), 1, 1)), sentinel))


def task_of(func: Any, name: str) -> Task:
    tvm = import_tvm()
    func = func.with_attr("global_symbol", "main")
    return Task(structural_hash(func), name, tvm.ir.save_json(func), {"toy": 1.0}, 1.0, 1.0)


def te_task(name: str, make: Callable[[Any], list[Any]]) -> Task:
    import_tvm()
    from tvm import te

    return task_of(te.create_prim_func(make(te)), name)


def matmul_task(n: int = 32) -> Task:
    def make(te: Any) -> list[Any]:
        a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
        k = te.reduce_axis((0, n), name="k")
        return [a, b, te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")]

    return te_task(f"matmul{n}", make)


def segfault_task() -> Task:
    """Reads four gigabytes behind its argument."""

    def make(te: Any) -> list[Any]:
        a = te.placeholder((16,), name="A")
        return [a, te.compute((16,), lambda i: a[i + 10**9], name="B")]

    return te_task("segfault", make)


def endless_task() -> Task:
    """Some minutes of sines."""

    def make(te: Any) -> list[Any]:
        import tvm

        a = te.placeholder((16,), name="A")
        k = te.reduce_axis((0, 10**10), name="k")
        return [a, te.compute((1,), lambda i: te.sum(tvm.tirx.sin(a[k % 16] + k), axis=k), name="B")]

    return te_task("endless", make)


def slow_build_task(extent: int = 30000) -> Task:
    """One statement `extent` times over: minutes in the compiler."""
    tvm = import_tvm()
    from tvm.s_tir.schedule import Schedule

    def make(te: Any) -> list[Any]:
        a = te.placeholder((extent,), name="A")
        return [a, te.compute((extent,), lambda i: tvm.tirx.exp(a[i] * a[extent - 1 - i]), name="B")]

    schedule = Schedule(te_task("slow_build", make).prim_func())
    schedule.unroll(schedule.get_loops(schedule.get_sblock("B", func_name="main"))[0])
    return task_of(schedule.mod["main"], "slow_build")


def as_it_is(task: Task) -> BuildJob:
    """The unscheduled task as a job."""
    return BuildJob(Program(task.hash, task.hash, None, "", "unscheduled"), task, None)


def sampled(task: Task, n: int, seed: int = 0, **options: Any) -> list[BuildJob]:
    """`n` random programs of a task as jobs; ``options`` are those of its spaces."""
    spaces = TaskSpaces(task, **options)
    return [BuildJob(p, task, spaces.space_of(p)) for p in spaces.sample(n, seed)]
