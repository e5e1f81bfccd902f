"""Measuring on boards that can run neither Ray nor our Python programs, through TVM's RPC tracker.

Programs are built here and loaded there. The board's own clock takes the samples (``time_evaluator``), so that none of them
includes the network. Each batch has a session of its own, as a server ends a program that hangs together with its session. A
program that crashes takes TVM's server with it: its record says ``device_lost``, and the run goes on with the remaining boards.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from cdmpp.device import Device
from cdmpp.errors import ProfilerError, reason
from cdmpp.profiler import machine
from cdmpp.profiler.cpu import Arguments, BatchDone, CpuConfig, LoadedProgram, SharedObject, measure_batch
from cdmpp.profiler.engine import Executor, Measured, Running, SamplingPlan, last_line
from cdmpp.profiler.machine import Sentinel, Worker, WorkerLost, requests
from cdmpp.program import import_tvm

#: Seconds for a tracker to answer, and for the sentinel program to run on a board.
_ANSWER_S, _PROBE_S = 10.0, 60
#: Type of an ELF file (its byte 16) that is not linked.
_RELOCATABLE = 1


@dataclass(frozen=True)
class Tracker:
    """Boards that are registered under one key; they run programs with ``threads`` threads. Waits ``free_s`` s for one."""

    host: str
    port: int
    key: str
    threads: int
    free_s: float = 60.0

    def _connect(self, timeout_s: float) -> Any:
        from tvm import rpc

        try:
            with socket.create_connection((self.host, self.port), _ANSWER_S) as probe:  # TVM would wait for ever
                magic = struct.pack("<i", rpc.base.RPC_TRACKER_MAGIC)
                probe.sendall(magic)
                if probe.recv(4) != magic:
                    raise ValueError("what answers is something else")
            tracker = rpc.connect_tracker(self.host, self.port)
            tracker._sock.settimeout(timeout_s)  # TVM sets no limit
            return tracker
        except Exception as err:
            raise ProfilerError(f"no RPC tracker answers at {self.host}:{self.port}: {reason(err)}") from err

    def boards(self) -> tuple[int, int]:
        """How many boards have the key, and how many of them are free (ProfilerError if none has the key)."""
        try:
            state = self._connect(_ANSWER_S).summary()
            keys = [str(server["key"]).partition(":")[2] for server in state["server_info"]]
            free = int(state["queue_info"].get(self.key, {"free": 0})["free"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise ProfilerError(f"{self.host}:{self.port} is no RPC tracker: {reason(err)}") from err
        if self.key not in keys:
            known = ", ".join(sorted(set(keys))) or "none"
            raise ProfilerError(f"no board has the key {self.key} at {self.host}:{self.port} (keys there: {known})")
        return keys.count(self.key), free

    def session(self, timeout_s: float) -> Any:
        """A session of `timeout_s` seconds on a board (ProfilerError if none becomes free)."""
        try:
            tracker = self._connect(self.free_s)
            session = tracker.request(self.key, session_timeout=int(timeout_s) + 1, max_retry=1)
            session.get_function("runtime.config_threadpool")(1, self.threads)
            return session
        except Exception as err:  # TVM raises RuntimeError, and its own errors
            raise ProfilerError(f"no board with the key {self.key} within {self.free_s:g} s: {last_line(err)}") from err


class BoardProgram(LoadedProgram):
    """A program on a board. Other users of its cores cannot be detected, so no sample counts as disturbed."""

    def __init__(self, built: SharedObject, arguments: Arguments, plan: SamplingPlan, session: Any) -> None:
        self._session = session
        super().__init__(built, arguments, plan, Sentinel(0.0))

    def load(self, path: str) -> Any:
        with Path(path).open("rb") as file:  # an object file, which was not linked here, is linked on the board
            suffix = ".o" if file.read(17)[16:] == bytes([_RELOCATABLE]) else ".so"
        name = Path(path).with_suffix(suffix).name
        self._session.upload(path, target=name)
        return self._session.load_module(name)

    def _run_s(self, number: int) -> float:
        timer = self.module.time_evaluator("main", self._session.cpu(0), number=number)
        return float(timer(*self.args).mean)

    def start(self) -> None:
        run_s = self.first_s = self._run_s(1)
        if self.plan.repeats(run_s) > 1:
            run_s = self._run_s(min(10, self.plan.repeats(run_s)))
        self.repeats = self.plan.repeats(run_s)

    def sample(self) -> None:
        self.calm.append(self._run_s(self.repeats))
        self.spent_s += self.calm[-1] * (self.repeats + 1)


def board_worker(connection: Connection, config: CpuConfig, tracker: Tracker, sentinel: SharedObject | None) -> None:
    """Measure list after list of :class:`SharedObject` on any board with the key (runs in its own process)."""
    machine.die_with_parent()
    import_tvm()
    batch: list[SharedObject]
    for batch in requests(connection):
        limit_s = len(batch) * config.first_run_s + config.sampling_s(len(batch))
        connection.send(Running((), limit_s + tracker.free_s))
        try:
            session = tracker.session(limit_s)
        except ProfilerError as err:
            connection.send(WorkerLost(str(err)))
            return
        try:
            _measure(connection, config, batch, sentinel, session)
        except Exception:  # a program ended the session: the parent finds out which one
            os._exit(1)
        del session


def _measure(
    connection: Connection, config: CpuConfig, batch: list[SharedObject], sentinel: SharedObject | None, session: Any
) -> None:
    """Measure one batch, and the time of the sentinel program before and after it."""
    arguments = Arguments(0, session.cpu(0))

    def load(built: SharedObject) -> BoardProgram:
        return BoardProgram(built, arguments, config.plan, session)

    reference = None if sentinel is None else load(sentinel)
    if reference is not None:
        reference.start()

    def reference_s() -> float:
        return float("nan") if reference is None else median(reference._run_s(reference.repeats) for _ in range(3))

    before_s = reference_s()
    for message in measure_batch(batch, config, load):
        if isinstance(message, Measured) and message.status == "run_error":
            session.get_function("runtime.config_threadpool")  # raises if the program ended the session
        connection.send(message)
    connection.send(BatchDone(before_s, reference_s(), 0.0, "rpc"))


class Boards(Executor):
    """Builders on this machine, and for each of ``degree`` boards a process here that waits for its measurements."""

    def __init__(self, tracker: Tracker, device: Device, degree: int) -> None:
        super().__init__()
        self._device, self.degree, self._tracker = device, degree, tracker

    def facts(self) -> dict[str, Any]:
        return {"boards": self.degree}

    def measurers(self, serve: Any, config: Any, sentinel: Any) -> list[Worker]:
        """As in :class:`Executor`; ProfilerError if the board cannot run the sentinel program."""
        tracker = self._tracker
        session = tracker.session(_PROBE_S)
        try:
            BoardProgram(sentinel, Arguments(0, session.cpu(0)), config.plan, session).start()
        except Exception as err:  # whatever TVM raises, here or there
            target = " ".join(f"{k}={v}" for k, v in self._device.target.items() if k in ("mcpu", "mtriple"))
            raise ProfilerError(
                f"the board with the key {tracker.key} does not run code for {self._device.name} ({target}): "
                f"{last_line(err)[:200]}"
            ) from err
        return [Worker(board_worker, (config, tracker, sentinel), f"board-{i}") for i in range(self.degree)]


def connect(address: str, key: str | None, device: Device, workers: int | str, free_s: float = 60.0) -> Boards:
    """The boards with a `key` at the tracker at `address` (HOST:PORT), used all at the same time, or at most `workers` of them.
    ProfilerError (one line): no tracker answers, it has no board with the key, none becomes free, or the device is no CPU."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ProfilerError(f"--rpc {address}: expected HOST:PORT of an RPC tracker")
    if not key:
        raise ProfilerError("--rpc needs --key: what the board is registered as")
    if device.kind != "cpu":
        raise ProfilerError(f"--rpc measures on CPUs, {device.name} is a {device.kind}: use cdmpp bundle and measure")
    import_tvm()
    tracker = Tracker(host, int(port), key, int(device.share), free_s)
    until = time.monotonic() + free_s
    while True:
        count, free = tracker.boards()
        if free:
            return Boards(tracker, device, count if workers == "auto" else min(count, int(workers)))
        if time.monotonic() > until:
            raise ProfilerError(f"the key {key} is taken: none of {count} boards became free within {free_s:g} s")
        time.sleep(0.5)
