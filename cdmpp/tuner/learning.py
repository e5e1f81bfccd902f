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

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.tuner.prior import Encoded, Prior

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


def fit_correction(z: FloatArray, task: IntArray, residual: FloatArray, common: float = 0.0) -> Correction:
    """The correction whose kernel predicts left-out records best; no correction where that predicts them better.

    Parameters
    ----------
    z, task, residual
        Records in the order in which they were measured: (n, d), (n,), (n,).
    common
        Variance of an offset common to all programs, for a device the predictor never saw.
    """
    if not len(residual):
        return Correction(Kernel(_LEAST**2), z, task, residual)
    rows = slice(max(0, len(residual) - _COMPARED), None)
    recent = (z[rows], task[rows], residual[rows])
    kernels = list(_candidates(*recent))
    if _tasks_help_each_other(kernels, *recent, common):
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


# -- the model -----------------------------------------------------------------------------------------------

FORMAT = "cdmpp-cost-model"
FORMAT_VERSION = 1

#: Records that the correction is fitted to, the latest: its inverse takes a third of a second.
_MAX_RECORDS = 1024
#: Records from which on intervals are the correction's; with fewer they are the prior's.
_OWN_INTERVALS = 20


class OnlineModel:
    """Predicts seconds on one device, and learns from measurements.

    Parameters
    ----------
    prior
        What is known at the start.

    Attributes
    ----------
    failed
        Hashes of programs that did not run; kept with what was learned, for who asks (:class:`cdmpp.tuner.CostModel`).
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._tasks: dict[str, int] = {}
        #: (task, program) -> log of the prior's prediction, embedding, log of the measured seconds; oldest first.
        self._records: dict[tuple[str, str], tuple[float, FloatArray, float]] = {}
        self._correction: Correction | None = None
        self.failed: set[str] = set()

    def __len__(self) -> int:
        return len(self._records)

    def predict(self, task: str, programs: Encoded) -> FloatArray:
        """Seconds of programs of one task, float64 (n,)."""
        if self._correction is None:
            return np.exp(programs.log_s)
        return np.exp(programs.log_s + self._correction.mean(programs.z, self._number(task)))

    def interval(self, task: str, programs: Encoded, coverage: float) -> tuple[FloatArray, FloatArray]:
        """Lowest and highest seconds that measurements fall between, (n,) each: (0, inf) where nothing tells.

        The prior's interval before there are enough records, then that of the corrected prediction; both conformal,
        though a search that picks the best of many programs is not the random choice their guarantee is for.
        """
        seconds, correction = self.predict(task, programs), self._correction
        width = None
        if correction is not None and len(correction) >= _OWN_INTERVALS:
            width = correction.width(coverage)
        if correction is not None and width is not None:
            half = width * correction.deviation(programs.z, self._number(task))
        else:
            of_prior = self.prior.half_width(coverage)
            half = np.full(len(programs), math.inf if of_prior is None else of_prior)
        with np.errstate(over="ignore"):
            return seconds * np.exp(-half), seconds * np.exp(half)

    def _number(self, task: str) -> int:
        """Of a task in the records; -1 of one that has none."""
        return self._tasks.get(task, -1)

    def learn(
        self, task: str, hashes: Sequence[str], programs: Encoded, latency_s: Sequence[float] | FloatArray
    ) -> None:
        """Take measurements of programs of one task; call :meth:`fit` when all are in.

        Raises
        ------
        PredictorError
            A latency is not finite and above 0.
        """
        labels = np.asarray(latency_s, dtype=np.float64)
        if not (np.isfinite(labels) & (labels > 0)).all():
            raise PredictorError("measured latencies must be finite and above 0")
        self._tasks.setdefault(task, len(self._tasks))
        for digest, log_s, z, label in zip(hashes, programs.log_s, programs.z, np.log(labels), strict=True):
            self._records.pop((task, digest), None)
            self._records[task, digest] = (float(log_s), z, float(label))

    def fit(self) -> None:
        """Fit the correction to the latest records."""
        if not self._records:
            return
        latest = list(self._records.items())[-_MAX_RECORDS:]
        task = np.array([self._tasks[name] for (name, _), _ in latest], dtype=np.int64)
        z = np.stack([record[1] for _, record in latest])
        residual = np.array([label - log_s for _, (log_s, _, label) in latest])
        self._correction = fit_correction(z, task, residual, self.prior.common)

    def describe(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        kernel = None if self._correction is None else self._correction.kernel
        return {
            "records": len(self._records),
            "tasks": len(self._tasks),
            "kernel": None if kernel is None else vars(kernel),
            "left_out_error": None
            if self._correction is None
            else self._correction.left_out.mean_square**0.5,
        }

    # -- storing ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write what was learned into one safetensors file; the predictor itself is not in it."""
        import torch

        from cdmpp.predictor.checkpoint import save_tensors

        records = list(self._records.values())
        depth = len(records[0][1]) if records else 0
        tensors = {
            "log_s": torch.tensor([r[0] for r in records], dtype=torch.float64),
            "z": torch.tensor(np.array([r[1] for r in records]).reshape(len(records), depth)),
            "label": torch.tensor([r[2] for r in records], dtype=torch.float64),
        }
        state = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "prior": self.prior.fingerprint,
            "keys": list(self._records),
            "failed": sorted(self.failed),
        }
        save_tensors(Path(path), tensors, {"state": json.dumps(state)})

    def load(self, path: str | Path) -> None:
        """Replace what was learned by what :meth:`save` wrote.

        Raises
        ------
        PredictorError
            Missing, damaged, or learned beside another predictor or for another device.
        """
        from cdmpp.predictor.checkpoint import load_tensors

        tensors, metadata = load_tensors(Path(path))
        try:
            state: Mapping[str, Any] = json.loads(metadata["state"])
            known = state["format"] == FORMAT and state["format_version"] == FORMAT_VERSION
            columns = [tensors[name].numpy() for name in ("log_s", "z", "label")]
            keys = [(str(task), str(digest)) for task, digest in state["keys"]]
            failed = {str(digest) for digest in state.get("failed", ())}
        except (KeyError, ValueError, TypeError) as err:
            raise PredictorError(f"{path}: not a complete cost model of cdmpp: {err!r}") from err
        if not known:
            raise PredictorError(f"{path}: not a cost model that this cdmpp reads")
        if state["prior"] != self.prior.fingerprint:
            raise PredictorError(f"{path}: learned beside another predictor or for another device")
        self._records = {
            key: (float(log_s), z, float(label)) for key, log_s, z, label in zip(keys, *columns, strict=True)
        }
        self.failed = failed
        self._tasks = {}
        for task, _ in keys:
            self._tasks.setdefault(task, len(self._tasks))
        self._correction = None
        self.fit()
