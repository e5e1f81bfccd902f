"""Labels a second of a cluster, simulated from times measured on one machine: 1 to 512 builder cores and 1 to 64 devices.

``python benchmarks/scale.py --measure 200 --json benchmarks/results/scale.json`` on a quiet machine.

A builder core builds one program after another. Each object is sent to the device's machine over the network (one at a time,
at the bandwidth that is given). A device measures one program at a time, in batches that have arrived before it begins. The
driver, one process, stores every outcome. Builders wait while more than four batches per device are built but not measured.
Times to build and to measure are drawn from the records of a dataset, failures included. The object size is that of the tests'
compiled programs; the driver's time per outcome is measured here. Not simulated: nodes of unequal speed, and start-up.

``--measure N`` profiles N programs here with one builder and with two, without Ray and on a Ray cluster of this machine, and
compares the labels a second with those simulated for this machine from the times with one builder and no Ray. If there are
fewer cores than builders and devices, a builder pauses while its core measures.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import sys
import tempfile
import time
import zipfile
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import REPOSITORY, Row, arguments, figure, provenance, report, start

from cdmpp.dataset import Dataset, Record
from cdmpp.dataset.record import join_meta
from cdmpp.device import get_device
from cdmpp.errors import DatasetError
from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer, sentinel_job
from cdmpp.profiler.engine import BuildJob, Engine, Executor
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.profiler.ray import connect
from cdmpp.program.types import Program, Task

OBJECTS = REPOSITORY / "tests/golden/objects.zip"
CORES, DEVICES = [2**k for k in range(10)], [2**k for k in range(7)]
#: From this fraction of the highest rate of so many devices on, more cores are of no use.
_SATURATED = 0.95
#: Number of times that each setup is measured, in turns; the median counts.
_ROUNDS = 3


@dataclass(frozen=True)
class Times:
    """Seconds to build and to measure each program, (n,), the latter 0 if the build failed; ``waited_s`` is its part that waits
    out a disturbance with the core free; seconds of the driver for each outcome, and of the network for each object."""

    build_s: np.ndarray
    run_s: np.ndarray
    waited_s: np.ndarray
    driver_s: float
    transfer_s: float


def simulate(times: Times, programs: Sequence[int], builders: int, devices: int, cores: int | None = None) -> dict[str, Any]:
    """Labels a second over the programs with these indices, and the fraction of time that each part is busy. With `cores`, all
    runs on one machine with so many cores, where builders pause while devices use their cores."""
    size = CpuConfig().batch_size
    most = 4 * size * devices
    waiting, queue, events = deque(programs), deque[int](), list[tuple[float, int, str, Any]]()
    shared = 0 if cores is None else max(0, builders + devices - cores)
    ends: dict[int, float] = {}  # by builder: when its build ends, later if it pauses for a measurement
    idle_builders, idle_devices, built, labels, now, order = list(range(builders)), devices, 0, 0, 0.0, 0
    measuring, taken_until = 0, 0.0  # programs being measured, and when the cores of builders are free again
    busy = dict.fromkeys(("builders", "devices", "network", "driver"), 0.0)
    link_free, driver_free, programs_of = [0.0] * devices, 0.0, dict[int, int]()

    def at(when: float, what: str, who: Any) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, what, who))

    while True:
        while idle_builders and waiting and built < most:
            who, program = idle_builders.pop(), waiting.popleft()
            built += 1
            rests_s = max(taken_until - now, 0.0) if who < shared else 0.0
            programs_of[who], ends[who] = program, now + times.build_s[program] + rests_s
            busy["builders"] += times.build_s[program]
            at(ends[who], "built", who)
        while idle_devices and queue and (len(queue) >= size or (not waiting and built == len(queue) + measuring)):
            batch, idle_devices = [queue.popleft() for _ in range(min(size, len(queue)))], idle_devices - 1
            run_s, measuring = float(times.run_s[batch].sum()), measuring + len(batch)
            busy["devices"] += run_s
            taken_until = now + run_s - float(times.waited_s[batch].sum())
            for who in [who for who in range(shared) if who in ends]:
                ends[who] += taken_until - now
            at(now + run_s, "measured", len(batch))
        if not events:
            break
        now, _, what, who = heapq.heappop(events)
        if what == "built":
            if ends[who] > now:
                at(ends[who], "built", who)
                continue
            program = programs_of.pop(who)
            idle_builders.append(who)
            del ends[who]
            if times.run_s[program] > 0:
                link = min(range(devices), key=link_free.__getitem__)
                link_free[link] = max(link_free[link], now) + times.transfer_s
                busy["network"] += times.transfer_s
                at(link_free[link], "arrived", program)
            else:
                built -= 1
        elif what == "arrived":
            queue.append(who)
        else:
            idle_devices, built, labels, measuring = idle_devices + 1, built - who, labels + who, measuring - who
            driver_free = max(driver_free, now) + who * times.driver_s
            busy["driver"] += who * times.driver_s
    now = max(now, driver_free)
    parts = {"builders": builders, "devices": devices, "network": devices, "driver": 1}
    used = {name: busy[name] / now / count for name, count in parts.items()}
    return {"labels_per_s": labels / now, "used": used, "bound_by": max(used, key=used.__getitem__)}


def driver_seconds(outcomes: int = 2000) -> float:
    """Seconds that the driver takes to store an outcome."""
    with tempfile.TemporaryDirectory() as folder, Dataset.open_or_create(Path(folder) / "d") as dataset:
        dataset.set_device(get_device("this-cpu@1"))
        dataset.add_task(Task("t", "t", "{}", {}, 1.0, 1.0))
        started = time.perf_counter()
        for i in range(outcomes):
            dataset.add_program(Program(f"p{i}", "t", None, ""))
            samples_s = tuple(1e-4 + 1e-7 * k for k in range(8))
            took = {"run_s": 0.1}
            dataset.add_record(Record(f"p{i}", "this-cpu@1", "ok", 1e-4, samples_s, 0.01, measured_at=1.0, meta=took))
        return (time.perf_counter() - started) / outcomes


def times_of(records: Any, bandwidth_gbit: float, driver_s: float, bytes_: float) -> Times:
    """The times of a dataset's records that have them; DatasetError if none has."""
    metas = [join_meta(row) for row in records[records["build_s"].notna()].to_dict("records")]
    if not metas:
        raise DatasetError("no record says how long it was built")
    return times_of_metas(metas, driver_s, bytes_ * 8 / (bandwidth_gbit * 1e9))


