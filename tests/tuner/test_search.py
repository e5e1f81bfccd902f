"""The search over decisions, with TVM's real spaces: nothing twice, nothing made up, better than blind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import cdmpp
from cdmpp.tuner.candidates import DecisionSearch, TaskTuner, hashes_of
from cdmpp.tuner.cost_model import CostModel
from tests.samples.programs import matmul_task
from tests.samples.tuning import made_up_latency_s

pytestmark = pytest.mark.usefixtures("on_zen3")


@pytest.fixture(scope="module")
def tuner(on_zen3: None) -> TaskTuner:
    return TaskTuner(matmul_task(64), cdmpp.get_device("this-cpu@1"), 1)


def by_hash(measures: Sequence[Any]) -> np.ndarray:
    return np.log([made_up_latency_s(digest) for digest in hashes_of(measures)])


def test_candidates_are_new_distinct_and_replay_exactly(tuner: TaskTuner) -> None:
    search, known = DecisionSearch(tuner, by_hash, 6, 0), set[str]()
    for size in (3, 6, 6):  # the first round is half of one
        found = search.propose(set())
        hashes = [c.hash for c in found]
        assert len(found) == size and len(set(hashes)) == size and not known & set(hashes)
        latencies = [made_up_latency_s(digest) for digest in hashes]
        assert latencies == sorted(latencies), "likeliest first"
        known.update(hashes)
    job = found[0].job
    assert job.space is not None and tuner.replay(job.program, job.space).hash == job.program.hash
    counts = search.describe()
    assert counts["proposed"] == 15 and counts["replayed"] < counts["judged"]
    assert counts["distinct"] + counts["equal"] + counts["rejected"] >= counts["replayed"] > 0
    again = [[c.hash for c in DecisionSearch(tuner, by_hash, 6, 0).propose(set())] for _ in range(2)]
    assert again[0] == again[1]


def test_predictions_that_favour_a_space_do_not_leave_the_others_out(tuner: TaskTuner) -> None:
    spaces = [space.hash for space in tuner._spaces.spaces]

    def of_first(measures: Sequence[Any]) -> np.ndarray:
        return np.array([float(spaces.index(tuner.candidate(m.sch).job.program.space_hash)) for m in measures])

    proposed = DecisionSearch(tuner, of_first, 32, 0).propose(set())
    numbers = [spaces.index(str(c.job.program.space_hash)) for c in proposed]
    assert len(spaces) > 2 and numbers == [0] * 14 + [1, 2]


def test_it_finds_faster_programs_than_as_many_drawn_blindly(tuner: TaskTuner) -> None:
    model = CostModel(None, "this-cpu@1")

    def score(measures: Sequence[Any]) -> np.ndarray:
        return np.log(model.predict_s(tuner.context, measures))

    search = DecisionSearch(tuner, score, 8, 1)
    found = score([c.measure for c in search.propose(set())])
    blind = score([c.measure for c in tuner.sample(search.counts["replayed"], 1)])
    assert found.min() <= blind.min() and found.mean() < np.sort(blind)[:8].mean()


def test_what_tvm_rejects_is_counted_and_what_failed_is_proposed_last(tuner: TaskTuner, monkeypatch) -> None:
    replayed, refused = TaskTuner.measure_of, list[Any]()

    def half(self: TaskTuner, insts: Any, decisions: Any) -> Any:
        if len(json.dumps(decisions)) % 2:
            refused.append(decisions)
            return None
        return replayed(self, insts, decisions)

    monkeypatch.setattr(TaskTuner, "measure_of", half)
    search = DecisionSearch(tuner, lambda measures: np.full(len(measures), np.inf), 8, 0)
    assert len(search.propose(set())) == 4, "all that is known failed, it goes on nevertheless"
    assert search.counts["rejected"] == len(refused) > 0
    monkeypatch.setattr(TaskTuner, "measure_of", lambda *_: None)
    assert DecisionSearch(tuner, by_hash, 4, 0).propose(set()) == []


def test_earlier_programs_are_parents_whatever_their_space(tuner: TaskTuner) -> None:
    earlier = tuner.sample(6, 3)
    search = DecisionSearch(tuner, by_hash, 4, 0, earlier)
    assert search.counts["replayed"] < 16, "they are not replayed again"
    assert {c.hash for c in earlier} <= set(search._log_s)
    assert not {c.hash for c in earlier} & {c.hash for c in search.propose({c.hash for c in earlier})}
