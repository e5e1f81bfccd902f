"""Several datasets -> one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.dataset.devices import unite_devices
from cdmpp.dataset.record import Record
from cdmpp.dataset.store import Dataset, find_datasets
from cdmpp.errors import DatasetError


@dataclass(frozen=True)
class Conflict:
    """A program and device of which two datasets have different records. All of them are kept.

    Attributes
    ----------
    records
        (dataset, status, latency_s) of each record; the latency is None for a failure.
    """

    program: str
    device: str
    records: tuple[tuple[str, str, float | None], ...]

    @property
    def relative_difference(self) -> float | None:
        """(largest - smallest) / smallest latency; None unless two records are ok."""
        latencies = [latency_s for _, _, latency_s in self.records if latency_s is not None]
        return max(latencies) / min(latencies) - 1 if len(latencies) > 1 else None


@dataclass(frozen=True)
class MergeReport:
    """What :func:`merge` did.

    Attributes
    ----------
    path
        Of the merged dataset.
    records
        Records in it.
    identical
        Records that were left out because an identical one is there.
    conflicts
        Pairs of program and device that two datasets measured differently.
    redefined
        ``kind hash`` of tasks, spaces and programs that two datasets define differently; the first is kept.
    """

    path: Path
    records: int
    identical: int
    conflicts: tuple[Conflict, ...]
    redefined: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values: counts, and the conflicts one by one."""
        return {
            "path": str(self.path),
            "records": self.records,
            "identical": self.identical,
            "redefined": list(self.redefined),
            "conflicts": [
                {
                    "program": conflict.program,
                    "device": conflict.device,
                    "relative_difference": conflict.relative_difference,
                    "records": [list(record) for record in conflict.records],
                }
                for conflict in self.conflicts
            ],
        }


def merge(paths: Sequence[str | Path], out: str | Path) -> MergeReport:
    """Write one dataset with everything that several hold; the sources stay as they are.

    Identical records are kept once. Different records of the same program and device are all kept, and
    reported as a conflict if they come from different datasets (``labels()`` takes their median). Of tasks
    the networks are united; of a task, space or program that two datasets define differently the first is
    kept, and it is reported. The counts are also in the ``merged_from`` and ``merge`` entries of the new
    dataset's ``meta.json``.

    Raises
    ------
    DatasetError
        A source cannot be read, two have different devices of one name, or ``out`` exists or cannot be written.
    """
    folders = find_datasets(paths)
    sources = [Dataset.open(folder) for folder in folders]
    if Path(out).resolve() in {folder.resolve() for folder in folders}:
        raise DatasetError(f"{out} cannot be merged into itself; choose another folder")
    devices = unite_devices({str(source.path): source.devices for source in sources})
    families: dict[str, str] = {}
    for source in sources:
        families = {**source.network_families, **families}
    names = [str(folder) for folder in folders]
    redefined: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    by_pair: dict[tuple[str, str], list[tuple[str, Record]]] = {}
    identical = 0
    meta = {
        **_shared_meta(sources),
        "devices": {name: device.to_json() for name, device in devices.items()},
        "network_families": families,
        "merged_from": names,
    }
    with Dataset.create(out, **meta) as merged:
        for name, source in zip(names, sources, strict=True):
            for task in source.tasks.values():
                known = merged.tasks.get(task.hash)
                if known is not None and known.tir_json != task.tir_json:
                    redefined.append(f"task {task.hash}")
                merged.add_task(task)
            for space in source.spaces.values():
                if merged.spaces.get(space.hash, space) != space:
                    redefined.append(f"space {space.hash}")
                merged.add_space(space)
            for program in source.programs.values():
                known_program = merged.programs.get(program.hash)
                if known_program is not None and known_program.task_hash != program.task_hash:
                    redefined.append(f"program {program.hash}")
                merged.add_program(program)
            for record in source.iter_records():
                key = (record.program, record.device, record.status, record.latency_s, record.measured_at)
                if key in seen:
                    identical += 1
                    continue
                if record.program not in merged.programs:
                    continue  # a damaged line took the program away: the record says nothing without it
                seen.add(key)
                merged.add_record(record)
                by_pair.setdefault((record.program, record.device), []).append((name, record))
        conflicts = tuple(_conflicts(by_pair))
        counts = {"identical": identical, "conflicts": len(conflicts), "redefined": redefined}
        merged.update_meta(merge=counts)
        merged.finalize()
    return MergeReport(Path(out), len(seen), identical, conflicts, tuple(redefined))


def _conflicts(by_pair: Mapping[tuple[str, str], list[tuple[str, Record]]]) -> list[Conflict]:
    return [
        Conflict(program, device, tuple((name, r.status, r.latency_s) for name, r in records))
        for (program, device), records in sorted(by_pair.items())
        if len({name for name, _ in records}) > 1
    ]


def _shared_meta(sources: Sequence[Dataset]) -> dict[str, Any]:
    """Entries of ``meta.json`` that all sources have alike."""
    own = ("schema_version", "created_at", "network_families", "merged_from", "merge", "devices")
    first = sources[0].meta
    return {
        key: value
        for key, value in first.items()
        if key not in own and all(source.meta.get(key) == value for source in sources)
    }
