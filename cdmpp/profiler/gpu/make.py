"""Making a bundle: networks and a device in, one file out; resumable until the file is written.

While it is made, ``FILE.building/`` holds a dataset without records and a journal of what was built.
"""

from __future__ import annotations

import base64
import logging
import os
import shutil
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.dataset import Dataset
from cdmpp.dataset.journal import JournalWriter, read_journal
from cdmpp.errors import BundleError, ProfilerError
from cdmpp.profiler.cuda_program import CudaProgram
from cdmpp.profiler.cuda_tasks import network_tasks
from cdmpp.profiler.gpu.build import BuiltProgram, Compiling, TaskDone, TaskJob, bundle_worker
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, Reference, write_bundle
from cdmpp.profiler.pool import Worker, ready

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.types import Program, Task

logger = logging.getLogger(__name__)

#: Shares whose facts go along, so that the measuring machine needs no device table.
SHARES: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
#: Programs of a task before the next task's turn.
_CHUNK = 16
#: Parents of mutants: the fastest of the task.
_ELITE = 6


@dataclass(frozen=True)
class BundleConfig:
    """Options of :func:`make_bundle`.

    Attributes
    ----------
    programs_per_task
        Programs that can run, of each task; fewer where its spaces hold no more or `task_seconds` pass.
    invalid_per_task
        Programs that the device's limits exclude, kept as records.
    build_timeout_s
        CPU seconds of lowering and compiling one program.
    reference_flops
        Tasks of at most so many operations come with a reference output (run on the CPU, unscheduled).
    cubins, sources
        What is kept of the code: at least one of them.
    """

    programs_per_task: int = 16
    invalid_per_task: int = 2
    builders: int | None = None
    build_timeout_s: float = 30.0
    task_seconds: float = 120.0
    reference_flops: float = 3e8
    cubins: bool = True
    sources: bool = True
    seed: int = 0


@dataclass(frozen=True)
class BundleProgress:
    """Where the making of a bundle stands."""

    done: int
    total: int
    statuses: dict[str, int]


@dataclass(frozen=True)
class BundleReport:
    """What a bundle holds; ``statuses`` counts its programs."""

    path: Path
    device: str
    compiler: str
    tasks: int
    references: int
    statuses: dict[str, int]
    bytes: int


