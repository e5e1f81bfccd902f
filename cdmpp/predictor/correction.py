r"""What a few measurements of a device say of a predictor's errors on it, without training the network again.

Errors are a constant of the device, a part that goes with what bounds a compiled program there (the features of program and
device together, and of the code), and a part that goes with what the network sees in it (its embedding, and waves over it):

.. math:: \log(y / f) = c + w^\top r + v^\top h + t + \epsilon,

with t shared by the programs of a task. With Gaussian priors that is a Gaussian process of linear kernels (Rasmussen &
Williams, Gaussian Processes for Machine Learning, 2006, section 2.7). How much of it is fitted grows with what was measured:
of :data:`STEPS` of priors the one is taken that errs least on tasks left out, in closed form (section 5.4.2, with blocks), and
none at all where none helps.
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

#: Standard deviations of the constant, and of the parts by resources and by embedding, from the least to the most.
STEPS: tuple[tuple[float, float, float], ...] = (
    (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.1, 0.0), (1.0, 0.3, 0.0), (1.0, 0.1, 0.1), (1.0, 0.3, 0.3), (1.0, 0.6, 0.6),
)  # fmt: skip
#: Of errors that tasks share, and of single programs.
_TASK, _PROGRAM = 0.15, 0.2
#: The centre of what is left is shrunk as if so many tasks more had shown none.
_TASKS_WITHOUT = 2
#: A step has to be better than a simpler one by so many standard errors over tasks, and by so much MAPE.
_SURE, _SURE_OF_CONSTANT = 1.0, 0.3
_LEAST_GAIN = 0.005
#: Programs of one task, and in all, that are fitted to at most.
_OF_TASK, _PROGRAMS = 32, 3000


class Fit(NamedTuple):
    """A correction, None where it is best to do nothing; log(measured / predicted) of m programs whose tasks were ``left`` out,
    and their ``tasks``; the mean over tasks of their MAPE (``error``), and that without a correction (``before``)."""

    correction: Correction | None
    left: FloatArray
    tasks: NDArray[np.str_]
    error: float
    before: float


def fit_correction(
    errors: FloatArray, tasks: Sequence[str], resources: FloatArray, embeddings: FloatArray, seed: int = 0
) -> Fit:
    """Fit to log(measured / predicted) (n,) of programs of these tasks; ``resources`` (n, r) and ``embeddings`` (n, h) are what
    the network takes and makes of them. PredictorError: no programs."""
    if not len(errors):
        raise PredictorError("a correction needs measured programs")
    rows = _chosen(np.asarray(tasks), seed)
    errors, parts = errors[rows], [resources[rows], embeddings[rows]]
    names, task = np.unique(np.asarray(tasks)[rows], return_inverse=True)
    means = [part.mean(0) for part in parts]
    centred = [part - mean for part, mean in zip(parts, means, strict=True)]
    # each part with a mean square of 1 over the programs
    scales = [1 / max(np.sqrt((part**2).sum(1).mean()), 1e-9) for part in centred]
    centred = [scale * part for scale, part in zip(scales, centred, strict=True)]
    kernels = [np.ones((len(rows), len(rows))), *(part @ part.T for part in centred)]
    noise = _TASK**2 * (task[:, None] == task[None, :]) + _PROGRAM**2 * np.eye(len(rows))
    best, left, shift, alpha = STEPS[0], errors, 0.0, np.zeros(len(rows))
    before = of_task = _by_task(errors, task)
    # of one task there is nothing to leave out: the constant alone
    for step in STEPS[1 : None if len(names) > 1 else 2]:
        inverse = np.linalg.inv(sum((sd**2 * kernel for sd, kernel in zip(step, kernels, strict=True)), noise))
        without = left_out(inverse, errors, task) if len(names) > 1 else errors - errors.mean()
        # predictions that are too long weigh more: what is left is centred where the mean error is least
        centre = least_mape_shift(without, task) * len(names) / (len(names) + _TASKS_WITHOUT)
        tried = _by_task(without - centre, task)
        gained = of_task - tried
        sure = _SURE if best[0] else _SURE_OF_CONSTANT
        if gained.mean() > max(sure * gained.std() / math.sqrt(len(names)), _LEAST_GAIN):
            best, of_task, left, shift, alpha = step, tried, without - centre, centre, inverse @ errors
    if not any(best):
        return Fit(None, left, names[task], float(of_task.mean()), float(before.mean()))
    constant = best[0] ** 2 * float(alpha.sum()) + shift
    weights = np.concatenate(
        [sd**2 * scale * (part.T @ alpha) for sd, scale, part in zip(best[1:], scales, centred, strict=True)]
    )
    shown = np.concatenate([part / scale for part, scale in zip(centred, scales, strict=True)], axis=1) @ weights
    correction = Correction(constant, np.concatenate(means), weights, float(shown.min()), float(shown.max()))
    return Fit(correction, left, names[task], float(of_task.mean()), float(before.mean()))


def _by_task(errors: FloatArray, task: NDArray[np.int64]) -> FloatArray:
    """MAPE of each task, of log(measured / predicted)."""
    mapes: FloatArray = np.bincount(task, np.abs(np.expm1(-errors))) / np.bincount(task)
    return mapes


def _chosen(tasks: NDArray[np.str_], seed: int) -> NDArray[np.int64]:
    """Numbers of at most so many programs of each task, and in all."""
    order = np.random.default_rng(seed).permutation(len(tasks))
    _, task = np.unique(tasks[order], return_inverse=True)
    seen: dict[int, int] = {}
    kept = []
    for row, number in zip(order, task, strict=True):
        seen[number] = seen.get(number, 0) + 1
        if seen[number] <= _OF_TASK:
            kept.append((seen[number], int(row)))
    return np.sort([row for _, row in sorted(kept)[:_PROGRAMS]]).astype(np.int64)
