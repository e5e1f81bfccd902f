"""NeuSight's measurements (Lee, Phanishayee and Mahajan, ASPLOS'25) as a dataset of library tasks, and its traces as networks.

Three kinds of file, told apart by their columns:

* **operators**, one measurement a row: ``op``, ``device``, ``latency_ms`` and the dimensions. Every distinct operator and
  shape is a task that a library runs; every row is a record in seconds. Of ``bmm`` and ``linear``, ``N`` is the reduction
  and ``K`` the output dimension; ``linear`` has a bias; convolutions are square and have none; what ends in ``u`` takes a
  tensor and a number. Latencies are of the whole call between two CUDA events, launch included;
* **traces**, one node of a network a row (:mod:`cdmpp.dataset.importers.neusight_traces`);
* **end-to-end** latencies, one network a row: they are added to the networks of the traces.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from cdmpp.dataset.importers.neusight_traces import TRACE_COLUMNS, add_end_to_end, read_traces
from cdmpp.errors import DatasetError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from cdmpp.dataset.record import Record
    from cdmpp.device import Device, DeviceTable
    from cdmpp.program.graph import NetworkGraph
    from cdmpp.program.types import Task

logger = logging.getLogger(__name__)

_ELEMENTWISE = ("add", "mul", "div", "pow", "addu", "mulu", "divu", "powu", "tanh", "relu", "gelu")
_ROWS = {"rows": "B", "columns": "H"}

#: Operator -> generator, and its arguments' columns.
_OPERATORS: dict[str, tuple[str, dict[str, str]]] = {
    "linear": ("linear", {"m": "M", "n": "N", "k": "K"}),
    "bmm": ("bmm", {"b": "B", "m": "M", "n": "N", "k": "K"}),
    "conv": (
        "conv2d",
        {
            "batch": "B",
            "in_channels": "conv_in_channels",
            "out_channels": "conv_out_channels",
            "kernel": "conv_kernel",
            "size": "conv_input_hw",
            "stride": "conv_stride",
            "padding": "conv_padding",
        },
    ),
    "softmax": ("softmax", _ROWS),
    "ln": ("layer_norm", _ROWS),
    **dict.fromkeys(_ELEMENTWISE, ("elementwise", {"rows": "B", "columns": "H"})),
}

#: Winograd and the like do a 3x3 convolution with fewer multiplications than its formula has: at most by this factor.
_FAST_CONVOLUTION = 5.0

#: Columns that go into a record's meta.
_META = ("op", "split", "authors_used")
#: Columns of which the dataset's meta has all values.
_VERSIONS = ("torch_version", "cuda_version", "cudnn_version")
#: How a matrix product or convolution was launched, which tells its tiles; of the others it follows from the shape.
_TILED = ("bmm", "linear", "conv")
_LAUNCH = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
#: Kernel names of templates are hundreds of characters long; those that tell a tile are short.
_KERNEL_CHARS = 64

OPERATOR_COLUMNS: tuple[str, ...] = ("op", "device", "latency_ms")
END_TO_END_COLUMNS: tuple[str, ...] = (
    "device",
    "model_name",
    "mode",
    "seqlen",
    "batch",
    "label_all_e2e_latency",
)

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "operators": ("op", OPERATOR_COLUMNS),
    "traces": ("FwOps", TRACE_COLUMNS),
    "end-to-end": ("label_all_e2e_latency", END_TO_END_COLUMNS),
}


@dataclass(frozen=True)
class _Operator:
    """Rows of one operator: its generator, the arguments of each row, and their work."""

    generator: str
    fixed: Mapping[str, Any]
    columns: Mapping[str, NDArray[np.int64]]
    rows: NDArray[np.int64]

    def arguments(self, i: int) -> dict[str, Any]:
        return self.shaped({name: int(values[i]) for name, values in self.columns.items()})

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """Arguments as the generator takes them."""
        if self.generator != "elementwise":
            return values
        return {**self.fixed, "shape": [values["rows"], values["columns"]]}


def import_neusight(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    table: DeviceTable | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import files of NeuSight's columns into a new dataset.

    Parameters
    ----------
    paths
        Parquet or CSV files: operators, traces, end-to-end latencies.
    out
        Folder of the new dataset; graphs are written to ``networks/*.json`` in it.
    table
        Known devices; None for :func:`cdmpp.device.load_table`.
    limit
        Take so many rows of each file of operators, spread evenly.

    Raises
    ------
    DatasetError
        A file cannot be read, lacks a column, or has a latency that physics rules out (the row is named); the folder
        is a dataset already.
    UnknownDeviceError
        A device is not in the table.
    NetworkError
        The nodes of a trace wait for each other.
    """
    from cdmpp.dataset.store import write_dataset
    from cdmpp.device import load_table
    from cdmpp.program.graph import FOLDER, save_graph
    from cdmpp.program.space import unscheduled

    refuse_existing(out)
    table = table or load_table()
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    frames: dict[str, list[tuple[Path, pd.DataFrame]]] = {kind: [] for kind in _KINDS}
    for path in map(Path, files):
        frame = read_table(path)
        frames[_kind(frame, path)].append((path, frame))
    unknown: Counter[str] = Counter()
    notes: list[str] = []
    operators = [
        (path, *_checked_operators(path, frame.iloc[evenly(len(frame), limit)], table, unknown))
        for path, frame in frames["operators"]
    ]
    tasks: dict[str, Task] = {}
    graphs: list[NetworkGraph] = []
    for path, frame in frames["traces"]:
        graphs.extend(read_traces(path, frame, table, tasks, unknown, notes, progress))
    for path, frame in frames["end-to-end"]:
        graphs = add_end_to_end(path, frame, table, graphs, notes)
    if len({graph.name for graph in graphs}) < len(graphs):
        raise DatasetError("two files have traces of the same network: import them into different datasets")
    meta = {
        "source": "neusight",
        "licence": "NeuSight (ASPLOS'25), MIT",
        "files": [path.name for path in map(Path, files)],
        "versions": _versions([frame for _, frame in frames["operators"]]),
        "network_families": {graph.name: str(graph.meta["model"]) for graph in graphs},
    }
    for graph in graphs:
        for task_hash, weight in graph.task_weights().items():
            task = tasks[task_hash]
            tasks[task_hash] = replace(task, networks={**task.networks, graph.name: weight})
    records: list[Record] = []
    for path, operator_rows, frame, devices in operators:
        records.extend(_records(path, operator_rows, frame, devices, tasks, progress))
    programs = [unscheduled(task) for task in tasks.values()]
    write_dataset(out, tasks.values(), (), programs, records, **meta)
    for graph in graphs:
        save_graph(graph, Path(out) / FOLDER / f"{graph.name}.json")
    used = {device.name for *_, devices in operators for device in devices.values()}
    used.update(device for graph in graphs for device in graph.meta["devices"])
    return ImportReport(
        Path(out),
        {"ok": len(records)},
        len(tasks),
        len(programs),
        sorted(used),
        dict(unknown.most_common()),
        tuple(graph.name for graph in graphs),
        tuple(notes),
    )


