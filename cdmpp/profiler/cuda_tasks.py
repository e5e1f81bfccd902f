"""The tasks of networks, imported or from a dataset that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cdmpp.errors import ProfilerError
from cdmpp.program.types import Task


def network_tasks(
    networks: Sequence[str], tasks_of: str | Path | None, say: Callable[[str], None]
) -> tuple[list[Task], dict[str, str]]:
    """Tasks of networks, and the networks' families.

    Parameters
    ----------
    networks
        Zoo names, ``.onnx`` or ``.pt2`` files.
    tasks_of
        A dataset that has the tasks (importing the zoo takes minutes); None to import.
    say
        Is told what goes on.

    Raises
    ------
    NetworkError
        A network is unknown or cannot be imported.
    ProfilerError
        There is no task.
    """
    from cdmpp.dataset import Dataset
    from cdmpp.program.network import load_network
    from cdmpp.program.tasks import extract_tasks

    loaded = [load_network(n) for n in networks]
    if tasks_of is not None:
        names = {n.name for n in loaded}
        tasks = [t for t in Dataset.open(tasks_of).tasks.values() if names & set(t.networks)]
    else:
        tasks = extract_tasks(loaded, progress=lambda name, i, n: say(f"importing {name} ({i}/{n})"))
    if not tasks:
        raise ProfilerError("no task of these networks")
    say(f"{len(tasks)} tasks of {len(loaded)} networks")
    return tasks, {n.name: n.family for n in loaded}
