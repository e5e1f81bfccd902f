"""Which programs run on a device: learned from failures, and used to begin a search and to skip candidates. After Rieber et
al., "HW-Aware Initialization of DNN Auto-Tuning to Improve Exploration Time and Robustness" (2022). Theirs is a check of one
accelerator's rules; here P(valid | program, device) is learned: gradient-boosted trees on the compact AST and the device's
limits, and, while tuning, a few more on what works and what fails here."""

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

#: A folder of programs that a CUDA compiler judged (``data/validity-cuda``): its table, and the programs as a dataset.
VERDICTS_FILE, PROGRAMS_FOLDER = "validity.parquet", "programs"

#: The trees that ship, of all of ``data/validity-cuda``.
_SHIPPED = Path(__file__).with_name("validity_cuda.json")
#: The trees. XGBoost would start from the rows' mean: one margin, whatever the rows, needs no fitting.
_TREES: dict[str, Any] = {
    "max_depth": 5, "eta": 0.1, "min_child_weight": 2.0, "subsample": 0.8, "colsample_bytree": 0.5,
    "tree_method": "hist", "objective": "binary:logistic", "base_score": 0.5, "nthread": 1, "verbosity": 0,
}  # fmt: skip
_NUMBER = 60
#: Log odds are kept within this: no count of programs seen makes another one certain.
_MOST_LOG_ODDS = 6.0
#: The trees that learn while tuning: together they move log odds by 3 at most, where all records agree.
_SMALL_TREES: dict[str, Any] = {**_TREES, "max_depth": 3, "eta": 0.15, "min_child_weight": 0.0, "subsample": 1.0}
_NUMBER_SMALL = 20
#: Records that they learn from, the latest.
_MAX_RECORDS = 1024
#: Log odds of a program without a model: nine of ten work, which the first failures soon correct.
_WITHOUT_MODEL = float(np.log(9.0))
#: Candidates less likely valid than this are not measured and have a score of 0; first candidates are at least so likely.
SKIP_BELOW, _LIKELY = 0.2, 0.5
#: So many of a round are measured all the same, the likeliest: the model may be wrong, and only measurements tell.
_PROBES = 2
#: Random programs that a task's first candidates are chosen from, and the part of them with the lowest predicted latency.
SAMPLED, _FASTEST = 128, 0.25
#: Programs whose features are kept while tuning: some 50 MB.
_CACHED = 20_000
#: Programs whose leaves are in memory in double precision at a time.
_CHUNK = 2048

# -- what the model sees ---------------------------------------------------------------------------------------

#: Leaf features that are of the whole program: all leaves repeat them.
_OF_PROGRAM = tuple(name for name in LEAF_FEATURES if name.startswith("program_"))

#: What a block, thread or multiprocessor may take; of the architecture's (:class:`~cdmpp.profiler.gpu.limits.ArchLimits`)
#: all but the first two.
LIMITS: tuple[str, ...] = (
    "is_gpu", "warp_size", "threads_per_block", "threads_per_sm", "shared_static_bytes", "shared_optin_bytes",
    "shared_per_sm_bytes", "registers_per_thread", "registers_per_block", "registers_per_sm", "async_copies",
)  # fmt: skip
#: What a program asks for -> the limit that it meets. Registers are guessed twice: from the arrays that a thread
#: allocates, and with what the straight-line code touches.
_DEMANDS: dict[str, str] = {
    "threads": "threads_per_block",
    "shared": "shared_static_bytes",
    "shared_optin": "shared_optin_bytes",
    "local_registers": "registers_per_thread",
    "tile_registers": "registers_per_thread",
    "block_local_registers": "registers_per_block",
    "block_tile_registers": "registers_per_block",
}
#: Columns of :func:`validity_features`. Nothing names a device: a model that learned from some is asked about others by
#: their limits.
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
    """Limits of a device or an NVIDIA architecture such as ``sm_86`` (ProfilerError: not in the table); NaN is unknown, or
    there is none."""
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
    """Programs on a device or an architecture, float32 (n, len(VALIDITY_FEATURES)), n >= 1; NaN for what is unknown. An
    architecture has no clock, and so no analytical estimate, by which programs run into a timeout."""
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
    """The columns of :func:`validity_features` that are the program's alone: what programs differ in."""
    return features[:, :_N_POOLED]


