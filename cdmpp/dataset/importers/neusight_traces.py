"""NeuSight's traces as graphs of library tasks.

A trace lists the nodes of a torch.fx graph in the order of execution, with the operators of each phase. What has to be known
to read it:

* of a language model it holds **one layer** of all equal ones; NeuSight repeats it when it adds up a network
  (``aggregate_gpt`` in its source). :data:`LAYERS` and :data:`_LAYER_BOUNDS` say so here, as ``repeat`` of the nodes;
* nodes without operators (``misc``) are views and numbers, but also some kernels that NeuSight counts as nothing
  (embeddings, masks, copies, the gradient of a maximum): those move memory here, as their names and shapes say;
* a binary operator's second tensor may be a number or be broadcast, which not its operator but its shapes tell;
* ``label_bwall`` is the measured backward pass *less* the accumulation of gradients, ``neusight_bwall`` *plus* it. Neither is
  used: the phases are kept apart;
* every node was timed alone between two events, so that even a view took some 10 us.

Nodes follow each other on one stream unless a column ``Prev`` names those that each waits for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.importers.common import Progress, refuse_implausible, resolve_devices
from cdmpp.dataset.importers.neusight_calls import (
    Call,
    UnknownOperatorError,
    forward_calls,
    literal,
    phase_calls,
    shape,
    shapes,
    unlisted_backward_calls,
)
from cdmpp.program.graph import GraphNode, NetworkGraph, network_graph

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.device import Device, DeviceTable
    from cdmpp.program.types import Task

logger = logging.getLogger(__name__)

#: Model -> its number of equal layers, of which the trace holds the first.
LAYERS: dict[str, int] = {
    "bert_large": 24, "gpt2_large": 36, "gpt3_xl": 24, "gpt3_27": 32, "opt_13": 24,
}  # fmt: skip

#: Part of a model's name -> names of the first and the last node of that layer.
_LAYER_BOUNDS: dict[str, tuple[str, str]] = {
    "bert": ("bert_encoder_layer_0_attention_self_query", "bert_encoder_layer_0_output_layer_norm"),
    "gpt": ("transformer_h_0_ln_1", "add_15"),
    "opt": ("model_decoder_layers_0_self_attn_layer_norm", "view_11"),
}

#: Phase -> column of its operators, and the suffix of the columns of its times.
_PHASES: dict[str, tuple[str, str]] = {
    "forward": ("FwOps", "fw"),
    "backward": ("BwOps", "bw"),
    "accumulate": ("AccOps", "acc"),
}

#: Whose predictions a trace may have, besides the measured ``label``.
SOURCES: tuple[str, ...] = ("neusight", "habitat", "roofline", "micro")

_STRUCTURE = ("Name", "OpName", "FwOps", "BwOps", "AccOps", "InputShapes", "OutputShape")
TRACE_COLUMNS: tuple[str, ...] = (*_STRUCTURE, "device", "desc", "model", "mode", "label_fw")

#: The part of a node's whole time that its operators may be below their roofline: nodes are in caches' good graces.
_IN_TRACE = 0.5


def read_traces(
    path: Path,
    frame: pd.DataFrame,
    table: DeviceTable,
    tasks: dict[str, Task],
    unknown: Counter[str],
    notes: list[str],
    progress: Progress | None = None,
) -> list[NetworkGraph]:
    """Graphs of all networks of a file; devices whose traces have the same nodes share one.

    Parameters
    ----------
    tasks
        The nodes' tasks by hash; new ones are added.
    unknown, notes
        Operators without a task, and what else to say, are added.

    Raises
    ------
    DatasetError
        A cell cannot be read, or a measured time is ruled out by physics; the message names the row.
    UnknownDeviceError, NetworkError
        See :func:`cdmpp.dataset.importers.import_neusight`.
    """
    frame = _float32_only(frame, notes)
    devices = resolve_devices(frame["device"], table, path)
    structure = [column for column in (*_STRUCTURE, "Prev") if column in frame]
    graphs: list[NetworkGraph] = []
    descriptions = list(dict.fromkeys(frame["desc"]))
    for number, description in enumerate(descriptions):
        if progress is not None:
            progress(f"{path.name}: networks", number, len(descriptions))
        variants: dict[tuple[Any, ...], list[tuple[Device, pd.DataFrame]]] = {}
        for device, rows in frame[frame["desc"] == description].groupby("device", sort=False):
            key = tuple(map(tuple, rows[structure].astype(str).to_numpy()))
            variants.setdefault(key, []).append((devices[str(device)], rows))
        for variant, traces in enumerate(variants.values(), start=1):
            name = str(description) if variant == 1 else f"{description}-variant{variant}"
            graphs.append(_Reader(path, name, traces, tasks, unknown, notes).graph())
    return graphs


def _float32_only(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The rows of float32 networks; those of other types, which the tasks would be wrong for, are named in `notes`.

    The type is that of a node's output: masks and numbers of rows are bool and int64 in float32 networks, too.
    """
    if "dtype" not in frame:
        return frame
    dtypes = frame["dtype"].fillna("float32").astype(str).str.removeprefix("torch.")
    other = dtypes.str.contains("float") & (dtypes != "float32")
    for name, dtype in dict.fromkeys(zip(frame["desc"][other], dtypes[other], strict=True)):
        notes.append(f"{name}: left out, as its numbers are {dtype}, not float32")
    return frame[~frame["desc"].isin(set(frame["desc"][other]))]


