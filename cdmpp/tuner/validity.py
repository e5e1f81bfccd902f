"""Predicts which programs run on a device, learned from failures, to choose a search's first candidates and to skip others.
After Rieber et al., "HW-Aware Initialization of DNN Auto-Tuning to Improve Exploration Time and Robustness" (2022), who check
the rules of one accelerator. Here P(valid | program, device) is learned: gradient-boosted trees on the compact AST and the
device's limits, and, while tuning, a few more trees on the programs that worked and failed on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import xgboost as xgb
from numpy.typing import NDArray
from scipy.special import expit

from cdmpp.dataset import load_datasets
from cdmpp.device import Device, get_device
from cdmpp.errors import DatasetError, PredictorError, ProfilerError, raised_as
from cdmpp.predictor.data import collect_asts
from cdmpp.predictor.encoding import signed_log1p
from cdmpp.predictor.pair_features import estimate_s
from cdmpp.profiler.gpu.limits import arch_limits
from cdmpp.program.ast import LEAF_FEATURES, CompactAST
from cdmpp.tuner.candidates import Candidate, CandidateCache, TaskTuner, funcs_of, hashes_of

FloatArray = NDArray[np.float64]
Features = NDArray[np.float32]
IntArray = NDArray[np.int64]

#: Contents of a folder of programs judged by a CUDA compiler (``data/validity-cuda``): its table, and the programs' dataset.
VERDICTS_FILE, PROGRAMS_FOLDER = "validity.parquet", "programs"

#: The shipped trees, trained on all of ``data/validity-cuda``.
_SHIPPED = Path(__file__).with_name("validity_cuda.json")
#: Parameters of the trees. By default XGBoost starts from the rows' mean: a fixed ``base_score`` needs no fitting.
_TREES: dict[str, Any] = {
    "max_depth": 5, "eta": 0.1, "min_child_weight": 2.0, "subsample": 0.8, "colsample_bytree": 0.5,
    "tree_method": "hist", "objective": "binary:logistic", "base_score": 0.5, "nthread": 1, "verbosity": 0,
}  # fmt: skip
_NUMBER = 60
#: Log odds are clipped to this: no number of programs seen makes another one certain.
_MOST_LOG_ODDS = 6.0
#: Parameters of the trees that learn while tuning: together they move log odds by at most 3, if all records agree.
_SMALL_TREES: dict[str, Any] = {**_TREES, "max_depth": 3, "eta": 0.15, "min_child_weight": 0.0, "subsample": 1.0}
_NUMBER_SMALL = 20
#: Number of latest records that these trees learn from.
_MAX_RECORDS = 1024
#: Log odds of a program if there is no model: nine of ten work, which the first failures soon correct.
_WITHOUT_MODEL = float(np.log(9.0))
#: Candidates with a lower P(valid) are not measured and have a score of 0; the least P(valid) of first candidates.
SKIP_BELOW, _LIKELY = 0.2, 0.5
#: So many candidates of a round, the likeliest, are always measured: the model may be wrong, and only measurements show it.
_PROBES = 2
#: Random programs to choose a task's first candidates from, and the fraction with the lowest predicted latency to use.
SAMPLED, _FASTEST = 128, 0.25
#: Programs whose features are cached while tuning: some 50 MB.
_CACHED = 20_000
#: Programs whose leaves are in memory at a time in double precision.
_CHUNK = 2048

# -- what the model sees ---------------------------------------------------------------------------------------

#: Leaf features that describe the whole program: all leaves have the same values.
_OF_PROGRAM = tuple(name for name in LEAF_FEATURES if name.startswith("program_"))

#: Resource limits of a block, thread or multiprocessor; all but the first two are the architecture's
#: (:class:`~cdmpp.profiler.gpu.limits.ArchLimits`).
LIMITS: tuple[str, ...] = (
    "is_gpu", "warp_size", "threads_per_block", "threads_per_sm", "shared_static_bytes", "shared_optin_bytes",
    "shared_per_sm_bytes", "registers_per_thread", "registers_per_block", "registers_per_sm", "async_copies",
)  # fmt: skip
#: A program's demand -> the limit that applies to it. Registers are estimated in two ways: from the arrays that a thread
#: allocates, and from the elements that the straight-line code touches.
_DEMANDS: dict[str, str] = {
    "threads": "threads_per_block",
    "shared": "shared_static_bytes",
    "shared_optin": "shared_optin_bytes",
    "local_registers": "registers_per_thread",
    "tile_registers": "registers_per_thread",
    "block_local_registers": "registers_per_block",
    "block_tile_registers": "registers_per_block",
}
#: Columns of :func:`validity_features`. None identifies a device: of one not trained on the limits tell.
VALIDITY_FEATURES: tuple[str, ...] = (
    *(f"sum_{name}" for name in LEAF_FEATURES if name not in _OF_PROGRAM),
    *(f"max_{name}" for name in LEAF_FEATURES if name not in _OF_PROGRAM),
    *_OF_PROGRAM,
    *(f"limit_{name}" for name in LIMITS),
    *(f"demand_{name}" for name in _DEMANDS),
    "estimate_s",
)
_N_POOLED = len(VALIDITY_FEATURES) - len(LIMITS) - len(_DEMANDS) - 1


def limits_of(where: Device | str) -> dict[str, float]:
    """Limits of a device or of an NVIDIA architecture such as ``sm_86`` (ProfilerError if it is not in the table); NaN for a
    limit that is unknown or does not exist."""
    limits = dict.fromkeys(LIMITS, np.nan)
    if not isinstance(where, str) and where.kind != "gpu":
        return {**limits, "is_gpu": 0.0}
    arch = where if isinstance(where, str) else str(where.target.get("arch", ""))
    limits["is_gpu"] = 1.0
    try:
        known = arch_limits(arch)
    except ProfilerError:
        if isinstance(where, str):
            raise
        return limits
    return {**limits, "warp_size": 32.0, **{name: float(getattr(known, name)) for name in LIMITS[2:]}}


def validity_features(asts: Sequence[CompactAST], where: Device | str) -> Features:
    """Features of programs on a device or an architecture, float32 (n, len(VALIDITY_FEATURES)), n >= 1; NaN if unknown. An
    architecture has no clock rate, and so no analytical latency estimate, which is the feature that predicts timeouts."""
    limits = limits_of(where)
    out = np.empty((len(asts), len(VALIDITY_FEATURES)), dtype=np.float32)
    for start in range(0, len(asts), _CHUNK):
        some = asts[start : start + _CHUNK]
        rows = out[start : start + _CHUNK]
        rows[:, :_N_POOLED] = _pool(some)
        rows[:, _N_POOLED : _N_POOLED + len(LIMITS)] = list(limits.values())
        rows[:, _N_POOLED + len(LIMITS) : -1] = _demands(some, limits)
        rows[:, -1] = np.nan if isinstance(where, str) else np.log(estimate_s(some, where))
    return out


def pooled(features: Features) -> Features:
    """The columns of :func:`validity_features` that depend only on the program."""
    return features[:, :_N_POOLED]


def _pool(asts: Sequence[CompactAST]) -> FloatArray:
    """Signed logarithms of the sums and maxima of the leaf features, and of the features of the whole program, once each."""
    leaves = np.concatenate([ast.leaves for ast in asts]).astype(np.float64)
    starts = np.cumsum([0, *(ast.n_leaves for ast in asts[:-1])])
    own = np.array([name not in _OF_PROGRAM for name in LEAF_FEATURES])
    sums = np.add.reduceat(leaves[:, own], starts)
    largest = np.maximum.reduceat(leaves[:, own], starts)
    return signed_log1p(np.concatenate([sums, largest, leaves[starts][:, ~own]], axis=1))


def _demands(asts: Sequence[CompactAST], limits: Mapping[str, float]) -> FloatArray:
    """Logarithms of programs' demands relative to a device's limits, (n, demands); NaN if there is no limit."""
    taken = []
    for ast in asts:
        threads = ast.column("thread_idx")
        # elements that one thread's straight-line code touches, for each leaf
        touched = (ast.column("tile_outputs") + ast.column("tile_inputs")) / np.maximum(threads, 1.0)
        shared, local = ast.column("program_shared")[0], ast.column("program_local")[0] / 4
        most, tile = threads.max(), touched.max()
        taken.append((most, shared, shared, local, tile, most * local, most * tile))
    bounds = np.array([limits[limit] for limit in _DEMANDS.values()])
    return np.log(np.maximum(np.array(taken, dtype=np.float64), 1.0) / bounds)


# -- what it learns from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidityData:
    """Programs that work and programs that do not."""

    #: Columns ``program, task, device, valid``, index 0..n-1; ``device`` is a device or an architecture such as ``sm_86``.
    table: pd.DataFrame
    asts: Mapping[str, CompactAST]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether the program of each row works, (n,)."""
        return self.table["valid"].to_numpy(dtype=bool)

    @cached_property
    def features(self) -> Features:
        """:func:`validity_features` of every row."""
        out = np.empty((len(self), len(VALIDITY_FEATURES)), dtype=np.float32)
        for name, rows in self.table.groupby("device", sort=False).indices.items():
            where = str(name) if str(name).startswith("sm_") else get_device(str(name))
            out[rows] = validity_features([self.asts[p] for p in self.table["program"].iloc[rows]], where)
        return out

    def of(self, device: Device) -> ValidityData:
        """The rows of a device and of its architecture; all rows if there are no such rows."""
        own = self.table["device"].isin([device.name, device.base, str(device.target.get("arch", ""))])
        return ValidityData(self.table[own].reset_index(drop=True), self.asts) if own.any() else self


