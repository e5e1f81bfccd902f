"""Where a network's graph and tasks come from: a network that is imported here, or a graph file of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.errors import DatasetError, NetworkError
from cdmpp.program.graph import FOLDER, NetworkGraph, load_graph

if TYPE_CHECKING:
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task


@dataclass(frozen=True)
class NetworkTasks:
    """A graph and the tasks that it runs.

    Attributes
    ----------
    graph
        Of the network; one task at least.
    tasks
        Hash -> task, those that the graph runs.
    library
        Whether a vendor library runs the tasks, so that there are no schedules to choose from.
    """

    graph: NetworkGraph
    tasks: Mapping[str, Task]
    library: bool = False

    def __post_init__(self) -> None:
        if not self.graph.task_weights():
            raise NetworkError(f"network {self.graph.name} has no task: there is nothing to predict")


def network_tasks(
    network: Network | NetworkTasks | str | Path, data: str | Path | None = None
) -> NetworkTasks:
    """The graph and the tasks of a network.

    Parameters
    ----------
    network
        A zoo name, an ``.onnx`` or ``.pt2`` file, a Network, or a graph file (``.json``) of an imported trace.
    data
        The dataset that holds the tasks of a graph file; None for the one whose ``networks/`` the file lies in.

    Raises
    ------
    NetworkError
        It cannot be found or imported, its nodes wait for each other, or it has no task.
    DatasetError
        There is no dataset with the tasks of a graph file.
    """
    from cdmpp.program.network import load_network

    if isinstance(network, NetworkTasks):
        return network
    if isinstance(network, str | Path):
        if Path(network).suffix.lower() == ".json":
            return _of_file(Path(network), data)
        network = load_network(network)
    return _of_network(network)


def _of_network(network: Network) -> NetworkTasks:
    from cdmpp.endtoend.from_relax import graph_of_fused
    from cdmpp.program.fusion import fuse
    from cdmpp.program.tvm_env import import_tvm, quiet

    import_tvm()
    with quiet():
        fused = fuse(network.to_relax())
    return NetworkTasks(*graph_of_fused(fused, network.name))


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
        raise DatasetError(
            f"{folder} lacks {len(missing)} tasks of network {graph.name}, such as {missing[0]}"
        )
    return NetworkTasks(graph, {task: known[task] for task in wanted}, library=True)