def add_end_to_end(
    path: Path, frame: pd.DataFrame, table: DeviceTable, graphs: Sequence[NetworkGraph], notes: list[str]
) -> list[NetworkGraph]:
    """The graphs with the measured and predicted latencies of whole networks, in seconds.

    Rows of several devices at work (``option`` such as ``tp4``) or of networks without a trace are counted in `notes`.
    """
    devices = resolve_devices(frame["device"], table, path)
    found: dict[str, tuple[dict[str, float], dict[str, dict[str, float]]]] = {
        g.name: ({}, {}) for g in graphs
    }
    left = 0
    for row in frame.to_dict("records"):
        option = row.get("option", "")
        device = devices[row["device"]].name
        key = (
            row["model_name"],
            row["mode"],
            row["seqlen"],
            row["batch"],
            "" if option != option else option,
        )
        graph = next((g for g in graphs if _key(g) == key and device in g.meta["devices"]), None)
        if graph is None:
            left += 1
            continue
        measured, predicted = found[graph.name]
        for source in ("label", *SOURCES):
            value = row.get(f"{source}_all_e2e_latency")
            if value is not None and value > 0:
                target = measured if source == "label" else predicted.setdefault(source, {})
                target[device] = float(value) / 1e3
    if left:
        notes.append(
            f"{path.name}: {left} rows are of networks without a trace, or of several devices at work"
        )
    return [replace(g, measured_s=found[g.name][0], predicted_s=found[g.name][1]) for g in graphs]


def _key(graph: NetworkGraph) -> tuple[Any, ...]:
    meta = graph.meta
    return meta["model"], meta["mode"], meta.get("seq"), meta.get("batch"), ""


