"""NeuSight's traces as graphs of library tasks.

A trace lists the nodes of a torch.fx graph in the order of execution, with the operators of each phase. To read it:

* for a language model, a trace holds only **one** of its equal **layers**; NeuSight repeats it when it adds up a network
  (``aggregate_gpt`` in its source). Here ``layers`` and ``layer_bounds`` of ``importers.yaml`` set the ``repeat`` of nodes;
* nodes without operators (``misc``) are views and numbers, but also some kernels that NeuSight counts as zero time
  (embeddings, masks, copies, the gradient of a maximum). Here these move memory, as their names and shapes imply;
* a binary operator's second tensor may be a number or be broadcast; only the shapes show it, not the operator;
* ``label_bwall`` is the measured backward pass *without* the accumulation of gradients, ``neusight_bwall`` *with* it. Neither
  is used, because the phases are stored separately;
* every node was timed alone between two events, so that even a view took about 10 us.

Nodes run one after the other on one stream, unless a column ``Prev`` names the nodes that each node waits for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp.dataset.importers.common import Import, literal, refuse_implausible
from cdmpp.device import Device
from cdmpp.errors import DatasetError
from cdmpp.files import shipped_table
from cdmpp.program import generators
from cdmpp.program.graph import GraphNode, NetworkGraph, network_graph
from cdmpp.program.library_ops import BINARY, ELEMENTWISE_FLOPS
from cdmpp.program.network import library_task
from cdmpp.program.types import Task

#: A generator and its arguments.
Call = tuple[str, dict[str, Any]]
Shape = tuple[int, ...]
#: Rows of a trace, one node each.
Rows = list[dict[str, Any]]

#: How NeuSight's files are read (``importers.yaml``).
HOW: Mapping[str, Any] = shipped_table("dataset/importers/importers.yaml")["neusight"]


class UnknownOperatorError(DatasetError):
    """There is no generator for an operator."""


#: Phase -> column of its operators, and suffix of its columns of times.
_PHASES = {"forward": ("FwOps", "fw"), "backward": ("BwOps", "bw"), "accumulate": ("AccOps", "acc")}

#: Predictors whose predictions a trace may contain, besides the measured ``label``.
SOURCES: tuple[str, ...] = ("neusight", "habitat", "roofline", "micro")

#: Devices share a graph if their traces are equal in these columns (and in ``Prev``).
_STRUCTURE = ("Name", "OpName", "FwOps", "BwOps", "AccOps", "InputShapes", "OutputShape")

#: A node's time is checked against its operators' roofline times this factor: what the node reads may be in caches.
_IN_TRACE = 0.5


def read_traces(path: Path, frame: pd.DataFrame, found: Import) -> list[NetworkGraph]:
    """The graphs of all networks of a file. Devices whose traces have the same nodes share a graph. Errors name the row."""
    if "dtype" in frame:
        # This is the dtype of a node's output: float32 networks, too, have masks (bool) and row numbers (int64).
        dtypes = frame["dtype"].fillna("float32").astype(str).str.removeprefix("torch.")
        other = dtypes.str.contains("float") & (dtypes != "float32")
        for name, dtype in dict.fromkeys(zip(frame["desc"][other], dtypes[other], strict=True)):
            found.notes.append(f"{name}: left out, as its numbers are {dtype}, not float32")
        frame = frame[~frame["desc"].isin(set(frame["desc"][other]))]
    devices = found.resolve(frame["device"], path)
    structure = [column for column in (*_STRUCTURE, "Prev") if column in frame]
    graphs: list[NetworkGraph] = []
    networks = frame.groupby("desc", sort=False)
    for number, (description, rows) in enumerate(networks):
        found.progress(f"{path.name}: networks", number, len(networks))
        variants: dict[tuple[Any, ...], list[tuple[Device, Rows]]] = {}
        for device, trace in rows.groupby("device", sort=False):
            key = tuple(map(tuple, trace[structure].astype(str).to_numpy()))
            variants.setdefault(key, []).append((devices[str(device)], trace.to_dict("records")))
        for variant, traces in enumerate(variants.values(), start=1):
            name = str(description) if variant == 1 else f"{description}-variant{variant}"
            graphs.append(_Reader(path, name, traces, found).graph())
    return graphs


def add_end_to_end(path: Path, table: pd.DataFrame, graphs: Sequence[NetworkGraph], found: Import) -> list[NetworkGraph]:
    """Add the measured and predicted latencies of whole networks, in seconds, to their graphs. Rows of several devices that
    work together (``option`` such as ``tp4``) or of networks without a trace are skipped and counted in the notes."""
    devices = found.resolve(table["device"], path)
    totals: list[tuple[dict[str, float], dict[str, dict[str, float]]]] = [({}, {}) for _ in graphs]
    left = 0
    for row in table.to_dict("records"):
        option = row.get("option", "")
        alone = option != option or option in ("", None)
        device = devices[row["device"]].name
        key = (row["model_name"], row["mode"], row["seqlen"], row["batch"])
        known = [(i, graph.meta) for i, graph in enumerate(graphs) if device in graph.meta["devices"]]
        names = ("model", "mode", "seq", "batch")
        match = next((i for i, meta in known if alone and key == tuple(map(meta.get, names))), None)
        if match is None:
            left += 1
            continue
        measured, predicted = totals[match]
        for source in ("label", *SOURCES):
            value = row.get(f"{source}_all_e2e_latency")
            if value is not None and value > 0:
                target = measured if source == "label" else predicted.setdefault(source, {})
                target[device] = float(value) / 1e3
    if left:
        found.notes.append(f"{path.name}: {left} rows are of networks without a trace, or of several devices at work")
    return [
        replace(graph, measured_s=measured, predicted_s=predicted)
        for graph, (measured, predicted) in zip(graphs, totals, strict=True)
    ]


class _Reader:
    """Reads one network from the traces of several devices that have the same nodes."""

    def __init__(self, path: Path, name: str, traces: Sequence[tuple[Device, Rows]], found: Import) -> None:
        self.path, self.name, self.traces, self.found = path, name, traces, found
        self.rows = traces[0][1]
        self.made: dict[str, Task] = {}
        self.names: list[str] = []  # repeated names get a number
        seen: Counter[str] = Counter()
        for row in self.rows:
            seen[row["Name"]] += 1
            number = seen[row["Name"]]
            self.names.append(row["Name"] if number == 1 else f"{row['Name']}#{number}")

    def graph(self) -> NetworkGraph:
        first = self.rows[0]
        repeats = self._repeats(str(first["model"]))
        nodes = [self._node(i, "forward", repeats[i]) for i in range(len(self.rows))]
        for i in reversed(range(len(self.rows))):
            nodes += [self._node(i, phase, repeats[i]) for phase in ("backward", "accumulate")]
        kept = ("model", "mode", "seq", "batch")
        meta: dict[str, Any] = {key: first[key] for key in kept if key in first}
        meta["devices"] = sorted(device.name for device, _ in self.traces)
        meta.update(source="neusight", layers=max(repeats))
        return network_graph(self.name, self._connected([node for node in nodes if node]), meta=meta)

    def _connected(self, nodes: Sequence[GraphNode]) -> list[GraphNode]:
        """The nodes in a chain, or, if the trace has ``Prev``, each forward node after those that it waits for."""
        waits: dict[str, tuple[str, ...]] = {}
        if "Prev" in self.rows[0]:
            for i, (name, row) in enumerate(zip(self.names, self.rows, strict=True)):
                waits[name] = tuple(sorted(map(str, literal(row["Prev"], self._where(i)) or ())))
        connected: list[GraphNode] = []
        for node in nodes:
            last = (connected[-1].name,) if connected else ()
            connected.append(replace(node, inputs=waits.get(node.name, last)))
        return connected

    def _repeats(self, model: str) -> list[float]:
        repeats = [1.0] * len(self.rows)
        bounds = next((b for part, b in HOW["layer_bounds"].items() if part in model), None)
        second = any("_layer_1_" in name or "_layers_1_" in name or "_h_1_" in name for name in self.names)
        if bounds is None or second or not set(bounds) <= set(self.names):
            return repeats
        if model not in HOW["layers"]:
            self.found.notes.append(f"{self.name}: the number of layers of {model} is unknown: its one layer runs once")
            return repeats
        first, last = map(self.names.index, bounds)
        return [float(HOW["layers"][model]) if first <= i <= last else 1.0 for i in range(len(self.rows))]

    def _node(self, i: int, phase: str, repeat: float) -> GraphNode | None:
        row, name = self.rows[i], self.names[i]
        column, suffix = _PHASES[phase]
        operator = str(row["OpName"])
        ops = literal(row[column], self._where(i)) or []
        inputs = shapes(literal(row["InputShapes"], self._where(i)))
        output = shape(literal(row["OutputShape"], self._where(i)))
        measured, predicted = self._seconds(i, suffix)
        if phase != "forward" and not ops and not any(measured.values()):
            return None
        try:
            if phase == "forward":
                before = self.names[i - 1] if i else ""
                kind, calls = forward_calls(name, operator, ops, inputs, output, before)
            else:
                calls = phase_calls(operator, ops)
                if phase == "backward" and not ops:
                    calls = unlisted_backward_calls(name, inputs, output)
                kind = "kernel" if calls else "view"
        except UnknownOperatorError as err:
            self.found.unknown[str(err)] += 1
            kind, calls = "unknown", []
        tasks = [self._task(call) for call in calls]
        if phase == "forward":
            self._check(i, [task for task, call in zip(tasks, calls, strict=True) if call[0] != "memory"])
        family = row.get("family")
        return GraphNode(
            name=name if phase == "forward" else f"{name}.{phase}",
            tasks=tuple(task.hash for task in tasks),
            repeat=repeat,
            operator=operator,
            kind=kind,
            phase=phase,
            family=family if isinstance(family, str) else "",
            input_shapes=inputs,
            output_shape=output,
            measured_s=measured,
            predicted_s=predicted,
        )

    def _task(self, call: Call) -> Task:
        text = generators.describe(*call)
        if text not in self.made:
            task = library_task(*call)
            self.made[text] = self.found.tasks.setdefault(task.hash, task)
        return self.made[text]

    def _seconds(self, i: int, suffix: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        measured: dict[str, float] = {}
        predicted: dict[str, dict[str, float]] = {}
        for device, rows in self.traces:
            for source in ("label", *SOURCES):
                value = rows[i].get(f"{source}_{suffix}")
                if value is not None and value == value:
                    target = measured if source == "label" else predicted.setdefault(source, {})
                    target[device.name] = float(value) / 1e3
        return measured, predicted

    def _check(self, i: int, tasks: Sequence[Task]) -> None:
        """Refuse a node whose measured time contradicts the roofline of its operators."""
        if not tasks:
            return
        flops = np.array([_IN_TRACE * sum(task.flops for task in tasks)])
        n_bytes = np.array([_IN_TRACE * max(task.bytes for task in tasks)])
        for device, rows in self.traces:
            latency_ms = rows[i]["label_fw"]
            if latency_ms and latency_ms == latency_ms:  # a node that was not run has 0
                seconds = np.array([latency_ms / 1e3])
                refuse_implausible(seconds, flops, n_bytes, device, lambda _: self._where(i))

    def _where(self, i: int) -> str:
        return f"{self.path}, {self.name}, node {self.names[i]}"


def shapes(value: Any) -> tuple[Shape, ...]:
    """The shapes in a list; an item that is no shape (a number, None) counts as a single value, of shape (1,)."""
    return tuple(shape(item) for item in value) if isinstance(value, list | tuple) else ()


def shape(value: Any) -> Shape:
    """The given shape as a tuple; (1,) if it is no shape."""
    if isinstance(value, list | tuple) and all(isinstance(size, int) for size in value):
        return tuple(value)
    return (1,)


def base_name(name: str) -> str:
    """The name of a node without its number: ``masked_fill_1`` -> ``masked_fill``."""
    return re.sub(r"(_\d+)+$", "", name)


def _ends_in(name: str, kind: str) -> bool:
    """Whether a node's name is, or ends in ``_`` followed by, one of the names of a kind (``nodes`` in ``importers.yaml``)."""
    return any(f"_{name}".endswith(f"_{end}") for end in HOW["nodes"][kind])


