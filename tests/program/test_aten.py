"""Networks as PyTorch runs them: the sizes of each operator, by hand."""

from __future__ import annotations

import random
from typing import Any

import pandas as pd
import pytest

from cdmpp.program.aten import arguments_of, calls_of, runs_without_onednn, table_of
from cdmpp.program.network import Network, load_network
from cdmpp.program.operators import work

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Function(nn.Module):
    def __init__(self, function: Any, **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def calls(function: Any, *shapes: tuple[int, ...], **modules: Any) -> list[Any]:
    return calls_of(Network.from_torch(Function(function, **modules), [torch.randn(s) for s in shapes]).export())


CASES: list[tuple[Any, list[tuple[int, ...]], Any, dict[str, float]]] = [
    (nn.Linear(32, 48), [(2, 5, 32)], None, {"op": "gemm", "m": 10, "n": 48, "k": 32}),
    (None, [(3, 4, 5, 6), (3, 4, 6, 7)], lambda _, a, b: a @ b, {"op": "gemm", "batch": 12, "m": 5, "n": 7, "k": 6}),
    (None, [(4, 5), (5,)], lambda _, a, b: a @ b, {"op": "gemm", "m": 4, "n": 1, "k": 5}),
    (None, [(2, 8, 6, 4), (2, 9, 4)], lambda _, a, b: torch.einsum("bhne,bme->bhnm", a, b),
     {"kernel": "bmm", "batch": 2, "m": 48, "n": 9, "k": 4}),
    (None, [(2, 8, 6, 9), (2, 9, 4)], lambda _, a, b: torch.einsum("bhnm,bmd->bnd", a, b), {"batch": 2, "n": 4, "k": 9}),
    (None, [(4, 5, 6), (5, 6, 7)], lambda _, a, b: torch.tensordot(a, b), {"kernel": "linear", "m": 4, "n": 7, "k": 30}),
    (nn.Conv2d(8, 12, 3, 2, 1, groups=4), [(2, 8, 9, 11)], None, {"op": "conv", "batch": 2, "in_channels": 8,
     "out_channels": 12, "height": 9, "width": 11, "out_h": 5, "out_w": 6, "kernel_h": 3, "kernel_w": 3, "stride": 4,
     "groups": 4, "backward": 0}),
    (nn.Conv3d(2, 3, 3), [(1, 2, 5, 6, 7)], None, {"op": "conv", "height": 30, "width": 7, "kernel_h": 9, "kernel_w": 3,
     "out_h": 12, "out_w": 5}),
    (nn.Conv1d(2, 3, 5, dilation=2), [(1, 2, 20)], None, {"op": "conv", "height": 1, "width": 20, "kernel_h": 1, "out_w": 12,
     "dilation": 2}),
    (nn.ConvTranspose2d(6, 4, 4, 2, 1), [(1, 6, 8, 8)], None, {"op": "conv", "in_channels": 4, "out_channels": 6, "height": 16,
     "out_h": 8, "stride": 4, "backward": 1}),
    (nn.Conv2d(3, 4, 3), [(3, 8, 9)], None, {"batch": 1, "in_channels": 3, "height": 8, "out_h": 6}),  # a single image
    (nn.LSTM(10, 20, 2, bidirectional=True, batch_first=True), [(3, 7, 10)], lambda self, x: self.inner(x)[0],
     {"op": "lstm", "m": 3, "n": 20, "k": (2 * 10 + 2 * 40) / 4, "batch": 4, "tokens": 7}),
    (nn.GroupNorm(2, 8), [(2, 8, 5, 5)], None, {"op": "layernorm", "m": 4, "n": 100}),
    (None, [(6,), (2, 5), (5, 6)], lambda _, *args: torch.addmm(*args), {"kernel": "linear", "m": 2, "n": 6, "k": 5}),
    (None, [(4, 2, 6), (4, 2, 5), (4, 5, 6)], lambda _, *args: torch.baddbmm(*args), {"kernel": "bmm", "batch": 4, "n": 6}),
    (None, [(2, 3, 4)], lambda _, x: x.softmax(1), {"op": "softmax", "m": 8, "n": 3}),
    (None, [(2, 3, 4)], lambda _, x: x.mean(-1), {"op": "reduce", "m": 6, "n": 4}),
    (None, [(4, 6), (6,)], lambda _, a, b: a + b, {"op": "elementwise", "n": 24, "inputs": 1.25}),
    (None, [(2, 3, 4)], lambda _, x: x.transpose(1, 2).contiguous(), {"op": "copy", "m": 24, "n": 1}),
    (nn.MaxPool2d(3, 2), [(2, 4, 9, 9)], None, {"op": "pool", "batch": 2, "out_channels": 4, "out_h": 4, "kernel_w": 3}),
    (None, [(2, 5, 7, 16), (2, 5, 9, 16)], lambda _, q, k: F.scaled_dot_product_attention(q, k, k),
     {"op": "attention", "heads": 5, "head_dim": 16, "sequences": 2, "tokens": 14, "kv_tokens": 18, "pairs": 126}),
    (None, [(1, 2, 8, 4)] * 2, lambda _, q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
     {"op": "attention", "pairs": 36}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shapes", "function", "expected"), CASES)
def test_sizes_of_an_operator(module: Any, shapes: Any, function: Any, expected: dict[str, float]) -> None:
    found = calls(function or (lambda self, x: self.inner(x)), *shapes, **({"inner": module} if module else {}))
    row = table_of(found).iloc[-1].to_dict()
    assert {name: row[name] for name in expected} == expected
    assert row["known"] and row["weight_bytes"] == sum(4 * p.numel() for p in (module.parameters() if module else ()))


def test_onnx_operators_are_those_that_they_mean(tmp_path) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, 2),
        nn.Hardswish(), Function(lambda _, x: x.reshape(x.shape[0], -1)), nn.LayerNorm(576), nn.Linear(576, 5), nn.Softmax(-1),
    ).eval()  # fmt: skip
    args, path = (torch.randn(2, 3, 32, 32),), tmp_path / "m.onnx"
    torch.onnx.export(net, args, path, dynamo=False, opset_version=17, dynamic_axes={"x": {0: "n"}}, input_names=["x"])
    meant = load_network(f"{path}@b2").operators
    assert meant is not None
    own, found = (table_of(calls_of(p)) for p in (Network.from_torch(net, args).export(), meant()))
    pd.testing.assert_frame_equal(found, own)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_an_onnx_recurrent_layer_has_the_sizes_of_both_directions(layer, tmp_path) -> None:
    module = Function(lambda self, x: self.inner(x)[0], inner=layer(10, 20, bidirectional=True)).eval()
    inputs, path = (torch.randn(7, 3, 10),), tmp_path / "m.onnx"
    torch.onnx.export(module, inputs, path, dynamo=False, opset_version=17)
    meant = load_network(str(path)).operators
    assert meant is not None
    own, found = (table_of(calls_of(p)) for p in (Network.from_torch(module, inputs).export(), meant()))
    row, expected = (t[t["op"] == layer.__name__.lower()].reset_index(drop=True) for t in (found, own))
    pd.testing.assert_frame_equal(row, expected, check_like=True)
    assert len(row) == 1


def test_files_with_inputs_by_name_groups_that_are_normalised_and_scales(tmp_path) -> None:
    net, shapes = Function(lambda _, x: x["a"] + 1), (({"a": {0: torch.export.Dim("n")}},),)
    torch.export.save(torch.export.export(net, ({"a": torch.ones(2, 4)},), dynamic_shapes=shapes), tmp_path / "m.pt2")
    assert [call.sizes["n"] for call in calls_of(load_network(f"{tmp_path}/m.pt2@b3").export())] == [12]
    graph = "g (float[1,4,3,3] x) => (float y) <float[4] a = {1,1,1,1}, float[4] s = {1,1,2,2}> "
    graph += "{z = GroupNormalization<num_groups = 2>(x, a, a) y = Resize(z, , s)}"
    model = pytest.importorskip("onnx.parser").parse_model('<ir_version: 10, opset_import: ["": 21]> ' + graph)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert [call.sizes["n"] for call in calls_of(load_network(tmp_path / "m.onnx").operators())] == [18, 36]


def test_work_of_a_transposed_convolution_and_of_a_cell() -> None:
    (up,) = calls(lambda self, x: self.up(x), (1, 6, 8, 8), up=nn.ConvTranspose2d(6, 4, 4, 2, 1, bias=False))
    assert work(table_of([up]))["matrix"][0] == 2 * 6 * 4 * 16 * 64
    cell = calls(lambda self, x: self.cell(x)[0], (3, 10), cell=nn.LSTMCell(10, 20))
    of_cell = work(table_of([call for call in cell if call.name == "lstm_cell"]))
    assert of_cell["matrix"][0] == 2 * 3 * 4 * 20 * (10 + 20)
    layers = calls(lambda self, x: self.layers(x)[0], (7, 3, 10), layers=nn.GRU(10, 20, 2, bidirectional=True))
    assert work(table_of(layers[-1:]))["matrix"][0] == 7 * 2 * 3 * 3 * 20 * (2 * (10 + 20) + 2 * (40 + 20))


def test_convolutions_without_onednn_are_those_that_pytorch_says() -> None:
    draw, threads, seen = random.Random(0), torch.get_num_threads(), []
    for i in range(40):
        dims, window, size, batch = (1 + i % 3, draw.choice([1, 3, 5]), draw.choice([6, 12, 40]), draw.choice([1, 1, 2, 16]))
        kind = getattr(nn, f"Conv{'Transpose' * (i % 2)}{dims}d")
        module = kind(8, 16, window, draw.choice([1, 1, 2]), window // 2, groups=draw.choice([1, 1, 2]), bias=False)
        shape, more = (batch, 8, *[size] * dims), int(dims == 1)  # PyTorch makes two dimensions of one
        x, w = (t.unsqueeze(2) if more else t for t in (torch.empty(shape), module.weight))
        stride, padding, ones = [*[1] * more, *module.stride], [*[0] * more, *module.padding], [1] * (dims + more)
        row = table_of(calls(lambda self, x: self.inner(x), shape, inner=module))
        for cores in (1, 2):
            torch.set_num_threads(cores)
            of_conv = (x, w, None, stride, padding, ones, bool(i % 2), [0] * len(ones), module.groups)
            seen.append(torch._C._select_conv_backend(*of_conv).name.startswith("Slow"))
            torch.set_num_threads(threads)
            assert runs_without_onednn(row, cores).tolist() == [seen[-1]]
    assert 10 < sum(seen) < 70


def test_views_are_no_calls_and_what_has_no_rule_is_marked() -> None:
    found = calls(lambda _, x: torch.special.i0(x.view(4, 6).t().unsqueeze(0)), (24,))
    assert [(call.name, call.known) for call in found] == [("special_i0", False)]
    assert table_of(found).iloc[0]["op"] == "elementwise"


def test_copies_have_weights_of_their_own_but_share_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = calls(lambda self, x: self.inner(x), (2, 8), inner=nn.Linear(8, 4))
    (first, second) = arguments_of(call, 2)
    assert call.node.target(*first[0], **first[1]).shape == (2, 4)
    assert first[0][0] is second[0][0] and first[0][1] is not second[0][1]
    monkeypatch.setattr("cdmpp.program.aten._MOST_BYTES", 4 * 64 * 90)
    (*_, call) = calls(lambda self, x: self.inner(x.long()), (2, 8), inner=nn.Embedding(90, 64))
    (table, rows), (same, others) = (args for args, _ in arguments_of(call, 2))
    assert table is same and not torch.equal(rows, others)
