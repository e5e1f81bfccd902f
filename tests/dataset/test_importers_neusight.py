"""NeuSight's tables as a dataset: units, dimension order, refused rows, traces as graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cdmpp.dataset import Dataset, Record
from cdmpp.dataset.importers import ImportReport, import_neusight
from cdmpp.dataset.importers.neusight_traces import forward_calls
from cdmpp.errors import DatasetError, NetworkError
from cdmpp.files import read_yaml
from cdmpp.program import import_tvm
from cdmpp.program.ast import compact_ast
from cdmpp.program.graph import NetworkGraph, load_graphs
from cdmpp.program.network import task_from_prim_func
from cdmpp.program.space import Rebuilder
from cdmpp.program.types import Task
from tests.samples.command import Command
from tests.samples.datasets import records_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

#: Rows of NeuSight's file: op, device, latency in ms and dimensions.
ROWS: list[dict[str, Any]] = read_yaml(Path(__file__).with_name("rows.yaml"))["neusight"]
DIMENSIONS = {"B", "M", "N", "K", "H", *(name for name in ROWS[-1] if name.startswith("conv_"))}


def operators(path: Path, rows: list[dict[str, Any]] = ROWS, **columns: Any) -> Path:
    """A file of operators as NeuSight's, dimensions as nullable integers."""
    frame = pd.DataFrame(rows)
    for name in DIMENSIONS:
        frame[name] = frame.get(name, pd.Series([None] * len(frame))).astype("Int64")
    frame = frame.assign(**{"split": "train", "authors_used": True, "dtype": "float32", **columns})
    frame.to_parquet(path)
    return path


def node(name: str, ops: Any = (), inputs: Any = (), output: Any = (1,), **more: Any) -> dict[str, Any]:
    """A row of a trace."""
    kind = ops[0][0] if ops else "misc"
    return {
        "Name": name, "OpName": kind, "FwOps": repr(list(ops)), "BwOps": "[]", "AccOps": "[]",
        "InputShapes": repr(list(inputs)), "OutputShape": repr(tuple(output)), "label_fw": 0.01, "label_bw": 0.0,
        "label_acc": 0.0, "neusight_fw": 0.02, "device": "Tesla_V100-PCIE-32GB", "desc": "gpt2_large-inf-8-2",
        "model": "gpt2_large", "mode": "inf", "seq": 8, "batch": 2, "family": "other", **more,
    }  # fmt: skip


TRACE = [
    node("input_ids", output=(2, 8)),
    node("transformer_h_0_ln_1", [["VECln", (16, 64)]], [(2, 8, 64)], (2, 8, 64), label_fw=0.03),
    node("addmm", [["Linear", (16, 64, 192)]], [(192,), (16, 64), (64, 192)], (16, 192), label_fw=0.05),
    node("view", inputs=[(16, 192), (1,)], output=(2, 8, 192)),
    node("truediv", [["VECdiv", (16, 192)]], [(2, 8, 192), (1,)], (2, 8, 192)),
    node("add_15", [["VECadd", (16, 192)]], [(2, 8, 192), (1, 8, 192)], (2, 8, 192)),
    node("frobnicate_1", inputs=[(2, 8, 192)], output=(2, 8, 192)),
    node("lm_head", [["Linear", (16, 64, 1000)]], [(2, 8, 64)], (2, 8, 1000), label_fw=0.06),
]


def traces(path: Path, rows: list[dict[str, Any]] = TRACE) -> Path:
    """A file of traces."""
    pd.DataFrame(rows).to_parquet(path)
    return path


def graph_of(folder: Path, rows: list[dict[str, Any]]) -> NetworkGraph:
    """The one network of a trace."""
    import_neusight(traces(folder / "t.parquet", rows), folder / "out")
    (graph,) = load_graphs(folder / "out").values()
    return graph


def add(name: str, **more: Any) -> dict[str, Any]:
    return node(name, [["VECadd", (16, 32)]], [(16, 32)] * 2, (16, 32), **more)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ImportReport:
    folder = tmp_path_factory.mktemp("neusight")
    files = operators(folder / "ops.parquet"), traces(folder / "traces.parquet")
    return import_neusight(files, folder / "out")


