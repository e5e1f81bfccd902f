"""End-to-end latency: known answers with a predictor of fixed numbers, the graph of a torch module, bad input."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.endtoend import NetworkTasks, compare_devices, network_tasks, predict_latency, read_prices
from cdmpp.endtoend.tasks import candidates
from cdmpp.errors import DatasetError, NetworkError, PredictorError, PriceError, TunerError, UnknownDeviceError
from cdmpp.predictor import Predictor
from cdmpp.predictor.uncertainty import Calibration
from cdmpp.program.graph import FOLDER, GraphNode, network_graph, save_graph
from cdmpp.program.library_ops import linear
from cdmpp.program.network import Network, task_from_prim_func
from cdmpp.program.types import Task
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.tuning import tune_tasks
from tests.samples.tuning import FakeEngine, tune_config

pytest.importorskip("tvm")
torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("on_zen3")


@dataclass(frozen=True)
class Fixed(Predictor):
    """Says `seconds` for every program, more for each GFLOP/s that a device lacks."""

    seconds: float = 1e-3
    by_device: bool = False

    def predict(self, programs: Any, device: Any, *, resolver: Any = None) -> Any:
        scale = 1e5 / device.peak_gflops["float32"] if self.by_device else 1.0
        return np.full(len(programs), self.seconds * scale)

    def reads_code_of(self, device: Any) -> bool:
        return False


def fixed(seconds: float = 1e-3, calibrated: bool = False, by_device: bool = False) -> Fixed:
    """With `calibrated`, every error of 20 tasks is a factor of 2."""
    calibration = None
    if calibrated:
        calibration = Calibration.fit([2.0, 0.5] * 10, [1.0] * 20, [f"t{i}" for i in range(20)], ["some-cpu"] * 20)
    none, trained = cast(Any, None), {name: get_device(name) for name in ("h200", "t4")}
    return Fixed(none, none, none, tuple(trained), calibration=calibration, specs=trained, seconds=seconds, by_device=by_device)


class Branches(torch.nn.Module):
    """Two branches of one input, a view and a split."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)
        self.last = torch.nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        product = torch.relu(self.left(x)) * torch.tanh(self.right(x))
        first, second = torch.split(product, 16, 1)
        return self.last(product.softmax(-1)).reshape(2, 2, 8), first @ second.T


@pytest.fixture(scope="module")
def branches() -> NetworkTasks:
    return network_tasks(Network.from_torch(Branches(), [torch.zeros(4, 16)], "branches"))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return [task_from_prim_func(linear(4, 8, n), f"linear{n}") for n in (16, 32)]


@pytest.fixture()
def trace(tasks: list[Task], tmp_path: Path) -> Path:
    """A graph file of a dataset: a task, then another three times, then a node without any."""
    with Dataset.create(tmp_path / "data") as dataset:
        for task in tasks:
            dataset.add_task(task)
        dataset.finalize()
    first, second = (task.hash for task in tasks)
    nodes = [
        GraphNode("query", (first,), operator="linear", measured_s={"h200": 2e-3}),
        GraphNode("layer", (second,), ("query",), repeat=3.0, operator="linear"),
        GraphNode("odd", (), ("layer",), kind="unknown", operator="sort"),
    ]
    path = tmp_path / "data" / FOLDER / "net.json"
    save_graph(network_graph("net", nodes, measured_s={"h200": 5e-3}), path)
    return path


