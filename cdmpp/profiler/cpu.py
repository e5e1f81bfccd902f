"""Measuring on CPUs: processes that own their cores and take latency samples, and a measurer that deals programs to them.

A label depends on the following state, which is fixed here:

* **Cores**: the process is pinned to its cores, with one thread of TVM's pool on each, under the real-time scheduler where the
  system allows it, so that builders on the same core wait.
* **First touch**: arguments are allocated and filled with random numbers by this process, on its cores, before the first run.
* **Caches**: warm. Each sample is one untimed run (unless one takes over 20 ms), then as many timed runs as fill
  ``SamplingPlan.min_sample_s``, half of them (at least one) with the stack 16 bytes lower.
* **Interleaving**: the samples of a batch of programs are taken in turn (A B C A B C ...), so that a slow disturbance hits all
  of them and is seen by the split-half difference.
* **Disturbance**: a sample counts if a :class:`~cdmpp.profiler.machine.Sentinel` finds the core undisturbed before and after it
  and the thread was not preempted; builders use the core while it waits. If a program gets too few such samples in its time,
  the disturbed ones are used too, and their share is reported. The time of a sentinel program before and after each batch,
  and the hypervisor's steal time, come with the results.
"""

from __future__ import annotations

import bisect
import os
import shutil
import subprocess
import tempfile
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device, get_device
from cdmpp.errors import CdmppError, ProfilerError, ProgramError, raised_as
from cdmpp.profiler import engine, machine
from cdmpp.profiler.machine import Sentinel, Worker, WorkerDied, WorkerLost, requests
from cdmpp.program import import_tvm, structural_hash
from cdmpp.program.space import Rebuilder
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.profiler.arguments import ArgSpec

#: Bytes of arguments that are kept between batches, for programs with the same signature.
_ARGUMENT_CACHE_BYTES = 2 << 30
#: A program is clearly slower than the best of its task if its fastest sample exceeds that by more than so many times the
#: noise, which is the distance to the second fastest, within bounds (labels repeat to a few per cent). For it two undisturbed
#: samples are enough.
_TIMES_NOISE, _CLEARLY_SLOWER = 3.0, (0.1, 0.25)
#: Most samples of a program, disturbed ones included, as a multiple of ``SamplingPlan.max_samples``.
_MAX_TAKEN = 2
#: Undisturbed samples to take of the sentinel program, in at most three times as many attempts.
_SENTINEL_SAMPLES = 3
#: A run of at least this length is timed from Python (2 us of overhead) without an untimed run before it: refilling the
#: caches is a negligible part of it, and the untimed run would double the cost.
_LONG_RUN_S = 0.02
#: Bytes by which the stack is lowered. The addresses of stacks, and of temporary arrays on them, differ between processes by
#: multiples of 16 bytes; at every other multiple, vectors cross cache lines. So both cases are sampled.
_STACKS = (16, 32)

#: Drift is relative to this quantile of the sentinel program's times so far, as disturbances only add time.
_BASELINE_QUANTILE = 0.1
#: A program whose samples were mostly disturbed is measured again after this time, when a neighbour may be done.
_LATER_S = 20.0
#: No program is measured again for that if it helps no more than this share of them, judged after this many.
_LATER_HELPS, _LATER_TRIALS = 0.3, 16
#: Most programs that may wait for that, as their shared objects lie in memory.
_MAX_LATER = 256
#: A folder with fewer free bytes counts as full.
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class SharedObject(engine.Built):
    """The result of building a job; ``path`` and ``args`` are set if ``status`` is ``ok``. If it was built on another machine,
    ``code`` refers to the file's content. ``counts`` are its instruction counts, if they were asked for."""

    program: str
    path: str = ""
    args: tuple[ArgSpec, ...] = ()
    best_s: float | None = None
    code: Any = field(default=None, repr=False, compare=False)
    counts: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class BatchDone:
    """Sent after a batch: how the machine behaved meanwhile. Before that, a :class:`Running` announces each program's first
    run, and an empty one announces the sampling of the batch."""

    sentinel_before_s: float
    sentinel_after_s: float
    steal_pct: float
    scheduler: str


