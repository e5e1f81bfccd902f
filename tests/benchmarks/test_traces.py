"""Predictions of traces beside measurements and others' predictions: known answers, and bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.traces import compare_networks, compare_nodes, compare_sources, network_row, node_rows, operator_errors
from cdmpp.program.graph import GraphNode, network_graph

GPU = "v100-pcie-32gb"


#: A linear layer that runs three times, a view, an addition that NeuSight predicts as nothing, one never measured.
GRAPH = network_graph(
    "net",
    [
        GraphNode("linear", ("a",), repeat=3.0, family="Linear", measured_s={GPU: 2.0, "t4": 9.0},
                  predicted_s={"neusight": {GPU: 1.0}, "micro": {"t4": 1.0}}),
        GraphNode("view", (), ("linear",), kind="view", measured_s={GPU: 0.5}),
        GraphNode("add", ("b", "c"), ("view",), family="EW", measured_s={GPU: 4.0}, predicted_s={"neusight": {GPU: 0.0}}),
        GraphNode("other", ("c",), ("add",), phase="backward"),
    ],
    measured_s={GPU: 8.0}, predicted_s={"neusight": {GPU: 6.0}}, meta={"mode": "inf"},
)  # fmt: skip


def a_report(seconds: dict[str, float], whole_s: float) -> Any:
    """What `cdmpp latency` says: seconds of one run of each node."""
    each = {node.name: node.repeat * seconds.get(node.name, 0.0) for node in GRAPH.nodes}
    layers = [SimpleNamespace(name=name, latency_s=latency_s) for name, latency_s in each.items()]
    whole = {"device": GPU, "latency_s": whole_s, "launches": 6.0, "low_s": None, "high_s": None}
    return SimpleNamespace(**whole, layers=layers)


def test_nodes_are_compared_by_one_run_and_views_are_left_out() -> None:
    rows = node_rows(GRAPH, a_report({"linear": 3.0, "add": 5.0}, 9.0))
    assert [(row["node"], row["measured_s"]) for row in rows] == [("linear", 2.0), ("add", 4.0)]
    assert rows[0]["predicted_s"] == {"neusight": 1.0, "cdmpp": 3.0}
    assert rows[1]["predicted_s"] == {"cdmpp": 5.0}, "a prediction of nothing is none"
    forward = compare_nodes(rows)["forward"]
    assert (forward["n"], forward["n_common"]) == (2, 1)
    assert forward["sources"]["cdmpp"]["ape_mean"] == pytest.approx(0.5)
    assert forward["sources"]["cdmpp"]["ape_mean_own"] == pytest.approx((0.5 + 0.25) / 2)
    assert forward["families"]["EW"]["sources"]["cdmpp"]["ape_mean"] == pytest.approx(0.25)
    assert "LN" not in forward["families"]


def test_a_whole_network_and_the_sum_of_its_trace() -> None:
    row = network_row(GRAPH, a_report({}, 10.0))
    assert row is not None
    assert row["predicted_s"] == {"neusight": 6.0, "cdmpp": 10.0, "in_trace": 3 * 2.0 + 0.5 + 4.0}
    found = compare_networks([row])
    errors = {source: errors["ape_mean"] for source, errors in found["sources"].items()}
    assert errors == pytest.approx({"neusight": 0.25, "cdmpp": 0.25, "in_trace": 2.5 / 8})
    assert found["sources"]["neusight"]["bias"] == -0.25
    assert found["modes"]["inf"]["n"] == 1 and found["rows"] == [row]


def test_sources_are_compared_where_all_of_them_and_where_each_of_them_predicts() -> None:
    rows = [
        {"measured_s": 1.0, "predicted_s": {"cdmpp": 1.1, "neusight": 1.2, "micro": 2.0}},
        {"measured_s": 2.0, "predicted_s": {"cdmpp": 1.0, "neusight": 1.0}},
        {"measured_s": 4.0, "predicted_s": {"cdmpp": 4.0}},
    ]
    found = compare_sources(rows)
    assert (found["n"], found["n_common"]) == (3, 1)
    ours, theirs = found["sources"]["cdmpp"], found["sources"]["neusight"]
    assert ours["ape_mean"] == pytest.approx(0.1) and theirs["ape_mean"] == pytest.approx(0.2)
    assert (theirs["n_own"], theirs["ape_mean_own"]) == (2, pytest.approx((0.2 + 0.5) / 2))
    assert theirs["ours_ape_mean_own"] == pytest.approx((0.1 + 0.5) / 2)
    assert (ours["n_own"], ours["ape_mean_own"]) == (3, pytest.approx((0.1 + 0.5 + 0.0) / 3))


def test_operators_by_family_and_without_the_shortest() -> None:
    names = ["linear", "conv2d", "gelu", "add"]
    found = operator_errors(names, [1e-3, 1e-3, 1e-5, 1e-4], [1.1e-3, 0.8e-3, 2e-5, 1e-4])
    assert (found["n"], found["mape"]) == (4, pytest.approx((0.1 + 0.2 + 1.0 + 0.0) / 4))
    assert found["above_50us"] == pytest.approx({"n": 3, "mape": 0.1, "median_ape": 0.1})
    assert found["families"]["elementwise"]["n"] == 2
    assert found["families"]["conv"]["mape"] == pytest.approx(0.2)
    none = operator_errors(["add"], [1e-5], [1e-5])["above_50us"]
    assert none == {"n": 0, "mape": None, "median_ape": None}
