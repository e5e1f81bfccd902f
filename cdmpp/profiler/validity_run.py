"""Collecting validity data: draws programs, has them judged in processes that may be killed, keeps a journal.

The folder holds ``programs/`` (a dataset without records: tasks, spaces and decisions, which rebuild every program with
``Rebuilder(verify=False)``), ``validity.parquet`` (the verdicts), ``asts.parquet`` (the compact ASTs, so that a model can
be trained without TVM) and ``validity.json`` (settings, versions, counts).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset import Dataset
from cdmpp.dataset.journal import JournalWriter, read_journal
from cdmpp.errors import DatasetError, FeatureMismatchError, ProfilerError, ProgramError
from cdmpp.files import write_json
from cdmpp.profiler.build import BuildJob
from cdmpp.profiler.cuda_tasks import network_tasks
from cdmpp.profiler.validity import (
    ValidityConfig,
    Verdict,
    judge_job,
    load_verdicts,
    summarise,
)
from cdmpp.profiler.workers import Worker, ready, requests

if TYPE_CHECKING:
    from cdmpp.program.types import Task

logger = logging.getLogger(__name__)

PROGRAMS_FOLDER = "programs"
TABLE_FILE = "validity.parquet"
AST_FILE = "asts.parquet"
META_FILE = "validity.json"
_JOURNAL = "verdicts.jsonl"


@dataclass(frozen=True)
class ValidityProgress:
    """Where a collection stands: programs judged, of how many, and by kind (``valid`` for valid ones)."""

    done: int
    total: int
    kinds: dict[str, int]


def validity_worker(connection: Connection, config: ValidityConfig) -> None:
    """Judge one :class:`BuildJob` after another; sends verdicts, each compilation announced by the verdict that holds
    if it does not end (runs in its own process)."""
    from cdmpp.profiler import machine
    from cdmpp.profiler.cuda_compile import find_compiler
    from cdmpp.profiler.cuda_lowering import CudaLowering
    from cdmpp.program.space import CUDA_SPACE_TARGET, Rebuilder

    machine.die_with_parent()
    # its architecture does not change the code of the cuda rule set
    lowering, rebuild = CudaLowering(CUDA_SPACE_TARGET), Rebuilder(verify=False)
    job: BuildJob
    for job in requests(connection):
        try:
            func = rebuild(job.program, job.task, job.space)
        except ProgramError as err:
            connection.send(err)
            continue
        connection.send(judge_job(job, func, lowering, config, find_compiler, connection.send))


class _Judges:
    """The processes, their deadlines and what they say."""

    def __init__(self, config: ValidityConfig, workers: int) -> None:
        self._config = config
        self._workers = [Worker(validity_worker, (config,), f"judge-{i}") for i in range(workers)]
        self._pending: dict[str, Verdict] = {}
        self._died: Counter[str] = Counter()

    def run(self, jobs: Iterator[BuildJob]) -> Iterator[tuple[BuildJob, list[Verdict]]]:
        """Judge jobs; programs that do not rebuild are left out, with a warning."""
        exhausted, again = False, list[BuildJob]()
        while True:
            for worker in self._workers:
                if worker.load is not None or (exhausted and not again):
                    continue
                job = again.pop() if again else next(jobs, None)
                if job is None:
                    exhausted = True
                elif not worker.submit(job, job, self._limit_s, of_cpu_time=True):
                    again.append(job)
            busy = [w for w in self._workers if w.load is not None]
            if not busy and not again:
                return
            for worker in ready(busy, 0.5):
                job = worker.load
                try:
                    said = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    worker.replace()
                    self._died[job.program.hash] += 1
                    if self._died[job.program.hash] == 1:
                        again.append(job)
                    else:
                        yield job, self._without_end(job, "compile", "the compiler died with it, twice")
                    continue
                if isinstance(said, Verdict):
                    self._pending[said.program] = said
                    worker.extend(self._limit_s, of_cpu_time=True)
                    continue
                worker.finished()
                self._pending.pop(job.program.hash, None)
                if isinstance(said, ProgramError):
                    logger.warning("%s", said)
                    continue
                yield job, said
            for worker in busy:
                if worker.load is not None and worker.overdue():
                    job = worker.load
                    worker.replace()
                    yield job, self._without_end(job, "timeout", f"over {self._limit_s:g} s")

    @property
    def _limit_s(self) -> float:
        return self._config.timeout_s

    def _without_end(self, job: BuildJob, kind: str, error: str) -> list[Verdict]:
        pending = self._pending.pop(job.program.hash, None)
        if pending is None:  # it was lowering that did not end
            arch = self._config.archs[0]
            return [Verdict(job.program.hash, arch, False, "lowering", error, "lowering")]
        return [replace(pending, kind=pending.rule or kind, error=error)]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()


def collect_validity(
    networks: Sequence[str],
    out: str | Path,
    config: ValidityConfig | None = None,
    *,
    tasks_of: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    progress: Callable[[ValidityProgress], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Draw CUDA programs of networks, judge them and write the folder `out`.

    Parameters
    ----------
    networks
        Zoo names, ``.onnx`` or ``.pt2`` files.
    tasks_of
        Take the tasks of these networks from a dataset that has them (importing the zoo takes minutes).
    resume
        Go on with the folder in `out`.

    Returns
    -------
    Counts, as :func:`cdmpp.profiler.validity.summarise` gives them.

    Raises
    ------
    ProfilerError
        No compiler for an architecture, no task.
    DatasetError
        `out` holds something and `resume` was not asked for; it cannot be written.
    """
    from cdmpp.profiler.cuda_compile import find_compiler

    config = config or ValidityConfig()
    say = notify or (lambda line: logger.info("%s", line))
    out = Path(out)
    if (out / PROGRAMS_FOLDER).exists() and not resume:
        raise DatasetError(
            f"{out} holds validity data already: go on with --resume, or choose another folder"
        )
    compilers = sorted({find_compiler(arch).name for arch in config.archs})
    tasks, _ = network_tasks(networks, tasks_of, say)
    with Dataset.open_or_create(out / PROGRAMS_FOLDER) as programs:
        known, drawn = _known(out)
        journal = JournalWriter(out / _JOURNAL)
        judges = _Judges(config, workers)
        kinds = Counter(_kind(rows) for rows in known.values())
        try:
            for job, verdicts in judges.run(_jobs(tasks, config, known, drawn)):
                programs.add_task(job.task)
                assert job.space is not None
                programs.add_space(job.space)
                programs.add_program(job.program)
                known[job.program.hash] = verdicts
                line = {"program": job.program.hash, "task": job.task.hash}
                journal.append({**line, "verdicts": [asdict(v) for v in verdicts]})
                kinds[_kind(verdicts)] += 1
                if progress is not None:
                    progress(ValidityProgress(len(known), config.programs, dict(kinds)))
        finally:
            judges.close()
            journal.close()
        if not known:
            raise ProfilerError("not one program was judged")
        programs.finalize()
        return _finish(out, programs, config, compilers, sorted(networks), say)


