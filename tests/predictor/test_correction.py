"""What a few measurements say of a predictor's errors: known answers, leaving tasks out, and when the base is kept."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cdmpp.errors import PredictorError
from cdmpp.predictor.correction import fit_correction
from cdmpp.predictor.encoding import Correction
from cdmpp.predictor.uncertainty import left_out


def made(tasks: int, of_task: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tasks, resources, embeddings and noise of programs."""
    rng = np.random.default_rng(seed)
    names = np.repeat([f"task{i}" for i in range(tasks)], of_task)
    n = len(names)
    return names, rng.normal(size=(n, 5)), rng.normal(size=(n, 7)), 0.02 * rng.normal(size=n)


def test_a_constant_is_found_and_nothing_else_where_nothing_else_is() -> None:
    tasks, resources, embeddings, noise = made(6)
    fit = fit_correction(0.8 + noise, tasks, resources, embeddings)
    assert fit.correction is not None
    assert fit.correction.constant == pytest.approx(0.8, abs=0.03) and not fit.correction.weights.any()
    assert fit.error < 0.05 < 0.5 < fit.before


def test_what_goes_with_resources_is_found_once_there_are_tasks_enough() -> None:
    tasks, resources, embeddings, noise = made(40)
    errors = 0.5 + 0.4 * resources[:, 0] + noise
    fit = fit_correction(errors, tasks, resources, embeddings)
    found = fit.correction
    assert found is not None
    fresh = made(20, seed=1)
    left = 0.5 + 0.4 * fresh[1][:, 0] - found.logs(np.concatenate(fresh[1:3], axis=1))
    assert np.abs(left).mean() < 0.5 * np.abs(0.4 * fresh[1][:, 0]).mean()
    assert fit_correction(errors[:16], tasks[:16], resources[:16], embeddings[:16]).error > fit.error


def test_the_base_is_kept_where_there_is_nothing_to_correct() -> None:
    tasks, resources, embeddings, noise = made(8)
    fit = fit_correction(noise, tasks, resources, embeddings)
    assert fit.correction is None and fit.error == fit.before < 0.03


def test_leaving_a_task_out_is_fitting_without_it() -> None:
    rng = np.random.default_rng(0)
    points, task, errors = rng.normal(size=(12, 3)), np.repeat(np.arange(4), 3), rng.normal(size=12)
    covariance = points @ points.T + 0.1 * np.eye(12)
    left = left_out(np.linalg.inv(covariance), errors, task)
    for number in range(4):
        at, others = task == number, task != number
        solved = np.linalg.solve(covariance[np.ix_(others, others)], errors[others])
        assert left[at] == pytest.approx(errors[at] - covariance[np.ix_(at, others)] @ solved)


def test_corrections_do_not_extrapolate_and_come_back_from_json() -> None:
    tasks, resources, embeddings, noise = made(40)
    found = fit_correction(0.4 * resources[:, 0] + noise, tasks, resources, embeddings).correction
    assert found is not None
    beyond_the_measured = found.logs(np.full((1, 12), 1e3))[0]
    assert found.constant + found.low <= beyond_the_measured <= found.constant + found.high
    again = Correction.from_json(json.loads(json.dumps(found.to_json())))
    inputs = np.concatenate([resources, embeddings], axis=1)
    assert again.logs(inputs) == pytest.approx(found.logs(inputs), abs=1e-4)
    for wrong in ({"constant": float("nan")}, {"mean": [0.0]}):
        with pytest.raises(ValueError, match="finite"):
            Correction.from_json({**found.to_json(), **wrong})
    with pytest.raises(PredictorError, match="needs measured programs"):
        fit_correction(np.zeros(0), [], np.zeros((0, 5)), np.zeros((0, 7)))
