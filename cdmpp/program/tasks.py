"""Networks to tasks: the fused functions of a network, equal ones of several networks taken together."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from cdmpp.errors import NetworkError, ProgramError
from cdmpp.program.fusion import FusedNetwork, fuse
from cdmpp.program.network import Network, load_network
from cdmpp.program.tvm_env import import_tvm, normalise, quiet, structural_hash
from cdmpp.program.types import Task
from cdmpp.program.zoo import TASK_COUNTS, zoo_networks

logger = logging.getLogger(__name__)

_PACKED_CALLS = ("tirx.tvm_call_packed", "tirx.tvm_call_cpacked", "tirx.call_extern", "tirx.tvm_call_packed_lowered")

#: Called with the name of a network, its number (from 1) and the number of networks before it is imported.
Progress = Callable[[str, int, int], None]


def extract_tasks(
    networks: Iterable[Network | str], target: Any = None, progress: Progress | None = None
) -> list[Task]:
    """The tasks of networks (or of what :func:`cdmpp.program.network.load_network` takes), one per structural hash, in the
    order of first occurrence; their ``networks`` say how often each network runs them.

    ``target``: ``tvm.target.Target`` (or what its constructor takes); one llvm core if None. Functions of dynamic shape or
    without any computation are left out, with a logged reason. NetworkError, UnsupportedOpError: a network cannot be imported,
    or two different ones have the same name."""
    tvm = import_tvm()
    if target is not None and not isinstance(target, tvm.target.Target):
        target = tvm.target.Target(target)
    specs = list(networks)
    seen: dict[str, Network] = {}
    tasks: dict[str, Task] = {}
    for number, spec in enumerate(specs, start=1):
        network = load_network(spec) if isinstance(spec, str) else spec
        if progress is not None:
            progress(network.name, number, len(specs))
        if network.name in seen:
            same = network is seen[network.name] or (network == seen[network.name] and network.source != "torch")
            if not same:
                raise NetworkError(f"two different networks are called {network.name}: rename one")
            logger.warning("%s was given twice: counted once", network.name)
            continue
        seen[network.name] = network
        with quiet():
            fused = fuse(network.to_relax(), target)
        if fused.untranslated:
            names = ", ".join(sorted(set(fused.untranslated)))
            logger.warning("%s: no task stands for %s, which TVM does not translate to TIR", network.name, names)
        for task in tasks_of(fused, network.name).values():
            known = tasks.get(task.hash, task)
            tasks[task.hash] = replace(known, networks={**known.networks, **task.networks})
    return list(tasks.values())


def tasks_of(fused: FusedNetwork, network: str) -> dict[str, Task]:
    """Function that a network calls -> its task, equal ones the same, with how often the network runs it. Functions that are no
    task (see :func:`task_from_prim_func`) are left out, with a logged reason."""
    found: dict[str, Task] = {}
    weights = Counter[str]()
    for name, count in Counter(fused.calls).items():
        try:
            found[name] = task_from_prim_func(fused.module[name], name)
        except ProgramError as err:
            logger.info("%s: left out: %s", network, err)
        else:
            weights[found[name].hash] += count
    first = {task.hash: task for task in reversed(found.values())}
    tasks = {key: replace(task, networks={network: float(weights[key])}) for key, task in first.items()}
    return {name: tasks[task.hash] for name, task in found.items()}


def task_from_prim_func(func: Any, name: str = "main", networks: Mapping[str, float] | None = None) -> Task:
    """A task of one unscheduled PrimFunc (ProgramError: it has no loop, no fixed shapes, or no schedulable blocks)."""
    tvm = import_tvm()
    from tvm.s_tir.analysis import estimate_tir_flops

    func = normalise(func)
    total_bytes = 0.0
    dtype = "float32"
    for param in func.params:
        if not isinstance(param.ty, tvm.tirx.BufferType):
            raise ProgramError(f"{name} takes a scalar argument, so its work is not fixed")
        elements = 1
        for extent in param.shape:
            if not isinstance(extent, tvm.tirx.IntImm):
                raise ProgramError(f"{name} has a dynamic shape {list(param.shape)}")
            elements *= int(extent)
        dtype = str(param.dtype)
        total_bytes += elements * max(1, tvm.DataType(dtype).bits // 8)
    _check_schedulable(func, name)
    return Task(
        hash=structural_hash(func),
        name=name,
        tir_json=tvm.ir.save_json(func),
        networks=dict(networks or {}),
        flops=float(estimate_tir_flops(tvm.IRModule({"main": func}))),
        bytes=total_bytes,
        dtype=dtype,
    )


def library_task(name: str, arguments: Mapping[str, Any], networks: Mapping[str, float] | None = None) -> Task:
    """The task of a library operator; some 0.7 ms (ProgramError: no such operator, or not with these arguments)."""
    from cdmpp.program import generators, library_ops

    func = generators.build(name, arguments)
    return Task(
        hash=structural_hash(func),
        name=str(arguments["op"]) if name == "elementwise" else name,
        tir_json=generators.describe(name, arguments),
        networks=dict(networks or {}),
        flops=float(library_ops.operator_flops(name, arguments)),
        bytes=float(library_ops.operator_bytes(name, arguments)),
    )


def _check_schedulable(func: Any, name: str) -> None:
    """Raise ProgramError unless there is a loop around a block, which is what MetaSchedule works on."""
    import tvm_ffi

    tvm = import_tvm()
    from tvm.s_tir.stmt import SBlock

    def nodes_in(body: Any) -> list[Any]:
        found: list[Any] = []
        tvm_ffi.structural_walk(body, found.append, order="pre")
        return found

    nodes = nodes_in(func.body)
    for node in nodes:
        if isinstance(node, tvm.ir.Call) and str(getattr(node.op, "name", "")) in _PACKED_CALLS:
            raise ProgramError(f"{name} calls the external function {getattr(node.args[0], 'value', '?')}")
    loops = [node for node in nodes if isinstance(node, tvm.tirx.For)]
    if not loops:
        raise ProgramError(f"{name} has no loop")
    if not any(isinstance(node, SBlock) for loop in loops for node in nodes_in(loop.body)):
        raise ProgramError(f"{name} has loops inside of an opaque block only: there is nothing to schedule")


if __name__ == "__main__":  # counts the tasks of every network of the zoo, which takes minutes
    counts = {name: len(extract_tasks([name])) for name in zoo_networks()}
    TASK_COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
