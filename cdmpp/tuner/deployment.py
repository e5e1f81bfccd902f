"""A whole network compiled with and without tuned schedules, and run side by side in the Relax VM.

The modules differ only in the schedules of the tasks. Without schedules LLVM compiles the loops as the operators define them.

A sample is *quiet* as in :mod:`cdmpp.profiler.cpu`: the core was undisturbed right before and after it and the thread was not
preempted. On a rented machine disturbances leave gaps of ten to a hundred milliseconds, into which a short run fits. A longer
run does not fit, but each of the functions that it calls may. So every network is measured in two ways:

* **runs**: whole runs, several per sample if one takes under ``SamplingPlan.min_sample_s``. Only runs of up to 30 ms can be
  quiet.
* **calls**: the Relax VM's instrument reports when each function begins and ends while the network runs. The shortest call of
  one of the VM's own functions is taken as the instrument's overhead and subtracted from each call. The VM's work between the
  calls, about a microsecond per function, is not counted; the caches may be colder after a wait.

Each latency is the mean of the faster half of the quiet samples, or of all samples if none is quiet. The network's label is
that of the runs if enough of them were quiet, else the sum of the calls.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.device import Device
from cdmpp.errors import TunerError
from cdmpp.profiler import machine
from cdmpp.profiler.cpu import CpuConfig
from cdmpp.profiler.engine import SamplingPlan, label, last_line, split_half_difference
from cdmpp.profiler.machine import Sentinel, Worker, WorkerDied
from cdmpp.program import import_tvm, normalise, quiet
from cdmpp.program.network import PREPARE_WEIGHTS, FusedNetwork, Network, example_inputs, fuse, tasks_of
from cdmpp.program.types import Task

logger = logging.getLogger(__name__)

#: Sampling of a variant of a network: short samples, which fit between two disturbances, for 30 s in all.
PLAN = SamplingPlan(min_sample_s=0.002, min_samples=8, max_samples=32, max_measure_s=15.0, max_wait_s=15.0)
#: Time limit for running the variants of a network.
_TIMEOUT_S = 1800.0
#: Time to find out how fast an undisturbed core is: disturbances last up to half a second.
_SETTLE_S = 2.0
#: Accepted difference between the modules' outputs, relative to the largest value: they sum in different orders.
_SAME_OUTPUT = 1e-2
#: Longer runs never count as quiet as a whole.
_SHORT_RUN_S = 0.03
#: Name prefix of the VM's own functions; all others are the network's.
_OWN = "vm.builtin."


@dataclass(frozen=True)
class CallLatency:
    """One call of a function by a network, with the function's name in the fused module."""

    name: str
    latency_s: float
    #: Fraction of disturbed samples among those used for the latency: 0 or 1.
    disturbed: float
    samples: int
    quiet_samples: int


@dataclass(frozen=True)
class VariantLatency:
    """Measurements of one compiled network."""

    latency_s: float
    #: Source of the label: ``runs`` (the quiet whole runs) or ``calls`` (the sum of `calls`).
    method: str
    #: Relative split-half difference of the label; None if there are too few samples.
    noise: float | None
    #: Fraction of the label's time that comes from disturbed samples, 0 to 1.
    disturbed: float
    #: Label of all whole runs, disturbed or not.
    plain_s: float
    #: Sum of `calls`; None if the runs did not all call the same functions in the same order.
    calls_s: float | None
    #: Number of samples of whole runs, and of the quiet ones.
    runs: int
    quiet_runs: int
    #: In the order of execution.
    calls: tuple[CallLatency, ...]


@dataclass(frozen=True)
class NetworkLatency:
    """Latencies of a network's variants, by name."""

    variants: Mapping[str, VariantLatency]
    #: Largest difference between their outputs, relative to the largest output.
    output_difference: float

    def of_each(self, name: str) -> dict[str, Any]:
        """A field of :class:`VariantLatency` by the variants' names."""
        return {variant: getattr(found, name) for variant, found in self.variants.items()}

    @property
    def latency_s(self) -> dict[str, float]:
        return self.of_each("latency_s")


def import_network(network: Network) -> FusedNetwork:
    """Import, legalise and fuse a network."""
    import_tvm()
    with quiet():
        return fuse(network.to_relax())


