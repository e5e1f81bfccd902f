"""Configurations: YAML round trip, unknown keys and wrong values named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdmpp.errors import PredictorError
from cdmpp.predictor.config import Config, config_from_dict, dump_config, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configurations_load(path):
    assert load_config(path).data.paths


def test_yaml_round_trip_and_an_empty_file_is_the_default(tmp_path):
    config = config_from_dict({"model": {"dim": 64}, "data": {"paths": ["a", "b"]}, "train": {"seed": 7}})
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config
    (tmp_path / "c.yaml").write_text("")
    assert load_config(tmp_path / "c.yaml") == Config()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, r"unknown key 'modle' \(known here: model, label"),
        ({"model": {"width": 3}}, r"unknown key 'model.width' \(known here: dim, layers"),
        ({"model": {"dim": 100, "heads": 8}}, "dim must be even and a multiple of heads"),
        ({"train": {"epochs": 0}}, "train.epochs"),
        ({"label": {"transform": "cube"}}, "label.transform: .*'box-cox' or 'log'"),
        ({"loss": {"mse_weight": 0, "mape_weight": 0}}, "must not both be zero"),
        ({"data": {"unmeasured": True}}, "needs another network's labels: train.members of 2, and model.compiled"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate"),
        ([1, 2], "expected a mapping"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(PredictorError, match=message):
        config_from_dict(values)


def test_unreadable_files(tmp_path):
    with pytest.raises(PredictorError, match="cannot read"):
        load_config(tmp_path / "none.yaml")
    for text in ("model: {dim: [", "[" * 60_000 + "]" * 60_000):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(PredictorError, match="not valid YAML"):
            load_config(tmp_path / "bad.yaml")
