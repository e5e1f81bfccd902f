"""TVM's PerStoreFeature: the features of the XGBoost baseline, extracted once and kept in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import DatasetError, FeatureMismatchError, ProgramError
from cdmpp.files import cache_file

if TYPE_CHECKING:
    from cdmpp.dataset import DatasetView

logger = logging.getLogger(__name__)

#: File in a dataset folder that keeps the aggregated features of its programs.
PER_STORE_FILE = "perstore.parquet"

#: Numbers per buffer written, as TVM 0.27 extracts them.
PER_STORE_DIM = 164

#: Extracted features are written back after so many programs: extraction takes minutes and can be interrupted.
_WRITE_EVERY = 2000

#: Identity of the aggregated features; stored in the file, another one is refused.
PER_STORE_SET = "perstore-sum-max-count/1"

#: Sum and maximum over the stores, and the number of stores.
AGGREGATED_DIM = 2 * PER_STORE_DIM + 1

_LLVM_TARGET: dict[str, Any] = {"kind": "llvm", "num-cores": 1}


class PerStoreExtractor:
    """Extracts PerStoreFeature matrices; keeps the tuning context TVM wants.

    Parameters
    ----------
    target
        Target as a dictionary (``Device.target``); features of a CPU program depend on it only by its kind.
    """

    def __init__(self, target: Mapping[str, Any] | None = None) -> None:
        from cdmpp.program.tvm_env import import_tvm

        self._tvm = import_tvm()
        from tvm.s_tir import meta_schedule as ms

        self._ms = ms
        self._target = self._tvm.target.Target(dict(target or _LLVM_TARGET))
        self._extractor = ms.feature_extractor.PerStoreFeature()

    def __call__(self, funcs: Sequence[Any]) -> list[NDArray[np.float64]]:
        """PrimFuncs -> one float64 matrix (stores, 164) each.

        Raises
        ------
        ProgramError
            TVM cannot lower or analyse a program.
        """
        from tvm.s_tir.schedule import Schedule

        if not funcs:
            return []
        try:
            mods = [self._tvm.IRModule({"main": func}) for func in funcs]
            candidates = [self._ms.MeasureCandidate(Schedule(mod), []) for mod in mods]
            context = self._ms.TuneContext(mod=mods[0], target=self._target, num_threads=1)
            features = self._extractor.extract_from(context, candidates)
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(
                f"TVM cannot extract PerStoreFeature: {' '.join(str(err).split())[:300]}"
            ) from err
        return [np.asarray(matrix.numpy(), dtype=np.float64) for matrix in features]


def aggregate_per_store(matrix: NDArray[np.float64]) -> NDArray[np.float32]:
    """(stores, 164) -> float32 (329,): sum and maximum over the stores, and their number.

    TVM finds no store in some programs that only move data; theirs are zeros.
    """
    if matrix.ndim != 2 or matrix.shape[1] != PER_STORE_DIM:
        raise FeatureMismatchError(
            f"expected per-store features of shape (n, {PER_STORE_DIM}), got {matrix.shape}"
        )
    if not len(matrix):
        return np.zeros(AGGREGATED_DIM, dtype=np.float32)
    return np.concatenate([matrix.sum(0), matrix.max(0), [len(matrix)]]).astype(np.float32)


def save_per_store(path: str | Path, features: Mapping[str, NDArray[np.float32]]) -> None:
    """Write aggregated features, program hash -> float32 (329,); kept in half precision."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    programs = list(features)
    stacked = np.stack([features[p] for p in programs]) if programs else np.zeros((0, AGGREGATED_DIM))
    matrix = np.clip(stacked, -65504, 65504).astype(np.float16)
    columns = {"program": pa.array(programs, pa.string())}
    columns.update({f"f{i:03d}": pa.array(np.ascontiguousarray(matrix[:, i])) for i in range(AGGREGATED_DIM)})
    table = pa.table(columns).replace_schema_metadata({"feature_set": PER_STORE_SET})
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary, compression="zstd", compression_level=9)
    temporary.replace(path)


def load_per_store(path: str | Path) -> dict[str, NDArray[np.float32]]:
    """Read what :func:`save_per_store` wrote.

    Raises
    ------
    FeatureMismatchError
        Written for another feature set.
    DatasetError
        Missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as err:
        raise DatasetError(f"{path}: cannot read per-store features: {err}") from err
    found = (table.schema.metadata or {}).get(b"feature_set", b"none").decode()
    if found != PER_STORE_SET:
        raise FeatureMismatchError(f"{path}: per-store features '{found}', expected '{PER_STORE_SET}'")
    matrix = np.stack([table.column(f"f{i:03d}").to_numpy() for i in range(AGGREGATED_DIM)], axis=1)
    return dict(zip(table.column("program").to_pylist(), matrix.astype(np.float32), strict=True))


def collect_per_store(
    view: DatasetView,
    programs: Iterable[str],
    progress: Callable[[int, int], None] | None = None,
    batch: int = 16,
) -> dict[str, NDArray[np.float32]]:
    """Aggregated features of programs, from the datasets' ``perstore.parquet`` or extracted with TVM.

    Missing ones are extracted (10-30 ms a program with its rebuilding) and kept in the user's cache. Programs that cannot be
    rebuilt or analysed are left out.
    """
    from cdmpp.predictor.data import program_resolver

    wanted = list(dict.fromkeys(programs))
    known: dict[str, NDArray[np.float32]] = {}
    for folder in (Path(part.path) for part in view.parts):
        for path in (cache_file(folder, PER_STORE_FILE), folder / PER_STORE_FILE):
            if path.exists():
                try:
                    known.update(load_per_store(path))
                except (FeatureMismatchError, DatasetError) as err:
                    logger.warning("per-store features are extracted again: %s", err)
    missing = [program for program in wanted if program not in known]
    if missing:
        resolve, extract = program_resolver(view), PerStoreExtractor()
        fresh: set[str] = set()
        for begin in range(0, len(missing), batch):
            funcs: dict[str, Any] = {}
            for program in missing[begin : begin + batch]:
                try:
                    funcs[program] = resolve(view.programs[program])
                except (KeyError, ProgramError) as err:
                    logger.warning("program %s has no per-store features: %s", program, err)
            for program, matrix in _extract_each(extract, funcs).items():
                known[program] = aggregate_per_store(matrix)
                fresh.add(program)
            if len(fresh) >= _WRITE_EVERY:
                _write_back(view, known, fresh)
                fresh.clear()
            if progress is not None:
                progress(min(begin + batch, len(missing)), len(missing))
        _write_back(view, known, fresh)
    return {program: known[program] for program in wanted if program in known}


def _extract_each(extract: PerStoreExtractor, funcs: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    try:
        return dict(zip(funcs, extract(list(funcs.values())), strict=True))
    except ProgramError:
        pass  # one of the batch: find it by extracting one by one
    matrices: dict[str, NDArray[np.float64]] = {}
    for program, func in funcs.items():
        try:
            matrices[program] = extract([func])[0]
        except ProgramError as err:
            logger.warning("program %s has no per-store features: %s", program, err)
    return matrices


def _write_back(view: DatasetView, known: Mapping[str, NDArray[np.float32]], fresh: set[str]) -> None:
    from cdmpp.predictor.data import first_holders

    for folder, held in first_holders(view).items():
        own = {program: vector for program, vector in known.items() if program in held}
        if fresh & own.keys():
            path = cache_file(folder, PER_STORE_FILE)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_per_store(path, own)
            except OSError as err:
                logger.warning("%s is not written: %s", path, err)
