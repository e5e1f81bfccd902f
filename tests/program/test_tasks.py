"""Networks to tasks: what is a task, what is not, and that fusing changes no result."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import NetworkError, ProgramError
from cdmpp.program import import_tvm, structural_hash

from cdmpp.program.network import (  # isort: skip
    PREPARE_WEIGHTS, Network, example_inputs, extract_tasks, fuse, load_network, task_from_prim_func,
)  # fmt: skip
from cdmpp.program.types import Task
from cdmpp.program.zoo import zoo_entry

torch = pytest.importorskip("torch")
pytest.importorskip("tvm")


def conv_net() -> Any:
    """Convolution with batch norm, batch norm on its own, pooling, reshape, linear."""
    norms = [torch.nn.BatchNorm2d(8) for _ in range(3)]
    for norm in norms:
        ranges = ((norm.running_mean, -1), (norm.running_var, 0.5), (norm.weight, 0.5), (norm.bias, -1))
        for values, low in ranges:
            torch.nn.init.uniform_(values, low, low + 2)
    relu, conv = torch.nn.ReLU(), torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
    body = (conv, norms[0], relu, torch.nn.MaxPool2d(2), norms[1], relu, torch.nn.Conv2d(8, 8, 3), norms[2], relu)
    return torch.nn.Sequential(*body, torch.nn.Flatten(), torch.nn.Linear(8 * 3 * 3, 5)).eval()


class Attention(torch.nn.Module):
    """A layer of a transformer: two heads of four, layer norms, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.heads, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.wide, self.narrow = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        query, key, value = self.heads(self.first(x)).reshape(-1, 3, 2, 4).permute(1, 2, 0, 3)
        attention = torch.softmax(query @ key.transpose(-1, -2) / 2, -1) @ value
        x = x + self.out(attention.transpose(0, 1).reshape(-1, 8))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))


class Powers(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x**2 + x**3 + x.abs() ** 1.5


def network_of(function: Any, *shape: int) -> Network:
    class Computing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return function(x)

    return Network.from_torch(Computing(), (torch.randn(shape),), name="net")


def tasks_of(function: Any, *shape: int) -> list[Task]:
    return extract_tasks([network_of(function, *shape)])


@functools.cache
def zoo_tasks(name: str) -> list[Task]:
    return extract_tasks([name])


@pytest.mark.parametrize(("make", "shape"), [(conv_net, (1, 3, 10, 10)), (Attention, (6, 8)), (Powers, (6, 8)), ("mlp", ())])
def test_fused_network_computes_what_the_module_computes(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    if make == "mlp":
        network, module = load_network(make), zoo_entry(make).build()
        args = example_inputs(network, seed=7)
    else:
        module, args = make().eval(), (torch.randn(shape),)
        network = Network.from_torch(module, args)
    with torch.no_grad():
        expected = module(*args).numpy()
    tvm = import_tvm()
    fused = fuse(network.to_relax())
    assert fused.num_inputs == len(args)
    assert sum(name.count("power") for name in fused.calls) == (make is Powers), "squares and cubes are products"
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    machine = tvm.relax.VirtualMachine(tvm.compile(fused.module, target=target), tvm.cpu())
    weights = machine[PREPARE_WEIGHTS](list(fused.weights))
    output = machine["main"](*[tvm.runtime.tensor(arg.numpy()) for arg in args], *weights)
    found = (output if hasattr(output, "numpy") else output[0]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_weight_transforms_are_no_tasks() -> None:
    tasks = extract_tasks([Network.from_torch(conv_net(), (torch.randn(1, 3, 10, 10),))])
    names = {re.sub(r"[0-9]+(?=_|$)", "", task.name) for task in tasks}
    assert names == {
        "fused_conv2d_add_relu",  # batch norm is folded into the convolution
        "fused_max_pool2d_multiply_add_relu",  # batch norm on its own is one scale and one shift
        "fused_conv2d_add_multiply_add_relu",
        "fused_matmul_add",
    }


def test_constants_are_arguments_and_json_is_small() -> None:
    for task in [*zoo_tasks("mlp"), *zoo_tasks("lstm")]:
        assert len(task.tir_json) < 80_000, task.name
    weights = next(task for task in zoo_tasks("mlp") if task.name == "fused_matmul_add_relu")
    shapes = [tuple(int(extent) for extent in param.shape) for param in weights.prim_func().params]
    assert shapes == [(1, 784), (784, 1024), (1024,), (1, 1024)]
    assert weights.flops == 1024 * (2 * 784 + 1 + 1)
    assert weights.bytes == 4 * (784 + 784 * 1024 + 1024 + 1024)
    assert weights.dtype == "float32"


def test_equal_tasks_of_several_networks_are_one() -> None:
    def stack(depth: int) -> Network:
        layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16), torch.nn.ReLU()] * depth)
        return Network.from_torch(layers, (torch.randn(1, 16),), name=f"stack{depth}")

    (task,) = extract_tasks([stack(2), stack(5)])
    assert dict(task.networks) == {"stack2": 2.0, "stack5": 5.0}
    # eight steps of an unrolled network, the first or last of which may fuse differently
    assert max(task.networks["lstm"] for task in zoo_tasks("lstm")) >= 7


