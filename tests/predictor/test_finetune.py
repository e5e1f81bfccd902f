"""Finetuning on a new device: what is trained on, what stays, what is written, few-shot on clean splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.errors import PredictorError, SplitError, UnknownDeviceError
from cdmpp.predictor import Predictor, evaluate, few_shot, finetune
from cdmpp.predictor.data import split_data, subset
from cdmpp.predictor.evidence import DevicePair, DeviceScaling
from cdmpp.predictor.finetuning import choose_tasks
from cdmpp.predictor.training import prepare, training_summary
from cdmpp.predictor.uncertainty import UNSEEN, Calibration, ScoreDistribution
from cdmpp.profiler.session import read_task_file
from cdmpp.report.content import collect_report
from tests.samples.training import changed, make_data


@pytest.fixture(scope="module")
def small():
    """Devices ``slow`` and ``fast``; ``fast`` differs in the clock alone."""
    return make_data(10, 12)


@pytest.fixture(scope="module")
def base(small, config):
    """Trained on ``slow`` alone."""
    config = changed(config, train={"epochs": 8, "patience": 3, "batch_size": 32, "learning_rate": 0.01})
    split = split_data("by_device:heldout=fast;seed=0", small)
    fitted = prepare(config, small, split)
    state = fitted.trainer.fit()
    return fitted.predictor(state.best, training_summary(config, small, split, state))


def rows_of(data, device, tasks=None):
    mask = data.labels["device"] == device
    return mask & data.labels["task"].isin(tasks) if tasks is not None else mask


def test_a_run_folder_holds_what_was_chosen_and_a_predictor(small, base, tmp_path):
    base.save(tmp_path / "base")
    result = finetune(tmp_path / "base", small, "fast", tmp_path / "run", tasks=3, seed=5)
    loaded = Predictor.load(tmp_path / "run")
    about = loaded.training["finetuned"]
    assert about["predictor"] == str(tmp_path / "base") and about["device"] == "fast"
    assert about["before"]["split"] == base.training["split"]
    chosen = result.selection.tasks
    assert len(chosen) == 3 and about["selection"]["tasks"] == list(chosen) and about["selection"]["seed"] == 5
    assert read_task_file(tmp_path / "run" / "tasks.json") == list(result.selection.wanted)
    assert about["learned"] == "correction" and about["records_of_device"] == 36
    assert loaded.training["records_by_device"]["fast"] == 36
    assert set(loaded.training["tasks"]) == set(base.training["tasks"]) | set(chosen)
    assert loaded.transform == base.transform and loaded.specs.keys() == {"slow", "fast"}
    # it is scored on the device's other tasks unless told otherwise
    assert loaded.training["split"] == result.split.spec
    assert evaluate(loaded, small)["overall"]["n"] == len(result.split.test) == 7 * 12
    assert collect_report(tmp_path / "run", small).scores["overall"]["n"] == 7 * 12
    (tmp_path / "interrupted").mkdir()
    (tmp_path / "interrupted" / "history.jsonl").touch()
    for folder in ("run", "interrupted"):
        with pytest.raises(PredictorError, match="holds a training run"):
            finetune(base, small, "fast", tmp_path / folder, tasks=3)


def test_it_learns_the_device_and_keeps_the_other(small, base, tmp_path):
    result = finetune(base, small, "fast", tmp_path, tasks=4)
    before, after = (evaluate(p, small, result.split)["overall"]["mape"] for p in (base, result.predictor))
    # fast is four times as fast as what the base takes it for
    assert before > 1.5 and after < 0.5 * before
    slow = subset(small, np.flatnonzero(rows_of(small, "slow")))
    kept = [evaluate(p, slow, "all")["overall"]["mape"] for p in (base, result.predictor)]
    assert kept[1] == kept[0]


def test_tasks_give_a_correction_and_leave_the_weights(small, base, tmp_path):
    """The device is four times as fast as the other, with the same programs."""
    finetune(base, small, "fast", tmp_path / "run", tasks=4)
    tuned = Predictor.load(tmp_path / "run")
    about = tuned.training["finetuned"]
    assert about["learned"] == "correction"
    assert about["errors"]["ast"]["corrected"] < 0.5 * about["errors"]["ast"]["before"]
    reference = base.network.state_dict()
    assert all((value == reference[name]).all() for name, value in tuned.network.state_dict().items())
    asts = [small.asts[p] for p in small.labels["program"].unique()[:9]]
    assert (tuned.predict(asts, "fast") / base.predict(asts, small.devices["fast"]) < 0.8).all()
    assert (tuned.predict(asts, "slow") == base.predict(asts, "slow")).all()  # on this device alone


def test_teaching_a_device_again_starts_from_what_was_known_before(small, base, tmp_path, caplog):
    once = finetune(base, small, "fast", tmp_path / "once", tasks=4)
    twice = finetune(once.predictor, small, "fast", tmp_path / "twice", tasks=4)
    rows = np.flatnonzero(rows_of(small, "fast"))
    assert np.allclose(twice.predictor.predict_rows(small, rows), once.predictor.predict_rows(small, rows))
    errors = (r.predictor.training["finetuned"]["errors"]["ast"] for r in (once, twice))
    assert next(errors) == next(errors) and "earlier finetuning on fast is dropped" in caplog.text


def test_the_chosen_tasks_show_how_latencies_scale_to_the_device(small, base):
    """Exactly a quarter of what they are on ``slow``: told these, nothing is left to be wrong."""
    known = DevicePair(0.1, 0.2, 9)
    base = replace(base, scaling=DeviceScaling(pairs={("other", "slow"): known}))
    tuned, split = few_shot(base, small, "fast", 8)
    pairs = tuned.scaling.pairs
    assert pairs["other", "slow"] == known and pairs["slow", "fast"].tasks == 8
    plain = evaluate(tuned, small, split)["overall"]["mape"]
    told = evaluate(tuned, small, split, measured=True)["overall"]["mape"]
    assert told < 0.6 * plain, (told, plain)
    wild = rows_of(small, "fast") & small.labels.index.isin(split.test)
    latency_s = small.labels["latency_s"].where(~wild, small.labels["latency_s"] * 50)
    other = replace(small, labels=small.labels.assign(latency_s=latency_s))
    assert few_shot(base, other, "fast", 8)[0].scaling == tuned.scaling


def test_what_is_not_chosen_changes_nothing(small, base, tmp_path):
    """Neither labels of the device's other tasks, nor tasks the base never trained on."""
    expected = finetune(base, small, "fast", tmp_path / "a", tasks=3)
    chosen = expected.selection.tasks
    unknown = sorted(set(small.labels["task"]) - set(base.training["tasks"]))
    assert unknown
    wild = rows_of(small, "fast") & ~small.labels["task"].isin(chosen)
    wild |= rows_of(small, "slow", unknown)
    latency_s = small.labels["latency_s"].where(~wild, small.labels["latency_s"] * 50)
    other = replace(small, labels=small.labels.assign(latency_s=latency_s))
    again = finetune(base, other, "fast", tmp_path / "b", tasks=3)
    rows = np.arange(len(small))
    assert (again.predictor.predict_rows(small, rows) == expected.predictor.predict_rows(small, rows)).all()
    found, wanted = (r.predictor.corrections["fast"]["ast"].constant for r in (again, expected))
    assert found == wanted != 0


