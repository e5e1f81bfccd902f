"""What learning while tuning must not make worse, from datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.errors import DatasetError, TunerError
from cdmpp.tuner.anchors import load_anchors
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.results import TuneReport
from cdmpp.tuner.store import DATASET_FOLDER
from cdmpp.tuner.tuning import tune_tasks
from tests.samples.programs import matmul_task
from tests.samples.tuning import FakeEngine, tune_config

pytestmark = pytest.mark.usefixtures("on_zen3")


def tuned(out: Path, *sizes: int, slower: float = 1.0, **options: Any) -> TuneReport:
    """Latencies are `slower` times 1 us an element of the product."""
    seconds = {matmul_task(n).hash: slower * 1e-6 * n for n in sizes}

    class Engine(FakeEngine):
        def run(self, jobs: Any) -> Any:
            for job in jobs:
                if job is not None:
                    self._latency_s = lambda _, s=seconds[job.task.hash]: s
                yield from super().run(iter([job]))

    tasks = [(matmul_task(n), 1.0) for n in sizes]
    with Measurer(Engine()) as measurer:
        return tune_tasks("toy", tasks, out=out, config=tune_config(12, **options), measurer=measurer)


@pytest.fixture(scope="module")
def earlier(on_zen3: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of two tasks."""
    out = tmp_path_factory.mktemp("earlier") / "t"
    tuned(out, 32, 48)
    return out / DATASET_FOLDER


def test_they_are_labels_of_tasks_that_were_not_trained_on(earlier: Path) -> None:
    records = Dataset.open(earlier).records
    everything = load_anchors([earlier], get_device("this-cpu@1"))
    assert len(everything.asts) == len(records)
    assert sorted(everything.latency_s) == pytest.approx(sorted(records["latency_s"]))
    other = load_anchors([earlier], get_device("this-cpu@1"), {matmul_task(32).hash})
    assert 0 < len(other.asts) < len(everything.asts)
    assert np.unique(other.latency_s) == pytest.approx([48e-6])
    assert len(load_anchors([earlier], get_device("this-cpu@1"), most=3).asts) == 3
    again = load_anchors([earlier], get_device("this-cpu@1"), most=3)
    assert (
        again.latency_s.tolist()
        == load_anchors([earlier], get_device("this-cpu@1"), most=3).latency_s.tolist()
    )


def test_where_there_are_none_it_says_so(earlier: Path, tmp_path: Path) -> None:
    with pytest.raises(TunerError, match="not trained on, which learning could be checked by"):
        load_anchors([earlier], get_device("this-cpu@1"), {matmul_task(32).hash, matmul_task(48).hash})
    with pytest.raises(TunerError, match="no labels on h200 of tasks"):
        load_anchors([earlier], get_device("h200"))
    with pytest.raises(DatasetError):
        load_anchors([tmp_path], get_device("this-cpu@1"))
    with pytest.raises(TunerError, match="no folder of earlier records"):
        tuned(tmp_path / "t", 32, anchors=[tmp_path / "nothing"])
    assert not (tmp_path / "t").exists()


def test_a_tuning_does_not_forget_them(earlier: Path, tmp_path: Path) -> None:
    """Everything is a thousand times as slow now; what the labels say of other tasks stays as it was."""
    free = tuned(tmp_path / "free", 16, 24, slower=1e3).learned
    assert free["anchor_error"] is None
    held = tuned(tmp_path / "held", 16, 24, slower=1e3, anchors=[earlier]).learned
    assert held["anchor_error"] <= held["anchor_error_before"] + 1e-12
    assert held["rolled_back"], (
        "the common factor, which tasks that were measured share, would have done harm"
    )