def forward_calls(
    name: str, operator: str, ops: Sequence[Any], inputs: Sequence[Shape], output: Shape, before: str = ""
) -> tuple[str, list[Call]]:
    """The kind of a node (see :mod:`cdmpp.program.graph`) and the calls of its forward pass (UnknownOperatorError names an
    unknown operator). ``contiguous`` and ``reshape`` copy only if the node ``before`` transposed their input."""
    if operator in ("getitem", "output"):
        return "view", []
    base = base_name(name)
    if base in ("contiguous", "reshape"):
        transposed = base_name(before) in ("transpose", "permute", "t")
        return ("kernel", [_move(inputs[:1], output)]) if transposed else ("view", [])
    if ops:
        calls = [_call(op, inputs if number == 0 else (), output) for number, op in enumerate(ops)]
        return "kernel", calls
    if not inputs or math.prod(output) == 1:
        return "view", []  # a placeholder, a weight, a number
    if _ends_in(base, "moves"):
        return "kernel", [_move(inputs, output)]
    if _ends_in(base, "views"):
        return "view", []
    raise UnknownOperatorError(base)


def phase_calls(operator: str, ops: Sequence[Any]) -> list[Call]:
    """The calls of a backward or accumulation phase (UnknownOperatorError as in :func:`forward_calls`).

    In NeuSight, the gradients of a sum and of a tuple's element move memory; PyTorch passes them on unchanged."""
    if operator in ("VECadd", "VECaddu", "getitem") and all(op[0] == "MEM" for op in ops):
        return []
    return [_call(op, (), ()) for op in ops]


