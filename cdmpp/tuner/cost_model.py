r"""A cost model and the profiler (as builder and runner), to replace MetaSchedule's own. Evolutionary search asks for some
thousand predictions to measure sixteen programs, for many of them repeatedly. So the network's output is cached before the
correction is applied: it stays valid when measurements change the predictions.

The predictor stays as it was trained. Tuning only learns its error near the measured programs: a Gaussian process models the
residuals :math:`r = \log(\text{measured} / \text{predicted})` as a function of the program's embedding :math:`z` and
its task :math:`t`, with the covariance

.. math:: k = c + s\,e^{-d^2 / 2 l^2} + [t = t'] (o + w\,e^{-d^2 / 2 l^2}) + [i = j]\,n, \quad d = |z - z'|

of an offset common to all programs (c), a smooth part that tasks share (s), a task's own offset (o) and smooth part (w), and
noise (n). Far from all measured programs the correction returns to 0, so the prediction is the predictor's own. Nothing that
it knew is lost; gradient steps on its weights could not promise that. Fitting a few hundred records takes milliseconds.

Leave-one-out and leave-task-out predictions are exact and cost nothing beyond the inverse (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, eqs. 5.10 to 5.12). They select one of a few kernels, decide whether tasks learn
from each other, and select no correction if that is better. Intervals are conformal, by standardised leave-one-out errors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel

from cdmpp.device import Device, get_device
from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import signed_log1p
from cdmpp.predictor.pair_features import estimate_s
from cdmpp.predictor.uncertainty import left_out, squared_distances
from cdmpp.profiler.engine import label
from cdmpp.program import import_tvm
from cdmpp.program.ast import CompactAST
from cdmpp.tuner.candidates import CandidateCache, funcs_of, hashes_of, task_hash
from cdmpp.tuner.config import TuneConfig

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.tuner.validity import ValidityGuard

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Variance, in squared log seconds, of the error common to all predictions for a device not trained on: a factor of e.
_UNSEEN_DEVICE = 1.0
#: Kernels are compared on so many of the latest records: a hundred inverses of this size take a second.
_COMPARED = 256
#: Lower bound of the residuals' spread, log seconds: labels themselves repeat to a few per cent.
_LEAST = 0.03
#: Kernels to compare: shares of noise in a task's variance, and length scales relative to the median distance of programs.
_NOISE_SHARES = (0.05, 0.25, 0.6)
_LENGTHS = (0.5, 1.0, 2.0)
#: Records that a task needs to take part in leave-task-out.
_PER_TASK = 2


# -- before anything is measured -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """Programs as input to the correction: log of the predicted seconds, float64 (n,), and embeddings, float64 (n, d)."""

    log_s: FloatArray
    z: FloatArray

    def __len__(self) -> int:
        return len(self.log_s)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Encoded:
        return Encoded(self.log_s[rows], self.z[rows])

    @classmethod
    def stack(cls, parts: Sequence[Encoded]) -> Encoded:
        """Concatenate one or more parts."""
        return cls(np.concatenate([p.log_s for p in parts]), np.concatenate([p.z for p in parts]))


class PredictorPrior:
    """A trained predictor: its predictions, and its network's embeddings of programs on the device. For a device that it was
    not trained on it extrapolates, with a warning. Raises PredictorError if it was trained on no device of this kind."""

    def __init__(self, predictor: Predictor, device: Device) -> None:
        self._predictor, self._device = predictor, device
        #: Variance of the error common to all predictions on the device, squared log seconds.
        self.common = 0.0
        if device.name not in predictor.devices:
            self.common = _UNSEEN_DEVICE
            trained_on = ", ".join(predictor.devices)
            if device.kind not in {predictor.specs[name].kind for name in predictor.devices}:
                raise PredictorError(
                    f"the predictor was trained on {trained_on} and never saw a {device.kind}: it says nothing about "
                    f"{device.name}; finetune it on records of that device, or tune without a predictor"
                )
            logger.warning(
                "the predictor was trained on %s, not on %s: its predictions are extrapolations until some "
                "programs have been measured",
                trained_on,
                device.name,
            )

    def encode(self, asts: Sequence[CompactAST]) -> Encoded:
        """Predict and embed n >= 1 programs in one pass through the network."""
        import torch

        from cdmpp.predictor.encoding import inference_batches
        from cdmpp.predictor.network import evaluating

        predictor = self._predictor
        arrays = predictor.encode(asts, [self._device], np.zeros(len(asts), dtype=np.int64))
        labels = np.empty(len(asts))
        z = np.empty((len(asts), predictor.network.config.embedding_dim))
        with evaluating(predictor.network):
            for rows in inference_batches(arrays.packed.lengths, 1024):
                batch, context = arrays.batch(rows, torch.device("cpu"))
                embedding = predictor.network.embed(batch, context.device)
                labels[rows] = predictor.network.decode(embedding, context).double().numpy()
                z[rows] = embedding.double().numpy()
        corrected = predictor.corrected([self._device.name], arrays, z)
        transform = predictor.transform
        reference = estimate_s(asts, self._device) if transform.relative else None
        latency_s = transform.inverse(labels, reference) * np.exp(corrected)
        return Encoded(np.log(latency_s), z)

    def half_width(self, coverage: float) -> float | None:
        """Distance from a prediction to the farther end of its interval, log seconds, by the predictor's calibration
        (:mod:`cdmpp.predictor.uncertainty`); None if it has no calibration for this device and coverage."""
        calibration = self._predictor.calibration_of(device=self._device)
        if calibration is None or not calibration.supports(coverage):
            return None
        return float(np.abs(calibration.ends(self._device.name, coverage)).max())


class AnalyticalPrior:
    """No predictor: :mod:`cdmpp.predictor.pair_features`; embeddings are logarithms of sums and maxima of all leaf features."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.common = _UNSEEN_DEVICE

    def encode(self, asts: Sequence[CompactAST]) -> Encoded:
        z = np.stack([np.concatenate([ast.leaves.sum(0), ast.leaves.max(0)]) for ast in asts])
        return Encoded(np.log(estimate_s(asts, self._device)), signed_log1p(z.astype(np.float64)))

    def half_width(self, coverage: float) -> None:
        """None: the error of the estimate is unknown."""


