"""The AutoTuning Association's benchmark hub as a dataset of scheduled GPU programs.

A row is a configuration of a kernel on a GPU: its parameters, and its latency or why there is none. It becomes the
scheduled TIR program it stands for (:mod:`cdmpp.program.kernels`), stored as the kernel's name and the parameters' values.
Every configuration is a program of its own, whichever GPUs it ran on; configurations that did not compile or run are
failure records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.dataset.importers.common import (
    ImportReport,
    Progress,
    evenly,
    read_table,
    refuse_existing,
    refuse_implausible,
    require_columns,
    resolve_devices,
)
from cdmpp.dataset.importers.neusight_calls import literal
from cdmpp.errors import DatasetError, ProgramError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from cdmpp.dataset.record import Record
    from cdmpp.device import Device, DeviceTable
    from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

COLUMNS: tuple[str, ...] = ("kernel", "gpu", "problem_size", "status", "latency_ms")

#: Status in the hub -> status of a record. Kernel Tuner names a failure after its exception.
_STATUSES: dict[str, str] = {
    "ok": "ok",
    "CompilationFailedConfig": "build_error",
    "RuntimeFailedConfig": "run_error",
    "InvalidConfig": "invalid_config",
    "TimeoutConfig": "run_timeout",
}

#: Columns that go into a record's meta, as they are called there.
_META = {"collection": "collection", "kernel": "kernel", "n_rep": "repeats", "rep_cv": "cv"}


@dataclass(frozen=True)
class _Kernel:
    """How to read the rows of a kernel.

    Attributes
    ----------
    task, generator
        Generators of the unscheduled task and of a configuration's program.
    sizes
        Names of the numbers of ``problem_size``, in order.
    fixed
        Other arguments of the task, which the hub's scripts have as constants.
    from_columns
        Arguments of the task that are columns.
    defaults
        Parameters that older kernels have not, and what they do instead.
    """

    task: str
    generator: str
    sizes: tuple[str, ...]
    fixed: Mapping[str, int]
    from_columns: Mapping[str, str]
    defaults: Mapping[str, int]


_KERNELS: dict[str, _Kernel] = {
    "convolution": _Kernel(
        "image_convolution", "kernel_tuner_convolution", ("width", "height"), {},
        {"filter_height": "p_filter_height", "filter_width": "p_filter_width"}, {"use_shmem": 1, "use_cmem": 1},
    ),
    "gemm": _Kernel(
        "gemm", "clblast_gemm", ("m", "n"), {}, {}, {"STRM": 0, "STRN": 0},
    ),
    "dedispersion": _Kernel(
        "dedispersion", "kernel_tuner_dedispersion", ("samples", "measures"),
        {"channels": 1536, "max_shift": 650}, {}, {},
    ),
}  # fmt: skip


def import_benchmark_hub(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    table: DeviceTable | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import tables of configurations into a new dataset.

    Parameters
    ----------
    paths
        Parquet or CSV files with :data:`COLUMNS` and one ``p_...`` column for each parameter.
    out
        Folder of the new dataset.
    table
        Known devices; None for :func:`cdmpp.device.load_table`.
    limit
        Take so many rows of each file, spread evenly.

    Raises
    ------
    DatasetError
        A file cannot be read, lacks a column, or has a latency that physics rules out (the row is named); the folder
        is a dataset already.
    UnknownDeviceError
        A device is not in the table.
    """
    from cdmpp.dataset.store import write_dataset
    from cdmpp.device import load_table

    refuse_existing(out)
    table = table or load_table()
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    unknown: Counter[str] = Counter()
    notes: list[str] = []
    groups: list[_Group] = []
    for path in files:
        frame = read_table(path)
        require_columns(frame, COLUMNS, path)
        groups.extend(_groups(path, frame.iloc[evenly(len(frame), limit)], table, unknown))
    for group in groups:
        group.check()
    made = _Made()
    for group in groups:
        made.add(group, progress)
    without = sum(program is None for program in made.configurations.values())
    if without:
        notes.append(
            f"{without} configurations stand for no program: their parameters do not divide each other"
        )
    programs = {program.hash: program for program in made.configurations.values() if program is not None}
    write_dataset(
        out,
        made.tasks.values(),
        made.spaces.values(),
        programs.values(),
        made.records,
        source="benchmark_hub",
        licence="AutoTuning Association benchmark hub, MIT",
        files=[path.name for path in files],
    )
    return ImportReport(
        Path(out),
        dict(Counter(record.status for record in made.records)),
        len(made.tasks),
        len(programs),
        sorted({group.device.name for group in groups}),
        dict(unknown.most_common()),
        (),
        tuple(notes),
    )