def unlisted_backward_calls(name: str, inputs: Sequence[Shape], output: Shape) -> list[Call]:
    """The calls of a node's backward pass if the trace lists no operators for it; none for a view.

    The gradient of the maximum of two tensors is ``where(a == b, grad / 2, grad).masked_fill(a < b, 0)`` in PyTorch: two
    comparisons, which write next to nothing, a division, a selection and a fill. NeuSight counts it as zero; it is an eighth of
    OPT's training. A lookup's gradient is a table of zeros (if the trace has its size) to which rows are added."""
    base = base_name(name)
    elements = math.prod(output)
    if elements == 1:
        return []
    if re.search(r"(^|_)max$", base) and len(inputs) == 2:
        return [("memory", {"elements": elements, "inputs": read}) for read in (0, 1, 2, 0, 1)]
    if _ends_in(base, "lookups"):
        rows: Call = ("memory", {"elements": elements, "inputs": 2})
        table = math.prod(inputs[1]) if len(inputs) == 2 else 0
        return [("memory", {"elements": table, "inputs": 0}), rows] if table else [rows]
    return []


#: Operator -> generator, and the generator's argument names for the operator's sizes.
_GENERATORS: dict[str, tuple[str, Sequence[str]]] = {
    "Linear": ("linear", "mnk"), "BMM": ("bmm", "bmnk"), "VECsoftmax": ("softmax", ("rows", "columns")),
    "VECln": ("layer_norm", ("rows", "columns")),
}  # fmt: skip