def times_of_metas(metas: list[dict[str, Any]], driver_s: float, transfer_s: float, around_s: float = 0.0) -> Times:
    """The times in the ``meta`` of records; ``around_s`` are the seconds of what is timed around each attempt to measure."""
    build, run, waited, attempts = (
        np.array([meta.get(name, 0.0) for meta in metas]) for name in ("build_s", "run_s", "waited_s", "attempts")
    )
    return Times(build, attempts * (run + waited + around_s * (run > 0)), attempts * waited, driver_s, transfer_s)


def measured(count: int, networks: list[str], seed: int, driver_s: float) -> list[dict[str, Any]]:
    """Labels a second with one and two builders, without Ray and on a Ray cluster of this machine, measured and simulated; with
    the median noise of the labels, and the CPU seconds of Ray's own processes per label."""
    from prediction_speed import draw

    jobs: list[BuildJob] = draw(networks, count + 4, seed)
    device, rates, times = get_device("this-cpu@1"), defaultdict[tuple[str, int], list[Row]](list), list[Times]()
    for _, where, builders in itertools.product(range(_ROUNDS), ("this machine", "Ray"), (1, 2)):
        config = CpuConfig(builders=builders)
        alone = where == "this machine"
        executor = Executor(core_groups(usable_cores(), 1, 1)) if alone else connect("local", device, 1)
        with Engine(CpuMeasurer(config, device.target, executor, sentinel_job())) as engine:
            list(engine.run(iter(jobs[:4])))  # starts and warms up the processes
            started, of_ray = time.perf_counter(), of_ray_s()
            outcomes = {o.job.program.hash: o for o in engine.run(iter(jobs[4:]))}
            elapsed_s = time.perf_counter() - started
        found = [outcomes[job.program.hash] for job in jobs[4:]]
        if alone and builders == 1:
            sentinel_s = 2 * 3 * 2 * config.plan.min_sample_s / config.batch_size  # before and after each batch
            times.append(times_of_metas([o.meta for o in found], driver_s, 0.0, sentinel_s))
        good = [o.noise for o in found if o.noise is not None]
        row = {"labels_per_s": len(good) / elapsed_s, "noise": float(np.median(good))}
        rates[where, builders].append({**row, "ray_cpu_s": (of_ray_s() - of_ray) / len(good)})
        print(where, builders, row, file=sys.stderr)
    rows, cores = [], len(usable_cores())
    for (where, builders), rounds in rates.items():
        expected = [simulate(one, range(len(one.run_s)), builders, 1, cores)["labels_per_s"] for one in times]
        middle = {name: float(np.median([row[name] for row in rounds])) for name in rounds[0]}
        rows.append({"where": where, "builders": builders, **middle, "simulated": float(np.median(expected)), "rounds": rounds})
    return rows


