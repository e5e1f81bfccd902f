"""Settings of all tests, and what is expensive to make and the same for many: made once, by the first that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from cdmpp.device.detect import ROOT_VARIABLE
from tests.machines import MACHINES, write_machine

if TYPE_CHECKING:
    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.run import TrainResult

# no test may fail because the machine was busy
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def _zen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_machine(tmp_path_factory.mktemp("zen3"), MACHINES["zen3-vm"])


@pytest.fixture
def on_zen3(_zen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``this-cpu`` is a Zen 3 of two cores, whatever the tests run on: for what is not measured here."""
    monkeypatch.setenv(ROOT_VARIABLE, str(_zen3))


@pytest.fixture(scope="session")
def data() -> TrainingData:
    """Programs of 12 tasks on two CPUs, ``slow`` and ``fast``."""
    from tests.samples.training import make_data

    return make_data()


@pytest.fixture(scope="session")
def trained(data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A small predictor of :func:`data`."""
    import torch

    from cdmpp.predictor import train
    from tests.samples.training import small_config

    torch.set_num_threads(1)
    return train(small_config("by_task:seed=0", epochs=15), data, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled MLP, finalized; not to be written to."""
    from cdmpp.profiler.profile import profile
    from tests.samples.programs import QUICK_PROFILE

    out = tmp_path_factory.mktemp("mlp") / "data"
    report = profile(["mlp"], out=out, config=QUICK_PROFILE)
    assert report.ok == report.new > 10
    return out
