"""Predictions that are told the instructions of the compiled program, by a network that can also do without."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cdmpp.device import get_device
from cdmpp.errors import PredictorError, ProgramError
from cdmpp.predictor import Predictor, evaluate, finetune
from cdmpp.predictor.baselines import make_model
from cdmpp.predictor.data import split_data, subset
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.pair_features import TIME_PARTS
from cdmpp.predictor.search import search
from cdmpp.predictor.training import prepare, train, with_unmeasured
from cdmpp.program.codegen import CODEGEN_FEATURES
from tests.samples.training import change_state, changed, small_config, with_counts

SPEC = "within_task:seed=0"
LONG, STEPS = (SPEC, {"compiled": True}), {"epochs": 15, "batch_size": 32, "learning_rate": 0.03}


@pytest.fixture(scope="module")
def counted(data):
    """Programs that a compiler makes up to e^2 times slower, which their counts alone tell; every eighth has none."""
    rng = np.random.default_rng(0)
    hidden = {program: rng.uniform(-2, 2) for program in data.asts}
    cycles = 4e6 * data.labels.groupby("program")["latency_s"].mean()
    counts = {program: cycles[program] * np.exp(hidden[program]) for i, program in enumerate(data.asts) if i % 8}
    factor = np.exp([hidden[program] for program in data.labels["program"]])
    return with_counts(replace(data, labels=data.labels.assign(latency_s=data.labels["latency_s"] * factor)), counts)


#: Of an epoch.
SHORT = small_config(SPEC, {"compiled": True}, epochs=1)


@pytest.fixture(scope="module")
def trained(counted, tmp_path_factory):
    return train(small_config(*LONG, **STEPS), counted, tmp_path_factory.mktemp("run") / "run")


def test_being_told_the_instructions_helps_and_doing_without_works(trained, counted):
    told = evaluate(trained.predictor, counted, trained.split, by=(), compiled=True)
    without = evaluate(trained.predictor, counted, trained.split, by=())
    assert told["overall"]["mape"] < 0.6 * without["overall"]["mape"]
    assert without["overall"]["spearman"] > 0.3, "the rest of the latency is learnt all the same"
    assert (without["n_compiled"], told["n_compiled"]) == (0, int(counted.counted(trained.split.test).sum()))
    assert told["n_compiled"] < told["overall"]["n"], "programs without counts are predicted without"


def test_a_device_is_taught_by_the_records_that_have_counts(trained, counted, tmp_path):
    there = counted.labels["device"] == "fast"
    labels = counted.labels.assign(latency_s=counted.labels["latency_s"] * np.where(there, 10, 1))
    slower = replace(counted, labels=labels)
    chosen = finetune(trained.predictor, slower, "fast", tmp_path / "run", tasks=6)
    known = slower.counted(np.flatnonzero(there & labels["task"].isin(chosen.selection.tasks)))
    assert known.any() and not known.all() and set(chosen.predictor.corrections["fast"]) == {"ast", "compiled"}


def test_members_are_networks_of_further_seeds_averaged_where_the_code_is_known(counted, tmp_path):
    rows, code = np.arange(60), Evidence.of_rows(counted, np.arange(60), compiled=True)
    both, *alone = (
        train(small_config(*LONG, **{**STEPS, "epochs": 2, **more}), counted, tmp_path / str(i)).predictor
        for i, more in enumerate(({"members": 2}, {"seed": 0}, {"seed": 1}))
    )
    logs = np.log([each.predict_rows(counted, rows, code) for each in alone])
    plain = alone[0].predict_rows(counted, rows)
    expected = np.where(code.known(60), np.exp(logs.mean(axis=0)), plain)
    assert both.predict_rows(counted, rows, code) == pytest.approx(expected, rel=0.05)
    assert both.predict_rows(counted, rows) == pytest.approx(plain, rel=0.05) and np.abs(logs[0] - logs[1]).max() > 0.2
    said = [each.predict_rows(counted, rows, code) for each in (both, Predictor.load(tmp_path / "0"))]
    compared = make_model("ours", config=small_config(*LONG, **{**STEPS, "epochs": 2, "members": 2}))
    compared.fit(counted, split_data(LONG[0], counted))
    assert (said[0] == [said[1], compared.predictor_.predict_rows(counted, rows, code)]).all()


def test_the_first_network_learns_what_the_others_say_of_programs_that_nobody_measured_there(
    counted, trained, tmp_path, monkeypatch
):
    spec = "by_network:heldout=net0;valid=net1;seed=0"
    there = (counted.labels["device"] == "slow").to_numpy()
    # of net0, which is held out, and of net2
    lacking = counted.labels["task"].isin(["t008", "t010"]).to_numpy() & there
    known = subset(counted, np.flatnonzero(~lacking))
    split = split_data(spec, known)
    both, taught = with_unmeasured(known, split, trained.predictor)
    new = taught.train[len(split.train) :]
    assert (new == np.arange(len(known), len(both))).all() and both.labels.iloc[: len(known)].equals(known.labels)
    pairs = both.labels.iloc[new]
    key = ["program", "task", "device"]
    expected = counted.labels[lacking & (counted.labels["task"] == "t010") & counted.counted(np.arange(len(counted)))]
    assert pairs[key].values.tolist() == expected[key].values.tolist()
    assert (pairs["n_records"] == 0).all() and not np.isclose(pairs["latency_s"], expected["latency_s"]).all()
    told = trained.predictor.predict_rows(both, new, Evidence.of_rows(both, new, compiled=True))
    assert (pairs["latency_s"] == told).all()
    fitted = prepare(small_config(*LONG), both, taught)
    assert not fitted.arrays.has_code[new].any() and fitted.arrays.has_code[split.train].any()
    monkeypatch.setattr("cdmpp.predictor.trainer._OTHERS_PER_TAUGHT", 100)
    n = len(split.train)
    epochs = [set(np.concatenate(fitted.trainer.epoch_batches(np.random.default_rng(i)))) for i in range(2)]
    assert all(rows > set(range(n)) and len(rows) == n + n // 100 < n + len(new) for rows in epochs)
    assert epochs[0] != epochs[1], "drawn anew"
    config = small_config(spec, {"compiled": True}, members=2)
    runs = [train(changed(config, data={"unmeasured": more}), known, tmp_path / str(more)) for more in (False, True)]
    of_both = [(run.predictor.members[0].state_dict(), run.predictor.network.state_dict()) for run in runs]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in zip(*of_both, strict=True)]
    assert same == [True, False], "the other network has learned from what was measured alone"
    members = [replace(run.predictor, network=run.predictor.members[0], members=()) for run in runs]
    assert np.array_equal(*(member.predict_rows(known, np.arange(20)) for member in members)), "of the same inputs"
    with pytest.raises(PredictorError, match="all compiled programs were measured; see cdmpp codegen --device"):
        with_unmeasured(counted, split_data(spec, counted), trained.predictor)


@pytest.mark.parametrize("spec", ["by_network:heldout=net0;valid=net1;seed=0", "by_task:seed=0"])
def test_programs_measured_nowhere_teach_where_the_split_trains(counted, trained, spec, monkeypatch):
    drawn = counted.labels["program"].str.endswith(("3", "4"))
    stored = counted.labels[drawn].set_index("program")["task"].items()
    view = SimpleNamespace(programs={name: SimpleNamespace(task_hash=task, origin="random") for name, task in stored})
    rest = replace(counted, labels=counted.labels[~drawn].reset_index(drop=True), view=view)
    split = split_data(split_data(spec, counted).spec, rest)
    both, taught = with_unmeasured(rest, split, trained.predictor)
    told = both.labels.iloc[taught.train[len(split.train) :]]
    wanted = drawn & counted.labels["task"].isin(rest.labels["task"].iloc[split.train])
    wanted &= counted.counted(np.arange(len(counted)))
    tables = told[told["program"].isin(view.programs)], counted.labels[wanted]
    found, expected = (table.groupby(["program", "device"]).size() for table in tables)
    assert len(found) and found.equals(expected)
    every = np.concatenate([split.train, told.index[told["program"].isin(view.programs)]])
    monkeypatch.setattr("cdmpp.predictor.trainer._OTHERS_PER_TAUGHT", 1000)
    epoch = prepare(small_config(*LONG), both, taught).trainer.epoch_batches(np.random.default_rng(0))
    assert set(np.concatenate(epoch)) == set(range(len(every))), "these in every epoch"


def test_intervals_are_of_the_kind_of_prediction(trained):
    wide, narrow = trained.predictor.calibration, trained.predictor.compiled_calibration
    assert np.ptp(narrow.ends("fast", 0.8)) < 0.8 * np.ptp(wide.ends("fast", 0.8))


def test_programs_without_counts_are_predicted_alike(trained, counted):
    predictor = trained.predictor
    asts = list(counted.asts.values())[:6]
    unknown = np.full((6, len(CODEGEN_FEATURES)), np.nan, dtype=np.float32)
    device = counted.devices["fast"]
    plain = predictor.predict_asts(asts, device)
    assert np.array_equal(predictor.predict_asts(asts, device, Evidence(code=unknown)), plain)
    with pytest.raises(ProgramError, match="CompactAST"):
        predictor.predict(asts[0], get_device("xeon-cascadelake-2.5ghz@1"), compiled=True)


def test_saved_and_loaded_it_is_the_same(trained, counted, tmp_path: Path):
    trained.predictor.save(tmp_path)
    loaded = Predictor.load(tmp_path)
    asts = list(counted.asts.values())[:5]
    counts = np.stack([np.full(len(CODEGEN_FEATURES), value, np.float32) for value in (1, 10, 50, 100, 400)])
    device = counted.devices["slow"]
    expected = trained.predictor.predict_asts(asts, device, Evidence(code=counts))
    assert np.array_equal(loaded.predict_asts(asts, device, Evidence(code=counts)), expected)
    ends = [each.compiled_calibration.ends("slow", 0.8) for each in (loaded, trained.predictor)]
    assert ends[0] == pytest.approx(ends[1])
    change_state(tmp_path, lambda state: state.update(counting_version=1))
    with pytest.raises(PredictorError, match="counted by version 1"):
        Predictor.load(tmp_path)
    change_state(tmp_path, lambda state: state["encoder"]["code_features"].reverse())
    with pytest.raises(PredictorError, match="code features"):
        Predictor.load(tmp_path)


def test_the_decoder_that_is_told_nothing_learns_from_all_programs(counted):
    """It does not depend on counts, nor does the other on programs that have none."""
    fitted = prepare(SHORT, counted, split_data(SPEC, counted))
    network, arrays = fitted.trainer.network.eval(), fitted.arrays
    rows = np.arange(40)
    batch, context = arrays.batch(rows, torch.device("cpu"))
    embedding = network.embed(batch, context.device)
    known = context.has_code
    assert np.array_equal(known.numpy(), counted.counted(rows)) and 0 < known.sum() < 40
    _, without = arrays.without_code().batch(rows, torch.device("cpu"))
    plain = network.decode_plain(embedding, context)
    assert torch.equal(plain, network.decode_plain(embedding, without))
    assert torch.equal(plain, network.decode(embedding, without))
    mixed = network.decode(embedding, context)
    assert torch.equal(mixed[~known], plain[~known]) and not torch.isclose(mixed[known], plain[known]).any()


def test_a_part_that_takes_longer_makes_the_program_take_longer_by_its_share(trained, counted):
    """What the decoder adds up are times: twice the time of all parts is twice the label's, whatever their ratios."""
    network = trained.predictor.network
    asts, counts = list(counted.asts.values())[:4], np.full((4, len(CODEGEN_FEATURES)), 9.0)
    arrays = trained.predictor.encode(asts, [counted.devices["fast"]], np.zeros(4, int), counts)
    batch, context = arrays.batch(np.arange(4), torch.device("cpu"))
    code = context.code.clone()
    code[:, -len(TIME_PARTS) :] += math.log(2)
    with torch.inference_mode():
        embedding = network.embed(batch, context.device)
        once, twice = (network.decode_compiled(embedding, context._replace(code=c)) for c in (context.code, code))
    assert torch.allclose(twice - once, math.log(2) * network.compiled_decoder.scale, atol=1e-5)


def test_without_counts_in_the_data_nothing_is_told(data, caplog):
    config = changed(SHORT, model={"codegen": True}, loss={"codegen_weight": 1.0})
    fitted = prepare(config, data, split_data(SPEC, data))
    assert fitted.encoder.code_dim == 0 and caplog.text.count("cdmpp codegen") == 2
    predictor = fitted.predictor(fitted.trainer.fit().best, {})
    with pytest.raises(PredictorError, match=r"model\.compiled"):
        predictor.predict(list(data.asts.values())[:1], data.devices["fast"], compiled=True)
    with pytest.raises(PredictorError, match="without instruction counts"):
        evaluate(predictor, data, SPEC, compiled=True)


def test_a_search_judges_both_decoders(counted, tmp_path: Path):
    result = search(SHORT, counted, tmp_path, trials=2)
    for line in result.summary["trials"]:
        told, untold = line["valid_mape_compiled"], line["valid_mape"]
        assert told != untold and line["value"] == pytest.approx((told * untold) ** 0.5)
    assert result.summary["best"] == min(result.summary["trials"], key=lambda line: line["value"])
    assert "with compiled code" in (tmp_path / "best.yaml").read_text()