def read_validity(folders: Sequence[str | Path]) -> ValidityData:
    """Rows from folders, which are datasets, folders of them, or programs judged by a compiler (``data/validity-cuda``). A
    program that ran once on a device works there. Records of lost devices and of unscheduled tasks are left out. Raises
    DatasetError if a folder cannot be read, or there is no row."""
    tables, asts = [], dict[str, CompactAST]()
    for folder in map(Path, folders):
        judged = (folder / VERDICTS_FILE).exists()
        view = load_datasets(folder / PROGRAMS_FOLDER if judged else folder)
        if judged:
            with raised_as(DatasetError, f"{folder / VERDICTS_FILE} is damaged", pa.ArrowException):
                table = pd.read_parquet(folder / VERDICTS_FILE, columns=["program", "task", "arch", "valid"])
            table = table.rename(columns={"arch": "device"}).astype({"program": str, "task": str, "device": str})
        else:
            rows = view.records
            rows = rows[(rows["status"] != "device_lost") & (rows["task"] != "") & (rows["origin"] != "unscheduled")]
            table = rows[["program", "task", "device"]].astype(str).assign(valid=rows["status"] == "ok")
        asts.update(collect_asts(view, table["program"].unique()))
        tables.append(table)
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["program"])
    table = table[table["program"].isin(list(asts))]
    if table.empty:
        raise DatasetError("no record to learn validity from")
    # valid rows first, so that one of them is kept of several records
    table = table.sort_values("valid", ascending=False, kind="stable").drop_duplicates(["program", "device"])
    return ValidityData(table.sort_index().reset_index(drop=True), asts)


