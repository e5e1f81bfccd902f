"""Making a bundle: networks and a device in, one file out; resumable until the file is written.

While it is made, ``FILE.building/`` holds a dataset without records and a journal of what was built.
"""

from __future__ import annotations

import base64
import logging
import shutil
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.dataset import Dataset
from cdmpp.dataset.journal import JournalWriter, read_journal
from cdmpp.device import Device, get_device
from cdmpp.errors import BundleError, ProfilerError
from cdmpp.profiler.engine import BuildConfig, BuildJob, BuildOnly, Engine, Outcome
from cdmpp.profiler.gpu.build import DrawJob, ReferenceJob, kernel_builder
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, CudaProgram, Reference, write_bundle
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.limits import arch_limits
from cdmpp.profiler.plan import CHUNK, ELITE, network_tasks, seed_of
from cdmpp.profiler.session import Progress
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

#: Shares whose specifications go along, so that the measuring machine needs no device table.
SHARES: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
#: Candidates drawn at a time.
_DRAWN = 16
#: Candidates that are lowered at most for each one that can run.
_MAX_TRIES = 60
#: Builders that die or take too long over one task before it is given up.
_MAX_BROKEN = 3


@dataclass(frozen=True, kw_only=True)
class BundleConfig(BuildConfig):
    """Options of :func:`make_bundle`.

    Attributes
    ----------
    programs_per_task
        Programs that can run, of each task; fewer where its spaces hold no more or `task_seconds` pass.
    invalid_per_task
        Programs that the device's limits exclude, kept as records.
    task_seconds
        Spent by builders on 16 programs of a task.
    reference_flops
        Tasks of at most so many operations come with a reference output (run on the CPU, unscheduled).
    cubins, sources
        What is kept of the code: at least one of them.
    """

    build_timeout_s: float = 30.0
    programs_per_task: int = 16
    invalid_per_task: int = 2
    task_seconds: float = 120.0
    reference_flops: float = 3e8
    cubins: bool = True
    sources: bool = True
    seed: int = 0


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
        self.dataset = Dataset.open_or_create(folder / "programs")
        self.kernels: dict[str, BundledProgram] = {}
        self.references: dict[str, Reference] = {}
        #: Task -> programs by status.
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        #: Tasks whose spaces hold no more.
        self.exhausted: set[str] = set()
        for line in read_journal(folder / "kernels.jsonl").values:
            self._take(line)
        self._journal = JournalWriter(folder / "kernels.jsonl")

    def _take(self, line: dict[str, Any]) -> None:
        if "reference" in line:
            outputs = {int(n): np.array(v, np.float32) for n, v in line["outputs"].items()}
            means = {int(n): float(v) for n, v in line["means"].items()}
            self.references[line["reference"]] = Reference(line["reference"], line["seed"], outputs, means)
        elif "spent" in line:
            self.exhausted.add(line["spent"])
        else:
            code, source, cubin = (
                line.pop("code"),
                _unpacked(line.pop("source")),
                _unpacked(line.pop("cubin")),
            )
            cuda = None if code is None else CudaProgram.from_json(code, source.decode())
            kernel = BundledProgram(cuda=cuda, cubin=cubin, **line)
            self.kernels[kernel.program] = kernel
            self.statuses[self.dataset.programs[kernel.program].task_hash][kernel.status] += 1

    def _add(self, line: dict[str, Any]) -> None:
        self._journal.append(line)
        self._take(line)

    def add(self, task: Task, program: Program, space: Space, kernel: BundledProgram) -> None:
        self.dataset.add_task(task)
        self.dataset.add_space(space)
        self.dataset.add_program(program)
        self._add(
            {
                "program": kernel.program,
                "status": kernel.status,
                "error": kernel.error,
                "code": None if kernel.cuda is None else kernel.cuda.to_json(),
                "source": _packed(b"" if kernel.cuda is None else kernel.cuda.source.encode()),
                "cubin": _packed(kernel.cubin),
                "resources": {name: dict(r) for name, r in kernel.resources.items()},
                "build_s": round(kernel.build_s, 4),
            }
        )

    def add_reference(self, reference: Reference) -> None:
        self._add(
            {
                "reference": reference.task,
                "seed": reference.seed,
                # As text, because a sum may overflow to infinity, which JSON lacks.
                "outputs": {str(n): [str(x) for x in v] for n, v in reference.outputs.items()},
                "means": {str(n): str(v) for n, v in reference.means.items()},
            }
        )

    def exhaust(self, task: str) -> None:
        self._add({"spent": task})

    def close(self) -> None:
        self._journal.close()
        self.dataset.close()


