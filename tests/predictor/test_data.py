"""From a dataset on disk to a prediction, with real programs."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.dataset import Dataset, Record
from cdmpp.errors import DatasetError, ProgramError, SplitError
from cdmpp.files import cache_file
from cdmpp.predictor import config_from_dict, evaluate, gather, program_resolver, split_data, train
from cdmpp.predictor.baselines import XGBoostModel, evaluate_models
from cdmpp.predictor.baselines.xgboost import PER_STORE_FILE, collect_per_store
from cdmpp.predictor.config import DataConfig
from cdmpp.predictor.data import AST_FILE, subset
from cdmpp.program import structural_hash
from cdmpp.program.ast import compact_asts
from tests.samples.programs import matmul_task

DEVICES = ("h200", "v100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks of three networks, 12 random programs each, made-up latencies on two devices, one failure."""
    from cdmpp.program.space import TaskSpaces

    path = tmp_path_factory.mktemp("data") / "d"
    rng = np.random.default_rng(0)
    with Dataset.create(path, network_families={"one": "mlp", "two": "mlp", "three": "cnn"}) as dataset:
        for n, networks in ((64, {"one": 1.0, "two": 2.0}), (128, {"two": 1.0}), (96, {"three": 1.0})):
            task = replace(matmul_task(n), networks=networks)
            spaces = TaskSpaces(task)
            dataset.add_task(task)
            for space in spaces.spaces:
                dataset.add_space(space)
            for i, program in enumerate(spaces.sample(12, seed=0)):
                dataset.add_program(program)
                for scale, device in enumerate(DEVICES, start=1):
                    if i == 11:
                        record = Record(program.hash, device, "build_error", error="made up")
                    else:
                        latency_s = float(1e-9 * n**3 * scale * rng.uniform(1, 3))
                        record = Record(program.hash, device, "ok", latency_s, noise=0.02)
                    dataset.add_record(record)
        dataset.finalize()
    return path


@pytest.fixture(scope="module")
def data(folder):
    return gather(folder)


def test_gather_computes_asts_once(folder, data, monkeypatch):
    assert len(data) == 3 * 11 * 2
    assert set(data.devices) == set(DEVICES)
    assert cache_file(folder, AST_FILE).exists() and not (folder / AST_FILE).exists(), "a dataset is only read"
    monkeypatch.setattr("cdmpp.predictor.data._derive_each", lambda *_: pytest.fail("computed again"))
    again = gather(folder)
    for program, ast in data.asts.items():
        assert (again.asts[program].leaves == ast.leaves).all()
        assert (again.asts[program].positions == ast.positions).all()


def test_what_is_derived_from_a_program_is_kept_once(folder, data, tmp_path, monkeypatch):
    copies = [tmp_path / name for name in ("a", "b")]
    for copy in copies:
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.lock"))
    monkeypatch.setattr("cdmpp.predictor.data._derive_each", lambda _, programs, *__: ({p: data.asts[p] for p in programs}, {}))
    gather([str(c) for c in copies])
    kept = [cache_file(copy, AST_FILE) for copy in copies]
    assert kept[0].exists() and not kept[1].exists()
    gather(copies[1])
    assert kept[1].exists()


def test_a_damaged_or_outdated_ast_file_is_made_again(folder, data, tmp_path, caplog):
    copy = shutil.copytree(folder, tmp_path / "d")
    (copy / AST_FILE).write_bytes(b"PAR1 cut")
    again = gather(copy)
    assert "computed again" in caplog.text
    program = next(iter(data.asts))
    assert (again.asts[program].leaves == data.asts[program].leaves).all()
    assert len(gather(copy).asts) == len(data.asts)


def test_choice_of_devices_and_groups_of_shared_tasks(folder, data, caplog):
    assert len(gather(folder, DataConfig(devices=("h200", "h201")))) == 33 and "no label is of device h201" in caplog.text
    with pytest.raises(DatasetError, match="no ok record is left"):
        gather(folder, DataConfig(devices=("v100-sxm2",)))
    adapting = gather(folder, DataConfig(devices=("h200",), adapt=(str(folder),)))
    assert adapting.unlabelled.keys() > adapting.asts.keys() and not data.unlabelled  # programs of other devices, too
    assert set(data.members("network")) == {("one", "two"), ("two",), ("three",)}
    assert set(data.members("family")) == {("mlp",), ("cnn",)}