def weighted_tasks(fused: FusedNetwork, network: str) -> list[tuple[Task, float]]:
    """The distinct tasks of a network and how often it runs each; TunerError if none of its functions can be scheduled."""
    tasks = {task.hash: task for task in tasks_of(fused, network).values()}
    if not tasks:
        raise TunerError(f"{network} has no task that can be tuned")
    return [(task, task.networks[network]) for task in tasks.values()]


def apply_database(module: Any, database: Any, target: Any) -> tuple[Any, list[str]]:
    """A fused network with the best schedules of a MetaSchedule database, and the names of the functions that got one."""
    tvm = import_tvm()
    changed, tuned = module.clone(), []
    for variable, func in module.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            workload = tvm.IRModule({"main": normalise(func)})
            best = database.query_ir_module(workload, target, variable.name_hint)
            if best is not None:
                func = best["main"].with_attr("global_symbol", variable.name_hint)
                func = func.with_attr("tirx.is_scheduled", True)
                tuned.append(variable.name_hint)
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
    """Compile variants of a fused network (name -> module) for a device, run them in turn in a process with its own cores, and
    compare their outputs. A variant may take ``max_measure_s + max_wait_s`` seconds of the plan, and at least four runs.
    Raises TunerError if a variant does not compile, or the process died."""
    tvm = import_tvm()
    target = tvm.target.Target(dict(device.target))
    folder = CpuConfig().work_folder()
    try:
        paths = {name: _compile(module, target, folder / f"{name}.so") for name, module in modules.items()}
        arrays = [*(t.numpy() for t in example_inputs(network)), *(w.numpy() for w in fused.weights)]
        np.savez(folder / "data.npz", *arrays, inputs=np.array(fused.num_inputs))
        worker = Worker(_serve, (paths, str(folder / "data.npz"), cores, plan, realtime), "network")
        try:
            if not worker.connection.poll(_TIMEOUT_S):
                raise TunerError(f"running {network.name} took over {_TIMEOUT_S:g} s")
            answer: NetworkLatency | str = worker.receive()
        except WorkerDied as err:
            raise TunerError(f"running {network.name} failed: {err}") from err
        finally:
            worker.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(answer, str):
        raise TunerError(f"running {network.name} failed: {answer}")
    if answer.output_difference > _SAME_OUTPUT:
        logger.warning("%s: tuned and untuned outputs differ by %.2g", network.name, answer.output_difference)
    return answer


def _compile(module: Any, target: Any, path: Path) -> str:
    """Compile a network into a shared object, and return its path."""
    tvm = import_tvm()
    from tvm import relax
    from tvm.relax.backend.cpu_generic.pipeline import dataflow_lower_passes, finalize_passes

    def link(output: str, objects: Sequence[str], **_: Any) -> None:
        """Link without a compiler driver, as the profiler does."""
        subprocess.run(["ld", "-shared", "-o", output, *objects], check=True, capture_output=True, text=True)

    link.output_format = "so"  # type: ignore[attr-defined]
    passes = tvm.transform.Sequential([*dataflow_lower_passes(target), *finalize_passes(target)])
    try:
        with quiet(), target, tvm.transform.PassContext(opt_level=3):
            executable = relax.build(module, target=target, relax_pipeline=passes)
            executable.export_library(str(path), **({} if shutil.which("ld") is None else {"fcompile": link}))
    except Exception as err:  # TVM reports through its own error types
        raise TunerError(f"the network does not compile: {last_line(err)[:300]}") from err
    return str(path)


def _serve(
    connection: Connection, modules: Mapping[str, str], data: str, cores: tuple[int, ...], plan: SamplingPlan, realtime: bool
) -> None:
    """Run networks and send their latencies, or the reason why there are none (runs in its own process)."""
    machine.die_with_parent()
    machine.pin(cores)
    os.environ["TVM_NUM_THREADS"] = str(len(cores))
    os.environ["TVM_BIND_THREADS"] = "0"
    if realtime:
        machine.own_the_core()
    try:
        sentinel = Sentinel(_SETTLE_S)
        networks = {name: Loaded(path, data) for name, path in modules.items()}
        variants = {name: Sampled(network, sentinel, plan) for name, network in networks.items()}
        sample_in_turn(list(variants.values()))
        first, *others = [network.outputs() for network in networks.values()]
        difference = max((largest_difference(first, other) for other in others), default=0.0)
        connection.send(NetworkLatency({name: v.result() for name, v in variants.items()}, difference))
    except Exception as err:  # whatever a foreign module or the runtime raises
        connection.send(f"{type(err).__name__}: {err}"[:500])


