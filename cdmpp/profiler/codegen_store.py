"""Counted instructions of a dataset's programs: the file beside its records, and how it is made."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.dataset.parquet import read_parquet, write_parquet
from cdmpp.errors import CdmppError, DatasetError
from cdmpp.profiler.build import ObjectCache, code_key, compile_to_shared_object
from cdmpp.profiler.codegen import CODEGEN_FEATURES, COUNTING_VERSION, codegen_features
from cdmpp.profiler.engine import BuildJob

if TYPE_CHECKING:
    from cdmpp.dataset import DatasetView

logger = logging.getLogger(__name__)

CODEGEN_FILE = "codegen.parquet"
#: Programs between two writes of the file.
_CHUNK = 512

#: (program hash, :func:`~cdmpp.profiler.build.code_key` of the target) -> counts, float32 (len(CODEGEN_FEATURES),).
Counts = dict[tuple[str, str], NDArray[np.float32]]


def _schema() -> Any:
    import pyarrow as pa

    counted = [(name, pa.float32()) for name in CODEGEN_FEATURES]
    return pa.schema([("program", pa.string()), ("code", pa.string()), *counted])


def save_codegen(path: Path, counts: Mapping[tuple[str, str], NDArray[np.float32]]) -> None:
    """Write counts; DatasetError where that fails, and what was there stays."""
    import pyarrow as pa

    keys = sorted(counts)
    rows = np.array([counts[key] for key in keys], dtype=np.float32).reshape(-1, len(CODEGEN_FEATURES))
    names = [program for program, _ in keys], [code for _, code in keys]
    write_parquet(path, pa.table([*names, *rows.T], schema=_schema()), counting_version=COUNTING_VERSION)


def load_codegen(path: Path) -> Counts:
    """Read counts; DatasetError if the file is missing, damaged, has other columns or was counted by another version."""
    try:
        table, note = read_parquet(path, _schema())
        version = note.get("counting_version", 1)
        if version != COUNTING_VERSION:
            raise DatasetError(
                f"{path} was counted by version {version}, this cdmpp counts by {COUNTING_VERSION}"
            )
    except DatasetError as error:
        raise DatasetError(f"{error}; delete it, and cdmpp codegen {path.parent} counts anew") from error
    rows = np.stack([table.column(name).to_numpy() for name in CODEGEN_FEATURES], axis=1).astype(np.float32)
    keys = zip(table.column("program").to_pylist(), table.column("code").to_pylist(), strict=True)
    return dict(zip(keys, rows, strict=True))


def collect_codegen(
    folder: str | Path,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    object_cache: str | Path | None = None,
) -> Counts:
    """Compile the programs of a dataset that have a label on a CPU and no counts yet, and count their instructions.

    The file is written every few hundred programs, so that what was counted is kept if the process ends. A program that
    does not compile is left out.

    Parameters
    ----------
    workers
        Compiling processes.
    progress
        Called with the numbers of programs done and wanted.
    object_cache
        Folder in which ``cdmpp profile --object-cache`` kept what it compiled: only what is not there is compiled, and kept
        there too.

    Raises
    ------
    DatasetError
        No dataset in the folder, or the file cannot be written.
    """
    from cdmpp.dataset import load_datasets

    folder = Path(folder)
    view = load_datasets(folder)
    path = folder / CODEGEN_FILE
    counts = load_codegen(path) if path.exists() else {}
    labels = view.labels(None)
    wanted: dict[tuple[str, str], tuple[BuildJob, dict[str, Any]]] = {}
    for name, table in labels.groupby("device", observed=True):
        target = dict(view.devices[str(name)].target)
        if target.get("kind") != "llvm":
            continue
        for program in table["program"]:
            key = (str(program), code_key(target))
            if key not in counts:
                wanted[key] = (_job(view, key[0]), target)
    done, total = 0, len(wanted)
    with ProcessPoolExecutor(max(1, workers)) as pool:
        for chunk in _chunks(list(wanted.items())):
            items = [(*item, object_cache) for _, item in chunk]
            found = pool.map(_count_one, items, chunksize=4)
            for (key, _), row in zip(chunk, found, strict=True):
                if row is not None:
                    counts[key] = row
                done += 1
                if progress is not None:
                    progress(done, total)
            save_codegen(path, counts)
    return counts


def compiled_features(
    func: Any, target: dict[str, Any], keep: Callable[[Path], None] | None = None
) -> NDArray[np.float32]:
    """Counts of a PrimFunc compiled for a target (llvm), float32 (len(CODEGEN_FEATURES),); errors as TVM's, and as of
    :func:`~cdmpp.profiler.codegen.codegen_features`. ``keep`` is given the object before it is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.so"
        compile_to_shared_object(func, target, path)
        if keep is not None:
            keep(path)
        return codegen_features(path)


def _chunks(items: Sequence[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def _job(view: DatasetView, digest: str) -> BuildJob:
    program = view.programs[digest]
    space = view.spaces.get(program.space_hash) if program.space_hash else None
    return BuildJob(program, view.task_of(program), space)


_REBUILDER: list[Any] = []


def _count_one(item: tuple[BuildJob, dict[str, Any], str | Path | None]) -> NDArray[np.float32] | None:
    from cdmpp.program.space import Rebuilder

    job, target, object_cache = item
    if not _REBUILDER:  # one a process: it keeps what it has parsed
        _REBUILDER.append(Rebuilder())
    try:
        cache = ObjectCache(object_cache, target)
        kept = cache.find(job.program.hash)
        if kept is not None:
            return codegen_features(kept)
        func = _REBUILDER[0](job.program, job.task, job.space)
        return compiled_features(func, target, partial(cache.keep, job.program.hash))
    except (CdmppError, RuntimeError, OSError) as err:
        logger.warning("program %s has no counts: %s", job.program.hash, str(err).strip().splitlines()[-1:])
        return None