def of_ray_s() -> float:
    """CPU seconds of Ray's own processes so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            ticks += sum(map(int, fields.split()[11:13])) if name.endswith(("(raylet", "(gcs_server")) else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    args = arguments(__doc__, __file__, data={"default": REPOSITORY / "data/epyc-zen4-1core"}).parse_args()
    made = provenance(__file__, [args.data, OBJECTS], seeds=[args.seed])
    with zipfile.ZipFile(OBJECTS) as archive:
        bytes_ = float(np.mean([part.file_size for part in archive.infolist()]))
    driver_s = driver_seconds()
    times = times_of(Dataset.open(args.data).records, args.bandwidth, driver_s, bytes_)
    rng, rows, figures = np.random.default_rng(args.seed), [], []
    for devices in DEVICES:
        of_cores = {}
        for cores in CORES:
            programs = rng.integers(len(times.build_s), size=max(args.programs, 30 * cores, 100 * devices)).tolist()
            of_cores[cores] = simulate(times, programs, cores, devices)
            rows.append({"cores": cores, "devices": devices, **of_cores[cores]})
        best = max(row["labels_per_s"] for row in of_cores.values())
        enough = next(cores for cores in CORES if of_cores[cores]["labels_per_s"] >= _SATURATED * best)
        values = {f"{cores} cores": round(row["labels_per_s"], 2) for cores, row in of_cores.items()}
        name = f"labels/s, {devices} devices (from {enough} cores on bound by {of_cores[enough]['bound_by']})"
        figures.append(figure(name, values, args.programs, [args.seed]))
    checked = measured(args.measure, args.networks, args.seed, driver_s) if args.measure else []
    for row in checked:
        values = {"measured, labels/s": row["labels_per_s"], "simulated": row["simulated"], "noise": row["noise"]}
        values["difference, %"] = 100 * (row["labels_per_s"] / row["simulated"] - 1)
        values["CPU s of Ray a label"] = row["ray_cpu_s"]
        figures.append(figure(f"{row['where']}, {row['builders']} builders", values, args.measure, [args.seed]))
    means = {"build_s": float(times.build_s.mean()), "run_s": float(times.run_s[times.run_s > 0].mean())}
    failed = math.fsum(times.run_s == 0) / len(times.run_s)
    report(args.json, made, figures, rows=rows, times={**means, "driver_s": driver_s, "transfer_s": times.transfer_s,
           "object_bytes": bytes_, "not_measured": failed}, measured=checked)  # fmt: skip


if __name__ == "__main__":
    start(main)
