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


def diamond() -> NetworkGraph:
    """``a`` before ``b`` and ``c``, which ``d`` waits for."""
    return network_graph(
        "diamond",
        [
            GraphNode("n1", ("a",)),
            GraphNode("n2", ("b",), ("n1",)),
            GraphNode("n3", ("c",), ("n1",)),
            GraphNode("n4", ("b",), ("n2", "n3")),
        ],
    )


def chain(*tasks: str, repeat: float = 1.0) -> NetworkGraph:
    nodes = [
        GraphNode(f"n{i}", (task,), (f"n{i - 1}",) if i else (), repeat=repeat)
        for i, task in enumerate(tasks)
    ]
    return network_graph("chain", nodes)


def played(graph: NetworkGraph, seconds: Mapping[str, float] = SECONDS, **options: Any) -> Replay:
    return replay(graph, {task: np.array([value]) for task, value in seconds.items()}, **options)


def test_one_stream_adds_up():
    result = played(diamond())
    assert result.latency_s == pytest.approx([15.0])
    assert [node.start_s for node in result.nodes] == [0.0, 5.0, 8.0, 12.0]


def test_streams_overlap_what_the_graph_allows():
    result = played(diamond(), streams=2)
    assert result.latency_s == pytest.approx([12.0])  # 5 + max(3, 4) + 3
    assert [node.stream for node in result.nodes] == [0, 0, 1, 0]
    assert played(diamond(), streams=8).latency_s == pytest.approx([12.0])
    assert played(chain("a", "b", "c"), streams=4).latency_s == pytest.approx([12.0])


def test_launches_leave_gaps_only_behind_short_kernels():
    # issued at 1, 2, 3, 4; the short ones end before the next is there
    result = played(chain("short", "short", "c", "a"), launch_s=1.0)
    assert [node.start_s for node in result.nodes] == [1.0, 2.0, 3.0, 7.0]
    assert result.latency_s == pytest.approx([12.0])
    assert [node.gap_s for node in result.nodes] == pytest.approx([1.0, 0.5, 0.5, 0.0])


def test_a_cpu_pays_every_launch():
    result = played(chain("short", "c"), launch_s=1.0, asynchronous=False)
    assert result.latency_s == pytest.approx([6.5])
    assert [node.gap_s for node in result.nodes] == [1.0, 1.0]


@pytest.mark.parametrize("repeat", [2.0, 24.0, 500.0, 2.5, 0.5])
@pytest.mark.parametrize("streams", [1, 2])
def test_a_layer_that_repeats_takes_that_often(repeat, streams):
    graph = chain("a", "b", repeat=repeat)
    result = played(graph, streams=streams)
    assert result.latency_s == pytest.approx([8.0 * repeat])
    assert [node.kernel_s for node in result.nodes] == pytest.approx([5.0 * repeat, 3.0 * repeat])


def test_runs_of_a_layer_follow_each_other_on_several_streams():
    nodes = [GraphNode(f"n{i}", ("c",), repeat=3.0) for i in range(2)]
    assert played(network_graph("pairs", nodes), streams=2).latency_s == pytest.approx([12.0])


def test_a_launch_bound_layer_that_repeats():
    result = played(chain("short", "short", repeat=100.0), launch_s=1.0)
    assert result.latency_s == pytest.approx([200.5])  # the last of 200 is issued at 200
    total = sum(node.kernel_s + node.gap_s for node in result.nodes)
    assert total == pytest.approx(200.5)


def test_a_repeated_layer_between_others_keeps_its_place():
    nodes = [
        GraphNode("first", ("a",)),
        GraphNode("layer", ("b",), ("first",), repeat=10.0),
        GraphNode("last", ("c",), ("layer",)),
    ]
    result = played(network_graph("net", nodes))
    assert result.latency_s == pytest.approx([39.0])
    assert [node.start_s for node in result.nodes] == [0.0, 5.0, 35.0]


def test_parts_add_up_to_the_latency_on_one_stream():
    result = played(chain("short", "a", "short", "short", "b"), launch_s=0.7)
    assert sum(n.kernel_s + n.gap_s for n in result.nodes) == pytest.approx(float(result.latency_s[0]))


def test_views_and_unknown_nodes_take_no_time_but_pass_on_what_they_wait_for():
    nodes = [
        GraphNode("n1", ("a",)),
        GraphNode("view", (), ("n1",), kind="view"),
        GraphNode("odd", (), ("view",), kind="unknown"),
        GraphNode("n2", ("b",), ("odd",)),
    ]
    assert played(network_graph("net", nodes), streams=2).latency_s == pytest.approx([8.0])


def test_a_node_of_several_kernels_launches_each():
    nodes = [GraphNode("n1", ("short", "short"))]
    result = played(network_graph("net", nodes), launch_s=1.0)
    assert result.latency_s == pytest.approx([2.5])


def test_cases_are_independent_of_each_other():
    seconds = {"a": np.array([5.0, 1.0]), "b": np.array([3.0, 30.0]), "c": np.array([4.0, 4.0])}
    result = replay(diamond(), seconds, streams=2)
    assert result.latency_s == pytest.approx([12.0, 61.0])


def test_bad_input_is_refused():
    with pytest.raises(NetworkError, match="one stream at least"):
        played(diamond(), streams=0)
    with pytest.raises(NetworkError, match="several streams are for GPUs"):
        played(diamond(), streams=2, asynchronous=False)
    with pytest.raises(NetworkError, match="no latency for its task a"):
        played(diamond(), {"b": 1.0, "c": 1.0})