# -- the model -------------------------------------------------------------------------------------------------


class ValidityModel:
    """P(valid | program, device)."""

    def __init__(self) -> None:
        #: An ``xgboost.Booster``, or None if all rows had the same label: then all log odds are ``constant_``.
        self.trees_: Any = None
        self.constant_ = 0.0

    def fit(self, data: ValidityData, rows: IntArray | None = None) -> ValidityModel:
        """Train from scratch on rows (all of them if None), and return itself. PredictorError without rows."""
        rows = np.arange(len(data)) if rows is None else np.asarray(rows)
        if not len(rows):
            raise PredictorError("a validity model needs rows to learn from")
        valid = data.valid[rows]
        # Laplace's rule of succession keeps the probability away from 0 and 1
        self.constant_ = float(np.log((valid.sum() + 1) / ((~valid).sum() + 1)))
        self.trees_ = None
        if not valid.all() and valid.any():
            matrix = xgb.DMatrix(data.features[rows], valid)
            self.trees_ = xgb.train(_TREES, matrix, num_boost_round=_NUMBER)
        return self

    def log_odds(self, features: Features) -> FloatArray:
        """Log odds of :func:`validity_features` (n, d), float64 (n,), within +-6."""
        if self.trees_ is None:
            return np.full(len(features), self.constant_)
        margins = self.trees_.predict(xgb.DMatrix(features), output_margin=True)
        return np.clip(margins.astype(np.float64), -_MOST_LOG_ODDS, _MOST_LOG_ODDS)


