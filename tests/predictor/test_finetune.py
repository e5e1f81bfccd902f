"""Finetuning on a new device: what is trained on, what stays, what is written, few-shot on clean splits."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.errors import PredictorError, SplitError, UnknownDeviceError
from cdmpp.predictor import Predictor, evaluate, few_shot, finetune, finetuning, load_config
from cdmpp.predictor.data import split_data, subset
from cdmpp.predictor.evidence import DevicePair, DeviceScaling
from cdmpp.predictor.finetuning import choose_tasks, extend_encoder, mixed_batches, starting_weights
from cdmpp.predictor.training import prepare, training_summary
from cdmpp.profiler.session import read_task_file
from cdmpp.report.content import collect_report
from tests.samples.training import changed, make_data, make_device


@pytest.fixture(scope="module")
def small():
    """Devices ``slow`` and ``fast``; ``fast`` differs in the clock alone."""
    return make_data(10, 12)


def quick(config, **changes):
    return changed(config, train={"epochs": 3, "patience": 3, "batch_size": 32, "learning_rate": 0.003, **changes})


@pytest.fixture(scope="module")
def base(small, config):
    """Trained on ``slow`` alone."""
    config = quick(config, epochs=8, learning_rate=0.01)
    split = split_data("by_device:heldout=fast;seed=0", small)
    fitted = prepare(config, small, split)
    state = fitted.trainer.fit()
    return fitted.predictor(state.best, training_summary(config, small, split, state))


@pytest.fixture
def trains(monkeypatch):
    """Weights are trained from three tasks on, and always kept."""
    monkeypatch.setattr(finetuning, "TASKS_TO_TRAIN", 3)
    monkeypatch.setattr(finetuning, "better", lambda errors: True)


def rows_of(data, device, tasks=None):
    mask = data.labels["device"] == device
    return mask & data.labels["task"].isin(tasks) if tasks is not None else mask


def test_a_run_folder_holds_what_was_chosen_and_a_predictor(small, base, config, tmp_path, trains):
    base.save(tmp_path / "base")
    lines = []
    result = finetune(
        tmp_path / "base", small, "fast", tmp_path / "run", tasks=3, seed=5, config=quick(config), progress=lines.append
    )
    loaded = Predictor.load(tmp_path / "run")
    about = loaded.training["finetuned"]
    assert about["predictor"] == str(tmp_path / "base") and about["device"] == "fast"
    assert about["before"]["split"] == base.training["split"]
    chosen = result.selection.tasks
    assert len(chosen) == 3 and about["selection"]["tasks"] == list(chosen) and about["selection"]["seed"] == 5
    assert read_task_file(tmp_path / "run" / "tasks.json") == list(result.selection.wanted)
    assert about["learned"] == "weights" and about["records_of_device"] == 36
    assert loaded.training["records_by_device"]["fast"] == 36
    assert set(loaded.training["tasks"]) == set(base.training["tasks"]) | set(chosen)
    assert loaded.transform == base.transform and loaded.devices.keys() == {"slow", "fast"}
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert history == lines == result.history and len(history) == 3
    assert load_config(tmp_path / "run" / "config.yaml").model == base.network.config
    # it is scored on the device's other tasks unless told otherwise
    assert loaded.training["split"] == result.split.spec
    assert evaluate(loaded, small)["overall"]["n"] == len(result.split.test) == 7 * 12
    assert collect_report(tmp_path / "run", small).scores["overall"]["n"] == 7 * 12
    with pytest.raises(PredictorError, match="holds a training run"):
        finetune(base, small, "fast", tmp_path / "run", tasks=3)


def test_it_learns_the_device_and_keeps_the_other(small, base, config, tmp_path):
    result = finetune(base, small, "fast", tmp_path, tasks=4, config=quick(config, epochs=8))
    before, after = (evaluate(p, small, result.split)["overall"]["mape"] for p in (base, result.predictor))
    # fast is four times as fast as what the base takes it for
    assert before > 1.5 and after < 0.5 * before
    slow = subset(small, np.flatnonzero(rows_of(small, "slow")))
    kept = [evaluate(p, slow, "all")["overall"]["mape"] for p in (base, result.predictor)]
    assert kept[1] < kept[0] + 0.15


def test_few_tasks_give_a_correction_and_leave_the_weights(small, base, config, tmp_path):
    """The device is four times as fast as the other, with the same programs."""
    result = finetune(base, small, "fast", tmp_path / "run", tasks=4, config=quick(config))
    tuned = Predictor.load(tmp_path / "run")
    about = tuned.training["finetuned"]
    assert about["learned"] == "correction" and not result.history
    assert about["errors"]["ast"]["corrected"] < 0.5 * about["errors"]["ast"]["before"]
    reference = base.network.state_dict()
    assert all((value == reference[name]).all() for name, value in tuned.network.state_dict().items())
    asts = [small.asts[p] for p in small.labels["program"].unique()[:9]]
    assert (tuned.predict(asts, "fast") / base.predict(asts, small.devices["fast"]) < 0.8).all()
    assert (tuned.predict(asts, "slow") == base.predict(asts, "slow")).all()  # on this device alone


def test_weights_are_kept_only_where_they_err_less_on_tasks_left_out(small, base, config, monkeypatch):
    monkeypatch.setattr(finetuning, "TASKS_TO_TRAIN", 3)
    ruined = quick(config, epochs=1, learning_rate=10.0)
    tuned, _ = few_shot(base, small, "fast", 6, config=ruined)
    errors = tuned.training["finetuned"]["errors"]["ast"]
    assert tuned.training["finetuned"]["learned"] == "correction"
    assert errors["trained, on tasks held out"] > errors["corrected, on tasks held out"]


def test_the_chosen_tasks_show_how_latencies_scale_to_the_device(small, base, config):
    """Exactly a quarter of what they are on ``slow``: told these, nothing is left to be wrong."""
    known = DevicePair(0.1, 0.2, 9)
    base = replace(base, scaling=DeviceScaling(pairs={("other", "slow"): known}))
    tuned, split = few_shot(base, small, "fast", 8, config=quick(config, epochs=1))
    pairs = tuned.scaling.pairs
    assert pairs["other", "slow"] == known and pairs["slow", "fast"].tasks == 8
    plain = evaluate(tuned, small, split)["overall"]["mape"]
    told = evaluate(tuned, small, split, measured=True)["overall"]["mape"]
    assert told < 0.6 * plain, (told, plain)
    wild = rows_of(small, "fast") & small.labels.index.isin(split.test)
    latency_s = small.labels["latency_s"].where(~wild, small.labels["latency_s"] * 50)
    other = replace(small, labels=small.labels.assign(latency_s=latency_s))
    assert few_shot(base, other, "fast", 8, config=quick(config, epochs=1))[0].scaling == tuned.scaling


def test_what_is_not_chosen_changes_nothing(small, base, config, tmp_path, trains):
    """Neither labels of the device's other tasks, nor tasks the base never trained on, nor what it is stopped by."""
    expected = finetune(base, small, "fast", tmp_path / "a", tasks=3, config=quick(config))
    chosen = expected.selection.tasks
    unknown = sorted(set(small.labels["task"]) - set(base.training["tasks"]))
    assert unknown
    wild = rows_of(small, "fast") & ~small.labels["task"].isin(chosen)
    wild |= rows_of(small, "slow", unknown)
    latency_s = small.labels["latency_s"].where(~wild, small.labels["latency_s"] * 50)
    other = replace(small, labels=small.labels.assign(latency_s=latency_s))
    again = finetune(base, other, "fast", tmp_path / "b", tasks=3, config=quick(config))
    weights, reference = (r.predictor.network.state_dict() for r in (again, expected))
    assert all((weights[name] == reference[name]).all() for name in reference)
    found, wanted = (r.predictor.corrections["fast"]["ast"].constant for r in (again, expected))
    assert found == wanted != 0