class _Store:
    """What was built so far: a dataset for the programs, a journal for their code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = Dataset.open_or_create(folder / "programs")
        self.kernels: dict[str, BundledProgram] = {}
        self.references: dict[str, Reference] = {}
        #: Tasks whose spaces hold no more.
        self.spent: set[str] = set()
        for line in read_journal(folder / "kernels.jsonl").values:
            self._take(line)
        self._journal = JournalWriter(folder / "kernels.jsonl")

    def _take(self, line: dict[str, Any]) -> None:
        if "reference" in line:
            outputs = {int(n): np.array(v, np.float32) for n, v in line["outputs"].items()}
            means = {int(n): float(v) for n, v in line["means"].items()}
            self.references[line["reference"]] = Reference(line["reference"], line["seed"], outputs, means)
        elif "spent" in line:
            self.spent.add(line["spent"])
        else:
            code = line["code"]
            cuda = None
            if code is not None:
                cuda = CudaProgram.from_json(code, _unpacked(line["source"]).decode())
            self.kernels[line["program"]] = BundledProgram(
                line["program"],
                line["status"],
                line["error"],
                cuda,
                _unpacked(line["cubin"]),
                line["resources"],
                line["build_s"],
            )

    def add(self, built: BuiltProgram, task: Task) -> None:
        self.dataset.add_task(task)
        self.dataset.add_space(built.space)
        self.dataset.add_program(built.program)
        kernel = built.kernel
        line = {
            "program": kernel.program,
            "status": kernel.status,
            "error": kernel.error,
            "code": None if kernel.cuda is None else kernel.cuda.to_json(),
            "source": _packed(b"" if kernel.cuda is None else kernel.cuda.source.encode()),
            "cubin": _packed(kernel.cubin),
            "resources": {name: dict(r) for name, r in kernel.resources.items()},
            "build_s": round(kernel.build_s, 4),
        }
        self._journal.append(line)
        self._take(line)

    def add_reference(self, reference: Reference) -> None:
        line = {
            "reference": reference.task,
            "seed": reference.seed,
            # As text, because a sum may overflow to infinity, which JSON lacks.
            "outputs": {str(n): [str(x) for x in v] for n, v in reference.outputs.items()},
            "means": {str(n): str(v) for n, v in reference.means.items()},
        }
        self._journal.append(line)
        self._take(line)

    def exhaust(self, task: str) -> None:
        self._journal.append({"spent": task})
        self.spent.add(task)

    def ready_programs(self) -> Counter[str]:
        """Programs that can run by task."""
        programs = self.dataset.programs
        return Counter(programs[h].task_hash for h, k in self.kernels.items() if k.status == "ok")

    def known(self, task: str) -> frozenset[str]:
        return frozenset(h for h, p in self.dataset.programs.items() if p.task_hash == task)

    def close(self) -> None:
        self._journal.close()
        self.dataset.close()


def _packed(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def make_bundle(
    networks: Sequence[str],
    *,
    device: str | Device,
    out: str | Path,
    config: BundleConfig | None = None,
    tasks_of: str | Path | None = None,
    mutants_of: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[BundleProgress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> BundleReport:
    """Compile programs of networks for a GPU that is elsewhere.

    Parameters
    ----------
    networks
        Zoo names, ``.onnx`` or ``.pt2`` files.
    device
        A CUDA device of the table, such as ``h200``.
    tasks_of
        Take the tasks of these networks from a dataset that has them.
    mutants_of
        A dataset measured on this device: draw mutants of each task's fastest programs in place of random points (the
        region that a tuner visits).
    resume
        Go on with a bundle that was not finished.

    Raises
    ------
    ProfilerError
        The device is no CUDA device, there is no compiler for it, or no task.
    BundleError
        The file exists or is half made and `resume` was not asked for.
    """
    from cdmpp.device import get_device
    from cdmpp.profiler.gpu.compile import find_compiler
    from cdmpp.profiler.gpu.limits import arch_limits

    config = config or BundleConfig()
    say = notify or (lambda line: logger.info("%s", line))
    target_device = get_device(device) if isinstance(device, str) else device
    arch = str(target_device.target.get("arch", ""))
    if target_device.kind != "gpu" or not arch.startswith("sm_"):
        raise ProfilerError(f"{target_device.name} is no CUDA device: bundles are for those")
    if not (config.cubins or config.sources):
        raise ProfilerError("a bundle needs sources or cubins")
    arch_limits(arch)
    compiler = find_compiler(arch, config.build_timeout_s).name
    out = Path(out)
    folder = out.with_name(f"{out.name}.building")
    if out.exists():
        raise BundleError(f"{out} exists: choose another file")
    if folder.exists() and not resume:
        raise BundleError(f"{out} is half made: go on with --resume, or remove {folder}")
    tasks, families = network_tasks(networks, tasks_of, say)
    parents = {} if mutants_of is None else _elites(mutants_of, target_device.base)
    if mutants_of is not None:
        tasks = [t for t in tasks if t.hash in parents]
        if not tasks:
            raise ProfilerError(
                f"{mutants_of} has no measured program of these tasks on {target_device.name}"
            )
    store = _Store(folder)
    try:
        _build_all(tasks, parents, target_device, arch, config, store, progress)
        bundle = _bundle(store, target_device, arch, compiler, config, families)
    finally:
        store.close()
    write_bundle(out, bundle)
    shutil.rmtree(folder)
    statuses = Counter(k.status for k in bundle.kernels)
    return BundleReport(
        out,
        target_device.name,
        compiler,
        len(bundle.tasks),
        len(bundle.references),
        dict(statuses),
        out.stat().st_size,
    )


def _build_all(
    tasks: Sequence[Task],
    parents: dict[str, tuple[Program, ...]],
    device: Device,
    arch: str,
    config: BundleConfig,
    store: _Store,
    progress: Callable[[BundleProgress], None] | None,
) -> None:
    """Keep the builders busy with rounds over the tasks."""
    args = (dict(device.target), arch, 10)
    count = config.builders or len(os.sched_getaffinity(0))
    workers = [Worker(bundle_worker, args, f"bundler-{i}") for i in range(count)]
    total = config.programs_per_task * len(tasks)
    rounds = range(_CHUNK, config.programs_per_task + _CHUNK, _CHUNK)
    queue = deque((task, min(wanted, config.programs_per_task)) for wanted in rounds for task in tasks)
    building: dict[str, Compiling] = {}
    have = store.ready_programs()
    broken: Counter[str] = Counter()
    at_work: set[str] = set()

    def job_of(task: Task, wanted: int) -> TaskJob | None:
        if task.hash in store.spent or have[task.hash] >= wanted:
            return None
        known = store.known(task.hash)
        invalid = sum(store.kernels[h].status == "invalid_config" for h in known if h in store.kernels)
        return TaskJob(
            task,
            wanted - have[task.hash],
            known,
            parents.get(task.hash, ()),
            max(0, config.invalid_per_task - invalid),
            config.task_seconds,
            config.reference_flops,
            config.seed,
        )

    try:
        while queue or any(w.load is not None for w in workers):
            for worker in workers:
                while worker.load is None and queue and queue[0][0].hash not in at_work:
                    task, wanted = queue.popleft()
                    job = job_of(task, wanted)
                    if job is not None:
                        if worker.submit(job, (task, wanted), config.task_seconds, of_cpu_time=True):
                            at_work.add(task.hash)
                        else:
                            queue.appendleft((task, wanted))
            for worker in ready(workers, 0.5):
                task, wanted = worker.load
                try:
                    said = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    _gave_up(
                        worker, store, building, broken, queue, f"the builder died ({worker.exit_reason()})"
                    )
                    at_work.discard(task.hash)
                    continue
                worker.extend(config.build_timeout_s, of_cpu_time=True)
                if isinstance(said, Compiling):
                    building[worker.name] = said
                elif isinstance(said, BuiltProgram):
                    store.add(said, task)
                    have[task.hash] += said.kernel.status == "ok"
                    if progress is not None:
                        statuses = Counter(k.status for k in store.kernels.values())
                        progress(BundleProgress(sum(have.values()), total, dict(statuses)))
                elif isinstance(said, TaskDone):
                    worker.finished()
                    at_work.discard(task.hash)
                    if said.error:
                        logger.warning("%s", said.error)
                    if said.reference is not None and task.hash in {
                        p.task_hash for p in store.dataset.programs.values()
                    }:
                        store.add_reference(said.reference)
                    if have[task.hash] < wanted:
                        store.exhaust(task.hash)
            for worker in workers:
                if worker.load is not None and worker.overdue():
                    task, wanted = worker.load
                    late = f"over {config.build_timeout_s:g} s"
                    _gave_up(worker, store, building, broken, queue, late, status="build_timeout")
                    at_work.discard(task.hash)
    finally:
        for worker in workers:
            worker.kill()


def _gave_up(
    worker: Worker,
    store: _Store,
    building: dict[str, Compiling],
    broken: Counter[str],
    queue: deque[tuple[Task, int]],
    why: str,
    status: str = "build_error",
) -> None:
    """A builder died or took too long: that is one program's fault if it was compiling; the task goes on."""
    task, wanted = worker.load
    compiling = building.pop(worker.name, None)
    worker.replace()
    broken[task.hash] += 1
    if compiling is not None and compiling.program is not None and compiling.space is not None:
        kernel = BundledProgram(compiling.program.hash, status, why)
        store.add(BuiltProgram(compiling.program, compiling.space, kernel), task)
    if broken[task.hash] > 3:
        logger.warning(
            "task %s (%s): given up after %d broken builds", task.name, task.hash, broken[task.hash]
        )
        store.exhaust(task.hash)
    else:
        queue.appendleft((task, wanted))