# -- the correction ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Variances in squared log seconds, and the length scale in units of the embedding; see the module docstring."""

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
        """Prior variance of one program's residual, without noise."""
        return self.common + self.shared + self.offset + self.own


class Correction:
    """A kernel with records: embeddings (n, d), tasks (n,), log(measured / predicted) (n,); n may be 0. :func:`fit_correction`
    makes it. ``error`` and ``error_deviation``, (n,), are leave-one-out: the measured minus the predicted residual of each
    record, and the predicted standard deviation."""

    def __init__(self, kernel: Kernel, z: FloatArray, task: IntArray, residual: FloatArray) -> None:
        self.kernel = kernel
        self._z, self._task = z, task
        self._inverse = _inverse(kernel, z, task)
        self._alpha = self._inverse @ residual
        precision = np.diag(self._inverse)
        self.error, self.error_deviation = self._alpha / precision, 1 / np.sqrt(precision)

    def __len__(self) -> int:
        return len(self._task)

    @property
    def mean_square(self) -> float:
        """Mean squared leave-one-out error of the records."""
        return float(np.mean(self.error**2))

    @property
    def log_density(self) -> float:
        """Mean leave-one-out log predictive density of the records."""
        terms = np.log(self.error_deviation) + 0.5 * (self.error / self.error_deviation) ** 2
        return float(-terms.mean()) - 0.5 * math.log(2 * math.pi)

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
        """Half-width of an interval in standard deviations (a conformal quantile); None with too few records."""
        scores = np.sort(np.abs(self.error) / self.error_deviation)
        rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
        return float(scores[rank - 1]) if 0 < rank <= len(scores) else None


def fit_correction(z: FloatArray, task: IntArray, residual: FloatArray, common: float = 0.0) -> Correction:
    """The correction whose kernel predicts left-out records best, or no correction if that predicts them better. The records
    (n, d), (n,), (n,) are in the order of measurement. `common` is the variance of an offset common to all programs, for a
    device that the predictor was not trained on."""
    if not len(residual):
        return Correction(Kernel(_LEAST**2), z, task, residual)
    rows = slice(max(0, len(residual) - _COMPARED), None)
    recent = (z[rows], task[rows], residual[rows])
    kernels = list(_candidates(*recent))
    if _tasks_help(kernels, *recent, common):
        # Leave-one-out cannot tell shared kernels from the others: the task's other records already predict the one left out.
        kernels = [_sharing(kernel, common) for kernel in kernels]
    best = max((Correction(kernel, *recent) for kernel in kernels), key=lambda c: c.log_density)
    kernel, nothing = best.kernel, float(np.mean(recent[2] ** 2))
    if best.mean_square > nothing:
        kernel = Kernel(max(nothing, _LEAST**2))
    return Correction(kernel, z, task, residual)


def _candidates(z: FloatArray, task: IntArray, residual: FloatArray) -> Iterator[Kernel]:
    """Kernels that share nothing between tasks, scaled to the spread of the residuals."""
    tasks, number, counts = np.unique(task, return_inverse=True, return_counts=True)
    means = np.bincount(number, weights=residual) / counts
    offset = max(float(np.mean(means**2)), _LEAST**2)
    within = float(np.sum((residual - means[number]) ** 2)) / max(len(residual) - len(tasks), 1)
    within = max(within, _LEAST**2)
    distances = np.sqrt(squared_distances(z, z))
    apart = distances[distances > 1e-5 * np.sqrt((z**2).sum(1).max())]  # embeddings have the accuracy of float32
    typical = float(np.median(apart)) if len(apart) else 1.0
    yield Kernel(within, offset, length=typical)
    for share in _NOISE_SHARES:
        for length in _LENGTHS:
            yield Kernel(share * within, offset, (1 - share) * within, length=length * typical)


