"""The validity model: what it learns, what it says of devices it never saw, what it writes and refuses to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cdmpp.dataset import Dataset, Record, Split
from cdmpp.device import get_device
from cdmpp.errors import DatasetError, FeatureMismatchError, PredictorError, ProfilerError, UnknownDeviceError
from cdmpp.program.ast import LEAF_FEATURES, CompactAST
from cdmpp.program.ast.store import save_asts
from cdmpp.program.types import Program, Task
from cdmpp.tuner.validity import (
    MODEL_FILE,
    TREES_FILE,
    ForestConfig,
    ValidityModel,
    validity_scores,
)
from cdmpp.tuner.validity_data import ValidityData, gather_validity, limits_of_name
from cdmpp.tuner.validity_features import (
    LIMIT_FEATURES,
    VALIDITY_FEATURES,
    limits_of,
    limits_of_arch,
    pool,
    pooled,
    validity_features,
)
from cdmpp.tuner.validity_online import OnlineValidity

REPOSITORY = Path(__file__).resolve().parents[2]
FOREST = ForestConfig(rounds=30, folds=3)


def ast(rng: np.random.Generator, shared: float, threads: float) -> CompactAST:
    """Two leaves of a kernel with some shared memory and threads; all else is noise."""
    leaves = rng.integers(0, 64, (2, len(LEAF_FEATURES))).astype(np.float32)
    for name, value in {"program_shared": shared, "program_local": 64.0, "thread_idx": threads}.items():
        leaves[:, LEAF_FEATURES.index(name)] = value
    return CompactAST(leaves, np.array([1, 4], dtype=np.int32), 6)


def made_up(
    devices: tuple[str, ...], limit_kb: dict[str, float], n: int = 120, seed: int = 0
) -> ValidityData:
    """Programs of four tasks that work where their shared memory is within a device's limit."""
    rng = np.random.default_rng(seed)
    asts, rows = {}, []
    for i in range(n):
        shared = float(rng.choice([4, 16, 40, 60, 90, 150])) * 1024
        asts[f"p{i}"] = ast(rng, shared, float(rng.choice([64, 128, 256])))
        for device in devices:
            works = shared <= limit_kb[device] * 1024
            rows.append((f"p{i}", f"t{i % 4}", device, "random", works, "" if works else "shared"))
    columns = ["program", "task", "device", "origin", "valid", "kind"]
    return ValidityData(pd.DataFrame(rows, columns=columns), asts)


# -- features ------------------------------------------------------------------------------------------------------


def test_pooling_is_the_signed_logarithm_of_sums_and_maxima() -> None:
    programs = [ast(np.random.default_rng(i), 1024.0, 64.0) for i in range(3)]
    found = pool(programs)
    column = VALIDITY_FEATURES.index("sum_iterations"), VALIDITY_FEATURES.index("max_iterations")
    for i, program in enumerate(programs):
        values = program.column("iterations").astype(np.float64)
        expected = np.log1p([values.sum(), values.max()])
        assert found[i, list(column)] == pytest.approx(expected, rel=1e-6)
    assert found[0, VALIDITY_FEATURES.index("program_shared")] == pytest.approx(np.log1p(1024.0))
    assert found.shape[1] == pooled(validity_features(programs, limits_of_arch("sm_86"))).shape[1]


def test_demands_are_logarithms_of_what_is_asked_over_the_limit() -> None:
    program = ast(np.random.default_rng(0), 24576.0, 512.0)
    row = validity_features([program], limits_of_arch("sm_86"))[0]

    def value(name: str) -> float:
        return float(row[VALIDITY_FEATURES.index(name)])

    assert value("demand_shared") == pytest.approx(np.log(0.5))
    assert value("demand_threads") == pytest.approx(np.log(0.5))
    assert value("demand_shared_optin") == pytest.approx(np.log(24576 / (99 * 1024)), rel=1e-5)
    assert value("demand_local_registers") == pytest.approx(np.log(16 / 255), rel=1e-5)
    assert value("demand_block_local_registers") == pytest.approx(np.log(512 * 16 / 65536), rel=1e-5)
    assert np.isnan(value("estimate_s")), "an architecture has no clock"


def test_limits_come_from_the_architecture_or_the_device() -> None:
    assert limits_of(get_device("rtx-2080-ti")) == limits_of_arch("sm_75")
    assert limits_of_arch("sm_75").async_copies == 0 and limits_of_arch("sm_86").async_copies == 1
    amd = limits_of(get_device("mi250x"))
    assert amd.is_gpu == 1 and amd.warp_size == 64 and np.isnan(amd.registers_per_thread)
    cpu = limits_of(get_device("xeon-cascadelake-2.5ghz@1")).vector()
    assert cpu[0] == 0 and np.isnan(cpu[1:]).all() and len(cpu) == len(LIMIT_FEATURES)
    assert limits_of_name("sm_90")[1] is None and limits_of_name("h100")[1] is not None
    with pytest.raises(ProfilerError, match="unknown architecture"):
        limits_of_arch("sm_1")
    with pytest.raises(UnknownDeviceError):
        limits_of_name("no-such-device")


