"""The parallel engine with real compilers, real processes and programs that misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import ProfilerError
from cdmpp.profiler.cpu import CpuConfig
from cdmpp.profiler.engine import BuildConfig, BuildJob, BuildOnly, Built, Engine, Outcome
from cdmpp.profiler.machine import core_groups
from cdmpp.program.codegen import ObjectCache

from tests.samples.programs import (  # isort: skip
    QUICK_CPU, TARGET, as_it_is, endless_task, matmul_task, quick_engine, sampled, segfault_task, slow_build_task,
)  # fmt: skip


def measure(jobs: list[BuildJob], config: CpuConfig = QUICK_CPU, target: dict[str, Any] = TARGET) -> dict[str, Outcome]:
    with quick_engine(config, target) as engine:
        outcomes = list(engine.run(iter(jobs)))
    assert len(outcomes) == len(jobs), "every job has one outcome"
    return {o.job.program.hash: o for o in outcomes}


def test_all_programs_are_measured_with_samples_and_noise() -> None:
    small, large = as_it_is(matmul_task(16)), as_it_is(matmul_task(64))
    outcomes = measure([*sampled(matmul_task(), 6), small, large])
    for outcome in outcomes.values():
        assert outcome.status == "ok", outcome.error
        assert outcome.latency_s is not None and 1e-7 < outcome.latency_s < 0.1
        assert len(outcome.samples_s) >= 2
        assert outcome.noise is not None and outcome.noise >= 0
        assert outcome.meta["build_s"] > 0
    ratio = outcomes[large.program.hash].latency_s / outcomes[small.program.hash].latency_s  # type: ignore[operator]
    assert 10 < ratio < 1000, "64 times the operations"


def waiting(_: BuildJob) -> Built:
    busy = "import time\nwhile time.process_time() < 0.2: pass\ntime.sleep(0.5)"
    subprocess.run([sys.executable, "-S", "-c", busy], check=True)
    return Built()


def test_waiting_costs_no_cpu_time_but_the_linker_does() -> None:
    with Engine(BuildOnly(BuildConfig(builders=1), (partial, (waiting,), 0))) as engine:
        (outcome,) = engine.run(iter([as_it_is(matmul_task())]))
    assert 0.15 < outcome.meta["build_cpu_s"] < outcome.meta["build_s"] - 0.45


def forged() -> BuildJob:
    job = sampled(matmul_task(), 1)[0]
    return BuildJob(replace(job.program, hash="0" * 16), job.task, job.space)


@pytest.mark.parametrize(
    ("bad", "status", "error"),
    [
        (lambda: as_it_is(segfault_task()), "run_error", "signal 11"),
        (lambda: as_it_is(endless_task()), "run_timeout", "one run took over 1 s"),
        (forged, "invalid_config", "replays as"),
    ],
)
def test_a_program_that_misbehaves_costs_one_record(bad: Callable[[], BuildJob], status: str, error: str) -> None:
    job = bad()
    outcomes = measure([*sampled(matmul_task(), 3), job])
    found = outcomes.pop(job.program.hash)
    assert found.status == status and error in found.error and found.meta["build_cpu_s"] > 0
    assert all(o.status == "ok" for o in outcomes.values())


def test_a_build_that_hangs_is_ended_and_its_process_is_gone() -> None:
    bad, good = as_it_is(slow_build_task(10000)), sampled(matmul_task(), 2)
    with quick_engine(replace(QUICK_CPU, build_timeout_s=1.0)) as engine:
        engine.start_builders()
        hung = engine._builders[0].pid
        outcomes = {o.job.program.hash: o for o in engine.run(iter([bad, *good]))}
        assert not _alive(hung) and engine._builders[0].pid != hung
    assert outcomes[bad.program.hash].status == "build_timeout"
    assert all(outcomes[j.program.hash].status == "ok" for j in good)


@pytest.mark.parametrize("kind", ["builder", "runner"])
def test_a_worker_killed_from_outside_loses_nothing(kind: str) -> None:
    jobs = sampled(matmul_task(), 8)
    with quick_engine() as engine:
        run = engine.run(iter(jobs))
        outcomes = [next(run)]
        workers = engine._builders if kind == "builder" else engine.measurer.workers
        os.kill(workers[0].pid, signal.SIGKILL)
        outcomes += list(run)
    assert sorted(o.job.program.hash for o in outcomes) == sorted(j.program.hash for j in jobs)
    assert all(o.status == "ok" for o in outcomes)


def test_workers_and_files_are_gone_afterwards() -> None:
    with quick_engine() as engine:
        list(engine.run(iter(sampled(matmul_task(), 1))))
        pids = [w.pid for w in [*engine._builders, *engine.measurer.workers]]
        folder = Path(engine.measurer.builder[1][1])
        assert folder.exists()
    assert not folder.exists()
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=False)


def test_a_full_disk_is_one_clear_error(tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(b"x" * 1_400_000)
    config = replace(QUICK_CPU, work_dir=str(tiny_disk), batch_size=16)
    with pytest.raises(ProfilerError, match="no space left"), quick_engine(config) as engine:
        list(engine.run(iter(sampled(matmul_task(), 16))))


def test_object_cache_serves_what_was_built_before(tmp_path: Path) -> None:
    jobs = sampled(matmul_task(), 2)
    config = replace(QUICK_CPU, object_cache=str(tmp_path))
    measure(jobs, config)
    kept = sorted(tmp_path.glob("*/*.so"))
    assert len(kept) == 2
    stamps = [k.stat().st_mtime_ns for k in kept]
    # Another number of cores is the same code.
    measure(jobs, config, {**TARGET, "num-cores": 2})
    assert [k.stat().st_mtime_ns for k in kept] == stamps
    assert ObjectCache(str(tmp_path), {**TARGET, "mcpu": "haswell"}).find(jobs[0].program.hash) is None


def test_core_groups_are_disjoint_and_refused_where_there_are_too_few() -> None:
    groups = core_groups(range(8), 2, 3)
    assert len(set(np.concatenate(groups))) == 6
    assert all(len(g) == 2 for g in groups)
    with pytest.raises(ProfilerError, match="need 4"):
        core_groups(range(3), 2, 2)


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.samples.programs import as_it_is, matmul_task, quick_engine\n"
        "with quick_engine(sentinel=as_it_is(matmul_task())):\n"
        "    print('once')\n"
        "print(__file__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["once", str(script)]), done.stderr[-2000:]


def test_what_workers_are_forked_from_is_deaf_to_ctrl_c() -> None:
    code = "import cdmpp.profiler._preload, signal; signal.raise_signal(signal.SIGINT); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive" and "Traceback" not in done.stderr
