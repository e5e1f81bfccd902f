"""Settings of all tests, and what is expensive to make and the same for many: made once, by the first that needs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from cdmpp.device.table import ROOT_VARIABLE
from tests.machines import MACHINES, write_machine

if TYPE_CHECKING:
    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.training import TrainResult
    from tests.samples.command import Command

# Tests are many small computations: threads cost more than they give.
os.environ["OMP_NUM_THREADS"] = "1"
# Processes that tests start find the samples, too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
# What is computed from datasets is kept apart from what the user of this machine has.
_cache = tempfile.TemporaryDirectory(prefix="cdmpp-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name
# No test may fail because the machine was busy. Few examples in `make test`, many in `make check`.
settings.register_profile("few", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("many", settings.get_profile("few"), max_examples=100)
settings.load_profile("few")


# `make machines`: the facts of a machine of tests.machines in place of this one's, but where compiled programs run.
if machine := os.environ.get("CDMPP_TEST_MACHINE"):
    _folder = tempfile.TemporaryDirectory(prefix="cdmpp-machine-")
    os.environ[ROOT_VARIABLE] = str(write_machine(Path(_folder.name), MACHINES[machine]))


@pytest.fixture(scope="session")
def _zen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_machine(tmp_path_factory.mktemp("zen3"), MACHINES["zen3-vm"])


@pytest.fixture(scope="module")
def on_zen3(_zen3: Path) -> Iterator[None]:
    """``this-cpu`` is a Zen 3 of two cores, whatever the tests run on: for modules that measure nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, str(_zen3))
        yield


@pytest.fixture(scope="module")
def real_machine() -> Iterator[None]:
    """For modules that run compiled programs, also where the other tests are given the facts of another machine. Labels of a
    disturbed core count like others: a shared machine may give no others while the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ROOT_VARIABLE, raising=False)
        patch.setattr("cdmpp.dataset.view.disturbance", lambda records: [0.0] * len(records))
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    from tests.samples.command import Command

    return Command(capsys, tmp_path)


@pytest.fixture(scope="session")
def data() -> TrainingData:
    """Programs of 12 tasks on two CPUs, ``slow`` and ``fast``."""
    from tests.samples.training import make_data

    return make_data(per_task=20)


@pytest.fixture(scope="session")
def trained(data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A small predictor of :func:`data`."""
    from cdmpp.predictor import train
    from tests.samples.training import small_config

    return train(small_config("by_task:seed=0", epochs=15), data, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled MLP, finalized; not to be written to. For modules on the ``real_machine``."""
    from cdmpp.profiler.session import profile
    from tests.samples.programs import QUICK_PROFILE

    out = tmp_path_factory.mktemp("mlp") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ROOT_VARIABLE, raising=False)
        report = profile(["mlp"], out=out, config=QUICK_PROFILE)
    assert report.ok == report.new > 10
    return out