@pytest.fixture(scope="module")
def dataset(report: ImportReport) -> Dataset:
    return Dataset.open(report.path)


def row_of(dataset: Dataset, number: int) -> tuple[Record, Task]:
    """Record and task of a row of the file."""
    record = next(r for r in records_of(dataset) if r.meta["row"] == number)
    return record, dataset.tasks[dataset.programs[record.program].task_hash]


def test_latencies_are_seconds_and_devices_canonical(report: ImportReport, dataset: Dataset) -> None:
    assert report.records == {"ok": len(ROWS)} and len(dataset.records) == len(ROWS)
    assert set(dataset.records["device"]) == {
        "a100-pcie-40gb", "t4", "mi100", "v100-pcie-32gb", "p100-pcie-16gb",
    }  # fmt: skip
    for number, row in enumerate(ROWS):
        record, _ = row_of(dataset, number)
        assert record.latency_s == pytest.approx(row["latency_ms"] / 1000, rel=1e-12)
        assert record.meta["op"] == row["op"] and record.meta["authors_used"] is True
    assert {p.implementation for p in dataset.programs.values()} == {"library"}


@pytest.mark.parametrize(
    ("number", "flops", "elements"),
    [
        # 2 m n k and the bias; x, w, b and y
        (0, 2 * 58 * 13 * 141 + 58 * 141, 58 * 13 + 13 * 141 + 141 + 58 * 141),
        (1, 2 * 734 * 196 * 220 * 65, 734 * (196 * 220 + 220 * 65 + 196 * 65)),
        (3, 127 * 168, 3 * 127 * 168),
        (4, 0, 2 * 127 * 168),
        (5, 4 * 300 * 500, 2 * 300 * 500),
        (7, 2 * 18 * 2034 * 21 * 9 * 81, 18 * 81 * (21 + 2034) + 9 * 21 * 2034),
    ],
)
def test_work_and_traffic_by_the_operators_formulas(dataset: Dataset, number: int, flops: int, elements: int) -> None:
    _, task = row_of(dataset, number)
    assert (task.flops, task.bytes) == (flops, 4 * elements)
    whole = task_from_prim_func(task.prim_func())
    assert (whole.hash, whole.flops, whole.bytes) == (task.hash, task.flops, task.bytes)


@pytest.mark.parametrize(("number", "reduction"), [(0, 13), (1, 220)])
def test_n_is_the_reduction(dataset: Dataset, number: int, reduction: int) -> None:
    func = row_of(dataset, number)[1].prim_func()
    schedule = import_tvm().s_tir.Schedule(func)
    *_, last = schedule.get_loops(schedule.get_sblock("matmul"))
    assert int(schedule.get(last).extent) == reduction
    assert int(func.params[-1].shape[-1]) == ROWS[number]["K"]


def test_equal_shapes_are_one_program_and_tasks_are_stored_by_their_dimensions(dataset: Dataset) -> None:
    assert row_of(dataset, 1)[0].program == row_of(dataset, 2)[0].program
    assert dataset.labels(["t4"])["n_records"].tolist() == [2]
    for task in dataset.tasks.values():
        assert len(task.tir_json) < 200
        ast = compact_ast(Rebuilder()(dataset.programs[task.hash], task, None))
        assert ast.column("program_flops")[0] == pytest.approx(task.flops)


