"""The hyper-parameter search: what it writes, resuming, failed and pruned trials, and what it may look at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from rich.console import Console

from cdmpp.cli.learn import show_search
from cdmpp.errors import LabelError, PredictorError
from cdmpp.predictor import config_from_dict, load_config, train
from cdmpp.predictor.baselines import CdmppModel, LatencyModel, TaskMedian, make_model
from cdmpp.predictor.search import SEARCHED_MODELS, own_values, search, search_space, trial_options
from tests.samples.training import changed, make_data, small_config


@pytest.fixture(scope="module")
def data():
    return make_data(6, 8)


@pytest.fixture()
def small():
    """Values of the search space decide about size, so epochs keep the tests short."""
    return small_config("by_task:seed=0", epochs=2, patience=2)


@pytest.fixture()
def scripted(monkeypatch):
    """Replaces all models that are fitted by one whose fit is a function of the trial's number."""

    def use(fit):
        count = iter(range(1000))

        class Scripted(TaskMedian):
            def __init__(self, progress):
                super().__init__()
                self.progress = progress

            def fit(self, data, split):
                super().fit(data, split)
                fit(next(count), self)

        def made(progress=None, **options):
            return make_model(**options) if progress is None else Scripted(progress)

        monkeypatch.setattr("cdmpp.predictor.baselines.make_model", made)

    return use


def test_best_yaml_trains_to_the_error_that_the_search_found(data, small, tmp_path):
    lines = []
    result = search(small, data, tmp_path / "search", 2, progress=lines.append)
    summary = json.loads((tmp_path / "search" / "summary.json").read_text())
    assert summary == result.summary and summary["trials"] == lines
    assert [line["state"] for line in lines] == ["complete"] * 2
    assert all(line["values"].keys() == search_space("ours").keys() for line in lines)
    assert summary["best"] == min(lines, key=lambda line: line["valid_mape"])
    best = load_config(tmp_path / "search" / "best.yaml")
    assert best.model.dim == summary["best"]["values"]["model.dim"]
    assert best.train.epochs == 2 and best.split == small.split, "what is not searched stays"
    trained = train(best, data, tmp_path / "run").predictor
    assert trained.training["valid_mape"] == pytest.approx(summary["best"]["valid_mape"], rel=1e-5)


def test_the_best_values_of_a_baseline_make_that_model(data, small, tmp_path):
    result = search(small, data, tmp_path, 2, model="xgboost-ast")
    options = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert options == result.best and options["name"] == "xgboost-ast"
    assert make_model(**options).params["max_depth"] == result.summary["best"]["values"]["params.max_depth"]


@pytest.mark.parametrize("name", SEARCHED_MODELS)
def test_every_space_gives_models(name, small):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        trial = study.ask(search_space(name))
        model = make_model(**trial_options(small, name, trial.params))
        assert isinstance(model, LatencyModel)
        if name == "ours":
            assert model._config.train.seed == small.train.seed
            assert model._config.split == small.split
        elif name in ("lstm", "released"):
            assert (model.train.epochs, model.train.threads) == (2, 1)
            assert model.train.learning_rate == trial.params["train.learning_rate"]


def test_a_resumed_search_goes_on(data, small, tmp_path, scripted):
    scripted(lambda number, model: None)
    first = search(small, data, tmp_path, 2, model="lstm")
    with pytest.raises(PredictorError, match="holds a search"):
        search(small, data, tmp_path, 4, model="lstm")
    more = search(small, data, tmp_path, 4, model="lstm", resume=True)
    assert more.summary["trials"][:2] == first.summary["trials"]
    assert len(more.summary["trials"]) == 4
    drawn = [json.dumps(line["values"]) for line in more.summary["trials"]]
    assert len(set(drawn)) == 4, "the first trials are not drawn again"
    assert search(small, data, tmp_path, 4, model="lstm", resume=True).summary == more.summary


def test_another_model_configuration_or_other_records_are_refused(data, small, tmp_path, scripted):
    scripted(lambda number, model: None)
    search(small, data, tmp_path, 1, model="lstm")
    other = changed(small, train={"epochs": 3})
    labels = data.labels.assign(latency_s=data.labels["latency_s"] * 1.01)
    for config, records, model in ((small, data, "ours"), (other, data, "lstm"), (small, replace(data, labels=labels), "lstm")):
        with pytest.raises(PredictorError, match="belongs to another"):
            search(config, records, tmp_path, 2, model=model, resume=True)


