"""Counted instructions of a dataset's programs: the file beside its records, and how it is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdmpp.dataset.record import read_parquet, write_parquet
from cdmpp.dataset.store import load_datasets
from cdmpp.device import Device
from cdmpp.errors import CdmppError, DatasetError
from cdmpp.program.codegen import CODEGEN_FEATURES, COUNTING_VERSION, ObjectCache, is_counted
from cdmpp.program.codegen.core import core_name, core_of, counts_key
from cdmpp.program.codegen.counts import codegen_features, compiled_features, require_decoder
from cdmpp.program.space import Rebuilder
from cdmpp.program.types import Program, Space, Task

logger = logging.getLogger(__name__)

CODEGEN_FILE = "codegen.parquet"
#: Programs between two writes of the file.
WRITE_EVERY = 512

#: (program hash, :func:`~cdmpp.program.codegen.core.counts_key` of the device) -> counts, float32 (len(CODEGEN_FEATURES),).
Counts = dict[tuple[str, str], NDArray[np.float32]]
_Wanted = tuple[Program, Task, Space | None, Device]


_SCHEMA = pa.schema(
    [("program", pa.string()), ("code", pa.string()), *((name, pa.float32()) for name in CODEGEN_FEATURES)]
)


def save_codegen(path: Path, counts: Mapping[tuple[str, str], NDArray[np.float32]]) -> None:
    """Write counts; DatasetError where that fails, and what was there stays."""
    keys = sorted(counts)
    rows = np.array([counts[key] for key in keys], dtype=np.float32).reshape(-1, len(CODEGEN_FEATURES))
    names = [program for program, _ in keys], [code for _, code in keys]
    write_parquet(path, pa.table([*names, *rows.T], schema=_SCHEMA), counting_version=COUNTING_VERSION)


def load_codegen(path: Path) -> Counts:
    """Read counts; DatasetError if the file is missing, damaged, has other columns or was counted by another version."""
    try:
        table, note = read_parquet(path, _SCHEMA)
        version = note.get("counting_version", 1)
        if version != COUNTING_VERSION:
            raise DatasetError(f"{path} was counted by version {version}, this cdmpp counts by {COUNTING_VERSION}")
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
    pool: Any = None,
    cpus: Sequence[Device] = (),
) -> Counts:
    """Compile the programs of a dataset that have a label on a CPU and no counts yet, and count their instructions; all, and
    those without any record, also for these ``cpus``, on which nothing need be measured.

    The file is written every few hundred programs. A program that does not compile is left out. ``progress`` is called with the
    numbers of programs done and wanted. What ``object_cache`` has (``cdmpp profile --object-cache``) is not compiled again, and
    what it lacks is kept there. ``pool``, in place of processes of this machine, has the method ``map`` of
    :class:`concurrent.futures.Executor`. DatasetError: no dataset in the folder, another device, or the file cannot be written;
    CdmppError: what decodes instructions is not installed."""
    require_decoder()
    if others := [cpu.name for cpu in cpus if not is_counted(cpu)]:
        raise DatasetError(f"{', '.join(others)}: only programs compiled for x86 CPUs are counted")
    view = load_datasets(folder)
    path = Path(folder) / CODEGEN_FILE
    counts = load_codegen(path) if path.exists() else {}
    wanted: dict[tuple[str, str], _Wanted] = {}
    labels, never = view.labels(None), sorted(view.programs.keys() - set(view.records["program"]))
    groups = [(view.devices[str(name)], table["program"]) for name, table in labels.groupby("device", observed=True)]
    for device, programs in [*groups, *((cpu, [*labels["program"].unique(), *never]) for cpu in cpus)]:
        if device.target.get("kind") != "llvm":
            continue
        if device.vendor == "arm":
            logger.warning("%s: only programs compiled for x86 CPUs are counted", device.name)
            continue
        for digest in programs:
            key = (str(digest), counts_key(device))
            if key not in counts:
                program = view.programs[key[0]]
                space = view.spaces.get(program.space_hash) if program.space_hash else None
                wanted[key] = program, view.task_of(program), space, device
    keys = list(wanted)
    with ProcessPoolExecutor(max(1, workers)) if pool is None else nullcontext(pool) as pool:
        for begin in range(0, len(keys), WRITE_EVERY):
            chunk = keys[begin : begin + WRITE_EVERY]
            rows = pool.map(partial(_count_one, object_cache), [wanted[key] for key in chunk], chunksize=4)
            for done, (key, row) in enumerate(zip(chunk, rows, strict=True), begin + 1):
                if row is not None:
                    counts[key] = row
                if progress is not None:
                    progress(done, len(keys))
            save_codegen(path, counts)
    return counts


#: One a process: it keeps what it has parsed.
_rebuilder = cache(Rebuilder)


def _count_one(object_cache: str | Path | None, wanted: _Wanted) -> NDArray[np.float32] | None:
    program, task, space, device = wanted
    try:
        objects = ObjectCache(object_cache, device.target)
        kept = objects.find(program.hash)
        if kept is not None:
            return codegen_features(kept, core_of(core_name(device)))
        return compiled_features(_rebuilder()(program, task, space), device, partial(objects.keep, program.hash))
    except (CdmppError, RuntimeError, OSError) as err:
        logger.warning("program %s has no counts: %s", program.hash, str(err).strip().splitlines()[-1:])
        return None
