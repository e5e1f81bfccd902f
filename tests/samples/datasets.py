"""Small datasets for tests: made-up tasks and programs, real files."""

from __future__ import annotations

import random
from pathlib import Path

from cdmpp.dataset import Dataset, Record
from cdmpp.dataset.record import join_meta
from cdmpp.program.types import Program, Space, Task

DEVICE = "xeon-cascadelake-2.5ghz@1"
OTHER_DEVICE = "xeon-cascadelake-2.5ghz@2"


def task(number: int, networks: dict[str, float] | None = None) -> Task:
    """Task ``number``; equal numbers are equal tasks."""
    tir = f'{{"tir": {number}}}'
    return Task(f"{number:016x}", f"fused_{number}", tir, networks or {"net": 1.0}, 2e6 * number, 3e4)


def space(number: int) -> Space:
    """The only design space of task ``number``."""
    return Space(f"space{number:011x}", f"{number:016x}", "llvm", 1, 0, '[["GetSBlock"], ["Split"]]')


def program(number: int, of_task: int = 1, origin: str = "random") -> Program:
    """Program ``number`` of a task."""
    key = f"{of_task:04x}{number:012x}"
    return Program(key, f"{of_task:016x}", f"space{of_task:011x}", f"[[0,[{number},4]]]", origin)


def record(number: int, of_task: int = 1, device: str = DEVICE, latency_s: float | None = None) -> Record:
    """An ok record with samples, noise and meta."""
    latency_s = 1e-3 * (number + 1) if latency_s is None else latency_s
    samples_s = (latency_s * 0.99, latency_s * 1.01)
    meta = {"build_s": 0.5, "attempts": 1, "session": "s1", "host": "h"}
    return Record(program(number, of_task).hash, device, "ok", latency_s, samples_s, 0.02, "", 1.7e9 + number, meta)


def failure(number: int, of_task: int = 1, status: str = "build_error", device: str = DEVICE) -> Record:
    """A failed record."""
    return Record(program(number, of_task).hash, device, status, error=f"{status}: no", measured_at=1.7e9 + number)


def records_of(dataset: Dataset) -> list[Record]:
    """The records as objects, meta included."""
    names = ("program", "device", "status", "latency_s", "noise", "samples_s", "error", "measured_at")
    frame = dataset.records
    frame = frame.assign(
        **{name: frame[name].astype(object).where(frame[name].notna(), None) for name in ("latency_s", "noise")}
    )
    return [Record(**{name: row[name] for name in names}, meta=join_meta(row)) for row in frame.to_dict("records")]


def add_all(dataset: Dataset, number: int, of_task: int = 1, networks: dict[str, float] | None = None) -> None:
    """Add a program with its task and space."""
    dataset.add_task(task(of_task, networks))
    dataset.add_space(space(of_task))
    dataset.add_program(program(number, of_task))


def add_measured(dataset: Dataset, *numbers: int, of_task: int = 1) -> None:
    """Add programs with their task and space, and an ok record of each."""
    for number in numbers:
        add_all(dataset, number, of_task)
        dataset.add_record(record(number, of_task))


def small_dataset(path: Path, n: int = 6, finalize: bool = False) -> Dataset:
    """A growing dataset of one task with ``n`` programs, the last one failed; closed."""
    with Dataset.create(path, network_families={"net": "cnn"}) as dataset:
        add_measured(dataset, *range(n - 1))
        add_all(dataset, n - 1)
        dataset.add_record(failure(n - 1))
        if finalize:
            dataset.finalize()
    return Dataset.open(path)


def zoo_dataset(path: Path, networks: int = 8, seed: int = 0, devices: tuple[str, ...] = (DEVICE,)) -> Dataset:
    """Networks ``net0``... with three tasks of their own each and some that neighbours share."""
    rng = random.Random(seed)
    families = {f"net{i}": f"family{i // 2}" for i in range(networks)}
    with Dataset.create(path, network_families=families) as dataset:
        for net in range(networks):
            for own in range(3):
                number = 100 * net + own
                members = {f"net{net}": 1.0}
                if own == 0:
                    members[f"net{(net + 1) % networks}"] = 2.0
                for p in range(4):
                    add_all(dataset, p, number, members)
                    for device in devices:
                        dataset.add_record(record(p, number, device, 1e-3 * (1 + rng.random())))
    return Dataset.open(path)
