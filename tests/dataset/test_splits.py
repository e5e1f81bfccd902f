"""Splits: nothing of the test part is known in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cdmpp.dataset import Split
from cdmpp.dataset.split import PARTS, architecture
from cdmpp.errors import SplitError
from cdmpp.files import read_yaml
from tests.samples.datasets import zoo_dataset

Networks = dict[str, tuple[str, ...]]
Data = tuple[pd.DataFrame, Networks]
SEEDS = st.integers(0, 5)
SHOTS = st.sets(st.sampled_from(["t0", "t1", "t2"]))


def table(rows: list[tuple[str, str, str]]) -> pd.DataFrame:
    labels = pd.DataFrame(sorted(set(rows)), columns=["task", "program", "device"])
    return labels.assign(latency_s=1e-3)


def one_each(n: int, *devices: str) -> pd.DataFrame:
    """A program of each task ``t0`` ..., on every device."""
    return table([(f"t{i}", f"p{i}", device) for i in range(n) for device in devices or ("d",)])


def units(split: Split, labels: pd.DataFrame, column: str = "task") -> tuple[set[str], ...]:
    """What train, valid and test have of a column."""
    return tuple(set(labels[column].iloc[getattr(split, name)]) for name in PARTS[:3])


@st.composite
def labelled(draw: st.DrawFn) -> Data:
    """A label table and the networks of its tasks, shared tasks and batch sizes included."""
    names = [f"net{i}{suffix}" for i in range(draw(st.integers(2, 8))) for suffix in ("", "@b4")]
    n_tasks = draw(st.integers(3, 25))
    some = st.lists(st.sampled_from(names), min_size=0, max_size=3, unique=True)
    networks = {f"t{i}": tuple(draw(some)) for i in range(n_tasks)}
    rows = []
    for name in networks:
        for number in range(draw(st.integers(1, 4))):
            # the same program may be measured on several devices
            for device in draw(st.sets(st.sampled_from(["d1", "d2", "d3"]), min_size=1)):
                rows.append((name, f"{name}p{number}", device))
    return table(rows), networks


def make(spec: str, labels: pd.DataFrame, networks: Networks) -> Split:
    """The split, checked: each label is in one part, its text makes the same one, and so does its JSON."""
    try:
        split = Split.parse(spec, labels, networks)
    except SplitError as error:
        assume(not any(text in str(error) for text in ("nothing is left", "cannot hold out", "at least two")))
        raise
    for other in (Split.parse(split.spec, labels, networks), Split.from_json(split.to_json())):
        assert all((getattr(other, name) == getattr(split, name)).all() for name in PARTS)
        assert other.to_json() == split.to_json()
    rows = [getattr(split, name) for name in PARTS]
    assert sorted(np.concatenate(rows)) == list(range(len(labels)))
    assert len(split.train) and len(split.test) and all(part.dtype == np.int64 for part in rows)
    return split


@given(labelled(), SEEDS, st.one_of(st.none(), st.integers(1, 4)))
def test_tasks_of_held_out_networks_are_nowhere_in_training(data: Data, seed: int, number: int | None) -> None:
    labels, networks = data
    split = make(f"by_network:seed={seed}" + (f";heldout={number}" if number else ""), labels, networks)
    train, valid, test = units(split, labels)
    assert not train & test and not valid & test and not train & valid
    for name, members in networks.items():
        assert (name in test) == bool(set(split.held_out) & {architecture(n) for n in members})
    assert 2 * len(test) <= len(networks)  # at least half of the tasks remain


@given(labelled(), SEEDS, st.sampled_from([0.1, 0.3, 0.5]), st.sampled_from([0.0, 0.1, 0.4]))
def test_by_task_and_within_task_are_disjoint(data: Data, seed: int, test: float, valid: float) -> None:
    labels, networks = data
    for kind, column in (("by_task", "task"), ("within_task", "program")):
        split = make(f"{kind}:test={test};valid={valid};seed={seed}", labels, networks)
        trained, validated, tested = units(split, labels, column)
        assert not trained & tested and not validated & tested and not trained & validated


@given(labelled(), SEEDS, SHOTS)
def test_a_held_out_device_is_not_in_training_but_for_allowed_tasks(data: Data, seed: int, shots: set[str]) -> None:
    labels, networks = data
    few = f";tasks={'+'.join(sorted(shots))}" if shots else ""
    split = make(f"by_device:seed={seed}{few}", labels, networks)
    held = set(split.held_out)
    assert set(labels["device"].iloc[split.test]) == held
    known = labels.iloc[np.concatenate([split.train, split.valid])]
    assert set(known[known["device"].isin(held)]["task"]) <= shots
    train, valid, _ = units(split, labels)
    assert not train & valid


SHARED = {"t0": ("a",), "t1": ("a", "b"), "t2": ("b",), "t3": ("c",), "t4": ("c", "b"), "t5": ("b",)}
SIZES = {"t0": ("resnet18",), "t1": ("resnet18@b4",), "t2": ("vgg",), "t3": ("vgg@b8",)}


@pytest.mark.parametrize(
    ("networks", "spec", "held_out", "valid", "test"),
    [
        # a task that a training network has too is tested
        (SHARED, "heldout=a;valid=0", "a", "", "t0 t1"),
        (SHARED, "heldout=a;valid=c", "a", "t3 t4", "t0 t1"),
        # a network is held out at every batch size
        *((SIZES, f"heldout={name};valid=0", "resnet18", "", "t0 t1") for name in ("resnet18", "resnet18@b4")),
        # the split of trained weights serves on data with some of its networks
        (SHARED, "heldout=a+missing;valid=0", "a", "", "t0 t1"),
    ],
)  # fmt: skip
def test_named_networks_are_held_out(
    networks: Networks, spec: str, held_out: str, valid: str, test: str, caplog: pytest.LogCaptureFixture
) -> None:
    labels = one_each(len(networks))
    split = make(f"by_network:{spec}", labels, networks)
    assert split.held_out == (held_out,) and ("missing" in caplog.text) == ("missing" in spec)
    assert units(split, labels)[1:] == (set(valid.split()), set(test.split()))


def test_the_default_holds_out_four_networks_of_different_families(tmp_path: Path) -> None:
    dataset = zoo_dataset(tmp_path / "d", networks=16)
    labels, families = dataset.labels(), dataset.network_families
    seen = set()
    for seed in range(5):
        split = Split.parse(f"by_network:seed={seed}", labels, dataset.tasks, families)
        assert len(split.held_out) == len({families[name] for name in split.held_out}) == 4
        assert 0.05 * len(labels) < len(split.valid) < 0.3 * len(labels)
        assert len(split.train) > 0.4 * len(labels)
        assert 0.15 * len(labels) <= len(split.test) <= 0.5 * len(labels)
        seen.add(split.held_out)
    assert len(seen) > 2  # the seed chooses
    assert Split.parse("by_network", labels, dataset.tasks, families).held_out in seen


def test_a_choice_does_not_depend_on_the_order_or_number_of_labels() -> None:
    labels = one_each(40)
    fewer = labels.iloc[::-1].iloc[:30].reset_index(drop=True)
    full, part = (Split.parse("by_task:seed=3", table) for table in (labels, fewer))
    assert units(part, fewer)[2] == units(full, labels)[2] & set(fewer["task"])


def test_devices_go_by_their_aliases() -> None:
    labels = one_each(5, "h200", "v100-pcie-32gb", "t4")
    assert Split.parse("by_device:heldout=NVIDIA H200,Tesla T4", labels).held_out == ("h200", "t4")
    few_shot = Split.parse("by_device:heldout=h200;tasks=t0+t1", labels)
    trained = labels.iloc[np.concatenate([few_shot.train, few_shot.valid])]
    assert set(trained[trained["device"] == "h200"]["task"]) == {"t0", "t1"}


def test_validation_falls_back_to_tasks_where_one_network_is_left() -> None:
    labels = one_each(20)
    split = Split.parse("by_network:heldout=a", labels, {f"t{i}": ("ab"[i >= 5],) for i in range(20)})
    train, valid, _ = units(split, labels)
    assert train and valid and not train & valid


def test_tasks_of_no_network_can_be_tested_and_validated_too() -> None:
    networks: Networks = {f"t{i}": ("a",) if i < 3 else ("b",) if i < 6 else () for i in range(206)}
    labels = one_each(206)
    train, valid, test = units(make("by_network:heldout=a;valid=0;others=0.2;seed=1", labels, networks), labels)
    assert {"t0", "t1", "t2"} <= test and {"t3", "t4", "t5"} <= train
    assert all(20 <= sum(not networks[name] for name in part) <= 60 for part in (valid, test))
    assert units(make("by_network:heldout=a;valid=0;seed=1", labels, networks), labels)[2] == {"t0", "t1", "t2"}


@pytest.mark.parametrize(("spec", "message"), read_yaml(Path(__file__).with_name("refused_splits.yaml")).items())
def test_specifications_that_cannot_be(spec: str, message: str) -> None:
    labels = one_each(4, "d1")
    networks = {f"t{i}": (f"net{i % 2}",) for i in range(4)}
    with pytest.raises(SplitError, match=message):
        Split.parse(spec, labels, networks)


def test_by_network_needs_networks_and_labels() -> None:
    labels = one_each(1)
    with pytest.raises(SplitError, match="needs the networks"):
        Split.parse("by_network", labels)
    with pytest.raises(SplitError, match="no labels to split"):
        Split.parse("by_task", labels.iloc[:0])


@pytest.mark.parametrize("text", ["{}", "3", '{"kind": "by_magic"}', "half"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(SplitError):
        Split.from_json(text)


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        ("by_task", lambda s: {"fingerprint": "0" * 16}, "another label table"),
        ("by_task", lambda s: {"valid": s.train[:1]}, "has a row twice"),
        ("by_task", lambda s: {"test": np.array([99])}, "rows outside"),
        ("by_network:heldout=a;valid=0", lambda s: {"train": np.append(s.train, s.test[-1]), "test": s.test[:1]},
         "task t1 of held-out network a is in train"),
    ],
)  # fmt: skip
def test_rows_that_a_split_may_not_have_are_refused(spec: str, change: Callable[[Split], dict[str, Any]], message: str) -> None:
    labels = one_each(6, *(("d1", "d2", "d3") if "device" in spec else ()))
    split = Split.parse(spec, labels, SHARED)
    split.check_disjoint(labels, SHARED)
    with pytest.raises(SplitError, match=message):
        replace(split, **change(split)).check_disjoint(labels, SHARED)
    with pytest.raises(SplitError, match="another label table"):
        split.check_disjoint(labels.iloc[::-1].reset_index(drop=True), SHARED)


@pytest.mark.parametrize("column", ["task", "program", "device"])
def test_shared_units_are_found(column: str) -> None:
    kind = {"task": "by_task", "program": "within_task", "device": "by_device"}[column]
    labels = table([("t0", "p0", "d0"), ("t1", "p1", "d1"), ("t2", "p2", "d2")])
    labels.loc[1, column] = labels.loc[0, column]
    rows = [np.array([i]) for i in range(3)]
    split = Split(kind, kind, 0, rows[0], rows[2], rows[1])
    with pytest.raises(SplitError, match=f"1 {column}s in train and test"):
        split.check_disjoint(labels)
