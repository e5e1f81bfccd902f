"""The cost model inside of TVM's own tuning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdmpp
from cdmpp.predictor.training import TrainResult
from cdmpp.program import import_tvm, structural_hash
from cdmpp.tuner import CostModel
from cdmpp.tuner.candidates import TaskTuner, runner_results
from tests.samples.programs import matmul_task
from tests.samples.training import make_device
from tests.samples.tuning import SEARCH

tvm = import_tvm()

from tvm.s_tir import meta_schedule as ms  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_zen3")
LLVM = {"kind": "llvm", "num-cores": 1}


@pytest.fixture(scope="module")
def context_and_candidates(on_zen3: None) -> tuple[Any, list[Any]]:
    tuner = TaskTuner(matmul_task(48), cdmpp.get_device("this-cpu@1"), 1, **SEARCH)
    tuner.start(ms.database.MemoryDatabase(), ms.cost_model.RandomModel(), 12)
    return tuner.context, [c.measure for c in tuner.propose()]


def test_scores_are_throughputs_of_predictions(context_and_candidates: tuple[Any, list[Any]], trained: TrainResult) -> None:
    context, candidates = context_and_candidates
    predictor = trained.predictor
    model = CostModel(predictor, make_device("slow", 1000.0))
    assert isinstance(model, ms.CostModel)
    seconds = predictor.predict([c.sch.mod for c in candidates], "slow")
    assert model.predict_s(context, candidates) == pytest.approx(seconds, rel=1e-4)
    scores = model.predict(context, candidates)
    assert scores.dtype == np.float64 and scores.shape == (len(candidates),)
    assert scores == pytest.approx(1 / seconds, rel=1e-4)


def test_what_is_asked_again_is_not_computed_again(context_and_candidates: tuple[Any, list[Any]]) -> None:
    context, candidates = context_and_candidates
    model = CostModel(None, "this-cpu@1")
    before = model.predict_s(context, candidates)
    computed = len({structural_hash(c.sch.mod["main"]) for c in candidates})
    assert model.cache.computed == computed
    model.update(context, candidates[:4], runner_results([1.0, 2.0, 3.0, 4.0]))
    after = model.predict_s(context, candidates)
    assert model.cache.computed == computed, "measurements change predictions, not what is cached"
    assert not np.allclose(before, after)


def test_it_learns_and_remembers_failures(context_and_candidates: tuple[Any, list[Any]]) -> None:
    context, candidates = context_and_candidates
    model = CostModel(None, "this-cpu@1")
    latencies = [1e-3 * (1 + i) for i in range(len(candidates) - 1)]
    before = np.abs(np.log(model.predict_s(context, candidates[:-1]) / latencies)).mean()
    model.update(context, candidates, runner_results([*latencies, None]))
    seconds = model.predict_s(context, candidates)
    assert np.abs(np.log(seconds[:-1] / latencies)).mean() < 0.5 * before
    assert np.isinf(seconds[-1]) and model.predict(context, candidates)[-1] == 0
    assert np.isinf(model.interval_s(context, candidates, 0.9)[0][-1]), "so that it is dropped"
    assert model.predict(context, candidates).max() <= 1e6


def by_tvm() -> dict[str, Any]:
    """A small tuning of TVM's own but for what it is given."""
    return {
        "space": ms.space_generator.PostOrderApply(sch_rules="llvm", postprocs="llvm", mutator_probs="llvm"),
        "strategy": ms.search_strategy.EvolutionarySearch(population_size=24, genetic_num_iters=1, init_min_unmeasured=1),
        "seed": 1,
    }


def test_it_is_a_drop_in_for_tvms_own_builder_and_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("tvm.s_tir.meta_schedule"), "handlers", [])  # as below
    model = CostModel("default", "this-cpu@1")
    mod = tvm.IRModule({"main": matmul_task(32).prim_func()})
    builder = ms.builder.LocalBuilder(max_workers=1, initializer=import_tvm)
    runner = ms.runner.LocalRunner(initializer=import_tvm)
    given = {"builder": builder, "runner": runner, "cost_model": model, "num_tuning_cores": 1}
    database = ms.tune_tir(mod, LLVM, str(tmp_path), 4, num_trials_per_iter=4, **given, **by_tvm())
    assert len(database) == model.model.describe()["records"] == 4
    assert all(0 < float(record.run_secs[0]) < 1 for record in database.get_all_tuning_records())