def test_half_of_every_batch_is_new():
    for new, replay, size in ((29, 100, 32), (5, 100, 32), (200, 3, 16), (40, 0, 16), (7, 50, 1), (9, 50, 5)):
        batches = mixed_batches(new, replay, size, np.random.default_rng(0))
        assert len(batches) == len(mixed_batches(new, replay, size, np.random.default_rng(1))) >= 20
        for rows in batches:
            own = int((rows < new).sum())
            assert 2 * own >= len(rows) <= size and own and rows.max() < new + replay
        counts = np.bincount(np.concatenate([rows[rows < new] for rows in batches]), minlength=new)
        assert counts.min() == counts.max() > 0
    assert all((rows >= 64).sum() == 16 for rows in mixed_batches(64, 100, 32, np.random.default_rng(0)))


def test_the_encoding_of_known_devices_stays_and_the_new_one_is_told_apart(small, base):
    vectors = small.device_vectors()
    encoder, fresh = extend_encoder(base.encoder, [vectors["slow"]], vectors["fast"])
    known = np.stack([vectors["slow"]])
    assert (encoder.encode_devices(known) == base.encoder.encode_devices(known)).all()
    new = encoder.encode_devices(vectors["fast"][None])[0]
    assert not base.encoder.encode_devices(vectors["fast"][None])[0, fresh].any()
    assert len(fresh) and (np.abs(new[fresh]) == 1).all()
    # told from both, and what varied before is not touched
    encoder_2, fresh_2 = extend_encoder(encoder, list(vectors.values()), vectors["fast"])
    assert not len(fresh_2) and (encoder_2.device.mean == encoder.device.mean).all()
    # a value where the known devices have none, and none where they have one
    unknown = int(np.flatnonzero(np.isnan(vectors["slow"]))[0])
    clock = int(fresh[0])
    odd = vectors["slow"].copy()
    odd[unknown], odd[clock] = 7.0, np.nan
    encoder, fresh = extend_encoder(base.encoder, [vectors["slow"]], odd)
    assert list(fresh) == [unknown, clock + len(odd)]
    assert encoder.encode_devices(odd[None])[0, unknown] == 1
    assert (encoder.encode_devices(known) == base.encoder.encode_devices(known)).all()


