"""The Gaussian process on residuals: known answers, roll-back, sharing, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cdmpp.tuner.learning import Correction, Kernel, fit_correction, squared_distances

KERNEL = Kernel(noise=0.04, offset=0.5, own=0.3, shared=0.2, common=0.1, length=1.5)


def records(n: int, tasks: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    task = rng.integers(0, tasks, n)
    return z, task, np.sin(z[:, 0]) + 0.5 * task + rng.normal(0, 0.05, n)


def test_one_record_of_known_answer() -> None:
    z, task, residual = np.zeros((1, 2)), np.zeros(1, np.int64), np.array([1.0])
    correction = Correction(Kernel(noise=0.25, offset=1.0), z, task, residual)
    mean, deviation = correction.mean(z, 0), correction.deviation(z, 0)
    assert mean == pytest.approx([1 / 1.25]), "prior variance over prior variance plus noise"
    assert deviation == pytest.approx([math.sqrt(1 - 1 / 1.25 + 0.25)])
    mean, deviation = correction.mean(z, 1), correction.deviation(z, 1)
    assert mean == pytest.approx([0.0]), "another task has an offset of its own"
    assert deviation == pytest.approx([math.sqrt(1.25)])


def test_covariance_of_known_answer() -> None:
    a, b = np.array([[0.0, 0.0]]), np.array([[3.0, 4.0]])
    assert squared_distances(a, b) == pytest.approx(np.array([[25.0]]))
    near = math.exp(-0.5 * 25 / 1.5**2)
    same, other = np.zeros(1, np.int64), np.ones(1, np.int64)
    assert KERNEL.covariance(a, same, b, other)[0, 0] == pytest.approx(0.1 + 0.2 * near)
    assert KERNEL.covariance(a, same, b, same)[0, 0] == pytest.approx(0.1 + 0.2 * near + 0.5 + 0.3 * near)


def test_leaving_one_out_is_what_fitting_the_others_gives() -> None:
    z, task, residual = records(12)
    left_out = Correction(KERNEL, z, task, residual).left_out
    for i in range(12):
        others = np.arange(12) != i
        fitted = Correction(KERNEL, z[others], task[others], residual[others])
        mean, deviation = (
            fitted.mean(z[i : i + 1], int(task[i])),
            fitted.deviation(z[i : i + 1], int(task[i])),
        )
        assert left_out.error[i] == pytest.approx(residual[i] - mean[0])
        assert left_out.deviation[i] == pytest.approx(deviation[0])


def test_it_learns_an_offset_and_a_shape() -> None:
    z, task, residual = records(200, tasks=1)
    correction = fit_correction(z[:150], task[:150], residual[:150])
    mean = correction.mean(z[150:], 0)
    assert np.mean((mean - residual[150:]) ** 2) < 0.1 * np.mean(residual[150:] ** 2)


def test_far_from_everything_measured_the_prediction_is_left_alone() -> None:
    z, task, residual = records(60)
    shared = fit_correction(z, task, residual)
    mean, deviation = shared.mean(z + 100, 7), shared.deviation(z + 100, 7)
    assert np.abs(mean).max() < 1e-6
    assert (deviation > shared.deviation(z, 0)).all(), "and it is less sure there"


def test_nothing_is_corrected_where_that_does_no_good() -> None:
    rng = np.random.default_rng(1)
    n = 40
    # errors without offset or shape: every correction of a program by the others makes it worse
    residual = np.tile([0.3, -0.3], n // 2)
    z = np.repeat(rng.normal(size=(n // 2, 3)), 2, axis=0)
    correction = fit_correction(z, np.arange(n) // 2, residual)
    assert correction.kernel.variance == 0, "rolled back"
    assert correction.mean(z, 0) == pytest.approx(np.zeros(n))


def test_tasks_learn_from_each_other_only_where_it_helps() -> None:
    rng = np.random.default_rng(2)
    z, task = rng.normal(size=(60, 3)), np.arange(60) % 4
    together = np.full(60, 1.0) + rng.normal(0, 0.05, 60)
    kernel = fit_correction(z, task, together, common=1.0).kernel
    assert kernel.shared > 0 and kernel.common > 0
    opposite = np.where(task % 2 == 0, 1.0, -1.0) + rng.normal(0, 0.05, 60)
    assert fit_correction(z, task, opposite).kernel.shared == 0


def test_intervals_hold_what_they_promise() -> None:
    z, task, residual = records(400, tasks=3, seed=5)
    correction = fit_correction(z[:200], task[:200], residual[:200])
    width = correction.width(0.9)
    assert width is not None
    covered = []
    for number in range(3):
        rows = np.flatnonzero(task[200:] == number) + 200
        mean, deviation = correction.mean(z[rows], number), correction.deviation(z[rows], number)
        covered += list(np.abs(residual[rows] - mean) <= width * deviation)
    assert 0.8 < np.mean(covered) < 0.98


def test_too_few_records_for_an_interval() -> None:
    z, task, residual = records(8)
    correction = Correction(KERNEL, z, task, residual)
    assert correction.width(0.9) is None, "nine are needed"
    assert correction.width(0.5) is not None
    empty = fit_correction(z[:0], task[:0], residual[:0])
    assert len(empty) == 0 and empty.width(0.5) is None
    assert empty.mean(z, 0) == pytest.approx(np.zeros(8))
