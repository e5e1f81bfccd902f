"""Which operators to measure on a new GPU, and how a model learns from them.

Prediction errors on one device share a constant, a constant for each kind of operator, and a part that depends on the
operator's numerical features. With Gaussian priors on these (:mod:`cdmpp.predictor.correction`) the most informative operators
are known before any is measured: each next one is the one that leaves the least variance over all operators (active learning,
Cohn, Neural Networks 1996), with all kinds of operators weighing the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.errors import PredictorError
from cdmpp.predictor.correction import Fit, fit_correction
from cdmpp.predictor.mechanism import without_unit
from cdmpp.predictor.operators import Errors, OperatorModel
from cdmpp.program.operators import COLUMNS, operator_table, runs_in_torch, work

FloatArray = NDArray[np.float64]
Select = Literal["variance", "kmeans", "random"]

#: Prior standard deviations of the constant, of the kinds and of the part by numerical features; and of the residual.
_PRIORS, _REST = (1.0, 0.3, 0.3), 0.25
#: Most candidate operators, and the fraction of a device's memory that the tensors of one operator may fill.
_POOL, _USABLE = 4000, 0.5
#: Fewest operators from which quantiles of the errors are estimated.
_LEAST_FOR_ERRORS = 30
_LIKE_IN_16_BITS = ("layernorm", "softmax", "elementwise")


def candidates(model: OperatorModel, device: Device) -> pd.DataFrame:
    """Operators as in the model's training data that PyTorch can run on a device (PredictorError: there are none)."""
    if model.measured is None:
        raise PredictorError("the predictor keeps no operators that could be measured: train it again")
    table = model.measured[[*COLUMNS]].drop_duplicates()
    narrow = table[table["op"].isin(_LIKE_IN_16_BITS)].assign(dtype="bfloat16", kv_dtype="bfloat16")
    table = operator_table(pd.concat([table, narrow], ignore_index=True))
    fits = sum(work(table)[name] for name in ("read", "written")) < _USABLE * 1e9 * (device.mem_gb or np.inf)
    has_unit = table["dtype"].map({dtype: not without_unit(device, dtype) for dtype in set(table["dtype"])})
    found = table[fits & has_unit.to_numpy(dtype=bool) & runs_in_torch(table)].reset_index(drop=True)
    if found.empty:
        raise PredictorError(f"no operator that was learned from can be measured on {device.name}")
    return found


def choose(kinds: FloatArray, numbers: FloatArray, n: int, select: str = "variance", seed: int = 0) -> NDArray[np.int64]:
    """Rows of ``n`` operators to measure (all if there are fewer), given their :meth:`OperatorModel.traits`. With ``variance``
    the most informative come first. PredictorError: ``n`` below 1, or an unknown ``select``."""
    ways = get_args(Select)
    if n < 1 or select not in ways:
        raise PredictorError(f"cannot choose {n} operators by {select}: expected 1 or more by {', '.join(ways)}")
    order = np.random.default_rng(seed).permutation(len(kinds))[:_POOL]
    if select == "random" or len(order) <= n:
        return order[:n]
    kinds, numbers = kinds[order], numbers[order]
    parts = [np.ones((len(order), 1)), kinds - kinds.mean(0), numbers - numbers.mean(0)]
    parts = [sd * part / np.sqrt(max((part**2).sum(1).mean(), 1e-9)) for sd, part in zip(_PRIORS, parts, strict=True)]
    vectors = np.concatenate(parts, axis=1)
    if select == "kmeans":
        from cdmpp.predictor.selection import distances_to_centres, nearest

        return order[nearest(distances_to_centres(vectors, n, seed, tries=3), np.ones(len(order), dtype=bool))]
    weights = 1 / (kinds @ kinds.sum(0)).clip(1)  # 1 / number of operators of its kind, so that kinds weigh the same
    moments = (vectors.T * weights) @ vectors
    inverse, chosen = np.eye(vectors.shape[1]), np.zeros(n, dtype=np.int64)
    for i in range(n):
        known = vectors @ inverse
        own = (known * vectors).sum(1)
        # by how much the weighted variance over all operators falls if this one is measured
        gain = ((known @ moments) * known).sum(1) / (own + _REST**2)
        gain[chosen[:i]] = -np.inf
        chosen[i] = best = int(gain.argmax())
        inverse = inverse - np.outer(known[best], known[best]) / (own[best] + _REST**2)
    return order[chosen]


def fit_errors(kinds: FloatArray, numbers: FloatArray, errors: FloatArray, seed: int = 0) -> Fit:
    """A correction fitted to log(measured / predicted) (n,) of operators with these traits."""
    return fit_correction(errors, [str(i) for i in range(len(errors))], kinds, numbers, seed)


def teach(model: OperatorModel, table: pd.DataFrame, device: Device, **choice: Any) -> tuple[OperatorModel, Fit]:
    """The model corrected by the labels (``seconds``) of one device; of several labels of an operator the fastest counts
    (PredictorError: there are none). With arguments of :func:`choose` it learns from the operators chosen alone."""
    table = table[(table["device"] == device.name).to_numpy()]
    table = table.sort_values("seconds").drop_duplicates([*COLUMNS])
    if choice and len(table):
        table = table.iloc[choose(*model.traits(table, device), **choice)]
    base = replace(model, corrections={n: c for n, c in model.corrections.items() if n != device.name})
    errors = np.log(table["seconds"].to_numpy(dtype=np.float64) / base.predict(table, device))
    if not len(errors):
        raise PredictorError(f"there are no operators measured on {device.name}")
    fit = fit_errors(*base.traits(table, device), errors)
    corrections = base.corrections if fit.correction is None else {**base.corrections, device.name: fit.correction}
    left = dict(model.left)
    if len(fit.left) >= _LEAST_FOR_ERRORS:
        left[device.name] = Errors(*[*np.quantile(fit.left, [0.05, 0.5, 0.95]).tolist(), len(fit.left)])
    return replace(base, corrections=corrections, left=left), fit