def test_before_training_the_new_device_is_predicted_as_without_its_features(small, base):
    """Weights that new device features meet were never trained: they do not add noise to start with."""
    vector = small.device_vectors()["fast"]
    encoder, fresh = extend_encoder(base.encoder, list(base.devices.values()), vector)
    dims = encoder.leaf_dim, encoder.device_dim, encoder.pair_dim
    network = type(base.network)(base.network.config, *dims).eval()
    network.load_state_dict(starting_weights(base, fresh))
    asts = list(small.asts.values())[:5]
    # the pairs of program and device are those of the slow device for both: they have weights
    devices, specs = {**base.devices, "fast": vector}, {**base.specs, "fast": base.specs["slow"]}
    extended = replace(base, network=network, encoder=encoder, devices=devices, specs=specs)
    assert np.allclose(extended.predict_asts(asts, "fast"), base.predict_asts(asts, "slow"))


def test_devices_that_look_like_the_new_one_are_not_replayed(small, base, config, tmp_path, caplog, trains):
    twin = make_device("twin", 1000.0)
    labels = small.labels.assign(device=small.labels["device"].replace("fast", "twin"))
    data = replace(small, labels=labels, devices={"slow": small.devices["slow"], "twin": twin})
    with caplog.at_level(logging.WARNING):
        result = finetune(base, data, "twin", tmp_path, tasks=3, config=quick(config, epochs=1))
    assert "cannot tell them from twin: slow" in caplog.text
    assert result.predictor.training["finetuned"]["learned"] == "weights"