def _versions(frames: Iterable[pd.DataFrame]) -> dict[str, list[str]]:
    """Versions of the libraries that measured, as far as the files tell."""
    found: dict[str, set[str]] = {}
    for frame in frames:
        for column in _VERSIONS:
            if column in frame:
                found.setdefault(column, set()).update(map(str, frame[column].dropna().unique()))
    return {column: sorted(values) for column, values in found.items()}


def _kind(frame: pd.DataFrame, path: Path) -> str:
    for kind, (mark, columns) in _KINDS.items():
        if mark in frame:
            require_columns(frame, columns, path)
            return kind
    expected = "; ".join(f"{kind} have {', '.join(columns)}" for kind, (_, columns) in _KINDS.items())
    raise DatasetError(f"{path} is none of NeuSight's tables: {expected}")


def _checked_operators(
    path: Path, frame: pd.DataFrame, table: DeviceTable, unknown: Counter[str]
) -> tuple[list[_Operator], pd.DataFrame, dict[str, Device]]:
    """The rows by operator, all their latencies found plausible."""
    import numpy as np

    from cdmpp.program.library_ops import operator_bytes, operator_flops

    devices = resolve_devices(frame["device"], table, path)
    dtypes = frame["dtype"].to_numpy(str) if "dtype" in frame else np.full(len(frame), "float32")
    names = frame["op"].to_numpy(str)
    found: list[_Operator] = []
    for op in dict.fromkeys(names):
        chosen = names == op
        for dtype in sorted(set(dtypes[chosen]) - {"float32"}):
            unknown[f"{op} ({dtype})"] += int((chosen & (dtypes == dtype)).sum())
        rows = np.flatnonzero(chosen & (dtypes == "float32"))
        if op not in _OPERATORS:
            if len(rows):
                unknown[op] += len(rows)
            continue
        if not len(rows):
            continue
        generator, columns = _OPERATORS[op]
        require_columns(frame, columns.values(), path)
        dimensions = {name: _dimension(frame, column, rows, op, path) for name, column in columns.items()}
        if op == "linear" and "B" in frame:
            dimensions["m"] = dimensions["m"] * _dimension(frame, "B", rows, op, path)
        found.append(_Operator(generator, {"op": op} if generator == "elementwise" else {}, dimensions, rows))
    seconds = frame["latency_ms"].to_numpy(dtype=np.float64) / 1e3
    owners = frame["device"].to_numpy(str)
    for operator in found:
        arguments = operator.shaped({k: v.astype(np.float64) for k, v in operator.columns.items()})
        flops = np.broadcast_to(
            np.asarray(operator_flops(operator.generator, arguments), float), len(operator.rows)
        )
        n_bytes = operator_bytes(operator.generator, arguments)
        if operator.generator == "conv2d":
            flops = flops / _FAST_CONVOLUTION
        for name, device in devices.items():
            here = np.flatnonzero(owners[operator.rows] == name)
            if len(here):
                refuse_implausible(
                    seconds[operator.rows[here]], flops[here], n_bytes[here], device,
                    _row_namer(path, frame, operator, here),
                )  # fmt: skip
    return found, frame, devices


