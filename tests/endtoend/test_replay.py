"""Replay of graphs: known answers on one stream, with launch gaps, with several streams, with layers that repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cdmpp.endtoend.replay import Replay, replay
from cdmpp.errors import NetworkError
from cdmpp.program.graph import GraphNode, NetworkGraph, network_graph

SECONDS = {"a": 5.0, "b": 3.0, "c": 4.0, "short": 0.5}


def graph(*nodes: GraphNode) -> NetworkGraph:
    return network_graph("net", nodes)


def chain(*tasks: str, repeat: float = 1.0) -> NetworkGraph:
    names = [f"n{i}" for i in range(len(tasks))]
    return graph(
        *(GraphNode(name, (task,), tuple(names[:i][-1:]), repeat=repeat)
          for i, (name, task) in enumerate(zip(names, tasks, strict=True)))
    )  # fmt: skip


#: ``a`` before ``b`` and ``c``, which ``d`` waits for.
DIAMOND = graph(
    GraphNode("n1", ("a",)), GraphNode("n2", ("b",), ("n1",)), GraphNode("n3", ("c",), ("n1",)),
    GraphNode("n4", ("b",), ("n2", "n3")),
)  # fmt: skip
#: Views and unknown nodes take no time but pass on what they wait for.
VIEWS = graph(
    GraphNode("n1", ("a",)), GraphNode("view", (), ("n1",), kind="view"), GraphNode("odd", (), ("view",), kind="unknown"),
    GraphNode("n2", ("b",), ("odd",)),
)  # fmt: skip
#: A repeated layer between others keeps its place.
BETWEEN = graph(
    GraphNode("first", ("a",)), GraphNode("layer", ("b",), ("first",), repeat=10.0), GraphNode("last", ("c",), ("layer",))
)  # fmt: skip
#: Runs of a layer follow each other, on several streams too.
PAIRS = graph(*(GraphNode(f"n{i}", ("c",), repeat=3.0) for i in range(2)))


def played(net: NetworkGraph, seconds: Mapping[str, float] = SECONDS, **options: Any) -> Replay:
    return replay(net, {task: np.array([value]) for task, value in seconds.items()}, **options)


@pytest.mark.parametrize(
    ("net", "options", "latency_s", "each"),
    [
        (DIAMOND, {}, 15.0, {"start_s": [0, 5, 8, 12]}),
        (DIAMOND, {"streams": 2}, 12.0, {"stream": [0, 0, 1, 0]}),  # 5 + max(3, 4) + 3
        (DIAMOND, {"streams": 8}, 12.0, {}),
        (chain("a", "b", "c"), {"streams": 4}, 12.0, {}),
        # launches leave gaps only behind short kernels: issued at 1, 2, 3, 4; the short ones end before the next is there
        (chain("short", "short", "c", "a"), {"launch_s": 1.0}, 12.0,
         {"start_s": [1, 2, 3, 7], "gap_s": [1, 0.5, 0.5, 0]}),
        # a CPU pays every launch
        (chain("short", "c"), {"launch_s": 1.0, "asynchronous": False}, 6.5, {"gap_s": [1, 1]}),
        *((chain("a", "b", repeat=repeat), {"streams": streams}, 8 * repeat, {"kernel_s": [5 * repeat, 3 * repeat]})
          for repeat in (2.0, 24.0, 500.0, 2.5, 0.5) for streams in (1, 2)),
        (PAIRS, {"streams": 2}, 12.0, {}),
        (chain("short", "short", repeat=100.0), {"launch_s": 1.0}, 200.5, {}),  # the last of 200 is issued at 200
        (BETWEEN, {}, 39.0, {"start_s": [0, 5, 35]}),
        (VIEWS, {"streams": 2}, 8.0, {}),
        (graph(GraphNode("n1", ("short", "short"))), {"launch_s": 1.0}, 2.5, {}),  # each kernel of a node is launched
    ],
)  # fmt: skip
def test_known_answers(net: NetworkGraph, options: Any, latency_s: float, each: Any) -> None:
    result = played(net, **options)
    assert result.latency_s == pytest.approx([latency_s])
    for name, values in each.items():
        assert [getattr(node, name) for node in result.nodes] == pytest.approx(values), name
    if options.get("streams", 1) == 1:
        assert sum(node.kernel_s + node.gap_s for node in result.nodes) == pytest.approx(latency_s)


def test_cases_are_independent_of_each_other() -> None:
    seconds = {"a": np.array([5.0, 1.0]), "b": np.array([3.0, 30.0]), "c": np.array([4.0, 4.0])}
    assert replay(DIAMOND, seconds, streams=2).latency_s == pytest.approx([12.0, 61.0])


@pytest.mark.parametrize(
    ("seconds", "options", "message"),
    [
        (SECONDS, {"streams": 0}, "one stream at least"),
        (SECONDS, {"streams": 2, "asynchronous": False}, "several streams are for GPUs"),
        ({"b": 1.0, "c": 1.0}, {}, "no latency for its task a"),
    ],
)
def test_bad_input_is_refused(seconds: dict[str, float], options: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        played(DIAMOND, seconds, **options)
