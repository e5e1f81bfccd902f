"""A network's graph and its tasks: of a network that is imported here, or of the graph file of an imported trace."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import DatasetError, NetworkError, ProgramError
from cdmpp.program.fusion import VIEWS, FusedNetwork, fuse
from cdmpp.program.graph import FOLDER, GraphNode, NetworkGraph, load_graph, network_graph
from cdmpp.program.tasks import task_from_prim_func
from cdmpp.program.tvm_env import import_tvm, quiet

if TYPE_CHECKING:
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkTasks:
    """A graph and the tasks that it runs, by hash; NetworkError where it runs none."""

    graph: NetworkGraph
    tasks: Mapping[str, Task]
    #: Whether a vendor library runs the tasks, so that there are no schedules to choose from.
    library: bool = False

    def __post_init__(self) -> None:
        if not self.graph.task_weights():
            raise NetworkError(f"network {self.graph.name} has no task: there is nothing to predict")


def network_tasks(network: Network | NetworkTasks | str | Path, data: str | Path | None = None) -> NetworkTasks:
    """The graph and tasks of a zoo name, an ``.onnx`` or ``.pt2`` file, a Network, or an imported trace's graph file.

    `data` is the dataset that holds the tasks of a graph file; None for the one whose ``networks/`` the file lies in.
    NetworkError where a network cannot be found or imported, its nodes wait for each other, or it has no task;
    DatasetError where there is no dataset with the tasks of a graph file.
    """
    from cdmpp.program.network import load_network

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
    from cdmpp.dataset import Dataset

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
    """A node for every call in ``main``, in the order of execution, named after the function that it calls.

    A function that is called again has its calls numbered. Inputs and weights are there from the start: nothing waits for
    them. Reshapes are views. Functions that are no task (see :func:`cdmpp.program.tasks.task_from_prim_func`),
    operators that did not become TIR, and branches are ``unknown``.
    """
    builder = _Builder(fused, name)
    for block in fused.module["main"].body.blocks:
        for binding in block.bindings:
            builder.add(binding)
    tasks = {task.hash: task for task in builder.tasks.values() if task is not None}
    return NetworkTasks(network_graph(name, builder.nodes, meta={"source": "relax"}), tasks)


class _Builder:
    """Collects nodes while walking ``main``."""

    def __init__(self, fused: FusedNetwork, network: str) -> None:
        from tvm import relax

        self._relax = relax
        self._fused, self._network = fused, network
        self._calls, self._used = Counter(fused.calls), Counter[str]()
        # Relax names variables more than once: they are told apart by the object's address, which hash() gives.
        self._made_by: dict[int, tuple[str, ...]] = {}
        self.nodes: list[GraphNode] = []
        self.tasks: dict[str, Task | None] = {}

    def add(self, binding: Any) -> None:
        value, key = binding.value, hash(binding.var)
        if isinstance(value, self._relax.Call):
            operator, arguments, kind, tasks = self._called(value)
        elif isinstance(value, self._relax.If):
            operator, arguments, kind, tasks = "if", value.cond, "unknown", ()
        else:
            self._made_by[key] = self._sources(value)
            return
        self._used[operator] += 1
        number = self._used[operator]
        node = GraphNode(
            name=operator if number == 1 else f"{operator}#{number}",
            tasks=tasks,
            inputs=self._sources(arguments),
            operator=operator,
            kind=kind,
            output_shape=_shape(binding.var),
        )
        self.nodes.append(node)
        self._made_by[key] = (node.name,)

    def _called(self, call: Any) -> tuple[str, Any, str, tuple[str, ...]]:
        """Name, arguments, kind and tasks of a call."""
        operator = str(getattr(call.op, "name", "?"))
        if operator.startswith("relax.call_tir"):
            function = str(call.args[0].name_hint)
            task = self._task(function)
            return function, call.args[1], *(("unknown", ()) if task is None else ("kernel", (task.hash,)))
        if operator == "relax.call_dps_packed":
            return str(call.args[0].global_symbol), call.args[1], "unknown", ()
        return operator, self._relax.Tuple(list(call.args)), "view" if operator in VIEWS else "unknown", ()

    def _task(self, function: str) -> Task | None:
        if function not in self.tasks:
            weight = {self._network: float(self._calls[function])}
            try:
                self.tasks[function] = task_from_prim_func(self._fused.module[function], function, weight)
            except ProgramError as err:
                logger.info("%s: not predicted: %s", self._network, err)
                self.tasks[function] = None
        return self.tasks[function]

    def _sources(self, expr: Any) -> tuple[str, ...]:
        """Names of the nodes that an expression's variables come from, each once."""
        found: dict[str, None] = {}

        def visit(part: Any) -> None:
            if isinstance(part, self._relax.Var):
                found.update(dict.fromkeys(self._made_by.get(hash(part), ())))

        self._relax.analysis.post_order_visit(expr, visit)
        return tuple(found)


def _shape(variable: Any) -> tuple[int, ...]:
    """Extents of a tensor; () for anything else and where they are not fixed."""
    shape = getattr(variable.ty, "shape", None)
    try:
        return tuple(int(extent) for extent in shape) if shape is not None else ()
    except (TypeError, ValueError):
        return ()
