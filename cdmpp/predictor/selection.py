"""Which tasks to measure on a new device: KMeans over the tasks' embeddings or AST features, after CDMPP (EuroSys'24), which
clusters programs. Here a task is one point, the mean of its programs, so that tasks with many programs do not dominate."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError, raised_as
from cdmpp.files import write_text
from cdmpp.predictor.data import TrainingData
from cdmpp.predictor.encoding import PairArrays, signed_log1p
from cdmpp.predictor.network import correction_inputs
from cdmpp.predictor.predictor import Predictor
from cdmpp.program.ast import CompactAST

logger = logging.getLogger(__name__)

Select = Literal["kmeans", "random"]

#: Aggregated features that vary less than this between tasks count as constant: they become 0.
_CONSTANT_STD = 1e-6


@dataclass(frozen=True)
class TaskSelection:
    """Tasks (hashes, sorted) chosen to be measured on a device, and how. ``wanted`` are those that would have been chosen if
    all were available; ``features`` is what tasks were compared by: ``embedding``, ``ast`` or, if not compared, ``none``;
    ``candidates`` is the number of candidate tasks."""

    tasks: tuple[str, ...]
    wanted: tuple[str, ...]
    select: str
    seed: int
    features: str
    candidates: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "tasks": list(self.tasks), "wanted": list(self.wanted)}


def select_tasks(
    data: TrainingData,
    k: int,
    select: str = "kmeans",
    seed: int = 0,
    *,
    predictor: Predictor | None = None,
    rows: NDArray[np.int64] | None = None,
    available: Collection[str] | None = None,
) -> TaskSelection:
    """Choose ``k`` tasks (all if there are fewer) to measure on a new device, among those in ``rows`` of ``data.labels`` (None:
    all). Latencies are not used. Equal arguments, equal choice. PredictorError: ``k`` below 1, no such ``select``, no task.

    Tasks are compared by the predictor's embeddings (:func:`embed_programs`), or without a predictor by :func:`ast_features`
    standardised over the tasks; ``select="random"`` is the baseline. A task that is not ``available`` (None: all are) is
    replaced by the next nearest to the centre in its cluster, or if there is none, by the nearest of all tasks left."""
    if k < 1:
        raise PredictorError(f"the number of tasks must be at least 1, got {k}")
    if select not in get_args(Select):
        raise PredictorError(f"unknown selection '{select}' (known: {', '.join(get_args(Select))})")
    table = data.labels if rows is None else data.labels.iloc[rows]
    programs = table.drop_duplicates("program")
    tasks = sorted(set(programs["task"]))
    free = np.asarray([available is None or task in available for task in tasks], dtype=bool)
    if not free.any():
        raise PredictorError("there is no task to choose from")
    everything = np.ones(len(tasks), dtype=bool)
    features = "none"
    if select == "random":
        order = np.random.default_rng(seed).permutation(len(tasks))
        chosen, wanted = ([i for i in order if mask[i]][:k] for mask in (free, everything))
    else:
        features = "ast" if predictor is None else "embedding"
        distances = distances_to_centres(_task_vectors(programs, data, predictor), min(k, len(tasks)), seed)
        chosen, wanted = (nearest(distances, mask) for mask in (free, everything))
    names = [tuple(sorted(tasks[i] for i in picked)) for picked in (chosen, wanted)]
    missing = len(set(names[1]) - set(names[0]))
    if missing:
        logger.warning("%d of %d tasks cannot be chosen; others take their place", missing, len(names[1]))
    return TaskSelection(names[0], names[1], select, seed, features, len(tasks))


def _task_vectors(programs: Any, data: TrainingData, predictor: Predictor | None) -> NDArray[np.float64]:
    """Mean feature vector of the programs of every task, in order of the task hashes, float64 (tasks, features)."""
    asts = [data.asts[program] for program in programs["program"]]
    rows = ast_features(asts) if predictor is None else embed_programs(predictor, asts)
    tasks, index = np.unique(programs["task"].to_numpy(dtype=str), return_inverse=True)
    sums = np.zeros((len(tasks), rows.shape[1]))
    np.add.at(sums, index, rows)
    vectors = sums / np.bincount(index)[:, None]
    if predictor is not None:
        return vectors
    std = vectors.std(0)
    return (vectors - vectors.mean(0)) / np.where(std > _CONSTANT_STD, std, np.inf)


def embed_programs(predictor: Predictor, asts: Sequence[CompactAST]) -> NDArray[np.float64]:
    """The network's pooled embeddings of programs, float64 (n, embedding_dim), all on one artificial device, the mean of the
    encoded training devices: the device enters before the encoder, so there is no embedding of a program alone."""
    device = predictor.encode_devices(predictor.devices).mean(0, keepdims=True)
    program = np.arange(len(asts))
    arrays = PairArrays.encode(predictor.encoder, asts, device, program, np.zeros_like(program), None, None)
    return correction_inputs(predictor.network, arrays)[1]


def ast_features(asts: Sequence[CompactAST]) -> NDArray[np.float64]:
    """Mean and maximum of the leaves' f log features and the logarithm of the number of leaves, float64 (n, 2 f + 1)."""
    rows = []
    for ast in asts:
        leaves = signed_log1p(ast.leaves)
        rows.append(np.concatenate([leaves.mean(0), leaves.max(0), [np.log(len(leaves))]]))
    return np.stack(rows)


def write_task_file(path: str | Path, selection: TaskSelection, **notes: Any) -> None:
    """Write the file that ``cdmpp profile --tasks`` reads: the *wanted* tasks, how they were chosen, and notes."""
    value = {**selection.to_json(), "tasks": list(selection.wanted), **notes}
    path = Path(path)
    with raised_as(PredictorError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def distances_to_centres(vectors: NDArray[np.float64], k: int, seed: int, tries: int = 10) -> NDArray[np.float64]:
    """Distances of every vector to every centre of ``k`` clusters, the best of ``tries`` runs: (n, d) -> float64 (n, k)."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    means = KMeans(n_clusters=k, n_init=tries, random_state=seed)
    with warnings.catch_warnings():
        # fewer distinct tasks than clusters gives this warning: :func:`nearest` fills up the rest
        warnings.simplefilter("ignore", ConvergenceWarning)
        distances: NDArray[np.float64] = means.fit(vectors).transform(vectors)
    return distances


def nearest(distances: NDArray[np.float64], free: NDArray[np.bool_]) -> list[int]:
    """One free row for every centre: the nearest free one of its cluster, else the nearest of all that are left."""
    cluster = distances.argmin(1)
    left = set(np.flatnonzero(free).tolist())
    chosen: dict[int, int] = {}
    for own_cluster in (True, False):
        for centre in range(distances.shape[1]):
            pool = [i for i in sorted(left) if cluster[i] == centre or not own_cluster]
            if pool and centre not in chosen:
                chosen[centre] = pool[int(distances[pool, centre].argmin())]
                left.discard(chosen[centre])
    return list(chosen.values())