def test_a_device_without_records_gets_a_task_file_and_a_command(small, base, config, tmp_path):
    slow = subset(small, np.flatnonzero(rows_of(small, "slow")))
    result = finetune(base, slow, "h200@0.5", tmp_path / "run", tasks=3)
    assert result.predictor is None and not result.selection.tasks and not result.history
    tasks = read_task_file(result.task_file)
    assert len(tasks) == 3 and set(tasks) <= set(small.labels["task"])
    assert result.next_command.startswith("cdmpp profile net") and "--device h200@0.5" in result.next_command
    named = result.next_command.split("--device")[0].split()[2:]
    assert all(set(small.networks[task]) & set(named) for task in tasks)
    # once the tasks are measured, the same are chosen, and the same folder serves
    measured = np.flatnonzero(rows_of(small, "slow") | rows_of(small, "fast", tasks))
    again = finetune(base, subset(small, measured), "fast", tmp_path / "run", tasks=3, config=quick(config, epochs=1))
    assert again.selection.tasks == tuple(tasks) and again.split is None
    assert again.predictor.training["finetuned"]["records_of_device"] > 0


def test_named_tasks_and_all_tasks(small, base, caplog):
    fewer = subset(small, np.flatnonzero(~rows_of(small, "fast", ["t001"])))
    named = choose_tasks(base, fewer, "fast", ["t001", "t002"])
    assert named.tasks == ("t002",) and named.wanted == ("t001", "t002") and "1 of 2 tasks" in caplog.text
    assert choose_tasks(base, fewer, "fast", None).tasks == tuple(f"t{i:03d}" for i in range(10) if i != 1)
    with pytest.raises(PredictorError, match="none of the 1 tasks named"):
        choose_tasks(base, fewer, "fast", ["t001"])
    with pytest.raises(PredictorError, match="no records of other"):
        choose_tasks(base, fewer, "other", None)


def test_few_shot_is_a_few_lines(small, base, config):
    config = quick(config)
    for k, select in ((2, "kmeans"), (4, "random")):
        tuned, split = few_shot(base, small, "fast", k, select, seed=1, config=config)
        assert len(split.allowed_tasks) == k and split.held_out == ("fast",)
        tested = small.labels.iloc[split.test]
        assert set(tested["device"]) == {"fast"} and not set(tested["task"]) & set(split.allowed_tasks)
        assert evaluate(tuned, small, split)["overall"]["n"] == (10 - k) * 12
        again, _ = few_shot(base, small, "fast", k, select, seed=1, config=config)
        weights = again.network.state_dict()
        assert all((weights[name] == value).all() for name, value in tuned.network.state_dict().items())


def test_few_shot_with_unlabelled_programs(small, base, config, trains):
    config = changed(quick(config, epochs=1), loss={"cmd_weight": 1.0})
    tuned, split = few_shot(base, small, "fast", 3, adapt=0.5, config=config)
    programs = small.labels["program"]
    assert len(split.adapt) and not set(programs.iloc[split.adapt]) & set(programs.iloc[split.test])
    assert tuned.training["split"] == split.spec
    with pytest.raises(PredictorError, match="no programs to adapt to"):
        few_shot(base, small, "fast", 3, config=config)


def test_few_shot_refuses_what_would_not_be_clean(small, base, config):
    with pytest.raises(PredictorError, match="was trained on slow"):
        few_shot(base, small, "slow", 3)
    with pytest.raises(SplitError, match="none is left to test"):
        few_shot(base, small, "fast", 10, config=quick(config))
    with pytest.raises(UnknownDeviceError):
        few_shot(base, small, "h300", 3)


def test_one_program_is_too_few(small, base, tmp_path):
    first = np.flatnonzero(rows_of(small, "fast"))[:1]
    data = subset(small, np.concatenate([np.flatnonzero(rows_of(small, "slow")), first]))
    with pytest.raises(PredictorError, match="at least two programs"):
        finetune(base, data, "fast", tmp_path, tasks=3)