def test_the_graph_of_a_network_has_its_calls_and_their_dependencies(branches: NetworkTasks) -> None:
    nodes = {node.name: node for node in branches.graph.nodes}
    (tanh,) = (n for n in nodes.values() if n.name.endswith("tanh"))
    (product,) = (n for n in nodes.values() if n.name.endswith("multiply"))
    (softmax,) = (n for n in nodes.values() if n.name == "softmax")
    (view,) = (n for n in nodes.values() if n.kind == "view")
    assert tanh.inputs == () and product.inputs == (tanh.name,) and softmax.inputs == (product.name,)
    assert tanh.output_shape == product.output_shape == (4, 32)
    assert view.tasks == () and view.output_shape == (2, 2, 8)
    assert nodes[view.inputs[0]].inputs == (softmax.name,)
    split = next(n for n in nodes.values() if n.name == "split")
    (last,) = (n for n in nodes.values() if n.output_shape == (4, 4))
    assert split.inputs == (product.name,) and split.name in last.inputs
    assert set(branches.graph.task_weights()) == set(branches.tasks)
    for task, weight in branches.graph.task_weights().items():
        assert branches.tasks[task].networks == {"branches": weight}


def test_a_network_adds_up_on_a_cpu(branches: NetworkTasks) -> None:
    report = predict_latency(branches, "this-cpu@1", fixed())
    kernels = sum(branches.graph.task_weights().values())
    assert report.latency_s == pytest.approx(1e-3 * kernels)
    assert report.launches == kernels and report.gap_s == 0.0
    assert sum(layer.fraction for layer in report.layers) == pytest.approx(1.0)
    assert report.low_s is None and report.independent_high_s is None
    assert "not calibrated" in report.notes[0]
    json.dumps(report.to_json(), allow_nan=False)


def test_programs_for_a_cpu_are_compiled_and_predicted_from_their_instructions(branches: NetworkTasks) -> None:
    device, predictor = "epyc-zen4-2.6ghz@1", Predictor.default()
    report = predict_latency(branches, device)
    seconds = predictor.predict([task.prim_func() for task in branches.tasks.values()], device, compiled=True)
    weights = [branches.graph.task_weights()[task] for task in branches.tasks]
    assert report.kernel_s == pytest.approx(np.dot(weights, seconds))
    from_asts = predict_latency(branches, device, compile_best=0)
    assert from_asts.latency_s != report.latency_s and len(report.assumptions) > len(from_asts.assumptions)
    of_best = [predict_latency(branches, device, schedule="best", compile_best=n).latency_s for n in (1, 8)]
    # the same program in a batch of another size differs by float32's rounding
    assert of_best[1] * (1 - 1e-6) <= of_best[0] < report.latency_s, "the best of more that are compiled is no slower"


def test_branches_run_at_the_same_time_on_a_gpu(branches: NetworkTasks) -> None:
    serial = predict_latency(branches, "h200", fixed())
    report = predict_latency(branches, "h200", fixed(), streams=2)
    assert report.serial_s == serial.latency_s
    assert report.latency_s < serial.latency_s
    assert any("without slowing each other down" in text for text in report.assumptions)


def test_the_best_of_random_programs(branches: NetworkTasks) -> None:
    task = next(iter(branches.tasks.values()))
    one = NetworkTasks(network_graph("one", [GraphNode("node", (task.hash,))]), {task.hash: task})
    found, notes = candidates(one, "best", get_device("this-cpu@1"), programs_per_task=3)
    (item,) = found.values()
    assert item.origin == "random" and 1 <= len(item.asts) <= 3 and not notes


def test_the_schedules_of_a_database(branches: NetworkTasks, tmp_path: Path) -> None:
    tuned = next(task for task in branches.tasks.values() if task.name.endswith("tanh"))
    engine: Any = FakeEngine(lambda digest: 1.0 if digest == tuned.hash else 1e-6)
    config = tune_config(6)
    with Measurer(engine) as running:
        tune_tasks("t", [(tuned, 1.0)], device="this-cpu@1", out=tmp_path, config=config, measurer=running)
    here = get_device("this-cpu@1")
    found, notes = candidates(branches, tmp_path, here)
    as_it_is, _ = candidates(branches, "untuned", here)
    assert {task for task, item in found.items() if item.origin == "database"} == {tuned.hash}
    (old,), (new,) = as_it_is[tuned.hash].asts, found[tuned.hash].asts
    assert old.n_nodes != new.n_nodes or not np.array_equal(old.leaves, new.leaves)
    others = len(branches.tasks)
    assert notes == [f"{others - 1} of {others} tasks are not in {tmp_path} and are untuned"]
    _, notes = candidates(branches, tmp_path, get_device("this-cpu.x86-64-v2@1"))
    assert notes[0].startswith(f"the schedules of {tmp_path} were found on {here.name}, not on")