class Arguments:
    """A cache of arguments by signature, which drops the least recently used first; `where` is a TVM device, None: this CPU."""

    def __init__(self, seed: int, where: Any = None) -> None:
        self._rng, self._where = np.random.RandomState(seed), where
        self._cache: OrderedDict[tuple[ArgSpec, ...], tuple[int, list[Any]]] = OrderedDict()

    def get(self, specs: tuple[ArgSpec, ...]) -> list[Any]:
        import tvm

        from cdmpp.profiler.arguments import random_values

        if specs in self._cache:
            self._cache.move_to_end(specs)
            return self._cache[specs][1]
        size = sum(int(np.prod(shape)) * 8 for shape, _ in specs)
        while self._cache and sum(s for s, _ in self._cache.values()) + size > _ARGUMENT_CACHE_BYTES:
            self._cache.popitem(last=False)
        arrays = [tvm.runtime.tensor(values, self._where) for values in random_values(specs, self._rng)]
        self._cache[specs] = (size, arrays)
        return arrays


class LoadedProgram:
    """A program ready to run, with its samples so far."""

    def __init__(self, built: SharedObject, arguments: Arguments, plan: engine.SamplingPlan, sentinel: Sentinel) -> None:
        self.hash, self.plan, self.sentinel = built.program, plan, sentinel
        self.best_s = built.best_s
        self.args = arguments.get(built.args)
        self.module = self.load(built.path)
        self.entry = self.module["main"]
        self.calm: list[float] = []
        self.disturbed: list[float] = []
        self.spent_s = self.waited_s = self.first_s = self.prepared_s = 0.0
        self.repeats = 1
        self._timer: Any = None

    def load(self, path: str) -> Any:
        """The TVM module of a shared object."""
        import tvm

        return tvm.runtime.load_module(path)

    def start(self) -> None:
        """Do the first run (page faults, lazy binding), then find how many runs make a sample."""
        import tvm

        run_s = self.first_s = self._run_once()
        if run_s < _LONG_RUN_S:
            run_s = self._run_once()  # warm: the first run may have taken ten times as long
        if self.plan.repeats(run_s) > 20:
            # A call from Python costs some 2 us, so short programs are timed inside the runtime.
            run_s = self.module.time_evaluator("main", tvm.cpu(0), number=10)(*self.args).mean
        self.repeats = self.plan.repeats(len(_STACKS) * run_s)
        if run_s < _LONG_RUN_S:
            timer = self.module.time_evaluator("main", tvm.cpu(0), number=self.repeats)
            self._timer = self._run_once if self.repeats == 1 else lambda: float(timer(*self.args).mean)

    def _run_once(self) -> float:
        started = time.perf_counter()
        self.entry(*self.args)
        return time.perf_counter() - started

    def _timed_s(self, lower: int) -> float:
        """Time with the stack `lower` bytes lower; without the C++ extension the stack stays where it is."""
        from cdmpp.program.ast import extension

        try:
            return extension().on_lower_stack(self._timer, lower)
        except CdmppError:
            return self._timer()

    def sample(self) -> None:
        """One sample: an untimed run, and the mean of `repeats` runs at both positions of the stack."""
        calm, waited_s = self.sentinel.wait(max(0.0, self.plan.max_wait_s - self.waited_s))
        self.waited_s += waited_s
        started, before = time.perf_counter(), machine.preemptions()
        if self.repeats == 1 and self._timer:  # TVM's timer makes its own untimed run
            self._run_once()
        value = float(np.mean([self._timed_s(size) for size in _STACKS])) if self._timer else self._run_once()
        calm = calm and machine.preemptions() == before and self.sentinel.calm()
        (self.calm if calm else self.disturbed).append(value)
        elapsed_s = time.perf_counter() - started
        self.spent_s += elapsed_s
        self.sentinel.measured(elapsed_s)

    @property
    def clearly_slower(self) -> bool:
        """Whether it is clearly slower than the best of its task, if that is known."""
        if self.best_s is None or len(self.calm) < 2:
            return False
        fastest, second = sorted(self.calm)[:2]
        least_s, most_s = (part * self.best_s for part in _CLEARLY_SLOWER)
        return fastest > self.best_s + min(most_s, max(least_s, _TIMES_NOISE * (second - fastest)))

    @property
    def wants_more(self) -> bool:
        taken = len(self.calm) + len(self.disturbed)
        if self.clearly_slower or (taken >= 2 and self.spent_s >= self.plan.max_measure_s):
            return False
        patient = self.waited_s < self.plan.max_wait_s and self.sentinel.patient
        if taken >= max(2, self.plan.min_samples // 2) and self.disturbed and not patient:
            # More disturbed samples would only keep builders from the core; the program is measured again later.
            return False
        return taken < _MAX_TAKEN * self.plan.max_samples and self.plan.needs_more(self.calm, 0.0)

    def result(self) -> tuple[tuple[float, ...], float]:
        """The samples that the label is made of, and the share of disturbed ones among them."""
        enough = 2 if self.clearly_slower else max(2, self.plan.min_samples // 2)
        if len(self.calm) >= enough or not self.disturbed:
            return tuple(self.calm), 0.0
        taken = self.calm + self.disturbed
        return tuple(taken), len(self.disturbed) / len(taken)


def measure_batch(
    batch: list[SharedObject], config: CpuConfig, load: Callable[[SharedObject], LoadedProgram]
) -> Iterator[engine.Running | engine.Measured]:
    """Measure the programs of `batch` interleaved; yields messages for the parent, results as soon as they are final."""
    loaded: list[LoadedProgram] = []
    for built in batch:
        yield engine.Running((built.program,), config.first_run_s)
        began = time.perf_counter()
        try:
            program = load(built)
            program.start()
            program.prepared_s = time.perf_counter() - began
        except Exception as err:  # whatever a foreign shared object or the runtime raises
            yield engine.Measured(built.program, "run_error", error=f"{type(err).__name__}: {err}"[:500])
            continue
        if program.first_s > config.run_timeout_s:
            error = f"one run took {program.first_s:.3g} s, over {config.run_timeout_s:g} s"
            yield engine.Measured(program.hash, "run_timeout", error=error, run_s=program.first_s)
            continue
        loaded.append(program)
    yield engine.Running((), config.sampling_s(len(batch)))
    while loaded:
        for program in loaded:
            program.sample()
        for program in [p for p in loaded if not p.wants_more]:
            loaded.remove(program)
            samples_s, disturbed = program.result()
            yield engine.Measured(
                program.hash,
                "ok",
                samples_s,
                run_s=program.prepared_s + program.spent_s,
                meta={
                    "repeats": program.repeats,
                    "retakes": len(program.disturbed),
                    "waited_s": round(program.waited_s, 3),
                    "disturbed": round(disturbed, 3),
                },
            )


def measure_worker(connection: Connection, config: CpuConfig, cores: tuple[int, ...], sentinel: SharedObject | None) -> None:
    """Measure list after list of :class:`SharedObject` on `cores`, with a thread on each (runs in its own process)."""
    machine.die_with_parent()
    machine.pin(cores)

    # TVM reads these when its thread pool starts, at the first parallel program. The pinning above replaces TVM's own binding,
    # which would bind the threads to the machine's first cores, whoever owns those.
    os.environ["TVM_NUM_THREADS"] = str(len(cores))
    os.environ["TVM_BIND_THREADS"] = "0"
    scheduler = machine.own_the_core() if config.realtime else "normal"
    import_tvm()
    arguments, watch = Arguments(0), Sentinel()

    def load(built: SharedObject) -> LoadedProgram:
        return LoadedProgram(built, arguments, config.plan, watch)

    program: LoadedProgram | None = None
    if sentinel is not None:
        program = load(sentinel)
        program.start()

    def time_sentinel() -> float:
        if program is None:
            return float("nan")
        program.calm.clear()
        program.disturbed.clear()
        program.waited_s = 0.0
        for _ in range(_SENTINEL_SAMPLES * 3):
            program.sample()
            if len(program.calm) == _SENTINEL_SAMPLES:
                break
        return float(np.median(program.calm or program.disturbed))

    batch: list[SharedObject]
    for batch in requests(connection):
        started, stolen = time.perf_counter(), machine.steal_ticks(cores)
        before_s = time_sentinel()
        for message in measure_batch(batch, config, load):
            connection.send(message)
        after_s = time_sentinel()
        elapsed = time.perf_counter() - started
        steal = (machine.steal_ticks(cores) - stolen) / 100 / len(cores) / max(elapsed, 0.01) * 100
        connection.send(BatchDone(before_s, after_s, min(steal, 100.0), scheduler))


# -- the side that builds and deals out --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CpuConfig(engine.BuildConfig):
    """How programs are built and measured on a CPU; no option may change a label by more than its noise."""

    #: Programs of one task that are sampled in turn.
    batch_size: int = 8
    #: A program whose first run takes longer is not sampled.
    run_timeout_s: float = 2.0
    #: Seconds allowed for loading a program and filling its arguments before its first run.
    loading_s: float = 10.0
    plan: engine.SamplingPlan = field(default_factory=engine.SamplingPlan)
    #: A batch during which the hypervisor took more than this share of the cores, or the sentinel program's time changed
    #: by more than this fraction, is measured once more.
    max_steal_pct: float = 2.0
    max_drift: float = 0.05
    #: A program is measured again a while later if more than this share of its samples was disturbed.
    max_disturbed: float = 0.25
    #: A program is measured at most this many times for these reasons; the fastest label counts.
    max_attempts: int = 3
    #: Ask for the real-time scheduler.
    realtime: bool = True
    #: Folder in which shared objects are kept between runs; None keeps none.
    object_cache: str | None = None
    #: Where shared objects are kept during a run; by default in a fresh folder in memory.
    work_dir: str | None = None

    @property
    def first_run_s(self) -> float:
        """Seconds that loading a program and its first run may take."""
        return self.run_timeout_s + self.loading_s

    def sampling_s(self, programs: int) -> float:
        """Seconds for the samples of a batch: each program may overrun its time by a few samples and their retakes."""
        return 10.0 + programs * (self.plan.max_wait_s + 2 * self.plan.max_measure_s + 8 * self.run_timeout_s)

    def work_folder(self) -> Path:
        """A fresh folder for shared objects (ProfilerError if it cannot be made)."""
        shm = Path("/dev/shm")
        parent = Path(self.work_dir or (shm if shm.is_dir() else tempfile.gettempdir()))
        with raised_as(ProfilerError, f"cannot make a folder for shared objects in {parent}"):
            return machine.make_work_folder(parent)


def threads_of(device: Device) -> int:
    """Cores in a CPU's share; ProfilerError if it is not this machine's, or this process may not use so many."""
    if device.kind != "cpu":
        raise ProfilerError(
            f"{device.name} is a {device.kind}: cdmpp.profiler.gpu.measure.profile_gpu measures those of this machine, "
            "cdmpp bundle and cdmpp measure those of another"
        )
    here = get_device("this-cpu")
    if device.base != here.base:
        raise ProfilerError(f"{device.name} is not this machine, which is {here.name}")
    threads = int(device.share)
    if threads != device.share or not 1 <= threads <= len(machine.usable_cores()):
        raise ProfilerError(f"{device.name}: this process may use {len(machine.usable_cores())} whole cores")
    return threads


def sentinel_job() -> engine.BuildJob:
    """The program that shows how the machine drifts. Its arithmetic is the same on every machine: an unscheduled 96x96x96
    float32 matrix product, which fits in the caches and takes some 100 us on one core, without threads."""
    tvm = import_tvm()
    from tvm import te

    n = 96
    a, b = (te.placeholder((n, n), name=name) for name in "AB")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    func = te.create_prim_func([a, b, c])
    digest = structural_hash(func)
    task = Task(digest, "sentinel_matmul", tvm.ir.save_json(func), {}, 2.0 * n**3, 3.0 * n * n * 4)
    return engine.BuildJob(Program(digest, digest, None, "", "unscheduled"), task, None)


class ObjectBuilder:
    """Compiles jobs to shared objects in a folder (None: one of its own), and counts their instructions if `cpu` is given."""

    def __init__(self, target: Mapping[str, Any], folder: Path | None, config: CpuConfig, cpu: Device | None = None) -> None:
        from cdmpp.program.codegen import ObjectCache
        from cdmpp.program.codegen.core import core_name, core_of

        folder = folder or config.work_folder()
        with (folder / f"stderr-{os.getpid()}").open("ab") as complaints:  # C++ code writes there, too
            os.dup2(complaints.fileno(), 2)
        import_tvm()
        self._target, self._folder = dict(target), folder
        self._core = None if cpu is None else core_of(core_name(cpu))
        self._cache = ObjectCache(config.object_cache, target)
        self._rebuild = Rebuilder()

    def __call__(self, job: engine.BuildJob) -> SharedObject:
        from cdmpp.profiler.arguments import argument_specs
        from cdmpp.program.codegen.compile import compile_to_shared_object
        from cdmpp.program.codegen.counts import codegen_features

        program = job.program.hash
        path = self._folder / f"{program}-{time.monotonic_ns():x}.so"
        try:
            func = self._rebuild(job.program, job.task, job.space)
            args = argument_specs(func)
            kept = self._cache.find(program)
            if kept is not None:
                shutil.copyfile(kept, path)
            else:
                compile_to_shared_object(func, self._target, path)
                self._cache.keep(program, path)
            counts = None if self._core is None else codegen_features(path, self._core)
            return SharedObject(program, str(path), args, job.best_s, counts=counts)
        except ProgramError as err:
            return SharedObject(program, status="invalid_config", error=str(err))
        except subprocess.CalledProcessError as err:
            error = f"ld: {err.stderr[-400:]}"
        except Exception as err:  # TVM reports through its own error types
            error = f"{type(err).__name__}: {engine.last_line(err)}"[:500]
        if "No space left" in error or shutil.disk_usage(self._folder).free < _FULL_BYTES:
            raise ProfilerError(
                f"no space left in {self._folder} for shared objects; what was measured is kept, "
                "free some space and go on with --resume"
            )
        return SharedObject(program, status="build_error", error=error)


@dataclass
class _Item:
    """A built program on its way through measuring."""

    job: engine.BuildJob
    built: SharedObject
    deaths: int = 0
    attempts: int = 0
    #: Results of the current attempt, and of the best one before it.
    measured: engine.Measured | None = None
    best: engine.Measured | None = None

    def settle(self) -> None:
        """Make the best attempt so far the result: an undisturbed one before a disturbed one, then the fastest."""
        tries = [m for m in (self.best, self.measured) if m is not None and m.status == "ok"]
        if tries:
            best = min(tries, key=lambda m: (m.meta.get("disturbed", 0.0) > 0, engine.label(m.samples_s)))
            self.measured = self.best = replace(best, run_s=sum(m.run_s for m in tries))


class CpuMeasurer(engine.Measurer):
    """Deals batches of programs to measuring processes that own their cores; decides what is measured again. Programs are
    compiled for the TVM target dictionary `target`; `sentinel` (:func:`sentinel_job`) is timed before and after every batch to
    see drift. Without `overlap` everything is built before anything is measured. ProfilerError on opening if there are no
    cores, or the sentinel program does not build; later, if all devices are lost."""

    config: CpuConfig

    def __init__(
        self,
        config: CpuConfig,
        target: Mapping[str, Any],
        executor: engine.Executor,
        sentinel: engine.BuildJob | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        super().__init__(config, executor)
        self._target, self._sentinel, self._overlap = target, sentinel, overlap
        self._folder: Path | None = None
        self._built: dict[str, list[_Item]] = {}
        self._batches: deque[list[_Item]] = deque()
        self._later: deque[tuple[float, _Item]] = deque()
        self._retried = self._recovered = 0
        #: Times of the sentinel program by node, in ascending order.
        self._sentinel_times_s: dict[str, list[float]] = defaultdict(list)

    def open(self, build_now: Callable[[engine.BuildJob], Any]) -> None:
        config = self.config
        self._folder = config.work_folder() if self.executor.local else None
        # Under the real-time scheduler measuring processes preempt builders anyway.
        niceness = 0 if config.realtime else 10
        self.builder = (ObjectBuilder, (self._target, self._folder, config), niceness)
        sentinel = None if self._sentinel is None else build_now(self._sentinel)
        self.workers = self.executor.measurers(measure_worker, config, sentinel)

    def close(self, *, kill: bool) -> None:
        super().close(kill=kill)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def labelled(self) -> Iterator[engine.Outcome]:
        """What is not passed on yet, with the labels of programs that wait for another measurement, which ends."""
        batches = [*self._batches, [item for _, item in self._later], *(w.load[0] for w in self.workers if w.load is not None)]
        for item in (item for batch in batches for item in batch if item.best is not None):
            item.measured = item.best
            self._finish(item)
        yield from self.outcomes

    def accepts(self, building: int) -> bool:
        built = sum(map(len, (*self._built.values(), *self._batches)))
        return not self._overlap or built < 4 * self.config.batch_size * len(self.workers)

    @property
    def waiting(self) -> bool:
        return bool(self._built or self._batches or self._later)

    def add(self, job: engine.BuildJob, built: SharedObject) -> None:
        self._built.setdefault(job.task.hash, []).append(_Item(job, built))

    def feed(self, coming: Sequence[engine.BuildJob]) -> None:
        self._form_batches(coming)
        if coming and not self._overlap:
            return
        idle = not coming and not self._batches and all(w.load is None for w in self.workers)
        while self._later and (idle or self._later[0][0] <= time.monotonic() or len(self._later) > _MAX_LATER):
            idle = False
            due = min(self.config.batch_size, len(self._later))
            self._batches.append([self._later.popleft()[1] for _ in range(due)])
        for worker in self.workers:
            if worker.load is None and self._batches:
                batch = self._batches.popleft()
                load = (batch, engine.Running())
                if not worker.submit([item.built for item in batch], load, self.config.first_run_s):
                    self._batches.appendleft(batch)

    def _form_batches(self, coming: Sequence[engine.BuildJob]) -> None:
        """Form batches of programs of one task; smaller ones only where no more programs of the task can join them."""
        size, tasks = self.config.batch_size, {job.task.hash for job in coming}
        for task, items in list(self._built.items()):
            while len(items) >= size:
                self._batches.append(items[:size])
                del items[:size]
            hungry = not self._batches and any(w.load is None for w in self.workers)
            if items and (not coming or (hungry and task not in tasks)):
                self._batches.append(items[:])
                items.clear()
            if not items:
                del self._built[task]

    def receive(self, worker: Worker) -> None:
        batch, _ = worker.load
        try:
            message: Any = worker.receive()
        except WorkerLost as err:
            self._device_lost(worker, str(err))
            return
        except WorkerDied as err:
            self._runner_died(worker, str(err))
            return
        if isinstance(message, engine.Running):
            worker.load = (batch, message)
            worker.extend(message.timeout_s)
        elif isinstance(message, BatchDone):
            self._batch_done(batch, message, worker.node)
            worker.finished()
        elif isinstance(message, engine.Measured) and message.program in (known := {i.built.program: i for i in batch}):
            known[message.program].measured = message
        else:
            self._runner_died(worker, "it sent what is no result")

    def _batch_done(self, batch: list[_Item], done: BatchDone, node: str = "") -> None:
        times_s, baseline_s = self._sentinel_times_s[node], 0.0
        if done.sentinel_before_s > 0:
            bisect.insort(times_s, done.sentinel_before_s)
            baseline_s = times_s[int(_BASELINE_QUANTILE * len(times_s))]
        config, again = self.config, []
        drift = abs(done.sentinel_after_s / done.sentinel_before_s - 1)
        disturbed = done.steal_pct > config.max_steal_pct or drift > config.max_drift
        for item in batch:
            item.attempts += 1
            item.settle()
            if item.measured is None or item.measured.status != "ok":
                self._finish(item, done, baseline_s)
                continue
            share = item.measured.meta.get("disturbed", 0.0)
            if item.attempts > 1:
                self._retried += 1
                self._recovered += share <= config.max_disturbed
            hopeful = self._retried < _LATER_TRIALS or self._recovered > _LATER_HELPS * self._retried
            if share > config.max_disturbed and item.attempts < config.max_attempts and hopeful:
                item.measured = None
                self._later.append((time.monotonic() + _LATER_S, item))
            elif disturbed and item.attempts < 2:
                item.measured = None
                again.append(item)
            else:
                self._finish(item, done, baseline_s)
        if again:
            self._batches.append(again)

    def _finish(self, item: _Item, done: BatchDone | None = None, baseline_s: float = 0.0) -> None:
        measured = item.measured
        if measured is None:
            self._batches.append([item])
            return
        Path(item.built.path).unlink(missing_ok=True)
        meta: dict[str, Any] = {"attempts": item.attempts}
        if done is not None and done.sentinel_before_s > 0:
            meta["reference_s"] = done.sentinel_before_s
            meta["drift"] = round(done.sentinel_before_s / baseline_s - 1, 4)
            meta["drift_within"] = round(done.sentinel_after_s / done.sentinel_before_s - 1, 4)
            meta["steal_pct"] = round(done.steal_pct, 2)
            meta["scheduler"] = done.scheduler
        self.finish(item.job, item.built, measured, **meta)

    def _device_lost(self, worker: Worker, reason: str) -> None:
        """Go on without the device. Programs that it was measuring are not measured elsewhere: one may be the cause."""
        batch, _ = worker.load
        worker.kill()
        self.workers.remove(worker)
        for item in batch:
            item.measured = item.measured or item.best
            if item.measured is not None:
                self._finish(item)
            else:
                self.fail(item.job, "device_lost", reason, node=worker.node)
        if not self.workers:
            raise ProfilerError(f"no device is left to measure on: {reason}; what was measured is kept (--resume)")

    def _runner_died(self, worker: Worker, reason: str) -> None:
        """Find out which program of the batch ended the process: those without a result are measured again, each alone."""
        batch, _ = worker.load
        worker.replace()
        for item in batch:
            item.measured = item.measured or item.best
            if item.measured is not None:
                self._finish(item)
                continue
            item.deaths += 1
            if item.deaths >= 2:
                error = f"the measuring process died with it twice, last {reason}"
                item.measured = engine.Measured(item.built.program, "run_error", error=error)
                self._finish(item)
            else:
                self._batches.append([item])

    def overdue(self, worker: Worker) -> None:
        batch, running = worker.load
        slow = next((i for i in batch if i.built.program in running.programs and i.measured is None), None)
        if slow is None:
            self._runner_died(worker, "sampling took too long")
            return
        worker.replace()
        error, spent_s = f"one run took over {self.config.run_timeout_s:g} s", self.config.first_run_s
        slow.measured = slow.best or engine.Measured(slow.built.program, "run_timeout", error=error, run_s=spent_s)
        for item in batch:
            if item.measured is not None:
                self._finish(item)
        rest = [item for item in batch if item.measured is None]
        if rest:
            self._batches.append(rest)