# -- the model -----------------------------------------------------------------------------------------------------


def test_it_learns_a_limit_and_is_calibrated_on_tasks_it_has_not_seen() -> None:
    data = made_up(("sm_75", "sm_86"), {"sm_75": 48, "sm_86": 48}, n=240)
    split = Split.parse("by_task:test=0.25;valid=0;seed=1", data.table)
    model = ValidityModel(FOREST).fit(data, split.train)
    scores = validity_scores(data.valid[split.test], model.predict_rows(data, split.test))
    assert scores["auc"] > 0.99 and scores["brier"] < 0.02 and scores["calibration_error"] < 0.1
    assert scores["found_at_loss"]["0.01"] > 0.95
    assert model.training_["rows"] == len(split.train), "nothing of the test part"
    assert model.training_["devices"] == ["sm_75", "sm_86"]


def test_what_it_learned_of_two_devices_holds_on_a_third_with_other_limits() -> None:
    """Limits differ between devices: only what is asked relative to them tells."""
    limits = {"sm_70": 96.0, "sm_75": 64.0, "sm_80": 163.0}
    seen = made_up(("sm_70", "sm_75"), limits, n=240)
    unseen = made_up(("sm_80",), limits, n=120, seed=1)
    model = ValidityModel(FOREST).fit(seen)
    p = model.predict_rows(unseen, np.arange(len(unseen)))
    assert validity_scores(unseen.valid, p)["auc"] is None, "all of them fit on the third"
    assert (p > 0.5).mean() > 0.8


def test_the_same_rows_give_the_same_model() -> None:
    data = made_up(("sm_75",), {"sm_75": 48})
    rows = np.arange(len(data))
    p = [ValidityModel(FOREST).fit(data).predict_rows(data, rows) for _ in range(2)]
    assert np.array_equal(p[0], p[1])


def test_rows_that_are_all_alike_give_a_constant() -> None:
    data = made_up(("sm_75",), {"sm_75": 1000}, n=18)
    model = ValidityModel(FOREST).fit(data)
    assert model.predict(list(data.asts.values())[:2], get_device("rtx-2080-ti")) == pytest.approx(
        [19 / 20] * 2
    )
    assert len(model.predict([], get_device("rtx-2080-ti"))) == 0
    with pytest.raises(PredictorError, match="needs rows"):
        model.fit(data, np.zeros(0, dtype=np.int64))


def test_known_answers_of_the_scores() -> None:
    valid = np.array([True, True, True, True, False, False])
    p = np.array([0.9, 0.8, 0.7, 0.2, 0.1, 0.5])
    scores = validity_scores(valid, p, (0.0, 0.25))
    assert scores["auc"] == pytest.approx(7 / 8)
    assert scores["brier"] == pytest.approx((0.01 + 0.04 + 0.09 + 0.64 + 0.01 + 0.25) / 6)
    assert scores["found_at_loss"] == {"0": 0.5, "0.25": 1.0}
    assert scores["invalid"] == pytest.approx(1 / 3)
    alike = validity_scores(valid[:4], p[:4])
    assert alike["auc"] is None and alike["found_at_loss"]["0.01"] is None
    perfect = validity_scores(valid, valid.astype(float))
    assert perfect["calibration_error"] == 0 and perfect["brier"] == 0


# -- storing -------------------------------------------------------------------------------------------------------


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    data = made_up(("sm_75",), {"sm_75": 48})
    model = ValidityModel(FOREST).fit(data)
    model.save(tmp_path / "m")
    again = ValidityModel.load(tmp_path / "m")
    rows = np.arange(len(data))
    assert np.array_equal(again.predict_rows(data, rows), model.predict_rows(data, rows))
    assert again.training_ == model.training_ and again.config == model.config
    assert {p.name for p in (tmp_path / "m").iterdir()} == {MODEL_FILE, TREES_FILE}
    for file in (tmp_path / "m").iterdir():
        json.loads(file.read_text())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "something"}, PredictorError, "not a validity model"),
        ({"format_version": 99}, PredictorError, "not a validity model"),
        ({"feature_set": "ast1-00000000"}, FeatureMismatchError, "ast1-00000000.*train it anew"),
        ({"scale": "steep"}, PredictorError, "damaged"),
        ({"config": {"depth": 3}}, PredictorError, "damaged"),
    ],
)
def test_files_it_does_not_read(
    tmp_path: Path, change: dict[str, object], error: type[Exception], message: str
) -> None:
    ValidityModel(FOREST).fit(made_up(("sm_75",), {"sm_75": 48}, n=40)).save(tmp_path)
    path = tmp_path / MODEL_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=message):
        ValidityModel.load(tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="holds no validity model"):
        ValidityModel.load(tmp_path)
    model = ValidityModel(FOREST).fit(made_up(("sm_75",), {"sm_75": 48}, n=40))
    model.save(tmp_path)
    (tmp_path / TREES_FILE).write_text("{}")
    with pytest.raises(PredictorError, match="damaged"):
        ValidityModel.load(tmp_path)
    (tmp_path / TREES_FILE).unlink()
    with pytest.raises(PredictorError, match="cannot read"):
        ValidityModel.load(tmp_path)
    (tmp_path / MODEL_FILE).write_text("{")
    with pytest.raises(PredictorError, match="damaged"):
        ValidityModel.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot write"):
        model.save(tmp_path / "file")