#: Seconds, and whether the sample was undisturbed.
Sample = tuple[float, bool]


def _quiet(samples: Sequence[Sample]) -> list[float]:
    return [seconds for seconds, quiet in samples if quiet]


def _chosen(samples: Sequence[Sample]) -> list[float]:
    """The samples in seconds that a label is computed from: the quiet ones, or all if none is quiet."""
    return _quiet(samples) or [seconds for seconds, _ in samples]


class Sampled:
    """A compiled network (:class:`Loaded`) with its samples so far. It runs once before the first sample. `clock` returns
    seconds, `preemptions` how often the thread was preempted."""

    def __init__(
        self,
        network: Any,
        sentinel: Sentinel,
        plan: SamplingPlan,
        *,
        clock: Callable[[], float] = time.perf_counter,
        preemptions: Callable[[], int] = machine.preemptions,
    ) -> None:
        self._network, self._sentinel, self._plan = network, sentinel, plan
        self._clock, self._preemptions = clock, preemptions
        self.runs: list[Sample] = []
        self.calls: list[tuple[str, list[Sample]]] = []
        #: Whether every run calls the same functions in the same order.
        self.steady = True
        self.passes = 0
        #: Seconds of calls of the VM's own functions: the shortest is the instrument's overhead.
        self._own_s: list[float] = []
        self._spent_s = self._waited_s = 0.0
        self._limit_s = plan.max_measure_s + plan.max_wait_s
        #: Number of quiet samples that a label needs.
        self._enough = max(2, plan.min_samples // 2)
        started = clock()
        network.run()
        self._run_s = clock() - started
        self._repeats = plan.repeats(self._run_s)

    def _begin(self, patient: bool = True) -> tuple[bool, int, float]:
        """Wait for an undisturbed core, and return the mark that :meth:`_end` takes."""
        left_s = max(0.0, self._plan.max_wait_s - self._waited_s) if patient else 0.0
        calm, waited_s = self._sentinel.wait(left_s)
        self._waited_s += waited_s
        return calm, self._preemptions(), self._clock()

    def _end(self, mark: tuple[bool, int, float]) -> Sample:
        """The sample since the mark."""
        calm, preempted, began = mark
        seconds = self._clock() - began
        self._sentinel.measured(seconds)
        return seconds, calm and self._preemptions() == preempted and self._sentinel.calm()

    def sample_run(self) -> None:
        started, mark = self._clock(), self._begin()
        for _ in range(self._repeats):
            self._network.run()
        seconds, quiet = self._end(mark)
        self.runs.append((seconds / self._repeats, quiet and self._run_s <= _SHORT_RUN_S))
        self._spent_s += self._clock() - started

    def sample_calls(self) -> None:
        """One run, call by call."""
        position, depth, mark = 0, 0, (False, 0, 0.0)

        def before(name: str) -> None:
            nonlocal depth, mark
            depth += 1
            if depth > 1:  # calls within calls count once
                return
            if name.startswith(_OWN):
                mark = (False, 0, self._clock())
                return
            if position == len(self.calls):
                self.calls.append((name, []))
            mark = self._begin(patient=len(_quiet(self.calls[position][1])) < self._enough)

        def after(name: str) -> None:
            nonlocal depth, position
            depth -= 1
            if depth:
                return
            if name.startswith(_OWN):
                self._own_s.append(self._clock() - mark[2])
                return
            known, samples = self.calls[position]
            self.steady &= known == name
            samples.append(self._end(mark))
            position += 1

        started = self._clock()
        self._network.run_instrumented(before, after)
        self.steady &= position == len(self.calls)
        self.passes += 1
        self._spent_s += self._clock() - started

    @property
    def wants_runs(self) -> bool:
        """Whether another sample of whole runs is wanted; at least two are."""
        if len(self.runs) < 2:
            return True
        in_time = self._run_s <= _SHORT_RUN_S and self._spent_s < 0.5 * self._limit_s
        return in_time and self._plan.needs_more(_quiet(self.runs), 0.0)

    @property
    def wants_calls(self) -> bool:
        """Whether another run call by call is wanted: at least two, then until all calls have enough quiet samples."""
        if self.passes < 2:
            return True
        another_s = self._spent_s / (len(self.runs) + self.passes)
        in_time = self._spent_s + another_s <= self._limit_s and self.passes < 2 * self._plan.max_samples
        open_ = any(len(_quiet(samples)) < self._enough for _, samples in self.calls)
        return self.steady and in_time and (open_ or self.passes < self._plan.min_samples)

    def _call_latencies(self) -> tuple[CallLatency, ...]:
        cost_s, found = min(self._own_s, default=0.0), []
        for name, samples in self.calls if self.steady else ():
            seconds, number = max(0.0, label(_chosen(samples)) - cost_s), len(_quiet(samples))
            found.append(CallLatency(name, seconds, float(not number), len(samples), number))
        return tuple(found)

    def result(self) -> VariantLatency:
        """The label and the samples behind it."""
        calls, quiet = self._call_latencies(), len(_quiet(self.runs))
        calls_s = sum(call.latency_s for call in calls) if calls else None
        counts = (label([seconds for seconds, _ in self.runs]), calls_s, len(self.runs), quiet, calls)
        if quiet < self._enough and calls_s:
            disturbed = sum(call.latency_s * call.disturbed for call in calls) / calls_s
            several = [values for values in (_quiet(samples) for _, samples in self.calls) if len(values) > 1]
            odd, even = (sum(label(values[i::2]) for values in several) for i in (0, 1))
            noise = abs(odd - even) / ((odd + even) / 2) if several else None
            return VariantLatency(calls_s, "calls", noise, disturbed, *counts)
        chosen = _chosen(self.runs)
        return VariantLatency(label(chosen), "runs", split_half_difference(chosen), float(not quiet), *counts)


def sample_in_turn(variants: Sequence[Sampled]) -> None:
    """Sample all variants in turn (A B A B ...), so that a slow disturbance affects all of them."""
    while todo := [variant for variant in variants if variant.wants_runs]:
        for variant in todo:
            variant.sample_run()
    while todo := [variant for variant in variants if variant.wants_calls]:
        for variant in todo:
            variant.sample_calls()


class Loaded:
    """A compiled network with its inputs and prepared weights."""

    def __init__(self, path: str, data: str) -> None:
        import tvm
        from tvm import relax

        vm = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
        with np.load(data) as stored:
            number = len(stored.files) - 1
            tensors = [tvm.runtime.tensor(stored[f"arr_{i}"]) for i in range(number)]
            inputs = int(stored["inputs"])
        weights = tensors[inputs:]
        prepared = list(vm[PREPARE_WEIGHTS](tuple(weights))) if weights else []
        self._vm, self._main = vm, vm["main"]
        self._args = [*tensors[:inputs], *prepared]
        self._main(*self._args)

    def run(self) -> None:
        self._main(*self._args)

    def run_instrumented(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        """One run that calls back before and after every function, including the VM's own."""
        from tvm.relax import VMInstrumentReturnKind

        def hook(_function: Any, name: str, is_before: bool, *_: Any) -> int:
            (before if is_before else after)(name)
            return int(VMInstrumentReturnKind.NO_OP)

        self._vm.set_instrument(hook)
        try:
            self._main(*self._args)
        finally:
            self._vm.set_instrument(None)

    def outputs(self) -> list[np.ndarray]:
        result = self._main(*self._args)
        flat = [result] if hasattr(result, "numpy") else list(result)
        return [item.numpy() for item in flat if hasattr(item, "numpy")]


def largest_difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Largest difference of floating-point outputs, relative to the largest finite value."""
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        if x.dtype.kind != "f":
            continue
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            return float("inf")
        a, b = x[finite].astype(np.float64), y[finite].astype(np.float64)
        if scale := np.abs(a).max(initial=0.0):
            worst = max(worst, float(np.abs(a - b).max() / scale))
    return worst
