"""The cost model that MetaSchedule's search asks: predicted seconds of candidates, corrected by measurements.

Evolutionary search asks for some thousand predictions to measure sixteen programs. Candidates that it asks for again are
answered from a cache; what is cached is the network's output before the correction, so it holds when measurements
change what is predicted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError
from cdmpp.program.ast import compact_asts
from cdmpp.program.tvm_env import import_tvm, structural_hash
from cdmpp.tuner import interrupt
from cdmpp.tuner.online import Anchors, OnlineModel
from cdmpp.tuner.prior import Encoded, make_prior

import_tvm()

from tvm.ir.utils import derived_object  # noqa: E402
from tvm.s_tir.meta_schedule.cost_model import PyCostModel  # noqa: E402

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

#: Programs whose network outputs are kept: some 30 MB.
_CACHED = 50_000


@derived_object
class CostModel(PyCostModel):
    """A MetaSchedule cost model in seconds, pretrained, that learns from the measurements of the tuning.

    To be passed as ``cost_model`` to ``ms.tune_tir``, ``ms.relax_integration.tune_relax`` and the like::

        fused = cdmpp.tuner.deployment.import_network(cdmpp.program.network.load_network("mlp"))
        database = ms.relax_integration.tune_relax(
            fused.module, {}, {"kind": "llvm", "num-cores": 1}, "runs/mlp", 64,
            cost_model=cdmpp.tuner.CostModel("default", "this-cpu@1"),
            space=ms.space_generator.PostOrderApply(sch_rules="llvm", postprocs="llvm", mutator_probs="llvm"),
        )

    The rules of the space have to be named where TVM would take those for AVX-512 or tensor cores: cdmpp leaves out their
    intrinsics, which take half a minute to import (:func:`cdmpp.program.tvm_env.import_tvm` has them when asked to).

    Parameters
    ----------
    predictor
        A predictor, its folder, or ``"default"``; None starts from an analytical estimate.
    device
        The device that is tuned for, a name or a Device, with its share: ``this-cpu@1``.
    anchors
        Labelled validation programs on which learning must not add to the predictor's error.

    Attributes
    ----------
    model
        The :class:`~cdmpp.tuner.online.OnlineModel`.
    asked, computed
        Predictions asked for, and those that were not in the cache.

    Raises
    ------
    PredictorError
        The predictor never saw a device of this kind.
    UnknownDeviceError
        No such device.
    """

    def __init__(
        self,
        predictor: Predictor | str | Path | None,
        device: str | Device,
        *,
        anchors: Anchors | None = None,
    ) -> None:
        super().__init__()
        from cdmpp.device import get_device
        from cdmpp.predictor.predictor import load_predictor

        self.device = get_device(device) if isinstance(device, str) else device
        loaded = None if predictor is None else load_predictor(predictor)
        self.model = OnlineModel(make_prior(loaded, self.device), anchors)
        self.asked = self.computed = 0
        self._cache: OrderedDict[str, Encoded | None] = OrderedDict()
        #: Seconds that have a score of 1, by task; they change with measurements only, so that scores compare.
        self._unit_s: dict[str, float] = {}

    @property
    def pretrained(self) -> bool:
        """Whether a predictor was trained on the device: before any measurement, its order of programs is worth something."""
        return self.model.prior.common == 0.0

    # -- what MetaSchedule calls -----------------------------------------------------------------------------

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,), higher is better: seconds of the best program known over predicted seconds.

        Programs that failed when they were measured, and those that cannot be read, have a score of 0.
        """
        interrupt.answer()
        seconds = self.predict_s(context, candidates)
        task = _task(context)
        finite = seconds[np.isfinite(seconds)]
        if task not in self._unit_s and len(finite):
            self._unit_s[task] = float(finite.min())
        return self._unit_s.get(task, 1.0) / seconds

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from measurements; failed ones are remembered."""
        from cdmpp.profiler.statistics import label

        hashes, latencies = _hashes(candidates), []
        for result in results:
            run_s = [float(s) for s in result.run_secs or ()]
            latencies.append(label(run_s) if run_s and result.error_msg is None else None)
        self.learn(_task(context), hashes, [c.sch.mod["main"] for c in candidates], latencies)

    def save(self, path: str) -> None:
        """Write what was learned into a file."""
        self.model.save(path)

    def load(self, path: str) -> None:
        """Read what was learned; see :meth:`cdmpp.tuner.online.OnlineModel.load` for errors."""
        self.model.load(path)

    # -- seconds -----------------------------------------------------------------------------------------------

    def predict_s(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Predicted seconds, float64 (n,); infinite for what failed or cannot be read."""
        seconds = np.full(len(candidates), np.inf)
        rows, programs = self._encode(context, candidates)
        if programs is not None:
            seconds[rows] = self.model.predict(_task(context), programs)
        return seconds

    def interval_s(
        self, context: Any, candidates: Sequence[Any], coverage: float
    ) -> tuple[FloatArray, FloatArray]:
        """Lowest and highest seconds, float64 (n,) each: (inf, inf) for what failed, (0, inf) for what cannot be read."""
        low = np.array([np.inf if digest in self.model.failed else 0.0 for digest in _hashes(candidates)])
        high = np.full(len(candidates), np.inf)
        rows, programs = self._encode(context, candidates)
        if programs is not None:
            low[rows], high[rows] = self.model.interval(_task(context), programs, coverage)
        return low, high

    def learn(
        self,
        task: str,
        hashes: Sequence[str],
        funcs: Sequence[Any],
        latency_s: Sequence[float | None],
        *,
        fit: bool = True,
    ) -> None:
        """Take measured programs of a task (its structural hash), None where one failed, and fit unless more follow."""
        self.model.failed.update(h for h, value in zip(hashes, latency_s, strict=True) if value is None)
        known = [(h, f, v) for h, f, v in zip(hashes, funcs, latency_s, strict=True) if v is not None]
        encoded = self._encode_funcs([h for h, _, _ in known], [f for _, f, _ in known])
        usable = [(h, e, v) for (h, _, v), e in zip(known, encoded, strict=True) if e is not None]
        if not usable:
            return
        values = [v for _, _, v in usable]
        self.model.learn(task, [h for h, _, _ in usable], Encoded.stack([e for _, e, _ in usable]), values)
        if fit:
            self.model.fit()
        self._unit_s[task] = min(self._unit_s.get(task, np.inf), *values)

    def _encode(self, context: Any, candidates: Sequence[Any]) -> tuple[list[int], Encoded | None]:
        hashes = _hashes(candidates)
        encoded = self._encode_funcs(hashes, [c.sch.mod["main"] for c in candidates])
        rows = [i for i, e in enumerate(encoded) if e is not None and hashes[i] not in self.model.failed]
        return rows, Encoded.stack([e for e in (encoded[i] for i in rows) if e is not None]) if rows else None

    def _encode_funcs(self, hashes: Sequence[str], funcs: Sequence[Any]) -> list[Encoded | None]:
        """Network outputs, from the cache where they are there; None for what cannot be read."""
        missing = {h: f for h, f in zip(hashes, funcs, strict=True) if h not in self._cache}
        self.asked += len(hashes)
        self.computed += len(missing)
        found = dict(zip(missing, self._compute(list(missing.values())), strict=True))
        for digest in hashes:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                found[digest] = self._cache[digest]
        self._cache.update((h, found[h]) for h in missing)
        while len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return [found[h] for h in hashes]

    def _compute(self, funcs: list[Any]) -> list[Encoded | None]:
        if not funcs:
            return []
        try:
            asts = compact_asts(funcs)
        except ProgramError:
            # One of them; find out which. This happens to few programs of few tasks.
            return [self._compute_one(func) for func in funcs]
        programs = self.model.prior.encode(asts)
        return [programs.take([i]) for i in range(len(asts))]

    def _compute_one(self, func: Any) -> Encoded | None:
        try:
            return self.model.prior.encode(compact_asts([func]))
        except ProgramError as err:
            logger.debug("no prediction for a candidate: %s", err)
            return None


def _task(context: Any) -> str:
    return structural_hash(context.mod["main"])


def _hashes(candidates: Sequence[Any]) -> list[str]:
    return [structural_hash(candidate.sch.mod["main"]) for candidate in candidates]
