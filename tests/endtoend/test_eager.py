"""What PyTorch takes for a network: known answers with a model of fixed numbers, and what ships."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from cdmpp.dataset.operators import TORCH_COLD
from cdmpp.device import get_device
from cdmpp.endtoend import compare_devices, eager, network_tasks, predict_latency, shares_of, smallest_share
from cdmpp.endtoend.eager import eager_latency
from cdmpp.errors import NetworkError, PredictorError
from cdmpp.predictor.operators import BEST, OperatorModel, load_operator_model
from cdmpp.program.network import Network, load_network
from tests.samples.command import Command

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("on_zen3")

ZEN4 = get_device("epyc-zen4-2.6ghz@1")


class Fixed:
    """A millisecond an operator, two with cold weights; half of it to each side."""

    devices: ClassVar = {ZEN4.name: ("gemm float32",)}
    inputs: ClassVar = [["relu"]]
    measured_on = OperatorModel.measured_on

    def interval(self, table: Any, device: Any, framework: str) -> tuple[Any, Any, Any]:
        seconds = np.full(len(table), {BEST: 1e-3, TORCH_COLD: 2e-3}[framework])
        self.asked = dict(zip(table["op"], table["dtype"], strict=True))
        return seconds, 0.5 * seconds, 1.5 * seconds


def mlp(width: int, layers: int = 3) -> Network:
    parts = [torch.nn.Linear(width, width), torch.nn.ReLU()] * layers
    return Network.from_torch(torch.nn.Sequential(*parts), [torch.randn(2, width)], "mlp-of-mine")


def test_operators_are_added_up_and_cold_weights_cost_more() -> None:
    report = eager_latency(mlp(64), ZEN4, Fixed(), price_per_hour=3.6)  # type: ignore[arg-type]
    results_s = 6 * 4 * 2 * 64 / (1e9 * eager._RESULT_GB_S)
    besides_s = 6 * eager._NEAR_CYCLES / 3.679e9 + results_s
    assert report.latency_s == pytest.approx(6e-3 + besides_s) and report.kernel_s == pytest.approx(6e-3 + results_s)
    assert report.low_s == pytest.approx(3e-3 + besides_s) and report.high_s == pytest.approx(9e-3 + besides_s)
    assert report.low_s < report.independent_low_s < report.latency_s < report.independent_high_s < report.high_s
    half = eager_latency(mlp(64), ZEN4, Fixed(), coverage=0.5)  # type: ignore[arg-type]
    assert half.coverage == 0.5 and half.high_s < report.high_s and half.independent_low_s > report.independent_low_s
    assert report.cost_per_million == pytest.approx(1e3 * report.latency_s)
    assert [layer.operator for layer in report.layers] == ["linear", "relu"] * 3
    assert sum(layer.fraction for layer in report.layers) == pytest.approx(1.0)
    one = eager_latency(mlp(2400, 1), ZEN4, Fixed())  # type: ignore[arg-type]  # 23 MB in a cache of 32
    assert one.kernel_s == pytest.approx(2e-3, rel=1e-3) and "stay in" in " ".join(one.assumptions)
    assert one.gap_s == pytest.approx(2 * eager._CALL_CYCLES / 3.679e9), "the code has left the caches"
    module = torch.nn.Sequential(torch.nn.Linear(2400, 2400), torch.nn.Linear(2400, 2400))
    cold = eager_latency(Network.from_torch(module, [torch.randn(1, 2400)]), ZEN4, Fixed())  # type: ignore[arg-type]
    assert cold.kernel_s == pytest.approx(4e-3, rel=1e-3) and "do not fit" in " ".join(cold.assumptions)


def test_on_a_gpu_the_longer_of_kernels_and_calls_counts() -> None:
    report = eager_latency(mlp(64), get_device("h200"), Fixed())  # type: ignore[arg-type]
    assert report.latency_s == report.kernel_s == pytest.approx(6e-3) and report.gap_s == pytest.approx(0.0)
    slow = eager_latency(mlp(64), get_device("h200"), Fixed(), launch_overhead_us=2000.0)  # type: ignore[arg-type]
    assert slow.latency_s == pytest.approx(12e-3) and slow.independent_low_s < 11e-3 < 13e-3 < slow.independent_high_s
    assert slow.gap_s == pytest.approx(6e-3) == slow.kernel_s and "calls bound it" in " ".join(slow.notes)
    network, model = Network.from_torch(torch.nn.Conv2d(3, 8, 3), [torch.randn(1, 3, 9, 9)]), Fixed()
    for device, dtype in (("h200", "tfloat32"), ("v100-pcie-32gb", "float32"), (ZEN4.name, "float32")):
        eager_latency(network, get_device(device), model)  # type: ignore[arg-type]
        assert model.asked == {"conv": dtype}, "as PyTorch has it by default"


def test_what_is_not_known_is_named() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.i0(torch.relu(x))

    network = Network.from_torch(Odd(), [torch.randn(8, 8)])
    report = eager_latency(network, get_device("epyc-7763@1"), Fixed())  # type: ignore[arg-type]
    assert report.notes == (
        "no library operator was measured on epyc-7763@1: predicted from epyc-zen4-2.6ghz@1",
        "priced by the bytes that they move, 50.0 % of the time: special_i0",
    )
    assert report.independent_high_s > 1.4 * report.latency_s, "a CPU whose kernels nobody measured"
    alike, more = (eager_latency(network, get_device(name), Fixed()) for name in ("epyc-9654@1", "epyc-9654@2"))  # type: ignore[arg-type]
    assert alike.independent_high_s < min(report.independent_high_s, more.independent_high_s), "as many Zen 4 cores"
    assert "no library operator" not in " ".join(alike.notes) and "no library operator" in " ".join(more.notes)
    with pytest.raises(NetworkError, match="no operator"):
        eager_latency(Network.from_torch(torch.nn.Identity(), [torch.randn(2)]), ZEN4, Fixed())  # type: ignore[arg-type]


def test_what_ships_prices_a_network_on_every_runtime(tmp_path: Path, command: Command) -> None:
    assert ZEN4.name in load_operator_model(kind="cpu").devices
    report = predict_latency(mlp(512), ZEN4)
    assert report.schedule == "torch" and 3e-5 < report.latency_s < 3e-3
    path = tmp_path / "mine.pt2"
    torch.export.save(torch.export.export(torch.nn.Conv2d(3, 8, 3), (torch.randn(1, 3, 32, 32),)), path)
    exported: list[Network] = []
    counting = replace(load_network(path), exporter=lambda own: exported.append(own) or load_network(path).export())
    by_path = [predict_latency(path, name).latency_s for name in ("l4", "h100-sxm")]
    assert [report.latency_s for report in compare_devices(counting, ["l4", "h100-sxm"]).reports] == sorted(by_path)
    assert len(exported) == 1  # for all devices
    here = ("latency", path, "--device", ZEN4.name)
    by_device = {r["device"]: r for r in command.json(*here[:-1], f"{ZEN4.name},h100-sxm")["reports"]}
    # the CPU's and the GPU's are both of a library: tens of times apart, not thousands
    assert by_device["h100-sxm"]["latency_s"] < by_device[ZEN4.name]["latency_s"] < 3e-3
    assert command.json(*here, "--runtime", "tvm")["schedule"] == "untuned"
    assert "--schedule is of --runtime tvm" in command.error(*here, "--runtime", "torch", "--schedule", "best")


def test_the_smallest_share_that_is_as_fast(tmp_path: Path, command: Command) -> None:
    assert [smallest_share(s) for s in ([4.0, 2.0, 1.05, 1.0], [1.0, 1.2, 1.0], [2.0])] == [2, 0, 0]
    assert [device.name for device in shares_of("epyc-7551")] == [f"epyc-7551@{n}" for n in (1, 2, 4, 8, 16, 32)]
    path = tmp_path / "mine.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4096, 4096), (torch.randn(64, 4096),)), path)
    found = command.json("latency", path, "--device", "h100-sxm", "--shares")
    latency_s = {report["device"]: report["latency_s"] for report in found["reports"]}
    assert len(latency_s) == 8 and latency_s["h100-sxm@0.125"] > 2 * latency_s["h100-sxm"]
    assert latency_s[found["smallest_share"]] <= 1.05 * latency_s["h100-sxm"]
    for devices, said in (("h200,h100-sxm", "of one device"), ("h200@0.5", "is a share itself")):
        assert said in command.error("latency", path, "--device", devices, "--shares")


def test_runtimes_that_cannot_be(tmp_path: Path) -> None:
    for option, value, said in (("runtime", "onnxruntime", "expected torch or tvm"), ("streams", 2, "one by one")):
        with pytest.raises(NetworkError, match=said):
            predict_latency(mlp(8), ZEN4, **{option: value})
    with pytest.raises(PredictorError, match="cannot read the operator model"):
        predict_latency(mlp(8), ZEN4, tmp_path)
    onnx = Network("m.onnx", "user", (), "m.onnx", importer=lambda: None)
    with pytest.raises(NetworkError, match=r"m\.onnx is no PyTorch network"):
        eager_latency(onnx, ZEN4, Fixed())  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match="no untuned programs for h200"):
        predict_latency(mlp(8), "h200", runtime="tvm")
    tasks = network_tasks(mlp(8))
    assert predict_latency(tasks, ZEN4).schedule == "untuned", "what TVM made of it is TVM's"
    with pytest.raises(NetworkError, match="networks, not tasks"):
        predict_latency(tasks, ZEN4, runtime="torch")