def _dimension(
    frame: pd.DataFrame, column: str, rows: NDArray[np.int64], op: str, path: Path
) -> NDArray[np.int64]:
    import numpy as np

    values = frame[column].iloc[rows]
    smallest = 0 if column == "conv_padding" else 1
    wrong = values.isna().to_numpy() | ~(values.fillna(smallest).to_numpy(dtype=np.float64) >= smallest)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise DatasetError(
            f"{path}, row {frame.index[rows[first]]}: {op} has {column} = {values.iloc[first]}, expected a whole number "
            f"of at least {smallest}"
        )
    return values.to_numpy(dtype=np.int64)


def _row_namer(
    path: Path, frame: pd.DataFrame, operator: _Operator, here: NDArray[np.int64]
) -> Callable[[int], str]:
    def name(i: int) -> str:
        row = int(operator.rows[here[i]])
        shape = ", ".join(f"{k}={v[here[i]]}" for k, v in operator.columns.items())
        return f"{path}, row {frame.index[row]} ({frame['op'].iloc[row]} {shape})"

    return name


def _records(
    path: Path,
    operators: Iterable[_Operator],
    frame: pd.DataFrame,
    devices: Mapping[str, Device],
    tasks: dict[str, Task],
    progress: Progress | None,
) -> Iterable[Record]:
    """A record a row in the order of the file; the tasks of all distinct shapes are added."""
    import numpy as np

    from cdmpp.dataset.record import Record
    from cdmpp.program.tasks import library_task

    programs = np.full(len(frame), "", dtype=object)
    for number, operator in enumerate(operators, start=1):
        matrix = np.stack(list(operator.columns.values()), axis=1)
        _, first, inverse = np.unique(matrix, axis=0, return_index=True, return_inverse=True)
        hashes = np.empty(len(first), dtype=object)
        for i, row in enumerate(first):
            task = library_task(operator.generator, operator.arguments(int(row)))
            tasks.setdefault(task.hash, task)
            hashes[i] = task.hash
            if progress is not None and i % 256 == 0:
                progress(f"{path.name}: shapes of operator {number}", i, len(first))
        programs[operator.rows] = hashes[inverse.reshape(-1)]
    known = np.flatnonzero(programs != "")
    chosen = frame.iloc[known]
    seconds = (chosen["latency_ms"].to_numpy(dtype=np.float64) / 1e3).tolist()
    names = [devices[name].name for name in chosen["device"]]
    for program, device, latency_s, meta in zip(programs[known], names, seconds, _metas(chosen), strict=True):
        yield Record(program, device, "ok", latency_s, meta=meta)


def _metas(frame: pd.DataFrame) -> Iterable[dict[str, Any]]:
    """What is kept of each row besides its label."""
    present = {column: frame[column].tolist() for column in _META if column in frame}
    kernels = frame["kernel_name"].astype(str).tolist() if "kernel_name" in frame else [""] * len(frame)
    tiled = frame["op"].isin(_TILED).tolist()
    launch = None
    if all(column in frame for column in _LAUNCH):
        launch = frame[list(_LAUNCH)].fillna(0).to_numpy(dtype=int).tolist()
    for i, number in enumerate(frame.index):
        meta: dict[str, Any] = {"session": "neusight", "row": int(number)}
        meta.update({name: values[i] for name, values in present.items() if values[i] == values[i]})
        if launch is not None and tiled[i] and launch[i][0]:
            meta.update(kernel=kernels[i][:_KERNEL_CHARS], grid=launch[i][:3], block=launch[i][3:])
        yield meta
