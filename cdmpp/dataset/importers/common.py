"""Code shared by importers: reads tables, resolves device names, refuses impossible latencies, writes the dataset."""

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
from cdmpp.errors import DatasetError, UnknownDeviceError, raised_as
from cdmpp.program.operators import read_csv
from cdmpp.program.types import Program, Space, Task

#: Path of one file, or paths of several.
Paths = str | Path | Sequence[str | Path]
#: Called with ``what, done, total`` during an import.
Progress = Callable[[str, int, int], None]

#: A latency below this fraction of the lower bound cannot be right: the unit, a shape or the device is wrong.
#: The lowest of NeuSight's 318,781 rows is at 0.999.
_LOWEST = 0.25
#: A latency above this many times (bound + launch time) cannot be right either. The highest of NeuSight's rows is at 26.
_HIGHEST = 250.0
#: Minimum and maximum seconds that it takes to launch a kernel and time it.
SHORTEST_S, _LAUNCH_S = 5e-7, 5e-5
#: A convolution by Winograd or FFT needs fewer operations than its formula, at most by this factor.
CONV_GAIN = 5.0
#: Peak rates that may apply to float32 operands.
_FLOAT32_PEAKS = ("float32", "float32_matrix", "tfloat32_matrix")


@dataclass(frozen=True)
class ImportReport:
    """What an import made: ``path`` is the dataset, ``records`` the number of records by status, ``devices`` canonical names.

    ``unknown_operators`` counts, for each operator that cannot be imported, the rows or nodes that are not in the dataset
    (nodes stay in their graph). ``graphs`` are names of networks, ``notes`` other remarks for the user."""

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
    """An import in progress: the tables to import, and what was found in them so far."""

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
        """The device of each name. UnknownDeviceError names the file and suggests similar names."""
        try:
            return {name: self._table.get(name) for name in sorted(set(map(str, names)))}
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
        """The report: these counts, and the devices, unknown operators and notes collected so far."""
        devices, unknown, notes = sorted(self.devices), dict(self.unknown.most_common()), tuple(self.notes)
        return ImportReport(self.out, records, tasks, programs, devices, unknown, graphs, notes)


def _read_table(path: Path) -> pd.DataFrame:
    text = dict.fromkeys(("mode", "option"), str)  # keep "inf", short for inference, from being read as infinity
    with raised_as(DatasetError, f"cannot read {path}", ImportError):
        return read_csv(path, dtype=text) if path.suffix == ".csv" else pd.read_parquet(path)


def require_columns(frame: pd.DataFrame, columns: Iterable[str], path: Path) -> None:
    """Raise DatasetError, which names all missing columns, unless the table has all of these columns."""
    missing = [column for column in columns if column not in frame]
    if missing:
        raise DatasetError(f"{path} has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}")


def evenly(frame: pd.DataFrame, limit: int | None) -> pd.DataFrame:
    """All rows, or `limit` of them, spread evenly (DatasetError if the limit is below 1)."""
    if limit is None or limit >= len(frame):
        return frame
    if limit < 1:
        raise DatasetError(f"the limit is {limit}, expected at least 1")
    return frame.iloc[np.linspace(0, len(frame) - 1, limit).astype(np.int64)]


def literal(text: Any, what: str) -> Any:
    """The value of a cell that holds a Python literal as text (DatasetError if it is none); other values are returned as is."""
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
    """Refuse latencies of float32 operators, (n,), that are far outside what the device's roofline allows.

    FLOPs are those of the fastest algorithm. ``slow`` says which latencies are also refused if they are far too long for a
    library's operator; the worst of many schedules may be that slow. DatasetError if a latency is missing, not above 0, less
    than a quarter of its lower bound, or so long that its unit must be wrong. It names the worst row and counts such rows."""
    bad = ~(np.isfinite(latency_s) & (latency_s > 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise DatasetError(f"{name(first)}: the latency is {latency_s[first]}, expected a number above 0")
    # Roofline of the fastest unit, 0 if the device table has no peak; data may already be in the last-level cache.
    peaks = [device.peak_gflops[peak] for peak in _FLOAT32_PEAKS if peak in device.peak_gflops]
    bound = flops / (1e9 * max(peaks)) if peaks else np.zeros(len(latency_s))
    if device.bandwidth_gb_s:
        cached = 1024 * max(device.l2_kb or 0.0, device.l3_kb or 0.0)
        bound = np.maximum(bound, np.maximum(n_bytes - cached, 0.0) / (1e9 * device.bandwidth_gb_s))
    low = latency_s / np.maximum(bound * _LOWEST, SHORTEST_S)
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
