"""What every dataset can be asked, whether it is one folder or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.codec import join_meta
from cdmpp.dataset.devices import unite_devices
from cdmpp.dataset.record import Record
from cdmpp.program.types import Program, Space, Task

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.device import Device


class DatasetView:
    """Tasks, spaces, programs and records, to be read."""

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Hash -> task."""
        raise NotImplementedError

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Hash -> design space."""
        raise NotImplementedError

    @property
    def programs(self) -> Mapping[str, Program]:
        """Hash -> program."""
        raise NotImplementedError

    @property
    def records(self) -> pd.DataFrame:
        """All records, one a row, columns :data:`cdmpp.dataset.schema.RECORD_COLUMNS`.

        ``latency_s`` and ``noise`` are NaN where there is none, ``task`` and ``origin`` are "" where the
        program is unknown.
        """
        raise NotImplementedError

    @property
    def network_families(self) -> Mapping[str, str]:
        """Network -> family, as far as the dataset's ``meta.json`` tells."""
        raise NotImplementedError

    @property
    def devices(self) -> Mapping[str, Device]:
        """Device name -> the specification that its records were measured under (DatasetError where there is none, or two
        datasets have different ones)."""
        raise NotImplementedError

    @property
    def parts(self) -> Sequence[Any]:
        """The datasets that this one is made of: itself, or several."""
        return [self]

    def task_of(self, program: Program) -> Task:
        """The task that a program of this dataset schedules (KeyError for none).

        Tasks of one hash may call their blocks differently, and a program's trace names them: where several datasets have the
        task, this is that of the dataset which has the program.
        """
        return self.tasks[program.task_hash]

    @property
    def network_names(self) -> list[str]:
        """The networks whose tasks are here, sorted."""
        return sorted({name for task in self.tasks.values() for name in task.networks})

    @property
    def device_names(self) -> list[str]:
        """The devices with records, sorted."""
        return sorted(set(self.records["device"]))

    def iter_records(self) -> Iterator[Record]:
        """The records as objects, meta included."""
        for row in self.records.to_dict("records"):
            yield Record(
                program=row["program"],
                device=row["device"],
                status=row["status"],
                latency_s=None if row["latency_s"] != row["latency_s"] else row["latency_s"],
                samples_s=tuple(row["samples_s"]),
                noise=None if row["noise"] != row["noise"] else row["noise"],
                error=row["error"],
                measured_at=row["measured_at"],
                meta=join_meta({str(name): value for name, value in row.items()}),
            )

    def labels(self, devices: Sequence[str] | None = None, aggregate: str = "median") -> pd.DataFrame:
        """One label per (program, device): see :func:`cdmpp.dataset.labels.label_table`."""
        from cdmpp.dataset.labels import label_table

        return label_table(self.records, devices=devices, aggregate=aggregate)

    def summary(self) -> dict[str, Any]:
        """What ``cdmpp dataset --json`` writes: see :func:`cdmpp.dataset.summary.summarise`."""
        from cdmpp.dataset.summary import summarise

        return summarise(self)


class DatasetCollection(DatasetView):
    """Several datasets read as one. Made by :func:`load_datasets`.

    The first dataset that has a task, space or program defines it; the networks of a task are united.
    Records are all kept, in the order of the datasets.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)

    @property
    def parts(self) -> Sequence[Any]:
        return self._parts

    def task_of(self, program: Program) -> Task:
        for part in self._parts:
            if program.hash in part.programs:
                return part.task_of(program)
        return super().task_of(program)

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for part in self._parts:
            for task in part.tasks.values():
                tasks[task.hash] = unite_networks(tasks[task.hash], task) if task.hash in tasks else task
        return tasks

    @cached_property
    def _spaces(self) -> dict[str, Space]:
        return {key: space for part in reversed(self._parts) for key, space in part.spaces.items()}

    @cached_property
    def _programs(self) -> dict[str, Program]:
        return {key: program for part in reversed(self._parts) for key, program in part.programs.items()}

    @cached_property
    def _records(self) -> pd.DataFrame:
        import pandas as pd

        return pd.concat([part.records for part in self._parts], ignore_index=True)

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        return unite_devices({str(part.path): part.devices for part in self._parts})

    @property
    def tasks(self) -> Mapping[str, Task]:
        return self._tasks

    @property
    def spaces(self) -> Mapping[str, Space]:
        return self._spaces

    @property
    def programs(self) -> Mapping[str, Program]:
        return self._programs

    @property
    def records(self) -> pd.DataFrame:
        return self._records

    @property
    def network_families(self) -> Mapping[str, str]:
        return {
            name: family for part in reversed(self._parts) for name, family in part.network_families.items()
        }


def unite_networks(task: Task, other: Task) -> Task:
    """The task with the networks of both; on a network of both, the first weight stays."""
    from dataclasses import replace

    if set(other.networks) <= set(task.networks):
        return task
    return replace(task, networks={**other.networks, **task.networks})


def load_datasets(paths: str | Path | Sequence[str | Path]) -> DatasetView:
    """Read dataset folders, or folders that contain some, as one dataset.

    Parameters
    ----------
    paths
        A folder or several. A folder without ``meta.json`` stands for the datasets right below it.

    Raises
    ------
    DatasetError
        A path does not exist or holds no dataset; a file is damaged.
    SchemaVersionError
        A dataset was written with another schema version.
    """
    from cdmpp.dataset.store import Dataset, find_datasets

    if isinstance(paths, str | Path):
        paths = [paths]
    parts = [Dataset.open(folder) for folder in find_datasets(paths)]
    return parts[0] if len(parts) == 1 else DatasetCollection(parts)
