"""A network's graph and its tasks, from a network that is imported here or from the graph file of an imported trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError, NetworkError
from cdmpp.program import import_tvm, quiet
from cdmpp.program.graph import FOLDER, GraphNode, NetworkGraph, load_graph, network_graph
from cdmpp.program.network import VIEWS, FusedNetwork, Network, callee, fuse, load_network, tasks_of
from cdmpp.program.types import Task


@dataclass(frozen=True)
class NetworkTasks:
    """A graph and the tasks that it runs, by hash. Raises NetworkError if it runs none."""

    graph: NetworkGraph
    tasks: Mapping[str, Task]
    #: Whether a vendor library runs the tasks, so that there are no schedules to choose from.
    library: bool = False

    def __post_init__(self) -> None:
        if not self.graph.task_weights():
            raise NetworkError(f"network {self.graph.name} has no task: there is nothing to predict")


def network_tasks(network: Network | NetworkTasks | str | Path, data: str | Path | None = None) -> NetworkTasks:
    """The graph and tasks of a zoo name, an ``.onnx`` or ``.pt2`` file, a Network, or an imported trace's graph file.

    `data` is the dataset that holds the tasks of a graph file; None is the one whose ``networks/`` folder contains the file.
    Raises NetworkError if a network cannot be found or imported, its nodes wait for each other in a cycle, or it has no task;
    DatasetError if there is no dataset with the tasks of a graph file."""
    if isinstance(network, NetworkTasks):
        return network
    if isinstance(network, str | Path):
        if Path(network).suffix.lower() == ".json":
            return _of_file(Path(network), data)
        network = load_network(network)
    import_tvm()
    with quiet():
        fused = fuse(network.to_relax())
    return graph_of_fused(fused, network.name)


def _of_file(path: Path, data: str | Path | None) -> NetworkTasks:
    graph = load_graph(path)
    folder = Path(data) if data is not None else path.parent.parent
    if data is None and path.parent.name != FOLDER:
        raise DatasetError(f"{path} does not lie in a dataset's {FOLDER}/: name the dataset with --data")
    known = Dataset.open(folder).tasks
    wanted = list(graph.task_weights())
    missing = [task for task in wanted if task not in known]
    if missing:
        raise DatasetError(f"{folder} lacks {len(missing)} tasks of network {graph.name}, such as {missing[0]}")
    return NetworkTasks(graph, {task: known[task] for task in wanted}, library=True)


def graph_of_fused(fused: FusedNetwork, name: str) -> NetworkTasks:
    """Build a graph with a node for every call in ``main``, in the order of execution, named after the called function.

    Further calls of a function are numbered. No node waits for inputs or weights. Reshapes are views. Functions that are not
    tasks (:func:`cdmpp.program.network.task_from_prim_func`), operators not lowered to TIR, and branches are ``unknown``."""
    from tvm import relax

    tasks = tasks_of(fused, name)
    nodes: list[GraphNode] = []
    used = Counter[str]()
    # Relax may give several variables the same name, so they are identified by the object's address, which hash() gives.
    made_by: dict[int, tuple[str, ...]] = {}

    def sources(*expressions: Any) -> tuple[str, ...]:
        """Names of the nodes that produce the variables in expressions, each once."""
        found: dict[str, None] = {}

        def visit(part: Any) -> None:
            if isinstance(part, relax.Var):
                found.update(dict.fromkeys(made_by.get(hash(part), ())))

        for expression in expressions:
            relax.analysis.post_order_visit(expression, visit)
        return tuple(found)

    for binding in (binding for block in fused.module["main"].body.blocks for binding in block.bindings):
        value, variable = binding.value, binding.var
        if not isinstance(value, relax.Call | relax.If):
            made_by[hash(variable)] = sources(value)
            continue
        operator, arguments, _ = callee(value) if isinstance(value, relax.Call) else ("if", [value.cond], False)
        task = tasks.get(operator)
        used[operator] += 1
        number = used[operator]
        node = GraphNode(
            name=operator if number == 1 else f"{operator}#{number}",
            tasks=() if task is None else (task.hash,),
            inputs=sources(*arguments),
            operator=operator,
            kind="view" if operator in VIEWS else "unknown" if task is None else "kernel",
            output_shape=_shape(variable),
        )
        nodes.append(node)
        made_by[hash(variable)] = (node.name,)
    by_hash = {task.hash: task for task in tasks.values()}
    return NetworkTasks(network_graph(name, nodes, meta={"source": "relax"}), by_hash)


def _shape(variable: Any) -> tuple[int, ...]:
    """Extents of a tensor; () for anything else, or if they are not fixed."""
    shape = getattr(variable.ty, "shape", None)
    try:
        return tuple(int(extent) for extent in shape) if shape is not None else ()
    except (TypeError, ValueError):
        return ()