def test_a_trace_is_replayed_with_its_repeats(trace: Path) -> None:
    report = predict_latency(trace, "h200", fixed(), launch_overhead_us=0.0)
    assert report.latency_s == pytest.approx(4e-3)
    assert report.measured_s == 5e-3 and report.ape == pytest.approx(0.2)
    assert [layer.latency_s for layer in report.layers] == pytest.approx([1e-3, 3e-3, 0.0])
    assert report.layers[0].measured_s == 2e-3 and report.layers[0].origin == "library"
    assert "1 of 3 nodes are unknown and count as nothing: sort" in report.notes


def test_launches_of_short_kernels_leave_gaps(trace: Path) -> None:
    report = predict_latency(trace, "h200", fixed(1e-6), launch_overhead_us=10.0)
    assert (report.latency_s, report.kernel_s, report.gap_s) == pytest.approx((41e-6, 4e-6, 37e-6))


def test_intervals_say_what_they_assume(trace: Path) -> None:
    report = predict_latency(trace, "h200", fixed(calibrated=True), launch_overhead_us=0.0)
    assert (report.low_s, report.high_s) == pytest.approx((2e-3, 8e-3))
    # each of two tasks is half or twice: the sums are 2, 3.5, 6.5 and 8 ms
    assert report.independent_low_s in (pytest.approx(2e-3), pytest.approx(3.5e-3))
    assert report.independent_high_s in (pytest.approx(6.5e-3), pytest.approx(8e-3))
    assert report.layers[1].low_s == pytest.approx(1.5e-3)
    assert all(any(words in text for text in report.assumptions) for words in ("same way", "by chance"))
    above = replace(fixed(), calibration=replace(fixed(calibrated=True).calibration, middle=0.2))  # more often than below
    report = predict_latency(trace, "h200", above, launch_overhead_us=0.0)
    assert sum(layer.low_s or 0.0 for layer in report.layers) == pytest.approx(report.low_s) != pytest.approx(2e-3)


