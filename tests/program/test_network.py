"""Loading networks: zoo names, batches, .onnx and .pt2 files, and what each kind of bad input says."""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import NetworkError, UnsupportedOpError
from cdmpp.program.network import Network, example_inputs, load_network
from cdmpp.program.tasks import extract_tasks

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("tvm")


def two_layers() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


def save_onnx(path: Path, shape: Sequence[int | str], op: str = "Relu", domain: str = "") -> Path:
    """An ONNX model ``op(x @ w)`` written with onnx.helper."""
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((16, 4), "float32"), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node(op, ["y"], ["z"], domain=domain),
    ]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, [weight])
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


def save_pt2(path: Path, batch: int = 1, dynamic: bool = False) -> Path:
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    exported = torch.export.export(two_layers().eval(), (torch.randn(batch, 16),), dynamic_shapes=shapes)
    torch.export.save(exported, str(path))
    return path


def hashes(*networks: Network | str) -> set[str]:
    return {task.hash for task in extract_tasks(networks)}


def of_two_layers(batch: int) -> set[str]:
    return hashes(Network.from_torch(two_layers(), (torch.randn(batch, 16),)))


@pytest.mark.parametrize(
    ("spec", "name", "shape"),
    [
        ("mlp", "mlp", (1, 784)),
        ("mlp@b4", "mlp@b4", (4, 784)),
        ("mlp@b1", "mlp", (1, 784)),
        ("resnet18@s160", "resnet18@s160", (1, 3, 160, 160)),
        ("resnet18@s224", "resnet18", (1, 3, 224, 224)),
        ("resnet18@s224b2", "resnet18@b2", (2, 3, 224, 224)),
        ("bert_tiny@s64b2", "bert_tiny@s64b2", (2, 64)),
        ("wavenet@s3000", "wavenet@s3000", (1, 1, 3000)),
        ("resnet3d@s80", "resnet3d@s80", (1, 3, 8, 80, 80)),
    ],
)
def test_zoo_name_with_batch_and_size(spec: str, name: str, shape: tuple[int, ...]) -> None:
    network = load_network(spec)
    assert (network.name, network.inputs[0].shape, network.source) == (name, shape, "zoo")


