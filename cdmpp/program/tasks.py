"""Networks to tasks: the fused functions of a network, equal ones of several networks taken together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.fusion import fuse
from cdmpp.program.network import Network, load_network
from cdmpp.program.tvm_env import import_tvm
from cdmpp.program.types import Task

logger = logging.getLogger(__name__)

#: Called with the name of a network, its number (from 1) and the number of networks before it is imported.
Progress = Callable[[str, int, int], None]


def extract_tasks(
    networks: Iterable[Network | str], target: Any = None, progress: Progress | None = None
) -> list[Task]:
    """The tasks of networks, in the order of first occurrence.

    Parameters
    ----------
    networks
        Networks, or what :func:`cdmpp.program.network.load_network` takes.
    target
        ``tvm.target.Target`` (or what its constructor takes); one llvm core if None.
    progress
        Called before every network.

    Returns
    -------
    list of Task
        One per structural hash; ``networks`` holds how often each network runs it. Functions of dynamic shape
        and functions without any computation are left out, with a logged reason.

    Raises
    ------
    NetworkError, UnsupportedOpError
        A network cannot be imported.
    """
    tvm = import_tvm()
    if target is not None and not isinstance(target, tvm.target.Target):
        target = tvm.target.Target(target)
    specs = list(networks)
    tasks: dict[str, Task] = {}
    for number, spec in enumerate(specs, start=1):
        if progress is not None:
            progress(spec if isinstance(spec, str) else spec.name, number, len(specs))
        network = load_network(spec) if isinstance(spec, str) else spec
        for task in _network_tasks(network, target):
            known = tasks.get(task.hash)
            if known is None:
                tasks[task.hash] = task
                continue
            weights = dict(known.networks)
            for name, weight in task.networks.items():
                weights[name] = weights.get(name, 0.0) + weight
            tasks[task.hash] = replace(known, networks=weights)
    return list(tasks.values())


def _network_tasks(network: Network, target: Any) -> list[Task]:
    module = fuse(network.to_relax(), target)
    found: dict[str, Task] = {}
    for name, count in _calls(module).items():
        func = module[name]
        try:
            task = task_from_prim_func(func, name=name, networks={network.name: float(count)})
        except ProgramError as err:
            logger.info("%s: %s is no task: %s", network.name, name, err)
            continue
        known = found.get(task.hash)
        if known is not None:
            total = known.networks[network.name] + count
            task = replace(known, networks={network.name: total})
        found[task.hash] = task
    return list(found.values())


def _calls(module: Any) -> dict[str, int]:
    """Names of the PrimFuncs that ``main`` calls, with the number of calls, in order of execution."""
    from tvm import relax

    calls: dict[str, int] = {}
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or not hasattr(value.op, "name"):
                continue
            if value.op.name.startswith("relax.call_tir"):
                name = str(value.args[0].name_hint)
                calls[name] = calls.get(name, 0) + 1
    return calls


def task_from_prim_func(func: Any, name: str = "main", networks: Mapping[str, float] | None = None) -> Task:
    """A task of one unscheduled PrimFunc.

    Raises
    ------
    ProgramError
        The function has no loop or no computation, or its shapes are not fixed.
    """
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
    if not _has_loop(func):
        raise ProgramError(f"{name} has no loop")
    return Task(
        hash=prim_func_hash(func),
        name=name,
        tir_json=tvm.ir.save_json(func),
        networks=dict(networks or {}),
        flops=float(estimate_tir_flops(tvm.IRModule({"main": func}))),
        bytes=total_bytes,
        dtype=dtype,
    )


def normalise(func: Any) -> Any:
    """The PrimFunc under the name ``main`` and without the attributes that only fusion used."""
    if "op_pattern" in func.attrs:
        func = func.without_attr("op_pattern")
    return func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)


def prim_func_hash(func: Any) -> str:
    """16 hexadecimal digits of the structural hash; names of variables and buffers do not matter."""
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(func) & 0xFFFFFFFFFFFFFFFF:016x}"


def _has_loop(func: Any) -> bool:
    import tvm_ffi

    tvm = import_tvm()
    found = False

    def visit(node: Any) -> None:
        nonlocal found
        found = found or isinstance(node, tvm.tirx.For)

    tvm_ffi.structural_walk(func.body, visit, order="pre")
    return found
