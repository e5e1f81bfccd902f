"""A latency model that learns while tuning: a prior, and the correction that measurements make to it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.tuner.prior import Encoded, Prior
from cdmpp.tuner.residual import Correction, fit_correction

FloatArray = NDArray[np.float64]

#: What was learned of a program: hashes of task and program, log of the prior's seconds, embedding, log of the measured.
Row = tuple[str, str, float, FloatArray, float]

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

    def rows(self, programs: Collection[str] | None = None) -> list[Row]:
        """What was learned of some programs (their hashes) or of all, for :meth:`add_rows` of a model with this prior."""
        return [
            (task, digest, *record)
            for (task, digest), record in self._records.items()
            if programs is None or digest in programs
        ]

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Take what another model learned beside the same prior; call :meth:`fit` when all are in."""
        for task, digest, log_s, z, label in rows:
            self._tasks.setdefault(task, len(self._tasks))
            self._records[task, digest] = (log_s, z, label)

    def fit(self) -> None:
        """Fit the correction to the latest records."""
        if not self._records:
            return
        latest = list(self._records.items())[-_MAX_RECORDS:]
        task = np.array([self._tasks[name] for (name, _), _ in latest], dtype=np.int64)
        z = np.stack([record[1] for _, record in latest])
        residual = np.array([label - log_s for _, (log_s, _, label) in latest])
        self._correction = fit_correction(z, task, residual, common=self.prior.common)

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
