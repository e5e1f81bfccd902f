"""Fixtures of the predictor's tests."""

from __future__ import annotations

import pytest

from cdmpp.predictor.config import Config
from tests.samples.training import small_config


@pytest.fixture(scope="session")
def config() -> Config:
    return small_config()