def test_a_trace_is_a_graph(report: ImportReport, dataset: Dataset) -> None:
    assert report.graphs == ("gpt2_large-inf-8-2",) and report.unknown_operators == {"frobnicate": 1}
    graph = load_graphs(dataset.path)["gpt2_large-inf-8-2"]
    assert [node.name for node in graph.nodes] == [row["Name"] for row in TRACE]
    by_name = {node.name: node for node in graph.nodes}
    # NeuSight's trace has one of 36 layers, from its first layer norm to its last sum
    assert [node.repeat for node in graph.nodes] == [1, 36, 36, 36, 36, 36, 1, 1]
    assert [node.kind for node in graph.nodes] == [
        "view", "kernel", "kernel", "view", "kernel", "kernel", "unknown", "kernel",
    ]  # fmt: skip
    assert by_name["addmm"].inputs == ("transformer_h_0_ln_1",)
    assert by_name["addmm"].measured_s == {"v100-pcie-32gb": pytest.approx(5e-5)}
    assert by_name["addmm"].predicted_s == {"neusight": {"v100-pcie-32gb": pytest.approx(2e-5)}}
    (task_hash,) = by_name["addmm"].tasks
    assert dataset.tasks[task_hash].networks == {"gpt2_large-inf-8-2": 36}
    assert dataset.tasks[task_hash].flops == 2 * 16 * 64 * 192 + 16 * 192
    # a number and a broadcast tensor as second input are told by the shapes alone
    assert json.loads(dataset.tasks[by_name["truediv"].tasks[0]].tir_json)["op"] == "divu"
    add = json.loads(dataset.tasks[by_name["add_15"].tasks[0]].tir_json)
    assert (add["shape"], add["other"]) == ([2, 1536], [1, 1536])


def test_training_has_its_phases_in_the_order_of_execution(tmp_path: Path) -> None:
    rows = [
        node("addmm", [["Linear", (16, 64, 32)]], [(32,), (16, 64), (64, 32)], (16, 32), mode="train",
             BwOps="[['Linear', (16, 32, 64)], ['Linear', (32, 16, 64)]]", AccOps="[['VECadd', [1, 2048]]]",
             label_bw=0.05, label_acc=0.02),
        node("gelu", [["VECgelu", (16, 32)]], [(16, 32)], (16, 32), mode="train", BwOps="[['VECgelu', (16, 32)]]",
             label_bw=0.02),
    ]  # fmt: skip
    found = [(n.name, len(n.tasks), n.measured_s["v100-pcie-32gb"]) for n in graph_of(tmp_path, rows).nodes]
    assert found == [
        ("addmm", 1, 1e-5), ("gelu", 1, 1e-5), ("gelu.backward", 1, 2e-5), ("addmm.backward", 2, 5e-5),
        ("addmm.accumulate", 1, 2e-5),
    ]  # fmt: skip