@dataclass(frozen=True)
class _Group:
    """The rows of one kernel, problem and GPU."""

    path: Path
    kernel: _Kernel
    problem: Mapping[str, int]
    device: Device
    frame: pd.DataFrame
    values: NDArray[np.int64]
    statuses: Sequence[str]
    parameters: tuple[str, ...]

    def name(self, i: int) -> str:
        """Row `i`, for people."""
        values = ", ".join(f"{p}={v}" for p, v in zip(self.parameters, self.values[i], strict=True))
        return f"{self.path}, row {self.frame.index[i]} ({self.frame['kernel'].iloc[i]} {values})"

    def seconds(self) -> NDArray[np.float64]:
        import numpy as np

        return self.frame["latency_ms"].to_numpy(dtype=np.float64) / 1e3

    def check(self) -> None:
        """Refuse latencies that cannot be: below the roofline by far, or all far above it."""
        import numpy as np

        flops, n_bytes = _work(self.kernel.task, self.problem)
        ok = np.flatnonzero(np.array(self.statuses) == "ok")
        if not len(ok):
            return
        seconds = self.seconds()[ok]
        work = np.full(len(ok), flops), np.full(len(ok), n_bytes)
        refuse_implausible(seconds, *work, self.device, lambda i: self.name(int(ok[i])), slow=False)
        best = int(np.argmin(seconds))
        one = slice(best, best + 1)
        refuse_implausible(
            seconds[one], work[0][one], work[1][one], self.device, lambda _: self.name(int(ok[best]))
        )


def _groups(path: Path, frame: pd.DataFrame, table: DeviceTable, unknown: Counter[str]) -> Iterator[_Group]:
    import numpy as np

    from cdmpp.program.generators import kernel_parameters

    devices = resolve_devices(frame["gpu"], table, path)
    for (name, gpu, size), rows in frame.groupby(["kernel", "gpu", "problem_size"], sort=False):
        kernel = _KERNELS.get(str(name).removesuffix("_milo"))
        if kernel is None:
            unknown[str(name)] += len(rows)
            continue
        foreign = ~rows["status"].isin(list(_STATUSES))
        for status, count in rows["status"][foreign].value_counts().items():
            unknown[f"{name}, status {status}"] += int(count)
        rows = rows[~foreign]
        if not len(rows):
            continue
        parameters = kernel_parameters(kernel.generator)
        columns = []
        for parameter in parameters:
            column = f"p_{parameter}"
            default = kernel.defaults.get(parameter)
            if default is None:
                require_columns(rows, [column], path)
            values = rows[column] if column in rows else rows["kernel"].map(lambda _: None)
            if default is not None:
                values = values.fillna(default)
            if values.isna().any():
                first = rows.index[int(np.flatnonzero(values.isna())[0])]
                raise DatasetError(f"{path}, row {first}: {name} has no {column}")
            columns.append(values.to_numpy(dtype=np.int64))
        statuses = [_STATUSES[status] for status in rows["status"]]
        for problem, chosen in _problems(path, kernel, str(size), rows):
            yield _Group(
                path,
                kernel,
                problem,
                devices[str(gpu)],
                rows.iloc[chosen],
                np.stack(columns, axis=1)[chosen],
                [statuses[i] for i in chosen],
                parameters,
            )


