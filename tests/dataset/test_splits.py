"""Splits: nothing of the test part is known in training."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cdmpp.dataset import Split
from cdmpp.dataset.split import PARTS, architecture
from cdmpp.errors import SplitError
from tests.samples.datasets import DEVICE, OTHER_DEVICE, zoo_dataset

Networks = dict[str, tuple[str, ...]]


def table(rows: list[tuple[str, str, str]]) -> pd.DataFrame:
    labels = pd.DataFrame(sorted(set(rows)), columns=["task", "program", "device"])
    return labels.assign(latency_s=1e-3)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[pd.DataFrame, Networks]:
    """A label table and the networks of its tasks, shared tasks and batch sizes included."""
    names = [f"net{i}{suffix}" for i in range(draw(st.integers(2, 8))) for suffix in ("", "@b4")]
    n_tasks = draw(st.integers(3, 25))
    networks = {
        f"t{i}": tuple(draw(st.lists(st.sampled_from(names), min_size=0, max_size=3, unique=True)))
        for i in range(n_tasks)
    }
    rows = []
    for name in networks:
        for number in range(draw(st.integers(1, 4))):
            # the same program may be measured on several devices
            for device in draw(st.sets(st.sampled_from(["d1", "d2", "d3"]), min_size=1)):
                rows.append((name, f"{name}p{number}", device))
    return table(rows), networks


def make(spec: str, labels: pd.DataFrame, networks: Networks) -> Split:
    """The split, checked: its text makes the same one, and so does its JSON."""
    try:
        split = Split.parse(spec, labels, networks)
    except SplitError as error:
        assume(not any(text in str(error) for text in ("nothing is left", "cannot hold out", "at least two")))
        raise
    for other in (Split.parse(split.spec, labels, networks), Split.from_json(split.to_json())):
        assert all((other.part(name) == split.part(name)).all() for name in PARTS)
    return split


def parts(split: Split, labels: pd.DataFrame, column: str) -> tuple[set[str], set[str], set[str]]:
    train, valid, test = (set(labels[column].iloc[split.part(name)]) for name in ("train", "valid", "test"))
    return train, valid, test


def check_partition(split: Split, labels: pd.DataFrame) -> None:
    rows = np.concatenate([split.train, split.valid, split.test])
    assert sorted(rows) == list(range(len(labels)))
    assert len(split.train) and len(split.test)
    assert all(split.part(name).dtype == np.int64 for name in ("train", "valid", "test"))


@given(labelled(), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 4)))
def test_tasks_of_held_out_networks_are_nowhere_in_training(
    data: tuple[pd.DataFrame, Networks], seed: int, number: int | None
) -> None:
    labels, networks = data
    split = make(f"by_network:seed={seed}" + (f";heldout={number}" if number else ""), labels, networks)
    check_partition(split, labels)
    train, valid, test = parts(split, labels, "task")
    assert not train & test and not valid & test and not train & valid
    for name, members in networks.items():
        tested = bool(set(split.held_out) & {architecture(n) for n in members})
        assert (name in test) == tested
    assert 2 * len(test) <= len(networks)  # at least half of the tasks remain


@given(labelled(), st.integers(0, 5), st.sampled_from([0.1, 0.3, 0.5]), st.sampled_from([0.0, 0.1, 0.4]))
def test_by_task_and_within_task_are_disjoint(
    data: tuple[pd.DataFrame, Networks], seed: int, test: float, valid: float
) -> None:
    labels, networks = data
    for kind, column in (("by_task", "task"), ("within_task", "program")):
        split = make(f"{kind}:test={test};valid={valid};seed={seed}", labels, networks)
        check_partition(split, labels)
        train_units, valid_units, test_units = parts(split, labels, column)
        assert not train_units & test_units and not valid_units & test_units and not train_units & valid_units


@given(labelled(), st.integers(0, 5), st.sets(st.sampled_from(["t0", "t1", "t2"])))
def test_a_held_out_device_is_not_in_training_but_for_allowed_tasks(
    data: tuple[pd.DataFrame, Networks], seed: int, shots: set[str]
) -> None:
    labels, networks = data
    few = f";tasks={'+'.join(sorted(shots))}" if shots else ""
    split = make(f"by_device:seed={seed}{few}", labels, networks)
    check_partition(split, labels)
    held = set(split.held_out)
    assert set(labels["device"].iloc[split.test]) == held
    known = labels.iloc[np.concatenate([split.train, split.valid])]
    assert set(known[known["device"].isin(held)]["task"]) <= shots
    train, valid, _ = parts(split, labels, "task")
    assert not train & valid


@given(
    labelled(), st.integers(0, 5), st.sampled_from([0.05, 0.3, 0.7]), st.sets(st.sampled_from(["t0", "t1"]))
)
def test_adapt_rows_leave_test_and_share_no_program_with_it(
    data: tuple[pd.DataFrame, Networks], seed: int, adapt: float, shots: set[str]
) -> None:
    labels, networks = data
    few = f";tasks={'+'.join(sorted(shots))}" if shots else ""
    for spec in (f"by_network:seed={seed}", f"by_device:seed={seed}{few}"):
        without, split = make(spec, labels, networks), make(f"{spec};adapt={adapt}", labels, networks)
        check_partition(without, labels)
        # only rows of test move, and every row of a program moves together
        assert (split.train == without.train).all() and (split.valid == without.valid).all()
        assert sorted([*split.test, *split.adapt]) == list(without.test)
        programs = labels["program"]
        assert not set(programs.iloc[split.adapt]) & set(programs.iloc[split.test])
        assert len(split.adapt) or len(set(programs.iloc[without.test])) == 1
        if split.kind == "by_device":
            assert set(labels["device"].iloc[split.adapt]) <= set(split.held_out)
            assert not set(labels["task"].iloc[split.adapt]) & shots


def test_a_split_without_adapt_rows_is_written_as_before() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(9)])
    networks = {f"t{i}": ("abc"[i // 3],) for i in range(9)}
    split = Split.parse("by_network:heldout=a;valid=b", labels, networks)
    assert split.spec == "by_network:heldout=a;valid=b;seed=0"
    assert list(labels["task"].iloc[split.valid]) == ["t3", "t4", "t5"]
    assert "adapt" not in json.loads(split.to_json())
    assert Split.from_json(split.to_json()).adapt.shape == (0,)


def test_adapt_and_test_with_a_program_in_common_are_refused() -> None:
    labels = table([(f"t{i}", f"p{i}", d) for i in range(6) for d in ("d1", "d2", "d3")])
    split = Split.parse("by_device:heldout=d1+d2;valid=0;adapt=0.4", labels)
    split.check_disjoint(labels)
    assert len(split.adapt)
    with pytest.raises(SplitError, match="1 programs in adapt and test"):
        replace(split, adapt=split.adapt[1:], test=np.append(split.test, split.adapt[0])).check_disjoint(
            labels
        )
    with pytest.raises(SplitError, match="has a row twice"):
        replace(split, adapt=split.train[:1]).check_disjoint(labels)


def test_a_shared_task_of_a_held_out_network_is_tested_not_trained() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(6)])
    networks = {"t0": ("a",), "t1": ("a", "b"), "t2": ("b",), "t3": ("c",), "t4": ("c", "b"), "t5": ("b",)}
    split = Split.parse("by_network:heldout=a;valid=0", labels, networks)
    assert list(labels["task"].iloc[split.test]) == ["t0", "t1"]
    split.check_disjoint(labels, networks)
    moved = replace(split, train=np.append(split.train, split.test[1]), test=split.test[:1])
    with pytest.raises(SplitError, match="task t1 of held-out network a is in train"):
        moved.check_disjoint(labels, networks)


def test_a_network_is_held_out_at_every_batch_size() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(4)])
    networks = {"t0": ("resnet18",), "t1": ("resnet18@b4",), "t2": ("vgg",), "t3": ("vgg@b8",)}
    for name in ("resnet18", "resnet18@b4"):
        split = Split.parse(f"by_network:heldout={name};valid=0", labels, networks)
        assert list(labels["task"].iloc[split.test]) == ["t0", "t1"]
        assert split.held_out == ("resnet18",)


def test_the_default_holds_out_four_networks_of_different_families(tmp_path: Path) -> None:
    dataset = zoo_dataset(tmp_path / "d", networks=16)
    labels, families = dataset.labels(), dataset.network_families
    seen = set()
    for seed in range(5):
        split = Split.parse(f"by_network:seed={seed}", labels, dataset.tasks, families)
        assert len(split.held_out) == 4
        assert len({families[name] for name in split.held_out}) == 4
        assert 0.05 * len(labels) < len(split.valid) < 0.3 * len(labels)
        assert len(split.train) > 0.4 * len(labels)
        assert 0.15 * len(labels) <= len(split.test) <= 0.5 * len(labels)
        seen.add(split.held_out)
    assert len(seen) > 2  # the seed chooses
    assert Split.parse("by_network", labels, dataset.tasks, families).held_out in seen


def test_a_choice_does_not_hang_on_the_order_or_number_of_labels() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(40)])
    fewer = labels.iloc[::-1].iloc[:30].reset_index(drop=True)
    full, part = (Split.parse("by_task:seed=3", table) for table in (labels, fewer))
    test = set(labels["task"].iloc[full.test])
    assert set(fewer["task"].iloc[part.test]) == test & set(fewer["task"])


def test_devices_go_by_their_aliases() -> None:
    labels = table([(f"t{i}", f"p{i}", d) for i in range(5) for d in ("h200", "v100-pcie-32gb", "t4")])
    split = Split.parse("by_device:heldout=NVIDIA H200,Tesla T4", labels)
    assert split.held_out == ("h200", "t4")
    few_shot = Split.parse("by_device:heldout=h200;tasks=t0+t1", labels)
    trained = labels.iloc[np.concatenate([few_shot.train, few_shot.valid])]
    assert set(trained[trained["device"] == "h200"]["task"]) == {"t0", "t1"}


def test_validation_falls_back_to_tasks_where_one_network_is_left() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(20)])
    networks = {f"t{i}": ("a",) if i < 5 else ("b",) for i in range(20)}
    split = Split.parse("by_network:heldout=a", labels, networks)
    assert len(split.valid) and len(split.train)
    assert not set(labels["task"].iloc[split.train]) & set(labels["task"].iloc[split.valid])


def test_tasks_of_no_network_can_be_tested_and_validated_too() -> None:
    networks: Networks = {f"t{i}": ("a",) if i < 3 else ("b",) if i < 6 else () for i in range(206)}
    labels = table([(task, f"{task}p", "d1") for task in networks])
    alone = {task for task, names in networks.items() if not names}
    split = Split.parse("by_network:heldout=a;valid=0;others=0.2;seed=1", labels, networks)
    parts = {name: set(labels["task"].iloc[getattr(split, name)]) for name in ("train", "valid", "test")}
    assert {"t0", "t1", "t2"} <= parts["test"] and {"t3", "t4", "t5"} <= parts["train"]
    for name in ("valid", "test"):
        assert 20 <= len(parts[name] & alone) <= 60
    assert Split.parse(split.spec, labels, networks).test.tolist() == split.test.tolist()
    without = Split.parse("by_network:heldout=a;valid=0;seed=1", labels, networks)
    assert set(labels["task"].iloc[without.test]) == {"t0", "t1", "t2"}
    with pytest.raises(SplitError, match="others must be a fraction"):
        Split.parse("by_network:others=many", labels, networks)


def test_a_trained_split_serves_on_data_with_some_of_its_networks(caplog: pytest.LogCaptureFixture) -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(6)])
    networks = {f"t{i}": ("ab"[i // 3],) for i in range(6)}
    with caplog.at_level(logging.WARNING):
        split = Split.parse("by_network:heldout=a+missing;valid=0", labels, networks)
    assert split.held_out == ("a",) and "missing" in caplog.text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("by_magic", "no split 'by_magic'; there are by_network"),
        ("by_task:heldout=a", "by_task has no 'heldout', only test, valid, seed"),
        ("by_task:test", "test has no value"),
        ("by_task:test=much", "must be a fraction"),
        ("by_task:test=0.7;valid=0.5", "below 1 together"),
        ("by_task:test=0.2;test=0.3", "given twice"),
        ("by_task:seed=x", "seed must be a whole number"),
        ("by_network:heldout=resnet", "no label is of network resnet; there are net"),
        ("by_network:heldout=net0+net1", "nothing is left to train"),
        ("by_network:heldout=2", "cannot hold out 2 of 2 networks"),
        ("by_network:heldout=+", "no network is named"),
        ("by_device:heldout=h300", "no label is of device h300"),
        ("by_device:heldout=d1", "nothing is left to train"),
        ("by_device", "at least two devices"),
        ("by_device:heldout=d1;tasks=nope", "no label of task nope"),
        ("by_device:heldout=d1;valid=x", "valid must be a fraction"),
        ("by_device:heldout=d1;adapt=x", "adapt must be a fraction"),
        ("by_network:heldout=net0;adapt=1", "adapt=1 must be at least 0 and below 1"),
        ("by_task:adapt=0.3", "by_task has no 'adapt', only test, valid, seed"),
    ],
)
def test_specifications_that_cannot_be(spec: str, message: str) -> None:
    labels = table([(f"t{i}", f"p{i}", "d1") for i in range(4)])
    networks = {f"t{i}": (f"net{i % 2}",) for i in range(4)}
    with pytest.raises(SplitError, match=message):
        Split.parse(spec, labels, networks)


def test_by_network_needs_networks_and_labels() -> None:
    labels = table([("t", "p", "d")])
    with pytest.raises(SplitError, match="needs the networks"):
        Split.parse("by_network", labels)
    with pytest.raises(SplitError, match="no labels to split"):
        Split.parse("by_task", labels.iloc[:0])


def test_json_round_trip(tmp_path: Path) -> None:
    dataset = zoo_dataset(tmp_path / "d", devices=(DEVICE, OTHER_DEVICE))
    labels = dataset.labels()
    for spec in (
        "by_network",
        "by_task",
        "within_task",
        f"by_device:heldout={OTHER_DEVICE}",
        "by_network:adapt=0.3",
    ):
        split = Split.parse(spec, labels, dataset.tasks)
        again = Split.from_json(split.to_json())
        assert again.to_json() == split.to_json()
        again.check_disjoint(labels, dataset.tasks)
    for text in ("{}", "3", '{"kind": "by_magic"}', "half"):
        with pytest.raises(SplitError):
            Split.from_json(text)


def test_a_split_of_another_table_and_overlapping_rows_are_refused() -> None:
    labels = table([(f"t{i}", f"p{i}", "d") for i in range(10)])
    split = Split.parse("by_task", labels)
    with pytest.raises(SplitError, match="another label table"):
        split.check_disjoint(labels.iloc[::-1].reset_index(drop=True))
    with pytest.raises(SplitError, match="has a row twice"):
        replace(split, valid=split.train[:1]).check_disjoint(labels)
    with pytest.raises(SplitError, match="rows outside"):
        replace(split, test=np.array([99])).check_disjoint(labels)
    with pytest.raises(SplitError, match="no part 'training'"):
        split.part("training")


@pytest.mark.parametrize("column", ["task", "program", "device"])
def test_shared_units_are_found(column: str) -> None:
    kind = {"task": "by_task", "program": "within_task", "device": "by_device"}[column]
    labels = table([("t0", "p0", "d0"), ("t1", "p1", "d1"), ("t2", "p2", "d2")])
    labels.loc[1, column] = labels.loc[0, column]
    rows = [np.array([i]) for i in range(3)]
    split = Split(kind, kind, 0, rows[0], rows[2], rows[1])
    with pytest.raises(SplitError, match=f"1 {column}s in train and test"):
        split.check_disjoint(labels)
