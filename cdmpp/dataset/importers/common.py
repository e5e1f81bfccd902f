"""What importers share: reading tables, naming devices, refusing latencies that cannot be, writing the dataset."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset.record import META_FILE, Record
from cdmpp.dataset.store import write_dataset
from cdmpp.device import Device, DeviceTable, load_table
from cdmpp.errors import DatasetError, UnknownDeviceError
from cdmpp.program.types import Program, Space, Task

#: One file or several.
Paths = str | Path | Sequence[str | Path]
#: ``what, done, total``: called while an import goes on.
Progress = Callable[[str, int, int], None]

#: A latency below this part of the lower bound is no latency of this operator: the unit, a shape or the device is wrong.
#: Of NeuSight's 318,781 rows the lowest is at 0.999.
_LOWEST = 0.25
#: A latency above this many times the bound plus launch is wrong likewise. Of NeuSight's rows the highest is at 26.
_HIGHEST = 250.0
#: Launching a kernel and timing it takes at least some and at most some more seconds.
_SHORTEST_S, _LAUNCH_S = 5e-7, 5e-5
#: Peaks that may serve float32 operands.
_FLOAT32_PEAKS = ("float32", "float32_matrix", "tfloat32_matrix")


@dataclass(frozen=True)
class ImportReport:
    """What an import made: ``path`` is the dataset, ``records`` counts them by status, ``devices`` are canonical names.

    ``unknown_operators`` counts the rows or nodes of each that are not in the dataset (nodes are in their graph), ``graphs``
    are names of networks, ``notes`` what else a reader should know."""

    path: Path
    records: Mapping[str, int]
    tasks: int
    programs: int
    devices: Sequence[str]
    unknown_operators: Mapping[str, int] = field(default_factory=dict)
    graphs: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "path": str(self.path)}


class Import:
    """An import in the making: the tables that are read, and what was found in them so far."""

    def __init__(self, paths: Paths, out: str | Path, table: DeviceTable | None, progress: Progress | None) -> None:
        self.out = Path(out)
        if (self.out / META_FILE).exists():
            raise DatasetError(f"{out} is a dataset already: import into a new folder")
        self._table = table or load_table()
        self.progress = progress or (lambda what, done, total: None)
        files = [paths] if isinstance(paths, str | Path) else paths
        self.frames = [(path, _read_table(path)) for path in map(Path, files)]
        self.tasks: dict[str, Task] = {}
        self.spaces: dict[str, Space] = {}
        self.programs: dict[str, Program] = {}
        self.records: list[Record] = []
        self.devices: set[str] = set()
        self.unknown: Counter[str] = Counter()
        self.notes: list[str] = []

    def resolve(self, names: Iterable[str], path: Path) -> dict[str, Device]:
        """Device of every name (UnknownDeviceError says which file has it, and suggests near names)."""
        try:
            return {name: self._table.get(name) for name in sorted(set(names))}
        except UnknownDeviceError as err:
            raise UnknownDeviceError(f"{path}: {err}; --devices FILE adds a device") from err

    def write(self, graphs: Sequence[str] = (), **meta: Any) -> ImportReport:
        """Write the dataset; ``meta`` goes into its ``meta.json``."""
        meta["files"] = [path.name for path, _ in self.frames]
        programs = self.programs.values()
        write_dataset(self.out, self.tasks.values(), self.spaces.values(), programs, self.records, **meta)
        records = dict(Counter(record.status for record in self.records)) or {"ok": 0}
        return self.report(records, len(self.tasks), len(programs), graphs)

    def report(self, records: dict[str, int], tasks: int, programs: int, graphs: Sequence[str] = ()) -> ImportReport:
        """What was made, and what was found on the way."""
        devices, unknown, notes = sorted(self.devices), dict(self.unknown.most_common()), tuple(self.notes)
        return ImportReport(self.out, records, tasks, programs, devices, unknown, graphs, notes)


def _read_table(path: Path) -> pd.DataFrame:
    try:
        if path.suffix == ".csv":
            # "inf", short for inference, is not infinity
            return pd.read_csv(path, dtype={"mode": str, "option": str})
        return pd.read_parquet(path)
    except (OSError, ValueError, ImportError) as err:
        raise DatasetError(f"cannot read {path}: {' '.join(str(err).split())[:200]}") from err


def require_columns(frame: pd.DataFrame, columns: Iterable[str], path: Path) -> None:
    """Refuse a table without some column (DatasetError names all that are missing)."""
    missing = [column for column in columns if column not in frame]
    if missing:
        raise DatasetError(f"{path} has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}")


def evenly(frame: pd.DataFrame, limit: int | None) -> pd.DataFrame:
    """All rows, or `limit` spread evenly over them (DatasetError unless the limit is positive)."""
    if limit is None or limit >= len(frame):
        return frame
    if limit < 1:
        raise DatasetError(f"the limit is {limit}, expected at least 1")
    return frame.iloc[np.linspace(0, len(frame) - 1, limit).astype(np.int64)]


def literal(text: Any, what: str) -> Any:
    """The Python literal in a cell; what is no text stays (DatasetError if it is none)."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as err:
        raise DatasetError(f"{what}: {text[:80]!r} is no list of operators or shapes") from err


def refuse_implausible(
    latency_s: NDArray[np.float64],
    flops: NDArray[np.float64],
    n_bytes: NDArray[np.float64],
    device: Device,
    name: Callable[[int], str],
    slow: NDArray[np.bool_] | bool = True,
) -> None:
    """Refuse latencies of float32 operators, (n,), that the device's roofline rules out by far.

    FLOPs are those that the fastest algorithm needs. ``slow`` says which are refused also for being far too slow for a
    library's operator; the worst of many schedules may be. DatasetError: a latency is missing, not above 0, a quarter of what
    physics needs or less, or so long that its unit must be wrong; it names the worst row, and how many there are."""
    bad = ~(np.isfinite(latency_s) & (latency_s > 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise DatasetError(f"{name(first)}: the latency is {latency_s[first]}, expected a number above 0")
    # The roofline with the fastest unit, 0 where the device's row is empty; bytes in the last-level cache may be there already.
    peaks = [device.peak_gflops[peak] for peak in _FLOAT32_PEAKS if peak in device.peak_gflops]
    bound = flops / (1e9 * max(peaks)) if peaks else np.zeros(len(latency_s))
    if device.bandwidth_gb_s:
        cached = 1024 * max(device.l2_kb or 0.0, device.l3_kb or 0.0)
        bound = np.maximum(bound, np.maximum(n_bytes - cached, 0.0) / (1e9 * device.bandwidth_gb_s))
    low = latency_s / np.maximum(bound * _LOWEST, _SHORTEST_S)
    high = np.where(slow, latency_s / (_HIGHEST * (bound + _LAUNCH_S)), 0.0)
    wrong = (low < 1) | (high > 1)
    if not wrong.any():
        return
    worst = int(np.argmax(np.maximum(1 / low, high)))
    raise DatasetError(
        f"{name(worst)}: {latency_s[worst]:.3g} s on {device.name} is implausibly {'less' if low[worst] < 1 else 'more'} "
        f"than its roofline of {bound[worst]:.3g} s ({int(wrong.sum())} of {len(latency_s)} rows are such): is the unit "
        "off by 1000, or a shape or the device wrong?"
    )