class _Reader:
    """Reads one network from the traces of the devices that have the same nodes of it."""

    def __init__(
        self,
        path: Path,
        name: str,
        traces: Sequence[tuple[Device, pd.DataFrame]],
        tasks: dict[str, Task],
        unknown: Counter[str],
        notes: list[str],
    ) -> None:
        self.path, self.name, self.traces = path, name, traces
        self.tasks, self.unknown, self.notes = tasks, unknown, notes
        self.rows = traces[0][1].to_dict("records")
        self.times = [(device, rows.to_dict("records")) for device, rows in traces]
        self.made: dict[str, Task] = {}
        self.names = _unique([str(row["Name"]) for row in self.rows])

    def graph(self) -> NetworkGraph:
        first = self.rows[0]
        repeats = self._repeats(str(first["model"]))
        forward = [self._node(i, "forward", repeats[i]) for i in range(len(self.rows))]
        nodes = [node for node in forward if node is not None]
        for i in reversed(range(len(self.rows))):
            more = (self._node(i, phase, repeats[i]) for phase in ("backward", "accumulate"))
            nodes.extend(node for node in more if node is not None)
        meta = {key: _plain(first[key]) for key in ("model", "mode", "seq", "batch") if key in first}
        return network_graph(
            self.name,
            self._connected(nodes),
            meta={
                **meta,
                "source": "neusight",
                "layers": max(repeats),
                "devices": sorted({device.name for device, _ in self.traces}),
            },
        )

    def _connected(self, nodes: Sequence[GraphNode]) -> list[GraphNode]:
        """Nodes in a row, unless the trace tells what each forward node waits for."""
        if "Prev" not in self.rows[0]:
            return [
                replace(node, inputs=(before.name,)) if before else node
                for before, node in zip((None, *nodes), nodes, strict=False)
            ]
        prev = {
            name: tuple(sorted(map(str, literal(row["Prev"], self._where(i)) or ())))
            for i, (name, row) in enumerate(zip(self.names, self.rows, strict=True))
        }
        last = [node.name for node in nodes if node.phase == "forward"][-1]
        connected: list[GraphNode] = []
        for node in nodes:
            if node.phase == "forward":
                connected.append(replace(node, inputs=prev[node.name]))
            else:
                connected.append(replace(node, inputs=(last,)))
                last = node.name
        return connected

    def _repeats(self, model: str) -> list[float]:
        repeats = [1.0] * len(self.rows)
        bounds = next((b for part, b in _LAYER_BOUNDS.items() if part in model), None)
        second = any("_layer_1_" in name or "_layers_1_" in name or "_h_1_" in name for name in self.names)
        if bounds is None or second or not set(bounds) <= set(self.names):
            return repeats
        if model not in LAYERS:
            self.notes.append(
                f"{self.name}: the number of layers of {model} is unknown: its one layer runs once"
            )
            return repeats
        for i in range(self.names.index(bounds[0]), self.names.index(bounds[1]) + 1):
            repeats[i] = float(LAYERS[model])
        return repeats

    def _node(self, i: int, phase: str, repeat: float) -> GraphNode | None:
        row = self.rows[i]
        column, suffix = _PHASES[phase]
        ops = literal(row[column], self._where(i)) or []
        inputs = shapes(literal(row["InputShapes"], self._where(i)))
        output = shape(literal(row["OutputShape"], self._where(i)))
        measured, predicted = self._seconds(i, suffix)
        if phase != "forward" and not ops and not any(measured.values()):
            return None
        try:
            if phase == "forward":
                before = self.names[i - 1] if i else ""
                kind, calls = forward_calls(self.names[i], str(row["OpName"]), ops, inputs, output, before)
            else:
                calls = phase_calls(str(row["OpName"]), ops)
                if phase == "backward" and not ops:
                    calls = unlisted_backward_calls(self.names[i], inputs, output)
                kind = "kernel" if calls else "view"
        except UnknownOperatorError as err:
            self.unknown[str(err)] += 1
            kind, calls = "unknown", []
        hashes = tuple(self._task(call).hash for call in calls)
        if phase == "forward":
            self._check(i, [call for call in calls if call[0] != "memory"], measured)
        family = row.get("family")
        return GraphNode(
            name=self.names[i] if phase == "forward" else f"{self.names[i]}.{phase}",
            tasks=hashes,
            repeat=repeat,
            operator=str(row["OpName"]),
            kind=kind,
            phase=phase,
            family=family if isinstance(family, str) else "",
            input_shapes=inputs,
            output_shape=output,
            measured_s=measured,
            predicted_s=predicted,
        )

    def _task(self, call: Call) -> Task:
        from cdmpp.program import generators
        from cdmpp.program.tasks import library_task

        text = generators.describe(*call)
        if text not in self.made:
            task = library_task(*call)
            self.made[text] = self.tasks.setdefault(task.hash, task)
        return self.made[text]

    def _seconds(self, i: int, suffix: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        measured: dict[str, float] = {}
        predicted: dict[str, dict[str, float]] = {}
        for device, rows in self.times:
            for source in ("label", *SOURCES):
                value = rows[i].get(f"{source}_{suffix}")
                if value is not None and value == value:
                    target = measured if source == "label" else predicted.setdefault(source, {})
                    target[device.name] = float(value) / 1e3
        return measured, predicted

    def _check(self, i: int, calls: Sequence[Call], measured: Mapping[str, float]) -> None:
        """Refuse a node whose measured time is ruled out by its operators' roofline."""
        import numpy as np

        if not calls:
            return
        made = [self._task(call) for call in calls]
        flops = np.array([_IN_TRACE * sum(task.flops for task in made)])
        n_bytes = np.array([_IN_TRACE * max(task.bytes for task in made)])
        for device, _ in self.times:
            seconds = measured.get(device.name, 0.0)
            if seconds:  # a node that was not run has 0
                refuse_implausible(np.array([seconds]), flops, n_bytes, device, lambda _: self._where(i))

    def _where(self, i: int) -> str:
        return f"{self.path}, {self.name}, node {self.names[i]}"


def _unique(names: Sequence[str]) -> list[str]:
    """Names, numbered where one occurs again."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
