"""Building and measuring on a Ray cluster: two nodes of this machine, and executors that are made up."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli import main
from cdmpp.dataset import Dataset
from cdmpp.dataset.codegen import load_codegen
from cdmpp.device import get_device
from cdmpp.errors import ProfilerError, TunerError
from cdmpp.profiler import ray as module
from cdmpp.profiler.compiled import collect_codegen
from cdmpp.profiler.cpu import BatchDone, CpuConfig, CpuMeasurer, ObjectBuilder, SharedObject
from cdmpp.profiler.engine import BuildJob, Engine, Executor, Measured, Outcome, Running
from cdmpp.profiler.machine import WorkerLost, usable_cores
from cdmpp.profiler.ray import CORES_VARIABLE, Node, RayExecutor, RayWorker, checked, connect, node_command
from cdmpp.profiler.session import ProfileConfig, profile
from cdmpp.program.types import Program
from cdmpp.tuner.tuning import tune_tasks
from tests.samples.tuning import tune_config

from tests.samples.programs import (  # isort: skip
    QUICK_CPU, QUICK_PLAN, QUICK_PROFILE, TARGET, as_it_is, matmul_task, sampled, slow_build_task,
)  # fmt: skip

# The clusters of these tests ask for no token, whatever the user of this machine has.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

pytestmark = pytest.mark.usefixtures("real_machine")


def node(name: str, **changes: Any) -> Node:
    device = get_device("xeon-cascadelake-2.5ghz@1")
    values = {"id": name, "cpus": 4.0, "claims": {device.base: 2.0}, "versions": module._versions(), "arch": "x86_64"}
    return Node(**{"name": name, "machine": {}, "here": device.base, "device": device, **values, **changes})


def test_all_nodes_with_the_device_measure_and_those_of_its_architecture_build() -> None:
    device = get_device("xeon-cascadelake-2.5ghz@2")
    builder = node("c", claims={}, here="epyc-zen3", device=None)
    kept = checked([node("a"), node("b"), builder, replace(builder, id="d", arch="aarch64")], device.name)
    assert [n.id for n in kept] == ["a", "b", "c"]
    assert RayExecutor(kept, get_device("xeon-cascadelake-2.5ghz@1"), "auto").degree == 4
    assert RayExecutor(kept, device, "auto").degree == 2
    assert RayExecutor(kept, device, 1).degree == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"cdmpp": "0.0.9"}}, "cdmpp is 0.0.9 on node b, and 0.1.0 here"),
        ({"versions": {"python": "3.9.1"}}, "python is 3.9.1 on node b, and 3"),
        ({"versions": {"apache-tvm": "not installed"}}, "apache-tvm is not installed on node b, and 0"),
        ({"device": None, "here": "epyc-zen3"}, "node b claims to have device:xeon-cascadelake.*, and is epyc-zen3"),
        ({"l2_kb": 2048.0}, "nodes a and b both claim to have device:xeon.*, and differ in l2_kb 1024.* / 2048"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    other = node("b")
    assert other.device is not None
    if l2_kb := changes.pop("l2_kb", None):
        changes["device"] = replace(other.device, l2_kb=l2_kb)
    if "versions" in changes:
        changes["versions"] = {**other.versions, **changes["versions"]}
    with pytest.raises(ProfilerError, match=message):
        checked([node("a"), replace(other, **changes)], other.device.name)


def test_ray_of_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs cdmpp[ray]")

    def init(**_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.12.1\n")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ProfilerError, match=r"join the Ray cluster.*: Ray: 2\.9\.0 Python: 3\.12\.1"):
        connect("local")


def test_addresses_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs cdmpp[ray]")
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ProfilerError, match=f"no Ray cluster answers at 127.0.0.1:{port}: timed out"):
            connect(f"127.0.0.1:{port}")
    for address, message in ((f"127.0.0.1:{port}", "Connection refused"), ("rack", "takes HOST:PORT")):
        assert main(["profile", "mlp", "--out", "/nonexistent", "--ray", address]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (["profile", "mlp"], ["tune", "mlp", "--device", "this-cpu@1", "--trials", "2"]):
        assert main([*command, "--out", "/nonexistent", "--ray", "local"]) == 2
        assert capsys.readouterr().err == "cdmpp: a cluster needs Ray: install cdmpp[ray]\n"
    code = "import sys, cdmpp.cli, cdmpp.profiler.ray, cdmpp.profiler.session, cdmpp.tuner.tuning; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_the_command_that_starts_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "usable_cores", lambda: (0, 1, 2, 3))
    command = node_command(2, "head:6379")
    assert f"{CORES_VARIABLE}=2,3 taskset -c 0,1 ray start --address=head:6379 --num-cpus=2" in command
    assert f'{{"device:{get_device("this-cpu").base}": 2}}' in command
    assert "device" not in node_command(0) and "--head" in node_command(0)
    with pytest.raises(ProfilerError, match="4 cores: one at least"):
        node_command(4)


def measured(batch: list[SharedObject], timeout_s: float) -> list[Any]:
    labels = [Measured(built.program, "ok", (1e-3,) * 4) for built in batch]
    return [Running(), *labels, BatchDone(1e-3, 1e-3, 0.0, "fifo")]


def lost_at_once(batch: list[SharedObject], timeout_s: float) -> list[Any]:
    return [*measured(batch[:1], timeout_s)[:2], WorkerLost("its node is gone")]


def hangs_over_the_first(batch: list[SharedObject], timeout_s: float) -> list[Any]:
    first = batch[0].program == f"{0:016x}"
    return [Running((batch[0].program,)), TimeoutError()] if first else measured(batch, timeout_s)


class FakeWorker(RayWorker):
    """Answers a request with a list of messages."""

    def submit(self, request: Any, load: Any, timeout_s: float) -> bool:
        self.load, self.messages = load, self._send(request, timeout_s)
        return True

    def receive(self) -> Any:
        self.message = self.messages.pop(0)
        return super().receive()

    def overdue(self) -> bool:
        return self.load is not None and isinstance(self.messages[0], TimeoutError)

    def kill(self) -> None:
        pass

    close = kill


class FakeExecutor(Executor):
    """Nodes by their names; what `slow` has to say comes when nobody else has anything."""

    local = False

    def __init__(self, **nodes: Callable[[Any, float], Any]) -> None:
        self._nodes = nodes

    def builder_count(self, asked: int | None) -> int:
        return 8

    def builders(self, builder: Any, count: int) -> list[Any]:
        return [FakeWorker(lambda job, _: [SharedObject(job.program.hash, path="/nowhere")]) for _ in range(count)]

    def measurers(self, serve: Any, config: Any, sentinel: Any) -> list[Any]:
        return [FakeWorker(answer, node=node) for node, answer in self._nodes.items()]

    def ready(self, workers: list[Any], timeout_s: float) -> list[Any]:
        speaking = [w for w in workers if w.load is not None and not w.overdue()]
        return [w for w in speaking if w.node != "slow"] or speaking


def engine_of(executor: Any) -> Engine:
    return Engine(CpuMeasurer(CpuConfig(batch_size=4), {}, executor))


def endless_jobs(number: int, drawn: list[int]) -> Iterator[BuildJob]:
    task = matmul_task()
    for i in range(number):
        drawn[0] += 1
        yield BuildJob(Program(f"{i:016x}", task.hash, None, "", "random"), task, None)


def test_of_many_programs_few_are_in_memory() -> None:
    drawn, most = [0], 0
    with engine_of(FakeExecutor(a=measured, b=measured)) as engine:
        for done, outcome in enumerate(engine.run(endless_jobs(100_000, drawn)), 1):
            assert outcome.status == "ok"
            most = max(most, drawn[0] - done)
            if done == 1000:
                break
    assert most <= 3 * 8 + 4 * 4 * 2 + 2 * 4, "queued for builders, built, being measured"


def test_a_slow_node_holds_up_nobody() -> None:
    with engine_of(FakeExecutor(slow=measured, fast=measured)) as engine:
        outcomes = list(engine.run(endless_jobs(200, [0])))
    assert len({o.job.program.hash for o in outcomes}) == 200
    assert {o.job.program.hash for o in outcomes[:4]}.isdisjoint(o.job.program.hash for o in outcomes[-4:])
    first_batch = {f"{i:016x}" for i in range(4)}
    assert {o.job.program.hash for o in outcomes[-4:]} == first_batch, "the batch of the slow one comes last"


def test_a_limit_that_the_node_kept_is_a_failure_of_one_program() -> None:
    with engine_of(FakeExecutor(a=hangs_over_the_first)) as engine:
        outcomes = {o.job.program.hash: o for o in engine.run(endless_jobs(20, [0]))}
    assert [h for h, o in outcomes.items() if o.status == "run_timeout"] == [f"{0:016x}"]
    assert {o.meta["node"] for o in outcomes.values() if o.status == "ok"} == {"a"} and len(outcomes) == 20


def test_a_build_that_takes_too_long_is_ended_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_builders", {})
    builder = (ObjectBuilder, (TARGET, None, QUICK_CPU), 0)
    assert isinstance(module._build(builder, as_it_is(slow_build_task(10000)), 1.0)[0], TimeoutError)
    built, code = module._build(builder, as_it_is(matmul_task()), 60.0)
    assert built.status == "ok" and code.startswith(b"\x7fELF") and not Path(built.path).exists()
    (process,) = module._builders.values()
    process.kill()


def test_the_last_device_that_is_lost_ends_the_run() -> None:
    outcomes: list[Outcome] = []
    lost = pytest.raises(ProfilerError, match="no device is left to measure on: its node is gone; ")
    with engine_of(FakeExecutor(a=lost_at_once, b=lost_at_once)) as engine, lost:
        outcomes.extend(engine.run(endless_jobs(50, [0])))
    assert Counter(o.status for o in outcomes) == {"ok": 2, "device_lost": 6}
    assert {o.meta["node"] for o in outcomes if o.status != "ok"} == {"a", "b"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of this machine: ``first``, the head, and ``second``; each builds on a core and measures on another."""
    ray = pytest.importorskip("ray", reason="needs cdmpp[ray]")
    from ray.cluster_utils import Cluster

    if len(usable_cores()) < 2:
        pytest.skip("needs two cores")
    cluster, resources = Cluster(), {f"device:{get_device('this-cpu').base}": 1}
    for name, core in zip(("first", "second"), usable_cores()[::-1], strict=False):
        settings = {CORES_VARIABLE: str(core), "RAY_worker_niceness": "0"}
        cluster.add_node(num_cpus=1, resources=resources, node_name=name, env_vars=settings)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_dataset_is_collected_and_its_instructions_counted(nodes: Any, tmp_path: Path, monkeypatch) -> None:
    config = replace(QUICK_PROFILE, programs_per_task=1, workers="auto", builders=None, ray=nodes.address)
    report = profile(["mlp"], out=tmp_path, config=config)
    dataset = Dataset.open(tmp_path)
    records = dataset.records
    assert report.ok == len(records) == len(dataset.tasks) and report.workers == 2
    assert records["program"].is_unique and set(records["device"]) == {get_device("this-cpu@1").name}
    assert {json.loads(meta)["node"] for meta in records["meta"]} <= {"first", "second"}
    assert {node["name"] for node in dataset.meta["sessions"][0]["nodes"]} == {"first", "second"}
    asked: list[int | None] = []
    monkeypatch.setattr(RayExecutor, "builder_count", lambda self, n: asked.append(n) or 2)
    assert main(["codegen", str(tmp_path), "--ray", nodes.address]) == 0 and asked == [None], "on all nodes"
    there = load_codegen(tmp_path / "codegen.parquet")
    assert len(there) == len(records)
    (tmp_path / "codegen.parquet").unlink()
    here = collect_codegen(tmp_path, ProfileConfig(builders=1))
    assert all((here[key] == row).all() for key, row in there.items())


