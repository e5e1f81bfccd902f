"""What MetaSchedule is given in place of its own: a cost model, and the profiler as builder and runner. Evolutionary search
asks for some thousand predictions to measure sixteen programs, for many again: the network's output is cached, before the
correction, so that it holds when measurements change what is predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device, get_device
from cdmpp.profiler.engine import Outcome
from cdmpp.profiler.statistics import label
from cdmpp.program.ast import CompactAST
from cdmpp.program.tvm_env import import_tvm
from cdmpp.tuner.candidates import CandidateCache, funcs_of, hashes_of, task_hash
from cdmpp.tuner.config import TuneConfig
from cdmpp.tuner.learning import AnalyticalPrior, Encoded, OnlineModel, PredictorPrior
from cdmpp.tuner.measure import Measurer, job_of_module

import_tvm()

from tvm.ir.utils import derived_object  # noqa: E402
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder  # noqa: E402
from tvm.s_tir.meta_schedule.cost_model import PyCostModel  # noqa: E402
from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture, RunnerResult  # noqa: E402

if TYPE_CHECKING:
    from cdmpp.predictor import Predictor
    from cdmpp.tuner.validity import ValidityGuard

FloatArray = NDArray[np.float64]

#: Programs whose network outputs are kept: some 30 MB.
_CACHED = 50_000


@derived_object
class CostModel(PyCostModel):
    """A MetaSchedule cost model in seconds, pretrained, that learns from the measurements of the tuning: ``cost_model`` of
    ``ms.tune_tir``, ``ms.relax_integration.tune_relax`` and the like (examples, and what saves time: docs/metaschedule.md).

    It starts from a predictor, its folder, or ``"default"``; with None from an analytical estimate. `device` is with its share:
    ``this-cpu@1``. PredictorError where the predictor never saw a device of this kind, UnknownDeviceError where there is no
    such device.
    """

    def __init__(self, predictor: Predictor | str | Path | None, device: str | Device) -> None:
        super().__init__()
        from cdmpp.predictor.predictor import load_predictor

        self.device = get_device(device)
        self.model = OnlineModel(
            AnalyticalPrior(self.device)
            if predictor is None
            else PredictorPrior(load_predictor(predictor), self.device)
        )
        #: Network outputs of the programs asked for.
        self.cache = CandidateCache(self._encode_asts, _CACHED)

    @property
    def pretrained(self) -> bool:
        """Whether a predictor was trained on the device: before any measurement, its order of programs is worth something."""
        return self.model.prior.common == 0.0

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,): predicted runs a second; 0 for programs that failed when measured or cannot be read."""
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
        """Predicted seconds, float64 (n,); infinite for what failed or cannot be read."""
        seconds = np.full(len(candidates), np.inf)
        rows, programs = self._encode(context, candidates)
        if programs is not None:
            seconds[rows] = self.model.predict(task_hash(context), programs)
        return seconds

    def interval_s(self, context: Any, candidates: Sequence[Any], coverage: float) -> tuple[FloatArray, FloatArray]:
        """Lowest and highest seconds, float64 (n,) each: (inf, inf) for what failed, (0, inf) for what cannot be read."""
        low = np.where([digest in self.model.failed for digest in hashes_of(candidates)], np.inf, 0.0)
        high = np.full(len(candidates), np.inf)
        rows, programs = self._encode(context, candidates)
        if programs is not None:
            low[rows], high[rows] = self.model.interval(task_hash(context), programs, coverage)
        return low, high

    def learn(self, task: str, hashes: Sequence[str], funcs: Sequence[Any], latency_s: Sequence[float | None]) -> None:
        """Take measured programs of a task (its structural hash), None where one failed; ``model.fit()`` when all are in."""
        ran = [(h, f, s) for h, f, s in zip(hashes, funcs, latency_s, strict=True) if s is not None]
        self.model.failed.update({*hashes} - {h for h, _, _ in ran})
        encoded = self.cache.get([h for h, _, _ in ran], [f for _, f, _ in ran])
        if encoded:
            known, seconds = [ran[i][0] for i in encoded], [ran[i][2] for i in encoded]
            self.model.learn(task, known, Encoded.stack(list(encoded.values())), seconds)

    def _encode(self, context: Any, candidates: Sequence[Any]) -> tuple[list[int], Encoded | None]:
        """Numbers of the candidates that can be read and have not failed, and their network outputs."""
        hashes = hashes_of(candidates)
        outputs = self.cache.get(hashes, funcs_of(candidates))
        known = {i: encoded for i, encoded in outputs.items() if hashes[i] not in self.model.failed}
        return list(known), Encoded.stack(list(known.values())) if known else None

    def _encode_asts(self, asts: Sequence[CompactAST]) -> list[Encoded]:
        programs = self.model.prior.encode(asts)
        return [programs.take([i]) for i in range(len(asts))]