def _pool(asts: Sequence[CompactAST]) -> FloatArray:
    """Signed logarithms of the sums and maxima of all leaf features, and once of what leaves say of their whole program."""
    leaves = np.concatenate([ast.leaves for ast in asts]).astype(np.float64)
    starts = np.cumsum([0, *(ast.n_leaves for ast in asts[:-1])])
    own = np.array([name not in _OF_PROGRAM for name in LEAF_FEATURES])
    sums = np.add.reduceat(leaves[:, own], starts)
    largest = np.maximum.reduceat(leaves[:, own], starts)
    return signed_log1p(np.concatenate([sums, largest, leaves[starts][:, ~own]], axis=1))


def _demands(asts: Sequence[CompactAST], limits: Mapping[str, float]) -> FloatArray:
    """How much of a device's limits programs take, logarithms, (n, demands), NaN where there is no limit."""
    taken = []
    for ast in asts:
        threads = ast.column("thread_idx")
        # elements that one thread's straight-line code touches, of the leaf that touches most
        touched = (ast.column("tile_outputs") + ast.column("tile_inputs")) / np.maximum(threads, 1.0)
        shared, local = ast.column("program_shared")[0], ast.column("program_local")[0] / 4
        most, tile = threads.max(), touched.max()
        taken.append((most, shared, shared, local, tile, most * local, most * tile))
    bounds = np.array([limits[limit] for limit in _DEMANDS.values()])
    return np.log(np.maximum(np.array(taken, dtype=np.float64), 1.0) / bounds)


