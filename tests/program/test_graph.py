"""Graphs of tasks: order, cycles, the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdmpp.errors import NetworkError
from cdmpp.program.graph import GraphNode, load_graph, load_graphs, network_graph, save_graph

CHAIN = network_graph(
    "net",
    [
        GraphNode("a", ("t1",), measured_s={"h200": 1e-3}, input_shapes=((2, 3), (3,)), output_shape=(2, 3)),
        GraphNode("b", ("t2", "t2"), ("a",), repeat=24, predicted_s={"neusight": {"h200": 2e-3}}, family="BMM"),
        GraphNode("c", (), ("b",), kind="view"),
        GraphNode("d", ("t1",), ("c",), phase="backward"),
    ],
    measured_s={"h200": 0.5},
    meta={"model": "m", "devices": ["h200"]},
)


def test_weights_count_repeats_and_tasks_of_a_node() -> None:
    assert CHAIN.task_weights() == {"t1": 2, "t2": 48}


def test_a_graph_goes_through_its_file(tmp_path: Path) -> None:
    file = tmp_path / "networks" / "net.json"
    save_graph(CHAIN, file)
    assert load_graph(file) == CHAIN and load_graphs(tmp_path) == {"net": CHAIN}
    assert load_graphs(tmp_path / "networks") == {}
    value = json.loads(file.read_text())
    assert value["nodes"][2] == {"name": "c", "inputs": ["b"], "kind": "view"}  # defaults are left out
    value["nodes"][0]["a_later_field"] = 1
    file.write_text(json.dumps(value))
    assert load_graph(file) == CHAIN


@pytest.mark.parametrize(
    ("waits_for", "order"), [({"d": "bc", "c": "a", "b": "a", "a": ""}, "acbd"), ({"x": "", "y": "", "z": "x"}, "xyz")]
)  # fmt: skip
def test_nodes_are_sorted_only_where_they_have_to_be(waits_for: dict[str, str], order: str) -> None:
    nodes = [GraphNode(name, (), tuple(inputs)) for name, inputs in waits_for.items()]
    assert [node.name for node in network_graph("net", nodes).nodes] == list(order)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([GraphNode("a", (), ("b",)), GraphNode("b", (), ("a",))], "wait for each other: (a -> b -> a|b -> a -> b)$"),
        ([GraphNode("a", (), ("a",))], "wait for each other: a -> a$"),
        ([GraphNode("a"), GraphNode("a")], "two nodes are called 'a'"),
        ([GraphNode("a", (), ("b",))], "node 'a' waits for 'b', which is not there"),
        ([GraphNode("a", repeat=0)], "node 'a' runs 0 times"),
        ([GraphNode("a", repeat=float("nan"))], "node 'a' runs nan times"),
        ([GraphNode("a", kind="magic")], "kind 'magic'"),
        ([GraphNode("a", phase="sideways")], "phase 'sideways'"),
    ],
)  # fmt: skip
def test_an_unsound_graph_is_refused(nodes: list[GraphNode], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        network_graph("net", nodes)


VERSION_1 = '"format": "cdmpp.network_graph", "version": 1'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"), ("{", "cannot read"), ("[]", "is no network graph"),
        ('{"format": "else"}', "is no network graph"),
        ('{"format": "cdmpp.network_graph", "version": 9}', "has version 9; this cdmpp reads version 1"),
        (f"{{{VERSION_1}}}", "is damaged: KeyError"),
        (f'{{{VERSION_1}, "name": "n", "nodes": [{{}}]}}', "is damaged: TypeError"),
        (f'{{{VERSION_1}, "name": "n", "nodes": [3]}}', "is damaged"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(NetworkError, match=message) as caught:
        load_graph(file)
    assert "bad.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NetworkError, match="cannot write"):
        save_graph(CHAIN, tmp_path / "file" / "net.json")
