"""Replaying a graph of tasks: when each of its kernels runs, on one stream or several.

A host issues kernels in the order of the graph, one every ``launch_s`` seconds. On a GPU it does so while kernels run: a
kernel starts when it has been issued, the nodes that it waits for are done and its stream is free. A gap is left where
kernels are shorter than it takes to issue them. On a CPU the host runs the kernels itself, so each costs its launch besides.

Kernels of different streams do not slow each other down here, and an event that makes one stream wait for another
costs nothing: with several streams the result is what concurrency can give at best.

A node that runs several times belongs to a layer of which the graph holds one: neighbours of equal ``repeat`` are a body
that runs so often, each run after the end of the one before. Views and unknown nodes take no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import NetworkError
from cdmpp.program.graph import GraphNode, NetworkGraph

FloatArray = NDArray[np.float64]

#: A body is replayed so often; what follows takes as long as its last run, which by then is the same every time.
_MAX_RUNS = 32


@dataclass(frozen=True)
class NodeTime:
    """When a node runs, in seconds, in the first case that was replayed.

    Attributes
    ----------
    start_s
        Of its first run.
    kernel_s, gap_s
        Of all its runs: what its kernels take, and how long its stream was idle because they had not been issued yet.
    stream
        Its number, from 0.
    """

    start_s: float
    kernel_s: float
    gap_s: float
    stream: int


@dataclass(frozen=True)
class Replay:
    """What replaying a graph gave.

    Attributes
    ----------
    latency_s
        From the first launch to the end of the last kernel, float64 seconds (m,), one for each case.
    nodes
        In the order of the graph.
    """

    latency_s: FloatArray
    nodes: tuple[NodeTime, ...]


def replay(
    graph: NetworkGraph,
    task_s: Mapping[str, FloatArray],
    *,
    launch_s: float = 0.0,
    asynchronous: bool = True,
    streams: int = 1,
) -> Replay:
    """Replay a graph in several cases at once, such as lowest, expected and highest latencies of its tasks.

    Parameters
    ----------
    task_s
        Task -> seconds in each case, float64 (m,). Nodes are assigned to streams by the first case.
    launch_s
        What the host needs to start one kernel.
    asynchronous
        Whether it does so while others run.
    streams
        Kernels that may run at the same time.

    Raises
    ------
    NetworkError
        A task of the graph is not in `task_s`, there is not one stream, or kernels wait for streams and not for a device.
    """
    if streams < 1:
        raise NetworkError(f"there must be one stream at least, got {streams}")
    if streams > 1 and not asynchronous:
        raise NetworkError("several streams are for GPUs: a CPU runs a network's tasks one after the other")
    missing = sorted({task for node in graph.nodes for task in node.tasks} - set(task_s))
    if missing:
        raise NetworkError(f"network {graph.name}: no latency for its task {missing[0]}")
    cases = next((len(np.atleast_1d(values)) for values in task_s.values()), 1)
    state = _State(task_s, launch_s, asynchronous, streams, cases)
    for repeat, body in itertools.groupby(graph.nodes, key=lambda node: node.repeat):
        state.run_body(list(body), repeat)
    return Replay(np.maximum(state.last_end, 0.0), tuple(state.times[node.name] for node in graph.nodes))


class _State:
    """Clocks of host and streams, and the ends of the nodes so far; arrays are (m,)."""

    def __init__(
        self, task_s: Mapping[str, FloatArray], launch_s: float, asynchronous: bool, streams: int, cases: int
    ) -> None:
        self._task_s, self._launch_s, self._asynchronous = task_s, launch_s, asynchronous
        self._zero = np.zeros(cases)
        self._host = self._zero
        self._free = [self._zero] * streams
        self._ends: dict[str, FloatArray] = {}
        self._streams: dict[str, int] = {}
        self._gaps: dict[str, float] = {}
        self._starts: dict[str, float] = {}
        self.last_end = self._zero
        self.times: dict[str, NodeTime] = {}

    def run_body(self, body: list[GraphNode], repeat: float) -> None:
        """Run nodes `repeat` times, a part of a run as that part of its time."""
        runs = max(1, min(int(repeat), _MAX_RUNS))
        rest = repeat - runs
        barrier = self._zero
        for run in range(runs):
            before = (self._host, self._free, self.last_end)
            gaps = {}
            for node in body:
                gaps[node.name] = self._run(node, barrier)
                self._gaps[node.name] = self._gaps.get(node.name, 0.0) + gaps[node.name]
            if repeat > 1:
                barrier = self.last_end
            if run == runs - 1 and rest:
                self._skip(body, rest, *before)
                for name, gap in gaps.items():
                    self._gaps[name] += rest * gap
        for node in body:
            kernel_s = node.repeat * sum(float(self._task_s[task][0]) for task in node.tasks)
            stream = self._streams.get(node.name, 0)
            self.times[node.name] = NodeTime(self._starts[node.name], kernel_s, self._gaps[node.name], stream)

    def _run(self, node: GraphNode, barrier: FloatArray) -> float:
        """Run a node once; seconds that its stream was idle for want of a launch."""
        ready = barrier
        for source in node.inputs:
            ready = np.maximum(ready, self._ends[source])
        if not node.tasks:
            self._ends[node.name] = ready
            self._starts.setdefault(node.name, float(ready[0]))
            return 0.0
        if node.name not in self._streams:
            self._streams[node.name] = self._choose(node, ready)
        stream = self._streams[node.name]
        gap = 0.0
        for number, task in enumerate(node.tasks):
            can_start = np.maximum(ready, self._free[stream])
            if self._asynchronous:
                self._host = self._host + self._launch_s
                start = np.maximum(can_start, self._host)
            else:
                start = can_start + self._launch_s
            gap += float(start[0] - can_start[0])
            if number == 0:
                self._starts.setdefault(node.name, float(start[0]))
            end = start + self._task_s[task]
            self._free = [end if i == stream else free for i, free in enumerate(self._free)]
        self._ends[node.name] = self._free[stream]
        self.last_end = np.maximum(self.last_end, self._free[stream])
        return gap

    def _choose(self, node: GraphNode, ready: FloatArray) -> int:
        """The stream on which a node starts first; of equal ones that of an input, which then needs no event."""
        starts = [max(float(ready[0]), float(free[0])) for free in self._free]
        inputs = {self._streams.get(source, -1) for source in node.inputs}
        return min(range(len(starts)), key=lambda stream: (starts[stream], stream not in inputs, stream))

    def _skip(
        self,
        body: list[GraphNode],
        rest: float,
        host: FloatArray,
        free: list[FloatArray],
        last_end: FloatArray,
    ) -> None:
        """Let `rest` further runs pass, each as long as the last one; a negative part takes back of it."""
        period = self.last_end - last_end
        self._host = self._host + rest * (self._host - host)
        self._free = [
            now + rest * (period if (now != then).any() else 0.0)
            for now, then in zip(self._free, free, strict=True)
        ]
        self.last_end = self.last_end + rest * period
        for node in body:
            self._ends[node.name] = np.minimum(self._ends[node.name] + rest * period, self.last_end)