# -- what it learns from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidityData:
    """Programs that work and that do not."""

    #: Columns ``program, task, device, valid``, index 0..n-1; ``device`` is a device or an architecture such as ``sm_86``.
    table: pd.DataFrame
    asts: Mapping[str, CompactAST]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether each works, (n,)."""
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
        """The rows of a device and of its architecture; all where there are none of them."""
        own = self.table["device"].isin([device.name, device.base, str(device.target.get("arch", ""))])
        return ValidityData(self.table[own].reset_index(drop=True), self.asts) if own.any() else self


def read_validity(folders: Sequence[str | Path]) -> ValidityData:
    """Rows of folders, which are datasets, folders of them, or programs that a compiler judged (``data/validity-cuda``). A
    program that ran once on a device works there; lost devices and unscheduled tasks say nothing. DatasetError where a folder
    cannot be read, or there is no row."""
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
    # "ok" first, so that it is what stays of several records
    table = table.sort_values("valid", ascending=False, kind="stable").drop_duplicates(["program", "device"])
    return ValidityData(table.sort_index().reset_index(drop=True), asts)


# -- the model -------------------------------------------------------------------------------------------------


class ValidityModel:
    """P(valid | program, device)."""

    def __init__(self) -> None:
        #: An ``xgboost.Booster``, or None where every row was alike: then all log odds are ``constant_``.
        self.trees_: Any = None
        self.constant_ = 0.0

    def fit(self, data: ValidityData, rows: IntArray | None = None) -> ValidityModel:
        """Learn from rows (all of them if None) and nothing else; gives itself. PredictorError without rows."""
        rows = np.arange(len(data)) if rows is None else np.asarray(rows)
        if not len(rows):
            raise PredictorError("a validity model needs rows to learn from")
        valid = data.valid[rows]
        # Laplace's rule of succession keeps the probability from 0 and 1
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
    """A model that learned from folders (see :func:`read_validity`, also for errors): of the programs on `device` or its
    architecture alone, where there are such."""
    data = read_validity(folders)
    return ValidityModel().fit(data if device is None else data.of(device))


# -- while tuning ----------------------------------------------------------------------------------------------


class OnlineValidity:
    """P(valid) on one device, with what was seen on it. The model stays as it was trained (None: nothing is known); a few small
    trees, grown anew on the tuning's records from its log odds (XGBoost's base margin), say how far it is off."""

    def __init__(self, model: ValidityModel | None, device: Device, seed: int = 0) -> None:
        self.model, self.device = model, device
        self._params = {**_SMALL_TREES, "seed": seed}
        #: Program -> features, whether it works; oldest first.
        self._records: dict[str, tuple[Features, bool]] = {}
        self._trees: Any = None

    def __len__(self) -> int:
        return len(self._records)

    def features(self, asts: Sequence[CompactAST]) -> Features:
        """Programs, n >= 1, as :meth:`predict` and :meth:`learn` take them: float32 (n, d)."""
        return validity_features(asts, self.device)

    def predict(self, features: Features) -> FloatArray:
        """P(valid) of programs, float64 (n,)."""
        odds = self._prior(features)
        if self._trees is not None and len(features):
            odds = self._trees.predict(xgb.DMatrix(features, base_margin=odds), output_margin=True)
        p: FloatArray = expit(odds.astype(np.float64))
        return p

    def learn(self, programs: Sequence[str], features: Features, valid: Sequence[bool] | NDArray[np.bool_]) -> None:
        """Take programs (their hashes) that worked or failed, and correct the model by all records so far."""
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


def initial_population(
    z: Features, p_valid: FloatArray, n: int, *, log_s: FloatArray | None = None, seed: int = 0
) -> IntArray:
    """Choose `n` of many random programs to begin a search with, as rows, int64 (min(n, m),): of the likely valid (or the
    likeliest, where fewer than `n` are) the part with the lowest predicted latency, and of that the nearest to the centres of
    `n` clusters: they stand for the others, while the programs farthest from each other would be the space's odd ones. `z` (m,
    d) are pooled features; `log_s` (m,), log of the predicted seconds, is None where nothing is known of the device."""
    rows = np.flatnonzero(p_valid >= _LIKELY)
    if len(rows) < n:
        # A random order first, so that equal ones are not taken by their number.
        order = np.random.default_rng(seed).permutation(len(p_valid))
        return order[np.argsort(-p_valid[order], kind="stable")][:n].astype(np.int64)
    if log_s is not None:
        rows = rows[np.argsort(log_s[rows], kind="stable")][: max(n, round(_FASTEST * len(rows)))]
    if len(rows) > n:
        rows = _representatives(z, rows, n, seed)
    return rows.astype(np.int64)


def _representatives(z: Features, rows: IntArray, n: int, seed: int) -> IntArray:
    """The row nearest to each of `n` centres (k-means on standardised columns); others fill up where centres agree."""
    from sklearn.preprocessing import StandardScaler

    from cdmpp.predictor.selection import distances_to_centres, nearest

    points = StandardScaler().fit_transform(z[rows].astype(np.float64))
    return rows[nearest(distances_to_centres(points, n, seed, tries=1), np.ones(len(rows), dtype=bool))]


class ValidityGuard:
    """Keeps a search from what will not run, and learns from what did not; `seed` draws the first candidates."""

    def __init__(self, validity: OnlineValidity, seed: int = 0) -> None:
        self.validity, self._seed = validity, seed
        self._cache: CandidateCache[Features] = CandidateCache(lambda asts: list(validity.features(asts)), _CACHED)

    def probability(self, measures: Sequence[Any]) -> FloatArray:
        """P(valid) of MetaSchedule's candidates of one task, float64 (n,); 1 for what has no AST to judge by."""
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
        """Expected scores, float64 (n,): an invalid program is worth nothing."""
        p = self.probability(measures)
        # TVM's models may predict slightly negative throughputs.
        return np.where(p < SKIP_BELOW, 0.0, p * np.maximum(scores, 0.0))

    def learn(self, measures: Sequence[Any], worked: Sequence[bool]) -> None:
        """Take what became of candidates of one task."""
        known, features = self._features(measures)
        if known:
            hashes = hashes_of(measures)
            self.validity.learn([hashes[i] for i in known], features, [worked[i] for i in known])

    def initial(self, tuner: TaskTuner, n: int, cost_model: Any = None) -> list[Candidate]:
        """The first candidates of a task, at most `n`: likely valid, unlike each other, and of the fastest that a cost
        model with a trained predictor foresees."""
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
        """Numbers of the candidates that can be read, and their features."""
        rows = self._cache.get(hashes_of(measures), funcs_of(measures))
        return list(rows), np.array(list(rows.values()), dtype=np.float32)


def shipped_model() -> ValidityModel:
    """The model of CUDA programs that ships."""
    model = ValidityModel()
    model.trees_ = xgb.Booster(model_file=_SHIPPED)
    return model


def make_guard(validity: ValidityModel | str | Path, device: Device, seed: int) -> ValidityGuard:
    """The guard of a tuning by a model, or by one learned from a folder of failures (DatasetError as of :func:`read_validity`);
    ``"default"`` is the model that ships, ``"online"`` starts from nothing."""
    if validity == "default":
        model: ValidityModel | None = shipped_model()
    elif isinstance(validity, str | Path):
        model = None if validity == "online" else train_validity([validity], device)
    else:
        model = validity
    return ValidityGuard(OnlineValidity(model, device, seed), seed)