def _kind(verdicts: list[Verdict]) -> str:
    return "valid" if verdicts[-1].valid else verdicts[-1].kind


def _known(out: Path) -> tuple[dict[str, list[Verdict]], Counter[str]]:
    """What was judged before: program -> verdicts, and programs by task."""
    known: dict[str, list[Verdict]] = {}
    task_of: dict[str, str] = {}
    if (out / TABLE_FILE).exists():
        for row in load_verdicts(out).to_dict("records"):
            task_of[row["program"]] = row.pop("task")
            known.setdefault(row["program"], []).append(Verdict(**{str(k): v for k, v in row.items()}))
    for line in read_journal(out / _JOURNAL).values:
        known[line["program"]] = [Verdict(**row) for row in line["verdicts"]]
        task_of[line["program"]] = line["task"]
    return known, Counter(task_of.values())


def _jobs(
    tasks: Sequence[Task], config: ValidityConfig, known: dict[str, list[Verdict]], drawn: Counter[str]
) -> Iterator[BuildJob]:
    """Programs in rounds over the tasks until enough are kept or no space holds more."""
    from cdmpp.program.space import TaskSpaces

    order = list(tasks)
    random.Random(config.seed).shuffle(order)
    seen = set(known)
    number = 0
    while order and len(seen) < config.programs:
        number += 1
        for task in list(order):
            have = drawn[task.hash]
            need = config.per_round * number - have
            if need <= 0:
                continue
            try:
                spaces = TaskSpaces(task, "cuda", verify=False)
            except ProgramError as err:
                logger.warning("%s", err)
                order.remove(task)
                continue
            by_hash = {s.hash: s for s in spaces.spaces}
            # The seed depends on what is there, so that a resumed run draws what the broken one lacks.
            programs = spaces.sample(need, config.seed + 7919 * have + 1, exclude=seen)
            if len(programs) < need:
                order.remove(task)
            drawn[task.hash] += len(programs)
            for program in programs:
                if len(seen) >= config.programs:
                    return
                seen.add(program.hash)
                yield BuildJob(program, task, by_hash[str(program.space_hash)])


