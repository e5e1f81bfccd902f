"""Boards at a TVM RPC tracker: both are started here, and are what TVM's own are."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdmpp import Dataset, Predictor
from cdmpp.device import Device, get_device
from cdmpp.errors import ProfilerError, TunerError
from cdmpp.profiler import rpc
from cdmpp.profiler.cpu import CpuMeasurer, sentinel_job
from cdmpp.profiler.engine import Engine
from cdmpp.program import import_tvm
from cdmpp.program.space import Rebuilder
from cdmpp.tuner import Objective, TuneConfig, tune_tasks
from cdmpp.tuner.measure import ChoosingMeasurer, compiled_for_each
from tests.golden.golden import FOLDER
from tests.samples.programs import QUICK_CPU, TARGET, as_it_is, endless_task, matmul_task, sampled, segfault_task

BOARD = replace(get_device("this-cpu@1"), target=TARGET)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A tracker with one board, registered as ``board``."""
    import_tvm()
    from tvm.rpc import connect_tracker
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    tracker = Tracker("127.0.0.1", 29190, 29290, silent=True)
    server = Server("127.0.0.1", 29300, 29400, key="board", tracker_addr=("127.0.0.1", tracker.port), silent=True)
    asked = connect_tracker("127.0.0.1", tracker.port)
    while not asked.summary()["server_info"]:  # the server registers itself while this goes on
        time.sleep(0.1)
    yield f"127.0.0.1:{tracker.port}"
    server.terminate()
    tracker.terminate()


def test_records_say_that_they_came_over_rpc(address: str, tmp_path, command) -> None:
    source, out = ["--programs-of", FOLDER, "--limit", 2], ["--out", tmp_path / "d"]
    assert command.json("profile", *source, "--rpc", address, "--key", "board", *out)["ok"] == 2
    with Dataset.open(tmp_path / "d") as dataset:
        records = dataset.records
        assert set(records["device"]) == {get_device("this-cpu@1").name}
        for samples, meta in zip(records["samples_s"], records["meta"], strict=True):
            values = meta if isinstance(meta, dict) else json.loads(meta)
            assert len(samples) >= 2 and values["rpc"] == "board" and values["reference_s"] > 0


def test_compiled_code_says_what_a_board_measures_in_a_tuning(address: str, tmp_path, monkeypatch) -> None:
    choose, right = ChoosingMeasurer.worth, []

    def worth(self: ChoosingMeasurer, jobs: Any, *args: Any) -> Any:
        chosen, build_s = choose(self, jobs, *args)
        funcs = [Rebuilder()(job.program, job.task, job.space) for job in jobs]
        latency_s = Predictor.default().predict(funcs, BOARD, compiled=True)
        right.append(set(np.flatnonzero(chosen)) == set(latency_s.argsort()[: len(jobs) // 4]))
        return chosen, build_s

    monkeypatch.setattr(ChoosingMeasurer, "worth", worth)
    config = TuneConfig(Objective(16), batch=8, trim=None, rpc=address, key="board", seed=1)
    costs = tune_tasks("net", [(matmul_task(), 1.0)], device=BOARD, out=tmp_path / "t", config=config).costs
    assert (costs.trials, costs.measurements, costs.dropped, right) == (16, 5, 11, [True] * 3)


def test_compiled_code_that_tells_nothing_is_said() -> None:
    assert compiled_for_each(TuneConfig(Objective(1), rpc="host:1", predictor=None), BOARD) == 1
    with pytest.raises(TunerError, match="--compile 4 chooses by compiled code"):
        compiled_for_each(TuneConfig(Objective(1), compile=4, predictor=None), BOARD)
    with pytest.raises(TunerError, match="--ray and --rpc measure in different places"):
        TuneConfig(Objective(1), rpc="host:1", ray="host:2")


def test_a_program_that_hangs_costs_one_record(address: str) -> None:
    jobs = [as_it_is(endless_task()), *sampled(matmul_task(), 3)]
    with Engine(CpuMeasurer(QUICK_CPU, TARGET, rpc.connect(address, "board", BOARD, 1), sentinel_job())) as engine:
        found = {outcome.job.task.name: outcome for outcome in engine.run(iter(jobs))}
    assert found["endless"].status == "run_timeout"
    good = found["matmul32"]
    assert good.status == "ok" and good.noise is not None and 1e-7 < (good.latency_s or 0) < 0.1


@pytest.mark.parametrize(
    ("key", "device", "message"),
    [
        ("printer", BOARD, r"no board has the key printer at .* \(keys there: board\)"),
        (None, BOARD, "needs --key"),
        ("board", get_device("t4"), "--rpc measures on CPUs, t4 is a gpu"),
    ],
)
def test_what_cannot_be_measured_on_is_said(address: str, key: str | None, device: Device, message: str) -> None:
    with pytest.raises(ProfilerError, match=message):
        rpc.connect(address, key, device, "auto")


def test_a_board_without_the_target_is_said(address: str) -> None:
    """This machine compiles for Arm; the board is told to link that, and cannot."""
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 1}
    boards = rpc.connect(address, "board", replace(BOARD, target=target), 1)
    with (
        pytest.raises(ProfilerError, match=r"does not run code for .* \(mtriple=aarch64-linux-gnu mcpu=cortex-a72\)"),
        Engine(CpuMeasurer(QUICK_CPU, target, boards, sentinel_job())),
    ):
        pass


def test_a_key_that_is_taken_is_said(address: str) -> None:
    host, _, port = address.rpartition(":")
    session = rpc.Tracker(host, int(port), "board", 1).session(60)
    with pytest.raises(ProfilerError, match="the key board is taken: none of 1 boards became free within 1 s"):
        rpc.connect(address, "board", BOARD, 1, free_s=1.0)
    del session


def test_no_tracker_is_said(monkeypatch) -> None:
    monkeypatch.setattr(rpc, "_ANSWER_S", 1.0)
    with pytest.raises(ProfilerError, match="expected HOST:PORT"):
        rpc.connect("board", "k", BOARD, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ProfilerError, match=f"no RPC tracker answers at 127.0.0.1:{port}"):
            rpc.connect(f"127.0.0.1:{port}", "k", BOARD, 1)
    with pytest.raises(ProfilerError, match=f"no RPC tracker answers at 127.0.0.1:{port}"):
        rpc.connect(f"127.0.0.1:{port}", "k", BOARD, 1)


def test_a_board_that_a_program_takes_down_is_lost(address: str) -> None:
    """The last test here: TVM's server does not survive it."""
    outcomes = []
    boards = rpc.connect(address, "board", BOARD, 1, free_s=2.0)
    with (
        pytest.raises(ProfilerError, match=r"no device is left to measure on: no board .* what was measured is kept"),
        Engine(CpuMeasurer(QUICK_CPU, TARGET, boards, sentinel_job())) as engine,
    ):
        outcomes.extend(outcome.status for outcome in engine.run(iter([as_it_is(segfault_task())])))
    assert not outcomes or outcomes == ["device_lost"]