def test_hashes_ignore_names_see_shapes_and_never_change() -> None:
    def doubled(second: Any) -> Any:
        result = torch.relu(second)
        return result * 2

    (task,), (same,) = tasks_of(lambda first: torch.relu(first) * 2, 4, 8), tasks_of(doubled, 4, 8)
    assert task.hash == same.hash == structural_hash(task.prim_func())
    (wider,), (tripled,) = tasks_of(doubled, 4, 9), tasks_of(lambda x: torch.relu(x) * 3, 4, 8)
    assert task.hash not in (wider.hash, tripled.hash)
    # in every process: records of several runs and machines belong together
    assert task.hash == "9abd1c141858584c"


def test_reshape_alone_is_no_task() -> None:
    assert tasks_of(lambda x: x.reshape(2, 128), 4, 64) == []
    (task,) = tasks_of(lambda x: x.t().contiguous(), 4, 64)
    assert task.flops == 0 and task.bytes == 2 * 4 * 4 * 64


@pytest.mark.parametrize(
    ("function", "shape", "reason"),
    [
        (lambda x: x + 1, (), "has no loop"),
        (lambda x: torch.topk(x, 5)[0], (4, 64), "external function tvm.contrib.sort.topk"),
        (lambda x: x.cumsum(1), (4, 64), "nothing to schedule"),
    ],
)
def test_what_cannot_be_scheduled_is_left_out_with_a_reason(
    function: Any, shape: tuple[int, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cdmpp"):
        assert tasks_of(function, *shape) == []
    assert reason in caplog.text and "no task stands for" in caplog.text


def test_a_function_that_is_no_task_asked_for_directly() -> None:
    import_tvm()
    from tvm import te

    def plus_one(*shape: Any) -> Any:
        a = te.placeholder(shape, "float32", name="a")
        return te.create_prim_func([a, te.compute(shape, lambda *at: a(*at) + 1.0)])

    with pytest.raises(ProgramError, match="scalar has no loop"):
        task_from_prim_func(plus_one(), name="scalar")
    with pytest.raises(ProgramError, match="add has a dynamic shape"):
        task_from_prim_func(plus_one(te.var("n", "int64"), 8), name="add")


def test_same_name_twice(caplog: pytest.LogCaptureFixture) -> None:
    twice = extract_tasks(["mlp", "mlp"])
    assert [task.networks for task in zoo_tasks("mlp")] == [task.networks for task in twice]
    assert "given twice" in caplog.text
    with pytest.raises(NetworkError, match="two different networks are called net"):
        extract_tasks([network_of(torch.relu, 4), network_of(torch.tanh, 4)])


def test_progress_is_given_every_network_and_the_target_may_be_a_dict() -> None:
    seen: list[tuple[str, int, int]] = []
    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 2}
    tasks = extract_tasks(["mlp", "gcn"], target, lambda *args: seen.append(args))
    assert seen == [("mlp", 1, 2), ("gcn", 2, 2)]
    assert [task.hash for task in tasks] == [task.hash for name in ("mlp", "gcn") for task in zoo_tasks(name)]