def train_validity(folders: Sequence[str | Path], device: Device | None = None) -> ValidityModel:
    """A model trained on folders (see :func:`read_validity`, also for errors). It uses only the programs on `device` or its
    architecture, if there are any."""
    data = read_validity(folders)
    return ValidityModel().fit(data if device is None else data.of(device))


# -- while tuning ----------------------------------------------------------------------------------------------


class OnlineValidity:
    """P(valid) on one device, corrected by the tuning's records. The model stays as it was trained (None: there is none). A few
    small trees learn its error: they start from its log odds (XGBoost's base margin), and are refitted to new records."""

    def __init__(self, model: ValidityModel | None, device: Device, seed: int = 0) -> None:
        self.model, self.device = model, device
        self._params = {**_SMALL_TREES, "seed": seed}
        #: Program -> features, whether it works; oldest first.
        self._records: dict[str, tuple[Features, bool]] = {}
        self._trees: Any = None

    def __len__(self) -> int:
        return len(self._records)

    def features(self, asts: Sequence[CompactAST]) -> Features:
        """Features of n >= 1 programs, for :meth:`predict` and :meth:`learn`: float32 (n, d)."""
        return validity_features(asts, self.device)

    def predict(self, features: Features) -> FloatArray:
        """P(valid) of programs, float64 (n,)."""
        odds = self._prior(features)
        if self._trees is not None and len(features):
            odds = self._trees.predict(xgb.DMatrix(features, base_margin=odds), output_margin=True)
        p: FloatArray = expit(odds.astype(np.float64))
        return p

    def learn(self, programs: Sequence[str], features: Features, valid: Sequence[bool] | NDArray[np.bool_]) -> None:
        """Add programs (by their hashes) that worked or failed, and refit the correction to the latest records."""
        for program, row, works in zip(programs, features, valid, strict=True):
            self._records.pop(program, None)
            self._records[program] = (row, bool(works))
        latest = list(self._records.values())[-_MAX_RECORDS:]
        self._trees = None
        if all(works for _, works in latest):
            return
        x = np.stack([row for row, _ in latest])
        y = np.array([works for _, works in latest], dtype=np.float64)
        data = xgb.DMatrix(x, y, base_margin=self._prior(x))
        self._trees = xgb.train(self._params, data, num_boost_round=_NUMBER_SMALL)

    def _prior(self, features: Features) -> FloatArray:
        if self.model is None:
            return np.full(len(features), _WITHOUT_MODEL)
        return self.model.log_odds(features)


def initial_population(z: Features, p_valid: FloatArray, n: int, *, log_s: FloatArray | None = None, seed: int = 0) -> IntArray:
    """Choose `n` of many random programs to begin a search with, as row indices, int64 (min(n, m),). Of the programs that are
    likely valid it takes the fraction with the lowest predicted latency, and of these the nearest to the centres of `n`
    clusters, which represent the others; programs farthest from each other would be outliers. If fewer than `n` are likely
    valid it takes the likeliest. `z` (m, d): pooled features; `log_s` (m,): log of predicted seconds, None if unknown."""
    rows = np.flatnonzero(p_valid >= _LIKELY)
    if len(rows) < n:
        # A random order first, so that ties are not broken by index.
        order = np.random.default_rng(seed).permutation(len(p_valid))
        return order[np.argsort(-p_valid[order], kind="stable")][:n].astype(np.int64)
    if log_s is not None:
        rows = rows[np.argsort(log_s[rows], kind="stable")][: max(n, round(_FASTEST * len(rows)))]
    if len(rows) > n:
        from sklearn.preprocessing import StandardScaler

        from cdmpp.predictor.selection import distances_to_centres, nearest

        points = StandardScaler().fit_transform(z[rows].astype(np.float64))
        rows = rows[nearest(distances_to_centres(points, n, seed, tries=1), np.ones(len(rows), dtype=bool))]
    return rows.astype(np.int64)


