"""Choosing tasks for a new device: clusters are found, the choice is repeatable and can be profiled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cdmpp.errors import PredictorError
from cdmpp.predictor.data import split_data
from cdmpp.predictor.selection import select_tasks, write_task_file
from cdmpp.predictor.training import prepare
from cdmpp.profiler.session import read_task_file
from cdmpp.program.ast import LEAF_FEATURES, CompactAST
from tests.samples.training import make_data


@pytest.fixture(scope="module")
def small():
    return make_data(8, 5)


@pytest.fixture()
def predictor(small, config):
    fitted = prepare(config, small, split_data("by_task:seed=0", small))
    return fitted.predictor(fitted.trainer.network.state_dict(), {})


@pytest.fixture(scope="module")
def three_kinds():
    """Nine tasks of three kinds: kind i sits at 20 i, its tasks at -1, 0 and +1 of that."""
    data = make_data(9, 2)
    asts = {}
    for program, task in zip(data.labels["program"], data.labels["task"], strict=True):
        number = int(task[1:])
        leaves = np.zeros((1, len(LEAF_FEATURES)), np.float32)
        leaves[:, 0] = np.exp(2 * (number // 3) + 0.1 * (number % 3 - 1))
        asts[program] = CompactAST(leaves=leaves, positions=np.zeros(1, np.int32), n_nodes=1)
    return type(data)(data.labels, asts, data.devices, data.networks, data.families)


def test_the_middle_task_of_every_kind_is_chosen(three_kinds):
    for seed in range(3):
        chosen = select_tasks(three_kinds, 3, seed=seed)
        assert chosen.tasks == chosen.wanted == ("t001", "t004", "t007")
        assert (chosen.features, chosen.candidates) == ("ast", 9)


def test_the_next_nearest_task_of_the_cluster_takes_the_place_of_one_that_is_not_available(three_kinds, caplog):
    available = {"t000", "t003", "t004", "t005", "t007"}
    chosen = select_tasks(three_kinds, 3, available=available)
    assert chosen.tasks == ("t000", "t004", "t007") and chosen.wanted == ("t001", "t004", "t007")
    assert "1 of 3 tasks cannot be chosen" in caplog.text
    # a cluster without any is replaced by the nearest that is left, never by one chosen already
    assert select_tasks(three_kinds, 3, available=available - {"t000"}).tasks == ("t003", "t004", "t007")
    assert select_tasks(three_kinds, 3, available={"t008"}).tasks == ("t008",)


@pytest.mark.parametrize("select", ["kmeans", "random"])
def test_a_choice_is_repeatable_and_as_large_as_asked(small, predictor, select):
    chosen = select_tasks(small, 4, select, seed=3, predictor=predictor)
    assert chosen == select_tasks(small, 4, select, seed=3, predictor=predictor)
    assert len(set(chosen.tasks)) == 4 and chosen.features == ("embedding" if select == "kmeans" else "none")
    assert len(select_tasks(small, 99, select).tasks) == 8
    rows = np.flatnonzero(small.labels["task"] < "t003")
    assert set(select_tasks(small, 2, select, rows=rows).tasks) < {"t000", "t001", "t002"}
    shuffled = small.labels.sample(frac=1, random_state=0).reset_index(drop=True)
    other = type(small)(shuffled, small.asts, small.devices, small.networks, small.families)
    assert select_tasks(other, 4, select, seed=3, predictor=predictor) == chosen


def test_random_choices_differ_by_seed_and_grow_with_k(small):
    assert len({select_tasks(small, 3, "random", seed).tasks for seed in range(6)}) > 1
    assert set(select_tasks(small, 2, "random", 1).tasks) < set(select_tasks(small, 5, "random", 1).tasks)


def test_the_file_is_what_profile_takes(three_kinds, tmp_path):
    chosen = select_tasks(three_kinds, 3, available={"t000", "t004", "t008"})
    path = tmp_path / "new" / "tasks.json"
    write_task_file(path, chosen, device="fast")
    # what is wanted, not what happens to have records
    assert read_task_file(path) == ["t001", "t004", "t007"]
    notes = json.loads(path.read_text())
    assert (notes["device"], notes["select"], notes["seed"]) == ("fast", "kmeans", 0)
    with pytest.raises(PredictorError, match="cannot write"):
        write_task_file(path / "below", chosen)


def test_bad_arguments_are_said(small):
    for number, by, said in ((0, "kmeans", "at least 1, got 0"), (2, "best", "unknown selection 'best'")):
        with pytest.raises(PredictorError, match=said):
            select_tasks(small, number, by)
    with pytest.raises(PredictorError, match="no task to choose from"):
        select_tasks(small, 2, available=())