def test_a_device_without_records_gets_a_task_file_and_a_command(small, base, tmp_path):
    slow = subset(small, np.flatnonzero(rows_of(small, "slow")))
    result = finetune(base, slow, "h200@0.5", tmp_path / "run", tasks=3)
    assert result.predictor is None and not result.selection.tasks
    tasks = read_task_file(result.task_file)
    assert len(tasks) == 3 and set(tasks) <= set(small.labels["task"])
    assert result.next_command.startswith("cdmpp profile net") and "--device h200@0.5" in result.next_command
    named = result.next_command.split("--device")[0].split()[2:]
    assert all(set(small.networks[task]) & set(named) for task in tasks)
    # once the tasks are measured, the same are chosen, and the same folder serves
    measured = np.flatnonzero(rows_of(small, "slow") | rows_of(small, "fast", tasks))
    again = finetune(base, subset(small, measured), "fast", tmp_path / "run", tasks=3)
    assert again.selection.tasks == tuple(tasks) and again.split is None
    assert again.predictor.training["finetuned"]["records_of_device"] > 0


def test_named_tasks_and_all_tasks(small, base, caplog):
    fewer = subset(small, np.flatnonzero(~rows_of(small, "fast", ["t001"])))
    named = choose_tasks(base, fewer, "fast", ["t001", "t002"])
    assert named.tasks == ("t002",) and named.wanted == ("t001", "t002") and "1 of 2 tasks" in caplog.text
    assert choose_tasks(base, fewer, "fast", None).tasks == tuple(f"t{i:03d}" for i in range(10) if i != 1)
    for device, tasks, said in (("fast", ["t001"], "none of the 1 tasks named"), ("other", None, "no records of other")):
        with pytest.raises(PredictorError, match=said):
            choose_tasks(base, fewer, device, tasks)


