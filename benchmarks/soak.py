"""Does profiling survive the failures that occur in weeks of it? Fake programs on a fake device; everything else is real.

``python benchmarks/soak.py --programs 20000 --json benchmarks/results/soak.json`` (some ten minutes).

Engine, worker processes, time limits, session and dataset are those of ``cdmpp profile``. Each of these happens to one program
in a hundred: its builder is killed, its measuring process is killed, it hangs in the compiler or when run, it crashes the
compiler or when run, it sends a malformed message, its samples are not numbers, or the clock jumps. Twice the disk is full for
five seconds: SQLite may not grow its file, and the run goes on as with ``--resume``. In the end every program must have one
record, and the dataset must open without damage. Memory, processes and open files should not have grown.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cdmpp.device import get_device
from cdmpp.errors import STATUSES, CdmppError
from cdmpp.profiler import machine
from cdmpp.profiler.cpu import BatchDone, CpuConfig, CpuMeasurer, SharedObject
from cdmpp.profiler.engine import BuildJob, Engine, Executor, Measured, Running, SamplingPlan
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.dataset import Dataset

#: Fate of a program (what goes wrong with it) -> statuses that its record may have.
FATES: dict[str, tuple[str, ...]] = {
    "": ("ok",),
    "builder killed": ("ok",),
    "measuring killed": ("ok",),
    "build hangs": ("build_timeout",),
    "run hangs": ("run_timeout",),
    "build crashes": ("build_error",),
    "run crashes": ("run_error",),
    "garbage": ("run_error",),
    "no number": ("run_error",),
    "clock jumps": ("run_error",),
}
CONFIG = CpuConfig(
    builders=2,
    batch_size=8,
    build_timeout_s=0.4,
    run_timeout_s=0.5,
    loading_s=1.5,
    realtime=False,
    plan=SamplingPlan(max_measure_s=0.01, max_wait_s=0.0),
)
_DEVICE = "this-cpu@1"


def fate(program: str) -> str:
    """The fate of a program, which is the end of its name."""
    return program.partition(" ")[2]


def _first_time(folder: str, program: str) -> bool:
    """Whether this is the first call for the program, by any process."""
    try:
        (Path(folder) / program.replace(" ", "-")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FakeBuilder:
    """Compiles nothing, and fails as the program's fate says."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, job: BuildJob) -> SharedObject:
        program = job.program.hash
        what = fate(program)
        if what == "builder killed" and _first_time(self._folder, program):
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "build hangs":
            time.sleep(3600)
        elif what == "build crashes":
            os._exit(1)
        return SharedObject(program, path=f"{self._folder}/{program}.so")


def fake_device(connection: Connection, config: CpuConfig, folder: str) -> None:
    """Measures nothing, and fails as the program's fate says (runs in its own process)."""
    machine.die_with_parent()
    for batch in machine.requests(connection):
        for built in batch:
            connection.send(Running((built.program,), config.first_run_s))
            what, samples_s = fate(built.program), [1e-4] * 8
            if what == "measuring killed" and _first_time(folder, built.program):
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "run hangs":
                time.sleep(3600)
            elif what == "run crashes":
                os._exit(1)
            elif what == "garbage":
                connection.send_bytes(b"garbage") if built.program < "8" else connection.send(("no", "message"))
            elif what in ("no number", "clock jumps"):
                samples_s[3] = float("nan") if what == "no number" else -3600.0
            connection.send(Measured(built.program, "ok", tuple(samples_s), run_s=1e-3))
        connection.send(BatchDone(1e-4, 1e-4, 0.0, "normal"))


