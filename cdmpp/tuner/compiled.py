"""Where measuring is dear, as on a board, compiled code says what is measured: several candidates are compiled for each one
that is, and those predicted fastest from their instructions go on. The object that was compiled is the one that is measured."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.device import Device
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import load_predictor
from cdmpp.profiler.cpu import CpuConfig, ObjectBuilder
from cdmpp.profiler.engine import BuildJob, BuildOnly, Engine, Executor
from cdmpp.program.ast import compact_asts
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.compile import ObjectCache
from cdmpp.program.space import Rebuilder
from cdmpp.tuner.config import TuneConfig
from cdmpp.tuner.measure import Measurer, in_time, make_engine


class ChoosingMeasurer(Measurer):
    """Compiles `of` candidates for each one that it measures; `executor` is :func:`~cdmpp.tuner.measure.make_engine`'s."""

    def __init__(self, config: TuneConfig, device: Device, degree: int, executor: Executor | None, of: int) -> None:
        assert config.predictor is not None
        built = CpuConfig(
            builders=config.builders, build_timeout_s=config.build_timeout_s, object_cache=config.object_cache
        )
        self._folder = built.work_folder()
        objects = built.object_cache or str(self._folder)
        super().__init__(make_engine(replace(config, object_cache=objects), device, degree, executor))
        self._predictor, self._device, self._of = load_predictor(config.predictor), device, of
        builder = (ObjectBuilder, (device.target, self._folder, built, device), 0 if config.realtime else 10)
        self._compiler = Measurer(Engine(BuildOnly(built, builder)))
        self._objects, self._rebuild = ObjectCache(objects, device.target), Rebuilder()

    def __enter__(self) -> ChoosingMeasurer:
        super().__enter__()
        self._compiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._compiler.__exit__(*error)
        super().__exit__(*error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def worth(self, jobs: Sequence[BuildJob], good: Sequence[bool], left_s: float | None) -> tuple[list[bool], float]:
        wanted = [job for job, is_good in zip(jobs, good, strict=True) if is_good]
        if len(wanted) < 2:
            return list(good), 0.0
        outcomes = [o for o in in_time(self._compiler, self._compiler.submit(wanted), left_s) if o is not None]
        built = {o.job.program.hash: o.built for o in outcomes if o.status == "ok"}
        # what did not compile is predicted from its AST, and fails where it is measured
        unknown = np.full(len(CODEGEN_FEATURES), np.nan, dtype=np.float32)
        code = [built[job.program.hash].counts if job.program.hash in built else unknown for job in wanted]
        asts = compact_asts([self._rebuild(job.program, job.task, job.space) for job in wanted])
        latency_s = self._predictor.predict_asts(asts, self._device, Evidence(code=np.stack(code)))
        best = {wanted[i].program.hash for i in np.argsort(latency_s)[: -(-len(wanted) // self._of)]}
        for digest, found in built.items():
            if digest in best:
                self._objects.keep(digest, Path(found.path))
            Path(found.path).unlink()
        return [job.program.hash in best for job in jobs], sum(o.meta.get("build_s", 0.0) for o in outcomes)
