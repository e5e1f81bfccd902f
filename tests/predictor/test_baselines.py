"""Baselines and the harness that compares models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.errors import DatasetError, FeatureMismatchError, PredictorError
from cdmpp.predictor.baselines import (
    CdmppModel,
    TaskMedian,
    XGBoostModel,
    comparison_table,
    evaluate_models,
    make_model,
)
from cdmpp.predictor.baselines.per_store import (
    AGGREGATED_DIM,
    PER_STORE_DIM,
    PerStoreExtractor,
    aggregate_per_store,
    load_per_store,
    save_per_store,
)
from cdmpp.predictor.data import split_data
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.compile import code_key


@pytest.fixture(scope="module")
def split(data):
    return split_data("by_task:seed=0", data)


def test_a_split_without_validation_leaves_programs_to_stop_by(data):
    """As few-shot training makes it: the baselines learn from the same tasks."""
    tasks = "+".join(sorted(set(data.labels["task"]))[:3])
    without = split_data(f"by_device:heldout=fast;tasks={tasks};valid=0;seed=0", data)
    assert not len(without.valid)
    kept = []

    class Kept(XGBoostModel):
        def fit(self, data, split):
            kept.append(split)
            super().fit(data, split)

    results = evaluate_models([Kept("ast", rounds=20)], data, without)
    (used,) = kept
    programs = data.labels["program"]
    assert not set(programs.iloc[used.train]) & set(programs.iloc[used.valid])
    assert sorted([*used.train, *used.valid]) == sorted(without.train)
    assert 0.05 < len(used.valid) / len(without.train) < 0.2
    assert results["xgboost-ast"]["overall"]["n"] == len(without.test)


def test_the_harness_scores_all_models_on_the_same_records(data, split, config):
    shorter = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    models = [TaskMedian(), XGBoostModel("ast", rounds=80), CdmppModel(shorter)]
    results = evaluate_models(models, data, split, by=("device",))
    assert list(results) == ["task_median", "xgboost-ast", "cdmpp"]
    assert {r["overall"]["n"] for r in results.values()} == {len(split.test)}
    assert results["xgboost-ast"]["overall"]["mape"] < 0.7 * results["task_median"]["overall"]["mape"]
    assert results["cdmpp"]["groups"]["device"].keys() == {"fast", "slow"}
    table = comparison_table(results).splitlines()
    assert len(table) == 5 and table[-1].startswith("noise floor") and "0.005" in table[-1]


def test_task_median_known_answer(data):
    split = split_data("within_task:seed=0", data)
    model = TaskMedian()
    model.fit(data, split)
    train = data.labels.iloc[split.train]
    row = int(split.test[0])
    task, device = data.labels["task"][row], data.labels["device"][row]
    mine = train[(train["task"] == task) & (train["device"] == device)]
    assert model.predict(data, np.array([row])) == pytest.approx(
        [np.exp(np.median(np.log(mine["latency_s"])))]
    )


def test_task_median_falls_back_to_the_device(data, split):
    model = TaskMedian()
    model.fit(data, split)
    predicted = model.predict(data, np.asarray(split.test))
    on_fast = (data.labels["device"].iloc[split.test] == "fast").to_numpy()
    assert len(set(predicted[on_fast])) == 1
    assert predicted[on_fast][0] < predicted[~on_fast][0]


def test_xgboost_ignores_the_test_labels(data, split):
    from dataclasses import replace

    latency_s = data.labels["latency_s"].to_numpy().copy()
    latency_s[split.test] *= 100
    predictions = []
    for labels in (data.labels, data.labels.assign(latency_s=latency_s)):
        model = XGBoostModel("ast", rounds=20)
        model.fit(replace(data, labels=labels), split)
        predictions.append(model.predict(data, np.asarray(split.test)))
    assert (predictions[0] == predictions[1]).all()


def test_aggregation_known_answer():
    matrix = np.zeros((2, PER_STORE_DIM))
    matrix[:, 0], matrix[:, 1] = [1, 2], [-3, -1]
    vector = aggregate_per_store(matrix)
    assert vector.shape == (AGGREGATED_DIM,)
    assert vector[:2].tolist() == [3, -4]
    assert vector[PER_STORE_DIM : PER_STORE_DIM + 2].tolist() == [2, -1]
    assert vector[-1] == 2
    with pytest.raises(FeatureMismatchError):
        aggregate_per_store(np.zeros((2, 3)))


def test_per_store_file_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    features = {f"p{i}": (rng.normal(size=AGGREGATED_DIM) * 10).astype(np.float32) for i in range(5)}
    save_per_store(tmp_path / "f.parquet", features)
    loaded = load_per_store(tmp_path / "f.parquet")
    assert list(loaded) == list(features)
    for program, vector in features.items():
        np.testing.assert_allclose(loaded[program], vector, rtol=1e-3, atol=1e-6)
    (tmp_path / "f.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot read"):
        load_per_store(tmp_path / "f.parquet")


def test_extraction_on_a_real_program():
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    from tvm import te

    a = te.placeholder((64, 32), name="a")
    b = te.compute((64, 32), lambda i, j: a[i, j] * 2.0, name="b")
    c = te.compute((64, 32), lambda i, j: b[i, j] + 1.0, name="c")
    func = te.create_prim_func([a, c])
    (matrix,) = PerStoreExtractor()([func])
    assert matrix.shape == (2, PER_STORE_DIM)
    assert np.isfinite(matrix).all()
    # feature 0 counts floating-point operations, log2-scaled: one multiply or add per element
    assert matrix[0].max() > 0
    del tvm


def test_unknown_settings_are_refused():
    with pytest.raises(PredictorError, match="features"):
        XGBoostModel("pixels")
    with pytest.raises(PredictorError, match="statistic"):
        TaskMedian("mode")
    with pytest.raises(PredictorError, match="not fitted"):
        CdmppModel().predict(None, np.array([0]))


def test_one_needs_instruction_counts_and_uses_them(data):
    split = split_data("within_task:seed=0", data)
    with pytest.raises(PredictorError, match="cdmpp codegen"):
        make_model("xgboost-ast-codegen", rounds=2).fit(data, split)
    label = dict(zip(data.labels["program"], data.labels["latency_s"], strict=True))
    codes = {code_key(dict(device.target)) for device in data.devices.values()}
    counts = {
        (program, code): np.full(len(CODEGEN_FEATURES), 1e9 * seconds, dtype=np.float32)
        for program, seconds in label.items()
        for code in codes
    }
    models = [make_model("xgboost-ast", rounds=40), make_model("xgboost-ast-codegen", rounds=40)]
    plain, told = evaluate_models(models, replace(data, codegen=counts), split).values()
    assert told["overall"]["mape"] < plain["overall"]["mape"]