def _sharing(kernel: Kernel, common: float) -> Kernel:
    """The kernel with half of each task's own variance shared between tasks."""
    own, offset = 0.5 * kernel.own, 0.5 * kernel.offset
    return replace(kernel, own=own, offset=offset, shared=own + offset, common=common)


def _tasks_help(kernels: list[Kernel], z: FloatArray, task: IntArray, residual: FloatArray, common: float) -> bool:
    """Whether predicting a task's residuals from other tasks is better than no correction."""
    tasks, counts = np.unique(task, return_counts=True)
    groups = [np.flatnonzero(task == t) for t in tasks[counts >= _PER_TASK]]
    if len(groups) < 2:
        return False
    rows = np.concatenate(groups)
    left = left_out(_inverse(_sharing(kernels[len(kernels) // 2], common), z, task), residual, task)
    return float(np.mean(left[rows] ** 2)) < float(np.mean(residual[rows] ** 2))


def _inverse(kernel: Kernel, z: FloatArray, task: IntArray) -> FloatArray:
    if not len(task):
        return np.zeros((0, 0))
    covariance = kernel.covariance(z, task, z, task)
    covariance[np.diag_indices(len(task))] += kernel.noise
    inverse: FloatArray = cho_solve(cho_factor(covariance, lower=True), np.eye(len(task)))
    return inverse


# -- the model -----------------------------------------------------------------------------------------------

#: The correction is fitted to so many of the latest records: its inverse takes a third of a second.
_MAX_RECORDS = 1024
#: Records from which intervals come from the correction; with fewer they come from the prior.
_OWN_INTERVALS = 20


class OnlineModel:
    """Predicts seconds on one device from a prior, and learns from measurements."""

    def __init__(self, prior: PredictorPrior | AnalyticalPrior) -> None:
        self.prior = prior
        #: Number of each task that has records; -1 stands for all others.
        self._tasks: dict[str, int] = {}
        #: (task, program) -> log of the prior's prediction, embedding, log of the measured seconds; oldest first.
        self._records: dict[tuple[str, str], tuple[float, FloatArray, float]] = {}
        self._correction: Correction | None = None
        #: Programs that did not run, for :class:`cdmpp.tuner.CostModel`.
        self.failed: set[str] = set()

    def predict(self, task: str, programs: Encoded) -> FloatArray:
        """Predicted seconds of programs of one task, float64 (n,)."""
        if self._correction is None:
            return np.exp(programs.log_s)
        return np.exp(programs.log_s + self._correction.mean(programs.z, self._tasks.get(task, -1)))

    def interval(self, task: str, programs: Encoded, coverage: float) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends of the measurement's interval in seconds, (n,) each: (0, inf) if it is unknown. With too few
        records it is the prior's interval. It is conformal, but that holds for random programs, and a search picks the best."""
        seconds, correction = self.predict(task, programs), self._correction
        of_prior = self.prior.half_width(coverage)
        half = np.full(len(programs), math.inf if of_prior is None else of_prior)
        if correction is not None and len(correction) >= _OWN_INTERVALS:
            width = correction.width(coverage)
            if width is not None:
                half = width * correction.deviation(programs.z, self._tasks.get(task, -1))
        with np.errstate(over="ignore"):
            return seconds * np.exp(-half), seconds * np.exp(half)

    def learn(self, task: str, hashes: Sequence[str], programs: Encoded, latency_s: Sequence[float] | FloatArray) -> None:
        """Add measurements of one task, finite and above 0 (else PredictorError); call :meth:`fit` after the last."""
        labels = np.asarray(latency_s, dtype=np.float64)
        if not (np.isfinite(labels) & (labels > 0)).all():
            raise PredictorError("measured latencies must be finite and above 0")
        self._tasks.setdefault(task, len(self._tasks))
        for digest, log_s, z, measured in zip(hashes, programs.log_s, programs.z, np.log(labels), strict=True):
            self._records.pop((task, digest), None)
            self._records[task, digest] = (float(log_s), z, float(measured))

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
        fitted = self._correction
        return {
            "records": len(self._records),
            "tasks": len(self._tasks),
            "kernel": None if fitted is None else vars(fitted.kernel),
            "left_out_error": None if fitted is None else fitted.mean_square**0.5,
        }


import_tvm()

#: Programs whose network outputs are cached: some 30 MB.
_CACHED = 50_000


@derived_object
class CostModel(PyCostModel):
    """A pretrained MetaSchedule cost model, in seconds, that learns from the tuning's measurements: pass it as ``cost_model``
    to ``ms.tune_tir``, ``ms.relax_integration.tune_relax`` etc. (examples, and what saves time: docs/metaschedule.md).

    `predictor` is a predictor, its folder, or ``"default"``; None is an analytical estimate. `device` includes its share:
    ``this-cpu@1``. Raises PredictorError if the predictor was trained on no device of this kind, UnknownDeviceError."""

    def __init__(self, predictor: Predictor | str | Path | None, device: str | Device) -> None:
        super().__init__()
        from cdmpp.predictor.predictor import load_predictor

        self.device = get_device(device)
        self.model = OnlineModel(
            AnalyticalPrior(self.device) if predictor is None else PredictorPrior(load_predictor(predictor), self.device)
        )
        #: Network outputs of the programs predicted so far.
        self.cache = CandidateCache(self._encode_asts, _CACHED)

    @property
    def pretrained(self) -> bool:
        """Whether the predictor was trained on the device, so that its ranking of programs is useful before any measurement."""
        return self.model.prior.common == 0.0

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,): predicted runs per second; 0 for programs that failed when measured or cannot be read."""
        return 1.0 / self.predict_s(context, candidates)

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from measurements; failed ones are remembered."""
        latencies = []
        for result in results:
            run_s = [float(s) for s in result.run_secs or ()]
            latencies.append(label(run_s) if run_s and result.error_msg is None else None)
        self.learn(task_hash(context), hashes_of(candidates), funcs_of(candidates), latencies)
        self.model.fit()

    def predict_s(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Predicted seconds, float64 (n,); infinite for programs that failed or cannot be read."""
        seconds = np.full(len(candidates), np.inf)
        rows, programs = self._encode(candidates)
        if programs is not None:
            seconds[rows] = self.model.predict(task_hash(context), programs)
        return seconds

    def interval_s(self, context: Any, candidates: Sequence[Any], coverage: float) -> tuple[FloatArray, FloatArray]:
        """Interval ends in seconds, float64 (n,) each: (inf, inf) for failed programs, (0, inf) for unreadable ones."""
        low = np.where([digest in self.model.failed for digest in hashes_of(candidates)], np.inf, 0.0)
        high = np.full(len(candidates), np.inf)
        rows, programs = self._encode(candidates)
        if programs is not None:
            low[rows], high[rows] = self.model.interval(task_hash(context), programs, coverage)
        return low, high

    def learn(self, task: str, hashes: Sequence[str], funcs: Sequence[Any], latency_s: Sequence[float | None]) -> None:
        """Add measured programs of a task (its structural hash), None for failures; call ``model.fit()`` after the last."""
        ran = [(h, f, s) for h, f, s in zip(hashes, funcs, latency_s, strict=True) if s is not None]
        self.model.failed.update({*hashes} - {h for h, _, _ in ran})
        encoded = self.cache.get([h for h, _, _ in ran], [f for _, f, _ in ran])
        if encoded:
            known, seconds = [ran[i][0] for i in encoded], [ran[i][2] for i in encoded]
            self.model.learn(task, known, Encoded.stack(list(encoded.values())), seconds)

    def _encode(self, candidates: Sequence[Any]) -> tuple[list[int], Encoded | None]:
        """Indices of the candidates that can be read and have not failed, and their network outputs."""
        hashes = hashes_of(candidates)
        outputs = self.cache.get(hashes, funcs_of(candidates))
        known = {i: encoded for i, encoded in outputs.items() if hashes[i] not in self.model.failed}
        return list(known), Encoded.stack(list(known.values())) if known else None

    def _encode_asts(self, asts: Sequence[CompactAST]) -> list[Encoded]:
        programs = self.model.prior.encode(asts)
        return [programs.take([i]) for i in range(len(asts))]


@derived_object
class GuardedModel(PyCostModel):
    """A cost model's scores weighted by validity, only for a search: the session itself trains the wrapped model."""

    def __init__(self, cost_model: Any, guard: ValidityGuard) -> None:
        super().__init__()
        self._cost_model, self._guard = cost_model, guard

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,)."""
        scores = np.asarray(self._cost_model.predict(context, candidates), dtype=np.float64)
        return self._guard.scores(candidates, scores)


def make_cost_model(config: TuneConfig, device: Device) -> Any:
    """The cost model of a configuration."""
    from tvm.s_tir.meta_schedule import cost_model

    if config.cost_model == "cdmpp":
        return CostModel(config.predictor, device)
    if config.cost_model == "xgb":
        return cost_model.XGBModel(
            extractor="per-store-feature", config=cost_model.xgb_model.XGBConfig(seed=config.seed), verbose_eval=False
        )
    return cost_model.RandomModel(seed=config.seed)