def test_devices_are_ranked_by_latency_and_cost(trace: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("H200: 36\nt4: 0.36\n")
    found = compare_devices(trace, ["t4", "h200", "T4", "a100-pcie-40gb"], fixed(by_device=True), prices=read_prices(prices))
    value = found.to_json()
    assert value["by_latency"] == ["h200", "a100-pcie-40gb", "t4"] and value["by_cost"] == ["t4", "h200"]
    fastest = found.reports[0]
    assert fastest.cost_per_million == pytest.approx(1e6 * fastest.latency_s * 36 / 3600)
    assert "no price is given for a100-pcie-40gb" in found.notes


def test_an_order_within_the_intervals_is_called_uncertain(trace: Path) -> None:
    close = compare_devices(trace, ["h200", "t4"], fixed(calibrated=True))
    assert any("the order of h200 and t4 is not certain" in note for note in close.notes)
    far = compare_devices(trace, ["h200", "t4"], fixed(calibrated=True, by_device=True), launch_overhead_us=0)
    assert far.reports[0].independent_high_s < far.reports[1].independent_low_s and not far.notes  # type: ignore[operator]


def test_the_command_prints_and_writes_the_same_numbers(trace: Path, monkeypatch, command) -> None:
    monkeypatch.setattr(Predictor, "default", classmethod(lambda cls: fixed()))
    one = command.json("latency", trace, "--device", "h200", "--launch-us", "0")
    assert one["latency_s"] == one["reports"][0]["latency_s"] == pytest.approx(4e-3) and "4 ms a run on h200" in command.out
    for network in (trace, "resnet18"):
        assert "0 or more microseconds" in command.error("latency", network, "--device", "h200", "--launch-us", "-3")
    two = command.json("latency", trace, "--device", "H100,t4")
    assert set(two["by_latency"]) == {"h100-sxm", "t4"} and "on 2 devices" in command.out
    assert "H100 is taken for h100-sxm; there are h100-pcie, h100-sxm" in command.err and "t4 is" not in command.err


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_prediction_that_is_no_latency_names_the_task(trace: Path, seconds: float) -> None:
    with pytest.raises(PredictorError, match=r"for task linear16 \([0-9a-f]{16}\) of net on h200"):
        predict_latency(trace, "h200", fixed(seconds))


def test_the_command_ends_with_one_line_on_bad_input(trace: Path, tmp_path, monkeypatch, command) -> None:
    monkeypatch.setattr(Predictor, "default", classmethod(lambda cls: fixed(float("nan"))))
    (tmp_path / "prices.yaml").write_text("h2000: 1")
    for options in (["h2000"], ["h200,nodevice"], ["h200"], [","], ["h200", "--price", str(tmp_path / "prices.yaml")]):
        error = command.error("latency", trace, "--device", *options)
        assert ("unknown device" in error) == any("h2000" in o or "nodevice" in o or "yaml" in o for o in options)


def test_what_is_no_graph_of_tasks_is_refused(trace: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.json"
    alone.write_text(trace.read_text())
    with pytest.raises(DatasetError, match="--data"):
        network_tasks(alone)
    assert network_tasks(alone, trace.parent.parent).graph.name == "net"
    Dataset.create(tmp_path / "empty").close()
    with pytest.raises(DatasetError, match="lacks 2 tasks of network net"):
        network_tasks(alone, tmp_path / "empty")
    value = json.loads(trace.read_text())
    value["nodes"][0]["inputs"] = ["odd"]
    trace.write_text(json.dumps(value))
    with pytest.raises(NetworkError, match="nodes wait for each other"):
        network_tasks(trace)
    save_graph(network_graph("views", [GraphNode("a", kind="view")]), trace)
    with pytest.raises(NetworkError, match="network views has no task"):
        predict_latency(trace, "h200", fixed())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nodevice: 3\n", UnknownDeviceError, r"prices.yaml: unknown device 'nodevice'"),
        ("h200: -3\n", PriceError, "price of h200 must be a positive number, not -3"),
        ("h200: .nan\n", PriceError, "price of h200"),
        (f"h200: {'9' * 400}\n", PriceError, "price of h200"),
        ("h200: cheap\n", PriceError, "price of h200"),
        ("h200: 3\nH200: 4\n", PriceError, "two prices of h200"),
        ("- h200\n", PriceError, "expected device names"),
        ("{", PriceError, "cannot read prices"),
    ],
)
def test_bad_prices_are_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(error, match=message):
        read_prices(tmp_path / "prices.yaml")
    with pytest.raises(PriceError, match="cannot read"):
        read_prices(tmp_path / "missing.yaml")


def test_bad_options_are_refused(trace: Path, branches: NetworkTasks, tmp_path: Path) -> None:
    for network, device, options, error, message in (
        (trace, "h200", {"schedule": "best"}, TunerError, "run by a library"),
        (branches, "this-cpu@1", {"schedule": tmp_path}, TunerError, r"there is no database_workload\.json"),
        (branches, "this-cpu@1", {"schedule": "best", "programs_per_task": 0}, TunerError, "one program per task"),
        (trace, "h200", {"launch_overhead_us": -1.0}, NetworkError, "launch overhead"),
        (branches, "this-cpu@1", {"streams": 2}, NetworkError, "several streams are for GPUs"),
        (trace, "h200", {"coverage": 1.0}, PredictorError, "coverage"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            predict_latency(network, device, fixed(), **options)
    assert not list(tmp_path.glob("database_*"))