def test_gradients_without_operators_move_memory(tmp_path: Path) -> None:
    """Rows of opt_13-train-2048-1 on MI210."""
    scores, table = (1, 32, 2048, 2048), (2050, 2048)
    rows = [
        node("embedding", [], [(1, 2048), table], (1, 2048, 2048), mode="train", label_bw=0.1979),
        node("max_1", [], [scores, (1,)], scores, mode="train", label_bw=4.6108),
        node("view_1", [], [scores], scores, mode="train", label_bw=0.006),
    ]
    backward = {n.name: n for n in graph_of(tmp_path, rows).nodes if n.phase == "backward"}
    lookup, maximum, view = (backward[f"{row['Name']}.backward"] for row in rows)
    assert (lookup.kind, maximum.kind, view.kind) == ("kernel", "kernel", "view")
    tasks, tensor = Dataset.open(tmp_path / "out").tasks, 4 * 32 * 2048 * 2048
    moved = [tasks[task].bytes // tensor for task in maximum.tasks]
    assert moved == [1, 2, 3, 1, 2], "tensors read and written: a == b, grad / 2, where, a < b, masked_fill"
    assert 0.5 < sum(moved) * tensor / 1.64e12 / 4.6108e-3 < 1, "near MI210's bandwidth"
    assert [tasks[task].bytes for task in lookup.tasks] == [4 * 2050 * 2048, 3 * 4 * 2048 * 2048]


def test_end_to_end_latencies_join_the_graphs(tmp_path: Path) -> None:
    row = {"device": "Tesla_V100-PCIE-32GB", "model_name": "gpt2_large", "mode": "inf", "seqlen": 8, "batch": 2}
    rows = [
        {**row, "option": None, "label_all_e2e_latency": 12.5, "neusight_all_e2e_latency": 14.0},
        {**row, "option": "tp4", "label_all_e2e_latency": 3.0, "neusight_all_e2e_latency": 4.0},
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "e2e.csv", index=False)
    report = import_neusight([traces(tmp_path / "t.parquet"), tmp_path / "e2e.csv"], tmp_path / "out")
    (graph,) = load_graphs(tmp_path / "out").values()
    assert graph.measured_s == {"v100-pcie-32gb": 0.0125}
    assert graph.predicted_s == {"neusight": {"v100-pcie-32gb": 0.014}}
    assert report.notes == ("e2e.csv: 1 rows are of networks without a trace, or of several devices at work",)


def test_networks_of_other_types_are_left_out_and_named(tmp_path: Path) -> None:
    rows = [
        add("add", dtype="float32"), add("add", desc="gpt2_large-inf-8-4", dtype="torch.float16"),
        add("add_1", dtype=None), add("gt", dtype="torch.bool"),
    ]  # fmt: skip
    report = import_neusight(traces(tmp_path / "t.parquet", rows), tmp_path / "out")
    assert report.graphs == ("gpt2_large-inf-8-2",)
    assert report.notes == ("gpt2_large-inf-8-4: left out, as its numbers are float16, not float32",)
    (graph,) = load_graphs(tmp_path / "out").values()
    assert [n.name for n in graph.nodes] == ["add", "add_1", "gt"]


SHAPE = (2, 8, 4, 16)
COPY = ("kernel", [("memory", {"elements": 1024, "inputs": 1})])


@pytest.mark.parametrize(
    ("name", "operator", "ops", "inputs", "before", "expected"),
    [
        ("contiguous_2", "contiguous", [["MEM", (SHAPE, SHAPE)]], [SHAPE], "permute_1", COPY),
        ("contiguous_3", "contiguous", [["MEM", (SHAPE, SHAPE)]], [SHAPE], "lm_head", ("view", [])),
        ("max_1", "misc", [], [SHAPE, (1,)], "", COPY),
        ("getitem", "getitem", [["MEM", ((1,), SHAPE)]], [(1,)], "", ("view", [])),
    ],
)
def test_copies_follow_transpositions_only(name: str, operator: str, ops: Any, inputs: Any, before: str, expected: Any) -> None:
    assert forward_calls(name, operator, ops, inputs, SHAPE, before) == expected


def test_a_trace_may_name_its_dependencies(tmp_path: Path) -> None:
    waits = {"a": "[]", "b": "{'a'}", "c": "{'a'}", "d": "{'b', 'c'}"}
    graph = graph_of(tmp_path, [add(name, Prev=before) for name, before in waits.items()])
    assert {node.name: node.inputs for node in graph.nodes} == {
        "a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"),
    }  # fmt: skip