def _call(op: Any, inputs: Sequence[Shape], output: Shape) -> Call:
    try:
        name, sizes = op
        if name in _GENERATORS:
            generator, arguments = _GENERATORS[name]
            return generator, dict(zip(arguments, sizes, strict=True))
        if name == "MEM":
            moved = shapes(sizes)
            return _move(moved[:-1], moved[-1])
        kind = name.removeprefix("VEC")
        if name.startswith("VEC") and kind in ELEMENTWISE_FLOPS:
            rows, columns = sizes
            return _elementwise(kind, (rows, columns), inputs, output)
    except (TypeError, ValueError, IndexError) as err:
        raise DatasetError(f"operator {op!r} has not the sizes that its kind has") from err
    raise UnknownOperatorError(str(name))


def _move(inputs: Sequence[Shape], output: Shape) -> Call:
    """A memory call that reads the inputs as large as the largest tensor, and writes the output if that is as large."""
    largest = max(math.prod(s) for s in (*inputs, output))
    read = sum(math.prod(s) == largest for s in inputs)
    if math.prod(output) < largest:
        read -= 1  # a reduction reads one tensor and writes next to nothing, the same traffic as a fill
    return "memory", {"elements": largest, "inputs": max(read, 0)}


def _elementwise(op: str, flat: Shape, inputs: Sequence[Shape], output: Shape) -> Call:
    """The operator with its actual second operand: a number, a broadcast tensor, or a tensor of the same shape."""
    same = ("elementwise", {"op": op, "shape": list(flat)})
    if op not in BINARY or len(inputs) != 2:
        return same
    sizes = [math.prod(s) for s in inputs]
    total = math.prod(flat)
    if 1 in sizes and total > 1:
        return "elementwise", {"op": f"{op}u", "shape": list(flat)}
    if sizes[0] == sizes[1] or max(sizes) != total:
        return same
    small = inputs[0] if sizes[0] < sizes[1] else inputs[1]
    first, second = _collapse(output, (1,) * (len(output) - len(small)) + small)
    return "elementwise", {"op": op, "shape": first, "other": second}


def _collapse(output: Shape, small: Shape) -> tuple[list[int], list[int]]:
    """Both shapes with neighbouring dimensions merged if all of them are broadcast, or none."""
    first: list[int] = []
    second: list[int] = []
    before: bool | None = None
    for size, other in zip(output, small, strict=True):
        if size == 1:
            continue
        there = other == size
        if there == before:
            first[-1] *= size
            second[-1] *= size if there else 1
        else:
            first.append(size)
            second.append(size if there else 1)
        before = there
    return first, second
