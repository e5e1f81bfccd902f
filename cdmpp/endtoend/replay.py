"""Replaying a graph of tasks: when each of its kernels runs, on one stream or several.

A host issues kernels in the order of the graph, one every ``launch_s`` seconds. On a GPU it does so while kernels run: a kernel
starts when it has been issued, the nodes that it waits for are done and its stream is free. Kernels shorter than the time to
issue one leave gaps. On a CPU the host runs the kernels itself, so each kernel also costs its launch.

Kernels of different streams do not slow each other down here, and events cost nothing, so with several streams the result is
the best that concurrency can give. A node that runs several times is part of a layer that the graph holds once: neighbours of
equal ``repeat`` form a body that runs that often, one run after the other. Views and unknown nodes take no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import NetworkError
from cdmpp.program.graph import GraphNode, NetworkGraph

FloatArray = NDArray[np.float64]

#: A body is replayed at most this often. Further runs take as long as the last one; by then every run takes the same time.
_MAX_RUNS = 32


@dataclass
class NodeTime:
    """When a node runs, in seconds, in the first replayed case."""

    #: Start of its first run.
    start_s: float
    #: Number of its stream, from 0.
    stream: int
    #: Sums over all its runs: time of its kernels, and time that its stream was idle because they had not been issued yet.
    kernel_s: float
    gap_s: float = 0.0


class Replay(NamedTuple):
    """The result of replaying a graph."""

    #: Time from the first launch to the end of the last kernel, float64 seconds (m,), one for each case.
    latency_s: FloatArray
    #: Times of the nodes, in the order of the graph.
    nodes: tuple[NodeTime, ...]


def replay(
    graph: NetworkGraph, task_s: Mapping[str, FloatArray], *, launch_s: float = 0.0, asynchronous: bool = True, streams: int = 1
) -> Replay:
    """Replay a graph in several cases at once, such as lowest, expected and highest latencies of its tasks.

    ``task_s`` maps a task to its seconds in each case, float64 (m,); the first case decides the stream of each node.
    ``launch_s`` is the host's time to start one kernel, ``asynchronous`` whether it does so while others run, and ``streams``
    how many kernels may run at the same time. Raises NetworkError if a task of the graph is not in `task_s`, or if there is no
    stream, or more than one on a CPU."""
    if streams < 1:
        raise NetworkError(f"there must be one stream at least, got {streams}")
    if streams > 1 and not asynchronous:
        raise NetworkError("several streams are for GPUs: a CPU runs a network's tasks one after the other")
    missing = sorted(graph.task_weights().keys() - task_s.keys())
    if missing:
        raise NetworkError(f"network {graph.name}: no latency for its task {missing[0]}")
    clocks = _Clocks(task_s, launch_s, asynchronous, streams)
    for repeat, body in itertools.groupby(graph.nodes, key=lambda node: node.repeat):
        clocks.run_body(list(body), repeat)
    return Replay(clocks.last_end, tuple(clocks.times[node.name] for node in graph.nodes))


class _Clocks:
    """Clocks of the host and the streams, and the end times of the nodes so far; arrays are (m,)."""

    def __init__(self, task_s: Mapping[str, FloatArray], launch_s: float, asynchronous: bool, streams: int) -> None:
        self._task_s, self._launch_s, self._asynchronous = task_s, launch_s, asynchronous
        self._host = self.last_end = self._zero = np.zeros_like(next(iter(task_s.values()), np.zeros(1)))
        self._free = [self._zero] * streams
        self._ends: dict[str, FloatArray] = {}
        self.times: dict[str, NodeTime] = {}

    def run_body(self, body: list[GraphNode], repeat: float) -> None:
        """Run nodes `repeat` times; a fraction of a run takes that fraction of its time."""
        runs = max(1, min(int(repeat), _MAX_RUNS))
        barrier = self._zero
        for left in reversed(range(runs)):
            host, free, last_end = self._host, list(self._free), self.last_end
            counts_as = 1.0 if left else 1.0 + repeat - runs
            for node in body:
                gap_s = self._run(node, barrier)
                self.times[node.name].gap_s += counts_as * gap_s
            if repeat > 1:
                barrier = self.last_end
        if repeat != runs:
            self._skip(body, repeat - runs, host, free, last_end)

    def _run(self, node: GraphNode, barrier: FloatArray) -> float:
        """Run a node once; returns the seconds that its stream was idle because its kernels had not been launched yet."""
        ready = barrier
        for source in node.inputs:
            ready = np.maximum(ready, self._ends[source])
        known = self.times.get(node.name)
        stream = known.stream if known else self._choose(node, ready) if node.tasks else 0
        gap_s, end, started_s = 0.0, ready, []
        for task in node.tasks:
            can_start = np.maximum(ready, self._free[stream])
            if self._asynchronous:
                self._host = self._host + self._launch_s
                start = np.maximum(can_start, self._host)
            else:
                start = can_start + self._launch_s
            gap_s += float(start[0] - can_start[0])
            started_s.append(float(start[0]))
            self._free[stream] = end = start + self._task_s[task]
            self.last_end = np.maximum(self.last_end, end)
        self._ends[node.name] = end
        if known is None:
            kernel_s = node.repeat * sum(float(self._task_s[task][0]) for task in node.tasks)
            self.times[node.name] = NodeTime([*started_s, float(ready[0])][0], stream, kernel_s)
        return gap_s

    def _choose(self, node: GraphNode, ready: FloatArray) -> int:
        """The stream on which a node starts first; if several do, preferably that of an input, which then needs no event."""
        starts = [max(float(ready[0]), float(free[0])) for free in self._free]
        inputs = {self.times[source].stream for source in node.inputs if self.times[source].kernel_s}
        return min(range(len(starts)), key=lambda stream: (starts[stream], stream not in inputs, stream))

    def _skip(self, body: list[GraphNode], rest: float, host: FloatArray, free: list[FloatArray], last_end: FloatArray) -> None:
        """Advance by `rest` further runs, each as long as the last one; a negative number takes back part of the last run."""
        period = self.last_end - last_end
        self._host = self._host + rest * (self._host - host)
        self._free = [now + rest * (period if (now != then).any() else 0.0) for now, then in zip(self._free, free, strict=True)]
        self.last_end = self.last_end + rest * period
        for node in body:
            self._ends[node.name] = np.minimum(self._ends[node.name] + rest * period, self.last_end)
