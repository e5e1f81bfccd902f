"""Fixtures of the predictor's tests."""

from __future__ import annotations

import pytest
import torch
from tests.samples.training import make_data

from cdmpp.predictor.config import Config, config_from_dict
from cdmpp.predictor.data import TrainingData


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data() -> TrainingData:
    return make_data()


@pytest.fixture()
def config() -> Config:
    return config_from_dict(
        {
            "model": {
                "dim": 16,
                "layers": 1,
                "heads": 2,
                "ffn_dim": 32,
                "embedding_dim": 16,
                "decoder_dim": 32,
            },
            "train": {"epochs": 4, "patience": 4, "batch_size": 64, "learning_rate": 0.01, "threads": 1},
            "split": {"spec": "within_task;seed=1"},
        }
    )
