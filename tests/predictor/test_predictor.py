"""The trained predictor: shapes, persistence, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from cdmpp.errors import FeatureMismatchError, PredictorError, UnknownDeviceError
from cdmpp.predictor import Predictor
from cdmpp.predictor import predictor as module
from cdmpp.program.types import Program
from tests.samples.training import change_state, make_ast, make_device


@pytest.fixture(scope="module")
def predictor(trained):
    return trained.predictor


@pytest.fixture()
def asts():
    rng = np.random.default_rng(3)
    return [make_ast(rng, n) for n in (1, 7, 2, 30, 1)]


def test_one_program_is_a_float_and_many_an_array(predictor, asts):
    one, many = predictor.predict(asts[1], "slow"), predictor.predict(asts, "slow")
    assert isinstance(one, float) and one > 0
    assert many.shape == (5,) and many.dtype == np.float64
    assert many[1] == pytest.approx(one, rel=1e-4)
    assert predictor.predict([], "slow").shape == (0,)


def test_device_by_name_or_object(predictor, asts):
    by_name = predictor.predict(asts, "fast")
    assert by_name == pytest.approx(predictor.predict(asts, make_device("fast", 4000.0)), rel=1e-6)
    assert (by_name != predictor.predict(asts, "slow")).all()
    assert np.isfinite(predictor.predict(asts, make_device("unseen", 2500.0))).all()
    with pytest.raises(UnknownDeviceError):
        predictor.predict(asts, "no-such-device")


def test_save_and_load_predict_the_same(predictor, asts, tmp_path):
    predictor.save(tmp_path / "p")
    loaded = Predictor.load(tmp_path / "p")
    assert (loaded.predict(asts, "fast") == predictor.predict(asts, "fast")).all()
    assert loaded.training == predictor.training
    assert {path.suffix for path in (tmp_path / "p").iterdir()} == {".json", ".safetensors"}


def test_programs_need_a_resolver(predictor, asts):
    program = Program("0" * 16, "1" * 16, None, "")
    assert predictor.predict(program, "fast", resolver=lambda p: asts[0]) == predictor.predict(asts[0], "fast")
    with pytest.raises(PredictorError, match="resolver"):
        predictor.predict(program, "fast")


#: Of two means and one weight.
CORRECTION = {"constant": 0.0, "mean": [0.0, 0.0], "weights": [0.0], "low": 0.0, "high": 0.0}


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda s: s["encoder"].update(feature_set="older/0"), FeatureMismatchError, "older/0"),
        (lambda s: s["encoder"]["device_features"].pop(), FeatureMismatchError, "device features"),
        (lambda s: s.update(format_version=99), PredictorError, "99"),
        (lambda s: s.update(format="other"), PredictorError, "cdmpp-predictor"),
        (lambda s: s.pop("label_transform"), PredictorError, "malformed: 'label_transform'"),
        (lambda s: s["label_transform"].pop("mean"), PredictorError, "malformed: 'mean'"),
        (lambda s: s["label_transform"].update(kind="cube"), PredictorError, "unknown label transform 'cube'"),
        (lambda s: s["encoder"]["clip"].pop("leaf"), PredictorError, "malformed: 'leaf'"),
        (lambda s: s["calibration"]["scores"].append({"device": "x", "units": 3}), PredictorError, "malformed"),
        (lambda s: s["calibration"]["scores"].pop(0), PredictorError, "malformed"),
        (lambda s: s["familiarity"].pop("threshold"), PredictorError, "malformed: 'threshold'"),
        (lambda s: s["scaling"].pop("own"), PredictorError, "malformed: 'own'"),
        (lambda s: s["corrections"].update(fast={"ast": CORRECTION}), PredictorError, "as many weights as means"),
        (lambda s: s["corrections"].update(fast={"ast": {**CORRECTION, "mean": [0.0]}}), PredictorError, "finetune again"),
        (lambda s: s["model"].update(depth=3), PredictorError, "depth"),
        (lambda s: s["model"].update(dim=32), PredictorError, "do not fit"),
        (lambda s: s.pop("encoder"), PredictorError, "encoder"),
    ],
)  # fmt: skip
def test_a_predictor_that_does_not_fit_is_refused(predictor, tmp_path, edit, error, message):
    predictor.save(tmp_path)
    change_state(tmp_path, edit)
    with pytest.raises(error, match=message):
        Predictor.load(tmp_path)


def test_damaged_or_missing_files_are_refused(predictor, tmp_path):
    with pytest.raises(PredictorError, match=r"expected predictor\.json"):
        Predictor.load(tmp_path / "none")
    predictor.save(tmp_path)
    weights, state = tmp_path / "weights.safetensors", tmp_path / "predictor.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PredictorError, match="safetensors"):
        Predictor.load(tmp_path)
    weights.unlink()
    with pytest.raises(PredictorError, match="safetensors"):
        Predictor.load(tmp_path)
    weights.write_bytes(whole)
    state.write_text(state.read_text()[:100])
    with pytest.raises(PredictorError, match="expected JSON"):
        Predictor.load(tmp_path)


def test_default_says_when_there_is_none(monkeypatch, tmp_path, predictor, asts):
    monkeypatch.setattr(module, "_DEFAULT_FOLDER", tmp_path / "default")
    with pytest.raises(PredictorError, match="no default predictor"):
        Predictor.default()
    predictor.save(tmp_path / "default")
    assert module.predict(asts[0], "fast") == predictor.predict(asts[0], "fast")