def _problems(
    path: Path, kernel: _Kernel, size: str, rows: pd.DataFrame
) -> Iterator[tuple[dict[str, int], NDArray[np.int64]]]:
    """Arguments of the task, and the rows that have them."""
    import numpy as np

    numbers = literal(size, f"{path}, problem_size")
    if not isinstance(numbers, list | tuple) or len(numbers) < len(kernel.sizes):
        raise DatasetError(
            f"{path}: problem_size {size!r} of {kernel.task} should be {', '.join(kernel.sizes)}"
        )
    problem = {**dict(zip(kernel.sizes, map(int, numbers), strict=False)), **kernel.fixed}
    if kernel.task == "gemm":
        problem["k"] = problem["m"]  # the grid has no third dimension; the hub's matrices are square
    if not kernel.from_columns:
        yield problem, np.arange(len(rows))
        return
    columns = list(kernel.from_columns.values())
    require_columns(rows, columns, path)
    numbers = rows[columns].to_numpy(dtype=np.int64)
    for distinct in np.unique(numbers, axis=0):
        more = dict(zip(kernel.from_columns, map(int, distinct), strict=True))
        yield {**problem, **more}, np.flatnonzero((numbers == distinct).all(axis=1))


def _work(task: str, problem: Mapping[str, int]) -> tuple[float, float]:
    """FLOPs and bytes of a problem."""
    p = problem
    if task == "gemm":
        sides = p["m"] * p["k"] + p["k"] * p["n"] + 2 * p["m"] * p["n"]
        return float(2 * p["m"] * p["n"] * p["k"]), 4.0 * sides
    if task == "image_convolution":
        image = p["height"] * p["width"]
        return float(2 * image * p["filter_height"] * p["filter_width"]), 8.0 * image
    sums = p["samples"] * p["measures"]
    return float(sums * p["channels"]), float(p["channels"] * (p["samples"] + p["max_shift"]) + 4 * sums)


@dataclass
class _Made:
    """What the groups have become so far.

    ``configurations`` has the program of each space and decisions, None where the parameters make none.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    spaces: dict[str, Space] = field(default_factory=dict)
    configurations: dict[tuple[str, str], Program | None] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def add(self, group: _Group, progress: Progress | None) -> None:
        """Programs and records of a group."""
        import json

        from cdmpp.dataset.record import Record
        from cdmpp.program.space import generator_space

        task = _task(group.kernel.task, group.problem)
        space = generator_space(task.hash, group.kernel.generator, group.parameters, group.problem)
        self.tasks[task.hash], self.spaces[space.hash] = task, space
        frame, seconds = group.frame, group.seconds().tolist()
        build_s = frame["compile_ms"].tolist() if "compile_ms" in frame else [0.0] * len(seconds)
        extra = {name: frame[column].tolist() for column, name in _META.items() if column in frame}
        for i, number in enumerate(frame.index):
            values = group.values[i].tolist()
            key = (space.hash, json.dumps(values, separators=(",", ":")))
            if key not in self.configurations:
                self.configurations[key] = _program(space, values)
            program = self.configurations[key]
            if program is None:
                continue
            status = group.statuses[i]
            meta = {
                "session": "benchmark_hub",
                "row": int(number),
                **{name: c[i] for name, c in extra.items()},
            }
            if build_s[i] and build_s[i] == build_s[i]:
                meta["build_s"] = build_s[i] / 1e3
            label = seconds[i] if status == "ok" else None
            error = "" if status == "ok" else str(frame["status"].iloc[i])
            self.records.append(
                Record(program.hash, group.device.name, status, label, error=error, meta=meta)
            )
            if progress is not None and i % 64 == 0:
                progress(f"{group.kernel.task} on {group.device.name}", i, len(seconds))


def _task(name: str, problem: Mapping[str, int]) -> Task:
    from cdmpp.program import generators
    from cdmpp.program.tvm_env import structural_hash
    from cdmpp.program.types import Task

    func = generators.build(name, problem)
    flops, n_bytes = _work(name, problem)
    return Task(structural_hash(func), name, generators.describe(name, problem), {}, flops, n_bytes)


def _program(space: Space, values: Sequence[int]) -> Program | None:
    """The program of a configuration; None where its parameters make none."""
    import json

    from cdmpp.program.space import build_program, generator_program
    from cdmpp.program.tvm_env import structural_hash

    try:
        func = build_program(space, json.dumps(list(values)))
    except ProgramError as err:
        logger.debug("no program of %s: %s", values, err)
        return None
    return generator_program(space, structural_hash(func), values)
