"""Validity in MetaSchedule's search: what it starts from, what it scores, and what is measured."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError, TunerError
from cdmpp.program.ast import compact_asts
from cdmpp.program.tvm_env import import_tvm, structural_hash
from cdmpp.tuner.validity_features import pooled
from cdmpp.tuner.validity_online import OnlineValidity
from cdmpp.tuner.validity_population import initial_population

import_tvm()

from tvm.ir.utils import derived_object  # noqa: E402
from tvm.s_tir.meta_schedule.cost_model import PyCostModel  # noqa: E402

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.tuner.task_tuner import Candidate, TaskTuner
    from cdmpp.tuner.validity import ValidityModel

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

#: Programs whose features are kept: some 50 MB.
_CACHED = 20_000


class ValidityGuard:
    """Keeps a search from what will not run, and learns from what did not.

    Parameters
    ----------
    validity
        P(valid), learning.
    skip_below
        Candidates less likely valid than this are not measured and have a score of 0.
    probes
        So many of a round are measured all the same, the likeliest: the model may be wrong, and only measurements tell.
    sampled
        Random programs that a task's first candidates are chosen from.
    seed
        Of the first candidates.

    Raises
    ------
    TunerError
        ``skip_below`` is not a probability, or ``probes`` or ``sampled`` are below 1.
    """

    def __init__(
        self,
        validity: OnlineValidity,
        *,
        skip_below: float = 0.2,
        probes: int = 2,
        sampled: int = 128,
        seed: int = 0,
    ) -> None:
        if not 0 <= skip_below < 1:
            raise TunerError(
                f"candidates are skipped below a probability from 0 to below 1, got {skip_below:g}"
            )
        if probes < 1 or sampled < 1:
            raise TunerError(f"a guard needs one probe and one sample at least, got {probes} and {sampled}")
        self.validity = validity
        self._skip_below, self._probes, self._sampled, self._seed = skip_below, probes, sampled, seed
        self._features: OrderedDict[str, NDArray[np.float32] | None] = OrderedDict()

    def probability(self, context: Any, measures: Sequence[Any]) -> FloatArray:
        """P(valid) of MetaSchedule's candidates of one task, float64 (n,); 1 for what has no AST to judge by."""
        known, features = self._encode(context, measures)
        out = np.ones(len(measures))
        if features is not None:
            out[known] = self.validity.predict(features)
        return out

    def worth(self, context: Any, measures: Sequence[Any]) -> NDArray[np.bool_]:
        """Which candidates to measure, bool (n,)."""
        if not len(measures):
            return np.zeros(0, dtype=bool)
        p = self.probability(context, measures)
        likely = p >= self._skip_below
        if likely.sum() < self._probes:
            likely[np.argsort(-p, kind="stable")[: self._probes]] = True
        return likely

    def learn(self, context: Any, measures: Sequence[Any], worked: Sequence[bool]) -> None:
        """Take what became of candidates of one task."""
        hashes = _hashes(measures)
        known, features = self._encode(context, measures)
        if features is not None:
            self.validity.learn([hashes[i] for i in known], features, [worked[i] for i in known])

    def initial(self, tuner: TaskTuner, n: int, cost_model: Any = None) -> list[Candidate]:
        """The first candidates of a task, at most `n`: likely valid, unlike each other, and of the fastest that a cost
        model with a trained predictor foresees."""
        candidates = tuner.sample(self._sampled, self._seed)
        measures = [candidate.measure for candidate in candidates]
        usable, features = self._encode(tuner.context, measures)
        if features is None:
            return candidates[:n]
        log_s = None
        if getattr(cost_model, "pretrained", False):
            log_s = np.log(cost_model.predict_s(tuner.context, [measures[i] for i in usable]))
        chosen = initial_population(
            pooled(features), self.validity.predict(features), n, log_s=log_s, seed=self._seed
        )
        return [candidates[usable[i]] for i in chosen]

    def guarded(self, cost_model: Any) -> Any:
        """A cost model for the search that gives what is likely invalid low scores."""
        return GuardedModel(cost_model, self)

    def scores(self, context: Any, measures: Sequence[Any], scores: FloatArray) -> FloatArray:
        """Expected scores, float64 (n,): an invalid program is worth nothing."""
        p = self.probability(context, measures)
        # TVM's models may predict slightly negative throughputs.
        return np.where(p < self._skip_below, 0.0, p * np.maximum(scores, 0.0))

    def _encode(self, context: Any, measures: Sequence[Any]) -> tuple[list[int], NDArray[np.float32] | None]:
        """Numbers of the candidates that can be read, and their features, from the cache where they are there."""
        hashes = _hashes(measures)
        missing = {
            h: m.sch.mod["main"] for h, m in zip(hashes, measures, strict=True) if h not in self._features
        }
        if missing:
            self._features.update(zip(missing, self._compute(list(missing.values())), strict=True))
        found = [(i, row) for i, h in enumerate(hashes) if (row := self._features[h]) is not None]
        for digest in hashes:
            self._features.move_to_end(digest)
        while len(self._features) > _CACHED:
            self._features.popitem(last=False)
        return [i for i, _ in found], np.stack([row for _, row in found]) if found else None

    def _compute(self, funcs: list[Any]) -> list[NDArray[np.float32] | None]:
        try:
            return list(self.validity.features(compact_asts(funcs)))
        except ProgramError as err:
            if len(funcs) == 1:
                logger.debug("no validity of a candidate: %s", err)
                return [None]
            # One of them; find out which. This happens to few programs of few tasks.
            return [row for func in funcs for row in self._compute([func])]


def make_guard(
    validity: ValidityModel | str | Path | None, device: Device, seed: int
) -> ValidityGuard | None:
    """The guard of a tuning.

    Parameters
    ----------
    validity
        A model or its folder; ``"online"`` starts from nothing; None is no guard.

    Raises
    ------
    PredictorError
        The folder holds no model that this version reads.
    """
    from cdmpp.tuner.validity import ValidityModel

    if validity is None:
        return None
    model = None
    if not isinstance(validity, str) or validity != "online":
        model = validity if isinstance(validity, ValidityModel) else ValidityModel.load(validity)
    return ValidityGuard(OnlineValidity(model, device, seed), seed=seed)


@derived_object
class GuardedModel(PyCostModel):
    """A MetaSchedule cost model whose scores count validity; who measures tells the model itself what was learned."""

    def __init__(self, cost_model: Any, guard: ValidityGuard) -> None:
        super().__init__()
        self._cost_model, self._guard = cost_model, guard

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,)."""
        scores = np.asarray(self._cost_model.predict(context, candidates), dtype=np.float64)
        return self._guard.scores(context, candidates, scores)

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Let the model learn."""
        self._cost_model.update(context, candidates, results)

    def save(self, path: str) -> None:
        """Write the model."""
        self._cost_model.save(path)

    def load(self, path: str) -> None:
        """Read the model."""
        self._cost_model.load(path)


def _hashes(measures: Sequence[Any]) -> list[str]:
    return [structural_hash(measure.sch.mod["main"]) for measure in measures]
