"""A network as a graph of tasks, which the end-to-end latency prediction replays.

The file is JSON::

    {"format": "cdmpp.network_graph", "version": 1, "name": ..., "meta": {...},
     "measured_s": {device: seconds of the whole network}, "predicted_s": {source: {device: seconds}},
     "nodes": [{"name": ..., "tasks": [hashes], "inputs": [names], "repeat": 1, "operator": ..., "kind": "kernel",
                "phase": "forward", "family": ..., "input_shapes": [...], "output_shape": [...],
                "measured_s": {device: seconds}, "predicted_s": {source: {device: seconds}}}, ...]}

Fields at their default are left out. The nodes are in an order in which they can run; on one stream they run in that order.
"""

from __future__ import annotations

import graphlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cdmpp.errors import NetworkError, raised_as
from cdmpp.files import read_json, write_text

FORMAT = "cdmpp.network_graph"
VERSION = 1

#: What a node is: kernels that tasks describe, a view or number that costs no device time, or unknown work.
KINDS: tuple[str, ...] = ("kernel", "view", "unknown")

#: The passes of a training step; inference has only the first.
PHASES: tuple[str, ...] = ("forward", "backward", "accumulate")

#: Folder of a dataset that holds its graphs.
FOLDER = "networks"


@dataclass(frozen=True)
class GraphNode:
    """One operator of a network, in one phase."""

    #: Unique in the graph.
    name: str
    #: Hashes of the tasks that it runs one after the other; empty if it runs no kernel or an unknown one.
    tasks: tuple[str, ...] = ()
    #: Names of the nodes that it waits for.
    inputs: tuple[str, ...] = ()
    #: How often it runs: several equal layers may be one node.
    repeat: float = 1.0
    #: The operator's name in the source.
    operator: str = ""
    #: One of :data:`KINDS`.
    kind: str = "kernel"
    #: One of :data:`PHASES`.
    phase: str = "forward"
    #: The source's family of operators, such as ``BMM``.
    family: str = ""
    #: Shapes, as far as the source gives them.
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shape: tuple[int, ...] = ()
    #: Device -> measured seconds of one run.
    measured_s: Mapping[str, float] = field(default_factory=dict)
    #: Source (``neusight``, ``habitat``, ...) -> device -> seconds that it predicted for one run.
    predicted_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkGraph:
    """Nodes in an order in which they can run."""

    #: Name of the network.
    name: str
    #: :func:`network_graph` sorts them and checks that their names are unique.
    nodes: tuple[GraphNode, ...]
    #: Device -> measured seconds of the whole network.
    measured_s: Mapping[str, float] = field(default_factory=dict)
    #: Source -> device -> seconds that it predicted for the whole network.
    predicted_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: JSON values: where it comes from, model, batch, sequence length, ...
    meta: Mapping[str, Any] = field(default_factory=dict)

    def task_weights(self) -> dict[str, float]:
        """Task hash -> how often the network runs it."""
        weights: dict[str, float] = {}
        for node in self.nodes:
            for task in node.tasks:
                weights[task] = weights.get(task, 0.0) + node.repeat
        return weights

    def to_json(self) -> dict[str, Any]:
        """As JSON values (see the module docstring); a node has only the fields that are not at their defaults."""
        plain = asdict(GraphNode(""))
        nodes = [{k: v for k, v in asdict(node).items() if v != plain[k]} for node in self.nodes]
        return {"format": FORMAT, "version": VERSION, **asdict(self), "nodes": nodes}


def network_graph(name: str, nodes: Iterable[GraphNode], **more: Any) -> NetworkGraph:
    """A graph from nodes in any order, with ``more`` attributes; nodes that are ready to run at the same time keep their order.

    NetworkError: two nodes have the same name, a node waits for one that does not exist, nodes wait for each other (the message
    names a cycle), or a field has an invalid value."""
    given = list(nodes)
    by_name: dict[str, GraphNode] = {}
    for node in given:
        if node.name in by_name:
            raise NetworkError(f"network {name}: two nodes are called {node.name!r}")
        if node.kind not in KINDS or node.phase not in PHASES:
            raise NetworkError(
                f"network {name}: node {node.name!r} has kind {node.kind!r} and phase {node.phase!r}; expected one of "
                f"{', '.join(KINDS)} and one of {', '.join(PHASES)}"
            )
        if not node.repeat > 0:
            raise NetworkError(f"network {name}: node {node.name!r} runs {node.repeat} times, expected more than 0")
        by_name[node.name] = node
    for node in given:
        for source in node.inputs:
            if source not in by_name:
                raise NetworkError(f"network {name}: node {node.name!r} waits for {source!r}, which is not there")
    return NetworkGraph(name, tuple(_sorted(name, given, by_name)), **more)


def _sorted(name: str, given: Sequence[GraphNode], by_name: Mapping[str, GraphNode]) -> list[GraphNode]:
    order = {node.name: number for number, node in enumerate(given)}
    if all(order[source] < order[node.name] for node in given for source in node.inputs):
        return list(given)
    sorter = graphlib.TopologicalSorter({node.name: node.inputs for node in given})
    try:
        sorter.prepare()
    except graphlib.CycleError as err:
        cycle = " -> ".join(reversed(err.args[1]))
        raise NetworkError(f"network {name}: nodes wait for each other: {cycle}") from err
    result: list[GraphNode] = []
    while sorter.is_active():
        for ready in sorted(sorter.get_ready(), key=order.__getitem__):
            result.append(by_name[ready])
            sorter.done(ready)
    return result


def save_graph(graph: NetworkGraph, path: str | Path) -> None:
    """Write a graph; the file appears whole or not at all (NetworkError if it cannot be written)."""
    path = Path(path)
    with raised_as(NetworkError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(graph.to_json(), indent=1, allow_nan=False) + "\n")


def load_graph(path: str | Path) -> NetworkGraph:
    """Read what :func:`save_graph` wrote (NetworkError: it is unreadable, no graph, or refused by :func:`network_graph`)."""
    with raised_as(NetworkError, f"cannot read {path}"):
        value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise NetworkError(f"{path} is no network graph: expected JSON with format {FORMAT!r}")
    if value.get("version") != VERSION:
        raise NetworkError(f"{path} has version {value.get('version')}; this cdmpp reads version {VERSION}")
    try:
        nodes = [_node_from_json(node) for node in value["nodes"]]
        more = {key: value.get(key, {}) for key in ("measured_s", "predicted_s", "meta")}
        return network_graph(str(value["name"]), nodes, **more)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise NetworkError(f"{path} is damaged: {type(err).__name__}: {err}") from err


def load_graphs(dataset: str | Path) -> dict[str, NetworkGraph]:
    """The graphs of a dataset folder by name; empty if it has none (NetworkError as in :func:`load_graph`)."""
    graphs = [load_graph(path) for path in sorted((Path(dataset) / FOLDER).glob("*.json"))]
    return {graph.name: graph for graph in graphs}


def _node_from_json(value: Mapping[str, Any]) -> GraphNode:
    kept = {entry.name: value[entry.name] for entry in fields(GraphNode) if entry.name in value}
    for key in ("tasks", "inputs", "output_shape"):
        if key in kept:
            kept[key] = tuple(kept[key])
    if "input_shapes" in kept:
        kept["input_shapes"] = tuple(tuple(shape) for shape in kept["input_shapes"])
    return GraphNode(**kept)
