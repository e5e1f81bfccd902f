r"""What measurements add to predictions: a Gaussian process on the errors of log latency.

The predictor stays as it was trained. What is learned while tuning is how far it is off near the programs measured:
residuals :math:`r = \log(\text{measured} / \text{predicted})`, as a function of the program's embedding :math:`z` and
its task :math:`t`, with the covariance

.. math:: k = c + s\,e^{-d^2 / 2 l^2} + [t = t'] (o + w\,e^{-d^2 / 2 l^2}) + [i = j]\,n, \quad d = |z - z'|

of an offset common to all programs (c), a smooth part that tasks share (s), a task's own offset (o) and smooth part (w), and
noise (n). Far from everything measured the correction returns to 0, the predictor's own word: nothing it knew is lost,
which gradient steps on its weights could not promise. A few hundred records are fitted in milliseconds, in closed form.

Leave-one-out and leave-task-out predictions are exact and cost nothing beyond the inverse (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, eqs. 5.10 to 5.12). They choose among few kernels, decide whether tasks may
learn from each other, and roll back to no correction where that was better. Intervals are conformal: standardised
leave-one-out errors set their width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Records that kernels are compared on, the latest: a hundred inverses of this size take a second.
_COMPARED = 256
#: Least spread of residuals that is believed, log seconds: labels themselves repeat to a few per cent.
_LEAST = 0.03
#: Shares of a task's spread that are noise, and length scales relative to the median distance of programs.
_NOISE_SHARES = (0.05, 0.25, 0.6)
_LENGTHS = (0.5, 1.0, 2.0)
#: A task takes part in leave-task-out with so many records.
_PER_TASK = 2


@dataclass(frozen=True)
class Kernel:
    """Variances in squared log seconds, and the length scale in units of the embedding; see the module's text."""

    noise: float
    offset: float = 0.0
    own: float = 0.0
    shared: float = 0.0
    common: float = 0.0
    length: float = 1.0

    def covariance(self, z: FloatArray, task: IntArray, z2: FloatArray, task2: IntArray) -> FloatArray:
        """Covariance without noise, (n, m), of programs z (n, d) and z2 (m, d) of tasks (n,) and (m,)."""
        near = np.exp(-0.5 * squared_distances(z, z2) / self.length**2)
        same = task[:, None] == task2[None, :]
        return self.common + self.shared * near + same * (self.offset + self.own * near)

    @property
    def variance(self) -> float:
        """Of one program's residual before anything is measured, without noise."""
        return self.common + self.shared + self.offset + self.own


@dataclass(frozen=True)
class LeaveOut:
    """Errors of predictions of records from the others.

    Attributes
    ----------
    error, deviation
        Leaving one record out: measured minus predicted residual, and the predicted standard deviation, (n,).
    """

    error: FloatArray
    deviation: FloatArray

    @property
    def log_density(self) -> float:
        """Mean log predictive density."""
        terms = np.log(self.deviation) + 0.5 * (self.error / self.deviation) ** 2
        return float(-terms.mean()) - 0.5 * math.log(2 * math.pi)

    @property
    def mean_square(self) -> float:
        """Mean squared error."""
        return float(np.mean(self.error**2))


class Correction:
    """A fitted correction; make one with :func:`fit_correction`.

    Parameters
    ----------
    kernel
        The covariance.
    z, task, residual
        Records: embeddings (n, d), tasks (n,), log(measured / predicted) (n,); n may be 0.
    """

    def __init__(self, kernel: Kernel, z: FloatArray, task: IntArray, residual: FloatArray) -> None:
        self.kernel = kernel
        self._z, self._task = z, task
        self._inverse = _inverse(kernel, z, task)
        self._alpha = self._inverse @ residual
        self.left_out = _leave_one_out(self._inverse, self._alpha)

    def __len__(self) -> int:
        return len(self._task)

    def mean(self, z: FloatArray, task: int) -> FloatArray:
        """Expected residual, log seconds, (m,), of programs of one task."""
        return self._cross(z, task) @ self._alpha

    def deviation(self, z: FloatArray, task: int) -> FloatArray:
        """Standard deviation of a measurement's residual, log seconds, (m,), of programs of one task."""
        cross = self._cross(z, task)
        explained = ((cross @ self._inverse) * cross).sum(1)
        return np.sqrt(np.maximum(self.kernel.variance - explained, 0.0) + self.kernel.noise)

    def _cross(self, z: FloatArray, task: int) -> FloatArray:
        tasks = np.full(len(z), task, dtype=np.int64)
        return self.kernel.covariance(z, tasks, self._z, self._task)

    def width(self, coverage: float) -> float | None:
        """Standard deviations that an interval reaches to either side; None with too few records to tell.

        The conformal quantile of the standardised leave-one-out errors.
        """
        scores = np.sort(np.abs(self.left_out.error) / self.left_out.deviation)
        rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
        return float(scores[rank - 1]) if 0 < rank <= len(scores) else None


