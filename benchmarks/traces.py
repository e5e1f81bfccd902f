"""Errors of predictions for traced networks, ours and those of other authors: by node, by family, end to end.

A row is a node, or a whole network, on one device: ``{"measured_s": seconds, "predicted_s": {source: seconds}, ...}``.
:data:`OURS` names this library as a source; the graph has the others (``neusight``, ``habitat``, ...). All sources are
compared on the rows that all of them predict (``n_common``). These leave out the hard rows, so each source is also compared
with ours on the rows that it predicts. APE is ``|predicted / measured - 1|``, a fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cdmpp.endtoend import LatencyReport
from cdmpp.program.graph import NetworkGraph

Row = dict[str, Any]

#: Source of this library's predictions.
OURS = "cdmpp"
#: Source with the sum of a network's measured node times: what a perfect predictor of nodes would predict for the network.
IN_TRACE = "in_trace"

#: Families of nodes that NeuSight predicts; it treats ``other`` nodes as memory transfers, or as nothing.
FAMILIES: tuple[str, ...] = ("BMM", "Linear", "EW", "LN", "Softmax")

#: Name of a library task -> family of operators; all other tasks are element-wise.
_TASK_FAMILIES: dict[str, str] = {
    "bmm": "bmm", "linear": "linear", "conv2d": "conv", "softmax": "softmax", "layer_norm": "layer_norm",
}  # fmt: skip
#: Operators that take fewer seconds are mostly launch overhead.
_LAUNCH_S = 5e-5


def node_rows(graph: NetworkGraph, report: LatencyReport) -> list[Row]:
    """Rows of a graph's nodes that have tasks and were measured on the report's device; seconds are of one run of a node."""
    rows = []
    for node, layer in zip(graph.nodes, report.layers, strict=True):
        measured_s = node.measured_s.get(report.device, 0.0)
        if not node.tasks or not measured_s > 0:
            continue
        predicted_s = {**_of_device(node.predicted_s, report.device), OURS: layer.latency_s / node.repeat}
        row = {"network": graph.name, "node": node.name, "phase": node.phase, "family": node.family or "other"}
        rows.append({**row, "repeat": node.repeat, "measured_s": measured_s, "predicted_s": predicted_s})
    return rows


def network_row(graph: NetworkGraph, report: LatencyReport) -> Row | None:
    """The row of a whole network on the report's device; None if it was not measured as a whole."""
    measured_s = graph.measured_s.get(report.device)
    if not measured_s:
        return None
    in_trace_s = sum(node.repeat * node.measured_s.get(report.device, 0.0) for node in graph.nodes)
    predicted = {**_of_device(graph.predicted_s, report.device), OURS: report.latency_s}
    if in_trace_s > 0:
        predicted[IN_TRACE] = in_trace_s
    return {
        "network": graph.name,
        "mode": str(graph.meta.get("mode", "")),
        "launches": report.launches,
        "low_s": report.low_s,
        "high_s": report.high_s,
        "measured_s": measured_s,
        "predicted_s": predicted,
    }


def _of_device(predicted_s: Mapping[str, Mapping[str, float]], device: str) -> dict[str, float]:
    """Source -> seconds on a device, without predictions of zero."""
    return {source: values[device] for source, values in predicted_s.items() if values.get(device, 0.0) > 0}


def compare_sources(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of every source that has a prediction for one of the rows.

    Means and medians are over the ``n_common`` rows that all sources predict (None without any; ``bias`` is the mean of
    ``predicted / measured - 1``). ``ape_mean_own`` is over the ``n_own`` rows that both the source and this library predict,
    ``ours_ape_mean_own`` is this library's error on the same rows."""
    sources = list(dict.fromkeys(source for row in rows for source in row["predicted_s"]))
    common = [row for row in rows if all(source in row["predicted_s"] for source in sources)]
    found = {}
    for source in sources:
        both = [row for row in rows if {source, OURS} <= row["predicted_s"].keys()]
        own, ours, shared = _errors(both, source), _errors(both, OURS), _errors(common, source)
        found[source] = {
            "ape_mean": _of(np.mean, np.abs(shared)),
            "ape_median": _of(np.median, np.abs(shared)),
            "bias": _of(np.mean, shared),
            "n_own": len(own),
            "ape_mean_own": _of(np.mean, np.abs(own)),
            "ours_ape_mean_own": _of(np.mean, np.abs(ours)),
        }
    return {"n": len(rows), "n_common": len(common), "sources": found}


def _of(middle: Callable[[np.ndarray], Any], values: np.ndarray) -> float | None:
    return float(middle(values)) if len(values) else None


def _errors(rows: Iterable[Row], source: str) -> np.ndarray:
    return np.array([row["predicted_s"][source] / row["measured_s"] - 1 for row in rows], dtype=np.float64)


def compare_nodes(rows: Sequence[Row]) -> dict[str, Any]:
    """Phase -> :func:`compare_sources` on the nodes of all :data:`FAMILIES`, and on those of each family (``families``)."""
    found = {}
    for phase in dict.fromkeys(row["phase"] for row in rows):
        own = [row for row in rows if row["phase"] == phase]
        together = compare_sources([row for row in own if row["family"] in FAMILIES])
        found[phase] = {**together, "families": _compare_by("family", own)}
    return found


def compare_networks(rows: Sequence[Row]) -> dict[str, Any]:
    """:func:`compare_sources` on all networks and on those of each mode (``modes``), and the rows themselves."""
    return {**compare_sources(rows), "modes": _compare_by("mode", rows), "rows": list(rows)}


def _compare_by(key: str, rows: Sequence[Row]) -> dict[str, Any]:
    values = dict.fromkeys(row[key] for row in rows)
    return {value: compare_sources([row for row in rows if row[key] == value]) for value in values}


def operator_errors(names: Sequence[str], labels: ArrayLike, predictions: ArrayLike) -> dict[str, Any]:
    """MAPE of library operators measured alone, by the names of their tasks; labels and predictions are seconds, (n,).

    ``n``, ``mape`` and ``median_ape`` of all, of those that take 50 us or longer (``above_50us``), and of each family
    (``families``); errors are None if there are no operators."""
    label_s = np.asarray(labels, np.float64)
    error = np.abs(np.asarray(predictions, np.float64) / label_s - 1)
    families = np.array([_TASK_FAMILIES.get(name, "elementwise") for name in names])
    return {
        **_mape(error),
        "above_50us": _mape(error[label_s >= _LAUNCH_S]),
        "families": {str(family): _mape(error[families == family]) for family in np.unique(families)},
    }


def _mape(error: np.ndarray) -> dict[str, Any]:
    return {"n": len(error), "mape": _of(np.mean, error), "median_ape": _of(np.median, error)}
