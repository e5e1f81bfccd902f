"""Compiling programs for CPUs, which need not be present, and counting their instructions."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import Dataset
from cdmpp.dataset.codegen import CODEGEN_FILE, Counts, load_codegen, save_codegen
from cdmpp.dataset.store import load_datasets
from cdmpp.device import Device, get_device
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler.cpu import ObjectBuilder
from cdmpp.profiler.engine import BuildJob, BuildOnly, Engine, Executor, Outcome, add_program
from cdmpp.profiler.plan import TaskPlan, network_tasks
from cdmpp.profiler.session import ProfileConfig, Progress, Report, Session, refuse_to_replace
from cdmpp.program.codegen import is_counted
from cdmpp.program.codegen.core import counts_key
from cdmpp.program.codegen.counts import require_decoder

if TYPE_CHECKING:
    from cdmpp.program.network import Network

logger = logging.getLogger(__name__)

#: The counts are written to their file after this many programs each.
_WRITE_EVERY = 512


def compile_programs(
    networks: Sequence[Network | str],
    *,
    device: str | Device,
    out: str | Path,
    config: ProfileConfig,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] = logger.info,
) -> Report:
    """Draw random programs of networks' tasks, compile them for an x86 CPU, which need not be present, and count their
    instructions. The result is a dataset without records, for ``data.unmeasured``. Arguments and errors are those of
    :func:`~cdmpp.profiler.session.profile`."""
    require_decoder()
    path, cpu = Path(out), get_device(device)
    if not is_counted(cpu):
        raise ProfilerError(f"{cpu.name}: only programs compiled for x86 CPUs are counted")
    refuse_to_replace(path, resume)
    tasks, families = network_tasks(networks, notify, resumed=path)
    plan = TaskPlan(tasks, config.programs_per_task, search_fraction=0.0, num_cores=int(cpu.share), seed=config.seed)
    with Dataset.open_or_create(path) as dataset:
        for program in dataset.programs.values():
            plan.learn(program, None)
        watch: dict[str, Any] = {"max_seconds": config.max_seconds, "progress": progress, "notify": notify}
        settings, packages = {"target": dict(cpu.target)}, ("apache-tvm", "apache-tvm-ffi")
        session = Session(dataset, cpu.name, settings, families, packages, known=plan.known, total=lambda: plan.total, **watch)

        def keep(outcome: Outcome) -> None:
            plan.done(outcome)
            add_program(dataset, outcome.job)

        with closing(_compiled(cpu, plan.jobs(), config, path / CODEGEN_FILE, _counts_in(path))) as outcomes:
            session.take(outcomes, None, keep)
        return session.report()


def collect_codegen(
    folder: str | Path, config: ProfileConfig, progress: Callable[[int, int], None] | None = None, cpus: Sequence[Device] = ()
) -> Counts:
    """Compile the programs of a dataset that have a label on a CPU and no counts yet, and count their instructions. Programs
    with any label, and those without any record, are also compiled for ``cpus``, on which nothing need be measured.

    A program that does not compile is left out. ``progress`` is called with the numbers of programs done and wanted.
    DatasetError: no dataset in the folder, one of ``cpus`` is no x86 CPU, or the file cannot be written; CdmppError: the
    instruction decoder is not installed; ProfilerError: no such cluster, or the disk is full."""
    require_decoder()
    if others := [cpu.name for cpu in cpus if not is_counted(cpu)]:
        raise DatasetError(f"{', '.join(others)}: only programs compiled for x86 CPUs are counted")
    view, counts = load_datasets(folder), _counts_in(folder)
    wanted, known = list[tuple[Device, list[str]]](), {*counts}
    labels, never = view.labels(None), sorted(view.programs.keys() - set(view.records["program"]))
    groups = [(view.devices[str(name)], table["program"]) for name, table in labels.groupby("device", observed=True)]
    for device, programs in [*groups, *((cpu, [*labels["program"].unique(), *never]) for cpu in cpus)]:
        if device.target.get("kind") != "llvm":
            continue
        if device.vendor == "arm":
            logger.warning("%s: only programs compiled for x86 CPUs are counted", device.name)
            continue
        code = counts_key(device)
        if names := [str(digest) for digest in programs if (str(digest), code) not in known]:
            wanted.append((device, names))
            known |= {(name, code) for name in names}
    executor, done, total = None, 0, sum(len(names) for _, names in wanted)
    if config.ray is not None:
        from cdmpp.profiler.ray import connect

        executor = connect(config.ray)
    for device, names in wanted:
        programs = (view.programs[name] for name in names)
        jobs = (BuildJob(p, view.task_of(p), view.spaces.get(p.space_hash or "")) for p in programs)
        with closing(_compiled(device, jobs, config, Path(folder) / CODEGEN_FILE, counts, executor)) as outcomes:
            for outcome in outcomes:
                done += 1
                if outcome.status != "ok":
                    logger.warning("program %s has no counts: %s", outcome.job.program.hash, outcome.error)
                if progress is not None:
                    progress(done, total)
    return counts


def _counts_in(folder: str | Path) -> Counts:
    """The counts that the dataset in a folder has already."""
    path = Path(folder) / CODEGEN_FILE
    return load_codegen(path) if path.exists() else {}


def _compiled(
    cpu: Device, jobs: Iterator[Any], config: ProfileConfig, file: Path, counts: Counts, executor: Executor | None = None
) -> Generator[Outcome]:
    """Compile jobs and add their counts to `counts`; the file is written every few hundred programs, and at the end."""
    folder = config.work_folder() if executor is None else None
    builder = BuildOnly(config, (ObjectBuilder, (cpu.target, folder, config, cpu), 10), executor)
    try:
        with Engine(builder) as engine:
            for number, outcome in enumerate(engine.run(jobs), 1):
                if outcome.status == "ok":
                    counts[outcome.job.program.hash, counts_key(cpu)] = outcome.built.counts
                    Path(outcome.built.path).unlink(missing_ok=True)  # it may be on another node
                if number % _WRITE_EVERY == 0:
                    save_codegen(file, counts)
                yield outcome
    finally:
        save_codegen(file, counts)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
