"""Loading networks: zoo names, batches, .onnx and .pt2 files, and what each kind of bad input says."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import NetworkError, UnsupportedOpError
from cdmpp.program.network import Network, example_inputs, extract_tasks, load_network
from tests.samples.pickles import pickle_that_touches

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("tvm")


class Fourier(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.fft.rfft(x).abs()


def two_layers() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


def save_onnx(path: Path, shape: Sequence[int | str] = (1, 16), op: str = "Relu", domain: str = "") -> Path:
    """An ONNX model ``op(x @ w)`` written with onnx.helper."""
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((16, 4), "float32"), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node(op, ["y"], ["z"], domain=domain)]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, [weight])
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


def save_pt2(path: Path, shape: tuple[int, int] = (1, 16), module: Any = None, dynamic: bool = False) -> Path:
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    module = (module or two_layers()).eval()
    torch.export.save(torch.export.export(module, (torch.randn(shape),), dynamic_shapes=shapes), str(path))
    return path


def hashes(*networks: Network | str) -> set[str]:
    return {task.hash for task in extract_tasks(networks)}


@pytest.mark.parametrize(
    ("spec", "name", "shape"),
    [
        ("mlp", "mlp", (1, 784)), ("mlp@b4", "mlp@b4", (4, 784)), ("mlp@b1", "mlp", (1, 784)),
        ("resnet18@s160", "resnet18@s160", (1, 3, 160, 160)), ("resnet18@s224", "resnet18", (1, 3, 224, 224)),
        ("resnet18@s224b2", "resnet18@b2", (2, 3, 224, 224)), ("bert_tiny@s64b2", "bert_tiny@s64b2", (2, 64)),
        ("wavenet@s3000", "wavenet@s3000", (1, 1, 3000)), ("resnet3d@s80", "resnet3d@s80", (1, 3, 8, 80, 80)),
    ],
)  # fmt: skip
def test_zoo_name_with_batch_and_size(spec: str, name: str, shape: tuple[int, ...]) -> None:
    network = load_network(spec)
    assert (network.name, network.inputs[0].shape, network.source) == (name, shape, "zoo")


def test_a_network_of_another_batch_or_size_has_other_tasks() -> None:
    assert hashes("mlp").isdisjoint(hashes("mlp@b4"))
    assert hashes("espcn@s8").isdisjoint(hashes("espcn@s12"))


@pytest.mark.parametrize(
    ("spec", "shapes", "message"),
    [
        *((f"mlp@{variant}", None, "batch") for variant in ("4", "b", "bx", "b0", "")),
        ("resnet18@s0", None, "the size must be at least 1"), ("mlp@s9", None, "one size only"),
        ("model.onnx@s64", None, "networks of the zoo"), ("resnet18@b2s160", None, "resnet18@s160b4"),
        ("resnet_18", None, "did you mean resnet18"), ("llama3-8b", None, "knows llama-3.1-8b"),
        *((f"nothing.{kind}", None, "no such file") for kind in ("onnx", "pt2")),
        ("mlp", {"x": (2, 784)}, "fixed shapes"),  # shapes are for files only
    ],
)  # fmt: skip
def test_what_is_no_network(spec: str, shapes: Any, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        load_network(spec, shapes=shapes)


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


def test_booleans_add_up_as_numbers() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x > 0).cumsum(1)

    assert "int64" in str(Network.from_torch(Sum(), [torch.zeros(1, 4)], "sum").to_relax()["main"].ret_ty)


def test_an_onnx_file_whose_shapes_depend_on_data_cannot_be_priced(tmp_path) -> None:
    meant = load_network(save_onnx(tmp_path / "m.onnx", op="NonZero")).operators
    with pytest.raises(NetworkError, match=r"m\.onnx: ONNX cannot tell the shape of z, a result of NonZero"):
        meant()


def test_onnx(tmp_path: Path) -> None:
    network = load_network(save_onnx(tmp_path / "tiny.onnx", (3, 16)))
    assert network.name == "tiny.onnx" and network.inputs[0].shape == (3, 16)
    (task,) = extract_tasks([network])
    assert "matmul" in task.name and "relu" in task.name
    assert task.flops == 3 * 4 * (2 * 16 + 1)
    assert task.bytes == 4 * (3 * 16 + 16 * 4 + 3 * 4)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_dynamic_batch_is_1_or_what_is_asked_for(tmp_path, caplog, suffix: str) -> None:
    save = save_onnx if suffix == "onnx" else save_pt2
    fixed, path = save(tmp_path / f"four.{suffix}", (4, 16)), tmp_path / f"two.{suffix}"
    save_onnx(path, ("n", 16)) if suffix == "onnx" else save_pt2(path, (2, 16), dynamic=True)
    one = load_network(path)
    assert "dynamic batch" in caplog.text and "taken as 1" in caplog.text
    assert one.inputs[0].shape == (1, 16) and hashes(one) == hashes(str(save(path.with_stem("one"))))
    four = load_network(f"{path}@b4")
    assert (four.name, four.inputs[0].shape) == (f"{path.name}@b4", (4, 16))
    assert hashes(four) == hashes(str(fixed))


def test_onnx_other_dynamic_extents_must_be_given(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "tiny.onnx", (1, "length", 16))
    network = load_network(path, shapes={"x": (1, 5, 16)})
    assert network.inputs[0].shape == (1, 5, 16) and len(hashes(network)) == 1
    for shapes, message in (
        (None, r"input x has the dynamic shape 1x\?x16"),
        ({"x": (1, 5, 17)}, "does not fit"),
        ({"q": (1, 5, 16)}, "no input q"),
    ):
        with pytest.raises(NetworkError, match=message):
            load_network(path, shapes=shapes)


@pytest.mark.parametrize(("suffix", "save"), [("onnx", save_onnx), ("pt2", save_pt2)])
@pytest.mark.parametrize("content", [b"", b"this is not a network\n" * 50, b"\x08\x01\x12", b"PK\5\6" + bytes(18), None])
def test_file_that_is_not_a_network_or_cut_in_half(tmp_path, capfd, suffix: str, save: Any, content: bytes | None) -> None:
    path = tmp_path / f"bad.{suffix}"
    if content is None:
        whole = save(path).read_bytes()
        content = whole[: len(whole) // 2]
    path.write_bytes(content)
    with pytest.raises(NetworkError, match=rf"bad\.{suffix} is not a") as caught:
        load_network(path)
    assert "\n" not in str(caught.value) and "warnings above" not in str(caught.value) and capfd.readouterr().err == ""


def test_networks_with_pickled_code_do_not_run_it(tmp_path: Path) -> None:
    """They are programs of the user, but what they hold is described, not pickled."""
    path, marker = save_pt2(tmp_path / "evil.pt2"), tmp_path / "ran"
    evil = pickle_that_touches(marker)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    replaced = [n for n in members if n.endswith(".pt") or "/weights/" in n or "constants" in n]
    assert replaced
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, evil if name in replaced and not name.endswith(".json") else data)
    with pytest.raises(NetworkError, match=r"not a readable \.pt2"):
        load_network(path)
    (tmp_path / "evil.onnx").write_bytes(evil)
    with pytest.raises(NetworkError, match=r"evil\.onnx is not a"):
        load_network(tmp_path / "evil.onnx")
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists(), "it works"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: load_network(save_onnx(path / "odd.onnx", op="StringNormalizer")), UnsupportedOpError, "StringNorm"),
        (lambda path: load_network(save_onnx(path / "odd.onnx", op="MyFancyOp", domain="my.company")), UnsupportedOpError,
         "MyFancyOp"),
        (lambda path: load_network(save_pt2(path / "fourier.pt2", (4, 8), Fourier())), UnsupportedOpError, "_fft_r2c"),
        (lambda path: Network.from_torch(Fourier(), (torch.randn(4, 8),)), UnsupportedOpError, "_fft_r2c"),
        (lambda path: Network.from_torch(two_layers(), (torch.randn(4, 8),), name="broken"), NetworkError,
         r"broken: torch\.export failed"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(tmp_path: Path, make: Any, error: type, message: str) -> None:
    network = make(tmp_path)
    with pytest.raises(error, match=message) as caught:
        network.to_relax()
    assert "\n" not in str(caught.value)
