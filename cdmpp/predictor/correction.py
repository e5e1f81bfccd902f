r"""Corrections of a predictor's errors on a device from a few measurements, without training the network again.

The log error is modelled as a constant of the device, a part linear in what bounds a compiled program there (the features of
program and device together, and of the code), and a part linear in the network's embedding of the program and waves over it:

.. math:: \log(y / f) = c + w^\top r + v^\top h + t + \epsilon,

with t shared by the programs of a task. With Gaussian priors this is a Gaussian process with linear kernels (Rasmussen &
Williams, Gaussian Processes for Machine Learning, 2006, section 2.7). The more was measured, the more of the model is fitted:
of the priors in :data:`STEPS` the one with the least error on left-out tasks is taken (in closed form, section 5.4.2, with
blocks), and no correction if none helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import Correction
from cdmpp.predictor.metrics import least_mape_shift
from cdmpp.predictor.uncertainty import left_out

FloatArray = NDArray[np.float64]

#: Prior standard deviations of the constant, and of the parts linear in resources and in embedding, from simple to complex.
STEPS: tuple[tuple[float, float, float], ...] = (
    (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.1, 0.0), (1.0, 0.3, 0.0), (1.0, 0.1, 0.1), (1.0, 0.3, 0.3), (1.0, 0.6, 0.6),
)  # fmt: skip
#: Standard deviations of the error that the programs of a task share, and of that of each program.
_TASK, _PROGRAM = 0.15, 0.2
#: The shift that centres the residuals is shrunk as if so many more tasks had shown none.
_TASKS_WITHOUT = 2
#: To be taken, a step must beat a simpler one by so many standard errors over tasks, and by so much MAPE.
_SURE, _SURE_OF_CONSTANT = 1.0, 0.3
_LEAST_GAIN = 0.005
#: Most programs that are fitted to, of one task and in all.
_OF_TASK, _PROGRAMS = 32, 3000


class Fit(NamedTuple):
    """A correction, None if none helps; ``left``, the log(measured / predicted) that remains of m programs when their task is
    left out, their ``rows`` and ``tasks``; the mean over tasks of their MAPE (``error``), and that without it (``before``)."""

    correction: Correction | None
    left: FloatArray
    rows: NDArray[np.int64]
    tasks: NDArray[np.str_]
    error: float
    before: float


def fit_correction(
    errors: FloatArray, tasks: Sequence[str], resources: FloatArray, embeddings: FloatArray, seed: int = 0
) -> Fit:
    """Fit to log(measured / predicted) (n,) of programs of these tasks. ``resources`` (n, r) are features that the network gets
    and ``embeddings`` (n, h) what it makes of the programs. PredictorError: no programs."""
    if not len(errors):
        raise PredictorError("a correction needs measured programs")
    rows = _chosen(np.asarray(tasks), seed)
    errors, parts = errors[rows], [resources[rows], embeddings[rows]]
    names, task = np.unique(np.asarray(tasks)[rows], return_inverse=True)
    means = [part.mean(0) for part in parts]
    centred = [part - mean for part, mean in zip(parts, means, strict=True)]
    # scale each part so that its squared norm is 1 on average over the programs
    scales = [1 / max(np.sqrt((part**2).sum(1).mean()), 1e-9) for part in centred]
    centred = [scale * part for scale, part in zip(scales, centred, strict=True)]
    kernels = [np.ones((len(rows), len(rows))), *(part @ part.T for part in centred)]
    noise = _TASK**2 * (task[:, None] == task[None, :]) + _PROGRAM**2 * np.eye(len(rows))
    best, left, shift, alpha = STEPS[0], errors, 0.0, np.zeros(len(rows))
    before = of_task = _by_task(errors, task)
    for step in STEPS[1:] if len(names) > 1 else ():  # with a single task none can be left out, so nothing is shown to help
        inverse = np.linalg.inv(sum((sd**2 * kernel for sd, kernel in zip(step, kernels, strict=True)), noise))
        without = left_out(inverse, errors, task)
        # MAPE weighs over-predictions more: shift the residuals to where it is least
        centre = least_mape_shift(without, task) * len(names) / (len(names) + _TASKS_WITHOUT)
        tried = _by_task(without - centre, task)
        gained = of_task - tried
        sure = _SURE if best[0] else _SURE_OF_CONSTANT
        if gained.mean() > max(sure * gained.std() / math.sqrt(len(names)), _LEAST_GAIN):
            best, of_task, left, shift, alpha = step, tried, without - centre, centre, inverse @ errors
    if not any(best):
        return Fit(None, left, rows, names[task], float(of_task.mean()), float(before.mean()))
    constant = best[0] ** 2 * float(alpha.sum()) + shift
    weights = np.concatenate(
        [sd**2 * scale * (part.T @ alpha) for sd, scale, part in zip(best[1:], scales, centred, strict=True)]
    )
    shown = np.concatenate([part / scale for part, scale in zip(centred, scales, strict=True)], axis=1) @ weights
    correction = Correction(constant, np.concatenate(means), weights, float(shown.min()), float(shown.max()))
    return Fit(correction, left, rows, names[task], float(of_task.mean()), float(before.mean()))


def _by_task(errors: FloatArray, task: NDArray[np.int64]) -> FloatArray:
    """MAPE of each task, from log(measured / predicted)."""
    mapes: FloatArray = np.bincount(task, np.abs(np.expm1(-errors))) / np.bincount(task)
    return mapes


def _chosen(tasks: NDArray[np.str_], seed: int) -> NDArray[np.int64]:
    """Random rows of at most ``_OF_TASK`` programs of each task, and at most ``_PROGRAMS`` in all."""
    order = np.random.default_rng(seed).permutation(len(tasks))
    _, task = np.unique(tasks[order], return_inverse=True)
    seen: dict[int, int] = {}
    kept = []
    for row, number in zip(order, task, strict=True):
        seen[number] = seen.get(number, 0) + 1
        if seen[number] <= _OF_TASK:
            kept.append((seen[number], int(row)))
    return np.sort([row for _, row in sorted(kept)[:_PROGRAMS]]).astype(np.int64)