def _packed(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


class _BundlePlan:
    """Programs that can run, in rounds over the tasks: candidates are drawn (and lowered) by builders, then compiled."""

    def __init__(
        self,
        tasks: Sequence[Task],
        parents: Mapping[str, tuple[Program, ...]],
        config: BundleConfig,
        store: _Store,
    ) -> None:
        self._tasks, self._parents, self._config, self._store = tasks, parents, config, store
        self._seen: dict[str, set[str]] = defaultdict(set)
        for program in store.dataset.programs.values():
            self._seen[program.task_hash].add(program.hash)
        self._candidates: dict[str, deque[tuple[Program, Space]]] = defaultdict(deque)
        self._references: list[ReferenceJob] = []
        self._drawing: set[str] = set()
        self._compiling: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def done(self) -> int:
        """Programs that can run so far."""
        return sum(self._store.statuses[task.hash]["ok"] for task in self._tasks)

    @property
    def total(self) -> int:
        return self._config.programs_per_task * len(self._tasks)

    def jobs(self) -> Iterator[BuildJob | DrawJob | ReferenceJob | None]:
        rounds = range(CHUNK, self._config.programs_per_task + CHUNK, CHUNK)
        for number, wanted in enumerate(rounds, 1):
            wanted = min(wanted, self._config.programs_per_task)
            unfinished = list(self._tasks)
            while unfinished:
                jobs = [job for task in unfinished for job in self._next(task, wanted, number)]
                yield from self._take_references()
                yield from jobs
                unfinished = [task for task in unfinished if self._more(task.hash, wanted)]
                if unfinished and not jobs:
                    yield None
        yield from self._take_references()

    def _take_references(self) -> list[ReferenceJob]:
        jobs, self._references = self._references, []
        return jobs

    def _more(self, task: str, wanted: int) -> bool:
        if task in self._drawing or self._compiling[task]:
            return True
        left = bool(self._candidates[task]) or task not in self._store.exhausted
        return left and self._store.statuses[task]["ok"] < wanted

    def _next(self, task: Task, wanted: int, number: int) -> Iterator[BuildJob | DrawJob]:
        key, config = task.hash, self._config
        need = wanted - self._store.statuses[key]["ok"] - self._compiling[key]
        candidates = self._candidates[key]
        while need > 0 and candidates:
            program, space = candidates.popleft()
            self._compiling[key] += 1
            need -= 1
            yield BuildJob(program, task, space)
        if need <= 0 or key in self._drawing or key in self._store.exhausted:
            return
        if self._tries[key] >= _MAX_TRIES * wanted or self._seconds[key] > number * config.task_seconds:
            self._store.exhaust(key)
            return
        self._drawing.add(key)
        seen = self._seen[key]
        seed = seed_of(config.seed, key, len(seen), self._broken[key])
        yield DrawJob(task, _DRAWN, seed, frozenset(seen), self._parents.get(key, ()))

    def take(self, outcome: Outcome) -> None:
        """Keep an outcome; the first program of a task asks for a reference."""
        job, store = outcome.job, self._store
        key = job.task.hash
        self._seconds[key] += outcome.meta.get("build_s", 0.0)
        if isinstance(job, ReferenceJob):
            if outcome.built is not None:
                store.add_reference(outcome.built.reference)
            return
        if outcome.built is None:  # the builder died, or took too long
            self._broken[key] += 1
            if self._broken[key] > _MAX_BROKEN:
                logger.warning(
                    "task %s (%s): given up after %d broken builds", job.task.name, key, _MAX_BROKEN + 1
                )
                store.exhaust(key)
        if isinstance(job, DrawJob):
            self._drawing.discard(key)
            self._take_drawn(job.task, outcome)
            return
        self._compiling[key] -= 1
        kernel = outcome.built or BundledProgram(job.program.hash, outcome.status, outcome.error)
        store.add(job.task, job.program, job.space, kernel)
        cuda: CudaProgram | None = kernel.cuda
        small = job.task.flops <= self._config.reference_flops
        if cuda is not None and store.statuses[key]["ok"] == 1 and small:
            self._references.append(ReferenceJob(job.task, cuda.params, cuda.outputs, self._config.seed))

    def _take_drawn(self, task: Task, outcome: Outcome) -> None:
        drawn, store = outcome.built, self._store
        if drawn is None:
            return
        if drawn.error:
            logger.warning("%s", drawn.error)
        if not drawn.candidates and not drawn.excluded:
            store.exhaust(task.hash)
        for program, space, kernel in drawn.excluded:
            self._seen[task.hash].add(program.hash)
            if store.statuses[task.hash]["invalid_config"] < self._config.invalid_per_task:
                store.add(task, program, space, kernel)
        for program, space in drawn.candidates:
            self._seen[task.hash].add(program.hash)
            self._candidates[task.hash].append((program, space))
        self._tries[task.hash] += len(drawn.candidates) + len(drawn.excluded)


def make_bundle(
    networks: Sequence[str],
    *,
    device: str | Device,
    out: str | Path,
    config: BundleConfig | None = None,
    tasks_of: str | Path | None = None,
    mutants_of: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
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
    progress
        Called after each program; ``done`` of ``total`` are those that can run.

    Raises
    ------
    ProfilerError
        The device is no CUDA device, there is no compiler for it, or no task.
    BundleError
        The file exists or is half made and `resume` was not asked for.
    """
    config = config or BundleConfig()
    say = notify or (lambda line: logger.info("%s", line))
    device = get_device(device) if isinstance(device, str) else device
    arch = str(device.target.get("arch", ""))
    if device.kind != "gpu" or not arch.startswith("sm_"):
        raise ProfilerError(f"{device.name} is no CUDA device: bundles are for those")
    if not (config.cubins or config.sources):
        raise ProfilerError("a bundle needs sources or cubins")
    arch_limits(arch)
    compiler = find_compiler(arch).name
    out = Path(out)
    folder = out.with_name(f"{out.name}.building")
    if out.exists():
        raise BundleError(f"{out} exists: choose another file")
    if folder.exists() and not resume:
        raise BundleError(f"{out} is half made: go on with --resume, or remove {folder}")
    tasks, families = network_tasks(networks, say, tasks_of=tasks_of)
    parents = {} if mutants_of is None else _fastest(mutants_of, device.base)
    if mutants_of is not None:
        tasks = [t for t in tasks if t.hash in parents]
        if not tasks:
            raise ProfilerError(f"{mutants_of} has no measured program of these tasks on {device.name}")
    store = _Store(folder)
    try:
        _build_all(_BundlePlan(tasks, parents, config, store), device, arch, config, store, progress)
        bundle = _bundle(store, device, arch, compiler, config, families)
    finally:
        store.close()
    write_bundle(out, bundle)
    shutil.rmtree(folder)
    statuses = Counter(k.status for k in bundle.kernels)
    return BundleReport(
        out,
        device.name,
        compiler,
        len(bundle.tasks),
        len(bundle.references),
        dict(statuses),
        out.stat().st_size,
    )


def _build_all(
    plan: _BundlePlan,
    device: Device,
    arch: str,
    config: BundleConfig,
    store: _Store,
    progress: Callable[[Progress], None] | None,
) -> None:
    started, before = time.perf_counter(), len(store.kernels)
    with Engine(config, BuildOnly(kernel_builder(arch, device.target))) as engine:
        for outcome in engine.run(plan.jobs()):
            plan.take(outcome)
            if progress is not None and isinstance(outcome.job, BuildJob):
                counts: Counter[str] = sum(store.statuses.values(), Counter())
                ok = counts.pop("ok", 0)
                new, elapsed_s = len(store.kernels) - before, time.perf_counter() - started
                progress(Progress(plan.done, plan.total, new, ok, dict(counts), elapsed_s))


def _fastest(path: str | Path, base: str) -> dict[str, tuple[Program, ...]]:
    """Task -> its fastest programs on the device, whatever the share."""
    dataset = Dataset.open(path)
    frame = dataset.records
    frame = frame[(frame["status"] == "ok") & [d.split("@")[0] == base for d in frame["device"]]]
    fastest = frame.sort_values("latency_s").drop_duplicates("program").groupby("task")
    return {
        str(task): tuple(dataset.programs[h] for h in part["program"].head(ELITE)) for task, part in fastest
    }


def _bundle(
    store: _Store,
    device: Device,
    arch: str,
    compiler: str,
    config: BundleConfig,
    families: dict[str, str],
) -> Bundle:
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
    if not config.cubins:
        kernel = replace(kernel, cubin=b"")
    if not config.sources and kernel.cuda is not None:
        kernel = replace(kernel, cuda=replace(kernel.cuda, source=""))
    return kernel
