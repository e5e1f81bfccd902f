r"""What a few measurements of a device say of a predictor's errors on it, without training the network again.

Errors are a constant of the device, a part that goes with what bounds a program there (the features of program and device
together, and of the compiled code), and a part that goes with what the network sees in it (its embedding):

.. math:: \log(y / f) = c + w^\top r + v^\top h + t + \epsilon,

with t shared by the programs of a task. With Gaussian priors that is a Gaussian process of linear kernels (Rasmussen &
Williams, Gaussian Processes for Machine Learning, 2006, section 2.7). How much of it is fitted grows with what was measured:
of :data:`STEPS` of priors the one is taken that errs least on tasks left out, in closed form (section 5.4.2, with blocks), and
none at all where none helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError

FloatArray = NDArray[np.float64]

#: Standard deviations of the constant, and of the parts by resources and by embedding, from the least to the most.
STEPS: tuple[tuple[float, float, float], ...] = (
    (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.1, 0.0), (1.0, 0.3, 0.0), (1.0, 0.1, 0.1), (1.0, 0.3, 0.3), (1.0, 0.6, 0.6),
)  # fmt: skip
#: Of errors that tasks share, and of single programs.
_TASK, _PROGRAM = 0.15, 0.2
#: A step has to be better than a simpler one by this part.
_BETTER = 0.02
#: Programs of one task, and in all, that are fitted to at most.
_OF_TASK, _PROGRAMS = 32, 3000


@dataclass(frozen=True)
class Correction:
    """What is added to the logarithm of predictions on a device: ``constant``, and ``weights`` (d,) of inputs less ``mean``
    (d,), between ``low`` and ``high``, where the parts of the measured programs were. ``error`` and ``before`` are the mean
    absolute logarithms of measured over predicted on tasks left out, with it and without."""

    constant: float
    mean: FloatArray
    weights: FloatArray
    low: float
    high: float
    error: float
    before: float
    tasks: int

    def logs(self, inputs: FloatArray) -> FloatArray:
        """To be added for programs with these inputs (n, d), (n,)."""
        return self.constant + np.clip((inputs - self.mean) @ self.weights, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: [float(f"{v:.6g}") for v in value] if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Correction:
        """Back from :meth:`to_json` (ValueError: numbers that are not finite, or do not belong together)."""
        made = cls(**{**state, **{name: np.asarray(state[name], dtype=np.float64) for name in ("mean", "weights")}})
        if not all(np.isfinite(value).all() for value in vars(made).values()) or made.mean.shape != made.weights.shape:
            raise ValueError("a correction must be finite, with as many weights as means")
        return made


def fit_correction(
    errors: FloatArray, tasks: Sequence[str], resources: FloatArray, embeddings: FloatArray, seed: int = 0
) -> Correction | None:
    """Fit to log(measured / predicted) (n,) of programs of these tasks; None where nothing is better than nothing.

    ``resources`` (n, r) and ``embeddings`` (n, h) are what the network takes and makes of them. PredictorError: no programs.
    """
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
    best: tuple[float, tuple[float, ...], FloatArray] | None = None
    for step in STEPS:
        inverse = np.linalg.inv(sum((sd**2 * kernel for sd, kernel in zip(step, kernels, strict=True)), noise))
        left = _left_out(inverse, errors, task) if step[0] else errors
        if len(names) < 2 and step[0]:
            left = errors - errors.mean()  # nothing to leave out: the constant alone
        error = float(np.mean([np.abs(left[task == number]).mean() for number in range(len(names))]))
        if best is None or error < (1 - _BETTER) * best[0]:
            best = error, step, inverse @ errors
        if len(names) < 2 and step[0]:
            break
    assert best is not None
    error, step, alpha = best
    if not any(step):
        return None
    before = float(np.mean([np.abs(errors[task == number]).mean() for number in range(len(names))]))
    weights = np.concatenate(
        [sd**2 * scale * (part.T @ alpha) for sd, scale, part in zip(step[1:], scales, centred, strict=True)]
    )
    shown = np.concatenate([part / scale for part, scale in zip(centred, scales, strict=True)], axis=1) @ weights
    constant = step[0] ** 2 * float(alpha.sum())
    return Correction(
        constant, np.concatenate(means), weights, float(shown.min()), float(shown.max()), error, before, len(names)
    )


def _left_out(inverse: FloatArray, errors: FloatArray, task: NDArray[np.int64]) -> FloatArray:
    """Errors that are left on each task by what the others say."""
    solved, left = inverse @ errors, np.empty_like(errors)
    for number in np.unique(task):
        at = np.flatnonzero(task == number)
        left[at] = np.linalg.solve(inverse[np.ix_(at, at)], solved[at])
    return left


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