def _finish(
    out: Path,
    programs: Dataset,
    config: ValidityConfig,
    compilers: Sequence[str],
    networks: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Turn the journal into the table, compute missing ASTs, write the notes; the journal goes last."""
    import pandas as pd

    from cdmpp.program.ast.store import load_asts, save_asts

    kept = {digest: rows for digest, rows in _known(out)[0].items() if digest in programs.programs}
    frame = pd.DataFrame([asdict(v) for rows in kept.values() for v in rows])
    frame["task"] = [programs.programs[p].task_hash for p in frame["program"]]
    for column in ("arch", "kind", "error", "rule", "task"):
        frame[column] = frame[column].astype("category")
    for column in frame.columns[frame.dtypes == "int64"]:
        frame[column] = frame[column].astype("int32")
    try:
        asts = load_asts(out / AST_FILE) if (out / AST_FILE).exists() else {}
    except FeatureMismatchError:  # of an older version: all anew
        asts = {}
    missing = [digest for digest in kept if digest not in asts]
    say(f"compact ASTs of {len(missing)} programs")
    asts.update(_asts(missing, programs))
    save_asts(out / AST_FILE, {digest: asts[digest] for digest in kept if digest in asts})
    draft = out / f"{TABLE_FILE}.tmp"
    frame.to_parquet(draft, index=False, compression="zstd", compression_level=19)
    draft.replace(out / TABLE_FILE)
    (out / _JOURNAL).unlink()
    summary = summarise(load_verdicts(out))
    note = {
        "config": asdict(config),
        "compilers": list(compilers),
        "networks": list(networks),
        "written_at": time.time(),
        "versions": {p: metadata.version(p) for p in ("cdmpp", "apache-tvm", "apache-tvm-ffi")},
        "summary": summary,
    }
    write_json(out / META_FILE, note)
    return summary


def _asts(missing: Sequence[str], programs: Dataset) -> dict[str, Any]:
    """Compact ASTs of programs, valid or not; those without one are left out, with a warning."""
    from cdmpp.program.ast import compact_ast
    from cdmpp.program.space import Rebuilder

    rebuild, found = Rebuilder(verify=False), {}
    for digest in sorted(missing, key=lambda d: programs.programs[d].task_hash):
        program = programs.programs[digest]
        try:
            func = rebuild(
                program, programs.tasks[program.task_hash], programs.spaces[str(program.space_hash)]
            )
            found[digest] = compact_ast(func)
        except ProgramError as err:
            logger.warning("no compact AST: %s", err)
    return found
