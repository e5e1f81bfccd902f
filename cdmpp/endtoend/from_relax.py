"""A fused Relax network as a graph of tasks: one node for each call, with what it waits for."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.fusion import VIEWS, FusedNetwork
from cdmpp.program.graph import GraphNode, NetworkGraph, network_graph
from cdmpp.program.tasks import task_from_prim_func
from cdmpp.program.tvm_env import import_tvm
from cdmpp.program.types import Task

logger = logging.getLogger(__name__)


def graph_of_fused(fused: FusedNetwork, name: str) -> tuple[NetworkGraph, dict[str, Task]]:
    """The graph of a fused network and its tasks by hash.

    Parameters
    ----------
    fused
        What :func:`cdmpp.program.fusion.fuse` made.
    name
        Of the network.

    Returns
    -------
    A node for every binding of ``main`` that is a call, in the order of execution, named after the function it calls (and
    numbered where that is called again). Inputs and weights are there from the start: nothing waits for them.
    Reshapes are views. Functions that are no task (see :func:`cdmpp.program.tasks.task_from_prim_func`), operators that
    did not become TIR, and branches are ``unknown``.
    """
    builder = _Builder(fused, name)
    for block in fused.module["main"].body.blocks:
        for binding in block.bindings:
            builder.add(binding)
    tasks = {task.hash: task for task in builder.tasks.values() if task is not None}
    return network_graph(name, builder.nodes, meta={"source": "relax"}), tasks


class _Builder:
    """Collects nodes while walking ``main``."""

    def __init__(self, fused: FusedNetwork, network: str) -> None:
        from tvm import relax

        import_tvm()
        self._relax = relax
        self._fused, self._network = fused, network
        self._calls = Counter(fused.calls)
        self._used: Counter[str] = Counter()
        # Relax names variables more than once: they are told apart by the object's address, which hash() gives.
        self._made_by: dict[int, tuple[str, ...]] = {}
        self.nodes: list[GraphNode] = []
        self.tasks: dict[str, Task | None] = {}

    def add(self, binding: Any) -> None:
        value, key = binding.value, hash(binding.var)
        if not isinstance(value, self._relax.Call | self._relax.If):
            self._made_by[key] = self._sources(value)
            return
        branch = isinstance(value, self._relax.If)
        operator, arguments, kind, tasks = (
            ("if", value.cond, "unknown", ()) if branch else self._called(value)
        )
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
