"""A whole network compiled with and without tuned schedules, and run side by side in the Relax VM.

Both modules differ in the schedules of the tasks alone. Without them LLVM compiles the loops as the operators define
them, which is what TVM does on a CPU by default.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import ProgramError, TunerError
from cdmpp.profiler.machine import make_work_folder
from cdmpp.profiler.statistics import SamplingPlan
from cdmpp.program.fusion import FusedNetwork, fuse
from cdmpp.program.tasks import task_from_prim_func
from cdmpp.program.tvm_env import import_tvm, normalise, quiet

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.network import Network
    from cdmpp.program.types import Task
    from cdmpp.tuner.network_runner import VariantLatency

logger = logging.getLogger(__name__)

#: Sampling of a variant of a network: short samples, which fit between two disturbances, for 30 s in all.
PLAN = SamplingPlan(min_sample_s=0.002, min_samples=8, max_samples=32, max_measure_s=15.0, max_wait_s=15.0)
#: Compiling and running a network may take so long.
_TIMEOUT_S = 1800.0
#: Real-time priority of the thread that looks at the core, above that of the thread that runs the network (10).
_WATCH_PRIORITY = 11
#: Spent on finding out how fast an undisturbed core is: disturbances last up to half a second.
_SETTLE_S = 2.0
#: Outputs of both modules may differ by so much, relative to the largest value: sums are taken in another order.
_SAME_OUTPUT = 1e-2


@dataclass(frozen=True)
class NetworkLatency:
    """Latency of a network's variants, run in turn; what counts is said in :mod:`cdmpp.tuner.network_runner`.

    Attributes
    ----------
    latency_s
        Name of a variant -> its label in seconds: of the whole runs on an undisturbed core where there were
        enough, else the sum over the functions it calls, each timed on an undisturbed core.
    noise
        Name -> relative split-half difference of the label; None where there are too few samples.
    disturbed
        Name -> part of the label's time during which somebody else used the core, 0 to 1.
    variants
        Name -> both figures, with a line for each call.
    output_difference
        Largest difference between outputs of the variants, relative to the largest output.
    """

    latency_s: Mapping[str, float]
    noise: Mapping[str, float | None]
    disturbed: Mapping[str, float]
    variants: Mapping[str, VariantLatency]
    output_difference: float


def network_latency(variants: Mapping[str, VariantLatency], output_difference: float) -> NetworkLatency:
    """What was measured of all variants, together."""
    return NetworkLatency(
        {name: variant.latency_s for name, variant in variants.items()},
        {name: variant.noise for name, variant in variants.items()},
        {name: variant.disturbed for name, variant in variants.items()},
        variants,
        output_difference,
    )


@dataclass(frozen=True)
class _Request:
    """What the process that runs networks needs to know."""

    modules: dict[str, str]
    data: str
    cores: tuple[int, ...]
    plan: SamplingPlan
    realtime: bool


def import_network(network: Network) -> FusedNetwork:
    """Import, legalise and fuse a network."""
    import_tvm()
    with quiet():
        return fuse(network.to_relax())


def weighted_tasks(fused: FusedNetwork, network: str) -> list[tuple[Task, float]]:
    """The distinct tasks of a network and how often it runs each.

    Raises
    ------
    TunerError
        Not one of its functions can be scheduled.
    """
    found: dict[str, tuple[Task, float]] = {}
    for name, count in Counter(fused.calls).items():
        try:
            task = task_from_prim_func(fused.module[name], name, {network: float(count)})
        except ProgramError as err:
            logger.info("%s: not tuned: %s", network, err)
            continue
        known = found.get(task.hash)
        found[task.hash] = (task, count) if known is None else (known[0], known[1] + count)
    if not found:
        raise TunerError(f"{network} has no task that can be tuned")
    return list(found.values())


def apply_database(module: Any, database: Any, target: Any) -> tuple[Any, list[str]]:
    """A fused network with the best schedules of a MetaSchedule database, and names of the functions that got one."""
    tvm = import_tvm()
    functions, tuned = {}, []
    for variable, func in module.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            workload = tvm.IRModule({"main": normalise(func)})
            best = database.query_ir_module(workload, target, variable.name_hint)
            if best is not None:
                func = best["main"].with_attr("global_symbol", variable.name_hint)
                func = func.with_attr("tirx.is_scheduled", True)
                tuned.append(variable.name_hint)
        functions[variable] = func
    changed = module.clone() if hasattr(module, "clone") else tvm.IRModule(dict(module.functions_items()))
    for variable, func in functions.items():
        changed.update_func(variable, func)
    return changed, tuned


def measure_network(
    fused: FusedNetwork,
    network: Network,
    device: Device,
    modules: Mapping[str, Any],
    cores: tuple[int, ...],
    *,
    plan: SamplingPlan = PLAN,
    realtime: bool = True,
) -> NetworkLatency:
    """Compile variants of a fused network for a device and run them in turn, in a process that owns its cores.

    Parameters
    ----------
    modules
        Name -> variant of ``fused.module``; two at least are compared with each other.
    cores
        To run on, one thread each.
    plan
        Of the samples; a variant may take ``max_measure_s + max_wait_s`` seconds, and at least four runs.

    Raises
    ------
    TunerError
        A variant does not compile, or the process died.
    """
    from cdmpp.profiler.workers import Worker
    from cdmpp.program.network import example_inputs

    tvm = import_tvm()
    target = tvm.target.Target(dict(device.target))
    shm = Path("/dev/shm")
    folder = make_work_folder(shm if shm.is_dir() else Path(tempfile.gettempdir()))
    try:
        paths = {
            name: str(_compile(module, target, folder / f"{name}.so")) for name, module in modules.items()
        }
        arrays = [*(t.numpy() for t in example_inputs(network)), *(w.numpy() for w in fused.weights)]
        np.savez(folder / "data.npz", *arrays, inputs=np.array(fused.num_inputs))
        request = _Request(paths, str(folder / "data.npz"), cores, plan, realtime)
        worker = Worker(_serve, (), "network")
        try:
            worker.submit(request, request, _TIMEOUT_S)
            if not worker.connection.poll(_TIMEOUT_S):
                raise TunerError(f"running {network.name} took over {_TIMEOUT_S:g} s")
            answer: NetworkLatency | str = worker.connection.recv()
        except EOFError as err:
            raise TunerError(f"running {network.name} failed: {worker.exit_reason()}") from err
        finally:
            worker.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(answer, str):
        raise TunerError(f"running {network.name} failed: {answer}")
    if answer.output_difference > _SAME_OUTPUT:
        logger.warning("%s: tuned and untuned outputs differ by %.2g", network.name, answer.output_difference)
    return answer


def _compile(module: Any, target: Any, path: Path) -> Path:
    tvm = import_tvm()
    from tvm import relax
    from tvm.relax.backend.cpu_generic.pipeline import dataflow_lower_passes, finalize_passes

    passes = tvm.transform.Sequential([*dataflow_lower_passes(target), *finalize_passes(target)])
    try:
        with quiet(), target, tvm.transform.PassContext(opt_level=3):
            executable = relax.build(module, target=target, relax_pipeline=passes)
            linker = {} if shutil.which("ld") is None else {"fcompile": _link}
            executable.export_library(str(path), **linker)
    except Exception as err:  # TVM reports through its own error types
        reason = (str(err).strip().splitlines() or [type(err).__name__])[-1]
        raise TunerError(f"the network does not compile: {reason[:300]}") from err
    return path


def _link(output: str, objects: Sequence[str], **_: Any) -> None:
    """Link without a compiler driver, as the profiler does."""
    subprocess.run(["ld", "-shared", "-o", output, *objects], check=True, capture_output=True, text=True)


_link.output_format = "so"  # type: ignore[attr-defined]


def _serve(connection: Connection) -> None:
    """Answer one request (runs in its own process)."""
    from cdmpp.profiler import machine

    machine.die_with_parent()
    request: _Request = connection.recv()
    machine.pin(request.cores)
    os.environ["TVM_NUM_THREADS"] = str(len(request.cores))
    os.environ["TVM_BIND_THREADS"] = "0"
    if request.realtime:
        machine.own_the_core()
    try:
        connection.send(_run(request))
    except Exception as err:  # whatever a foreign module or the runtime raises
        connection.send(f"{type(err).__name__}: {err}"[:500])


def _run(request: _Request) -> NetworkLatency:
    from cdmpp.profiler import machine
    from cdmpp.profiler.sentinel import Sentinel
    from cdmpp.tuner.network_runner import Loaded, Looks, Sampled, largest_difference, sample_in_turn

    looks = Looks(Sentinel(_SETTLE_S), alone=len(request.cores) == 1)
    networks = {name: Loaded(path, request.data) for name, path in request.modules.items()}
    if request.realtime:
        looks.watch(lambda: machine.own_the_core(_WATCH_PRIORITY))
    else:
        looks.watch()
    try:
        variants = {name: Sampled(network, looks, request.plan) for name, network in networks.items()}
        sample_in_turn(list(variants.values()))
    finally:
        looks.close()
    outputs = [network.outputs() for network in networks.values()]
    differences = [largest_difference(outputs[0], other) for other in outputs[1:]]
    return network_latency(
        {name: variant.result() for name, variant in variants.items()}, max(differences, default=0.0)
    )