def test_a_trial_that_was_cut_short_does_not_count(data, small, tmp_path, scripted):
    def interrupted(number, model):
        if number == 1:
            raise KeyboardInterrupt

    scripted(interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(small, data, tmp_path, 3, model="lstm")
    assert (tmp_path / "best.yaml").exists(), "what was found so far is there"
    result = search(small, data, tmp_path, 3, model="lstm", resume=True)
    assert [line["state"] for line in result.summary["trials"]] == ["complete", "interrupted", "complete", "complete"]


def test_a_diverging_trial_fails_and_the_search_goes_on(data, small, tmp_path, scripted):
    def diverges(number, model):
        if number == 0:
            raise PredictorError("training diverged in epoch 1")
        if number == 1:
            model.predict = lambda data, rows: np.full(len(rows), np.nan)

    scripted(diverges)
    result = search(small, data, tmp_path, 3, model="lstm")
    trials = result.summary["trials"]
    assert [line["state"] for line in trials] == ["failed", "failed", "complete"]
    assert "diverged" in trials[0]["error"] and "nan" in trials[1]["error"]
    assert result.summary["best"]["trial"] == 2
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    show_search(console, result.summary)
    text = console.export_text()
    assert "1 complete, 2 failed" in text and "hidden=" in text


def test_a_search_without_a_success_says_why(data, small, tmp_path, scripted):
    def fails(number, model):
        raise PredictorError(f"no luck {number}")

    scripted(fails)
    with pytest.raises(PredictorError, match=r"none of 2 trials succeeded; the first: no luck 0"):
        search(small, data, tmp_path, 2, model="lstm")


def test_poor_trials_are_pruned_on_the_epochs_validation_error(data, small, tmp_path, scripted):
    def reports(number, model):
        for epoch in range(1, 5):
            model.progress({"epoch": epoch, "valid_mape": 9.0 if number == 6 else 0.5 + 0.01 * number})

    scripted(reports)
    result = search(small, data, tmp_path, 7, model="lstm")
    last = result.summary["trials"][-1]
    assert (last["state"], last["epochs"], last["valid_mape"]) == ("pruned", 2, 9.0)
    assert all(line["state"] != "pruned" for line in result.summary["trials"][:5])


def test_the_test_part_cannot_be_looked_at(data, small, tmp_path, monkeypatch):
    seen = []

    class Peeks(CdmppModel):
        def fit(self, data, split):
            seen.append(data.labels["latency_s"].to_numpy()[split.test])
            raise LabelError("enough")

    monkeypatch.setattr("cdmpp.predictor.baselines.make_model", lambda **_: Peeks(small))
    with pytest.raises(LabelError):
        search(small, data, tmp_path, 1)
    assert len(seen[0]) and np.isnan(seen[0]).all()


def test_the_command_goes_on_where_it_stopped(data, tmp_path, monkeypatch, command):
    monkeypatch.setattr("cdmpp.predictor.training.gather", lambda paths, config: data)
    args = ["search", "--config", "configs/smoke.yaml", "--data", "somewhere", "--model", "xgboost-ast"]
    args += ["--split", "within_task:test=0.3", "--out", tmp_path / "search"]
    first = command.json(*args, "--trials", 1)
    assert first == json.loads((tmp_path / "search" / "summary.json").read_text())
    assert first["split"].startswith("within_task") and "trial   0" in command.err
    assert "holds a search" in command.error(*args, "--trials", 2)
    more = command.json(*args, "--trials", 2, "--resume")
    assert more["trials"][0] == first["trials"][0] and len(more["trials"]) == 2
    assert "2 complete" in command.out


def test_bad_input(data, small, tmp_path):
    with pytest.raises(PredictorError, match="no search space for model 'roofline'"):
        search(small, data, tmp_path, 1, model="roofline")
    for config, of, trials, said in ((small, data, 0, "at least one trial"), (config_from_dict({}), None, 1, "no data")):
        with pytest.raises(PredictorError, match=said):
            search(config, of, tmp_path, trials)


def test_the_first_trial_is_the_configuration_itself_where_the_space_holds_it(data, small, tmp_path, scripted) -> None:
    scripted(lambda number, model: None)
    config = changed(small, model={"dim": 96, "heads": 4})
    values = own_values(config, search_space("ours"))
    assert values["model.dim"] == 96 and values["train.ema_decay"] == config.train.ema_decay
    found = search(config, data, tmp_path / "s", trials=1).summary["trials"][0]["values"]
    assert values.items() <= found.items()
    odd = changed(small, model={"dim": 24, "dropout": 0.9})
    assert {"model.dim", "model.dropout"}.isdisjoint(own_values(odd, search_space("ours"))), "left to the search"


@pytest.mark.parametrize(("name", "option", "value"), [("lstm", "hidden", 128), ("released", "train.batch_size", 600)])
def test_a_baseline_starts_with_what_it_has(data, small, tmp_path, scripted, name, option, value) -> None:
    scripted(lambda number, model: None)
    (first,) = search(small, data, tmp_path / "s", trials=1, model=name).summary["trials"]
    assert first["values"][option] == value


@pytest.mark.parametrize("name", ["xgboost-perstore", "xgboost-ast", "xgboost-ast-codegen", "lstm"])
def test_what_searches_found_for_baselines_makes_them(name: str) -> None:
    options = yaml.safe_load(Path(f"configs/search/{name}.yaml").read_text())
    summary = f"configs/search/{name}.json".replace("xgboost-ast.json", "xgboost-ast-codegen.json")
    best = json.loads(Path(summary).read_text())["best"]["values"]
    assert options["name"] == name
    assert own_values(make_model(**options), search_space(name)) == best