class FakeExecutor(Executor):
    """Two fake devices."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def measurers(self, serve: Any, config: Any, sentinel: Any) -> list[machine.Worker]:
        return [machine.Worker(fake_device, (config, self._folder), f"fake-{i}") for i in range(2)]


class FakeMeasurer(CpuMeasurer):
    """The real measurer with a fake builder and fake devices."""

    def __init__(self, folder: str) -> None:
        super().__init__(CONFIG, {}, FakeExecutor(folder))
        self._fake = folder

    def open(self, build_now: Any) -> None:
        super().open(build_now)
        self.builder = (FakeBuilder, (self._fake,), 10)


def programs_of(count: int, rate: float, seed: int) -> list[Program]:
    """Programs of fifty tasks; each bad fate befalls a fraction `rate` of them."""
    rng, bad = random.Random(seed), list(FATES)[1:]
    found = []
    for i in range(count):
        draw = rng.random()
        what = bad[int(draw / rate)] if draw < rate * len(bad) else ""
        found.append(Program(f"{rng.getrandbits(64):016x} {what}".strip(), f"t{i % 50}", None, "", "unscheduled"))
    return found


def _jobs(programs: Sequence[Program], dataset: Dataset, full_at: list[int]) -> Iterator[BuildJob]:
    """Jobs of these programs, which are not measured yet. ``full_at``: the disk is full from this job on, once per entry."""
    for number, program in enumerate(programs):
        if full_at and number == full_at[-1]:  # SQLite's page limit gives the same error as a full disk
            full_at.pop()
            db = dataset._writable()._db
            db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        yield BuildJob(program, Task(program.task_hash, program.task_hash, "{}", {}, 1.0, 1.0), None)


def soak(count: int, rate: float, seed: int, folder: Path, full_s: float = 5.0) -> dict[str, Any]:
    """Profile `count` programs; returns their statuses, and which of them are not as expected."""
    # not at the top: every new process imports this file
    from cdmpp.dataset import Dataset
    from cdmpp.profiler.session import Session

    programs, this = programs_of(count, rate, seed), psutil.Process()
    dataset, sizes, interruptions = Dataset.open_or_create(folder / "dataset"), [], []
    dataset.set_device(get_device(_DEVICE))
    device, full_at = get_device(_DEVICE).name, [count // 4] * 2
    done = 0
    while len(interruptions) < 10:
        known = dataset.measured(device)
        left = [program for program in programs if program.hash not in known]

        def follow(state: Any) -> None:
            nonlocal done
            done += 1
            if done % max(1, count // 20) == 0:
                files = len(this.open_files()) + len(this.net_connections())
                sizes.append((this.memory_info().rss, len(this.children(recursive=True)), files))
                print(f"{state.done} of {count}, {sizes[-1][0] / 1e6:.0f} MB", file=sys.stderr, flush=True)

        try:
            session = Session(
                dataset, device, {}, {}, (), known=len(known), total=lambda: count, max_seconds=None, progress=follow,
                notify=print,
            )  # fmt: skip
            with Engine(FakeMeasurer(str(folder))) as engine:
                session.take(engine.run(_jobs(left, dataset, full_at)), {})
            dataset.finalize()
            break
        except CdmppError as err:  # the disk is full; a user would free some space and use --resume
            interruptions.append(str(err))
            time.sleep(full_s)
            dataset.close()
            dataset = Dataset.open(folder / "dataset")
    with Dataset.open(folder / "dataset") as again:
        records, damaged = again.records, again.corrupt_lines
    found = Counter(records["status"])
    times = Counter(records["program"])
    wrong = {what: Counter[str]() for what in FATES}
    for program, status in zip(records["program"], records["status"], strict=True):
        if status not in FATES[fate(program)]:
            wrong[fate(program)][status] += 1
    quarter = sizes[len(sizes) // 4 :] or [(0, 0, 0)]
    return {
        "programs": count,
        "once": sum(times[program.hash] == 1 for program in programs),
        "statuses": {status: found[status] for status in STATUSES if found[status]},
        "other status than expected": {what or "good": dict(counts) for what, counts in wrong.items() if counts},
        "damaged rows": damaged,
        "interruptions": interruptions,
        "memory grew by MB": (max(size for size, _, _ in quarter) - quarter[0][0]) / 1e6,
        "processes and files grew by": [max(s[i] for s in quarter) - quarter[0][i] for i in (1, 2)],
    }


def main() -> None:
    from common import arguments, figure, provenance, report

    args = arguments(__doc__, __file__).parse_args()
    made, started = provenance(__file__, seeds=[args.seed]), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(args.programs, args.rate, args.seed, Path(folder))
    seconds = time.perf_counter() - started
    values = {"labelled or failed once": found["once"], **found["statuses"]}
    values["memory grew by MB"] = found["memory grew by MB"]
    report(args.json, made, [figure("soak", values, args.programs, [args.seed])], **found, seconds=seconds)
    if found["once"] != args.programs or found["other status than expected"] or found["damaged rows"]:
        sys.exit(f"{found['programs'] - found['once']} programs without one record: {found}")


if __name__ == "__main__":
    __import__("soak").main()  # worker processes import the module by this name