def test_intervals_are_of_errors_over_their_difficulty_and_wide_where_nothing_was_learned(small, base, monkeypatch):
    monkeypatch.setattr("cdmpp.predictor.uncertainty.MIN_UNITS", 4)
    data = replace(small, devices={**small.devices, "fast": replace(small.devices["fast"], arch="new")})
    scores = ScoreDistribution.fit(np.linspace(0, 1, 50), range(50))
    base = replace(base, calibration=Calibration("task", scores, {"slow": scores}))
    nothing, taught = (few_shot(base, data, "fast", k)[0] for k in (1, 8))
    assert nothing.calibration_of(device="fast").ends("fast", 0.5) == pytest.approx(UNSEEN * base.calibration.ends("slow", 0.5))
    monkeypatch.setattr(Predictor, "difficulty", lambda self, pairs, arrays=None: np.full(len(pairs.asts), 2.0))
    halved = few_shot(base, data, "fast", 8)[0].calibration.ends("fast", 0.5)
    assert halved == pytest.approx(taught.calibration.ends("fast", 0.5) / 2)


def test_few_shot_is_a_few_lines(small, base):
    for k, select in ((2, "kmeans"), (4, "random")):
        tuned, split = few_shot(base, small, "fast", k, select, seed=1)
        assert len(split.allowed_tasks) == k and split.held_out == ("fast",)
        tested = small.labels.iloc[split.test]
        assert set(tested["device"]) == {"fast"} and not set(tested["task"]) & set(split.allowed_tasks)
        assert evaluate(tuned, small, split)["overall"]["n"] == (10 - k) * 12
        again, _ = few_shot(base, small, "fast", k, select, seed=1)
        assert (again.predict_rows(small, split.test) == tuned.predict_rows(small, split.test)).all()


def test_few_shot_refuses_what_would_not_be_clean(small, base):
    errors = ("slow", 3, PredictorError, "was trained on slow"), ("fast", 10, SplitError, "none is left to test")
    for device, number, error, said in (*errors, ("h300", 3, UnknownDeviceError, "")):
        with pytest.raises(error, match=said):
            few_shot(base, small, device, number)


def test_one_program_is_too_few(small, base, tmp_path):
    first = np.flatnonzero(rows_of(small, "fast"))[:1]
    data = subset(small, np.concatenate([np.flatnonzero(rows_of(small, "slow")), first]))
    with pytest.raises(PredictorError, match="at least two programs"):
        finetune(base, data, "fast", tmp_path, tasks=3)