def test_a_tuning_with_sessions_for_parts_of_the_tasks(nodes: Any, tmp_path: Path) -> None:
    config = tune_config(4, batch=2, shards="auto", plan=QUICK_PLAN, ray=nodes.address)
    report = tune_tasks("toy", [(matmul_task(n), 1.0) for n in (16, 24)], out=tmp_path / "t", config=config)
    assert report.stopped == "4 trials" and [task.measured for task in report.tasks] == [2, 2]
    assert all(task.best_s for task in report.tasks)
    with pytest.raises(TunerError, match=r"3 shards of .*: the cluster has 2"):
        tune_tasks("toy", [], out=tmp_path / "u", config=replace(config, shards=3))


def test_what_a_cluster_has_not(nodes: Any) -> None:
    with pytest.raises(ProfilerError, match="no node has the resource device:xeon-cascadelake"):
        connect(nodes.address, "xeon-cascadelake-2.5ghz@1")
    with pytest.raises(ProfilerError, match=r"@2: node (first|second) has 1 cores for measuring"):
        connect(nodes.address, "this-cpu@2")
    with pytest.raises(ProfilerError, match="h200 is a gpu"):
        connect(nodes.address, "h200")


def test_a_node_that_dies_loses_only_what_it_measures(nodes: Any) -> None:
    jobs = sampled(matmul_task(), 24)
    cluster = connect(nodes.address, "this-cpu@1")
    # Both have one of the first three batches, as all is built first and nothing measured again; the others wait for the loss.
    config = replace(QUICK_CPU, builders=None, loading_s=30.0, max_steal_pct=100.0, max_drift=1e9, max_disturbed=1.0)
    measurer = CpuMeasurer(config, cluster.device.target, cluster, overlap=False)
    until_lost = iter(lambda: None if nodes.worker_nodes else "lost", "lost")
    with Engine(measurer) as engine:
        run = engine.run(itertools.chain(jobs[:12], until_lost, jobs[12:]))
        outcomes = [next(run)]
        while outcomes[-1].meta["node"] != "second":
            outcomes.append(next(run))
        nodes.remove_node(*nodes.worker_nodes, allow_graceful=False)
        outcomes += list(run)
    assert Counter(o.job.program.hash for o in outcomes) == Counter(job.program.hash for job in jobs)
    lost = [o for o in outcomes if o.status != "ok"]
    assert len(lost) <= QUICK_CPU.batch_size
    assert {(o.status, o.meta["node"]) for o in lost} <= {("device_lost", "second")}
    assert [o.meta["node"] for o in outcomes].count("first") >= 8