def changed(number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} if i == number else row for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(("rows", "message"), [
    *((changed(i, latency_ms=row["latency_ms"] * factor), rf"row {i} .*implausibly.*off by 1000")
      for i, row in enumerate(ROWS) for factor in (1e-3, 1e3)),
    (changed(3, latency_ms=float("nan")), "row 3 .*expected a number above 0"),
    (changed(3, latency_ms=0.0), "row 3 .*expected a number above 0"),
    (changed(1, N=None), "row 1: bmm has N = <NA>"),
    (changed(1, N=0), "row 1: bmm has N = 0, expected a whole number of at least 1"),
    (changed(7, conv_padding=-1), "row 7: conv has conv_padding = -1"),
])  # fmt: skip
def test_a_row_that_cannot_be_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DatasetError, match=rf"ops\.parquet, {message}") as caught:
        import_neusight(operators(tmp_path / "ops.parquet", rows), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_an_unknown_operator_or_type_is_counted_not_fatal(tmp_path: Path) -> None:
    rows = [*changed(5, op="fft"), {**ROWS[5], "op": "fft"}, {**ROWS[5], "op": None}]
    dtypes = ["float16" if row["op"] == "powu" else "float32" for row in rows]
    report = import_neusight(operators(tmp_path / "ops.parquet", rows, dtype=dtypes), tmp_path / "out")
    assert report.unknown_operators == {"fft": 2, "none": 1, "powu (float16)": 1}
    assert report.records == {"ok": len(ROWS) - 2}


def test_missing_columns_and_foreign_files_are_named(tmp_path: Path) -> None:
    frame, file = pd.DataFrame(ROWS), tmp_path / "a.parquet"
    for table, message in (
        (frame.drop(columns=["latency_ms"]), r"a\.parquet has no column latency_ms"),
        (frame.drop(columns=["N"]), r"a\.parquet has no column N"),
        (frame.assign(N=2.5), r"a\.parquet, row 0: linear has N = 2.5, expected a whole number"),
        (pd.DataFrame({"x": [1]}), "is none of NeuSight's tables"),
    ):
        table.to_parquet(file)
        with pytest.raises(DatasetError, match=message):
            import_neusight(file, tmp_path / "out")
    file.write_text("nothing")
    for path, said in ((file, ".*"), (tmp_path / "absent.parquet", "no such file")):
        with pytest.raises(DatasetError, match=f"cannot read .*{path.name}: {said}"):
            import_neusight(path, tmp_path / "out")
    with pytest.raises(DatasetError, match="limit is 0"):
        import_neusight(operators(tmp_path / "e.parquet"), tmp_path / "out", limit=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([node("a", [["Linear", (16, 32)]])], "has not the sizes that its kind has"),
        ([node("a", FwOps="[[")], "t.parquet, gpt2_large-inf-8-2, node a: .*no list of operators"),
        ([node("a", [["Linear", (4096, 4096, 4096)]], label_fw=0.009)], "node a: .*implausibly less"),
        ([add("a", Prev="{'b'}"), add("b", Prev="{'a'}")], "nodes wait for each other: (a -> b -> a|b -> a -> b)$"),
    ],
)  # fmt: skip
def test_a_bad_node_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises((DatasetError, NetworkError), match=message) as caught:
        graph_of(tmp_path, rows)
    assert "\n" not in str(caught.value)


def test_the_command_line(tmp_path: Path, command: Command) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("{name: t5, kind: gpu, aliases: [Tesla T5], bandwidth_gb_s: 320}")
    file = operators(tmp_path / "ops.parquet", changed(1, device="Tesla T5"))
    imported = ("import", "neusight", file, "--out", tmp_path / "out")
    error = command.error(*imported)
    assert "ops.parquet: unknown device 'Tesla T5'; did you mean" in error and "t4" in error
    assert command.json(*imported, "--devices", mine, "--limit", 4)["records"] == {"ok": 4}
    assert "4 labels (failures: none)" in command.out
    assert "is a dataset already" in command.error(*imported, "--devices", mine, "--limit", 4)


@pytest.mark.skipif(not (SHARED / "neusight_traces.parquet").exists(), reason="needs ../shared/data")
def test_layers_repeat_as_neusight_adds_them_up(tmp_path: Path) -> None:
    frame = pd.read_parquet(SHARED / "neusight_traces.parquet")
    wanted = ("gpt2_large-inf-1024-4", "opt_13-inf-2048-2", "bert_large-inf-512-16")
    chosen = frame[(frame["device"] == "Tesla_V100-PCIE-32GB") & frame["desc"].isin(wanted)]
    chosen.to_parquet(tmp_path / "traces.parquet")
    report = import_neusight([tmp_path / "traces.parquet", SHARED / "neusight_e2e.csv"], tmp_path / "out")
    assert report.unknown_operators == {} and set(report.graphs) == set(wanted)
    for graph in load_graphs(tmp_path / "out").values():
        total = sum(n.repeat * n.predicted_s["neusight"]["v100-pcie-32gb"] for n in graph.nodes)
        assert total == pytest.approx(graph.predicted_s["neusight"]["v100-pcie-32gb"], rel=1e-6)
    # the networks' own latency is that of their kernels, measured one by one, within the gaps between them
    gpt = load_graphs(tmp_path / "out")["gpt2_large-inf-1024-4"]
    kernels = sum(n.repeat * n.measured_s["v100-pcie-32gb"] for n in gpt.nodes if n.kind == "kernel")
    assert kernels == pytest.approx(gpt.measured_s["v100-pcie-32gb"], rel=0.1)
