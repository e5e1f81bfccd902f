"""Making a bundle: compiles programs of networks for a device into one file. Meanwhile ``FILE.building`` is a bundle of what
was built so far, usually at most about 20 seconds old, from which making it can be resumed."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset
from cdmpp.device import Device, get_device
from cdmpp.errors import BundleError, ProfilerError
from cdmpp.profiler.engine import BuildConfig, BuildJob, BuildOnly, Engine, Outcome
from cdmpp.profiler.gpu.build import DrawJob, Drawn, KernelBuilder
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, read_bundle, write_bundle
from cdmpp.profiler.gpu.compile import find_compiler
from cdmpp.profiler.gpu.limits import cuda_arch
from cdmpp.profiler.machine import installed
from cdmpp.profiler.plan import CHUNK, ELITE, network_tasks, seed_of
from cdmpp.profiler.session import Progress
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

#: Shares of the device whose specifications the bundle holds, so that the measuring machine needs no device table.
SHARES: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
#: Minimum seconds between two writes of the unfinished bundle.
_SAVE_S = 20.0
#: Candidates per draw job.
_DRAWN = 8
#: Maximum number of candidates to lower for each program that is wanted.
_MAX_TRIES = 60
#: A task is given up if more builders than this die or time out on it.
_MAX_BROKEN = 3


@dataclass(frozen=True, kw_only=True)
class BundleConfig(BuildConfig):
    """Options of :func:`make_bundle`."""

    build_timeout_s: float = 30.0
    #: Programs that can run, per task; fewer if its design spaces hold no more, or its time is up.
    programs_per_task: int = 16
    #: Programs per task that the device's limits exclude and that are still kept, as records of failures.
    invalid_per_task: int = 2
    #: Time that builders may spend per 16 programs of a task.
    task_seconds: float = 120.0
    #: Tasks of at most this many operations get a reference output (from running them unscheduled on the CPU).
    reference_flops: float = 3e8
    #: Which form of the code is kept; at least one must be True.
    cubins: bool = True
    sources: bool = True
    seed: int = 0


@dataclass(frozen=True)
class BundleReport:
    """What a bundle holds; ``statuses`` counts its programs by status."""

    path: Path
    device: str
    compiler: str
    tasks: int
    references: int
    statuses: dict[str, int]
    bytes: int


class _Draft:
    """The unfinished bundle: what was built so far. It is written every now and then, and when building ends for any reason."""

    def __init__(self, path: Path, arch: str) -> None:
        self._path, self._arch, self._saved_at, self._save_s = path, arch, time.monotonic(), 0.0
        self.bundle = read_bundle(path) if path.exists() else Bundle({}, {}, {}, {}, [], {})
        if (begun_for := self.bundle.note.get("arch", arch)) != arch:
            raise BundleError(f"{path} was begun for {begun_for}, not for {arch}: choose another file")
        self.statuses = Counter(kernel.status for kernel in self.bundle.kernels)
        #: Tasks for which nothing more is drawn: their spaces hold no more, or they were given up.
        self.exhausted: set[str] = set(self.bundle.note.get("exhausted", ()))

    def add(self, task: Task, program: Program, space: Space, kernel: BundledProgram) -> None:
        self.bundle.tasks[task.hash], self.bundle.spaces[space.hash] = task, space
        self.bundle.programs[program.hash] = program
        self.bundle.kernels.append(kernel)
        self.statuses[kernel.status] += 1
        if time.monotonic() - self._saved_at > max(_SAVE_S, 20 * self._save_s):
            self.save()

    def save(self) -> None:
        started = time.monotonic()
        write_bundle(self._path, replace(self.bundle, note={"arch": self._arch, "exhausted": sorted(self.exhausted)}), level=1)
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - started


class _TaskPlan:
    """Collects programs of one task that can run: builders draw (and lower) candidates, then compile them."""

    def __init__(self, task: Task, parents: tuple[Program, ...], config: BundleConfig, draft: _Draft) -> None:
        self.task, self._parents, self._config, self._draft = task, parents, config, draft
        self._seen = {p.hash for p in draft.bundle.programs.values() if p.task_hash == task.hash}
        kept = [kernel.status for kernel in draft.bundle.kernels if kernel.program in self._seen]
        self.ok, self._invalid = kept.count("ok"), kept.count("invalid_config")
        self._candidates: deque[tuple[Program, Space]] = deque()
        self._drawing = False
        self._compiling = self._tries = self._broken = 0
        self._seconds = 0.0

    def _exhaust(self) -> None:
        self._draft.exhausted.add(self.task.hash)

    def needs_more(self, wanted: int) -> bool:
        """Whether work is under way or left to do before `wanted` programs can run."""
        if self._drawing or self._compiling:
            return True
        return self.ok < wanted and (bool(self._candidates) or self.task.hash not in self._draft.exhausted)

    def jobs(self, wanted: int) -> Iterator[BuildJob | DrawJob]:
        """Jobs that can start now, to get to `wanted` programs that can run."""
        need, config = wanted - self.ok - self._compiling, self._config
        while need > 0 and self._candidates:
            program, space = self._candidates.popleft()
            self._compiling += 1
            need -= 1
            yield BuildJob(program, self.task, space)
        if need <= 0 or self._drawing or self.task.hash in self._draft.exhausted:
            return
        if self._tries >= _MAX_TRIES * wanted or self._seconds > -(-wanted // CHUNK) * config.task_seconds:
            self._exhaust()
            return
        self._drawing = True
        seed = seed_of(config.seed, self.task.hash, len(self._seen), self._broken)
        wants = self.task.hash not in self._draft.bundle.references and self.task.flops <= config.reference_flops
        yield DrawJob(self.task, _DRAWN, seed, frozenset(self._seen), self._parents, config.seed if wants else None)

    def take(self, outcome: Outcome) -> None:
        """Take in the outcome of a job."""
        job, built = outcome.job, outcome.built
        self._seconds += outcome.meta.get("build_s", 0.0)
        if built is None:  # the builder died, or took too long
            self._broken += 1
            if self._broken > _MAX_BROKEN:
                name = f"{self.task.name} ({self.task.hash})"
                logger.warning("task %s: given up after %d broken builds", name, self._broken)
                self._exhaust()
        if isinstance(job, DrawJob):
            self._drawing = False
            if built is not None:
                self._take_drawn(built)
            return
        self._compiling -= 1
        kernel = built or BundledProgram(job.program.hash, status=outcome.status, error=outcome.error)
        self._draft.add(self.task, job.program, job.space, kernel)
        self.ok += kernel.status == "ok"

    def _take_drawn(self, drawn: Drawn) -> None:
        if drawn.error:
            logger.warning("%s", drawn.error)
        if not drawn.candidates and not drawn.excluded:
            self._exhaust()
        if drawn.reference is not None:
            self._draft.bundle.references[self.task.hash] = drawn.reference
        self._tries += len(drawn.candidates) + len(drawn.excluded)
        self._candidates.extend(drawn.candidates)
        self._seen.update(program.hash for program, _ in drawn.candidates)
        for program, space, kernel in drawn.excluded:
            self._seen.add(program.hash)
            if self._invalid < self._config.invalid_per_task:
                self._invalid += 1
                self._draft.add(self.task, program, space, kernel)


def make_bundle(
    networks: Sequence[str],
    *,
    device: str | Device,
    out: str | Path,
    config: BundleConfig | None = None,
    tasks: Collection[str] | None = None,
    tasks_of: str | Path | None = None,
    mutants_of: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> BundleReport:
    """Compile programs of networks (zoo names, ``.onnx`` or ``.pt2`` files) for another machine's CUDA GPU, such as ``h200``.

    ``tasks`` are hashes of tasks (None: all); ``tasks_of`` is a dataset that has those of these networks. With ``mutants_of``,
    a dataset measured on this device, mutants of each task's fastest programs are drawn instead of random points (the region
    that a tuner visits). ``progress`` counts programs that can run. ProfilerError if the device is no CUDA device, has no
    compiler, or there is no such task. BundleError: the file exists, or an unfinished one exists and `resume` is False."""
    config, notify = config or BundleConfig(), notify or logger.info
    device = get_device(device)
    arch = cuda_arch(device)
    if not (config.cubins or config.sources):
        raise ProfilerError("a bundle needs sources or cubins")
    compiler = find_compiler(arch).name
    out = Path(out)
    unfinished = out.with_name(f"{out.name}.building")
    if out.exists():
        raise BundleError(f"{out} exists: choose another file")
    if unfinished.exists() and not resume:
        raise BundleError(f"{out} is half made: go on with --resume, or remove {unfinished}")
    chosen, families = network_tasks(networks, notify, tasks_of=tasks_of, wanted=tasks)
    parents = {} if mutants_of is None else _fastest(mutants_of, device.base)
    if mutants_of is not None:
        chosen = [task for task in chosen if task.hash in parents]
        if not chosen:
            raise ProfilerError(f"{mutants_of} has no measured program of these tasks on {device.name}")
    draft = _Draft(unfinished, arch)
    plans = {task.hash: _TaskPlan(task, parents.get(task.hash, ()), config, draft) for task in chosen}
    bundle, started, before = draft.bundle, time.perf_counter(), len(draft.bundle.kernels)
    try:
        with Engine(BuildOnly(config, (KernelBuilder, (arch, device.target), 10))) as engine:
            for outcome in engine.run(_jobs(list(plans.values()), config)):
                plans[outcome.job.task.hash].take(outcome)
                if progress is not None and isinstance(outcome.job, BuildJob):
                    failures = {status: n for status, n in draft.statuses.items() if status != "ok"}
                    done = sum(plan.ok for plan in plans.values())
                    total = config.programs_per_task * len(plans)
                    new, elapsed_s = len(bundle.kernels) - before, time.perf_counter() - started
                    progress(Progress(done, total, new, draft.statuses["ok"], failures, elapsed_s))
    finally:
        draft.save()
    if not draft.statuses["ok"]:
        raise ProfilerError("not one program could be built")
    shares = [get_device(f"{device.base}@{share:g}") for share in SHARES]
    note = {
        "device": device.name,
        "arch": arch,
        "compiler": compiler,
        "devices": {d.name: d.to_json() for d in (device, *shares)},
        "network_families": families,
        "made_at": time.time(),
        "versions": installed("cdmpp", "apache-tvm", "apache-tvm-ffi", "numpy"),
        "config": asdict(config),
    }
    kernels = sorted(bundle.kernels, key=lambda kernel: (bundle.programs[kernel.program].task_hash, kernel.program))
    write_bundle(out, replace(bundle, note=note, kernels=[_kept(kernel, config) for kernel in kernels]))
    unfinished.unlink()
    tasks_n, references_n, statuses = len(bundle.tasks), len(bundle.references), dict(draft.statuses)
    return BundleReport(out, device.name, compiler, tasks_n, references_n, statuses, out.stat().st_size)


def _jobs(plans: Sequence[_TaskPlan], config: BundleConfig) -> Iterator[Any]:
    """Jobs in rounds over the tasks; yields None while all tasks wait for outcomes."""
    for end in range(CHUNK, config.programs_per_task + CHUNK, CHUNK):
        wanted = min(end, config.programs_per_task)
        unfinished = list(plans)
        while unfinished:
            jobs = [job for plan in unfinished for job in plan.jobs(wanted)]
            yield from jobs
            unfinished = [plan for plan in unfinished if plan.needs_more(wanted)]
            if unfinished and not jobs:
                yield None


def _fastest(path: str | Path, base: str) -> dict[str, tuple[Program, ...]]:
    """Task -> its fastest programs on the device or any share of it."""
    dataset = Dataset.open(path)
    frame = dataset.records
    frame = frame[(frame["status"] == "ok") & [d.split("@")[0] == base for d in frame["device"]]]
    fastest = frame.sort_values("latency_s").drop_duplicates("program").groupby("task")
    return {str(task): tuple(dataset.programs[h] for h in part["program"].head(ELITE)) for task, part in fastest}


def _kept(kernel: BundledProgram, config: BundleConfig) -> BundledProgram:
    if not config.cubins:
        kernel = replace(kernel, cubin=b"")
    if not config.sources and kernel.cuda is not None:
        kernel = replace(kernel, cuda=replace(kernel.cuda, source=""))
    return kernel
