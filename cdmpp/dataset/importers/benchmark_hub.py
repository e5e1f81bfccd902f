"""Imports the AutoTuning Association's benchmark hub as a dataset of scheduled GPU programs.

A row is a configuration of a kernel on a GPU: its parameters, and its latency or why there is none. It becomes the scheduled
TIR program that it stands for (:mod:`cdmpp.program.kernels`), stored as the kernel's name and the values of its parameters.
Each configuration is one program for all GPUs it ran on. Configurations that did not compile or run become failure records.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cdmpp.dataset.importers import common
from cdmpp.dataset.record import Record
from cdmpp.device import Device, DeviceTable
from cdmpp.errors import DatasetError, ProgramError
from cdmpp.files import shipped_table
from cdmpp.program import generators, structural_hash
from cdmpp.program.space import build_program, generator_program, generator_space
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

COLUMNS: tuple[str, ...] = ("kernel", "gpu", "problem_size", "status", "latency_ms")

#: How the hub's files are read (``importers.yaml``).
_HOW: Mapping[str, Any] = shipped_table("dataset/importers/importers.yaml")["benchmark_hub"]


class _Kernel(NamedTuple):
    """How to read the rows of a kernel (``importers.yaml``)."""

    task: str
    generator: str
    sizes: Sequence[str]
    fixed: Mapping[str, int] = {}
    in_columns: Sequence[str] = ()
    defaults: Mapping[str, int] = {}


def import_benchmark_hub(
    paths: common.Paths,
    out: str | Path,
    *,
    table: DeviceTable | None = None,
    limit: int | None = None,
    progress: common.Progress | None = None,
) -> common.ImportReport:
    """Import parquet or CSV files with :data:`COLUMNS` and one ``p_...`` column for each parameter into a new dataset.

    ``limit`` is the maximum number of rows per file, spread evenly; ``table`` holds the known devices (None:
    :func:`cdmpp.device.load_table`). DatasetError if a file cannot be read, lacks a column, or has a physically impossible
    latency (the row is named), or the folder is a dataset already. UnknownDeviceError if a device is not in the table."""
    found = common.Import(paths, out, table, progress)
    groups: list[_Group] = []
    for path, frame in found.frames:
        common.require_columns(frame, COLUMNS, path)
        frame = frame.assign(latency_ms=pd.to_numeric(frame["latency_ms"], errors="coerce"))
        groups.extend(_groups(path, common.evenly(frame, limit), found))
    for group in groups:
        group.check()
    # None if the parameters make no program
    configurations: dict[tuple[str, str], Program | None] = {}
    for group in groups:
        _add(group, found, configurations)
    without = list(configurations.values()).count(None)
    if without:
        found.notes.append(f"{without} configurations stand for no program: their parameters do not divide each other")
    return found.write(source="benchmark_hub", licence="AutoTuning Association benchmark hub, MIT")


@dataclass(frozen=True)
class _Group:
    """The rows of one kernel, problem and GPU; ``values`` has the values of the parameters, one column for each."""

    path: Path
    kernel: _Kernel
    problem: Mapping[str, int]
    device: Device
    rows: pd.DataFrame
    values: pd.DataFrame

    def name(self, i: int) -> str:
        """Describes row `i` for error messages."""
        values = ", ".join(f"{name}={value}" for name, value in self.values.iloc[i].items())
        return f"{self.path}, row {self.rows.index[i]} ({self.rows['kernel'].iloc[i]} {values})"

    def check(self) -> None:
        """Refuse impossible latencies: any that is far below the roofline, and the fastest if even that is far above it."""
        ok = np.flatnonzero(self.rows["status"] == "ok")
        if len(ok):
            seconds = self.rows["latency_ms"].to_numpy(dtype=np.float64, na_value=np.nan)[ok] / 1e3
            flops, n_bytes = (np.full(len(ok), work) for work in _work(self.kernel.task, self.problem))
            fastest = seconds == np.nanmin(seconds) if np.isfinite(seconds).any() else False
            common.refuse_implausible(seconds, flops, n_bytes, self.device, lambda i: self.name(int(ok[i])), fastest)


def _groups(path: Path, frame: pd.DataFrame, found: common.Import) -> Iterator[_Group]:
    devices = found.resolve(frame["gpu"], path)
    for (name, gpu, size), rows in frame.groupby(["kernel", "gpu", "problem_size"], sort=False):
        how = _HOW["kernels"].get(str(name).removesuffix("_milo"))
        if how is None:
            found.unknown[str(name)] += len(rows)
            continue
        kernel = _Kernel(**how)
        known = rows["status"].isin(list(_HOW["statuses"]))
        found.unknown.update(f"{name}, status {status}" for status in rows["status"][~known])
        rows = rows[known]
        if not len(rows):
            continue
        parameters = generators.kernel_parameters(kernel.generator)
        columns = [f"p_{parameter}" for parameter in (*parameters, *kernel.in_columns)]
        values = rows.assign(**{f"p_{key}": rows.get(f"p_{key}") for key in kernel.defaults})
        common.require_columns(values, columns, path)
        values = values[columns].rename(columns=lambda column: column.removeprefix("p_")).fillna(kernel.defaults)
        values = values.apply(pd.to_numeric, errors="coerce")
        for column in values:
            if (wrong := ~(values[column] % 1 == 0).fillna(False)).any():
                raise DatasetError(f"{path}, row {values.index[wrong][0]}: {name} has no p_{column}, or no whole number")
        values = values.astype(np.int64)
        problem, device = _problem(path, kernel, str(size)), devices[str(gpu)]
        if not kernel.in_columns:
            yield _Group(path, kernel, problem, device, rows, values)
            continue
        for key, chosen in values.groupby(list(kernel.in_columns)).indices.items():
            more = {**problem, **dict(zip(kernel.in_columns, map(int, key), strict=True))}
            configurations = values[list(parameters)].iloc[chosen]
            yield _Group(path, kernel, more, device, rows.iloc[chosen], configurations)


def _problem(path: Path, kernel: _Kernel, size: str) -> dict[str, int]:
    """Arguments of the task, except those that have a column."""
    numbers = common.literal(size, f"{path}, problem_size")
    listed = isinstance(numbers, list | tuple) and all(isinstance(number, int | float) for number in numbers)
    if not listed or len(numbers) < len(kernel.sizes):
        raise DatasetError(f"{path}: problem_size {size!r} of {kernel.task} should be {', '.join(kernel.sizes)}")
    problem = {**dict(zip(kernel.sizes, map(int, numbers), strict=False)), **kernel.fixed}
    if kernel.task == "gemm":
        problem["k"] = problem["m"]  # the grid has no third dimension; the hub's matrices are square
    return problem


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


def _add(group: _Group, found: common.Import, configurations: dict[tuple[str, str], Program | None]) -> None:
    """Add the task, space, programs and records of a group to the import."""
    name = group.kernel.task
    func = generators.build(name, group.problem)
    flops, n_bytes = _work(name, group.problem)
    task = Task(structural_hash(func), name, generators.describe(name, group.problem), {}, flops, n_bytes)
    space = generator_space(task.hash, group.kernel.generator, list(group.values.columns), group.problem)
    found.tasks[task.hash], found.spaces[space.hash] = task, space
    found.devices.add(group.device.name)
    rows = group.rows.to_dict("records")
    each = zip(group.rows.index, rows, group.values.to_numpy().tolist(), strict=True)
    for i, (number, row, values) in enumerate(each):
        key = (space.hash, json.dumps(values))
        if key not in configurations:
            configurations[key] = _program(space, values)
        program = configurations[key]
        if program is None:
            continue
        found.programs[program.hash] = program
        status = _HOW["statuses"][row["status"]]
        meta = {"session": "benchmark_hub", "row": int(number)}
        meta.update({kept: row[column] for column, kept in _HOW["meta"].items() if column in row})
        build_ms = row.get("compile_ms")
        if build_ms and build_ms == build_ms:
            meta["build_s"] = build_ms / 1e3
        label = {"latency_s": row["latency_ms"] / 1e3} if status == "ok" else {"error": str(row["status"])}
        found.records.append(Record(program.hash, group.device.name, status, **label, meta=meta))
        if i % 64 == 0:
            found.progress(f"{name} on {group.device.name}", i, len(rows))


def _program(space: Space, values: Sequence[int]) -> Program | None:
    """The program of a configuration; None if its parameters make no program."""
    try:
        func = build_program(space, json.dumps(list(values)))
    except ProgramError as err:
        logger.debug("no program of %s: %s", values, err)
        return None
    return generator_program(space, structural_hash(func), values)
