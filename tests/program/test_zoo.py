"""The zoo: what it lists, that listing is cheap, that weights are reproducible and counts are true."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cdmpp.errors import NetworkError
from cdmpp.program.network import example_inputs, extract_tasks, load_network
from cdmpp.program.zoo import task_counts, zoo_entry, zoo_networks


def test_has_enough_networks_and_families() -> None:
    entries = zoo_networks()
    assert len(entries) >= 18 and len({entry.family for entry in entries.values()}) >= 9
    for name, entry in entries.items():
        assert name == entry.name and entry.description and entry.inputs and {i.shape[0] for i in entry.inputs} == {1}


def test_listing_networks_and_devices_imports_neither_torch_nor_tvm() -> None:
    code = (
        "import sys; import cdmpp.program; assert 'cdmpp.program.zoo' not in sys.modules;"
        "from cdmpp.program.zoo import zoo_networks, task_counts; zoo_networks(); task_counts();"
        "import cdmpp.program.network, cdmpp.dataset, cdmpp.device as d; d.device_features(d.get_device('this-cpu@1'));"
        "print(sorted({'torch', 'tvm', 'transformers', 'onnx', 'xgboost'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    {"resnet81": "resnet18", "bert": "bert_tiny", "mobilenetv2": "mobilenet_v2", "xyzzy": "cdmpp networks"}.items(),
)
def test_an_unknown_name_suggests_near_ones_or_where_to_look(wrong: str, hint: str) -> None:
    with pytest.raises(NetworkError, match=f"{wrong}.*{hint}") as caught:
        zoo_entry(wrong)
    assert "\n" not in str(caught.value)


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, third = (zoo_entry("mlp").build(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before), "building must leave the global generator alone"
    assert not first.training
    weights = [torch.cat([p.flatten() for p in net.parameters()]) for net in (first, second, third)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "name", ["squeezenet", "mobilenet_v3", "shufflenet_v2", "dlrm", "gcn", "gru", "unet", "espcn", "regnet_y_400mf"]
)
def test_networks_run(name: str) -> None:
    with torch.no_grad():
        output = zoo_entry(name).build()(*example_inputs(load_network(f"{name}@b2")))
    assert output.shape[0] == 2 and bool(torch.isfinite(output).all())


@pytest.mark.parametrize(
    ("name", "millions"),
    {
        "alexnet": 61.10, "resnet18": 11.69, "resnet50": 25.56, "resnext50": 25.03, "mobilenet_v2": 3.50,
        "efficientnet_b0": 5.29, "shufflenet_v2": 2.28, "densenet121": 7.98, "squeezenet": 1.24, "regnet_y_400mf": 4.34,
        "mobilevit_xxs": 1.27,
    }.items(),
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name: str, millions: float) -> None:
    with torch.device("meta"):
        parameters = zoo_entry(name).build().parameters()
    assert sum(each.numel() for each in parameters) / 1e6 == pytest.approx(millions, rel=0.005)


def test_shipped_counts_cover_the_zoo_and_are_those_of_the_extraction() -> None:
    counts = task_counts()
    assert set(counts) == set(zoo_networks())
    assert min(counts.values()) > 0 and sum(counts.values()) >= 250
    for name in ("mlp", "gcn"):
        assert len(extract_tasks([name])) == counts[name]


def test_drawn_operators_are_those_of_their_number_and_all_become_tasks() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (load_network(f"operators@s{number}") for number in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before), "drawing must leave the global generator alone"
    assert first.inputs == same.inputs != other.inputs and first.family == "generated"
    tasks, others = extract_tasks([first]), extract_tasks([other])
    assert min(len(tasks), len(others)) >= 50, "an operator was taken for another or became nothing"
    kinds = ("conv", "matmul", "pool", "softmax", "norm", "transpose")
    assert [kind for kind in kinds if not any(kind in task.name for task in (*tasks, *others))] == []
    assert {task.hash for task in tasks}.isdisjoint(task.hash for task in others)
    for number, kinds in ((2001, ("conv1d",)), (3001, ("conv2d", "pool2d"))):
        assert all(any(kind in t.name for kind in kinds) for t in extract_tasks([f"operators@s{number}"]))


@pytest.mark.parametrize("spec", ["operators", "operators@b4", "operators@s1b4"])
def test_operators_are_drawn_by_number_alone(spec: str) -> None:
    with pytest.raises(NetworkError, match="drawn by number, as operators@s7"):
        load_network(spec)