# -- rows ----------------------------------------------------------------------------------------------------------


def dataset_of(path: Path, records: list[tuple[str, str, float | None]]) -> Path:
    """A dataset with ASTs and (program, status, latency) on one device."""
    rng = np.random.default_rng(0)
    with Dataset.create(path) as dataset:
        dataset.add_task(Task("t0", "toy", "{}", {"toy": 1.0}, 1.0, 1.0))
        for program, status, latency_s in records:
            origin = "unscheduled" if program == "t0" else "random"
            dataset.add_program(Program(program, "t0", None, "", origin))
            dataset.add_record(Record(program, "rtx-2080-ti", status, latency_s))
        dataset.finalize()
    save_asts(path / "asts.parquet", {program: ast(rng, 1.0, 1.0) for program, _, _ in records})
    return path


def test_records_become_rows(tmp_path: Path) -> None:
    records = [
        ("a", "ok", 1e-3),
        ("b", "build_error", None),
        ("c", "run_timeout", None),
        ("c", "ok", 1e-3),
        ("d", "device_lost", None),
        ("t0", "ok", 1e-3),
        ("b", "run_error", None),
    ]
    data = gather_validity(dataset_of(tmp_path / "d", records))
    rows = {r.program: (r.valid, r.kind) for r in data.table.itertuples()}
    assert rows == {"a": (True, ""), "b": (False, "build_error"), "c": (True, "")}
    assert len(data.where(data.valid)) == 2
    with pytest.raises(DatasetError, match="to learn validity from"):
        gather_validity(tmp_path / "d", devices=["h100"])
    with pytest.raises(DatasetError, match="to learn validity from"):
        gather_validity()
    with pytest.raises(DatasetError, match="no validity data"):
        gather_validity(verdicts=[tmp_path])


def test_a_lost_device_alone_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="to learn validity from"):
        gather_validity(dataset_of(tmp_path / "d", [("a", "device_lost", None)]))


@pytest.mark.skipif(not (REPOSITORY / "data" / "validity-cuda").is_dir(), reason="no validity data")
def test_the_shipped_verdicts_are_rows_of_architectures() -> None:
    data = gather_validity(verdicts=[REPOSITORY / "data" / "validity-cuda"], devices=["sm_75", "sm_86"])
    assert set(data.table["device"]) == {"sm_75", "sm_86"}
    by_kind = data.table.groupby("kind")["valid"].all()
    assert by_kind[""] and not by_kind.drop("").any()
    split = Split.parse("by_device:heldout=sm_86;valid=0", data.table)
    split.check_disjoint(data.table)


# -- learning online -----------------------------------------------------------------------------------------------


def test_a_session_teaches_what_fails_here() -> None:
    """Without a model nine of ten work; then all with more than 48 KB fail, and others that were not seen are told apart."""
    device = get_device("rtx-2080-ti")
    seen, unseen = (made_up(("sm_75",), {"sm_75": 48}, n=60, seed=s) for s in (0, 1))
    online = OnlineValidity(None, device)
    features = [online.features([d.asts[p] for p in d.table["program"]]) for d in (seen, unseen)]
    assert online.predict(features[1]) == pytest.approx(np.full(60, 0.9))
    online.learn(list(seen.table["program"]), features[0], seen.valid)
    p = online.predict(features[1])
    assert validity_scores(unseen.valid, p)["auc"] > 0.95
    assert p[unseen.valid].mean() > 0.8 > 0.4 > p[~unseen.valid].mean()
    assert len(online) == 60


def test_without_failures_the_model_stays_as_it_is() -> None:
    data = made_up(("sm_75",), {"sm_75": 48})
    model = ValidityModel(FOREST).fit(data)
    online = OnlineValidity(model, get_device("rtx-2080-ti"))
    features = online.features(list(data.asts.values()))
    before = online.predict(features)
    works = np.flatnonzero(data.valid)[:20]
    online.learn([f"p{i}" for i in works], features[works], [True] * 20)
    assert np.array_equal(online.predict(features), before)
    online.learn(["p0"], features[:1], [False])
    after = online.predict(features)
    assert after[0] < before[0] and not np.array_equal(after, before)


def test_a_session_corrects_a_model_that_is_wrong() -> None:
    data = made_up(("sm_75",), {"sm_75": 48}, n=200)
    wrong = ValidityData(data.table.assign(valid=~data.valid), data.asts)
    model = ValidityModel(replace(FOREST, folds=2)).fit(wrong)
    online = OnlineValidity(model, get_device("rtx-2080-ti"))
    features = online.features(list(data.asts.values()))
    before = validity_scores(data.valid, online.predict(features))["brier"]
    online.learn([f"p{i}" for i in range(100)], features[:100], data.valid[:100])
    assert validity_scores(data.valid[100:], online.predict(features[100:]))["brier"] < 0.5 * before