@derived_object
class GuardedModel(PyCostModel):
    """Scores of a cost model that count validity, for a search alone: the session teaches the model itself."""

    def __init__(self, cost_model: Any, guard: ValidityGuard) -> None:
        super().__init__()
        self._cost_model, self._guard = cost_model, guard

    def predict(self, context: Any, candidates: Sequence[Any]) -> FloatArray:
        """Scores, float64 (n,)."""
        scores = np.asarray(self._cost_model.predict(context, candidates), dtype=np.float64)
        return self._guard.scores(candidates, scores)


def make_cost_model(config: TuneConfig, device: Device) -> Any:
    """The cost model that a configuration names."""
    from tvm.s_tir.meta_schedule import cost_model

    if config.cost_model == "cdmpp":
        return CostModel(config.predictor, device)
    if config.cost_model == "xgb":
        return cost_model.XGBModel(
            extractor="per-store-feature", config=cost_model.xgb_model.XGBConfig(seed=config.seed), verbose_eval=False
        )
    return cost_model.RandomModel(seed=config.seed)


# -- builder and runner ----------------------------------------------------------------------------------------

#: Programs handed over, by the path that stands for a built file.
Tickets = dict[str, "Future[Outcome]"]


def builder_and_runner(measurer: Measurer) -> tuple[Any, Any]:
    """A MetaSchedule Builder and Runner for ``ms.tune_tir`` and the like, that measure with a running Measurer, for its target,
    whatever the tuning names. The path of a built file stands for a program; the runner waits for its outcome, and hands on
    what failed."""
    tickets: Tickets = {}
    return EngineBuilder(measurer, tickets), EngineRunner(tickets)


@derived_object
class EngineBuilder(PyBuilder):
    """Hands modules over to be built and measured."""

    def __init__(self, measurer: Measurer, tickets: Tickets) -> None:
        super().__init__()
        self._measurer, self._tickets = measurer, tickets

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        """One result an input, at once."""
        results = []
        for future in self._measurer.submit([job_of_module(item.mod) for item in build_inputs]):
            # A folder of its own: MetaSchedule removes the folder of what it takes for a built file.
            path = tempfile.mkdtemp(prefix="cdmpp-ticket-") + "/program"
            self._tickets[path] = future
            results.append(BuilderResult(path, None))
        return results


@derived_object
class EngineRunner(PyRunner):
    """Waits for the outcomes of what :class:`EngineBuilder` handed over."""

    def __init__(self, tickets: Tickets) -> None:
        super().__init__()
        self._tickets = tickets

    def run(self, runner_inputs: Sequence[Any]) -> list[Any]:
        """One future an input."""
        futures = [self._tickets.pop(str(item.artifact_path)) for item in runner_inputs]
        return [RunnerFuture(future.done, partial(_result, future)) for future in futures]


def _result(future: Future[Outcome]) -> Any:
    """The label of a program in seconds, or the reason why there is none; it waits for the outcome."""
    outcome = future.result()
    if outcome.latency_s is None:
        return RunnerResult(None, f"{outcome.status}: {outcome.error}")
    return RunnerResult([outcome.latency_s], None)
