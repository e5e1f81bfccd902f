"""Imports NeuSight's measurements (Lee, Phanishayee and Mahajan, ASPLOS'25): library tasks as a dataset, traces as networks.

There are three kinds of files, which differ in their columns:

* **operators**, one measurement per row: ``op``, ``device``, ``latency_ms`` and the dimensions. Every distinct operator and
  shape becomes a task that a library runs; every row becomes a record in seconds. In ``bmm`` and ``linear``, ``N`` is the
  reduction and ``K`` the output dimension. ``linear`` has a bias; convolutions are square and have none. Operators whose name
  ends in ``u`` take a tensor and a number. Latencies are those of the whole call between two CUDA events, launch included;
* **traces**, one node of a network per row (:mod:`cdmpp.dataset.importers.neusight_traces`);
* **end-to-end** latencies, one network per row, which are added to the networks of the traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset.importers import common
from cdmpp.dataset.importers.neusight_traces import HOW, add_end_to_end, read_traces
from cdmpp.dataset.record import Record
from cdmpp.device import Device, DeviceTable
from cdmpp.errors import DatasetError
from cdmpp.program.graph import FOLDER, NetworkGraph, save_graph
from cdmpp.program.library_ops import operator_work
from cdmpp.program.network import library_task
from cdmpp.program.space import unscheduled

#: Columns that are stored in a record's meta.
_META = ("op", "split", "authors_used")
#: Columns whose distinct values are stored in the dataset's meta.
_VERSIONS = ("torch_version", "cuda_version", "cudnn_version")
#: Operators whose launch is stored, because it reveals their tiles, and its columns; other launches follow from the shape.
_TILED = ("bmm", "linear", "conv")
_LAUNCH = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]
#: Kernel names are cut to this length. Those of templates have hundreds of characters; names that reveal a tile are short.
_KERNEL_CHARS = 64


def import_neusight(
    paths: common.Paths,
    out: str | Path,
    *,
    table: DeviceTable | None = None,
    limit: int | None = None,
    progress: common.Progress | None = None,
) -> common.ImportReport:
    """Import parquet or CSV files of operators, traces and end-to-end latencies into a new dataset.

    Graphs of networks are written to ``networks/*.json`` in it. ``limit`` is the maximum number of rows per operator file.
    Raises the errors of :func:`cdmpp.dataset.importers.import_benchmark_hub`, and NetworkError if a trace has a cycle.
    """
    found = common.Import(paths, out, table, progress)
    frames: dict[str, list[tuple[Path, pd.DataFrame]]] = {kind: [] for kind in HOW["files"]}
    for path, frame in found.frames:
        frames[_kind(frame, path)].append((path, frame))
    checked = [_checked(path, common.evenly(frame, limit), found) for path, frame in frames["operators"]]
    graphs: list[NetworkGraph] = []
    for path, frame in frames["traces"]:
        graphs.extend(read_traces(path, frame, found))
    for path, frame in frames["end-to-end"]:
        graphs = add_end_to_end(path, frame, graphs, found)
    if len({graph.name for graph in graphs}) < len(graphs):
        raise DatasetError("two files have traces of the same network: import them into different datasets")
    for graph in graphs:
        found.devices.update(graph.meta["devices"])
        for task_hash, weight in graph.task_weights().items():
            task = found.tasks[task_hash]
            found.tasks[task_hash] = replace(task, networks={**task.networks, graph.name: weight})
    for operators in checked:
        found.records.extend(_records(operators, found))
    found.programs = {program.hash: program for program in map(unscheduled, found.tasks.values())}
    report = found.write(
        tuple(graph.name for graph in graphs),
        source="neusight",
        licence="NeuSight (ASPLOS'25), MIT",
        versions=_versions([frame for _, frame in frames["operators"]]),
        network_families={graph.name: str(graph.meta["model"]) for graph in graphs},
    )
    for graph in graphs:
        save_graph(graph, found.out / FOLDER / f"{graph.name}.json")
    return report


def _versions(frames: Sequence[pd.DataFrame]) -> dict[str, list[str]]:
    """Versions of the libraries that were measured, as far as the files have them."""
    values = {name: [frame[name].dropna() for frame in frames if name in frame] for name in _VERSIONS}
    return {name: sorted(set(map(str, pd.concat(found)))) for name, found in values.items() if found}


def _kind(frame: pd.DataFrame, path: Path) -> str:
    files: dict[str, dict[str, Any]] = HOW["files"]
    for kind, file in files.items():
        if file["only"] in frame:
            common.require_columns(frame, file["columns"], path)
            return kind
    expected = "; ".join(f"{kind} have {', '.join(file['columns'])}" for kind, file in files.items())
    raise DatasetError(f"{path} is none of NeuSight's tables: {expected}")


@dataclass(frozen=True)
class _Operators:
    """A file of operators: its rows, and the arguments of each known operator, indexed by the row's position in `frame`."""

    path: Path
    frame: pd.DataFrame
    devices: dict[str, Device]
    arguments: dict[str, pd.DataFrame]

    def name(self, op: str, place: int) -> str:
        """Describes a row for error messages."""
        shape = ", ".join(f"{k}={v}" for k, v in self.arguments[op].loc[place].items())
        return f"{self.path}, row {self.frame.index[place]} ({op} {shape})"


def _checked(path: Path, frame: pd.DataFrame, found: common.Import) -> _Operators:
    """The operators of a file with the arguments of their rows, after checking that all latencies are plausible."""
    devices = found.resolve(frame["device"], path)
    found.devices.update(device.name for device in devices.values())
    operators = _Operators(path, frame, devices, {})
    dtypes = frame["dtype"].astype(object).fillna("none").to_numpy(str) if "dtype" in frame else np.full(len(frame), "float32")
    names = frame["op"].astype(object).fillna("none").to_numpy(str)  # a missing one would cut all names to one letter
    for op in dict.fromkeys(names):
        found.unknown.update(f"{op} ({dtype})" for dtype in dtypes[(names == op) & (dtypes != "float32")])
        places = np.flatnonzero((names == op) & (dtypes == "float32"))
        if op not in HOW["operators"]:
            found.unknown.update([op] * len(places))
        elif len(places):
            operators.arguments[op] = _arguments(path, frame, op, places)
    frame["latency_ms"] = pd.to_numeric(frame["latency_ms"], errors="coerce")
    seconds = frame["latency_ms"].to_numpy(dtype=np.float64, na_value=np.nan) / 1e3
    owners = frame["device"].to_numpy(str)
    for op, arguments in operators.arguments.items():
        generator, values = _call(op, dict(arguments.astype(np.float64)))
        work, elements = operator_work(generator, values)
        flops = np.broadcast_to(np.asarray(work, float), len(arguments))
        if generator == "conv2d":
            flops = flops / common.CONV_GAIN
        n_bytes = 4 * np.asarray(elements)
        for name, device in devices.items():
            here = np.flatnonzero(owners[arguments.index] == name)
            places = arguments.index[here]
            common.refuse_implausible(
                seconds[places], flops[here], n_bytes[here], device,
                lambda i, op=op, places=places: operators.name(op, places[i]),  # type: ignore[misc]
            )  # fmt: skip
    return operators


def _arguments(path: Path, frame: pd.DataFrame, op: str, places: NDArray[np.int64]) -> pd.DataFrame:
    columns = HOW["operators"][op]["columns"]
    common.require_columns(frame, columns.values(), path)
    made = {name: _dimension(path, frame, column, op, places) for name, column in columns.items()}
    if op == "linear" and "B" in frame:
        made["m"] = made["m"] * _dimension(path, frame, "B", op, places)
    return pd.DataFrame(made, index=places)


def _dimension(path: Path, frame: pd.DataFrame, column: str, op: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    values = frame[column].iloc[places]
    smallest = 0 if column == "conv_padding" else 1
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = ~((numbers >= smallest) & (numbers < 2**53) & (numbers % 1 == 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        given = f"{op} has {column} = {values.iloc[first]}"
        raise DatasetError(f"{path}, row {values.index[first]}: {given}, expected a whole number of at least {smallest}")
    return numbers.astype(np.int64)


def _call(op: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The generator of an operator, and the arguments in the form that the generator takes."""
    generator = HOW["operators"][op]["generator"]
    if generator == "elementwise":
        arguments = {"op": op, "shape": [arguments["rows"], arguments["columns"]]}
    return generator, arguments


def _records(operators: _Operators, found: common.Import) -> Iterator[Record]:
    """One record per row, in the order of the file; adds the tasks of all distinct shapes to the import."""
    programs = np.full(len(operators.frame), "", dtype=object)
    for op, arguments in operators.arguments.items():
        shapes = arguments.groupby(list(arguments.columns), sort=False).indices
        for i, (key, rows) in enumerate(shapes.items()):
            task = library_task(*_call(op, dict(zip(arguments.columns, map(int, key), strict=True))))
            found.tasks.setdefault(task.hash, task)
            programs[arguments.index[rows]] = task.hash
            if i % 256 == 0:
                found.progress(f"{operators.path.name}: shapes of {op}", i, len(shapes))
    known = np.flatnonzero(programs != "")
    frame = operators.frame.iloc[known]
    seconds = (frame["latency_ms"].to_numpy(dtype=np.float64) / 1e3).tolist()
    rows = zip(programs[known], frame["device"], seconds, _metas(frame), strict=True)
    for program, device, latency_s, meta in rows:
        yield Record(program, operators.devices[device].name, "ok", latency_s, meta=meta)


def _metas(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The meta of each row's record: what is kept besides the label."""
    kept = frame[[column for column in (*_META, "kernel_name") if column in frame]].to_dict("records")
    launches = np.zeros((len(frame), len(_LAUNCH)), dtype=np.int64)
    if set(_LAUNCH) <= set(frame):
        launches = frame[_LAUNCH].fillna(0).to_numpy(dtype=np.int64)
    for number, row, launch in zip(frame.index, kept, launches.tolist(), strict=True):
        kernel = str(row.pop("kernel_name", ""))
        meta: dict[str, Any] = {"session": "neusight", "row": int(number)}
        meta.update({name: value for name, value in row.items() if value == value})
        if row["op"] in _TILED and launch[0]:
            meta.update(kernel=kernel[:_KERNEL_CHARS], grid=launch[:3], block=launch[3:])
        yield meta