class ValidityGuard:
    """Keeps a search from programs that will not run, and learns from failures; `seed` is for sampling the first candidates."""

    def __init__(self, validity: OnlineValidity, seed: int = 0) -> None:
        self.validity, self._seed = validity, seed
        self._cache: CandidateCache[Features] = CandidateCache(lambda asts: list(validity.features(asts)), _CACHED)

    def probability(self, measures: Sequence[Any]) -> FloatArray:
        """P(valid) of MetaSchedule's candidates of one task, float64 (n,); 1 for candidates whose AST cannot be read."""
        known, features = self._features(measures)
        out = np.ones(len(measures))
        if known:
            out[known] = self.validity.predict(features)
        return out

    def worth(self, measures: Sequence[Any]) -> NDArray[np.bool_]:
        """Which candidates to measure, bool (n,)."""
        p = self.probability(measures)
        likely: NDArray[np.bool_] = p >= SKIP_BELOW
        likely[np.argsort(-p, kind="stable")[:_PROBES]] = True
        return likely

    def scores(self, measures: Sequence[Any], scores: FloatArray) -> FloatArray:
        """Expected scores, float64 (n,): an invalid program has a score of 0."""
        p = self.probability(measures)
        # TVM's models may predict slightly negative throughputs.
        return np.where(p < SKIP_BELOW, 0.0, p * np.maximum(scores, 0.0))

    def learn(self, measures: Sequence[Any], worked: Sequence[bool]) -> None:
        """Learn whether candidates of one task worked."""
        known, features = self._features(measures)
        if known:
            hashes = hashes_of(measures)
            self.validity.learn([hashes[i] for i in known], features, [worked[i] for i in known])

    def initial(self, tuner: TaskTuner, n: int, cost_model: Any = None) -> list[Candidate]:
        """The first candidates of a task, at most `n`: likely valid, unlike each other, and, if the cost model has a predictor
        trained on the device, among those predicted fastest."""
        candidates = tuner.sample(SAMPLED, self._seed)
        measures = [candidate.measure for candidate in candidates]
        known, features = self._features(measures)
        if not known:
            return candidates[:n]
        log_s = None
        if getattr(cost_model, "pretrained", False):
            log_s = np.log(cost_model.predict_s(tuner.context, [measures[i] for i in known]))
        chosen = initial_population(pooled(features), self.validity.predict(features), n, log_s=log_s, seed=self._seed)
        return [candidates[known[i]] for i in chosen]

    def _features(self, measures: Sequence[Any]) -> tuple[list[int], Features]:
        """Indices of the candidates that can be read, and their features."""
        rows = self._cache.get(hashes_of(measures), funcs_of(measures))
        return list(rows), np.array(list(rows.values()), dtype=np.float32)


def make_guard(validity: ValidityModel | str | Path, device: Device, seed: int) -> ValidityGuard:
    """The guard of a tuning, with a given model or one trained on a folder of failures (DatasetError as in
    :func:`read_validity`); ``"default"`` is the shipped model, ``"online"`` starts without a model."""
    model: ValidityModel | None
    if validity == "default":
        model = ValidityModel()
        model.trees_ = xgb.Booster(model_file=_SHIPPED)
    elif isinstance(validity, str | Path):
        model = None if validity == "online" else train_validity([validity], device)
    else:
        model = validity
    return ValidityGuard(OnlineValidity(model, device, seed), seed)