def test_programs_without_an_ast_are_left_out_and_said(folder, data, caplog, tmp_path, monkeypatch):
    dataset = Dataset.open(shutil.copytree(folder, tmp_path / "d"))
    broken, refused = list(data.asts)[:2]
    dataset.programs[broken] = replace(dataset.programs[broken], decisions="[[0, 5]]")

    def choosy(funcs):
        if refused in map(structural_hash, funcs):
            raise ProgramError("made up")
        return compact_asts(funcs)

    monkeypatch.setattr("cdmpp.predictor.data.compact_asts", choosy)
    gathered = gather(dataset)
    assert gathered.asts.keys() == data.asts.keys() - {broken, refused} == set(gathered.labels["program"])
    assert "labels left out" in caplog.text and f"left out: 1, such as {refused}: made up" in caplog.text


def test_labels_of_a_disturbed_core_neither_train_nor_test(folder, caplog, tmp_path):
    dataset = Dataset.open(shutil.copytree(folder, tmp_path / "d"))
    records, noisy = dataset.records, next(iter(dataset.programs))
    records.loc[records["program"] == noisy, "noise"] = 0.3
    assert noisy not in set(gather(dataset).labels["program"]) and "the core was disturbed" in caplog.text
    assert len(gather(dataset, disturbed=True)) == 3 * 11 * 2
    records["noise"] = 0.3
    with pytest.raises(DatasetError, match="measure again"):
        gather(dataset)


def test_dataset_to_prediction(folder, data, tmp_path, caplog):
    config = config_from_dict(
        {
            "model": {"dim": 16, "layers": 1, "heads": 2, "embedding_dim": 16, "decoder_dim": 32},
            "train": {"epochs": 3, "threads": 1, "batch_size": 16},
            "data": {"paths": [str(folder)]},
            "split": {"spec": "by_network:heldout=three;valid=one;seed=0"},
        }
    )
    result = train(config, None, tmp_path / "run")
    scores = evaluate(result.predictor, data, "by_network", by=("network",))
    assert scores["groups"]["network"].keys() == {"three"}
    assert scores["overall"]["n"] == 22 and scores["n_trained_tasks"] == 0
    assert scores["overall"]["noise_floor_mape"] == pytest.approx(0.01)
    # Data of new networks only: none is the one that was held out, and none was trained on.
    trained = set(result.predictor.training["tasks"])
    new = subset(data, np.flatnonzero(~data.labels["task"].isin(trained)))
    new = replace(new, networks=dict.fromkeys(new.networks, ("new",)))
    scores = evaluate(result.predictor, new, "by_network", by=())
    assert (scores["split"], scores["overall"]["n"], scores["n_trained_tasks"]) == ("all", len(new), 0)
    assert "every record is scored" in caplog.text
    renamed = replace(data, networks=dict.fromkeys(data.networks, ("new",)))
    with pytest.raises(SplitError, match="three"):
        evaluate(result.predictor, renamed, "by_network")
    program = next(iter(data.view.programs.values()))
    resolver = program_resolver(data.view)
    seconds = result.predictor.predict(program, "h200", resolver=resolver)
    assert seconds == pytest.approx(result.predictor.predict(data.asts[program.hash], "h200"), rel=1e-5)
    task = data.view.tasks[program.task_hash]
    assert result.predictor.predict(task.prim_func(), "h200") > 0
    assert result.predictor.predict([task, program], "v100", resolver=resolver).shape == (2,)


def test_xgboost_on_per_store_features(folder, data):
    split = split_data("within_task:seed=0", data)
    assert evaluate_models([XGBoostModel(rounds=30)], data, split)["xgboost-perstore"]["overall"]["mape"] < 1.0
    assert cache_file(folder, PER_STORE_FILE).exists() and not (folder / PER_STORE_FILE).exists()
    programs = list(data.asts)[:3]
    assert collect_per_store(data.view, programs).keys() == set(programs)