def _elites(path: str | Path, base: str) -> dict[str, tuple[Program, ...]]:
    """Task -> its fastest programs on the device, whatever the share."""
    dataset = Dataset.open(path)
    frame = dataset.records
    frame = frame[(frame["status"] == "ok") & [d.split("@")[0] == base for d in frame["device"]]]
    fastest = frame.sort_values("latency_s").drop_duplicates("program").groupby("task")
    return {
        str(task): tuple(dataset.programs[h] for h in part["program"].head(_ELITE)) for task, part in fastest
    }


def _bundle(
    store: _Store,
    device: Device,
    arch: str,
    compiler: str,
    config: BundleConfig,
    families: dict[str, str],
) -> Bundle:
    from cdmpp.device import get_device

    programs = dict(store.dataset.programs)
    if not any(k.status == "ok" for k in store.kernels.values()):
        raise ProfilerError("not one program could be built")
    order = sorted(store.kernels, key=lambda h: (programs[h].task_hash, h))
    shares = [get_device(f"{device.base}@{share:g}") for share in SHARES]
    note = {
        "device": device.name,
        "arch": arch,
        "compiler": compiler,
        "devices": {d.name: d.to_json() for d in (device, *shares)},
        "network_families": families,
        "made_at": time.time(),
        "versions": {p: metadata.version(p) for p in ("cdmpp", "apache-tvm", "apache-tvm-ffi", "numpy")},
        "config": asdict(config),
    }
    return Bundle(
        note,
        dict(store.dataset.tasks),
        dict(store.dataset.spaces),
        programs,
        [_kept(store.kernels[h], config) for h in order],
        dict(store.references),
    )


def _kept(kernel: BundledProgram, config: BundleConfig) -> BundledProgram:
    from dataclasses import replace

    if not config.cubins:
        kernel = replace(kernel, cubin=b"")
    if not config.sources and kernel.cuda is not None:
        kernel = replace(kernel, cuda=replace(kernel.cuda, source=""))
    return kernel