def fit_correction(
    z: FloatArray, task: IntArray, residual: FloatArray, *, may_share: bool = True, common: float = 0.0
) -> Correction:
    """The correction whose kernel predicts left-out records best; no correction where that predicts them better.

    Parameters
    ----------
    z, task, residual
        Records in the order in which they were measured: (n, d), (n,), (n,).
    may_share
        Whether tasks may learn from each other, which they then do if it helps tasks that are left out.
    common
        Variance of an offset common to all programs, for a device the predictor never saw.
    """
    if not len(residual):
        return Correction(Kernel(_LEAST**2), z, task, residual)
    rows = slice(max(0, len(residual) - _COMPARED), None)
    recent = (z[rows], task[rows], residual[rows])
    kernels = list(_candidates(*recent))
    if may_share and _tasks_help_each_other(kernels, *recent, common):
        # Leaving one record out does not tell these from the others: a task's own records say it all.
        kernels = [_sharing(kernel, common) for kernel in kernels]
    scored = [(_left_out(kernel, *recent), kernel) for kernel in kernels]
    left_out, kernel = max(scored, key=lambda pair: pair[0].log_density)
    nothing = float(np.mean(recent[2] ** 2))
    if left_out.mean_square > nothing:
        kernel = Kernel(max(nothing, _LEAST**2))
    return Correction(kernel, z, task, residual)


def squared_distances(a: FloatArray, b: FloatArray) -> FloatArray:
    """Squared Euclidean distances of rows, (n, d) and (m, d) -> (n, m)."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.maximum(squares, 0.0)


def _candidates(z: FloatArray, task: IntArray, residual: FloatArray) -> Iterator[Kernel]:
    """Kernels within tasks, scaled to the spread of the residuals."""
    tasks, number, counts = np.unique(task, return_inverse=True, return_counts=True)
    means = np.bincount(number, weights=residual) / counts
    offset = max(float(np.mean(means**2)), _LEAST**2)
    within = float(np.sum((residual - means[number]) ** 2)) / max(len(residual) - len(tasks), 1)
    within = max(within, _LEAST**2)
    distances = np.sqrt(squared_distances(z, z))
    apart = distances[distances > 1e-9]
    typical = float(np.median(apart)) if len(apart) else 1.0
    yield Kernel(within, offset, length=typical)
    for share in _NOISE_SHARES:
        for length in _LENGTHS:
            yield Kernel(share * within, offset, (1 - share) * within, length=length * typical)


def _sharing(kernel: Kernel, common: float) -> Kernel:
    """Half of what was a task's own is shared."""
    own = 0.5 * kernel.own
    offset = 0.5 * kernel.offset
    return replace(kernel, own=own, offset=offset, shared=own + offset, common=common)


def _tasks_help_each_other(
    kernels: list[Kernel], z: FloatArray, task: IntArray, residual: FloatArray, common: float
) -> bool:
    """Whether a task's residuals are predicted better from other tasks than not at all."""
    tasks, counts = np.unique(task, return_counts=True)
    groups = [np.flatnonzero(task == t) for t in tasks[counts >= _PER_TASK]]
    if len(groups) < 2:
        return False
    rows = np.concatenate(groups)
    nothing = float(np.mean(residual[rows] ** 2))
    kernel = _sharing(kernels[len(kernels) // 2], common)
    inverse = _inverse(kernel, z, task)
    alpha = inverse @ residual
    errors = [np.linalg.solve(inverse[np.ix_(group, group)], alpha[group]) for group in groups]
    return float(np.mean(np.concatenate(errors) ** 2)) < nothing


def _left_out(kernel: Kernel, z: FloatArray, task: IntArray, residual: FloatArray) -> LeaveOut:
    inverse = _inverse(kernel, z, task)
    return _leave_one_out(inverse, inverse @ residual)


def _leave_one_out(inverse: FloatArray, alpha: FloatArray) -> LeaveOut:
    precision = np.diag(inverse)
    return LeaveOut(alpha / precision, 1 / np.sqrt(precision))


def _inverse(kernel: Kernel, z: FloatArray, task: IntArray) -> FloatArray:
    from scipy.linalg import cho_factor, cho_solve

    if not len(task):
        return np.zeros((0, 0))
    covariance = kernel.covariance(z, task, z, task)
    covariance[np.diag_indices(len(task))] += kernel.noise
    inverse: FloatArray = cho_solve(cho_factor(covariance, lower=True), np.eye(len(task)))
    return inverse