def test_a_network_of_another_batch_or_size_has_other_tasks() -> None:
    assert hashes("mlp").isdisjoint(hashes("mlp@b4"))
    assert hashes("espcn@s8").isdisjoint(hashes("espcn@s12"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((f"mlp@{variant}", "batch") for variant in ("4", "b", "bx", "b0", "")),
        ("resnet18@s0", "the size must be at least 1"),
        ("mlp@s9", "one size only"),
        ("model.onnx@s64", "networks of the zoo"),
        ("resnet18@b2s160", "resnet18@s160b4"),
        ("resnet_18", "did you mean resnet18"),
        ("nothing.onnx", "no such file"),
        ("nothing.pt2", "no such file"),
    ],
)
def test_what_is_no_network(spec: str, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        load_network(spec)


def test_shapes_are_for_files_only() -> None:
    with pytest.raises(NetworkError, match="fixed shapes"):
        load_network("mlp", shapes={"x": (2, 784)})


def test_example_inputs_respect_types_and_bounds() -> None:
    dense, sparse = example_inputs(load_network("dlrm@b64"))
    assert dense.dtype == torch.float32 and dense.shape == (64, 13)
    assert sparse.dtype == torch.int64
    assert int(sparse.min()) >= 0 and 1000 < int(sparse.max()) < 10_000


def test_torch_module_and_its_pt2_are_the_same_tasks(tmp_path: Path) -> None:
    module = two_layers().train()
    from_module = extract_tasks([Network.from_torch(module, (torch.randn(1, 16),), name="two")])
    assert module.training, "the user's module is left as it was"
    assert [dict(task.networks) for task in from_module] == [{"two": 1.0}] * 2
    path = save_pt2(tmp_path / "two.pt2")
    loaded = load_network(path)
    assert loaded.name == "two.pt2" and loaded.inputs[0].shape == (1, 16)
    assert hashes(loaded) == {task.hash for task in from_module}
    with pytest.raises(NetworkError, match="fixed batch"):
        load_network(f"{path}@b4")


def test_pt2_dynamic_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_pt2(tmp_path / "two.pt2", batch=2, dynamic=True)
    with caplog.at_level(logging.WARNING):
        one = load_network(path)
    assert "dynamic batch" in caplog.text and "taken as 1" in caplog.text
    assert one.inputs[0].shape == (1, 16) and hashes(one) == of_two_layers(1)
    four = load_network(f"{path}@b4")
    assert (four.name, four.inputs[0].shape) == ("two.pt2@b4", (4, 16)) and hashes(four) == of_two_layers(4)


def test_onnx(tmp_path: Path) -> None:
    network = load_network(save_onnx(tmp_path / "tiny.onnx", (3, 16)))
    assert network.name == "tiny.onnx" and network.inputs[0].shape == (3, 16)
    (task,) = extract_tasks([network])
    assert "matmul" in task.name and "relu" in task.name
    assert task.flops == 3 * 4 * (2 * 16 + 1)
    assert task.bytes == 4 * (3 * 16 + 16 * 4 + 3 * 4)


def test_onnx_dynamic_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_onnx(tmp_path / "tiny.onnx", ("n", 16))
    with caplog.at_level(logging.WARNING):
        assert load_network(path).inputs[0].shape == (1, 16)
    assert "taken as 1" in caplog.text
    assert hashes(f"{path}@b3") == hashes(str(save_onnx(tmp_path / "three.onnx", (3, 16))))


def test_onnx_other_dynamic_extents_must_be_given(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "tiny.onnx", (1, "length", 16))
    with pytest.raises(NetworkError, match=r"input x has the dynamic shape 1x\?x16"):
        load_network(path)
    network = load_network(path, shapes={"x": (1, 5, 16)})
    assert network.inputs[0].shape == (1, 5, 16) and len(hashes(network)) == 1
    with pytest.raises(NetworkError, match="does not fit"):
        load_network(path, shapes={"x": (1, 5, 17)})
    with pytest.raises(NetworkError, match="no input q"):
        load_network(path, shapes={"q": (1, 5, 16)})


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("content", [b"", b"this is not a network\n" * 50, b"\x08\x01\x12", None])
def test_file_that_is_not_a_network_or_cut_in_half(
    tmp_path: Path, suffix: str, content: bytes | None
) -> None:
    path = tmp_path / f"bad{suffix}"
    if content is None:
        content = (save_onnx(path, (1, 16)) if suffix == ".onnx" else save_pt2(path)).read_bytes()
        content = content[: len(content) // 2]
    path.write_bytes(content)
    with pytest.raises(NetworkError, match=rf"bad\{suffix} is not a") as caught:
        load_network(path)
    assert "\n" not in str(caught.value)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_pt2_with_pickled_code_does_not_run_it(tmp_path: Path) -> None:
    path, marker = save_pt2(tmp_path / "evil.pt2"), tmp_path / "ran"
    evil = pickle.dumps(_Evil(marker))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    replaced = [
        name for name in members if name.endswith(".pt") or "/weights/" in name or "constants" in name
    ]
    assert replaced
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, evil if name in replaced and not name.endswith(".json") else data)
    with pytest.raises(NetworkError, match=r"not a readable \.pt2"):
        load_network(path)
    assert not marker.exists()


@pytest.mark.parametrize(("op", "domain"), [("StringNormalizer", ""), ("MyFancyOp", "my.company")])
def test_unsupported_onnx_op_is_named(tmp_path: Path, op: str, domain: str) -> None:
    network = load_network(save_onnx(tmp_path / "odd.onnx", (1, 16), op=op, domain=domain))
    with pytest.raises(UnsupportedOpError, match=op):
        network.to_relax()


class Fourier(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.fft.rfft(x).abs()


def test_unsupported_torch_op_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fourier.pt2"
    torch.export.save(torch.export.export(Fourier(), (torch.randn(4, 8),)), str(path))
    for network in (Network.from_torch(Fourier(), (torch.randn(4, 8),)), load_network(path)):
        with pytest.raises(UnsupportedOpError, match="_fft_r2c") as caught:
            network.to_relax()
        assert "\n" not in str(caught.value)


def test_module_that_does_not_run() -> None:
    network = Network.from_torch(two_layers(), (torch.randn(4, 8),), name="broken")
    with pytest.raises(NetworkError, match=r"broken: torch\.export failed") as caught:
        network.to_relax()
    assert "\n" not in str(caught.value)
