"""Graphs of tasks: order, cycles, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import NetworkError
from cdmpp.program.graph import GraphNode, NetworkGraph, load_graph, load_graphs, network_graph, save_graph


def chain() -> NetworkGraph:
    return network_graph(
        "net",
        [
            GraphNode(
                "a", ("t1",), measured_s={"h200": 1e-3}, input_shapes=((2, 3), (3,)), output_shape=(2, 3)
            ),
            GraphNode(
                "b", ("t2", "t2"), ("a",), repeat=24, predicted_s={"neusight": {"h200": 2e-3}}, family="BMM"
            ),
            GraphNode("c", (), ("b",), kind="view"),
            GraphNode("d", ("t1",), ("c",), phase="backward"),
        ],
        measured_s={"h200": 0.5},
        meta={"model": "m", "devices": ["h200"]},
    )


def test_weights_count_repeats_and_tasks_of_a_node() -> None:
    assert chain().task_weights() == {"t1": 2, "t2": 48}


def test_a_graph_goes_through_its_file(tmp_path: Path) -> None:
    graph = chain()
    save_graph(graph, tmp_path / "networks" / "net.json")
    assert load_graph(tmp_path / "networks" / "net.json") == graph
    assert load_graphs(tmp_path) == {"net": graph}
    value = json.loads((tmp_path / "networks" / "net.json").read_text())
    assert value["nodes"][2] == {"name": "c", "inputs": ["b"], "kind": "view"}  # defaults are left out
    assert load_graphs(tmp_path / "networks") == {}


def test_nodes_are_sorted_only_where_they_have_to_be() -> None:
    nodes = [
        GraphNode("d", (), ("b", "c")),
        GraphNode("c", (), ("a",)),
        GraphNode("b", (), ("a",)),
        GraphNode("a"),
    ]
    assert [node.name for node in network_graph("net", nodes).nodes] == ["a", "c", "b", "d"]
    given = [GraphNode("x"), GraphNode("y"), GraphNode("z", (), ("x",))]
    assert [node.name for node in network_graph("net", given).nodes] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [GraphNode("a", (), ("b",)), GraphNode("b", (), ("a",))],
            r"wait for each other: (a -> b -> a|b -> a -> b)$",
        ),
        ([GraphNode("a", (), ("a",))], "wait for each other: a -> a$"),
        ([GraphNode("a"), GraphNode("a")], "two nodes are called 'a'"),
        ([GraphNode("a", (), ("b",))], "node 'a' waits for 'b', which is not there"),
        ([GraphNode("a", repeat=0)], "node 'a' runs 0 times"),
        ([GraphNode("a", repeat=float("nan"))], "node 'a' runs nan times"),
        ([GraphNode("a", kind="magic")], "kind 'magic'"),
        ([GraphNode("a", phase="sideways")], "phase 'sideways'"),
    ],
)
def test_an_unsound_graph_is_refused(nodes: list[GraphNode], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        network_graph("net", nodes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "is no network graph"),
        ('{"format": "else"}', "is no network graph"),
        ('{"format": "cdmpp.network_graph", "version": 9}', "has version 9; this cdmpp reads version 1"),
        ('{"format": "cdmpp.network_graph", "version": 1}', "is damaged: KeyError"),
        (
            '{"format": "cdmpp.network_graph", "version": 1, "name": "n", "nodes": [{}]}',
            "is damaged: TypeError",
        ),
        ('{"format": "cdmpp.network_graph", "version": 1, "name": "n", "nodes": [3]}', "is damaged"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(NetworkError, match=message) as caught:
        load_graph(file)
    assert "bad.json" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"cannot read .*none\.json"):
        load_graph(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(NetworkError, match="cannot write"):
        save_graph(chain(), tmp_path / "file" / "net.json")


def test_later_fields_are_ignored(tmp_path: Path) -> None:
    value: dict[str, Any] = chain().to_json()
    value["nodes"][0]["a_later_field"] = 1
    (tmp_path / "later.json").write_text(json.dumps(value))
    assert load_graph(tmp_path / "later.json") == chain()
